"""Define the records of measurements, in base units and without tensors: lines of rank<k>.jsonl and statistics."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from enum import StrEnum
from typing import Any

from actor_init.as_json import AnyFloat, parse_json, to_json

# Parts of the errors by which CUDA's allocator and a CPU's say that memory did not suffice.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


class FirstUse(StrEnum):
    """What a pass did for the first time in its process; such a pass is no measurement. Values go into the log.

    COMPILED   dynamo, inductor or its autotuning compiled a graph
    TRITON     a Triton kernel was compiled or loaded
    AUTOTUNED  Triton timed the variants of a kernel, which may have been compiled before
    GPU_CODE   kernels or workspaces were loaded: memory in use outside torch's allocator grew
    PLAN       cuDNN's attention was called for a number of tokens for which it had no plan
    RETRY      CUDA's allocator gave memory back to get other memory
    LIBRARY    a shared library was loaded
    IMPORT     a Python module was imported
    ONCE       the same pass was faster when it was run again
    """

    COMPILED = "compiled"
    TRITON = "Triton kernel"
    AUTOTUNED = "autotuned"
    GPU_CODE = "GPU code"
    PLAN = "cuDNN plan"
    RETRY = "cudaMalloc retry"
    LIBRARY = "library"
    IMPORT = "import"
    ONCE = "slow once"


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseCost:
    """The cost of one phase of one pass on one rank: seconds of device time on CUDA, of wall time on a CPU.

    Bytes are the CUDA allocator's, or on a CPU the process's resident set: see `memory_kind` in run.json.

    allocated_bytes      when the phase ended; None if the system reports peaks only
    peak_reserved_bytes  None on a CPU
    host_seconds         until the host had launched the phase; None on a CPU
    """

    seconds: AnyFloat
    allocated_bytes: int | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    host_seconds: AnyFloat | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSection:
    """The micro-batch of a pass's capture, and how much of it the model computed.

    fed_tokens    tokens computed, padding included, over all ranks that shared the micro-batch
    row_tokens    real tokens of each row
    input_digest  of its tensors; None if the file could not be read
    trains        None if the file could not be read
    """

    rows: int = 0
    padded_tokens: int = 0
    real_tokens: int = 0
    fed_tokens: int = 0
    row_tokens: list[int] = field(default_factory=list)
    input_digest: str | None = None
    trains: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CostSection:
    """What a pass cost, as its clock measured it; nothing of a pass that was not measured.

    phases         by name: forward, backward, step
    seconds        host wall time of the whole pass, without copies to the device
    wait_seconds   after forward, until the slowest rank's forward had ended; None with one rank
    seconds_again  of forward and backward in a second run; None: there was no second run
    """

    phases: Mapping[str, PhaseCost] = field(default_factory=dict)
    seconds: AnyFloat | None = None
    wait_seconds: AnyFloat | None = None
    seconds_again: AnyFloat | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultSection:
    """What a pass computed.

    row_log_probs      of each row, the fp64 sum over its action tokens
    row_action_tokens  of each row, the number of these tokens
    weight             of its mean loss in the gradient of its window; 1: equal weights
    grad_norm          before clipping; on the pass that ends an accumulation window
    num_steps          steps of the optimizer that the pass's weights have behind them, in this run
    has_stepped        the optimizer stepped at its end
    """

    loss: AnyFloat | None = None
    row_log_probs: list[AnyFloat] = field(default_factory=list)
    row_action_tokens: list[int] = field(default_factory=list)
    weight: AnyFloat = 1.0
    grad_norm: AnyFloat | None = None
    num_steps: int = 0
    has_stepped: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutesSection:
    """Which experts the tokens of a pass went to, in a mixture of experts; nothing of a dense model.

    routing          recorded: to those that the job chose, in every layer; live: to those chosen here
    routed_tokens    tokens times layers in which the job's choice is known
    flipped_tokens   those of them whose scores here choose others
    flips_by_router  the same by layer, where there are any
    router_loss      what the routers' loss adds to `loss`; None where the job's loss held none
    """

    routing: str | None = None
    routed_tokens: int = 0
    flipped_tokens: int = 0
    flips_by_router: Mapping[str, int] = field(default_factory=dict)
    router_loss: AnyFloat | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilationSection:
    """What torch.compile did in a pass.

    compile_seconds  how many of the pass's seconds it took
    recompilations   graphs that were made again, each with the guard that failed
    """

    new_graphs: int = 0
    compile_seconds: AnyFloat = 0.0
    recompilations: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRecord:
    """One micro-batch through the model on one rank: a line of rank<k>.jsonl, where sections are not nested.

    A pass that failed has the default values in the sections that it did not reach.

    data_rank         ranks with the same data rank share a micro-batch
    first_uses        values of FirstUse, in its order
    first_non_finite  the first tensor with a nan or an inf, as far as this rank saw it
    traced            a trace was written, which makes a pass slower
    window            index of the first pass of its accumulation window; None: it has no backward
    """

    index: int
    source: str
    rank: int
    data_rank: int = 0
    input: InputSection = InputSection()
    cost: CostSection = CostSection()
    result: ResultSection = ResultSection()
    compilation: CompilationSection = CompilationSection()
    routes: RoutesSection = RoutesSection()
    first_uses: list[str] = field(default_factory=list)
    first_non_finite: str | None = None
    warmup: bool = False
    traced: bool = False
    window: int | None = None
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


# A line has the fields of the record and of its sections side by side, and is read by a class that is made of them.
_SECTIONS: dict[str, Any] = {part.name: part.type for part in fields(PassRecord) if is_dataclass(part.type)}
_TOP_FIELDS = [part for part in fields(PassRecord) if part.name not in _SECTIONS]
PASS_LINE = make_dataclass(
    "_Line",
    [(part.name, part.type, copy(part)) for group in (_TOP_FIELDS, *map(fields, _SECTIONS.values())) for part in group],
    kw_only=True,
)


def to_line(record: PassRecord) -> dict[str, object]:
    """Return the fields of a record's line. Sections are not nested, so that a table of passes has a column a field."""
    line: dict[str, object] = {}
    for part in fields(record):
        value = to_json(getattr(record, part.name))
        line |= value if part.name in _SECTIONS else {part.name: value}
    return line


def parse_line(line: str, *, source: str) -> PassRecord:
    """Read what `to_line` made. Raises UsageError, whose message begins with `source`, if the line does not fit."""
    return make_record(**vars(parse_json(PASS_LINE, line, source=source)))


def make_record(**values: Any) -> PassRecord:
    """Make the record with these values, named as in its line; all other fields have their defaults."""
    sections = {
        name: kind(**{part.name: values.pop(part.name) for part in fields(kind) if part.name in values})
        for name, kind in _SECTIONS.items()
    }
    return PassRecord(**values, **sections)
