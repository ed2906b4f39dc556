"""What `replay` says where it cannot run: in an old Python, and without the extra that brings what it imports."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from replay.command_line import entry

ROOT = Path(__file__).resolve().parents[3]


def test_an_old_python_is_told_what_to_type() -> None:
    refusal = entry.complaint([], (3, 10))
    assert refusal is not None
    assert refusal.startswith("replaying needs Python 3.11 or later, and this is 3.10")
    assert "pip install 'micro-replay[replay]'" in refusal
    assert entry.complaint([], (3, 11)) is None


FORMS = {
    "module": ["-m", "replay"],
    "folder": ["replay"],
    "script": ["-c", "import replay.command_line.entry as e; e.run_and_leave()"],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_bare_install_is_told_what_to_type_in_one_line(form: list[str]) -> None:
    """-S leaves out site-packages: then this project is there and nothing else is."""
    done = subprocess.run(
        [sys.executable, "-S", *form], cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "replay: replaying needs jinja2, pydantic, rich, safetensors, transformers, typer, which the bare install "
        "leaves out. Try: pip install 'micro-replay[replay]'\n"
    )


def test_the_doctor_needs_typer_alone() -> None:
    with_typer = {"typer": "a module"}.get
    assert entry.complaint(["doctor"], (3, 11), find_module=with_typer) is None
    assert entry.complaint(["compare"], (3, 11), find_module=with_typer) is not None
    assert entry.complaint(["doctor"], (3, 11), find_module=lambda _: None) is not None


def test_the_bare_install_needs_torch_alone_and_has_no_upper_bound() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (declared["requires-python"], declared["dependencies"]) == (">=3.10", ["torch>=2.4"])
    of_replay = [line.partition(">=") for line in declared["optional-dependencies"]["replay"]]
    assert {name for name, _, _ in of_replay} == {*entry.NEEDED, "deepspeed", "torch"}
    bounds = {name: tuple(int(part) for part in bound.split(".")) for name, _, bound in of_replay}
    assert {name: bounds[name] for name in entry.FIRST_VERSIONS} == entry.FIRST_VERSIONS
    assert all(bound.replace(".", "").isdigit() for _, _, bound in of_replay)
    assert "micro-replay[replay]" in declared["optional-dependencies"]["test"]


@pytest.mark.parametrize(
    ("name", "installed", "is_refused"),
    [
        ("torch", "2.5.1+cu121", True),
        ("torch", "2.6.0a0+git1", False),
        ("torch", "2.13.0+cpu", False),
        ("transformers", "4.56.2", True),
        ("transformers", "4.57.0", False),
        ("transformers", "5.0.0rc1", False),
    ],
)
def test_a_library_that_is_too_old_is_named(name: str, installed: str, is_refused: bool) -> None:
    find_version = {name: installed}.get
    refusal = entry.complaint([], (3, 11), find_version=find_version)
    assert (refusal is not None) is is_refused
    if refusal is not None:
        assert f"{name} {'2.6' if name == 'torch' else '4.57'} or later, and {installed} is installed" in refusal
    assert entry.complaint(["doctor"], (3, 11), find_version=find_version) is None
