"""Record a loop under Accelerate, from what `accelerator.prepare` returned. Accelerate itself is not imported."""

from pathlib import Path
from typing import Any

from torch import nn

from capture.record.recorder import Recorder
from capture.recordings import recording


def record_prepared(accelerator: Any, model: nn.Module, folder: str | Path, **settings: Any) -> Recorder:
    """Record a prepared model until `accelerator.end_training()`, and note the losses that the loop computes.

        model, optimizer = accelerator.prepare(model, optimizer)
        record_prepared(accelerator, model, "inputs/my-run", reproduce=True)

    The loss that `accelerator.backward` is given is noted if the model was called once since the last backward: then
    it is that pass's own.

    model             what `accelerator.prepare` returned for the model
    folder, settings  as for `recording`, which raises TypeError or ValueError for what is not allowed
    """
    recorder = recording(model, folder, **settings)
    backward, end_training = accelerator.backward, accelerator.end_training
    num_seen = 0

    def note_and_backward(loss: Any, **arguments: Any) -> None:
        nonlocal num_seen
        if recorder.num_seen - num_seen == 1:
            recorder.note(loss=loss)
        num_seen = recorder.num_seen
        backward(loss, **arguments)

    def close_and_end_training() -> None:
        recorder.close()
        accelerator.backward, accelerator.end_training = backward, end_training
        end_training()

    accelerator.backward, accelerator.end_training = note_and_backward, close_and_end_training
    return recorder
