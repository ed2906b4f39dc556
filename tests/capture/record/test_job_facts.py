"""What a folder is told of the job's model: no path of the host, and one model a folder."""

from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from capture.file_format.actor_config import (
    read_actor_config,
    read_adapter_configs,
    read_frozen_names,
    read_parameter_names,
)
from capture.file_format.micro_batch import CaptureError
from capture.record.job_facts import find_attention_kernel, find_kernels, prepare_folder, read_config


class Config:
    """Answers as a config of transformers or PEFT does."""

    def __init__(self, name: str | None = None, **settings: Any) -> None:
        self.settings = settings
        if name is not None:
            self._name_or_path = name

    def to_dict(self) -> dict[str, Any]:
        return dict(self.settings)


class Model(nn.Module):
    def __init__(self, config: Any, adapters: Any = None) -> None:
        super().__init__()
        self.config = config
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.first.requires_grad_(False)
        if adapters is not None:
            self.peft_config = adapters


class Kind(Enum):
    LORA = "LORA"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (Config("llama"), "llama"),
        (Config("meta/llama"), "meta/llama"),
        (Config("/data/models/llama"), "llama"),
        (Config(""), "Model"),
        (Config(), "Model"),
    ],
)
def test_a_model_is_called_by_the_name_that_it_was_loaded_by_or_by_its_class(
    config: Config, name: str, tmp_path: Path
) -> None:
    assert prepare_folder(tmp_path / "a" / "b", nn.Sequential(Model(config))) == name
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_model_without_a_config_leaves_none(tmp_path: Path) -> None:
    for model in (nn.Linear(2, 2), Model({"model_type": "tiny"})):
        assert prepare_folder(tmp_path, model) == type(model).__name__
        assert read_config(model) == {}
    assert list(tmp_path.iterdir()) == []


def test_the_config_is_that_of_the_outermost_module_and_has_no_path_of_the_host(tmp_path: Path) -> None:
    outer = Model(Config("x", model_type="tiny", nested={"file": "/data/x.json", "url": "https://a/b"}, size=3))
    outer.inner = Model(Config("y", model_type="other"))
    prepare_folder(tmp_path, outer)
    assert read_actor_config(tmp_path) == {
        "model_type": "tiny",
        "nested": {"file": "x.json", "url": "https://a/b"},
        "size": 3,
    }
    assert read_parameter_names(tmp_path) == [
        *("first.weight", "second.weight", "inner.first.weight", "inner.second.weight"),
    ]
    assert read_frozen_names(tmp_path) == ["first.weight", "inner.first.weight"]
    assert read_adapter_configs(tmp_path) == {}


def test_of_a_model_with_adapters_their_configs_say_what_is_trained(tmp_path: Path) -> None:
    adapters = {
        "default": Config(r=8, peft_type=Kind.LORA, target_modules={"v", "q"}, file="/data/a", sizes=(1, 2), none=None),
        "other": Config(r=4),
    }
    prepare_folder(tmp_path, Model(Config("x", model_type="tiny"), adapters))
    assert read_adapter_configs(tmp_path) == {
        "default": {
            "r": 8,
            "peft_type": "LORA",
            "target_modules": ["q", "v"],
            "file": "a",
            "sizes": [1, 2],
            "none": None,
        },
        "other": {"r": 4},
    }
    assert read_frozen_names(tmp_path) == []


@pytest.mark.parametrize("adapters", [{}, {"default": {"r": 8}}, [Config(r=8)]])
def test_what_is_no_config_of_an_adapter_is_none(adapters: Any, tmp_path: Path) -> None:
    prepare_folder(tmp_path, Model(Config("x", model_type="tiny"), adapters))
    assert read_adapter_configs(tmp_path) == {}
    assert read_frozen_names(tmp_path) == ["first.weight"]


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({}, True),
        ({"transformers_version": "9", "use_cache": False, "architectures": ["A"], "dtype": "x"}, True),
        ({"_name_or_path": "other", "torch_dtype": "x"}, True),
        ({"hidden_size": 9}, False),
        ({"num_layers": 2}, False),
    ],
)
def test_a_folder_holds_one_models_captures_whatever_it_is_called(
    change: dict[str, Any], is_same: bool, tmp_path: Path
) -> None:
    known = {"model_type": "tiny", "hidden_size": 8}
    prepare_folder(tmp_path, Model(Config("x", **known)))
    written = (tmp_path / "actor.json").read_bytes()
    later = Model(Config("y", **known | change))
    if is_same:
        assert prepare_folder(tmp_path, later) == "y"
    else:
        with pytest.raises(CaptureError, match="holds captures of a model with another config"):
            prepare_folder(tmp_path, later)
    # What the first recording wrote stays.
    assert (tmp_path / "actor.json").read_bytes() == written


def test_other_adapters_are_another_model(tmp_path: Path) -> None:
    prepare_folder(tmp_path, Model(Config("x", model_type="tiny"), {"default": Config(r=8)}))
    prepare_folder(tmp_path, Model(Config("x", model_type="tiny"), {"default": Config(r=8)}))
    for adapters in ({"default": Config(r=4)}, {"other": Config(r=8)}, None):
        with pytest.raises(CaptureError, match="another config"):
            prepare_folder(tmp_path, Model(Config("x", model_type="tiny"), adapters))


def test_kernels_are_told_by_what_is_set_and_by_whose_functions_stand_in() -> None:
    model = Model(SimpleNamespace(_attn_implementation="flash_attention_2"))
    assert (find_attention_kernel(nn.Sequential(model)), find_kernels(model)) == ("flash_attention_2", "model")
    assert find_attention_kernel(Model(SimpleNamespace(_attn_implementation=None))) is None
    assert find_attention_kernel(nn.Linear(2, 2)) is None

    def forward(x: Any) -> Any:
        return x

    forward.__module__ = "liger_kernel.ops"
    vars(model.second)["forward"] = forward
    assert find_kernels(nn.Sequential(model)) == "liger"
    forward.__module__ = "liger_kernel_of_mine.ops"
    assert find_kernels(model) == "model"
