"""Print the progress and the answer of `replay suite`: a line or two a training, the table of losses, the verdict."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from actor_init.spec import Dtype
from capture.progress_bar import ProgressBar
from replay.commands.suite.folder import Suite
from replay.commands.suite.loss_curve import Curve, CurveComparison, NoCurve, Status, TrainingResult
from replay.commands.suite.plan import DDP, DEEPSPEED, Planned
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import Columns, Pairs, counted, gibibytes, milliseconds


class SuiteConsole:
    def __init__(self, suite: Suite, file: IO[str] | None = None) -> None:
        """Print what is trained, on which inputs and device."""
        self._out = open_console(file)
        self._bar = ProgressBar(self._out.file)
        self._suite = suite
        self._say(_header(suite))

    def wrote_init_weights(self) -> None:
        self._say([("weights", f"all begin with {_shown(self._suite.init_weights)}")])

    def begins(self, training: Planned, num_done: int, num_all: int) -> None:
        """Say which configuration is trained now; the bar shows how many of those to train are done."""
        passes = counted(self._suite.inputs_a_step // training.num_data_ranks, "pass")
        ranks = counted(training.num_data_ranks, "data rank")
        said = f"{training.name}: {counted(training.num_processes, 'process')}, {ranks} x {passes} a step"
        self._say([("training", said)])
        self._bar.show(num_done, num_all, "configurations trained")

    def ended(self, curve: Curve | NoCurve) -> None:
        if isinstance(curve, NoCurve):
            self._say([("", f"no curve: {curve.reason}")])
        else:
            self._say([("", f"loss {curve.losses[0]:.5f} to {curve.losses[-1]:.5f}")])

    def interrupted(self, trained: Mapping[str, Curve | NoCurve]) -> None:
        done = [training.name for training in self._suite.plan if isinstance(trained.get(training.name), Curve)]
        self._say([("finished", ", ".join(done) or "none"), *_go_on(self._suite)])

    def finish(self, results: Sequence[TrainingResult]) -> None:
        """Print the answer; see docs/suite.md."""
        self._bar.clear()
        print_line(self._out)
        print_table(self._out, _table(results))
        print_line(self._out)
        print_pairs(self._out, _verdict(self._suite, results))

    def _say(self, lines: Pairs) -> None:
        self._bar.clear()
        print_pairs(self._out, lines)


def _header(suite: Suite) -> Pairs:
    spec, machine = suite.spec, suite.campaign.machine
    device = counted(machine.num_devices, "GPU") if machine.has_gpus else "a CPU, where processes stand in for GPUs"
    each = f"{counted(spec.steps, 'step')} of {counted(suite.inputs_a_step, 'input')}"
    return [
        ("suite", str(_shown(suite.folder))),
        ("inputs", f"{suite.inputs.said}; {each}, learning rate {spec.learning_rate:g}, {spec.dtype}"),
        ("device", device),
        *([("states", f"every {counted(spec.save_every, 'step')} in {suite.storage}")] if spec.save_every else []),
    ]


def _go_on(suite: Suite) -> Pairs:
    return [("go on", f"replay suite --continue {_shown(suite.folder)}")]


def _table(results: Sequence[TrainingResult]) -> Columns:
    """Return a row per configuration; differences are of a step's loss, from the same step under ddp and deepspeed."""
    curves: list[tuple[str, Callable[[CurveComparison], str]]] = [
        ("initial", lambda judged: f"{judged.curve.losses[0]:.5f}"),
        ("final", lambda judged: f"{judged.curve.losses[-1]:.5f}"),
        ("min", lambda judged: f"{min(judged.curve.losses):.5f}"),
        ("mean", lambda judged: f"{judged.curve.mean:.5f}"),
        ("initial diff", lambda judged: f"{judged.from_ddp.points[0].difference:.2g}" if judged.from_ddp else "-"),
        ("max diff", lambda judged: f"{judged.from_ddp.max_difference:.2g}" if judged.from_ddp else "-"),
        ("mean diff", lambda judged: f"{judged.from_ddp.mean_difference:.2g}" if judged.from_ddp else "-"),
        (
            "from deepspeed",
            lambda judged: f"{judged.from_deepspeed.max_relative:.2%}" if judged.from_deepspeed else "-",
        ),
        ("step ms", lambda judged: milliseconds(judged.curve.seconds_a_step)),
        ("peak GiB", lambda judged: gibibytes(judged.curve.peak_bytes)),
    ]
    return {
        "configuration": [result.planned.name for result in results],
        "ranks": [str(result.planned.num_processes) if result.judgement else "-" for result in results],
        **{
            title: [cell(result.judgement) if result.judgement else "-" for result in results] for title, cell in curves
        },
        "result": [result.status.value for result in results],
    }


def _verdict(suite: Suite, results: Sequence[TrainingResult]) -> Pairs:
    pairs: Pairs = []
    for result in results:
        reasons = result.judgement.complaints if result.judgement else [result.reason]
        pairs += [(result.status.value, f"{result.planned.name}: {reason}") for reason in reasons]
    if any(result.status is Status.FAILED and not result.judgement for result in results):
        pairs += _go_on(suite)
    standard = [result for result in results if result.planned.configuration.is_standard]
    passed = [result for result in standard if result.status is Status.PASSED]
    has_failed = any(result.status is Status.FAILED for result in results)
    text = f"{len(passed)} of {len(standard)} standard configurations"
    if not has_failed:
        text += ": each loss falls, and none is further from the others than its bound"
    judgements = [result.judgement for result in results if result.judgement]
    if suite.spec.dtype is not Dtype.FP32 and any(result.beyond and not result.faults for result in judgements):
        pairs.append(("note", f"a large model's rounding in {suite.spec.dtype} is near the bounds. Try: --dtype fp32"))
    for result in results:
        if result.planned.name in (DDP, DEEPSPEED) and not result.judgement:
            pairs.append(("note", f"{result.planned.name} has no curve, so none was compared with it"))
    return [*pairs, ("failed" if has_failed else "passed", text), ("log", str(_shown(suite.folder)))]


def _shown(folder: Path) -> Path:
    """Return the path relative to the current folder, if it is below it."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
