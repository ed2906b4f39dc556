"""What a release has: a tag's version, every file of the packages, and commands that run without the checkout."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from email.message import Message
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.test_floors import FLOORS, ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("setuptools_scm"), reason="needs the extra: pip install -e '.[test]'"),
]
# The name that PyPI knows, in the form of file names.
STEM = "micro_replay-1.2.3"


def run(*words: str | Path, folder: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what git would commit of the checkout, links as links, without its history."""
    tree = tmp_path_factory.mktemp("tree")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():  # not if it is deleted, but not committed yet
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    return tree


@pytest.fixture(scope="module")
def releases(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tag the tree v1.2.3 and build the sdist, then the wheel from the sdist, as `python -m build` does."""
    git = ("git", "-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
    for words in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "-m", "all"), ("tag", "v1.2.3")):
        run(*git, *words, folder=tree)
    folder = tmp_path_factory.mktemp("releases")
    build_sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", build_sdist, folder=tree)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, folder / f"{STEM}.tar.gz", folder=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(releases: Path) -> ZipFile:
    return ZipFile(releases / f"{STEM}-py3-none-any.whl")


@pytest.fixture(scope="module")
def metadata(wheel: ZipFile) -> Message:
    return Parser().parsestr(wheel.read(f"{STEM}.dist-info/METADATA").decode())


def test_a_tree_without_git_has_the_version_that_pyproject_names(tree: Path) -> None:
    shutil.rmtree(tree / ".git", ignore_errors=True)
    fallback = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools_scm"]["fallback_version"]
    assert fallback.endswith(".dev0")
    assert run(sys.executable, "-m", "setuptools_scm", folder=tree).strip() == fallback


def test_the_wheel_has_each_file_of_the_packages_and_nothing_else(tree: Path, wheel: ZipFile) -> None:
    """The sample inputs are links in the tree and files in the wheel."""
    files = {
        (Path(folder) / name).relative_to(tree).as_posix()
        for package in FLOORS
        for folder, _, names in os.walk(tree / package, followlinks=True)
        for name in names
    }
    sizes = {info.filename: info.file_size for info in wheel.infolist()}
    assert {name for name in sizes if not name.startswith(f"{STEM}.dist-info/")} == files
    assert {f"{package}/py.typed" for package in FLOORS} | {"replay/sample/actor.json"} <= files
    assert max(sizes.values()) < 2**20


def test_the_sdist_has_the_tests_and_no_file_over_a_mebibyte(releases: Path) -> None:
    with tarfile.open(releases / f"{STEM}.tar.gz") as sdist:
        sizes = {member.name.removeprefix(f"{STEM}/"): member.size for member in sdist}
    assert {"LICENSE", "constraints.txt", "inputs/sample/actor.json", "tests/test_release.py"} <= set(sizes)
    assert max(sizes.values()) < 2**20


def test_the_metadata_is_that_of_the_tag(wheel: ZipFile, metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"], metadata["License-Expression"]) == ("micro-replay", "1.2.3", "MIT")
    assert metadata["Description-Content-Type"] == "text/markdown"
    bare = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert bare == ["torch>=2.4"]
    scripts = wheel.read(f"{STEM}.dist-info/entry_points.txt").decode()
    assert scripts.splitlines() == [
        "[console_scripts]",
        "capture = capture.cli:main",
        "replay = replay.command_line.entry:run_and_leave",
    ]


def test_the_wheel_runs_without_the_checkout(wheel: ZipFile, tmp_path: Path) -> None:
    """Its packages come before the checkout's, which may be installed here, and its own version is printed."""
    site, folder = tmp_path / "site", tmp_path / "folder"
    folder.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site)
    run(*pip, str(wheel.filename), folder=folder)
    for program in ("replay", "capture"):
        said = run(site / "bin" / program, "--version", folder=folder, PYTHONPATH=str(site))
        assert said == f"{program} 1.2.3\n"
    where = "import actor_init, capture, replay; print(actor_init.__file__, capture.__file__, replay.__file__)"
    files = run(sys.executable, "-P", "-c", where, folder=folder, PYTHONPATH=str(site)).split()
    assert files == [str(site / package / "__init__.py") for package in sorted(FLOORS)]
    run(sys.executable, "-P", "-m", "replay", "--max-inputs", "1", folder=folder, PYTHONPATH=str(site))
    [run_file] = folder.glob("logs/*/run.json")
    log = json.loads(run_file.read_text())
    assert (log["status"], log["inputs"]["num_inputs"]) == ("finished", 1)
    assert log["versions"]["micro-replay"] == "1.2.3"
