"""Write parity.html: one file that needs no network and no script, with the terminal's tables and the plot."""

from collections.abc import Mapping, Sequence
from html import escape

from replay.parity import text as words
from replay.parity.results import MatrixResult
from replay.parity.rows import ParityLog
from replay.report.text import Pairs, is_text
from replay.runlog.writer import versions

NO_PICTURE = "<p>No picture: it needs matplotlib. Try: pip install 'micro-replay[plot]'</p>"
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem; color: #1a1a1a; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th.text, td.text { text-align: left; }
td.EQUAL, td.WITHIN { color: #12692e; }
td.DIFFERS, td.FAILED, td.NOT { color: #b3001b; font-weight: bold; }
dt { font-weight: bold; } dd { margin: 0 0 0.4rem 1.5rem; overflow-wrap: anywhere; }
code { font-size: 12px; overflow-wrap: anywhere; } svg { max-width: 100%; height: auto; }
"""


def page(log: ParityLog, result: MatrixResult, differences: Pairs, picture: str | None) -> str:
    """Return the page. `picture` is an SVG file; `differences` says where differing cells first depart from the
    reference.
    """
    commands = {"run": [row.cell.name for row in log.rows], "command": words.commands(log)}
    installed = [(name, number or "-") for name, number in versions().items()]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>replay parity</title>",
        f"<style>{STYLE}</style></head><body><h1>replay parity</h1>",
        _pairs([*words.header(log), *words.summary(log, result)]),
        _pairs(words.failures(log, result) + differences),
        picture[picture.index("<svg") :] if picture else NO_PICTURE,
        "<h2>Noise</h2><p>The floor is the largest relative difference between runs that should be equal except for "
        "rounding. A run DIFFERS beyond the bound. What is beyond the ceiling cannot be rounding alone.</p>",
        _table(words.noise_table(result)),
        "<h2>Runs</h2><p>The largest relative difference, of any input, from the reference of the same dtype.</p>",
        _table(words.cell_table(log, result)),
        f"<h2>Commands</h2>{_table(commands)}<h2>Versions</h2>{_pairs(installed)}</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _pairs(pairs: Pairs) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs)
    return f"<dl>{items}</dl>" if items else ""


def _table(columns: Mapping[str, Sequence[str]]) -> str:
    head = "".join(f"<th{_kind(name)}>{escape(name)}</th>" for name in columns)
    rows = zip(*columns.values(), strict=True)
    body = "".join(
        "<tr>" + "".join(_cell(name, value) for name, value in zip(columns, row, strict=True)) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(name: str, value: str) -> str:
    if name == "verdict":
        return f"<td class='text {escape(value.split()[0])}'>{escape(value)}</td>"
    text = f"<code>{escape(value)}</code>" if name == "command" else escape(value)
    return f"<td{_kind(name)}>{text}</td>"


def _kind(name: str) -> str:
    return " class='text'" if is_text(name) else ""
