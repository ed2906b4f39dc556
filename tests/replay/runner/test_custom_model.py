"""A model of a user's own, recorded in plain PyTorch and replayed with --model FILE.py:function.

Two jobs, and two launches that replay them under each backend.
"""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from actor_init.spec import ActorSpec, UsageError
from capture.facts import Setting
from replay.command_line.cli import main
from replay.options.spec import ReplaySpec
from replay.resolution.job_defaults import find_model_source_on_all_ranks
from tests.helpers.commands import ROOT, run
from tests.helpers.contract import replayed
from tests.helpers.ranks import run_ranks
from tests.helpers.read_logs import read_log

pytestmark = pytest.mark.slow

MODEL = "tests/custom_models/nano.py:build"
# As in tests/custom_models/train.py.
NUM_STEPS = 3
BACKENDS = {
    "fsdp2": "--backend fsdp2",
    "fsdp2 keeps": "--backend fsdp2 --zero-stage 2 --gradient-checkpointing",
    "ddp": "--backend ddp",
    "zero 0": "--backend deepspeed --zero-stage 0",
    "zero 1": "--backend deepspeed --zero-stage 1 --gradient-checkpointing",
    "zero 3": "--backend deepspeed --zero-stage 3",
}
# Layers are compiled in the same way under each backend that has no hooks of its own within them.
COMPILED = {1: ("zero 1", "zero 3"), 2: ("fsdp2",)}
RUNS = {
    number: BACKENDS | {f"{name}, compiled": f"{BACKENDS[name]} --compile" for name in names}
    for number, names in COMPILED.items()
}
CASES = [(number, name) for number, runs in RUNS.items() for name in runs]


class Job:
    """A recorded job, and the logs of its replays by name."""

    def __init__(self, home: Path, num_ranks: int) -> None:
        self.home = home
        run_ranks(["-m", "tests.custom_models.train", str(home)], num_ranks)
        self.arguments = ["--inputs", str(home / "captures"), "--weights", str(home / "ckpt.pt")]
        runs = {name: [*self.arguments, *text.split()] for name, text in RUNS[num_ranks].items()}
        runs["bf16"] = [*self.arguments, "--backend", "fsdp2", "--dtype", "bf16", "--noise-floor"]
        if num_ranks == 1:
            changed = _changed(home)
            runs["changed"] = [*self.arguments[:2], "--weights", str(changed), "--backend", "fsdp2"]
        # What is compiled has graphs alone: kernels are torch's.
        self.logs = replayed(runs, num_ranks, Path(MODEL), home, graphs=True)

    def read_run(self, name: str) -> dict[str, Any]:
        (folder,) = self.logs[name].iterdir()
        return read_log(folder)[0]


def _changed(home: Path) -> Path:
    """The job's weights in safetensors, with one matrix changed."""
    weights = torch.load(home / "ckpt.pt", weights_only=True)["model"]
    named = {name.removeprefix("_orig_mod."): values.clone() for name, values in weights.items()}
    # The head is tied to the embedding.
    del named["lm_head.weight"]
    named["transformer.h.1.fc.weight"] += 0.5
    path = home / "changed.safetensors"
    save_file(named, path)
    return path


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Job]:
    return {number: Job(tmp_path_factory.mktemp(f"ranks{number}"), number) for number in (1, 2)}


@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_a_plain_gpt_is_reproduced_with_its_gradients(jobs: dict[int, Job], num_ranks: int, name: str) -> None:
    run = jobs[num_ranks].read_run(name)
    assert run["verdict"]["outcome"] == "REPRODUCED", run["verdict"]
    assert run["verdict"]["window_counts"] == {"REPRODUCED": NUM_STEPS}, run["verdict"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_in_bf16_it_is_reproduced_too(jobs: dict[int, Job], num_ranks: int) -> None:
    assert jobs[num_ranks].read_run("bf16")["verdict"]["outcome"] == "REPRODUCED"


def test_a_changed_weight_makes_another_model(jobs: dict[int, Job]) -> None:
    run = jobs[1].read_run("changed")
    assert run["verdict"]["outcome"] == "CANNOT TELL"
    assert run["verdict"]["reason"] == "other weights"
    assert run["verdict"]["weights"]["differing"] == ["transformer.h.1.fc.weight"]


def test_a_mixture_is_replayed_without_a_word_of_torchs(tmp_path: Path) -> None:
    done = run("replay --model tests/custom_models/odd.py:Mixture --max-inputs 1 --backend ddp", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fake_tensor" not in done.stderr


def test_other_code_for_the_same_weights_differs(jobs: dict[int, Job], tmp_path: Path, one_world: None) -> None:
    arguments = [*jobs[1].arguments, "--model", "tests/custom_models/nano.py:build_unscaled", "--backend", "fsdp2"]
    assert main([*arguments, "--quiet", "--log-folder", str(tmp_path)]) == 0
    (folder,) = tmp_path.iterdir()
    verdict = read_log(folder)[0]["verdict"]
    assert verdict["outcome"] == "DIFFERS", verdict
    assert verdict["weights"]["differing"] == [], verdict


def test_the_log_says_which_file_and_function(jobs: dict[int, Job]) -> None:
    facts = jobs[1].read_run("ddp")["facts"]
    file = ROOT / "tests" / "custom_models" / "nano.py"
    assert (facts["model_file"], facts["model_function"]) == (str(file), "build")
    assert facts["model_file_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert facts["attention_kernel"] == "of its own"


class OtherRank:
    """A world of two, in which the other rank found something else."""

    world_size = 2

    def __init__(self, refusal: UsageError | None = None, **facts: str) -> None:
        self._answers = [refusal, facts]

    def gather(self, value: Any) -> list[Any]:
        return [value, self._answers.pop(0)]


def test_a_file_that_one_rank_lacks_is_refused_on_all() -> None:
    spec = ReplaySpec(actor=ActorSpec(model=MODEL))
    world: Any = OtherRank(UsageError(Setting("model", "nano.py:build"), ": No such file or directory"))
    with pytest.raises(UsageError, match=r"on rank 1: model='nano.py:build': No such file or directory"):
        find_model_source_on_all_ranks(spec, world)


def test_two_ranks_with_other_files_are_refused() -> None:
    spec = ReplaySpec(actor=ActorSpec(model=MODEL))
    world: Any = OtherRank(model_file="/other/nano.py", model_file_sha256="0" * 64)
    with pytest.raises(UsageError, match=r"/other/nano.py is another file on rank 1 than .*nano.py on rank 0"):
        find_model_source_on_all_ranks(spec, world)
