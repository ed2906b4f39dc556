"""Imports go down the floors, and each heavy or optional library stays in its room."""

import ast
import re
import sys
import tomllib
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from actor_init.declarations.backends import BACKENDS

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"capture": 0, "actor_init": 1, "replay": 2}
# of the folders in a package, from the ground up: a file imports from its own floor's folder and from lower floors
ROOMS = {
    "capture": (
        ("facts",),
        ("file_format", "path_checks", "progress_bar"),
        ("record", "importers"),
        ("black_box",),  # beside recording, which it observes: recording works without it
        ("folder_tools", "module_search", "child_processes", "on_ray", "recordings"),
        ("run",),
        ("auto", "cli", "integrations"),
        ("", "__main__"),
    ),
    "actor_init": (
        ("option_values", "checkpoint_names", "name_hash", "presets"),
        (
            "declarations",
            "as_json",
            "compiling",
            "model_form",
            "sketching",
        ),  # of backends and kernels: what each needs and refuses
        ("spec",),
        ("fused", "hub", "schedule_and_norm", "training_mode", "weights", "world"),
        ("adapters", "custom", "model_config"),
        ("optimizers",),
        ("model",),
        ("dropout_settings", "parallel", "saving"),
        ("attention", "head"),
        ("inputs",),
        ("action_log_probs", "tracing"),
        ("backends", "probe"),  # backends: their engines
        ("model_positions",),
    ),
    "replay": (
        ("options", "output", "tolerances"),  # options: what a user can type, and the words for it
        ("objective", "processes", "runlog"),
        ("on_ray", "profiling", "tracing", "verdict", "watch"),
        ("comparison", "lint", "post_mortem", "resolution"),
        ("runner",),  # one replay
        ("on_ray",),
        ("campaign",),  # many replays
        ("agreement",),  # which of them agree
        ("commands",),  # none of which imports another
        ("api",),
        ("command_line",),
        ("", "__main__"),
    ),
}
LIBRARIES = {
    "typer": {
        "replay/command_line/cli.py",
        "replay/command_line/help_text.py",
        "replay/campaign/campaign_options.py",
        "replay/options/option_parsing.py",
        "replay/options/ray_options.py",
    }
    | {path.relative_to(ROOT).as_posix() for path in ROOT.glob("replay/commands/*/command.py")},
    "pytest": {"replay/pytest_plugin.py"},
    "rich": {"replay/output/printing.py"},
    "jinja2": {"replay/output/html.py"},
    "deepspeed": {"actor_init/backends/deepspeed.py", "actor_init/backends/deepspeed_autotp.py"},
    "ring_flash_attn": {"actor_init/attention/ring_attention.py"},
    "triton": {"actor_init/head/softmax_kernels.py"},
    "pydantic": {"actor_init/as_json.py"},
    "pydantic_core": {"actor_init/as_json.py"},
    "matplotlib": {"replay/comparison/plot.py"},
    "huggingface_hub": {"actor_init/hub.py"},
    "peft": {"actor_init/adapters.py"},
    "pandas": {"replay/output/frames.py"},
    "pyarrow": {"replay/commands/suite/inputs.py"},
    "liger_kernel": {"replay/commands/diagnose/reference_losses.py", "actor_init/fused/liger.py"},
    "ray": {"capture/on_ray/cluster.py", "replay/campaign/training_rank.py"}
    | {f"replay/on_ray/{name}.py" for name in ("cluster", "launch", "node_actors", "ray_train", "task_runner")},
}
OPTIONAL = {  # in capture
    "capture/integrations/transformers_trainer.py": {"transformers"},  # for those who import it: they have the trainer
    "capture/integrations/lightning_trainer.py": {"lightning", "pytorch_lightning"},
    "capture/on_ray/cluster.py": {"ray"},  # inside the function that connects
}
HEAVY = ("torch", "transformers", "deepspeed", "pydantic", "pydantic_core")
LIGHT = (
    *("actor_init/option_values.py", "actor_init/as_json.py"),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "actor_init" / "declarations").rglob("*.py"))),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "replay" / "options" / "declarations").rglob("*.py"))),
    *(
        "actor_init/__init__.py",
        "actor_init/spec.py",
        "replay/options/spec.py",
        "replay/options/option_parsing.py",
        "replay/options/needed_tensors.py",
        "replay/options/recorded_names.py",
        "capture/file_format/safe_unpickler.py",
        "replay/command_line/cli.py",
        "replay/pytest_plugin.py",
    ),
    *(f"replay/commands/doctor/{name}.py" for name in ("report", "packages", "hardware")),
    *(
        "replay/output/text.py",
        "replay/commands/doctor/probe_process.py",
        "replay/commands/doctor/probes.py",
        "replay/commands/suite/plan.py",
    ),
)
INSTALLED = set(packages_distributions())  # names that can be imported

