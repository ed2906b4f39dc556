"""Run the checks of `replay diagnose` in order, each with its figures and what to look at next.

An actor is opened for one group of checks and closed after it. The first group compares losses and gradients and takes
no steps; the training checks start again from the initial weights.
"""

import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

from actor_init.declarations.attention import form_of
from actor_init.model import ModelSource
from actor_init.spec import ActorSpec, Attention, Dtype, UsageError
from actor_init.world import World
from capture.file_format.micro_batch import MicroBatch
from replay.commands.diagnose.gradients import (
    Difference,
    Gradients,
    difference,
    halves,
    of_peers,
    relative,
    shares_of,
    twice,
    whole_gradients,
)
from replay.commands.diagnose.overfit import goal_of_a_row, goal_of_inputs, learned
from replay.commands.diagnose.reference_losses import PlainAnswer, plain_answer
from replay.commands.diagnose.untimed_actor import Trial, trial
from replay.options.wording import in_flags
from replay.output.check import Check, Status
from replay.output.text import counted, one_line
from replay.tolerances.runs import GRADIENT_BOUNDS, LOSS_BOUND, PEERS_BOUND
from replay.watch.progress import Tracker

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


def examined(case: Case, *, show_traceback: bool = False) -> Iterator[Check]:
    """Yield all checks as this rank sees them, each as soon as it is known. All ranks must iterate together.

    In one process, an exception is a failed check and the next ones are tried. With several processes it is raised.
    """
    guarded = partial(_guarded, world=case.world, show_traceback=show_traceback)
    plain: PlainAnswer | None = None
    whole: Gradients | None = None
    with guarded("plain model") as broken:
        plain = plain_answer(case.batches[0], case.spec, case.source, case.world, lambda _: case.tracker.goes_on())
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
def _guarded(name: str, world: World, show_traceback: bool) -> Iterator[list[Check]]:
    broken: list[Check] = []
    try:
        yield broken
    except UsageError:
        raise
    except Exception as error:
        if world.world_size > 1:
            raise
        if show_traceback:
            traceback.print_exc()
        text = f"{type(error).__name__}: {one_line(in_flags(error))}"
        broken.append(_passed_or_failed(name, passes=False, text=text, advice="--traceback shows where"))


def _passes(case: Case, plain: PlainAnswer | None) -> Generator[Check, None, Gradients]:
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


def _kernel(kernel: str, case: Case) -> Check:
    """Report the attention kernel, and why it is not flash-attn where `auto` would have preferred that."""
    is_chosen = case.spec.attention != Attention.AUTO or case.spec.is_custom
    if is_chosen or form_of(kernel).is_expected:
        return Check(name="attention kernel", status=Status.OK, found=kernel)
    if case.world.device.type == "cpu":
        reason = "flash-attn has no CPU kernel"
    elif case.spec.dtype is Dtype.FP32:
        reason = "flash-attn has no fp32"
    else:
        package = "flash-attn" if find_spec("flash_attn") is None else "ring-flash-attn"
        reason = f"{package} is not installed"
    return Check(name="attention kernel", status=Status.NOTE, found=f"{kernel}, for {reason}")


def _four_ways(loss: float, plain: PlainAnswer) -> Check:
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


def _as_one_process(case: Case, whole: Gradients, plain: PlainAnswer) -> Check:
    apart = difference(whole.items(), plain.gradients)
    advice = "look at what reduces and scales gradients, and at frozen parameters. Try: one process, which reduces none"
    check = _equal("as a plain model", case.spec.dtype, apart, advice=advice)
    ranks = counted(case.world.num_data_ranks, "data rank")
    return replace(check, found=f"{ranks} beside a plain model: {check.found}")


def _loss_on_peers(case: Case, losses: list[tuple[int, float]]) -> Check:
    name = "loss on peers"
    if case.world.num_data_ranks == case.world.world_size:
        return Check(name=name, status=Status.NOT_RUN, found="no ranks share a micro-batch", advice="Try: --tp 2")
    apart = of_peers(losses)
    text = f"loss by {apart:.2g} among ranks of one micro-batch, bound {PEERS_BOUND:g}"
    advice = "look at what tp and ring ranks are fed, and at what gathers their log-probs"
    return _passed_or_failed(name, passes=apart <= PEERS_BOUND, text=text, advice=advice)


def _gradient_on_ranks(case: Case, apart: Difference) -> Check:
    name = "gradient on ranks"
    if case.world.world_size == 1:
        return Check(name=name, status=Status.NOT_RUN, found="one process", advice=NOT_ONE)
    advice = "look at what is replicated and not reduced: norms under --tp, everything under --zero-stage 0"
    return _equal(name, case.spec.dtype, apart, advice=advice)


def _accumulated(case: Case, whole: Gradients | None) -> Check:
    if whole is None:
        return Check(name="accumulated", status=Status.NOT_RUN, found="there is no whole batch to compare with")
    parts = halves(case.batches[0])
    with case.trial(grad_accumulation=len(parts)) as actor:
        _, apart = actor.read_gradients(parts, partial(difference, expected=whole), shares=shares_of(parts, actor))
    advice = "look at what divides by --grad-accumulation, and at what keeps a gradient from one pass to the next"
    return _equal("accumulated", case.spec.dtype, apart, advice=advice)


def _row_learned(case: Case) -> Check:
    with case.trial() as actor:
        curve = learned(actor, [case.row], num_steps=case.num_steps, goal_of=goal_of_a_row)
    check = curve.check("one row learned")
    return replace(check, found=f"{check.found} ({case.row.num_real_tokens} tokens of {case.row.origin.source})")


def _inputs_learned(case: Case) -> Check:
    with case.trial(grad_accumulation=len(case.batches)) as actor:
        curve = learned(actor, case.batches, num_steps=case.num_steps, goal_of=goal_of_inputs)
    check = curve.check("inputs learned")
    return replace(check, found=f"{check.found} ({counted(len(case.batches) * case.world.num_data_ranks, 'input')})")


def _equal(
    name: str, dtype: Dtype, gradient: Difference, *, losses: tuple[float, float] | None = None, advice: str
) -> Check:
    bound = GRADIENT_BOUNDS[dtype]
    apart = relative(*losses) if losses else 0.0
    text = f"loss by {apart:.2g}, bound {LOSS_BOUND:g}; " if losses else ""
    passes = apart <= LOSS_BOUND and gradient.relative <= bound
    return _passed_or_failed(name, passes=passes, text=text + gradient.said(bound), advice=advice)


def _passed_or_failed(name: str, *, passes: bool, text: str, advice: str) -> Check:
    if passes:
        return Check(name=name, status=Status.OK, found=text)
    return Check(name=name, status=Status.FAILED, found=text, advice=advice, needed=True)
