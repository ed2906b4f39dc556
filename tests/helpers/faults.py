"""Thirty faults of training code, each a small patch to the actor, its plan or its inputs.

A fault is put into one run; the run that it is held against has none. What has to find it, and which layer has to be
named, stands beside it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from actor_init.inputs import packing
from actor_init.inputs.packing import ActorInputs, TargetPlaces
from actor_init.model import build_on_meta
from actor_init.parallel.split_linear import SplitColumns
from actor_init.weights import OnProgress, RandomWeights
from actor_init.world import World
from capture.file_format.micro_batch import MicroBatch
from replay.agreement.matrix import Setting
from tests.helpers import sabotage

Patch = Callable[[World], AbstractContextManager[None]]
BACKENDS = ("deepspeed", "fsdp2", "ddp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What is broken, where it shows, and what has to be said of it."""

    breaks: Patch
    cell: Setting  # the configuration of the run that has it
    model: str = "llama"
    group: str = ""  # of the edge shapes that show it
    command: str = "parity"  # that has to find it
    options: Mapping[str, Any] = field(default_factory=dict)  # of that command
    named: str = ""  # what the first difference has to be called, by a part of its name; empty: it has no layer

    @property
    def name(self) -> str:
        return self.breaks.__name__


def _edited(edit: Callable[[PreTrainedModel], None]) -> AbstractContextManager[Any]:
    """The model with `edit` done to it before it is sharded."""

    def build(*args: Any, **kwargs: Any) -> PreTrainedModel:
        model = build_on_meta(*args, **kwargs)
        edit(model)
        return model

    stack = ExitStack()
    for backend in BACKENDS:
        stack.enter_context(patch(f"actor_init.backends.{backend}.build_on_meta", build))
    return stack


