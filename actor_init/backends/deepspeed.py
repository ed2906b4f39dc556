"""Run the actor under a DeepSpeed engine, ZeRO stages 0 to 3."""

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from actor_init.action_log_probs import action_log_probs
from actor_init.adapters import list_trained_parameters
from actor_init.attention.kernel_choice import choose_kernel_name
from actor_init.attention.ring_attention import check_ring
from actor_init.attention.ring_split import check_head_stride
from actor_init.backends.deepspeed_autotp import (
    check_autotp,
    compute_norm_over_tp,
    gather_over_tp,
    list_split_linears,
    mark_split_gradients,
)
from actor_init.compiling import compile_blocks
from actor_init.declarations.backends.deepspeed import is_partitioned_over
from actor_init.declarations.backends.deepspeed_config import build_config, has_block_hooks
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
from actor_init.saving.state_file import SavedState
from actor_init.schedule_and_norm import (
    TORCH_DTYPES,
    Progress,
    StepSettings,
    allows_step,
    compute_total_norm,
    count_state_bytes,
    load_schedule,
    make_schedule,
    undo_loss_scale,
)
from actor_init.spec import ActorSpec, Compile, UsageError
from actor_init.weights import OnProgress, ignore_progress
from actor_init.world import World
from capture.facts import Setting

# DeepSpeed's name of the only checkpoint in a state folder.
STATE_TAG = "state"
CONVERTER = "deepspeed.checkpoint.ds_to_universal"


