"""Read what torch.compile did in a pass from dynamo's own metrics: its seconds, and the guards that failed.

compilations.begin()
...  # the pass
compilations.end()  # its seconds, and: forward: 0/0: tensor 'hidden_states' size mismatch at index 1. expected 5
"""

import re
import sys

from replay.report.text import one_line
from replay.runlog.records import CompilationSection

CODE = re.compile(r"\s+# .*")  # behind a guard: the line of code that made it, and the stack there


def begin() -> None:
    """Forget what was compiled before."""
    if (utils := sys.modules.get("torch._dynamo.utils")) is not None:
        utils.clear_compilation_metrics()


def end() -> CompilationSection:
    """Return the seconds of compiling since `begin`, and the function and the guard of each graph made again.

    Dynamo keeps the last 64 graphs; a pass that compiles more has more seconds than are returned.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    metrics = [] if utils is None else utils.get_compilation_metrics()
    seconds = sum(one.duration_us or 0 for one in metrics) / 1e6
    named = [(one.co_name, getattr(one, "recompile_reason", None)) for one in metrics]  # torch 2.6 does not say it
    reasons = [f"{name}: {CODE.sub('', one_line(reason))}" for name, reason in named if reason]
    return CompilationSection(compile_seconds=seconds, recompilations=reasons)
