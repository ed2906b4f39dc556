"""Choose the objective that --loss names, check that a capture has what it needs, and compute it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actor_init.custom.user_file import UserFunction
from capture.facts import Setting
from capture.file_format.capture_file import Call
from capture.file_format.micro_batch import CaptureError
from replay.loss import tokens_for
from replay.objective import names
from replay.objective.dpo import dpo_loss
from replay.objective.inputs import ObjectiveError, ObjectiveInputs, Recorded, missing
from replay.objective.policy import policy_loss
from replay.spec import USER_LOSS, LossName, ObjectiveSpec, Parts, Reduction, is_objective

ON_POLICY = f"where the samples are the policy's own, {Setting('on_policy', True)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A job's own loss: `policy`, `dpo`, or the user's function.

    sha256  of the user's file; None for the others
    """

    loss: str
    spec: ObjectiveSpec
    function: Callable[[Any], Any]
    sha256: str | None = None

    @classmethod
    def of(cls, spec: Parts) -> "Objective | None":
        """Return what --loss names; None for stand-in and sft. Raises UsageError for a file that cannot be loaded."""
        loss, settings = spec.measure.loss, spec.objective
        if not is_objective(loss):
            return None
        match loss:
            case LossName.POLICY:
                return cls(loss=loss, spec=settings, function=lambda inputs: policy_loss(inputs, settings))
            case LossName.DPO:
                return cls(loss=loss, spec=settings, function=lambda inputs: dpo_loss(inputs, settings))
        named = USER_LOSS.fullmatch(loss)
        assert named is not None
        own = UserFunction.open(Path(named["file"]), named["function"], setting="loss")
        return cls(loss=loss, spec=settings, function=own.found(), sha256=own.sha256)

    @property
    def needs_logits(self) -> bool:
        """May the loss ask for logits, or for entropies?"""
        return self.needs_whole_logits or self.spec.entropy_coefficient > 0

    @property
    def needs_whole_logits(self) -> bool:
        """May the loss ask for logits? A user's function may."""
        return self.sha256 is not None

    @property
    def is_share_of_window(self) -> bool:
        """Is a pass's loss its share of the step's, so that the passes of a step add up?"""
        return self.loss == LossName.POLICY and self.spec.reduction is Reduction.WINDOW_TOKENS

    def __call__(self, inputs: ObjectiveInputs) -> Tensor:
        """Compute the loss of one pass. Raises ObjectiveError, or what the user's function raises."""
        loss, given = self.function(inputs), Setting("loss", self.loss)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ObjectiveError(given, f"returned {kind}; it must return a tensor of one number")
        if inputs.log_probs_BA.requires_grad and not loss.requires_grad:
            advice = "Compute it from inputs.log_probs_BA, inputs.logits() or inputs.entropies(), not detached"
            advice = f"{advice}. Try: {Setting('backward', False)}"
            raise ObjectiveError(given, "returned a number without a gradient", advice)
        return loss.reshape(())

    def check(self, recorded: Recorded) -> None:
        """Raise ObjectiveError if a capture lacks what `policy` or `dpo` needs. Shapes are checked in the pass."""
        if self.sha256 is not None:
            return
        if not recorded.has_action_mask:
            raise ObjectiveError(
                recorded.source,
                f": nothing says which tokens {Setting('loss', self.loss)} is over: no action mask, no labels",
                "Try: recorder.note(action_mask=...) in the job (docs/objectives.md)",
            )
        for wanted, or_else in self._needs(recorded):
            if not any(name in recorded.tensors for name in wanted):
                raise ObjectiveError(missing(recorded, wanted) + (f"; {or_else}" if or_else else ""))

    def _needs(self, recorded: Recorded) -> list[tuple[tuple[str, ...], str]]:
        if self.loss == LossName.DPO:
            has_pairs = all(names_[0] in recorded.tensors for names_ in (names.REF_CHOSEN, names.REF_REJECTED))
            return [] if has_pairs else [(names.REF_LOG_PROBS, "")]
        needs: list[tuple[tuple[str, ...], str]] = [(names.ADVANTAGES, "")]
        needs += [] if self.spec.on_policy else [(names.OLD_LOG_PROBS, ON_POLICY)]
        needs += [(names.REF_LOG_PROBS, f"or without {Setting('kl_coefficient')}")] if self.spec.kl_coefficient else []
        has_divisor = self.spec.divisor or any(name in recorded.numbers for name in names.DIVISOR)
        lacks_divisor = self.spec.reduction is Reduction.DIVISOR and not has_divisor
        return needs + ([(names.DIVISOR, f"or {Setting('divisor', 'X')}")] if lacks_divisor else [])

    def described(self) -> str:
        """Describe the objective for the header."""
        match self.loss:
            case LossName.POLICY:
                return f"policy, {', '.join(self._of_policy())}"
            case LossName.DPO:
                parts = [f"beta {self.spec.dpo_beta:g}", f"pairs in {self.spec.pairs}"]
                parts += [f"label smoothing {self.spec.label_smoothing:g}"] if self.spec.label_smoothing else []
                parts += ["mean log-probs"] if self.spec.average_log_probs else []
                return f"dpo, {', '.join(parts)}"
        assert self.sha256 is not None
        return f"{self.loss}, sha256 {self.sha256[:12]}"

    def _of_policy(self) -> list[str]:
        spec = self.spec
        high = spec.clip_low if spec.clip_high is None else spec.clip_high
        parts = [f"ratio clipped to {1 - spec.clip_low:g} ... {1 + high:g}", f"reduction {spec.reduction}"]
        parts += [f"divisor {spec.divisor:g}"] if spec.divisor is not None else []
        parts += ["on policy"] if spec.on_policy else []
        parts += [f"dual clip {spec.dual_clip:g}"] if spec.dual_clip is not None else []
        parts += [f"KL {spec.kl} x {spec.kl_coefficient:g}"] if spec.kl_coefficient else []
        parts += [f"entropy x {spec.entropy_coefficient:g}"] if spec.entropy_coefficient else []
        return parts


