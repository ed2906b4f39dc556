"""Ring attention gives the loss and every gradient of the unsharded model, under both backends and beside tp."""

from pathlib import Path

import pytest

from tests.helpers.contract import LOSS_BOUND, NORM_BOUND, records_of
from tests.helpers.gradients import assert_gradients_are_the_reference_s
from tests.helpers.made_captures import write_pass
from tests.helpers.reference import Reference
from tests.helpers.sharded import COMMON, FEW, MANY, MODELS, ONE, Job, Outcome, replay_all, replay_jobs, save_models

pytestmark = pytest.mark.slow

LLAMA, QWEN3, GEMMA = "llama", "qwen3, norms on heads", "gemma3, sliding window, softcap"
TIED = "llama, tied, biases, uneven"
STANDING = [
    *[Job(model, 2, f"--ring 2 {MANY if model == GEMMA else FEW}") for model in MODELS],
    # What models differ in is in the ring or in tp alone; beside tp, and under DeepSpeed, each has one of these jobs.
    Job(TIED, 4, f"--tp 2 --ring 2 {FEW}"),
    Job(TIED, 2, f"--ring 2 --zero-stage 1 {FEW}", backend="deepspeed"),
    Job(GEMMA, 2, f"--ring 2 --zero-stage 3 {FEW}", backend="deepspeed"),
    Job(GEMMA, 2, f"--ring 2 --ring-head-stride 1 --gradient-checkpointing --zero-stage 2 {FEW}"),
    Job(QWEN3, 3, f"--ring 3 {FEW}"),
    Job(QWEN3, 4, f"--ring 2 --grad-accumulation 2 {FEW}"),
    Job(QWEN3, 4, f"--ring 2 --pad-to longest {FEW}", backend="deepspeed"),
    Job(GEMMA, 4, f"--tp 2 --ring 2 --sequence-parallel {FEW}"),
    Job(GEMMA, 4, f"--tp 2 --ring 2 --zero-stage 1 {FEW}", backend="deepspeed"),
    Job(LLAMA, 2, f"--ring 2 --compile {ONE}"),
    Job(GEMMA, 2, f"--ring 2 --head chunks {FEW}", "small_chunks"),
    Job(LLAMA, 2, f"--ring 2 --zero-stage 3 --head chunks {FEW}", "small_chunks", backend="deepspeed"),
    Job(QWEN3, 4, f"--tp 2 --ring 2 --head chunks {FEW}", "small_chunks"),
    Job(LLAMA, 2, f"--ring 2 --head chunks {FEW}"),
]
# So few tokens that keys from another rank are a large part of them.
SHORTER = "--skip-inputs 2 --max-inputs 1"
WRONG = [Job(LLAMA, 2, f"--ring 2 {SHORTER}", sabotage) for sabotage in ("own_keys_alone", "positions_from_zero")]
WRONG_GRADIENTS = [
    Job(LLAMA, 2, f"--ring 2 --head chunks {ONE}", sabotage) for sabotage in ("ring_averaged", "last_chunk_alone")
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(MODELS, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[Job, Outcome]:
    return replay_jobs([*STANDING, *WRONG, *WRONG_GRADIENTS], folders, tmp_path_factory.mktemp("logs"))


@pytest.mark.parametrize("job", STANDING, ids=lambda job: job.name)
def test_losses_and_gradients_are_the_reference_s(job: Job, outcomes: dict[Job, Outcome]) -> None:
    outcomes[job].check()


@pytest.mark.parametrize("job", WRONG, ids=lambda job: job.name)
def test_a_wrong_ring_fails_every_comparison(job: Job, outcomes: dict[Job, Outcome]) -> None:
    for check in (outcomes[job].check_losses, outcomes[job].check_norms, outcomes[job].check_gradients):
        with pytest.raises(AssertionError):
            check()


@pytest.mark.parametrize("job", WRONG_GRADIENTS, ids=lambda job: job.name)
def test_wrong_gradients_are_seen(job: Job, outcomes: dict[Job, Outcome]) -> None:
    outcomes[job].check_losses()
    for check in (outcomes[job].check_norms, outcomes[job].check_gradients):
        with pytest.raises(AssertionError):
            check()


def test_rows_of_one_document_go_zigzag_and_are_right(folders: dict[str, Path], tmp_path: Path) -> None:
    captures = [
        write_pass(tmp_path / "inputs", step=step, num_rows=1, length=length, num_real=length, vocabulary=264)
        for step, length in enumerate((4, 17, 40))
    ]
    jobs = []
    for number, backend in enumerate(("fsdp2", "deepspeed")):
        where = ["--model", str(folders[QWEN3]), "--inputs", str(tmp_path / "inputs")]
        arguments = ["--backend", backend, *COMMON, "--ring", "2", *where, "--log-folder", str(tmp_path / str(number))]
        jobs.append({"arguments": arguments, "gradients": str(tmp_path / f"{number}.pt")})
    replay_all(jobs, tmp_path / "jobs.json", num_processes=2, parallel=(1, 2))
    reference = Reference(folders[QWEN3])
    for number in range(2):
        records = records_of(tmp_path / str(number))
        assert len(records) == 2 * len(captures)
        for record in records:
            expected = captures[record.index]
            assert record.result.loss == pytest.approx(reference.answer(expected).loss, rel=LOSS_BOUND)
            assert record.result.grad_norm == pytest.approx(reference.gradient_norm([expected]), rel=NORM_BOUND)
        windows = [[capture] for capture in captures]
        assert_gradients_are_the_reference_s(tmp_path / f"{number}.pt", windows, reference)
