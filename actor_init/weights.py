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
from actor_init.checkpoint_names import Recipe, find_recipes
from actor_init.spec import RANDOM_WEIGHTS, UsageError

# How much of a file the system reads after the tensor that is requested. Files are sorted by name, so that this is
# mostly the rest of the same block.
AHEAD_BYTES = 512 * 2**20
# A safetensors file begins with the length of its header.
_NUM_LENGTH_BYTES = 8
_OTHER_CONFIG = f"Give the config of these weights, or {RANDOM_WEIGHTS}"
# The relative standard deviation of vectors that the model's own init does not set to 0.
NORM_SPREAD = 0.05
# It is called during long work with the number of elements filled since the last call.
OnProgress = Callable[[int], None]
INIT_FILLS_BUFFERS = int(transformers.__version__.partition(".")[0]) >= 5


@dataclass(kw_only=True, slots=True)
class ReadAhead:
    """Tells the system which parts of the files are needed next. Does nothing on a system that cannot be told.

    safetensors maps its files, so each page comes when it is touched, in small pieces, while the processor waits. The
    system reads large pieces by itself, and at the disk's own speed, if it is told what will be needed.

    num_bytes   how much the system reads after the tensor that is requested
    _offsets    where each tensor begins and ends, by file
    _requested  the part that is read or on its way, by file
    """

    num_bytes: int = AHEAD_BYTES
    _offsets: dict[Path, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    _requested: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def request(self, path: Path, name: str) -> None:
        """Tell the system to read the tensor `name`, and what follows it in the file. Returns at once."""
        if sys.platform != "linux":
            return
        if path not in self._offsets:
            self._offsets[path] = find_tensor_offsets(path)
        begin, end = self._offsets[path][name]
        first, last = self._requested.get(path, (begin, begin))
        if first <= begin and end + self.num_bytes // 2 <= last:
            return
        if not first <= begin <= last:
            first = last = begin
        self._requested[path] = first, end + self.num_bytes
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, last, end + self.num_bytes - last, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


def find_tensor_offsets(path: Path) -> Mapping[str, tuple[int, int]]:
    """Return where each tensor of a safetensors file begins and ends in it, in bytes."""
    with open(path, "rb") as file:
        num_header_bytes = int.from_bytes(file.read(_NUM_LENGTH_BYTES), "little")
        header = json.loads(file.read(num_header_bytes))
    base = _NUM_LENGTH_BYTES + num_header_bytes
    offsets = {name: tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"}
    return {name: (base + begin, base + end) for name, (begin, end) in offsets.items()}


def ignore_progress(num_filled: int) -> None:
    """Ignore progress: the default `OnProgress`."""


class Weights(Protocol):
    def describe(self) -> str:
        """Return one line for the header that identifies the weights."""
        ...

    def has_tensor(self, name: str) -> bool:
        """Do the weights have values for the buffer `name`?"""
        ...

    def fill(self, name: str, parameter: Tensor, on_progress: OnProgress = ignore_progress) -> bool:
        """Write the values of `name` into a whole, unsharded `parameter`; False means they were left unchanged."""
        ...

    def sample(self, name: str, shape: Sequence[int], start: int, count: int) -> Tensor | None:
        """Return `count` consecutive elements of the flattened `name` from `start` on, within one row of its last
        dimension.

        Nothing else is computed or read. In the dtype of the weights; None if they do not define it.
        """
        ...


class VectorSource(Protocol):
    """The values a model's class gives its parameters before weights are loaded."""

    def make_vector(self, name: str) -> Tensor:
        """Return the whole parameter `name`, of less than two dimensions: fp32, on the CPU, the same in every call."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomWeights:
    """Uniform values that depend only on `seed`, the qualified name and the element's index.

    So every backend, device, world size, sharding and layer count gives the same model. Values are representable in
    bf16, so that fp32 master weights and bf16 weights agree. The standard deviation is the config's
    `initializer_range`. Vectors are spread around the model's own init: those it sets to 0 (biases) by that deviation,
    the others (norms' 1, states' decays, sinks) by NORM_SPREAD of their value, which changes no sign. Without
    `vector_source` vectors are left unchanged.
    """

    seed: int
    std: float
    vector_source: VectorSource | None = None

    def describe(self) -> str:
        """Name the weights differently from those of releases whose vectors were constant."""
        return f"random v2, seed {self.seed}"

    def has_tensor(self, name: str) -> bool:
        return False

    def fill(self, name: str, parameter: Tensor, on_progress: OnProgress = ignore_progress) -> bool:
        if parameter.ndim < 2:
            if self.vector_source is None:
                return False
            parameter.detach().copy_(self._compute_vector(name, self.vector_source).view_as(parameter))
            return True
        name_hash.fill(parameter.detach().view(-1), self._keys(name), self.std, on_progress)
        return True

    def sample(self, name: str, shape: Sequence[int], start: int, count: int) -> Tensor | None:
        if len(shape) < 2:
            return (
                self._compute_vector(name, self.vector_source).flatten()[start : start + count]
                if self.vector_source
                else None
            )
        index = torch.arange(start, start + count, device="cpu")
        return name_hash.compute_values(index, self._keys(name), self.std).to(torch.bfloat16).float()

    def _compute_vector(self, name: str, vector_source: VectorSource) -> Tensor:
        """Compute a vector whole, on the CPU, in fp32; vectors are small."""
        initial = vector_source.make_vector(name).float()
        index = torch.arange(initial.numel(), device="cpu")
        random = name_hash.compute_values(index, self._keys(name), 1.0).view_as(initial)
        spread = torch.where(initial == 0, random * self.std, initial * (1 + NORM_SPREAD * random))
        return spread.to(torch.bfloat16).float()

    def _keys(self, name: str) -> tuple[int, int]:
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderWeights:
    """The weights in a model folder's safetensors files. One parameter is made at a time, of the tensors it needs.

    file_of_name  by the tensor's name in the files
    recipes       by the parameter's name in the model
    """

    folder: Path
    file_of_name: Mapping[str, Path]
    recipes: Mapping[str, Recipe]
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
            # safetensors raises a type of its own, and OSError.
            except Exception as error:
                advice = f"Copy it again, or give {RANDOM_WEIGHTS}"
                raise UsageError(path, f"cannot be read: {error}", advice) from error
        if model is None:
            unchanged = {name: Recipe.from_unchanged_tensor(name) for name in shapes}
            return cls(folder=folder, file_of_name=file_of_name, recipes=unchanged)
        try:
            recipes = find_recipes(model, shapes)
        # A conversion raises whatever it likes for tensors of other shapes than it expects.
        except Exception as error:
            why = f": transformers cannot convert its tensors for {type(model).__name__}: {error}"
            raise UsageError(folder, why, _OTHER_CONFIG) from error
        return cls(folder=folder, file_of_name=file_of_name, recipes=recipes)

    def describe(self) -> str:
        return f"from {self.folder}"

    def has_tensor(self, name: str) -> bool:
        return name in self.recipes

    def fill(self, name: str, parameter: Tensor, on_progress: OnProgress = ignore_progress) -> bool:
        """Fill `parameter`. Raises UsageError if the folder has no `name`, or one of another shape."""
        if name not in self.recipes:
            known = f"{len(self.file_of_name)} tensors, such as {next(iter(self.file_of_name), 'none')}"
            why = f"has no weights named {name} (it has {known})"
            advice = f"Is it the model of this config? Or give {RANDOM_WEIGHTS}"
            raise UsageError(self.folder, why, advice)
        values = self.recipes[name].make(name, self._read_ahead)
        if values.shape != parameter.shape:
            why = f": {name} has shape {list(values.shape)}, but the config makes it {list(parameter.shape)}"
            raise UsageError(self.folder, why, _OTHER_CONFIG)
        # The values are moved before they are converted: a device makes fp32 of bf16 faster than the host, and half the
        # bytes are moved.
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
        return self._read_slice(source, shape, start, count)

    def _read_ahead(self, source: str) -> Tensor:
        """Read a tensor, and have the system read what is likely to be needed next."""
        self._ahead.request(self.file_of_name[source], source)
        return self._read(source)

    def _read(self, source: str) -> Tensor:
        with safe_open(self.file_of_name[source], framework="pt") as file:
            tensor: Tensor = file.get_tensor(source)
        return tensor

    def _read_slice(self, source: str, shape: Sequence[int], start: int, count: int) -> Tensor | None:
        """Read `count` elements of a tensor in the files, and nothing else."""
        with safe_open(self.file_of_name[source], framework="pt") as file:
            values = file.get_slice(source)
            if tuple(values.get_shape()) != tuple(shape):
                return None
            if not shape:
                whole: Tensor = file.get_tensor(source)
                return whole.reshape(1)
            reversed_slices: list[slice] = []
            for size in reversed(shape):
                width = count if not reversed_slices else 1
                reversed_slices.append(slice(start % size, start % size + width))
                start //= size
            block: Tensor = values[tuple(reversed(reversed_slices))]
        return block.flatten() if block.is_floating_point() else None


def build_with_values(config: PretrainedConfig, *, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model with buffers and vectors on the CPU, as its class sets them, and matrices on the meta device.

    Before transformers 5.0 these values are computed in the constructors alone. From 5.0 on `_init_weights` fills them
    again on a model that was built on the meta device.
    """
    with torch.random.fork_rng(devices=[]), _register_matrices_on_meta():
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


def list_modules_below(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules at and below `prefix`, with their names in `model`; all of them if it is empty."""
    for name, module in model.named_modules():
        if not prefix or name == prefix or name.startswith(f"{prefix}."):
            yield name, module


class TiedParameters:
    """The empty parameters on a device that stand for those on the meta device. Parameters that are tied stay tied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_meta_parameter: dict[nn.Parameter, nn.Parameter] = {}

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._by_meta_parameter

    def get(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter on the device; it is made at the first call."""
        if parameter not in self._by_meta_parameter:
            empty = torch.empty_like(parameter, device=self._device)
            self._by_meta_parameter[parameter] = nn.Parameter(empty, parameter.requires_grad)
        return self._by_meta_parameter[parameter]


@contextmanager
def _register_matrices_on_meta() -> Iterator[None]:
    """Move each parameter of two or more dimensions to the meta device as it is registered: none is filled."""
    register = nn.Module.register_parameter

    def register_small(module: nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.ndim > 1:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", register_small):
        yield
