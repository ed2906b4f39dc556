"""Run the actor under FSDP2: `fully_shard` on every block, embedding, head and the root."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from actor_init.action_log_probs import action_log_probs
from actor_init.attention.kernel_choice import choose_kernel_name
from actor_init.attention.ring_attention import check_ring
from actor_init.attention.ring_split import check_head_stride
from actor_init.backends.fsdp2_one_rank import spare_one_rank
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
from actor_init.parallel.tensor_parallel import check_divisible, check_sequence, shard_block, shard_root
from actor_init.parallel.tp_plan import SplitPlan, find_plan
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
from actor_init.spec import ActorSpec, Compile, CompileLengths, Dtype, UsageError
from actor_init.weights import OnProgress, ignore_progress
from actor_init.world import World
from capture.facts import Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDP2Backend(TorchBackend):
    """An actor under FSDP2. `num_parameters` are those of the whole model; `tp_plan` is None without tp."""

    num_parameters: int
    tp_plan: SplitPlan | None

    @classmethod
    def open(
        cls, spec: ActorSpec, source: ModelSource, world: World, on_progress: OnProgress = ignore_progress
    ) -> Self:
        """Open the actor: build on the meta device, plan tp, compile each block, fill and shard it, make the optimizer.

        Blocks are moved to the device and sharded one by one, so there is never a second full copy of the model.
        """
        check_streams(world.device)
        check_head_stride(source.config, spec.parallel)
        attention = choose_kernel_name(spec, world.device, source.config)
        compute_dtype = TORCH_DTYPES[spec.dtype]
        has_masters = spec.has_optimizer
        model = build_on_meta(source.config, attention=attention, dtype=torch.float32 if has_masters else compute_dtype)
        kernels = fuse_if_requested(model, spec.kernels, world.device)
        make_trainable(model, source)
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32 if has_masters else compute_dtype
        )
        blocks = find_blocks(model)
        plan = find_plan(model, spec.parallel.tp_plan, spec.parallel.tp) if spec.parallel.tp > 1 else None
        if plan and not plan.gathered:
            check_divisible(source.config, spec.parallel.tp)
        if plan and spec.parallel.sequence_parallel:
            check_sequence(model, plan, packing=spec.packs)
        configure_model(model, spec)
        if spec.compile is Compile.BLOCKS:
            # With DTensors sharded along the sequence, a graph for any length raises InductorError (torch 2.13).
            lengths = CompileLengths.STATIC if spec.parallel.sequence_parallel else spec.compile_lengths
            compile_blocks((block for _, block in blocks), lengths=lengths)
        for name, block in blocks:
            materialise(model, source.weights, world.device, prefix=name, on_progress=on_progress)
            if plan:
                shard_block(
                    block,
                    name,
                    plan,
                    world.weights_mesh["tp"],
                    sequence=spec.parallel.sequence_parallel,
                    checkpoints=spec.gradient_checkpointing,
                )
            fully_shard(
                block,
                mesh=world.weights_mesh["shard"],
                mp_policy=policy,
                reshard_after_forward=spec.resolved_zero_stage == 3,
            )
        materialise(model, source.weights, world.device, on_progress=on_progress)
        if plan:
            shard_root(model, world.weights_mesh["tp"], sequence=spec.parallel.sequence_parallel)
        _shard_rest(model, world.weights_mesh["shard"], policy, reshards=spec.resolved_zero_stage == 3)
        if world.weights_mesh["shard"].size() == 1:
            spare_one_rank(model, world.device)
        if spec.parallel.ring > 1:
            check_ring(model.eval(), source.config, compute_dtype, world.device)
            for module in model.modules():
                # check_ring runs a forward alone. The backward that would reshard the modules does not come.
                if isinstance(module, FSDPModule):
                    module.reshard()
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
            source=source,
            optimizer=optimizer,
            schedule=make_schedule(spec, optimizer) if optimizer else None,
            scaler=torch.amp.GradScaler(world.device.type, enabled=spec.dtype is Dtype.FP16 and has_masters),
            attention=attention,
            kernels=kernels,
            num_parameters=count_elements(model),
            tp_plan=plan,
        )

    def forward(self, inputs: ActorInputs, *, train_mode: bool) -> Tensor:
        self.model.train(train_mode)
        head = self.model.get_output_embeddings() if isinstance(self.model, PreTrainedModel) else None
        # In training the head stays gathered after forward: backward needs it first, and would wait for it.
        if isinstance(head, FSDPModule):
            head.set_reshard_after_forward(self.spec.resolved_zero_stage == 3 and not train_mode, recurse=False)
        return action_log_probs(self.model, inputs)

    def end_window(self, *, step: bool, settings: StepSettings | None = None) -> float:
        if self.scaler.is_enabled():
            assert self.optimizer is not None
            self.scaler.unscale_(self.optimizer)
        groups = group_parameters_by_mesh(self.model)
        norms = [_compute_norm(parameters) for parameters in groups]
        norm = torch.stack(norms).norm().float()
        step = step and allows_step(settings, norm)
        if step:
            assert self.optimizer is not None
            if settings is not None:
                settings.apply(self.optimizer, self.schedule)
                clip_gradients(groups, settings.clippings)
            with ChangesShards():
                for parameters in groups:
                    if self.spec.max_norm and not (settings is not None and settings.clippings):
                        # Torch scales DTensors one by one unless it is told otherwise.
                        clip_grads_with_norm_(parameters, self.spec.max_norm, norm, foreach=True)
                self.scaler.step(self.optimizer)
        update_scale_and_rate(self.scaler, self.schedule if step else None)
        self.model.zero_grad(set_to_none=True)
        return float(norm)

    def facts(self) -> Mapping[str, str | int]:
        return {
            "backend": self.spec.backend,
            "num_parameters": self.num_parameters,
            "zero_stage": self.spec.resolved_zero_stage,
            "reshard_after_forward": str(self.spec.resolved_zero_stage == 3),
            "attention_kernel": self.attention,
            **({"kernels": self.kernels} if self.kernels else {}),
            "optimizer": self.spec.optimizer,
            "reduce_dtype": "fp32" if self.optimizer else self.spec.dtype.value,
            **({"tp_plan": self.tp_plan.origin} if self.tp_plan else {}),
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, _gather_whole(parameter.detach()).to(TORCH_DTYPES[self.spec.dtype])

    def masters(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if name in names:
                yield name, _gather_whole(parameter).detach()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        # Asking for the scale waits for the device.
        scale = self.loss_scale()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield name, undo_loss_scale(_gather_whole(parameter.grad), scale)

    def optimizer_states(self, names: Collection[str]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter) if self.optimizer is not None and name in names else None
            if state:
                yield name, {key: _gather_whole(value) for key, value in state.items() if isinstance(value, Tensor)}

    def save_model(self, folder: Path) -> None:
        write_model(folder, self.source.config, self.spec.dtype, self.model, _gather_whole)


def _shard_rest(model: PreTrainedModel, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshards: bool) -> None:
    """Shard what is outside of the blocks. `reshards`: after forward, as the blocks do."""
    embedding, head = find_embedding_and_head(model)
    # By torch's default, which is another value before 2.8, the root stays gathered: backward needs it first.
    default = signature(fully_shard).parameters["reshard_after_forward"].default
    root_rule = default if reshards else False
    for module, rule in ((embedding, reshards), (head, root_rule), (model, root_rule)):
        if module is not None:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=rule)


def find_embedding_and_head(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the modules that are sharded by themselves, as they are large; (None, None) if one weight serves both.

    One group of them and the root would be gathered, and have its gradients reduced, as a whole: for Llama 3.1 8B,
    where both are an eighth of the parameters, 2 GiB more at the end of backward. A module of another class may be
    asked for its weight without being called, and stays in the root's group; so do those of a user's model, which
    does not name them.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if type(head) is not nn.Linear:
        return None, None
    assert isinstance(model, PreTrainedModel)
    embedding = model.get_input_embeddings()
    is_apart = type(embedding) is nn.Embedding and embedding.weight is not head.weight
    return (embedding, head) if is_apart else (None, None)


def check_streams(device: torch.device) -> None:
    """Raise UsageError on a CPU whose streams lack what `fully_shard` calls, as in torch 2.6."""
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        backend, why = Setting("backend"), f"on a CPU needs a later torch than {torch.__version__}, as 2.8"
        raise UsageError(
            backend.with_value("fsdp2"), why, f"Try: {backend.with_value('ddp')}, or {backend.with_value('deepspeed')}"
        )


def _gather_whole(tensor: Tensor) -> Tensor:
    """Return the whole of a parameter, its gradient or its state. All ranks of its mesh must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    # One rank holds the whole. A collective of it alone would cost each parameter of each pass several times as much.
    return tensor.to_local() if tensor.device_mesh.size() == 1 else tensor.full_tensor()


