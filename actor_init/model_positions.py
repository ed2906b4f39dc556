"""Supply the position ids that a model would make itself when given none, where it counts padding too.

GPT-2 counts a row's columns, padding included; OPT counts the tokens that its attention mask marks as real. Where
positions rotate queries and keys (rotary), or weigh their distance (ALiBi), only differences matter, and both agree;
not so where queries and keys are scaled after they were rotated, as in HunYuan.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from actor_init.custom.config import CustomConfig
from actor_init.inputs.documents import gives_positions
from actor_init.probe.packing_probe import SEEDS, build_small_model
from actor_init.probe.small_config import make_small_configs
from capture.file_format.micro_batch import MicroBatch

_NUM_COLUMNS, _NUM_PADDED = 12, 5
# The largest relative difference of logits that are the same. Rounding gives 1e-6; another position at least 1e-3,
# except where it does not matter.
_MAX_DIFFERENCE = 1e-4
# What `has_column_positions` found out, by model type and config.
_answer_by_config: dict[tuple[str, str], bool] = {}


def add_model_positions(batch: MicroBatch, config: PretrainedConfig) -> MicroBatch:
    """Return `batch` with column numbers as position ids, if it has none and a model of `config` counts columns."""
    if gives_positions(batch) or not has_column_positions(config):
        return batch
    columns_BS = torch.arange(batch.sequences_BS.shape[1]).expand(batch.sequences_BS.shape)
    return replace(batch, extra_tensors={**batch.extra_tensors, "position_ids": columns_BS})


def has_column_positions(config: PretrainedConfig) -> bool:
    """Does a model of `config` that is given no position ids take a row's columns, padding included?

    A user's model is given columns, if it takes position ids: it would have made them itself when the job gave none.
    """
    if isinstance(config, CustomConfig):
        return True
    key = str(config.model_type), config.to_json_string(use_diff=False)
    if key not in _answer_by_config:
        _answer_by_config[key] = _probe_column_positions(config)
    return _answer_by_config[key]


def counts_padding(config: Mapping[str, Any] | PretrainedConfig) -> bool:
    """Does a known class, by itself, give a token another position where padding stands before it?

    config  of a model, or its values as a recording has them
    """
    if isinstance(config, CustomConfig):
        return False
    if isinstance(config, PretrainedConfig):
        return has_column_positions(config)
    values = dict(config)
    try:
        known = AutoConfig.for_model(values.pop("model_type"), **values)
    # A user's model has values of its own, which may raise anything here.
    except Exception:
        return False
    return has_column_positions(known)


@torch.no_grad()
def _probe_column_positions(config: PretrainedConfig) -> bool:
    """Ask a small copy of the class: are its logits those of columns, and not those of real tokens counted?"""
    real_BS = (torch.arange(_NUM_COLUMNS) >= _NUM_PADDED)[None]
    columns_BS = torch.arange(_NUM_COLUMNS)[None]
    counted_BS = (real_BS.cumsum(dim=1) - 1).clamp(min=0)
    for small in make_small_configs(config):
        try:
            model = build_small_model(small, "eager", SEEDS[0], torch.device("cpu"))
            logits, with_columns, with_counts = (
                _compute_logits(model, real_BS, position_BS) for position_BS in (None, columns_BS, counted_BS)
            )
        # A class checks its config itself, and raises any type. The next copy may pass.
        except Exception:
            continue
        return _is_near(logits, with_columns) and not _is_near(logits, with_counts)
    return False


def _compute_logits(model: PreTrainedModel, real_BS: Tensor, position_BS: Tensor | None) -> Tensor:
    ids_BS = torch.arange(3, 3 + _NUM_COLUMNS)[None]
    positions = {} if position_BS is None else {"position_ids": position_BS}
    logits: Tensor = model(input_ids=ids_BS, attention_mask=real_BS.long(), use_cache=False, **positions).logits
    return logits[real_BS].float()


def _is_near(logits: Tensor, other: Tensor) -> bool:
    return float((logits - other).norm()) <= _MAX_DIFFERENCE * float(logits.norm())
