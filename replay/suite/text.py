"""Format a suite as text: what it trains, the progress of each configuration, the table of losses, the verdict."""

from collections.abc import Callable, Sequence
from pathlib import Path

from actor_init.spec import Dtype
from replay.report.text import Columns, Pairs, counted, gibibytes, milliseconds
from replay.suite.loss_curve import Curve, CurveComparison
from replay.suite.outcome import NoCurve, Status, TrainingResult
from replay.suite.plan import DDP, DEEPSPEED, Planned
from replay.suite.state import Suite


def header(suite: Suite) -> Pairs:
    spec, machine = suite.spec, suite.machine
    device = counted(machine.num_devices, "GPU") if machine.has_gpus else "a CPU, where processes stand in for GPUs"
    each = f"{counted(spec.steps, 'step')} of {counted(suite.inputs_a_step, 'input')}"
    return [
        ("suite", str(_shown(suite.folder))),
        ("inputs", f"{suite.inputs.said}; {each}, learning rate {spec.learning_rate:g}, {spec.dtype}"),
        ("device", device),
        *([("states", f"every {counted(spec.save_every, 'step')} in {suite.storage}")] if spec.save_every else []),
    ]


def init_weights(suite: Suite) -> Pairs:
    return [("weights", f"all begin with {_shown(suite.init_weights)}")]


def begins(one: Planned, inputs_a_step: int) -> Pairs:
    passes = counted(inputs_a_step // one.num_data_ranks, "pass")
    ranks = counted(one.num_data_ranks, "data rank")
    return [("training", f"{one.name}: {counted(one.num_processes, 'process')}, {ranks} x {passes} a step")]


def ended(curve: Curve | None, no_curve: NoCurve | None) -> Pairs:
    if no_curve is not None or curve is None:
        return [("", f"no curve: {no_curve.reason if no_curve else 'none was written'}")]
    return [("", f"loss {curve.losses[0]:.5f} to {curve.losses[-1]:.5f}")]


def interrupted(suite: Suite) -> Pairs:
    done = [one.name for one in suite.plan if suite.curve(one.name) is not None]
    return [("finished", ", ".join(done) or "none"), *_go_on(suite)]


def _go_on(suite: Suite) -> Pairs:
    return [("go on", f"replay suite --continue {_shown(suite.folder)}")]


def table(outcomes: Sequence[TrainingResult]) -> Columns:
    """Return a row per configuration; differences are of a step's loss, from the same step under ddp and deepspeed."""
    curves: list[tuple[str, Callable[[CurveComparison], str]]] = [
        ("initial", lambda one: f"{one.curve.losses[0]:.5f}"),
        ("final", lambda one: f"{one.curve.losses[-1]:.5f}"),
        ("min", lambda one: f"{min(one.curve.losses):.5f}"),
        ("mean", lambda one: f"{one.curve.mean:.5f}"),
        ("initial diff", lambda one: f"{one.from_ddp.points[0].difference:.2g}" if one.from_ddp else "-"),
        ("max diff", lambda one: f"{one.from_ddp.max_difference:.2g}" if one.from_ddp else "-"),
        ("mean diff", lambda one: f"{one.from_ddp.mean_difference:.2g}" if one.from_ddp else "-"),
        ("from deepspeed", lambda one: f"{one.from_deepspeed.max_relative:.2%}" if one.from_deepspeed else "-"),
        ("step ms", lambda one: milliseconds(one.curve.seconds_a_step)),
        ("peak GiB", lambda one: gibibytes(one.curve.peak_bytes)),
    ]
    return {
        "configuration": [one.planned.name for one in outcomes],
        "ranks": [str(one.planned.num_processes) if one.judgement else "-" for one in outcomes],
        **{title: [cell(one.judgement) if one.judgement else "-" for one in outcomes] for title, cell in curves},
        "result": [one.status.value for one in outcomes],
    }


def verdict(suite: Suite, outcomes: Sequence[TrainingResult]) -> Pairs:
    pairs: Pairs = []
    for one in outcomes:
        reasons = one.judgement.complaints if one.judgement else [one.reason]
        pairs += [(one.status.value, f"{one.planned.name}: {reason}") for reason in reasons]
    if any(one.status is Status.FAILED and not one.judgement for one in outcomes):
        pairs += _go_on(suite)
    standard = [one for one in outcomes if one.planned.configuration.is_standard]
    passed = [one for one in standard if one.status is Status.PASSED]
    has_failed = any(one.status is Status.FAILED for one in outcomes)
    text = f"{len(passed)} of {len(standard)} standard configurations"
    if not has_failed:
        text += ": each loss falls, and none is further from the others than its bound"
    judgements = [one.judgement for one in outcomes if one.judgement]
    if suite.spec.dtype is not Dtype.FP32 and any(one.beyond and not one.faults for one in judgements):
        pairs.append(("note", f"a large model's rounding in {suite.spec.dtype} is near the bounds. Try: --dtype fp32"))
    for one in outcomes:
        if one.planned.name in (DDP, DEEPSPEED) and not one.judgement:
            pairs.append(("note", f"{one.planned.name} has no curve, so none was compared with it"))
    return [*pairs, ("failed" if has_failed else "passed", text), ("log", str(_shown(suite.folder)))]


def _shown(folder: Path) -> Path:
    """Return the path relative to the current folder, if it is below it."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
