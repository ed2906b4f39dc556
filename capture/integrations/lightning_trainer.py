"""Record from Lightning's Trainer: `Trainer(callbacks=[LightningCaptureCallback("inputs/my-run", reproduce=True)])`.

The Trainer is that of `lightning` or of `pytorch_lightning`: each has a class for callbacks, and the job's is taken.
"""

import sys
from pathlib import Path
from typing import Any

from capture.child_processes import choose_marks_folder
from capture.record.background_writer import warn
from capture.record.recorder import Recorder
from capture.recordings import check_settings
from capture.run import ModelSearch, RecordingOrder

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


# Lightning is not imported by mypy.
class LightningCaptureCallback(Callback):  # type: ignore[misc]
    """Records the outermost causal language model that a LightningModule trains, as `capture run` finds it.

    It records from the first training forward to the end of `fit`; each `fit` is a recording of its own. `recorder` is
    the latest one, or None before its first pass.

    folder, settings  as for `recording`. Raises TypeError or ValueError for settings that are not allowed
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        check_settings(settings)
        self.recorder: Recorder | None = None
        self._folder = Path(folder).absolute()
        self._settings = settings
        self._search: ModelSearch | None = None
        self._num_seen = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        settings = dict(self._settings)
        order = RecordingOrder(
            folder=str(self._folder),
            module_name=None,
            arguments=settings.pop("arguments", None) or {},
            settings=settings,
            marks=str(choose_marks_folder()),
        )
        self.recorder = None
        self._search = ModelSearch(order, self._keep)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._num_seen = 0 if self.recorder is None else self.recorder.num_seen

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the loss of `training_step` if that was one pass: then it is the pass's own.

        `on_before_backward` would come in time for the pass's weight in the gradient, but is given a loss that is
        multiplied by the scale of fp16. Lightning has divided this one for accumulation.
        """
        if self.recorder is None or self.recorder.num_seen - self._num_seen != 1:
            return
        if isinstance(outputs, dict) and outputs.get("loss") is not None:
            self.recorder.note(loss=outputs["loss"] * trainer.accumulate_grad_batches)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._end(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(exception)

    def _keep(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def _end(self, error: BaseException | None) -> None:
        """End the search, and close the recording with the error that ends `fit`."""
        search, self._search = self._search, None
        if search is None:
            return
        search.end()
        if self.recorder is not None:
            self.recorder.__exit__(None if error is None else type(error), error, None)
        elif error is None:
            warn(search.describe())
