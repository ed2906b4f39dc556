"""`replay recompiles` counts each policy's graphs, names the guards that failed, and says which policy to use."""

import json
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.fx import GraphModule

import replay
from actor_init.spec import ActorSpec, UsageError
from capture import capture_files
from replay.api.logs import PastCampaign
from replay.command_line.cli import main
from replay.commands.recompiles.policies import (
    Policy,
    PolicyResult,
    apply_policy,
    choose_lengths,
    find_best,
    find_break_even,
    find_policy_options,
    parse_buckets,
)
from replay.commands.recompiles.runs import summarize_run
from replay.options.spec import find_sample_folder
from replay.processes.pool import ProcessResult, Task
from replay.runlog.records import CompilationSection, PassRecord
from replay.runner.observers import CompilationCounter, describe_compilations
from tests.helpers.children import end_each_task, replay_here
from tests.helpers.made_captures import copy_captures
from tests.helpers.made_records import record
from tests.helpers.read_logs import read_log
from tests.helpers.schemas import assert_valid
from tests.helpers.typed import spec_of

Captured = pytest.CaptureFixture[str]
# Training passes of the sample that have two documents each, of 215, 186, 52 and 234 tokens.
TWO_SHORT_ROWS = (8, 16, 18, 29)


@pytest.fixture
def here(one_world: None, monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Replays in this process, whose graphs dynamo makes and nothing compiles."""
    tasks: list[Task] = []

    def as_it_is(graph: GraphModule, _: Any) -> Any:
        return graph.forward

    def run_here(task: Task) -> ProcessResult:
        torch.compiler.reset()
        tasks.append(task)
        return replay_here(task)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=as_it_is))
    end_each_task(run_here, monkeypatch)
    return tasks


def recompiles(logs: Path, *typed: str) -> tuple[int, dict[str, dict[str, Any]]]:
    captures = capture_files(find_sample_folder())
    inputs = copy_captures(logs / "inputs", [captures[number] for number in TWO_SHORT_ROWS])
    own = ("--num-layers", "1", "--dtype", "fp32", "--inputs", str(inputs), "--log-folder", str(logs))
    code = main(["recompiles", *typed, *own])
    (path,) = logs.glob("*-recompiles/recompiles.json")
    return code, {result["policy"]: result for result in json.loads(path.read_text())["result"]["policies"]}


@pytest.mark.slow
def test_each_policy_makes_its_graphs_and_pads_as_it_says(here: list[Task], tmp_path: Path, capsys: Captured) -> None:
    code, found = recompiles(tmp_path, "--buckets", "2", "--multiple", "64")
    assert code == 0, capsys.readouterr().out
    records = read_log(Path(found["off"]["log"]))[1]
    lengths = [record.input.fed_tokens for record in records[:4]]
    assert len(records) == 8
    assert len(set(lengths)) == 4  # of two rows each: more or fewer documents would make another graph
    # of the blocks, and as many of the loss
    assert {name: result["num_graphs"] / 2 for name, result in found.items()} == {
        "off": 0,
        "automatic": 2,
        "dynamic": 1,
        "static": 4,
        "buckets": 2,
        "multiple": len({-(-length // 64) for length in lengths}),
    }
    assert sum(found["static"]["recompilations"].values()) == 2 * 3
    guards = found["automatic"]["recompilations"]
    assert len(guards) == 2
    assert all("size mismatch at index N. expected N, actual N" in guard for guard in guards)
    assert found["dynamic"]["recompilations"] == {}
    assert found["multiple"]["fed_tokens"] == sum(-(-length // 64) * 64 for length in lengths)
    first, second = choose_lengths(lengths, 2)
    assert found["buckets"]["fed_tokens"] == sum(first if length <= first else second for length in lengths)
    assert found["buckets"]["options"] == f"--pad-tokens {first},{second} --compile --compile-lengths static"
    assert found["off"]["compile_seconds"] == 0 < found["dynamic"]["compile_seconds"]
    losses = {
        name: [record.result.loss for record in read_log(Path(result["log"]))[1]]
        for name, result in found.items()
        if result["log"]
    }
    for name, own in losses.items():
        assert own == pytest.approx(losses["off"], rel=1e-5), name
    said = capsys.readouterr().out
    assert "recompiled automatic, 1 x " in said
    assert any(line.startswith("use        ") for line in said.splitlines())


@pytest.mark.slow
@pytest.mark.usefixtures("forks_compile_to_graphs")
def test_from_python_policies_are_compiled_in_processes_of_their_own(tmp_path: Path) -> None:
    sample: Any = {"backend": "ddp", "num_layers": 1, "dtype": "fp32", "max_inputs": 1, "backward": False}
    result = replay.recompiles(policies=["off", "dynamic"], num_passes=10, log_folder=tmp_path, **sample)
    off, dynamic = result.policies
    assert (result.exit_code, off.error, dynamic.error) == (0, "", "")
    # That of the blocks and that of the loss.
    assert (off.num_graphs, dynamic.num_graphs) == (0, 2)
    losses = [read_log(Path(str(policy.log)))[1][0].result.loss for policy in (off, dynamic)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert list(result.to_frame().policy) == ["off", "dynamic"]


def test_buckets_that_hold_no_row_are_refused_and_the_rest_is_kept(
    here: list[Task], tmp_path: Path, capsys: Captured
) -> None:
    code, found = recompiles(tmp_path, "--policies", "buckets,dynamic", "--buckets", "8,16")
    assert code == 1
    assert found["buckets"]["error"].startswith("--buckets 8,16 holds no row of ")
    assert found["dynamic"]["pass_seconds"] > 0
    assert "failed     buckets: --buckets 8,16 holds no row of " in capsys.readouterr().out
    (folder,) = tmp_path.glob("*-recompiles")
    assert main(["recompiles", "--continue", str(folder), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    result = replay.recompiles(continue_=folder)
    assert capsys.readouterr().out == ""
    assert result.to_dict() == printed
    assert_valid("recompiles", printed)
    assert printed["result"]["policies"] == list(found.values())
    assert [policy.policy for policy in result.policies] == list(found)
    assert list(result.to_frame().num_graphs) == [policy["num_graphs"] for policy in found.values()]
    past = replay.open(folder)
    assert isinstance(past, PastCampaign)
    assert {name: len(past[name].records) for name in past} == {"off": 8, "dynamic": 8}


@pytest.mark.slow
def test_policies_that_have_run_are_not_run_again(here: list[Task], tmp_path: Path, capsys: Captured) -> None:
    code, found = recompiles(tmp_path, "--policies", "dynamic")
    capsys.readouterr()
    (folder,) = tmp_path.glob("*-recompiles")
    (folder / "journal.jsonl").write_text((folder / "journal.jsonl").read_text().splitlines(keepends=True)[0])
    num_runs = len(here)
    assert main(["recompiles", "--continue", str(folder)]) == code == 0
    assert [task.logs.parent.name for task in here[num_runs:]] == ["dynamic"]
    again = {
        result["policy"]: result
        for result in json.loads((folder / "recompiles.json").read_text())["result"]["policies"]
    }
    assert again["off"] == found["off"]
    assert again["dynamic"]["num_graphs"] == found["dynamic"]["num_graphs"]


def test_a_policy_that_does_not_finish_is_said_and_the_others_count(
    here: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def late(task: Task) -> ProcessResult:
        torch.compiler.reset()
        child = replay_here(task)
        if task.job.spec.actor.compile_lengths != "static":
            return child
        (lines,) = child.logs.glob("*/rank0.jsonl")
        lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:5]))
        return ProcessResult(exit_code=None, seconds=9.0, output=child.output, logs=child.logs)

    end_each_task(late, monkeypatch)
    code, found = recompiles(tmp_path, "--policies", "static")
    assert code == 1
    assert (found["static"]["num_passes"], found["static"]["pass_seconds"]) == (5, None)
    assert found["static"]["error"].startswith("not finished within 9 s")
    assert "use        off, no compiling" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("policy", "sizes", "options"),
    [
        (Policy.OFF, [1], ""),
        (Policy.DYNAMIC, [1], "--compile"),
        (Policy.AUTOMATIC, [1], "--compile --compile-lengths automatic"),
        (Policy.STATIC, [1], "--compile --compile-lengths static"),
        (Policy.BUCKETS, [128, 512], "--pad-tokens 128,512 --compile --compile-lengths static"),
        # One number alone would be a multiple.
        (Policy.BUCKETS, [128], "--pad-tokens 128,128 --compile --compile-lengths static"),
        (Policy.MULTIPLE, [1], "--pad-tokens 64 --compile --compile-lengths static"),
    ],
)
def test_each_policy_is_what_a_user_types_for_it(policy: Policy, sizes: list[int], options: str) -> None:
    actor = apply_policy(policy, spec_of(["--dtype", "fp32"]).actor, multiple=64, sizes=sizes)
    assert " ".join(find_policy_options(actor)) == options
    assert actor.dtype == "fp32"
    assert spec_of(["--dtype", "fp32", *options.split()]).actor == actor


@pytest.mark.parametrize(("text", "buckets"), [("4", 4), ("512,128,512", [128, 512]), ("7,7", [7])])
def test_one_number_of_buckets_is_how_many_and_several_are_lengths(text: str, buckets: int | list[int]) -> None:
    assert parse_buckets(text) == buckets


@pytest.mark.parametrize(
    ("pass_seconds", "extra_seconds", "first"),
    [
        ((0.5, 1.0), (10.0, 0.0), 20),
        ((0.5, 1.0), (10.0, 4.0), 12),
        ((0.5, 1.0), (0.0, 4.0), 1),
        ((1.0, 1.0), (0.0, 9.0), None),
    ],
)
def test_what_is_faster_pays_from_the_pass_on_that_makes_up_for_compiling(
    pass_seconds: tuple[float, float], extra_seconds: tuple[float, float], first: int | None
) -> None:
    compiled, other = [
        PolicyResult(policy=Policy.STATIC, pass_seconds=seconds, extra_seconds=extra)
        for seconds, extra in zip(pass_seconds, extra_seconds, strict=True)
    ]
    assert find_break_even(compiled, other) == first


def make_rank_passes(index: int, seconds: float, *, is_failed: bool = False, **of_ranks: Any) -> list[PassRecord]:
    """A pass of two ranks, of which the second is half a second slower; `of_ranks` has a value for each."""
    boom: dict[str, Any] = {"error": "boom", "error_type": "ValueError"}
    return [
        record(
            index,
            rank=rank,
            data_rank=0,
            seconds=seconds + 0.5 * rank,
            **{name: values[rank] for name, values in of_ranks.items()},
            **(boom if is_failed and rank else {}),
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize("is_failed", [False, True])
def test_a_policy_costs_what_its_slowest_rank_takes_and_a_guard_fails_once_for_all_ranks(
    is_failed: bool, tmp_path: Path
) -> None:
    """Two inputs, twice each, on two ranks that share them."""
    fed: dict[str, Any] = {"fed_tokens": (80, 80)}
    records = [
        *make_rank_passes(0, 3.0, new_graphs=(2, 1), compile_seconds=(1.0, 2.0), **fed),
        *make_rank_passes(
            1, 4.0, new_graphs=(0, 1), recompilations=(["a 1 != 2"], ["a 1 != 2"]), fed_tokens=(100, 100)
        ),
        *make_rank_passes(2, 1.0, recompilations=(["a 3 != 4/5", "b"],) * 2, **fed),
        *make_rank_passes(3, 2.0, is_failed=is_failed, fed_tokens=(100, 100)),
    ]
    (tmp_path / "output.txt").write_text("")
    child = ProcessResult(exit_code=1 if is_failed else 0, seconds=9.0, output=tmp_path / "output.txt", logs=tmp_path)
    result = summarize_run(Policy.DYNAMIC, spec_of(["--compile"]).actor, records, child, 2, "logs/x")
    assert (result.num_graphs, result.compile_seconds, result.fed_tokens) == (3, 2.0, 180)
    assert result.recompilations == {"a N != N": 2, "b": 1}
    assert (result.options, result.log) == ("--compile", "logs/x")
    if is_failed:
        # Of the input whose second pass failed nothing is known; the first one took 3.5 s, and then 1.5 s.
        assert (result.num_passes, result.pass_seconds, result.extra_seconds) == (3, None, 2.0)
        assert result.error == "input_3.pkl: ValueError: boom"
    else:
        assert (result.num_passes, result.pass_seconds, result.extra_seconds) == (4, (1.5 + 2.5) / 2, 2.0 + 2.0)
        assert result.error == ""


def test_passes_that_are_missing_are_counted(tmp_path: Path) -> None:
    (tmp_path / "output.txt").write_text("")
    child = ProcessResult(exit_code=0, seconds=9.0, output=tmp_path / "output.txt", logs=tmp_path)
    result = summarize_run(Policy.OFF, ActorSpec(), make_rank_passes(0, 1.0), child, 2, "")
    assert (result.num_passes, result.pass_seconds, result.error) == (1, None, "1 of 4 passes")


def test_the_policy_with_the_least_net_time_is_used() -> None:
    off = PolicyResult(policy=Policy.OFF, pass_seconds=0.1)
    dynamic = PolicyResult(policy=Policy.DYNAMIC, pass_seconds=0.08, extra_seconds=10.0)
    static = PolicyResult(policy=Policy.STATIC, pass_seconds=0.07, extra_seconds=100.0)
    cut = PolicyResult(policy=Policy.BUCKETS, error="late")
    every = [off, dynamic, static, cut]
    assert find_best(every, 100) is off
    assert find_best(every, 1000) is dynamic
    assert find_best(every, 100_000) is static
    assert find_best([cut], 5) is None
    assert find_break_even(dynamic, off) == 500
    assert find_break_even(off, dynamic) is None


@pytest.mark.parametrize("number", [1, 2, 3, 5, 9])
def test_buckets_add_the_least_padding_there_is(number: int) -> None:
    lengths = [5, 7, 7, 30, 31, 90, 91, 100]

    def fed(sizes: tuple[int, ...]) -> int:
        return sum(min(size for size in sizes if size >= length) for length in lengths)

    every = sorted(set(lengths))
    choices = [
        (*chosen, 100) for several in range(number) for chosen in combinations(every[:-1], min(several, len(every) - 1))
    ]
    found = choose_lengths(lengths, number)
    assert len(found) <= number
    assert fed(tuple(found)) == min(map(fed, choices))


@pytest.mark.parametrize("layout", ["--packing", "--no-packing"])
def test_padding_to_lengths_changes_no_log_prob(layout: str, one_world: None, tmp_path: Path) -> None:
    logs = {}
    for name, more in (("own", []), ("padded", ["--pad-tokens", "128,256"])):
        typed = [
            layout,
            "--dtype",
            "fp32",
            "--num-layers",
            "2",
            "--pick-inputs",
            "13,14",
            "--grad-accumulation",
            "1",
            "--quiet",
            "--no-noise-floor",
        ]
        assert main([*typed, *more, "--log-folder", str(tmp_path / name)]) == 0
        (folder,) = (tmp_path / name).iterdir()
        logs[name] = read_log(folder)[1]
    for own, padded in zip(logs["own"], logs["padded"], strict=True):
        rows = 1 if layout == "--packing" else own.input.rows
        assert padded.input.fed_tokens == rows * (128 if own.input.fed_tokens <= rows * 128 else 256)
        assert padded.input.fed_tokens > own.input.fed_tokens
        assert padded.result.row_log_probs == pytest.approx(
            own.result.row_log_probs, rel=1e-5
        )  # fp32 sums in another order
        assert padded.result.grad_norm == pytest.approx(own.result.grad_norm, rel=1e-4)


def test_a_row_that_no_length_holds_fails_and_says_which_would(one_world: None, tmp_path: Path) -> None:
    typed = ["--pad-tokens", "8,16", "--dtype", "fp32", "--max-inputs", "1", "--quiet", "--log-folder", str(tmp_path)]
    assert main(typed) == 1
    (folder,) = tmp_path.iterdir()
    (record,) = read_log(folder)[1]
    assert "is longer than each of --pad-tokens 8,16. Add a length of at least " in (record.error or "")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--pad-tokens", "0"], "--pad-tokens '0' is not allowed"),
        (["--pad-tokens", "8,,16"], "--pad-tokens '8,,16' is not allowed"),
        (["--compile-lengths", "static"], "is a setting of --compile. Try: --compile --compile-lengths static"),
        (["recompiles", "--policies", "none"], "--policies 'none' is not allowed"),
        (["recompiles", "--buckets", "0"], "--buckets '0' is not allowed"),
        (["--pick-inputs", "1,x"], "--pick-inputs '1,x' is not allowed"),
        (["--order", "worst", "--shuffle-inputs"], "exclude each other"),
    ],
)
def test_what_cannot_be_is_one_line(typed: list[str], said: str, capsys: Captured) -> None:
    assert main(typed) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_lengths_are_rounded_up() -> None:
    assert ActorSpec().find_padded_length(77) == 77
    assert [ActorSpec(pad_tokens="64").find_padded_length(length) for length in (1, 64, 65)] == [64, 64, 128]
    assert [ActorSpec(pad_tokens="64,8").find_padded_length(length) for length in (8, 9, 65)] == [8, 64, None]
    with pytest.raises(UsageError):
        ActorSpec(pad_tokens="a")
    assert spec_of(["--compile", "--compile-lengths", "static"]).actor.compile_lengths == "static"


def test_a_guard_is_named_without_the_code_that_made_it() -> None:
    reason = "0/0: kwargs['max_length_q'] == 12  # return f(  # /x/y.py:3 in g\n  User stack trace:\n  File ..."
    metrics = [SimpleNamespace(duration_us=2_500_000, co_name="forward", recompile_reason=reason)]

    assert describe_compilations(metrics) == CompilationSection(
        compile_seconds=2.5, recompilations=["forward: 0/0: kwargs['max_length_q'] == 12"]
    )


def test_what_was_compiled_before_a_pass_is_none_of_it() -> None:
    torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
    counter = CompilationCounter()
    counter.before_pass(cast(Any, None))
    counter.after_measurement()
    counter.close(None)
    assert counter.section == CompilationSection()
    counter.before_pass(cast(Any, None))
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    counter.after_measurement()
    counter.close(None)
    assert counter.section.new_graphs == 1
    assert counter.section.compile_seconds > 0
