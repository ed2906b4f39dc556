"""Choose the objective that --loss names, check that a capture has what it needs, and compute it.

An objective's module defines a `Formula`: its loss, what it needs of a capture, and its words for the header.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from actor_init.custom.user_file import UserFunction
from actor_init.inputs.packing import ActorInputs
from capture.facts import Setting
from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import (
    LOSS_MISFIT,
    CaptureError,
    MicroBatch,
    with_loss_targets_as_labels,
    with_shift_labels_as_labels,
)
from replay.objective.inputs import ObjectiveData, ObjectiveError, ObjectiveInputs
from replay.options.declarations import OBJECTIVES
from replay.options.declarations.policy import POLICY
from replay.options.declarations.recorded import FROM_LOGIT_GRADIENT
from replay.options.declarations.tensor_names import ADVANTAGES, OLD_LOG_PROBS
from replay.options.needed_tensors import explain_missing
from replay.options.spec import USER_LOSS_PATTERN, LossName, ObjectiveSpec, ReplayParts, is_objective
from replay.tolerances.difference import is_coarse


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """A tensor that a capture must have, under one of some names; `or_else` says what to type where it has none."""

    names: tuple[str, ...]
    or_else: str = ""


def need_nothing(recorded: ObjectiveData, spec: ObjectiveSpec) -> Iterable[Need]:
    return ()


def is_never(spec: ObjectiveSpec) -> bool:
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """What an objective computes, each part by the settings of --loss.

    loss              of a pass, a tensor of one number. Raises ObjectiveError
    describe          its settings, for the header
    needs             what a capture must have. Shapes are checked in the pass
    asks_entropies    does `loss` ask for the inputs' entropies?
    asks_logits       may it ask for their logits, which are then computed whole?
    sums_over_window  is a pass's loss its share of the step's, so that the passes of a step add up?
    """

    loss: Callable[[ObjectiveInputs, ObjectiveSpec], Any]
    describe: Callable[[ObjectiveSpec], list[str]]
    needs: Callable[[ObjectiveData, ObjectiveSpec], Iterable[Need]] = need_nothing
    asks_entropies: Callable[[ObjectiveSpec], bool] = is_never
    asks_logits: bool = False
    sums_over_window: Callable[[ObjectiveSpec], bool] = is_never


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A job's own loss: one that is declared, or the user's function.

    sha256  of the user's file; None for the others
    """

    loss: str
    spec: ObjectiveSpec
    formula: Formula
    sha256: str | None = None

    @classmethod
    def open(cls, spec: ReplayParts) -> "Objective | None":
        """Open what --loss names; None for stand-in and sft. Raises UsageError for a file that cannot be loaded."""
        loss, settings = spec.measure.loss, spec.objective
        if not is_objective(loss):
            return None
        if loss in OBJECTIVES:
            return cls(loss=loss, spec=settings, formula=resolve_name(OBJECTIVES[loss].formula))
        user_loss = USER_LOSS_PATTERN.fullmatch(loss)
        assert user_loss is not None
        user_function = UserFunction.open(Path(user_loss["file"]), user_loss["function"], setting="loss")
        function, sha256 = user_function.load(), user_function.sha256
        formula = Formula(
            loss=lambda inputs, spec: function(inputs),
            describe=lambda spec: [f"sha256 {sha256[:12]}"],
            asks_logits=True,
        )
        return cls(loss=loss, spec=settings, formula=formula, sha256=sha256)

    @property
    def needs_logits_or_entropies(self) -> bool:
        """May the loss ask for logits, or for entropies?"""
        return self.needs_whole_logits or self.formula.asks_entropies(self.spec)

    @property
    def needs_whole_logits(self) -> bool:
        """May the loss ask for logits? A user's function may."""
        return self.formula.asks_logits

    @property
    def sums_over_window(self) -> bool:
        """Is a pass's loss its share of the step's, so that the passes of a step add up?"""
        return self.formula.sums_over_window(self.spec)

    def __call__(self, inputs: ObjectiveInputs) -> Tensor:
        """Compute the loss of one pass. Raises ObjectiveError, or what the user's function raises."""
        loss, setting = self.formula.loss(inputs, self.spec), Setting("loss", self.loss)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ObjectiveError(setting, f"returned {kind}; it must return a tensor of one number")
        if inputs.log_probs_BA.requires_grad and not loss.requires_grad:
            advice = "Compute it from inputs.log_probs_BA, inputs.logits() or inputs.entropies(), not detached"
            advice = f"{advice}. Try: {Setting('backward', False)}"
            raise ObjectiveError(setting, "returned a number without a gradient", advice)
        return loss.reshape(())

    def check(self, recorded: ObjectiveData) -> None:
        """Raise ObjectiveError if a capture lacks what a declared objective needs. Shapes are checked in the pass."""
        if self.sha256 is not None:
            return
        if not recorded.has_action_mask:
            raise ObjectiveError(
                recorded.source,
                f": nothing says which tokens {Setting('loss', self.loss)} is over: no action mask, no labels",
                "Try: recorder.note(action_mask=...) in the job (docs/objectives.md)",
            )
        for need in self.formula.needs(recorded, self.spec):
            if not any(name in recorded.tensors for name in need.names):
                raise ObjectiveError(
                    explain_missing(recorded, need.names) + (f"; {need.or_else}" if need.or_else else "")
                )

    def describe(self, *, is_noted: bool = False) -> str:
        """Describe the objective for the header. Of one that the job noted the settings are defaults."""
        settings = self.formula.describe(self.spec)
        if is_noted and self.loss != FROM_LOGIT_GRADIENT.name:
            return f"{self.loss}, as the job noted it; by default {', '.join(settings)}"
        return ", ".join([self.loss, *settings])


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWeights:
    """What the log-probs of one row weigh, of those that weigh something.

    least, most  of targets that are not all but certain; 0 where all are
    """

    total: float
    num_targets: int
    least: float
    most: float


