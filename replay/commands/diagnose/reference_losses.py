"""Compute reference losses for the actor's tokens: Hugging Face's, a chunked one, and Liger's.

They come from a plain model: one process, nothing sharded, packed or padded, one document at a time. Its gradient,
averaged over the data ranks with torch alone, is the reference for the actor's gradient.

Shape letters: L tokens of one document, N of them with a label, C of those in a chunk, D hidden width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from actor_init.adapters import add_adapter
from actor_init.declarations.attention.plain import has_sdpa
from actor_init.model import ModelSource, build_on_meta, configure_model, materialise
from actor_init.schedule_and_norm import TORCH_DTYPES
from actor_init.spec import ActorSpec, Attention, Dtype
from actor_init.weights import OnProgress, ignore_progress
from actor_init.world import World
from capture.file_format.micro_batch import IGNORED_LABEL, MicroBatch
from replay.commands.diagnose.untimed_actor import split_documents

TOKENS_PER_CHUNK = 1024
VOCABULARY_PER_CHUNK = 16384


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainAnswer:
    # By method.
    losses: dict[str, float]
    # The method that was skipped, and why; empty if none was.
    omission: str
    # Of the mean loss over the data ranks, by parameter name: fp32 on the host.
    gradients: dict[str, Tensor]


def compute_plain_answer(
    batch: MicroBatch, spec: ActorSpec, source: ModelSource, world: World, on_progress: OnProgress = ignore_progress
) -> PlainAnswer:
    """Compute the losses and gradients of a plain model with these weights on this rank's `batch`.

    All ranks must call this. It computes in `spec.dtype`, but in fp32 for fp16: without loss scaling, fp16 gradients
    vanish.

    Each document goes through the model once, with Hugging Face's loss, whose backward gives the gradients. The head is
    observed meanwhile, and the other losses are computed from the hidden states that it got. They are left out of a
    model that changes what its head computes, since they would not know of that.
    """
    model = _build_plain_model(spec, source, world.device, on_progress)
    documents = [document for document in split_documents(batch) if _count_labels(document[-1])]
    num_labels = max(1, sum(_count_labels(label_1L) for _, _, label_1L in documents))
    if spec.has_user_model:
        losses = {"plain": _compute_custom_loss(model, documents, num_labels, world)}
        gradients = dict(_average_gradients(model, world))
        return PlainAnswer(losses=losses, omission="chunked left out: no known head", gradients=gradients)
    softcap = getattr(source.config.get_text_config(), "final_logit_softcapping", None)
    liger, omission = _load_liger(world, softcap)
    losses = {"Hugging Face": 0.0, "chunked": 0.0} | ({"Liger": 0.0} if liger else {})
    are_logits_the_heads = True
    for document in documents:
        ids_1L, position_1L, label_1L = (tensor.to(world.device) for tensor in document)
        with _observe_head(model) as (head, observed):
            answer = model(
                input_ids=ids_1L,
                position_ids=position_1L,
                labels=label_1L,
                num_items_in_batch=num_labels,
                use_cache=False,
            )
        torch.autograd.backward(answer.loss)
        losses["Hugging Face"] += answer.loss.item()
        are_logits_the_heads &= torch.equal(_apply_softcap(observed["logits"], softcap), answer.logits.detach())
        shifted_L = label_1L[0, 1:]
        hidden_ND, target_N = (
            tensor[shifted_L != IGNORED_LABEL] for tensor in (observed["hidden"].flatten(0, -2)[:-1], shifted_L)
        )
        with torch.no_grad():
            losses["chunked"] += compute_chunked_loss(hidden_ND, head, target_N, softcap) / num_labels
            if liger:
                losses["Liger"] += float(liger(head.weight, hidden_ND, target_N, head.bias)) / num_labels
    if not are_logits_the_heads:
        losses = {"Hugging Face": losses["Hugging Face"]}
        omission = f"chunked and Liger's left out: {type(model).__name__} changes what its head computes"
    return PlainAnswer(losses=losses, omission=omission, gradients=dict(_average_gradients(model, world)))


def choose_attention(spec: ActorSpec, config: PretrainedConfig) -> str:
    """Return the plain model's attention: sdpa, or eager for a spec that asks for it and a model without sdpa."""
    return "sdpa" if spec.attention != Attention.EAGER and has_sdpa(config) else "eager"


