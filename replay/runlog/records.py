"""What was measured, in base units, without tensors: the lines of rank<k>.jsonl and the statistics over them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from actor_init.as_json import AnyFloat


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseCost:
    """One phase of one pass on one rank: seconds of device time on CUDA, of wall time on a CPU.

    Bytes are the CUDA allocator's, or on a CPU the process's resident set: see `memory_kind` in run.json.
    """

    seconds: AnyFloat
    allocated_bytes: int | None  # when the phase ended; None where the system tells peaks only
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None  # None on a CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRecord:
    """One micro-batch through the model on one rank; a line of rank<k>.jsonl."""

    index: int
    source: str
    rank: int
    data_rank: int = 0  # ranks that share it worked on the same micro-batch together
    rows: int = 0
    padded_tokens: int = 0
    real_tokens: int = 0
    fed_tokens: int = 0  # that the model computed: real ones and padding, of all ranks that shared this micro-batch
    row_tokens: list[int] = field(default_factory=list)  # real tokens of each row
    input_digest: str | None = None  # of its tensors; None where the file could not be read
    trains: bool | None = None  # None where the file could not be read
    phases: Mapping[str, PhaseCost] = field(default_factory=dict)  # forward, backward, step
    seconds: AnyFloat | None = None  # host wall time of the whole pass, copies to the device left out
    wait_seconds: AnyFloat | None = None  # after forward, for the slowest rank's forward; None with one rank
    loss: AnyFloat | None = None
    row_log_probs: list[AnyFloat] = field(default_factory=list)  # of each row the fp64 sum over its action tokens
    row_action_tokens: list[int] = field(default_factory=list)  # of each row those tokens
    weight: AnyFloat = 1.0  # of its mean loss in the gradient of its window; 1: as much as every other pass
    grad_norm: AnyFloat | None = None  # before clipping; on the pass that ends an accumulation window
    new_graphs: int = 0
    first_non_finite: str | None = None  # what held a nan or an inf first, in words, as far as this rank saw it
    warmup: bool = False
    traced: bool = False  # and so slower than it would be
    error: str | None = None
    error_type: str | None = None
