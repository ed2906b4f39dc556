"""List policy losses that a job may have computed of the same log-probs and notes. Hypotheses as data.

Each is the replay's own policy loss with one thing changed, then with two. Beside its value it has a gradient, which is
held against the one that the job's logits had, where that was recorded.

Shape letters: B rows, S tokens a row, A columns of the action mask (the last tokens of each row).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from capture.file_format.micro_batch import LOSS_GRADIENTS, LOSS_TARGETS
from replay.objective.inputs import ObjectiveInputs
from replay.objective.policy import compute_clipped_loss, estimate_divergence, reduce_loss
from replay.options.declarations.tensor_names import ADVANTAGES, OLD_LOG_PROBS, REF_LOG_PROBS
from replay.options.spec import KlEstimator, ObjectiveSpec, Reduction
from replay.runner.trial_logits import TargetLogits, choose_positions, measure_distance, search_number
from replay.runner.trial_losses import is_same_loss
from replay.verdict.causes.trial_rules import MANY_VALUES
from replay.verdict.tried_losses import TriedLoss

NEVER_CLIPPED = 1e9
# Two changes are tried where their loss comes so near to the job's, relatively or absolutely.
NEAR_LOSS = 1e-2
# A policy's temperature lies between these.
TEMPERATURES = (0.2, 5.0)
CLIPS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
HIGH_CLIPS = (0.2, 0.25, 0.28, 0.3, 0.4)
# Digits that a person gives a coefficient, and the least that one is.
COEFFICIENT_DIGITS, LEAST_COEFFICIENT = 3, 1e-4
MEND_SETTINGS = "compare the settings of the job's policy loss with those that the line loss shows"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyForm:
    """A policy loss.

    reduction    of `spec`, or `rows`: the sum divided by the rows; `places`: by all columns, `sum`: by nothing
    takes_worse  the larger of the two losses is not taken, but the smaller
    sign         -1 where the job goes the other way
    ratio        `ratio`; `inverted`: the old policy's to the new one's; `sequence`: one for each sequence, of the mean
                 of its log-ratios; `chance`: the chance itself; `log`: the log-prob itself
    advantages   as noted; `whitened` or `centred` once more over the pass's tokens; `ones`; or moved, as `old` is
    old          as noted; moved: `earlier` or `later` by a token, `reversed` by rows
    kl_sign      -1 where the divergence is rewarded
    swaps_kl     the divergence is that of the reference to the policy
    """

    spec: ObjectiveSpec
    reduction: str = ""
    takes_worse: bool = True
    sign: float = 1.0
    ratio: str = "ratio"
    advantages: str = ""
    old: str = ""
    kl_sign: float = 1.0
    swaps_kl: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyChange:
    """One change of a form; `says` is what the job's loss does, `typed` what makes the replay do the same."""

    says: str
    form: Mapping[str, Any]
    spec: Mapping[str, Any]
    typed: str = ""

    @property
    def keys(self) -> set[str]:
        return {*self.form, *self.spec}


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyCase:
    """What the losses of a pass are computed of; `gradient_BA` of the targets' logits in the job, or None.

    entropy_BA  of the distributions, without a graph; None where the job's gradient shows no entropy
    """

    inputs: ObjectiveInputs
    spec: ObjectiveSpec
    job_loss: float
    gradient_BA: Tensor | None
    entropy_BA: Tensor | None = None

    @classmethod
    def make(
        cls,
        inputs: ObjectiveInputs,
        spec: ObjectiveSpec,
        job_loss: float,
        entropy_BA: Tensor | None,
    ) -> "PolicyCase":
        return cls(
            inputs=inputs,
            spec=spec,
            job_loss=job_loss,
            gradient_BA=place_gradients(inputs),
            entropy_BA=entropy_BA,
        )

    def compute(self, form: PolicyForm) -> Tensor:
        """Compute the loss under a form, with its graph."""
        return self._reduce(self._compute_tokens(form), form)

    @property
    def plain_residual(self) -> float | None:
        """How far the gradient of the replay's own loss is from the job's."""
        return self.measure_residual(self.compute(PolicyForm(spec=self.spec)))

    @property
    def num_gradients(self) -> int:
        return 0 if self.gradient_BA is None else int((self.gradient_BA != 0).sum())

    def select_gradients(self) -> Tensor | None:
        """Select places in the flattened [B, A] at which the job has a gradient; None if there are too few."""
        if self.gradient_BA is None:
            return None
        place_N = ((self.gradient_BA != 0) & self.inputs.action_mask_BA).flatten().nonzero()[:, 0]
        if len(place_N) < MANY_VALUES:
            return None
        return choose_positions(place_N)

    def make_plain_trial(self, words: str) -> TriedLoss:
        """Make the trial of the replay's own settings of these log-probs, which are a trial's already."""
        value = float(self.compute(PolicyForm(spec=self.spec)).detach())
        return TriedLoss(name=f"policy {words}", loss=value, gradient_apart=None, says=words, try_next=MEND_SETTINGS)

    def _compute_tokens(self, form: PolicyForm) -> Tensor:
        inputs, spec = self.inputs, form.spec
        log_probs_BA = inputs.log_probs_BA
        advantages_BA = self._read_advantages(form).to(log_probs_BA.dtype)
        old_BA = log_probs_BA.detach() if spec.on_policy else self._move(form.old, *OLD_LOG_PROBS)
        match form.ratio:
            case "log":
                loss_BA = -log_probs_BA * advantages_BA
            case "inverted":
                loss_BA = compute_clipped_loss(old_BA, log_probs_BA, advantages_BA, spec)
            case "sequence":
                sums = inputs.sum_by_sequence(log_probs_BA - old_BA) / inputs.num_tokens_by_sequence().clamp(min=1)
                ratio_BA = sums[inputs.recorded.sequence_BA]
                loss_BA = compute_clipped_loss(ratio_BA, torch.zeros_like(old_BA), advantages_BA, spec)
            case "chance":
                loss_BA = compute_clipped_loss(log_probs_BA, torch.zeros_like(old_BA), advantages_BA, spec)
            case _ if form.takes_worse:
                loss_BA = compute_clipped_loss(log_probs_BA, old_BA, advantages_BA, spec)
            case _:
                loss_BA = -compute_clipped_loss(log_probs_BA, old_BA, -advantages_BA, spec)
        loss_BA = form.sign * loss_BA
        if spec.kl_coefficient:
            reference_BA = inputs.of_tokens(*REF_LOG_PROBS).to(log_probs_BA.dtype)
            pair = (reference_BA, log_probs_BA) if form.swaps_kl else (log_probs_BA, reference_BA)
            divergence_BA = estimate_divergence(*pair, old_BA, spec.kl)
            loss_BA = loss_BA + form.kl_sign * spec.kl_coefficient * divergence_BA
        return loss_BA

    def _read_advantages(self, form: PolicyForm) -> Tensor:
        advantages_BA, mask_BA = self.inputs.of_tokens(*ADVANTAGES), self.inputs.action_mask_BA
        match form.advantages:
            case "ones":
                return torch.ones_like(advantages_BA)
            case "reversed" | "earlier" | "later":
                return self._move(form.advantages, *ADVANTAGES)
            case "centred":
                return advantages_BA - advantages_BA[mask_BA].mean()
            case "whitened":
                values_N = advantages_BA[mask_BA]
                return (advantages_BA - values_N.mean()) / (values_N.std(correction=0) + 1e-8)
        return advantages_BA

    def _move(self, how: str, *names: str) -> Tensor:
        """Return a noted tensor in the tokens' places, moved by a token or by rows."""
        values_BA = self.inputs.of_places(*names).to(self.inputs.log_probs_BA.dtype)
        match how:
            case "reversed":
                values_BA = values_BA.flip(0)
            case "earlier":
                values_BA = torch.nn.functional.pad(values_BA[:, 1:], (0, 1))
            case "later":
                values_BA = torch.nn.functional.pad(values_BA[:, :-1], (1, 0))
        return torch.where(self.inputs.action_mask_BA, values_BA, 0.0)

    def _reduce(self, loss_BA: Tensor, form: PolicyForm) -> Tensor:
        if not form.reduction:
            return reduce_loss(loss_BA, self.inputs, form.spec)
        total = torch.where(self.inputs.action_mask_BA, loss_BA, 0.0).sum()
        divisors = {"rows": len(loss_BA), "places": loss_BA.numel(), "sum": 1}
        return total / divisors[form.reduction]

    def measure_residual(
        self, loss: Tensor, entropy_weight: float = 0.0, form: PolicyForm | None = None
    ) -> float | None:
        """Measure how far the gradient of the targets' logits is from the job's, relatively and up to a factor."""
        if self.gradient_BA is None:
            return None
        own_BA = differentiate_targets(loss, self.inputs)
        if entropy_weight and self.entropy_BA is not None and form is not None:
            log_probs_BA = self.inputs.log_probs_BA.detach()
            ones_BA = torch.ones_like(log_probs_BA).requires_grad_()
            (share_BA,) = torch.autograd.grad(self._reduce(ones_BA, form), ones_BA)
            slope_BA = -log_probs_BA.exp() * (log_probs_BA + self.entropy_BA)
            own_BA = own_BA - torch.where(self.inputs.action_mask_BA, entropy_weight * share_BA * slope_BA, 0.0)
        return measure_distance(self.gradient_BA, own_BA)


