"""A job that is broken is not called REPRODUCED, and a clean one does not differ.

Eight of the jobs of tests/broken_jobs; `python -m tests.broken_jobs.campaign` has all, and how large each fault is.
"""

from dataclasses import replace

import pytest

from tests.broken_jobs.batches import num_labels, windows_of
from tests.broken_jobs.campaign import Campaign, Row, job_of, line_of, read_notes, text_of_causes, twins_of
from tests.broken_jobs.declarations import Fault, FaultClass, Kind, Layout, Setup
from tests.broken_jobs.table import JOBS, TWINS

pytestmark = pytest.mark.slow

BROKEN = ("gradients-x10", "tied-head-detached", "mean-of-means", "documents-visible", "betas", "ddp-not-reduced")
CLEAN = ("clean-windows", "clean-autocast")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(home=tmp_path_factory.mktemp("jobs"))


@pytest.mark.parametrize("name", [*BROKEN, *CLEAN])
def test_the_verdict_on_a_job(name: str, campaign: Campaign) -> None:
    for row in campaign.judge(JOBS[name], with_effect=False):
        assert row.says == "ok", f"{row.outcome}: {row.headline}"


@pytest.mark.parametrize("name", ["mean-of-means", "trainer-mean-of-means"])
def test_the_option_that_a_cause_prints_gives_what_the_job_computed(name: str, campaign: Campaign) -> None:
    folder = campaign.record(JOBS[name])
    printed = Campaign(home=campaign.home, replay_arguments=["--window", "mean-of-means"])
    assert folder == printed.record(JOBS[name])
    [row] = printed.judge(JOBS[name], with_effect=False)
    assert row.outcome == "REPRODUCED", row.headline


def test_each_class_has_jobs_of_several_kinds() -> None:
    for fault_class in FaultClass:
        assert len({job.kind for job in JOBS.values() if job.fault_class is fault_class}) >= 2
    assert {job.kind for job in JOBS.values() if not job.is_broken} == set(Kind)


def test_each_broken_job_has_its_causes_and_a_sound_twin() -> None:
    for job in JOBS.values():
        assert job.is_broken is bool(job.causes or job.note)
        assert not (job.causes and job.note), job.name
        assert len(set(job.causes)) == len(job.causes) <= 2, job.name
        if job.is_broken:
            twin = TWINS[job.twin.name]
            assert (twin.kind, twin.setup, twin.replays) == (job.kind, job.setup, job.replays)
            assert not twin.is_broken
            assert twin.fault == Fault()
    assert not TWINS.keys() & JOBS.keys()


def test_jobs_that_are_trained_and_replayed_alike_have_one_twin() -> None:
    names = ("gradients-x10", "loss-x10", "clean-llama", "betas", "eps", "fsdp2-gradients-x10", "fsdp2-v-dropped")
    twins = twins_of([JOBS[name] for name in names])
    assert [twin.twin_of for twin in twins] == ["gradients-x10", "betas", "fsdp2-gradients-x10", "fsdp2-v-dropped"]


def test_a_note_that_says_what_was_planted_is_right_and_is_wrong_of_the_twin() -> None:
    """A note's further lines are read, too."""
    output = "verdict    REPRODUCED\nnote       labels: in 2 rows the last place is to\n           predict the first "
    notes = read_notes(f"{output}token of the next row: [...]\nalso ran   nothing\n           more\n")
    assert notes == ["labels: in 2 rows the last place is to predict the first token of the next row: [...]"]
    rows = [
        replace(_row(f"shifted-across-full-rows{name}", "REPRODUCED", []), notes=found)
        for name in ("", "-unbroken")
        for found in (notes, ["labels: something else"])
    ]
    assert [row.says for row in rows] == ["ok", "WRONG", "WRONG", "ok"]


@pytest.mark.parametrize(
    ("outcome", "causes", "says"),
    [
        ("REPRODUCED", [], "ok"),
        ("REPRODUCED", [("dropout", "may be")], "ok"),
        ("CANNOT TELL", None, "weak"),
        ("REPRODUCED", [("dropout", "may be"), ("another dtype", "probably")], "WRONG"),
        ("DIFFERS", [], "WRONG"),
    ],
)
def test_what_is_said_of_a_twin(outcome: str, causes: list[tuple[str, str]] | None, says: str) -> None:
    assert _row("gradients-x10-unbroken", outcome, causes).says == says
    assert job_of("gradients-x10-unbroken").group == "twin"


def test_right_causes_are_counted_over_broken_jobs_with_an_effect_that_the_dtype_carries() -> None:
    rows = [
        _row("ddp-summed", "DIFFERS", [("gradients summed over ranks", "is"), ("scaled gradients", "may be")]),
        _row("mean-of-means", "DIFFERS", [("other weights of passes", "probably")]),
        _row("rate-x10", "DIFFERS", [("another optimizer", "may be")]),
        _row("betas", "DIFFERS", [("another schedule", "is"), ("another optimizer", "is")]),
        _row("eps", "DIFFERS", [("another schedule", "probably")]),
        _row("stale-state", "CANNOT TELL", None),
        _row("llama-off-by-one", "REPRODUCED", []),
        _row("clean-llama", "REPRODUCED", [("dropout", "is")]),
    ]
    assert text_of_causes(rows) == [
        "causes     of 6 replays of broken jobs 2 have a right first cause at least probably, 1 as is",
        "wrong is   1: betas (another schedule)",
        "wrong      1 less surely: eps (probably another schedule)",
        "no cause   1: stale-state",
    ]


def test_a_line_says_whether_the_cause_is_right() -> None:
    assert "is another dtype: wrong" in line_of(_row("ddp-summed", "DIFFERS", [("another dtype", "is")]))
    assert "is another dtype: right" in line_of(_row("bf16-masters", "DIFFERS", [("another dtype", "is")]))
    assert "no cause" in line_of(_row("bf16-masters", "DIFFERS", []))


def test_micro_batches_have_unequal_numbers_of_labels_but_where_rows_are_full() -> None:
    def counts(layout: Layout) -> set[int]:
        setup = Setup(layout=layout, accumulation=2)
        return {num_labels(batch) for rank in (0, 1) for window in windows_of(setup, rank) for batch in window}

    assert len(counts(Layout.FULL)) == 1
    assert all(len(counts(layout)) > 2 for layout in Layout if layout is not Layout.FULL)


def _row(job: str, outcome: str, causes: list[tuple[str, str]] | None) -> Row:
    return Row(
        job=job, replay="", outcome=outcome, headline="", effect=None, is_below=False, traces=None, causes=causes
    )
