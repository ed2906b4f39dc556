"""Read from a running job its model's config and name, its rank, its settings and the versions of what it uses."""

import json
import os
import platform
import sys
import weakref
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from capture.file_format.actor_config import read_actor_config, read_adapter_configs, write_actor_config
from capture.file_format.micro_batch import CaptureError
from capture.record.parameter_sampler import list_frozen_names, list_parameter_names

LIGER = "liger_kernel"
# Variables that change numbers. None of them holds a secret or a path.
ENVIRONMENT_NAMES = (
    "ACCELERATE_MIXED_PRECISION",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "FLASH_ATTENTION_DETERMINISTIC",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
_MAX_VALUE_LENGTH = 100
_HAS_DISTRIBUTED = torch.distributed.is_available()


def prepare_folder(folder: Path, model: nn.Module) -> str:
    """Make the folder and its `actor.json`, and return the model's name.

    Raises OSError, and CaptureError if the folder holds another model's captures.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    config = find_config(model)
    if config is None:
        return type(model).__name__
    owner = next(module for module in model.modules() if vars(module).get("config") is config)
    name = _remove_host_paths(getattr(config, "_name_or_path", "")) or type(owner).__name__
    adapters = find_adapter_configs(model)
    frozen = [] if adapters else list_frozen_names(model)
    _write_config_once(folder, read_config(model), name, adapters, frozen, list_parameter_names(model))
    return str(name)


def find_config(model: nn.Module) -> Any:
    """Return the config of the outermost module that has one; None without any."""
    # `getattr` would also find the config of a module inside: wrappers look attributes up in what they wrap.
    configs: list[Any] = [vars(module).get("config") for module in model.modules()]
    return next((config for config in configs if callable(getattr(config, "to_dict", None))), None)


def read_config(model: nn.Module) -> dict[str, object]:
    """Read the model's config as it is now; empty without one."""
    config = find_config(model)
    settings: dict[str, object] = {} if config is None else _remove_host_paths(config.to_dict())
    return settings


def find_adapter_configs(model: nn.Module) -> dict[str, dict[str, object]]:
    """Return the configs of PEFT's adapters in the model by name, as plain data; empty without any."""
    for module in model.modules():
        configs = vars(module).get("peft_config")
        if (
            isinstance(configs, dict)
            and configs
            and all(callable(getattr(config, "to_dict", None)) for config in configs.values())
        ):
            plain = {name: _to_json_value(config.to_dict()) for name, config in configs.items()}
            return {name: _remove_host_paths(config) for name, config in plain.items()}
    return {}


def _to_json_value(value: Any) -> Any:
    """Turn a config into what JSON knows: sets become sorted lists, members of enumerations their values."""
    if isinstance(value, dict):
        return {str(key): _to_json_value(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(member) for member in value]
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
    parameters: Sequence[str],
) -> None:
    existing = read_actor_config(folder)
    if existing is None:
        write_actor_config(folder, config, model_name, adapters, frozen, parameters)
    elif (
        select_architecture(existing) != select_architecture(json.loads(json.dumps(config, default=str)))
        or read_adapter_configs(folder) != adapters
    ):
        raise CaptureError(
            f"{folder} holds captures of a model with another config; one folder holds one model's. "
            "Give this recording a folder of its own"
        )


def _remove_host_paths(value: Any) -> Any:
    """Shorten absolute paths to their last names: a recording does not tell where a host keeps its models."""
    if isinstance(value, dict):
        return {key: _remove_host_paths(member) for key, member in value.items()}
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value


def select_architecture(config: dict[str, object]) -> dict[str, object]:
    """Return the settings that tell one model from another."""
    # These differ between runs of one model. save_pretrained sets the last three, and one rank alone may call it.
    changing_names = ("_name_or_path", "transformers_version", "use_cache", "architectures", "dtype", "torch_dtype")
    return {name: value for name, value in config.items() if name not in changing_names}


def is_in_process_group() -> bool:
    """Tell whether the job has a process group now."""
    return _HAS_DISTRIBUTED and torch.distributed.is_initialized()


def read_rank_and_world_size() -> tuple[int, int]:
    if is_in_process_group():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def read_environment() -> dict[str, str]:
    """Return settings that change numbers: allow-listed variables that are set, and torch's own."""
    variables = {name: os.environ[name][:_MAX_VALUE_LENGTH] for name in ENVIRONMENT_NAMES if name in os.environ}
    return variables | {
        "torch.deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.num_threads": str(torch.get_num_threads()),
        "torch.cudnn.deterministic": str(torch.backends.cudnn.deterministic),
        "torch.cudnn.benchmark": str(torch.backends.cudnn.benchmark),
    }


def read_versions() -> dict[str, str]:
    """Return the versions of packages that are loaded. Nothing is imported for it."""
    modules = {name: sys.modules[name] for name in ("torch", "transformers", "deepspeed") if name in sys.modules}
    return {"python": platform.python_version(), **{name: str(module.__version__) for name, module in modules.items()}}


def find_attention_kernel(model: nn.Module) -> str | None:
    """Return the attention kernel that transformers is set to use; None where nothing names one."""
    configs: list[Any] = [vars(module).get("config") for module in model.modules()]
    names = (getattr(config, "_attn_implementation", None) for config in configs)
    return next((name for name in names if isinstance(name, str)), None)


def find_kernels(model: nn.Module) -> str:
    """Return `liger` if Liger computes a norm, a SwiGLU layer or rotary embeddings of the model, else `model`.

    Liger replaces classes, forwards of modules, or functions in the file of a class; all three are looked at.
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


def describe_model(model: nn.Module) -> dict[str, str]:
    """Return the settings that the whole model has: whose kernels it calls, and whether a part of it is compiled."""
    return {
        "kernels": find_kernels(model),
        "compiled": "yes" if any(is_compiled(module) for module in model.modules()) else "no",
    }


def is_compiled(module: nn.Module) -> bool:
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


class PassDevice(NamedTuple):
    """The device of a pass, with what takes 0.01 ms to read of a torch.device where the job's caches hold other things.

    number  as Tensor.get_device has it of the pass's arguments; -1 stands for the CPU
    """

    device: torch.device
    number: int
    type: str


class ModelDevices:
    """Knows on which devices a model's parameters are. It keeps no parameter alive.

    It looks once, at the first pass: a job may move its model there after the recording was opened.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._accelerators: list[torch.device] | None = None
        self._known: dict[int, PassDevice] = {}

    def find(self, tensors: Mapping[str, Tensor]) -> PassDevice:
        """Find the device of a pass: that of its arguments, or the model's, to which DDP or FSDP moves arguments."""
        first = next(iter(tensors.values()), None)
        number = -1 if first is None else first.get_device()
        known = self._known.get(number)
        if known is None:
            device = self._find(torch.device("cpu") if first is None else first.device)
            known = self._known[number] = PassDevice(device, number, device.type)
        return known

    def _find(self, device: torch.device) -> torch.device:
        if self._accelerators is None:
            model = self._model()
            devices = {parameter.device for parameter in model.parameters()} if model is not None else set()
            self._accelerators = sorted((other for other in devices if other.type not in ("cpu", "meta")), key=str)
        return self._accelerators[0] if self._accelerators and device.type == "cpu" else device

    @property
    def are_several(self) -> bool:
        return self._accelerators is not None and len(self._accelerators) > 1


def read_autocast_dtype(device_type: str) -> str:
    """Return autocast's dtype on devices of this type, or `off`."""
    if not _has_autocast(device_type) or not torch.is_autocast_enabled(device_type):
        return "off"
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")


@cache
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


@cache
def read_device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
