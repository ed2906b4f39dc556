"""benchmarks/harness.py alternates, drops, keeps and goes on; `python -m benchmarks` lists every file that is one."""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

import benchmarks.questions
from actor_init.declarations.attention import KERNELS
from benchmarks.__main__ import BENCHMARKS
from benchmarks.harness import ROOT, Answers, Column, Ended, Sample, alternate, run, table
from benchmarks.one_gpu import Scale, list_questions
from benchmarks.questions import Question, ask, make_campaign_parser
from benchmarks.verdict_cost.parts import FLOORS, PARTS, REST, Stopwatch, find_owner


def given(out: Path | None, rounds: int = 2, size: int = 3) -> argparse.Namespace:
    return argparse.Namespace(out=out, rounds=rounds, size=size)


def measure(calls: list[tuple[str, int]], name: str, seconds: float, number: int) -> list[Sample]:
    calls.append((name, number))
    return [{"s": seconds * (number + 1)}]


def test_contestants_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[tuple[str, int]] = []
    contestants = {"bare": partial(measure, calls, "bare", 2.0), "ours": partial(measure, calls, "ours", 3.0)}
    figures = alternate(contestants, Answers(given(None), "x"), rounds=8)
    assert figures == {
        "bare": [{"s": 2.0 * number} for number in range(1, 9)],
        "ours": [{"s": 3.0 * number} for number in range(1, 9)],
    }
    rounds = [calls[at : at + 2] for at in range(0, len(calls), 2)]
    assert [{number for _, number in each} for each in rounds] == [{0}, *({number} for number in range(8))]
    assert {tuple(name for name, _ in each) for each in rounds} == {("bare", "ours"), ("ours", "bare")}


def test_a_broken_off_benchmark_goes_on_and_measures_no_round_twice(tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []
    contestants = {"bare": partial(measure, calls, "bare", 2.0)}
    before = alternate(contestants, Answers(given(tmp_path), "x"), rounds=2)
    calls.clear()
    after = alternate(contestants, Answers(given(tmp_path, rounds=3), "x"), rounds=3)
    assert after == {"bare": [*before["bare"], {"s": 6.0}]}
    assert calls == [("bare", 0), ("bare", 2)]  # one that does not count, and the third


def test_answers_of_other_arguments_or_of_another_machine_are_not_gone_on_with(tmp_path: Path) -> None:
    Answers(given(tmp_path), "x").ask("one", lambda: 1)
    with pytest.raises(SystemExit, match="Try another --out"):
        Answers(given(tmp_path, size=4), "x")
    path = tmp_path / "x.jsonl"
    head, *lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(head) | {"machine": "another"}), *lines]))
    with pytest.raises(SystemExit, match="another"):
        Answers(given(tmp_path), "x")


def test_a_ratio_is_of_neighbours_with_its_quartiles_and_what_was_not_measured_is_a_dash() -> None:
    figures: dict[str, list[Sample]] = {
        "bare": [{"s": 1.0, "peak": 4.0}, {"s": 2.0, "peak": 8.0}, {"s": 4.0, "peak": 6.0}],
        "ours": [{"s": 1.1}, {"s": 2.4}, {"s": 5.2}],
    }
    columns = [
        Column("ms", "s", ".0f", 1e3),
        Column("of bare", "s", ".2f", of="bare"),
        Column("speed", "s", ".3f", of="bare", is_speed=True),
        Column("peak", "peak", ".0f", reduce=max),
    ]
    assert table("series", figures, columns).splitlines() == [
        "| series | ms | of bare | speed | peak |",
        "| --- | --- | --- | --- | --- |",
        "| bare | 2000 | 1.00 (1.00 to 1.00) | 1.000 (1.000 to 1.000) | 8 |",
        "| ours | 2400 | 1.20 (1.15 to 1.25) | 0.833 (0.801 to 0.871) | - |",
    ]


def test_a_program_whose_time_is_up_is_ended_and_what_it_printed_is_kept() -> None:
    program = "print('begun', flush=True); import threading; threading.Event().wait()"
    ended = run([sys.executable, "-c", program], limit=0.2)
    assert ended.exit_code is None
    assert ended.output in ("", "begun\n")  # nothing where even Python did not come up in that time
    assert run([sys.executable, "-c", "print(1); raise SystemExit(3)"]) == (3, "1\n")


# What benchmarks share, and the loop that one of them runs, a script of its own.
SHARED = ("harness", "sides", "bare", "questions")


def test_every_file_and_package_of_the_folder_is_listed() -> None:
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__", "__main__", *SHARED}
    packages = {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}
    assert modules | packages == BENCHMARKS.keys()


def test_a_part_has_its_seconds_without_those_of_the_parts_in_it_and_floors_have_parts_of_their_own() -> None:
    stopwatch = Stopwatch(iter([(0.0, 0.0), (1.0, 1.0), (3.0, 2.0), (7.0, 4.0), (15.0, 8.0), (31.0, 16.0)]).__next__)
    with stopwatch.measure(FLOORS), stopwatch.measure("a pass"):
        pass
    stopwatch.give()
    assert stopwatch.seconds == {REST: [17.0, 9.0], FLOORS: [10.0, 5.0], f"{FLOORS}: a pass": [4.0, 2.0]}


@pytest.mark.parametrize("target", PARTS)
def test_each_part_of_a_replay_that_is_timed_is_there(target: str) -> None:
    import_module(target.partition(":")[0])
    owner, name = find_owner(target)
    assert name in vars(owner)


@pytest.mark.parametrize(("tiny", "kernel"), [(None, "flex"), (Path("tiny.json"), "eager")])
def test_a_model_with_sinks_has_flex_attention_on_a_gpu_on_both_sides(tiny: Path | None, kernel: str) -> None:
    questions = list_questions(Scale(tiny=tiny), Path("inputs"), Path("work"))
    lines = [question.line for question in questions if question.name.startswith("bare: gpt-oss")]
    assert [f"--attention {kernel}" in line for line in lines] == [True, True]
    assert KERNELS["flex"].job_names[0] == "flex_attention"  # what the bare loop is built with


def test_questions_that_ended_are_not_asked_again_and_one_that_the_total_cut_off_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def pretend_to_run(command: Sequence[str], *, limit: float) -> Ended:
        """Each line ends with the exit code that it says, `long` needs its whole limit of 60 s."""
        line = command[-1]
        asked.append(line)
        return Ended(None if line == "long" and limit < 60 else 0 if line == "long" else int(line), "")

    monkeypatch.setattr(benchmarks.questions, "run", pretend_to_run)

    def ask_all(*lines: str, total: int = 600) -> int:
        given = make_campaign_parser(None).parse_args(["--out", str(tmp_path / "out"), "--total", str(total)])
        return ask([Question(name=line, seconds=60, line=line) for line in lines], given, "some questions")

    assert ask_all("0", "3") == 1
    assert ask_all("0", "long", total=50) == 1
    assert ask_all("0", "long") == 0
    assert asked == ["0", "3", "long", "long"]
    lines = (tmp_path / "out" / "some-questions.jsonl").read_text().splitlines()[1:]
    kept = [(name, answer["exit_code"]) for line in lines for name, answer in json.loads(line).items()]
    assert kept == [("0", 0), ("3", 3), ("long", 0)]
