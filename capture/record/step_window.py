"""Collect what a job does from one optimizer step to the next: passes, shares of their losses, gradients, the norm.

A step may have several parts: several optimizers step, or one is called for its partitions one after the other
(DeepSpeed). Parts without a pass with autograd on between them are one step.
"""

import math
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from capture.file_format.optimizer_step import OptimizerStep, merge_equal_settings
from capture.record import optimizer_hooks
from capture.record.engine_gradients import (
    EngineGradients,
    count_skipped_steps,
    find_engine_optimizer,
    has_engine_stepped,
)
from capture.record.gradient_signer import GradientSigner, RawSignatures
from capture.record.host_copy import copy_to_host, is_capturing_graph
from capture.record.parameter_sampler import ParameterSampler, RawSamples
from capture.record.sharding import copy_local_norm
from capture.record.state_sampler import RawState, StateSampler

# So many groups of an optimizer have their settings kept.
_MAX_GROUPS = 64
# A setting that is a word, as Muon's `adjust_lr_fn`, is not longer.
_MAX_WORD = 40
# Adafactor's eps may be (None, 0.001).
_PLAIN_MEMBERS = (bool, int, float, type(None))
# Attributes of an optimizer that are settings of its step.
_MODES = ("adam_w_mode", "decoupled_weight_decay")
# Keys of a group that are none: fused classes count a group's steps, and those are kept as the state's.
_NO_SETTINGS = ("params", "param_names", "step")
# Names, or beginnings of names, of numbers that are copied to the host.
_SHARE, _SETTING, _NORM = "share ", "setting ", "norm"
# Names of what was sampled beside them.
_GRADIENTS, _SIGNATURES, _STATE, _STATE_STEPS = "gradients", "signatures", "state", "state steps"
_FOUND_INF = "found inf"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPart:
    """One part of a step, as it is handed to the writer. Its tensors are on the host once `copy_events` have happened.

    step     all but the tensors
    numbers  one each, by name
    """

    step: OptimizerStep
    gradients: RawSamples | None
    signatures: RawSignatures | None
    state: RawState | None
    numbers: Mapping[str, Tensor]
    copy_events: list[torch.cuda.Event]

    def make_step(self) -> OptimizerStep | None:
        """Return the step as it is written, once everything is on the host; None if GradScaler left it out."""
        values = {name: float(value.item()) for name, value in self.numbers.items()}
        if values.get(_FOUND_INF):
            return None
        settings = [dict(group) for group in self.step.settings]
        for name, value in values.items():
            if name.startswith(_SETTING):
                group, key = name.removeprefix(_SETTING).split(" ", 1)
                settings[int(group)][key] = value
        state = () if self.state is None else self.state.to_samples()
        state_steps = () if self.state is None else self.state.list_steps()
        has_values = any(value for sample in state for values in sample.values.values() for value in values)
        return replace(
            self.step,
            shares=tuple(values.get(f"{_SHARE}{number}") for number in self.step.passes),
            gradients=None if self.gradients is None else self.gradients.to_parameter_samples(),
            signatures=() if self.signatures is None else self.signatures.to_signatures(),
            grad_norm=values.get(_NORM),
            settings=merge_equal_settings(settings),
            state=state,
            state_steps=state_steps,
            # A fused optimizer makes its state in a step that GradScaler leaves out, and counts none.
            has_state=False if state_steps == (0,) and not has_values else self.step.has_state,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Clipping:
    """The gradients before the latest clipping, and what the clipping was given."""

    after_pass: int
    gradients: RawSamples | None
    signatures: RawSignatures | None
    without_gradient: Sequence[str]
    num_clipped: int | None
    max_norm: float | None
    norm: Tensor | None
    is_part_of_norm: bool

    @property
    def has_limit(self) -> bool:
        """Tell whether it may have changed the gradients: jobs that only want the norm clip to infinity."""
        return self.max_norm != math.inf


@dataclass(kw_only=True, slots=True)
class _WindowState:
    """What was seen since the last step.

    passes, shares           numbers of the passes, and the shares of their losses in what the job differentiates
    clipping                 the latest clipping that counts
    unapplied_norm           the limit of a clipping that found no gradient
    norm_without_parameters  that of one that was given no parameter, as a generator that something else has used up
    clippings                behind which pass each clipping came, -1 if it was not of all gradients; its norm's order,
                             and its limit
    stepped                  what has stepped, and on which parameters
    sampled_names            names of the parameters whose gradients are in the parts of the step so far
    signed_names             the same of the signatures
    signs                    whether the gradients of this step are to be signed at all; None: not decided yet
    """

    passes: list[int] = field(default_factory=list)
    shares: dict[int, Tensor] = field(default_factory=dict)
    watched_passes: set[int] = field(default_factory=set)
    has_recorded_pass: bool = False
    clipping: _Clipping | None = None
    unapplied_norm: float | None = None
    norm_without_parameters: float | None = None
    was_clipped_before_last_pass: bool = False
    clips_otherwise: bool = False
    clippings: list[tuple[int, float | None, Any]] = field(default_factory=list)
    has_late_clipping: bool = False
    has_stepped: bool = False
    stepped: dict[weakref.ref[Optimizer], tuple[Any, ...]] = field(default_factory=dict)
    sampled_names: set[str] = field(default_factory=set)
    signed_names: set[str] = field(default_factory=set)
    signs: bool | None = None


class StepWindow:
    """Follows the passes and steps of one model, in the job's thread. Its methods may raise.

    number            that of the next step
    num_unseen_steps  steps that an optimizer took anew after one, with gradients and without a forward between them:
                      the job called another module, or stepped twice on one gradient
    unseen_after      the forward after which the first of them came
    num_late_clippings  steps whose gradients were clipped to a limit after the step, and not before it
    on_backward  is called with the number of a pass when its loss is differentiated
    """

    def __init__(self, sampler: ParameterSampler) -> None:
        self.number = 0
        self.num_unseen_steps = 0
        self.unseen_after: int | None = None
        self.num_late_clippings = 0
        self.on_backward: Callable[[int], None] = lambda forward: None
        self._sampler = sampler
        self._signer = GradientSigner(sampler)
        self._state_sampler = StateSampler(sampler)
        # For each optimizer that was seen: whether it trains the model, and DeepSpeed's optimizer around it.
        self._relations: weakref.WeakKeyDictionary[Optimizer, tuple[bool, weakref.ref[Any] | None]]
        self._relations = weakref.WeakKeyDictionary()
        # For each optimizer with several groups: what tells whether they are still the same, and their parameters.
        self._members: weakref.WeakKeyDictionary[Optimizer, tuple[tuple[Any, ...], list[str] | None]]
        self._members = weakref.WeakKeyDictionary()
        # How often a schedule set the rate of an optimizer since that stepped.
        self._schedule_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # The steps that the schedule of an optimizer has counted.
        self._schedule_counts: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        self._num_skipped = 0
        self._window = _WindowState()
        # A device may stand idle while a pass begins. So the window that it may begin is made by the step before, which
        # also lets go of the tensors of the last one.
        self._next_window: _WindowState | None = None
        self._last_window: _WindowState | None = None

    def _begin_window(self) -> None:
        self._last_window, self._window, self._next_window = self._window, self._next_window or _WindowState(), None

    def begin_pass(self, number: int) -> None:
        """Note that a forward with autograd on begins."""
        if self._window.has_stepped or self._has_lost_gradients():
            self._begin_window()
        self._window.passes.append(number)

    def keep_pass(self) -> bool:
        """Note that the pass that has begun is recorded. Returns whether it is the first one since the last step."""
        is_first, self._window.has_recorded_pass = not self._window.has_recorded_pass, True
        return is_first

    def watch_loss(self, number: int, loss: Tensor) -> None:
        """Watch the backward for the share of pass `number`.

        That is the derivative of what the job differentiates with respect to the pass's loss. The first loss that a
        pass is watched for counts: the model's own, otherwise the one that the loop noted.
        """
        if number in self._window.watched_passes or not loss.requires_grad or is_capturing_graph({"loss": loss}):
            return
        self._window.watched_passes.add(number)

        def add_share(gradient: Tensor | None) -> None:
            # DDP sends all outputs through one autograd function, also a loss that nobody differentiates.
            if gradient is None:
                return
            self.on_backward(number)
            share, earlier_share = gradient.detach().reshape(1), self._window.shares.get(number)
            self._window.shares[number] = share.clone() if earlier_share is None else earlier_share + share

        loss.register_hook(add_share)

    @property
    def may_sign(self) -> bool:
        """Tell whether the gradients of this step may be signed, for which their norms are of use."""
        return self._window.has_recorded_pass and (
            self._signer.is_due if self._window.signs is None else self._window.signs
        )

    def begin_clipping(
        self,
        parameters: Sequence[Tensor],
        max_norm: Any,
        norm: Any,
        other_rule: optimizer_hooks.OtherRule | None = None,
    ) -> None:
        """Sample the gradients of the model before these parameters are clipped.

        A job may clip several times before a step. What counts are the gradients before the first clipping with a limit
        since the latest pass, and that clipping's limit.
        """
        earlier = self._window.clipping
        if not self._window.has_recorded_pass:
            return
        ids = set(map(id, parameters))
        limit = float(max_norm) if isinstance(max_norm, int | float) else None
        if not ids and limit != math.inf and not self._window.has_stepped:
            self._window.norm_without_parameters = limit
        if not self._sampler.has_any_of(ids):
            return
        if self._window.has_stepped:
            self._note_late_clipping(ids, limit)
            return
        self._window.clips_otherwise |= limit is None
        is_whole = len(ids) >= self._sampler.num_trained
        self._window.clippings.append((self._window.passes[-1] if is_whole else -1, *(other_rule or (2.0, limit))))
        if earlier and earlier.has_limit and self._is_clipping_up_to_date:
            return
        if all(parameter.grad is None for parameter in parameters):
            self._window.unapplied_norm = None if limit == math.inf else limit
            return
        num_clipped = None if is_whole else len(ids)
        if earlier is not None and self._is_clipping_up_to_date:
            self._window.clipping = replace(earlier, max_norm=limit, num_clipped=num_clipped)
            return
        self._window.was_clipped_before_last_pass |= earlier is not None and earlier.has_limit
        gradients, without_gradient = self._sampler.sample_gradients()
        local_norm, is_part = copy_local_norm(norm)
        self._window.clipping = _Clipping(
            after_pass=self._window.passes[-1],
            gradients=gradients,
            signatures=self._sign(known_norms=optimizer_hooks.find_gradient_norms(norm)),
            without_gradient=without_gradient,
            num_clipped=num_clipped,
            max_norm=limit,
            norm=local_norm,
            is_part_of_norm=is_part,
        )

    def _note_late_clipping(self, ids: set[int], limit: float | None) -> None:
        """Count a step whose own gradients are clipped behind it, as where the loop has the two calls in a wrong order.

        Of several optimizers, the gradients of one may be clipped behind the step of another, and before its own.
        """
        if (
            limit == math.inf
            or self._window.clipping is not None
            or self._window.clips_otherwise
            or self._window.has_late_clipping
        ):
            return
        optimizers = [optimizer for reference in self._window.stepped if (optimizer := reference()) is not None]
        if any(ids & _collect_parameter_ids(optimizer) for optimizer in optimizers):
            self._window.has_late_clipping = True
            self.num_late_clippings += 1

    def add_schedule_step(self, optimizer: Any, count: int | None, *, is_of_job: bool) -> None:
        """Note that a schedule has set the learning rate of this optimizer, and has counted so many steps."""
        self._schedule_counts[optimizer] = count
        if is_of_job:
            self._schedule_steps[optimizer] = self._schedule_steps.get(optimizer, 0) + 1

    def add_clipped_norm(self, norm: Any) -> None:
        """Add the norm of the latest clipping, if it was not known before the clipping."""
        if self._window.clipping is not None and self._window.clipping.norm is None:
            local_norm, is_part = copy_local_norm(norm)
            self._window.clipping = replace(self._window.clipping, norm=local_norm, is_part_of_norm=is_part)

    def end_scaled_step(self, optimizer: Optimizer) -> None:
        """Forget the passes whose gradients a GradScaler was to step on, if it has left the step out."""
        if not self._window.has_stepped and self._find_relation(optimizer)[0]:
            self._begin_window()

    def begin_step(self, optimizer: Optimizer) -> StepPart | None:
        """Describe the step that an optimizer begins.

        Returns None if the optimizer does not train the model, or no pass since the last step is recorded.
        """
        trains_model, engine = self._find_relation(optimizer)
        if not trains_model:
            return None
        wrapper = None if engine is None else engine()
        # DeepSpeed calls one optimizer for its partitions one after the other.
        if self._window.passes and wrapper is None and self._steps_again(optimizer):
            if any(value.grad is not None for group in optimizer.param_groups for value in group["params"]):
                self.num_unseen_steps += 1
                self.unseen_after = self._window.passes[-1] if self.unseen_after is None else self.unseen_after
            return None
        if not self._window.has_stepped:
            self._window.has_stepped = True
            self._last_window, self._next_window = None, _WindowState()
            self.number += 1
        if not self._window.has_recorded_pass:
            return None
        return self._make_part(optimizer) if wrapper is None else self._make_engine_part(optimizer, wrapper)

    def _steps_again(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer has stepped on the same parameters since the latest pass."""
        key = tuple((len(group["params"]), id(group["params"][0])) for group in _list_groups(optimizer))
        reference = weakref.ref(optimizer)
        is_known, self._window.stepped[reference] = self._window.stepped.get(reference) == key, key
        return is_known

    @torch.no_grad()
    def _make_engine_part(self, optimizer: Optimizer, wrapper: Any) -> StepPart:
        """Describe the partitions that DeepSpeed steps on now."""
        engine_gradients = EngineGradients.from_optimizer(wrapper, optimizer)
        gradients = self._sampler.sample_gradients_with(engine_gradients.find, excluded=self._window.sampled_names)
        if gradients is not None:
            self._window.sampled_names |= {name for name, _ in gradients.locations}
            gradients = replace(gradients, values=engine_gradients.undo_clipping(gradients.values))
        signatures = self._sign(engine=engine_gradients)
        if signatures is not None:
            self._window.signed_names |= signatures.names
            signatures = replace(signatures, values=engine_gradients.undo_clipping(signatures.values))
        settings, tensors = read_optimizer_settings(optimizer)
        members = engine_gradients.list_parameters()
        # Other numbers of groups mean that it is not known which parameters lie in which group.
        are_known = len(members) == len(settings)
        for group, parameters in zip(settings, members if are_known else [()] * len(settings), strict=True):
            group["num_parameters"] = len(parameters)
        if are_known and len(optimizer.param_groups) > 1:
            self._add_members(optimizer, settings, members)
        tensors |= {f"{_SHARE}{number}": share for number, share in self._window.shares.items()}
        if (norm := engine_gradients.grad_norm) is not None:
            tensors[_NORM] = torch.tensor([norm], device="cpu") if isinstance(norm, float) else norm.reshape(1)
        step = OptimizerStep(
            number=self.number - 1,
            passes=tuple(self._window.passes),
            shares=(None,) * len(self._window.passes),
            max_norm=engine_gradients.max_norm,
            unapplied_norm=self._find_unapplied_norm(),
            is_unclipped=engine_gradients.can_undo_clipping,
            optimizer=type(optimizer).__name__,
            library=name_library(optimizer),
            settings=settings,
            num_schedule_steps=self._schedule_steps.pop(optimizer, 0),
            schedule_count=self._schedule_counts.get(optimizer),
            has_state=has_engine_stepped(self._sampler.model),
        )
        state = self._state_sampler.sample(optimizer, engine_gradients)
        return _copy_part(step, gradients, signatures, state, tensors)

    @torch.no_grad()
    def _make_part(self, optimizer: Optimizer) -> StepPart:
        """Describe what the optimizer steps on, with the gradients as they were before a clipping."""
        clipping = self._window.clipping if self._is_clipping_up_to_date else None
        if clipping is None:
            ids = _collect_parameter_ids(optimizer)
            gradients, without_gradient = self._sampler.sample_gradients(ids, excluded=self._window.sampled_names)
            signatures = self._sign(ids)
            if isinstance(scale := vars(optimizer).get("grad_scale"), Tensor):
                # A fused optimizer divides by GradScaler's scale itself.
                gradients = None if gradients is None else replace(gradients, values=_divide(gradients.values, scale))
                signatures = (
                    None if signatures is None else replace(signatures, values=_divide(signatures.values, scale))
                )
        elif self._window.sampled_names:
            # An earlier part of this step has the samples that were taken before the clipping.
            gradients, without_gradient, signatures = None, [], None
        else:
            gradients, without_gradient = clipping.gradients, list(clipping.without_gradient)
            signatures = clipping.signatures
        # A part without samples is marked by an empty name.
        self._window.sampled_names |= {name for name, _ in gradients.locations} if gradients is not None else {""}
        if signatures is not None:
            self._window.signed_names |= signatures.names
            without_gradient = list(dict.fromkeys([*without_gradient, *signatures.without]))
        settings, tensors = read_optimizer_settings(optimizer)
        if self._sampler.has_flat_parameters:
            for group_settings, group in zip(settings, _list_groups(optimizer), strict=False):
                group_settings["num_parameters"] = self._sampler.count_among(set(map(id, group["params"])))
        members = [group["params"] for group in _list_groups(optimizer)]
        # Of more than _MAX_GROUPS groups it is not known which parameters the last kept one counts. An optimizer with
        # one group of all parameters needs no numbers of them; one that has a part of them, beside another, does.
        is_part = len(members) == 1 and len(members[0]) < self._sampler.num_trained
        if len(members) == len(settings) and (len(members) > 1 or is_part):
            self._add_members(optimizer, settings, members)
        tensors |= {f"{_SHARE}{number}": share for number, share in self._window.shares.items()}
        if clipping is not None and clipping.norm is not None:
            tensors[_NORM] = clipping.norm
        if isinstance(found_inf := vars(optimizer).get("found_inf"), Tensor):
            # A fused optimizer leaves the step out on its device, if GradScaler found an overflow.
            tensors[_FOUND_INF] = found_inf.detach().reshape(1)
        clips_early = self._window.was_clipped_before_last_pass or self._was_clipped_in_parts
        step = OptimizerStep(
            number=self.number - 1,
            passes=tuple(self._window.passes),
            shares=(None,) * len(self._window.passes),
            without_gradient=tuple(without_gradient),
            is_part_of_norm=clipping is not None and clipping.is_part_of_norm,
            max_norm=None if clipping is None else clipping.max_norm,
            unapplied_norm=self._find_unapplied_norm(),
            num_clipped=None if clipping is None else clipping.num_clipped,
            is_unclipped=(optimizer_hooks.sees_all_clipping() or clipping is not None) and not clips_early,
            clips_early=clips_early,
            clips_otherwise=self._window.clips_otherwise,
            clippings=self._list_clippings(),
            optimizer=type(optimizer).__name__,
            library=name_library(optimizer),
            settings=settings,
            num_schedule_steps=self._schedule_steps.pop(optimizer, 0),
            schedule_count=self._schedule_counts.get(optimizer),
            has_state=bool(optimizer.state),
        )
        return _copy_part(step, gradients, signatures, self._state_sampler.sample(optimizer), tensors)

    def _sign(
        self,
        ids: Container[int] | None = None,
        engine: EngineGradients | None = None,
        known_norms: optimizer_hooks.GradientNorms | None = None,
    ) -> RawSignatures | None:
        """Sign the gradients that no earlier part of this step has signed, if this step is one to be signed.

        ids          ids of the parameters to sign; None: all
        engine       has the gradients of DeepSpeed's partitions
        known_norms  what the job's clipping has computed
        """
        if self._window.signs is None:
            device_type = None if engine is None else engine.device_type
            has_norms = known_norms is not None and known_norms.are_in_fp32
            self._window.signs = self._signer.begin_step(device_type, has_norms=has_norms)
        if not self._window.signs:
            return None
        find_part = None if engine is None else engine.find_part
        return self._signer.sign(ids, self._window.signed_names, find_part, known_norms)

    def _add_members(
        self, optimizer: Optimizer, settings: Sequence[dict[str, Any]], groups: Sequence[Sequence[Any]]
    ) -> None:
        """Add to the settings of each group which parameters it has, where that is known."""
        key = tuple((len(group), id(group[0])) for group in groups if len(group))
        earlier_key, numbers = self._members.get(optimizer, ((), None))
        if key != earlier_key:
            numbers = self._sampler.find_numbers(groups)
            self._members[optimizer] = key, numbers
        for group_settings, text in zip(settings, numbers or (), strict=False):
            group_settings["parameters"] = text

    @property
    def has_stepped(self) -> bool:
        """Tell whether an optimizer of the model has begun to step since the latest pass with autograd on."""
        return self._window.has_stepped

    def _find_unapplied_norm(self) -> float | None:
        """Find the norm that a clipping changed nothing by. One of no parameter may be of another model's."""
        return (
            self._window.unapplied_norm
            if self._window.unapplied_norm or self._window.clippings
            else self._window.norm_without_parameters
        )

    def _list_clippings(self) -> tuple[tuple[float | None, float], ...]:
        """List the clippings of a step one of which is by another rule; none where that does not tell all of them."""
        is_known = all(
            forward == self._window.passes[-1] and isinstance(limit, int | float)
            for forward, _, limit in self._window.clippings
        )
        if not self._window.clips_otherwise or not is_known:
            return ()
        return tuple((order, float(limit)) for _, order, limit in self._window.clippings)

    @property
    def _was_clipped_in_parts(self) -> bool:
        """Tell whether the latest clipping came before the last pass, whose gradients were added to clipped ones."""
        return (
            self._window.clipping is not None and self._window.clipping.has_limit and not self._is_clipping_up_to_date
        )

    @property
    def _is_clipping_up_to_date(self) -> bool:
        """Tell whether no pass has begun since the latest clipping."""
        return self._window.clipping is not None and self._window.clipping.after_pass == self._window.passes[-1]

    def _has_lost_gradients(self) -> bool:
        """Tell whether a backward's gradients are gone without a step: fp16 leaves out steps that overflow."""
        num_skipped_before, self._num_skipped = self._num_skipped, count_skipped_steps(self._sampler.model)
        if self._num_skipped > num_skipped_before:
            return True
        had_gradients = self._window.clipping is not None and self._window.clipping.gradients is not None
        return (had_gradients or bool(self._window.shares)) and self._sampler.has_no_gradients(in_shards=had_gradients)

    def _find_relation(self, optimizer: Optimizer) -> tuple[bool, weakref.ref[Any] | None]:
        """Find out whether the optimizer trains the model, and DeepSpeed's optimizer around it, if there is one."""
        relation = self._relations.get(optimizer)
        if relation is None:
            ids = _collect_parameter_ids(optimizer)
            relation = self._sampler.has_any_of(ids), None
            if not relation[0] and (wrapper := find_engine_optimizer(self._sampler.model, optimizer)) is not None:
                relation = True, weakref.ref(wrapper)
            self._relations[optimizer] = relation
        return relation


def _divide(values: Tensor, scale: Tensor) -> Tensor:
    """Divide gradients by their scale on their device, unless that is another one: moving it would wait."""
    return values.float() / scale if scale.device == values.device else values


def name_library(optimizer: Optimizer) -> str:
    """Name the package that an optimizer's class is of: classes of one name may step in different ways."""
    return type(optimizer).__module__.partition(".")[0]


def read_optimizer_settings(optimizer: Optimizer) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return each group's plain settings, and those that are tensors, without waiting for a device.

    Groups without parameters are left out.
    """
    settings: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    groups = _list_groups(optimizer)
    for number, group in enumerate(groups[:_MAX_GROUPS]):
        plain: dict[str, Any] = {"num_parameters": len(group["params"])}
        # Fused classes of Adam, and Lion's, keep what weight decay acts on beside their groups.
        plain |= {name: vars(optimizer)[name] for name in _MODES if type(vars(optimizer).get(name)) in (bool, int)}
        for key, value in group.items():
            if key in _NO_SETTINGS:
                continue
            if type(value) in (bool, int, float) or (type(value) is str and len(value) <= _MAX_WORD):
                plain[key] = value
            elif type(value) in (tuple, list) and all(type(member) in _PLAIN_MEMBERS for member in value):
                plain[key] = list(value)
            elif isinstance(value, Tensor) and value.numel() == 1:
                tensors[f"{_SETTING}{number} {key}"] = value.detach().reshape(1)
        settings.append(plain)
    # The last group that is kept counts the parameters of those that are not, so that the sum is that of all groups.
    for group in groups[_MAX_GROUPS:]:
        settings[-1]["num_parameters"] += len(group["params"])
    return settings, tensors


def _collect_parameter_ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _list_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if group["params"]]


def _copy_part(
    step: OptimizerStep,
    gradients: RawSamples | None,
    signatures: RawSignatures | None,
    state: RawState | None,
    tensors: Mapping[str, Tensor],
) -> StepPart:
    """Begin to copy what was sampled, and the numbers of a part, in one copy where they lie on one device."""
    sampled = {} if gradients is None else {_GRADIENTS: gradients.values}
    sampled |= {} if signatures is None else {_SIGNATURES: signatures.values}
    sampled |= {} if state is None else {_STATE: state.values, _STATE_STEPS: state.device_steps}
    copies, copy_events = copy_to_host({**tensors, **sampled})
    if state is not None:
        state = replace(state, values=copies.pop(_STATE), device_steps=copies.pop(_STATE_STEPS))
    return StepPart(
        step=step,
        gradients=None if gradients is None else replace(gradients, values=copies.pop(_GRADIENTS)),
        signatures=None if signatures is None else replace(signatures, values=copies.pop(_SIGNATURES)),
        state=state,
        numbers=copies,
        copy_events=copy_events,
    )
