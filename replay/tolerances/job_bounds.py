"""Hold every tolerance of the verdict: how far a replay's numbers may be from the job's (docs/tolerances.md).

A difference is relative to the recorded number, and absolute where that is below 1; a gradient norm's is always
relative. With the unit roundoff u of the coarser dtype, L layers and N tokens, the formulas are

    loss, log-probs     u (1/2 + 3 sqrt(2 L / N))
    gradient norm       4 u
    gradient samples    64 u of the root mean square of the parameter's gradient
    their root mean square, by parameter                             24 u sqrt(L)
    norm of a parameter's gradient                                   12 u sqrt(L)
    norm of the gradient of K parameters of one kind                 12 u sqrt(L / K), at least 12 u

and no bound is below LEAST_BOUND. Where a noise floor was measured, the bound follows from the floor.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actor_init.as_json import AnyFloat
from replay.tolerances.difference import find_outlier_factor, relative_difference, roundoff

# The quantities of a pass and of a step, as verdicts and logs name them.
LOSS, LOG_PROBS, GRAD_NORM = "loss", "log-probs", "gradient norm"
TOKEN_LOG_PROBS, ACTION_TOKENS = "token log-probs", "log-probs by token"
GRADIENT = "gradient samples"
STEPPED = "weights behind a step"
TOKENS_RMS = "token log-probs, root mean square"
GRADIENT_NORMS = "gradient norm by parameter"
GRADIENT_RMS = "gradient samples, root mean square"

# What may be judged of a gradient.
GRADIENT_QUANTITIES = (GRAD_NORM, GRADIENT_NORMS, GRADIENT_RMS, GRADIENT)

# In fp32, summing in another order changes a number by more than the formulas say.
LEAST_BOUND = {
    LOSS: 1e-5,
    LOG_PROBS: 1e-5,
    TOKEN_LOG_PROBS: 3e-5,
    ACTION_TOKENS: 3e-5,
    GRAD_NORM: 1e-4,
    GRADIENT: 1e-3,
    GRADIENT_RMS: 1e-3,
    GRADIENT_NORMS: 5e-4,
}
# The part of an error that all tokens share, so that no mean removes it.
COMMON_ROUNDOFFS = 0.5
# The part that is independent from token to token; it is multiplied by sqrt(2 L / N).
TOKEN_ROUNDOFFS = 3.0
# Of a gradient norm.
NORM_ROUNDOFFS = 4.0
# Of one element of a gradient, relative to the root mean square of its parameter's gradient.
SAMPLE_ROUNDOFFS = 64.0
# Of the root mean square of a signature's differences; it is multiplied by sqrt(L).
SIGNATURE_ROUNDOFFS = 24.0
# The measured floor of a signature is multiplied by this: a mean square over 64 elements hardly varies. If it is of
# fewer than FEW_SIGNATURES, it is multiplied by FEW_FACTOR.
SIGNATURE_FACTOR = 4.0
FEW_FACTOR = 6.0
FEW_SIGNATURES = 8
# And by this besides, once the job and the replay have stepped: two trainings part faster than two replays.
STEPPED_FACTOR = 2.0
# The norm of a gradient is off by no more than its elements are, and by much less where those errors are independent.
NORM_SHARE = 0.5
# Of the norm of several parameters' gradients together, at least.
LEAST_KIND_ROUNDOFFS = 12.0
# Relative to that root mean square, or to the norm. Within a wider bound a gradient could vanish or change its sign
# unseen, and a loss be any other one.
HIDING_BOUND = 0.5
# An optimizer's state may be so many times as far off as a gradient: it averages those of many steps, whose own errors
# differ, and in which the gradients may cancel.
STATE_FACTOR = 4.0
# How far a weight may be off behind a step, relative to how far the step moved it, as so many times the bound of
# gradient samples: half of a gradient's elements are at least two thirds of its root mean square, and Adam's moments
# take them up twice, as they are and squared.
UPDATE_FACTOR = 4.0
# How far half of the parameters may be off behind a step, as such a share, where rounding hides how far one may be.
# Seen of sound jobs in bf16, 36 to 76 parameters: 0.004 at most; where an average of the weights stayed in, 0.86.
MEDIAN_UPDATE_BOUND = 0.25
# So many parameters have to be sampled behind a step for that.
MIN_UPDATES = 8
# A measured floor of any quantity is multiplied by at least this.
LEAST_FACTOR = 4.0
# The floor of TOKENS_RMS is multiplied by this: a mean square over hundreds of tokens hardly varies.
RMS_FACTOR = 3.0
# Within so many times a mixture's measured floor another route at a tie may be the cause.
ROUTES_FACTOR = 10.0
# Of a router's logits, relative to their root mean square; multiplied by sqrt(2 L). Closer ones are tied.
ROUTE_ROUNDOFFS = 8.0
# So many of a router's tokens may choose other experts beyond a tie, and so large a share of them.
FLIPPED_TOKENS = 3.0
FLIPPED_SHARE = 0.01
# Two passes' shares of a window's gradient that are no further apart are equal.
SAME_SHARES = 1e-4
# Relative to the root mean square of all parameters' gradients: a parameter's difference is divided by at least this,
# since a much smaller gradient may be rounding.
LEAST_RMS = 1e-3
# Relative: how far a weight may be from itself in bf16, rounded to nearest or towards zero.
BF16_SPACING = 2**-7
# Absolute: what fp16 rounds to 0.
FP16_SMALLEST = 2**-24


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseFloor:
    """The largest of `num_values` differences between two replays that differ in rounding alone.

    is_least  they differ in a part of the rounding, so that a bound by formula holds where it is wider
    """

    value: AnyFloat
    num_values: int
    is_least: bool = False

    @property
    def bound(self) -> float:
        return self.value * max(LEAST_FACTOR, find_outlier_factor(self.num_values))


def compute_bound(
    name: str,
    dtypes: Sequence[str],
    num_layers: int,
    num_tokens: int,
    floors: Mapping[str, NoiseFloor] | None = None,
    *,
    is_mixture: bool = False,
) -> float:
    """Compute how far two numbers may be apart that come from two of `dtypes`, other orders and other kernels.

    Where a floor was measured for the quantity, the bound is that of the floor, but not more than the formula, or
    LEAST_FACTOR times the floor if that is more: the formula is what was seen in models whose weights have the usual
    size. In a mixture of experts the formula stays, since its floor may be of other routes. For gradient samples,
    whose formula is a rule of thumb, the floor alone decides.

    The formula of a mean over N tokens: each layer adds to the residual stream twice and rounds it, so a log-prob is
    off by about u sqrt(2 L). Most of that is random and averages out over tokens; a part is common to all of them.
    Seen: up to 0.15 u in the loss of Llama 3.1 8B with other kernels or tp, and 1.8 u sqrt(2 L / N) at most in rows of
    1 to 128 tokens through 2 to 24 layers. Seen of a gradient norm: 1.3 u.
    """
    if name == ACTION_TOKENS:
        name = TOKEN_LOG_PROBS
    unit = max(map(roundoff, dtypes))
    match name:
        case "gradient norm":
            bound = NORM_ROUNDOFFS * unit
        case "gradient samples":
            bound = SAMPLE_ROUNDOFFS * unit
        case _:
            bound = unit * (COMMON_ROUNDOFFS + TOKEN_ROUNDOFFS * math.sqrt(2 * num_layers / max(num_tokens, 1)))
    if floors and name in floors:
        measured = floors[name]
        if not is_mixture:
            bound = max(bound, LEAST_FACTOR * measured.value)
        if name == GRADIENT:
            bound = max(bound, measured.bound) if measured.is_least else measured.bound
        else:
            bound = min(bound, measured.bound)
    return max(LEAST_BOUND[name], bound)


def compute_signature_bound(
    dtypes: Sequence[str],
    num_layers: int,
    floor: NoiseFloor | None,
    num_passes: int = 1,
    *,
    has_stepped: bool = False,
) -> float:
    """Compute how large the root mean square of a gradient signature's differences may be, relative to the gradient's.

    floor       of the parameter's kind; where it was measured, and is no lower limit, it decides, but for the sum
                over passes
    num_passes  that each rank's gradient was accumulated over
    has_stepped  both have made optimizer steps since their weights were the same

    The formula: on the way down and up each of L layers rounds the residual stream and its gradient twice, each time by
    u. Those errors are independent, so they grow like sqrt(L). Seen: 8.7 u sqrt(L) at most in sound jobs of 3 layers,
    of 1.8 floors.
    """
    bound = 0.0
    if floor is None or floor.is_least:
        bound = SIGNATURE_ROUNDOFFS * max(map(roundoff, dtypes)) * math.sqrt(max(num_layers, 1))
    if floor is not None:
        measured = (FEW_FACTOR if floor.num_values < FEW_SIGNATURES else SIGNATURE_FACTOR) * floor.value
        bound = max(bound, measured)
    if has_stepped:
        bound *= STEPPED_FACTOR
    if num_passes > 1:
        # A job may accumulate in its 16-bit dtype, and so round the sum once a pass; a replay need not.
        bound = math.hypot(bound, max(map(roundoff, dtypes)) * math.sqrt(num_passes))
    return max(LEAST_BOUND[GRADIENT_RMS], bound)


def compute_norm_bound(signature_bound: float, dtypes: Sequence[str], num_parameters: int = 1) -> float:
    """Compute how far the norm of the gradients of several parameters together may be from the job's, relatively.

    signature_bound  of `compute_signature_bound`, the largest of these parameters'
    """
    bound = NORM_SHARE * signature_bound / math.sqrt(num_parameters)
    least = LEAST_KIND_ROUNDOFFS * max(map(roundoff, dtypes)) if num_parameters > 1 else 0.0
    return max(LEAST_BOUND[GRADIENT_NORMS], bound, least)


def name_signature_floor(kind: str) -> str:
    """Name the floor of the signatures of a kind of parameters."""
    return f"{GRADIENT_RMS}: {kind}"


def compute_tie_distance(dtypes: Sequence[str], num_layers: int) -> float:
    """Compute how far apart two experts' logits may be that rounding alone can put in another order.

    It is relative to the root mean square of the token's logits. Seen: 0.095 at most in 16 sound jobs of 4 layers in
    bf16, 64 wide, of 22,000 choices; the other experts of a wrong router are 0.5 to 2 away.
    """
    return max(LEAST_BOUND[TOKEN_LOG_PROBS], ROUTE_ROUNDOFFS * max(map(roundoff, dtypes)) * math.sqrt(2 * num_layers))


def compute_flip_bound(num_tokens: int) -> float:
    """Compute which share of a router's tokens may choose other experts beyond a tie."""
    return FLIPPED_SHARE + FLIPPED_TOKENS / max(num_tokens, 1)


def compute_rms_bound(floor: NoiseFloor) -> float:
    """Compute how large the root mean square of all sampled tokens' differences may be."""
    return max(LEAST_BOUND[TOKEN_LOG_PROBS], RMS_FACTOR * floor.value)


def measure_difference(recorded: float, replayed: float) -> float:
    """Measure the difference, relative to the recorded number, or to 1 where that is smaller."""
    return relative_difference(replayed, recorded, least_size=1.0)


def is_equal_but_for_dtype(value: float, other: float) -> bool:
    """May one number be the other rounded to bf16 or fp16, to nearest or towards zero?"""
    if value == other or (math.isnan(value) and math.isnan(other)):
        return True
    return abs(value - other) <= max(abs(value), abs(other)) * BF16_SPACING + FP16_SMALLEST < math.inf
