"""What attaches to trainers: it taps what they call, from the first training forward on, and closes at the end."""

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

from capture import capture_files
from capture.file_format.capture_file import read_call
from capture.integrations import CaptureCallback, record_prepared
from capture.record.recorder import Recorder
from tests.helpers.causal_lms import IDS_BS, Outer, Tiny, lm


class Training:
    """What a Trainer does to its callbacks."""

    def __init__(self, callback: CaptureCallback, model: Tiny, **settings: int) -> None:
        counts = {"gradient_accumulation_steps": 1, "world_size": 1, **settings}
        self.arguments = SimpleNamespace(**counts, logging_dir=None)
        self.state, self.control = TrainerState(), TrainerControl()
        self.handler = CallbackHandler([callback], model, None, None, None)
        self.handler.on_train_begin(self.arguments, self.state, self.control)

    def log(self, step: int, **logs: float) -> None:
        self.state.global_step = step
        self.handler.on_log(self.arguments, self.state, self.control, logs)

    def end(self) -> None:
        self.handler.on_train_end(self.arguments, self.state, self.control)


def test_the_wrapper_is_tapped_from_the_first_training_forward_on(tmp_path: Path) -> None:
    model, other = lm(), lm()
    wrapped = Outer(model)
    callback = CaptureCallback(tmp_path, max_queued=8)
    training = Training(callback, model)
    with torch.no_grad():
        model(IDS_BS)
    other(IDS_BS)
    assert callback.recorder is None
    for _ in range(2):
        wrapped(IDS_BS)
    model(IDS_BS)
    training.end()
    wrapped(IDS_BS)
    assert isinstance(callback.recorder, Recorder)
    assert (callback.recorder.num_seen, callback.recorder.num_written) == (2, 2)
    assert not model._forward_pre_hooks
    assert len(capture_files(tmp_path)) == 2


def test_each_training_is_a_recording_of_its_own_and_one_without_a_forward_leaves_nothing(tmp_path: Path) -> None:
    model = lm()
    callback = CaptureCallback(tmp_path)
    for expected in (1, 2):
        training = Training(callback, model)
        assert callback.recorder is None
        model(IDS_BS)
        training.end()
        assert len(capture_files(tmp_path)) == expected
    Training(callback, model).end()
    assert callback.recorder is None


@pytest.mark.parametrize(
    ("settings", "logs", "noted"),
    [
        ({}, {"loss": 2.0, "grad_norm": 3.0}, {"loss": 2.0, "grad_norm": 3.0}),
        ({"gradient_accumulation_steps": 2}, {"loss": 2.0, "grad_norm": 3.0}, {"grad_norm": 3.0}),
        # Each logged loss is a mean, of which this pass is only a part.
        ({"world_size": 2}, {"loss": 2.0}, None),
        ({"world_size": 2}, {"loss": float("inf"), "grad_norm": 3.0}, {"loss": float("inf"), "grad_norm": 3.0}),
        ({}, {"eval_loss": 2.0}, None),
    ],
)
def test_only_what_is_the_passes_own_is_noted(
    settings: dict[str, int], logs: dict[str, float], noted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, float]] = []
    monkeypatch.setattr(Recorder, "note", lambda _, **given: seen.append(given))
    model = lm()
    training = Training(CaptureCallback(tmp_path), model, **settings)
    # There is no pass yet.
    training.log(0, loss=1.0)
    model(IDS_BS)
    training.log(1, **logs)
    training.end()
    assert seen == ([] if noted is None else [noted])


@pytest.mark.parametrize(("settings", "error"), [({"every": 0}, ValueError), ({"evry": 2}, TypeError)])
def test_settings_are_refused_before_the_training(settings: dict[str, int], error: type[Exception]) -> None:
    with pytest.raises(error):
        CaptureCallback("inputs/never", **settings)


