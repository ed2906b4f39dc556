"""What attaches to trainers, for jobs to import. Each name imports its trainer's library when it is first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capture.integrations.accelerate_loop import record_prepared
    from capture.integrations.lightning_trainer import LightningCaptureCallback
    from capture.integrations.transformers_trainer import CaptureCallback

_HOMES = {
    "CaptureCallback": "transformers_trainer",
    "LightningCaptureCallback": "lightning_trainer",
    "record_prepared": "accelerate_loop",
}

__all__ = ["CaptureCallback", "LightningCaptureCallback", "record_prepared"]


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that a job needs no trainer but its own."""
    if name not in _HOMES:
        raise AttributeError(f"module 'capture.integrations' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
