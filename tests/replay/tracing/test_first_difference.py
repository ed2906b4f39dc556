"""Traced runs: right ones have no first difference, wrong ones have it where the fault is."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from actor_init.spec import UsageError
from actor_init.world import World
from replay.command_line import cli
from replay.command_line.cli import parse_command_line
from replay.runner.run import run_in
from replay.tracing.first_difference import FirstDifference, find_first_difference
from replay.tracing.trace_file import TensorKind, TraceFile
from tests.helpers.made_logs import passed, write_log
from tests.helpers.read_logs import read_log
from tests.helpers.replay_worker import MEAN_LOSS
from tests.helpers.sharded import COMMON, MODELS, SEVERAL_ROWS, replay_all, save_models
from tests.helpers.tracing_faults import FAULTS, SHORT_INPUT, change_border, in_module

pytestmark = pytest.mark.usefixtures("proofs_once")

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(MODELS, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def traced(world: World, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Replays an input of the sample in this process, once for each set of options."""
    done: dict[tuple[str, str], Path] = {}

    def run(flags: str = "", model: str = "llama", *, anew: bool = False) -> Path:
        if anew or (model, flags) not in done:
            folder = tmp_path_factory.mktemp("logs")
            spec = parse_command_line(build_arguments(flags, folders[model], folder)).args[0].spec
            assert run_in(world, spec, show_traceback=True).exit_code == 0
            [log] = folder.iterdir()
            if anew:
                return log
            done[model, flags] = log
        return done[model, flags]

    return run


def build_arguments(flags: str, model: Path, logs: Path) -> list[str]:
    backend = [] if "--backend" in flags else ["--backend", "fsdp2"]
    first = [] if "--skip-inputs" in flags else ["--skip-inputs", str(SHORT_INPUT)]
    inputs = [*first, *([] if "--max-inputs" in flags else ["--max-inputs", "1"])]
    return [
        *COMMON,
        *MEAN_LOSS,
        *backend,
        *inputs,
        "--trace",
        *flags.split(),
        "--model",
        str(model),
        "--log-folder",
        str(logs),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("llama", "--no-packing"),
        ("llama", "--attention eager"),
        ("llama", "--backend deepspeed --zero-stage 0"),
        ("llama", "--backend deepspeed --zero-stage 3 --gradient-checkpointing"),
        ("llama", "--zero-stage 2 --gradient-checkpointing --no-packing"),
        ("llama", "--dtype bf16"),
        ("llama, tied, biases, uneven", "--no-packing --attention eager"),
        ("gemma3, sliding window, softcap", "--backend deepspeed --zero-stage 3 --no-packing"),
    ],
)
def test_right_runs_have_no_first_difference(traced: Run, model: str, flags: str) -> None:
    assert find_first_difference(traced(model=model), traced(flags, model)) is None


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_where_it_is(traced: Run, name: str) -> None:
    fault, flags, (kind, qualified, what, layer, place) = FAULTS[name]
    with fault():
        wrong = traced(flags, anew=True)
    difference = find_first_difference(traced(), wrong)
    assert difference is not None
    assert (difference.kind, difference.name, difference.what, difference.layer) == (kind, qualified, what, layer)
    assert difference.relative > difference.bound
    if place:
        assert (difference.row, difference.token) == place


def test_a_right_run_in_bf16_shows_what_fp32_would_not_allow(traced: Run) -> None:
    """A block that computes in bf16 where fp32 was meant is the first difference, not the dtype's own rounding."""

    def lower_precision(module: torch.nn.Module) -> None:
        module.register_forward_hook(lambda _, args, output: output.bfloat16().float())

    with in_module("model.layers.0.mlp.gate_proj", lower_precision):
        wrong = traced(anew=True)
    difference = find_first_difference(traced(), wrong)
    assert difference is not None
    assert (difference.kind, difference.name, difference.layer) == (
        TensorKind.FORWARD,
        "model.layers.0.mlp.gate_proj",
        0,
    )


def test_equivalent_runs_measure_the_floor(traced: Run) -> None:
    """What they differ by, four times over, is allowed: here by 1 % in one layer, which nothing else would allow."""
    with in_module("model.layers.1.self_attn.o_proj", change_border):
        wrong = traced(anew=True)
    assert find_first_difference(traced(), wrong, [traced("--no-packing")]) is not None
    assert find_first_difference(traced(), wrong, [traced("--no-packing"), wrong]) is None
    unlike = find_first_difference(traced(), traced("--dtype bf16"), [traced("--no-packing")])
    assert unlike is None, "what fp32 runs differ by is no bound for bf16"


def test_tracing_changes_no_number(traced: Run, world: World, folders: dict[str, Path], tmp_path: Path) -> None:
    flags = "--attention eager --gradient-checkpointing"
    arguments = [argument for argument in build_arguments(flags, folders["llama"], tmp_path) if argument != "--trace"]
    assert run_in(world, parse_command_line(arguments).args[0].spec).exit_code == 0
    [plain] = read_log(next(tmp_path.iterdir()))[1]
    run, [seen] = read_log(traced(flags))
    assert (seen.result.loss, seen.result.grad_norm) == (plain.result.loss, plain.result.grad_norm)
    assert (seen.traced, plain.traced) == (True, False)
    assert run["statistics"]["left_out"] == {"traced": 1}


@pytest.mark.usefixtures("compiles_to_graphs")
def test_compiled_blocks_are_seen_from_outside(traced: Run) -> None:
    with patch("actor_init.backends.fsdp2.compile_blocks"):
        log = traced("--compile", anew=True)
    file = TraceFile.open(next((log / "trace").glob("pass*")))
    assert file.metadata.seen == "blocks"
    keys = file.order
    inside = [key.name for key in keys if key.name.count(".") > 2 and key.kind is not TensorKind.PARAMETER_GRADIENT]
    assert inside == []
    assert "model.layers.1" in {key.name for key in keys}
    assert find_first_difference(traced("--no-packing"), log) is None


