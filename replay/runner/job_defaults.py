"""Fill options that were not given from the job: dtype, window, attention kernel, fused modules, sometimes rows."""

from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from actor_init.attention.kernel_choice import lacks
from actor_init.declarations.attention import kernel_of_job
from actor_init.inputs.documents import BORDER_NAMES
from actor_init.spec import ActorSpec, Attention, Dtype, Kernels
from capture.file_format.capture_file import Call
from replay.report.roundoff import roundoff
from replay.spec import RunSpec, VerdictRule
from replay.verdict.job_values import dtypes_of

DTYPES = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16}


def settled(
    spec: RunSpec, first: Call | None, grad_accumulation: int, device_type: str, *, padding_predicts: bool = False
) -> RunSpec:
    """Return `spec` with unset options taken from `first`, a capture of the job; the attention kernel stays unset.

    Without a capture, and where it does not record them, the usual defaults apply. A job in fp16 is replayed in fp32
    on a CPU, which has no fp16. Where padding predicts a label of the loss, rows are padded, as the job's were.
    """
    is_padded = padding_predicts or (spec.measure.verdict is VerdictRule.STRICT and _is_padded(first))
    return replace(
        spec,
        actor=spec.actor.settled(
            dtype=_dtype(first, device_type),
            packing=not (is_padded and spec.actor.parallel.ring == 1),
            kernels=Kernels.FUSED if _used_liger(first) else Kernels.MODEL,
            grad_accumulation=grad_accumulation,
        ),
    )


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


def _used_liger(first: Call | None) -> bool:
    return first is not None and first.environment.get("kernels") == "liger"


def _dtype(first: Call | None, device_type: str) -> Dtype:
    known = dtypes_of(first) if first is not None else []
    dtype = DTYPES.get(max(known, key=roundoff), Dtype.FP32) if known else Dtype.BF16
    return Dtype.FP32 if dtype is Dtype.FP16 and device_type == "cpu" else dtype


def _is_padded(first: Call | None) -> bool:
    """Are rows separate, and free of rows with several documents, which padding could not separate?"""
    return first is not None and not {"position_ids", *BORDER_NAMES} & first.tensors.keys()
