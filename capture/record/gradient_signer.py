"""Take the norm of each parameter's gradient, and elements from all over it, at the steps that a time budget allows.

`capture/file_format/gradient_signature.py` defines which elements. A rank that holds a part of a gradient takes the
norm of its part, and those elements that lie in it.

A parameter costs the job's thread about MICROSECONDS_PER_PARAMETER, and each gradient is read besides, unless the job's
clipping has computed its norm in fp32. So all gradients are signed in the first step, in a few more of a small model,
and then in every n-th, such that it costs MICROSECONDS_PER_STEP on average. Model and clipping alone decide on n, so
all ranks sign the same steps.
"""

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from capture.file_format.gradient_signature import (
    GradientSignature,
    choose_signature_elements,
    find_held_elements,
)
from capture.record.optimizer_hooks import GradientNorms
from capture.record.parameter_sampler import FlatParameterSlot, ParameterSampler, ParameterSlot
from capture.record.sharding import HeldPart, UnknownLayoutError, locate_part, locate_part_in_flat

MICROSECONDS_PER_PARAMETER = 8.0
MICROSECONDS_PER_CPU_ELEMENT = 0.001
# A GPU for training reads about 3 TB in a second.
MICROSECONDS_PER_DEVICE_BYTE = 1 / 3e6
# A thousandth of a step of 70 ms.
MICROSECONDS_PER_STEP = 70.0
# The first step is signed, and those behind it as far as all of them cost no more than this together: a job that opens
# recordings often pays for it in each of them.
MICROSECONDS_AT_FIRST = 4_000.0
MAX_FIRST_STEPS = 8
# Of a model with more parameters each signing takes so many, in turn.
MAX_SIGNED = 1024