def differentiate_targets(loss: Tensor, inputs: ObjectiveInputs) -> Tensor:
    """Differentiate a loss of log-probs by the logits of the tokens that these are of, [B, A]."""
    (weight_BA,) = torch.autograd.grad(loss, inputs.log_probs_BA, retain_graph=True)
    # Each log-prob has the derivative 1 - p by its own token's logit.
    own_BA = weight_BA * (1 - inputs.log_probs_BA.detach().exp())
    return torch.where(inputs.action_mask_BA, own_BA, 0.0)


def place_gradients(inputs: ObjectiveInputs) -> Tensor | None:
    """Place the recorded gradients [B, A] at the tokens that they predict; None if none tells anything."""
    gradient_BS, target_BS = inputs.find(LOSS_GRADIENTS), inputs.find(LOSS_TARGETS)
    num_actions = inputs.log_probs_BA.shape[1]
    if gradient_BS is None or target_BS is None or num_actions >= gradient_BS.shape[1]:
        return None
    gradient_BA = gradient_BS[:, -num_actions - 1 : -1].to(inputs.log_probs_BA.dtype)
    # What the loss is of besides is another matter than its formula.
    gradient_BA = torch.where(inputs.action_mask_BA, gradient_BA, 0.0)
    return gradient_BA if bool(gradient_BA.isfinite().all() & (gradient_BA != 0).any()) else None


