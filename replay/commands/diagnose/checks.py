"""Run the checks of `replay diagnose` in order, each with its figures and what to look at next.

Losses and gradients of passes that do the same work in different ways are compared. Gradients are compared parameter by
parameter, because a total norm hides an error in a small parameter. Then the loss has to fall when the actor trains: on
one row until it is memorised, and on several inputs.

An actor is opened for one group of checks and closed after it. The first group compares losses and gradients and takes
no steps; the training checks start again from the initial weights.
"""

import math
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor

from actor_init.declarations.attention import find_attention_form
from actor_init.inputs.packing import prepare_inputs
from actor_init.model import ModelSource
from actor_init.spec import ActorSpec, Attention, Dtype, UsageError
from actor_init.world import World
from capture.file_format.micro_batch import MicroBatch
from replay.commands.diagnose.reference_losses import PlainAnswer, compute_plain_answer
from replay.commands.diagnose.untimed_actor import UntimedActor, open_untimed_actor, select_rows
from replay.options.option_parsing import describe_error
from replay.output.text import CheckResult, CheckStatus, pluralise
from replay.tolerances.difference import relative_difference
from replay.tolerances.run_bounds import GRADIENT_BOUNDS, LEAST_DIVISOR, LOSS_BOUND, PEERS_BOUND, SMALLEST_SHARE
from replay.watch.progress import Tracker

# By parameter name: fp32 on the host, unsharded.
Gradients = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientDifference:
    """The parameter whose gradients differ most; inf if one of the two is missing or not a number."""

    relative: float
    parameter: str

    @classmethod
    def find_worst(cls, relative: Mapping[str, float]) -> "GradientDifference":
        numbers = {name: torch.inf if math.isnan(error) else error for name, error in relative.items()}
        parameter = max(numbers, key=numbers.__getitem__)
        return cls(relative=numbers[parameter], parameter=parameter)

    def describe(self, bound: float) -> str:
        if self.relative == torch.inf:
            return f"the gradient of {self.parameter} is missing, or not a number"
        return f"gradient by {self.relative:.2g} at most, bound {bound:g}, {self.parameter}"


def compare_gradients(gradients: Iterable[tuple[str, Tensor]], expected: Gradients) -> GradientDifference:
    """Return the largest difference, relative to its expected norm or to a thousandth of the total norm, if larger."""
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    least = SMALLEST_SHARE * float(torch.tensor(list(norms.values())).norm())
    differences = dict.fromkeys(expected, torch.inf)
    for name, gradient in gradients:
        if name in expected:
            differences[name] = float((gradient.cpu() - expected[name]).norm()) / max(norms[name], least, LEAST_DIVISOR)
        else:
            differences[name] = torch.inf
    return GradientDifference.find_worst(differences)


def gather_gradients(
    gradients: Iterable[tuple[str, Tensor]], num_ranks: int
) -> tuple[dict[str, Tensor], GradientDifference]:
    """Return a backend's gradients on the host, and the largest difference between ranks, relative to the norm."""
    on_host, differences = {}, {}
    for name, gradient in gradients:
        on_host[name], differences[name] = gradient.to("cpu", copy=True), 0.0
        if num_ranks > 1:
            highest, lowest = gradient.clone(), gradient.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
            differences[name] = float((highest - lowest).norm() / gradient.norm().clamp(min=LEAST_DIVISOR))
    return on_host, GradientDifference.find_worst(differences)


def compute_relative_difference(value: float, expected: float) -> float:
    """Return the relative difference; inf if either is not a number."""
    are_numbers = math.isfinite(value) and math.isfinite(expected)
    return relative_difference(value, expected, least_size=LEAST_DIVISOR) if are_numbers else math.inf


def compare_peers(losses: Sequence[tuple[int, float]]) -> float:
    """Return the largest relative difference between ranks of one data rank, given every rank's (data rank, loss)."""
    firsts = dict(reversed(losses))
    return max(compute_relative_difference(loss, firsts[data_rank]) for data_rank, loss in losses)


def repeat_rows(batch: MicroBatch) -> MicroBatch:
    """Return the batch with every row repeated."""
    rows = range(batch.num_rows)
    return select_rows(batch, [*rows, *rows])


