"""Under DeepSpeed's AutoTP every loss, gradient and norm is the unsharded model's, and what cannot be is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from actor_init.backends.deepspeed_autotp import check_autotp, check_version
from actor_init.model import build_on_meta
from actor_init.spec import UsageError
from replay.options.option_parsing import format_error_with_flags
from replay.options.spec import find_sample_folder
from tests.helpers.commands import run
from tests.helpers.contract import (
    BF16_NORM_BOUND,
    LEARNING_RATE,
    LOSS_BOUND,
    MAX_NORM,
    NORM_BOUND,
    records_of,
)
from tests.helpers.gradients import GRADIENT_BOUND
from tests.helpers.ranks import run_ranks
from tests.helpers.read_logs import read_log
from tests.helpers.reference import Reference
from tests.helpers.sharded import FEW, MANY, MODELS, ONE, SIZES, THREE, copy_short, save_models

pytestmark = pytest.mark.slow

UNEVEN: dict[str, Any] = {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "vocab_size": 265}
TIED, ODD = "llama, tied, biases, uneven", "llama, all biases, odd sizes"
CONFIGS = {**MODELS, ODD: {**UNEVEN, "intermediate_size": 50}}
QWEN3, GEMMA3 = "qwen3, norms on heads", "gemma3, sliding window, softcap"
TWO = f"--grad-accumulation 2 {FEW}"
# Processes, flags and models of runs of one accumulation window each.
RUNS = [
    (2, f"--zero-stage 1 --grad-accumulation 8 {MANY}", ["llama"]),
    (2, f"--zero-stage 1 {TWO}", CONFIGS),
    # How a model is split does not depend on the stage, nor on checkpoints and rows: each other has one or two models.
    (2, f"--zero-stage 3 {TWO}", [TIED, GEMMA3]),
    (2, f"--zero-stage 0 {TWO} --gradient-checkpointing", [ODD]),
    (2, f"--zero-stage 2 {TWO} --no-packing", [QWEN3]),
    (2, f"--zero-stage 1 --compile {ONE}", [QWEN3]),
    (4, f"--zero-stage 1 {TWO}", [QWEN3]),
    (4, f"--zero-stage 3 {TWO} --gradient-checkpointing", [QWEN3]),
]
CASES = [(name, num_processes, flags) for num_processes, flags, names in RUNS for name in names]
STEPPING = f"--dtype fp32 --step --learning-rate {LEARNING_RATE} --max-norm {MAX_NORM}"
# Gradients and norms of every model are compared above; a step adds clipping and the optimizer of a stage.
STEPS = [(TIED, 1), (QWEN3, 1), (GEMMA3, 3), ("llama", 0)]
FLOOR_STAGE = 3  # the rounding of its steps is measured too
BF16 = ["--zero-stage 0 --noise-floor", "--zero-stage 1", "--optimizer none"]


def flags_of_steps(stage: int) -> str:
    return f"{STEPPING} --zero-stage {stage} {THREE}{' --noise-floor' * (stage == FLOOR_STAGE)}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(CONFIGS, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_short(tmp_path_factory.mktemp("inputs") / "short")


@pytest.fixture(scope="module")
def results(
    folders: dict[str, Path], short: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int, str], Any]:
    """By case, what each rank found."""
    home = tmp_path_factory.mktemp("found")
    answers: dict[tuple[str, int, str], Any] = {}
    for num_processes in (2, 4):
        cases = [case for case in CASES if case[1] == num_processes]
        table, out = home / f"cases{num_processes}.json", home / f"out{num_processes}.json"
        rows = []
        for name, _, flags in cases:
            inputs = [] if MANY in flags else ["--inputs", str(short)]
            rows.append([str(folders[name]), ["--dtype", "fp32", "--tp", "2", *inputs, *flags.split()]])
        table.write_text(json.dumps(rows))
        run_ranks(["-m", "tests.helpers.autotp_worker", str(table), str(out)], num_processes)
        answers |= dict(zip(cases, json.loads(out.read_text()), strict=True))
    return answers


@pytest.fixture(scope="module")
def logs(
    folders: dict[str, Path], short: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Path]:
    """By model and flags, the log folder of a whole replay."""
    home = tmp_path_factory.mktemp("logs")
    runs = [(name, flags_of_steps(stage)) for name, stage in STEPS]
    runs += [(QWEN3, f"--dtype bf16 {flags} {ONE}") for flags in BF16]
    places = {run: home / str(number) for number, run in enumerate(runs)}
    common = ["--tp", "2", "--quiet", "--inputs", str(short)]
    commands = [
        [*common, *flags.split(), "--model", str(folders[name]), "--log-folder", str(place)]
        for (name, flags), place in places.items()
    ]
    (home / "commands.json").write_text(json.dumps(commands))
    run_ranks(["-m", "tests.helpers.replay_worker", str(home / "commands.json"), "2"], 2)
    return places


@pytest.mark.parametrize(("name", "num_processes", "flags"), CASES)
def test_losses_gradients_and_norms_are_the_reference_s(
    name: str, num_processes: int, flags: str, results: dict[tuple[str, int, str], Any]
) -> None:
    ranks = results[name, num_processes, flags]
    num_passes = int(flags.split("--max-inputs ")[1].split()[0])
    assert len(ranks) == num_processes
    for rank in ranks:
        # The two tp peers are fed the same inputs.
        assert rank["num_inputs"] == num_passes * num_processes // 2
        assert rank["num_split"] >= 7 * SIZES["num_hidden_layers"] or "--zero-stage 3" in flags
        assert rank["loss"] < LOSS_BOUND
        assert {
            parameter_name: error for parameter_name, error in rank["gradients"].items() if not error < GRADIENT_BOUND
        } == {}
        assert rank["norm"] < NORM_BOUND


@pytest.mark.parametrize(("name", "stage"), STEPS)
def test_clipped_steps_lead_where_a_plain_loop_leads(
    name: str, stage: int, logs: dict[tuple[str, str], Path], folders: dict[str, Path]
) -> None:
    records = records_of(logs[name, flags_of_steps(stage)])
    assert len(records) == 2 * 3
    paths = [find_sample_folder() / record.source for record in records if record.rank == 0]
    expected = Reference(folders[name]).clipped_steps(paths, learning_rate=LEARNING_RATE, max_norm=MAX_NORM)
    for record in records:
        loss, norm = expected[record.index]
        assert record.result.loss == pytest.approx(loss, rel=LOSS_BOUND)
        assert record.result.grad_norm == pytest.approx(norm, rel=NORM_BOUND)


@pytest.mark.parametrize("flags", BF16)
def test_the_norm_in_bf16_has_every_rank_in_it(
    flags: str, logs: dict[tuple[str, str], Path], folders: dict[str, Path]
) -> None:
    records = records_of(logs[QWEN3, f"--dtype bf16 {flags} {ONE}"])
    expected = Reference(folders[QWEN3]).gradient_norm([find_sample_folder() / records[0].source])
    assert [r.result.grad_norm for r in records] == pytest.approx([expected] * len(records), rel=BF16_NORM_BOUND)


@pytest.mark.parametrize(
    ("config", "tp", "complaint"),
    [
        ({"model_type": "llama"}, 4, "4 heads, 2 key-value heads and MLP width of 48. Try: --tp with one of 1, 2"),
        ({"model_type": "gpt2"}, 2, "transformers has no tensor parallel plan for it. Try: --tp 1"),
        ({"model_type": "phi3"}, 2, "does not know the style rowwise_split_input"),
        ({"model_type": "apertus"}, 2, "does not say what becomes of model.layers.0.mlp.act_fn.alpha_p"),
        ({"model_type": "phi", "qk_layernorm": True}, 2, "becomes of model.layers.0.self_attn.q_layernorm.weight"),
    ],
)
def test_a_model_that_cannot_be_split_rightly_is_refused(config: dict[str, Any], tp: int, complaint: str) -> None:
    fields = {**SIZES, **{key: value for key, value in config.items() if key != "model_type"}}
    whole = AutoConfig.for_model(config["model_type"], **fields)
    with pytest.raises(UsageError) as refusal:
        check_autotp(build_on_meta(whole, attention="sdpa", dtype=torch.float32), tp)
    assert complaint in format_error_with_flags(refusal.value)


def test_the_command_succeeds_and_tp_peers_share_their_inputs(tmp_path: Path) -> None:
    process = run("deepspeed --num_gpus=2 replay --tp 2 --zero-stage 1 --max-inputs 3", tmp_path)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    (folder,) = tmp_path.iterdir()
    log, records = read_log(folder)
    assert log["world_size"] == 2
    for index in range(3):
        first, second = (record.source for record in records if record.index == index)
        assert first == second


def test_a_deepspeed_without_the_setting_of_the_head_is_refused_for_tp() -> None:
    check_version("0.19.0")
    with pytest.raises(
        UsageError, match=r"needs DeepSpeed 0\.19\.0 or later, and 0\.18\.9 is installed\. Try: backend="
    ):
        check_version("0.18.9")