def list_policy_trials(case: PolicyCase) -> Iterator[TriedLoss]:
    """Yield the losses with one change; then with two, which come near the job's loss and have no value of before."""
    plain = PolicyForm(spec=case.spec)
    own_value = float(case.compute(plain).detach())
    # A change that this pass does not show is left out.
    changes = [
        change for change in _list_changes(case) if not is_same_loss(_compute_value(case, plain, (change,)), own_value)
    ]
    pairs = [
        (first, second)
        for number, first in enumerate(changes)
        for second in changes[number + 1 :]
        if not first.keys & second.keys
    ]
    seen = [own_value]
    for chosen in [*((change,) for change in changes), *pairs]:
        loss = case.compute(_apply(plain, chosen))
        value = float(loss.detach())
        is_pair = len(chosen) > 1
        if is_pair and (any(is_same_loss(value, other) for other in seen) or not _is_near(value, case.job_loss)):
            continue
        seen.append(value)
        yield _make_trial(chosen, value, case.measure_residual(loss))
    for chosen in [(), *((change,) for change in changes)]:
        yield from _fit_terms(case, _apply(plain, chosen), chosen)


def _apply(form: PolicyForm, chosen: Sequence[PolicyChange]) -> PolicyForm:
    for change in chosen:
        form = replace(form, **change.form, spec=replace(form.spec, **change.spec))
    return form


def _compute_value(case: PolicyCase, form: PolicyForm, chosen: Sequence[PolicyChange]) -> float:
    return float(case.compute(_apply(form, chosen)).detach())


def _is_near(value: float, job_loss: float) -> bool:
    """Tell whether a value may be the job's loss; never where that is not known."""
    return abs(value - job_loss) <= NEAR_LOSS * max(1.0, abs(job_loss))


