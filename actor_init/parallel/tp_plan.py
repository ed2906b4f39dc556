"""Decide how tensor parallelism splits each layer: the model's own plan, or ours for models built like Llama."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatch
from inspect import signature

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from actor_init.model import find_blocks
from actor_init.spec import TpPlan, UsageError
from capture.facts import Setting


class Split(StrEnum):
    """How a module's parameters are split, by transformers' names.

    COLUMNS      a Linear's output features, one share a rank
    ROWS         a Linear's input features, one share a rank; the ranks' outputs are summed
    PER_HEAD     whole, applied to a rank's own heads; gradients are summed over the ranks
    LATENT       whole; the gradient of the outputs that skip to a rank's own heads is summed over the ranks
    GATHERED     a Linear's output features, one share a rank; each rank gets all of them
    EXPERTS      a mixture's experts, one share a rank; the ranks' outputs are summed
    EXPERT_ROWS  the same for experts that are given and return a row for each expert and token
    """

    COLUMNS = "colwise"
    ROWS = "rowwise"
    PER_HEAD = "replicated_with_grad_allreduce"
    LATENT = "mla_kv_a_proj"
    GATHERED = "colwise_gather_output"
    EXPERTS = "grouped_gemm"
    EXPERT_ROWS = "grouped_rows"


# The splits of a plan that splits all of a layer.
STRICT = (Split.COLUMNS, Split.ROWS, Split.PER_HEAD)
# What comes before the projections to the heads in multi-head latent attention. It stays whole beside split Linears.
BEFORE_HEADS = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
# Linears whose weight another module reads: those of Mamba's time steps and of Gemma 3n's alternating updates.
READ_ELSEWHERE = ("dt_proj", "correction_coefs", "prediction_coefs")
# The head's logits stay sharded in this actor, also where the plan gathers them.
HEAD_STYLES = ("colwise", "colwise_gather_output")
FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
# The plan of --tp-plan builtin, for models built like Llama: by the names of modules below a transformer layer.
BUILTIN_SPLITS = {
    **{f"self_attn.{name}_proj": Split.COLUMNS for name in "qkv"},
    "self_attn.o_proj": Split.ROWS,
    "self_attn.q_norm": Split.PER_HEAD,
    "self_attn.k_norm": Split.PER_HEAD,
    "mlp.gate_proj": Split.COLUMNS,
    "mlp.up_proj": Split.COLUMNS,
    "mlp.down_proj": Split.ROWS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPlan:
    """How each module in the transformer layers is split, by qualified name.

    Embedding and head are not in it: both are sharded on the vocabulary, under every plan.
    """

    splits: Mapping[str, Split]
    # Whose plan it is, for display.
    origin: str
    # The modules inside which each rank has all features of all heads.
    gathered: frozenset[str] = frozenset()
    # How many of the last outputs of a LATENT Linear go to the heads directly.
    num_rotated: int = 0


def find_plan(model: PreTrainedModel, choice: TpPlan, tp: int = 1) -> SplitPlan:
    """Find the plan that `choice` selects for `model` over `tp` ranks. The model may be on the meta device.

    A plan is complete if it splits every module with parameters in the transformer layers, except norms of hidden
    size, which all ranks hold whole, and if the model has a Linear head, which the model's own plan has to name.
    Where neither plan is complete, auto mixes them: see `_mix_model_and_builtin_plans`. Raises UsageError for a plan
    that was typed and is not complete, and for a model without an Embedding and a Linear head.
    """
    name = type(model).__name__
    model_type = model.config.get_text_config().model_type
    model_splits = _read_model_splits(model)
    model_gap = _describe_head_gap(model, named=True) or _describe_gap(model, model_splits)
    builtin_splits = _list_builtin_splits(model)
    builtin_gap = _describe_head_gap(model, named=False) or _describe_gap(model, builtin_splits)
    if choice is TpPlan.MODEL and model_gap:
        typed = Setting("tp_plan", TpPlan.MODEL)
        advice = f"Try: {typed.with_value(TpPlan.AUTO if builtin_gap else TpPlan.BUILTIN)}"
        raise UsageError(typed, f": transformers' plan for {name} {model_gap}", advice)
    if choice is not TpPlan.BUILTIN and not model_gap:
        return SplitPlan(
            splits={key: Split(style) for key, style in model_splits.items()}, origin=f"transformers' for {name}"
        )
    if not builtin_gap:
        is_known = model_type in FAMILIES
        origin = f"builtin for {model_type}" if is_known else f"Llama-style fallback, not made for {model_type}"
        return SplitPlan(splits={key: Split(style) for key, style in builtin_splits.items()}, origin=origin)
    head_gap = _describe_head_gap(model, named=False)
    if choice is TpPlan.BUILTIN or head_gap:
        why = f"fits {name}: the Llama-style one {builtin_gap}"
        advice = f"Try: {Setting('tp', 1) if head_gap else Setting('tp_plan', TpPlan.AUTO)}"
        raise UsageError("no tensor parallel plan", why, advice)
    return _mix_model_and_builtin_plans(model, model_splits, builtin_splits, tp)


def _mix_model_and_builtin_plans(
    model: PreTrainedModel, model_splits: Mapping[str, str], builtin_splits: Mapping[str, str], tp: int
) -> SplitPlan:
    """Mix the plans: a part is split by the first plan that splits all of it, and every other Linear is gathered.

    A mixture's experts are split expert by expert. To gather outputs is right for any model, and costs more
    communication.
    """
    splits: dict[str, Split] = {}
    gathered: list[str] = []

    def visit(prefix: str, module: nn.Module) -> None:
        for plan in (model_splits, builtin_splits):
            if _is_whole_part(model, prefix, module, plan) and _is_divisible(model, prefix, module, tp):
                below = {name: plan[name] for name in [prefix, *_list_names_below(prefix, module)] if name in plan}
                splits.update({name: Split(style) for name, style in below.items()})
                return
        gathered.append(prefix)
        if prefix.rpartition(".")[2] not in READ_ELSEWHERE and (split := _choose_fallback_split(module)) is not None:
            splits[prefix] = split
        for name, child in module.named_children():
            visit(f"{prefix}.{name}", child)

    for prefix, block in find_blocks(model):
        for name, child in block.named_children():
            visit(f"{prefix}.{name}", child)
    kinds = set(splits.values())
    parts = [
        *(["attention or MLP by transformers' or the Llama-style plan"] if Split.ROWS in kinds else []),
        *(["experts one share a rank"] if kinds & {Split.EXPERTS, Split.EXPERT_ROWS} else []),
        *(["outputs gathered" + " elsewhere" * (len(kinds) > 1)] if Split.GATHERED in kinds else []),
    ]
    return SplitPlan(
        splits=splits,
        origin=f"mixed for {type(model).__name__}: {', '.join(parts)}",
        gathered=frozenset(gathered),
        num_rotated=getattr(model.config.get_text_config(), "qk_rope_head_dim", 0),
    )


def _choose_fallback_split(module: nn.Module) -> Split | None:
    """Choose how `module` itself is split where neither plan splits the part that it is in.

    Returns None where its own parameters stay whole.
    """
    if type(module).forward in (nn.Linear.forward, Conv1D.forward) or type(module).__name__ == "FalconLinear":
        return Split.GATHERED
    parameters = list(module.parameters(recurse=False))
    counts = {parameter.shape[0] for parameter in parameters if parameter.ndim}
    if len(counts) == 1 and sum(parameter.ndim == 3 for parameter in parameters) >= 2:
        return {3: Split.EXPERTS, 1: Split.EXPERT_ROWS}.get(len(signature(type(module).forward).parameters) - 1)
    return None


def _is_whole_part(model: PreTrainedModel, prefix: str, module: nn.Module, styles: Mapping[str, str]) -> bool:
    """Do `styles` split all that is in `module`, from whole inputs to whole outputs?"""
    splits = {styles[name] for name in _list_names_below(prefix, module) if name in styles}
    if not {Split.COLUMNS, Split.ROWS} <= splits or any(True for _ in module.parameters(recurse=False)):
        return False
    # The threshold of Gemma 3n's sparse activation is taken over all features, so they cannot be split.
    if getattr(module, "activation_sparsity", 0):
        return False
    allowed = [f"{prefix}.{name}" for name in BEFORE_HEADS] if Split.LATENT in splits else []
    return (
        _describe_gap_in(
            model, prefix, module, {name: style for name, style in styles.items() if name not in allowed}, allowed
        )
        is None
    )


def _is_divisible(model: PreTrainedModel, prefix: str, part: nn.Module, tp: int) -> bool:
    """Does `tp` divide what the part splits: its Linears' widths and, in attention, the heads?"""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or tp
    counts = [heads, getattr(config, "num_key_value_heads", None) or heads] if "attn" in prefix else []
    linears = [module for module in part.modules() if isinstance(module, nn.Linear)]
    widths = [width for linear in linears for width in (linear.in_features, linear.out_features)]
    return not any(count % tp for count in [*counts, *widths])


