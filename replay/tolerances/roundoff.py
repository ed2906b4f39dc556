"""Give the unit roundoff of each dtype, and how far rounding alone moves a value that a model computes."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from actor_init.spec import Dtype

UNIT_ROUNDOFF = {"float64": 2**-53, "float32": 2**-24, "tf32": 2**-11, "float16": 2**-11, "bfloat16": 2**-8}
FP32_SPACING = 2.0**-23  # losses, log-probs and norms are fp32 in every dtype
_NAMES = {Dtype.FP32: "float32", Dtype.FP16: "float16", Dtype.BF16: "bfloat16"}


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
