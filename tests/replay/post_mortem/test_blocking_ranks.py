"""Which rank of a job was behind: real jobs of two ranks that hang or die, and a table of what ranks leave."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import capture.black_box.flight_recorder
from actor_init.spec import UsageError
from capture import recording
from capture.black_box.collectives import find_last_collective_in_dump
from capture.black_box.incidents import Incident, read_incidents, write_incidents
from capture.black_box.position_page import PAGE_BYTES, read_position
from capture.black_box.stacks import correct_phase, find_main_stack, format_all_stacks, mark_main_thread
from capture.file_format.end_record import EndRecord, write_end_record
from capture.file_format.micro_batch import CaptureError
from capture.record.observer import JobPosition, TrainingPhase
from replay.command_line.cli import main
from replay.commands.inspect.inspection import inspect_folder
from replay.post_mortem.blocking_ranks import (
    End,
    LastSighting,
    find_blocking_ranks,
    find_world_size,
    read_last_sightings,
)
from replay.post_mortem.hang import examine_hang
from replay.post_mortem.text import describe_hang, print_report
from tests.helpers.hanging_jobs import FATAL_PASS, JOBS
from tests.helpers.made_captures import damage, write_pass
from tests.helpers.small_jobs import TinyModel
from tests.warm import warm_bin

ROOT = Path(__file__).resolve().parents[3]

LEFT: dict[str, tuple[str, str, str]] = {  # of the jobs: what is said of rank 1, where it was, the line it stood at
    "asleep in its loss": ("was behind", f"after the forward of pass {FATAL_PASS + 1}", "hanging_jobs.py:{} in hang"),
    "asleep in its data": (
        "was behind",
        f"after the optimizer's step that followed pass {FATAL_PASS}",
        "hanging_jobs.py:{} in hang",
    ),
    "asleep in a hook of the backward": (
        "was behind",
        f"in the backward of pass {FATAL_PASS + 1}",
        "hanging_jobs.py:{} in hang",
    ),
    "stopped": ("died without a word", f"after the forward of pass {FATAL_PASS + 1}", ""),
    "killed": ("died without a word", f"after the forward of pass {FATAL_PASS + 1}", ""),
    "crashed": ("crashed in native code", f"after the forward of pass {FATAL_PASS + 1}", "hanging_jobs.py:{} in crash"),
    "failed": (
        "failed",
        f"after the optimizer's step that followed pass {FATAL_PASS}",
        "hanging_jobs.py:{} in fail",
    ),
    "left": ("was behind", f"after the forward of pass {FATAL_PASS + 1}", ""),
    "of fewer batches": ("was behind", f"after the optimizer's step that followed pass {FATAL_PASS}", ""),
    "without a backward": ("was behind", f"after the forward of pass {FATAL_PASS + 1}", " in train"),
    "slow, then both killed": (
        "died without a word",
        f"after the forward of pass {FATAL_PASS + 1}",
        "hanging_jobs.py:{} in hang",
    ),
}
assert LEFT.keys() == JOBS.keys()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hanging")
    done = subprocess.run(
        [warm_bin() / "python", ROOT / "tests" / "helpers" / "hanging_jobs.py", folder],
        capture_output=True,
        text=True,
        timeout=1800,
        env={name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def line_of(function: str) -> int:
    """Return the line in hanging_jobs.py that a job stands at in one of its short functions."""
    lines = (ROOT / "tests" / "helpers" / "hanging_jobs.py").read_text().splitlines()
    return lines.index(f"def {function}() -> None:") + 2


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT)
def test_the_right_rank_is_named_with_its_place_and_line(
    name: str, ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ended / name.replace(" ", "-")
    assert main(["hang", str(folder)]) == 1
    said = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("hang "))
    verb, where, line = LEFT[name]
    if "{}" in line:
        line = line.format(line_of(line.rpartition(" ")[2]))
    assert said.startswith(f"hang       rank 1 {verb}: {where}")
    assert line in said


@pytest.mark.slow
def test_inspect_names_the_rank_as_well(ended: Path) -> None:
    hang = dict(inspect_folder(ended / "asleep-in-its-loss").hang)
    assert hang["hang"].startswith("rank 1 was behind: after the forward of pass 3, at hanging_jobs.py:")
    assert hang["rank 0"].startswith("in the backward of pass 3, at hanging_jobs.py:")
    assert "SIGTERM" in hang["rank 0"]


@pytest.mark.slow
def test_an_incident_keeps_every_threads_stack(ended: Path) -> None:
    [record] = [
        incident_record for incident_record in read_incidents(ended / "asleep-in-its-loss") if incident_record.rank == 1
    ]
    [found] = record.incidents
    assert "[capture-writer] (most recent call first)" in found.stacks
    assert [str(frame) for frame in find_main_stack(found.stacks)][:2] == [
        f"hanging_jobs.py:{line_of('hang')} in hang",
        next(str(frame) for frame in find_main_stack(found.stacks) if frame.function == "happens"),
    ]
    assert str(ROOT) not in found.stacks
    assert (found.world_size, found.last_backward) == (2, FATAL_PASS - 1)
    assert sum(found.collectives.values()) > 0


# what ranks leave, without processes


OWN = 'Thread 0x01 [MainThread] (most recent call first):\n  File "train.py", line 27 in compute_loss\n'
IN_BACKWARD = (
    'Thread 0x01 [MainThread] (most recent call first):\n  File "torch/autograd/graph.py", line 979 in '
    '_engine_run_backward\n  File "train.py", line 40 in main\n'
)
IN_COLLECTIVE = (
    'Thread 0x01 [MainThread] (most recent call first):\n  File "torch/distributed/distributed_c10d.py", line 5 in '
    'barrier\n  File "train.py", line 44 in main\n'
)
LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:2947."


def left(
    what: str,
    forward: int,
    place: TrainingPhase,
    stacks: str = "",
    *,
    at: int = 0,
    message: str = "",
    where: str = "",
    **more: Any,
) -> Incident:
    """One rank's last incident, `at` seconds after nine."""
    where = where or ("SIGTERM" if what == "signal" else "without a word" if what == "died" else "main thread")
    time = f"2026-03-01T09:00:{at:02d}.000000+00:00"
    return Incident(
        what=what, where=where, forward=forward, time=time, message=message, place=place, stacks=stacks,
        world_size=2, opened="2026-03-01T08:59:00.000000+00:00", **more,
    )  # fmt: skip


