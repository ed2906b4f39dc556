"""Read a folder of captures, pass by pass: `replay.captures`."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from actor_init.spec import UsageError
from capture.file_format.capture_file import CapturedCall, read_call
from capture.file_format.folder_recordings import list_recordings
from capture.file_format.tensor_codec import Output
from replay.options.spec import Passes, check_folder
from replay.options.value_checks import check_value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Capture:
    """One pass of a recorded job, as one rank saw it.

    path     of its file; of a pass in a segment `<segment>.seg/<capture>.pkl`, which `replay --input-file` takes too
    rank     of the job; None where it is not known
    forward  number of the forward, as this rank's recorder counted them, from 0; None where it is not known
    step     number of the job's optimizer step that the pass is for, from 1; None where none was counted
    trains   whether autograd was on
    tensors  the model's arguments by the job's names, such as `input_ids`, on the CPU
    notes    tensors that the job's loop noted for the pass, such as advantages
    outputs  numbers that the forward gave, such as `loss`; docs/formats.md lists them
    """

    path: Path
    rank: int | None
    forward: int | None
    step: int | None
    trains: bool
    tensors: Mapping[str, Tensor]
    notes: Mapping[str, Tensor]
    outputs: Mapping[str, Output]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self.tensors.items())
        return f"Capture({str(self.path)!r}, rank {self.rank}, step {self.step}: {shapes})"

    @classmethod
    def from_call(cls, path: Path, call: CapturedCall) -> Self:
        """Return the capture at `path`, which holds `call`."""
        origin = call.origin
        return cls(
            path=path,
            rank=origin.rank,
            forward=origin.step,
            step=None if call.optimizer_step is None else call.optimizer_step + 1,
            trains=call.trains,
            tensors=call.tensors,
            notes=call.notes,
            outputs=call.outputs,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the capture as JSON has it; of tensors their shapes and dtypes."""
        return {
            "path": str(self.path),
            "rank": self.rank,
            "forward": self.forward,
            "step": self.step,
            "trains": self.trains,
            "tensors": _describe_tensors(self.tensors),
            "notes": _describe_tensors(self.notes),
        }


def captures(folder: str | os.PathLike[str], *, passes: str = "all", recording: int | None = None) -> Iterator[Capture]:
    """Iterate over the passes in a folder by rank, in recorded order within a rank. One pass at a time is in memory.

    folder     of captures
    passes     `train` (captured with autograd on), `rollout` (off) or `all`
    recording  number of the recording, from 1, as `replay inspect` lists them; None: the latest

    Raises UsageError for a folder or an argument that cannot be, and CaptureError, when it comes to it, for a file that
    is damaged, or that is gone since the folder was listed.
    """
    folder = check_value("folder", folder, Path)
    check_folder(folder, "Give a folder of captures, such as inputs/sample")
    if passes not in list(Passes):
        raise UsageError.not_allowed("passes", passes, f"Give one of {', '.join(Passes)}")
    recordings = list_recordings(folder)
    if not recordings:
        raise UsageError(f"{folder} holds no captures. Give a folder that a recording was written to")
    latest = len(recordings)
    number = latest if recording is None else check_value("recording", recording, int, min=1, max=latest)
    locations = recordings[number - 1].list_captures()
    return _read_captures([location.path for location in locations], passes)


def _read_captures(paths: list[Path], passes: str) -> Iterator[Capture]:
    for path in paths:
        call = read_call(path)
        if passes == Passes.ALL or call.trains == (passes == Passes.TRAIN):
            yield Capture.from_call(path, call)


def _describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in tensors.items()
    }