@dataclass(slots=True)
class StepGate:
    """Say whether the optimizer's step does anything.

    settings  of the step; None: as the spec says
    engine    whose optimizer knows the gradient's norm when it steps; None: it is not there yet
    """

    is_open: bool = False
    settings: StepSettings | None = None
    engine: Any = None

    @property
    def lets_through(self) -> bool:
        norm = getattr(getattr(self.engine, "optimizer", None), "_global_grad_norm", None)
        return self.is_open and allows_step(self.settings, norm)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedBackend:
    """An actor under DeepSpeed's engine.

    `engine.step` is called at the end of every window: it computes the norm and clears every gradient buffer. Without
    --step the optimizer inside it is blocked, so that weights and moments do not change.

    engine    deepspeed.DeepSpeedEngine
    schedule  the replay's; the engine's would advance without an optimizer step
    kernels   what was fused; None: nothing
    config    as passed to DeepSpeed
    """

    spec: ActorSpec
    source: ModelSource
    engine: Any
    gate: StepGate
    schedule: LambdaLR
    attention: str
    kernels: str | None
    num_parameters: int
    config: Mapping[str, Any]

    @classmethod
    def open(
        cls, spec: ActorSpec, source: ModelSource, world: World, on_progress: OnProgress = ignore_progress
    ) -> Self:
        """Open the actor: build it on the meta device, compile each block, fill and partition weights, start DeepSpeed.

        Under ZeRO 3 and AutoTP blocks are moved to the device and partitioned one by one, so there is never a second
        full copy of the model. Raises UsageError for what DeepSpeed cannot do.
        """
        check_head_stride(source.config, spec.parallel)
        os.environ.setdefault("DS_ACCELERATOR", world.device.type)
        import deepspeed

        attention = choose_kernel_name(spec, world.device, source.config)
        config = build_config(spec)
        model = build_on_meta(source.config, attention=attention, dtype=TORCH_DTYPES[spec.dtype])
        kernels = fuse_if_requested(model, spec.kernels, world.device)
        make_trainable(model, source)
        check_autotp(model, spec.parallel.tp)
        num_elements = count_elements(model)
        blocks = find_blocks(model)
        configure_model(model, spec)
        if spec.compile is Compile.BLOCKS:
            compile_blocks((block for _, block in blocks), lengths=spec.compile_lengths)
        if has_block_hooks(spec):
            deepspeed.utils.set_z3_leaf_modules(model, {type(block) for _, block in blocks})
        # On a CPU DeepSpeed would build a shared-memory operator that only inference uses. That takes 30 s, and needs a
        # C++ compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)
        for name, block in [*blocks, ("", model)]:
            materialise(model, source.weights, world.device, prefix=name, on_progress=on_progress)
            _partition(_list_modules_to_partition(spec, model, name, block), config, TORCH_DTYPES[spec.dtype])
        gate = StepGate()
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list_trained_parameters(model),
            optimizer=_make_gated_optimizer(spec, model, source, gate),
            config=config,
            dist_init_required=False,
        )
        gate.engine = engine
        # The modules that AutoTP replaced are in reference cycles, and hold their weights until they are collected.
        gc.collect()
        if spec.compile is Compile.DEEPCOMPILE:
            _compile_deep(engine, spec.resolved_zero_stage)
        if spec.parallel.ring > 1:
            engine.eval()
            check_ring(engine, source.config, TORCH_DTYPES[spec.dtype], world.device)
        return cls(
            spec=spec,
            source=source,
            engine=engine,
            gate=gate,
            schedule=make_schedule(spec, engine.basic_optimizer),
            attention=attention,
            kernels=kernels,
            num_parameters=num_elements,
            config=config,
        )

    def forward(self, inputs: ActorInputs, *, train_mode: bool) -> Tensor:
        self.engine.train(train_mode)
        return action_log_probs(self.engine, inputs)

    def skip_passes(self, num_passes: int) -> None:
        # The engine ends a window where its count of passes is a multiple.
        self.engine.micro_steps += num_passes

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)
        # Within a window the engine's step only counts the micro-batch.
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def end_window(self, *, step: bool, settings: StepSettings | None = None) -> float:
        if self.spec.parallel.tp > 1:
            mark_split_gradients(self.engine.module)
        norm = self._norm_of_plain_gradients()
        step = step and allows_step(settings, norm)
        if step and settings is not None:
            settings.apply(self.engine.basic_optimizer, self.schedule)
        self.gate.is_open, self.gate.settings = step, settings
        self.engine.step()
        norm = self.engine.get_global_grad_norm() if norm is None else norm
        if step and self.engine.was_step_applied() and allows_step(settings, norm):
            self.schedule.step()
        return float(norm)

    def _norm_of_plain_gradients(self) -> Tensor | None:
        """Return the norm where the engine computes none: stage 0 in fp32, or without an optimizer."""
        if self.engine.zero_optimization_stage() or self.engine.bfloat16_enabled() or self.engine.fp16_enabled():
            return None
        model: PreTrainedModel = self.engine.module
        if self.spec.parallel.tp > 1:
            return compute_norm_over_tp(model, self.engine.mpu.get_model_parallel_group())
        return compute_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])

    def facts(self) -> Mapping[str, str | int]:
        return {
            "backend": self.spec.backend,
            "num_parameters": self.num_parameters,
            "zero_stage": self.engine.zero_optimization_stage(),
            "attention_kernel": self.attention,
            **({"kernels": self.kernels} if self.kernels else {}),
            "optimizer": self.spec.optimizer,
            "engine_optimizer": type(self.engine.optimizer).__name__,
            "zero3_leaf_modules": "blocks" if has_block_hooks(self.spec) else "none",
            **({"tp_plan": "AutoTP"} if self.spec.parallel.tp > 1 else {}),
            # The config is recorded because the file may change. "auto" is replaced by the option's value.
            **({"deepspeed_config": json.dumps(self.config)} if self.spec.deepspeed_config else {}),
        }

    @property
    def model(self) -> PreTrainedModel:
        return self.engine.module

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return gather_weights(self.model)

    def masters(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        return gather_masters(self.model, names)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return gather_gradients(self.model, self.loss_scale())

    def optimizer_states(self, names: Collection[str]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        # DeepSpeed's partitions hold a state from the first step on.
        if self.schedule.last_epoch:
            yield from gather_optimizer_states(self.engine, names)

    def loss_scale(self) -> float:
        return float(self.engine.optimizer.loss_scale) if self.engine.fp16_enabled() else 1.0

    def save_model(self, folder: Path) -> None:
        write_model(folder, self.source.config, self.spec.dtype, self.model, gather_whole)

    def save_state(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag=STATE_TAG, client_state={"schedule": self.schedule.state_dict()})

    def load_state(self, folder: Path) -> None:
        if is_partitioned_over(SavedState.read(folder), torch.distributed.get_world_size()):
            _, client_state = self.engine.load_checkpoint(str(folder), tag=STATE_TAG)
        else:
            with convert_to_universal(folder / STATE_TAG) as converted:
                # This is what "load_universal" in the config sets.
                self.engine._config.load_universal_checkpoint = True
                _, client_state = self.engine.load_checkpoint(str(converted.parent), tag=converted.name)
        load_schedule(self.schedule, client_state["schedule"])

    def progress(self) -> Progress:
        return Progress.from_schedule(self.schedule)

    def count_state_bytes(self) -> int:
        return count_state_bytes(self.engine.basic_optimizer)

    def close(self) -> None:
        self.engine.destroy()
        _restore_linear()
        if self.spec.resolved_zero_stage == 3:
            _forget_modules()


def _restore_linear() -> None:
    """Undo what ZeRO 3 does to torch.nn.functional.linear: DeepSpeed leaves its own function there for good.

    Later replays in this process would compute with it, under every backend.
    """
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    nn.functional.linear = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", nn.functional.linear)


def _forget_modules() -> None:
    """Empty what DeepSpeed's ZeRO 3 keeps for good, and with it models: modules whose forward did not end, and a cache.

    Seen with DeepSpeed 0.19; no issue of DeepSpeed's was found for it.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    getattr(parameter_offload, "FWD_MODULE_STACK", []).clear()
    for method in vars(PartitionedParameterCoordinator).values():
        for wrapped in (method, *(cell.cell_contents for cell in getattr(method, "__closure__", None) or ())):
            if hasattr(wrapped, "cache_clear"):
                wrapped.cache_clear()


def _list_modules_to_partition(
    spec: ActorSpec, model: PreTrainedModel, name: str, module: nn.Module
) -> Iterable[nn.Module]:
    """Return what is partitioned over all ranks once `module` is on the device.

    Under ZeRO 3, all of it. Otherwise what AutoTP will split: it gathers one weight after the other and keeps this
    rank's part as an ordinary parameter, so a device holds its part of the model at most twice.
    """
    if spec.resolved_zero_stage == 3:
        return [module]
    return list(list_split_linears(model, name)) if spec.parallel.tp > 1 else []


def _partition(modules: Iterable[nn.Module], config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Partition modules, which are on the device, over all ranks, as ZeRO 3 does under any stage."""
    import deepspeed

    for module in modules:
        deepspeed.zero.Init(
            module=module,
            config_dict_or_path={**config, "zero_optimization": config["zero_optimization"] | {"stage": 3}},
            dtype=dtype,
        )


def _compile_deep(engine: Any, zero_stage: int) -> None:
    """Turn DeepCompile on. Raises UsageError if DeepSpeed does not."""
    engine.compile()
    if not engine.is_deepcompile_active():
        why = f"declined DeepCompile for ZeRO stage {zero_stage} and would run plain torch.compile instead"
        advice = f"Try: {Setting('zero_stage', 1)} or 3, or {Setting('compile', Compile.BLOCKS)}"
        raise UsageError("DeepSpeed", why, advice)


def _make_gated_optimizer(
    spec: ActorSpec, model: nn.Module, source: ModelSource, gate: StepGate
) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """Return an optimizer factory for deepspeed.initialize whose step does nothing while `gate` is closed."""

    def build(parameters: Iterable[nn.Parameter]) -> Optimizer:
        given = list(parameters)
        # By now DeepSpeed's tensor parallelism has put its own parameters in place of the model's.
        names = {id(parameter): name for name, parameter in list_named_parameters(model)}
        outer = find_outer_parameters(model)
        named = [(names[id(parameter)], parameter) for parameter in given]
        optimizer = make_optimizer(
            spec, named, outer=outer, groups=source.optimizer_groups, state=source.optimizer_state
        )
        optimizer = optimizer or torch.optim.SGD(given, lr=0.0)
        step = type(optimizer).step

        def step_if_open(self: Any, closure: Any = None) -> Any:
            return step(self, closure) if gate.lets_through else None

        optimizer.step = MethodType(step_if_open, optimizer)  # type: ignore[method-assign]
        return optimizer

    return build


def gather_whole(tensor: Tensor) -> Tensor:
    """Return a whole copy of a parameter or buffer. All ranks must call this."""
    import deepspeed

    # Only parameters under stage 3 have an id of DeepSpeed's.
    is_partitioned = hasattr(tensor, "ds_id")
    with deepspeed.zero.GatheredParameters([tensor]) if is_partitioned else nullcontext():
        return gather_over_tp(tensor, tensor)


def gather_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, gather_whole(parameter)


def gather_masters(model: nn.Module, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters from the fp32 partitions that the optimizer steps; those that it has no copy of as they are."""
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in model.named_parameters():
        if name in names:
            master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
            yield name, gather_whole(parameter) if master is None else gather_over_tp(parameter, master)


def gather_gradients(model: nn.Module, loss_scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield gradients as reduced and averaged; parameters without one are skipped."""
    from deepspeed.utils import safe_get_full_grad

    for name, parameter in model.named_parameters():
        gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
        if gradient is not None:
            yield name, undo_loss_scale(gather_over_tp(parameter, gradient), loss_scale)


def gather_optimizer_states(engine: Any, names: Collection[str]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yield what the optimizer holds of these parameters, whole; nothing at stage 0 in half precision.

    Where a rank lacks a state of its part, that state is left out on all ranks: gathering it would never end.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    named = [
        (name, parameter)
        for name, parameter in engine.module.named_parameters()
        if name in names and parameter.requires_grad
    ]
    _link_optimizer_states(engine.optimizer)
    rank_keys: list[dict[str, list[str] | None]] = [{}] * dist.get_world_size()
    dist.all_gather_object(rank_keys, {name: _list_partitioned_states(parameter) for name, parameter in named})
    for name, parameter in named:
        if not hasattr(parameter, "ds_id") and not hasattr(parameter, "_hp_mapping"):
            state = engine.basic_optimizer.state.get(parameter, {})
            whole = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        else:
            held = [set(keys) for keys_of in rank_keys if (keys := keys_of[name]) is not None]
            keys = sorted(set.intersection(*held)) if held else []
            whole = {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
        if whole:
            yield name, {key: gather_over_tp(parameter, value) if value.ndim else value for key, value in whole.items()}


def _link_optimizer_states(optimizer: Any) -> None:
    """Let parameters find their states in DeepSpeed's flat partitions, as they are now, under ZeRO 1 and 2.

    DeepSpeed links them once, and too early where the optimizer has several groups: it steps one group at a time, and
    links all of them after the first, when the others hold nothing. Loading a checkpoint takes the links away.
    """
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _list_partitioned_states(parameter: Any) -> list[str] | None:
    """List the states of a parameter that this rank holds a part of; None where it holds no part of the parameter.

    A state of another size than its partition is of no single element, as a count of steps.
    """
    if hasattr(parameter, "ds_id"):
        zero = parameter._z3_optimizer
        number, _, _ = zero.grad_position[zero.get_param_id(parameter)]
        partition = zero.fp32_partitioned_groups_flat[number]
        state = zero.optimizer.state.get(partition, {})
        return [key for key, value in state.items() if isinstance(value, Tensor) and value.shape == partition.shape]
    mapping = getattr(parameter, "_hp_mapping", None)
    return None if mapping is None else mapping.get_optim_state_keys()


@contextmanager
def convert_to_universal(checkpoint: Path) -> Iterator[Path]:
    """Yield a universal copy of the folder `checkpoint`, which exists while it is loaded. All ranks must enter.

    It is created beside the state's own folder, where every rank sees it, and needs as much disk space. Raises
    RuntimeError if DeepSpeed's converter, a separate program, fails.
    """
    home = checkpoint.parent
    converted = home.parent / f".{home.name}.universal" / checkpoint.name
    problems: list[str | None] = [None]
    try:
        if dist.get_rank() == 0:
            problems = [_convert(checkpoint, converted)]
        dist.broadcast_object_list(problems, src=0)
        if problems[0] is not None:
            raise RuntimeError(f"DeepSpeed could not convert {home} for another number of ranks: {problems[0]}")
        yield converted
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(converted.parent, ignore_errors=True)


def _convert(checkpoint: Path, converted: Path) -> str | None:
    """Return why the conversion failed, None if it did not."""
    folders = ["--input_folder", str(checkpoint), "--output_folder", str(converted)]
    # With more than one worker the converter starts process pools.
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    process = subprocess.run(
        [sys.executable, "-m", CONVERTER, *folders, *workers, "--inject_missing_state"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "\n".join(process.stderr.strip().splitlines()[-1:]) if process.returncode else None
