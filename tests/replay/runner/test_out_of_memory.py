"""A pass that ran out of memory: what it would have needed, with which options less; what a rank writes at its end."""

import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from actor_init.option_values import Dtype
from actor_init.spec import ActorSpec, Head
from actor_init.world import World
from capture.file_format.actor_config import write_actor_config
from replay.command_line.cli import main
from replay.options.spec import InputsSpec, ReplaySpec
from replay.resolution.job_defaults import find_source
from replay.runlog.records import PassRecord, PhaseCost, is_out_of_memory
from replay.runner.out_of_memory import OutOfMemory, OutOfMemoryAnalysis
from replay.runner.reruns import Reruns
from replay.watch.blame import report_failed_rank
from replay.watch.progress import RankPhase, RankPosition
from replay.watch.shutdown import Shutdown
from tests.helpers.commands import run
from tests.helpers.made_captures import LLAMA, write_pass
from tests.helpers.made_records import record
from tests.helpers.read_logs import read_log

Captured = pytest.CaptureFixture[str]
MIB = 2**20
NUM_PARAMETERS = 64 * 32 * 2 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 32) + 32
RUNS_OUT = """
import torch

def loss(inputs):
    if inputs.log_probs_BA.shape[1] > {most}:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
    return -inputs.log_probs_BA.sum()
"""