ABORTED = "Fatal Python error: Aborted"
TABLE: dict[str, tuple[list[Incident | EndRecord], tuple[int, ...]]] = {
    "NCCL's watchdog aborts the rank that waits": (
        [
            left("died", 3, "in backward", IN_BACKWARD, message=ABORTED),
            left("signal", 3, "after forward", OWN),
        ],
        (1,),
    ),
    "a rank aborts where nobody waits": (
        [left("died", 3, "in forward", OWN, message=ABORTED), left("signal", 3, "in forward", OWN)],
        (0,),
    ),
    "the job's own faulthandler has the stacks of the rank that waits": (
        [left("died", 3, "in backward", message="elsewhere"), left("signal", 3, "after forward", OWN)],
        (1,),
    ),
    "gloo gives up waiting for a rank that sleeps": (
        [
            left(
                "exception", 3, "in backward", message="RuntimeError: Timed out waiting 8000ms for recv",
                traceback='File "train.py", line 40, in main\n  File "torch/autograd/graph.py", line 979, in '
                "_engine_run_backward\n",
            ),
            left("signal", 3, "after forward", OWN, at=1),
        ],
        (1,),
    ),
    "gloo gives up waiting where buffers are broadcast": (
        [
            left("exception", 4, "in forward", message="RuntimeError: Timed out waiting 30000ms for recv operation",
                 traceback='File "train.py", line 73, in main\n  File "torch/nn/parallel/distributed.py", line 23, in '
                 "_distributed_broadcast_coalesced\n"),
            left("signal", 3, "after the optimizer's step", OWN, at=1),
        ],
        (1,),
    ),
    "a timeout of the job's own is a failure": (
        [
            left("signal", 3, "in backward", IN_BACKWARD, at=1),
            left("exception", 4, "in forward", message="TimeoutError: timed out",
                 traceback='File "http.py", line 1, in get\n'),
        ],
        (1,),
    ),
    "two fail, the first is named": (
        [
            left("exception", 3, "in forward", message="ValueError: b", at=5),
            left("out of memory", 3, "in backward", message="OutOfMemoryError: a", at=4),
        ],
        (1,),
    ),
    "one is ended from outside before the other loses it": (
        [
            left("exception", 4, "in forward", message=LOST, at=2),
            left("signal", 4, "in backward", IN_BACKWARD, at=1),
        ],
        (1,),
    ),
    "a loop that is over, and a barrier behind it": (
        [
            left("signal", 4, "in backward", IN_BACKWARD),
            left("signal", 3, "after the optimizer's step", IN_COLLECTIVE),
        ],
        (1,),
    ),
    "a loop that is over": (
        [
            left("exception", 4, "in backward", message=LOST),
            EndRecord(
                rank=1, world_size=2, num_passes=4, num_steps=4, place="after the optimizer's step",
                opened="2026-03-01T08:59:01.000000+00:00", time="2026-03-01T09:00:00.000000+00:00",
            ),
        ],
        (1,),
    ),
    "a backward that one rank leaves out": (
        [
            left("signal", 3, "in backward", IN_BACKWARD, last_backward=3),
            left("signal", 4, "in forward", IN_COLLECTIVE, last_backward=2),
        ],
        (1,),
    ),
    "no backward is left out": (
        [
            left("signal", 3, "in backward", IN_BACKWARD, last_backward=3),
            left("signal", 4, "in forward", IN_COLLECTIVE, last_backward=3),
        ],
        (0,),
    ),
    "asleep in a backward whose other rank is past it": (
        [left("signal", 3, "in backward", OWN), left("signal", 3, "after backward", IN_COLLECTIVE)],
        (0,),
    ),
    "asleep where the other waits, at the same place": (
        [left("signal", 3, "after forward", IN_COLLECTIVE), left("signal", 3, "after forward", OWN)],
        (1,),
    ),
    "a crash of the rank further on": (
        [
            left("signal", 3, "after forward", OWN),
            left("died", 3, "in backward", OWN, message="Fatal Python error: Segmentation fault"),
        ],
        (1,),
    ),
    "a kill of the rank further on": (
        [left("signal", 3, "after forward", OWN), left("died", 4, "in forward")],
        (1,),
    ),
    "a loop that is over, while the other waits for its device": (
        [
            left("signal", 4, "after forward", OWN),
            left("signal", 3, "after the optimizer's step", IN_COLLECTIVE),
        ],
        (1,),
    ),
    "a collective of its own in the forward": (
        [left("signal", 3, "in backward", IN_BACKWARD), left("signal", 3, "in forward", IN_COLLECTIVE)],
        (1,),
    ),
    "one collective less": (
        [
            left("signal", 3, "in forward", IN_COLLECTIVE, collectives={"0": 12}),
            left("signal", 3, "in forward", IN_COLLECTIVE, collectives={"0": 11}),
        ],
        (1,),
    ),
    "all alike": ([left("signal", 3, "in forward", OWN), left("signal", 3, "in forward", OWN)], ()),
}  # fmt: skip