def _read_model_splits(model: PreTrainedModel) -> dict[str, str]:
    plan: Mapping[str, str] = model.tp_plan or {}
    names = [name for prefix, block in find_blocks(model) for name in _list_names_below(prefix, block)]
    planned = {name: next((style for pattern, style in plan.items() if fnmatch(name, pattern)), None) for name in names}
    return {name: style for name, style in planned.items() if style is not None}


def _list_builtin_splits(model: PreTrainedModel) -> dict[str, str]:
    return {
        f"{prefix}.{name}": split.value
        for prefix, block in find_blocks(model)
        for name, _ in block.named_modules()
        if (split := BUILTIN_SPLITS.get(name))
    }


def _list_names_below(prefix: str, block: nn.Module) -> list[str]:
    return [f"{prefix}.{name}" for name, _ in block.named_modules() if name]


def _describe_gap(model: PreTrainedModel, styles: Mapping[str, str]) -> str | None:
    """Describe what `styles` misses or gets wrong in the transformer layers, to end a sentence; None if nothing."""
    width = (model.config.get_text_config().hidden_size,)
    for prefix, block in find_blocks(model):
        children = block.named_children()
        on_residual = [
            f"{prefix}.{name}"
            for name, child in children
            if {parameter.shape for parameter in child.parameters()} == {width}
        ]
        if gap := _describe_gap_in(model, prefix, block, styles, on_residual):
            return gap
    return None


