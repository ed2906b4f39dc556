"""Define the records of measurements, in base units and without tensors: lines of rank<k>.jsonl and statistics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from actor_init.as_json import AnyFloat

# parts of errors that say that memory did not suffice, of CUDA's allocator and of a CPU's
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


class FirstUse(StrEnum):
    """What a pass did for the first time in its process; such a pass is no measurement. Values go into the log."""

    COMPILED = "compiled"  # by dynamo, inductor or its autotuning
    TRITON = "Triton kernel"  # compiled or loaded
    AUTOTUNED = "autotuned"  # by Triton, kernels that may have been compiled before
    GPU_CODE = "GPU code"  # kernels or workspaces loaded: memory in use outside torch's allocator grew
    PLAN = "cuDNN plan"  # its attention was called for a number of tokens for which it had no plan
    RETRY = "cudaMalloc retry"  # the allocator gave memory back to get other memory
    LIBRARY = "library"  # a shared library was loaded
    IMPORT = "import"  # a Python module was imported
    ONCE = "slow once"  # run again, the same pass was faster


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseCost:
    """The cost of one phase of one pass on one rank: seconds of device time on CUDA, of wall time on a CPU.

    Bytes are the CUDA allocator's, or on a CPU the process's resident set: see `memory_kind` in run.json.
    """

    seconds: AnyFloat
    allocated_bytes: int | None  # when the phase ended; None if the system reports peaks only
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None  # None on a CPU
    host_seconds: AnyFloat | None = None  # until the host had launched the phase; None on a CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRecord:
    """One micro-batch through the model on one rank; a line of rank<k>.jsonl."""

    index: int
    source: str
    rank: int
    data_rank: int = 0  # ranks with the same data rank share a micro-batch
    rows: int = 0
    padded_tokens: int = 0
    real_tokens: int = 0
    fed_tokens: int = 0  # tokens computed, padding included, over all ranks that shared the micro-batch
    row_tokens: list[int] = field(default_factory=list)  # real tokens of each row
    input_digest: str | None = None  # of its tensors; None if the file could not be read
    trains: bool | None = None  # None if the file could not be read
    phases: Mapping[str, PhaseCost] = field(default_factory=dict)  # forward, backward, step
    seconds: AnyFloat | None = None  # host wall time of the whole pass, without copies to the device
    wait_seconds: AnyFloat | None = None  # after forward, for the slowest rank's forward; None with one rank
    loss: AnyFloat | None = None
    row_log_probs: list[AnyFloat] = field(default_factory=list)  # per row, the fp64 sum over its action tokens
    row_action_tokens: list[int] = field(default_factory=list)  # per row, the number of those tokens
    weight: AnyFloat = 1.0  # of its mean loss in the gradient of its window; 1: equal weights
    grad_norm: AnyFloat | None = None  # before clipping; on the pass that ends an accumulation window
    new_graphs: int = 0
    compile_seconds: AnyFloat = 0.0  # of `seconds`, in which torch.compile worked
    recompilations: list[str] = field(default_factory=list)  # graphs made again, each with the guard that failed
    first_uses: list[str] = field(default_factory=list)  # values of FirstUse, in its order
    seconds_again: AnyFloat | None = None  # of forward and backward in a second run; None: there was none
    first_non_finite: str | None = None  # the first tensor with a nan or an inf, as far as this rank saw it
    warmup: bool = False
    traced: bool = False  # traced passes are slower
    error: str | None = None
    error_type: str | None = None

    @property
    def ran_out_of_memory(self) -> bool:
        return self.error is not None and tells_of_memory(f"{self.error_type}: {self.error}")


def is_out_of_memory(error: BaseException | None) -> bool:
    return error is not None and tells_of_memory(f"{type(error).__name__}: {error}")


def tells_of_memory(error: str) -> bool:
    """Tell whether an error, as `Type: message`, says that memory did not suffice."""
    return error.startswith(("OutOfMemoryError:", "MemoryError:")) or any(part in error for part in OUT_OF_MEMORY)
