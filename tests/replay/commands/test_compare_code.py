"""From DIFFERS to the layer: the command that a verdict prints, with the job's own model, names where the fault is."""

import re
import shlex
from pathlib import Path

import pytest

from replay.command_line import cli
from tests.helpers.code_faults import FAULTS, Plain, train

FILE = "tests/helpers/code_faults.py"
LAYER_LINE = re.compile(r"^layer +replay (compare \S+ )FILE\.py:FUNCTION, with .*: names the first layer", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_code_is_named_by_the_command_that_the_verdict_prints(
    name: str, tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    train(name, tmp_path)
    is_plain = FAULTS[name].stock is Plain
    model = f"{FILE}:Plain --weights {tmp_path}/weights.pt" if is_plain else f"{tmp_path}/weights"
    typed = f"--inputs {tmp_path}/inputs --model {model} --log-folder {tmp_path}/logs"
    assert cli.main(shlex.split(typed)) == 0
    screen = capsys.readouterr().out
    assert re.search("^verdict +DIFFERS", screen, re.MULTILINE), screen
    printed = LAYER_LINE.search(screen)
    assert printed is not None, screen
    cli.main(shlex.split(f"{printed[1]}{FILE}:{name}"))
    kind, module, what = FAULTS[name].first
    screen = capsys.readouterr().out
    assert f"first diff B: {kind}, {module} {what} at " in screen, screen
