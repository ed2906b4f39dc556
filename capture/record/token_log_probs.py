"""Compute log-probs of a few tokens of a pass from its logits: they tell tokens apart, which a loss does not.

Shapes: B rows, S tokens, V vocabulary, N tokens that are looked at.
"""

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from capture.file_format.optimizer_step import sampled_tokens

_MAX_REMEMBERED = 64
_CPU_ELEMENTS = 2**18  # computed at once: what a cache holds
_indices: OrderedDict[tuple[int, int, torch.device], tuple[Tensor, ...]] = OrderedDict()


def logits_of(output: Any, ids_BS: Tensor, vocabularies: Collection[int] = ()) -> Tensor | None:
    """Find logits for each token id in a forward's output; None if there are none in a plain tensor.

    Those that have no name are as wide as one of `vocabularies`: hidden states have their shape, too.
    """
    logits = output.get("logits") if isinstance(output, dict) else None
    if not isinstance(output, dict):
        several = output if isinstance(output, tuple | list) else (output,)
        wide = (one for one in several if isinstance(one, Tensor) and one.ndim == 3 and one.shape[2] in vocabularies)
        logits = next(wide, None)
    if type(logits) is not Tensor or logits.ndim != 3 or not logits.is_floating_point() or not logits.numel():
        return None
    is_of_ids = type(ids_BS) is Tensor and not ids_BS.is_floating_point() and logits.shape[:2] == ids_BS.shape
    return logits if is_of_ids and logits.device == ids_BS.device else None


@torch.no_grad()
def token_log_probs(logits_BSV: Tensor, ids_BS: Tensor) -> Tensor | None:
    """Compute log-probs, in fp32, of the ids at `sampled_tokens` from the logits one place before.

    An id without a logit gives nan.
    """
    if logits_BSV.shape[1] < 2:
        return None
    rows_N, columns_N, before_N = _indices_of(ids_BS.shape[0], ids_BS.shape[1], logits_BSV.device)
    logits_BSV = logits_BSV.detach()
    ids_N = ids_BS[rows_N, columns_N].long()
    known_N = ids_N.clamp(0, logits_BSV.shape[2] - 1)
    if logits_BSV.device.type == "cpu":
        at_once = max(1, _CPU_ELEMENTS // logits_BSV.shape[2])
        pieces = zip(rows_N.split(at_once), before_N.split(at_once), known_N.split(at_once), strict=True)
        log_probs_N = torch.cat([_log_probs(logits_BSV[rows, before], known) for rows, before, known in pieces])
    else:
        log_probs_N = _log_probs(logits_BSV[rows_N, before_N], known_N)
    return torch.where(known_N == ids_N, log_probs_N, torch.nan)


def _log_probs(logits_NV: Tensor, ids_N: Tensor) -> Tensor:
    return -nn.functional.cross_entropy(logits_NV.float(), ids_N, reduction="none")


def _indices_of(num_rows: int, num_tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the row, the column and the column before of each token that is looked at."""
    key = num_rows, num_tokens, device
    if key not in _indices:
        places = [(row, column, column - 1) for row, column in sampled_tokens(num_rows, num_tokens)]
        indices = torch.tensor(places, device="cpu").T.contiguous()
        if device.type == "cuda":
            indices = indices.pin_memory().to(device, non_blocking=True)
        _indices[key] = indices.to(device).unbind()
        if len(_indices) > _MAX_REMEMBERED:
            _indices.popitem(last=False)
    return _indices[key]
