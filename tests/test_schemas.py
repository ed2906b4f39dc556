"""The schemas in replay/schemas/ are what the dataclasses are today, and what is written fits them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import replay
from docs.write_schemas import DOCUMENTS, FOLDER, format_schema
from tests.helpers.commands import ROOT
from tests.helpers.made_logs import passed, write_log
from tests.helpers.schemas import assert_valid, find_validator
from tests.replay.api.test_results import WRONG


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_is_what_the_dataclasses_say(name: str) -> None:
    assert (FOLDER / f"{name}.json").read_bytes() == format_schema(name), "run `python -m docs.write_schemas`"
    schema = find_validator(name).schema
    assert schema["$id"] == f"urn:micro-replay:{name}:{schema['version']}"


def test_every_file_is_of_a_document() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(DOCUMENTS)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log", [passed(0, "x"), passed(1, "y", float("nan"))], verdict=WRONG)


def test_what_functions_return_fits(log: Path) -> None:
    """A pass with a loss that is not finite is among it."""
    assert_valid("verdict", WRONG.to_dict())
    assert_valid("replay", replay.open(log).to_dict())
    assert_valid("compare", replay.compare(log, log).to_dict())
    assert_valid("report", replay.report(log).to_dict())
    sample = ROOT / "inputs" / "edges" / "rows"
    assert_valid("inspect", replay.inspect(sample).to_dict())
    assert_valid("hang", replay.hang(sample).to_dict())


def change(line: dict[str, Any], *path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(line)
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf", 2, 2.5, None])
def test_a_number_that_is_not_finite_is_a_word(log: Path, loss: Any) -> None:
    line = json.loads((log / "rank0.jsonl").read_text().splitlines()[0])
    assert_valid("pass", change(line, "loss", value=loss))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("loss",), "NaN"),
        (("loss",), "2.5"),
        (("index",), "nan"),
        (("index",), 0.5),
        (("warmup",), None),
        (("phases", "forward", "seconds"), None),
        (("row_log_probs",), [None]),
    ],
)
def test_what_a_reader_refuses_does_not_fit(log: Path, path: tuple[str, ...], value: Any) -> None:
    line = json.loads((log / "rank0.jsonl").read_text().splitlines()[0])
    assert_valid("pass", line)
    assert not find_validator("pass").is_valid(change(line, *path, value=value))


def test_fields_may_come_and_none_may_go(log: Path) -> None:
    run = json.loads((log / "run.json").read_text())
    assert_valid("run", run | {"of a later version": 1})
    for name in ("format", "status", "spec", "devices", "inputs", "work"):
        without = {key: value for key, value in run.items() if key != name}
        # Without its devices, a run had not begun.
        assert find_validator("run").is_valid(without) == (name == "devices"), name
    assert not find_validator("run").is_valid(run | {"format": 2})
    assert not find_validator("run").is_valid(run | {"verdict": run["verdict"] | {"outcome": "fine"}})
