"""Record the micro-batches of a training job, and read them.

from capture import recording

with recording(model, "inputs/my-run"):
    train(model)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capture.facts import CaptureError
    from capture.file_format.actor_config import read_actor_config, write_actor_config
    from capture.file_format.capture_file import read_micro_batch, write_call
    from capture.file_format.listing import capture_files
    from capture.file_format.micro_batch import MicroBatch, Origin
    from capture.record.recorder import Recorder, note, note_next
    from capture.recordings import recording

_HOMES = {
    "CaptureError": "capture.facts",
    "MicroBatch": "capture.file_format.micro_batch",
    "Origin": "capture.file_format.micro_batch",
    "Recorder": "capture.record.recorder",
    "capture_files": "capture.file_format.listing",
    "note": "capture.record.recorder",
    "note_next": "capture.record.recorder",
    "read_actor_config": "capture.file_format.actor_config",
    "read_micro_batch": "capture.file_format.capture_file",
    "recording": "capture.recordings",
    "write_actor_config": "capture.file_format.actor_config",
    "write_call": "capture.file_format.capture_file",
}

__all__ = [
    "CaptureError",
    "MicroBatch",
    "Origin",
    "Recorder",
    "capture_files",
    "note",
    "note_next",
    "read_actor_config",
    "read_micro_batch",
    "recording",
    "write_actor_config",
    "write_call",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that torch is not imported before."""
    if name not in _HOMES:
        raise AttributeError(f"module 'capture' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
