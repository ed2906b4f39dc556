"""Provide a parameter's values: from a safetensors folder, or random ones derived from its name."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from actor_init import name_hash
from actor_init.checkpoint_names import Recipe, recipes_of
from actor_init.spec import RANDOM_WEIGHTS, UsageError

AHEAD_BYTES = 512 * 2**20  # behind the tensor that is asked for: as names are sorted, mostly those of the same block
_NUM_LENGTH_BYTES = 8  # of a file, before its header
_OTHER_CONFIG = f"Give the config of these weights, or {RANDOM_WEIGHTS}"
NORM_SPREAD = 0.05  # relative standard deviation of vectors that the model's own init does not set to 0
OnProgress = Callable[[int], None]  # called during long work with the number of elements filled since the last call
INIT_FILLS_BUFFERS = int(transformers.__version__.partition(".")[0]) >= 5


@dataclass(kw_only=True, slots=True)
class ReadAhead:
    """Tells the system which parts of the files are needed next. Does nothing on a system that cannot be told.

    safetensors maps its files, so each page comes when it is touched, in small pieces, while the processor waits. The
    system reads large pieces by itself, and at the disk's own speed, if it is told what will be needed.
    """

    _places: dict[Path, Mapping[str, tuple[int, int]]] = field(default_factory=dict)  # of each tensor, by file
    _told: dict[Path, tuple[int, int]] = field(default_factory=dict)  # what is read or on its way, by file

    def of(self, path: Path, name: str) -> None:
        """Have the tensor `name` read, and what is behind it in the file. Returns at once."""
        if sys.platform != "linux":
            return
        if path not in self._places:
            self._places[path] = places_of(path)
        begin, end = self._places[path][name]
        first, last = self._told.get(path, (begin, begin))
        if first <= begin and end + AHEAD_BYTES // 2 <= last:
            return
        if not first <= begin <= last:
            first = last = begin
        self._told[path] = first, end + AHEAD_BYTES
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, last, end + AHEAD_BYTES - last, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def places_of(path: Path) -> Mapping[str, tuple[int, int]]:
    """Return where each tensor of a safetensors file begins and ends in it, in bytes."""
    with open(path, "rb") as file:
        num_header_bytes = int.from_bytes(file.read(_NUM_LENGTH_BYTES), "little")
        header = json.loads(file.read(num_header_bytes))
    base = _NUM_LENGTH_BYTES + num_header_bytes
    places = {name: tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"}
    return {name: (base + begin, base + end) for name, (begin, end) in places.items()}


def unheard(num_filled: int) -> None:
    """Ignore progress: the default `OnProgress`."""


class Weights(Protocol):
    def describe(self) -> str:
        """Return one line for the header that identifies the weights."""
        ...

    def holds(self, name: str) -> bool:
        """Do the weights have values for the buffer `name`?"""
        ...

    def fill(self, name: str, parameter: Tensor, on_progress: OnProgress = unheard) -> bool:
        """Write the values of `name` into a whole, unsharded `parameter`; False means they were left unchanged."""
        ...

    def sample(self, name: str, shape: Sequence[int], start: int, count: int) -> Tensor | None:
        """Return `count` consecutive elements of the flattened `name` from `start` on, within one row of its last
        dimension.

        Nothing else is computed or read. In the dtype of the weights; None if they do not define it.
        """
        ...


class OwnInit(Protocol):
    """The values a model's class gives its parameters before weights are loaded."""

    def vector(self, name: str) -> Tensor:
        """Return the whole parameter `name`, of less than two dimensions: fp32, on the CPU, the same in every call."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomWeights:
    """Uniform values that depend only on `seed`, the qualified name and the element's index.

    So every backend, device, world size, sharding and layer count gives the same model. Values are representable in
    bf16, so that fp32 master weights and bf16 weights agree. The standard deviation is the config's
    `initializer_range`. Vectors are spread around the model's own init: those it sets to 0 (biases) by that deviation,
    the others (norms' 1, states' decays, sinks) by NORM_SPREAD of their value, which changes no sign. Without
    `own_init` vectors are left unchanged.
    """

    seed: int
    std: float
    own_init: OwnInit | None = None

    def describe(self) -> str:
        """Name the weights differently from those of releases whose vectors were constant."""
        return f"random v2, seed {self.seed}"

    def holds(self, name: str) -> bool:
        return False

    def fill(self, name: str, parameter: Tensor, on_progress: OnProgress = unheard) -> bool:
        if parameter.ndim < 2:
            if self.own_init is None:
                return False
            parameter.detach().copy_(self._vector(name, self.own_init).view_as(parameter))
            return True
        name_hash.fill(parameter.detach().view(-1), self._keys(name), self.std, on_progress)
        return True

    def sample(self, name: str, shape: Sequence[int], start: int, count: int) -> Tensor | None:
        if len(shape) < 2:
            return self._vector(name, self.own_init).flatten()[start : start + count] if self.own_init else None
        index = torch.arange(start, start + count, device="cpu")
        return name_hash.values(index, self._keys(name), self.std).to(torch.bfloat16).float()

    def _vector(self, name: str, own_init: OwnInit) -> Tensor:
        """Compute a vector whole, on the CPU, in fp32; vectors are small."""
        own = own_init.vector(name).float()
        random = name_hash.values(torch.arange(own.numel(), device="cpu"), self._keys(name), 1.0).view_as(own)
        around = torch.where(own == 0, random * self.std, own * (1 + NORM_SPREAD * random))
        return around.to(torch.bfloat16).float()

    def _keys(self, name: str) -> tuple[int, int]:
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderWeights:
    """The weights in a model folder's safetensors files. One parameter is made at a time, of the tensors it needs."""

    folder: Path
    file_of_name: Mapping[str, Path]  # by the tensor's name in the files
    recipes: Mapping[str, Recipe]  # by parameter
    _ahead: ReadAhead = field(default_factory=ReadAhead, compare=False, repr=False)

    @classmethod
    def open(cls, folder: Path, model: PreTrainedModel | None) -> "FolderWeights":
        """Open the folder of weights for `model`, which may be on the meta device; None: names are as in the files.

        Raises UsageError if a file is damaged, or holds tensors that transformers cannot convert for this model.
        """
        file_of_name: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (no mapping)
                        shapes[name] = tuple(file.get_slice(name).get_shape())
                        file_of_name[name] = path
            except Exception as error:  # safetensors raises its own type, and OSError
                advice = f"Copy it again, or give {RANDOM_WEIGHTS}"
                raise UsageError(path, f"cannot be read: {error}", advice) from error
        if model is None:
            as_they_are = {name: Recipe.of_one(name) for name in shapes}
            return cls(folder=folder, file_of_name=file_of_name, recipes=as_they_are)
        try:
            recipes = recipes_of(model, shapes)
        except Exception as error:  # whatever a conversion raises for tensors of other shapes than it expects
            why = f": transformers cannot convert its tensors for {type(model).__name__}: {error}"
            raise UsageError(folder, why, _OTHER_CONFIG) from error
        return cls(folder=folder, file_of_name=file_of_name, recipes=recipes)

    def describe(self) -> str:
        return f"from {self.folder}"

    def holds(self, name: str) -> bool:
        return name in self.recipes

    def fill(self, name: str, parameter: Tensor, on_progress: OnProgress = unheard) -> bool:
        """Fill `parameter`. Raises UsageError if the folder has no `name`, or one of another shape."""
        if name not in self.recipes:
            known = f"{len(self.file_of_name)} tensors, such as {next(iter(self.file_of_name), 'none')}"
            why = f"has no weights named {name} (it has {known})"
            advice = f"Is it the model of this config? Or give {RANDOM_WEIGHTS}"
            raise UsageError(self.folder, why, advice)
        values = self.recipes[name].make(name, self._read_on)
        if values.shape != parameter.shape:
            why = f": {name} has shape {list(values.shape)}, but the config makes it {list(parameter.shape)}"
            raise UsageError(self.folder, why, _OTHER_CONFIG)
        # a device makes fp32 of bf16 faster than the host, and gets half the bytes
        parameter.detach().copy_(values.to(parameter.device))
        on_progress(values.numel())
        return True

    def sample(self, name: str, shape: Sequence[int], start: int, count: int) -> Tensor | None:
        if name not in self.recipes:
            return None
        recipe = self.recipes[name]
        if recipe.converter is not None:
            values = recipe.make(name, self._read)
            if tuple(values.shape) != tuple(shape) or not values.is_floating_point():
                return None
            return values.flatten()[start : start + count].clone()
        ((_, source),) = recipe.sources
        return self._slice(source, shape, start, count)

    def _read_on(self, source: str) -> Tensor:
        """Read a tensor, and have the system read what is likely to be needed next."""
        self._ahead.of(self.file_of_name[source], source)
        return self._read(source)

    def _read(self, source: str) -> Tensor:
        with safe_open(self.file_of_name[source], framework="pt") as file:
            tensor: Tensor = file.get_tensor(source)
        return tensor

    def _slice(self, source: str, shape: Sequence[int], start: int, count: int) -> Tensor | None:
        """Read `count` elements of a tensor in the files, and nothing else."""
        with safe_open(self.file_of_name[source], framework="pt") as file:
            values = file.get_slice(source)
            if tuple(values.get_shape()) != tuple(shape):
                return None
            if not shape:
                whole: Tensor = file.get_tensor(source)
                return whole.reshape(1)
            places: list[slice] = []
            for size in reversed(shape):
                width = count if not places else 1
                places.append(slice(start % size, start % size + width))
                start //= size
            block: Tensor = values[tuple(reversed(places))]
        return block.flatten() if block.is_floating_point() else None


def build_with_values(config: PretrainedConfig, *, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model with buffers and vectors on the CPU, as its class sets them, and matrices on the meta device.

    Before transformers 5.0 these values are computed in the constructors alone. From 5.0 on `_init_weights` fills them
    again on a model that was built on the meta device.
    """
    with torch.random.fork_rng(devices=[]), _matrices_on_meta():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=attention, dtype=dtype)
    assert isinstance(model, PreTrainedModel)
    return model


def copy_buffers(source: nn.Module, target: nn.Module, device: torch.device) -> None:
    """Give `target` the buffers of `source`, and tensors that it holds as plain attributes, on `device`.

    Rotary embeddings keep their frequencies as both.
    """
    for name, buffer in source.named_buffers(recurse=False):
        setattr(target, name, buffer.to(device))
    for name, value in vars(source).items():
        if isinstance(value, Tensor):
            setattr(target, name, value.to(device))


@contextmanager
def _matrices_on_meta() -> Iterator[None]:
    """Move each parameter of two or more dimensions to the meta device as it is registered: none is filled."""
    register = nn.Module.register_parameter

    def register_small(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.ndim > 1:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", register_small):
        yield
