"""Have torchrun repeat this process's error at the end of what it prints when a process has failed."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

NOTICE_SECONDS = 3  # at most, between the end of a process by a signal and the messages of other ranks about it


def repeat_for_torchrun(message: str, *, is_cause: bool = True) -> None:
    """Write `message` where torchrun's agent looks for the error of a process; without torchrun do nothing.

    torchrun names the process of the earliest error as the root cause, and dates one that leaves no file, killed by
    hand or by a collective that aborted, when it sees its end. So the cause is dated NOTICE_SECONDS before now, and
    what comes of another's end that much after.
    The file's format is that of torch.distributed.elastic.multiprocessing.errors.ErrorHandler, which itself can write
    tracebacks only and whose import takes seconds. The deepspeed launcher has no such file.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        date = int(time.time()) + (-NOTICE_SECONDS if is_cause else NOTICE_SECONDS)
        error = {"message": message, "extraInfo": {"timestamp": str(date)}}
        with suppress(OSError):  # torchrun then says less, and the message has been printed
            Path(path).write_text(json.dumps({"message": error}))