def split_rows(batch: MicroBatch) -> list[MicroBatch]:
    """Split the rows into two micro-batches; a single row is used for both."""
    middle = batch.num_rows // 2
    if not middle:
        return [batch, batch]
    return [select_rows(batch, range(middle)), select_rows(batch, range(middle, batch.num_rows))]


def compute_shares(parts: Sequence[MicroBatch], actor: UntimedActor) -> list[float]:
    """Return the weight of each of `parts` in one accumulation window, by its action tokens.

    The backend averages over the window, so each weight is multiplied by the number of parts.
    """
    counts = [
        int(prepare_inputs(part, packing=actor.source.layout_under(actor.spec).joins_rows).action_mask_BA.sum())
        for part in parts
    ]
    return [count / max(1, sum(counts)) * len(parts) for count in counts]


# One row counts as memorised below this loss, and below this share of the first loss.
MEMORISED_LOSS = 0.1
MEMORISED_SHARE = 0.5
# Several inputs are being learned below this share of the first loss.
LEARNED_SHARE = 0.8
# A smaller relative change of the loss is none, or is due to weight decay.
UNCHANGED_SHARE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningCurve:
    """The losses before each step, and after the last."""

    losses: tuple[float, ...]
    goal: float
    learning_rate: float

    @property
    def is_reached(self) -> bool:
        return self.losses[-1] <= self.goal

    def check(self, name: str) -> CheckResult:
        text = (
            f"loss {self.losses[0]:.4g} to {self.losses[-1]:.4g} in {pluralise(len(self.losses) - 1, 'step')}, "
            f"wanted {self.goal:.3g}, learning rate {self.learning_rate:.2g}"
        )
        if self.is_reached:
            return CheckResult(name=name, status=CheckStatus.OK, found=text)
        return CheckResult(name=name, status=CheckStatus.FAILED, found=text, advice=self._choose_advice(), needed=True)

    def _choose_advice(self) -> str:
        """Return what the shape of the curve suggests."""
        first, lowest, last = self.losses[0], min(self.losses), self.losses[-1]
        lower = f"Try: --learning-rate {self.learning_rate / 10:.1g}"
        if not math.isfinite(last):
            return f"it is {last} at step {len(self.losses) - 1}: the steps are too large. {lower}"
        if max(self.losses) - lowest <= UNCHANGED_SHARE * abs(first):
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


def train_until_learned(
    actor: UntimedActor,
    batches: Sequence[MicroBatch],
    *,
    num_steps: int,
    choose_goal: Callable[[float], float],
) -> LearningCurve:
    """Train on all `batches` in each step, until the goal derived from the first loss is reached, or for `num_steps`.

    The loss is the mean over the batches of all data ranks, so that all ranks stop together.
    """
    losses: list[float] = []
    while True:
        rank_loss = sum(actor.train(batches, steps=len(losses) < num_steps)) / len(batches)
        rank_losses = actor.world.gather(rank_loss)
        losses.append(sum(rank_losses) / len(rank_losses))
        curve = LearningCurve(losses=tuple(losses), goal=choose_goal(losses[0]), learning_rate=actor.spec.base_rate)
        if curve.is_reached or len(losses) > num_steps or not math.isfinite(losses[-1]):
            return curve


def choose_row_goal(first: float) -> float:
    return min(MEMORISED_LOSS, MEMORISED_SHARE * first)


def choose_inputs_goal(first: float) -> float:
    return LEARNED_SHARE * first


TRY_TWO_PROCESSES = "Try: torchrun --nproc-per-node 2 -m replay diagnose"


@dataclass(frozen=True, kw_only=True, slots=True)
class DiagnosisCase:
    """The subject of a diagnosis."""

    spec: ActorSpec
    source: ModelSource
    world: World
    tracker: Tracker
    # The micro-batches of this data rank.
    batches: Sequence[MicroBatch]
    # A micro-batch of one row, the same on every rank.
    row: MicroBatch
    num_steps: int

    def open_actor(self, *, grad_accumulation: int = 1) -> AbstractContextManager[UntimedActor]:
        spec = replace(self.spec, grad_accumulation=grad_accumulation)
        return open_untimed_actor(spec, self.source, self.world, self.tracker)


