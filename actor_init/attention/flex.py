"""Run torch's flex attention as transformers does: it is compiled for each kind of mask, and skips blocks of pairs.

Packed documents are kept apart by the mask alone, which transformers makes from the position ids: a function of pairs
of tokens, and a table of those blocks of 128 by 128 pairs in which any token sees another.
"""

from typing import Any

import torch._dynamo.config
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import flex_attention_mask

from actor_init.attention.signature import make_refusal, read_settings
from actor_init.compiling import MAX_GRAPHS_PER_BLOCK
from actor_init.declarations.attention.flex import LIMITS

refuse_what_flex_lacks = make_refusal(LIMITS)


def flex_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: BlockMask | None, **options: Any
) -> tuple[Tensor, None]:
    """Run flex attention on rows under a mask, with transformers' attention signature.

    query is [B, H, S, D], key and value are [B, K, S, D]. Returns [B, S, H, D]. Raises UsageError for what the kernel
    lacks.
    """
    refuse_what_flex_lacks(read_settings(**options), query.shape[2], query.shape[3])
    out: Tensor = flex_attention_forward(module, query, key, value, attention_mask, **options)[0]
    return out, None


def make_block_mask(*args: Any, **options: Any) -> BlockMask:
    """Make the mask as transformers does, and allow for the graphs that it takes.

    The mask and the kernel are compiled for one document and for several, for each window, with and without autograd,
    and for a small copy of the model too. After dynamo's default of 8 graphs, torch would compute all scores of all
    pairs, and say no more than a warning.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS_PER_BLOCK)
    mask: BlockMask = flex_attention_mask(*args, **options)
    return mask
