"""Predict the peak of a pass under options that need less memory, from what held its peak."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from transformers import PretrainedConfig, PreTrainedModel

from actor_init.declarations.backends import find_backend_declaration
from actor_init.declarations.backends.declaration import BytesPerParameter
from actor_init.model import count_parameters, find_blocks, share_meta_model
from actor_init.schedule_and_norm import TORCH_DTYPES
from actor_init.spec import ActorSpec, Head
from replay.options.spec import MeasureSpec
from replay.profiling.profile_records import Holder, HolderKind, Saving

NUM_SAVINGS = 3
# An option that saves a smaller share of the peak is not named.
LEAST_SAVING = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSize:
    """What the predictions need to know of a model and a pass besides its holders."""

    num_layers: int
    # Which share of the parameters is in blocks.
    block_share: float
    # The size of a number: in the compute dtype, and of the weights that the model holds.
    compute_bytes: int
    weight_bytes: int
    # Whether the pass keeps activations for a backward.
    trains: bool
    # The size of a block's input, tokens times width, and of whole logits on a rank: both in the compute dtype.
    residual_bytes: int
    logits_bytes: int
    # Whether gradients are the parameters' own. Otherwise they are in buffers of the backend, which are communication.
    keeps_gradients: bool = True

    @classmethod
    def measure(
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
        # A rank may hold only a part of `model`.
        whole_model = share_meta_model(config)
        blocks = find_blocks(whole_model)
        num_in_blocks = sum(parameter.numel() for _, block in blocks for parameter in block.parameters())
        compute_bytes = TORCH_DTYPES[spec.dtype].itemsize
        text = config.get_text_config()
        return cls(
            num_layers=len(blocks),
            block_share=num_in_blocks / sum(parameter.numel() for parameter in whole_model.parameters()),
            compute_bytes=compute_bytes,
            weight_bytes=next(model.parameters()).element_size(),
            trains=trains,
            residual_bytes=num_tokens * text.hidden_size * compute_bytes,
            logits_bytes=num_tokens * text.vocab_size // spec.parallel.tp * compute_bytes,
            keeps_gradients=keeps_gradients,
        )


def compute_declared_bytes(
    config: PretrainedConfig, actor: ActorSpec, measure: MeasureSpec, num_data_ranks: int
) -> Mapping[HolderKind, float]:
    """Return the bytes that a rank holds whatever it is fed, as the backend declares it."""
    holding = find_backend_declaration(actor.backend).predict_memory(actor, measure.steps)
    share_elsewhere = 1 - 1 / num_data_ranks
    num_parameters = count_parameters(config) / actor.parallel.tp

    def sum_bytes(part: Callable[[BytesPerParameter], float]) -> float:
        return num_parameters * (part(holding.total) - share_elsewhere * part(holding.partitioned))

    weights, masters = sum_bytes(lambda held: held.weights), sum_bytes(lambda held: held.masters)
    return {
        # A model may hold its masters alone, and compute with casts of them.
        HolderKind.WEIGHTS: weights or masters,
        HolderKind.OPTIMIZER: sum_bytes(lambda held: held.moments) + (masters if weights else 0.0),
        HolderKind.GRADIENTS: sum_bytes(lambda held: held.gradients) if measure.backward else 0.0,
    }


def predict_savings(holders: Sequence[Holder], spec: ActorSpec, size: PassSize) -> list[Saving]:
    """Return the options that save most, each with the peak it is predicted to have, in bytes, the lowest first.

    Checkpointing keeps what each block got, and either one block's activations or the head's. Without an optimizer
    weights and gradients are in the compute dtype, and there are no masters or states. Fewer layers have their share of
    weights, gradients, states and activations. A second rank holds half of the weights, gradients and states. None has
    a lower peak than the end of backward, when all gradients are there beside weights, states and communication.
    """
    held = _PeakParts.sum_up(holders, size)
    predictions: dict[str, _PeakParts] = {}
    if size.trains and not spec.gradient_checkpointing:
        # When a block computes its activations again, the head's are gone.
        block_bytes = max(0.0, held.activations / size.num_layers - held.head)
        activations = block_bytes + size.num_layers * size.residual_bytes
        predictions["--gradient-checkpointing"] = replace(held, activations=activations)
    if spec.has_optimizer:
        predictions["--optimizer none"] = held.scale_parameters(size.compute_bytes / size.weight_bytes, states=0.0)
    if size.num_layers > 1:
        half = size.num_layers // 2
        share = half / size.num_layers
        parameter_share = 1 - (1 - share) * size.block_share
        fewer = held.scale_parameters(parameter_share, states=parameter_share)
        # Without autograd the activations are those of one block, however many blocks there are.
        activations = held.activations * (share if size.trains else 1.0)
        predictions[f"--num-layers {half}"] = replace(fewer, activations=activations)
    if find_backend_declaration(spec.backend).shards:
        ranks = "twice as many ranks"
        ranks += "" if spec.resolved_zero_stage == 3 else " and --zero-stage 3"
        predictions[ranks] = held.scale_parameters(0.5, states=0.5)
    if spec.head is Head.WHOLE:
        predictions[f"--head {Head.CHUNKS}"] = replace(held, head=0.0)
    savings = [Saving(option=option, peak_bytes=int(parts.peak)) for option, parts in predictions.items()]
    worthwhile = [saving for saving in savings if saving.peak_bytes < (1 - LEAST_SAVING) * held.peak]
    return sorted(worthwhile, key=lambda saving: saving.peak_bytes)[:NUM_SAVINGS]


@dataclass(frozen=True, kw_only=True, slots=True)
class _PeakParts:
    """Bytes at the peak by what they are held for, and all gradients, which are there at the end of backward."""

    weights: float
    gradients: float
    all_gradients: float
    states: float
    activations: float
    head: float
    communication: float
    process: float
    others: float

    @classmethod
    def sum_up(cls, holders: Sequence[Holder], size: PassSize) -> "_PeakParts":
        held = {kind: sum(holder.num_bytes for holder in holders if holder.kind is kind) for kind in HolderKind}
        keeps = size.keeps_gradients
        return cls(
            weights=held[HolderKind.WEIGHTS],
            gradients=held[HolderKind.GRADIENTS] + (0.0 if keeps else held[HolderKind.COMMUNICATION]),
            # Gradients have the dtype of the weights that the model holds, so they take as many bytes.
            all_gradients=held[HolderKind.WEIGHTS] if size.trains and keeps else 0.0,
            states=held[HolderKind.OPTIMIZER],
            activations=held[HolderKind.ACTIVATIONS],
            head=held[HolderKind.HEAD],
            communication=held[HolderKind.COMMUNICATION] if keeps else 0.0,
            process=held[HolderKind.PROCESS],
            others=held[HolderKind.BACKWARD] + held[HolderKind.OTHER],
        )

    def scale_parameters(self, share: float, *, states: float) -> "_PeakParts":
        return replace(
            self,
            weights=self.weights * share,
            gradients=self.gradients * share,
            all_gradients=self.all_gradients * share,
            states=self.states * states,
        )

    @property
    def peak(self) -> float:
        at_the_peak = self.gradients + self.activations + self.head + self.others
        lasting = self.weights + self.states + self.communication + self.process
        return lasting + max(at_the_peak, self.all_gradients)
