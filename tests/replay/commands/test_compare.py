"""`replay compare` as it is typed: its exit codes, what it refuses and why, what it writes; and real runs."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import replay
from capture.file_format.capture_file import read_micro_batch
from replay.command_line import cli
from replay.comparison.plot import plot_comparison
from replay.options.spec import find_sample_folder
from replay.runlog.records import PassRecord
from replay.runner.checkpoint import digest_inputs, digest_weights
from tests.helpers.commands import run
from tests.helpers.machine import lack_package
from tests.helpers.made_captures import write_pass
from tests.helpers.made_logs import passed, write_log
from tests.helpers.read_logs import read_log
from tests.helpers.reference import Reference
from tests.helpers.sharded import SIZES, save_model

STEP = "--step on"
ONE = [passed(0, "x")]
Captured = pytest.CaptureFixture[str]


def compare(*typed: Path | str) -> int:
    return cli.main(["compare", *map(str, typed)])


def refusal(capsys: Captured, *typed: Path | str) -> str:
    """The one line that says why, without the name of the program."""
    assert compare(*typed) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("replay: ").rstrip("\n")


@pytest.mark.parametrize(("threshold", "code"), [("0.125", 0), ("0.124", 1), (None, 1), ("0", 1)])
def test_the_threshold_decides_the_exit_code(
    tmp_path: Path, capsys: Captured, threshold: str | None, code: int
) -> None:
    a = write_log(tmp_path / "a", ONE)
    b = write_log(tmp_path / "b", [passed(0, "x", norm=4.5)])
    assert compare(a, b, *(["--threshold", threshold] if threshold else [])) == code
    *_, verdict = capsys.readouterr().out.splitlines()
    said = f"gradient norm by 0.125 at most, threshold {threshold or 0.05}"
    assert verdict == (f"beyond     B: {said}" if code else f"within     B: loss by 0, log-probs by 0, {said}")


def test_one_run_beyond_is_enough_and_each_is_held_against_the_first(tmp_path: Path, capsys: Captured) -> None:
    logs = [write_log(tmp_path / name, [passed(0, "x", loss)]) for name, loss in [("a", 2.0), ("b", 2.05), ("c", 2.2)]]
    assert compare(*logs) == 1
    *_, b, c = capsys.readouterr().out.splitlines()
    assert b.startswith("within     B: loss by 0.025,")
    assert c.startswith("beyond     C: loss by 0.1 at most")
    assert compare(*logs, "--threshold", "0.11") == 0


def test_what_is_said_into_a_pipe_is_plain_text(tmp_path: Path) -> None:
    slower = {name: passed(0, "x").cost.phases["backward"] for name in ("forward", "backward")}
    write_log(tmp_path / "a" / "run", [passed(0, "x"), passed(1, "y")])
    b = write_log(tmp_path / "b", [passed(0, "x", 2.5, phases=slower), passed(1, "new")], typed="--backend fsdp2")
    done = subprocess.run(
        [sys.executable, "-m", "replay", "compare", "a", b, "--threshold", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "FORCE_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert (
        done.stdout
        == f"""\
A          a/run: the reference
B          {b}: 1 matched pass, 1 in A alone, 1 in B alone

setting  A          B
backend  deepspeed  fsdp2

run  quantity       matched  mean in A   mean  max diff  mean diff  max relative  at input
B    loss                 1          2    2.5       0.5        0.5          0.25  x.pkl
B    log-probs            1        -15    -15         0          0             0  -
B    gradient norm        1          4      4         0          0             0  -
B    forward ms           1      250.0  500.0     250.0      250.0             1  x.pkl
B    backward ms          1      500.0  500.0      0.00       0.00             0  -
B    peak GiB             1      2.000  2.000     0.000      0.000             0  -