def noted_losses(folder: Path) -> list[float]:
    """Return what was noted for each pass; 0 for nothing."""
    losses = [read_call(path).outputs.get("noted_loss", 0.0) for path in capture_files(folder)]
    assert all(isinstance(loss, float) for loss in losses)
    return [loss for loss in losses if isinstance(loss, float)]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """Give one that accumulates two passes; its state is that of the process."""
    # The end of its training would take the process group away from the other tests of this process.
    monkeypatch.setattr(PartialState, "destroy_process_group", lambda *state: None)
    yield Accelerator(cpu=True, gradient_accumulation_steps=2)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_under_accelerate_the_loops_loss_is_noted_for_its_only_pass(accelerator: Any, tmp_path: Path) -> None:
    model = lm()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    recorder = record_prepared(accelerator, model, tmp_path, reproduce=True)
    losses: list[float] = []
    for num_calls in (1, 1, 2, 1):
        with accelerator.accumulate(model):
            loss = sum((model(IDS_BS).square().mean() for _ in range(num_calls)), torch.tensor(0.0))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        # Two passes have a loss together, which is neither's own.
        losses += [loss.item()] if num_calls == 1 else [0.0, 0.0]
    accelerator.end_training()
    model(IDS_BS)
    assert (recorder.num_seen, recorder.num_written) == (5, 5)
    assert noted_losses(tmp_path) == losses


def test_the_integrations_import_no_trainer_that_the_job_has_not() -> None:
    probe = (
        "import sys; import capture.integrations; "
        "from capture.integrations import record_prepared; "
        "print([name for name in ('accelerate', 'lightning', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=1800)
    assert done.stdout == "[]\n"


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give Lightning under one of its names, in a process that does not know the other."""
    if not find_spec("lightning"):
        pytest.skip("needs lightning")
    library = importlib.import_module(request.param)
    for name in {"lightning.pytorch", "pytorch_lightning"} - {request.param}:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, "capture.integrations.lightning_trainer", raising=False)
    return library


def fit(lightning: Any, callback: Any, folder: Path, *, num_calls: int = 1, fails: bool = False) -> list[float]:
    """Train a tiny model for three batches, in windows of two. Returns the losses of `training_step`."""
    losses: list[float] = []

    class Language(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = lm()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            if fails and index == 1:
                raise OSError("the job broke")
            loss = sum((self.model(batch).square().mean() for _ in range(num_calls)), torch.tensor(0.0))
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=2,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[callback],
        **quiet,
    )
    batches: Any = [IDS_BS] * 3
    trainer.fit(Language(), torch.utils.data.DataLoader(batches, batch_size=None))
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightnings_trainer_is_recorded_with_the_losses_of_its_steps(lightning: Any, tmp_path: Path) -> None:
    from capture.integrations import LightningCaptureCallback

    assert issubclass(LightningCaptureCallback, lightning.Callback)
    callback = LightningCaptureCallback(tmp_path / "once", reproduce=True)
    losses = fit(lightning, callback, tmp_path)
    assert len(set(losses)) == 2  # the first two are of the weights at the start
    assert noted_losses(tmp_path / "once") == pytest.approx(losses, rel=1e-6)  # divided by two and multiplied again
    steps = [read_call(path).optimizer_step for path in capture_files(tmp_path / "once")]
    assert steps == [0, 0, 1]
    fit(lightning, LightningCaptureCallback(tmp_path / "twice", reproduce=True), tmp_path, num_calls=2)
    assert noted_losses(tmp_path / "twice") == [0.0] * 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_error_in_lightnings_training_closes_the_recording_as_an_incident(lightning: Any, tmp_path: Path) -> None:
    from capture.integrations import LightningCaptureCallback

    callback = LightningCaptureCallback(tmp_path / "kept", flight_recorder=2)
    with pytest.raises(OSError, match="the job broke"):
        fit(lightning, callback, tmp_path, fails=True)
    assert len(capture_files(tmp_path / "kept")) == 1


@pytest.mark.slow
def test_a_lightning_module_without_a_language_model_is_one_warning(lightning: Any, tmp_path: Path) -> None:
    from capture.integrations import LightningCaptureCallback

    callback = LightningCaptureCallback(tmp_path / "kept")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback.on_fit_start(None, None)
        callback.on_fit_end(None, None)
    assert [str(warning.message)[:32] for warning in caught] == ["capture: nothing recorded: no ca"]
    assert callback.recorder is None


@pytest.mark.slow
def test_settings_of_lightnings_callback_are_refused_before_the_training(lightning: Any) -> None:
    from capture.integrations import LightningCaptureCallback

    with pytest.raises(ValueError, match="every must be"):
        LightningCaptureCallback("inputs/never", every=0)
