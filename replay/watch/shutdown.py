"""End a run that broke off: one rank reports the failure, every rank writes its stacks, and no process stays."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from actor_init.as_json import to_json
from actor_init.world import World
from replay.processes.error_reports import repeat_for_torchrun
from replay.runlog.run_file import RUN_FILE, RunFailure, RunFile
from replay.runlog.writer import INTERRUPTED
from replay.watch.blame import RankFailure
from replay.watch.progress import position_path
from replay.watch.side_channel import Peers
from replay.watch.stacks import StackFile, write_flight_recorder

# How long a rank may take to write what held its memory.
WRITING_SECONDS = 30.0
# How long to wait for the other ranks' stacks. The watchdog of a rank whose Python is held ends it within this time.
PATIENCE_SECONDS = 1.5
FAILURE_FILE = "failure.txt"


class Shutdown:
    """Ends one rank when a run breaks off, by os._exit, since closing a process group would wait for other ranks."""

    def __init__(
        self,
        world: World,
        folder: Path,
        stacks: StackFile,
        peers: Peers,
        *,
        clock: Callable[[], float] = time.monotonic,
        end_process: Callable[[int], NoReturn] = os._exit,
        kill_process: Callable[[int, int], None] = os.kill,
        patience_seconds: float | None = None,
    ) -> None:
        """Tell all ranks this one's host and process; every rank calls this together.

        clock             in seconds
        end_process       ends this process with an exit code
        kill_process      sends another process of this host a signal
        patience_seconds  how long to wait for the other ranks' stacks; None: PATIENCE_SECONDS
        """
        self.world = world
        self.folder = folder
        self.stacks = stacks
        self.peers = peers
        self._clock = clock
        self._end_process = end_process
        self._kill_process = kill_process
        self._patience_seconds = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        # The main thread holds the lock while it writes what a shutdown must not cut off. The watch's thread, which
        # ends the process, acquires it first. `_writing` names the other ranks that hold their lock.
        self._writing_lock = threading.Lock()
        self._writing_since: float | None = None
        self._writing: set[int] = set()
        self._processes: list[tuple[str, int]] = world.gather((socket.gethostname(), os.getpid()))

    @contextmanager
    def postpone_shutdown(self) -> Iterator[None]:
        """Do not end this rank while the block runs, for WRITING_SECONDS at most; the other ranks wait for it."""
        with self._writing_lock:
            self.peers.send({"kind": "writing"})
            self._writing_since = self._clock()
            try:
                yield
            finally:
                self._writing_since = None
                self.peers.send({"kind": "written"})

    def is_writing(self) -> bool:
        """Is this rank writing what a shutdown must not cut off, for no longer than WRITING_SECONDS?"""
        since = self._writing_since
        return since is not None and self._clock() - since < WRITING_SECONDS

    def note_writing(self, rank: int, kind: str) -> None:
        """Note that another rank has begun or finished writing what a shutdown must not cut off."""
        if kind == "writing":
            self._writing.add(rank)
        else:
            self._writing.discard(rank)

    def report_and_end(self, failure: RankFailure, *, exit_code: int = 1) -> NoReturn:
        """Report the failure on stderr, in failure.txt and run.json, unless another rank did; end with all ranks."""
        text = failure.text(self.folder)
        first = self.world.rank if failure.rank is None else failure.rank
        if claim_failure(self.folder, failure, text):
            sys.stdout.flush()
            print(text, file=sys.stderr, flush=True)
            self.peers.send({"kind": "ended", "first": first, "exit_code": exit_code, "failure": to_json(failure)})
        self._end(first, exit_code, text)

    def end_after_report(self, first: int, exit_code: int, failure: RankFailure) -> NoReturn:
        """End because of a failure that another rank reported, and write it down if that rank could not do so here."""
        text = failure.text(self.folder)
        claim_failure(self.folder, failure, text)
        self._end(first, exit_code, text)

    def _end(self, first: int, exit_code: int, text: str) -> NoReturn:
        """Write the stacks and end.

        Launchers name the first process that ends as the cause, so the others wait until rank `first` has ended. A
        rank that does not write its stacks in time is killed, if it is on this host.
        """
        self._writing_lock.acquire(timeout=WRITING_SECONDS)
        repeat_for_torchrun(text, is_cause=self.world.rank == first)
        self.stacks.write()
        write_flight_recorder(self.folder, self.world.rank, self.world.device)
        self.peers.send({"kind": "done"})
        began = self._clock()
        done: set[int] = set()
        while unfinished := self._find_unfinished_ranks(first, done):
            patience = self._patience_seconds + (WRITING_SECONDS if unfinished & self._writing else 0.0)
            if (remaining := began + patience - self._clock()) <= 0:
                break
            for rank, message in self.peers.receive(remaining):
                if rank is None or not isinstance(message, dict):
                    continue
                if message["kind"] in ("done", "left"):
                    done.add(rank)
                elif message["kind"] in ("writing", "written"):
                    self.note_writing(rank, message["kind"])
        for rank in set(self.peers.by_rank) - done:
            self._kill(rank)
        self._end_process(exit_code)

    def _find_unfinished_ranks(self, first: int, done: set[int]) -> set[int]:
        """Find the connected ranks that have not written their stacks, and rank `first` until its connection closes."""
        connected = set(self.peers.by_rank)
        return (connected - done) | ({first} & connected)

    def _kill(self, rank: int) -> None:
        host, process = self._processes[rank]
        if host == socket.gethostname():
            self._kill_process(process, signal.SIGKILL)


def claim_failure(folder: Path, failure: RankFailure, text: str) -> bool:
    """Write which rank and input ended a run into run.json, and `text` into failure.txt. Any rank may call this.

    Return False if another rank did so before: its failure may be why this rank fails, and nothing is written. Where
    nodes share no disk, the first rank of each node writes, and run.json is on the node of rank 0.
    """
    try:
        with (folder / FAILURE_FILE).open("x", encoding="utf-8") as file:
            file.write(text + "\n")
    except FileExistsError:
        return False
    has_begun = (folder / RUN_FILE).is_file()
    if not has_begun and not position_path(folder, 0).is_file():
        # Rank 0 is on another node, and shares no disk with this one.
        return True
    position = failure.position
    run_failure = RunFailure(
        kind=failure.kind,
        rank=failure.rank,
        index=None if position is None else position.index,
        source=None if position is None else position.source,
        phase=None if position is None else position.phase,
        error=failure.error,
        ranks=to_json(failure.sightings),
    )
    status, exit_code = ("interrupted", INTERRUPTED) if failure.kind == "interrupted" else ("failed", 1)
    run = RunFile.read(folder) if has_begun else RunFile(status=status)
    replace(run, status=status, failure=run_failure, exit_code=exit_code).write(folder)
    return True