def write(folder: Path, ranks: list[Incident | EndRecord], stamp: str = "2026_03_01_08_59_00_000000") -> None:
    for rank, end in enumerate(ranks):
        if isinstance(end, EndRecord):
            write_end_record(folder, replace(end, rank=rank), stamp=stamp)
        else:
            write_incidents(folder, [end], num_others=0, rank=rank, stamp=stamp)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("is_mirrored", [False, True], ids=["", "mirrored"])
def test_what_ranks_leave_tells_which_was_behind(name: str, is_mirrored: bool, tmp_path: Path) -> None:
    ranks, expected = TABLE[name]
    write(tmp_path, ranks[::-1] if is_mirrored else ranks)
    seen = read_last_sightings(tmp_path)
    assert find_blocking_ranks(seen, find_world_size(seen)).ranks == tuple(
        1 - rank if is_mirrored else rank for rank in expected
    )
    assert ("cannot be told" in dict(describe_hang(seen))["hang"]) == (not expected)


def test_of_the_errors_of_a_ranks_last_pass_the_first_one_ended_it(tmp_path: Path) -> None:
    earlier_pass = left("exception", 2, "in forward", message="KeyError: caught")
    cause = left("exception", 3, "in forward", at=1, message="ValueError: a")
    follower = left("exception", 3, "in forward", at=2, message=LOST)
    write_incidents(tmp_path, [earlier_pass, cause, follower], num_others=0, rank=0, stamp="a")
    [sighting] = read_last_sightings(tmp_path)
    assert sighting.incident is not None
    assert (sighting.end, sighting.incident.message) == (End.FAILED, cause.message)


def test_only_the_last_job_of_a_folder_counts(tmp_path: Path) -> None:
    write(tmp_path, [left("exception", 1, "in forward", message="ValueError: a"), left("signal", 1, "in forward", OWN)])
    later = [replace(incident, opened="2026-03-02T08:59:00.000000+00:00") for incident in TABLE["all alike"][0][:1]]
    write(
        tmp_path, [*later, replace(TABLE["one collective less"][0][1], opened="2026-03-02T08:59:00.5+00:00")], "later"
    )
    assert [sighting.end for sighting in read_last_sightings(tmp_path)] == [End.SIGNALLED, End.SIGNALLED]


FAILED = left("exception", 1, "in forward", message="ValueError: a")
MORE, FEWER = TABLE["one collective less"][0]
CLOSED = TABLE["a loop that is over"][0][1]