def _list_changes(case: PolicyCase) -> Iterator[PolicyChange]:
    spec = case.spec
    yield PolicyChange(says="does not clip the ratio", form={}, spec={"clip_low": 1.0, "clip_high": NEVER_CLIPPED},
                       typed="--clip-low 1 --clip-high 1e9")  # fmt: skip
    for name, reduction in (
        ("the mean of the sequences' means", Reduction.SEQUENCES),
        ("the mean over its tokens", Reduction.TOKENS),
        ("the sum over its tokens divided by the tokens of all passes of the step", Reduction.WINDOW_TOKENS),
    ):
        if spec.reduction is not reduction:
            yield PolicyChange(says=f"is {name}", form={}, spec={"reduction": reduction, "divisor": None},
                               typed=f"--reduction {reduction}")  # fmt: skip
    num_rows, num_columns = case.inputs.log_probs_BA.shape
    for says, reduction_name in (
        (f"is the sum over its tokens divided by the {num_rows} rows, not by the tokens", "rows"),
        (f"is divided by all {num_rows * num_columns} places of the rows, not by the action tokens", "places"),
        ("is the sum over its tokens, not their mean", "sum"),
    ):
        yield PolicyChange(says=says, form={"reduction": reduction_name}, spec={})
    yield PolicyChange(says="has the other sign: it goes down where the advantage is negative",
                       form={"sign": -1.0}, spec={})  # fmt: skip
    yield PolicyChange(says="takes the larger of the clipped and the unclipped gain, not the smaller",
                       form={"takes_worse": False}, spec={})  # fmt: skip
    yield PolicyChange(says="has the chances of the tokens in place of their ratio to the old ones",
                       form={"ratio": "chance"}, spec={})  # fmt: skip
    yield PolicyChange(says="is the advantage times the log-prob: it has no ratio to the old log-probs",
                       form={"ratio": "log"}, spec={})  # fmt: skip
    yield PolicyChange(says="has the pass's own log-probs for the old ones, so that each ratio is 1", form={},
                       spec={"on_policy": True}, typed="--on-policy")  # fmt: skip
    for ratio, says in (
        ("inverted", "has the ratio of the old policy to the new one"),
        ("sequence", "has one ratio for each sequence, of the mean of its log-ratios (GSPO)"),
    ):
        yield PolicyChange(says=says, form={"ratio": ratio}, spec={})
    for advantages, says in (
        ("whitened", "whitens the noted advantages once more, over the pass's tokens"),
        ("centred", "takes the mean of the noted advantages from each, over the pass's tokens"),
        ("ones", "has the advantage 1 for each token"),
        ("reversed", "has the advantages of the rows in reverse order"),
        ("earlier", "has for each token the advantage of the next one"),
        ("later", "has for each token the advantage of the one before"),
    ):
        yield PolicyChange(says=says, form={"advantages": advantages}, spec={})
    for old, says in (
        ("reversed", "has the old log-probs of the rows in reverse order"),
        ("earlier", "has for each token the old log-prob of the next one"),
        ("later", "has for each token the old log-prob of the one before"),
    ):
        if not spec.on_policy:
            yield PolicyChange(says=says, form={"old": old}, spec={})
    yield from _list_divergence_changes(spec)
    for low in CLIPS:
        yield PolicyChange(
            says=f"clips the ratio to {1 - low:g} ... {1 + low:g}",
            form={},
            spec={"clip_low": low, "clip_high": None},
            typed=f"--clip-low {low:g}",
        )
    for high in HIGH_CLIPS:
        yield PolicyChange(
            says=f"clips the ratio to no more than {1 + high:g}",
            form={},
            spec={"clip_high": high},
            typed=f"--clip-high {high:g}",
        )
    for bound in (2.0, 3.0, 10.0):
        yield PolicyChange(
            says=f"is at most {bound:g} times a negative advantage (dual clip)",
            form={},
            spec={"dual_clip": bound},
            typed=f"--dual-clip {bound:g}",
        )


