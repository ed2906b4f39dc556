"""What actor to build: plain data, no heavy imports, each toggle declared once with its default, help and range."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class UsageError(ValueError):
    """What was asked for makes no sense, or cannot be had here. The message says what to type instead."""


def option(
    default: Any,
    help: str,
    *,
    min: float | None = None,
    max: float | None = None,
    flags: Mapping[str, Any] | None = None,
    named: bool = True,
) -> Any:
    """A dataclass field that is also a command line option.

    `flags` are extra switches that set the field to a fixed value, as {"--compile": Compile.BLOCKS}; with named=False
    they are the only way to set it.
    """
    return field(
        default=default, metadata={"help": help, "min": min, "max": max, "flags": dict(flags or {}), "named": named}
    )


class BackendName(StrEnum):
    DEEPSPEED = "deepspeed"
    FSDP2 = "fsdp2"


class Attention(StrEnum):
    AUTO = "auto"
    FLASH = "flash"
    VARLEN = "varlen"
    SDPA = "sdpa"
    EAGER = "eager"


class Compile(StrEnum):
    OFF = "off"
    BLOCKS = "blocks"
    DEEPCOMPILE = "deepcompile"


class Dtype(StrEnum):
    BF16 = "bf16"
    FP32 = "fp32"
    FP16 = "fp16"


class OptimizerName(StrEnum):
    ADAMW = "adamw"
    SGD = "sgd"
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSpec:
    """How many ranks share one replica of the model: along its layers' weights (tp) and along the sequence (ring)."""

    tp: int = option(1, "Ranks that share each layer's weights (fsdp2).", min=1)
    ring: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorSpec:
    """What to build. Raises UsageError on a combination that makes no sense."""

    backend: BackendName = option(BackendName.DEEPSPEED, "Who shards, reduces and steps.")
    model: str | None = option(
        None,
        "A preset (llama-3.1-8b), a model folder or a config.json. Default: the config beside the inputs.",
    )
    num_layers: int | None = option(None, "Build only the first N transformer layers.", min=1)
    random_weights: bool = option(
        False, "Ignore the weights in the model folder; weights are random where there are none."
    )
    weights_seed: int = option(
        0, "Seed of random weights; a parameter's values depend on it and on its name alone.", min=0
    )
    dtype: Dtype = option(Dtype.BF16, "Compute dtype. Master weights are fp32 whenever there is an optimizer.")
    zero_stage: int | None = option(
        None,
        "What is sharded. deepspeed: 0 nothing, 1 optimizer (default where there is one), 2 + gradients, 3 + weights. "
        "fsdp2: 2 keeps weights gathered between forward and backward, 3 (default) does not.",
        min=0,
        max=3,
    )
    packing: bool = option(True, "Pack a micro-batch's rows into one row without padding.")
    attention: Attention = option(
        Attention.AUTO,
        "Attention kernel. auto: on CUDA flash-attn if installed, else torch's varlen for packed rows; else sdpa.",
        flags={"--flash-attn": Attention.FLASH, "--no-flash-attn": Attention.SDPA},
    )
    compile: Compile = option(
        Compile.OFF,
        "torch.compile each transformer block (--compile), or DeepSpeed's own compiler (--deepcompile).",
        flags={"--compile": Compile.BLOCKS, "--deepcompile": Compile.DEEPCOMPILE},
        named=False,
    )
    gradient_checkpointing: bool = option(False, "Recompute each block's activations in backward.")
    optimizer: OptimizerName = option(
        OptimizerName.ADAMW, "none keeps weights and gradients in the compute dtype, without master weights."
    )
    learning_rate: float = option(1e-6, "Used with --step.", min=0)
    lr_warmup_steps: int = option(
        0, "Steps over which the learning rate rises linearly from 0, as trainers do; constant after them.", min=0
    )
    grad_accumulation: int = option(1, "Passes whose gradients are averaged before a step.", min=1)
    max_norm: float | None = option(None, "Clip the global gradient norm to this before a step.", min=0)
    parallel: ParallelSpec = field(default_factory=ParallelSpec)

    def __post_init__(self) -> None:
        if self.backend is BackendName.FSDP2 and self.zero_stage in (0, 1):
            raise UsageError(
                f"--zero-stage {self.zero_stage} does not exist under fsdp2, which has 2 (keep weights gathered after "
                f"forward) and 3 (reshard). Try: --backend fsdp2 --zero-stage 3, or --backend deepspeed"
            )
        if self.backend is BackendName.FSDP2 and self.compile is Compile.DEEPCOMPILE:
            raise UsageError("--deepcompile belongs to deepspeed. Try: --backend deepspeed --deepcompile, or --compile")
        if self.backend is BackendName.DEEPSPEED and self.parallel.tp > 1:
            raise UsageError(
                f"--tp {self.parallel.tp} is not there for deepspeed. Try: --backend fsdp2 --tp {self.parallel.tp}"
            )
        if self.attention is Attention.VARLEN and not self.packing:
            raise UsageError("--attention varlen reads packed rows. Try: --packing, or --attention sdpa")

    @property
    def resolved_zero_stage(self) -> int:
        if self.zero_stage is not None:
            return self.zero_stage
        if self.backend is BackendName.FSDP2:
            return 3
        return 0 if self.optimizer is OptimizerName.NONE else 1
