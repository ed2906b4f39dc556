"""Read the dump of NCCL's flight recorder that a watchdog leaves before it ends its process. It is never unpickled."""

import os
from pathlib import Path
from typing import Any

from capture.file_format.micro_batch import CaptureError
from capture.file_format.safe_unpickler import PickleReader
from capture.record.stacks import described_trace

MAX_DUMP_BYTES = 64 * 2**20


class _DumpReader(PickleReader):
    """Reads plain data in which lists are referred to twice, as torch writes it; nobody walks the result."""

    max_instructions = 4_000_000
    max_text_bytes = MAX_DUMP_BYTES

    def recall(self, index: int) -> Any:
        if index not in self.memo:
            raise self.error("a reference to a value that was not there before")
        return self.memo[index]


def last_collective_in_dump(rank: int, prefix: str | None, *, after: float) -> str:
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
            if isinstance(trace, dict) and (text := described_trace(trace)):
                return text
        except (OSError, CaptureError, AttributeError, TypeError, ValueError):
            continue
    return ""
