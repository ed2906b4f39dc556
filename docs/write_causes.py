"""Write the table of causes into docs/verdict.md, between its two marks.

python -m docs.write_causes
"""

from pathlib import Path

from replay.verdict.causes.table import RULES

PAGE = Path(__file__).parent / "verdict.md"
BEGIN, END = "<!-- causes: begin -->", "<!-- causes: end -->"


def list_causes() -> list[str]:
    """Return the lines of the table, one for each rule, in the order in which rules are applied."""
    lines = ["| cause | means | told by | planted in |", "|---|---|---|---|"]
    return lines + [f"| {rule.name} | {rule.means} | {rule.told_by} | `{rule.job}` |" for rule in RULES]


def insert_causes(text: str) -> str:
    """Return the page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, *list_causes(), END + after])


if __name__ == "__main__":
    PAGE.write_text(insert_causes(PAGE.read_text()))
