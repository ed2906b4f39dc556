"""Fill options that were not given from the job: dtype, window, and rows and kernel for a strict verdict."""

from dataclasses import replace

from actor_init.inputs.documents import BORDER_NAMES
from actor_init.spec import Attention, Dtype
from capture.file_format.capture_file import Call
from replay.report.roundoff import roundoff
from replay.spec import RunSpec, VerdictRule
from replay.verdict.job_values import dtypes_of

DTYPES = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16}
KERNELS = {"sdpa": Attention.SDPA, "eager": Attention.EAGER}


def settled(spec: RunSpec, first: Call | None, grad_accumulation: int, device_type: str) -> RunSpec:
    """Return `spec` with unset options taken from `first`, a capture of the job.

    Without a capture, and where it does not record them, the usual defaults apply. A job in fp16 is replayed in fp32
    on a CPU, which has no fp16.
    """
    is_strict = spec.measure.verdict is VerdictRule.STRICT
    return replace(
        spec,
        actor=spec.actor.settled(
            dtype=_dtype(first, device_type),
            packing=not (is_strict and spec.actor.parallel.ring == 1 and _is_padded(first)),
            attention=_kernel(first) if is_strict and spec.actor.parallel.ring == 1 else Attention.AUTO,
            grad_accumulation=grad_accumulation,
        ),
    )


def _dtype(first: Call | None, device_type: str) -> Dtype:
    known = dtypes_of(first) if first is not None else []
    dtype = DTYPES.get(max(known, key=roundoff), Dtype.FP32) if known else Dtype.BF16
    return Dtype.FP32 if dtype is Dtype.FP16 and device_type == "cpu" else dtype


def _is_padded(first: Call | None) -> bool:
    """Are rows separate, and free of rows with several documents, which padding could not separate?"""
    return first is not None and not {"position_ids", *BORDER_NAMES} & first.tensors.keys()


def _kernel(first: Call | None) -> Attention:
    asked = "" if first is None else first.environment.get("attention", "")
    return KERNELS.get(asked, Attention.AUTO)
