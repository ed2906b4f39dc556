"""A recording keeps what the optimizer held before each step, and how often it had stepped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from capture import capture_files, recording
from capture.file_format.capture_file import read_call
from capture.file_format.micro_batch import CaptureError
from capture.file_format.optimizer_step import OptimizerStep
from capture.record.parameter_sampler import ParameterSampler
from capture.record.state_sampler import NUM_PER_STEP, StateSampler
from capture.record.step_window import read_optimizer_settings
from tests.capture.record.test_optimizer_hooks import Model, compute_loss, read_steps


def record_steps(folder: Path, model: Model, optimizer: Any, num_steps: int = 3) -> list[OptimizerStep]:
    with recording(model, folder, reproduce=True):
        for _ in range(num_steps):
            compute_loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    return read_steps(folder)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_moments_before_each_step_are_kept_beside_the_count(kind: Any, tmp_path: Path) -> None:
    model = Model()
    optimizer = kind(model.parameters(), lr=1e-3)
    held: list[dict[str, dict[str, torch.Tensor]]] = []
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def keep(stepped: Any, *_: Any) -> None:
        held.append({names[id(p)]: {k: v.clone() for k, v in state.items()} for p, state in stepped.state.items()})

    optimizer.register_step_pre_hook(keep)
    steps = record_steps(tmp_path, model, optimizer)
    assert [step.state_steps for step in steps] == [(), (1,), (2,)]
    assert steps[0].state == ()
    for step, states in zip(steps[1:], held[1:], strict=True):
        assert 0 < len(step.state) <= NUM_PER_STEP
        for sample in step.state:
            assert set(sample.values) == {"exp_avg", "exp_avg_sq"}
            for key, values in sample.values.items():
                whole = states[sample.name][key].flatten().tolist()
                # 9 digits tell every fp32 number.
                assert values == pytest.approx(whole[sample.start : sample.start + len(values)], rel=1e-8)


def test_the_parameters_take_turns(tmp_path: Path) -> None:
    model = Model()
    names = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    steps = record_steps(tmp_path, model, torch.optim.AdamW(model.parameters()), num_steps=6)
    seen = {sample.name for step in steps for sample in step.state}
    with_gradient = {sample.name for step in steps if step.gradients for sample in step.gradients.samples}
    assert seen == with_gradient <= names


@pytest.mark.parametrize(
    ("states", "steps"),
    [
        # No parameter has a state: that its group has stepped is all that is known.
        ([{}, {}], (5,)),
        # A parameter that has none beside one that has some begins at 0.
        ([{"step": torch.tensor(3.0), "m": 1.0}, {}], (0, 3, 5)),
        ([{"step": 3, "m": 1.0}, {"step": 3, "m": 1.0}], (3, 5)),
        ([{"step": 3.0, "m": 1.0}, {"step": 4, "m": 1.0}], (3, 4, 5)),
        ([{"m": 1.0}, {"m": 1.0}], (5,)),
        # Neither a switch nor several numbers are a count.
        ([{"step": True, "m": 1.0}, {"step": torch.ones(2), "m": 1.0}], (5,)),
        ([], (5,)),
    ],
)
def test_counts_are_those_of_parameters_and_groups_and_one_that_was_lost_is_0(
    states: list[dict[str, Any]], steps: tuple[int, ...]
) -> None:
    model = torch.nn.Linear(2, 2)
    sampler = ParameterSampler(model)
    sampler.sample_weights(begins_window=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.param_groups[0]["step"] = 5
    for parameter, state in zip(model.parameters(), states, strict=False):
        optimizer.state[parameter] = {
            key: torch.full_like(parameter, value) if key == "m" else value for key, value in state.items()
        }
    taken = StateSampler(sampler).sample(optimizer)
    assert taken is not None
    assert taken.list_steps() == steps
    assert len(taken.to_samples()) == sum("m" in state for state in states)


def test_the_last_group_whose_settings_are_kept_counts_the_parameters_of_all_further_ones() -> None:
    sizes = [1] * 63 + [2, 3, 0, 4]
    groups = [
        {"params": [torch.nn.Parameter(torch.ones(1)) for _ in range(size)], "lr": float(number)}
        for number, size in enumerate(sizes)
    ]
    settings, tensors = read_optimizer_settings(torch.optim.SGD(groups, lr=1.0))
    assert tensors == {}
    assert [group["num_parameters"] for group in settings] == [1] * 63 + [2 + 3 + 4]
    assert [group["lr"] for group in settings] == [float(number) for number in range(64)]


def test_an_optimizer_that_keeps_no_count_has_none(tmp_path: Path) -> None:
    model = Model()
    steps = record_steps(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert [step.state_steps for step in steps] == [(), (), ()]
    assert {key for sample in steps[2].state for key in sample.values} == {"momentum_buffer"}


def test_a_state_that_was_lost_starts_its_count_anew(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    with recording(model, tmp_path, reproduce=True):
        for number in range(4):
            if number == 2:
                optimizer.state.clear()
            compute_loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [(step.has_state, step.state_steps) for step in read_steps(tmp_path)] == [
        (False, ()),
        (True, (1,)),
        (False, ()),
        (True, (1,)),
    ]


def test_words_and_pairs_of_a_setting_are_kept_and_what_a_fused_class_keeps_beside_its_groups(tmp_path: Path) -> None:
    model = Model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.adam_w_mode = 1
    optimizer.param_groups[0] |= {"adjust_lr_fn": "original", "eps": (None, 1e-3), "note": "x" * 99, "step": 7}
    [step] = record_steps(tmp_path, model, optimizer, num_steps=1)
    [group] = step.settings
    assert (group["adam_w_mode"], group["adjust_lr_fn"], group["eps"]) == (1, "original", [None, 1e-3])
    assert not {"note", "step"} & set(group)
    assert (step.state_steps, step.library) == ((7,), "torch")


@pytest.mark.parametrize(
    "plain",
    [["weight"], ["weight", [2], 0, {"exp_avg": [1.0] * 3}], ["weight", [2], -1, {}], [3, [2], 0, {}], [None]],
)
def test_damaged_samples_are_refused(plain: Any, tmp_path: Path) -> None:
    text = json.loads(OptimizerStep(number=0, passes=(0,), shares=(None,)).to_json())
    with pytest.raises(CaptureError, match="no record of an optimizer step"):
        OptimizerStep.from_json(json.dumps({**text, "state": [plain]}), "here")


def test_a_step_without_these_keys_is_read(tmp_path: Path) -> None:
    text = json.loads(OptimizerStep(number=0, passes=(0,), shares=(None,)).to_json())
    for key in ("state", "state_steps", "library"):
        del text[key]
    step = OptimizerStep.from_json(json.dumps(text), "here")
    assert (step.state, step.state_steps, step.library) == ((), (), None)


def test_the_samples_of_a_step_take_about_a_kilobyte(tmp_path: Path) -> None:
    model = Model()
    step = record_steps(tmp_path, model, torch.optim.AdamW(model.parameters()))[2]
    assert len(json.dumps([sample.to_plain() for sample in step.state])) < 1300
    assert [read_call(path).step is not None for path in capture_files(tmp_path)] == [True] * 3
