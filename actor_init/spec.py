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
    DDP = "ddp"


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


class PadTo(StrEnum):
    OWN = "own"
    LONGEST = "longest"


class OptimizerName(StrEnum):
    ADAMW = "adamw"
    SGD = "sgd"
    NONE = "none"


class TpPlan(StrEnum):
    AUTO = "auto"
    MODEL = "model"
    BUILTIN = "builtin"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSpec:
    """How many ranks share one replica of the model: along its layers' weights (tp) and along the sequence (ring)."""

    tp: int = option(1, "Ranks that share each layer's weights.", min=1)
    ring: int = option(1, "Ranks that share each packed row's tokens, and exchange keys and values.", min=1)
    ring_head_stride: int | None = option(
        None,
        "Key-value heads that ring attention gathers at once. Default: all of a rank's; 1 takes the least memory.",
        min=1,
    )
    tp_plan: TpPlan = option(
        TpPlan.AUTO,
        "Which layers --tp splits how (fsdp2). model: transformers' plan for the model; builtin: ours for Llama, Qwen "
        "and Gemma, and for models built like Llama; auto: the model's own if it is complete, else ours.",
    )
    sequence_parallel: bool = option(False, "Shard norms and residuals along the sequence over --tp (fsdp2).")

    def __post_init__(self) -> None:
        if self.tp == 1 and self.sequence_parallel:
            raise UsageError("--sequence-parallel shards over the ranks of --tp. Try: --tp 2 --sequence-parallel")
        if self.ring == 1 and self.ring_head_stride is not None:
            stride = self.ring_head_stride
            raise UsageError(f"--ring-head-stride is a setting of --ring. Try: --ring 2 --ring-head-stride {stride}")
        if self.tp == 1 and self.tp_plan is not TpPlan.AUTO:
            raise UsageError(f"--tp-plan {self.tp_plan} is a plan for --tp. Try: --tp 2 --tp-plan {self.tp_plan}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorSpec:
    """What to build. Raises UsageError on a combination that makes no sense."""

    backend: BackendName = option(
        BackendName.DEEPSPEED,
        "Who shards, reduces and steps. ddp: torch's, and nobody shards: to hold the others against.",
    )
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
        "fsdp2: 2 keeps weights gathered between forward and backward, 3 (default) does not. ddp: nothing ever.",
        min=0,
        max=3,
    )
    packing: bool = option(True, "Pack a micro-batch's rows into one row without padding.")
    pad_to: PadTo = option(
        PadTo.OWN,
        "longest: pad to the longest row that any data rank has in this pass, as trainers that need equal shapes do.",
    )
    attention: Attention = option(
        Attention.AUTO,
        "Attention kernel. auto: on CUDA flash-attn if installed, else torch's varlen for packed rows; "
        "else, and in fp32, sdpa. With --ring: ring-flash-attn, else sdpa over gathered keys.",
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
        if self.backend is BackendName.DDP:
            self._refuse_sharding()
        if self.backend is not BackendName.DEEPSPEED and self.compile is Compile.DEEPCOMPILE:
            raise UsageError("--deepcompile belongs to deepspeed. Try: --backend deepspeed --deepcompile, or --compile")
        if self.backend is BackendName.DEEPSPEED and self.parallel.sequence_parallel:
            raise UsageError("--sequence-parallel is not there for deepspeed. Try: --backend fsdp2")
        if self.backend is BackendName.DEEPSPEED and self.parallel.tp_plan is not TpPlan.AUTO:
            raise UsageError(f"--tp-plan {self.parallel.tp_plan} is fsdp2's. Try: --backend fsdp2, or no --tp-plan")
        if self.parallel.ring > 1 and not self.packing:
            raise UsageError(
                f"--ring {self.parallel.ring} slices packed rows, and --no-packing leaves none. "
                f"Try: --ring {self.parallel.ring} --packing, or --no-packing without --ring"
            )
        if self.parallel.ring > 1 and self.attention in (Attention.VARLEN, Attention.EAGER):
            raise UsageError(
                f"--attention {self.attention} has no ring. Try: --ring {self.parallel.ring} --attention flash, or sdpa"
            )
        if self.attention is Attention.VARLEN and not self.packing:
            raise UsageError("--attention varlen reads packed rows. Try: --packing, or --attention sdpa")

    def _refuse_sharding(self) -> None:
        asked = {
            f"--zero-stage {self.zero_stage}": self.zero_stage is not None,
            f"--tp {self.parallel.tp}": self.parallel.tp > 1,
            f"--ring {self.parallel.ring}": self.parallel.ring > 1,
        }
        for typed, is_given in asked.items():
            if is_given:
                raise UsageError(
                    f"{typed} shards, and under ddp every rank holds the whole model and its own inputs. "
                    f"Try: --backend fsdp2 {typed}, or --backend ddp alone"
                )

    @property
    def resolved_zero_stage(self) -> int:
        if self.zero_stage is not None:
            return self.zero_stage
        if self.backend is BackendName.DDP:
            return 0
        if self.backend is BackendName.FSDP2:
            return 3
        return 0 if self.optimizer is OptimizerName.NONE else 1
