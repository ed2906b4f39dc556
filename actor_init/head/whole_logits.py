"""Compute log-probs from whole logits, as a job does whose model returns them: eager, or by a compiled loss.

Shape letters: T tokens of all rows, N of them whose log-prob is requested, V vocabulary.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from actor_init.compiling import compile_function
from actor_init.option_values import CompileLengths
from capture.file_format.micro_batch import IGNORED_LABEL


def compute_eager_log_probs(logits: Tensor, predictor_N: Tensor, target_ids_N: Tensor) -> Tensor:
    """Compute fp32 log-probs [N] of the targets, from `logits` [B, S, V]; `predictor_N` indexes the flattened [B, S].

    Where a backward follows and most tokens have a target, all logits are converted to fp32, as jobs do: to select rows
    first would copy the logits, and in the backward their gradient. A long prompt's logits are not converted. Without a
    backward a token may have several targets.
    """
    logits_TV = logits.flatten(0, 1)
    num_tokens, num_targets = logits_TV.shape[0], predictor_N.shape[0]
    # A selected row takes 2 bytes a number beside the 4 of fp32.
    if not logits.requires_grad or 4 * num_tokens > 6 * num_targets:
        return -F.cross_entropy(logits_TV[predictor_N].float(), target_ids_N, reduction="none")
    return -_compute_losses(logits_TV, _place_targets(num_tokens, predictor_N, target_ids_N))[predictor_N]


def compute_compiled_log_probs(
    logits: Tensor, predictor_N: Tensor, target_ids_N: Tensor, lengths: CompileLengths
) -> Tensor:
    """Compute what `compute_eager_log_probs` does, by a loss of all tokens that torch.compile has compiled.

    The compiler makes no copy of the logits in fp32: forward and backward read the logits, and write their gradient.
    """
    logits_TV = logits.flatten(0, 1)
    target_T = _place_targets(logits_TV.shape[0], predictor_N, target_ids_N)
    if lengths is CompileLengths.DYNAMIC:
        for tensor in (logits_TV, target_T):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    loss_T = compile_losses(lengths)(logits_TV, target_T)
    return -loss_T[predictor_N]


def _place_targets(num_tokens: int, predictor_N: Tensor, target_ids_N: Tensor) -> Tensor:
    """Return each token's target [T], and for a token without one the label that a loss ignores."""
    return predictor_N.new_full((num_tokens,), IGNORED_LABEL).index_copy(0, predictor_N, target_ids_N)


@cache
def compile_losses(lengths: CompileLengths) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the compiled loss of each token of whole logits, the same one for the whole process."""
    return compile_function(_compute_losses, lengths)


# The names of its arguments are none that a block's forward has: the lengths of those are dynamic in all their
# dimensions, and a graph for any vocabulary would be slower.
def _compute_losses(loss_logits_TV: Tensor, loss_targets_T: Tensor) -> Tensor:
    return F.cross_entropy(loss_logits_TV.float(), loss_targets_T, reduction="none", ignore_index=IGNORED_LABEL)