within     B: loss by 0.25, log-probs by 0, gradient norm by 0 at most, threshold 1
"""
    )


def test_captures_are_named_shortly_or_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "actor_inputs_rank0_20261122_012150_163029_00000004"
    logs = [write_log(tmp_path / folder, [passed(0, name, loss)]) for folder, loss in (("a", 2.0), ("b", 2.01))]
    compare(*logs)
    short = capsys.readouterr().out
    compare(*logs, "--full-names")
    assert "rank0 #4" in short
    assert name not in short
    assert f"{name}.pkl" in capsys.readouterr().out


def test_help_needs_neither_torch_nor_rich() -> None:
    probe = (
        "import sys; from replay.command_line.cli import main; code = main(['compare', '--help']); "
        "print(code, [m for m in ('torch', 'rich', 'matplotlib', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert "--threshold" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"work": {"config": {"num_hidden_layers": 2}}}, "num_hidden_layers is 2, not 4"),
        ({"facts": {"weights": "random, seed 1"}, "work": {"weights": "1"}}, "weights are random, seed 1, not random,"),
        ({"work": {"weights": "other digest"}}, "weights are other ones, both random, seed 0"),
        ({"typed": "--loss sft"}, "--loss sft, not --loss stand-in"),
        ({"typed": "--backward no"}, "--no-backward, not --backward"),
        ({"typed": "--step on"}, "--step, not --step off"),
        ({"records": [passed(0, "y")]}, "no input in common: y.pkl, not x.pkl"),
        (
            {"records": [passed(0, "y", trains=False)], "typed": "--passes rollout"},
            "no input in common (rollout passes, not train): y.pkl, not x.pkl",
        ),
        ({"records": [passed(0, "x", input_digest="redacted")]}, "x.pkl holds other tensors"),
        ({"records": [passed(0, "x", trains=False)]}, "x.pkl was a training pass in one of them alone"),
        ({"typed": "--loss sft --backward no"}, "--loss sft, not --loss stand-in; --no-backward, not --backward"),
    ],
)
def test_what_was_not_the_same_work_is_refused(
    tmp_path: Path, capsys: Captured, changes: dict[str, Any], says: str
) -> None:
    a = write_log(tmp_path / "a", ONE, typed="--name reference")
    b = write_log(tmp_path / "b", changes.pop("records", ONE), **changes)
    line = refusal(capsys, a, b)
    assert line.startswith(f"{b} did not do the work of {a}: {says}")
    assert line.endswith("Try: replay, changed in nothing but what is to be compared")


@pytest.mark.parametrize(
    "typed",
    [
        "--backend fsdp2",
        "--dtype fp32 --zero-stage 3 --optimizer none",
        "--attention eager --gradient-checkpointing yes --compile yes",
        "--learning-rate 0.5 --max-norm 1",
    ],
)
def test_what_is_to_be_compared_may_differ(tmp_path: Path, typed: str) -> None:
    assert compare(write_log(tmp_path / "a", ONE), write_log(tmp_path / "b", ONE, typed=typed)) == 0


@pytest.mark.parametrize("typed", ["--learning-rate 0.5", "--max-norm 1.0", "--optimizer sgd", "--lr-warmup-steps 3"])
def test_what_decides_a_step_must_be_the_same_under_step(tmp_path: Path, capsys: Captured, typed: str) -> None:
    a = write_log(tmp_path / "a", ONE, typed=STEP)
    b = write_log(tmp_path / "b", ONE, typed=f"{STEP} {typed}")
    assert f": {typed}, not " in refusal(capsys, a, b)


@pytest.mark.parametrize(
    ("chosen", "typed", "says"),
    [
        ("stand-in", "--loss stand-in", None),
        ("policy", "--loss policy", None),
        ("policy", "--loss stand-in", "--loss stand-in, not --loss policy"),
        ("policy", "", "--loss stand-in, not --loss policy"),
    ],
)
def test_a_loss_that_was_not_typed_is_the_one_that_the_run_chose(
    tmp_path: Path, capsys: Captured, chosen: str, typed: str, says: str | None
) -> None:
    a = write_log(tmp_path / "a", ONE, chosen_loss=chosen)
    b = write_log(tmp_path / "b", ONE, typed=typed)
    if says is None:
        assert compare(a, b) == 0
        assert "loss   " not in capsys.readouterr().out.partition("\nrun ")[0]
    else:
        assert f": {says}" in refusal(capsys, a, b)


def on(*columns: str) -> list[PassRecord]:
    """Passes of as many data ranks as there are columns, each a word whose letters are its inputs."""
    rows = enumerate(zip(*columns, strict=True))
    return [passed(index, name, rank=rank) for index, row in rows for rank, name in enumerate(row)]


@pytest.mark.parametrize(
    ("reference", "other", "says"),
    [
        (on("xyz"), on("xyz"), None),
        (on("xyz"), on("xy"), None),
        # The same gradients were averaged.
        (on("xz", "yw"), on("yw", "xz"), None),
        # What came after other steps is in one of them alone.
        (on("xyz"), on("xwv"), None),
        (on("xyz"), on("yxz"), "x.pkl came after 1 step, not 0"),
        (on("xyz"), on("xwz"), "z.pkl came after steps on other inputs: step 2 was on w.pkl, not y.pkl"),
        (on("xy"), on("x", "y"), "y.pkl came after 0 steps, not 1"),
        (on("xz", "yw"), on("xz", "vw"), "z.pkl came after steps on other inputs: step 1 was on v.pkl and 1 more,"),
    ],
)
def test_under_step_a_pass_must_have_come_after_the_same_steps(
    tmp_path: Path, capsys: Captured, reference: list[PassRecord], other: list[PassRecord], says: str | None
) -> None:
    logs = write_log(tmp_path / "a", reference, typed=STEP), write_log(tmp_path / "b", other, typed=STEP)
    if says is None:
        assert compare(*logs) == 0
    else:
        assert f": {says}" in refusal(capsys, *logs)
        without = write_log(tmp_path / "c", reference), write_log(tmp_path / "d", other)
        assert compare(*without) == 0


def edit_run(log: Path, **changes: Any) -> None:
    path = log / "run.json"
    run_json = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in run_json.items() if value is not ...}))


def edit_lines(log: Path, change: Callable[[str], str]) -> None:
    path = log / "rank0.jsonl"
    path.write_text(change(path.read_text()))


def empty(log: Path) -> None:
    edit_lines(log, lambda _: "")
    edit_run(log, statistics={"num_passes": 0, "num_counted": 0})


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "{b} does not exist. Give one that a run left, such as logs/"),
    "no run": (lambda b: (b / "run.json").unlink(), "{b} holds no run (no run.json). Give a folder that a run left"),
    "several runs": (
        lambda b: [b.rename(b.with_name("old")), write_log(b / "1", ONE), write_log(b / "2", ONE)],
        "{b} holds 2 runs. Name one of them, such as {b}/2",
    ),
    "no end": (
        lambda b: edit_run(b, exit_code=..., statistics=..., status="running"),
        "{b}: the log is cut short: it has no end, so the run goes on or was killed. Try: replay, again",
    ),
    "Ctrl-C": (lambda b: edit_run(b, exit_code=130), "{b}: the log is cut short: the run was interrupted. Try: replay"),
    "a rank died": (
        lambda b: edit_run(b, exit_code=1, failure={"rank": 3}),
        "{b}: the run broke off on rank 3, see {b}/failure.txt. Try: replay, again",
    ),
    "a broken last line": (
        lambda b: edit_lines(b, lambda text: text[:-20]),
        "{b}/rank0.jsonl is cut short in line 2. Try: replay, again",
    ),
    "a line too few": (
        lambda b: edit_lines(b, lambda text: text[: text.index("\n") + 1]),
        "{b}/rank0.jsonl is cut short: it has 1 of 2 passes. Try: replay, again",
    ),
    "a line twice": (
        lambda b: edit_lines(b, lambda text: text[: text.index("\n") + 1] * 2),
        "{b}/rank0.jsonl does not hold the passes of rank 0 one by one. Try: replay, again",
    ),
    "a damaged line": (
        lambda b: edit_lines(b, lambda text: text.replace('"rows"', '"rose"', 1)),
        "{b}/rank0.jsonl is damaged in line 1: rose is unknown; allowed are index, source, rank, ",
    ),
    "no lines": (lambda b: (b / "rank0.jsonl").unlink(), "{b}/rank0.jsonl cannot be read: "),
    "not JSON": (lambda b: (b / "run.json").write_text("{"), "{b}/run.json cannot be read: "),
    "another JSON": (lambda b: (b / "run.json").write_text("[1]"), "{b}/run.json holds a list, not a run."),
    "another version": (
        lambda b: edit_run(b, format=2, versions={"micro-replay": "9.9"}),
        "{b} was written in format 2, by micro-replay 9.9; this version compares logs of format 1. Try: the version ",
    ),
    "no version": (
        lambda b: edit_run(b, format=..., versions=...),
        "{b} was written before logs had a format; this version compares logs of format 1. Try: ",
    ),
    "a part is missing": (lambda b: edit_run(b, work=...), "{b}/run.json is damaged: work is missing. Try: replay"),
    "no pass": (
        empty,
        "{b}: no pass was replayed. Try: replay with other inputs",
    ),
    "a failed pass": (
        lambda b: edit_lines(b, lambda text: text.replace('"error": null', '"error": "out of memory"', 1)),
        "{b}: pass 1 failed on rank 0 (x.pkl: None: out of memory). Runs are compared when every pass succeeded.",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_log_that_cannot_be_used_is_one_line(tmp_path: Path, capsys: Captured, name: str) -> None:
    spoil, says = BAD[name]
    two = [passed(0, "x"), passed(1, "y")]
    a, b = write_log(tmp_path / "a", two), write_log(tmp_path / "b", two)
    assert compare(a, b) == 0
    capsys.readouterr()
    spoil(b)
    expected = says.format(b=b)
    assert refusal(capsys, a, b).startswith(expected)
    assert refusal(capsys, b, a).startswith(expected)


def test_a_run_that_failed_for_a_damaged_file_alone_can_be_compared(tmp_path: Path) -> None:
    assert compare(write_log(tmp_path / "a", ONE, exit_code=1), write_log(tmp_path / "b", ONE)) == 0


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ([], "missing argument"),
        (["a"], "two to 26 logs can be compared, not 1. Try: replay compare LOG LOG"),
        (["a", "b", "--threshold", "nan"], "--threshold nan is not allowed. Give a finite number of at least 0"),
        (["a", "b", "--threshold", "-1"], "--threshold -1.0 is not allowed. Give a finite number of at least 0"),
        (["a", "b", "--plot", "out.doc"], "--plot out.doc has no ending of a picture. Give one of "),
    ],
)
def test_wrong_usage_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, typed: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).mkdir()
    if "--plot" in typed:
        pytest.importorskip("matplotlib")
    assert refusal(capsys, *typed).startswith(says)


def test_json_has_every_number(tmp_path: Path, capsys: Captured) -> None:
    a, b = write_log(tmp_path / "a", ONE), write_log(tmp_path / "b", [passed(0, "x", math.nan)])
    assert compare(a, b, "--json") == 1
    whole = json.loads(capsys.readouterr().out)
    assert (whole["threshold"], whole["runs"]) == (0.05, [str(a), str(b)])
    [comparison] = whole["comparisons"]
    assert (comparison["within"], comparison["num_matched"]) == (False, 1)
    assert comparison["results"][0]["points"] == [
        {"source": "x.pkl", "place": 0, "reference": 2.0, "other": "nan", "name": "", "apart": None, "num_values": 1}
    ]
    assert comparison["results"][0]["max_relative"] == "inf"


def test_a_plot_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "nowhere" / "out.png"
    line = refusal(capsys, write_log(tmp_path / "a", ONE), write_log(tmp_path / "b", ONE), "--plot", out)
    assert line == f"--plot {out}: No such file or directory. Give a file that can be written"


def test_without_matplotlib_plot_says_what_to_install(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    lack_package("matplotlib", monkeypatch)
    line = refusal(capsys, write_log(tmp_path / "a", ONE), write_log(tmp_path / "b", ONE), "--plot", "out.png")
    assert line == "--plot needs matplotlib. Try: pip install 'micro-replay[plot]'"


@pytest.mark.parametrize("others", [[2.0, 4.0], [2.1, 4.0], [math.nan, 4.0], [math.nan, math.inf]])
def test_a_plot_is_drawn_of_equal_near_and_infinite_differences(tmp_path: Path, others: Sequence[float]) -> None:
    pytest.importorskip("matplotlib")
    a = write_log(tmp_path / "a", [passed(0, "x", 2.0), passed(1, "y", 4.0)])
    b = write_log(tmp_path / "b", [passed(0, "y", others[1]), passed(1, "x", others[0])])
    compare(a, b, "--plot", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    above, below = plot_comparison(replay.compare(a, b)).axes
    curves = {line.get_label(): line for line in above.lines}
    assert list(curves["A"].get_ydata()) == [2.0, 4.0]
    assert list(curves["B"].get_ydata()) == pytest.approx(list(others), nan_ok=True)
    differences = [abs(other - value) / value for other, value in zip(others, [2.0, 4.0], strict=True)]
    finite = [value if math.isfinite(value) else math.nan for value in differences]
    assert list(below.lines[0].get_ydata()) == pytest.approx(finite, nan_ok=True)
    num_beyond = len([value for value in differences if not math.isfinite(value)])
    assert below.lines[0].get_label() == "B, loss" + (f" ({num_beyond} not finite)" if num_beyond else "")
    bottom, top = below.get_ylim()
    assert bottom == 0 < max([0.05, *(value for value in finite if not math.isnan(value))]) <= top


def test_inputs_are_known_by_their_tensors(tmp_path: Path) -> None:
    first = read_micro_batch(write_pass(tmp_path / "1", step=0))
    renamed = read_micro_batch(write_pass(tmp_path / "2", step=3))
    masked = read_micro_batch(write_pass(tmp_path / "3", step=0, num_actions=1))
    assert digest_inputs(first) == digest_inputs(renamed) != digest_inputs(masked)
    assert renamed.origin.source != first.origin.source
    first.sequences_BS[0, 0] += 1
    assert digest_inputs(first) != digest_inputs(renamed)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one model, and a copy of the first."""
    home = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("first", "second")):
        save_model(home / name, seed, {"model_type": "llama"})
    shutil.copytree(home / "first", home / "copy")
    return {name: home / name for name in ("first", "second", "copy")}