@pytest.mark.parametrize(
    ("jobs", "ranks", "blamed"),
    [
        # The last job has fewer ranks than the one before, or more.
        ([{0: MORE, 1: MORE, 2: MORE, 3: FAILED}, {0: MORE, 1: FEWER}], (0, 1), (1,)),
        ([{0: FAILED}, {0: FEWER, 1: MORE}], (0, 1), (0,)),
        # Some of its ranks left nothing, though they did in the job before.
        ([{0: MORE, 1: FAILED, 2: MORE}, {0: MORE, 2: FEWER}], (0, 2), (2,)),
        ([{0: FAILED, 1: MORE}, {1: MORE}], (1,), None),
        # Of three jobs it is the last one too.
        ([{0: FAILED, 1: MORE}, {0: MORE, 1: FAILED, 2: FAILED}, {0: MORE, 1: FEWER}], (0, 1), (1,)),
        # A job that ended well comes last, or first.
        ([{0: MORE, 1: FAILED}, {0: CLOSED, 1: CLOSED}], (), None),
        ([{0: MORE, 1: MORE, 2: FAILED}, {0: CLOSED, 1: CLOSED}], (), None),
        ([{0: CLOSED, 1: CLOSED, 2: CLOSED}, {0: MORE, 1: FAILED}], (0, 1), (1,)),
    ],
)
def test_the_ranks_are_those_of_the_last_job_alone(
    jobs: list[dict[int, Incident | EndRecord]], ranks: tuple[int, ...], blamed: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """Ranks of a job begin within a second; jobs come a day apart, and each has as many ranks as left something."""
    for day, job in enumerate(jobs, start=1):
        for rank, end in job.items():
            opened = f"2026-03-{day:02d}T08:59:00.{rank:06d}+00:00"
            stamp = f"2026_03_{day:02d}_08_59_00_{rank:06d}"
            end = replace(end, opened=opened, world_size=len(job))
            if isinstance(end, EndRecord):
                write_end_record(tmp_path, replace(end, rank=rank), stamp=stamp)
            else:
                write_incidents(tmp_path, [end], num_others=0, rank=rank, stamp=stamp)
    seen = read_last_sightings(tmp_path)
    assert tuple(sighting.rank for sighting in seen) == ranks
    assert find_world_size(seen) == (len(jobs[-1]) if ranks else 0)
    if blamed is not None:
        assert find_blocking_ranks(seen, find_world_size(seen)).ranks == blamed


def test_a_number_that_is_not_finite_ends_no_rank(tmp_path: Path) -> None:
    """A rank that wrote one goes on: what it wrote before and behind it tells where it ended."""
    not_finite = left("not finite", 5, "after forward", message="loss is nan")
    stamp = "2026_03_01_08_59_00_000000"
    for rank, incidents in enumerate(([not_finite], [left("signal", 4, "in forward", OWN), not_finite], [FAILED])):
        write_incidents(tmp_path, incidents, num_others=0, rank=rank, stamp=stamp)
    seen = read_last_sightings(tmp_path)
    assert [(sighting.rank, sighting.end, sighting.forward) for sighting in seen] == [
        (1, End.SIGNALLED, 4),
        (2, End.FAILED, 1),
    ]


def test_ranks_that_all_ended_well_are_no_hang(tmp_path: Path) -> None:
    end = TABLE["a loop that is over"][0][1]
    write(tmp_path, [end, end])
    assert read_last_sightings(tmp_path) == []


def test_a_rank_that_left_nothing_is_not_named_but_said_to_be_missing(tmp_path: Path) -> None:
    write(tmp_path, [left("signal", 3, "in backward", IN_BACKWARD)])
    text = dict(describe_hang(read_last_sightings(tmp_path)))["hang"]
    assert text == (
        "which rank was behind cannot be told: rank 1 of the job's 2 left nothing here; copy what their hosts have"
    )


def test_a_job_of_one_rank_is_told_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [replace(left("signal", 3, "in backward", IN_BACKWARD), world_size=1)])
    report = examine_hang(tmp_path)
    print_report(report)
    assert (report.ranks, report.reason, report.exit_code) == ((0,), "it is the only rank", 1)
    assert "rank 0     in the backward of pass 4, at " in capsys.readouterr().out


@pytest.mark.parametrize(("forward", "exit_code"), [(1, 0), (2, 1)])
def test_the_only_rank_that_went_on_after_its_stacks_were_asked_for_is_no_hang(
    forward: int, exit_code: int, tmp_path: Path
) -> None:
    model = TinyModel()
    with recording(model, tmp_path):
        for _ in range(3):
            model(torch.ones(2, 4, dtype=torch.int64))
    asked = replace(left("signal", forward, "in forward", OWN), where="SIGUSR1", world_size=1)
    write(tmp_path, [asked])
    assert examine_hang(tmp_path).exit_code == exit_code


