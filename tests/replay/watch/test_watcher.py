"""The watch where no fault matrix is needed: one process, Ctrl-C, its connections, what it leaves of a good run."""

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from actor_init.world import World
from replay.command_line.cli import main
from replay.watch import stacks
from replay.watch.blame import RankFailure, Sighting, report_failed_rank
from replay.watch.progress import RankPhase, RankPosition, Tracker, read_last_position
from replay.watch.shutdown import Shutdown, claim_failure
from replay.watch.side_channel import Peers, connect_ranks
from replay.watch.stacks import is_raised_in_collective
from replay.watch.watcher import Watch, judge_sightings, watch_run
from tests.helpers.commands import BIN, LIMIT, ROOT
from tests.helpers.failing_inputs import folder_of
from tests.helpers.ports import free_port
from tests.helpers.process_table import processes_left
from tests.helpers.thread_ranks import Threads
from tests.warm import warm_bin


def start(home: Path, launcher: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *launcher.split(),
            "--inputs",
            str(folder_of(home, [20, 22, 24, 26], num_ranks=2)),
            "--log-folder",
            str(home / "logs"),
        ],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_of(home: Path) -> dict[str, Any]:
    [folder] = (home / "logs").iterdir()
    run: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return run


def until_the_fault(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("FAULT"):
            return
    raise AssertionError("".join(lines[-50:]))


def test_a_single_process_that_hangs_is_ended_and_says_where(tmp_path: Path) -> None:
    with start(tmp_path, f"{warm_bin()}/python -u -m tests.helpers.faulty_replay blocked backward 0") as process:
        output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert "replay: no progress for 6 s in pass 2 on actor_inputs_rank0_" in output
    assert "(2 rows, 48 tokens, 48 of them real), phase backward, at python3" in output
    assert "helpers/faulty_replay.py" in output
    assert "Try: --timeout 60" in output.replace("try", "Try")
    assert run_of(tmp_path)["failure"]["phase"] == "backward"
    [stack] = (tmp_path / "logs").glob("*/rank0.stack.txt")
    assert "in blocked" in stack.read_text()


def test_a_single_process_that_is_sent_sigterm_says_where_it_was(tmp_path: Path) -> None:
    with start(tmp_path, f"{warm_bin()}/python -u -m tests.helpers.faulty_replay asleep forward 0") as process:
        until_the_fault(process)
        process.terminate()
        output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGTERM
    assert "replay: rank 0 was ended from outside (SIGTERM) in pass 2 on actor_inputs_rank0_" in output
    assert run_of(tmp_path)["status"] == "failed"


def test_a_signal_that_the_launcher_passes_on_names_no_rank(tmp_path: Path) -> None:
    launcher = f"{warm_bin()}/torchrun --standalone --nproc-per-node 2 -m tests.helpers.faulty_replay asleep forward 1"
    with start(tmp_path, f"{launcher} --backend fsdp2") as process:
        until_the_fault(process)
        process.terminate()
        process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    failure = run_of(tmp_path)["failure"]
    assert (failure["kind"], failure["rank"]) == ("terminated", None)


@pytest.mark.slow
def test_a_rank_that_is_slow_and_goes_on_ends_no_run(tmp_path: Path) -> None:
    """The other rank waits twice as long as --timeout."""
    launcher = f"{warm_bin()}/torchrun --standalone --nproc-per-node 2 -m tests.helpers.faulty_replay"
    launcher += " slow_and_going_on forward 1"
    with start(tmp_path, f"{launcher} --backend fsdp2") as process:
        output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output[-4000:]
    assert run_of(tmp_path)["status"] == "finished"


@pytest.mark.slow
def test_a_rank_that_stands_behind_its_last_pass_is_named(tmp_path: Path) -> None:
    """Such as one whose output nobody reads. The other has met nobody at the end, and no collective tells."""
    launcher = f"{warm_bin()}/torchrun --standalone --nproc-per-node 2 -m tests.helpers.faulty_replay blocked end 0"
    with start(tmp_path, f"{launcher} --backend fsdp2") as process:
        output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    assert "rank 0 did not arrive: it has not reached the phase of the others (out of inputs)" in output, output[-4000:]


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_ended_without_a_launcher(tmp_path: Path) -> None:
    """As under srun, which ends nobody."""
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    arguments = (
        f"{warm_bin()}/python -u -m tests.helpers.faulty_replay stopped forward 1 --backend fsdp2 --max-inputs 2"
    )
    folder = folder_of(tmp_path, [20, 22, 24, 26], num_ranks=2)
    ranks = [
        subprocess.Popen(
            [*arguments.split(), "--inputs", str(folder), "--log-folder", str(tmp_path / "logs")],
            cwd=ROOT,
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in (0, 1)
    ]
    for process in ranks:
        process.wait(LIMIT)
    assert run_of(tmp_path)["failure"]["rank"] == 1
    assert processes_left(str(tmp_path), LIMIT) == []


@pytest.mark.slow
def test_a_network_that_breaks_is_no_rank_s_failure(tmp_path: Path) -> None:
    launcher = (
        f"{warm_bin()}/torchrun --standalone --nproc-per-node 2 -m tests.helpers.faulty_replay network_cut forward 1"
    )
    with start(tmp_path, f"{launcher} --backend fsdp2") as process:
        output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    assert "replay: a collective failed on rank" in output, output[-4000:]
    assert "in a collective" in output


@pytest.mark.slow
@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_ctrl_c_ends_ranks_that_stand_in_a_collective(faulty_rank: int, tmp_path: Path) -> None:
    torchrun = warm_bin() / "torchrun" if faulty_rank == 0 else "torchrun"  # one as a user's
    launcher = (
        f"{torchrun} --master-port {free_port()} --nproc-per-node 2 -m tests.helpers.faulty_replay "
        f"asleep forward {faulty_rank} --backend fsdp2"
    )
    with start(tmp_path, launcher) as process:
        until_the_fault(process)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    assert run_of(tmp_path)["status"] == "interrupted"
    assert processes_left(str(tmp_path), LIMIT) == []


@pytest.mark.usefixtures("one_world")
def test_a_good_run_leaves_nothing_of_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = []

    def noted(world: Any, folder: Any, timeout: float, **given: Any) -> Any:
        timeouts.append(timeout)
        return watch_run(world, folder, timeout, **given)

    monkeypatch.setattr("replay.runner.run.watch_run", noted)
    handlers = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    threads = threading.enumerate()
    arguments = ["--inputs", str(folder_of(tmp_path, [20, 22])), "--log-folder", str(tmp_path / "logs")]
    assert main([*arguments, "--timeout", "33", "--uneven"]) == 0
    assert timeouts == [33.0]
    [folder] = (tmp_path / "logs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.jsonl", "run.json"]
    assert (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)) == handlers
    assert [thread for thread in threading.enumerate() if thread not in threads] == []


class Clock:
    """Stands still unless it is told to go on, and then waits until somebody has looked at it twice."""

    def __init__(self) -> None:
        self._now = 0.0
        self._looked = threading.Semaphore(0)

    def monotonic(self) -> float:
        self._looked.release()
        return self._now

    def pass_by(self, seconds: float) -> None:
        self._now += seconds
        while self._looked.acquire(blocking=False):
            pass
        for _ in range(3):
            assert self._looked.acquire(timeout=LIMIT)


class NotedFailures(Shutdown):
    """Notes what would have ended this rank, and goes on."""

    headlines: list[str]

    def report_and_end(self, failure: RankFailure, **given: Any) -> Any:
        self.headlines.append(failure.headline)


@contextmanager
def watch_by(clock: Clock, world: World, folder: Path, timeout: float) -> Iterator[tuple[Watch, list[str]]]:
    """Watch the code inside by that clock; yields the headlines of failures too."""
    headlines: list[str] = []

    def make_shutdown(*given: Any) -> Shutdown:
        shutdown = NotedFailures(*given, clock=clock.monotonic)
        shutdown.headlines = headlines
        return shutdown

    with watch_run(
        world, folder, timeout, clock=clock.monotonic, tick_seconds=0.001, make_shutdown=make_shutdown
    ) as watch:
        yield watch, headlines


@pytest.mark.parametrize("reports", [True, False])
def test_an_opening_that_reports_goes_on_and_one_that_does_not_hangs(
    reports: bool, world: World, tmp_path: Path
) -> None:
    """Four parts of 50 s each, with --timeout 120."""
    clock = Clock()
    with watch_by(clock, world, tmp_path, 120.0) as (watch, said):
        for _ in range(4):
            clock.pass_by(50.0)
            if reports:
                watch.tracker.report_progress()
    assert bool(said) != reports
    assert reports or said[0].startswith("no progress for 120 s in phase opening the actor")


def test_a_rank_that_writes_why_it_failed_is_not_reported_as_hanging(world: World, tmp_path: Path) -> None:
    """With --timeout 10 it may write for 30 s, WRITING_SECONDS; after that it hangs like any other."""
    clock = Clock()
    with watch_by(clock, world, tmp_path, 10.0) as (watch, said), watch.postpone_shutdown():
        # The watch takes what it first sees for progress. Later it first asks and then judges, so it looks at the time
        # more often than once.
        for seconds in (0.0, 25.0, 0.0, 0.0):
            clock.pass_by(seconds)
        assert said == []
        for seconds in (25.0, 0.0, 0.0):
            clock.pass_by(seconds)
        assert said[0].startswith("no progress for 10 s")


def test_a_compiler_has_five_times_as_long(world: World, tmp_path: Path) -> None:
    clock = Clock()

    def compile_slowly(said: list[str]) -> None:
        for seconds in (0.0, 25.0, 0.0, 0.0, 20.0, 0.0, 0.0):
            clock.pass_by(seconds)
        assert said == []
        for seconds in (20.0, 0.0, 0.0):
            clock.pass_by(seconds)
        assert said[0].startswith("no progress for 50 s")

    with watch_by(clock, world, tmp_path, 10.0) as (_, said):
        calling("_dynamo/convert_frame.py")(partial(compile_slowly, said))


@pytest.mark.parametrize(
    ("idle_seconds", "compiling", "hangs"),
    [
        ((200.0, 3.0, 200.0), (), False),
        ((3.0, 200.0, 200.0), (), False),
        ((200.0, 121.0, 500.0), (), True),
        ((200.0, 200.0, 200.0), (0, 1), False),
        ((200.0, 200.0, 200.0), (0,), False),
        ((200.0, 200.0, 200.0), (1,), False),
        ((700.0, 601.0, 700.0), (1,), True),
        ((700.0, 601.0, 700.0), (0, 1), True),
    ],
)
@pytest.mark.parametrize("answers", [True, False])
def test_a_run_goes_on_while_any_rank_makes_progress(
    idle_seconds: tuple[float, ...], compiling: tuple[int, ...], hangs: bool, answers: bool
) -> None:
    """With --timeout 120, five times as long where one compiles. Of a rank that is silent no progress is known."""
    first, second, third = [
        Sighting(
            rank=rank,
            position=RankPosition(index=0, phase=RankPhase.FORWARD),
            idle_seconds=seconds,
            is_compiling=rank in compiling,
            standing_at="x.py:1 in y",
        )
        for rank, seconds in enumerate(idle_seconds)
    ]
    last = third if answers else replace(third, answers=False, idle_seconds=0.0)
    judgement = judge_sightings([first, second, last], timeout=120.0)
    assert isinstance(judgement, RankFailure) == hangs
    # Where the run goes on, the ranks are asked again once the last progress is that old, or a compiler had as long.
    idle = min(idle_seconds[: 3 if answers else 2])
    assert hangs or judgement == (120.0 - idle if idle < 120.0 else 120.0)


def test_a_collective_that_failed_is_reported_whatever_the_ranks_do() -> None:
    busy = Sighting(rank=0, position=RankPosition(index=0, phase=RankPhase.FORWARD), is_compiling=True)
    judgement = judge_sightings([busy], 120.0, "a collective failed on rank 1")
    assert isinstance(judgement, RankFailure)
    assert judgement.headline.startswith("a collective failed on rank 1")


def test_the_first_of_two_ranks_that_fail_at_once_is_believed(tmp_path: Path) -> None:
    """As where all run out of memory in the same pass."""
    Tracker(tmp_path, rank=0)
    position = RankPosition(index=1, phase=RankPhase.FORWARD, source="a.pkl")
    assert claim_failure(tmp_path, report_failed_rank(1, position, "OutOfMemoryError"), "rank 1 failed")
    assert not claim_failure(tmp_path, report_failed_rank(0, position, "OutOfMemoryError"), "rank 0 failed")
    assert (tmp_path / "failure.txt").read_text() == "rank 1 failed\n"
    assert json.loads((tmp_path / "run.json").read_text())["failure"]["rank"] == 1


def test_what_a_rank_said_last_is_in_its_file(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, rank=3)
    assert read_last_position(tmp_path, 3) == RankPosition(index=-1, phase=RankPhase.OPENING)
    tracker.begin_pass(11, "a" * 240 + "ü.pkl")
    tracker.set_shapes(2, 40, 38)
    tracker.enter_phase(RankPhase.BACKWARD)
    expected = RankPosition(
        index=11, phase=RankPhase.BACKWARD, source="a" * 240 + "ü.pkl", rows=2, padded_tokens=40, real_tokens=38
    )
    assert read_last_position(tmp_path, 3) == expected
    tracker.enter_phase_after_passes(12, RankPhase.OUT_OF_INPUTS)
    assert read_last_position(tmp_path, 3) == RankPosition(index=12, phase=RankPhase.OUT_OF_INPUTS)
    assert RankPosition(index=12, phase=RankPhase.OUT_OF_INPUTS).describe() == "phase out of inputs after 12 passes"


def test_a_collective_that_no_pass_before_had_is_counted(tmp_path: Path) -> None:
    entered = {"data": 5}
    tracker = Tracker(tmp_path, rank=0, count_collectives=lambda: dict(entered))

    def replay(index: int, forward: int, backward: int, index_in_window: int = 0) -> list[int]:
        seen = []
        tracker.begin_pass(index, "a.pkl", index_in_window=index_in_window)
        for phase, number in ((RankPhase.FORWARD, forward), (RankPhase.BACKWARD, backward)):
            tracker.enter_phase(phase)
            entered["data"] += number
            seen.append(tracker.count_new_collectives())
        tracker.enter_phase(RankPhase.PASS_END)
        return [*seen, tracker.count_new_collectives()]

    assert replay(0, forward=9, backward=2) == [0, 0, 0]
    assert replay(1, forward=8, backward=2) == [0, 0, 0]
    assert replay(2, forward=9, backward=2) == [0, 0, 0]
    assert replay(3, forward=10, backward=3) == [1, 2, 2]
    entered["ring"] = 1
    assert tracker.count_new_collectives() == 3
    assert replay(4, forward=20, backward=2, index_in_window=1) == [0, 0, 0]
    tracker.begin_pass(5, "a.pkl")
    tracker.enter_phase(RankPhase.FORWARD)
    entered["data"] += 99
    assert tracker.count_new_collectives() == 89
    tracker.enter_phase(RankPhase.PASS_END)  # without a backward: no pass before went this way
    assert tracker.count_new_collectives() == 0


def connected(
    world_size: int,
    change_addresses: Callable[[list[Any]], list[Any]] = list,
    connect: Callable[[World], Peers] = Peers.connect,
) -> list[Peers]:
    """Connect ranks that are threads; `change_addresses` is what the second one hears of their addresses."""
    threads = Threads(world_size)
    peers: dict[int, Peers] = {}

    def connect_rank(rank: int) -> None:
        world = threads.on_rank(rank)
        if rank == 1:
            gather, rounds = world.gather, iter([change_addresses])
            world.gather = lambda value: next(rounds, list)(gather(value))
        peers[rank] = connect(world)

    workers = [threading.Thread(target=connect_rank, args=(rank,)) for rank in range(world_size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(LIMIT)
    return [peers[rank] for rank in range(world_size)]


def test_every_rank_hears_every_other_and_that_one_is_gone() -> None:
    first, second, third = connected(3)
    assert [sorted(peers.by_rank) for peers in (first, second, third)] == [[1, 2], [0, 2], [0, 1]]
    third.send({"kind": "first word"})
    third.send({"kind": "second word"}, to=0)
    third.close()
    heard: list[Any] = []
    while (2, None) not in heard:
        heard += first.receive(LIMIT)
    assert heard == [(2, {"kind": "first word"}), (2, {"kind": "second word"}), (2, None)]
    assert sorted(first.by_rank) == [1]
    heard = []
    while (2, None) not in heard:
        heard += second.receive(LIMIT)
    assert heard == [(2, {"kind": "first word"}), (2, None)]
    second.ring()
    assert second.receive(LIMIT) == [(None, 0)]
    first.close()
    second.close()


def test_a_stranger_that_calls_a_rank_s_port_is_turned_away() -> None:
    """Such as a rank of another run, or a port scanner."""

    def call_as_a_stranger(addresses: list[Any]) -> list[Any]:
        family, *address = addresses[0]
        with socket.socket(family, socket.SOCK_STREAM) as stranger:
            stranger.connect(tuple(address))
            stranger.sendall(f"{'0' * 32} 1\n".encode())
        return addresses

    first, second = connected(2, call_as_a_stranger)
    second.send({"kind": "word"})
    assert first.receive(LIMIT) == [(1, {"kind": "word"})]
    first.close()
    second.close()


def test_ranks_that_cannot_reach_each_other_go_on_without_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    closed_port = free_port()

    def lead_elsewhere(addresses: list[Any]) -> list[Any]:
        return [(family, host, closed_port) for family, host, _ in addresses]

    ranks = connected(2, lead_elsewhere, connect=partial(connect_ranks, connect_seconds=1.0))
    assert [peers.by_rank for peers in ranks] == [{}, {}]
    assert capsys.readouterr().err.count("a rank that dies or hangs will not be named") == 1
    for peers in ranks:
        peers.close()


def test_no_collective_gives_up_before_the_timeout_has_been_diagnosed() -> None:
    """Gloo's own limit is 30 minutes. A group of one rank waits for nobody."""
    pair, alone = (SimpleNamespace(size=lambda size=size: size) for size in (2, 1))
    limits: list[tuple[timedelta, object]] = []
    for timeout in (2 * 3600, 60):
        stacks.extend_collective_timeouts(timeout, [alone, pair], lambda *given: limits.append(given))
    assert limits == [
        (timedelta(seconds=2 * 3600) + stacks.TIMEOUT_MARGIN, pair),
        (distributed_c10d.default_pg_timeout, pair),
    ]


def calling(name: str) -> Callable[[Callable[[], None]], None]:
    """A function of a file called `name` that calls what it is given."""
    space: dict[str, Any] = {}
    exec(compile("def call(inside): inside()", f"/lib/torch/{name}", "exec"), space)
    call: Callable[[Callable[[], None]], None] = space["call"]
    return call


@pytest.mark.parametrize(
    ("files", "is_collective"),
    [
        (["distributed/distributed_c10d.py"], True),
        (["distributed/_functional_collectives.py", "_ops.py"], True),
        (["distributed/fsdp/_fully_shard/_fsdp_collectives.py", "optim/adamw.py"], False),
        (["distributed/c10d_logger.py", "distributed/distributed_c10d.py", "my_hook.py"], False),
        (["optim/adamw.py", "_ops.py"], False),
        ([], False),
    ],
)
def test_an_exception_is_a_collective_s_only_if_the_collective_raised_it(files: list[str], is_collective: bool) -> None:
    def fail() -> None:
        [][0]  # stands in for C++, which has no frame

    call = fail
    for name in reversed(files):
        call = partial(calling(name), call)
    with pytest.raises(IndexError) as caught:
        call()
    inside = last = caught.value.__traceback__
    while last is not None and last.tb_next is not None:
        inside, last = last, last.tb_next
    assert inside is not None
    inside.tb_next = None
    assert is_raised_in_collective(caught.value) is is_collective
