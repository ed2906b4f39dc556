"""Imports go down the floors, and each heavy or optional library stays in its room."""

import ast
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"capture": 0, "actor_init": 1, "replay": 2}
ROOMS = {
    "typer": {"replay/cli.py", "replay/options.py", "replay/subcommands.py"}
    | {f"replay/{name}_command.py" for name in ("diagnose", "parity", "suite")},
    "rich": {"replay/report/table.py"},
    "deepspeed": {f"actor_init/backends/deepspeed_{part}.py" for part in ("zero", "autotp", "gathering")},
    "ring_flash_attn": {"actor_init/attention/ring_attention.py"},
    "pydantic": {"actor_init/as_json.py"},
    "pydantic_core": {"actor_init/as_json.py"},
    "matplotlib": {"replay/compare/plot.py"},
    "pyarrow": {"replay/suite/text_dataset.py"},
    "liger_kernel": {"replay/diagnose/reference_losses.py"},
}
INTEGRATIONS = {"capture/integrations.py": {"transformers"}}  # for those who import it: they have the trainer
HEAVY = ("torch", "transformers", "deepspeed", "pydantic", "pydantic_core")
LIGHT = (
    *(
        "actor_init/__init__.py",
        "actor_init/as_json.py",
        "actor_init/spec.py",
        "replay/spec.py",
        "replay/options.py",
        "replay/cli.py",
    ),
    *(f"replay/{name}.py" for name in ("doctor", "checks", "packages", "hardware", "toolchain", "variables")),
    *("replay/doctor/probe_process.py", "replay/doctor/probes.py", "replay/suite/plan.py"),
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


def complaints(name: str, source: str) -> list[str]:
    """What is wrong with the imports of the module `name`."""
    floor, _, _ = name.partition("/")
    found = []
    for dotted in imported(ast.parse(source)):
        library = dotted.partition(".")[0]
        if FLOORS.get(library, 0) > FLOORS[floor]:
            found.append(f"{name} imports {dotted} from a floor above")
        if library in ROOMS and name not in ROOMS[library]:
            found.append(f"{name} imports {dotted}, which belongs in {sorted(ROOMS[library])}")
        allowed = {"capture", "torch", *sys.stdlib_module_names, *INTEGRATIONS.get(name, ())}
        if floor == "capture" and library not in allowed:
            found.append(f"{name} imports {dotted}; capture rides in other people's jobs with torch alone")
        if dotted.startswith("capture.integrations"):
            found.append(f"{name} imports {dotted}, which is for jobs to import")
        if dotted.startswith("actor_init.backends.") and name.startswith("actor_init/backends/"):
            here = f"actor_init.backends.{Path(name).stem.partition('_')[0]}"  # a backend may have several modules
            if not name.endswith("__init__.py") and not dotted.startswith(here):
                found.append(f"{name} imports {dotted}: the backends know nothing of each other")
    return found


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
        ("capture/integrations.py", "import accelerate"),
        ("capture/run.py", "from capture.integrations import CaptureCallback"),
        ("actor_init/model.py", "import replay.spec"),
        ("actor_init/model.py", "def build():\n    import deepspeed"),
        ("actor_init/attention/kernels.py", "from ring_flash_attn import llama3"),
        ("actor_init/backends/fsdp2.py", "from actor_init.backends.deepspeed_zero import DeepSpeedBackend"),
        ("actor_init/backends/fsdp2.py", "from actor_init.backends import deepspeed_zero"),
        ("actor_init/backends/deepspeed_autotp.py", "from actor_init.backends.fsdp2 import FSDP2Backend"),
        ("replay/report/text.py", "from rich.table import Table"),
        ("replay/runner/session.py", "import typer"),
        ("replay/compare/command.py", "from matplotlib.figure import Figure"),
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


@pytest.mark.parametrize("path", sorted((ROOT / "replay").rglob("*.py")), ids=name_of)
def test_no_module_of_replay_hides_another_when_the_folder_is_run(path: Path) -> None:
    assert path.stem not in sys.stdlib_module_names | INSTALLED
