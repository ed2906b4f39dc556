"""What failed in a replay, read from its log and its exit code, and whether two failures are the same one."""

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replay.commands.minimise.failure import ADVICE, FailureKind, ReplayFailure, find_failure, mask
from replay.processes.pool import ProcessResult
from replay.runlog.records import PassRecord
from replay.verdict.findings import Finding, FindingStatus
from replay.verdict.outcomes import Outcome, PassVerdict
from tests.helpers.made_logs import VERDICT, passed, write_log
from tests.helpers.typed import spec_of

Kind = FailureKind
NAN, INF = float("nan"), float("inf")
DIED = {"kind": "died", "rank": 1, "index": 2, "source": "c.pkl", "error": "rank 1 was ended by SIGKILL"}
HUNG = {"kind": "hung", "rank": 1, "index": 2, "source": "c.pkl", "error": "no progress for 60 s"}
FAILED = {"kind": "failed", "rank": 1, "index": 2, "source": "c.pkl", "error": "ValueError: 5 rows"}


def child_of(
    home: Path, exit_code: int | None, records: Sequence[PassRecord], printed: str = "", typed: str = "", **run: Any
) -> ProcessResult:
    """A replay that left these records, and these fields of run.json."""
    folder = write_log(home / "run", records, exit_code=exit_code, spec=spec_of(typed.split()))
    whole = json.loads((folder / "run.json").read_text()) | run
    (folder / "run.json").write_text(json.dumps(whole))
    (home / "output.txt").write_text(printed)
    return ProcessResult(exit_code=exit_code, seconds=3.0, output=home / "output.txt", logs=home)


def fail(index: int, kind: str, text: str, **changes: Any) -> PassRecord:
    values = {"index": index, "source": f"{index}.pkl", "rank": 0, "error": text, "error_type": kind}
    return PassRecord(**{**values, **changes})


@pytest.mark.parametrize(
    ("exit_code", "records", "run", "failure"),
    [
        # Nothing failed, or the replay refused what was typed.
        (0, [passed(0, "a")], {}, None),
        (2, [fail(0, "IndexError", "x")], {}, None),
        # The first pass that failed.
        (
            1,
            [passed(0, "a"), fail(1, "IndexError", "index 70 of /a/b.pkl"), fail(2, "KeyError", "x")],
            {},
            ReplayFailure(
                kind=Kind.EXCEPTION,
                error_type="IndexError",
                message="index N of FILE",
                said="index 70 of /a/b.pkl",
                index=1,
                source="1.pkl",
            ),
        ),
        # The numbers of out of memory vary from run to run.
        (
            1,
            [fail(0, "OutOfMemoryError", "Tried to allocate 9 GiB")],
            {},
            ReplayFailure(
                kind=Kind.EXCEPTION,
                error_type="OutOfMemoryError",
                said="Tried to allocate 9 GiB",
                index=0,
                source="0.pkl",
            ),
        ),
        # Of several ranks the one that failed first, in its own words where its record has them.
        (
            1,
            [passed(0, "a")],
            {"failure": FAILED},
            ReplayFailure(
                kind=Kind.EXCEPTION, error_type="ValueError", message="N rows", said="5 rows", index=2, source="c.pkl"
            ),
        ),
        (
            1,
            [fail(2, "RuntimeError", "from rank 0"), fail(2, "KeyError", "from rank 1", rank=1)],
            {"failure": FAILED},
            ReplayFailure(
                kind=Kind.EXCEPTION,
                error_type="KeyError",
                message="from rank N",
                said="from rank 1",
                index=2,
                source="c.pkl",
            ),
        ),
        (
            1,
            [passed(0, "a")],
            {"failure": FAILED | {"error": "no words of Python", "index": -1}},
            ReplayFailure(
                kind=Kind.EXCEPTION,
                error_type="error",
                message="no words of Python",
                said="no words of Python",
                source="c.pkl",
            ),
        ),
        (
            1,
            [passed(0, "a")],
            {"failure": DIED},
            ReplayFailure(kind=Kind.DIED, said=str(DIED["error"]), index=2, source="c.pkl"),
        ),
        # A hang is noticed by the watch, or by the time limit of the run.
        (
            1,
            [passed(0, "a")],
            {"failure": HUNG},
            ReplayFailure(kind=Kind.HANG, said=str(HUNG["error"]), index=2, source="c.pkl"),
        ),
        (
            None,
            [passed(0, "a"), passed(0, "b", rank=1)],
            {},
            ReplayFailure(kind=Kind.HANG, said="not finished within 3 s", index=1),
        ),
        (
            -signal.SIGKILL,
            [passed(0, "a"), passed(1, "b")],
            {},
            ReplayFailure(kind=Kind.DIED, error_type="SIGKILL", said="a process was ended by SIGKILL", index=2),
        ),
        # Numbers that are not finite, and where the replay found the first one.
        (
            0,
            [passed(0, "a"), passed(1, "b", loss=NAN, first_non_finite="output of layers.1, row 3, token 9")],
            {},
            ReplayFailure(
                kind=Kind.NOT_FINITE,
                quantities=("loss",),
                said="output of layers.1, row 3, token 9",
                index=1,
                source="b.pkl",
                row=3,
                token=9,
            ),
        ),
        (
            0,
            [passed(0, "a", loss=INF, norm=NAN, row_log_probs=[-1.0, -INF])],
            {},
            ReplayFailure(
                kind=Kind.NOT_FINITE,
                quantities=("loss", "log-probs", "gradient norm"),
                said="what came first is not known",
                index=0,
                source="a.pkl",
            ),
        ),
    ],
)
def test_what_failed_in_a_replay(
    exit_code: int | None,
    records: Sequence[PassRecord],
    run: Mapping[str, Any],
    failure: ReplayFailure | None,
    tmp_path: Path,
) -> None:
    assert find_failure(child_of(tmp_path, exit_code, records, **run)) == failure


