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
STATE_DICT_KEYS = ("model", "state_dict", "model_state_dict", "module")  # where checkpoints keep the state dict
WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.")  # torch.compile, DDP, FSDP
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
        files, given = [path], Setting("weights", path)
        if path.is_dir():
            files = next(
                (found for kind in (SAFETENSORS_SUFFIXES, TORCH_SUFFIXES) if (found := _list_files(path, kind))), []
            )
        if not files or not files[0].is_file() or files[0].suffix not in (*SAFETENSORS_SUFFIXES, *TORCH_SUFFIXES):
            what = (
                "has none" if path.is_dir() else "is no checkpoint, by its name" if path.exists() else "does not exist"
            )
            advice = f"{_ADVICE} ({', '.join((*SAFETENSORS_SUFFIXES, *TORCH_SUFFIXES))})"
            raise UsageError(given, f": {what}", advice)
        tensors: dict[str, CheckpointTensor] = {}
        for file in files:
            try:
                tensors |= {_strip_wrappers(name): stored for name, stored in _read_tensors(file)}
            except Exception as error:  # safetensors, pickle and zip have their own
                said = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise UsageError(given, f": {file} cannot be read: {said}", _ADVICE) from error
        if not tensors:
            raise UsageError(given, ": no tensors by name in it", f"{_ADVICE} with a state dict")
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
    """A tensor in a file: mapped, or read when it is asked for."""

    file: Path
    name: str  # in the file
    mapped: Tensor | None = None

    def read(self) -> Tensor:
        if self.mapped is not None:
            return self.mapped
        with safe_open(self.file, framework="pt") as file:
            values: Tensor = file.get_tensor(self.name)
        return values


def _list_files(folder: Path, kinds: Sequence[str]) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in kinds)


def _read_tensors(file: Path) -> Iterator[tuple[str, CheckpointTensor]]:
    if file.suffix in SAFETENSORS_SUFFIXES:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
        yield from ((name, CheckpointTensor(file=file, name=name)) for name in names)
        return
    whole = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    for name, tensor in _find_state_dict(whole).items():
        if isinstance(tensor, Tensor):
            yield name, CheckpointTensor(file=file, name=name, mapped=tensor)


def _find_state_dict(whole: Any) -> Mapping[str, Any]:
    inner: Any = whole
    if isinstance(whole, Mapping) and not any(isinstance(value, Tensor) for value in whole.values()):
        inner = next((whole[key] for key in STATE_DICT_KEYS if isinstance(whole.get(key), Mapping)), {})
    return inner if isinstance(inner, Mapping) else {}


def _strip_wrappers(name: str) -> str:
    """Return the name without those that wrappers put before it."""
    while wrapper := next((one for one in WRAPPERS if name.startswith(one)), None):
        name = name.removeprefix(wrapper)
    return name
