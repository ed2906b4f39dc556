"""Watch a run: a thread in every rank notices a rank that died or hangs, names it, and ends all ranks.

What can happen to a rank, and how the other ranks learn of it:

    it fails (an exception, memory, sys.exit)   it reports it, after GRACE_SECONDS without news of a dead rank
    it is killed or crashes                     its connections close, and it did not say that it leaves
    a collective fails on it or aborts it       all are asked: another rank may have reached a different collective
    it receives SIGTERM                         it reports it, unless the launcher sent it because a rank died
    it stands still, or waits for a rank        no rank makes progress for --timeout seconds; all are asked, one named
    native code holds its Python                it does not answer; its watchdog in C writes the stacks and ends it

So an error that another rank's end caused, such as a connection closed by the peer, is never taken for the cause.
"""

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from actor_init.as_json import find_type_adapter, from_json, to_json
from actor_init.spec import UsageError
from actor_init.world import World
from replay.options.option_parsing import describe_error
from replay.runlog.writer import INTERRUPTED
from replay.watch.blame import (
    RankFailure,
    Sighting,
    report_dead_rank,
    report_departed_rank,
    report_failed_rank,
    report_hang,
    report_termination,
)
from replay.watch.progress import RankPosition, Tracker, read_last_position
from replay.watch.shutdown import Shutdown
from replay.watch.side_channel import Barrier, Message, Peers, connect_ranks
from replay.watch.stacks import (
    StackFile,
    count_collectives,
    has_aborted_in_collective,
    has_watchdog_fired,
    is_raised_in_collective,
    observe_threads,
)

TICK_SECONDS = 0.25
# A rank that has an error waits so long before it reports it. News that another rank died, which may have caused the
# error, arrive within this time.
GRACE_SECONDS = 1.0
# A rank that is asked has only to wake up a thread.
ANSWER_SECONDS = 0.75
# So many times --timeout may pass without progress while a rank compiles. Collectives wait longer: half an hour.
COMPILING_FACTOR = 5
# Python counts as held if no Python thread ran for this time beyond the timeout.
HELD_SECONDS = 1.5
# When another rank has left with an error, this rank's main thread gets so long to end with the same error.
LEAVE_SECONDS = 2.5
TERMINATED = 128 + signal.SIGTERM

MakeShutdown = Callable[[World, Path, StackFile, Peers], Shutdown]


class TerminationSignals:
    """While open, SIGTERM does not end the process but writes its number to `bell`. For the main thread only.

    Another thread reads the bell, since the main thread runs no Python signal handler while it is in a collective.
    """

    def __init__(self, bell: socket.socket) -> None:
        self._previous: tuple[Any, int] | None = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.signal(signal.SIGTERM, lambda *_: None)
            self._previous = handler, signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        if self._previous is not None:
            handler, wakeup_fd = self._previous
            signal.set_wakeup_fd(wakeup_fd)
            signal.signal(signal.SIGTERM, handler)


def make_message_readers() -> None:
    """Make the readers of what ranks send each other as JSON, each once in a process."""
    for kind in (RankPosition, Sighting, RankFailure):
        find_type_adapter(kind)


@contextmanager
def watch_run(
    world: World,
    folder: Path,
    timeout: float,
    *,
    show_traceback: bool = False,
    clock: Callable[[], float] = time.monotonic,
    tick_seconds: float = TICK_SECONDS,
    make_shutdown: MakeShutdown = Shutdown,
) -> Iterator["Watch"]:
    """Watch the code inside. An error that leaves it on one of several ranks ends them all."""
    watch = Watch(world, folder, timeout, clock=clock, tick_seconds=tick_seconds, make_shutdown=make_shutdown)
    try:
        yield watch
    except UsageError:
        watch.leave(2)
        raise
    except KeyboardInterrupt:
        watch.leave(INTERRUPTED)
        raise
    except (Exception, SystemExit) as error:
        if world.world_size > 1:
            if show_traceback:
                traceback.print_exception(error)
            watch.stop_all(error)
        watch.leave(1)
        raise
    else:
        watch.leave(0)


def judge_sightings(sightings: Sequence[Sighting], timeout: float, trouble: str = "") -> RankFailure | float:
    """Judge what ranks answered: the failure to report, or the seconds after which they are asked again.

    They are while any rank has made progress, or may be compiling.

    sightings  of all ranks; of one that did not answer no progress is known
    trouble    what was noticed, if not a lack of progress: then nothing is waited for
    """
    if trouble:
        return report_hang(sightings, trouble, "")
    idle = min(sighting.idle_seconds for sighting in sightings if sighting.answers)
    if idle < timeout:
        return timeout - idle
    # A compiler tells nothing of its progress, and on a busy machine a cold one takes minutes.
    limit = timeout * (COMPILING_FACTOR if any(sighting.is_compiling for sighting in sightings) else 1)
    if idle < limit:
        return timeout
    advice = f". If that is slow and not stuck, try: --timeout {10 * timeout:g}"
    return report_hang(sightings, f"no progress for {limit:g} s", advice)


