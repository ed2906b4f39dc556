"""Fill in what the command line left open, as the job had it: dtype, window; for a strict verdict rows and kernel."""

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
    """`spec` with what it leaves open as in `first`, a capture of the job; without one, and where it says nothing, by
    the defaults. A job in fp16 is replayed in fp32 on a CPU, where fp16 is not to be had.
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
    found = DTYPES.get(max(known, key=roundoff), Dtype.FP32) if known else Dtype.BF16
    return Dtype.FP32 if found is Dtype.FP16 and device_type == "cpu" else found


def _is_padded(first: Call | None) -> bool:
    """Rows apart, and none of several documents, which padded rows could not keep apart."""
    return first is not None and not {"position_ids", *BORDER_NAMES} & first.tensors.keys()


def _kernel(first: Call | None) -> Attention:
    asked = "" if first is None else first.environment.get("attention", "")
    return KERNELS.get(asked, Attention.AUTO)