def test_weights_are_known_by_their_values(models: dict[str, Path]) -> None:
    from actor_init.model import find_model
    from actor_init.spec import ActorSpec
    from actor_init.weights import RandomWeights

    opened = (find_model(ActorSpec(model=str(folder)), None, "").weights for folder in models.values())
    first, second, copy = (digest_weights(weights) for weights in opened)
    assert first == copy != second
    assert len({digest_weights(RandomWeights(seed=seed, std=0.02)) for seed in (0, 1)}) == 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> dict[str, Path]:
    """Real ones over the sample, each in processes of its own."""
    home = tmp_path_factory.mktemp("runs")
    common = "--quiet --dtype fp32 --skip-inputs 13 --model"  # short ones
    commands = {
        "deepspeed": f"replay --max-inputs 3 {common} {models['first']}",
        "tp": f"torchrun --nproc-per-node 2 replay --backend fsdp2 --tp 2 --max-inputs 3 {common} {models['copy']}",
        "other": f"replay --backend fsdp2 --max-inputs 3 {common} {models['second']}",
    }
    for name, command in commands.items():
        done = run(command, home / name)
        assert done.returncode == 0, done.stdout + done.stderr
    return {name: home / name for name in commands}


def test_two_backends_did_the_same(runs: dict[str, Path], capsys: Captured) -> None:
    assert compare(runs["deepspeed"], runs["tp"], "--threshold", "1e-4") == 0
    out = capsys.readouterr().out
    assert "3 matched passes\n" in out
    for setting in ("backend ", "tp ", "model ", "devices "):
        assert f"\n{setting}" in out
    assert "note" not in out


