"""List losses of pairs that a job may have computed in place of --loss dpo. Hypotheses as data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from replay.objective.dpo import compute_dpo_loss, compute_margins, read_reference, reduce_by_sequence, split_pairs
from replay.objective.inputs import ObjectiveInputs
from replay.options.spec import ObjectiveSpec, PairOrder

BETAS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossVariant:
    """Another loss than the objective's.

    loss      of a pass. Raises ObjectiveError where the capture lacks what it needs
    says      what the job's loss does then, for `the job's loss ...`
    try_next  what to type, if it was meant, or to mend in the job
    """

    says: str
    try_next: str
    loss: Callable[[ObjectiveInputs], Tensor]


def list_dpo_variants(spec: ObjectiveSpec) -> Iterator[LossVariant]:
    """Yield losses of other settings, then of other formulas."""
    yield from _list_dpo_settings(spec)
    yield from _list_dpo_formulas(spec)


def _list_dpo_settings(spec: ObjectiveSpec) -> Iterator[LossVariant]:
    def vary(says: str, option: str, **changes: object) -> LossVariant:
        other = replace(spec, **changes)  # type: ignore[arg-type]
        return LossVariant(
            says=says,
            try_next=f"{option}, if the job is meant to do so",
            loss=lambda inputs: compute_dpo_loss(inputs, other),
        )

    for beta in BETAS:
        if beta != spec.dpo_beta:
            yield vary(
                f"has a beta of {beta:g}, not {spec.dpo_beta:g}",
                f"--dpo-beta {beta:g}",
                dpo_beta=beta,
            )
    averages = not spec.average_log_probs
    yield vary(
        f"takes the {'mean' if averages else 'sum'} of each sequence's log-probs",
        "--average-log-probs" if averages else "leave out --average-log-probs",
        average_log_probs=averages,
    )
    order = PairOrder.ALTERNATE if spec.pairs is PairOrder.HALVES else PairOrder.HALVES
    yield vary(f"has its pairs in {order}, not {spec.pairs}", f"--pairs {order}", pairs=order)
    for smoothing in (0.0, 0.1):
        if smoothing != spec.label_smoothing:
            says = f"has a label smoothing of {smoothing:g}"
            yield vary(says, f"--label-smoothing {smoothing:g}", label_smoothing=smoothing)


def _list_dpo_formulas(spec: ObjectiveSpec) -> Iterator[LossVariant]:
    def vary(
        says: str,
        loss_of_margins: Callable[[Tensor], Tensor] = lambda margins: -F.logsigmoid(margins),
        read: Callable[[ObjectiveInputs, ObjectiveSpec], tuple[Tensor, Tensor]] = read_reference,
    ) -> LossVariant:
        return LossVariant(
            says=says,
            try_next="compare the job's loss with that of --loss dpo",
            loss=lambda inputs: loss_of_margins(compute_margins(inputs, spec, read(inputs, spec))).mean(),
        )

    def take_none(inputs: ObjectiveInputs, spec: ObjectiveSpec) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros_like(split_pairs(reduce_by_sequence(inputs.log_probs_BA, inputs, spec), spec.pairs)[0])
        return zeros, zeros

    def take_policy(inputs: ObjectiveInputs, spec: ObjectiveSpec) -> tuple[Tensor, Tensor]:
        return split_pairs(reduce_by_sequence(inputs.log_probs_BA, inputs, spec).detach(), spec.pairs)

    def swap(inputs: ObjectiveInputs, spec: ObjectiveSpec) -> tuple[Tensor, Tensor]:
        chosen, rejected = read_reference(inputs, spec)
        return rejected, chosen

    def reverse(inputs: ObjectiveInputs, spec: ObjectiveSpec) -> tuple[Tensor, Tensor]:
        chosen, rejected = read_reference(inputs, spec)
        return chosen.flip(0), rejected.flip(0)

    yield vary(
        "prefers the rejected sequences: chosen and rejected are swapped",
        lambda margins: -F.logsigmoid(-margins),
    )
    yield vary("has no reference", read=take_none)
    yield vary("has the policy itself as its reference, as it is now", read=take_policy)
    yield vary("has the reference of the chosen and of the rejected sequences swapped", read=swap)
    yield vary("has the reference of the pairs in the reverse order", read=reverse)
    yield vary("is a hinge loss, not the sigmoid's", lambda margins: torch.relu(1 - margins))
    # IPO divides by beta, which may be typed as 0.
    if spec.dpo_beta:
        yield vary(
            "is that of IPO, not the sigmoid's",
            lambda margins: (margins / spec.dpo_beta - 1 / (2 * spec.dpo_beta)) ** 2,
        )
