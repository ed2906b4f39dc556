"""Build DeepSpeed's config, and refuse what DeepSpeed does not support."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from actor_init.declarations.backends.declaration import ActorSettings
from actor_init.option_values import Compile, Dtype, OptimizerName, UsageError
from capture.facts import Setting

FSDP2 = Setting("backend", "fsdp2")
ADVICE = "Give a JSON file of DeepSpeed's"
OPTIMIZER = Setting("optimizer")
# Keys that a file may not set, and the reason that a refusal gives.
REFUSED_KEYS = {
    "train_batch_size": "a pass is one micro-batch as it was captured, whose size no option changes",
    "optimizer": f"the replay's own optimizer steps, which {OPTIMIZER} and {Setting('learning_rate')} choose",
    "scheduler": f"the replay has a schedule of its own, which {Setting('lr_warmup_steps')} shapes",
}
# Keys that no option decides: the file may overwrite them.
OVERWRITABLE = ("steps_per_print", "zero_allow_untested_optimizer", "zero_optimization.memory_efficient_linear")
DEEPCOMPILE = Setting("compile", Compile.DEEPCOMPILE)
# The option that decides each key's value.
OPTIONS = {
    "gradient_accumulation_steps": Setting("grad_accumulation"),
    "gradient_clipping": Setting("max_norm"),
    "zero_optimization.stage": Setting("zero_stage"),
    "bf16.enabled": Setting("dtype"),
    "fp16.enabled": Setting("dtype"),
    "compile.deepcompile": DEEPCOMPILE,
    "tensor_parallel": Setting("tp"),
}


def find_obstacle(spec: ActorSettings, device_type: str) -> str | None:
    """Return why DeepSpeed cannot run `spec` on a `device_type` or cannot take its config file; None if it can."""
    if find_spec("deepspeed") is None:
        return f"DeepSpeed is not installed. Try: {FSDP2}, or pip install deepspeed"
    on_cpu = device_type == "cpu"
    if on_cpu and spec.dtype is Dtype.FP16:
        return f"DeepSpeed has no fp16 on a CPU. Try: {FSDP2}"
    if on_cpu and spec.compile is Compile.DEEPCOMPILE:
        return f"{DEEPCOMPILE} needs CUDA, and this machine has none. Try: {Setting('compile', Compile.BLOCKS)}"
    if not spec.has_optimizer and spec.resolved_zero_stage:
        none, stage = OPTIMIZER.with_value(OptimizerName.NONE), Setting("zero_stage", spec.zero_stage)
        return (
            f"{none} does not go with {stage}: DeepSpeed's stages 1 to 3 keep fp32 master weights of their own. "
            f"Try: {stage.with_value(0)} {none}, or {FSDP2}"
        )
    try:
        build_config(spec)
    except UsageError as error:
        return error.text
    return None


def build_config(spec: ActorSettings) -> dict[str, Any]:
    """Return the options' config merged with the file of --deepspeed-config. Raises UsageError if they contradict."""
    config = _build_config_from_options(spec)
    if spec.deepspeed_config is None:
        return config
    file_config = _read_config_file(spec.deepspeed_config)
    for key, why in REFUSED_KEYS.items():
        if file_config.get(key, "auto") != "auto":
            raise _refusal(spec, key, file_config[key], f"{why}. Leave it out")
    additions = {key: value for key, value in file_config.items() if key not in REFUSED_KEYS}
    zero = additions.get("zero_optimization")
    if isinstance(zero, Mapping) and "offload_optimizer" in zero:
        # With this key on, DeepSpeed takes only its own CPU Adam for an offloaded optimizer. The replay's optimizer is
        # torch's, which also steps on a CPU.
        config["zero_force_ds_cpu_optimizer"] = False
    return _merge_configs(spec, config, additions, "")


def _merge_configs(
    spec: ActorSettings, config: Mapping[str, Any], additions: Mapping[str, Any], section: str
) -> dict[str, Any]:
    """Return `config` plus `additions`; "auto", as in transformers' Trainer, means the option's value.

    section  the place of both in the whole config: empty, or names that each end with a dot
    """
    merged = dict(config)
    for key, value in additions.items():
        name = f"{section}{key}"
        if value == "auto":
            continue
        if isinstance(config.get(key), Mapping):
            if not isinstance(value, Mapping):
                raise _refusal(spec, name, value, "it is a section with keys of its own. Give an object")
            merged[key] = _merge_configs(spec, config[key], value, f"{name}.")
        elif key in config and name not in OVERWRITABLE and config[key] != value:
            raise _refusal(spec, name, value, f"here it is {json.dumps(config[key])}{_advice_for(name, value)}")
        else:
            merged[key] = value
    return merged


def _advice_for(name: str, value: Any) -> str:
    option = next((option for prefix, option in OPTIONS.items() if name.startswith(prefix)), None)
    if option is None:
        return ". Leave it out"
    suggestion = option.with_value(value) if type(value) in (int, float) else option
    return f", which {option} says. Leave it out, and try: {suggestion}"


def _refusal(spec: ActorSettings, name: str, value: Any, why: str) -> UsageError:
    setting = Setting("deepspeed_config", spec.deepspeed_config)
    return UsageError(setting, f": {name} is {json.dumps(value)}; {why}")


def _read_config_file(path: Path) -> dict[str, Any]:
    setting = Setting("deepspeed_config", path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(setting, f"cannot be read: {error}", ADVICE) from error
    if not isinstance(config, dict):
        raise UsageError(setting, f"holds a {type(config).__name__}", ADVICE)
    return config


def _build_config_from_options(spec: ActorSettings) -> dict[str, Any]:
    has_masters = spec.has_optimizer
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": spec.resolved_grad_accumulation,
        "gradient_clipping": spec.max_norm or 0.0,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": spec.resolved_zero_stage,
            "memory_efficient_linear": not has_block_hooks(spec),
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": has_masters and spec.dtype is Dtype.BF16},
        "fp16": {"enabled": has_masters and spec.dtype is Dtype.FP16},
        "compile": {"deepcompile": spec.compile is Compile.DEEPCOMPILE},
        **build_autotp_section(spec.parallel.tp),
    }


def build_autotp_section(tp: int) -> dict[str, Any]:
    """Return the section for DeepSpeed's config; empty without tensor parallelism.

    DeepSpeed's vocabulary-parallel head, the default for tied embeddings, would leave each rank with partial logits.
    """
    return {"tensor_parallel": {"autotp_size": tp, "vocab_parallel_lm_head": False}} if tp > 1 else {}


def has_block_hooks(spec: ActorSettings) -> bool:
    """Do ZeRO 3's hooks go on whole blocks? On submodules they would break a compiled block into many graphs.

    DeepSpeed's own linear function is not used either: it reads a parameter's id, which makes a graph per layer with
    torch 2.11.
    """
    return spec.compile is Compile.BLOCKS and spec.resolved_zero_stage == 3
