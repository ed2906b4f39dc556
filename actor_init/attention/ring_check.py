"""Prove that a model can be cut into slices: its tokens meet in the attention kernel and nowhere else.

Ring attention exchanges keys and values. What else carries from one token to another (a convolution, a recurrent
state, a mask of the model's own) would stop at the border of a slice, and the loss would be wrong but plausible. So,
once the actor is open, a few tokens go through it with a kernel that lets each see itself alone: then no token may
change another's logits.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from actor_init.attention.ring_attention import EachAlone
from actor_init.spec import UsageError
from capture.facts import Setting

NUM_TOKENS = 16
# of what the changed token's own logits move: roundoff of a mixture whose experts get other batches
BOUNDS = {torch.float32: 1e-4}
COARSE_BOUND = 2e-2
UNKNOWN_WAYS_TO_FAIL = (TypeError, KeyError, ValueError, IndexError, AttributeError, NotImplementedError, RuntimeError)


def check_ring(model: Callable[..., Any], config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UsageError unless tokens of `model`, opened with a ring kernel, meet in that kernel alone.

    All ranks must call this. It takes two forwards of 16 tokens, without gradients.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or [])
    if "chunked_attention" in kinds:
        _refuse(config, "its chunked attention has no ring kernel")
    alone = EachAlone()
    ids_L = torch.arange(NUM_TOKENS, device=device) % text.vocab_size
    changed_L = ids_L.clone()
    changed_L[0] = text.vocab_size - 1
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            before_LV, after_LV = (_logits(model, ids, alone) for ids in (ids_L, changed_L))
    except (UsageError, torch.OutOfMemoryError, dist.DistError):
        raise
    except UNKNOWN_WAYS_TO_FAIL as error:
        reason = (str(error).splitlines() or [""])[0][:120]
        if "argument: 'ring'" in reason:
            _refuse(config, "its layers do not tell their attention of the slice")
        _refuse(config, f"its layers cannot run on a slice ({type(error).__name__}: {reason})")
    moved_L = (before_LV - after_LV).abs().amax(dim=-1)
    if bool(moved_L[1:].max() > BOUNDS.get(dtype, COARSE_BOUND) * moved_L[0]):
        _refuse(config, "its tokens meet outside of the attention that a ring kernel replaces, as in a recurrent state")
    if not alone.num_calls:
        _refuse(config, "its layers have no attention that can be replaced")
    if alone.given:
        _refuse(config, f"its attention needs {' and '.join(sorted(alone.given))}, which no ring kernel takes")
    is_windowed = any("sliding" in kind for kind in kinds) if kinds else _has_window(text)
    if is_windowed and not alone.num_windowed:
        _refuse(config, "its sliding window is in a mask of its own, which no ring kernel takes")


def _has_window(text: PretrainedConfig) -> bool:
    return bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True) is not False


def _logits(model: Callable[..., Any], ids_L: Tensor, alone: EachAlone) -> Tensor:
    positions_L = torch.arange(NUM_TOKENS, device=ids_L.device)
    given: dict[str, Any] = {"input_ids": ids_L[None], "position_ids": positions_L[None], "attention_mask": None}
    logits = model(**given, use_cache=False, ring=alone).logits
    logits = logits.to_local() if isinstance(logits, DTensor) else logits
    whole: Tensor = logits[0].float()
    return whole


def _refuse(config: PretrainedConfig, why: str) -> None:
    ring = Setting("ring")
    raise UsageError(ring, f"cannot slice a {config.model_type}: {why}", f"Try: {ring.of(1)}")
