"""Read the weights of a user's model, by the names of its state dict, from safetensors or torch checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from actor_init.spec import UsageError
from actor_init.weights import OnProgress, ignore_progress
from capture.facts import Setting

SAFETENSORS_SUFFIXES = (".safetensors",)
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# Keys under which checkpoints keep the state dict.
STATE_DICT_KEYS = ("model", "state_dict", "model_state_dict", "module")
# Prefixes of torch.compile, DDP and FSDP.
WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.")
_WRONG_MODEL_ADVICE = "Is it a checkpoint of this model?"
_ADVICE = "Give a safetensors or torch file, or a folder of them"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointWeights:
    """The weights in files of --weights. Tensors are read one at a time: torch's files are mapped, not loaded."""

    path: Path
    files: Sequence[Path]
    tensors: Mapping[str, "CheckpointTensor"]

    @classmethod
    def open(cls, path: Path) -> "CheckpointWeights":
        """Open a file or folder. Raises UsageError if there are no weights, or a file is damaged."""
        files, setting = [path], Setting("weights", path)
        if path.is_dir():
            files = next(
                (
                    paths
                    for suffixes in (SAFETENSORS_SUFFIXES, TORCH_SUFFIXES)
                    if (paths := _list_files(path, suffixes))
                ),
                [],
            )
        if not files or not files[0].is_file() or files[0].suffix not in (*SAFETENSORS_SUFFIXES, *TORCH_SUFFIXES):
            what = (
                "has none" if path.is_dir() else "is no checkpoint, by its name" if path.exists() else "does not exist"
            )
            advice = f"{_ADVICE} ({', '.join((*SAFETENSORS_SUFFIXES, *TORCH_SUFFIXES))})"
            raise UsageError(setting, f": {what}", advice)
        tensors: dict[str, CheckpointTensor] = {}
        for file in files:
            try:
                tensors |= {_strip_wrappers(name): tensor for name, tensor in _read_tensors(file)}
            # safetensors, pickle and zip raise types of their own.
            except Exception as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise UsageError(setting, f": {file} cannot be read: {reason}", _ADVICE) from error
        if not tensors:
            raise UsageError(setting, ": no tensors by name in it", f"{_ADVICE} with a state dict")
        return cls(path=path, files=files, tensors=tensors)

    def describe(self) -> str:
        return f"from {self.path}"

    def has_tensor(self, name: str) -> bool:
        return name in self.tensors

    def fill(self, name: str, parameter: Tensor, on_progress: OnProgress = ignore_progress) -> bool:
        """Fill `parameter`. Raises UsageError if there is no `name`, or one of another shape."""
        if name not in self.tensors:
            known = next(iter(self.tensors))
            why = f"has nothing named {name} (it has {len(self.tensors)} tensors, such as {known})"
            raise UsageError(Setting("weights", self.path), why, _WRONG_MODEL_ADVICE)
        values = self.tensors[name].read()
        if values.shape != parameter.shape:
            why = f": {name} has shape {list(values.shape)}, and the model's is {list(parameter.shape)}"
            raise UsageError(Setting("weights", self.path), why, _WRONG_MODEL_ADVICE)
        parameter.detach().copy_(values)
        on_progress(values.numel())
        return True

    def sample(self, name: str, shape: Sequence[int], start: int, count: int) -> Tensor | None:
        if name not in self.tensors:
            return None
        values = self.tensors[name].read()
        if tuple(values.shape) != tuple(shape) or not values.is_floating_point():
            return None
        return values.flatten()[start : start + count]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointTensor:
    """A tensor in a file, under its name there: mapped, or read at each call of `read`."""

    file: Path
    name: str
    mapped: Tensor | None = None

    def read(self) -> Tensor:
        if self.mapped is not None:
            return self.mapped
        with safe_open(self.file, framework="pt") as file:
            values: Tensor = file.get_tensor(self.name)
        return values


def _list_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in suffixes)


def _read_tensors(file: Path) -> Iterator[tuple[str, CheckpointTensor]]:
    if file.suffix in SAFETENSORS_SUFFIXES:
        with safe_open(file, framework="pt") as reader:
            names = list(reader.keys())
        yield from ((name, CheckpointTensor(file=file, name=name)) for name in names)
        return
    content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    for name, tensor in _find_state_dict(content).items():
        if isinstance(tensor, Tensor):
            yield name, CheckpointTensor(file=file, name=name, mapped=tensor)


def _find_state_dict(whole: Any) -> Mapping[str, Any]:
    inner: Any = whole
    if isinstance(whole, Mapping) and not any(isinstance(value, Tensor) for value in whole.values()):
        inner = next((whole[key] for key in STATE_DICT_KEYS if isinstance(whole.get(key), Mapping)), {})
    return inner if isinstance(inner, Mapping) else {}


def _strip_wrappers(name: str) -> str:
    """Return the name without those that wrappers put before it."""
    while wrapper := next((prefix for prefix in WRAPPERS if name.startswith(prefix)), None):
        name = name.removeprefix(wrapper)
    return name
