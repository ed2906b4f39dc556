"""Tensor parallelism gives the loss and every gradient of the unsharded model; the comparison sees wrong plans."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from actor_init.model import find_blocks
from actor_init.parallel.split_linear import sum_over
from actor_init.parallel.tensor_parallel import shard_block
from actor_init.parallel.tp_plan import find_plan
from actor_init.spec import TpPlan
from actor_init.world import World
from replay.options.spec import find_sample_folder
from tests.helpers.commands import run
from tests.helpers.contract import (
    BF16_BOUND,
    BF16_NORM_BOUND,
    LEARNING_RATE,
    LOSS_BOUND,
    MAX_NORM,
    NORM_BOUND,
    records_of,
)
from tests.helpers.gradients import (
    GRADIENT_BOUND,
    assert_gradients_are_the_reference_s,
    gradient_errors,
    windows_in,
)
from tests.helpers.made_captures import write_pass
from tests.helpers.read_logs import read_log
from tests.helpers.reference import Reference
from tests.helpers.sharded import (
    COMMON,
    FEW,
    FIRST,
    MODELS,
    ONE,
    SEVERAL_ROWS,
    SIZES,
    THREE,
    Job,
    Outcome,
    replay_all,
    replay_jobs,
    save_model,
    save_models,
    sources_of,
)

pytestmark = pytest.mark.slow

OTHERS: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma"},
    "stablelm, no plan of its own": {"model_type": "stablelm", "use_qkv_bias": True},
}
STEPPING = f"--tp 2 --step --learning-rate {LEARNING_RATE} --max-norm {MAX_NORM} {THREE}"
SGD_RATE = 0.1
SGD_STEPPING = f"--tp 2 --step --optimizer sgd --learning-rate {SGD_RATE} --max-norm {MAX_NORM} {THREE}"
QWEN3, GEMMA3 = "qwen3, norms on heads", "gemma3, sliding window, softcap"
TIED = "llama, tied, biases, uneven"
# Three inputs of the sample, of two long rows each; the others have short ones.
LONG = (TIED, "--tp 2 --sequence-parallel")
SEEN_MODELS = ("llama", TIED, GEMMA3)  # the shapes of their tensors are looked at
BUILTIN = f"--tp 2 --tp-plan builtin --gradient-checkpointing --zero-stage 2 --no-packing {FEW}"


def standing_jobs() -> list[Job]:
    jobs = []
    for flags in ("--tp 2", "--tp 2 --sequence-parallel"):
        jobs += [
            Job(model, 2, f"{flags} {FIRST if (model, flags) == LONG else FEW}", shapes=model in SEEN_MODELS)
            for model in MODELS
        ]
    jobs += [Job(TIED, 4, f"--tp 2 {FEW}")]
    pad = f"--tp 2 --sequence-parallel --gradient-checkpointing {SEVERAL_ROWS}"
    jobs += [Job(m, 2, f"{pad} {FEW}") for m in ("llama, tied, biases, uneven", GEMMA3)]
    jobs += [Job(m, 2, BUILTIN) for m in ("llama", QWEN3, GEMMA3)]
    window = "--tp 2 --tp-plan builtin --sequence-parallel --grad-accumulation 2"
    jobs += [Job(m, 4, f"{window} {FEW}") for m in ("qwen2, biases", QWEN3)]
    jobs += [Job(m, 2, f"--tp 2 --head chunks {FEW}", "small_chunks") for m in (TIED, GEMMA3)]
    jobs += [Job(TIED, 2, f"--tp 2 --head chunks --sequence-parallel {FEW}", "small_chunks")]
    jobs += [Job(TIED, 2, f"--tp 2 --head chunks --sequence-parallel {FEW}")]
    return jobs


ANY_LENGTH = Job(QWEN3, 2, f"--tp 2 --compile {FIRST}")
STANDING = [
    *standing_jobs(),
    Job("gemma", 2, f"--tp 2 --tp-plan builtin --sequence-parallel {FEW}"),
    Job("stablelm, no plan of its own", 2, f"--tp 2 --sequence-parallel {FEW}"),
    Job(QWEN3, 2, f"--tp 2 --sequence-parallel --compile {ONE}"),
    ANY_LENGTH,
]
# Each model's gradients and norms are held to the reference above; a step adds clipping and the optimizer to them.
STEPPED = [  # AdamW hardly sees the size of a gradient
    Job(GEMMA3, 2, f"{STEPPING} --noise-floor"),
    Job("llama", 2, SGD_STEPPING),
    *[Job(model, 2, f"{SGD_STEPPING} --sequence-parallel") for model in (TIED, QWEN3)],
    # The check of a ring runs forwards before the optimizer is made, and a Llama's embedding is gathered by itself.
    Job("llama", 4, f"{SGD_STEPPING} --ring 2"),
]
WRONG = [
    Job("gemma3, sliding window, softcap", 2, f"--tp 2 --sequence-parallel {ONE}", "column_for_a_row"),
    Job("llama", 2, f"--tp 2 --head chunks {ONE}", "own_shard_alone"),
    Job("qwen2, biases", 2, f"--tp 2 --sequence-parallel {ONE}", "different_inputs"),
]
UNSUMMED = {  # and which gradients have to be found wrong, and no others
    Job(GEMMA3, 2, f"--tp 2 {ONE}", "head_norms_not_summed"): ("q_norm", "k_norm"),
    Job("qwen2, biases", 2, f"--tp 2 --sequence-parallel {ONE}", "sequence_norms_not_summed"): ("norm",),
}
SEEN = [job for job in STANDING if job.shapes]
GATHERED = Job("llama", 2, f"--tp 2 --head whole {ONE}", "whole_logits", shapes=True)
BF16 = [
    Job("llama, tied, biases, uneven", 2, f"--tp 2 --dtype bf16 {FEW}{flag}")
    for flag in (" --noise-floor", " --sequence-parallel")
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models({**MODELS, **OTHERS}, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[Job, Outcome]:
    jobs = [*STANDING, *STEPPED, *WRONG, *UNSUMMED, GATHERED, *BF16]
    return replay_jobs(jobs, folders, tmp_path_factory.mktemp("logs"))


@pytest.mark.parametrize("job", STANDING, ids=lambda job: job.name)
def test_losses_and_gradients_are_the_reference_s(job: Job, outcomes: dict[Job, Outcome]) -> None:
    outcomes[job].check()


@pytest.mark.parametrize("job", BF16, ids=lambda job: job.name)
def test_bf16_stays_within_its_bound(job: Job, outcomes: dict[Job, Outcome]) -> None:
    outcomes[job].check_losses(BF16_BOUND)
    outcomes[job].check_norms(BF16_NORM_BOUND)


@pytest.mark.parametrize("job", STEPPED, ids=lambda job: job.name)
def test_clipped_steps_lead_where_a_plain_loop_leads(
    job: Job, outcomes: dict[Job, Outcome], folders: dict[str, Path]
) -> None:
    records = [record for record in records_of(outcomes[job].log) if record.rank == 0]
    sgd = "sgd" in job.flags
    expected = Reference(folders[job.model]).clipped_steps(
        [find_sample_folder() / record.source for record in records],
        learning_rate=SGD_RATE if sgd else LEARNING_RATE,
        max_norm=MAX_NORM,
        kind=torch.optim.SGD if sgd else torch.optim.AdamW,
    )
    assert [record.result.loss for record in records] == pytest.approx([loss for loss, _ in expected], rel=LOSS_BOUND)
    assert [record.result.grad_norm for record in records] == pytest.approx(
        [norm for _, norm in expected], rel=NORM_BOUND
    )


@pytest.mark.parametrize("job", WRONG, ids=lambda job: job.name)
def test_a_wrong_plan_fails_every_comparison(job: Job, outcomes: dict[Job, Outcome]) -> None:
    for check in (outcomes[job].check_losses, outcomes[job].check_norms, outcomes[job].check_gradients):
        with pytest.raises(AssertionError):
            check()


@pytest.mark.parametrize("job", UNSUMMED, ids=lambda job: job.name)
def test_a_wrong_gradient_of_small_parameters_is_seen(job: Job, outcomes: dict[Job, Outcome]) -> None:
    outcome = outcomes[job]
    outcome.check_losses()
    with pytest.raises(AssertionError):
        outcome.check_gradients()
    (first, *_), (records, *_) = windows_in(outcome.gradients), outcome.windows()
    errors = gradient_errors(first, outcome.reference.gradients(sources_of(records)))
    wrong = {name for name, error in errors.items() if not error < GRADIENT_BOUND}
    assert wrong == {name for name in errors if any(part in name for part in UNSUMMED[job])}


def widest(outcome: Outcome, size: int) -> list[list[int]]:
    """The shapes of plain floating tensors, of all that were made, that have a dimension of `size`."""
    shapes = json.loads((outcome.home / "shapes.json").read_text())
    assert len(shapes) > 20
    return [shape for shape in shapes if size in shape]


@pytest.mark.parametrize("job", SEEN, ids=lambda job: job.name)
def test_the_whole_logits_never_exist(job: Job, outcomes: dict[Job, Outcome]) -> None:
    vocabulary = {**SIZES, **MODELS[job.model]}["vocab_size"]
    assert widest(outcomes[job], -(-vocabulary // 2))
    assert widest(outcomes[job], vocabulary) == []  # nor the whole embedding, nor its gradient


def test_whole_logits_are_noticed(outcomes: dict[Job, Outcome]) -> None:
    outcomes[GATHERED].check_losses()
    assert widest(outcomes[GATHERED], SIZES["vocab_size"])


def test_a_sequence_shorter_than_the_number_of_ranks_leaves_some_without_a_share(tmp_path: Path) -> None:
    save_model(tmp_path / "model", 0, {"model_type": "llama", "num_key_value_heads": 4})
    folder = tmp_path / "inputs"
    captures = [
        write_pass(folder, step=step, num_rows=1, length=5, num_real=length, num_actions=4, vocabulary=264)
        for step, length in enumerate((3, 5))  # on 4 ranks: 1, 1, 1, 0 and 2, 2, 1, 0
    ]
    where = ["--model", str(tmp_path / "model"), "--inputs", str(folder)]
    arguments = [
        "--backend",
        "fsdp2",
        *COMMON,
        "--tp",
        "4",
        "--sequence-parallel",
        *where,
        "--log-folder",
        str(tmp_path / "log"),
    ]
    job = {"arguments": arguments, "gradients": str(tmp_path / "gradients.pt")}
    replay_all([job], tmp_path / "jobs.json", num_processes=4, parallel=(4, 1))
    reference = Reference(tmp_path / "model")
    for record in records_of(tmp_path / "log"):
        assert record.result.loss == pytest.approx(reference.answer(captures[record.index]).loss, rel=LOSS_BOUND)
    windows = [[capture] for capture in captures]
    assert_gradients_are_the_reference_s(tmp_path / "gradients.pt", windows, reference)


@pytest.mark.parametrize(
    ("model", "flags", "origin"),
    [
        ("qwen3, norms on heads", f"--tp 2 {FEW}", "transformers' for Qwen3ForCausalLM"),
        ("qwen3, norms on heads", BUILTIN, "builtin for qwen3"),
        (
            "stablelm, no plan of its own",
            f"--tp 2 --sequence-parallel {FEW}",
            "Llama-style fallback, not made for stablelm",
        ),
    ],
)
def test_the_log_says_whose_plan_it_was(model: str, flags: str, origin: str, outcomes: dict[Job, Outcome]) -> None:
    (folder,) = outcomes[Job(model, 2, flags)].log.iterdir()
    assert read_log(folder)[0]["facts"]["tp_plan"] == origin


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--backend fsdp2 --tp 3", "Try: --tp with one of 1, 2"),
        ("--tp 3", "Try: --tp with one of 1, 2"),
    ],
)
def test_what_cannot_be_split_is_refused(arguments: str, expected: str, tmp_path: Path) -> None:
    done = run(f"replay {arguments} --max-inputs 1", tmp_path)
    assert done.returncode == 2, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_one_graph_serves_every_length(outcomes: dict[Job, Outcome]) -> None:
    records = [record for record in records_of(outcomes[ANY_LENGTH].log) if record.rank == 0]
    assert len({record.input.real_tokens for record in records}) > 1
    assert [record.compilation.new_graphs for record in records] == [1, 0, 0]


def test_a_compiled_sum_has_its_gradient(world: World) -> None:
    """Torch 2.11 loses it where an autograd.Function returns the very tensor that it has written to."""
    group = dist.group.WORLD
    assert group is not None
    inputs, weight = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    summed = torch.compile(lambda x, w: sum_over(x @ w, group).sin())
    torch.autograd.backward(summed(inputs, weight).sum())
    (expected,) = torch.autograd.grad((inputs @ weight).sin().sum(), weight)
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize(("checkpoints", "backward"), [(False, 2), (True, 5)])
def test_a_layer_sums_twice_in_each_direction(
    checkpoints: bool, backward: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind attention and MLP, and before them, as in Megatron-LM (Shoeybi et al., 2019, section 3).

    With checkpoints each of five layers sums by itself.
    """
    config = LlamaConfig(**SIZES)
    model = LlamaForCausalLM(config)
    plan = find_plan(model, TpPlan.AUTO, 1)
    for name, block in find_blocks(model):
        shard_block(block, name, plan, world.weights_mesh["tp"], sequence=False, checkpoints=checkpoints)
    num_sums: list[int] = []
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: num_sums.append(1))
    out = model.model(torch.arange(5)[None]).last_hidden_state
    assert len(num_sums) == 2 * 2
    torch.autograd.backward(out.sum())
    assert len(num_sums) == 2 * (2 + backward)
