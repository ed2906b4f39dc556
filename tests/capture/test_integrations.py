"""The Trainer's callback: it taps what the Trainer calls, from the first training forward on, and closes at the end."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

from capture import capture_files
from capture.integrations import CaptureCallback
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
