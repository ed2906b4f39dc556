"""Run `replay suite`: train one model under each configuration, in its own processes, and judge the curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from actor_init.spec import UsageError
from replay.campaign.campaign import until_interrupted
from replay.campaign.executor import Executor, executor
from replay.commands.suite.console import SuiteConsole
from replay.commands.suite.folder import Suite
from replay.commands.suite.loss_curve import Curve
from replay.commands.suite.outcome import NoCurve, Status, TrainingResult, outcomes
from replay.commands.suite.plan import DDP, Planned, SuiteSpec, num_ranks_of
from replay.comparison.plot import check_plot, draw_curves
from replay.options.ray_options import RayOptions
from replay.processes.limits import RunLimits
from replay.runlog.writer import INTERRUPTED


def begin(spec: SuiteSpec, logs: Path, words: Sequence[str], ray: RayOptions | None, plot: Path | None) -> int:
    """Run a suite, and return the exit code: 0 if every configuration that ran passed.

    words  options of the command line
    plot   file for a picture of the curves; None: none is drawn

    Raises UsageError, and leaves no folder, if no configuration can run.
    """
    if plot is not None:
        check_plot(plot)
    with executor(ray, num_ranks_of(spec)) as where:
        return _run(Suite.begin(spec, logs, where, words=words), where, plot)


def go_on(folder: Path, ray: RayOptions | None, plot: Path | None) -> int:
    """Train the configurations of a suite that have no curve yet, and judge all of them.

    Raises UsageError if there is no such suite, or if it was begun on another machine or with other versions.
    """
    if plot is not None:
        check_plot(plot)
    suite = Suite.read(folder)
    with executor(ray, num_ranks_of(suite.spec)) as where:
        suite.campaign.refuse_elsewhere(where, map(suite.job, suite.runnable))
        return _run(suite, where, plot)


def _run(suite: Suite, where: Executor, plot: Path | None) -> int:
    limits = RunLimits(each=suite.spec.run_limit, total=None, at_once=None)
    suite.campaign.open(where, limits, storage=suite.storage)
    console = SuiteConsole(suite)
    curves = suite.curves
    missing = [training for training in suite.runnable if training.name not in curves]
    with until_interrupted() as interruption:
        if missing and suite.spec.save_init_weights:
            _save_init_weights(suite, console)
        for number, training in enumerate(missing):
            console.begins(training, number, len(missing))
            curves[training.name] = _train(suite, training, is_first=not curves)
            console.ended(curves[training.name])
    results = _results(suite, curves)
    has_failed = any(result.status is Status.FAILED for result in results)
    status = "interrupted" if interruption.happened else "failed" if has_failed else "passed"
    suite.write(status, {result.planned.name: result.summary() for result in results})
    if interruption.happened:
        console.interrupted(curves)
        return INTERRUPTED
    if plot is not None:
        judged = {result.planned.name: result.judgement for result in results if result.judgement}
        draw_curves(plot, {name: judgement.curve.losses for name, judgement in judged.items()})
    console.finish(results)
    return 1 if has_failed else 0


def _save_init_weights(suite: Suite, console: SuiteConsole) -> None:
    """Write the weights with which all configurations begin, unless they are there. Raises UsageError if that fails."""
    if suite.init_weights.exists():
        return
    suite.campaign.forget(suite.job_of_init_weights)
    if error := suite.campaign.run(suite.job_of_init_weights).error:
        raise UsageError(f"--save-init-weights: {error}")
    console.wrote_init_weights()


def _train(suite: Suite, training: Planned, *, is_first: bool) -> Curve | NoCurve:
    """Train one configuration.

    Raises UsageError for what the reference configuration refuses, since all others would refuse it too.
    """
    child = suite.campaign.run(suite.job(training))
    if is_first and training.name == DDP and child.is_refusal:
        error = child.error
        suite.discard()
        raise UsageError(error)
    curve = suite.curve_after(training, child)
    suite.copy_out()
    return curve


def _results(suite: Suite, curves: Mapping[str, Curve | NoCurve]) -> list[TrainingResult]:
    return outcomes(suite.plan, curves, steps_an_epoch=suite.inputs.steps_an_epoch(suite.inputs_a_step))
