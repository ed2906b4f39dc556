"""Ask a running job for its model's config and name, its rank, its settings and the versions of what it uses."""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from capture.file_format.actor_config import read_actor_config, read_adapter_configs, write_actor_config
from capture.file_format.micro_batch import CaptureError
from capture.record.parameter_sampler import list_frozen_names

LIGER = "liger_kernel"


def prepare_folder(folder: Path, model: nn.Module) -> str:
    """Make the folder and its `actor.json`, and return the model's name.

    Raises OSError, and CaptureError if the folder holds another model's captures.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for module in model.modules():
        config: Any = vars(module).get("config")  # the module's own: wrappers look `config` up in what they wrap
        if callable(getattr(config, "to_dict", None)):
            name = _without_host_paths(getattr(config, "_name_or_path", "")) or type(module).__name__
            adapters = find_adapter_configs(model)
            frozen = [] if adapters else list_frozen_names(model)
            _write_config_once(folder, _without_host_paths(config.to_dict()), name, adapters, frozen)
            return str(name)
    return type(model).__name__


def find_adapter_configs(model: nn.Module) -> dict[str, dict[str, object]]:
    """Return the configs of PEFT's adapters in the model by name, as plain data; empty without any."""
    for module in model.modules():
        configs = vars(module).get("peft_config")
        if (
            isinstance(configs, dict)
            and configs
            and all(callable(getattr(c, "to_dict", None)) for c in configs.values())
        ):
            plain = {name: _plain(config.to_dict()) for name, config in configs.items()}
            return {name: _without_host_paths(config) for name, config in plain.items()}
    return {}


def _plain(value: Any) -> Any:
    """Turn a config into what JSON knows: sets are sorted, members of enumerations are their values."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    value = value.value if isinstance(value, Enum) else value
    return value if isinstance(value, str | int | float | None) else str(value)


def _write_config_once(
    folder: Path,
    config: dict[str, object],
    model_name: str,
    adapters: dict[str, dict[str, object]],
    frozen: Sequence[str],
) -> None:
    present = read_actor_config(folder)
    if present is None:
        write_actor_config(folder, config, model_name, adapters, frozen)
    elif (
        select_architecture(present) != select_architecture(json.loads(json.dumps(config, default=str)))
        or read_adapter_configs(folder) != adapters
    ):
        raise CaptureError(
            f"{folder} holds captures of a model with another config; one folder holds one model's. "
            "Give this recording a folder of its own"
        )


def _without_host_paths(value: Any) -> Any:
    """Shorten absolute paths to their last names: a recording does not say where a host keeps its models."""
    if isinstance(value, dict):
        return {key: _without_host_paths(item) for key, item in value.items()}
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value


def select_architecture(config: dict[str, object]) -> dict[str, object]:
    """Return the settings that tell one model from another."""
    # these differ between runs of one model, and save_pretrained, which one rank alone may call, sets the last ones
    changing = ("_name_or_path", "transformers_version", "use_cache", "architectures", "dtype", "torch_dtype")
    return {name: value for name, value in config.items() if name not in changing}


def is_in_process_group() -> bool:
    """Tell whether the job has a process group now."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def read_rank_and_world_size() -> tuple[int, int]:
    if is_in_process_group():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def read_versions() -> dict[str, str]:
    """Return the versions of packages that are loaded; nothing is imported for it."""
    used = {name: sys.modules[name] for name in ("torch", "transformers", "deepspeed") if name in sys.modules}
    return {"python": platform.python_version(), **{name: str(module.__version__) for name, module in used.items()}}


def find_attention_kernel(model: nn.Module) -> str | None:
    """Return the attention kernel that transformers was asked for; None where nothing says one."""
    configs: list[Any] = [vars(module).get("config") for module in model.modules()]
    names = (getattr(config, "_attn_implementation", None) for config in configs)
    return next((name for name in names if isinstance(name, str)), None)


def find_kernels(model: nn.Module) -> str:
    """Return `liger` if Liger computes a norm, a SwiGLU layer or rotary embeddings of the model, else `model`.

    Liger replaces classes, forwards of modules, or functions in the file of a class. Nothing is imported for it.
    """
    files = {type(module).__module__ for module in model.modules()}
    forwards = (getattr(vars(module).get("forward"), "__module__", None) for module in model.modules())
    functions = (
        getattr(function, "__module__", None)
        for file in files
        if file in sys.modules
        for name, function in vars(sys.modules[file]).items()
        if name.startswith("apply_rotary")
    )
    return "liger" if any(str(name).split(".")[0] == LIGER for name in (*files, *forwards, *functions)) else "model"


def describe_call_settings(tensors: Mapping[str, Tensor], of_model: Mapping[str, str]) -> dict[str, str]:
    """Return settings that only the job's thread knows: device, autocast, and those of the model that were given."""
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    return {"device": read_device_name(device), "autocast": read_autocast_dtype(device.type), **of_model}


def read_autocast_dtype(kind: str) -> str:
    """Return autocast's dtype on devices of this kind, or `off`."""
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return "off"
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")


@cache
def read_device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
