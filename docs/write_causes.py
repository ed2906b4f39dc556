"""Write the table of causes into docs/verdict.md and into the skill, between their two marks.

python -m docs.write_causes
"""

from pathlib import Path

from docs.generated_block import insert_lines
from replay.verdict.causes.table import RULES

PAGE = Path(__file__).parent / "verdict.md"
SKILL = Path(__file__).parent.parent / "skills" / "debug-training-step" / "SKILL.md"


def list_causes() -> list[str]:
    """Return the lines of the table, one for each rule, in the order in which rules are applied."""
    lines = ["| cause | means | told by | planted in |", "|---|---|---|---|"]
    return lines + [f"| {rule.name} | {rule.means} | {rule.told_by} | `{rule.job}` |" for rule in RULES]


def list_meanings() -> list[str]:
    """Return the lines of the skill's table: each cause with what it may mean."""
    meanings: dict[str, list[str]] = {}
    for rule in RULES:
        meanings.setdefault(rule.name, []).append(rule.means)
    lines = ["| cause | means |", "|---|---|"]
    return lines + [f"| {name} | {'; or '.join(dict.fromkeys(texts))} |" for name, texts in meanings.items()]


if __name__ == "__main__":
    PAGE.write_text(insert_lines(PAGE.read_text(), "causes", list_causes()))
    SKILL.write_text(insert_lines(SKILL.read_text(), "causes", list_meanings()))
