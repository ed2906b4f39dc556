"""Define the records of measurements, in base units and without tensors: lines of rank<k>.jsonl and statistics."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from enum import StrEnum
from typing import Any

from actor_init.as_json import AnyFloat, parse_json, to_json

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
class InputSection:
    """What a pass was given: the micro-batch of its capture, and how much of it the model computed."""

    rows: int = 0
    padded_tokens: int = 0
    real_tokens: int = 0
    fed_tokens: int = 0  # tokens computed, padding included, over all ranks that shared the micro-batch
    row_tokens: list[int] = field(default_factory=list)  # real tokens of each row
    input_digest: str | None = None  # of its tensors; None if the file could not be read
    trains: bool | None = None  # None if the file could not be read


@dataclass(frozen=True, kw_only=True, slots=True)
class CostSection:
    """What a pass cost, as its clock measured it; nothing of a pass that was not measured."""

    phases: Mapping[str, PhaseCost] = field(default_factory=dict)  # forward, backward, step
    seconds: AnyFloat | None = None  # host wall time of the whole pass, without copies to the device
    wait_seconds: AnyFloat | None = None  # after forward, for the slowest rank's forward; None with one rank
    seconds_again: AnyFloat | None = None  # of forward and backward in a second run; None: there was none


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultSection:
    """What a pass computed."""

    loss: AnyFloat | None = None
    row_log_probs: list[AnyFloat] = field(default_factory=list)  # per row, the fp64 sum over its action tokens
    row_action_tokens: list[int] = field(default_factory=list)  # per row, the number of those tokens
    weight: AnyFloat = 1.0  # of its mean loss in the gradient of its window; 1: equal weights
    grad_norm: AnyFloat | None = None  # before clipping; on the pass that ends an accumulation window


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilationSection:
    """What torch.compile did in a pass."""

    new_graphs: int = 0
    compile_seconds: AnyFloat = 0.0  # of the pass's seconds, in which it worked
    recompilations: list[str] = field(default_factory=list)  # graphs made again, each with the guard that failed


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRecord:
    """One micro-batch through the model on one rank; a line of rank<k>.jsonl, which has sections' fields side by side.

    A pass that failed keeps the sections that it has not come to as they are of a pass that did nothing.
    """

    index: int
    source: str
    rank: int
    data_rank: int = 0  # ranks with the same data rank share a micro-batch
    input: InputSection = InputSection()
    cost: CostSection = CostSection()
    result: ResultSection = ResultSection()
    compilation: CompilationSection = CompilationSection()
    first_uses: list[str] = field(default_factory=list)  # values of FirstUse, in its order
    first_non_finite: str | None = None  # the first tensor with a nan or an inf, as far as this rank saw it
    warmup: bool = False
    traced: bool = False  # traced passes are slower
    error: str | None = None
    error_type: str | None = None

    @property
    def ran_out_of_memory(self) -> bool:
        return self.error is not None and describes_out_of_memory(f"{self.error_type}: {self.error}")


def is_out_of_memory(error: BaseException | None) -> bool:
    return error is not None and describes_out_of_memory(f"{type(error).__name__}: {error}")


def describes_out_of_memory(error: str) -> bool:
    """Tell whether an error, as `Type: message`, says that memory did not suffice."""
    return error.startswith(("OutOfMemoryError:", "MemoryError:")) or any(part in error for part in OUT_OF_MEMORY)


_SECTIONS: dict[str, Any] = {part.name: part.type for part in fields(PassRecord) if is_dataclass(part.type)}
_OWN = [part for part in fields(PassRecord) if part.name not in _SECTIONS]
_LINE = make_dataclass(
    "_Line",
    [(part.name, part.type, copy(part)) for kind in (_OWN, *map(fields, _SECTIONS.values())) for part in kind],
    kw_only=True,
)


def to_line(record: PassRecord) -> dict[str, object]:
    """Return a record as its line has it. Sections are no objects there, so a table of passes has a column a field."""
    line: dict[str, object] = {}
    for part in fields(record):
        value = to_json(getattr(record, part.name))
        line |= value if part.name in _SECTIONS else {part.name: value}
    return line


def parse_line(line: str, *, source: str) -> PassRecord:
    """Read what `to_line` made. Raises UsageError, whose message begins with `source`, if the line does not fit."""
    return make_record(**vars(parse_json(_LINE, line, source=source)))


def make_record(**values: Any) -> PassRecord:
    """Return the record with these values, named as in its line; the others are those of a pass that did nothing."""
    sections = {
        name: kind(**{part.name: values.pop(part.name) for part in fields(kind) if part.name in values})
        for name, kind in _SECTIONS.items()
    }
    return PassRecord(**values, **sections)
