"""Watch a run: a thread in every rank notices a rank that died or hangs, names it, and ends all ranks.

What can happen to a rank, and how the others hear of it:

    it fails (an exception, memory, sys.exit)   it says so itself, after GRACE_SECONDS without news of a death
    it is killed or crashes                     its connections close without a goodbye
    a collective fails on it or aborts it       all are asked: another rank may have reached a different collective
    it is sent SIGTERM                          it says so itself, unless a death is why the launcher sent it
    it stands still, or waits for a rank        no rank goes on for --timeout seconds; all are asked, one is named
    its Python is held by native code           it does not answer; its watchdog in C leaves the stacks and ends it

Errors that follow from another's end, as a connection closed by the peer, are thus never taken for the cause.
"""

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from actor_init.as_json import find_type_adapter, from_json, to_json
from actor_init.spec import UsageError
from actor_init.world import World
from replay.options.option_parsing import in_flags
from replay.output.text import join_lines
from replay.runlog.writer import INTERRUPTED
from replay.watch.blame import Failure, Sighting, died, failed, hung, left_alone, terminated
from replay.watch.progress import Position, Tracker, last_position
from replay.watch.shutdown import Ending
from replay.watch.side_channel import Meeting, Message, connected
from replay.watch.stacks import (
    StackFile,
    aborted_in_collective,
    collectives_entered,
    raised_in_collective,
    standing,
    was_held,
)

TICK_SECONDS = 0.25
GRACE_SECONDS = 1.0  # in which the news of a death overtakes the errors that come of it
ANSWER_SECONDS = 0.75  # for a thread that only has to wake up
HELD_SECONDS = 1.5  # beyond the timeout, after which Python counts as held
LEAVE_SECONDS = 2.5  # for a main thread to end as another rank's did
TERMINATED = 128 + signal.SIGTERM


class Terminations:
    """While open, SIGTERM does not end the process but writes its number to `bell`. For the main thread only.

    A thread reads the bell: in a collective the main thread runs no Python signal handler.
    """

    def __init__(self, bell: socket.socket) -> None:
        self._before: tuple[Any, int] | None = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.signal(signal.SIGTERM, lambda *_: None)
            self._before = handler, signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        if self._before is not None:
            handler, wakeup = self._before
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def watching(world: World, folder: Path, timeout: float, *, show_traceback: bool = False) -> Iterator["Watch"]:
    """Watch the code inside. An error that leaves it on one of several ranks ends them all."""
    watch = Watch(world, folder, timeout)
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


