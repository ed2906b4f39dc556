"""Name what can be wrong with a training step, and hold one such cause with what it explains.

A finding is a number that is not the job's. A cause is what a person would mend: it explains findings. The same cause
may show in many numbers, and the first number that differs is rarely the one to mend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Sureness(StrEnum):
    """How sure a cause is.

    IS        the recording states it, or no other cause gives these numbers
    PROBABLY  the numbers are what this cause gives, and another cause could give them
    MAY_BE    the cause is possible, and nothing speaks against it
    """

    IS = "is"
    PROBABLY = "probably"
    MAY_BE = "may be"


class CauseName(StrEnum):
    """The causes that the verdict tells apart."""

    # The replay does not run on the job's weights.
    OTHER_WEIGHTS = "other weights"
    WEIGHTS_CHANGED = "weights changed outside the optimizer"
    TIED_WEIGHTS = "tied weights that are not tied"
    ADAPTER_SCALE = "adapter scale"
    # The forward computes something else.
    MODEL_CONFIG = "another model config"
    MODEL_CODE = "another model code"
    KERNEL = "another kernel"
    COMPILED = "the compiled graph"
    DTYPE = "another dtype"
    POSITIONS = "other positions"
    MASK = "another attention mask"
    DOCUMENTS_MEET = "packed documents that see each other"
    DROPOUT = "dropout"
    ROUTES = "other expert routes"
    ROUTER_LOSS = "the routers' loss"
    # The loss is another function of the same log-probs.
    OTHER_TOKENS = "a loss over other tokens"
    WINDOW_WEIGHTS = "other weights of passes"
    OBJECTIVE = "another objective"
    # The gradient is another one than the loss has.
    NO_GRADIENT = "a parameter without a gradient"
    FROZEN = "a frozen parameter"
    GRADIENTS_SCALED = "scaled gradients"
    GRADIENTS_CHANGED = "changed gradients"
    NOT_REDUCED = "gradients that are not reduced"
    SUMMED = "gradients summed over ranks"
    NOT_CLEARED = "gradients that are not cleared"
    CLIPPED_EARLY = "clipping at the wrong time"
    CLIPPING = "another clipping"
    # The step is another one than the gradient gives.
    OPTIMIZER = "another optimizer"
    SCHEDULE = "another schedule"
    STEPS_SKIPPED = "skipped or repeated steps"
    OPTIMIZER_STATE = "another optimizer state"
    # Nothing above is known to be the cause.
    VERSIONS = "other versions"


# What a job's loop does with the log-probs and the gradients of a model: no layer computes otherwise.
LOOP_CAUSES = frozenset(
    {
        *(CauseName.OTHER_TOKENS, CauseName.WINDOW_WEIGHTS, CauseName.OBJECTIVE, CauseName.GRADIENTS_SCALED),
        *(CauseName.NOT_REDUCED, CauseName.SUMMED, CauseName.NOT_CLEARED, CauseName.CLIPPED_EARLY, CauseName.CLIPPING),
        *(CauseName.OPTIMIZER, CauseName.SCHEDULE, CauseName.STEPS_SKIPPED, CauseName.OPTIMIZER_STATE),
    }
)

# What is no code of a layer, and settled once it is sure.
SETTLED_CAUSES = frozenset(
    {
        *(CauseName.TIED_WEIGHTS, CauseName.FROZEN, CauseName.MODEL_CONFIG, CauseName.POSITIONS),
        *(CauseName.MASK, CauseName.DOCUMENTS_MEET, CauseName.DROPOUT),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One cause of what differs in a run.

    sentence  what is wrong, where, and since when, in words for the terminal
    try_next  the command or the change that mends it, or that tells more; None where nothing does
    explains  the names of the findings that this cause explains, as `Finding.name` has them
    entails   causes that would be its consequences, however sure they are, such as labels of what a wrong mask hides
    """

    name: CauseName
    sureness: Sureness
    sentence: str
    try_next: str | None = None
    explains: Sequence[str] = ()
    entails: Sequence[CauseName] = ()
