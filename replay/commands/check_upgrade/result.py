"""Hold what `replay check-upgrade` comes to, and write it as tables and as a Markdown page."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from actor_init.as_json import AnyFloat, to_json
from replay.output.text import Columns, Pairs, format_gibibytes, format_milliseconds, join_lines
from replay.processes.interpreter import Environment
from replay.verdict.outcomes import Outcome

NAMES = ("old", "new")


class UpgradeResult(StrEnum):
    AGREE = "AGREE"
    DIFFER = "DIFFER"
    # A replay failed or was refused, or the two could not be compared.
    FAILED = "FAILED"


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentRun:
    """The replay in one environment.

    folder   of its log; None where it left none
    error    why it is not whole; empty: it is
    outcome  of its verdict; None where it has none that this version can read
    verdict  its first lines: the outcome, and a cause where one is known
    """

    environment: Environment
    folder: Path | None
    error: str
    outcome: Outcome | None = None
    verdict: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedQuantity:
    """How far apart the two environments are in one quantity, at most, and what rounding explains."""

    name: str
    distance: AnyFloat
    bound: float
    where: str

    @property
    def agrees(self) -> bool:
        return self.distance <= self.bound


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedCost:
    """The mean over the passes that count in both: seconds of a phase, or bytes of the peak."""

    name: str
    unit: str
    old: float
    new: float


@dataclass(frozen=True, kw_only=True, slots=True)
class UpgradeCheck:
    """Whether two environments compute the same numbers.

    command           the command line that repeats the check
    folder            of its log
    runs              the replays in the old and in the new environment
    quantities        losses, log-probs and gradients, compared; empty where a replay failed
    costs             time and memory beside each other; they decide nothing
    first_difference  the first traced tensor beyond its bound, where the numbers differ
    notes             why the two could not be compared, or what was left out
    """

    command: str
    folder: Path
    runs: Sequence[EnvironmentRun]
    quantities: Sequence[ComparedQuantity] = ()
    costs: Sequence[ComparedCost] = ()
    first_difference: str | None = None
    notes: Sequence[str] = ()

    @property
    def result(self) -> UpgradeResult:
        """AGREE, DIFFER or FAILED."""
        if not self.quantities or any(run.error for run in self.runs):
            return UpgradeResult.FAILED
        old, new = (run.outcome for run in self.runs)
        is_same_verdict = old == new or old is None or new is None
        agrees = is_same_verdict and all(quantity.agrees for quantity in self.quantities)
        return UpgradeResult.AGREE if agrees else UpgradeResult.DIFFER

    @property
    def exit_code(self) -> int:
        """0: they agree."""
        return int(self.result is not UpgradeResult.AGREE)

    def to_dict(self) -> dict[str, Any]:
        """Return the check as JSON has it."""
        return {"result": self.result.value, **to_json(self)}

    def to_markdown(self) -> str:
        """Return the check as a Markdown page, as a CI job shows it."""
        return format_markdown(self)


MEANINGS = {
    UpgradeResult.AGREE: "no number differs by more than rounding explains",
    UpgradeResult.DIFFER: "the two environments do not compute the same",
    UpgradeResult.FAILED: "the two environments could not be compared",
}


def make_environment_table(result: UpgradeCheck) -> Columns:
    """Make a row for each version, the verdict and each cost, and a column for each environment."""
    old, new = (run.environment.versions for run in result.runs)
    rows = {name: (old.get(name) or "none", new.get(name) or "none") for name in dict.fromkeys((*old, *new))}
    verdict, other_verdict = ("failed" if run.error else run.outcome or "none" for run in result.runs)
    rows["verdict"] = verdict, other_verdict
    rows |= {cost.name: (_format_cost(cost, cost.old), _format_cost(cost, cost.new)) for cost in result.costs}
    return {"": list(rows), **{name: [row[number] for row in rows.values()] for number, name in enumerate(NAMES)}}


def make_quantity_table(result: UpgradeCheck) -> Columns:
    return {
        "quantity": [quantity.name for quantity in result.quantities],
        "largest difference": [f"{quantity.distance:.3g}" for quantity in result.quantities],
        "bound": [f"{quantity.bound:.2g}" for quantity in result.quantities],
        "result": ["agrees" if quantity.agrees else "differs" for quantity in result.quantities],
        "at": [quantity.where if quantity.distance else "" for quantity in result.quantities],
    }


def list_remarks(result: UpgradeCheck) -> Pairs:
    pairs: Pairs = [
        (name, run.error or run.verdict)
        for name, run in zip(NAMES, result.runs, strict=True)
        if run.error or run.outcome is not Outcome.REPRODUCED
    ]
    if len(pairs) > 1 and pairs[0][1] == pairs[1][1]:
        pairs = [("both", pairs[0][1])]
    pairs += [("first diff", result.first_difference)] if result.first_difference is not None else []
    pairs += [("note", note) for note in result.notes]
    return [*pairs, ("repeat", result.command), ("log", str(result.folder))]


def format_markdown(result: UpgradeCheck) -> str:
    """Return the page: the result, both environments, the quantities, and where the two part."""
    parts = [
        f"## replay check-upgrade: {result.result}",
        f"{MEANINGS[result.result].capitalize()}.",
        _format_table(make_environment_table(result)),
    ]
    parts += [_format_table(make_quantity_table(result))] if result.quantities else []
    parts.append("\n".join(f"* {name}: {_escape(text)}" for name, text in list_remarks(result)))
    return "\n\n".join(parts) + "\n"


def _format_cost(cost: ComparedCost, value: float) -> str:
    return f"{format_milliseconds(value)} ms" if cost.unit == "seconds" else f"{format_gibibytes(value)} GiB"


def _format_table(columns: Columns) -> str:
    rows = [list(columns), ["---"] * len(columns), *map(list, zip(*columns.values(), strict=True))]
    return "\n".join(f"| {' | '.join(map(_escape, row))} |" for row in rows)


def _escape(text: str) -> str:
    """Keep text on one line, and what Markdown or HTML would read from it as it is."""
    text = join_lines(text)
    for sign in "\\|<>`*_":
        text = text.replace(sign, f"\\{sign}")
    return text
