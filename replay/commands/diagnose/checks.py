"""Run the checks of `replay diagnose` in order, each with its figures and what to look at next.

An actor is opened for one group of checks and closed after it. The first group compares losses and gradients and takes
no steps; the training checks start again from the initial weights.
"""

import math
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor

from actor_init.declarations.attention import find_form
from actor_init.inputs.packing import prepare_inputs
from actor_init.model import ModelSource
from actor_init.spec import ActorSpec, Attention, Dtype, UsageError
from actor_init.world import World
from capture.file_format.micro_batch import MicroBatch
from replay.commands.diagnose.reference_losses import PlainAnswer, plain_answer
from replay.commands.diagnose.untimed_actor import Trial, rows_of, trial
from replay.options.option_parsing import in_flags
from replay.output.text import CheckResult, CheckStatus, join_lines, pluralise
from replay.tolerances.difference import relative_difference
from replay.tolerances.run_bounds import GRADIENT_BOUNDS, LEAST_DIVISOR, LOSS_BOUND, PEERS_BOUND, SMALLEST_SHARE
from replay.watch.progress import Tracker

# Compare the losses and gradients of passes that do the same work in different ways.
#
# Gradients are compared parameter by parameter, because a total norm hides an error in a small parameter.

Gradients = Mapping[str, Tensor]  # fp32 on the host, unsharded, by parameter name


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The parameter whose gradients differ most; inf if one of the two is missing or not a number."""

    relative: float
    parameter: str

    @classmethod
    def worst(cls, relative: Mapping[str, float]) -> "Difference":
        numbers = {name: error if error == error else torch.inf for name, error in relative.items()}
        parameter = max(numbers, key=numbers.__getitem__)
        return cls(relative=numbers[parameter], parameter=parameter)

    def said(self, bound: float) -> str:
        if self.relative == torch.inf:
            return f"the gradient of {self.parameter} is missing, or not a number"
        return f"gradient by {self.relative:.2g} at most, bound {bound:g}, {self.parameter}"


def difference(gradients: Iterable[tuple[str, Tensor]], expected: Gradients) -> Difference:
    """Return the largest difference, relative to its expected norm or to a thousandth of the total norm, if larger."""
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    least = SMALLEST_SHARE * float(torch.tensor(list(norms.values())).norm())
    apart = dict.fromkeys(expected, torch.inf)
    for name, gradient in gradients:
        if name in expected:
            apart[name] = float((gradient.cpu() - expected[name]).norm()) / max(norms[name], least, LEAST_DIVISOR)
        else:
            apart[name] = torch.inf
    return Difference.worst(apart)


def whole_gradients(gradients: Iterable[tuple[str, Tensor]], num_ranks: int) -> tuple[dict[str, Tensor], Difference]:
    """Return a backend's gradients on the host, and the largest difference between ranks, relative to the norm."""
    kept, apart = {}, {}
    for name, gradient in gradients:
        kept[name], apart[name] = gradient.cpu(), 0.0
        if num_ranks > 1:
            highest, lowest = gradient.clone(), gradient.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
            apart[name] = float((highest - lowest).norm() / gradient.norm().clamp(min=LEAST_DIVISOR))
    return kept, Difference.worst(apart)


def relative(value: float, expected: float) -> float:
    """Return the relative difference; inf if either is not a number."""
    are_numbers = math.isfinite(value) and math.isfinite(expected)
    return relative_difference(value, expected, least_size=LEAST_DIVISOR) if are_numbers else math.inf


def of_peers(losses: Sequence[tuple[int, float]]) -> float:
    """Return the largest relative difference between ranks of one data rank, given every rank's (data rank, loss)."""
    firsts = dict(reversed(losses))
    return max(relative(loss, firsts[data_rank]) for data_rank, loss in losses)


def twice(batch: MicroBatch) -> MicroBatch:
    """Return the batch with every row repeated."""
    rows = range(batch.num_rows)
    return rows_of(batch, [*rows, *rows])


def halves(batch: MicroBatch) -> list[MicroBatch]:
    """Split the rows into two micro-batches; a single row is used for both."""
    middle = batch.num_rows // 2
    if not middle:
        return [batch, batch]
    return [rows_of(batch, range(middle)), rows_of(batch, range(middle, batch.num_rows))]