@pytest.mark.parametrize(("typed", "is_failure"), [("--dtype fp16", False), ("--dtype fp32", True)])
def test_a_norm_that_overflows_in_fp16_is_no_failure(typed: str, is_failure: bool, tmp_path: Path) -> None:
    """The loss scale is lowered after it."""
    found = find_failure(child_of(tmp_path, 0, [passed(0, "a", norm=INF)], typed=typed))
    assert (found is not None) is is_failure


@pytest.mark.parametrize(
    ("outcome", "status", "kind"),
    [
        (Outcome.DIFFERS, FindingStatus.DIFFERS, Kind.DIFFERS),
        (Outcome.UNSETTLED, FindingStatus.UNSETTLED, Kind.UNSETTLED),
        (Outcome.REPRODUCED, FindingStatus.AGREES, None),
        (Outcome.CANNOT_TELL, FindingStatus.NOT_JUDGED, None),
    ],
)
def test_the_verdict_names_the_quantities_that_differ_and_their_row(
    outcome: Outcome, status: FindingStatus, kind: FailureKind | None, tmp_path: Path
) -> None:
    numbers: dict[str, Any] = {"recorded": -3.0, "replayed": -2.0, "difference": 0.3, "bound": 1e-4}
    findings = [
        Finding(name="loss", status=FindingStatus.AGREES, **numbers),
        Finding(name="gradient samples", status=status, where="model.layers.0", **numbers),
        Finding(name="log-probs", status=status, where="row 1", **(numbers | {"bound": 2e-4})),
        Finding(name="log-probs", status=status, where="row 3", **numbers),
    ]
    first = PassVerdict(index=4, source="e.pkl", rank=0, outcome=outcome, reason=None, findings=findings)
    verdict = replace(VERDICT, outcome=outcome, first=first)
    found = find_failure(child_of(tmp_path, 0, [passed(0, "a")], verdict=verdict.to_dict()))
    said = "gradient samples of model.layers.0: -3.0 in the job, -2.0 here, 0.3 apart, bound 0.0001"
    expected = ReplayFailure(
        kind=kind or Kind.DIFFERS,
        quantities=("gradient samples", "log-probs"),
        said=said,
        index=4,
        source="e.pkl",
        row=1,
        bound=2e-4,
    )
    assert found == (None if kind is None else expected)


@pytest.mark.parametrize(
    ("printed", "error_type", "message"),
    [
        ("replay: rank 1: OSError: no space left on /dev/sda1\n", "OSError", "no space left on FILE"),
        (f"replay: the weights are damaged{ADVICE}\n", "error", "the weights are damaged"),
    ],
)
def test_an_error_before_the_first_pass_is_what_was_printed(
    printed: str, error_type: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "output.txt").write_text(printed)
    child = ProcessResult(exit_code=1, seconds=1.0, output=tmp_path / "output.txt", logs=tmp_path / "none")
    found = find_failure(child)
    assert found is not None
    assert (found.kind, found.error_type, found.message, found.index) == (Kind.EXCEPTION, error_type, message, None)


@pytest.mark.parametrize(
    ("message", "masked"),
    [
        ("row 4 of /a/b/c.pkl: shape [2, 40]\n  at 0x7f2a", "row N of FILE: shape [N, N] at N"),
        ("1.5e-3 is not 2", "N is not N"),
        ("no digits", "no digits"),
    ],
)
def test_what_differs_between_inputs_is_masked(message: str, masked: str) -> None:
    assert mask(message) == masked


RAISED = ReplayFailure(kind=Kind.EXCEPTION, error_type="IndexError", message="N rows", index=3, said="5 rows")
DIFFERS = ReplayFailure(kind=Kind.DIFFERS, quantities=("loss", "log-probs"))


@pytest.mark.parametrize(
    ("failure", "changes", "is_same"),
    [
        (RAISED, {"index": 5, "said": "7 rows", "source": "b.pkl", "row": 2, "token": 1}, True),
        (RAISED, {"message": "N tokens"}, False),
        (RAISED, {"error_type": "KeyError"}, False),
        (RAISED, {"kind": Kind.DIED}, False),
        (DIFFERS, {"quantities": ("log-probs", "gradient norm")}, True),
        (DIFFERS, {"quantities": ("gradient norm",)}, False),
        (DIFFERS, {"kind": Kind.UNSETTLED}, False),
    ],
)
def test_two_failures_are_the_same_by_what_failed_not_by_where(
    failure: ReplayFailure, changes: dict[str, Any], is_same: bool
) -> None:
    assert failure.is_same_as(replace(failure, **changes)) is is_same


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (RAISED, "IndexError: 5 rows"),
        (replace(RAISED, source="d.pkl"), "IndexError in pass 4, d.pkl: 5 rows"),
        (replace(DIFFERS, index=0, source="a.pkl", said="x"), "differs (loss and log-probs) in pass 1, a.pkl: x"),
        (ReplayFailure(kind=Kind.HANG, said="60 s"), "hang: 60 s"),
    ],
)
def test_a_failure_is_one_line(failure: ReplayFailure, text: str) -> None:
    assert failure.text == text
