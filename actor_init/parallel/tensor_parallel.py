"""Apply tensor parallelism for FSDP2: a split plan with DTensor over the tp axis, optionally sharding the sequence."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.func import functional_call
from torch.torch_version import TorchVersion
from transformers import PretrainedConfig, PreTrainedModel

from actor_init.model import find_blocks
from actor_init.parallel.split_linear import (
    GatheredColumns,
    SharedInput,
    SplitColumns,
    SplitExperts,
    SplitRows,
    sum_gradient,
)
from actor_init.parallel.tp_plan import Split, SplitPlan
from actor_init.parallel.vocab_parallel import VocabularyParallelEmbedding
from actor_init.spec import PACKED, PADDED, SEQUENCE_PARALLEL, UsageError
from capture.facts import Setting

# Attributes from which some attention modules take the shapes of their heads.
HEAD_COUNTS = ("num_heads", "num_key_value_heads")
# The first torch whose DTensor leaves no gaps between rows when it gathers shares of unequal length.
GATHERS_IN_ONE_PIECE = "2.13"
# The sequence dimension of hidden states [B, S, H]. DTensor shards a length that tp does not divide unevenly.
ALONG_SEQUENCE = Shard(1)


def check_divisible(config: PretrainedConfig, tp: int) -> None:
    """Raise UsageError unless tp divides the heads, the key-value heads and the MLP's width."""
    # Returning early serves models without attention, which have no heads to count.
    if tp == 1:
        return
    text = config.get_text_config()
    heads = text.num_attention_heads
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "intermediate_size", None) or 0
    if heads % tp or key_value_heads % tp or width % tp:
        possible = [
            str(size)
            for size in range(1, key_value_heads + 1)
            if not (heads % size or key_value_heads % size or width % size)
        ]
        parts = f"{heads} heads, {key_value_heads} key-value heads and MLP width of {width}"
        advice = f"Try: {Setting('tp')} with one of {', '.join(possible)}"
        raise UsageError(Setting("tp", tp), f"does not divide the model's {parts}", advice)


def check_sequence(model: PreTrainedModel, plan: SplitPlan, *, packing: bool) -> None:
    """Raise UsageError if a module that the plan leaves whole is not on the residual stream itself.

    Also for several rows under a torch whose DTensor leaves gaps between them when it gathers shares of unequal length
    (pytorch pull request #184443): a linear layer would then fail in the middle of a run.
    """
    if not packing and TorchVersion(torch.__version__) < GATHERS_IN_ONE_PIECE:
        why = f"with {PADDED} needs torch {GATHERS_IN_ONE_PIECE}, and this is {torch.__version__}"
        raise UsageError(SEQUENCE_PARALLEL, why, f"Try: {PACKED}, or {SEQUENCE_PARALLEL.with_value(False)}")
    advice = f"Try: {SEQUENCE_PARALLEL.with_value(False)}"
    if plan.gathered:
        why = f"needs a plan that splits all of a layer, and {type(model).__name__} has none"
        raise UsageError(SEQUENCE_PARALLEL, why, advice)
    for prefix, block in find_blocks(model):
        for name, module in block.named_modules():
            if "." in name and f"{prefix}.{name}" not in plan.splits and list(module.parameters(recurse=False)):
                parameters = f"parameters in {prefix}.{name}, which every rank holds whole"
                why = f"knows the norms between attention and MLP, but {type(model).__name__} has {parameters}"
                raise UsageError(SEQUENCE_PARALLEL, why, advice)


