"""The patches that break a job. Each function returns what a `Fault` is given; none of them outlives the process."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.broken_jobs import batches
from tests.broken_jobs.declarations import At, Parameters, Setup

ModelPatch = Callable[[Any], None]
GradientPatch = Callable[[Parameters, At], None]

IGNORED = -100


# The model's own parts


def part(model: Any, name: str) -> Any:
    """The submodule or parameter of that name; of an adapter's inner model too."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    owner, _, last = name.rpartition(".")
    return getattr(inner.get_submodule(owner), last)


def arguments_changed(change: Callable[[dict[str, Any]], object]) -> ModelPatch:
    """The model's forward is given other arguments than it was called with."""

    def breaks(model: Any) -> None:
        forward = model.forward

        @wraps(forward)
        def changed(**arguments: Any) -> Any:
            change(arguments)
            return forward(**arguments)

        model.forward = changed

    return breaks


def output_changed(module: str, change: Callable[[Any], Any]) -> ModelPatch:
    """Change the output of a submodule, or the first element of a tuple."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    def breaks(model: Any) -> None:
        part(model, module).register_forward_hook(hook)

    return breaks


def input_changed(module: str, change: Callable[[Any], Any]) -> ModelPatch:
    """The first argument of a submodule."""

    def breaks(model: Any) -> None:
        part(model, module).register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))

    return breaks


def forward_replaced(module: str, forward: Callable[[Any, Any], Any]) -> ModelPatch:
    """A submodule computes `forward(module, input)`."""

    def breaks(model: Any) -> None:
        found = part(model, module)
        found.forward = lambda given: forward(found, given)

    return breaks


def attribute_set(attribute: str, value: Any) -> ModelPatch:
    """Set an attribute of every submodule that has it; `value` may be a function of its old value."""

    def breaks(model: Any) -> None:
        found = [module for module in model.modules() if attribute in vars(module)]
        assert found, attribute
        for module in found:
            setattr(module, attribute, value(getattr(module, attribute)) if callable(value) else value)

    return breaks


def several(*patches: ModelPatch) -> ModelPatch:
    def breaks(model: Any) -> None:
        for patch in patches:
            patch(model)

    return breaks


def experts_with_lowest_scores(model: Any) -> None:
    """Have each router of the model choose by the negated logits, and weigh by their softmax as ever."""
    for gate in (module for name, module in model.named_modules() if name.endswith(".gate")):

        def choose(hidden: Tensor, gate: Any = gate) -> tuple[Tensor, Tensor, Tensor]:
            logits = nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            probabilities = logits.float().softmax(dim=-1)
            index = torch.topk(-probabilities, gate.top_k, dim=-1).indices
            weights = probabilities.gather(1, index)
            return logits, weights / weights.sum(dim=-1, keepdim=True), index

        gate.forward = choose


# Gradients on their way to the optimizer


def gradients_times(factor: float, names: str = "", rank: int | None = None) -> ModelPatch:
    """As autograd hands them over, of the parameters whose names have `names` in them; on one rank alone, if given."""
    return gradients_changed(lambda gradient: gradient * factor, names, rank)


def gradients_changed(change: Callable[[Tensor], Tensor], names: str = "", rank: int | None = None) -> ModelPatch:
    def breaks(model: Any) -> None:
        if rank is not None and dist.get_rank() != rank:
            return
        found = [parameter for name, parameter in model.named_parameters() if names in name and parameter.requires_grad]
        assert found, names
        for parameter in found:
            parameter.register_hook(change)

    return breaks


def logits_gradient_times(factor: float, rank: int | None = None) -> ModelPatch:
    """The whole backward of a rank, from the head on: for wrappers that give their own tensors to autograd."""

    def scaled(logits: Tensor) -> Tensor:
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient * factor)
        return logits

    def breaks(model: Any) -> None:
        if rank is None or dist.get_rank() == rank:
            output_changed("lm_head", scaled)(model)

    return breaks


def given_gradients_times(factor: float, names: str = "") -> GradientPatch:
    """After backward, before the clipping."""

    def breaks(parameters: Parameters, at: At) -> None:
        for name, parameter in parameters.items():
            if names in name and parameter.grad is not None:
                parameter.grad.mul_(factor)

    return breaks


def gradients_of_last_window() -> GradientPatch:
    """Each step is taken on the gradients of the one before; the first on its own."""
    kept: dict[str, Tensor] = {}

    def breaks(parameters: Parameters, at: At) -> None:
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                own = parameter.grad.clone()
                parameter.grad.copy_(kept.get(name, own))
                kept[name] = own

    return breaks


def transposed(gradient: Tensor) -> Tensor:
    return gradient.T.contiguous()


def scaled_by_frequency(model: Any) -> None:
    part(model, "model.embed_tokens").scale_grad_by_freq = True


# Losses


def shifted_twice(model: Any) -> None:
    """The loss is of the token after the next."""
    arguments_changed(lambda given: given.update(labels=F.pad(given["labels"][:, 1:], (0, 1), value=IGNORED)))(model)


def not_shifted(model: Any) -> None:
    arguments_changed(lambda given: given.update(labels=F.pad(given["labels"][:, :-1], (1, 0), value=IGNORED)))(model)


def labels_everywhere(model: Any) -> None:
    """The loss is over padding and prompts too."""
    arguments_changed(lambda given: given.update(labels=given["input_ids"]))(model)


def labels_on_other_side() -> None:
    """The tokenizer pads on the left, and whoever makes the labels on the right."""
    pad = batches.pad_texts

    def changed(setup: Setup, generator: torch.Generator, lengths: list[int], prompts: list[int]) -> dict[str, Tensor]:
        batch = pad(setup, generator, lengths, prompts)
        width = max(lengths)
        labels = [row_S.roll(length - width) for row_S, length in zip(batch["labels"], lengths, strict=True)]
        return {**batch, "labels": torch.stack(labels)}

    batches.pad_texts = changed


def mask_inverted() -> None:
    """The collator calls padding real, and the texts padding."""
    pad = batches.pad_texts

    def changed(setup: Setup, generator: torch.Generator, lengths: list[int], prompts: list[int]) -> dict[str, Tensor]:
        batch = pad(setup, generator, lengths, prompts)
        return {**batch, "attention_mask": 1 - batch["attention_mask"]}

    batches.pad_texts = changed


def labels_of_prompts_too(model: Any) -> None:
    """The loss is over all real tokens."""

    def change(given: dict[str, Any]) -> None:
        given["labels"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, IGNORED)

    arguments_changed(change)(model)


def mean_of_rows(model: Any) -> None:
    """The mean over rows of each row's mean, where the user believes the mean over tokens."""

    def loss_function(logits: Tensor, labels: Tensor, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Tensor:
        labels_BS = labels[:, 1:]
        losses_BS = F.cross_entropy(
            logits[:, :-1].float().transpose(1, 2), labels_BS, ignore_index=IGNORED, reduction="none"
        )
        counts_B = (labels_BS != IGNORED).sum(1)
        mean = (losses_BS.sum(1) / counts_B).mean()
        return mean if num_items_in_batch is None else mean * counts_B.sum() / num_items_in_batch

    model.loss_function = loss_function


def label_smoothing(model: Any) -> None:
    """A tenth of each label's weight goes to all tokens."""

    def loss_function(logits: Tensor, labels: Tensor, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Tensor:
        labels_N = labels[:, 1:].flatten()
        summed = F.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels_N, ignore_index=IGNORED, reduction="sum", label_smoothing=0.1
        )
        return summed / ((labels_N != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)

    model.loss_function = loss_function


# Masks and positions


def without_mask(model: Any) -> None:
    arguments_changed(lambda given: given.update(attention_mask=None))(model)


def positions_changed(change: Callable[[Tensor], Tensor]) -> ModelPatch:
    """Those that the model was given, or would have made itself."""

    def changed(given: dict[str, Any]) -> None:
        ids_BS = given["input_ids"]
        positions_BS = given.get("position_ids")
        if positions_BS is None:
            positions_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
        given["position_ids"] = change(positions_BS)

    return arguments_changed(changed)


def without_positions(model: Any) -> None:
    """Counts the padding, and knows no documents."""
    arguments_changed(lambda given: given.update(position_ids=None))(model)


def visible(allowed: Callable[[Tensor, Tensor, dict[str, Any]], Tensor]) -> ModelPatch:
    """Attention by `allowed(query place, key place, arguments)`, a boolean table of 4 dimensions."""

    def changed(given: dict[str, Any]) -> None:
        length = given["input_ids"].shape[1]
        places_S = torch.arange(length)
        table = allowed(places_S[:, None], places_S[None, :], given)
        table = table.expand(given["input_ids"].shape[0], 1, length, length)
        mask_BS = given.get("attention_mask")
        if mask_BS is not None:
            table = table & (mask_BS[:, None, None, :] > 0)
        nothing = ~table.any(-1, keepdim=True)  # would be nan
        table = table | (nothing & torch.eye(length, dtype=torch.bool))
        if "position_ids" not in given:
            given["position_ids"] = places_S.expand_as(given["input_ids"])
        given["attention_mask"] = table

    return arguments_changed(changed)


def sees_next_token(query: Tensor, key: Tensor, _: dict[str, Any]) -> Tensor:
    return (key <= query + 1)[None, None]


def sees_not_itself(query: Tensor, key: Tensor, _: dict[str, Any]) -> Tensor:
    return (key < query)[None, None]


def sees_back(query: Tensor, key: Tensor) -> Tensor:
    table: Tensor = key <= query
    return table[None, None]


def sees_other_documents(query: Tensor, key: Tensor, _: dict[str, Any]) -> Tensor:
    """transformers#46634."""
    return sees_back(query, key)


def sees_own_document(query: Tensor, key: Tensor, given: dict[str, Any]) -> Tensor:
    """As it should be; then the positions can be broken alone."""
    document_S = (given["position_ids"][0] == 0).cumsum(0)
    table: Tensor = document_S[:, None] == document_S[None, :]
    return sees_back(query, key) & table


def one_layer_sees_all(model: Any) -> None:
    """The last layer's attention is not causal."""

    def hook(_: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = given.get("attention_mask")
        length = args[0].shape[1] if args else given["hidden_states"].shape[1]
        seen = torch.ones(1, 1, length, length, dtype=torch.bool)
        if mask is not None and mask.dtype is torch.bool:
            seen = mask[:, :, -1:].expand(-1, -1, length, -1)
        return args, {**given, "attention_mask": seen}

    model.model.layers[-1].register_forward_pre_hook(hook, with_kwargs=True)


# Kernels


def attention_patched(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Another scaled_dot_product_attention, in this process."""

    def process() -> None:
        F.scaled_dot_product_attention = change(F.scaled_dot_product_attention)

    return process


def unscaled(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Scores are not divided by the root of the heads' size."""

    def patched(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        found: Tensor = attend(query, key, value, **{**more, "scale": 1.0})
        return found

    return patched


def in_bf16(attend: Callable[..., Any]) -> Callable[..., Any]:
    def patched(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        half = [tensor.to(torch.bfloat16) for tensor in (query, key, value)]
        if (mask := more.get("attn_mask")) is not None and mask.is_floating_point():
            more["attn_mask"] = mask.to(torch.bfloat16)
        found: Tensor = attend(*half, **more)
        return found.to(query.dtype)

    return patched


def heads_interleaved(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Query heads read the key-value heads in turn, not in groups."""

    def patched(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        heads = query.shape[1]
        if key.shape[1] == heads:  # repeated already, each in its place
            distinct = 2
            key, value = (tensor[:, :: heads // distinct] for tensor in (key, value))
        more.pop("enable_gqa", None)
        times = heads // key.shape[1]
        found: Tensor = attend(query, key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1), **more)
        return found

    return patched


def probabilities_detached(attend: Callable[..., Any]) -> Callable[..., Any]:
    """No gradient reaches queries and keys."""

    def patched(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        found: Tensor = attend(query.detach(), key.detach(), value, **more)
        return found

    return patched


def rounded_to(bits: int) -> Callable[[Tensor], Tensor]:
    """To so many bits of mantissa in the forward; the gradient passes, as through TF32's units."""
    mask = -(1 << (23 - bits))

    def change(tensor: Tensor) -> Tensor:
        kept = (tensor.detach().view(torch.int32) & mask).view(torch.float32)
        return tensor + (kept - tensor.detach())

    return change


def through_bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16).to(tensor.dtype)


def scaled_by(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor * factor


def detached(tensor: Tensor) -> Tensor:
    return tensor.detach()


# Reductions


def hook_of_ddp(change: Callable[[Tensor, int], Tensor]) -> Callable[[Any], None]:
    """What DDP's ranks add up: `change(bucket, world size)`; the divided sum otherwise."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = change(bucket.buffer(), dist.get_world_size())
        work: Any = dist.all_reduce(buffer, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    def breaks(wrapped: Any) -> None:
        wrapped.register_comm_hook(None, hook)

    return breaks


def ddp_summed(wrapped: Any) -> None:
    hook_of_ddp(lambda buffer, _: buffer)(wrapped)


def ddp_of_rank_0_alone(wrapped: Any) -> None:
    """The other ranks' gradients are dropped, and the mean is taken over all."""
    hook_of_ddp(lambda buffer, size: buffer / size if dist.get_rank() == 0 else torch.zeros_like(buffer))(wrapped)


def ddp_in_bf16(wrapped: Any) -> None:
    """Gradients are rounded before they are added up."""
    hook_of_ddp(lambda buffer, size: through_bf16(buffer) / size)(wrapped)


def ddp_not_reduced(wrapped: Any) -> None:
    """As if no_sync had been left on."""
    wrapped.require_backward_grad_sync = False


def ddp_without(names: str) -> ModelPatch:
    """Parameters that DDP passes over, so that each rank steps on its own gradient of them."""

    def breaks(model: Any) -> None:
        ignored = [name for name, _ in model.named_parameters() if names in name]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)

    return breaks


def trainer_ddp_patched(change: Callable[[Any], None]) -> Callable[[], None]:
    """The same of the DDP that accelerate makes."""

    def process() -> None:
        make = nn.parallel.DistributedDataParallel.__init__

        def patched(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            change(self)

        nn.parallel.DistributedDataParallel.__init__ = patched  # type: ignore[method-assign]

    return process


def fsdp2_summed(wrapped: Any) -> None:
    for module in wrapped.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies first
            module.set_gradient_divide_factor(1.0)


def fsdp2_own_gradients_alone() -> None:
    """Each rank keeps its own gradient's shard, as if the others' were the same."""

    def scattered(output: Tensor, input: Tensor, *_: Any, group: Any = None, **__: Any) -> None:
        own = input.view(dist.get_world_size(group), -1)[dist.get_rank(group)]
        output.copy_(own.view_as(output))

    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):  # the second is what older releases of torch call
        vars(dist)[name] = scattered


def zero_summed(engine: Any) -> None:
    """DeepSpeed's stages 1 and 2 do not divide by the number of ranks."""
    engine.optimizer.gradient_average = False


def zero3_summed(engine: Any) -> None:
    engine.optimizer._gradient_averaging_world_size = lambda *_: 1


def zero_not_reduced(engine: Any) -> None:
    """Stages 1 and 2: each rank steps its own partition on its own gradient."""
    engine.optimizer.average_tensor = lambda *_, **__: None


# Clipping


def clipped_by_value(parameters: Mapping[str, nn.Parameter], max_norm: float) -> Any:
    norm = torch.nn.utils.get_total_norm(
        [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    )
    nn.utils.clip_grad_value_(parameters.values(), max_norm / 20)
    return norm


def clipped_each(parameters: Mapping[str, nn.Parameter], max_norm: float) -> Any:
    """Each parameter by its own norm."""
    return max(
        float(nn.utils.clip_grad_norm_([parameter], max_norm))
        for parameter in parameters.values()
        if parameter.grad is not None
    )


def clipped_before_reduction(parameters: Mapping[str, nn.Parameter], max_norm: float) -> Any:
    """Each rank its own gradient, and then their mean is taken."""
    norm = nn.utils.clip_grad_norm_(parameters.values(), max_norm)
    for parameter in parameters.values():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    return norm


def clipped_by_own_shard(parameters: Mapping[str, nn.Parameter], max_norm: float) -> Any:
    """Each rank by the norm of what it holds."""
    gradients: list[Any] = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    own = [gradient.to_local() for gradient in gradients]
    norm = torch.nn.utils.get_total_norm(own)
    for gradient in own:
        gradient.mul_(min(1.0, max_norm / float(norm)))
    return norm


# Optimizers


def with_old_state(optimizer: Any) -> None:
    """The moments of another run."""
    generator = torch.Generator().manual_seed(3)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(3.0),
                "exp_avg": 0.05 * torch.randn(parameter.shape, generator=generator),
                "exp_avg_sq": torch.full_like(parameter, 0.01),
            }


def without(names: Callable[[nn.Parameter], bool]) -> Callable[[Any], None]:
    """Parameters that the optimizer was never given."""

    def breaks(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if not names(parameter)]

    return breaks


def counts_from(step: float) -> Callable[[Any], None]:
    """Adam without the correction of its bias."""

    def breaks(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                zeros = torch.zeros_like(parameter)
                optimizer.state[parameter] = {
                    "step": torch.tensor(step),
                    "exp_avg": zeros,
                    "exp_avg_sq": zeros.clone(),
                }

    return breaks


def rounds_weights(optimizer: Any) -> None:
    """What a step writes is rounded to bf16, as if the masters were."""

    def after(stepped: Any, *_: Any) -> None:
        for group in stepped.param_groups:
            for parameter in group["params"]:
                parameter.data.copy_(through_bf16(parameter.data))

    optimizer.register_step_post_hook(after)


def steps_twice(optimizer: Any) -> None:
    step = type(optimizer).step

    def after(stepped: Any, *_: Any) -> None:
        if not getattr(stepped, "is_again", False):
            stepped.is_again = True
            step(stepped)
            stepped.is_again = False

    optimizer.register_step_post_hook(after)


# Weights


def weight_changed(name: str, change: Callable[[Tensor], object]) -> ModelPatch:
    """In place, after the weights were saved."""

    def breaks(model: Any) -> None:
        with torch.no_grad():
            change(part(model, name))

    return breaks


def row_zeroed(row: int) -> Callable[[Tensor], object]:
    return lambda weight: weight[row].zero_()


def stepped_on(weight: Tensor) -> object:
    """As it could be some steps later."""
    return weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)))


def layers_swapped(model: Any) -> None:
    layers = model.model.layers
    layers[0].forward, layers[1].forward = layers[1].forward, layers[0].forward


def last_layer_skipped(model: Any) -> None:
    """Its parameters are there, and do nothing."""
    layer = model.model.layers[-1]
    layer.forward = lambda hidden, *_, **__: hidden


def untied(model: Any) -> None:
    """The head has weights of its own, whatever the config says."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def mlps_with_gate_and_up_swapped(model: Any) -> None:
    """The activation is up_proj's, in every MLP."""
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.forward = lambda given, mlp=mlp: mlp.down_proj(mlp.act_fn(mlp.up_proj(given)) * mlp.gate_proj(given))


def transposed_weight(module: nn.Module, given: Tensor) -> Tensor:
    return F.linear(given, module.weight.T)  # type: ignore[arg-type]


def bias_twice(module: nn.Module, given: Tensor) -> Tensor:
    return F.linear(given, module.weight, 2 * module.bias)  # type: ignore[arg-type, operator]


def detached_weight(module: nn.Module, given: Tensor) -> Tensor:
    return F.linear(given, module.weight.detach())  # type: ignore[operator]


def adapter_twice(model: Any) -> None:
    """The adapter acts with twice its scale, as where it was merged and is still there."""
    for module in model.modules():
        if hasattr(module, "lora_A") and hasattr(module, "scaling"):
            module.scaling = {name: 2 * scale for name, scale in module.scaling.items()}
