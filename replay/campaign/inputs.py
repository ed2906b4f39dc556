"""Read the shapes of the inputs that a campaign replays in an order of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actor_init.spec import UsageError
from replay.options.spec import InputsSpec
from replay.profiling.shapes import Shape, read_shapes
from replay.resolution.selection import Selection, select


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapedInputs:
    """The inputs of a folder that can be fed to a model, and the files that cannot, each with the reason."""

    selection: Selection
    shapes: Sequence[Shape]
    damaged: Sequence[tuple[Path, str]]

    @classmethod
    def of(cls, spec: InputsSpec, *, loss: str, grad_accumulation: int | None) -> "ShapedInputs":
        """Read the shapes, of one data rank. Raises UsageError if no input can be replayed.

        grad_accumulation  passes of a window; None: the job's
        """
        selection = select(spec, 0, 1, loss=loss, grad_accumulation=grad_accumulation)
        shapes, wrong = read_shapes(selection.inputs, loss)
        if not shapes:
            raise UsageError("no input can be fed to a model. Try: replay inspect, with that folder")
        return cls(selection=selection, shapes=shapes, damaged=[*selection.damaged, *wrong])