def test_a_row_s_log_probs_are_those_of_a_plain_model_on_every_rank(
    runs: dict[str, Path], models: dict[str, Path]
) -> None:
    assert SIZES["vocab_size"] == 264
    reference = Reference(models["first"])
    for name, num_ranks in (("deepspeed", 1), ("tp", 2)):
        _, records = read_log(next(runs[name].iterdir()))
        assert len(records) == 3 * num_ranks
        for record in records:
            with torch.no_grad():
                expected = reference.log_probs(read_micro_batch(find_sample_folder() / record.source))
            sums = expected.double().sum(dim=1).tolist()
            # The fp32 logits are summed in another order.
            assert record.result.row_log_probs == pytest.approx(sums, rel=1e-5)


def test_other_weights_are_refused(runs: dict[str, Path], capsys: Captured) -> None:
    line = refusal(capsys, runs["deepspeed"], runs["other"])
    assert "/second, not from /" in line


OWN_MODEL = """\
from transformers import AutoConfig, LlamaForCausalLM

def build():
    return LlamaForCausalLM(AutoConfig.from_pretrained({folder!r}))

def build_wrong():
    model = build()
    model.config.rms_norm_eps = 1.0
    return LlamaForCausalLM(model.config)
"""
OWN_LOSS = """\
def loss(inputs):
    return -inputs.log_probs_BA.sum() / inputs.action_mask_BA.sum()

def other(inputs):
    return 2 * loss(inputs)
"""


