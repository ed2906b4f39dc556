"""What a job's model was is read back as it was written, and a file that is none is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from capture.file_format.micro_batch import CaptureError
from capture.file_format.model_facts import (
    ModelFacts,
    copy_model_facts,
    read_model_facts,
    select_part,
    write_model_facts,
)
from capture.record.model_facts import collect_model_facts

HOOK = ["forward hook", "train.py:hook", "h0"]
FACTS = ModelFacts(
    rank=1,
    recording="2026-01-01T00:00:00+00:00",
    forward=3,
    trains=True,
    python="cpython-311",
    versions={"torch": "2.13.0"},
    config={"rms_norm_eps": 1e-3},
    modules={
        "layers.*": {"class": "a:B", "code": "c", "attributes": {"eps": 1.0}, "forward": ["f", "d"], "hooks": [HOOK]}
    },
    parameters={
        "layers.*.weight": {"dtype": "float32", "trained": True, "hooks": [HOOK]},
        "head.weight": {"dtype": "float32", "trained": False},
    },
    tied=[["head.weight", "embed.weight"]],
    frozen_later={"5": ["layers.*.weight"]},
    buffers={"inv_freq": {"dtype": "float32", "num_elements": 1, "values": [1.0], "norm": 1.0}},
    functions={"a": {"rotate": ["", "r"]}},
    patches={"torch.nn.functional.silu": ["train.py:silu", "s"]},
    loss_function=["train.py:loss", "l"],
    attention={"name": "sdpa", "function": ["a:sdpa", "s"], "mask": None},
    compiled=["layers.*"],
    autocast="bfloat16",
    checkpoints=True,
    wrappers=[{"class": "DistributedDataParallel"}],
)


def test_facts_are_read_back_by_recording_and_rank(tmp_path: Path) -> None:
    (tmp_path / "actor.json").touch()
    first, other_rank = replace(FACTS, rank=0), FACTS
    later = replace(FACTS, rank=0, recording="2026-01-02T00:00:00+00:00")
    write_model_facts(tmp_path, later, stamp="later")
    write_model_facts(tmp_path / "rank1", other_rank, stamp="first")
    write_model_facts(tmp_path, first, stamp="first")
    assert read_model_facts(tmp_path) == [first, other_rank, later]
    assert read_model_facts(tmp_path / "rank1") == [first, other_rank, later]
    assert FACTS.frozen == ["head.weight"]


def test_the_later_facts_of_a_recording_replace_the_earlier(tmp_path: Path) -> None:
    write_model_facts(tmp_path, replace(FACTS, trains=False), stamp="first")
    write_model_facts(tmp_path, FACTS, stamp="first")
    assert read_model_facts(tmp_path) == [FACTS]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 9),
        ("rank", "1"),
        ("trains", 1),
        ("modules", []),
        ("modules", {"a": {"class": "a:B"}}),
        ("modules", {"a": {"class": "a:B", "code": "c", "hooks": [["forward hook"]]}}),
        ("modules", {"a": {"class": "a:B", "code": "c", "forward": "f"}}),
        ("parameters", {"a": {"dtype": "float32"}}),
        ("buffers", {"a": {"dtype": "float32", "num_elements": 1, "values": ["1"], "norm": 1.0}}),
        ("functions", {"a": {"rotate": "r"}}),
        ("patches", {"a": None}),
        ("tied", [["a", 1]]),
        ("frozen_later", {"later": []}),
        ("frozen_later", {"5": "a"}),
        ("attention", {"function": None}),
        ("wrappers", [{}]),
        ("others", 1),
    ],
)
def test_other_content_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    path = write_model_facts(tmp_path, FACTS, stamp="first")
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(CaptureError, match=r"model_rank1_first.json: no facts of a model of format 1. Delete the file"):
        read_model_facts(tmp_path)


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    path = write_model_facts(tmp_path, FACTS, stamp="first")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(
        CaptureError, match=r"model_rank1_first.json: cannot be read: .*Delete the file or copy it again"
    ):
        read_model_facts(tmp_path)


def test_facts_are_copied_with_their_ranks_folders(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    target.mkdir()
    source.mkdir()
    write_model_facts(source, replace(FACTS, rank=0), stamp="first")
    write_model_facts(source / "rank1", FACTS, stamp="first")
    copy_model_facts(source, target)
    assert read_model_facts(target) == read_model_facts(source) == [replace(FACTS, rank=0), FACTS]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))
        self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight


class Outer(nn.Module):
    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor = actor
        self.critic = nn.Linear(4, 1)


def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
    pass


def test_the_part_that_has_the_parameters_has_the_facts_that_it_has_alone() -> None:
    inner = Inner()
    inner.layers[1].requires_grad_(False)
    names = [name for name, _ in inner.named_parameters()]
    alone = collect_model_facts(inner, forward=0, trains=True).to_model_facts()
    outer = Outer(Outer(inner))
    outside = collect_model_facts(outer, forward=0, trains=True).to_model_facts()
    assert outside.parameters != alone.parameters
    found = select_part(outside, names)
    for table in ("modules", "parameters", "tied", "buffers", "frozen"):
        assert getattr(found, table) == getattr(alone, table), table
    later = {"4": ["actor.actor.layers.*", "actor.critic.weight"]}
    assert select_part(replace(outside, frozen_later=later), names).frozen_later == {"4": ["layers.*"]}

    outer.register_forward_hook(hook)
    hooked = collect_model_facts(outer, forward=0, trains=True).to_model_facts()
    assert select_part(hooked, names).modules[""]["hooks"] == hooked.modules[""]["hooks"] != []


@pytest.mark.parametrize("names", [["layers.0.0.weight"], ["another.weight"], []])
def test_a_model_without_such_a_part_is_told_as_it_is(names: list[str]) -> None:
    facts = collect_model_facts(Inner(), forward=0, trains=True).to_model_facts()
    assert select_part(facts, names) is facts