def shares_of(parts: Sequence[MicroBatch], trial: Trial) -> list[float]:
    """Return the weight of each of `parts` in one accumulation window, by its action tokens.

    The backend averages over the window, so each weight is multiplied by the number of parts.
    """
    counts = [
        int(prepare_inputs(part, packing=trial.source.layout_under(trial.spec).joins).action_mask_BA.sum())
        for part in parts
    ]
    return [count / max(1, sum(counts)) * len(parts) for count in counts]


# Check that the loss falls when the actor trains: on one row until it is memorised, and on several inputs.

ROW_LOSS = 0.1  # below it one row counts as memorised, if ROW_SHARE holds too
ROW_SHARE = 0.5  # of the first loss
INPUTS_SHARE = 0.8  # of the first loss: below it several inputs are being learned
STANDS = 0.01  # relative: a smaller change is none, or is due to weight decay


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The losses before each step, and after the last."""

    losses: tuple[float, ...]
    goal: float
    learning_rate: float

    @property
    def reached(self) -> bool:
        return self.losses[-1] <= self.goal

    def check(self, name: str) -> CheckResult:
        text = (
            f"loss {self.losses[0]:.4g} to {self.losses[-1]:.4g} in {pluralise(len(self.losses) - 1, 'step')}, "
            f"wanted {self.goal:.3g}, learning rate {self.learning_rate:.2g}"
        )
        if self.reached:
            return CheckResult(name=name, status=CheckStatus.OK, found=text)
        return CheckResult(name=name, status=CheckStatus.FAILED, found=text, advice=self._advice(), needed=True)

    def _advice(self) -> str:
        """Return what the shape of the curve suggests."""
        first, lowest, last = self.losses[0], min(self.losses), self.losses[-1]
        lower = f"Try: --learning-rate {self.learning_rate / 10:.1g}"
        if not math.isfinite(last):
            return f"it is {last} at step {len(self.losses) - 1}: the steps are too large. {lower}"
        if max(self.losses) - lowest <= STANDS * abs(first):
            return (
                "it hardly moves: look for frozen parameters, a loss that none moves, and steps that are not made. "
                f"Try: --learning-rate {self.learning_rate * 10 or 1e-3:.1g}"
            )
        if last > first:
            return f"it rises: the steps are too large, or go the wrong way. {lower}"
        if last > 1.5 * lowest:
            return f"it fell to {lowest:.4g} and rose again: the steps are too large. {lower}"
        half = self.losses[(len(self.losses) - 1) // 2]
        if half - last > 0.1 * (first - last):
            return f"it is still falling. Try: --steps {4 * (len(self.losses) - 1)}"
        return (
            f"it stands at {last:.4g}: look for frozen parameters, dropout, or a target that no input tells. "
            f"Try: --learning-rate {self.learning_rate * 5:.1g}, and then {self.learning_rate / 5:.1g}"
        )


def learned(
    trial: Trial,
    batches: Sequence[MicroBatch],
    *,
    num_steps: int,
    goal_of: Callable[[float], float],
) -> Curve:
    """Train on all `batches` in each step, until the goal derived from the first loss is reached, or for `num_steps`.

    The loss is the mean over the batches of all data ranks, so that all ranks stop together.
    """
    losses: list[float] = []
    while True:
        own = sum(trial.train(batches, steps=len(losses) < num_steps)) / len(batches)
        everyones = trial.world.gather(own)
        losses.append(sum(everyones) / len(everyones))
        curve = Curve(losses=tuple(losses), goal=goal_of(losses[0]), learning_rate=trial.spec.learning_rate)
        ends = curve.reached or len(losses) > num_steps or not math.isfinite(losses[-1])
        if ends:
            return curve


def goal_of_a_row(first: float) -> float:
    return min(ROW_LOSS, ROW_SHARE * first)


def goal_of_inputs(first: float) -> float:
    return INPUTS_SHARE * first


NOT_ONE = "Try: torchrun --nproc-per-node 2 replay diagnose"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The subject of a diagnosis."""

    spec: ActorSpec
    source: ModelSource
    world: World
    tracker: Tracker
    batches: Sequence[MicroBatch]  # of this data rank
    row: MicroBatch  # one row, the same on every rank
    num_steps: int

    def trial(self, *, grad_accumulation: int = 1) -> AbstractContextManager[Trial]:
        spec = replace(self.spec, grad_accumulation=grad_accumulation)
        return trial(spec, self.source, self.world, self.tracker)


