"""The schemas in replay/schemas/ are what the dataclasses are today, and what is written fits them."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import replay
from docs.write_schemas import DOCUMENTS, FOLDER, format_schema
from replay.campaign.campaign import Campaign
from replay.processes import forkserver
from replay.processes.pool import Machine
from tests.helpers.commands import ROOT
from tests.helpers.made_logs import passed, write_log
from tests.helpers.schemas import assert_valid, find_validator
from tests.replay.api.test_results import WRONG
from tests.writers import written_json

CHILD_PATH = os.pathsep.join([written_json.HOME, str(ROOT)])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_is_what_the_dataclasses_say(name: str) -> None:
    assert (FOLDER / f"{name}.json").read_bytes() == format_schema(name), "run `python -m docs.write_schemas`"
    validator = find_validator(name)
    validator.check_schema(validator.schema)
    schema = validator.schema
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
    assert_valid("run", run | {"of a later version": 1}, written_here=False)
    for name in ("format", "status", "spec", "devices", "inputs", "work"):
        without = {key: value for key, value in run.items() if key != name}
        # Without its devices, a run had not begun.
        assert find_validator("run").is_valid(without) == (name == "devices"), name
    assert not find_validator("run").is_valid(run | {"format": 2})
    assert not find_validator("run").is_valid(run | {"verdict": run["verdict"] | {"outcome": "fine"}})


@pytest.mark.slow
@pytest.mark.usefixtures("fork_server_as_a_users")
def test_what_a_process_writes_otherwise_than_its_schema_says_is_noticed(tmp_path: Path) -> None:
    """In this process, in one that Python starts, and in one that the fork server of replays starts."""
    code = f"""
from pathlib import Path
from replay.runlog.run_file import RunFile

RunFile(status="done", seconds=float("nan")).write(Path({str(tmp_path)!r}))
"""
    program = tmp_path / "program.py"
    program.write_text(code)
    exec(code, {})
    in_this = written_json.take_breaches()
    words = "\n".join(in_this)
    assert f"{tmp_path / 'run.json'}: run.json: $.status: 'done' is not one of" in words
    assert "$.seconds: 'nan' is not" in words
    subprocess.run(
        [sys.executable, str(program)], env=os.environ | {"PYTHONPATH": CHILD_PATH}, cwd=tmp_path, check=True
    )
    assert written_json.take_breaches() == in_this
    process = forkserver.start(program, [], os.environ, tmp_path / "output.txt", tmp_path)
    process.join()
    assert (process.exitcode, written_json.take_breaches()) == (0, in_this)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_json_lacks_is_noticed(word: str) -> None:
    with pytest.raises(ValueError, match=f"{word} is no JSON"):
        written_json.parse_strictly(f'{{"loss": {word}}}')


def test_a_field_that_the_schema_lacks_is_noticed_where_this_version_wrote_it(log: Path) -> None:
    run = json.loads((log / "run.json").read_text())
    assert written_json.list_breaches(run, "run") == []
    run["statistics"]["modes"] = 1
    [breach] = written_json.list_breaches(run, "run")
    assert "Additional properties are not allowed ('modes' was unexpected)" in breach


FRAGMENTS: list[dict[str, Any]] = [
    {"description": "anything"},
    *({"type": word} for word in ("array", "boolean", "integer", "null", "number", "object", "string")),
    {"type": ["integer", "null"]},
    {"enum": ["x", 1, None]},
    {"const": True},
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "number"}}]},
    {"$ref": "#/$defs/List"},
    {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"$ref": "#/$defs/List"}}, "required": ["x"]},
    {"properties": {"x": {}}, "additionalProperties": False},
    {"properties": {"x": {}}, "additionalProperties": {"type": "string"}},
    {"propertyNames": {"enum": ["x", "y"]}},
    {"dependentRequired": {"x": ["y"]}},
    {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
]
LIST: dict[str, Any] = {"anyOf": [{"type": "null"}, {"properties": {"x": {"$ref": "#/$defs/List"}}, "required": ["x"]}]}
LISTS: list[Any] = [None, {"x": {}}]
SCALARS: list[Any] = [None, True, False, 0, 1, 1.0, 2.5, "", "x", "y"]
VALUES: list[Any] = [
    *SCALARS,
    *([], {}),
    *([first, *more] for first in SCALARS for more in ([1.0], [2.5], [1, 1])),
    *([first] for first in SCALARS),
    *({"x": value} for value in SCALARS),
    *({"x": value, "y": other} for value in SCALARS for other in LISTS),
    *({"x": value, "z": "x"} for value in SCALARS),
    {"x": {"x": None}},
]


def test_the_quick_check_says_what_a_validator_of_json_schemas_says(log: Path) -> None:
    for fragment in FRAGMENTS:
        validator = Draft202012Validator(fragment | {"$defs": {"List": LIST}})
        check = written_json.make_check(fragment, {"List": LIST})
        for value in VALUES:
            assert check(value) == validator.is_valid(value), (fragment, value)
    words = {word for fragment in [*FRAGMENTS, LIST] for word in fragment}
    assert words >= set(written_json.KINDS), "each keyword that it knows is in a fragment"
    with pytest.raises(KeyError, match="pattern"):
        written_json.make_check({"pattern": "x"}, {})
    run = json.loads((log / "run.json").read_text())
    check, validator = written_json.find_closed_check("run"), written_json.find_closed_validator("run")
    for name, value in {**run, "other": 1}.items():
        for changed in ({**run, name: []}, {key: run[key] for key in run if key != name}, {**run, name: value}):
            assert check(changed) == validator.is_valid(changed), (name, changed.get(name, "missing"))


def test_a_result_of_a_campaign_is_held_against_the_schema_of_its_command(tmp_path: Path) -> None:
    plan: dict[str, str] = {}
    campaign = Campaign.begin("scan", tmp_path, plan, arguments=[], machine=Machine(num_devices=1, has_gpus=False))
    assert written_json.take_breaches() == []
    campaign.result = {"groups": [{"first": "0"}]}
    campaign.write()
    assert any("$.groups[0].first: '0' is not of type 'integer'" in line for line in written_json.take_breaches())
