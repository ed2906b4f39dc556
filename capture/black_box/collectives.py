"""Tell which collectives a rank has entered, and which one was its last: torch's flight recorder of collectives knows.

Of a process that is gone it is in the dump that NCCL's watchdog leaves before it ends its process. That is never
unpickled.
"""

import _thread
import contextlib
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from capture.file_format.micro_batch import CaptureError
from capture.file_format.safe_unpickler import PickleReader

MAX_TRACE_SECONDS = 1.0  # that the flight recorder of the process groups may take to answer
MAX_DUMP_BYTES = 64 * 2**20


def count_collectives() -> dict[str, int]:
    """Count the collectives that this rank has entered, by the name of the process group; empty where torch differs."""
    counted: dict[str, int] = {}
    with contextlib.suppress(Exception):
        groups: Any = torch.distributed.distributed_c10d._world.pg_names
        for group in list(groups):
            if group.size() > 1:
                counted[str(group.group_name)] = int(group._get_sequence_number_for_group())
    return counted


def find_last_collective() -> str:
    """Ask torch's flight recorder of collectives (NCCL's) for the last one of each process group.

    Empty where it keeps none. It is asked in a thread: a driver that hangs may not let it answer.
    """
    found: list[str] = []
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):
            known: Any = torch._C._distributed_c10d
            for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
                if not found and hasattr(known, name):
                    found.append(describe_trace(json.loads(getattr(known, name)())))
                    found[:] = [text for text in found if text]
        answered.set()

    if "torch._C._distributed_c10d" in sys.modules and torch.distributed.is_initialized():
        _thread.start_new_thread(ask, ())
        answered.wait(MAX_TRACE_SECONDS)
    return "".join(found[:1])


def describe_trace(trace: Mapping[str, Any]) -> str:
    """Describe each process group's last collective in a dump: `all_reduce 12 of default_pg, [4] Float, started`."""
    last: dict[str, Mapping[str, Any]] = {}
    for entry in trace.get("entries", ()):
        if not entry.get("is_p2p"):
            last[":".join(map(str, entry.get("process_group", ())))] = entry
    return "; ".join(_described_entry(entry) for entry in last.values())[:2000]


def _described_entry(entry: Mapping[str, Any]) -> str:
    group = [str(part) for part in entry.get("process_group", ())]
    name = str(entry.get("profiling_name", "")).partition(":")[2] or str(entry.get("profiling_name", ""))
    sizes = " ".join(f"[{', '.join(map(str, size))}]" for size in entry.get("input_sizes", ()))
    kinds = " ".join(dict.fromkeys(map(str, entry.get("input_dtypes", ()))))
    parts = [f"{name} {entry.get('collective_seq_id')} of {group[-1] if group else 'a group'}"]
    parts += [text for text in (f"{sizes} {kinds}".strip(), str(entry.get("state", ""))) if text]
    return ", ".join(parts)


class _DumpReader(PickleReader):
    """Reads plain data in which lists are referred to twice, as torch writes it; nobody walks the result."""

    max_instructions = 4_000_000
    max_text_bytes = MAX_DUMP_BYTES

    def recall(self, index: int) -> Any:
        if index not in self.memo:
            raise self.error("a reference to a value that was not there before")
        return self.memo[index]


def find_last_collective_in_dump(rank: int, prefix: str | None, *, after: float) -> str:
    """Describe the last collective of each group in this rank's dump; empty without one that is newer than `after`.

    prefix  of the dump's name, as the job had set it; None: torch's own, in the home folder or in /tmp
    after   seconds since 1970
    """
    prefixes = [prefix] if prefix else [str(Path.home() / ".cache/torch/nccl_trace_rank_"), "/tmp/nccl_trace_rank_"]
    for one in prefixes:
        path = Path(f"{one}{rank}")
        try:
            facts = path.stat()
            if facts.st_mtime < after or facts.st_size > MAX_DUMP_BYTES or facts.st_uid != os.getuid():
                continue
            trace = _DumpReader(memoryview(path.read_bytes()), 0, path.name, None, None).run()
            if isinstance(trace, dict) and (text := describe_trace(trace)):
                return text
        except (OSError, CaptureError, AttributeError, TypeError, ValueError):
            continue
    return ""
