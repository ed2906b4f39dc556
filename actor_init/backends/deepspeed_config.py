"""What is asked of DeepSpeed: its config, and what it is not asked for because it has none of it."""

from typing import Any

from actor_init.backends.deepspeed_autotp import autotp_config
from actor_init.spec import ActorSpec, Compile, Dtype, OptimizerName, UsageError
from actor_init.world import World


def refuse(spec: ActorSpec, world: World) -> None:
    """Raises UsageError for what DeepSpeed cannot do."""
    on_cpu = world.device.type == "cpu"
    if on_cpu and spec.dtype is Dtype.FP16:
        raise UsageError("DeepSpeed has no fp16 on a CPU. Try: --dtype bf16, or --backend fsdp2")
    if on_cpu and spec.compile is Compile.DEEPCOMPILE:
        raise UsageError("--deepcompile needs CUDA, and this machine has none. Try: --compile")
    if spec.optimizer is OptimizerName.NONE and spec.resolved_zero_stage:
        raise UsageError(
            f"--optimizer none does not go with --zero-stage {spec.zero_stage}: DeepSpeed's stages 1 to 3 keep fp32 "
            "master weights of their own. Try: --zero-stage 0 --optimizer none, or --backend fsdp2"
        )


def config_of(spec: ActorSpec) -> dict[str, Any]:
    has_masters = spec.optimizer is not OptimizerName.NONE
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": spec.grad_accumulation,
        "gradient_clipping": spec.max_norm or 0.0,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": spec.resolved_zero_stage,
            "memory_efficient_linear": not has_whole_blocks(spec),
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": has_masters and spec.dtype is Dtype.BF16},
        "fp16": {"enabled": has_masters and spec.dtype is Dtype.FP16},
        "compile": {"deepcompile": spec.compile is Compile.DEEPCOMPILE},
        **autotp_config(spec.parallel.tp),
    }


def has_whole_blocks(spec: ActorSpec) -> bool:
    """ZeRO 3's hooks on each submodule would break a compiled block into many graphs: there they go on the block.

    DeepSpeed's own linear function stays away too: it asks for a parameter's number, which makes a graph a layer with
    torch 2.11.
    """
    return spec.compile is Compile.BLOCKS and spec.resolved_zero_stage == 3
