"""Read the weights of a user's model from safetensors or torch checkpoints.

Tensors have the names of its state dict. Where a user's function builds a model of transformers' classes, they may have
the names by which transformers saves it, as of a mixture's experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from actor_init.checkpoint_names import Recipe, find_recipes
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
    """The weights in files of --weights. One parameter is made at a time; torch's files are mapped, not loaded.

    tensors  by their names in the files, without those of wrappers
    recipes  by the parameter's name in the model
    """

    path: Path
    files: Sequence[Path]
    tensors: Mapping[str, "CheckpointTensor"]
    recipes: Mapping[str, Recipe]

    @classmethod
    def open(cls, path: Path, model: nn.Module) -> "CheckpointWeights":
        """Open a file or folder for `model`, which may be on the meta device.

        Raises UsageError if there are no weights, a file is damaged, or transformers cannot convert its tensors.
        """
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
        recipes = {name: Recipe.from_unchanged_tensor(name) for name in tensors}
        if isinstance(model, PreTrainedModel):
            try:
                recipes |= find_recipes(model, {name: tensor.read_shape() for name, tensor in tensors.items()})
            # A conversion raises whatever it likes for tensors of other shapes than it expects.
            except Exception as error:
                why = f": transformers cannot convert its tensors for {type(model).__name__}: {error}"
                raise UsageError(setting, why, _WRONG_MODEL_ADVICE) from error
        return cls(path=path, files=files, tensors=tensors, recipes=recipes)

    def describe(self) -> str:
        return f"from {self.path}"

    def has_tensor(self, name: str) -> bool:
        return name in self.recipes

    def fill(self, name: str, parameter: Tensor, on_progress: OnProgress = ignore_progress) -> bool:
        """Fill `parameter`. Raises UsageError if there is no `name`, or one of another shape."""
        if name not in self.recipes:
            known = next(iter(self.tensors))
            why = f"has nothing named {name} (it has {len(self.tensors)} tensors, such as {known})"
            raise UsageError(Setting("weights", self.path), why, _WRONG_MODEL_ADVICE)
        values = self.recipes[name].make(name, self._read)
        if values.shape != parameter.shape:
            why = f": {name} has shape {list(values.shape)}, and the model's is {list(parameter.shape)}"
            raise UsageError(Setting("weights", self.path), why, _WRONG_MODEL_ADVICE)
        parameter.detach().copy_(values)
        on_progress(values.numel())
        return True

    def sample(self, name: str, shape: Sequence[int], start: int, count: int) -> Tensor | None:
        if name not in self.recipes:
            return None
        values = self.recipes[name].make(name, self._read)
        if tuple(values.shape) != tuple(shape) or not values.is_floating_point():
            return None
        return values.flatten()[start : start + count]

    def _read(self, name: str) -> Tensor:
        return self.tensors[name].read()


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

    def read_shape(self) -> tuple[int, ...]:
        if self.mapped is not None:
            return tuple(self.mapped.shape)
        with safe_open(self.file, framework="pt") as file:
            return tuple(file.get_slice(self.name).get_shape())


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
