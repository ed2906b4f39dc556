"""Dataclasses to JSON and back; files that an earlier version wrote are read; what does not fit is named."""

import json
import math
import shutil
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
from replay.runner.rounding_floor import _known
from replay.tolerances.job import Floor
from replay.tracing.trace_file import TraceFile
from replay.watch.blame import Sighting
from replay.watch.progress import Phase, Position, last_position
from tests.helpers.read_logs import read_log

OLD = Path(__file__).parents[1] / "old_logs"  # written before there was actor_init/as_json.py


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
    assert from_json(Part, {"size": 1, "else": 2}, source="here", ignore_others=True) == Part(size=1)


def test_an_old_log_is_read() -> None:
    run = PastRun.read(OLD / "replay")
    assert (run.actor.parallel.tp, run.actor.dtype, run.weights) == (2, Dtype.FP32, "random, seed 0")
    assert (run.config["vocab_size"], run.devices) == (264, ["H200", "H200"])
    assert str(read_log(OLD / "replay")[1]) == str(run.records)  # as text: nan is not nan
    first, _, second, last = run.records
    assert (str(first.result.loss), first.result.grad_norm, first.result.row_log_probs) == (
        "nan",
        math.inf,
        [-math.inf, -20.0],
    )
    assert (second.cost.wait_seconds, second.result.weight, second.cost.phases["backward"].seconds) == (0.25, 0.5, 0.5)
    assert last.result.grad_norm is None


def test_an_old_state_trace_floor_and_position_are_read(tmp_path: Path) -> None:
    state = SavedState.read(OLD / "state")
    assert (state.num_steps, state.max_norm, state.versions["flash-attn"]) == (3, None, None)
    trace = TraceFile.open(OLD / "trace" / "pass000000-rank1.safetensors")
    assert (trace.about.tp_rank, trace.about.num_columns, [str(key) for key in trace.order]) == (
        1,
        8,
        ["forward/log_probs/output"],
    )
    assert _known(OLD / "floor", "0123456789ab") == {
        "loss": Floor(value=1.5e-7, num_values=2),
        "row_log_probs": Floor(value=0.0, num_values=4),
    }
    position = Position(index=1, phase=Phase.BACKWARD, source="b.pkl", rows=2, padded_tokens=40, real_tokens=38)
    assert last_position(OLD / "watch", 1) == position
    seen = parse_json(Sighting, (OLD / "watch" / "sighting.json").read_text(), source="here")
    assert seen.position == position
    assert (seen.collectives, seen.standing_at) == ({"world": 7}, "mine.py:12 in pull")


@pytest.mark.parametrize(
    ("file", "edit", "read", "complaint"),
    [
        ("state/state.json", ('"tp": 1', '"tp": "1"'), SavedState.read, 'tp is "1"; allowed is a valid'),
        ("floor/rounding.json", ("1.5e-07", "true"), lambda f: _known(f, "0123456789ab"), "loss.value is true"),
    ],
)
def test_a_damaged_file_names_the_field(
    tmp_path: Path, file: str, edit: tuple[str, str], read: Callable[[Path], Any], complaint: str
) -> None:
    room, _, name = file.partition("/")
    folder = shutil.copytree(OLD / room, tmp_path / room)
    text = (folder / name).read_text()
    assert edit[0] in text
    (folder / name).write_text(text.replace(*edit, 1))
    with pytest.raises(UsageError) as error:
        read(folder)
    assert complaint in str(error.value)
    assert str(folder / name) in str(error.value) or room == "state"
