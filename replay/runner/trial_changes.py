"""List what a model can compute otherwise in one pass: other dtypes, adapters, masks of a layer. Hypotheses as data."""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from actor_init.declarations.attention.plain import SDPA_FORM
from actor_init.model import find_blocks
from capture.file_format.name_patterns import PatternTable
from replay.verdict.causes.cause import CauseName
from replay.verdict.causes.model_rules import COMPUTE_BUFFERS, choose_cause_name, describe_model_difference
from replay.verdict.model_facts import ALL_ZEROS, ModelDifference, ModelDifferenceKind

LORA_SCALES = "scaling"
# Of the modules that the recording states to be other ones, so many are tried, and each trial costs a forward.
MAX_PLACES = 2
# A tensor core that is fed fp32 leaves out the last 13 bits.
TF32_BITS = -(1 << 13)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTrial:
    """A hypothesis about what the job's model computed of the same rows.

    change   changes the model within a context
    coarsens the numbers are those of a coarser dtype
    is_stated          the recording states the change itself
    is_of_stated_code  it is a mistake of code that the recording states to be another one
    """

    name: str
    cause: CauseName
    says: str
    try_next: str
    change: Callable[[PreTrainedModel], AbstractContextManager[None]]
    coarsens: bool = False
    is_stated: bool = False
    is_of_stated_code: bool = False


def list_model_trials(
    model: PreTrainedModel,
    visible_BSS: Tensor,
    *,
    may_round: bool,
    differences: Sequence[ModelDifference] = (),
    suspect_id: int | None = None,
) -> Iterator[ModelTrial]:
    """Yield the hypotheses that apply to this model. The same on every rank, but for that of the token.

    visible_BSS  what each token would see if attention were not causal, on the model's device
    may_round    the model computes in fp32, and the job's numbers are as near as those of a coarser dtype
    differences  what the recording states of the job's model
    suspect_id   the token behind which the numbers are wrong, if there is one
    """
    has_sdpa = getattr(getattr(model, "config", None), "_attn_implementation", None) == SDPA_FORM.name
    yield from _list_buffer_trials(model, differences)
    if suspect_id is not None:
        yield ModelTrial(
            name=f"embedding of token {suspect_id} zeroed",
            cause=CauseName.OTHER_WEIGHTS,
            says=f"the job's embedding of token {suspect_id} is zeros",
            try_next="look for a padding_idx, and for rows of the embedding that were added or reset",
            change=lambda model: zero_embedding(model, suspect_id),
        )
    if may_round:
        yield from _list_dtype_trials(visible_BSS.device.type)
        yield from _list_rounding_trials(model, differences, visible_BSS.device.type)
    if may_round and has_sdpa:
        yield ModelTrial(
            name="attention in bf16",
            cause=CauseName.KERNEL,
            says="the job's attention computes in bf16, in a model that computes in fp32",
            try_next="let the job's attention compute in fp32 too (sdpa, not flash), or --dtype bf16 for all",
            change=attend_in_bf16,
            coarsens=True,
        )
    if has_sdpa:
        for name, number in (("first", 0), ("last", -1)):
            yield ModelTrial(
                name=f"{name} layer not causal",
                cause=CauseName.MASK,
                says=f"the attention of the job's {name} layer is not causal",
                try_next=f"look at the mask that the {name} layer of the job's model is given",
                change=lambda model, number=number: see_all_in_layer(model, number, visible_BSS),  # type: ignore[misc]
            )
    if any(_has_scales(module) for module in model.modules()):
        yield from _list_adapter_trials(_find_stated_scale(differences))


def _list_buffer_trials(model: nn.Module, differences: Sequence[ModelDifference]) -> Iterator[ModelTrial]:
    """Yield that the buffers are zeros which the recording states to be zeros in the job."""
    zeros = [
        difference
        for difference in differences
        if difference.kind is ModelDifferenceKind.BUFFER and difference.job == ALL_ZEROS
    ]
    patterns = PatternTable({difference.where: True for difference in zeros})
    names = [name for name, _ in model.named_buffers() if patterns.find(name) is not None]
    if names:
        yield ModelTrial(
            name="buffers of zeros",
            cause=choose_cause_name(zeros[0], is_forward=True),
            says=describe_model_difference(zeros[0]),
            try_next=COMPUTE_BUFFERS,
            change=partial(zero_buffers, names),
            is_stated=True,
        )