class Watch:
    """One rank's view of all ranks. The main thread moves `tracker` and calls `meet`, `stop_all` and `leave`."""

    def __init__(self, world: World, folder: Path, timeout: float) -> None:
        """Connect this rank to all others; every rank calls this together."""
        self.world = world
        self.folder = folder
        self.timeout = timeout
        self.tracker = Tracker(folder, world.rank, collectives_entered)
        self._stacks = StackFile(folder, world.rank)
        self._peers = connected(world)
        self._ending = Ending(world, folder, self._stacks, self._peers)
        self._left: dict[int, int] = {}  # ranks that have said goodbye, and their exit codes
        self._terminated: set[int] = set()
        self._error: str | None = None  # of this rank's main thread
        self._collective_failed = False
        self._grace_ends: float | None = None  # for news that would explain what is known
        self._trouble = ""  # what was noticed, if it is not that nothing goes on
        self._dead: dict[int, Sighting] = {}  # ranks whose end is not the cause
        self._asked: float | None = None
        self._answers: dict[int, Sighting] = {}
        self._progress = (0, 0, 0)
        self._since = time.monotonic()
        self._meeting = Meeting({world.rank, *self._peers.by_rank})
        self._closing = False
        self._terminations = Terminations(self._peers.bell)
        for kind in (Position, Sighting, Failure):
            find_type_adapter(kind)  # now: the thread may need it when this process can import nothing any more
        self._thread = threading.Thread(target=self._run, name="replay-watch", daemon=True)
        self._thread.start()

    def meet(self) -> None:
        """Wait for all ranks, outside torch: a barrier could meet a collective of a rank that has more passes."""
        self._meeting.arrived(self.world.rank)
        self._peers.send({"kind": "arrived"})
        self._meeting.wait(TICK_SECONDS)

    def stop_all(self, error: BaseException) -> NoReturn:
        """End all ranks because of this rank's `error`, or because of the failure that caused it."""
        self._collective_failed = raised_in_collective(error)
        self._error = f"{type(error).__name__}: {join_lines(in_flags(error))}"
        self._peers.ring()
        while self._thread.is_alive():  # it ends this process; Ctrl-C can come in between
            self._thread.join(TICK_SECONDS)
        os._exit(1)

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """Let this rank finish what is inside before it ends because of another rank's failure."""
        with self._ending.unbroken():
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

    # the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._stacks.still_here(self.timeout + HELD_SECONDS)
                for rank, message in self._peers.receive(TICK_SECONDS):
                    if rank is None:
                        self._hear_bell(message)
                    elif isinstance(message, dict):
                        self._hear(rank, message)
                    elif rank not in self._left and not self._closing:
                        self._lost(rank)
                if not self._closing:
                    self._look(time.monotonic())
        except Exception:
            traceback.print_exc()
            os._exit(1)

    def _hear_bell(self, byte: Any) -> None:
        if byte == signal.SIGTERM:
            self._terminated.add(self.world.rank)
            self._peers.send({"kind": "terminated"})
            self._begin_grace()

    def _hear(self, rank: int, message: Message) -> None:
        match message["kind"]:
            case "ask":
                self._peers.send({"kind": "seen", "seen": to_json(self._own_sighting())}, to=rank)
            case "seen":
                self._answers[rank] = from_json(Sighting, message["seen"], source=f"the answer of rank {rank}")
            case "terminated":
                self._terminated.add(rank)
            case "arrived":
                self._meeting.arrived(rank)
            case "writing" | "written":
                self._ending.heard(rank, message["kind"])
            case "left":
                self._left[rank] = message["exit_code"]
                if message["exit_code"]:  # the same error, or Ctrl-C, is on its way to this rank's main thread
                    self._grace_ends = time.monotonic() + LEAVE_SECONDS
            case "ended":
                failure = from_json(Failure, message["failure"], source=f"the last word of rank {rank}")
                self._ending.follow(message["first"], message["exit_code"], failure)

    def _begin_grace(self) -> None:
        if self._grace_ends is None:
            self._grace_ends = time.monotonic() + (GRACE_SECONDS if self._peers.by_rank else 0.0)

    def _look(self, now: float) -> None:
        """Act on what is known, if it is time: ask the others, judge their answers, or end the run."""
        tracker = self.tracker
        progress = (tracker.num_borders, tracker.num_parts_done, sum(collectives_entered().values()))
        if progress != self._progress:
            self._progress, self._since = progress, now
        if self._error is not None:
            self._begin_grace()
        if self._asked is not None:
            if set(self._peers.by_rank) <= set(self._answers) or now >= self._asked + ANSWER_SECONDS:
                self._judge(now)
        elif self._grace_ends is not None and now >= self._grace_ends:
            self._end_with_what_is_known(now)
        elif now - self._since >= self.timeout:
            self._ask(now)

    def _end_with_what_is_known(self, now: float) -> None:
        for rank, code in self._left.items():
            if code:
                self._ending.speak(left_alone(rank, interrupted=code == INTERRUPTED), exit_code=code)
        if self._terminated:
            positions = {r: last_position(self.folder, r) for r in (self.world.rank, *self._peers.by_rank)}
            self._ending.speak(terminated(sorted(self._terminated), positions), exit_code=TERMINATED)
        assert self._error is not None
        if self._collective_failed and self._peers.by_rank:
            self._trouble = f"a collective failed on rank {self.world.rank} ({self._error})"
            self._ask(now)
        else:
            self._ending.speak(failed(self.world.rank, self.tracker.position, self._error))

    def _ask(self, now: float) -> None:
        self._asked = now
        self._answers = {}
        self._peers.send({"kind": "ask"})

    def _judge(self, now: float) -> None:
        """Judge the answers. If any rank went on meanwhile, all get another --timeout."""
        seen = self._answers | self._dead | {self.world.rank: self._own_sighting()}
        for rank in set(self._peers.by_rank) - set(self._answers):
            seen[rank] = Sighting(rank=rank, position=last_position(self.folder, rank), answers=False)
        idle = min(sighting.idle_seconds for sighting in seen.values() if sighting.answers)
        if idle < self.timeout and not self._trouble:
            self._asked, self._since = None, now - idle
            return
        trouble, advice = self._trouble, ""
        if not trouble:
            trouble = f"no progress for {self.timeout:g} s"
            advice = f". If that is slow and not stuck, try: --timeout {10 * self.timeout:g}"
        self._ending.speak(hung([seen[rank] for rank in sorted(seen)], trouble, advice))

    def _lost(self, rank: int) -> None:
        """Handle a rank that is gone without a goodbye: it died, unless its files say that a hang ended it."""
        position = last_position(self.folder, rank)
        if was_held(self.folder, rank):
            self._dead[rank] = Sighting(rank=rank, position=position, answers=False)
            self._trouble = f"no progress for {self.timeout:g} s"
        elif aborted_in_collective(self.folder, rank):
            self._dead[rank] = Sighting(rank=rank, position=position, in_collective=True, collective_failed=True)
            self._trouble = f"a collective aborted rank {rank}"
        else:
            self._ending.speak(died(rank, position))
        self._ask(time.monotonic())

    def _own_sighting(self) -> Sighting:
        at = standing(threading.get_ident())
        return Sighting(
            rank=self.world.rank,
            position=self.tracker.position,
            idle_seconds=time.monotonic() - self._since,
            collectives=collectives_entered(),
            num_unforeseen=self.tracker.num_unforeseen(),
            in_collective=at.in_collective or self._collective_failed,
            collective_failed=self._collective_failed,
            waits_for_device=at.waits_for_device,
            standing_at=at.line,
        )
