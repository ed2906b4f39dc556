"""Shrink a model's config to a copy of its class that runs in milliseconds, with every kind of layer that it mixes."""

import re
from collections.abc import Iterator
from copy import deepcopy
from functools import reduce
from math import gcd
from typing import Any

from transformers import PretrainedConfig

VOCABULARY = 128
WINDOW = 6
CHUNK = 8
# Keys that a query selects: more than each of the probe's documents has, less than all of them together.
NUM_SELECTED_KEYS = 24
WIDTHS = (
    *("hidden_size", "intermediate_size", "n_embd", "d_model", "n_inner", "ffn_dim", "ffn_hidden_size", "dff"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size"),
    *("word_embed_proj_dim", "lru_width", "attention_hidden_size", "mamba_d_ssm", "intermediate_size_mlp"),
    *("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"),
)
QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
# Heads and groups of state-space layers.
STATE_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
STATE_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size", "local_attention")
# How many tokens a layer handles at once: a recurrent layer's chunk, or a block of sparse attention.
CHUNKS = ("chunk_size", "mamba_chunk_size", "block_size")
VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
TOP_K = ("index_topk",)
# Names of the number of layers.
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
PERIOD = re.compile(r"period|pattern|interval|every|freq|offset|first_k_dense|_step$|hash_layers")
# Elements of the widest matrix of all layers. Below that, nothing has to be narrower.
SMALL_MATRIX = 100_000


def make_small_configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield copies of `config` to try in turn: narrow with few layers, narrow with all, wide with few.

    All have a small vocabulary and short windows, so that a document of 20 tokens is longer than a window. A copy may
    not be possible for its class: then building it raises.
    """
    for divisor, is_cut in ((_find_divisor(config), True), (_find_divisor(config), False), (1, True)):
        small = deepcopy(config)
        text = small.get_text_config()
        for name in _find_numbers(text, VOCABULARIES):
            setattr(text, name, VOCABULARY)
        _limit_values(text, WINDOWS, WINDOW)
        _limit_values(text, CHUNKS, CHUNK)
        _limit_values(text, TOP_K, NUM_SELECTED_KEYS)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if _find_numbers(text, (name,)).get(name, 0) >= VOCABULARY:
                setattr(text, name, 0)
        if divisor > 1:
            _narrow_widths(text, divisor)
        if is_cut:
            _cut_layers(text)
        yield small


def _limit_values(config: Any, names: tuple[str, ...], largest: int) -> None:
    for name in names:
        if name in _find_numbers(config, names) and getattr(config, name) > largest:
            setattr(config, name, largest)


def _find_numbers(config: Any, names: tuple[str, ...]) -> dict[str, int]:
    """Return the whole numbers above 0 that `config` has under `names`."""
    # `vars` has no aliases of other names, and no settings of which each layer has a value of its own.
    values = vars(config)
    return {name: values[name] for name in names if type(values.get(name)) is int and values[name] > 0}


def _find_divisor(config: PretrainedConfig) -> int:
    """Return the largest number that divides all widths and heads and leaves two heads; 1 if the model is narrow."""
    text = config.get_text_config()
    widths = _find_numbers(text, WIDTHS)
    if not widths or max(widths.values()) ** 2 < SMALL_MATRIX:
        return 1
    groups = max(_find_numbers(text, STATE_GROUPS).values(), default=1)
    heads = {**_find_numbers(text, QUERY_HEADS), **_find_numbers(text, STATE_HEADS)}
    common = reduce(gcd, [*widths.values(), *heads.values()])
    least = min(heads.values(), default=common)
    possible = [n for n in range(1, common + 1) if not common % n and all(not h // n % groups for h in heads.values())]
    return max((n for n in possible if least // n >= 2), default=1)


def _narrow_widths(config: Any, divisor: int) -> None:
    for name, value in {**_find_numbers(config, WIDTHS), **_find_numbers(config, QUERY_HEADS + STATE_HEADS)}.items():
        setattr(config, name, value // divisor)
    for name, value in _find_numbers(config, KEY_HEADS).items():
        setattr(config, name, 1 if value % divisor else value // divisor)


def _cut_layers(config: Any) -> None:
    """Keep the first layers, up to one of each kind, and at least two."""
    depths = _find_numbers(config, DEPTHS)
    depth = max(depths.values(), default=0)
    names = [name for name, value in vars(config).items() if _is_list_by_layer(value, depth)]
    kinds = list(zip(*(map(repr, vars(config)[name]) for name in names), strict=True))
    num_needed = max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)
    if not names:
        periods = [
            value
            for name, value in vars(config).items()
            if PERIOD.search(name) and type(value) is int and 1 < value < depth
        ]
        num_needed = 2 * max(periods, default=1)
    num_layers = min(depth, max(2, num_needed))
    for name in names:
        setattr(config, name, list(vars(config)[name])[:num_layers])
    for name in depths:
        setattr(config, name, num_layers)


def _is_list_by_layer(value: object, depth: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == depth > 0
