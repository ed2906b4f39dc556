"""Measure how far two numbers are apart, and how much of that rounding and chance explain, by dtypes' unit roundoff."""

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from actor_init.spec import Dtype

UNIT_ROUNDOFF = {"float64": 2**-53, "float32": 2**-24, "tf32": 2**-11, "float16": 2**-11, "bfloat16": 2**-8}
# Losses, log-probs and norms are fp32 in every dtype.
FP32_SPACING = 2.0**-23
_NAMES = {Dtype.FP32: "float32", Dtype.FP16: "float16", Dtype.BF16: "bfloat16"}
# The probability of a false alarm that `find_outlier_factor` allows: one sound difference taken for a fault.
FALSE_ALARM = 1e-7


def absolute_difference(value: float, reference: float) -> float:
    """Compute |value - reference|: 0 for nan beside nan or an infinity, inf for either beside anything else.

    Which of the two a sum becomes that overflows depends on the order of its terms.
    """
    are_finite = math.isfinite(value), math.isfinite(reference)
    has_nan = math.isnan(value) or math.isnan(reference)
    if value == reference or (has_nan and not any(are_finite)):
        return 0.0
    if not all(are_finite):
        return math.inf
    return abs(value - reference)


def relative_difference(value: float, reference: float, *, least_size: float = 0.0) -> float:
    """Compute the absolute difference divided by |reference|, or by `least_size` where that is more.

    inf where the numbers differ and there is no size to divide by.
    """
    return as_share(absolute_difference(value, reference), max(abs(reference), least_size))


def as_share(difference: float, size: float) -> float:
    """Express a difference as a share of `size`; inf where there is a difference and no size."""
    if difference == 0 or math.isinf(difference):
        return difference
    return difference / size if size else math.inf


def roundoff(dtype: str | Dtype) -> float:
    """Look up the unit roundoff of a dtype, named as torch or as `--dtype` names it."""
    return UNIT_ROUNDOFF[_NAMES[dtype] if isinstance(dtype, Dtype) else dtype]


def is_coarse(dtypes: Iterable[str]) -> bool:
    """Does one of the dtypes round more than fp32?"""
    return max(map(roundoff, dtypes)) > roundoff("float32")


def estimate_rounding_ceiling(dtype: Dtype, config: Mapping[str, Any], num_tokens: int) -> float:
    """Estimate what rounding alone explains, from the model's config in run.json and the tokens of the largest pass."""
    text = config.get("text_config") or config
    names = _read_size_names(text.get("model_type"))
    hidden_size, num_layers = (text[names.get(name, name)] for name in ("hidden_size", "num_hidden_layers"))
    num_summed = max(hidden_size, num_tokens) if dtype is Dtype.FP32 else 1
    return roundoff(dtype) * math.sqrt(2 * num_layers * num_summed)


def _read_size_names(model_type: str | None) -> Mapping[str, str]:
    """Read under which names a model type's config has its sizes: GPT-2's hidden size is n_embd."""
    if model_type is None:
        return {}
    from transformers import CONFIG_MAPPING

    # The type of a user's model is not transformers'.
    if model_type not in CONFIG_MAPPING:
        return {}
    names: Mapping[str, str] = CONFIG_MAPPING[model_type].attribute_map
    return names


@cache
def find_outlier_factor(num_samples: int) -> float:
    """Find k such that one more normal sample exceeds k times the largest of `num_samples` at odds FALSE_ALARM."""
    low, high = 1.0, 1e7
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        if estimate_chance_beyond(middle, num_samples) > FALSE_ALARM:
            low = middle
        else:
            high = middle
    return high


def estimate_chance_beyond(factor: float, num_samples: int) -> float:
    """Sum up, over the largest sample's size m, its probability times the chance of exceeding `factor` m."""
    chance = 0.0
    for size, probability in _list_sizes(num_samples):
        # It grows smaller with the size, and is 0 in fp64 long before the largest one.
        beyond = math.erfc(factor * size / math.sqrt(2))
        if not beyond:
            break
        chance += probability * beyond
    return chance


@cache
def _list_sizes(num_samples: int) -> list[tuple[float, float]]:
    """List the sizes that the largest of `num_samples` normal samples may have, smallest first, with probabilities."""
    step = 0.005
    sizes = [(number + 0.5) * step for number in range(int(8 / step))]
    probabilities = [
        step
        * num_samples
        * math.erf(size / math.sqrt(2)) ** (num_samples - 1)
        * math.sqrt(2 / math.pi)
        * math.exp(-size * size / 2)
        for size in sizes
    ]
    return [(size, probability) for size, probability in zip(sizes, probabilities, strict=True) if probability]
