"""Read the state of a job's optimizer: from a file of torch.save, a Trainer's checkpoint folder, or a folder of DCP.

No code of a file is run. torch.load reads tensors and plain values alone (`weights_only`); the table of a DCP folder
(torch.distributed.checkpoint) is a pickle, and is read with a list of the classes that it may name.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from actor_init.spec import UsageError
from capture.facts import Setting

# The files in a folder that may hold the whole state: Trainer's and accelerate's names.
STATE_FILES = ("optimizer.pt", "optimizer.bin")
DCP_TABLE = ".metadata"
# Keys that a dict of torch.save may have the optimizer's state under.
STATE_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_state")
STEP = "step"
ADVICE = "Give optimizer.pt of a Trainer's checkpoint, a file of torch.save(optimizer.state_dict()), or a folder of DCP"


@dataclass(frozen=True, kw_only=True, slots=True)
class DcpValue:
    """A tensor or a number in a DCP folder, which `read` reads.

    shape   None: a plain value
    pieces  what a file holds of it: the file, the first byte and their number, and where in the tensor the piece begins
    """

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    pieces: Sequence[tuple[Path, int, int, tuple[int, ...]]]

    def read(self) -> Any:
        """Read the whole value. Raises OSError, or what torch raises for a damaged file."""
        if self.shape is None:
            path, first, length, _ = self.pieces[0]
            return _load_slice(path, first, length)
        whole = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        for path, first, length, offsets in self.pieces:
            piece = _load_slice(path, first, length)
            region = tuple(slice(begin, begin + size) for begin, size in zip(offsets, piece.shape, strict=True))
            whole[region] = piece
        return whole


def _load_slice(path: Path, first: int, length: int) -> Any:
    with path.open("rb") as file:
        file.seek(first)
        return torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateGroup:
    """A parameter group of a saved state: the numbers of its parameters, and their names where it says them."""

    numbers: Sequence[int]
    names: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerState:
    """The state of a job's optimizer, by numbers of parameters (torch.save) or by their names (DCP).

    by_number, by_name  each parameter's state: tensors, numbers and values of DCP that are not read yet
    groups              of a state by numbers
    learning_rates      of its groups, as they were saved; empty where the file does not say them
    """

    path: Path
    by_number: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    by_name: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    groups: Sequence[StateGroup] = ()
    learning_rates: Sequence[float] = ()

    @classmethod
    def read(cls, path: Path) -> "OptimizerState":
        """Read the state in a file or a folder. Raises UsageError if there is none that can be read."""
        setting = Setting("optimizer_state", path)
        if not path.exists():
            raise UsageError(setting, "does not exist", ADVICE)
        if path.is_file():
            return cls._read_file(path)
        if (path / DCP_TABLE).is_file():
            return cls._read_dcp(path)
        for name in STATE_FILES:
            if (path / name).is_file():
                return cls._read_file(path / name)
        folders = sorted(table.parent for table in path.glob(f"*optim*/{DCP_TABLE}"))
        if folders:
            return cls._read_dcp(folders[0])
        if any(path.glob("*zero_pp_rank_*optim_states.pt")) or any(path.glob("*/*zero_pp_rank_*optim_states.pt")):
            why = "is a checkpoint of DeepSpeed's, partitioned over its ranks, which its own engine alone puts together"
            raise UsageError(
                setting, why, f"Try: a state that {Setting('save_state')} wrote, with {Setting('load_state')}"
            )
        raise UsageError(setting, f"holds none of {', '.join(STATE_FILES)} and {DCP_TABLE}", ADVICE)

    @classmethod
    def _read_file(cls, path: Path) -> "OptimizerState":
        setting = Setting("optimizer_state", path)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            # torch raises many kinds for a file that is damaged, or that asks for more than tensors and plain values.
            reason = " ".join(str(error).split())[:200]
            raise UsageError(setting, f"cannot be read without running code: {reason}", ADVICE) from error
        state = _find_state(content)
        if state is None:
            keys = ", ".join(sorted(map(str, content))[:8]) if isinstance(content, dict) else type(content).__name__
            raise UsageError(setting, f"holds no `state` and `param_groups` ({keys})", ADVICE)
        by_key: Mapping[Any, Any] = state["state"]
        rates = tuple(float(group["lr"]) for group in state["param_groups"] if "lr" in group)
        # A full state of FSDP has names, as a DCP folder has.
        if by_key and all(isinstance(key, str) for key in by_key):
            return cls(path=path, by_name=by_key, learning_rates=rates)
        groups = [
            StateGroup(numbers=tuple(group["params"]), names=tuple(group.get("param_names", ())))
            for group in state["param_groups"]
        ]
        return cls(path=path, by_number=by_key, groups=groups, learning_rates=rates)

    @classmethod
    def _read_dcp(cls, folder: Path) -> "OptimizerState":
        table = _read_dcp_table(folder)
        by_name: dict[str, dict[str, Any]] = {}
        for key, described in table.state_dict_metadata.items():
            parts = key.split(".")
            if "state" not in parts[:-2]:
                continue
            begin = parts.index("state") + 1
            value = _locate_dcp_value(folder, table, key, described)
            by_name.setdefault(".".join(parts[begin:-1]), {})[parts[-1]] = value
        if not by_name:
            raise UsageError(Setting("optimizer_state", folder), "holds no state of an optimizer", ADVICE)
        return cls(path=folder, by_name=by_name)

    def list_counts(self) -> tuple[int, ...]:
        """List the different numbers of steps that it has counted; empty where it counts none."""
        states = [*self.by_number.values(), *self.by_name.values()]
        counts = [_read_value(state[STEP]) for state in states if STEP in state]
        return tuple(sorted({int(count) for count in counts}))


def _find_state(content: Any) -> Mapping[str, Any] | None:
    """Find the state of an optimizer in what torch.save wrote."""
    candidates = [content]
    if isinstance(content, dict):
        candidates += [content[key] for key in STATE_KEYS if key in content]
    for candidate in candidates:
        if isinstance(candidate, dict) and {"state", "param_groups"} <= candidate.keys():
            return candidate
    return None


def read_state(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Read the state of one parameter: each value by its name."""
    for key, value in values.items():
        yield key, _read_value(value)


