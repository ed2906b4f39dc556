"""Read a traced run back: its passes, and each tensor put together from the ranks that shared a pass.

Shape letters: T tokens, K signs of a sketch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from actor_init.spec import UsageError
from replay.runlog.matching import Pass, Window, passes_and_windows
from replay.runlog.reader import PastRun
from replay.tracing.trace_file import (
    FED_PLACES,
    FOLDER,
    LOG_PROBS,
    PARAMETERS,
    PREDICTED_PLACES,
    TRACE,
    Key,
    TraceFile,
    pass_file,
)


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
