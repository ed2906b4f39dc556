"""Say an error of the command line in one line, on the screen and to torchrun, and end with its exit code.

The exit code of a replay that ran, by its failed passes and its verdict, comes from `replay/runner/exit_code.py`.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from actor_init.spec import UsageError
from replay.options.option_parsing import describe_error, format_error_with_flags

HEAD_START_SECONDS = 3.0
# Other ranks report the end of a process by a signal within this time.
NOTICE_SECONDS = 3


def run_to_exit_code(
    action: Callable[[], int], *, show_traceback: bool = False, head_start: float = HEAD_START_SECONDS
) -> int:
    """Run the action. A usage error is one line on stderr and exit code 2, any other error 1, Ctrl-C 130.

    head_start  seconds that rank 0 has to report a usage error before other ranks do
    """
    try:
        return int(action())
    except UsageError as error:
        # Rank 0 reports an error that all ranks share. The launcher then ends the others, before they repeat it.
        if read_own_rank() > 0:
            time.sleep(head_start)
        if show_traceback:
            traceback.print_exception(error)
        say(format_error_with_flags(error))
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
        else:
            say(f"{describe_error(error)}. --traceback shows where")
        return 1


def say(message: str) -> None:
    speaker = f"rank {read_own_rank()}: " if read_own_rank() > 0 else ""
    print(f"replay: {speaker}{message}", file=sys.stderr, flush=True)
    repeat_for_torchrun(f"replay: {speaker}{message}")


def read_own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


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
        # Without the file torchrun says less, but the message itself has been printed.
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": error}))