@pytest.mark.parametrize(
    ("name", "value"), [("collectives", {"0": "many"}), ("place", 3), ("world_size", "two"), ("of_another_version", "")]
)
def test_an_incident_that_does_not_fit_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    write(tmp_path, [left("exception", 3, "in forward", message="ValueError: a")])
    [path] = tmp_path.glob("incidents_*")
    content = json.loads(path.read_text())
    content["incidents"][0][name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(CaptureError, match="no incidents of format 1"):
        read_incidents(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"format": 2}', '{"format": 1, "rank": 0}'])
def test_a_damaged_end_is_one_clear_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "end_rank0_x.json").write_text(content)
    with pytest.raises(UsageError, match=r"end_rank0_x.json: .* Delete the file or copy it again"):
        examine_hang(tmp_path)


def test_a_damaged_capture_keeps_nobody_from_hearing_who_was_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks, expected = TABLE["one collective less"]
    write(tmp_path, ranks)
    damage(write_pass(tmp_path))

    assert main(["hang", str(tmp_path)]) == 1

    said = capsys.readouterr().out
    assert f"hang       rank {expected[0]} " in said
    assert "not judged the passes: actor_inputs_rank0" in said


# stacks and positions


def test_own_stacks_and_faulthandlers_are_read_alike(tmp_path: Path) -> None:
    import faulthandler
    import threading

    with (tmp_path / "stacks").open("w+") as file:
        own = format_all_stacks()
        faulthandler.dump_traceback(file)
        file.seek(0)
        theirs = mark_main_thread(file.read(), threading.main_thread().ident)
    frames, other = find_main_stack(own), find_main_stack(theirs)
    assert len(frames) > 5
    function = "test_own_stacks_and_faulthandlers_are_read_alike"
    mine = [frame.function for frame in frames].index(function)
    assert other[0].function == function
    assert [frame.function for frame in frames[mine : mine + 5]] == [frame.function for frame in other[:5]]


@pytest.mark.parametrize(
    ("place", "stacks", "refined_place"),
    [
        ("after forward", IN_BACKWARD, "in backward"),
        ("in backward", OWN, "after backward"),
        ("in backward", "", "in backward"),
        ("in forward", IN_BACKWARD, "in forward"),
        ("after forward", OWN, "after forward"),
    ],
)
def test_the_stack_corrects_what_the_hooks_saw(place: TrainingPhase, stacks: str, refined_place: TrainingPhase) -> None:
    assert correct_phase(place, find_main_stack(stacks)) == refined_place


def test_a_page_that_is_no_position_is_none(tmp_path: Path) -> None:
    assert read_position(tmp_path) is None
    for content in (b"", b"x" * 20, b"\xff" * PAGE_BYTES):
        (tmp_path / "position").write_bytes(content)
        assert read_position(tmp_path) is None


def test_a_position_without_shared_memory_is_kept_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture.black_box.flight_recorder, "SHARED_MEMORY", tmp_path / "none")
    model = nn.Linear(2, 2)
    with recording(model, tmp_path) as recorder:
        assert recorder.position == JobPosition()
        model(torch.zeros(1, 2))
        assert (recorder.position.forward, recorder.position.phase) == (0, "after forward")


def test_the_dump_of_ncclss_flight_recorder_is_read_without_unpickling(tmp_path: Path) -> None:
    import pickle

    group = ["0", "default_pg"]
    entries = [
        {"process_group": group, "collective_seq_id": number, "profiling_name": f"nccl:{name}", "is_p2p": False,
         "input_sizes": [[4, 5]], "input_dtypes": ["Float"], "state": "started"}
        for number, name in ((11, "all_gather"), (12, "all_reduce"))
    ]  # fmt: skip
    (tmp_path / "trace_1").write_bytes(pickle.dumps({"version": "2.4", "entries": entries}, protocol=2))
    prefix = str(tmp_path / "trace_")
    assert find_last_collective_in_dump(1, prefix, after=0.0) == "all_reduce 12 of default_pg, [4, 5] Float, started"
    assert find_last_collective_in_dump(1, prefix, after=2e10) == ""
    assert find_last_collective_in_dump(0, prefix, after=0.0) == ""
    (tmp_path / "trace_0").write_bytes(pickle.dumps(LastSighting))
    assert find_last_collective_in_dump(0, prefix, after=0.0) == ""