def gain(loss: Tensor, log_probs_BA: Tensor) -> float:
    """Return how far the loss moves if each log-prob moves by 1, each in the worst direction.

    A mean of log-probs has 1: the verdict's bound on a loss is made for that, and grows with it.
    """
    if not loss.requires_grad:
        return 1.0
    (gradient,) = torch.autograd.grad(loss, log_probs_BA, retain_graph=True, allow_unused=True)
    return 1.0 if gradient is None else float(gradient.abs().sum())


def described_loss(objective: Objective | None, spec: Parts, first: Call | None) -> str:
    """Describe the loss for the header, and say when it was not asked for. `first` is a capture that says of what."""
    if objective is not None:
        return objective.described()
    loss = spec.measure.loss
    return f"{loss}{', by default' if loss == LossName.STAND_IN else ''}: {_mean_of(loss, first)}"


def _mean_of(loss: str, first: Call | None) -> str:
    """Say what the stand-in or sft is the mean over, as `actor_inputs` chooses the tokens."""
    try:
        batch = None if first is None else tokens_for(loss, first.micro_batch())
    except CaptureError:  # the pass itself will report it
        batch = None
    if batch is None:
        of_sft = "the negated mean log-prob of the labels, or of all real tokens"
        return of_sft if loss == LossName.SFT else "the negated mean log-prob of the action tokens"
    if batch.action_mask_BA is not None:
        return "the negated mean log-prob of the action tokens"
    lacking = ", for there is no action mask" if loss == LossName.STAND_IN else ""
    if batch.labels_BS is None and batch.shift_labels is None:
        return f"the negated mean log-prob of all real tokens{lacking or ', for there are no labels'}"
    return f"the mean cross entropy of the labels{lacking}"
