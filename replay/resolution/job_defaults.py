"""Fill options that were not given from the job: dtype, window, attention kernel, fused modules, sometimes rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from actor_init.attention.kernel_choice import lacks
from actor_init.declarations.attention import kernel_of_job
from actor_init.fused.liger import lack_of_liger
from actor_init.inputs.documents import BORDER_NAMES
from actor_init.spec import ActorSpec, Attention, Dtype, Kernels
from capture.file_format.capture_file import Call
from replay.options.resolved import KERNELS, PACKING, By, Choice
from replay.options.spec import Parts, VerdictRule
from replay.resolution.selection import Selection
from replay.tolerances.difference import roundoff
from replay.verdict.job_values import dtypes_of

DTYPES = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16}
PADDING_PREDICTS = "padding on the left predicts labels of the job's loss"


def from_job(spec: Parts, first: Call | None, selection: Selection, device_type: str) -> list[Choice]:
    """Choose dtype, packing, kernels and accumulation: as typed, else as `first`, a capture of the job, says.

    Without a capture, and where it does not say, the usual defaults apply. Where padding predicts a label of the loss,
    rows are padded, as the job's were.
    """
    return [
        _dtype(spec.actor, first, device_type),
        _packing(spec, first, selection),
        _kernels(spec.actor, first, device_type),
        _accumulation(spec.actor, selection),
    ]


def settled(actor: ActorSpec, choices: Sequence[Choice]) -> ActorSpec:
    """Return `actor` with these choices for its fields."""
    return replace(actor, **{choice.setting.removeprefix("actor."): choice.value for choice in choices})


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenKernel:
    """The attention kernel of --attention auto: the job's, or auto where another has to be found, and why."""

    attention: str
    why: str = ""  # for the header; empty: nothing that a reader would not expect


def job_kernel(spec: ActorSpec, first: Call | None, where: torch.device, config: PretrainedConfig) -> ChosenKernel:
    """Return the kernel that the job had, if it can be had here, for a settled spec; what was typed stays."""
    if spec.attention != Attention.AUTO or spec.is_custom or spec.parallel.ring > 1:
        return ChosenKernel(attention=spec.attention)
    on_cuda = where.type == "cuda"
    asked = None if first is None else first.environment.get("attention")
    instead = "the fastest here that the kernel check finds right" if on_cuda else "what a CPU has"
    if asked is None:
        why = f"{instead}; the captures do not name the job's" if on_cuda else ""
        return ChosenKernel(attention=Attention.AUTO, why=why)
    kernel = kernel_of_job(asked)
    if kernel is None:
        return ChosenKernel(attention=Attention.AUTO, why=f"{instead}; the job's {asked} is not known here")
    lack = lacks(kernel.word, where, spec.dtype)
    if lack is not None:
        return ChosenKernel(attention=Attention.AUTO, why=f"{instead}; of the job's {asked}: {lack.text}")
    if kernel.complaint(config):
        return ChosenKernel(
            attention=Attention.AUTO, why=f"{instead}; {config.model_type} does not take the job's {asked}"
        )
    if on_cuda and kernel.packed.reads_mask and spec.packs and _is_padded(first):
        why = f"{instead}; the job's {asked} had padded rows, and packed ones need a mask of all pairs of tokens"
        return ChosenKernel(attention=Attention.AUTO, why=why)
    return ChosenKernel(attention=kernel.word, why=f"as the job's {asked}" if on_cuda else "")


def _dtype(actor: ActorSpec, first: Call | None, device_type: str) -> Choice:
    def choice(value: Dtype, by: By, why: str = "") -> Choice:
        return Choice(setting="actor.dtype", value=value, by=by, why=why)

    if actor.dtype is not Dtype.AUTO:
        return choice(actor.dtype, By.TYPED)
    if first is None or not (known := dtypes_of(first)):
        return choice(Dtype.BF16, By.DEFAULT, "the inputs do not say what the job computed in")
    coarsest = max(known, key=roundoff)
    dtype = DTYPES.get(coarsest, Dtype.FP32)
    if dtype is Dtype.FP16 and device_type == "cpu":
        return choice(Dtype.FP32, By.MACHINE, "the job computed in float16, which a CPU does not have")
    return choice(dtype, By.JOB, f"it computed in {coarsest}")


def _packing(spec: Parts, first: Call | None, selection: Selection) -> Choice:
    """Choose whether rows are packed, as long as the probe has nothing against it."""

    def choice(value: bool, by: By, why: str = "") -> Choice:
        return Choice(setting=PACKING, value=value, by=by, why=why)

    actor = spec.actor
    if actor.packing is not None:
        return choice(actor.packing, By.TYPED)
    if actor.is_custom:
        return choice(False, By.MODEL)
    if actor.parallel.ring > 1:
        return choice(True, By.OPTION, f"--ring {actor.parallel.ring} slices packed rows")
    if selection.padding_predicts:
        return choice(False, By.JOB, PADDING_PREDICTS)
    if spec.measure.verdict is VerdictRule.STRICT and _is_padded(first):
        return choice(False, By.JOB, "its rows were padded, and --verdict strict was given")
    return choice(True, By.MODEL)


def _kernels(actor: ActorSpec, first: Call | None, device_type: str) -> Choice:
    if actor.kernels is not Kernels.AUTO:
        return Choice(setting=KERNELS, value=actor.kernels, by=By.TYPED)
    if first is not None and first.environment.get("kernels") == "liger":
        if lack := lack_of_liger(torch.device(device_type)):
            return Choice(setting=KERNELS, value=Kernels.MODEL, by=By.MACHINE, why=f"the job used Liger, which {lack}")
        return Choice(setting=KERNELS, value=Kernels.FUSED, by=By.JOB, why="it used Liger")
    return Choice(setting=KERNELS, value=Kernels.MODEL, by=By.DEFAULT)


def _accumulation(actor: ActorSpec, selection: Selection) -> Choice:
    by = By.TYPED if actor.grad_accumulation else By.JOB if selection.has_job_windows else By.DEFAULT
    why = "as many passes as make its windows" if by is By.JOB else ""
    return Choice(setting="actor.grad_accumulation", value=selection.grad_accumulation, by=by, why=why)


def _is_padded(first: Call | None) -> bool:
    """Are rows separate, and free of rows with several documents, which padding could not separate?"""
    return first is not None and not {"position_ids", *BORDER_NAMES} & first.tensors.keys()
