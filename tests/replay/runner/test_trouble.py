"""What goes wrong is said in one clear line, written down, and does not touch the passes after it."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actor_init.backends.protocol import open_backend
from capture.file_format.actor_config import write_actor_config
from capture.file_format.listing import capture_files
from replay.command_line.cli import main
from replay.objective.objective import compute_negated_mean
from replay.options.spec import find_sample_folder
from replay.runlog.records import PassRecord
from tests.helpers.commands import run
from tests.helpers.failing_inputs import CONFIG, TOO_LONG, folder_of
from tests.helpers.made_captures import write_pass
from tests.helpers.read_logs import read_log
from tests.helpers.replaced_parts import replace_opening, replace_stand_in_loss

pytestmark = pytest.mark.usefixtures("one_world")


def replay(home: Path, *arguments: str) -> tuple[int, list[PassRecord]]:
    """The exit code and the records of a replay in this process."""
    logs = home / f"logs-{len(list(home.iterdir()))}"
    code = main([*arguments, "--dtype", "fp32", "--log-folder", str(logs)])
    records = [record for folder in logs.iterdir() for record in read_log(folder)[1]] if logs.exists() else []
    return code, records


@pytest.mark.slow
@pytest.mark.usefixtures("compiles_to_graphs")
@pytest.mark.parametrize(
    "flags",
    ["--zero-stage 0", "--zero-stage 1", "--zero-stage 2", "--zero-stage 3", "--backend fsdp2", "--compile"],
)
def test_a_crashed_pass_is_recorded_and_leaves_the_next_ones_right(flags: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [20, 24, TOO_LONG, 28, TOO_LONG, 30])
    code, records = replay(tmp_path, "--inputs", str(folder), *flags.split())
    assert code == 1
    assert [record.index for record in records if record.error] == [2, 4]
    assert all(record.result.loss is None for record in records if record.error)
    code, clean = replay(tmp_path, "--inputs", str(folder_of(tmp_path / "clean", [20, 24, 28, 30])), *flags.split())
    assert code == 0
    good = [record for record in records if not record.error]
    assert [r.result.loss for r in good] == pytest.approx([r.result.loss for r in clean], rel=1e-6)
    assert [r.result.grad_norm for r in good] == pytest.approx([r.result.grad_norm for r in clean], rel=1e-6)


@pytest.mark.parametrize("flags", ["--zero-stage 1", "--zero-stage 2", "--zero-stage 3", "--backend fsdp2"])
def test_a_crash_in_backward_leaves_no_gradient_behind(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the gradients are there when backward breaks off; the pass after it must not be made of them."""
    folder = folder_of(tmp_path, [20, 24, 28])
    _, clean = replay(tmp_path, "--inputs", str(folder), *flags.split())
    breaks_on_second = _break_backward(call=2)
    replace_stand_in_loss(monkeypatch, breaks_on_second)
    code, records = replay(tmp_path, "--inputs", str(folder), *flags.split())
    assert code == 1
    assert [bool(record.error) for record in records] == [False, True, False]
    for before, after in zip(clean, records, strict=True):
        if not after.error:
            assert after.result.grad_norm == pytest.approx(before.result.grad_norm, rel=1e-6)