def group_parameters_by_mesh(model: PreTrainedModel) -> list[list[nn.Parameter]]:
    """Group trained parameters by mesh, data ranks or also tp: torch's foreach operations take one mesh at a time."""
    groups: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        sharded: Any = parameter
        assert isinstance(sharded, DTensor)
        groups.setdefault(sharded.device_mesh, []).append(parameter)
    return list(groups.values())


def _compute_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the norm of the gradients of parameters on one mesh: each shard counts once, and replicas count once."""
    gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and gradients[0].device_mesh.size() == 1:
        # Each operation on a DTensor takes longer than its arithmetic, and one rank holds the whole.
        gradients = [gradient.to_local() for gradient in gradients]
    norm = compute_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class ChangesShards(TorchDispatchMode):
    """Within it, an optimizer that changes lists of DTensors in place changes the shards of this rank.

    Parameter, gradient and state are sharded alike, and the change of an element is of that element alone. To find how
    the results are sharded takes DTensor, once for each such operation, as long as many steps take.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        is_in_place = func._schema.is_mutable and name.startswith(("aten::_foreach_", "aten::_fused_"))
        # Adam divides by square roots and drops them. Other results may stay in a state, and have to be DTensors.
        if is_in_place or name == "aten::_foreach_sqrt":
            args = tuple(list(map(_take_shard, value)) if isinstance(value, list) else value for value in args)
        return func(*args, **(kwargs or {}))


def _take_shard(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
