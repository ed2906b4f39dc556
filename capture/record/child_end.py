"""Act at the end of a process that multiprocessing has started, as `atexit` does in others."""

import multiprocessing
from collections.abc import Callable
from multiprocessing import util


def at_end_of_child(action: Callable[[], object], *, order: int) -> None:
    """Call `action` when this process ends, if multiprocessing started it: that calls nothing of `atexit`.

    order  the highest comes first
    """
    if multiprocessing.parent_process() is not None:
        util.Finalize(None, action, exitpriority=order)
