"""Say how far two numbers are apart, and how much of it rounding and chance explain, by each dtype's unit roundoff."""

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from actor_init.spec import Dtype

UNIT_ROUNDOFF = {"float64": 2**-53, "float32": 2**-24, "tf32": 2**-11, "float16": 2**-11, "bfloat16": 2**-8}
FP32_SPACING = 2.0**-23  # losses, log-probs and norms are fp32 in every dtype
_NAMES = {Dtype.FP32: "float32", Dtype.FP16: "float16", Dtype.BF16: "bfloat16"}
FALSE_ALARM = 1e-7  # the odds by which `factor_for` takes a difference for a fault


def absolute_difference(value: float, reference: float) -> float:
    """Return |value - reference|: 0 for nan beside nan, inf for nan or an infinity beside anything else."""
    if value == reference or (math.isnan(value) and math.isnan(reference)):
        return 0.0
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.inf
    return abs(value - reference)


def relative_difference(value: float, reference: float, *, least_size: float = 0.0) -> float:
    """Return the absolute difference divided by |reference|, or by `least_size` where that is more.

    inf where the numbers differ and there is no size to divide by.
    """
    return as_share(absolute_difference(value, reference), max(abs(reference), least_size))


def as_share(difference: float, size: float) -> float:
    """Return a difference as a share of `size`; inf where there is a difference and no size."""
    if difference == 0 or math.isinf(difference):
        return difference
    return difference / size if size else math.inf


def roundoff(dtype: str | Dtype) -> float:
    """Return the unit roundoff of a dtype, named as torch or as `--dtype` names it."""
    return UNIT_ROUNDOFF[_NAMES[dtype] if isinstance(dtype, Dtype) else dtype]


def is_coarse(dtypes: Iterable[str]) -> bool:
    """Tell whether one of the dtypes rounds more than fp32."""
    return max(map(roundoff, dtypes)) > roundoff("float32")


def ceiling_of(dtype: Dtype, config: Mapping[str, Any], num_tokens: int) -> float:
    """Return what rounding alone explains, from the model's config in run.json and the tokens of the largest pass."""
    text = config.get("text_config") or config
    names = _own_names(text.get("model_type"))
    hidden_size, num_layers = (text[names.get(name, name)] for name in ("hidden_size", "num_hidden_layers"))
    summed = max(hidden_size, num_tokens) if dtype is Dtype.FP32 else 1
    return roundoff(dtype) * math.sqrt(2 * num_layers * summed)


def _own_names(model_type: str | None) -> Mapping[str, str]:
    """Return the model type's own names of config sizes: GPT-2's hidden size is n_embd."""
    if model_type is None:
        return {}
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:  # a user's model
        return {}
    names: Mapping[str, str] = CONFIG_MAPPING[model_type].attribute_map
    return names


@cache
def factor_for(num_samples: int) -> float:
    """Return k such that one more normal sample exceeds k times the largest of `num_samples` at odds FALSE_ALARM."""
    low, high = 1.0, 1e7
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        if chance_beyond(middle, num_samples) > FALSE_ALARM:
            low = middle
        else:
            high = middle
    return high


def chance_beyond(factor: float, num_samples: int) -> float:
    """Integrate, over the largest sample's size m, its density times the chance of exceeding `factor` m."""
    step = 0.005
    sizes = [(number + 0.5) * step for number in range(int(8 / step))]
    density = (
        num_samples * math.erf(m / math.sqrt(2)) ** (num_samples - 1) * math.sqrt(2 / math.pi) * math.exp(-m * m / 2)
        for m in sizes
    )
    chances = (math.erfc(factor * m / math.sqrt(2)) for m in sizes)
    return step * sum(a * b for a, b in zip(density, chances, strict=True))
