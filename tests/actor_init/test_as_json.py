"""Dataclasses to JSON and back; what does not fit is named."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from actor_init.as_json import AnyFloat, from_json, parse_json, to_json
from actor_init.saving.state_file import SavedState
from actor_init.spec import Dtype, UsageError
from replay.runlog.reader import PastRun
from replay.runner import rounding_floor
from replay.tolerances.job_bounds import NoiseFloor
from tests.helpers.made_logs import passed, write_log


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    size: int
    cost: AnyFloat = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    name: str
    colour: Colour = Colour.RED
    folder: Path | None = None
    parts: Mapping[str, Part] = field(default_factory=dict)
    costs: list[AnyFloat] = field(default_factory=list)
    names: frozenset[str] = frozenset()
    rest: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "nobody":
            raise UsageError("nobody is no name. Try: somebody")


WHOLE = Whole(
    name="a",
    colour=Colour.BLUE,
    folder=Path("in/here"),
    parts={"one": Part(size=1, cost=-math.inf), "two": Part(size=2)},
    costs=[math.inf, 1.5],
    names=frozenset({"y", "x"}),
    rest={"any": [1, None, {"thing": True}]},
)


def test_what_is_written_is_strict_json_and_comes_back() -> None:
    text = json.dumps(to_json(WHOLE), allow_nan=False)
    assert json.loads(text) == {
        "name": "a",
        "colour": "blue",
        "folder": "in/here",
        "parts": {"one": {"size": 1, "cost": "-inf"}, "two": {"size": 2, "cost": 0.0}},
        "costs": ["inf", 1.5],
        "names": ["x", "y"],
        "rest": {"any": [1, None, {"thing": True}]},
    }
    assert parse_json(Whole, text, source="here") == from_json(Whole, json.loads(text), source="here") == WHOLE
    assert math.isnan(from_json(Part, {"size": 1, "cost": "nan"}, source="here").cost)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "f.json: no JSON: EOF while parsing an object"),
        ("3", "f.json: it is 3; allowed is an object"),
        ("{}", "f.json: name is missing"),
        ('{"name": 1}', "f.json: name is 1; allowed is a valid string"),
        ('{"name": "a", "colour": "green"}', "f.json: colour is \"green\"; allowed is 'red' or 'blue'"),
        ('{"name": "a", "parts": {"x": {"size": "1"}}}', 'f.json: parts.x.size is "1"; allowed is a valid integer'),
        ('{"name": "a", "parts": {"x": {"size": true}}}', "f.json: parts.x.size is true; allowed is a valid integer"),
        (
            '{"name": "a", "parts": {"x": {"size": 1, "way": 2}}}',
            "f.json: parts.x.way is unknown; allowed are size, cost",
        ),
        ('{"name": "a", "costs": [1, "2"]}', 'f.json: costs.1 is "2"; allowed is a valid number'),
        ('{"name": "a", "wide": 1}', "f.json: wide is unknown; allowed are name, colour, folder, parts"),
        ('{"name": "nobody"}', "f.json: nobody is no name. Try: somebody"),
    ],
)
def test_what_does_not_fit_is_named(text: str, complaint: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_json(Whole, text, source="f.json")
    assert str(error.value).startswith(complaint)


def test_a_refused_value_is_cut_short() -> None:
    with pytest.raises(UsageError) as error:
        from_json(Part, {"size": "x" * 10_000}, source="here")
    assert len(str(error.value)) < 300


def test_other_fields_are_passed_over_where_a_part_is_asked_for() -> None:
    assert from_json(Part, {"size": 1, "else": 2}, source="here", ignore_unknown_fields=True) == Part(size=1)


def test_a_log_with_numbers_that_are_not_finite_is_read(tmp_path: Path) -> None:
    written = [
        passed(0, "a", loss=math.nan, norm=math.inf, row_log_probs=[-math.inf, -20.0]),
        passed(1, "b", norm=None),
    ]
    run = PastRun.read(write_log(tmp_path / "log", written, typed="--dtype fp32"))
    assert (run.actor.dtype, run.weights, run.devices) == (Dtype.FP32, "random, seed 0", ["H200"])
    # They are compared as text, because nan is not nan.
    assert str(run.records) == str(written)


STATE = SavedState(
    backend="deepspeed",
    zero_stage=1,
    world_size=2,
    tp=1,
    ring=1,
    dtype="fp32",
    optimizer="adamw",
    learning_rate=0.01,
    lr_warmup_steps=4,
    max_norm=None,
    num_steps=3,
    next_learning_rate=0.0075,
    num_inputs=6,
    model={"hidden_size": 8, "rope_parameters": {"rope_theta": 10000.0}},
    versions={"torch": "2.13.0", "flash-attn": None},
)
FLOORS = {"loss": NoiseFloor(value=1.5e-7, num_values=2), "row_log_probs": NoiseFloor(value=0.0, num_values=4)}


def test_a_state_and_floors_are_read(tmp_path: Path) -> None:
    STATE.write(tmp_path)
    rounding_floor.write_floors(tmp_path, "0123456789ab", FLOORS)
    assert SavedState.read(tmp_path) == STATE
    assert rounding_floor.read_floors(tmp_path, "0123456789ab") == FLOORS


@pytest.mark.parametrize(
    ("name", "edit", "read", "complaint"),
    [
        ("state.json", ('"tp": 1', '"tp": "1"'), SavedState.read, 'tp is "1"; allowed is a valid'),
        (
            "rounding.json",
            ("1.5e-07", "true"),
            lambda folder: rounding_floor.read_floors(folder, "0123456789ab"),
            "loss.value is true",
        ),
    ],
)
def test_a_damaged_file_names_the_field(
    tmp_path: Path, name: str, edit: tuple[str, str], read: Callable[[Path], Any], complaint: str
) -> None:
    STATE.write(tmp_path)
    rounding_floor.write_floors(tmp_path, "0123456789ab", FLOORS)
    text = (tmp_path / name).read_text()
    assert edit[0] in text
    (tmp_path / name).write_text(text.replace(*edit, 1))
    with pytest.raises(UsageError) as error:
        read(tmp_path)
    assert complaint in str(error.value)
    assert str(tmp_path) in str(error.value)
