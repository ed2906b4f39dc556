"""Compute action tokens' log-probs from prepared inputs; the one forward that every backend uses."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from actor_init.attention.document_masks import mask_between_documents
from actor_init.attention.ring_split import sum_over_ring
from actor_init.head.head_patch import patch_head
from actor_init.head.whole_logits import compute_compiled_log_probs, compute_eager_log_probs
from actor_init.inputs.packing import ActorInputs
from actor_init.model_form import DocumentBorders
from actor_init.parallel.vocab_parallel import compute_sharded_log_probs
from actor_init.training_mode import switch_parts


def action_log_probs(model: Callable[..., Any], inputs: ActorInputs) -> Tensor:
    """Return fp32 log-probs [B, A] of the action tokens, 0 where `inputs.action_mask_BA` is False.

    By what `inputs.head` says they may be computed inside the model's head. Else logits are computed for every token,
    as trainers do, so that time and memory match theirs. Raises UsageError for a model whose head is not as
    `inputs.head` says.
    """
    if inputs.modules_in_other_mode and isinstance(model, nn.Module):
        switch_parts(model, inputs.modules_in_other_mode)
    arguments: dict[str, Any] = {}
    mask_context: AbstractContextManager[None] = nullcontext()
    if inputs.ring is not None:
        arguments = {"ring": inputs.ring}
    elif inputs.cu_seq_lens is not None:
        arguments = {
            "cu_seq_lens_q": inputs.cu_seq_lens,
            "cu_seq_lens_k": inputs.cu_seq_lens,
            "max_length_q": inputs.max_length,
            "max_length_k": inputs.max_length,
        }
        if inputs.borders is not DocumentBorders.OWN:
            document_1T = number_documents(inputs.cu_seq_lens, inputs.input_ids.shape[1])
            mask_context = mask_between_documents(document_1T)
            arguments |= {"seq_idx": document_1T} if inputs.borders is DocumentBorders.NUMBERS else {}
    arguments |= {
        "input_ids": inputs.input_ids,
        "position_ids": None if inputs.makes_positions else inputs.position_ids,
        "attention_mask": inputs.attention_mask_BS,
        "use_cache": False,
    }
    with mask_context:
        has_logits = inputs.head is None or inputs.head.is_whole
        log_probs_N = (
            _compute_from_logits(model(**arguments).logits, inputs)
            if has_logits
            else _compute_in_head(model, inputs, arguments)
        )
    flat = log_probs_N.new_zeros(inputs.action_mask_BA.numel()).index_put((inputs.slot_N,), log_probs_N)
    if inputs.ring is not None:
        flat = sum_over_ring(flat, inputs.ring.group)
    return flat.view(inputs.action_mask_BA.shape)


def _compute_in_head(model: Callable[..., Any], inputs: ActorInputs, arguments: dict[str, Any]) -> Tensor:
    assert inputs.head is not None
    kept_logits = inputs.kept_logits
    with patch_head(
        model,
        inputs.head,
        predictor_N=inputs.predictor_N,
        target_ids_N=inputs.target_ids_N,
        has_uniform_gradient=inputs.has_uniform_gradient and kept_logits is None,
        with_entropies=kept_logits is not None,
    ) as patched_head:
        logits = model(**arguments).logits
    log_probs_N, entropy_N = patched_head.take_results(logits)
    if kept_logits is not None and entropy_N is not None:
        kept_logits.keep_entropies(entropy_N, *_find_slots(inputs))
    return log_probs_N


def _compute_from_logits(logits: Tensor, inputs: ActorInputs) -> Tensor:
    if inputs.kept_logits is not None:
        inputs.kept_logits.keep(logits, inputs.predictor_N, *_find_slots(inputs))
    # Under tensor parallelism the head may be sharded on the vocabulary.
    if isinstance(logits, DTensor):
        return compute_sharded_log_probs(logits, inputs.predictor_N, inputs.target_ids_N)
    if inputs.head is not None and inputs.head.compiled is not None:
        return compute_compiled_log_probs(logits, inputs.predictor_N, inputs.target_ids_N, inputs.head.compiled)
    return compute_eager_log_probs(logits, inputs.predictor_N, inputs.target_ids_N)


def _find_slots(inputs: ActorInputs) -> tuple[Tensor, tuple[int, ...], Any]:
    """Find each log-prob's index in the flattened [B, A], its shape, and the ring's group or None."""
    ring = None if inputs.ring is None else inputs.ring.group
    return inputs.slot_N, tuple(inputs.action_mask_BA.shape), ring


def number_documents(cu_seq_lens: Tensor, num_tokens: int) -> Tensor:
    """Return each token's document [1, T], int32, counted from 0. `cu_seq_lens` is [D + 1], int32."""
    index_T = torch.arange(num_tokens, device=cu_seq_lens.device, dtype=cu_seq_lens.dtype)
    return (torch.bucketize(index_T, cu_seq_lens, right=True, out_int32=True) - 1)[None]
