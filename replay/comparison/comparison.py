"""Compare runs: each with the first of them, the reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from actor_init.as_json import to_json
from actor_init.spec import UsageError
from replay.comparison.comparable import compare_settings
from replay.comparison.differences import Differences, compare
from replay.options.value_checks import check_value
from replay.output.text import MAX_RUNS, list_run_letters
from replay.runlog.reader import PastRun

if TYPE_CHECKING:
    # This module needs torch, and logs without traces are compared without torch.
    from replay.tracing.first_difference import FirstDifference, FirstDifferences


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """How far runs are from a reference, and in which settings they differ.

    names              what each run is called, the reference first
    threshold          the largest relative difference that is taken for none
    settings           those that differ, with the value of each run
    differences        of each run but the reference
    first_differences  where traced runs leave their bounds, by the number of the run in `differences`
    """

    names: Sequence[str]
    runs: Sequence[PastRun]
    threshold: float
    settings: Mapping[str, Sequence[str]]
    differences: Sequence[Differences]
    first_differences: "FirstDifferences"

    @classmethod
    def read(cls, folders: Sequence[Path], *, threshold: float, names: Sequence[str] = ()) -> Self:
        """Compare the runs in these folders. Raises UsageError for logs that cannot be compared."""
        if not 2 <= len(folders) <= MAX_RUNS:
            raise UsageError(f"two to {MAX_RUNS} logs can be compared, not {len(folders)}. Try: replay compare LOG LOG")
        threshold = check_value("threshold", threshold, float, min=0)
        reference, *others = runs = [PastRun.read(folder) for folder in folders]
        return cls(
            names=names or list_run_letters(len(runs)),
            runs=runs,
            threshold=threshold,
            differences=[compare(reference, other, tolerates_other_code=True) for other in others],
            first_differences=_find_first_differences(reference, others),
            settings=compare_settings(runs),
        )

    @property
    def by_name(self) -> list[tuple[str, Differences]]:
        """The name and the differences of each run but the reference."""
        return list(zip(self.names[1:], self.differences, strict=True))

    @property
    def is_within(self) -> bool:
        """Whether no relative difference that decides is beyond the threshold."""
        return all(differences.max_relative <= self.threshold for differences in self.differences)

    @property
    def first_difference(self) -> "FirstDifference | None":
        """The first traced tensor in which a run leaves its bound; None where none does, or a run was not traced."""
        return next((first for first in self.first_differences.values() if first is not None), None)

    @property
    def exit_code(self) -> int:
        """0: within the threshold."""
        return 0 if self.is_within else 1

    def to_dict(self) -> dict[str, Any]:
        """Return the whole comparison as JSON has it, with each point, and where traced runs leave their bounds."""
        return {
            "threshold": self.threshold,
            "runs": [str(run.folder) for run in self.runs],
            "settings": to_json(self.settings),
            "comparisons": [
                {
                    "run": str(run.folder),
                    "within": differences.max_relative <= self.threshold,
                    **to_json(differences),
                    **(
                        {"first_difference": to_json(self.first_differences[number])}
                        if number in self.first_differences
                        else {}
                    ),
                }
                for number, (run, differences) in enumerate(zip(self.runs[1:], self.differences, strict=True))
            ],
        }


def _find_first_differences(reference: PastRun, others: Sequence[PastRun]) -> "FirstDifferences":
    """Find the first difference of each run that was traced, if the reference was."""
    if not reference.measure.trace:
        return {}

    from replay.tracing.first_difference import find_first_difference

    traced = {number: other for number, other in enumerate(others) if other.measure.trace}
    return {number: find_first_difference(reference.folder, other.folder) for number, other in traced.items()}
