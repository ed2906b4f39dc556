"""Hand on what was typed where a room below wants what was resolved: mypy refuses each call but the first.

Nothing runs this file. mypy checks it with all others, and reports an ignore that it does not need.
"""

from typing import Any

from replay.options.resolved import ResolvedReplay
from replay.options.spec import ReplaySpec
from replay.profiling.profiler import profile_pass
from replay.runlog.writer import Logbook
from replay.runner import rounding_floor
from replay.runner.checkpoint import Saver
from replay.runner.replayer import Replayer
from replay.tracing.writer import TraceWriter
from replay.verdict.judge import judge
from replay.watch.progress import Tracker


# A line for each value that is handed on: an ignore is of one line.
def hand_on(resolved: ResolvedReplay, spec: ReplaySpec, other: Any) -> None:
    rounding_floor.make_fp32_variant(resolved, other)
    rounding_floor.make_fp32_variant(
        spec,  # type: ignore[arg-type]
        other,
    )
    Logbook.begin(
        other,
        spec,  # type: ignore[arg-type]
        facts=other,
        work=other,
        inputs=other,
        memory_kind=other,
        devices=other,
    )
    Replayer(
        spec,  # type: ignore[arg-type]
        other,
        other,
        other,
        other,
        other,
    )
    Saver(
        spec=spec,  # type: ignore[arg-type]
        source=other,
        world=other,
        log_folder=other,
        states=other,
        num_steps=other,
    )
    TraceWriter.open(
        other,
        spec,  # type: ignore[arg-type]
        other,
        other,
        other,
    )
    profile_pass(
        other,
        other,
        spec,  # type: ignore[arg-type]
        other,
        other,
    )
    judge(
        other,
        spec,  # type: ignore[arg-type]
    )
    Tracker(
        other,
        spec,  # type: ignore[arg-type]
    )