def examined(case: Case, *, show_traceback: bool = False) -> Iterator[CheckResult]:
    """Yield all checks as this rank sees them, each as soon as it is known. All ranks must iterate together.

    In one process, an exception is a failed check and the next ones are tried. With several processes it is raised.
    """
    guarded = partial(_guarded, world=case.world, show_traceback=show_traceback)
    plain: PlainAnswer | None = None
    whole: Gradients | None = None
    with guarded("plain model") as broken:
        plain = plain_answer(
            case.batches[0], case.spec, case.source, case.world, lambda _: case.tracker.report_progress()
        )
    yield from broken
    with guarded("a pass") as broken:
        whole = yield from _passes(case, plain)
    yield from broken
    with guarded("accumulated") as broken:
        yield _accumulated(case, whole)
    yield from broken
    with guarded("one row learned") as broken:
        yield _row_learned(case)
    yield from broken
    with guarded("inputs learned") as broken:
        yield _inputs_learned(case)
    yield from broken


@contextmanager
def _guarded(name: str, world: World, show_traceback: bool) -> Iterator[list[CheckResult]]:
    broken: list[CheckResult] = []
    try:
        yield broken
    except UsageError:
        raise
    except Exception as error:
        if world.world_size > 1:
            raise
        if show_traceback:
            traceback.print_exc()
        text = f"{type(error).__name__}: {join_lines(in_flags(error))}"
        broken.append(_passed_or_failed(name, passes=False, text=text, advice="--traceback shows where"))


def _passes(case: Case, plain: PlainAnswer | None) -> Generator[CheckResult, None, Gradients]:
    """Run the checks of passes over the first input, and return its gradient over all data ranks."""
    batch, world = case.batches[0], case.world
    with case.trial() as actor:
        yield _kernel(str(actor.backend.facts()["attention_kernel"]), case)
        (loss,), (whole, apart) = actor.read_gradients(
            [batch], lambda gradients: whole_gradients(gradients, world.world_size)
        )
        if plain is not None:
            yield _four_ways(loss, plain)
            yield _as_one_process(case, whole, plain)
        yield _loss_on_peers(case, world.gather((world.data_rank, loss)))
        yield _gradient_on_ranks(case, apart)
        for name, others, advice in (
            (
                "same pass twice",
                batch,
                "something is random: look for dropout in the config. Try: --attention sdpa",
            ),
            ("twice the tokens", twice(batch), "every row came twice: look at how the loss is averaged over tokens"),
        ):
            (again,), apart = actor.read_gradients([others], partial(difference, expected=whole))
            yield _equal(name, case.spec.dtype, apart, losses=(again, loss), advice=advice)
    return whole


def _kernel(kernel: str, case: Case) -> CheckResult:
    """Report the attention kernel, and why it is not flash-attn where `auto` would have preferred that."""
    is_chosen = case.spec.attention != Attention.AUTO or case.spec.is_custom
    if is_chosen or find_form(kernel).is_expected_on_gpu:
        return CheckResult(name="attention kernel", status=CheckStatus.OK, found=kernel)
    if case.world.device.type == "cpu":
        reason = "flash-attn has no CPU kernel"
    elif case.spec.dtype is Dtype.FP32:
        reason = "flash-attn has no fp32"
    else:
        package = "flash-attn" if find_spec("flash_attn") is None else "ring-flash-attn"
        reason = f"{package} is not installed"
    return CheckResult(name="attention kernel", status=CheckStatus.NOTE, found=f"{kernel}, for {reason}")


