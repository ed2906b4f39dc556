"""A replay's log as an object with tables: what `replay.run` returns, and `replay.open` reads."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from html import escape
from typing import TYPE_CHECKING, Any

from actor_init.spec import UsageError
from capture.facts import Setting
from replay.options.value_checks import check_value
from replay.output.frames import make_frame
from replay.output.printing import NAME_WIDTH
from replay.runlog import token_log_probs
from replay.runlog.records import PASS_LINE, PassRecord, to_line
from replay.runner.result import Run
from replay.verdict.outcomes import PassVerdict, Verdict
from replay.verdict.text import format_verdict

if TYPE_CHECKING:
    from replay.output.frames import DataFrame


@dataclass(frozen=True, kw_only=True, slots=True)
class RunVerdict(Verdict):
    """The verdict on a run, which can say itself."""

    def explain(self) -> str:
        """Return the lines that the terminal shows: outcome, cause, what to try, evidence, coverage."""
        return "\n".join(f"{name.ljust(NAME_WIDTH)}{text}" for name, text in format_verdict(self))


# The columns of `ReplayedRun.findings`.
FINDING_COLUMNS = (
    *("number", "rank", "quantity", "status", "recorded", "replayed", "difference", "bound", "where", "doubt"),
)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ReplayedRun(Run):
    """One replay: run.json and the records of its passes, which are numbered from 1.

    folder    of its log
    file      run.json
    records   of all ranks, by pass and rank
    problems  why the log is not whole: passes that failed, a rank that broke off, a line that is cut short
    """

    def __repr__(self) -> str:
        outcome = self.verdict.outcome if self.has_verdict else "no verdict"
        return f"ReplayedRun({str(self.folder)!r}, {len(self.records)} records of passes, {outcome})"

    @property
    def verdict(self) -> RunVerdict:
        """The verdict. Raises UsageError for a run that came to none."""
        verdict = self._section(RunVerdict, "verdict", self._end.verdict)
        if verdict is None:
            why = "; ".join(self.problems) or "its log has no end"
            raise UsageError(f"{self.folder} has no verdict: {why}")
        return verdict

    @property
    def has_verdict(self) -> bool:
        return self._end.verdict is not None

    def passes(self) -> "DataFrame":
        """Return a table with a row for each pass and rank. Needs pandas.

        Columns are the fields of a line of rank<k>.jsonl, which docs/formats.md explains, with these in place of
        `index` and `phases`: `number` (from 1), `outcome` (of the verdict; None where there is none), and of each phase
        `<phase>_seconds` and `<phase>_peak_bytes`.
        """
        rows = list(self._list_pass_rows(self._outcomes()))
        # A run that was cut short before its first pass has the columns that every run has.
        return make_frame(rows, None if rows else ("number", *_LINE_COLUMNS, "outcome"))

    def gradients(self) -> "DataFrame":
        """Return a table of what was judged of the gradients: a row for each window, rank and quantity. Needs pandas.

        Columns: `number` of the window's last pass, `rank`, `optimizer_step` (of the job, from 1), and those of
        `findings`.
        """
        rows = [row for window in self.verdict.windows for row in _list_finding_rows(window)]
        return make_frame(rows, (*FINDING_COLUMNS[:2], "optimizer_step", *FINDING_COLUMNS[2:]))

    def findings(self) -> "DataFrame":
        """Return a table of what was judged of the forwards: a row for each pass, rank and quantity. Needs pandas.

        Columns: `number`, `rank`, `quantity`, `status`, `recorded` (in the job), `replayed`, `difference` (relative),
        `bound`, `where`, `doubt`.
        """
        rows = [row for judged in self.verdict.passes for row in _list_finding_rows(judged)]
        return make_frame(rows, FINDING_COLUMNS)

    def weights(self) -> "DataFrame":
        """Return a table of the parameters whose samples were compared: `name` and `differs`. Needs pandas."""
        weights = self.verdict.weights
        differing = set() if weights is None else {*weights.differing}
        names = () if weights is None else weights.compared
        return make_frame(({"name": name, "differs": name in differing} for name in names), ("name", "differs"))

    def tokens(self, *, worst: int | None = None) -> "DataFrame":
        """Return a table of the tokens' log-probs: a row for each pass, rank and token. Needs pandas, and `trace=True`.

        Columns: `number`, `rank`, `row` and `column` in the captured rows, `log_prob`, `recorded` (in the job; of a
        sample of tokens, and of all where the job computed log-probs), `difference` (absolute). With `worst`, only so
        many of those that the job recorded, the farthest from the job first.

        Raises UsageError for a run that kept no tokens.
        """
        if not (self.folder / token_log_probs.FOLDER).is_dir():
            trace = Setting("trace", True)
            raise UsageError(f"{self.folder} kept no tokens. Try: the run again, with {trace}")
        rows = [row for record in self.records if record.error is None for row in self._list_token_rows(record)]
        if worst is not None:
            worst = check_value("worst", worst, int, min=0)
            known = [row for row in rows if row["difference"] is not None]
            # What is not a number is farther from the job than any number.
            rows = sorted(known, key=_sort_by_difference, reverse=True)[:worst]
        return make_frame(iter(rows), ("number", "rank", "row", "column", "log_prob", "recorded", "difference"))

    def _list_token_rows(self, record: PassRecord) -> Iterator[dict[str, Any]]:
        for token in token_log_probs.read_tokens(self.folder, record.index, record.rank):
            difference = None if token.recorded is None else abs(token.log_prob - token.recorded)
            place = {"number": record.index + 1, "rank": record.rank, "row": token.row, "column": token.column}
            yield {**place, "log_prob": token.log_prob, "recorded": token.recorded, "difference": difference}

    def log_to(self, logger: Any, *, prefix: str = "replay/") -> None:
        """Log what the run measured: a call for each pass, and one with the statistics.

        Seconds, bytes, losses and gradient norms, as `replay/forward_seconds`; of several ranks the first one's. The
        last call also has `replay/reproduced`, 1 or 0, where there is a verdict.

        logger  with `log(dict)`, as a run of wandb, trackio or aim; with `log_metrics(dict, step=...)`, as mlflow and
                Lightning's loggers; or with `add_scalar(name, value, step)`, as TensorBoard's SummaryWriter

        Raises UsageError for a logger with none of these.
        """
        for record in self.records:
            if record.rank == self.ranks[0]:
                values = _list_phase_costs(record) | {"loss": record.result.loss, "grad_norm": record.result.grad_norm}
                _log(logger, _prefix_numbers(values, prefix), step=record.index + 1)
        statistics = self.statistics
        totals: dict[str, Any] = {
            "num_passes": statistics.num_passes,
            "median_seconds": statistics.median_seconds,
            "real_tokens_per_second": statistics.real_tokens_per_second,
        }
        if self.has_verdict:
            totals["reproduced"] = int(self.verdict.reproduced)
        _log(logger, _prefix_numbers(totals, prefix), step=statistics.num_passes)

    def _outcomes(self) -> dict[tuple[int, int], str]:
        if not self.has_verdict:
            return {}
        return {(judged.index, judged.rank): judged.outcome for judged in self.verdict.passes}

    def _list_pass_rows(self, outcomes: dict[tuple[int, int], str]) -> Iterator[dict[str, Any]]:
        for record in self.records:
            line = to_line(record)
            del line["index"], line["phases"]
            outcome = outcomes.get((record.index, record.rank))
            yield {"number": record.index + 1, **line, **_list_phase_costs(record), "outcome": outcome}

    def _repr_html_(self) -> str:
        """Return the page of `replay report`, as a notebook shows a result."""
        from replay.commands.report.page import render_page

        run = Run(folder=self.folder, file=self.file, records=self.records, problems=self.problems)
        # The page has styles of its own, which must not become the notebook's.
        page = escape(render_page([run], [], self.folder), quote=True)
        return f'<iframe srcdoc="{page}" width="100%" height="720" style="border: 0"></iframe>'


# The fields of a line that a table of passes has as they are.
_LINE_COLUMNS = tuple(field.name for field in fields(PASS_LINE) if field.name not in ("index", "phases"))


def _sort_by_difference(row: Mapping[str, Any]) -> float:
    difference = float(row["difference"])
    return math.inf if math.isnan(difference) else difference


def _list_phase_costs(record: PassRecord) -> dict[str, Any]:
    costs: dict[str, Any] = {}
    for name, cost in record.cost.phases.items():
        costs |= {f"{name}_seconds": cost.seconds, f"{name}_peak_bytes": cost.peak_allocated_bytes}
    return costs


def _list_finding_rows(judged: PassVerdict) -> Iterator[dict[str, Any]]:
    place: dict[str, Any] = {"number": judged.index + 1, "rank": judged.rank}
    if judged.is_window:
        place["optimizer_step"] = None if judged.optimizer_step is None else judged.optimizer_step + 1
    for finding in judged.findings:
        yield {
            **place,
            "quantity": finding.name,
            "status": finding.status.value,
            "recorded": finding.recorded,
            "replayed": finding.replayed,
            "difference": finding.difference,
            "bound": finding.bound,
            "where": finding.where,
            "doubt": finding.doubt,
        }


def _log(logger: Any, values: dict[str, float], *, step: int) -> None:
    if hasattr(logger, "log"):
        logger.log(values)
    elif hasattr(logger, "log_metrics"):
        logger.log_metrics(values, step=step)
    elif hasattr(logger, "add_scalar"):
        for name, value in values.items():
            logger.add_scalar(name, value, step)
    else:
        raise UsageError(
            f"a {type(logger).__name__} has neither log, log_metrics nor add_scalar. Give a logger with one"
        )


def _prefix_numbers(values: dict[str, Any], prefix: str) -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in values.items() if value is not None}
