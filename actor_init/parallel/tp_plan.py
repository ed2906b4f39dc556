"""Decide how tensor parallelism splits each layer: the model's own plan, or ours for models built like Llama."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatch

from torch import nn
from transformers import PreTrainedModel

from actor_init.model import blocks_of
from actor_init.spec import TpPlan, UsageError


class Split(StrEnum):
    """How a module's parameters are split, by transformers' names."""

    COLUMNS = "colwise"  # a Linear's output features, one share a rank
    ROWS = "rowwise"  # a Linear's input features; the ranks' outputs are summed
    PER_HEAD = "replicated_with_grad_allreduce"  # whole, applied to a rank's own heads; gradients are summed


HEAD_STYLES = ("colwise", "colwise_gather_output")  # the head's logits stay sharded here, whatever the plan gathers
FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
BUILTIN = {  # names below a transformer layer
    **{f"self_attn.{name}_proj": Split.COLUMNS for name in "qkv"},
    "self_attn.o_proj": Split.ROWS,
    "self_attn.q_norm": Split.PER_HEAD,
    "self_attn.k_norm": Split.PER_HEAD,
    "mlp.gate_proj": Split.COLUMNS,
    "mlp.up_proj": Split.COLUMNS,
    "mlp.down_proj": Split.ROWS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How each module in the transformer layers is split, by qualified name.

    Embedding and head are not in it: both are sharded on the vocabulary, under every plan.
    """

    splits: Mapping[str, Split]
    origin: str  # for display: whose plan it is


def find_plan(model: PreTrainedModel, wanted: TpPlan) -> Plan:
    """Return the plan that `wanted` selects for `model`, which may be on the meta device.

    A plan is complete if it splits every module with parameters in the transformer layers, except norms of hidden
    size, which all ranks hold whole, and if the model has a Linear head, which the model's own plan has to name.
    Raises UsageError if there is no complete plan.
    """
    name = type(model).__name__
    model_type = model.config.get_text_config().model_type
    own = _own_splits(model)
    own_gap = _head_gap(model, named=True) or _gap(model, own)
    builtin = _builtin_splits(model)
    builtin_gap = _head_gap(model, named=False) or _gap(model, builtin)
    if wanted is TpPlan.MODEL and own_gap:
        way_out = "--tp 1" if builtin_gap else "--tp-plan builtin"
        raise UsageError(f"--tp-plan model: transformers' plan for {name} {own_gap}. Try: {way_out}")
    if wanted is not TpPlan.BUILTIN and not own_gap:
        return Plan(splits={key: Split(style) for key, style in own.items()}, origin=f"transformers' for {name}")
    if builtin_gap:
        raise UsageError(f"no tensor parallel plan fits {name}: the Llama-style one {builtin_gap}. Try: --tp 1")
    known = model_type in FAMILIES
    origin = f"builtin for {model_type}" if known else f"Llama-style fallback, not made for {model_type}"
    return Plan(splits={key: Split(style) for key, style in builtin.items()}, origin=origin)


def _own_splits(model: PreTrainedModel) -> dict[str, str]:
    plan: Mapping[str, str] = model.tp_plan or {}
    names = [name for prefix, block in blocks_of(model) for name in _names_below(prefix, block)]
    planned = {name: next((style for pattern, style in plan.items() if fnmatch(name, pattern)), None) for name in names}
    return {name: style for name, style in planned.items() if style is not None}


def _builtin_splits(model: PreTrainedModel) -> dict[str, str]:
    return {
        f"{prefix}.{name}": split.value
        for prefix, block in blocks_of(model)
        for name, _ in block.named_modules()
        if (split := BUILTIN.get(name))
    }


def _names_below(prefix: str, block: nn.Module) -> list[str]:
    return [f"{prefix}.{name}" for name, _ in block.named_modules() if name]


def _gap(model: PreTrainedModel, styles: Mapping[str, str]) -> str | None:
    """Return what `styles` misses or gets wrong in the transformer layers, to end a sentence; None if nothing."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for prefix, block in blocks_of(model):
        for name, module in block.named_modules(prefix=prefix):
            shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
            style, kind = styles.get(name), type(module).__name__
            if style is not None and style not in list(Split):
                return f"gives {name} the style {style}, which is not known here"
            if style is None and any(shape != (config.hidden_size,) for shape in shapes):
                return f"leaves out {name} ({kind})"
            if style in (Split.COLUMNS, Split.ROWS) and not isinstance(module, nn.Linear):
                return f"splits {name} ({kind}), which is no Linear"
            if style == Split.PER_HEAD and any(shape != (head_dim,) for shape in shapes):
                return f"takes {name} ({kind}) for one of {head_dim} elements a head"
    return None


def _head_gap(model: PreTrainedModel, *, named: bool) -> str | None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        return f"needs an Embedding and a Linear head, not {type(embedding).__name__} and {type(head).__name__}"
    name = next(name for name, module in model.named_modules() if module is head)
    plan: Mapping[str, str] = model.tp_plan or {}
    if named and not any(fnmatch(name, pattern) and style in HEAD_STYLES for pattern, style in plan.items()):
        return f"leaves out {name}" if plan else "is empty"
    return None