def run_checks(case: DiagnosisCase, *, show_traceback: bool = False) -> Iterator[CheckResult]:
    """Yield all checks as this rank sees them, each as soon as it is known. All ranks must iterate together.

    In one process, an exception is a failed check and the next ones are tried. With several processes it is raised.
    """
    catch_failure = partial(_catch_failure, world=case.world, show_traceback=show_traceback)
    plain: PlainAnswer | None = None
    whole: Gradients | None = None
    with catch_failure("plain model") as failed_checks:
        plain = compute_plain_answer(
            case.batches[0], case.spec, case.source, case.world, lambda _: case.tracker.report_progress()
        )
    yield from failed_checks
    with catch_failure("a pass") as failed_checks:
        whole = yield from _check_passes(case, plain)
    yield from failed_checks
    with catch_failure("accumulated") as failed_checks:
        yield _check_accumulation(case, whole)
    yield from failed_checks
    with catch_failure("one row learned") as failed_checks:
        yield _check_row_learned(case)
    yield from failed_checks
    with catch_failure("inputs learned") as failed_checks:
        yield _check_inputs_learned(case)
    yield from failed_checks


@contextmanager
def _catch_failure(name: str, world: World, show_traceback: bool) -> Iterator[list[CheckResult]]:
    """Yield a list that gets a failed check if the block raises in the only process."""
    failed_checks: list[CheckResult] = []
    try:
        yield failed_checks
    except UsageError:
        raise
    except Exception as error:
        if world.world_size > 1:
            raise
        if show_traceback:
            traceback.print_exc()
        text = describe_error(error)
        failed_checks.append(_make_check(name, passes=False, text=text, advice="--traceback shows where"))


def _check_passes(case: DiagnosisCase, plain: PlainAnswer | None) -> Generator[CheckResult, None, Gradients]:
    """Run the checks of passes over the first input, and return its gradient over all data ranks."""
    batch, world = case.batches[0], case.world
    with case.open_actor() as actor:
        yield _check_kernel(str(actor.backend.facts()["attention_kernel"]), case)
        (loss,), (whole, rank_difference) = actor.read_gradients(
            [batch], lambda gradients: gather_gradients(gradients, world.world_size)
        )
        if plain is not None:
            yield _compare_four_losses(loss, plain)
            yield _compare_with_plain_model(case, whole, plain)
        yield _check_loss_on_peers(case, world.gather((world.data_rank, loss)))
        yield _check_gradient_on_ranks(case, rank_difference)
        for name, same_work, advice in (
            (
                "same pass twice",
                batch,
                "something is random: look for dropout in the config. Try: --attention sdpa",
            ),
            (
                "twice the tokens",
                repeat_rows(batch),
                "every row came twice: look at how the loss is averaged over tokens",
            ),
        ):
            (second_loss,), difference = actor.read_gradients([same_work], partial(compare_gradients, expected=whole))
            yield _check_equal(name, case.spec.dtype, difference, losses=(second_loss, loss), advice=advice)
    return whole


def _check_kernel(kernel: str, case: DiagnosisCase) -> CheckResult:
    """Report the attention kernel, and why it is not flash-attn where `auto` would have preferred that."""
    is_chosen = case.spec.attention != Attention.AUTO or case.spec.has_user_model
    if is_chosen or find_attention_form(kernel).is_expected_on_gpu:
        return CheckResult(name="attention kernel", status=CheckStatus.OK, found=kernel)
    if case.world.device.type == "cpu":
        reason = "flash-attn has no CPU kernel"
    elif case.spec.dtype is Dtype.FP32:
        reason = "flash-attn has no fp32"
    else:
        package = "flash-attn" if find_spec("flash_attn") is None else "ring-flash-attn"
        reason = f"{package} is not installed"
    return CheckResult(name="attention kernel", status=CheckStatus.NOTE, found=f"{kernel}, for {reason}")


def _compare_four_losses(loss: float, plain: PlainAnswer) -> CheckResult:
    losses = {"actor": loss, **plain.losses}
    difference = _find_largest_difference(losses.values())
    advice = (
        "the model's own losses disagree: look at its head and its loss function"
        if _find_largest_difference(plain.losses.values()) > LOSS_BOUND
        else "the actor alone is off: look at mask, positions and targets. Try: --no-packing, --attention eager, no "
        "--compile, and a config without dropout"
    )
    figures = ", ".join(f"{method} {value:.6g}" for method, value in losses.items())
    text = f"{figures}; by {difference:.2g}, bound {LOSS_BOUND:g}" + f" ({plain.omission})" * bool(plain.omission)
    return _make_check("loss, four ways", passes=difference <= LOSS_BOUND, text=text, advice=advice)