def shard_block(
    block: nn.Module, name: str, plan: SplitPlan, mesh: DeviceMesh, *, sequence: bool, checkpoints: bool = False
) -> None:
    """Replace the parameters of the transformer layer `name` by the shards that the plan gives them.

    They are whole before, and equal on every rank. With `sequence`, the residual stream is a DTensor sharded along the
    sequence, gathered where attention and MLP begin, and reduce-scattered where they end.
    """
    styles: dict[str, ParallelStyle] = {}
    shared_inputs: dict[str, SharedInput] = {}
    for inner, module in block.named_modules():
        split = plan.splits.get(f"{name}.{inner}")
        if f"{name}.{inner}" in plan.gathered:
            cast("Any", module).has_all_heads = True
        if split is Split.LATENT:
            styles[inner] = LatentOfHeads(plan.num_rotated)
        elif split is Split.ROWS and plan.gathered:
            styles[inner] = SplitRows(writable=True)
        elif split is Split.COLUMNS and not sequence:
            parent = inner.rpartition(".")[0]
            # A checkpoint ends its second forward by an exception, so no hook would drop the tensor that SharedInput
            # holds, and it would stay in memory.
            if parent not in shared_inputs and not checkpoints:
                shared_inputs[parent] = SharedInput(block.get_submodule(parent))
            styles[inner] = SplitColumns(shared_input=shared_inputs.get(parent))
        elif split is not None:
            styles[inner] = (SEQUENCE_STYLES if sequence else STYLES)[split]()
        elif sequence and list(module.parameters(recurse=False)):
            styles[inner] = SequenceParallel()
    for child in {inner.partition(".")[0] for inner in styles if "." in inner} if sequence else ():
        styles[child] = GatheredInput()
    for module in _find_split_parts(block, name, plan):
        for count in vars(module).keys() & HEAD_COUNTS:
            setattr(module, count, getattr(module, count) // mesh.size())
    _parallelize(block, mesh, styles)


def _find_split_parts(block: nn.Module, name: str, plan: SplitPlan) -> list[nn.Module]:
    """Find the modules of a layer that are split as a whole, such as its attention."""
    return [
        module
        for inner, module in block.named_modules()
        if inner
        and f"{name}.{inner}" not in plan.gathered
        and ("." not in inner or f"{name}.{inner.rpartition('.')[0]}" in plan.gathered)
        and any(split.startswith(f"{name}.{inner}.") for split in plan.splits)
    ]


def shard_root(model: PreTrainedModel, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Shard embedding and head on the vocabulary (one weight if they are tied), and the remaining norms."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is head.weight
    prefixes = tuple(f"{prefix}." for prefix, _ in find_blocks(model))
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if module is embedding:
            styles[name] = VocabularyParallelEmbedding(
                ALONG_SEQUENCE if sequence else Replicate(), use_local_output=not sequence
            )
        elif module is head:
            styles[name] = (
                ColwiseParallel(input_layouts=ALONG_SEQUENCE, use_local_output=False)
                if sequence
                else SplitColumns(whole_shape=True)
            )
        elif sequence and not f"{name}.".startswith(prefixes) and list(module.parameters(recurse=False)):
            styles[name] = SequenceParallel()
    _parallelize(model, mesh, styles)
    if tied:
        head.weight = embedding.weight


def _parallelize(module: nn.Module, mesh: DeviceMesh, styles: dict[str, ParallelStyle]) -> None:
    # Without a source rank there is no broadcast: all ranks hold the same values.
    parallelize_module(module, mesh, styles, src_data_rank=None)


class GatheredInput(ParallelStyle):
    """Gather the sequence's shards once, for all column-parallel layers in the module."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return tuple(_gather_whole(value) for value in args), {
                key: _gather_whole(value) for key, value in kwargs.items()
            }

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


def _gather_whole(value: Any) -> Any:
    return value.redistribute(placements=[Replicate()]) if isinstance(value, DTensor) else value


class ReplicatedOverHeads(ParallelStyle):
    """Keep parameters whole that act on a rank's own heads only, and sum their gradient over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        forward = module.forward

        def run_and_sum_gradients(*args: Any, **kwargs: Any) -> Any:
            module.forward = forward
            try:
                parameters = {name: sum_gradient(p, group) for name, p in module.named_parameters()}
                return functional_call(module, parameters, args, kwargs)
            finally:
                module.forward = run_and_sum_gradients

        module.forward = run_and_sum_gradients
        return module


class LatentOfHeads(ParallelStyle):
    """Keep a Linear whole whose last outputs, the rotated part of the keys, go to a rank's own heads without a split
    Linear between, and sum the gradient of these outputs over the ranks.
    """

    def __init__(self, num_rotated: int) -> None:
        self.num_rotated = num_rotated

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def sum_rotated_gradient(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            latent, rotated = output.split([output.shape[-1] - self.num_rotated, self.num_rotated], dim=-1)
            return torch.cat([latent, sum_gradient(rotated, group)], dim=-1)

        module.register_forward_hook(sum_rotated_gradient)
        return module


STYLES: Mapping[Split, Callable[[], ParallelStyle]] = {
    Split.ROWS: SplitRows,
    Split.PER_HEAD: ReplicatedOverHeads,
    Split.GATHERED: GatheredColumns,
    Split.EXPERTS: SplitExperts,
    Split.EXPERT_ROWS: partial(SplitExperts, by_rows=True),
}
SEQUENCE_STYLES: Mapping[Split, Callable[[], ParallelStyle]] = {
    Split.COLUMNS: ColwiseParallel,
    Split.ROWS: partial(RowwiseParallel, output_layouts=ALONG_SEQUENCE, use_local_output=False),
    Split.PER_HEAD: ReplicatedOverHeads,
}
