"""Would the ranks of a folder have met? Planted schedules part in the right pass, and clean ones do not."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capture.file_format.capture_file import read_micro_batch
from replay.command_line.cli import main
from replay.post_mortem.schedule import read_schedules
from replay.post_mortem.schedule_differences import ScheduleDifference, find_schedule_differences
from tests.helpers.made_captures import write_pass, write_passes
from tests.helpers.planned_jobs import Planned, record_job

ROOT = Path(__file__).resolve().parents[3]

TRAIN = Planned()
ROLLOUT = Planned(trains=False)
HELD = Planned(steps=False)  # a pass of an accumulation window, not its last
Plan = Sequence[Planned]


def plan_lengths(*padded: int, real: Sequence[int]) -> Plan:
    return [Planned(length=length, num_real=num_real) for length, num_real in zip(padded, real, strict=True)]


def find_differences(folder: Path, **settings: Any) -> list[ScheduleDifference]:
    return [
        difference
        for schedule in read_schedules(folder)
        for difference in find_schedule_differences(schedule, **settings)
    ]


PADDED = (12, 9, 11, 10, 8)  # by the longest row of both ranks
PLANTED: dict[str, tuple[Sequence[Plan], dict[str, Any], dict[str, Any], tuple[str, int, tuple[int, ...]]]] = {
    "fewer passes": ([[TRAIN] * 5, [TRAIN] * 4], {}, {}, ("passes", 4, (1,))),
    "one pass more on rank 2 of 3": ([[TRAIN] * 3, [TRAIN] * 3, [TRAIN] * 4], {}, {}, ("passes", 3, (0, 1))),
    "fewer rollouts": ([[ROLLOUT, ROLLOUT, TRAIN], [ROLLOUT, TRAIN, TRAIN]], {}, {}, ("order", 1, (1,))),
    "trained before the rollout": ([[ROLLOUT, TRAIN], [TRAIN, ROLLOUT]], {}, {}, ("order", 0, (1,))),
    "a backward is skipped": (
        [[HELD, TRAIN] * 2, [HELD, TRAIN, Planned(backward=False, steps=False), TRAIN]],
        {},
        {},
        ("backward", 2, (1,)),
    ),
    "other borders": ([[HELD, TRAIN] * 3, [HELD, HELD, TRAIN] * 2], {}, {}, ("steps", 2, (1,))),
    "a micro-batch is left out of a window": ([[HELD, TRAIN] * 2, [TRAIN, HELD, TRAIN]], {}, {}, ("steps", 1, (1,))),
    "no last step": ([[HELD, TRAIN] * 2, [HELD, TRAIN, HELD, HELD]], {}, {}, ("steps", 3, (1,))),
    "a head without gradient": (
        [[TRAIN] * 3, [TRAIN, Planned(with_second=False), TRAIN]],
        {},
        {},
        ("gradients", 1, (1,)),
    ),
    "a head frozen on one rank": ([[TRAIN] * 2] * 2, {"of_rank": {1: {"freezes": True}}}, {}, ("trained", 0, (1,))),
    "padded to its own longest row": (
        [plan_lengths(*PADDED, real=(12, 7, 11, 6, 8)), plan_lengths(12, 9, 11, 9, 8, real=(8, 9, 5, 9, 4))],
        {},
        {},
        ("shapes", 3, (1,)),
    ),
    "gathered and not padded": (
        [plan_lengths(8, 8, real=(8, 8)), plan_lengths(8, 9, real=(8, 9))],
        {},
        {"equal_shapes": True},
        ("shapes", 1, (1,)),
    ),
    "peers with other tokens": (
        [[Planned(seed=seed) for seed in (1, 2, 3, 4, 5)], [Planned(seed=seed) for seed in (1, 2, 3, 9, 5)]],
        {},
        {},
        ("inputs", 3, (0, 1)),
    ),
    "no autocast": ([[Planned(in_bf16=True)] * 2, [Planned(in_bf16=True), TRAIN]], {}, {}, ("dtype", 1, (1,))),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_schedule_parts_where_it_was_planted(name: str, tmp_path: Path) -> None:
    plans, settings, given, (kind, number, ranks) = PLANTED[name]
    found = find_differences(record_job(tmp_path, plans, **settings), **given)
    assert (found[0].kind, found[0].number, found[0].ranks) == (kind, number, ranks)
    assert found[0].remedy


def test_a_rank_whose_loop_was_over_in_a_hang_lacks_an_input_that_is_named(tmp_path: Path) -> None:
    record_job(tmp_path, [[TRAIN] * 6, [TRAIN] * 5])
    # How far a rank came that was ended from outside tells nothing, whichever it was.
    assert find_differences(tmp_path, was_cut_short=True) == []
    assert find_differences(tmp_path, was_cut_short=True, ended_loops=[0]) == []
    [difference] = find_differences(tmp_path, was_cut_short=True, ended_loops=[1])
    assert (difference.kind, difference.number, difference.ranks) == ("passes", 5, (1,))
    [sixth] = tmp_path.glob("actor_inputs_rank0_*_00000005.pkl")
    rows, length = read_micro_batch(sixth).sequences_BS.shape
    text = f"rank 1 has 5 passes, and others up to 6; the next one of rank 0 is {rows} rows of {length}, {sixth.name}"
    assert difference.text == text


def write_kinds(*kinds: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_passes(folder, dict(enumerate(kinds)))
        return folder

    return write


def record_plans(*plans: Plan, **settings: Any) -> Callable[[Path], Path]:
    return lambda folder: record_job(folder, plans, **settings)


def write_unequal_lengths(folder: Path) -> Path:
    for rank in (0, 1):
        for step in range(5):
            write_pass(folder, rank=rank, step=step, length=10 + 3 * rank + step, num_real=8)
    return folder


def record_twice(folder: Path) -> Path:
    for _ in range(2):
        record_job(folder, [[TRAIN] * 2] * 2)
    return folder


def with_a_gap(folder: Path) -> Path:
    """As where the disk of one rank was slow."""
    record_job(folder, [[TRAIN] * 4] * 2)
    next(folder.glob("actor_inputs_rank1_*_00000002.pkl")).unlink()
    return folder


def with_a_dump_of_another_name(folder: Path) -> Path:
    write_kinds("tt", "tt")(folder)
    first = min(folder.glob("actor_inputs_rank0_*"))
    first.with_name("actor_inputs_rank0_dummy_20260301_091244_000000.pkl").write_bytes(first.read_bytes())
    return folder


CLEAN: dict[str, Callable[[Path], Path]] = {
    "the sample": lambda folder: ROOT / "inputs" / "sample",
    "edge shapes, one rank": lambda folder: ROOT / "inputs" / "edges" / "rows",
    "edge documents, one rank": lambda folder: ROOT / "inputs" / "edges" / "documents",
    "rollouts and training": write_kinds("rrttt", "rrttt"),
    "three ranks": write_kinds("tttt", "tttt", "tttt"),
    "one rank": write_kinds("ttt"),
    "unequal lengths": write_unequal_lengths,
    "a step a pass": record_plans([TRAIN] * 4, [TRAIN] * 4),
    "accumulation": record_plans([HELD, TRAIN] * 3, [HELD, TRAIN] * 3),
    "a window that is cut short on both ranks": record_plans([HELD, TRAIN, HELD], [HELD, TRAIN, HELD]),
    "rows of unequal lengths": record_plans([Planned(length=9)] * 3, [Planned(length=7)] * 3),
    "a smaller last batch on one rank": record_plans([TRAIN] * 4, [*[TRAIN] * 3, Planned(rows=1)]),
    "padded to the longest row of both": record_plans(
        plan_lengths(*PADDED, real=(12, 7, 11, 6, 8)), plan_lengths(*PADDED, real=(8, 9, 5, 10, 4))
    ),
    "one fixed length": record_plans([Planned(num_real=5)] * 4, [Planned(num_real=8)] * 4),
    "clipping": record_plans([Planned(clips=True)] * 3, [Planned(clips=True)] * 3),
    "a head without gradient on both": record_plans(
        [TRAIN, Planned(with_second=False)], [TRAIN, Planned(with_second=False)]
    ),
    "peers of the same tokens": record_plans(*[[Planned(seed=seed) for seed in range(5)]] * 2),
    "every second pass": record_plans([TRAIN] * 6, [TRAIN] * 6, every=2),
    "a limit that rows of other lengths reach elsewhere": record_plans(
        [replace(TRAIN, length=400)] * 6, [TRAIN] * 6, max_bytes=40_000
    ),
    "segments": record_plans([HELD, TRAIN] * 2, [HELD, TRAIN] * 2, segment="1MB"),
    "two recordings": record_twice,
    "a pass that was not kept": with_a_gap,
    "a dump beside": with_a_dump_of_another_name,
    "some ranks of many": record_plans([TRAIN] * 3, [TRAIN] * 3, world_size=8),
}


@pytest.mark.filterwarnings("ignore:capture. .* has nothing of rank")
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_schedule_is_no_alarm(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = CLEAN[name](tmp_path)
    assert find_differences(folder) == []
    assert main(["hang", str(folder)]) == 0
    assert "part at" not in capsys.readouterr().out
