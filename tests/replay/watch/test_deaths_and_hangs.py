"""A rank that dies or hangs ends the run: the right one is named, with its input and phase, and nothing is left.

Each case is a real run of two ranks with a fault in the second pass of one. Several run at a time: they mostly wait.
"""

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from capture.file_format.listing import capture_files
from tests.helpers.commands import BIN, LIMIT, ROOT
from tests.helpers.failing_inputs import folder_of
from tests.helpers.faulty_replay import DEVICE
from tests.helpers.ports import free_port
from tests.helpers.process_table import processes_left
from tests.warm import warm_bin

pytestmark = pytest.mark.slow

WAITS_AT_ONCE = DEVICE == "cpu"  # for a collective; on CUDA a rank queues more work behind it
NUM_AT_ONCE = max(2, (os.cpu_count() or 1) // 4)
SECONDS_TO_END = 60.0  # a launcher may return while a rank that it killed is not gone yet
LAUNCHERS = {
    "torchrun": "torchrun --master-port {port} --nproc-per-node 2 -m tests.helpers.faulty_replay {fault}",
    "deepspeed": "deepspeed --num_gpus=2 --master_port {port} --module tests.helpers.faulty_replay {fault}",
}
DIED = "replay: rank {rank} died in pass 2 on {source} ({shape}), phase {phase}: its process ended without a word"
FAILED = "replay: rank {rank} failed in pass 2 on {source} ({shape}), phase {phase}: "
HUNG = "replay: no progress for 6 s: rank {rank} did not arrive: "
OTHER_PHASE = HUNG + "it has not reached the phase of the others"
COMPILING = OTHER_PHASE.replace("for 6 s", "for 30 s")
OWN_COLLECTIVE = HUNG + "it entered a collective of its own"
ABORTED = "replay: a collective aborted rank {other}: rank {rank} did not arrive: it entered a collective of its own"
FEWER = HUNG + "it entered fewer collectives than the others"
OUTSIDE = HUNG + "the other ranks stand in a collective, and it does not"
SILENT = HUNG + "it does not answer"
RAN_OUT = HUNG + "it has run out of inputs after 2 passes, and others are in a later one"


@dataclass(frozen=True, kw_only=True)
class Case:
    launcher: str
    kind: str
    phase: str
    rank: int
    says: str
    found_in: str | None = ""  # the phase in which the fault is found, if not the one in which it strikes; None: any
    uneven: bool = False

    @property
    def is_cold(self) -> bool:
        """One of each launcher has nothing between the launcher and its ranks."""
        return (self.kind, self.phase) == ("killed", "forward")

    @property
    def has_snapshot(self) -> bool:
        """One launcher's ranks that run out of memory are asked for a snapshot."""
        return (self.launcher, self.kind) == ("torchrun", "out_of_memory")

    @property
    def named(self) -> str:
        return f"{self.launcher}, {'uneven' if self.uneven else self.kind} in {self.phase}, rank {self.rank}"


def table() -> Iterator[Case]:
    # Each kind that a launcher sees meets both launchers and both ranks; of a hang the watch alone knows, and the
    # launcher sees a rank that ended.
    for number, (kind, phase, says, found_in) in enumerate(
        (
            ("killed", "forward", DIED, ""),
            ("raised", "backward", FAILED + "RuntimeError: broken on purpose", ""),
            ("out_of_memory", "forward", FAILED + "OutOfMemoryError: ", ""),
            ("left", "forward", FAILED + "RuntimeError: sys.exit(0) was called", ""),
            (
                "terminated",
                "backward",
                "replay: rank {rank} was ended from outside (SIGTERM) in pass 2 on {source}",
                "",
            ),
            ("nothing", "forward", RAN_OUT, "out of inputs"),
        )
    ):
        for launcher, rank in zip(LAUNCHERS, (number % 2, 1 - number % 2), strict=True):
            yield Case(
                launcher=launcher,
                kind=kind,
                phase=phase,
                rank=rank,
                says=says,
                found_in=found_in,
                uneven=kind == "nothing",
            )
    yield Case(
        launcher="torchrun",
        kind="extra_collective",
        phase="forward",
        rank=0,
        says=OWN_COLLECTIVE if WAITS_AT_ONCE else HUNG,
        found_in="waiting after forward" if WAITS_AT_ONCE else None,
    )
    for launcher, kind, phase, rank, says in (
        ("torchrun", "killed", "backward", 0, DIED),
        ("deepspeed", "blocked", "forward", 0, OTHER_PHASE),
        ("torchrun", "compiling", "forward", 1, COMPILING),
        ("deepspeed", "crashed", "forward", 0, DIED),
        ("torchrun", "left_hard", "forward", 0, DIED),
        ("deepspeed", "left_hard", "backward", 1, DIED),
        ("torchrun", "out_of_host_memory", "forward", 1, FAILED + "MemoryError"),
        ("torchrun", "raised", "step", 1, FAILED + "RuntimeError: broken on purpose"),
        ("deepspeed", "raised", "step", 0, FAILED + "RuntimeError: broken on purpose"),
        ("torchrun", "blocked", "backward", 1, HUNG),
        ("torchrun", "blocked_after_collective", "forward", 0, HUNG),
        ("torchrun", "blocked_before_async", "forward", 1, FEWER if WAITS_AT_ONCE else HUNG),
        ("torchrun", "blocked_before_new_group", "forward", 1, OUTSIDE if WAITS_AT_ONCE else HUNG),
        ("torchrun", "holding_python", "forward", 1, SILENT),
        ("torchrun", "holding_python_first", "forward", 1, SILENT),
        ("torchrun", "mismatched_collective", "forward", 0, ABORTED),
        ("deepspeed", "stopped", "forward", 0, SILENT),
    ):
        mismatched = kind == "mismatched_collective"  # which may return where it was called, before the other rank dies
        yield Case(
            launcher=launcher,
            kind=kind,
            phase=phase,
            rank=rank,
            says=HUNG if mismatched and not WAITS_AT_ONCE else says,
            found_in=None if mismatched else "",
        )


CASES = list(table())
# ranks that leave with exit code 0, or that are ended after the others because they do not answer
UNKNOWN_TO_TORCHRUN = ("left_hard", "holding_python", "holding_python_first")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    exit_code: int
    output: str
    sources: list[str]  # of the faulty rank
    log: Path
    seconds_after_fault: float | None
    processes_left: list[str]


def run_case(case: Case, home: Path) -> Outcome:
    """Lengths differ from rank to rank and pass to pass, so that shapes tell which input is named."""
    lengths = [20, 21, 22, 23, 24, 25]
    if case.uneven:  # that rank has two inputs, the other three
        folder = folder_of(home, [20, 21, 22, 23], num_ranks=2)
        extra = folder_of(home / "extra", [26, 27, 28, 29, 30, 31], num_ranks=2)
        longer = capture_files(extra)[2 if case.rank == 1 else 5]
        longer.rename(folder / longer.name)
    else:
        folder = folder_of(home, lengths, num_ranks=2)
    backend = "fsdp2" if case.launcher == "torchrun" else "deepspeed"
    command = LAUNCHERS[case.launcher].format(fault=f"{case.kind} {case.phase} {case.rank}", port=free_port())
    arguments = f"{command} --backend {backend} --inputs {folder} --log-folder {home / 'logs'} --timeout 1800".split()
    with subprocess.Popen(
        [
            *arguments,
            *["--uneven"] * case.uneven,
            *["--step"] * (case.phase == "step"),
            *["--memory-snapshot"] * case.has_snapshot,
        ],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{BIN if case.is_cold else warm_bin()}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate(timeout=LIMIT)
    struck = [float(seconds) for seconds in re.findall(r"FAULT (\d+\.\d+)", output)]
    logs = list((home / "logs").glob("*"))
    assert len(logs) == 1, f"exit code {process.returncode}\n{output[-4000:]}"
    return Outcome(
        exit_code=process.returncode,
        output=output,
        sources=[path.name for path in capture_files(folder) if f"_rank{case.rank}_" in path.name],
        log=logs[0],
        seconds_after_fault=time.time() - struck[0] if struck else None,
        processes_left=processes_left(str(folder), SECONDS_TO_END),
    )


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    """Start all cases that this session runs before waiting for any, and return their outcomes."""
    wanted = {item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        yield {
            case.named: pool.submit(run_case, case, tmp_path_factory.mktemp("fault"))
            for case in CASES
            if case in wanted
        }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.named)
def test_the_run_ends_and_names_the_rank_its_input_and_its_phase(
    case: Case, outcomes: dict[str, Future[Outcome]]
) -> None:
    outcome = outcomes[case.named].result()
    print(f"{case.named}: ended {outcome.seconds_after_fault or float('nan'):.1f} s after the fault")
    assert outcome.exit_code != 0
    assert outcome.processes_left == []
    source = outcome.sources[1]
    length = 22 + case.rank
    shape = f"2 rows, {2 * length} tokens, {2 * length} of them real"
    phase = None if case.found_in is None else case.found_in or case.phase
    expected = case.says.format(rank=case.rank, other=1 - case.rank, source=source, shape=shape, phase=phase)
    ours, _, torchruns_last_words = outcome.output.partition("faulty_replay FAILED\n")
    assert ours.count(expected) == 1, outcome.output[-6000:]
    if case.launcher == "torchrun":
        assert f"traceback : {expected}" in torchruns_last_words, torchruns_last_words
        if case.kind not in UNKNOWN_TO_TORCHRUN:
            cause = torchruns_last_words.partition("Root Cause")[2]
            assert f"rank      : {case.rank} (" in cause, torchruns_last_words
    said = [line for line in outcome.output.splitlines() if line.startswith("replay: ")]
    assert len(said) == 2, said
    assert str(outcome.log) in said[1]
    assert expected in (outcome.log / "failure.txt").read_text()
    run: dict[str, Any] = json.loads((outcome.log / "run.json").read_text())
    assert (run["status"], run["failure"]["rank"]) == ("failed", case.rank)
    if phase is not None:
        assert run["failure"]["phase"] == phase
    if not case.uneven:
        assert (run["failure"]["index"], run["failure"]["source"]) == (1, source)
    num_finished = 2 if case.uneven else 1
    for rank in (0, 1):
        records = [json.loads(line) for line in (outcome.log / f"rank{rank}.jsonl").read_text().splitlines()]
        waits = rank == case.rank or case.phase != "step"  # the other rank's own step needs nobody under FSDP2
        finished = [record["index"] for record in records if record["error"] is None]
        assert finished in ([list(range(num_finished))] if waits else [[0], [0, 1]])
    if case.kind.startswith("out_of"):
        check_memory(case, outcome)
    if "no progress" in case.says:
        check_evidence(case, outcome, run)


def check_memory(case: Case, outcome: Outcome) -> None:
    """Check that the rank that ran out, and no other, said what held its memory, or what could have been asked for."""
    written = {path.name for path in outcome.log.glob("rank*.memory.*")}
    if not case.has_snapshot:
        assert written == set()
        assert f"pass 2, rank {case.rank}: a rank holds" in outcome.output
        assert outcome.output.count("would need not predicted: 1 pass of its kind finished") == 1
        return
    assert {name.split(".")[-1] for name in written} in ({"gz", "txt"}, {"pickle", "txt"})  # on a CPU, on CUDA
    assert {name.split(".")[0] for name in written} == {f"rank{case.rank}"}
    said = (outcome.log / f"rank{case.rank}.memory.txt").read_text()
    assert said.startswith(f"rank {case.rank} ran out of memory in pass 2\n")
    assert f"pass 2, rank {case.rank}, {outcome.sources[1]}" in said
    assert said in outcome.output


def check_evidence(case: Case, outcome: Outcome, run: dict[str, Any]) -> None:
    """Check the evidence of a hang: where every rank was, in words and in run.json, and its stack."""
    assert [seen["rank"] for seen in run["failure"]["ranks"]] == [0, 1]
    for rank in (0, 1):
        lines = [line for line in outcome.output.splitlines() if line.startswith(f"  rank {rank}: ")]
        assert len(lines) == 1
        stack = (outcome.log / f"rank{rank}.stack.txt").read_text()
        if case.kind != "stopped" or rank != case.rank:  # a process that is stopped can say nothing
            assert "replay/runner/session.py" in stack
    if not case.uneven:
        [line] = [line for line in outcome.output.splitlines() if line.startswith(f"  rank {case.rank}: ")]
        assert f"pass 2 on {outcome.sources[1]}" in line
        if case.found_in is not None:
            assert f"phase {case.found_in or case.phase}" in line
    if case.kind == "compiling":
        assert "in blocked, compiling" in outcome.output
    if case.kind in ("blocked", "holding_python", "compiling"):
        assert (
            f"in {'blocked' if case.kind == 'compiling' else case.kind}"
            in (outcome.log / f"rank{case.rank}.stack.txt").read_text()
        )