def _four_ways(loss: float, plain: PlainAnswer) -> CheckResult:
    losses = {"actor": loss, **plain.losses}
    apart = max(relative(a, b) for a in losses.values() for b in losses.values())
    others = max(relative(a, b) for a in plain.losses.values() for b in plain.losses.values())
    advice = (
        "the model's own losses disagree: look at its head and its loss function"
        if others > LOSS_BOUND
        else "the actor alone is off: look at mask, positions and targets. Try: --no-packing, --attention eager, no "
        "--compile, and a config without dropout"
    )
    listed = ", ".join(f"{way} {value:.6g}" for way, value in losses.items())
    text = f"{listed}; by {apart:.2g}, bound {LOSS_BOUND:g}" + f" ({plain.left_out})" * bool(plain.left_out)
    return _passed_or_failed("loss, four ways", passes=apart <= LOSS_BOUND, text=text, advice=advice)


def _as_one_process(case: Case, whole: Gradients, plain: PlainAnswer) -> CheckResult:
    apart = difference(whole.items(), plain.gradients)
    advice = "look at what reduces and scales gradients, and at frozen parameters. Try: one process, which reduces none"
    check = _equal("as a plain model", case.spec.dtype, apart, advice=advice)
    ranks = pluralise(case.world.num_data_ranks, "data rank")
    return replace(check, found=f"{ranks} beside a plain model: {check.found}")


def _loss_on_peers(case: Case, losses: list[tuple[int, float]]) -> CheckResult:
    name = "loss on peers"
    if case.world.num_data_ranks == case.world.world_size:
        return CheckResult(
            name=name, status=CheckStatus.NOT_RUN, found="no ranks share a micro-batch", advice="Try: --tp 2"
        )
    apart = of_peers(losses)
    text = f"loss by {apart:.2g} among ranks of one micro-batch, bound {PEERS_BOUND:g}"
    advice = "look at what tp and ring ranks are fed, and at what gathers their log-probs"
    return _passed_or_failed(name, passes=apart <= PEERS_BOUND, text=text, advice=advice)


def _gradient_on_ranks(case: Case, apart: Difference) -> CheckResult:
    name = "gradient on ranks"
    if case.world.world_size == 1:
        return CheckResult(name=name, status=CheckStatus.NOT_RUN, found="one process", advice=NOT_ONE)
    advice = "look at what is replicated and not reduced: norms under --tp, everything under --zero-stage 0"
    return _equal(name, case.spec.dtype, apart, advice=advice)


def _accumulated(case: Case, whole: Gradients | None) -> CheckResult:
    if whole is None:
        return CheckResult(
            name="accumulated", status=CheckStatus.NOT_RUN, found="there is no whole batch to compare with"
        )
    parts = halves(case.batches[0])
    with case.trial(grad_accumulation=len(parts)) as actor:
        _, apart = actor.read_gradients(parts, partial(difference, expected=whole), shares=shares_of(parts, actor))
    advice = "look at what divides by --grad-accumulation, and at what keeps a gradient from one pass to the next"
    return _equal("accumulated", case.spec.dtype, apart, advice=advice)


def _row_learned(case: Case) -> CheckResult:
    with case.trial() as actor:
        curve = learned(actor, [case.row], num_steps=case.num_steps, goal_of=goal_of_a_row)
    check = curve.check("one row learned")
    return replace(check, found=f"{check.found} ({case.row.num_real_tokens} tokens of {case.row.origin.source})")


def _inputs_learned(case: Case) -> CheckResult:
    with case.trial(grad_accumulation=len(case.batches)) as actor:
        curve = learned(actor, case.batches, num_steps=case.num_steps, goal_of=goal_of_inputs)
    check = curve.check("inputs learned")
    return replace(check, found=f"{check.found} ({pluralise(len(case.batches) * case.world.num_data_ranks, 'input')})")


def _equal(
    name: str, dtype: Dtype, gradient: Difference, *, losses: tuple[float, float] | None = None, advice: str
) -> CheckResult:
    bound = GRADIENT_BOUNDS[dtype]
    apart = relative(*losses) if losses else 0.0
    text = f"loss by {apart:.2g}, bound {LOSS_BOUND:g}; " if losses else ""
    passes = apart <= LOSS_BOUND and gradient.relative <= bound
    return _passed_or_failed(name, passes=passes, text=text + gradient.said(bound), advice=advice)


def _passed_or_failed(name: str, *, passes: bool, text: str, advice: str) -> CheckResult:
    if passes:
        return CheckResult(name=name, status=CheckStatus.OK, found=text)
    return CheckResult(name=name, status=CheckStatus.FAILED, found=text, advice=advice, needed=True)