# Of a likelier target rounding leaves little of the weight that is taken from a gradient.
MAX_CHANCE = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbWeights:
    """What the log-probs weigh in a pass's loss: minus its derivatives by them.

    total  their sum, 1 for a negated mean of log-probs
    size   the sum of their sizes: how far the loss moves if each log-prob moves by 1, each in the worst direction
    least, most  of the log-probs that weigh something, and that are finite
    rows   the same row by row, of rows with such log-probs
    """

    total: float = 1.0
    size: float = 1.0
    least: float = 0.0
    most: float = 0.0
    rows: Sequence[RowWeights] = ()


# The weights of log-probs in their negated mean.
WEIGHTS_IN_MEAN = LogProbWeights()


def measure_log_prob_weights(loss: Tensor, log_probs_BA: Tensor) -> LogProbWeights:
    """Measure what the log-probs weigh; of a loss without a graph, as if it were their mean.

    The verdict's bound on a loss is made for a mean, and grows with the size.
    """
    if not loss.requires_grad:
        return WEIGHTS_IN_MEAN
    (gradient,) = torch.autograd.grad(loss, log_probs_BA, retain_graph=True, allow_unused=True)
    if gradient is None:
        return WEIGHTS_IN_MEAN
    weights_BA = -gradient.detach()
    counts_BA = (weights_BA != 0) & weights_BA.isfinite()
    is_doubted_BA = counts_BA & (log_probs_BA.detach() < math.log(MAX_CHANCE))
    by_row_7B = torch.stack(
        [
            weights_BA.sum(dim=1),
            weights_BA.abs().sum(dim=1),
            torch.where(counts_BA, weights_BA, torch.inf).amin(dim=1),
            torch.where(counts_BA, weights_BA, -torch.inf).amax(dim=1),
            counts_BA.sum(dim=1),
            torch.where(is_doubted_BA, weights_BA, torch.inf).amin(dim=1),
            torch.where(is_doubted_BA, weights_BA, -torch.inf).amax(dim=1),
        ]
    )
    totals, sizes, leasts, mosts, counts, doubted_leasts, doubted_mosts = by_row_7B.tolist()
    rows = [
        RowWeights(
            total=total,
            num_targets=int(count),
            least=least if least <= most else 0.0,
            most=most if least <= most else 0.0,
        )
        for total, count, least, most in zip(totals, counts, doubted_leasts, doubted_mosts, strict=True)
        if count
    ]
    return LogProbWeights(total=sum(totals), size=sum(sizes), least=min(leasts), most=max(mosts), rows=rows)


def describe_loss(objective: Objective | None, spec: ReplayParts, first: CapturedCall | None, *, is_noted: bool) -> str:
    """Describe the loss for the header, and say when it was not asked for.

    first     a capture that says of what it is
    is_noted  the objective is there because the job noted its loss
    """
    if objective is not None:
        return objective.describe(is_noted=is_noted)
    loss = spec.measure.loss
    return f"{loss}{', by default' if loss == LossName.STAND_IN else ''}: {_describe_mean(loss, first)}"


