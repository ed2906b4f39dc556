"""Predict the peak of a pass under options that need less memory, from what held its peak."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from transformers import PretrainedConfig, PreTrainedModel

from actor_init.declarations.backends import find_declaration
from actor_init.model import build_on_meta, find_blocks
from actor_init.optimizer import TORCH_DTYPES
from actor_init.spec import ActorSpec, OptimizerName
from replay.profiling.shares import Holder, HolderKind, Saving

NUM_SAVINGS = 3
LEAST_SAVING = 0.01  # share of the peak; an option that saves less is not named


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSize:
    """What the predictions need to know of a model and a pass besides its holders."""

    num_layers: int
    block_share: float  # of the parameters that are in blocks
    compute_bytes: int  # of a number in the compute dtype
    weight_bytes: int  # of a number of the weights that the model holds
    trains: bool  # does it keep activations for a backward?
    residual_bytes: int  # of what a block gets: tokens times width, in the compute dtype
    logits_bytes: int  # of whole logits on a rank, in the compute dtype
    keeps_gradients: bool = True  # as the parameters' own; else in buffers of the backend, which are communication

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        config: PretrainedConfig,
        spec: ActorSpec,
        num_tokens: int,
        *,
        trains: bool,
        keeps_gradients: bool = True,
    ) -> Self:
        """Return the size of a pass of so many tokens through `model`, which has `config`."""
        whole = build_on_meta(config, attention="eager", dtype=torch.float32)  # of `model` a rank may hold a part
        blocks = find_blocks(whole)
        in_blocks = sum(one.numel() for _, block in blocks for one in block.parameters())
        compute_bytes = TORCH_DTYPES[spec.dtype].itemsize
        text = config.get_text_config()
        return cls(
            num_layers=len(blocks),
            block_share=in_blocks / sum(one.numel() for one in whole.parameters()),
            compute_bytes=compute_bytes,
            weight_bytes=next(model.parameters()).element_size(),
            trains=trains,
            residual_bytes=num_tokens * text.hidden_size * compute_bytes,
            logits_bytes=num_tokens * text.vocab_size // spec.parallel.tp * compute_bytes,
            keeps_gradients=keeps_gradients,
        )


def savings(holders: Sequence[Holder], spec: ActorSpec, size: PassSize) -> list[Saving]:
    """Return the options that save most, each with the peak it is predicted to have, in bytes, the lowest first.

    Checkpointing keeps what each block got, and either one block's activations or the head's. Without an optimizer
    weights and gradients are in the compute dtype, and there are no masters or states. Fewer layers have their share of
    weights, gradients, states and activations. A second rank holds half of the weights, gradients and states. None has
    a lower peak than the end of backward, when all gradients are there beside weights, states and communication.
    """
    held = _Held.of(holders, size)
    found: dict[str, _Held] = {}
    if size.trains and not spec.gradient_checkpointing:
        one_block = max(0.0, held.activations / size.num_layers - held.head)  # the head's are gone by then
        kept = one_block + size.num_layers * size.residual_bytes
        found["--gradient-checkpointing"] = replace(held, activations=kept)
    if spec.optimizer is not OptimizerName.NONE:
        found["--optimizer none"] = held.of_parameters(size.compute_bytes / size.weight_bytes, states=0.0)
    if size.num_layers > 1:
        half = size.num_layers // 2
        share = half / size.num_layers
        parameters = 1 - (1 - share) * size.block_share
        fewer = held.of_parameters(parameters, states=parameters)
        activations = held.activations * (share if size.trains else 1.0)  # without autograd those of one block
        found[f"--num-layers {half}"] = replace(fewer, activations=activations)
    if find_declaration(spec.backend).shards:
        ranks = "twice as many ranks"
        ranks += "" if spec.resolved_zero_stage == 3 else " and --zero-stage 3"
        found[ranks] = held.of_parameters(0.5, states=0.5)
    if spec.whole_logits:
        found["no --whole-logits"] = replace(held, head=0.0)
    peaks = [Saving(option=option, peak_bytes=int(one.peak)) for option, one in found.items()]
    less = [one for one in peaks if one.peak_bytes < (1 - LEAST_SAVING) * held.peak]
    return sorted(less, key=lambda one: one.peak_bytes)[:NUM_SAVINGS]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """Bytes at the peak by what they are held for, and all gradients, which are there at the end of backward."""

    weights: float
    gradients: float
    all_gradients: float
    states: float
    activations: float
    head: float
    communication: float
    process: float
    rest: float

    @classmethod
    def of(cls, holders: Sequence[Holder], size: PassSize) -> "_Held":
        held = {kind: sum(one.num_bytes for one in holders if one.kind is kind) for kind in HolderKind}
        keeps = size.keeps_gradients
        return cls(
            weights=held[HolderKind.WEIGHTS],
            gradients=held[HolderKind.GRADIENTS] + (0.0 if keeps else held[HolderKind.COMMUNICATION]),
            # in the dtype of the weights that the model holds
            all_gradients=held[HolderKind.WEIGHTS] if size.trains and keeps else 0.0,
            states=held[HolderKind.OPTIMIZER],
            activations=held[HolderKind.ACTIVATIONS],
            head=held[HolderKind.HEAD],
            communication=held[HolderKind.COMMUNICATION] if keeps else 0.0,
            process=held[HolderKind.PROCESS],
            rest=held[HolderKind.BACKWARD] + held[HolderKind.OTHER],
        )

    def of_parameters(self, share: float, *, states: float) -> "_Held":
        return replace(
            self,
            weights=self.weights * share,
            gradients=self.gradients * share,
            all_gradients=self.all_gradients * share,
            states=self.states * states,
        )

    @property
    def peak(self) -> float:
        at_the_peak = self.gradients + self.activations + self.head + self.rest
        lasting = self.weights + self.states + self.communication + self.process
        return lasting + max(at_the_peak, self.all_gradients)