def _find_largest_difference(losses: Collection[float]) -> float:
    return max(compute_relative_difference(first, second) for first in losses for second in losses)


def _compare_with_plain_model(case: DiagnosisCase, whole: Gradients, plain: PlainAnswer) -> CheckResult:
    difference = compare_gradients(whole.items(), plain.gradients)
    advice = "look at what reduces and scales gradients, and at frozen parameters. Try: one process, which reduces none"
    check = _check_equal("as a plain model", case.spec.dtype, difference, advice=advice)
    ranks = pluralise(case.world.num_data_ranks, "data rank")
    return replace(check, found=f"{ranks} beside a plain model: {check.found}")


def _check_loss_on_peers(case: DiagnosisCase, losses: list[tuple[int, float]]) -> CheckResult:
    name = "loss on peers"
    if case.world.num_data_ranks == case.world.world_size:
        return CheckResult(
            name=name, status=CheckStatus.NOT_RUN, found="no ranks share a micro-batch", advice="Try: --tp 2"
        )
    difference = compare_peers(losses)
    text = f"loss by {difference:.2g} among ranks of one micro-batch, bound {PEERS_BOUND:g}"
    advice = "look at what tp and ring ranks are fed, and at what gathers their log-probs"
    return _make_check(name, passes=difference <= PEERS_BOUND, text=text, advice=advice)


def _check_gradient_on_ranks(case: DiagnosisCase, difference: GradientDifference) -> CheckResult:
    name = "gradient on ranks"
    if case.world.world_size == 1:
        return CheckResult(name=name, status=CheckStatus.NOT_RUN, found="one process", advice=TRY_TWO_PROCESSES)
    advice = "look at what is replicated and not reduced: norms under --tp, everything under --zero-stage 0"
    return _check_equal(name, case.spec.dtype, difference, advice=advice)


def _check_accumulation(case: DiagnosisCase, whole: Gradients | None) -> CheckResult:
    if whole is None:
        return CheckResult(
            name="accumulated", status=CheckStatus.NOT_RUN, found="there is no whole batch to compare with"
        )
    parts = split_rows(case.batches[0])
    with case.open_actor(grad_accumulation=len(parts)) as actor:
        _, difference = actor.read_gradients(
            parts, partial(compare_gradients, expected=whole), shares=compute_shares(parts, actor)
        )
    advice = "look at what divides by --grad-accumulation, and at what keeps a gradient from one pass to the next"
    return _check_equal("accumulated", case.spec.dtype, difference, advice=advice)


def _check_row_learned(case: DiagnosisCase) -> CheckResult:
    with case.open_actor() as actor:
        curve = train_until_learned(actor, [case.row], num_steps=case.num_steps, choose_goal=choose_row_goal)
    check = curve.check("one row learned")
    return replace(check, found=f"{check.found} ({case.row.num_real_tokens} tokens of {case.row.origin.source})")


def _check_inputs_learned(case: DiagnosisCase) -> CheckResult:
    with case.open_actor(grad_accumulation=len(case.batches)) as actor:
        curve = train_until_learned(actor, case.batches, num_steps=case.num_steps, choose_goal=choose_inputs_goal)
    check = curve.check("inputs learned")
    return replace(check, found=f"{check.found} ({pluralise(len(case.batches) * case.world.num_data_ranks, 'input')})")


def _check_equal(
    name: str, dtype: Dtype, gradient: GradientDifference, *, losses: tuple[float, float] | None = None, advice: str
) -> CheckResult:
    bound = GRADIENT_BOUNDS[dtype]
    loss_difference = compute_relative_difference(*losses) if losses else 0.0
    text = f"loss by {loss_difference:.2g}, bound {LOSS_BOUND:g}; " if losses else ""
    passes = loss_difference <= LOSS_BOUND and gradient.relative <= bound
    return _make_check(name, passes=passes, text=text + gradient.describe(bound), advice=advice)


def _make_check(name: str, *, passes: bool, text: str, advice: str) -> CheckResult:
    if passes:
        return CheckResult(name=name, status=CheckStatus.OK, found=text)
    return CheckResult(name=name, status=CheckStatus.FAILED, found=text, advice=advice, needed=True)