def _read_value(value: Any) -> Any:
    return value.read() if isinstance(value, DcpValue) else value


def find_shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor that may not be read yet; None for a number."""
    if isinstance(value, DcpValue):
        return value.shape
    return tuple(value.shape) if isinstance(value, Tensor) else None


class _TableUnpickler(pickle.Unpickler):
    """Reads the table of a DCP folder. It knows the classes of such tables, none of which does anything."""

    _DCP_CLASSES = (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    )
    _PATHS: Mapping[str, Any] = {"PosixPath": PosixPath, "PurePosixPath": PurePosixPath, "WindowsPath": PurePosixPath}

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == metadata.__name__ and (known := self._find_nested(global_name)) is not None:
            return known
        if (module_name, global_name) == (filesystem.__name__, "_StorageInfo"):
            return filesystem._StorageInfo
        if module_name == "pathlib" and global_name in self._PATHS:
            return self._PATHS[global_name]
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if (module_name, global_name) == ("torch", "Size"):
            return torch.Size
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module_name, global_name) == ("torch.serialization", "_get_layout"):
            return _get_layout
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def _find_nested(self, global_name: str) -> Any:
        name = global_name.rpartition(".")[2]
        return getattr(metadata, name, None) if name in self._DCP_CLASSES else None


def _get_layout(name: str) -> torch.layout:
    """Return a layout by its name, as `torch.strided`."""
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f"{name} is no layout")
    return layout


def _read_dcp_table(folder: Path) -> metadata.Metadata:
    setting = Setting("optimizer_state", folder)
    try:
        table = _TableUnpickler(io.BytesIO((folder / DCP_TABLE).read_bytes())).load()
    except Exception as error:
        raise UsageError(
            setting, f": {DCP_TABLE} cannot be read: {' '.join(str(error).split())[:200]}", ADVICE
        ) from error
    if not isinstance(table, metadata.Metadata):
        raise UsageError(setting, f": {DCP_TABLE} is no table of torch.distributed.checkpoint", ADVICE)
    return table


def _locate_dcp_value(folder: Path, table: metadata.Metadata, key: str, described: Any) -> DcpValue:
    """Find the pieces of a value. Raises UsageError for pieces that are not there, or are packed in some way."""
    is_tensor = isinstance(described, metadata.TensorStorageMetadata)
    places = [tuple(chunk.offsets) for chunk in described.chunks] if is_tensor else [None]
    pieces = []
    for offsets in places:
        index = metadata.MetadataIndex(key) if offsets is None else metadata.MetadataIndex(key, torch.Size(offsets))
        info = (table.storage_data or {}).get(index)
        if info is None or getattr(info, "transform_descriptors", None):
            why = f": {key} is not there" if info is None else f": {key} is compressed"
            raise UsageError(Setting("optimizer_state", folder), why, ADVICE)
        path = folder / Path(info.relative_path).name
        pieces.append((path, int(info.offset), int(info.length), offsets or ()))
    shape = tuple(described.size) if is_tensor else None
    dtype = described.properties.dtype if is_tensor else None
    return DcpValue(shape=shape, dtype=dtype, pieces=pieces)