def _list_divergence_changes(spec: ObjectiveSpec) -> Iterator[PolicyChange]:
    """Yield changes of a divergence that the replay's loss has."""
    if not spec.kl_coefficient:
        return
    yield PolicyChange(says="has no KL term", form={}, spec={"kl_coefficient": 0.0})
    yield PolicyChange(says="subtracts the KL", form={"kl_sign": -1.0}, spec={})
    yield PolicyChange(says="has policy and reference swapped in the KL", form={"swaps_kl": True}, spec={})
    for estimator in KlEstimator:
        if estimator is not spec.kl:
            yield PolicyChange(
                says=f"estimates the KL by {estimator}, not {spec.kl}",
                form={},
                spec={"kl": estimator},
                typed=f"--kl {estimator}",
            )


def _fit_terms(case: PolicyCase, form: PolicyForm, chosen: Sequence[PolicyChange]) -> Iterator[TriedLoss]:
    """Yield the loss with a divergence or an entropy in it, whose weight is what the job's loss leaves for it."""
    loss = case.compute(form)
    rest = case.job_loss - float(loss.detach())
    if case.inputs.find(*REF_LOG_PROBS) is not None and not form.spec.kl_coefficient:
        for estimator in KlEstimator:
            unit = replace(form, spec=replace(form.spec, kl=estimator, kl_coefficient=1.0))
            weight = _round(rest, float((case.compute(unit) - loss).detach()))
            if not weight:
                continue
            spec = replace(form.spec, kl=estimator, kl_coefficient=abs(weight))
            with_term = case.compute(replace(form, spec=spec, kl_sign=1.0 if weight > 0 else -1.0))
            what = "adds" if weight > 0 else "rewards the divergence from the reference: it subtracts"
            typed = f"--kl {estimator} --kl-coefficient {weight:g}" if weight > 0 else ""
            change = PolicyChange(
                says=f"{what} {abs(weight):g} times {estimator} of the reference", form={}, spec={}, typed=typed
            )
            yield _make_trial(
                (*chosen, change), float(with_term.detach()), case.measure_residual(with_term), is_fitted=True
            )
    if case.entropy_BA is not None and not form.spec.entropy_coefficient:
        mean = float(case._reduce(case.entropy_BA, form))
        weight = _round(-rest, mean)
        if weight:
            what = "subtracts" if weight > 0 else "punishes entropy: it adds"
            change = PolicyChange(
                says=f"{what} {abs(weight):g} times the entropy",
                form={},
                spec={},
                typed=f"--entropy-coefficient {weight:g}" if weight > 0 else "",
            )
            residual = case.measure_residual(loss, weight, form)
            yield _make_trial((*chosen, change), float(loss.detach()) - weight * mean, residual, is_fitted=True)


def _round(rest: float, unit: float) -> float:
    """Round what is left by the term's size to the digits of a coefficient; 0 where there is no term."""
    weight = float(f"{rest / unit:.{COEFFICIENT_DIGITS}g}") if abs(unit) > 1e-9 else 0.0
    return weight if abs(weight) >= LEAST_COEFFICIENT else 0.0


def _make_trial(
    chosen: Sequence[PolicyChange], loss: float, residual: float | None, *, is_fitted: bool = False
) -> TriedLoss:
    typed = " ".join(change.typed for change in chosen if change.typed)
    says = " and ".join(change.says for change in chosen)
    try_next = f"if the job is meant so: {typed}; else {MEND_SETTINGS}" if typed else MEND_SETTINGS
    return TriedLoss(
        name=f"policy {says}",
        loss=loss,
        gradient_apart=residual,
        says=says,
        try_next=try_next,
        num_changes=len(chosen),
        is_fitted=is_fitted,
    )


def fit_temperature(
    logits: TargetLogits, advantage_N: Tensor, old_N: Tensor, spec: ObjectiveSpec
) -> tuple[float, float]:
    """Fit the number that the job divides its logits by before its clipped loss; return it and what is left."""

    def differentiate(temperature: float) -> Tensor:
        log_probs_N = logits.take((logits.logits_NV / temperature).log_softmax(dim=1)).requires_grad_()
        loss = compute_clipped_loss(log_probs_N, old_N, advantage_N, spec).sum()
        (weight_N,) = torch.autograd.grad(loss, log_probs_N)
        return weight_N * (1 - log_probs_N.detach().exp()) / temperature

    number, residual = search_number(logits, differentiate, TEMPERATURES)
    return float(f"{number:.{COEFFICIENT_DIGITS}g}"), residual
