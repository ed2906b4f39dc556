"""Define what a check says of a recording, and what it knows besides the recorded passes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from capture.file_format.end_record import EndRecord
from replay.verdict.causes.cause import CauseName
from replay.verdict.recorded_pass import RecordedPass


class Weight(IntEnum):
    """How telling a remark is. What is a FACT of many sound jobs too is no note under a verdict."""

    WRONG_TARGETS = 0
    NO_TRAINING = 1
    OTHER_CONFIG = 2
    WRONG_TOKENS = 3
    SAME_ROWS = 4
    PRECISION = 5
    SETTING = 6
    MISSING_PASSES = 7
    FACT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LintRemark:
    """One sentence about a recording. It is said, and judges nothing.

    topic  what it is about, in a word
    cause  the verdict's cause that says the same of a job that differs; None: none does
    """

    topic: str
    text: str
    weight: Weight
    cause: CauseName | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LintSubject:
    """What the checks look at.

    passes              one of each rank and forward
    is_whole            they are all passes of the recording
    pad_token_id        of the model's config; None: it names none
    eos_token_ids       ids that end a text
    vocabulary          number of ids that the model knows; None: not known
    dropout             settings of the model that make dropout
    parameter_names     of the job's model, in the order in which a step numbers them; empty: not recorded
    frozen              names of the parameters that the job did not train
    counts_padding      the model, given no position ids, counts the padding of rows padded on the left
    has_router_loss     the model adds a loss of its routers, over all tokens that no mask hides
    has_adapter         the job trained an adapter, so that the other parameters are frozen
    broken_ties         modules that share a weight in the model and not in its adapter: those with a copy, the others
    config_differences  of the model folder and the job
    code_differences    of the job's model and the replay's, besides settings, that no cause of the verdict tells
    not_recorded        numbers of training passes that the recording could not keep, by the reason
    given_rates         learning rates in the optimizer state that the replay was given; empty where none is known
    ends                how ranks closed the recording, of those that wrote it
    """

    passes: Sequence[RecordedPass]
    is_whole: bool = False
    pad_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    vocabulary: int | None = None
    dropout: Sequence[str] = ()
    parameter_names: Sequence[str] = ()
    frozen: Sequence[str] = ()
    counts_padding: bool = False
    has_router_loss: bool = False
    has_adapter: bool = False
    broken_ties: Sequence[tuple[Sequence[str], Sequence[str]]] = ()
    config_differences: Sequence[str] = ()
    code_differences: Sequence[str] = ()
    not_recorded: Mapping[str, int] = field(default_factory=dict)
    given_rates: Sequence[float] = ()
    ends: Sequence[EndRecord] = ()

    @property
    def trained(self) -> list[RecordedPass]:
        return [recorded for recorded in self.passes if recorded.trains]
