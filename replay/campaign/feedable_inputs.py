"""Read which inputs of a folder can be fed to a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from actor_init.spec import UsageError
from replay.options.spec import InputsSpec
from replay.profiling.prediction import InputShape, read_shapes
from replay.resolution.selection import Selection, select


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedableInputs:
    """The inputs of a folder that can be fed to a model, for campaigns that replay them in an order of their own.

    unfeedable  files that cannot be read, or whose inputs no model can be fed, each with the reason. A file of a call
                that no replay can make is in `selection.unreplayable` instead
    """

    selection: Selection
    shapes: Sequence[InputShape]
    unfeedable: Sequence[tuple[Path, str]]

    @classmethod
    def read(cls, spec: InputsSpec, *, loss: str, grad_accumulation: int | None) -> Self:
        """Read the shapes of all selected inputs, as a replay with one data rank feeds them.

        Raises UsageError if no input can be replayed.

        grad_accumulation  passes of a window; None: as many as in the job that was recorded
        """
        selection = select(spec, data_rank=0, num_data_ranks=1, loss=loss, grad_accumulation=grad_accumulation)
        shapes, unfeedable = read_shapes(selection.inputs, loss)
        if not shapes:
            raise UsageError("no input can be fed to a model. Try: replay inspect, with that folder")
        return cls(selection=selection, shapes=shapes, unfeedable=[*selection.damaged, *unfeedable])
