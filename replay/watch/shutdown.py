"""End a run that broke off: one rank reports the failure, every rank writes its stacks, and no process stays."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from actor_init.as_json import to_json
from actor_init.world import World
from replay.processes.exit_code import repeat_for_torchrun
from replay.runlog.run_file import RUN_FILE, RunFailure, RunFile
from replay.runlog.writer import INTERRUPTED
from replay.watch.blame import Failure
from replay.watch.progress import position_file
from replay.watch.side_channel import Peers
from replay.watch.stacks import StackFile, write_flight_recorder

WRITING_SECONDS = 30.0  # for a rank to write what held its memory
PATIENCE_SECONDS = 1.5  # with ranks that leave no stack; the watchdog of one that is held strikes within it
FAILURE_FILE = "failure.txt"


class Ending:
    """Ends one rank when a run breaks off, by os._exit: closing a process group would wait for others."""

    def __init__(self, world: World, folder: Path, stacks: StackFile, peers: Peers) -> None:
        """Tell all ranks this one's host and process; every rank calls this together."""
        self.world = world
        self.folder = folder
        self.stacks = stacks
        self.peers = peers
        self._lasts = threading.Lock()  # held by the main thread over what an end must not break off
        self._writing: set[int] = set()  # other ranks that hold theirs
        self._processes: list[tuple[str, int]] = world.gather((socket.gethostname(), os.getpid()))

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """Do not end this rank while the block runs, for WRITING_SECONDS at most; the others wait for it."""
        with self._lasts:
            self.peers.send({"kind": "writing"})
            try:
                yield
            finally:
                self.peers.send({"kind": "written"})

    def heard(self, rank: int, kind: str) -> None:
        """Note if another rank is in its `unbroken`."""
        self._writing.add(rank) if kind == "writing" else self._writing.discard(rank)

    def speak(self, failure: Failure, *, exit_code: int = 1) -> NoReturn:
        """Report the failure on stderr, in failure.txt and run.json, unless another rank did; end with all ranks."""
        text = failure.text(self.folder)
        first = self.world.rank if failure.rank is None else failure.rank
        if claim_failure(self.folder, failure, text):
            sys.stdout.flush()
            print(text, file=sys.stderr, flush=True)
            self.peers.send({"kind": "ended", "first": first, "exit_code": exit_code, "failure": to_json(failure)})
        self._end(first, exit_code, text)

    def follow(self, first: int, exit_code: int, failure: Failure) -> NoReturn:
        """End because of a failure that another rank reported, and write it down if that rank could not do so here."""
        text = failure.text(self.folder)
        claim_failure(self.folder, failure, text)
        self._end(first, exit_code, text)

    def _end(self, first: int, exit_code: int, text: str) -> NoReturn:
        """Write the stacks and end. Rank `first` ends before the others, for launchers name the first to end."""
        self._lasts.acquire(timeout=WRITING_SECONDS)
        repeat_for_torchrun(text, is_cause=self.world.rank == first)
        self.stacks.write()
        write_flight_recorder(self.folder, self.world.rank, self.world.device)
        self.peers.send({"kind": "done"})
        began = time.monotonic()
        done: set[int] = set()
        while missing := self._missing(first, done):
            patience = PATIENCE_SECONDS + (WRITING_SECONDS if missing & self._writing else 0.0)
            if (left := began + patience - time.monotonic()) <= 0:
                break
            for rank, message in self.peers.receive(left):
                if rank is None or not isinstance(message, dict):
                    continue
                if message["kind"] in ("done", "left"):
                    done.add(rank)
                elif message["kind"] in ("writing", "written"):
                    self.heard(rank, message["kind"])
        for rank in set(self.peers.by_rank) - done:
            self._kill(rank)
        os._exit(exit_code)

    def _missing(self, first: int, done: set[int]) -> set[int]:
        return set(self.peers.by_rank) - done | {first} & set(self.peers.by_rank)

    def _kill(self, rank: int) -> None:
        host, process = self._processes[rank]
        if host == socket.gethostname():
            os.kill(process, signal.SIGKILL)


def claim_failure(folder: Path, failure: Failure, text: str) -> bool:
    """Write which rank and input ended a run into run.json, and `text` into failure.txt. Any rank may call this.

    False if another rank did so before: its failure may be why this one fails, and nothing is written. Where nodes
    share no disk, the first rank of each node writes, and run.json is on the node of rank 0.
    """
    try:
        with (folder / FAILURE_FILE).open("x", encoding="utf-8") as file:
            file.write(text + "\n")
    except FileExistsError:
        return False
    has_begun = (folder / RUN_FILE).is_file()
    if not has_begun and not position_file(folder, 0).is_file():
        return True  # rank 0 is on another node and shares no disk with this one
    position = failure.position
    named = RunFailure(
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
    replace(run, status=status, failure=named, exit_code=exit_code).write(folder)
    return True
