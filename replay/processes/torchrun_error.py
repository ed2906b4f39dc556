"""Have torchrun repeat this process's error at the end of what it prints when a process has failed."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

NOTICE_SECONDS = 3  # at most, from the end of a process by a signal to the message of the rank that caused it


def repeat_for_torchrun(message: str, *, is_cause: bool = True) -> None:
    """Write `message` where torchrun's agent looks for the error of a process; without torchrun do nothing.

    torchrun names the process of the earliest error as the root cause, and dates one without a file, such as a rank
    whose collective aborted, when it sees the end of it. The cause is therefore dated NOTICE_SECONDS before now.
    The file's format is that of torch.distributed.elastic.multiprocessing.errors.ErrorHandler, which itself can write
    tracebacks only and whose import takes seconds. The deepspeed launcher has no such file.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        error = {"message": message, "extraInfo": {"timestamp": str(int(time.time()) - NOTICE_SECONDS * is_cause)}}
        with suppress(OSError):  # torchrun then says less, and the message has been printed
            Path(path).write_text(json.dumps({"message": error}))
