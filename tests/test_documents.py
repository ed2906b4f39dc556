"""README, AGENTS.md and the pages of docs/: links lead somewhere, commands are accepted, programs run."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from capture.cli import build_parser as build_capture_parser
from docs import write_api, write_options
from docs.generated_block import insert_lines
from replay.command_line.cli import parse_command_line
from tests.helpers.machine import job_environment
from tests.warm import warm_bin

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/RESULTS.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "skills/debug-training-step/SKILL.md",
]
LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "python", "sbatch")


class Block(NamedTuple):
    page: str
    line: int
    language: str  # of a fence; "" of an indented block
    text: str


def read_blocks(page: Path) -> Iterator[Block]:
    """Read the blocks of code of a page, in order: between fences, or indented by four spaces or more."""
    name = page.relative_to(ROOT).as_posix()
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        first = number
        if fence := re.fullmatch(r"\s*```(\w*)", lines[number]):
            number = next(i for i in range(first + 1, len(lines)) if lines[i].strip() == "```")
            yield Block(name, first + 1, fence[1], "\n".join(lines[first + 1 : number]))
        elif lines[number].startswith("    ") and not lines[number - 1].strip():
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                number += 1
            yield Block(name, first + 1, "", "\n".join(line[4:] for line in lines[first:number]))
            continue
        number += 1


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def find_commands(block: Block) -> Iterator[list[str]]:
    """Find the command lines that a reader may type, without prompts, comments and variables set before them."""
    for line in block.text.replace("\\\n", " ").splitlines():
        line = re.sub(r"\s{2,}#.*| # .*", "", line.strip().removeprefix("$ "))
        for command in line.split(" && "):
            command = re.sub(r"^([A-Z_]+=\S+ )+", "", command)
            if re.match(rf"(replay|capture|{'|'.join(LAUNCHERS)}) ", command) and "[...]" not in command:
                yield shlex.split(command)


def find_commands_in_text(page: Path) -> Iterator[list[str]]:
    """Find the command lines in sentences and tables. A command or an option that stands alone is a name."""
    for span in re.findall(r"`((?:replay|capture) [^`]+ [^`]+)`", page.read_text(encoding="utf-8")):
        yield shlex.split(span)


COMMANDS = [
    pytest.param(command, id=f"{block.page}:{block.line} {' '.join(command)}")
    for block in BLOCKS
    for command in find_commands(block)
] + [
    pytest.param(command, id=f"{page.relative_to(ROOT).as_posix()}: {' '.join(command)}")
    for page in PAGES
    for command in find_commands_in_text(page)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_of_a_page_is_accepted(command: list[str]) -> None:
    """Its options exist and have such values. Nothing is run."""
    if command[0] in LAUNCHERS:
        program = next((i for i, word in enumerate(command) if word in ("replay", "capture")), None)
        if program is None:
            return
        command = command[program:]
    if command[0] == "capture":
        build_capture_parser().parse_args(command[1:])
    else:
        parse_command_line(command[1:])


def make_anchor(heading: str) -> str:
    """Make the anchor that GitHub and mkdocs give a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text.lower()).strip())


def read_anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {make_anchor(heading) for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    broken = []
    for target in targets:
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in read_anchors(file)):
            broken.append(target)
    assert broken == []


def test_the_map_for_agents_is_short_and_names_files_that_are_there() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
    named = set(re.findall(r"`([\w./]+(?:/|\.py|\.md|\.toml|\.yml|\.yaml))`", text))
    assert len(named) > 30
    files = [file for folder in ("capture", "actor_init", "replay", "tests") for file in (ROOT / folder).rglob("*.py")]
    lost = {name for name in named if not (ROOT / name).exists() and not any(file.match(name) for file in files)}
    assert lost == set()


def test_the_site_lists_every_page() -> None:
    listed = re.findall(r"- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert sorted({*listed} & pages) == sorted(pages)


def test_the_pages_are_short() -> None:
    """Every word between blanks counts, in tables and code too; what a builder writes between its marks does not."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    written = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL)
    assert len(pages) <= 18
    assert len(re.findall(r"\S*\w\S*", written)) <= 20_000


def test_the_reference_of_the_api_is_what_the_docstrings_say() -> None:
    text = write_api.PAGE.read_text(encoding="utf-8")
    assert insert_lines(text, "reference", write_api.list_reference()) == text, "run `python -m docs.write_api`"


def test_the_options_of_a_run_are_those_that_are_declared() -> None:
    text = write_options.FILE.read_text(encoding="utf-8")
    assert write_options.format_file() == text, "run `python -m docs.write_options`"


@pytest.mark.parametrize(
    "folder", [ROOT / name for name in ("capture", "actor_init", "replay", "tests", "benchmarks", "examples", "deploy")]
)
def test_the_pages_that_code_names_are_there(folder: Path) -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in folder.rglob("*.py")
        for page in re.findall(r"\b(docs/[\w-]+\.md)", path.read_text(encoding="utf-8"))
    }
    assert [(path, page) for path, page in sorted(named) if not (ROOT / page).exists()] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a reader's folder: the examples, and the log of a replay of the sample."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "examples").symlink_to(ROOT / "examples")
    run("replay --max-inputs 2", folder)
    return folder


def run(command: str, folder: Path) -> str:
    """Run a command line in the folder and return what it prints. Its imports are there already."""
    words = shlex.split(command)
    if words[0] == "capture":
        words = ["python", "-m", *words]
    done = subprocess.run(
        words,
        cwd=folder,
        env=job_environment() | {"PATH": f"{warm_bin()}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    # A replay that differs from its job, and a comparison of runs that differ, end with 1.
    said = done.stdout[-2000:] + done.stderr[-4000:]
    assert done.returncode in (0, 1), said
    assert "Traceback" not in done.stderr, said
    return done.stdout


PROGRAMS = [block for block in BLOCKS if block.language == "python"]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.page}:{program.line}")
def test_the_program_of_a_page_runs(program: Block, folder: Path) -> None:
    """What it records is REPRODUCED by the command line below it."""
    if "ray.train" in program.text:
        pytest.skip("tests/capture/on_ray/test_ray_jobs.py runs it on two nodes")
    (folder / "program.py").write_text(program.text)
    run("python program.py", folder)
    if re.search(r"^(from|import) capture", program.text, re.MULTILINE):
        below = BLOCKS[BLOCKS.index(program) + 1]
        (command,) = find_commands(below)
        assert "verdict    REPRODUCED" in run(shlex.join(command), folder)


STORY = [block for block in BLOCKS if block.page == "README.md" and block.text.startswith("$ ")]


@pytest.mark.slow
def test_the_story_of_the_readme_goes_as_it_says(folder: Path) -> None:
    """Each line that README shows is printed, but for its numbers and for what it leaves out as [...]."""
    assert STORY
    for block in STORY:
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n?)*)", block.text, re.MULTILINE):
            newest_log = max((folder / "logs").iterdir(), key=lambda log: log.stat().st_mtime).name
            printed = without_numbers(run(re.sub(r"(?<=logs/)\S+", newest_log, command), folder))
            for part in shown.replace("\n           ", " ").replace("[...]", "\n").splitlines():
                assert without_numbers(part) in printed, (command, part, printed)


def without_numbers(text: str) -> str:
    """Leave out numbers and layout: machines differ in the last digits, and README's lines are broken."""
    return " ".join(re.sub(r"-?\d[\d.,e+-]*", "N", text).split())
