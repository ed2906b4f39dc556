"""Write the reference of docs/api.md, between its two marks, from the docstrings of what `import replay` offers.

python -m docs.write_api
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import replay
from docs.generated_block import insert_lines
from replay.api.run import RunVerdict
from replay.commands.check_upgrade.result import UpgradeCheck
from replay.commands.diagnose.report import DiagnoseResult
from replay.commands.doctor.report import MachineReport
from replay.commands.inspect.inspection import Inspection
from replay.commands.minimise.runs import MinimiseResult
from replay.commands.mismatch.report import MismatchResult
from replay.commands.parity.runs import ParityResult
from replay.commands.recompiles.runs import RecompilesResult
from replay.commands.scan.runs import ScanResult
from replay.commands.suite.runs import SuiteResult
from replay.commands.worst.runs import WorstResult
from replay.post_mortem.hang import HangReport
from replay.verdict.causes.cause import Cause
from replay.verdict.outcomes import Coverage

# What the functions return, beside the classes that `import replay` offers itself.
RESULTS = (
    *(RunVerdict, Coverage, Cause, Inspection, HangReport, MachineReport, UpgradeCheck),
    *(DiagnoseResult, MinimiseResult, MismatchResult, ParityResult, RecompilesResult, ScanResult, SuiteResult),
    WorstResult,
)
PAGE = Path(__file__).parent / "api.md"
# The argument or field of a docstring's list, and what it is.
ENTRY = re.compile(r"(?P<names>\w+(?:, \w+)*)  +(?P<text>\S.*)")


def list_reference() -> Iterator[str]:
    """Yield the lines of the reference: functions first, then classes, each in alphabetical order."""
    yield ""
    exports = {name: getattr(replay, name) for name in replay.__all__}
    for name, function in exports.items():
        if not inspect.isclass(function):
            yield f"### replay.{name}"
            yield from ["", f"`{format_call(name, function)}`", ""]
            yield from format_docstring(function)
    for name, kind in exports.items():
        if inspect.isclass(kind):
            yield from [f"### {name}", "", *format_docstring(kind)]
            yield from list_members(kind)
    for kind in RESULTS:
        yield from [f"### {kind.__name__}", "", *format_docstring(kind)]
        yield from list_other_fields(kind)
        yield from list_members(kind)


def format_call(name: str, function: Any) -> str:
    """Format a function's arguments with their defaults; the options of a replay are `**options`."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
    ]
    return f"replay.{name}{inspect.Signature(parameters)}"


def list_other_fields(kind: type) -> Iterator[str]:
    """Yield a line for each field that the class's own docstring does not describe.

    It has the text of a base class's docstring, else the field's type.
    """
    bases = [base for base in kind.__mro__[1:] if base.__module__.partition(".")[0] == "replay"]
    inherited = {name: text for base in reversed(bases) for name, text in read_entries(base)}
    own = {name for name, _ in read_entries(kind)}
    others = [field for field in fields(kind) if field.name not in own and not field.name.startswith("_")]
    for field in others:
        of_type = re.sub(r"\b[a-z_]+(?:\.\w+)*\.(?=\w)", "", inspect.formatannotation(field.type))
        yield f"* `{field.name}`: {inherited.get(field.name, f'`{of_type}`')}"
    if others:
        yield ""


def read_entries(kind: type) -> Iterator[tuple[str, str]]:
    """Yield each field that a class's docstring describes, with its text in one line."""
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(kind.__doc__ or "").splitlines():
        entry = ENTRY.fullmatch(line)
        if entry:
            names = entry["names"].split(", ")
            entries |= dict.fromkeys(names, entry["text"])
        elif names and line.startswith("  "):
            entries |= {name: f"{entries[name]} {line.strip()}" for name in names}
        else:
            names = []
    yield from entries.items()


def list_members(kind: type) -> Iterator[str]:
    """Yield a line for each public property and method that a class of this project gives a docstring."""
    members = {
        name: member
        for owner in reversed(kind.__mro__)
        if owner.__module__.partition(".")[0] in ("replay", "actor_init", "capture")
        for name, member in vars(owner).items()
        if not name.startswith(("_", "from_"))
    }
    lines = []
    for name, member in members.items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and (text := inspect.getdoc(function)):
            first = text.partition("\n\n")[0].replace("\n", " ")
            lines.append(f"* `{name}{'' if isinstance(member, property) else '()'}`: {first}")
    if lines:
        yield from [*lines, ""]


def format_docstring(documented: Any) -> Iterator[str]:
    """Yield a docstring as Markdown: its lists of arguments or fields become lists."""
    for paragraph in (inspect.getdoc(documented) or "").split("\n\n"):
        lines = paragraph.splitlines()
        if ENTRY.fullmatch(lines[0]):
            for line in lines:
                entry = ENTRY.fullmatch(line)
                yield f"* `{entry['names']}`: {entry['text']}" if entry else f"  {line.strip()}"
        else:
            yield from lines
        yield ""


if __name__ == "__main__":
    PAGE.write_text(insert_lines(PAGE.read_text(encoding="utf-8"), "reference", list_reference()), encoding="utf-8")