# Finds the tensor that holds the gradient, or a part of it, and which part.
FindPart = Callable[[ParameterSlot, nn.Parameter], tuple[Tensor, HeldPart] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSignatures:
    """Signatures as they were taken.

    values      the norms of all, then the elements of all, one after the other
    unsigned    each signature, still without its numbers, and how many elements it has
    num_copies  for each the number of ranks that hold the same part
    without     names of parameters that are trained and have no gradient
    """

    values: Tensor
    unsigned: Sequence[tuple[GradientSignature, int]]
    num_copies: Sequence[int]
    without: Sequence[str] = ()

    @property
    def names(self) -> set[str]:
        return {signature.name for signature, _ in self.unsigned}

    def to_signatures(self) -> tuple[GradientSignature, ...]:
        """Return the signatures as they are written, once `values` are on the host.

        Ranks that hold the same part each count it in part, so that all ranks' squares add up to the whole.
        """
        numbers = self.values.double().tolist()
        norms, begin = numbers[: len(self.unsigned)], len(self.unsigned)
        signatures: list[GradientSignature] = []
        for (signature, count), norm, num_copies in zip(self.unsigned, norms, self.num_copies, strict=True):
            elements = tuple(numbers[begin : begin + count])
            signatures.append(replace(signature, norm=norm / math.sqrt(num_copies), values=elements))
            begin += count
        return tuple(signatures)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SigningPlan:
    """How to sign a gradient.

    signature  without its numbers
    part       where the gradient lies in the tensor
    offset     of the signature's first element in the tensor, in elements
    count      number of its elements there
    """

    signature: GradientSignature
    part: HeldPart
    offset: int
    count: int


class GradientSigner:
    """Signs gradients on their device. It never waits for a device, calls no collective and keeps no memory."""

    def __init__(self, sampler: ParameterSampler) -> None:
        self._sampler = sampler
        self._microseconds: float | None = None
        self._num_steps = 0
        self._num_signings = 0
        # By name of the parameter: what the plan depends on, and the plan.
        self._plans: dict[str, tuple[Any, _SigningPlan | None]] = {}

    def begin_step(self, device_type: str | None = None, *, has_norms: bool = False) -> bool:
        """Count a step of which something is recorded, and tell whether its gradients are to be signed.

        device_type  of the gradients; None: as of the parameters
        has_norms    the job has computed the norms
        """
        if self._microseconds is None:
            num_signed = min(max(self._sampler.num_trained, 1), MAX_SIGNED)
            num_cpu_elements = self._sampler.count_cpu_elements() if device_type in ("cpu", None) else 0
            num_device_bytes = 0 if has_norms or device_type == "cpu" else self._sampler.count_device_bytes()
            self._microseconds = (
                MICROSECONDS_PER_PARAMETER * num_signed
                + MICROSECONDS_PER_CPU_ELEMENT * num_cpu_elements
                + MICROSECONDS_PER_DEVICE_BYTE * num_device_bytes * num_signed / max(self._sampler.num_trained, 1)
            )
        is_due = self.is_due
        self._num_steps += 1
        self._num_signings += is_due
        return is_due

    @property
    def is_due(self) -> bool:
        """Tell whether the gradients of the next step are to be signed, if something of it is recorded."""
        if self._microseconds is None:
            return True
        num_first = max(1, min(MAX_FIRST_STEPS, int(MICROSECONDS_AT_FIRST / self._microseconds)))
        period = math.ceil(self._microseconds / MICROSECONDS_PER_STEP)
        return self._num_steps < num_first or self._num_steps % period == 0

    @torch.inference_mode()
    def sign(
        self,
        ids: Container[int] | None = None,
        excluded: Container[str] = (),
        find_part: FindPart | None = None,
        known_norms: GradientNorms | None = None,
    ) -> RawSignatures | None:
        """Sign the gradients of a step; None where there are none.

        ids          ids of the parameters to sign; None: all
        excluded     names of parameters to leave out
        find_part    finds the gradients, where the parameters do not have them
        known_norms  of gradients that parameters have, as the job has computed them
        """
        plans: list[_SigningPlan] = []
        norms: list[Tensor | None] = []
        parts: list[Tensor] = []
        elements: list[Tensor] = []
        without: list[str] = []
        device: torch.device | None = None
        for slot in self._choose_slots():
            parameter = slot.get_parameter()
            if parameter is None or slot.name in excluded or (ids is not None and not slot.is_among(ids)):
                continue
            if find_part is None:
                planned = self._plan_with_parameter(slot)
                if parameter.requires_grad and slot.get_local_gradient() is None:
                    without.append(slot.name)
            else:
                planned = self._plan_with_engine(slot, find_part(slot, parameter))
            # Of a model on several devices the gradients on the first one are signed.
            if planned is None or (device is not None and planned[1].device != device):
                continue
            plan, local = planned
            device, begin = local.device, local.storage_offset()
            if plan.part.is_whole_tensor:
                parts.append(local)
            else:
                parts.append(local.as_strided((plan.part.count,), (1,), begin + plan.part.offset))
            if plan.count:
                elements.append(local.as_strided((plan.count,), (plan.signature.stride,), begin + plan.offset))
            plans.append(plan)
            norms.append(None if known_norms is None else _find_norm(known_norms, slot.get_local_gradient(), plan.part))
        if not plans:
            return None
        own_norms = [norm for norm in norms if norm is not None]
        if len(own_norms) < len(norms):
            # A bf16 norm would itself be rounded to eight bits.
            is_double = any(part.dtype == torch.float64 for part in parts)
            own_norms = [*torch._foreach_norm(parts, 2, dtype=torch.float64 if is_double else torch.float32)]
        joined_norms = torch.stack(own_norms)
        # Tensors of one dtype are joined by one kernel, those of several by one each.
        return RawSignatures(
            values=torch.cat([joined_norms, torch.cat(elements)]) if elements else joined_norms,
            unsigned=tuple((plan.signature, plan.count) for plan in plans),
            num_copies=tuple(plan.part.num_copies for plan in plans),
            without=tuple(without),
        )

    def _choose_slots(self) -> Sequence[ParameterSlot]:
        slots = self._sampler.slots
        num_turns = -(-len(slots) // MAX_SIGNED) or 1
        return slots[self._num_signings % num_turns :: num_turns]

    def _plan_with_parameter(self, slot: ParameterSlot) -> tuple[_SigningPlan, Tensor] | None:
        """Plan how to sign the gradient that the parameter itself has, and return what this rank holds of it."""
        gradient = slot.get_local_gradient()
        if gradient is None:
            return None
        layout = type(gradient), gradient.dtype, gradient.shape, gradient.stride()
        plan = self._plan(slot, layout, lambda: _locate(slot, gradient))
        return None if plan is None else (plan, getattr(gradient, "_local_tensor", gradient))

    def _plan_with_engine(
        self, slot: ParameterSlot, gradient_and_part: tuple[Tensor, HeldPart] | None
    ) -> tuple[_SigningPlan, Tensor] | None:
        """Plan how to sign a gradient that DeepSpeed's engine holds."""
        if gradient_and_part is None:
            return None
        gradient, part = gradient_and_part
        plan = self._plan(slot, part, lambda: part)
        return None if plan is None else (plan, gradient)

    def _plan(self, slot: ParameterSlot, layout: Any, locate: Callable[[], HeldPart | None]) -> _SigningPlan | None:
        """Return the plan of a parameter's gradient, made anew only where its layout has changed since the last step.

        locate  tells which part of the gradient this rank holds
        """
        layout_and_plan = self._plans.get(slot.name)
        if layout_and_plan is None or layout_and_plan[0] != layout:
            layout_and_plan = self._plans[slot.name] = layout, _make_plan(slot, locate())
        return layout_and_plan[1]


def _find_norm(known_norms: GradientNorms, gradient: Any, part: HeldPart) -> Tensor | None:
    """Find the norm of what this rank holds of a gradient, in fp32; None where the job has computed no such norm."""
    norm: Any = known_norms.find(gradient)
    if norm is None or norm.dtype != torch.float32 or gradient.dtype != torch.float32 or not part.is_whole_tensor:
        return None
    if not hasattr(gradient, "placements"):
        return norm if type(norm) is Tensor else None
    # Where the gradient is sharded, the norm is not added up yet: then what is here is that of the shard.
    is_local = all(
        of_norm.is_partial() if of_gradient.is_shard() else of_gradient.is_replicate()
        for of_norm, of_gradient in zip(norm.placements, gradient.placements, strict=True)
    )
    return norm._local_tensor if is_local else None


def _locate(slot: ParameterSlot, gradient: Any) -> HeldPart | None:
    """Tell which part of a parameter's gradient is in what this rank holds; None where that is not known."""
    try:
        if isinstance(slot, FlatParameterSlot):
            return replace(
                locate_part_in_flat(slot.get_parameter(), gradient, slot.number), num_copies=slot.count_copies()
            )
        return locate_part(gradient)
    except (UnknownLayoutError, AttributeError):
        return None


def _make_plan(slot: ParameterSlot, part: HeldPart | None) -> _SigningPlan | None:
    """Choose the signature's elements that lie in a part; None for a part that has none, or is not known."""
    if part is None or not part.count:
        return None
    start, stride, count = choose_signature_elements(slot.name, part.shape)
    skipped, held = (0, 0) if part.first is None else find_held_elements(start, stride, count, part.first, part.end)
    first_held = start + skipped * stride
    signature = GradientSignature(
        name=slot.name,
        shape=part.shape,
        is_part=part.is_part,
        norm=0.0,
        start=first_held if held else 0,
        stride=stride,
        values=(),
    )
    offset = part.offset + first_held - part.first if held and part.first is not None else 0
    return _SigningPlan(signature=signature, part=part, offset=offset, count=held)
