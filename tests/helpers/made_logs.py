"""Logs with known numbers, written as a run writes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replay.options.option_parsing import build_replay_spec
from replay.options.resolved import LOSS, ChosenBy, ResolvedChoice
from replay.options.spec import LossName, ReplaySpec
from replay.resolution.selection import Selection
from replay.runlog.records import PassRecord
from replay.runlog.run_file import RunEnd, RunWork
from replay.runlog.summary import summarize
from replay.runlog.writer import Logbook
from replay.runner.non_finite import find_first_non_finite
from replay.verdict.outcomes import Outcome, Verdict
from tests.helpers.made_records import cost, record
from tests.helpers.made_replays import MadeReplay

FACTS = {"weights": "random, seed 0", "zero_stage": 1}
WORK: dict[str, Any] = {"weights": "random, seed 0", "config": {"num_hidden_layers": 4, "vocab_size": 264}}
VERDICT = Verdict(
    outcome=Outcome.REPRODUCED,
    reason=None,
    counts={},
    window_counts={},
    first=None,
    worst=[],
    open=[],
    weights=None,
    environment={},
    dtypes=("float32", "float32"),
)
SELECTION = Selection(inputs=[], num_left_out_passes=0, num_left_over=0, damaged=[], dealing="in recorded order")


def passed(index: int, name: str, loss: float = 2.0, norm: float | None = 4.0, **changes: Any) -> PassRecord:
    """A pass over the input `name`, whose two rows have log-probs of -10 and -20."""
    values = {"source": f"{name}.pkl", "input_digest": name, "row_log_probs": [-10.0, -20.0]}
    phases = {"forward": cost(0.25), "backward": cost(0.5, 2.0)}
    return record(index, **{**values, "phases": phases, "loss": loss, "grad_norm": norm, **changes})


def write_log(
    folder: Path,
    records: Sequence[PassRecord],
    *,
    typed: str = "",
    facts: dict[str, Any] | None = None,
    work: dict[str, Any] | None = None,
    memory_kind: str = "cuda allocator",
    exit_code: int | None = 0,
    spec: ReplaySpec | None = None,
    chosen_loss: str = LossName.STAND_IN,
    verdict: Verdict | None = None,
) -> Path:
    """A log of `replay` with the options `typed`, pairs of name and value; without an exit code it has no end.

    spec         options that were parsed before, instead of `typed`
    chosen_loss  what the run chose where no loss was typed
    """
    words = typed.split()
    given = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    spec = spec or build_replay_spec(
        {name: {"yes": True, "no": False}.get(value, value) for name, value in given.items()}
    )
    is_auto = spec.measure.loss == LossName.AUTO
    choices = [ResolvedChoice(setting=LOSS, value=chosen_loss, by=ChosenBy.DEFAULT)] if is_auto else []
    folder.mkdir(parents=True)
    ranks = sorted({record.rank for record in records})
    books = [Logbook(folder, rank) for rank in ranks]
    books[0].begin(
        MadeReplay.of(spec, *choices),
        facts=FACTS | (facts or {}),
        work=RunWork(**(WORK | (work or {}))),
        inputs=SELECTION.describe(),
        memory_kind=memory_kind,
        devices=["H200"] * len(ranks),
    )
    for pass_record in records:
        books[pass_record.rank].write(pass_record)
    if exit_code is not None:
        values = None if verdict is None else verdict.to_dict()
        first_tensor = find_first_non_finite(records)
        end = RunEnd(statistics=summarize(records), verdict=values, first_non_finite=first_tensor)
        books[0].finish(end, exit_code=exit_code)
    for book in books:
        book.close()
    return folder