def _build_plain_model(spec: ActorSpec, source: ModelSource, device: torch.device, on_progress: OnProgress) -> Any:
    dtype = torch.float32 if spec.dtype is Dtype.FP16 else TORCH_DTYPES[spec.dtype]
    model = build_on_meta(source.config, attention=choose_attention(spec, source.config), dtype=dtype)
    add_adapter(model, source.adapter)
    materialise(model, source.weights, device, on_progress=on_progress)
    if spec.has_user_model:
        configure_model(model, replace(spec, gradient_checkpointing=False))
    return model.eval()


def _compute_custom_loss(
    model: nn.Module, documents: Sequence[tuple[Tensor, Tensor, Tensor]], num_labels: int, world: World
) -> float:
    """Return the mean loss of a user's model, from its logits, and add up its gradients."""
    total = 0.0
    for document in documents:
        ids_1L, position_1L, label_1L = (tensor.to(world.device) for tensor in document)
        logits = model(input_ids=ids_1L, position_ids=position_1L, attention_mask=torch.ones_like(ids_1L)).logits
        shifted_L = label_1L[0, 1:]
        loss = nn.functional.cross_entropy(logits[0, :-1].float(), shifted_L, reduction="sum") / num_labels
        torch.autograd.backward(loss)
        total += loss.item()
    return total


def compute_chunked_loss(
    hidden_ND: Tensor,
    head: nn.Linear,
    target_N: Tensor,
    softcap: float | None,
    *,
    num_tokens: int = TOKENS_PER_CHUNK,
    num_words: int = VOCABULARY_PER_CHUNK,
) -> float:
    """Return the cross entropy summed over tokens, with a log-sum-exp over chunks.

    A chunk has `num_tokens` tokens, and `num_words` entries of the vocabulary.
    """
    total = 0.0
    for hidden_CD, target_C in zip(torch.split(hidden_ND, num_tokens), torch.split(target_N, num_tokens), strict=True):
        log_sum_C = torch.full_like(target_C, -torch.inf, dtype=torch.float32)
        target_logit_C = torch.zeros_like(log_sum_C)
        for begin in range(0, head.out_features, num_words):
            end = min(begin + num_words, head.out_features)
            bias = None if head.bias is None else head.bias[begin:end]
            logits_CV = _apply_softcap(nn.functional.linear(hidden_CD, head.weight[begin:end], bias), softcap).float()
            log_sum_C = torch.logaddexp(log_sum_C, logits_CV.logsumexp(dim=-1))
            inside_C = (target_C >= begin) & (target_C < end)
            local_C = (target_C - begin).masked_fill(~inside_C, 0)
            target_logit_C += logits_CV.gather(1, local_C[:, None])[:, 0].masked_fill(~inside_C, 0)
        total += float((log_sum_C - target_logit_C).double().sum())
    return total


def _count_labels(label_1L: Tensor) -> int:
    """Count the labels that follow another token."""
    return int((label_1L[0, 1:] != IGNORED_LABEL).sum())


def _apply_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


@contextmanager
def _observe_head(model: Any) -> Iterator[tuple[nn.Linear, dict[str, Tensor]]]:
    """Yield the head, and a dict that a forward fills with the head's input hidden states and its logits."""
    head: nn.Linear = model.get_output_embeddings()
    observed: dict[str, Tensor] = {}

    def observe(_: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> None:
        observed["hidden"], observed["logits"] = inputs[0].detach(), logits.detach()

    handle = head.register_forward_hook(observe)
    try:
        yield head, observed
    finally:
        handle.remove()


def _load_liger(world: World, softcap: float | None) -> tuple[Any, str]:
    """Return Liger's fused linear cross entropy, summed over tokens, or why it is not available."""
    if find_spec("liger_kernel") is None:
        return None, "Liger's left out: liger_kernel is not installed"
    if world.device.type != "cuda":
        return None, "Liger's left out: its kernels are for CUDA"
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum", softcap=softcap), ""


def _average_gradients(model: nn.Module, world: World) -> Iterator[tuple[str, Tensor]]:
    """Average the gradients over all ranks; each data rank has as many ranks, so this is the mean over data ranks."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.float()
            if world.world_size > 1:
                dist.all_reduce(gradient)
            yield name, (gradient / world.world_size).cpu()
