"""Specify the actor to build: plain data, no heavy imports; each option declares its default, help and range once."""

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from actor_init.declarations.attention import ATTENTION_VALUES, KERNELS, find_kernel
from actor_init.declarations.attention.declaration import AttentionKernel
from actor_init.declarations.backends import BACKENDS, DEFAULT, find_backend_declaration, find_backends
from actor_init.declarations.backends.declaration import BackendDeclaration
from actor_init.declarations.optimizers import (
    OPTIMIZERS,
    find_optimizer,
    find_optimizers_with,
    list_optimizer_values,
)
from actor_init.option_values import (
    Attention,
    Compile,
    CompileLengths,
    Dtype,
    Head,
    Kernels,
    OptimizerName,
    PadTo,
    Routing,
    TpPlan,
    UsageError,
    option,
)
from capture.facts import Setting

PAD_TOKENS = re.compile(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*")
USER_FUNCTION = re.compile(r"(.+\.py):(\w+)")
# Settings of a step beside the learning rate. Each family of optimizers takes some of them.
STEP_SETTINGS = ("weight_decay", "beta1", "beta2", "eps", "momentum")
PACKED, PADDED = Setting("packing", True), Setting("packing", False)
SEQUENCE_PARALLEL = Setting("sequence_parallel", True)
RANDOM_WEIGHTS = Setting("random_weights", True)

__all__ = [
    "ActorSpec",
    "Attention",
    "Compile",
    "CompileLengths",
    "Dtype",
    "Head",
    "Kernels",
    "OptimizerName",
    "PadTo",
    "ParallelSpec",
    "Routing",
    "TpPlan",
    "UsageError",
    "option",
]


def _find_backends_with_option(field_name: str) -> list[str]:
    """Return the backends that take an option that not every one has."""
    return find_backends(lambda declaration: field_name in declaration.exclusive_options)


def _find_backends_with_compiler(compiler: Compile) -> list[str]:
    return find_backends(lambda declaration: compiler in declaration.compilers)


def _backend_help() -> str:
    sentences = [f"{name}: {declaration.help}." for name, declaration in BACKENDS.items() if declaration.help]
    return " ".join(["Who shards, reduces and steps.", *sentences])


def _stages_help() -> str:
    sentences = [f"{name}: {declaration.stages_help}." for name, declaration in BACKENDS.items()]
    return " ".join(["What is sharded.", *sentences])


def _tp_plan_help() -> str:
    backends = ", ".join(_find_backends_with_option("tp_plan"))
    return (
        f"Which layers --tp splits how ({backends}). model: transformers' plan for the model; "
        "builtin: ours for Llama, Qwen and Gemma, and for models built like Llama; auto: the model's own if it is "
        "complete, else ours."
    )


def _sequence_parallel_help() -> str:
    backends = ", ".join(_find_backends_with_option("sequence_parallel"))
    return f"Shard norms and residuals along the sequence over --tp ({backends})."


def _optimizer_help() -> str:
    sentences = [f"{value}: {family.help}." for value, family in OPTIMIZERS.items() if family.help]
    none = "none keeps weights and gradients in the compute dtype, without master weights."
    auto = "auto: the job's where its steps are followed (--step), else adamw."
    return " ".join([auto, *sentences, none, "FILE.py:function: your own (docs/replay.md)."])


def _list_optimizer_forms() -> str:
    return "|".join([OptimizerName.AUTO, *list_optimizer_values(), "FILE.py:function"])


def _setting_help(name: str) -> str:
    """Return the families that an option is a setting of, and what each takes where it is not given."""
    owners_by_default: dict[str, list[str]] = {}
    for owner in find_optimizers_with(name):
        for setting in find_optimizer(owner).settings:
            if name in setting.options:
                default = setting.default[setting.options.index(name)] if setting.options[1:] else setting.default
                owners_by_default.setdefault("none" if default is None else f"{default:g}", []).append(owner)
    defaults = "; ".join(f"{default} for {', '.join(owners)}" for default, owners in owners_by_default.items())
    return f"Default: the job's in each step, as --learning-rate; else {defaults}."


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSpec:
    """The ranks that share one replica of the model: over its layers' weights (tp) and over the sequence (ring)."""

    tp: int = option(1, "Ranks that share each layer's weights.", min=1, brief="Ranks that share each layer's weights.")
    ring: int = option(
        1,
        "Ranks that share each packed row's tokens, and exchange keys and values.",
        min=1,
    )
    ring_head_stride: int | None = option(
        None,
        "Key-value heads that ring attention gathers at once. Default: all of a rank's; 1 takes the least memory.",
        min=1,
    )
    tp_plan: TpPlan = option(TpPlan.AUTO, _tp_plan_help)
    sequence_parallel: bool = option(False, _sequence_parallel_help)

    def __post_init__(self) -> None:
        tp, ring = Setting("tp"), Setting("ring")
        if self.tp == 1 and self.sequence_parallel:
            why, advice = f"shards over the ranks of {tp}", f"Try: {tp.with_value(2)} {SEQUENCE_PARALLEL}"
            raise UsageError(SEQUENCE_PARALLEL, why, advice)
        if self.ring == 1 and self.ring_head_stride is not None:
            stride = Setting("ring_head_stride")
            advice = f"Try: {ring.with_value(2)} {stride.with_value(self.ring_head_stride)}"
            raise UsageError(stride, f"is a setting of {ring}", advice)
        if self.tp == 1 and self.tp_plan is not TpPlan.AUTO:
            setting = Setting("tp_plan", self.tp_plan)
            raise UsageError(setting, f"is a plan for {tp}", f"Try: {tp.with_value(2)} {setting}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorSpec:
    """The actor to build. Raises UsageError for options that contradict each other."""

    backend: str = option(DEFAULT, _backend_help, choices=BACKENDS, brief="Who shards, reduces and steps.")
    model: str | None = option(
        None,
        "A preset (llama-3.1-8b), a model folder, an id of the Hugging Face Hub, a config.json, a folder of captures, "
        "or FILE.py:function, which returns a module of your own. Default: the config beside the inputs.",
        metavar="NAME|PATH",
        brief="Default: the config beside the inputs.",
    )
    weights: Path | None = option(
        None, "A safetensors or torch checkpoint, file or folder, for --model FILE.py:function.", metavar="PATH"
    )
    blocks: str | None = option(
        None, "The list of layers in the model of FILE.py:function. Default: its longest ModuleList."
    )
    adapter: str | None = option(
        None,
        "A folder or an id of the Hub with a LoRA or DoRA adapter, as PEFT writes it; none: build the model without. "
        "Default: the job's adapter, with random weights, where the model's are random; a folder of weights is taken "
        "to have it merged.",
        metavar="FOLDER|none",
        brief="A LoRA or DoRA adapter of PEFT.",
    )
    num_layers: int | None = option(
        None, "Build only the first N transformer layers.", min=1, brief="Build only the first N layers."
    )
    random_weights: bool = option(
        False,
        "Ignore the weights in the model folder; weights are random where there are none.",
        brief="Ignore the model folder's weights.",
    )
    weights_seed: int = option(
        0, "Seed of random weights; a parameter's values depend on it and on its name alone.", min=0
    )
    dtype: Dtype = option(
        Dtype.AUTO,
        "Compute dtype. Master weights are fp32 whenever there is an optimizer. auto: the job's, bf16 where the "
        "inputs do not say.",
        brief="auto: the job's.",
    )
    zero_stage: int | None = option(None, _stages_help, min=0, max=3, brief="What is sharded: 0 nothing ... 3 all.")
    packing: bool | None = option(
        None,
        "Pack a micro-batch's rows into one row without padding. Default: packed if the packing probe shows that the "
        "model keeps documents apart; padded where padding on the left predicts labels, and with --verdict strict "
        "where the job's rows were.",
        brief="--no-packing: rows padded as they came.",
    )
    pad_to: PadTo = option(
        PadTo.OWN,
        "longest: pad to the longest row that any data rank has in this pass, as trainers that need equal shapes do.",
    )
    pad_tokens: str | None = option(
        None,
        "Pad each row, packed or not, to a multiple of N tokens, or to the next of several lengths.",
        metavar="N|N,N,...",
    )
    attention: str = option(
        Attention.AUTO,
        "Attention kernel. auto: the job's, if the captures name it and it works here; else on CUDA flash-attn if "
        "installed, torch's varlen for packed rows, and cuDNN for a row of one document of 4,096 tokens or more; else, "
        "and in fp32, sdpa. With --ring: ring-flash-attn, else sdpa over gathered keys.",
        flags={"--flash-attn": Attention.FLASH, "--no-flash-attn": Attention.SDPA},
        choices=ATTENTION_VALUES,
        brief="Attention kernel. auto: the job's.",
    )
    head: Head = option(
        Head.AUTO,
        "Whole logits, chunks of tokens, or Liger's fused loss. auto: as the job; if unknown, whole where they fit.",
    )
    kernels: Kernels = option(
        Kernels.AUTO,
        "RMSNorm, SwiGLU and rotary embedding: the model's own modules, or fused ones that keep less for backward: "
        "Liger's, on CUDA (pip install liger-kernel). auto: fused where the job used Liger and it is here.",
    )
    compile: Compile = option(
        Compile.OFF,
        "torch.compile each transformer layer (--compile), or DeepSpeed's own compiler (--deepcompile).",
        flags={"--compile": Compile.BLOCKS, "--deepcompile": Compile.DEEPCOMPILE},
        named=False,
        brief="torch.compile each layer.",
    )
    compile_lengths: CompileLengths = option(
        CompileLengths.DYNAMIC,
        "Of --compile. dynamic: one graph for any length; automatic: torch's default, a graph for the first length and "
        "more when others come; static: one for each length.",
    )
    routing: Routing = option(
        Routing.AUTO,
        "Which experts a mixture of experts sends each token to. recorded: the job's, with the scores that they get "
        "here; live: those chosen here. auto: recorded where the captures hold them.",
    )
    gradient_checkpointing: bool = option(False, "Recompute each layer's activations in backward.")
    optimizer: str = option(OptimizerName.AUTO.value, _optimizer_help, metavar=_list_optimizer_forms)
    learning_rate: float | None = option(
        None,
        "Used with --step. Default: the job's in each step, where the inputs hold its steps; else 1e-6.",
        min=0,
        aliases=("--lr",),
    )
    weight_decay: float | None = option(None, lambda: _setting_help("weight_decay"), min=0)
    beta1: float | None = option(None, lambda: _setting_help("beta1"), min=0, max=1)
    beta2: float | None = option(None, lambda: _setting_help("beta2"), min=0, max=1)
    eps: float | None = option(None, lambda: _setting_help("eps"), min=0)
    momentum: float | None = option(None, lambda: _setting_help("momentum"), min=0)
    lr_warmup_steps: int = option(
        0, "Steps over which the learning rate rises linearly from 0, as trainers do; constant after them.", min=0
    )
    grad_accumulation: int | None = option(
        None,
        "Passes of each data rank that go into one gradient. Default: those of the job's steps where the inputs say "
        "which they were, else 1.",
        min=1,
    )
    max_norm: float | None = option(
        None,
        "Clip the global gradient norm to this before a step; inf is no limit. Default: as the job did, where its "
        "steps are followed (--step); else no limit.",
        min=0,
        max=math.inf,
    )
    deepspeed_config: Path | None = option(
        None,
        "A JSON file of DeepSpeed's own settings, added to what the options say; contradictions are refused.",
        metavar="FILE",
    )
    parallel: ParallelSpec = field(default_factory=ParallelSpec)

    def __post_init__(self) -> None:
        self._refuse_unknown_optimizer()
        self._refuse_foreign_settings()
        self._refuse_what_a_custom_model_lacks()
        self._refuse_what_the_backend_lacks(find_backend_declaration(self.backend))
        kernel = None if self.attention == Attention.AUTO else find_kernel(self.attention)
        self._refuse_what_has_no_ring(kernel)
        if self.pad_tokens is not None and not PAD_TOKENS.fullmatch(self.pad_tokens):
            one_number, several = Setting("pad_tokens", "128"), Setting("pad_tokens", "512,1024,2048")
            advice = f"Give a number above 0, or several with commas between. Try: {one_number}, or {several}"
            raise UsageError.not_allowed("pad_tokens", self.pad_tokens, advice)
        if self.compile_lengths is not CompileLengths.DYNAMIC:
            self._refuse_compile_lengths()
        if kernel is not None and kernel.padded is None and self.packing is False:
            advice = f"Try: {PACKED}, or {Setting('attention', Attention.SDPA)}"
            raise UsageError(Setting("attention", self.attention), "reads packed rows", advice)

    def with_defaults(
        self,
        *,
        dtype: Dtype = Dtype.BF16,
        packing: bool = True,
        attention: str = Attention.AUTO,
        kernels: Kernels = Kernels.MODEL,
        routing: Routing = Routing.LIVE,
        grad_accumulation: int = 1,
    ) -> Self:
        """Return the spec with these values for the options that were not given."""
        return replace(
            self.with_step_defaults(),
            dtype=dtype if self.dtype is Dtype.AUTO else self.dtype,
            packing=packing and not self.has_user_model if self.packing is None else self.packing,
            attention=attention if self.attention == Attention.AUTO and not self.has_user_model else self.attention,
            kernels=kernels if self.kernels is Kernels.AUTO else self.kernels,
            routing=routing if self.routing is Routing.AUTO else self.routing,
            grad_accumulation=self.grad_accumulation or grad_accumulation,
        )

    def with_step_defaults(self) -> Self:
        """Return the spec with an optimizer, where the job's is not known, and without a limit that is none."""
        return replace(
            self,
            optimizer=OptimizerName.ADAMW.value if self.optimizer == OptimizerName.AUTO else self.optimizer,
            max_norm=None if self.max_norm == math.inf else self.max_norm,
        )

    def find_padded_length(self, num_tokens: int) -> int | None:
        """Compute how long a row of `num_tokens` is under --pad-tokens; None if it is longer than all lengths."""
        if self.pad_tokens is None:
            return num_tokens
        lengths = [int(length) for length in self.pad_tokens.split(",")]
        if len(lengths) == 1:
            return -(-num_tokens // lengths[0]) * lengths[0]
        return min((length for length in lengths if length >= num_tokens), default=None)

    @property
    def packs(self) -> bool:
        """Are a micro-batch's rows packed into one?"""
        return self.packing is not False and not self.has_user_model

    @property
    def custom_model(self) -> tuple[Path, str] | None:
        """The file and the function of --model FILE.py:function; None for another model."""
        match = USER_FUNCTION.fullmatch(self.model or "")
        return (Path(match[1]), match[2]) if match else None

    @property
    def has_user_model(self) -> bool:
        """Is the model built by a function of the user's, --model FILE.py:function?"""
        return self.custom_model is not None

    @property
    def lacks_weights(self) -> bool:
        """Is the model a user's own, for which nobody asked for random weights, and none were given?"""
        return self.has_user_model and self.weights is None and not self.random_weights

    @property
    def resolved_grad_accumulation(self) -> int:
        """The passes of each data rank that go into one gradient."""
        return self.grad_accumulation or 1

    @property
    def base_rate(self) -> float:
        """The learning rate that was typed, else the default."""
        return 1e-6 if self.learning_rate is None else self.learning_rate

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        """Return the keyword arguments of the optimizer's class, with its defaults for settings that were not given.

        A user's own function is given what was typed, by the names of the fields, and the learning rate.
        """
        if self.optimizer == OptimizerName.AUTO:
            return self.with_step_defaults().optimizer_settings
        if self.optimizer in OPTIMIZERS:
            return find_optimizer(self.optimizer).read_options(self)
        typed = {name: getattr(self, name) for name in STEP_SETTINGS if getattr(self, name) is not None}
        return {"lr": self.base_rate, **typed}

    @property
    def custom_optimizer(self) -> tuple[Path, str] | None:
        """The file and the function of --optimizer FILE.py:function; None for another optimizer."""
        match = USER_FUNCTION.fullmatch(self.optimizer)
        return (Path(match[1]), match[2]) if match else None

    @property
    def has_optimizer(self) -> bool:
        """Are there an optimizer and fp32 masters?"""
        return self.optimizer != OptimizerName.NONE

    def _refuse_what_has_no_ring(self, kernel: AttentionKernel | None) -> None:
        if self.parallel.ring == 1:
            return
        ring, attention = Setting("ring", self.parallel.ring), Setting("attention", self.attention)
        if self.packing is False:
            advice = f"Try: {ring} {PACKED}, or {PADDED} without {Setting('ring')}"
            raise UsageError(ring, f"slices packed rows, and {PADDED} leaves none", advice)
        if kernel is not None and kernel.slices is None:
            first, *others = (other.option_value for other in KERNELS.values() if other.slices is not None)
            advice = f"Try: {', or '.join([f'{ring} {attention.with_value(first)}', *others])}"
            raise UsageError(attention, "has no ring", advice)

    def _refuse_what_a_custom_model_lacks(self) -> None:
        model = Setting("model", self.model)
        if not self.has_user_model:
            if (self.model or "").endswith((".py", ".py:")):
                advice = f"Try: {model.with_value((self.model or '').removesuffix(':') + ':FUNCTION')}"
                raise UsageError(model, "names no function", advice)
            custom = model.with_value("FILE.py:function")
            if self.weights is not None:
                weights = Setting("weights", self.weights)
                folder = (
                    f", or for transformers' models {model.with_value(self.weights)}" if self.weights.is_dir() else ""
                )
                raise UsageError(weights, f"is for {custom}", f"Try: {custom} {weights}{folder}")
            if self.blocks is not None:
                raise UsageError(Setting("blocks", self.blocks), f"is for {custom}", "Leave it out")
            return
        tp, ring = self.parallel.tp, self.parallel.ring
        for setting, is_given, why in (
            (Setting("tp", tp), tp > 1, "needs a plan that splits each layer, and there is none for"),
            (Setting("ring", ring), ring > 1, "slices attention, and nothing is known about that of"),
            (PACKED, self.packing is True, "needs attention that stays within a document, not known about"),
            (
                Setting("attention", self.attention),
                self.attention != Attention.AUTO,
                "chooses transformers' kernels, and there are none in",
            ),
            (Setting("adapter", self.adapter), self.adapter is not None, "goes into transformers' models, not into"),
        ):
            if is_given:
                raise UsageError(setting, f"{why} {model}", "Leave it out")
        if self.weights is not None and self.random_weights:
            why = f"and {RANDOM_WEIGHTS} exclude each other"
            raise UsageError(Setting("weights", self.weights), why, "Give one of the two")

    def _refuse_compile_lengths(self) -> None:
        setting, blocks = Setting("compile_lengths", self.compile_lengths), Setting("compile", Compile.BLOCKS)
        if self.compile is not Compile.BLOCKS:
            raise UsageError(setting, f"is a setting of {blocks}", f"Try: {blocks} {setting}")
        if self.parallel.sequence_parallel and self.compile_lengths is CompileLengths.AUTOMATIC:
            why = f"does not go with {SEQUENCE_PARALLEL}, which needs a graph for each length"
            raise UsageError(setting, why)

    def _refuse_unknown_optimizer(self) -> None:
        values = list_optimizer_values()
        if self.optimizer in (OptimizerName.AUTO, *values) or self.custom_optimizer is not None:
            return
        optimizer = Setting("optimizer", self.optimizer)
        if self.optimizer.endswith((".py", ".py:")):
            advice = f"Try: {optimizer.with_value(self.optimizer.removesuffix(':') + ':FUNCTION')}"
            raise UsageError(optimizer, "names no function", advice)
        advice = f"Give one of {', '.join(values)}, or FILE.py:function"
        raise UsageError.not_allowed("optimizer", self.optimizer, advice)

    def _refuse_foreign_settings(self) -> None:
        if self.custom_optimizer is not None or self.optimizer == OptimizerName.AUTO:
            # Of `auto` they are checked when it is known which it is.
            return
        known = find_optimizer(self.optimizer).options if self.has_optimizer else ()
        for name in STEP_SETTINGS:
            value = getattr(self, name)
            if value is not None and name not in known:
                optimizer = Setting("optimizer", self.optimizer)
                other = optimizer.with_value(find_optimizers_with(name)[0])
                setting = Setting(name, int(value) if float(value).is_integer() else value)
                raise UsageError(setting, f"is no setting of {optimizer}", f"Try: {other}")

    def _refuse_what_the_backend_lacks(self, declaration: BackendDeclaration) -> None:
        name, stage = declaration.name, self.zero_stage
        backend = Setting("backend", name)
        if declaration.shards and stage is not None and stage not in declaration.stages:
            known_stages = " and ".join(f"{number} ({what})" for number, what in declaration.stages.items())
            setting = Setting("zero_stage", stage)
            alternatives = find_backends(lambda other: stage in other.stages)
            other_backend = f", or {backend.with_value(alternatives[0])}" if alternatives else ""
            advice = f"Try: {backend} {setting.with_value(declaration.default_stage)}{other_backend}"
            raise UsageError(setting, f"does not exist under {name}, which has {known_stages}", advice)
        if self.deepspeed_config is not None and "deepspeed_config" not in declaration.exclusive_options:
            owner, *_ = _find_backends_with_option("deepspeed_config")
            setting = Setting("deepspeed_config", self.deepspeed_config)
            advice = f"Try: {backend.with_value(owner)}, or leave it out"
            raise UsageError(setting, f"is {owner}'s, and the backend is {name}", advice)
        self._refuse_sharding(declaration)
        if self.compile not in (Compile.OFF, Compile.BLOCKS, *declaration.compilers):
            owner, *_ = _find_backends_with_compiler(self.compile)
            setting = Setting("compile", self.compile)
            advice = f"Try: {backend.with_value(owner)} {setting}, or {setting.with_value(Compile.BLOCKS)}"
            raise UsageError(setting, f"belongs to {owner}", advice)
        if self.parallel.sequence_parallel and "sequence_parallel" not in declaration.exclusive_options:
            owner, *_ = _find_backends_with_option("sequence_parallel")
            advice = f"Try: {backend.with_value(owner)}"
            raise UsageError(SEQUENCE_PARALLEL, f"is not there for {name}", advice)
        if self.parallel.tp_plan is not TpPlan.AUTO and "tp_plan" not in declaration.exclusive_options:
            owner, *_ = _find_backends_with_option("tp_plan")
            setting = Setting("tp_plan", self.parallel.tp_plan)
            advice = f"Try: {backend.with_value(owner)}, or no {Setting('tp_plan')}"
            raise UsageError(setting, f"is {owner}'s", advice)

    def _refuse_sharding(self, declaration: BackendDeclaration) -> None:
        name, stage, tp, ring = declaration.name, self.zero_stage, self.parallel.tp, self.parallel.ring
        backend = Setting("backend", name)
        for setting, is_missing, alternatives in (
            (
                Setting("zero_stage", stage),
                stage is not None and not declaration.shards,
                find_backends(lambda other: stage in other.stages),
            ),
            (Setting("tp", tp), tp > 1 and not declaration.tp, find_backends(lambda other: other.tp)),
            (Setting("ring", ring), ring > 1 and not declaration.ring, find_backends(lambda other: other.ring)),
        ):
            if is_missing:
                why = f"is not there for {name}"
                if not declaration.shards:
                    why = f"shards, and under {name} every rank holds the whole model and its own inputs"
                advice = [*(f"{backend.with_value(other)} {setting}" for other in alternatives[:1]), f"{backend} alone"]
                raise UsageError(setting, why, f"Try: {', or '.join(advice)}")

    @property
    def resolved_zero_stage(self) -> int:
        if self.zero_stage is not None:
            return self.zero_stage
        declaration = find_backend_declaration(self.backend)
        if not self.has_optimizer:
            return declaration.default_stage_without_optimizer
        return declaration.default_stage
