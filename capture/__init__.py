"""Captures the micro-batches of a training job, and reads them.

from capture import recording

with recording(model, "inputs/my-run"):
    train(model)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capture.actor_config import read_actor_config, write_actor_config
    from capture.capture_file import capture_files, read_micro_batch, write_call
    from capture.micro_batch import CaptureError, MicroBatch, Origin
    from capture.recorder import Recorder, recording

_HOMES = {
    "CaptureError": "capture.micro_batch",
    "MicroBatch": "capture.micro_batch",
    "Origin": "capture.micro_batch",
    "Recorder": "capture.recorder",
    "capture_files": "capture.capture_file",
    "read_actor_config": "capture.actor_config",
    "read_micro_batch": "capture.capture_file",
    "recording": "capture.recorder",
    "write_actor_config": "capture.actor_config",
    "write_call": "capture.capture_file",
}

__all__ = [
    "CaptureError",
    "MicroBatch",
    "Origin",
    "Recorder",
    "capture_files",
    "read_actor_config",
    "read_micro_batch",
    "recording",
    "write_actor_config",
    "write_call",
]


def __getattr__(name: str) -> Any:
    """Imports torch only once something is used that needs it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'capture' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