def _replaced_output(name: str, change: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
    """The module of that qualified name gives what `change` makes of its output."""

    def edit(model: PreTrainedModel) -> None:
        module: Any = model.get_submodule(name)
        forward = module.forward

        def changed(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

        module.forward = changed

    return _edited(edit)


def _other_inputs(change: Callable[[ActorInputs], ActorInputs]) -> AbstractContextManager[Any]:
    def changed(*args: Any, **kwargs: Any) -> ActorInputs:
        return change(packing.prepare_inputs(*args, **kwargs))

    return patch("replay.runner.run_pass.prepare_inputs", changed)


def _other_weights(change: Callable[[str, Tensor], None]) -> AbstractContextManager[Any]:
    fill = RandomWeights.fill

    def filled(self: RandomWeights, name: str, parameter: Tensor, on_progress: OnProgress) -> bool:
        known = fill(self, name, parameter, on_progress)
        with torch.no_grad():
            change(name, parameter)
        return known

    return patch.object(RandomWeights, "fill", filled)


@contextmanager
def norm_of_wrong_sign(world: World) -> Iterator[None]:
    with _replaced_output("model.layers.1.input_layernorm", torch.neg):
        yield


@contextmanager
def norm_in_bf16(world: World) -> Iterator[None]:
    """bf16 where fp32 was meant."""
    with _replaced_output("model.layers.1.post_attention_layernorm", lambda out: out.bfloat16().float()):
        yield


@contextmanager
def key_heads_swapped(world: World) -> Iterator[None]:
    with _replaced_output("model.layers.1.self_attn.k_proj", lambda out: torch.roll(out, 8, dims=-1)):
        yield


@contextmanager
def attention_scale(world: World) -> Iterator[None]:
    """One layer's scores are scaled by 1.05 of what they should be."""

    def edit(model: PreTrainedModel) -> None:
        attention: Any = model.get_submodule("model.layers.1.self_attn")
        attention.scaling *= 1.05

    with _edited(edit):
        yield


@contextmanager
def dropout_left_on(world: World) -> Iterator[None]:
    def dropped(out: Tensor) -> Tensor:
        return nn.functional.dropout(out, 0.05)

    with _replaced_output("model.layers.1.mlp", dropped):
        yield


@contextmanager
def gradient_cut(world: World) -> Iterator[None]:
    """Forward is right; no gradient goes back through one layer's attention."""
    with _replaced_output("model.layers.1.self_attn.o_proj", Tensor.detach):
        yield


@contextmanager
def gradient_twice(world: World) -> Iterator[None]:
    """One parameter's gradient is added twice."""

    def doubled(out: Tensor) -> Tensor:
        return out + (out - out.detach())

    with _replaced_output("model.layers.1.mlp.up_proj", doubled):
        yield


@contextmanager
def sliding_window_ignored(world: World) -> Iterator[None]:
    causal = _masking().causal_mask_function
    with patch("transformers.masking_utils.sliding_window_causal_mask_function", lambda window: causal):
        yield


@contextmanager
def next_token_seen(world: World) -> Iterator[None]:
    """The causal mask is off by one."""

    def seen(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx <= q_idx + 1

    with patch("transformers.masking_utils.causal_mask_function", seen):
        yield


def _masking() -> Any:
    from transformers import masking_utils

    return masking_utils


@contextmanager
def rope_not_reset(world: World) -> Iterator[None]:
    """Positions run on over the borders of packed documents, and the mask still keeps them apart."""

    def edit(model: PreTrainedModel) -> None:
        rotary: Any = model.get_submodule("model.rotary_emb")
        forward = rotary.forward

        def running(hidden: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            on = torch.arange(position_ids.shape[1]).expand_as(position_ids) // 2  # another offset for each document
            return forward(hidden, torch.where(on > position_ids, on, position_ids), *args, **kwargs)

        rotary.forward = running

    with _edited(edit):
        yield


@contextmanager
def documents_see_each_other(world: World) -> Iterator[None]:
    def all_seen(packed_sequence_mask: Tensor) -> Callable[..., Any]:
        return lambda batch_idx, head_idx, q_idx, kv_idx: packed_sequence_mask[batch_idx, q_idx] >= 0

    with patch("transformers.masking_utils.packed_sequence_mask_function", all_seen):
        yield


@contextmanager
def padding_attended(world: World) -> Iterator[None]:
    def attended(inputs: ActorInputs) -> ActorInputs:
        assert inputs.attention_mask_BS is not None
        return replace(inputs, attention_mask_BS=torch.ones_like(inputs.attention_mask_BS))

    with _other_inputs(attended):
        yield


@contextmanager
def action_mask_off_by_one(world: World) -> Iterator[None]:
    real = packing.prepare_inputs

    def shifted(batch: Any, **kwargs: Any) -> ActorInputs:
        return real(replace(batch, action_mask_BA=torch.roll(batch.action_mask_BA, 1, dims=-1)), **kwargs)

    with patch("replay.runner.run_pass.prepare_inputs", shifted):
        yield


@contextmanager
def targets_not_shifted(world: World) -> Iterator[None]:
    """Each token is scored by the logits of its own place."""
    with _other_inputs(lambda inputs: replace(inputs, predictor_N=inputs.predictor_N + 1)):
        yield


@contextmanager
def another_rank_s_input(world: World) -> Iterator[None]:
    """One data rank is fed what another one replays, under its own input's name."""
    firsts: list[ActorInputs] = []

    def repeated(inputs: ActorInputs) -> ActorInputs:
        everyones: list[Any] = [None] * world.world_size
        dist.all_gather_object(everyones, inputs)
        firsts[:] = everyones[:1]
        return firsts[0]

    def all_own(batch: MicroBatch) -> TargetPlaces:
        is_own_BA = torch.ones_like(firsts[0].action_mask_BA, device="cpu")
        return TargetPlaces(is_own_BA, batch.sequences_BS.shape[1] - is_own_BA.shape[1])

    with _other_inputs(repeated), patch("replay.runner.replayer.find_targets_equal_to_input_tokens", all_own):
        yield


@contextmanager
def loss_over_padding(world: World) -> Iterator[None]:
    """The mean is taken over all places of the action mask, the padded ones too."""

    def averaged(log_probs_BA: Tensor, inputs: ActorInputs) -> Tensor:
        return -log_probs_BA.mean()

    with patch("replay.runner.replayer.compute_negated_mean", averaged):
        yield


@contextmanager
def loss_by_rows(world: World) -> Iterator[None]:
    """The mean of the rows' means, in which a short row counts as much as a long one."""

    def averaged(log_probs_BA: Tensor, inputs: ActorInputs) -> Tensor:
        counts_B = inputs.action_mask_BA.sum(dim=1).clamp(min=1)
        return -(log_probs_BA.sum(dim=1) / counts_B).mean()

    with patch("replay.runner.replayer.compute_negated_mean", averaged):
        yield


@contextmanager
def stale_weight(world: World) -> Iterator[None]:
    """One matrix is that of an earlier step."""

    def stale(name: str, parameter: Tensor) -> None:
        if name == "model.layers.1.mlp.down_proj.weight":
            parameter.mul_(0.999)

    with _other_weights(stale):
        yield


@contextmanager
def gate_and_up_swapped(world: World) -> Iterator[None]:
    fill = RandomWeights.fill
    swapped = {"gate_proj": "up_proj", "up_proj": "gate_proj"}

    def filled(self: RandomWeights, name: str, parameter: Tensor, on_progress: OnProgress) -> bool:
        *front, module, kind = name.split(".")
        if name.startswith("model.layers.0.mlp") and module in swapped:
            name = ".".join([*front, swapped[module], kind])
        return fill(self, name, parameter, on_progress)

    with patch.object(RandomWeights, "fill", filled):
        yield


@contextmanager
def accumulation_not_divided(world: World) -> Iterator[None]:
    """Each micro-batch of a window counts as if it were alone."""
    from actor_init.backends.fsdp2 import FSDP2Backend

    backward = FSDP2Backend.backward

    def whole(self: FSDP2Backend, loss: Tensor) -> None:
        backward(self, loss * self.spec.resolved_grad_accumulation)

    with patch.object(FSDP2Backend, "backward", whole):
        yield


@contextmanager
def clipped_by_local_norm(world: World) -> Iterator[None]:
    """Each rank clips by the norm of its own shards."""
    from torch.nn.utils import clip_grads_with_norm_ as clip

    def clipped(parameters: Any, max_norm: float, norm: Tensor, *, foreach: bool) -> None:
        shards: list[Any] = [parameter.grad.to_local() for parameter in parameters]
        clip(parameters, max_norm, torch.nn.utils.get_total_norm(shards), foreach=foreach)

    with patch("actor_init.backends.fsdp2.clip_grads_with_norm_", clipped):
        yield


@contextmanager
def masters_in_bf16(world: World) -> Iterator[None]:
    """The optimizer's result is kept in bf16."""
    step = torch.optim.AdamW.step

    def rounded(self: torch.optim.AdamW, closure: Any = None) -> Any:
        step(self)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.copy_(parameter.bfloat16().float())

    with patch.object(torch.optim.AdamW, "step", rounded):
        yield


@contextmanager
def gradient_not_reduced(world: World) -> Iterator[None]:
    """Each data rank goes on with its own gradient, as if it were everyone's mean."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    def own_share(_: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **__: Any) -> None:
        share = input_tensor.view(-1).chunk(group.size())[group.rank()].view_as(output_tensor)
        output_tensor.copy_(share if op == dist.ReduceOp.AVG else share * group.size())  # divided before, if not there

    with patch.object(DefaultReduceScatter, "__call__", own_share):
        yield


@contextmanager
def gradient_summed(world: World) -> Iterator[None]:
    """Scaled by the wrong world size: the sum over the data ranks is taken for their mean."""
    from actor_init.backends.fsdp2 import FSDP2Backend

    backward = FSDP2Backend.backward

    def summed(self: FSDP2Backend, loss: Tensor) -> None:
        backward(self, loss * world.num_data_ranks)

    with patch.object(FSDP2Backend, "backward", summed):
        yield


@contextmanager
def shards_swapped(world: World) -> Iterator[None]:
    """Each tp rank computes with the other's share of one matrix."""
    apply = SplitColumns._apply

    def swapped(self: SplitColumns, module: nn.Module, mesh: Any) -> nn.Module:
        if isinstance(module, nn.Linear) and module.out_features == 48 and not swapped_ones:
            swapped_ones.append(module)
            with torch.no_grad():
                module.weight.copy_(torch.roll(module.weight, 24, dims=0))
        return apply(self, module, mesh)

    swapped_ones: list[nn.Module] = []
    with patch.object(SplitColumns, "_apply", swapped):
        yield


@contextmanager
def output_not_summed(world: World) -> Iterator[None]:
    """The partial sums of one layer's o_proj are taken for the whole."""
    from actor_init.parallel import split_linear

    num_calls = 0

    def partial(tensor: Tensor, group: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return tensor.clone() if num_calls % 4 == 3 else split_linear._SumOver.apply(tensor, group)

    with patch.object(split_linear, "sum_over", partial):
        yield


LAYER_1 = "model.layers.1."
FP32: Setting = {"dtype": "fp32", "attention": "sdpa"}
ZERO_1: Setting = {"backend": "deepspeed", "zero_stage": 1, "packing": True, **FP32}
ZERO_3: Setting = {**ZERO_1, "zero_stage": 3}
PACKED: Setting = {"backend": "fsdp2", "packing": True, **FP32}
PADDED: Setting = {**ZERO_1, "zero_stage": 2, "packing": False}
TP: Setting = {**PACKED, "tp": 2}
RING: Setting = {**PACKED, "ring": 2}
DATA: Setting = {**PACKED, "data": 2}
CLIPPED = {"step": "on", "optimizer": "sgd", "learning_rate": "0.1", "max_norm": "0.1"}
FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(breaks=norm_of_wrong_sign, cell=ZERO_1, named=f"{LAYER_1}input_layernorm"),
        Fault(breaks=norm_in_bf16, cell=ZERO_3, named=f"{LAYER_1}post_attention_layernorm"),
        Fault(breaks=key_heads_swapped, cell=PADDED, named=f"{LAYER_1}self_attn.k_proj"),
        Fault(breaks=attention_scale, cell=PACKED, named=f"{LAYER_1}self_attn"),
        Fault(breaks=dropout_left_on, cell=ZERO_3, named="model.layers.1"),
        Fault(breaks=gradient_cut, cell=PACKED, named=f"{LAYER_1}self_attn.o_proj"),
        Fault(breaks=gradient_twice, cell=ZERO_1, named=f"{LAYER_1}mlp"),
        Fault(breaks=sliding_window_ignored, cell=ZERO_1, model="gemma3", named="model.layers.0.self_attn"),
        Fault(breaks=next_token_seen, cell=PADDED, named="model.layers.0.self_attn"),
        Fault(breaks=rope_not_reset, cell=ZERO_1, named="model.rotary_emb"),
        Fault(breaks=documents_see_each_other, cell=ZERO_1, named="model.layers.0.self_attn"),
        Fault(breaks=padding_attended, cell=PADDED, named="documents"),
        Fault(breaks=action_mask_off_by_one, cell=ZERO_1),
        Fault(breaks=targets_not_shifted, cell=PACKED),
        Fault(breaks=loss_over_padding, cell=ZERO_3),
        Fault(breaks=loss_by_rows, cell=PADDED),
        Fault(breaks=stale_weight, cell=ZERO_1, named=f"{LAYER_1}mlp.down_proj"),
        Fault(breaks=gate_and_up_swapped, cell=PACKED, named="model.layers.0.mlp.gate_proj"),
        Fault(breaks=accumulation_not_divided, cell=PACKED, command="diagnose"),
        Fault(breaks=masters_in_bf16, cell=DATA, options={"step": "on", "learning_rate": "1e-4"}),
        Fault(breaks=clipped_by_local_norm, cell=DATA, options=CLIPPED),
        Fault(breaks=another_rank_s_input, cell=DATA),
        Fault(breaks=gradient_not_reduced, cell=DATA),
        Fault(breaks=gradient_summed, cell=DATA),
        Fault(breaks=sabotage.column_for_a_row, cell=TP, named="model.layers.0.self_attn.o_proj"),
        Fault(breaks=shards_swapped, cell=TP, named="model.layers.0.mlp"),
        Fault(breaks=output_not_summed, cell=TP, named=f"{LAYER_1}self_attn.o_proj"),
        Fault(breaks=sabotage.head_norms_not_summed, cell=TP, model="qwen3", named="_norm"),
        Fault(breaks=sabotage.own_keys_alone, cell=RING, named="model.layers.0.self_attn"),
        Fault(breaks=sabotage.ring_averaged, cell=RING),
    )
}
