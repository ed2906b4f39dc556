"""Compute log-probs from whole logits by a loss that torch.compile has compiled, as a job compiles its loss.

The compiler makes no copy of the logits in fp32: forward and backward read the logits, and write their gradient.

Shape letters: T tokens of all rows, N of them whose log-prob is requested, V vocabulary.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from actor_init.compiling import compile_function
from actor_init.option_words import CompileLengths
from capture.file_format.micro_batch import IGNORED_LABEL


def compute_compiled_log_probs(
    logits: Tensor, predictor_N: Tensor, target_ids_N: Tensor, lengths: CompileLengths
) -> Tensor:
    """Compute fp32 log-probs [N] of the targets, from `logits` [B, S, V]; `predictor_N` indexes the flattened [B, S].

    The loss is that of all tokens, as a job's: of those without a target it is 0.
    """
    logits_TV = logits.flatten(0, 1)
    target_T = predictor_N.new_full((logits_TV.shape[0],), IGNORED_LABEL).index_copy(0, predictor_N, target_ids_N)
    if lengths is CompileLengths.DYNAMIC:
        for tensor in (logits_TV, target_T):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    loss_T = _compile_losses(lengths)(logits_TV, target_T)
    return -loss_T[predictor_N]


@cache
def _compile_losses(lengths: CompileLengths) -> Callable[[Tensor, Tensor], Tensor]:
    return compile_function(_compute_losses, lengths)


# The names of its arguments are none that a block's forward has: the lengths of those are dynamic in all their
# dimensions, and a graph for any vocabulary would be slower.
def _compute_losses(loss_logits_TV: Tensor, loss_targets_T: Tensor) -> Tensor:
    return F.cross_entropy(loss_logits_TV.float(), loss_targets_T, reduction="none", ignore_index=IGNORED_LABEL)
