"""Run `replay suite`: train one model under each configuration, in its own processes, and judge the curves."""

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from actor_init.spec import UsageError
from replay.compare.plot import draw_curves
from replay.processes.child_job import ChildJob
from replay.processes.pool import RunTasks, Task, run_child
from replay.runlog.reader import PastRun
from replay.suite import text as suite_wording
from replay.suite.console import SuiteConsole
from replay.suite.loss_curve import curve_of
from replay.suite.outcome import NoCurve, Status, TrainingResult, outcomes
from replay.suite.plan import DDP, Planned, run_spec_of, spec_of_init_weights
from replay.suite.state import Suite
from replay.wording import in_flags

TERMINATED = 143


def run_suite(suite: Suite, run: RunTasks, plot: Path | None = None) -> int:
    """Run the suite and return 0 if every configuration that ran passed, else 1. Finished ones are not repeated.

    plot  file for a picture of the curves; None: none is drawn

    Raises UsageError, and leaves no folder, if no configuration can run.
    """
    console = SuiteConsole()
    console.say(suite_wording.header(suite))
    no_curves: dict[str, NoCurve] = {}
    wanted = [one for one in suite.plan if not one.reason and suite.curve(one.name) is None]
    try:
        with _sigterm_exits():
            if wanted and suite.spec.saves_init_weights and not suite.init_weights.exists():
                save_init_weights(suite, run)
                console.say(suite_wording.init_weights(suite))
            for number, one in enumerate(wanted):
                console.say(suite_wording.begins(one, suite.inputs_a_step))
                console.trained(number, len(wanted))
                if no_curve := train(suite, one, run):
                    no_curves[one.name] = no_curve
                console.say(suite_wording.ended(suite.curve(one.name), no_curve))
    except (KeyboardInterrupt, SystemExit):
        suite.write("interrupted", _results(training_results(suite, no_curves)))
        console.say(suite_wording.interrupted(suite))
        raise
    results = training_results(suite, no_curves)
    has_failed = any(one.status is Status.FAILED for one in results)
    suite.write("failed" if has_failed else "passed", _results(results))
    if plot is not None:
        draw_curves(plot, {one.planned.name: one.judgement.curve.losses for one in results if one.judgement})
    console.finish(suite_wording.table(results), suite_wording.verdict(suite, results))
    return 1 if has_failed else 0


def train(suite: Suite, one: Planned, run: RunTasks) -> NoCurve | None:
    """Train one configuration and write its curve, or return why there is none.

    Raises UsageError for what the reference configuration refuses, since all others would refuse it too.
    """
    begin = str(suite.init_weights) if suite.spec.saves_init_weights else suite.spec.init_weights
    spec = run_spec_of(
        one,
        replace(suite.spec, init_weights=begin),
        inputs=suite.inputs_for_all,
        num_inputs=suite.inputs.num_inputs,
        inputs_a_step=suite.inputs_a_step,
        loss=suite.inputs.loss,
        states=suite.states_of(one.name),
    )
    logs, output = suite.room_for(one.name)
    task = Task(
        job=ChildJob(spec=spec).logging_into(logs),
        num_processes=one.num_processes,
        output=output,
        limit=suite.spec.limit,
    )
    child = run_child(task, run)
    if error := child.error:
        is_refusal = child.is_refusal
        if is_refusal and one.name == DDP and suite.is_untouched:
            suite.discard()
            raise UsageError(error)
        return NoCurve(reason=error, is_refusal=is_refusal)
    try:
        curve = curve_of(PastRun.read(logs))
    except UsageError as error:
        return NoCurve(reason=in_flags(error))
    if len(curve.steps) != suite.spec.steps:
        return NoCurve(reason=f"its log has {len(curve.steps)} steps, not {suite.spec.steps}, see {output}")
    suite.write_curve(one.name, curve)
    return None


def save_init_weights(suite: Suite, run: RunTasks) -> None:
    """Write the weights with which all configurations begin. Raises UsageError if that fails."""
    spec = spec_of_init_weights(
        suite.spec, inputs=suite.inputs_for_all, loss=suite.inputs.loss, folder=suite.init_weights
    )
    logs, output = suite.room_for("init-weights")
    job = ChildJob(spec=spec).logging_into(logs)
    task = Task(job=job, num_processes=1, output=output, limit=suite.spec.limit)
    if error := run_child(task, run).error:
        raise UsageError(f"--save-init-weights: {error}")


def training_results(suite: Suite, no_curves: Mapping[str, NoCurve]) -> list[TrainingResult]:
    curves = {one.name: curve for one in suite.plan if (curve := suite.curve(one.name)) is not None}
    steps_an_epoch = suite.inputs.steps_an_epoch(suite.inputs_a_step)
    return outcomes(suite.plan, curves, no_curves, steps_an_epoch=steps_an_epoch)


def _results(results: Sequence[TrainingResult]) -> dict[str, Any]:
    return {one.planned.name: one.summary() for one in results}


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """Exit on SIGTERM, so that the running replay is ended: its own process group does not get the signal."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