@pytest.mark.slow
def test_other_code_and_another_window_are_compared_and_told_first(
    models: dict[str, Path], tmp_path: Path, one_world: None, capsys: Captured
) -> None:
    own, loss = tmp_path / "own.py", tmp_path / "loss.py"
    own.write_text(OWN_MODEL.format(folder=str(models["first"])))
    loss.write_text(OWN_LOSS)

    def run_replay(name: str, *typed: str) -> Path:
        common = ["--max-inputs", "2", "--grad-accumulation", "2", "--dtype", "fp32", "--backend", "fsdp2", "--quiet"]
        assert cli.main([*common, *typed, "--log-folder", str(tmp_path / name)]) == 0
        return tmp_path / name

    def told(a: Path, b: Path, code: int) -> str:
        capsys.readouterr()
        assert compare(a, b, "--threshold", "1e-3") == code
        first, _, second, *_ = capsys.readouterr().out.splitlines()
        assert second.endswith("2 matched passes")
        assert first.startswith("other work B: ")
        return first.removeprefix("other work B: ")

    # A mean of log-probs is what --window is for; the sample's own loss is the policy's.
    mean = "--loss", "stand-in"
    stock = run_replay("stock", "--model", str(models["first"]), "--no-packing", *mean)
    user = "--model", f"{own}:build", "--weights", str(models["first"])
    built = run_replay("built", *user, *mean)
    of_stock = f"the model is {own}:build, not {models['first']}; model_type is custom, not llama"
    assert told(stock, built, 0) == of_stock
    wrong = run_replay("wrong", "--model", f"{own}:build_wrong", *user[2:], *mean)
    assert told(built, wrong, 1) == f"the model is {own}:build_wrong, not {own}:build"
    own.write_text(own.read_text() + "# a new version\n")
    again = run_replay("again", *user, *mean)
    assert told(built, again, 0).startswith(f"{own} has changed, or is another file: its sha256 is ")
    # In the job each pass weighed the same.
    by_tokens = run_replay("tokens", *user, *mean, "--window", "tokens")
    assert told(again, by_tokens, 1) == "--window tokens, not --window job"
    users = run_replay("users", *user, "--loss", f"{loss}:loss")
    # The user's mean is of each pass, and the passes weigh the same, as in the job.
    assert told(again, users, 0) == f"--loss {loss}:loss, not --loss stand-in"
    twice = run_replay("twice", *user, "--loss", f"{loss}:other")
    assert told(users, twice, 1) == f"--loss {loss}:other, not --loss {loss}:loss"
    loss.write_text(OWN_LOSS.replace("-inputs", "-3 * inputs"))
    changed = run_replay("changed", *user, "--loss", f"{loss}:loss")
    assert told(users, changed, 1) == f"--loss {loss}:loss is other code: its file has changed in between"
    layers = run_replay("layers", *user, *mean, "--num-layers", "1")
    capsys.readouterr()
    assert "num_hidden_layers is 1, not " in refusal(capsys, again, layers)


def test_one_loss_that_is_changed_afterwards_is_beyond_the_threshold(
    runs: dict[str, Path], tmp_path: Path, capsys: Captured
) -> None:
    shutil.copytree(runs["deepspeed"], tmp_path / "log")
    [lines] = tmp_path.glob("log/*/rank0.jsonl")
    first, second, third = map(json.loads, lines.read_text().splitlines())
    second["loss"] *= 1.01
    lines.write_text("".join(f"{json.dumps(line)}\n" for line in (first, second, third)))
    assert compare(runs["deepspeed"], tmp_path / "log", "--threshold", "0.009") == 1
    assert "B: loss by 0.01 at most" in capsys.readouterr().out
    assert compare(runs["deepspeed"], tmp_path / "log", "--threshold", "0.011") == 0
