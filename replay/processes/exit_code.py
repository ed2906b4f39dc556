"""Turn what an action of the command line returns or raises into an exit code, and say an error in one line."""

import os
import sys
import time
import traceback
from collections.abc import Callable

from actor_init.spec import UsageError
from replay.processes.torchrun_error import repeat_for_torchrun
from replay.report.text import one_line
from replay.wording import in_flags

HEAD_START_SECONDS = 3.0


def exit_code_of(action: Callable[[], int], *, show_traceback: bool = False) -> int:
    """Run the action. A usage error is one line on stderr and exit code 2, any other error 1, Ctrl-C 130."""
    try:
        return int(action())
    except UsageError as error:
        if own_rank() > 0:  # rank 0 reports an error that all ranks share; the launcher then ends the others
            time.sleep(HEAD_START_SECONDS)
        if show_traceback:
            traceback.print_exception(error)
        say(in_flags(error))
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
        else:
            say(f"{type(error).__name__}: {one_line(in_flags(error))}. --traceback shows where")
        return 1


def say(message: str) -> None:
    where = f"rank {own_rank()}: " if own_rank() > 0 else ""
    print(f"replay: {where}{message}", file=sys.stderr, flush=True)
    repeat_for_torchrun(f"replay: {where}{message}")


def own_rank() -> int:
    return int(os.environ.get("RANK", "0"))
