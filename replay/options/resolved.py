"""Hold one replay with every choice made, and who made it. `replay/resolution/resolve.py` makes the choices.

What runs, measures, judges and logs a replay reads this, and never the spec that somebody typed.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self, TypeVar

from actor_init.declarations.attention import KERNELS as ATTENTION_KERNELS
from actor_init.spec import ActorSpec, Attention, Dtype, Head, Kernels, OptimizerName, Routing
from replay.options.spec import InputsSpec, MeasureSpec, ObjectiveSpec, ReplayParts, ReplaySpec, StepMode

# A log is read without these heavy imports.
if TYPE_CHECKING:
    import torch

    from actor_init.model import ModelSource
    from actor_init.schedule_and_norm import StepSettings
    from actor_init.world import World

ATTENTION = "actor.attention"
PACKING = "actor.packing"
KERNELS = "actor.kernels"
ROUTING = "actor.routing"
HEAD = "actor.head"
TP_PLAN = "actor.parallel.tp_plan"
STEP = "measure.step"
LOSS = "measure.loss"
FUSED_MODULES = "fused modules"
LOSS_SCALE = "loss scale"
KNOWN_WHEN_OPEN = "known once the actor is open"
# Choices of torch, a backend, this machine or the captures. The command that repeats a run leaves them out, so that
# they are made anew where it is typed.
LEFT_TO_OTHER_MACHINES = {
    *(ATTENTION, HEAD, ROUTING),
    "actor.zero_stage",
    *(f"actor.{name}" for name in ("weight_decay", "beta1", "beta2", "eps", "momentum")),
    *("actor.optimizer", "actor.max_norm", "measure.loss", "measure.step"),
    "inputs.inputs",
    "objective.clip_high",
}


PartT = TypeVar("PartT", ActorSpec, InputsSpec, MeasureSpec, ObjectiveSpec)


class ChosenBy(StrEnum):
    """Who made a choice."""

    TYPED = "typed"
    OPTION = "another option"
    JOB = "the job"
    MODEL = "the model"
    MACHINE = "the machine"
    DEFAULT = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedChoice:
    """One setting of a run, its value, and who chose it.

    setting  the path of a spec's field, such as `actor.dtype`; a name without a point for what no option sets
    value    plain: text, a number, a truth, a path or None
    why      empty where the value and who chose it say all
    """

    setting: str
    value: Any
    by: ChosenBy
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedReplay(ReplayParts):
    """One replay with every choice made. None is a value, and no setting is `auto`, with two exceptions.

    `--attention` stays `auto` if no value of the option names the kernel (cuDNN for long documents, a ring's), which
    `kernel` names; and `--tp-plan` if nothing is split.

    source            the model: the layout of rows, how log-probs come from its head, what is frozen
    kernel            the attention kernel's name in transformers
    attention_reason  why that kernel, for readers who may expect another; else empty
    why_whole_logits  what of the run needs whole logits, whatever the job had; empty if nothing does
    step_settings     of the steps that are taken as the job took them, by the index of the pass that ends the window
    setting_names_from_job  names, by torch, of the settings that these steps take from the job's; FAMILY is among
                      them if no optimizer was typed
    job_code_clip_norm  the norm that the job clipped to with code of its own and not by clip_grad_norm_, inferred from
                      its recorded gradients; None: it did not clip so
    first_forward_with_other_trained_parameters  the job's first forward that trained other parameters than the forwards
                      before it, if this backend cannot change what it trains; else None
    """

    source: "ModelSource"
    device: "torch.device"
    kernel: str
    choices: tuple[ResolvedChoice, ...]
    attention_reason: str = ""
    why_whole_logits: str = ""
    step_settings: "Mapping[int, StepSettings]" = field(default_factory=dict)
    setting_names_from_job: frozenset[str] = frozenset()
    job_code_clip_norm: float | None = None
    first_forward_with_other_trained_parameters: int | None = None

    def __post_init__(self) -> None:
        ReplayParts.__post_init__(self)
        actor = self.actor
        missing = [
            name
            for name, is_open in {
                "actor.dtype": actor.dtype is Dtype.AUTO,
                PACKING: actor.packing is None,
                KERNELS: actor.kernels is Kernels.AUTO,
                ROUTING: actor.routing is Routing.AUTO,
                HEAD: actor.head is Head.AUTO,
                "actor.grad_accumulation": actor.grad_accumulation is None,
                "actor.optimizer": actor.optimizer == OptimizerName.AUTO,
                STEP: self.measure.step is StepMode.AUTO,
            }.items()
            if is_open
        ]
        assert not missing, f"{', '.join(missing)}: not resolved"

    @property
    def steps_unasked(self) -> bool:
        """Does the optimizer step because the job's steps can be followed, and not because --step was typed?"""
        return self.measure.steps and self.find_chooser(STEP) is ChosenBy.JOB

    def find_chooser(self, setting: str) -> ChosenBy:
        """Find who chose a setting; a default that nobody had to choose is one."""
        return next((choice.by for choice in self.choices if choice.setting == setting), ChosenBy.DEFAULT)

    def to_spec(self) -> ReplaySpec:
        """Return what to type for the same run: with what the job and the model decided, not what a machine did."""
        reset = {
            choice.setting
            for choice in self.choices
            if choice.setting in LEFT_TO_OTHER_MACHINES
            and (choice.by is ChosenBy.MACHINE if choice.setting == ATTENTION else choice.by is not ChosenBy.TYPED)
        }
        return ReplaySpec(
            actor=_reset_settings(self.actor, "actor", reset),
            inputs=_reset_settings(self.inputs, "inputs", reset),
            measure=_reset_settings(self.measure, "measure", reset),
            state=self.state,
            objective=_reset_settings(self.objective, "objective", reset),
        )

    def complete(self, facts: Mapping[str, str | int], loss_scale: float) -> Self:
        """Complete the run with what the open actor alone can tell: its plan for tp, fused modules, and loss scale."""
        known = {TP_PLAN: facts.get("tp_plan"), FUSED_MODULES: facts.get("kernels"), LOSS_SCALE: loss_scale}
        return replace(
            self,
            choices=tuple(
                choice if (value := known.get(choice.setting)) is None else replace(choice, value=value)
                for choice in self.choices
            ),
        )

    def derive_variant(
        self,
        world: "World",
        *,
        why: str,
        actor: ActorSpec | None = None,
        inputs: InputsSpec | None = None,
        measure: MeasureSpec | None = None,
        source: "ModelSource | None" = None,
    ) -> Self:
        """Derive a run with other parts, checked again. An attention kernel that is `auto` there is chosen anew.

        All ranks must call this. Raises UsageError, on all of them, if that is not possible on one.
        """
        from actor_init.attention.kernel_choice import choose_kernel_name_on_all_ranks

        parts: dict[str, Any] = {"actor": actor or self.actor, "inputs": inputs or self.inputs}
        parts["measure"] = measure or self.measure
        changed = {
            f"{part}.{declared.name}": getattr(spec, declared.name)
            for part, spec in parts.items()
            for declared in fields(spec)
            if getattr(spec, declared.name) != getattr(getattr(self, part), declared.name)
        }
        is_open = parts["actor"].attention == Attention.AUTO
        kernel = choose_kernel_name_on_all_ranks(parts["actor"], world, self.source.config)
        parts["actor"] = replace_auto_attention(parts["actor"], kernel)
        # Another dtype may have another kernel, too.
        if kernel != self.kernel:
            changed[ATTENTION] = kernel
        kept_choices = [choice for choice in self.choices if choice.setting not in changed]
        new_choices = [
            ResolvedChoice(
                setting=setting,
                value=kernel if setting == ATTENTION else value,
                by=ChosenBy.MACHINE if setting == ATTENTION and is_open else ChosenBy.DEFAULT,
                why=why,
            )
            for setting, value in changed.items()
        ]
        return replace(
            self, **parts, source=source or self.source, kernel=kernel, choices=(*kept_choices, *new_choices)
        )


def replace_auto_attention(actor: ActorSpec, kernel: str) -> ActorSpec:
    """Return `actor` with the value of --attention whose kernel is `kernel` in transformers.

    `auto` stays where no other value names it, as where two kernels are taken in turn.
    """
    if actor.attention == Attention.AUTO and not actor.has_user_model:
        for declared in ATTENTION_KERNELS.values():
            if kernel in {form.name for form in declared.list_forms()}:
                return replace(actor, attention=declared.option_value)
    return actor


def _reset_settings(part: PartT, name: str, settings: Collection[str]) -> PartT:
    defaults: dict[str, Any] = {
        declared.name: declared.default for declared in fields(part) if f"{name}.{declared.name}" in settings
    }
    return replace(part, **defaults)
