"""Record from trainers with callbacks: `trainer = Trainer(..., callbacks=[CaptureCallback("inputs/my-run")])`.

This is the only module of `capture` that imports transformers.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from capture.module_search import ModuleSearch
from capture.record.recorder import Recorder
from capture.recordings import check_settings, recording


# transformers has no types.
class CaptureCallback(TrainerCallback):  # type: ignore[misc]
    """Records the model of transformers' Trainer, or of one made from it, in whatever wrapper it calls.

    It records from the first training forward to the end of training; each `train()` is a recording of its own.
    `recorder` is the latest one, or None before its first pass.

    folder, settings  as for `recording`. Raises TypeError or ValueError for settings that are not allowed
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        check_settings(settings)
        self.recorder: Recorder | None = None
        self._folder = Path(folder).absolute()
        self._settings = settings
        self._search: ModuleSearch | None = None
        self._logged_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        self._close()
        self.recorder = None
        self._logged_step = state.global_step

        def trains_model(module: nn.Module, *_: Any) -> bool:
            return torch.is_grad_enabled() and any(inner is model for inner in module.modules())

        self._search = ModuleSearch(trains_model, self._record)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Note the logged loss and norm for the latest pass.

        A logged loss is the mean over all ranks and passes since the last log. It is the pass's own loss only if that
        was a single pass.
        """
        num_steps, self._logged_step = state.global_step - self._logged_step, state.global_step
        if self.recorder is None or not logs or "loss" not in logs:
            return
        loss, grad_norm = logs["loss"], logs.get("grad_norm")
        is_single_pass = num_steps * args.gradient_accumulation_steps * args.world_size == 1
        if is_single_pass or not math.isfinite(loss):
            self.recorder.note(loss=loss, grad_norm=grad_norm)
        elif grad_norm is not None:
            self.recorder.note(grad_norm=grad_norm)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close()

    def _record(self, module: nn.Module) -> None:
        self.recorder = recording(module, self._folder, **self._settings)

    def _close(self) -> None:
        if self._search is not None:
            self._search.end()
        if self.recorder is not None:
            self.recorder.close()
