"""Write and read the files of a traced run, beside its log: sketches, never code.

    trace/parameters.safetensors          by rank 0 before the first pass: a sketch of every parameter
    trace/pass000003-rank1.safetensors    by each rank after each pass: what it fed, and of every traced tensor a row
                                          for each token it fed; on rank 0, where a window ends, parameters' gradients

A tensor's key is its kind, name and what it is there, as in `forward/model.layers.1.mlp.down_proj/input`. The header's
metadata is one JSON object: `format` is the version, `order` the keys in the order of the pass, and `seen` what of the
model was traced: modules, blocks (where they are compiled), no layer.

A file that is read back becomes a `TraceFile`; the files of the ranks that shared a pass become a `TracedPass`, whose
tensors are put together from theirs.

Shape letters: T tokens, N action tokens, K signs of a sketch, B rows of a micro-batch, S tokens of a row.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actor_init.as_json import from_json
from actor_init.spec import UsageError
from capture.facts import Setting
from replay.runlog.reader import GradientWindow, PastRun, SharedPass, group_passes_and_windows

FORMAT = 1
TRACE = Setting("trace", True)
TRACE_AGAIN = f"Try: the run again, with {TRACE}"
FOLDER = "trace"
PARAMETERS = "parameters.safetensors"
# Keys of tables of what the model was given: int64 [T, 4] for the real tokens, [N, 2] for the action tokens.
FED = "fed"
PREDICTED = "predicted"
# Keys of the tokens' positions, int64 [T] and [N], in the flattened captured [B, S].
FED_POSITIONS, PREDICTED_POSITIONS = "fed_places", "predicted_places"
# The column "documents" holds the token's place in its document.
FED_COLUMNS = ("attention_mask", "input_ids", "position_ids", "documents")
# The column "action_mask" holds the position of the token that predicts the action token, "labels" the token predicted.
PREDICTED_COLUMNS = ("action_mask", "labels")
LOG_PROBS = "log_probs"


class TensorKind(StrEnum):
    """The kinds of traced tensors, in the order in which they are compared; gradients in the order of the backward."""

    PARAMETER = "parameter"
    INPUT = "input"
    FORWARD = "forward"
    GRADIENT = "gradient of an activation"
    PARAMETER_GRADIENT = "gradient of a parameter"


class TensorKey(NamedTuple):
    """Names one traced tensor."""

    kind: TensorKind
    name: str
    what: str

    def __str__(self) -> str:
        return "/".join(self)

    @classmethod
    def parse(cls, text: str) -> Self:
        kind, name, what = text.split("/")
        return cls(TensorKind(kind), name, what)


def name_pass_file(index: int, rank: int) -> str:
    return f"pass{index:06}-rank{rank}.safetensors"


def write_trace(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> None:
    """Write the file under another name and rename it, so that it is there whole or not at all. Raises OSError."""
    from safetensors.torch import save_file

    unfinished = path.with_suffix(".tmp")
    text = json.dumps({"format": FORMAT, **metadata})
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, unfinished, metadata={"trace": text})
    os.replace(unfinished, path)


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceMetadata:
    """What a file's metadata says of it. Fields with defaults are those of a pass, and not of parameters.

    order        keys of the tensors, as the pass computed them
    blocks       name of the module list that holds the transformer layers
    seen         what of the model was traced
    num_columns  tokens in a captured row
    parts        keys of the tensors of which each tp rank holds an addend
    """

    order: list[str]
    blocks: str
    seen: str
    num_columns: int = 0
    tp_rank: int = 0
    parts: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceFile:
    """One file, whose tensors are read as they are asked for.

    It stays open: its list of tensors, which is long, would be read again with each of them.
    """

    path: Path
    metadata: TraceMetadata
    order: list[TensorKey]
    _file: Any = field(compare=False, repr=False)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a file. Raises UsageError if it is not there, damaged, or of another format."""
        try:
            file = safe_open(path, framework="pt")
            values = json.loads((file.metadata() or {})["trace"])
            if values["format"] != FORMAT:
                raise UsageError(
                    f"{path} is in format {values['format']}; this version compares traces of format {FORMAT}. "
                    "Try: the run again"
                )
            metadata = from_json(TraceMetadata, values, source="its metadata", ignore_unknown_fields=True)
            return cls(
                path=path, metadata=metadata, order=[TensorKey.parse(text) for text in metadata.order], _file=file
            )
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UsageError(path, f"is not there or damaged: {error}", TRACE_AGAIN) from error

    def read_tensor(self, key: TensorKey | str) -> Tensor:
        """Read one tensor. Raises UsageError where the file is damaged."""
        try:
            tensor: Tensor = self._file.get_tensor(str(key))
        except (OSError, SafetensorError) as error:
            raise UsageError(self.path, f"is damaged: {error}", TRACE_AGAIN) from error
        return tensor


