"""Supply the position ids that a model with a position table would make itself when given none.

GPT-2 counts a row's columns, padding included; OPT counts the tokens that its attention mask marks as real. Where
positions rotate queries and keys (rotary), or weigh their distance (ALiBi), only differences matter, and both agree.
"""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from actor_init.custom.config import CustomConfig
from actor_init.inputs.documents import BORDER_NAMES
from actor_init.model import build_on_meta, config_of
from capture.file_format.micro_batch import MicroBatch

_NUM_COLUMNS, _NUM_PADDED = 6, 2


class _SeenError(Exception):
    """Stops a forward at the position table, with the table's output."""

    def __init__(self, looked_up: Tensor) -> None:
        self.looked_up = looked_up


def with_own_positions(batch: MicroBatch, config: PretrainedConfig) -> MicroBatch:
    """Return `batch` with column numbers as position ids, if it has none and a model of `config` counts columns.

    A batch with an action mask came from a trainer's own actor around the model, which counts real tokens.
    """
    given = batch.extra_tensors
    if batch.action_mask_BA is not None or "position_ids" in given or any(name in given for name in BORDER_NAMES):
        return batch
    if not counts_columns(config):
        return batch
    columns_BS = torch.arange(batch.sequences_BS.shape[1]).expand(batch.sequences_BS.shape)
    return replace(batch, extra_tensors={**given, "position_ids": columns_BS})


def counts_columns(config: PretrainedConfig) -> bool:
    """Does a model of `config` look up a row's columns in a position table, padding included?

    A user's model is given columns, if it takes position ids: it would have made them itself when the job gave none.
    """
    if isinstance(config, CustomConfig):
        return True
    return _counts_columns(str(config.model_type), config.to_json_string(use_diff=False))


@cache
def _counts_columns(model_type: str, config_json: str) -> bool:
    """Ask the class itself: only its embeddings are real, and no layer runs."""
    config = config_of({**json.loads(config_json), "model_type": model_type})
    model = build_on_meta(config, attention="eager", dtype=torch.float32).eval()
    table = _table_of(model, config)
    if table is None:
        return False
    mask_BS = torch.ones(1, _NUM_COLUMNS, dtype=torch.long)
    mask_BS[:, :_NUM_PADDED] = 0
    columns_BS = torch.arange(_NUM_COLUMNS)[None]
    own, columns = (_looked_up(model, table, mask_BS, given) for given in ({}, {"position_ids": columns_BS}))
    counted = _looked_up(model, table, mask_BS, {"position_ids": (mask_BS.cumsum(dim=1) - 1).clamp(min=0)})
    if own is None or columns is None or counted is None:
        return False
    return torch.equal(own, columns) and not torch.equal(own, counted)


def _table_of(model: Any, config: PretrainedConfig) -> nn.Embedding | None:
    """Return the embedding that is not of tokens and has a row per position."""
    num_positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    others = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings()]
    tables = [m for m in others if num_positions and m.num_embeddings >= num_positions]
    return tables[0] if len(tables) == 1 else None


def _looked_up(model: Any, table: nn.Embedding, mask_BS: Tensor, given: dict[str, Tensor]) -> Tensor | None:
    """Return the rows of `table` that the real tokens get; None if the model does not look them up this way."""
    words = model.get_input_embeddings()
    words.weight = nn.Parameter(torch.zeros(2, words.embedding_dim), requires_grad=False)  # for ids 0 and 1
    rows = torch.arange(table.num_embeddings, dtype=torch.float32)[:, None]
    table.weight = nn.Parameter(rows.expand(-1, table.embedding_dim).contiguous(), requires_grad=False)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name == "position_ids" and buffer.is_meta:
                setattr(module, name, torch.arange(buffer.shape[-1]).expand(buffer.shape))

    def look(_: nn.Module, __: Any, output: Tensor) -> None:
        raise _SeenError(output)

    handle = table.register_forward_hook(look)
    try:
        with torch.no_grad():
            model(input_ids=torch.ones_like(mask_BS), attention_mask=mask_BS, use_cache=False, **given)
    except _SeenError as seen:
        return seen.looked_up.expand(*mask_BS.shape, -1)[mask_BS.bool()][:, 0]
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    finally:
        handle.remove()
    return None