def _describe_mean(loss: str, first: CapturedCall | None) -> str:
    """Say what the stand-in or sft is the mean over, as `prepare_inputs` chooses the tokens."""
    try:
        batch = None if first is None else select_loss_tokens(loss, first.micro_batch())
    except CaptureError:
        # The pass itself will report what is wrong with the capture.
        batch = None
    if batch is None:
        sft_mean = "the mean cross entropy of the labels, or of all real tokens"
        return sft_mean if loss == LossName.SFT else "the mean cross entropy of the action tokens"
    if batch.action_mask_BA is not None:
        return "the mean cross entropy of the action tokens"
    lacking = ", for there is no action mask" if loss == LossName.STAND_IN else ""
    if batch.labels_BS is None and batch.shift_labels is None:
        return f"the mean cross entropy of all real tokens{lacking or ', for there are no labels'}"
    return f"the mean cross entropy of the labels{lacking}"


def select_loss_tokens(loss: str, batch: MicroBatch) -> MicroBatch:
    """Give `batch` the action mask that `loss` averages over.

    sft drops the captured action mask, so that the loss is over the labels, or over every real token if there are
    none. A job's objective is of a row's own tokens, so that `shift_labels` are labels there.
    """
    if loss == FROM_LOGIT_GRADIENT.name:
        return with_loss_targets_as_labels(batch)
    if is_objective(loss):
        return with_shift_labels_as_labels(batch)
    return replace(batch, action_mask_BA=None) if name_loss(loss, batch) == LossName.SFT else batch


def name_loss(loss: str, batch: MicroBatch) -> str:
    """Name the loss that `loss` is for a micro-batch: `auto` is sft where there are labels, else the stand-in."""
    if loss != LossName.AUTO:
        return loss
    has_labels = batch.labels_BS is not None or batch.shift_labels is not None
    return LossName.SFT if has_labels else LossName.STAND_IN


# Which share of the gradient of a pass's logits may not be of the form that a loss of log-probs gives it: what rounding
# of the gradient's entries makes of their sum.
MAX_MISFIT, MAX_COARSE_MISFIT = 1e-4, 1e-2


def is_of_log_probs(call: CapturedCall, dtypes: Sequence[str]) -> bool:
    """Tell whether the job's loss depends on its logits through the log-probs of its targets alone.

    Not where fp16 was in use: the loss may have been scaled, by a number that is not recorded with the pass.

    dtypes  in which the job computed
    """
    misfit = call.notes.get(LOSS_MISFIT)
    return misfit is not None and "float16" not in dtypes and float(misfit) <= _choose_misfit_bound(dtypes)


def explain_unusable_logit_gradient(call: CapturedCall, dtypes: Sequence[str]) -> str | None:
    """Say why `is_of_log_probs` does not hold of a pass; None if it does, and if nothing usable was recorded."""
    misfit = float(call.notes.get(LOSS_MISFIT, math.nan))
    if not math.isfinite(misfit):
        return None
    if misfit > _choose_misfit_bound(dtypes):
        return (
            f"{misfit:.2%} of the gradient of the job's logits cannot come from a loss of log-probs; label smoothing, "
            "a temperature or an entropy may have made it"
        )
    if "float16" in dtypes:
        return "the job's loss may have been scaled for float16 by a number that is not recorded"
    return None


def _choose_misfit_bound(dtypes: Sequence[str]) -> float:
    return MAX_COARSE_MISFIT if is_coarse(dtypes) else MAX_MISFIT


def name_shown_objective(call: CapturedCall, batch: MicroBatch, dtypes: Sequence[str]) -> str | None:
    """Name the objective that a pass shows; None if it shows none.

    It is that of the loss that the job noted with what it is computed from; else FROM_LOGIT_GRADIENT, where the
    gradient of the logits tells all of the loss.
    """
    if not call.trains:
        return None
    names = call.tensors.keys() | call.notes.keys()
    has_needs = all(any(name in names for name in need) for need in (ADVANTAGES, OLD_LOG_PROBS))
    has_tokens = batch.action_mask_BA is not None or batch.labels_BS is not None
    if has_needs and has_tokens and isinstance(call.outputs.get("noted_loss"), float):
        return POLICY.name
    return FROM_LOGIT_GRADIENT.name if batch.loss_targets_BS is not None and is_of_log_probs(call, dtypes) else None


def padding_may_predict_label(spec: ReplayParts) -> bool:
    """May a label count that padding predicts, as in a model's own loss, if rows are padded as captured?

    Not where packed rows were typed, nor where parity compares runs of the same tokens in any layout.
    """
    actor, measure = spec.actor, spec.measure
    is_of_actions = is_objective(measure.loss) and measure.loss != FROM_LOGIT_GRADIENT.name
    return not (actor.packing or actor.parallel.ring > 1 or measure.details or is_of_actions)


def compute_negated_mean(log_probs_BA: Tensor, inputs: ActorInputs) -> Tensor:
    """Compute minus the mean log-prob of the micro-batch's action tokens; 0 if there are none."""
    return -log_probs_BA.sum() / inputs.action_mask_BA.sum().clamp(min=1)