class TokenTable(NamedTuple):
    """A row of values for each token, by the token's position in the flattened captured [B, S], ascending."""

    positions_T: Tensor
    values_TK: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedPass:
    """One micro-batch, as the ranks that shared it traced it.

    num_columns  tokens in a captured row
    order        tensors that all ranks traced, as the pass computed them
    parts        tensors of which each tp rank holds an addend
    files        by tp rank, the files of its ring ranks
    """

    source: str
    num_columns: int
    order: list[TensorKey]
    parts: frozenset[TensorKey]
    files: Mapping[int, list[TraceFile]]

    def read_tables(self, key: TensorKey | str, positions_key: str | None = None) -> list[TokenTable]:
        """Return a table for each tp rank, since they may disagree; a single one, the sum, where each holds an addend.

        positions_key  names the positions of the table's tokens; None: those that a traced tensor has
        """
        if positions_key is None:
            is_log_probs = isinstance(key, TensorKey) and key.name == LOG_PROBS
            positions_key = PREDICTED_POSITIONS if is_log_probs else FED_POSITIONS
        tables = [self._join_ring(ring_files, key, positions_key) for ring_files in self.files.values()]
        if key not in self.parts:
            return tables
        return [TokenTable(tables[0].positions_T, torch.stack([table.values_TK for table in tables]).sum(dim=0))]

    @staticmethod
    def _join_ring(ring_files: list[TraceFile], key: TensorKey | str, positions_key: str) -> TokenTable:
        """Put the tokens of all ring ranks together, in the order of the captured micro-batch."""
        positions_T = torch.cat([file.read_tensor(positions_key) for file in ring_files])
        values_TK = torch.cat([file.read_tensor(key) for file in ring_files])
        order_T = positions_T.argsort()
        return TokenTable(positions_T[order_T], values_TK[order_T])


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRun:
    """A run that was traced, as its log and its trace tell."""

    run: PastRun
    folder: Path
    parameters: TraceFile
    passes: list[SharedPass]
    windows: list[GradientWindow]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a traced run. Raises UsageError if it was not traced, or its log or trace cannot be used."""
        run = PastRun.read(path)
        if not run.measure.trace:
            raise UsageError(run.folder, "was not traced", f"Try: {run.command} {TRACE}")
        folder = run.folder / FOLDER
        passes, windows = group_passes_and_windows(run.records)
        parameters = TraceFile.open(folder / PARAMETERS)
        return cls(run=run, folder=folder, parameters=parameters, passes=passes, windows=windows)

    def open_pass(self, traced_pass: SharedPass) -> TracedPass:
        files = [TraceFile.open(self.folder / name_pass_file(peer.index, peer.rank)) for peer in traced_pass.peers]
        by_tp_rank: dict[int, list[TraceFile]] = {}
        for file in files:
            by_tp_rank.setdefault(file.metadata.tp_rank, []).append(file)
        return TracedPass(
            source=traced_pass.source,
            num_columns=files[0].metadata.num_columns,
            order=[key for key in files[0].order if all(key in file.order for file in files)],
            parts=frozenset(TensorKey.parse(text) for text in files[0].metadata.parts),
            files=by_tp_rank,
        )

    def open_window_end(self, window: GradientWindow) -> TraceFile:
        """Open the file that holds the gradients of parameters: rank 0 writes it with the window's last pass."""
        return TraceFile.open(self.folder / name_pass_file(self.passes[window.last_pass].peers[0].index, 0))

    def find_layer(self, name: str) -> int | None:
        """Return the layer of the module or parameter `name`; None outside of the transformer layers."""
        prefix = f"{self.parameters.metadata.blocks}."
        return int(name.removeprefix(prefix).split(".")[0]) if name.startswith(prefix) else None