class Watch:
    """One rank's view of all ranks. The main thread moves `tracker` and calls `meet`, `stop_all` and `leave`."""

    def __init__(
        self,
        world: World,
        folder: Path,
        timeout: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        tick_seconds: float = TICK_SECONDS,
        make_shutdown: MakeShutdown = Shutdown,
    ) -> None:
        """Connect this rank to all others; every rank calls this together.

        clock          in seconds; what --timeout is measured by
        tick_seconds   the time between two looks at what is known
        make_shutdown  makes what ends this rank when the run breaks off
        """
        self.world = world
        self.folder = folder
        self.timeout = timeout
        self._clock = clock
        self._tick_seconds = tick_seconds
        self.tracker = Tracker(folder, world.rank, count_collectives)
        self._stacks = StackFile(folder, world.rank)
        self._peers = connect_ranks(world)
        self._shutdown = make_shutdown(world, folder, self._stacks, self._peers)
        # What is known: the exit codes of ranks that left, the ranks that received SIGTERM, this rank's own error, and
        # ranks that died without being the cause. `_trouble` says what was noticed, if not a lack of progress.
        self._exit_codes: dict[int, int] = {}
        self._terminated: set[int] = set()
        self._error: str | None = None
        self._collective_failed = False
        self._dead: dict[int, Sighting] = {}
        self._trouble = ""
        # Until this time, news may arrive that explain what is known.
        self._grace_ends: float | None = None
        # When the other ranks were asked for a sighting, and what they answered.
        self._asked_at: float | None = None
        # They are not asked before this time: one of them was compiling.
        self._next_ask = 0.0
        self._answers: dict[int, Sighting] = {}
        self._progress = (0, 0, 0)
        self._progress_at = self._clock()
        self._barrier = Barrier({world.rank, *self._peers.by_rank})
        self._closing = False
        self._terminations = TerminationSignals(self._peers.bell)
        # Now, because the thread may need one at a time when this process can import nothing any more.
        make_message_readers()
        self._thread = threading.Thread(target=self._run, name="replay-watch", daemon=True)
        self._thread.start()

    def meet(self) -> None:
        """Wait for all ranks, without torch: its barrier could be matched with a collective of a rank's next pass."""
        self._barrier.mark_arrived(self.world.rank)
        self._peers.send({"kind": "arrived"})
        self._barrier.wait(self._tick_seconds)

    def stop_all(self, error: BaseException) -> NoReturn:
        """End all ranks because of this rank's `error`, or because of the failure that caused it."""
        self._collective_failed = is_raised_in_collective(error)
        self._error = describe_error(error)
        self._peers.ring()
        # The thread ends this process. Python handles Ctrl-C only between two joins.
        while self._thread.is_alive():
            self._thread.join(self._tick_seconds)
        os._exit(1)

    @contextmanager
    def postpone_shutdown(self) -> Iterator[None]:
        """Let this rank finish what is inside before it ends because of another rank's failure."""
        with self._shutdown.postpone_shutdown():
            yield

    def leave(self, exit_code: int) -> None:
        """Tell the others that this rank ends; they would take a silent end for a death."""
        self._closing = True
        self._peers.send({"kind": "left", "exit_code": exit_code})
        self._peers.ring()
        self._thread.join()
        self._terminations.close()
        self._peers.close()
        self._stacks.close()
        self.tracker.close()

    # The methods below run in the watch's thread.

    def _run(self) -> None:
        """Handle what arrives, and act on it every `tick_seconds`; the watchdog waits for the next turn of the loop."""
        try:
            while not self._closing:
                self._stacks.reset_watchdog(self.timeout + HELD_SECONDS)
                for rank, message in self._peers.receive(self._tick_seconds):
                    if rank is None:
                        self._handle_wake_up(message)
                    elif isinstance(message, dict):
                        self._handle_message(rank, message)
                    elif rank not in self._exit_codes and not self._closing:
                        self._handle_lost_rank(rank)
                if not self._closing:
                    self._act_on_news(self._clock())
        except Exception:
            traceback.print_exc()
            os._exit(1)

    def _handle_wake_up(self, byte: Any) -> None:
        if byte == signal.SIGTERM:
            self._terminated.add(self.world.rank)
            self._peers.send({"kind": "terminated"})
            self._begin_grace()

    def _handle_message(self, rank: int, message: Message) -> None:
        match message["kind"]:
            case "ask":
                self._peers.send({"kind": "seen", "seen": to_json(self._observe_self())}, to=rank)
            case "seen":
                self._answers[rank] = from_json(Sighting, message["seen"], source=f"the answer of rank {rank}")
            case "terminated":
                self._terminated.add(rank)
            case "arrived":
                self._barrier.mark_arrived(rank)
            case "writing" | "written":
                self._shutdown.note_writing(rank, message["kind"])
            case "left":
                self._exit_codes[rank] = message["exit_code"]
                if message["exit_code"]:
                    # The same error, or Ctrl-C, is about to end this rank's main thread too.
                    self._grace_ends = self._clock() + LEAVE_SECONDS
            case "ended":
                failure = from_json(RankFailure, message["failure"], source=f"the last word of rank {rank}")
                self._shutdown.end_after_report(message["first"], message["exit_code"], failure)

    def _begin_grace(self) -> None:
        if self._grace_ends is None:
            self._grace_ends = self._clock() + (GRACE_SECONDS if self._peers.by_rank else 0.0)

    def _act_on_news(self, now: float) -> None:
        """Act on what is known, if it is time: ask the others, judge their answers, or end the run."""
        tracker = self.tracker
        progress = (tracker.num_phase_changes, tracker.num_parts_done, sum(count_collectives().values()))
        # A rank that writes why it failed is about to say so. The others wait for it, and would report a hang instead.
        if progress != self._progress or self._shutdown.is_writing():
            self._progress, self._progress_at = progress, now
        if self._error is not None:
            self._begin_grace()
        if self._asked_at is not None:
            if set(self._peers.by_rank) <= set(self._answers) or now >= self._asked_at + ANSWER_SECONDS:
                self._judge(now)
        elif self._grace_ends is not None and now >= self._grace_ends:
            self._end_with_what_is_known(now)
        elif now - self._progress_at >= self.timeout and now >= self._next_ask:
            self._ask(now)

    def _end_with_what_is_known(self, now: float) -> None:
        """Report what ended the run, as no news will explain it any more; after a failed collective, ask the others."""
        for rank, code in self._exit_codes.items():
            if code:
                failure = report_departed_rank(rank, interrupted=code == INTERRUPTED)
                self._shutdown.report_and_end(failure, exit_code=code)
        if self._terminated:
            ranks = (self.world.rank, *self._peers.by_rank)
            positions = {rank: read_last_position(self.folder, rank) for rank in ranks}
            self._shutdown.report_and_end(report_termination(sorted(self._terminated), positions), exit_code=TERMINATED)
        assert self._error is not None
        if self._collective_failed and self._peers.by_rank:
            self._trouble = f"a collective failed on rank {self.world.rank} ({self._error})"
            self._ask(now)
        else:
            self._shutdown.report_and_end(report_failed_rank(self.world.rank, self.tracker.position, self._error))

    def _ask(self, now: float) -> None:
        self._asked_at = now
        self._answers = {}
        self._peers.send({"kind": "ask"})

    def _judge(self, now: float) -> None:
        """Judge the answers. If any rank made progress meanwhile, or compiles, all get another --timeout."""
        sightings = self._answers | self._dead | {self.world.rank: self._observe_self()}
        for rank in set(self._peers.by_rank) - set(self._answers):
            sightings[rank] = Sighting(rank=rank, position=read_last_position(self.folder, rank), answers=False)
        judgement = judge_sightings([sightings[rank] for rank in sorted(sightings)], self.timeout, self._trouble)
        if isinstance(judgement, RankFailure):
            self._shutdown.report_and_end(judgement)
        else:
            self._asked_at, self._next_ask = None, now + judgement

    def _handle_lost_rank(self, rank: int) -> None:
        """Handle a rank that ended without saying so: it died, unless its stack file says that a hang ended it."""
        position = read_last_position(self.folder, rank)
        if has_watchdog_fired(self.folder, rank):
            self._dead[rank] = Sighting(rank=rank, position=position, answers=False)
            self._trouble = f"no progress for {self.timeout:g} s"
        elif has_aborted_in_collective(self.folder, rank):
            self._dead[rank] = Sighting(rank=rank, position=position, in_collective=True, collective_failed=True)
            self._trouble = f"a collective aborted rank {rank}"
        else:
            self._shutdown.report_and_end(report_dead_rank(rank, position))
        self._ask(self._clock())

    def _observe_self(self) -> Sighting:
        threads = observe_threads(threading.get_ident())
        return Sighting(
            rank=self.world.rank,
            position=self.tracker.position,
            idle_seconds=self._clock() - self._progress_at,
            collectives=count_collectives(),
            num_unforeseen=self.tracker.count_new_collectives(),
            in_collective=threads.in_collective or self._collective_failed,
            collective_failed=self._collective_failed,
            waits_for_device=threads.waits_for_device,
            is_compiling=threads.is_compiling,
            standing_at=threads.line,
        )