def write_captures(folder: Path, lengths: Sequence[int]) -> list[Path]:
    paths = [
        write_pass(folder, step=step, num_rows=1, length=length, num_real=length, num_actions=length // 2)
        for step, length in enumerate(lengths)
    ]
    write_actor_config(folder, LLAMA, "tiny")
    return paths


def run_replay(folder: Path, most: int, *options: str) -> tuple[int, dict[str, Any], list[PassRecord], Path]:
    """Replay a folder, whose passes with more action tokens than `most` run out of memory."""
    loss = folder / "loss.py"
    loss.write_text(RUNS_OUT.format(most=most))
    logs = folder / "logs"
    arguments = ["--backend", "ddp", "--inputs", str(folder), "--log-folder", str(logs), "--warmup", "0"]
    exit_code = main([*arguments, "--loss", f"{loss}:loss", *options])
    log = max(logs.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    run, records = read_log(log)
    return exit_code, run, records, log


def make_record(index: int, length: int, forward: float, backward: float) -> PassRecord:
    phases = {
        name: PhaseCost(seconds=0.1, allocated_bytes=0, peak_allocated_bytes=int(peak), peak_reserved_bytes=None)
        for name, peak in (("forward", forward), ("backward", backward))
    }
    return record(index, phases=phases, fed_tokens=length, real_tokens=length)


class OneRank:
    rank, num_data_ranks, device = 0, 1, torch.device("cpu")


def analyze(
    folder: Path, lengths: Sequence[int], records: Sequence[PassRecord], actor: ActorSpec, *, has_adapter: bool = False
) -> OutOfMemory:
    spec = ReplaySpec(actor=replace(actor, dtype=Dtype.BF16), inputs=InputsSpec(inputs=folder))
    paths = write_captures(folder, lengths)
    source = find_source(spec)
    # Only the dtype of the weights, fp32, is read of the model.
    model = torch.nn.Linear(1, 1)
    found = OutOfMemoryAnalysis(
        actor=spec.actor,
        measure=spec.measure,
        world=cast(World, OneRank()),
        config=source.config,
        inputs=paths,
        has_adapter=has_adapter,
        has_whole_logits=actor.head is Head.WHOLE,
    ).describe_first_failure(records, cast(Any, model))
    assert found is not None
    return found


def test_a_fit_to_the_passes_that_finished_says_what_the_one_that_failed_would_need(tmp_path: Path) -> None:
    """By hand: 100 MiB and a MiB a token in backward; so 400 tokens need 500 MiB."""
    lengths = [100, 200, 150, 400, 250]
    records = [
        make_record(index, length, (50 + length) * MIB, (100 + length) * MIB) for index, length in enumerate(lengths)
    ]
    records[3] = record(3, phases={}, error="CUDA out of memory", error_type="OutOfMemoryError")

    found = analyze(tmp_path, lengths, records, ActorSpec(backend="ddp"))

    assert found.index == 3
    assert found.needed is not None
    assert found.needed.peak_bytes == pytest.approx(500 * MIB, rel=1e-3)
    by_option = {saving.option: saving.peak_bytes for saving in found.needed.savings}
    # two blocks: a half of the 400 MiB that grow with the tokens, and each block's input, which is small
    residual = 2 * 400 * 32 * 2
    assert by_option["--gradient-checkpointing"] == pytest.approx((100 + 200) * MIB + residual, rel=1e-3)
    assert by_option["--num-layers 1"] == pytest.approx((100 + 200) * MIB, rel=5e-3)
    assert not any("ranks" in option for option in by_option), "ddp shares nothing"
    said = dict(found.lines(has_snapshot=False))
    assert said["memory"].startswith("pass 4, rank 0 would need 0.488 GiB by a fit to 4 measured passes")
    assert "--gradient-checkpointing: 0.293 GiB" in said["would need"]


def test_a_pass_that_ran_out_on_another_rank_is_not_told_of_this_one() -> None:
    """That rank tells it itself, by its own peaks."""
    parts: dict[str, Any] = {declared.name: None for declared in fields(Reruns)}
    reruns = Reruns(**{**parts, "world": SimpleNamespace(rank=0)})
    elsewhere = record(3, rank=1, phases={}, error="CUDA out of memory", error_type="OutOfMemoryError")
    assert reruns.analyze_out_of_memory([record(3), elsewhere]) is None


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("kind", ["of the other kind", "that failed"])
def test_a_fit_takes_passes_of_the_same_kind_that_finished(trains: bool, kind: str, tmp_path: Path) -> None:
    """A rollout keeps nothing for a backward, and a pass that broke off has no peak."""
    lengths = [100, 200, 150, 300, 400]
    other: dict[str, Any] = {"trains": not trains} if kind == "of the other kind" else {"error": "boom"}
    records = [make_record(index, length, length * MIB, length * MIB) for index, length in enumerate(lengths[:4])]
    records = [replace(one, input=replace(one.input, trains=trains)) for one in records]
    records[2] = record(2, phases=records[2].cost.phases, **{"trains": trains, **other})
    records[3] = record(3, phases=records[3].cost.phases, **{"trains": trains, **other})
    records.append(record(4, phases={}, error="x", error_type="OutOfMemoryError", trains=trains))

    found = analyze(tmp_path, lengths, records, ActorSpec(backend="ddp"))

    assert (found.needed, found.why_not) == (
        None,
        "2 passes of its kind finished, and a fit of peaks to tokens takes 3",
    )


def test_whole_logits_are_told_from_what_blocks_keep(tmp_path: Path) -> None:
    lengths = [100, 200, 150, 400]
    records = [make_record(index, length, 0, length * 1_000) for index, length in enumerate(lengths[:3])]
    records.append(record(3, phases={}, error="x", error_type="OutOfMemoryError"))

    found = analyze(tmp_path, lengths, records, ActorSpec(backend="ddp", head=Head.WHOLE))

    assert found.needed is not None
    by_option = {saving.option: saving.peak_bytes for saving in found.needed.savings}
    logits, residual = 400 * LLAMA["vocab_size"] * 2, 2 * 400 * LLAMA["hidden_size"] * 2  # type: ignore[operator]
    assert by_option["--head chunks"] == pytest.approx(400_000 - logits, rel=1e-3)
    assert by_option["--num-layers 1"] == pytest.approx((400_000 - logits) / 2 + logits, rel=1e-3)
    # a block's activations come when the logits are gone, and take more than they
    assert by_option["--gradient-checkpointing"] == pytest.approx((400_000 - logits) / 2 + residual, rel=1e-3)


@pytest.mark.parametrize(
    ("lengths", "peaks", "why"),
    [
        ([100, 200, 400], [200, 300], "2 passes of its kind finished, and a fit of peaks to tokens takes 3"),
        ([100, 200, 150, 400], [200, 200, 200], "the peaks of the measured passes do not grow with their tokens"),
        ([100, 200, 150, 50], [200, 300, 250], "passes that finished had a higher peak than is predicted of it"),
    ],
)
def test_what_cannot_be_predicted_is_said(tmp_path: Path, lengths: list[int], peaks: list[int], why: str) -> None:
    records = [make_record(index, lengths[index], peak * MIB // 2, peak * MIB) for index, peak in enumerate(peaks)]
    records.append(record(len(peaks), phases={}, error="CUDA out of memory", error_type="OutOfMemoryError"))

    found = analyze(tmp_path, lengths, records, ActorSpec(backend="fsdp2"))

    assert (found.needed, found.why_not) == (None, why)
    said = dict(found.lines(has_snapshot=False))
    assert said["would need"].startswith(f"not predicted: {why}. --memory-snapshot")
    assert "a rank holds 0.000 GiB of weights" in said["memory"]


def test_what_a_rank_holds_is_what_its_backend_declares(tmp_path: Path) -> None:
    number = NUM_PARAMETERS
    failed = [record(0, phases={}, error="x", error_type="OutOfMemoryError")]

    for_fsdp2 = analyze(tmp_path, [10], failed, ActorSpec(backend="fsdp2"))
    assert (for_fsdp2.weights_bytes, for_fsdp2.gradients_bytes, for_fsdp2.optimizer_bytes) == (
        4 * number,
        4 * number,
        0,
    )
    engine = analyze(tmp_path, [10], failed, ActorSpec(backend="deepspeed"))
    assert (engine.weights_bytes, engine.optimizer_bytes) == (2 * number, 4 * number)


def test_of_an_adapter_nothing_is_made_up(tmp_path: Path) -> None:
    lengths = [100, 200, 150, 400]
    records = [make_record(index, length, length * MIB, length * MIB) for index, length in enumerate(lengths[:3])]
    records.append(record(3, phases={}, error="x", error_type="OutOfMemoryError"))

    found = analyze(tmp_path, lengths, records, ActorSpec(backend="fsdp2"), has_adapter=True)

    said = dict(found.lines(has_snapshot=False))
    assert "not known of a model with an adapter" in said["memory"]
    assert said["would need"].startswith("not predicted: of a model with an adapter no backend declares")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("a"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("broken"), False),
        (None, False),
    ],
)
def test_errors_of_memory_are_told_from_others(error: BaseException | None, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_profile_of_a_run_whose_passes_all_failed_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    write_captures(tmp_path, [10, 12])
    without = run_replay(tmp_path, 0)
    told = capsys.readouterr()

    exit_code, run, records, log = run_replay(tmp_path, 0, "--profile")

    assert (exit_code, run["status"], run["profile"]) == (without[0], "failed", None) == (1, "failed", None)
    assert [record.error for record in records] == [record.error for record in without[2]]
    said = capsys.readouterr()
    assert said.err == told.err
    mine = [line for line in said.out.splitlines() if "logs/" not in line]
    plain = [line for line in told.out.splitlines() if "logs/" not in line]
    assert [line for line in mine if line not in plain] == ["profiled   nothing: no pass finished"]
    assert not list(log.glob("*.profile.json.gz"))


ALIVE = """
import gc, sys, weakref
import torch
from transformers.models.llama.modeling_llama import LlamaMLP
from replay.command_line.cli import main
from replay.runner.replayer import ReopenableActor

models = []
opened, inner = ReopenableActor._open_backend, LlamaMLP.forward

def open_again(actor):
    if models:
        tensors = [tensor for tensor in gc.get_objects() if type(tensor) is torch.Tensor and tensor.grad_fn is not None]
        print("ALIVE", sum(model() is not None for model in models), sum(60 in tensor.shape for tensor in tensors))
    backend = opened(actor)
    models.append(weakref.ref(backend.model))
    return backend

def forward(mlp, hidden):
    if hidden.shape[1] == 60:
        raise torch.OutOfMemoryError("CUDA out of memory on purpose")
    return inner(mlp, hidden)

ReopenableActor._open_backend, LlamaMLP.forward = open_again, forward
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ["fsdp2 --optimizer none", "ddp", "deepspeed --optimizer none", "deepspeed --zero-stage 3"]
)
def test_nothing_of_a_pass_that_failed_is_held_when_the_actor_opens_again(tmp_path: Path, options: str) -> None:
    """Neither the model nor a tensor of the pass: two models may be more than a device holds."""
    write_captures(tmp_path, [10, 60, 12, 60])
    script = tmp_path / "alive.py"
    script.write_text(ALIVE)

    done = run(f"python {script} --inputs {tmp_path} --backend {options}", tmp_path / "logs")

    said = [line for line in done.stdout.splitlines() if line.startswith("ALIVE")]
    assert said == 2 * ["ALIVE 0 0"], done.stdout[-2000:] + done.stderr[-2000:]


def test_a_pass_that_ran_out_says_what_it_would_need_or_what_held_its_memory(tmp_path: Path, capsys: Captured) -> None:
    """The second run has a snapshot of the same pass."""
    write_captures(tmp_path, [10, 12, 60, 14])

    exit_code, run, _, _ = run_replay(tmp_path, 20)
    assert (exit_code, run["out_of_memory"]["index"], run["memory"]) == (1, 2, None)
    assert "memory     pass 3, rank 0" in capsys.readouterr().out

    exit_code, run, _, log = run_replay(tmp_path, 20, "--memory-snapshot")
    assert (exit_code, run["out_of_memory"]["index"], run["memory"]["index"]) == (1, 2, 2)
    assert "--memory-snapshot" not in run["out_of_memory"]["why_not"]
    (rank,) = run["memory"]["ranks"]
    assert rank["ran_out"].startswith("CUDA out of memory. Tried")
    assert (log / rank["snapshot"]).is_file()
    said = capsys.readouterr().out
    assert "ran out    CUDA out of memory. Tried to allocate 9.00 GiB" in said


def test_an_accumulation_window_is_filled_as_it_was(tmp_path: Path) -> None:
    """The pass that ran out was the second of its window, and the first one's gradient was there."""
    write_captures(tmp_path, [10, 12, 14, 90])

    _, run, _, _ = run_replay(tmp_path, 20, "--grad-accumulation", "2", "--memory-snapshot", "--dtype", "fp32")

    assert run["memory"]["index"] == 3
    (rank,) = run["memory"]["ranks"]
    assert rank["ran_out"] is not None
    (gradients,) = [holder for holder in rank["holders"] if holder["kind"] == "gradients"]
    assert gradients["num_bytes"] >= 4 * NUM_PARAMETERS


def test_a_profile_that_fails_by_itself_leaves_the_report(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_captures(tmp_path, [10, 12])

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no events")

    monkeypatch.setattr("replay.profiling.profiler.summarize_events", fail)
    exit_code, run, records, _ = run_replay(tmp_path, 99, "--profile")

    assert (exit_code, run["status"], len(records)) == (0, "finished", 2)
    assert "profiled   unknown: ValueError: no events" in capsys.readouterr().out


def test_a_run_that_goes_on_and_has_nothing_left_profiles_what_it_did_before(tmp_path: Path) -> None:
    write_captures(tmp_path, [10, 12])
    states = ["--step", "--save-every", "1", "--save-state", str(tmp_path / "states"), "--profile"]
    run_replay(tmp_path, 99, *states)

    exit_code, run, records, _ = run_replay(tmp_path, 99, *states, "--resume")

    assert (exit_code, len(records)) == (0, 2)
    assert run["profile"] is not None


PROCESS_OF_OTHER_RANK = 4242
FAILURE = report_failed_rank(0, RankPosition(index=1, phase=RankPhase.FORWARD), "OutOfMemoryError")


class Peers:
    """One other rank, and what it sends; keeps what is sent to it."""

    def __init__(self, *heard: dict[str, Any]) -> None:
        self.by_rank = {1: None}
        self.sent: list[str] = []
        self.heard = list(heard)

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message["kind"])

    def receive(self, _: float) -> list[tuple[int, dict[str, Any]]]:
        if not self.heard:
            self.by_rank.clear()
            return []
        return [(1, self.heard.pop(0))]


def ending(tmp_path: Path, peers: Peers, **given: Any) -> Shutdown:
    class Alone:
        rank, device = 0, torch.device("cpu")

        def gather(self, own: Any) -> list[Any]:
            host, _ = own
            return [own, (host, PROCESS_OF_OTHER_RANK)]

    class Stacks:
        def write(self) -> None: ...

    return Shutdown(
        cast(World, Alone()), tmp_path, cast(Any, Stacks()), cast(Any, peers), end_process=sys.exit, **given
    )


def test_a_rank_that_writes_what_held_its_memory_is_not_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = Peers({"kind": "done"})
    last = ending(tmp_path, peers)

    def note_end() -> None:
        with pytest.raises(SystemExit):
            last.end_after_report(0, 1, FAILURE)

    class Lock:
        """Says when somebody asks to hold it, or to wait for it."""

        asked, lock = threading.Event(), threading.Lock()

        def acquire(self, *, timeout: float) -> bool:
            self.asked.set()
            return self.lock.acquire(timeout=timeout)

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    lock = Lock()
    monkeypatch.setattr(last, "_writing_lock", lock)
    thread = threading.Thread(target=note_end)
    with last.postpone_shutdown():
        thread.start()
        assert lock.asked.wait(60)
    thread.join()

    assert peers.sent == ["writing", "written", "done"]


def test_a_rank_that_writes_is_waited_for(tmp_path: Path) -> None:
    killed: list[tuple[int, int]] = []
    peers = Peers({"kind": "written"}, {"kind": "done"})
    last = ending(tmp_path, peers, kill_process=lambda *given: killed.append(given), patience_seconds=0.0)
    last.note_writing(1, "writing")

    with pytest.raises(SystemExit):
        last.end_after_report(0, 1, FAILURE)

    assert killed == [(PROCESS_OF_OTHER_RANK, signal.SIGKILL)], "0 s after it had written"
    assert peers.heard == [{"kind": "done"}], "its first message was waited for"