def _describe_gap_in(
    model: PreTrainedModel, prefix: str, part: nn.Module, styles: Mapping[str, str], allowed: Sequence[str] = ()
) -> str | None:
    """Describe the same for one module. Those with `allowed` names may be left out: they see whole activations."""
    config = model.config.get_text_config()
    num_heads = getattr(config, "num_attention_heads", None) or 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    for name, module in part.named_modules(prefix=prefix):
        shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
        style, kind = styles.get(name), type(module).__name__
        if style is not None and style not in STRICT:
            return f"gives {name} the style {style}, which is not known here"
        if style is None and name not in allowed and shapes:
            return f"leaves out {name} ({kind})"
        if style in (Split.COLUMNS, Split.ROWS) and not isinstance(module, nn.Linear):
            return f"splits {name} ({kind}), which is no Linear"
        if style == Split.PER_HEAD and any(shape != (head_dim,) for shape in shapes):
            return f"takes {name} ({kind}) for one of {head_dim} elements a head"
    return None


def _describe_head_gap(model: PreTrainedModel, *, named: bool) -> str | None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        return f"needs an Embedding and a Linear head, not {type(embedding).__name__} and {type(head).__name__}"
    name = next(name for name, module in model.named_modules() if module is head)
    plan: Mapping[str, str] = model.tp_plan or {}
    if named and not any(fnmatch(name, pattern) and style in HEAD_STYLES for pattern, style in plan.items()):
        return f"leaves out {name}" if plan else "is empty"
    return None
