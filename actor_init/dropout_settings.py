"""Find the config settings that make a model's training random, by asking the model class rather than names.

GPT-2's `summary_first_dropout`, for example, belongs to another head, which no causal LM has.
"""

import inspect
import json
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

# They stand in attention_dropout, resid_pdrop, layerdrop and router_jitter_noise.
RANDOM_WORDS = ("drop", "jitter")


def find_acting_dropouts(config: Mapping[str, object]) -> list[str]:
    """Return the settings above 0 that a causal LM of `config` was built with, or reads in its forward.

    Returns all of them if transformers does not know the model.
    """
    return list(_find_acting(json.dumps(dict(config), sort_keys=True)))


@cache
def _find_acting(config_json: str) -> tuple[str, ...]:
    config = json.loads(config_json)
    candidates = [
        key for key, value in config.items() if any(word in key for word in RANDOM_WORDS) and _is_above_0(value)
    ]
    if not candidates:
        return ()
    try:
        numbers, source = _build_and_inspect(config)
        return tuple(
            key
            for key in candidates
            if f"self.config.{key}" in source or _build_and_inspect({**config, key: 0.0})[0] != numbers
        )
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError, OSError):
        return tuple(candidates)


def _is_above_0(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _build_and_inspect(config: Mapping[str, object]) -> tuple[dict[tuple[str, str], float], str]:
    """Return the numbers in a model's modules, by module and attribute, and the source of its file."""
    # `replay inspect` and `compare` import this file, and seldom come to here.
    import torch
    from transformers import AutoConfig

    from actor_init.model import build_on_meta

    fields = {key: value for key, value in config.items() if key != "model_type"}
    hf_config = AutoConfig.for_model(config["model_type"], **fields)
    model = build_on_meta(hf_config, attention="eager", dtype=torch.float32)
    numbers = {
        (name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, (int, float))
    }
    return numbers, inspect.getsource(sys.modules[type(model).__module__])