MODULES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything that is imported anywhere below `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports here are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant))


def backend_of(dotted: str) -> str | None:
    """The backend whose engine or declaration a module is part of, if it is."""
    found = re.match(r"actor_init\.(?:declarations\.)?backends\.([a-z0-9]+)", dotted)
    return found[1] if found and found[1] in BACKENDS else None


def complaints(name: str, source: str) -> list[str]:
    """What is wrong with the imports of the module `name`."""
    floor, _, _ = name.partition("/")
    found = []
    for dotted in imported(ast.parse(source)):
        library = dotted.partition(".")[0]
        if FLOORS.get(library, 0) > FLOORS[floor]:
            found.append(f"{name} imports {dotted} from a floor above")
        if library in LIBRARIES and name not in LIBRARIES[library]:
            found.append(f"{name} imports {dotted}, which belongs in {sorted(LIBRARIES[library])}")
        allowed = {"capture", "torch", *sys.stdlib_module_names, *OPTIONAL.get(name, ())}
        if floor == "capture" and library not in allowed:
            found.append(f"{name} imports {dotted}; capture rides in other people's jobs with torch alone")
        if dotted.startswith("capture.integrations") and not name.startswith("capture/integrations/"):
            found.append(f"{name} imports {dotted}, which is for jobs to import")
        own_backend, other = backend_of(name.removesuffix(".py").replace("/", ".")), backend_of(dotted)
        if own_backend and other and other != own_backend:
            found.append(f"{name} imports {dotted}: the backends know nothing of each other")
        found += upwards(name, dotted)
        if name.startswith("replay/commands/") and dotted.startswith("replay.commands."):
            command, other_command = name.split("/")[2], dotted.split(".")[2]
            if command != other_command:
                found.append(f"{name} imports {dotted}: a command never imports another")
    return found


def upwards(name: str, dotted: str) -> list[str]:
    """Complain of an import from a room on a higher floor of the same package, or from another one on its own."""
    package, *rest = name.removesuffix(".py").split("/")
    if dotted.partition(".")[0] != package or package not in ROOMS:
        return []
    floors = {room: number for number, rooms in enumerate(ROOMS[package]) for room in rooms}
    here, there = (
        _room(parts, floors) for parts in ([part for part in rest if part != "__init__"], dotted.split(".")[1:])
    )
    if here == there or (floors[there] < floors[here]):
        return []
    return [f"{name} imports {dotted}: {there or package} is not on a floor below {here or package}"]


def _room(parts: Sequence[str], floors: Container[str]) -> str:
    """Return the folder or file below the package."""
    return parts[0] if parts and parts[0] in floors else ""


def circles() -> list[list[str]]:
    """Files of one package that import each other, round and round."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}
    edges = {
        name: {found for found in map(partial(_module, names), imported(ast.parse(path.read_text()))) if found}
        for name, path in names.items()
    }
    try:
        tuple(TopologicalSorter({name: found - {name} for name, found in edges.items()}).static_order())
    except CycleError as error:
        return [error.args[1]]
    return []


def _module(names: Mapping[str, Path], dotted: str) -> str | None:
    while dotted and dotted not in names:
        dotted = dotted.rpartition(".")[0]
    return dotted or None


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles() == []


def test_there_is_something_to_look_at() -> None:
    assert {name_of(path).partition("/")[0] for path in MODULES} == set(FLOORS)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down_and_stay_in_their_rooms(path: Path) -> None:
    assert complaints(name_of(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("capture/record/background_writer.py", "from actor_init.spec import UsageError"),
        ("capture/record/background_writer.py", "import numpy"),
        ("capture/record/background_writer.py", "def write():\n    import transformers"),
        ("capture/integrations/transformers_trainer.py", "import accelerate"),
        ("capture/integrations/accelerate_loop.py", "import accelerate"),
        ("capture/on_ray/node_files.py", "import ray"),
        ("capture/run.py", "from capture.integrations import CaptureCallback"),
        ("actor_init/model.py", "import replay.options.spec"),
        ("actor_init/model.py", "def build():\n    import deepspeed"),
        ("actor_init/attention/kernels.py", "from ring_flash_attn import llama3"),
        ("actor_init/backends/fsdp2.py", "from actor_init.backends.deepspeed import DeepSpeedBackend"),
        ("actor_init/declarations/backends/fsdp2.py", "from actor_init.declarations.backends import deepspeed"),
        ("actor_init/declarations/backends/ddp.py", "from actor_init.spec import ActorSpec"),
        ("actor_init/backends/deepspeed_autotp.py", "from actor_init.backends.fsdp2 import FSDP2Backend"),
        ("replay/output/text.py", "from rich.table import Table"),
        ("replay/commands/minimise/trials.py", "from replay.commands.parity.text import table"),
        ("replay/runner/session.py", "import typer"),
        ("replay/commands/compare/command.py", "from matplotlib.figure import Figure"),
        ("replay/output/text.py", "from replay.runlog.records import PassRecord"),
        ("replay/verdict/judge.py", "from replay.watch.blame import Failure"),
        ("replay/runlog/writer.py", "from replay.resolution.selection import Selection"),
        ("capture/file_format/capture_file.py", "from capture.record.recorder import Recorder"),
        ("capture/record/recorder.py", "from capture.black_box.black_box import BlackBox"),
        ("capture/record/pass_store.py", "def finish():\n    from capture.black_box import incidents"),
        ("replay/runner/session.py", "import importlib\nimportlib.import_module('deepspeed')"),
    ],
)
def test_an_import_out_of_place_is_found(name: str, source: str) -> None:
    assert complaints(name, source) != []


@pytest.mark.parametrize("name", LIGHT)
def test_what_help_and_the_doctor_need_imports_nothing_heavy_at_the_top(name: str) -> None:
    top = [node for node in ast.parse((ROOT / name).read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    heavy = [dotted for node in top for dotted in imported(node) if dotted.partition(".")[0] in HEAVY]
    assert heavy == []


@pytest.mark.parametrize(
    "path",
    sorted(path for path in (ROOT / "replay").iterdir() if path.name not in ("__pycache__", "py.typed")),
    ids=name_of,
)
def test_nothing_in_replay_hides_another_package_when_the_folder_is_run(path: Path) -> None:
    assert path.stem not in sys.stdlib_module_names | INSTALLED


def test_every_folder_of_code_is_found_by_the_patterns_of_pyproject() -> None:
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert {pattern.rstrip("*") for pattern in find["include"]} == set(FLOORS)
    assert not find["namespaces"]  # so that each folder of code needs an __init__.py
    assert [name_of(path) for path in MODULES if not (path.parent / "__init__.py").is_file()] == []