def _list_dtype_trials(device_type: str) -> Iterator[ModelTrial]:
    yield ModelTrial(
        name="logits in bf16",
        cause=CauseName.DTYPE,
        says="the job's logits are rounded to bf16 before its loss",
        try_next="look for what casts the logits in the job, or let its head compute in fp32",
        change=round_logits,
        coarsens=True,
    )
    yield ModelTrial(
        name="autocast to bf16",
        cause=CauseName.DTYPE,
        says="the job's forward runs under autocast to bf16",
        try_next="--dtype bf16, or take the autocast out of the job",
        change=lambda model: _run_under_autocast(device_type),
        coarsens=True,
    )


def _list_rounding_trials(
    model: PreTrainedModel, differences: Sequence[ModelDifference], device_type: str
) -> Iterator[ModelTrial]:
    """Yield that a module whose code or hooks are stated to be other ones rounds what goes into it, or comes out."""
    places: dict[str, Mapping[str, ModuleChange]] = {}
    for difference in differences:
        match difference.kind, difference.key:
            case ModelDifferenceKind.HOOK, "forward pre-hook":
                changes = {f"is given {word}": partial(_round_input, round_to) for word, round_to in ROUNDINGS.items()}
            case ModelDifferenceKind.HOOK, "forward hook":
                changes = {f"returns {word}": partial(_round_output, round_to) for word, round_to in ROUNDINGS.items()}
            case ((ModelDifferenceKind.FORWARD | ModelDifferenceKind.CLASS), _):
                changes = {
                    "returns bf16": partial(_round_output, ROUNDINGS["bf16"]),
                    "computes in bf16": partial(_compute_in_bf16, device_type),
                }
            case _:
                continue
        places[difference.where] = {**places.get(difference.where, {}), **changes}
    # That the head's logits are rounded is tried whatever the recording states.
    names = [name for name, module in model.named_modules() if module is not model.get_output_embeddings()]
    modules = {where: [name for name in names if PatternTable({where: True}).find(name)] for where in places}
    for where in [where for where in places if modules[where]][:MAX_PLACES]:
        for what, change in places[where].items():
            yield ModelTrial(
                name=f"{where} {what}",
                cause=CauseName.DTYPE,
                says=f"the job's {where} {what}, in a model of fp32",
                try_next=f"look for a cast in the code or the hooks of {where} in the job",
                change=partial(_change_modules, modules[where], change),
                coarsens=True,
                is_of_stated_code=True,
            )


def _find_stated_scale(differences: Sequence[ModelDifference]) -> tuple[float, float] | None:
    """Find the scale of the job's adapter and of the replay's, if the recording states one that differs."""
    for difference in differences:
        if difference.key == LORA_SCALES and difference.job is not None and difference.replay is not None:
            try:
                scales = [list(dict(ast.literal_eval(text)).values()) for text in (difference.job, difference.replay)]
                (job,), (replay,) = scales
                return (float(job), float(replay)) if float(replay) else None
            except (SyntaxError, TypeError, ValueError):
                return None
    return None


def _list_adapter_trials(stated: tuple[float, float] | None) -> Iterator[ModelTrial]:
    """Yield other scales of the adapter: the stated one, or those that mistakes give it."""
    guesses: Sequence[tuple[str, float, str]] = (
        ("adapter twice", 2.0, "the job's adapter acts with twice its scale, as where it is merged and acts once more"),
        ("adapter halved", 0.5, "the job's adapter acts with half its scale"),
        ("no adapter", 0.0, "the job's adapter does not act"),
    )
    if stated is not None:
        job, replay = stated
        says = f"the scale of the job's adapter is {job:g}, and {replay:g} here (lora_alpha by r, or by its root)"
        guesses = (("stated scale", job / replay, says),)
    for name, factor, says in guesses:
        yield ModelTrial(
            name=name,
            cause=CauseName.ADAPTER_SCALE,
            says=says,
            try_next="look at lora_alpha and r in the job, and at what merges, disables or scales its adapter",
            change=lambda model, factor=factor: scale_adapters(model, factor),  # type: ignore[misc]
        )


def _has_scales(module: nn.Module) -> bool:
    return isinstance(getattr(module, LORA_SCALES, None), dict) and hasattr(module, "lora_A")


ModuleChange = Callable[[nn.Module], AbstractContextManager[None]]
Rounding = Callable[[Tensor], Tensor]

ROUNDINGS: Mapping[str, Rounding] = {
    "bf16": lambda tensor: tensor.to(torch.bfloat16).to(tensor.dtype),
    "fp16": lambda tensor: tensor.to(torch.float16).to(tensor.dtype),
    "TF32": lambda tensor: (tensor.float().view(torch.int32) & TF32_BITS).view(torch.float32).to(tensor.dtype),
}


