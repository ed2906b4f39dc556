"""Write and read the files of a traced run, beside its log: sketches, never code.

    trace/parameters.safetensors          by rank 0 before the first pass: a sketch of every parameter
    trace/pass000003-rank1.safetensors    by each rank after each pass: what it fed, and of every traced tensor a row
                                          for each token it fed; on rank 0, where a window ends, parameters' gradients

A tensor's key is its kind, name and what it is there, as in `forward/model.layers.1.mlp.down_proj/input`; the header's
metadata is one JSON object, of which `format` is the version, `order` the keys as the pass came upon them, and `seen`
what of the model was traced: modules, blocks (where they are compiled), no layer.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from safetensors import SafetensorError, safe_open

from actor_init.as_json import from_json
from actor_init.spec import UsageError
from capture.facts import Setting

if TYPE_CHECKING:  # `replay compare` reads logs without torch
    from torch import Tensor
import torch
from torch import Tensor

from replay.runlog.reader import Pass, PastRun, Window, passes_and_windows

FORMAT = 1
TRACE = Setting("trace", True)
AGAIN = f"Try: the run again, with {TRACE}"
FOLDER = "trace"
PARAMETERS = "parameters.safetensors"
FED = "fed"  # int64 [T, 4], of each real token: see FED_COLUMNS
PREDICTED = "predicted"  # int64 [N, 2], of each action token: see PREDICTED_COLUMNS
FED_PLACES, PREDICTED_PLACES = "fed_places", "predicted_places"  # int64, in the flattened captured [B, S]
FED_COLUMNS = ("attention_mask", "input_ids", "position_ids", "documents")  # the last: its place in its document
PREDICTED_COLUMNS = ("action_mask", "labels")  # the token that predicts it, and what is predicted
LOG_PROBS = "log_probs"


class Kind(StrEnum):
    """The kinds of traced tensors, in the order in which they are compared; gradients as they come back."""

    PARAMETER = "parameter"
    INPUT = "input"
    FORWARD = "forward"
    GRADIENT = "gradient of an activation"
    PARAMETER_GRADIENT = "gradient of a parameter"


class Key(NamedTuple):
    """Names one traced tensor."""

    kind: Kind
    name: str
    what: str

    def __str__(self) -> str:
        return "/".join(self)

    @classmethod
    def parse(cls, text: str) -> Self:
        kind, name, what = text.split("/")
        return cls(Kind(kind), name, what)


def pass_file(index: int, rank: int) -> str:
    return f"pass{index:06}-rank{rank}.safetensors"


def write_trace(path: Path, tensors: "Mapping[str, Tensor]", about: Mapping[str, object]) -> None:
    """Write the file whole or not at all. Raises OSError."""
    from safetensors.torch import save_file

    unfinished = path.with_suffix(".tmp")
    text = json.dumps({"format": FORMAT, **about})
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, unfinished, metadata={"trace": text})
    os.replace(unfinished, path)


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a file's metadata says of it. Fields with defaults are those of a pass, and not of parameters."""

    order: list[str]
    blocks: str
    seen: str
    num_columns: int = 0
    tp_rank: int = 0
    parts: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFile:
    """One file, whose tensors are read as they are asked for."""

    path: Path
    about: About
    order: list[Key]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a file. Raises UsageError if it is not there, damaged, or of another format."""
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["trace"])
            if about["format"] != FORMAT:
                raise UsageError(
                    f"{path} is in format {about['format']}; this version compares traces of format {FORMAT}. "
                    "Try: the run again"
                )
            written = from_json(About, about, source="its metadata", ignore_others=True)
            return cls(path=path, about=written, order=[Key.parse(text) for text in written.order])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UsageError(path, f"is not there or damaged: {error}", AGAIN) from error

    def tensor(self, key: Key | str) -> "Tensor":
        """Read one tensor. Raises UsageError where the file is damaged."""
        try:
            with safe_open(self.path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(str(key))
        except (OSError, SafetensorError) as error:
            raise UsageError(self.path, f"is damaged: {error}", AGAIN) from error
        return tensor


# Read a traced run back: its passes, and each tensor put together from the ranks that shared a pass.
#
# Shape letters: T tokens, K signs of a sketch.


class Table(NamedTuple):
    """Rows by their place in the flattened captured [B, S], ascending."""

    places_T: Tensor
    values_TK: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedPass:
    """One micro-batch, as the ranks that shared it traced it."""

    source: str
    num_columns: int  # tokens in a captured row
    order: list[Key]
    parts: frozenset[Key]
    files: Mapping[int, list[TraceFile]]  # by tp rank: of each ring rank

    def tables(self, key: Key | str, places: str | None = None) -> list[Table]:
        """Return one table where tp ranks hold parts, which add up; else each tp rank's own, for they may disagree."""
        if places is None:
            places = PREDICTED_PLACES if isinstance(key, Key) and key.name == LOG_PROBS else FED_PLACES
        own = [self._of_ring(files, key, places) for files in self.files.values()]
        if key not in self.parts:
            return own
        return [Table(own[0].places_T, torch.stack([table.values_TK for table in own]).sum(dim=0))]

    @staticmethod
    def _of_ring(files: list[TraceFile], key: Key | str, places: str) -> Table:
        places_T = torch.cat([file.tensor(places) for file in files])
        values_TK = torch.cat([file.tensor(key) for file in files])
        order_T = places_T.argsort()
        return Table(places_T[order_T], values_TK[order_T])


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRun:
    run: PastRun
    folder: Path
    parameters: TraceFile
    passes: list[Pass]
    windows: list[Window]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a traced run. Raises UsageError if it was not traced, or its log or trace cannot be used."""
        run = PastRun.read(path)
        if not run.measure.trace:
            raise UsageError(run.folder, "was not traced", f"Try: {run.command} {TRACE}")
        folder = run.folder / FOLDER
        passes, windows = passes_and_windows(run.records)
        parameters = TraceFile.open(folder / PARAMETERS)
        return cls(run=run, folder=folder, parameters=parameters, passes=passes, windows=windows)

    def traced(self, one: Pass) -> TracedPass:
        opened = [TraceFile.open(self.folder / pass_file(peer.index, peer.rank)) for peer in one.peers]
        files: dict[int, list[TraceFile]] = {}
        for file in opened:
            files.setdefault(file.about.tp_rank, []).append(file)
        return TracedPass(
            source=one.source,
            num_columns=opened[0].about.num_columns,
            order=[key for key in opened[0].order if all(key in file.order for file in opened)],
            parts=frozenset(Key.parse(text) for text in opened[0].about.parts),
            files=files,
        )

    def end_of(self, window: Window) -> TraceFile:
        """Open the file that holds the gradients of parameters."""
        return TraceFile.open(self.folder / pass_file(self.passes[window.last_pass].peers[0].index, 0))

    def layer_of(self, name: str) -> int | None:
        """Return the layer of the module or parameter `name`; None outside of the transformer layers."""
        blocks = f"{self.parameters.about.blocks}."
        return int(name.removeprefix(blocks).split(".")[0]) if name.startswith(blocks) else None