@pytest.mark.slow
def test_steps_are_compared_one_by_one(traced: Run) -> None:
    """After a step with another learning rate the next pass differs, though every weight began equal."""
    flags = "--skip-inputs 13 --max-inputs 2 --step --learning-rate"
    difference = find_first_difference(traced(f"{flags} 1e-2"), traced(f"{flags} 2e-2"))
    assert difference is not None
    assert (difference.kind, difference.name) == (TensorKind.FORWARD, "model.embed_tokens")
    _, (_, second) = read_log(traced(f"{flags} 1e-2"))
    assert difference.source == second.source
    assert find_first_difference(traced(f"{flags} 1e-2"), traced(f"{flags} 1e-2", anew=True)) is None


def test_compare_prints_it(traced: Run, capsys: pytest.CaptureFixture[str]) -> None:
    fault, flags, _ = FAULTS["attention at a border alone"]
    with fault():
        wrong = traced(flags, anew=True)
    logs = [str(folder) for folder in (traced(), traced("--no-packing"), wrong)]
    assert cli.main(["compare", *logs]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("first diff")]
    assert lines[0] == "first diff B: no traced tensor leaves its bound"
    assert lines[1].startswith("first diff C: forward, model.layers.1.self_attn.o_proj input at rank1 #")
    assert "row 1 token 14: 0.01" in lines[1]
    assert cli.main(["compare", *logs, "--json"]) == 0
    comparisons = json.loads(capsys.readouterr().out)["comparisons"]
    first, second = (comparison["first_difference"] for comparison in comparisons)
    assert first is None
    assert second["layer"] == 1


def test_traces_that_cannot_be_used_are_refused(traced: Run, tmp_path: Path) -> None:
    untraced = write_log(tmp_path / "untraced", [passed(0, "x")])
    with pytest.raises(UsageError, match=r"was not traced. Try: replay trace=True"):
        find_first_difference(traced(), untraced)
    cut, gone = (shutil.copytree(traced(), tmp_path / name) for name in ("cut", "gone"))
    file = next((cut / "trace").glob("pass*"))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UsageError, match="is not there or damaged"):
        find_first_difference(traced(), cut)
    next((gone / "trace").glob("pass*")).unlink()
    with pytest.raises(UsageError, match=r"Try: the run again, with trace=True"):
        find_first_difference(traced(), gone)
    with pytest.raises(UsageError, match="no input in common"):
        find_first_difference(traced(), traced("--skip-inputs 13"))


SHARDED: dict[int, dict[str, tuple[str, str, str, tuple[TensorKind, str] | None]]] = {  # by tp: model, flags, sabotage
    2: {
        "tp": ("qwen3, norms on heads", "--tp 2", "", None),
        "tp, tied": ("llama, tied, biases, uneven", "--tp 2", "", None),
        "sequence": ("qwen3, norms on heads", f"--tp 2 --sequence-parallel {SEVERAL_ROWS}", "", None),
        "AutoTP": ("qwen3, norms on heads", "--tp 2 --backend deepspeed", "", None),
        "transposed": (
            "llama",
            "--tp 2",
            "column_for_a_row",
            (TensorKind.PARAMETER, "model.layers.0.self_attn.o_proj.weight"),
        ),
        "other tokens": ("llama", "--tp 2", "different_inputs", (TensorKind.INPUT, "input_ids")),
        "not summed": (
            "qwen3, norms on heads",
            "--tp 2",
            "head_norms_not_summed",
            (TensorKind.PARAMETER_GRADIENT, "model.layers.1.self_attn.k_norm.weight"),
        ),
    },
    1: {
        "ring": ("llama", "--ring 2 --backend deepspeed", "", None),
        "ring, fsdp2": ("gemma3, sliding window, softcap", "--ring 2", "", None),
        "own keys": ("llama", "--ring 2", "own_keys_alone", (TensorKind.FORWARD, "model.layers.0.self_attn.o_proj")),
        "own positions": ("llama", "--ring 2", "positions_from_zero", (TensorKind.INPUT, "position_ids")),
        "averaged": ("llama", "--ring 2", "ring_averaged", (TensorKind.GRADIENT, "lm_head")),
    },
}


@pytest.fixture(scope="module")
def sharded(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Logs by name; one launch of two ranks for tp and one for the ring."""
    home = tmp_path_factory.mktemp("sharded")
    for tp, jobs in SHARDED.items():
        table = []
        for name, (model, flags, sabotage, _) in jobs.items():
            job = {
                "arguments": build_arguments(flags, folders[model], home / name),
                "gradients": str(home / f"{name}.pt"),
            }
            table.append(job | ({"sabotage": sabotage} if sabotage else {}))
        replay_all(table, home / f"jobs{tp}.json", num_processes=2, parallel=(tp, 3 - tp))
    return {name: next((home / name).iterdir()) for jobs in SHARDED.values() for name in jobs}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for jobs in SHARDED.values() for name in jobs])
def test_sharded_runs_are_put_together_and_faults_in_them_are_named(
    traced: Run, sharded: dict[str, Path], name: str
) -> None:
    [(model, _, _, expected)] = [jobs[name] for jobs in SHARDED.values() if name in jobs]
    difference: FirstDifference | None = find_first_difference(traced(model=model), sharded[name])
    assert (difference and (difference.kind, difference.name)) == expected
