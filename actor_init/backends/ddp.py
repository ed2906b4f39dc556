"""Run the actor under torch's DistributedDataParallel: the whole model on every rank, nothing sharded.

The sharding backends are compared with it, so it shares no sharding, gathering or casting code with them.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_

from actor_init.action_log_probs import action_log_probs
from actor_init.attention.kernel_choice import choose_kernel_name
from actor_init.backends.torch_backend import TorchBackend
from actor_init.compiling import compile_blocks
from actor_init.fused.rotary import fuse_if_requested
from actor_init.inputs.packing import ActorInputs
from actor_init.model import (
    ModelSource,
    build_on_meta,
    configure_model,
    count_elements,
    find_blocks,
    make_trainable,
    materialise,
)
from actor_init.optimizers.build import find_outer_parameters, list_named_parameters, make_optimizer
from actor_init.saving.huggingface import write_model
from actor_init.schedule_and_norm import (
    TORCH_DTYPES,
    StepSettings,
    allows_step,
    clip_gradients,
    compute_total_norm,
    make_schedule,
    undo_loss_scale,
    update_scale_and_rate,
)
from actor_init.spec import ActorSpec, Compile, Dtype
from actor_init.weights import OnProgress, ignore_progress
from actor_init.world import World


@dataclass(slots=True)
class DDPWindow:
    """The passes whose gradients add up before a step. torch decides in the forward whether backward averages over the
    ranks: in the window's last pass alone.
    """

    size: int
    num_backwards: int = 0

    @property
    def is_last_pass(self) -> bool:
        return self.num_backwards + 1 == self.size


@dataclass(frozen=True, kw_only=True, slots=True)
class DDPBackend(TorchBackend):
    """An actor under DDP. `replica` wraps `model`."""

    replica: DistributedDataParallel
    window: DDPWindow

    @classmethod
    def open(
        cls, spec: ActorSpec, source: ModelSource, world: World, on_progress: OnProgress = ignore_progress
    ) -> Self:
        attention = choose_kernel_name(spec, world.device, source.config)
        compute_dtype = TORCH_DTYPES[spec.dtype]
        has_masters = spec.has_optimizer
        model = build_on_meta(source.config, attention=attention, dtype=torch.float32 if has_masters else compute_dtype)
        kernels = fuse_if_requested(model, spec.kernels, world.device)
        make_trainable(model, source)
        configure_model(model, spec)
        materialise(model, source.weights, world.device, on_progress=on_progress)
        for module in list(model.modules()):
            cast_own_weights(module, compute_dtype)
        if spec.compile is Compile.BLOCKS:
            compile_blocks((block for _, block in find_blocks(model)), lengths=spec.compile_lengths)
        optimizer = make_optimizer(
            spec,
            list_named_parameters(model),
            outer=find_outer_parameters(model),
            groups=source.optimizer_groups,
            state=source.optimizer_state,
        )
        return cls(
            spec=spec,
            model=model,
            replica=DistributedDataParallel(model, gradient_as_bucket_view=True),
            source=source,
            optimizer=optimizer,
            schedule=make_schedule(spec, optimizer) if optimizer else None,
            scaler=torch.amp.GradScaler(world.device.type, enabled=spec.dtype is Dtype.FP16 and has_masters),
            window=DDPWindow(size=spec.resolved_grad_accumulation),
            attention=attention,
            kernels=kernels,
        )

    def forward(self, inputs: ActorInputs, *, train_mode: bool) -> Tensor:
        self.model.train(train_mode)
        with nullcontext() if self.window.is_last_pass else self.replica.no_sync():
            return action_log_probs(self.replica, inputs)

    def skip_passes(self, num_passes: int) -> None:
        self.window.num_backwards += num_passes

    def backward(self, loss: Tensor) -> None:
        # super() without arguments does not work in a dataclass with slots, which is made a second time.
        TorchBackend.backward(self, loss)
        self.window.num_backwards += 1

    def end_window(self, *, step: bool, settings: StepSettings | None = None) -> float:
        self.window.num_backwards = 0
        if self.scaler.is_enabled():
            assert self.optimizer is not None
            self.scaler.unscale_(self.optimizer)
        norm = compute_total_norm(
            [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        )
        step = step and allows_step(settings, norm)
        if step:
            assert self.optimizer is not None
            if settings is not None:
                settings.apply(self.optimizer, self.schedule)
            if settings is not None and settings.clippings:
                clip_gradients([list(self.model.parameters())], settings.clippings)
            elif self.spec.max_norm:
                clip_grads_with_norm_(self.model.parameters(), self.spec.max_norm, norm)
            self.scaler.step(self.optimizer)
        update_scale_and_rate(self.scaler, self.schedule if step else None)
        self.model.zero_grad(set_to_none=True)
        return float(norm)

    def facts(self) -> Mapping[str, str | int]:
        return {
            "backend": self.spec.backend,
            "num_parameters": count_elements(self.model),
            "zero_stage": self.spec.resolved_zero_stage,
            "attention_kernel": self.attention,
            **({"kernels": self.kernels} if self.kernels else {}),
            "optimizer": self.spec.optimizer,
            "reduce_dtype": "fp32" if self.optimizer else self.spec.dtype.value,
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to(TORCH_DTYPES[self.spec.dtype])

    def masters(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if name in names:
                yield name, parameter.detach()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        # Asking for the scale waits for the device.
        scale = self.loss_scale()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield name, undo_loss_scale(parameter.grad, scale)

    def optimizer_states(self, names: Collection[str]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter) if self.optimizer is not None and name in names else None
            if state:
                yield name, {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def save_model(self, folder: Path) -> None:
        write_model(folder, self.source.config, self.spec.dtype, self.model, lambda tensor: tensor)


def cast_own_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Make `module.forward` compute with its own parameters cast to `dtype`.

    The parameters and their gradients keep their dtype: a cast's backward casts back. This is done per module rather
    than once for the model, because a checkpointed block is recomputed in backward, after the model's forward has
    returned.
    """
    names = [name for name, parameter in module.named_parameters(recurse=False) if parameter.dtype != dtype]
    if not names:
        return
    caller = _ForwardCaller(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        cast = {f"module.{name}": module.get_parameter(name).to(dtype) for name in names}
        return functional_call(caller, cast, args, kwargs)

    module.forward = forward


class _ForwardCaller(nn.Module):
    """The module passed to `functional_call`: the original forward, with `module` as a child for parameter swaps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.call = module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)
