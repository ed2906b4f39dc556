"""Hold a layout of rows against each document alone, fed to the plain model as nothing but its tokens."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from actor_init.action_log_probs import action_log_probs
from actor_init.attention.ring_split import compute_ring_indices, may_zigzag
from actor_init.inputs.packing import apply_layout, prepare_inputs, slice_for_ring
from actor_init.model_form import Layout
from capture.file_format.micro_batch import MicroBatch, Origin
from tests.helpers.families import VOCABULARY, tiny_model

LENGTHS = (7, 19, 4, 13)
SIDES = ("left", "right", "left", "left")  # of the padding
NUM_TOKENS = 23
BOUND = 1e-4  # fp32 sums in another order give up to 2e-5, the least leak of a family 0.07


def documents() -> list[Tensor]:
    random = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCABULARY, (length,), generator=random) for length in LENGTHS]


def batch() -> MicroBatch:
    ids_BS = torch.randint(3, VOCABULARY, (len(LENGTHS), NUM_TOKENS), generator=torch.Generator().manual_seed(8))
    real_BS = torch.zeros_like(ids_BS, dtype=torch.bool)
    for row, (document, side) in enumerate(zip(documents(), SIDES, strict=True)):
        begin = NUM_TOKENS - len(document) if side == "left" else 0
        ids_BS[row, begin : begin + len(document)] = document
        real_BS[row, begin : begin + len(document)] = True
    return MicroBatch(sequences_BS=ids_BS, attention_mask_BS=real_BS, trains=True, origin=Origin(source="tiny"))


class EachAlone:
    """The loss and every gradient of a tiny model, each document alone."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        model = tiny_model(config)
        each = []
        for document in documents():
            logits_TV = model(input_ids=document[None], use_cache=False).logits[0]
            each.append(torch.log_softmax(logits_TV[:-1], dim=-1).gather(1, document[1:, None])[:, 0])
        self.loss, self.gradients = _loss_and_gradients(model, torch.cat(each))

    def off(self, kernel: str, layout: Layout, ring: dist.ProcessGroup | None = None) -> float:
        """Return how far the loss or a gradient is off under `layout`, relative to the whole gradient's norm."""
        model = tiny_model(self.config, kernel)
        inputs = apply_layout(prepare_inputs(batch(), packing=layout.joins_rows), layout)
        slot_N = inputs.slot_N
        if ring is not None:
            assert inputs.cu_seq_lens is not None
            inputs = slice_for_ring(
                inputs, compute_ring_indices(inputs.cu_seq_lens, ring, may_zigzag=may_zigzag(self.config))
            )
        loss, gradients = _loss_and_gradients(model, action_log_probs(model, inputs).flatten()[slot_N])
        if ring is not None:
            for gradient in gradients.values():
                dist.all_reduce(gradient, group=ring)
                gradient /= ring.size()
        return max(abs(loss - self.loss) / abs(self.loss), relative(gradients, self.gradients))


def _loss_and_gradients(model: PreTrainedModel, log_probs_N: Tensor) -> tuple[float, dict[str, Tensor]]:
    loss = -log_probs_N.mean()
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    pairs = zip(named.items(), found, strict=True)
    return loss.item(), {name: torch.zeros_like(p) if gradient is None else gradient for (name, p), gradient in pairs}


def relative(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    return _norm([found[name] - wanted[name] for name in wanted]) / _norm(list(wanted.values()))


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())
