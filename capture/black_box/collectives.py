"""Tell how many collectives a rank has entered, and which one was its last.

torch's flight recorder of collectives knows the last one. NCCL's watchdog writes a dump of it before it ends a process:
for a process that is gone, the dump is read, and never unpickled.
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

# How long torch's flight recorder of collectives may take to answer.
MAX_TRACE_SECONDS = 1.0
MAX_DUMP_BYTES = 64 * 2**20


def count_collectives() -> dict[str, int]:
    """Count the collectives that this rank has entered, by the process group's name; empty if torch cannot tell."""
    counts: dict[str, int] = {}
    # The attributes are private: other versions of torch may lack them.
    with contextlib.suppress(Exception):
        groups: Any = torch.distributed.distributed_c10d._world.pg_names
        for group in list(groups):
            if group.size() > 1:
                counts[str(group.group_name)] = int(group._get_sequence_number_for_group())
    return counts


def find_last_collective() -> str:
    """Ask torch's flight recorder of collectives (NCCL's) for the last one of each process group.

    Empty where it keeps none. It is asked in a thread of its own: a driver that hangs may not let it answer.
    """
    texts: list[str] = []
    has_answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):
            c10d: Any = torch._C._distributed_c10d
            # Versions of torch differ in the name of the function.
            for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
                if not texts and hasattr(c10d, name) and (text := describe_trace(json.loads(getattr(c10d, name)()))):
                    texts.append(text)
        has_answered.set()

    if "torch._C._distributed_c10d" in sys.modules and torch.distributed.is_initialized():
        # threading.Thread would wait for the thread to start, and take locks that a signal may have interrupted.
        _thread.start_new_thread(ask, ())
        has_answered.wait(MAX_TRACE_SECONDS)
    return "".join(texts[:1])


def describe_trace(trace: Mapping[str, Any]) -> str:
    """Describe each process group's last collective in a dump: `all_reduce 12 of default_pg, [4] Float, started`."""
    last_by_group: dict[str, Mapping[str, Any]] = {}
    for collective in trace.get("entries", ()):
        if not collective.get("is_p2p"):
            last_by_group[":".join(map(str, collective.get("process_group", ())))] = collective
    return "; ".join(_describe_collective(collective) for collective in last_by_group.values())[:2000]


def _describe_collective(collective: Mapping[str, Any]) -> str:
    # The id of a process group, and its name.
    group = [str(part) for part in collective.get("process_group", ())]
    # Such as `nccl:all_reduce`.
    profiling_name = str(collective.get("profiling_name", ""))
    name = profiling_name.partition(":")[2] or profiling_name
    sizes = " ".join(f"[{', '.join(map(str, size))}]" for size in collective.get("input_sizes", ()))
    dtypes = " ".join(dict.fromkeys(map(str, collective.get("input_dtypes", ()))))
    parts = [f"{name} {collective.get('collective_seq_id')} of {group[-1] if group else 'a group'}"]
    parts += [text for text in (f"{sizes} {dtypes}".strip(), str(collective.get("state", ""))) if text]
    return ", ".join(parts)


class _DumpReader(PickleReader):
    """Reads plain data in which lists are referred to more than once, as torch writes it.

    A capture is refused for them: whoever walks it would meet more than the file holds. Nobody walks a dump.
    """

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
    for path_prefix in prefixes:
        path = Path(f"{path_prefix}{rank}")
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