@contextmanager
def _change_modules(names: Sequence[str], change: ModuleChange, model: nn.Module) -> Iterator[None]:
    """Change each of these modules within this context."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(change(model.get_submodule(name)))
        yield


def _round_first(round_to: Rounding, values: Any) -> Any:
    """Round a tensor, or the first of several values."""
    if isinstance(values, tuple):
        return (round_to(values[0]), *values[1:])
    return round_to(values)


@contextmanager
def _round_input(round_to: Rounding, module: nn.Module) -> Iterator[None]:
    with module.register_forward_pre_hook(lambda _, args: _round_first(round_to, args)):
        yield


@contextmanager
def _round_output(round_to: Rounding, module: nn.Module) -> Iterator[None]:
    with module.register_forward_hook(lambda _, args, output: _round_first(round_to, output)):
        yield


@contextmanager
def _compute_in_bf16(device_type: str, module: nn.Module) -> Iterator[None]:
    """Let a module run under autocast to bf16, and return the dtype that it is given."""
    forward = module.forward

    def run(*args: Any, **options: Any) -> Any:
        with torch.autocast(device_type, torch.bfloat16):
            return _round_first(lambda tensor: tensor.float(), forward(*args, **options))

    module.forward = run
    try:
        yield
    finally:
        module.forward = forward


@contextmanager
def zero_embedding(model: PreTrainedModel, token_id: int) -> Iterator[None]:
    """Let the embedding of one token be zeros within this context. Its weights may be sharded, so its output is."""

    def zero_output(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.masked_fill((args[0] == token_id)[..., None], 0.0)

    with model.get_input_embeddings().register_forward_hook(zero_output):
        yield


@contextmanager
def zero_buffers(names: Sequence[str], model: nn.Module) -> Iterator[None]:
    """Let these buffers be zeros within this context."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in names}
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        for buffer in buffers.values():
            buffer.zero_()
        yield
    finally:
        for name, buffer in buffers.items():
            buffer.copy_(values[name])


@contextmanager
def scale_adapters(model: nn.Module, factor: float) -> Iterator[None]:
    """Multiply the scale of every LoRA adapter by `factor` within this context."""
    scales = {module: dict(getattr(module, LORA_SCALES)) for module in model.modules() if _has_scales(module)}
    try:
        for module, scale_by_name in scales.items():
            setattr(module, LORA_SCALES, {name: factor * scale for name, scale in scale_by_name.items()})
        yield
    finally:
        for module, scale_by_name in scales.items():
            setattr(module, LORA_SCALES, scale_by_name)


@contextmanager
def round_logits(model: PreTrainedModel) -> Iterator[None]:
    """Round what the model's head returns to bf16 within this context."""

    def round_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.to(torch.bfloat16).to(output.dtype)

    with _name_head(model).register_forward_hook(round_output):
        yield


@contextmanager
def divide_logits(model: PreTrainedModel, temperature: float) -> Iterator[None]:
    """Divide what the model's head returns within this context."""
    with _name_head(model).register_forward_hook(lambda _, args, output: output / temperature):
        yield


def _name_head(model: PreTrainedModel) -> nn.Module:
    """Return the model's head. Raises ValueError where it names none."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if not isinstance(head, nn.Module):
        raise ValueError(f"{type(model).__name__} names no head")
    return head


@contextmanager
def attend_in_bf16(model: nn.Module) -> Iterator[None]:
    """Let torch's sdpa compute in bf16 within this context, in every model."""
    attend = AttentionInterface()[SDPA_FORM.name]

    def attend_rounded(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        if mask is not None and mask.is_floating_point():
            mask = mask.to(torch.bfloat16)
        rounded = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
        output, weights = attend(module, *rounded, mask, **options)
        return output.to(query.dtype), weights

    AttentionInterface.register(SDPA_FORM.name, attend_rounded)
    try:
        yield
    finally:
        AttentionInterface.register(SDPA_FORM.name, attend)


@contextmanager
def see_all_in_layer(model: PreTrainedModel, number: int, visible_BSS: Tensor) -> Iterator[None]:
    """Give one layer the mask `visible_BSS` within this context. Its forward raises where it takes no mask by name."""

    def replace_mask(module: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "attention_mask" not in options:
            raise ValueError(f"{type(module).__name__} takes no attention_mask by name")
        return args, {**options, "attention_mask": visible_BSS[:, None]}

    _, layer = find_blocks(model)[number]
    with layer.register_forward_pre_hook(replace_mask, with_kwargs=True):
        yield


@contextmanager
def _run_under_autocast(device_type: str) -> Iterator[None]:
    with torch.autocast(device_type, torch.bfloat16):
        yield
