"""A job's numbers beside the replay's, and how far two such numbers may be apart."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from replay.recorded import GRAD_NORM, LOG_PROBS, LOSS, Claim, Recorded
from replay.records import PassRecord

UNIT_ROUNDOFF = {"float64": 2**-53, "float32": 2**-24, "tf32": 2**-11, "float16": 2**-11, "bfloat16": 2**-8}
LEAST_BOUND = {LOSS: 1e-5, LOG_PROBS: 1e-5, GRAD_NORM: 1e-4}  # as fp32 is held to in the tests


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What decides which numbers the replay can be held to."""

    dtype: str  # as torch calls it
    num_layers: int
    num_data_ranks: int
    grad_accumulation: int
    steps: bool  # the replay moves its weights
    dropout: Sequence[str] = ()  # of the config, that is not 0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A claim beside the replay's number; of log-probs the row that is farthest off, as means over its tokens."""

    name: str
    row: int | None
    recorded: float
    replayed: float
    difference: float  # relative; absolute where the recorded number is below 1, as a sum of log-probs may be 0
    bound: float
    doubt: str | None

    @property
    def agrees(self) -> bool:
        return self.difference <= self.bound


def findings_of(
    record: PassRecord, recorded: Recorded, known: Sequence[tuple[PassRecord, Recorded]], setting: Setting
) -> list[Finding]:
    """Each of a pass's claims that the replay computed too; `known`: all passes, for what one does not tell."""
    findings = [
        _finding(claim, values, record, recorded, setting)
        for claim in recorded.claims
        if (values := _replayed(claim, record)) is not None
    ]
    return _with_norms_doubted(findings, record, recorded, known, setting)


def bound_of(name: str, dtypes: Sequence[str], num_layers: int, num_tokens: int) -> float:
    """How far two numbers may be apart that were computed in two of `dtypes`, in other orders and by other kernels.

    Of a mean over N tokens: u (1/2 + 3 sqrt(2 L / N)), with the unit roundoff u of the coarsest dtype and L layers.
    Each layer adds to the residual stream twice and rounds it, so a log-prob is off by about u sqrt(2 L); over tokens
    that is random and averages out, but for a part that does not. Seen: up to 0.15 u in the loss of Llama 3.1 8B with
    other kernels or tp, and single tokens to 128 at 2 to 24 layers off by 1.8 u sqrt(2 L / N) at most. Of a gradient
    norm: 4 u, where 1.3 u was seen. In fp32 sums in another order are more than all that, and the bounds are those of
    this project's tests, 1e-5 and 1e-4.
    """
    unit = max(map(roundoff, dtypes))
    computed = 4 * unit if name == GRAD_NORM else unit * (0.5 + 3 * math.sqrt(2 * num_layers / max(num_tokens, 1)))
    return max(LEAST_BOUND[name], computed)


def roundoff(dtype: str) -> float:
    return UNIT_ROUNDOFF[dtype]


def _replayed(claim: Claim, record: PassRecord) -> list[float] | None:
    """What the replay computed of it; None where it did not."""
    match claim.name:
        case "loss":
            return None if record.loss is None else [record.loss]
        case "gradient norm":
            return None if record.grad_norm is None else [record.grad_norm]
        case _:
            return list(record.row_log_probs) or None


def _finding(
    claim: Claim, replayed: Sequence[float], record: PassRecord, recorded: Recorded, setting: Setting
) -> Finding:
    """The farthest of a claim's values."""
    per_row = claim.name == LOG_PROBS
    own_tokens = record.row_action_tokens if per_row else [sum(record.row_action_tokens)]
    doubt = claim.doubt
    if claim.num_tokens is not None and list(claim.num_tokens) != list(own_tokens):
        doubt = f"the job's {claim.name} is of {sum(claim.num_tokens)} tokens, the replay's of {sum(own_tokens)}"
    found = []
    for row, (there, here, tokens) in enumerate(zip(claim.values, replayed, own_tokens, strict=True)):
        share = max(tokens, 1) if per_row else 1
        dtypes = [*(recorded.dtypes or ["bfloat16"]), setting.dtype]
        bound = bound_of(claim.name, dtypes, setting.num_layers, tokens)
        found.append(
            Finding(
                name=claim.name,
                row=row if per_row else None,
                recorded=there / share,
                replayed=here / share,
                difference=difference(there / share, here / share),
                bound=bound,
                doubt=doubt,
            )
        )
    return max(found, key=lambda one: one.difference / one.bound)


def difference(recorded: float, replayed: float) -> float:
    """Relative to the recorded number, or to 1 where that is smaller; nan beside nan is none."""
    if recorded == replayed or (math.isnan(recorded) and math.isnan(replayed)):
        return 0.0
    if not (math.isfinite(recorded) and math.isfinite(replayed)):
        return math.inf
    return abs(replayed - recorded) / max(abs(recorded), 1.0)


def _with_norms_doubted(
    findings: Sequence[Finding],
    record: PassRecord,
    recorded: Recorded,
    known: Sequence[tuple[PassRecord, Recorded]],
    setting: Setting,
) -> list[Finding]:
    """A gradient norm is that of everything it was averaged over, and of the loss that was differentiated.

    It is left out where the replay's window cannot be the job's: other ranks, or more passes. It is doubted where the
    loss is, and where the file before does not show that the job's windows are of one pass.
    """
    kept = [one for one in findings if one.name != GRAD_NORM]
    norms = [one for one in findings if one.name == GRAD_NORM]
    ranks = {r.rank for other, r in known if other.index == record.index}
    is_whole = len(ranks) == setting.num_data_ranks == recorded.world_size and setting.grad_accumulation == 1
    if not norms or not is_whole:
        return kept
    is_sure_of_loss = any(one.name == LOSS and one.doubt is None for one in kept)
    doubt = norms[0].doubt
    if not is_sure_of_loss:
        doubt = "the gradient is of a loss that the replay may not compute"
    elif recorded.num_frozen:
        doubt = f"the job did not train {recorded.num_frozen} of its parameters"
    elif not _steps_each_pass(recorded, known):
        doubt = "one gradient norm does not tell how many passes it was accumulated over"
    return [*kept, replace(norms[0], doubt=doubt)]


def _steps_each_pass(recorded: Recorded, known: Sequence[tuple[PassRecord, Recorded]]) -> bool:
    """Has the job's very pass before this one, by the same rank, a norm of its own?"""
    return recorded.step is not None and any(
        one.rank == recorded.rank and one.step == recorded.step - 1 and any(c.name == GRAD_NORM for c in one.claims)
        for _, one in known
    )