def _break_backward(call: int) -> Callable[..., Any]:
    """`compute_negated_mean` whose graph raises, in the given call, once the gradient reaches the log-probs."""
    calls = 0

    def break_once(log_probs_BA: Any, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            next_node = log_probs_BA.grad_fn.next_functions[0][0]
            for _ in range(60):  # some way down into the model
                nodes = [node for node, _ in next_node.next_functions if node is not None]
                if not nodes:
                    break
                next_node = nodes[0]
            next_node.register_prehook(_raise)
        return compute_negated_mean(log_probs_BA, inputs)

    return break_once


def _raise(*_: Any) -> None:
    raise RuntimeError("broken on purpose")


def test_an_actor_that_cannot_be_opened_again_ends_the_run_with_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    openings: Iterator[Callable[..., Any]] = iter([open_backend, _raise])
    replace_opening(monkeypatch, lambda *arguments: next(openings)(*arguments))
    code, records = replay(tmp_path, "--inputs", str(folder_of(tmp_path, [20, TOO_LONG, 24])), "--warmup", "0")
    assert code == 1
    assert [bool(record.error) for record in records] == [False, True]
    said = capsys.readouterr()
    assert "could not be opened again" in said.err
    assert "passes measured  1 of 2" in said.out
    assert read_run(tmp_path)["status"] == "failed"


def test_ctrl_c_leaves_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([compute_negated_mean, _interrupt])
    replace_stand_in_loss(monkeypatch, lambda *arguments: next(calls)(*arguments))
    code, records = replay(tmp_path, "--inputs", str(folder_of(tmp_path, [20, 22, 24])))
    assert code == 130
    assert len(records) == 1
    assert read_run(tmp_path)["status"] == "interrupted"


def _interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def read_run(home: Path) -> dict[str, Any]:
    (logs,) = home.glob("logs-*")
    (folder,) = logs.iterdir()
    return read_log(folder)[0]


def copy_with_damage(home: Path) -> Path:
    """The sample's first files of rank 0, and one of each kind of damage among them."""
    folder = home / "damaged"
    folder.mkdir()
    shutil.copy(find_sample_folder() / "actor.json", folder)
    whole = capture_files(find_sample_folder())[4:7]
    for path in whole:
        shutil.copy(path, folder)
    data = whole[0].read_bytes()
    (folder / "actor_inputs_rank0_a_truncated.pkl").write_bytes(data[: len(data) // 2])
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    (folder / "actor_inputs_rank0_b_flipped.pkl").write_bytes(bytes(flipped))
    (folder / "actor_inputs_rank0_c_foreign.pkl").write_bytes(b"PK\x03\x04 no capture")
    return folder


def test_damaged_files_are_named_and_the_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, records = replay(tmp_path, "--inputs", str(copy_with_damage(tmp_path)))
    assert code == 1
    assert len(records) == 3
    assert not any(record.error for record in records)
    out = capsys.readouterr().out
    for kind in ("a_truncated", "b_flipped", "c_foreign"):
        assert f"actor_inputs_rank0_{kind}.pkl" in out


def test_token_ids_beyond_the_vocabulary_fail_the_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, [20])
    write_actor_config(folder, {**CONFIG, "vocab_size": 5}, "tiny")
    code, records = replay(tmp_path, "--inputs", str(folder))
    assert code == 1
    assert "token id 7 is beyond the model's vocabulary of 5" in (records[0].error or "")
    assert "vocabulary of 5" in capsys.readouterr().out


USAGE = {
    "no such folder": ("--inputs {home}/nowhere", "no such folder"),
    "empty folder": ("--inputs {home}/empty", "holds no captures"),
    "no actor.json": ("--inputs {home}/nameless", "--model llama-3.1-8b"),
    "damaged actor.json": ("--inputs {home}/mangled", "Name the model instead, with --model"),
    "unknown model": ("--model llama-9", "Allowed: llama-3.1-8b, a folder with config.json"),
    "zero stage under fsdp2": ("--backend fsdp2 --zero-stage 1", "Try: --backend fsdp2 --zero-stage 3"),
    "too many layers": ("--num-layers 99", "Allowed: 1 to 4"),
    "deepcompile under fsdp2": ("--backend fsdp2 --deepcompile", "Try: --backend deepspeed --deepcompile"),
    "deepcompile on a CPU": ("--deepcompile", "needs CUDA"),
    "both compilers": ("--compile --deepcompile", "--deepcompile"),
    "flash-attn that is not there": ("--attention flash", "Try: --attention sdpa"),
    "varlen on a CPU": ("--attention varlen", "Try: --attention sdpa"),
    "varlen on padded rows": ("--attention varlen --no-packing", "Try: --packing"),
    "fp16 on a CPU": ("--dtype fp16", "Try: --backend fsdp2"),
    "no optimizer to shard": ("--optimizer none --zero-stage 1", "Try: --zero-stage 0"),
    "step without backward": ("--step --no-backward", "Drop one"),
    "step without optimizer": ("--step --optimizer none", "Try: --optimizer adamw"),
    "unknown option": ("--max-input 3", "Did you mean --max-inputs"),
    "not a number": ("--max-inputs many", "--max-inputs"),
    "out of range": ("--zero-stage 4", "--zero-stage"),
    "log folder is a file": ("--log-folder {home}/file", "Try: --log-folder with a folder you may write to"),
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage_is_one_line_and_exit_code_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    write_pass(tmp_path / "nameless")
    write_pass(tmp_path / "mangled")
    (tmp_path / "mangled" / "actor.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    arguments, expected = USAGE[name]
    assert main(arguments.format(home=tmp_path).split()) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("replay: ")
    assert expected in lines[0]


@pytest.mark.parametrize(
    ("launcher", "crashing_rank"),
    [("torchrun --nproc-per-node 2 replay --backend fsdp2", 1), ("deepspeed --num_gpus=2 replay", 0)],
)
def test_a_crash_on_one_rank_ends_all_and_names_it(launcher: str, crashing_rank: int, tmp_path: Path) -> None:
    lengths = [20, 24, 28, 30]
    # That rank fails in its second pass.
    lengths[2 + crashing_rank] = TOO_LONG
    folder = folder_of(tmp_path, lengths, num_ranks=2)
    done = run(f"{launcher} --inputs {folder}", tmp_path / "logs")
    assert done.returncode != 0, done.stdout[-2000:] + done.stderr[-4000:]
    source = capture_files(folder)[crashing_rank * 2 + 1].name
    assert f"replay: rank {crashing_rank} failed in pass 2 on {source}" in done.stderr + done.stdout
    (home,) = (tmp_path / "logs").iterdir()
    log = json.loads((home / "run.json").read_text())
    assert (log["status"], log["failure"]["rank"], log["failure"]["source"]) == ("failed", crashing_rank, source)
    first = [json.loads((home / f"rank{rank}.jsonl").read_text().splitlines()[0]) for rank in (0, 1)]
    assert all(line["error"] is None for line in first)


def test_all_ranks_stop_at_the_shortest(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [20, 22, 24], num_ranks=2)
    done = run(f"torchrun --nproc-per-node 2 replay --backend fsdp2 --quiet --inputs {folder}", tmp_path / "logs")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "left over" in done.stdout
    (home,) = (tmp_path / "logs").iterdir()
    log, records = read_log(home)
    assert log["inputs"]["num_left_over"] == 1
    assert len(records) == 2
