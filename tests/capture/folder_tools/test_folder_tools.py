"""`capture check`, `convert`, `redact` and `pack`, against what is known of the files they are given."""

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from capture import capture_files, read_micro_batch, write_actor_config
from capture.cli import main
from capture.file_format.capture_file import read_call, write_call
from capture.file_format.gradient_signature import GradientSignature
from capture.file_format.micro_batch import Origin
from capture.file_format.optimizer_state import StateSample
from capture.file_format.optimizer_step import OptimizerStep, ParameterSamples, Sample
from capture.folder_tools.convert import convert_folder
from replay.command_line.cli import main as replay_main
from replay.options.spec import find_sample_folder
from tests.helpers.dumps import make_dump

SECRET = "/home/somebody/secret-project"


def write_dumps(folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    dumps = []
    for number in range(3):
        dump = make_dump(rank=number % 2, timestamp=f"20250619_05260{number}_430740")
        name = f"actor_inputs_rank{number % 2}_{dump['timestamp']}.pkl"
        (folder / name).write_bytes(pickle.dumps(dump, protocol=4))
        dumps.append(dump)
    return dumps


def write_secrets(folder: Path) -> Path:
    """Write a capture of two rows of real tokens 100 .. 119, with padding 9 on the left of the second.

    A label is the token at its own position; some are none, one is the next token and one is another token.
    """
    ids_BS = torch.arange(100, 120).view(2, 10).clone()
    mask_BS = torch.ones(2, 10, dtype=torch.long)
    mask_BS[1, :4] = 0
    ids_BS[1, :4] = 9
    labels_BS = ids_BS.clone()
    labels_BS[0, :5] = -100
    labels_BS[1, 5] = 1234
    labels_BS[1, 6] = ids_BS[1, 7]
    write_call(
        folder,
        {
            "input_ids": ids_BS,
            "attention_mask": mask_BS,
            "labels": labels_BS,
            "position_ids": torch.arange(10).expand(2, 10),
            "advantages": torch.randn(2, 10),
        },
        {"prompt": "the secret text", "temperature": 0.7, "return_output": True},
        trains=True,
        origin=Origin(source="", rank=0, step=3, time="2026-03-01T09:12:44+00:00", model_name=SECRET),
    )
    write_actor_config(
        folder, {"model_type": "llama", "vocab_size": 2000, "_name_or_path": SECRET, "x": SECRET}, SECRET
    )
    return folder


def describe_conversion(folder: Path, num_passes: int, *, without: Container[str] = ()) -> str:
    """Say what converting `old` into `new` prints; `without` are the names of the dumps that were refused."""
    before = sum(path.stat().st_size for path in (folder / "old").iterdir() if path.name not in without)
    after = sum(path.stat().st_size for path in (folder / "new").glob("*.pkl"))
    share = f"{round(100 * after / before)}% of their size"
    return f"converted  {num_passes} passes to {folder / 'new'}, {share}, each read back and equal\n"


def test_convert_keeps_what_the_dumps_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumps = write_dumps(tmp_path / "old")
    assert main(["convert", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out == describe_conversion(tmp_path, 3)
    batches = [read_micro_batch(path) for path in capture_files(tmp_path / "new")]
    # Captures are sorted by rank, then in recorded order.
    for batch, dump in zip(batches, [dumps[0], dumps[2], dumps[1]], strict=True):
        assert batch.sequences_BS.equal(dump["sequences"])
        assert batch.attention_mask_BS.equal(dump["attention_mask"].bool())
        assert batch.action_mask_BA is not None
        assert batch.action_mask_BA.equal(dump["action_mask"])
        assert batch.call_facts["return_output"] is True
        assert batch.origin.rank == dump["rank"]
        second = dump["timestamp"][13:15]
        assert batch.origin.time == f"2025-06-19T05:26:{second}.430740+00:00"
    assert [batch.origin.step for batch in batches] == [0, 1, 0]
    assert main(["check", str(tmp_path / "new")]) == 0
    assert "no manifest" not in capsys.readouterr().out


def test_convert_reports_how_many_dumps_are_done(tmp_path: Path) -> None:
    write_dumps(tmp_path / "old")
    progress = []
    convert_folder(tmp_path / "old", tmp_path / "new", on_progress=lambda *numbers: progress.append(numbers))
    assert progress == [(0, 3), (1, 3), (2, 3)]


def test_convert_keeps_what_was_computed_from_the_text_and_redact_does_not(tmp_path: Path) -> None:
    source = _make_folder(tmp_path / "in")
    call = replace(
        read_call(capture_files(find_sample_folder())[0]),
        outputs={"loss": 1.5},
        random={"python": {"version": 3, "state": b"12", "gauss": None}},
        random_after={"cpu": b"12"},
        weights=ParameterSamples(samples=(), num_parameters=1, num_frozen=0, is_sharded=False),
        routes={"model.layers.0.mlp.gate": torch.tensor([[1, 0]])},
        environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    )
    call.write(source)
    redacted = replace(call, outputs={}, random={}, random_after={}, weights=None, routes={})
    for command, expected in (("convert", call), ("redact", redacted)):
        assert main([command, str(source), str(tmp_path / command)]) == 0
        copy = read_call(capture_files(tmp_path / command)[0])
        assert (copy.outputs, copy.random, copy.random_after) == (
            expected.outputs,
            expected.random,
            expected.random_after,
        )
        assert (copy.weights, list(copy.routes)) == (expected.weights, list(expected.routes))
        assert copy.environment == call.environment


def test_redact_keeps_of_a_step_no_number_of_a_gradient(tmp_path: Path) -> None:
    """Moments are of gradients, and whose rows these have in the embedding are the text's tokens."""
    name, shape = "model.embed_tokens.weight", (264, 64)
    sample = Sample(name=name, dtype="float32", shape=shape, start=0, values=(0.625, 0.6875))
    signature = GradientSignature(
        name=name, shape=shape, is_part=False, norm=0.625, start=0, stride=1, values=(0.6875,)
    )
    known = OptimizerStep(
        number=0,
        passes=(3,),
        shares=(1.0,),
        max_norm=1.5,
        optimizer="AdamW",
        library="torch",
        settings=({"lr": 0.25, "num_parameters": 1},),
        has_state=True,
        state_steps=(2,),
    )
    step = replace(
        known,
        gradients=ParameterSamples(samples=(sample,), num_parameters=1, num_frozen=0, is_sharded=False),
        signatures=(signature,),
        without_gradient=("model.norm.weight",),
        grad_norm=0.6875,
        is_part_of_norm=True,
        state=(StateSample(name=name, shape=shape, start=0, values={"exp_avg": (0.625,), "exp_avg_sq": (0.6875,)}),),
    )
    source = _make_folder(tmp_path / "in")
    replace(read_call(capture_files(find_sample_folder())[0]), step=step).write(source)
    assert main(["redact", str(source), str(tmp_path / "out")]) == 0
    [before, after] = [read_call(capture_files(folder)[0]).step for folder in (source, tmp_path / "out")]
    assert (before, after) == (step, known)


def test_convert_names_what_it_refuses_and_takes_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dumps(tmp_path / "old")
    (tmp_path / "old" / "actor_inputs_rank0_broken.pkl").write_bytes(b"\x80\x04no")
    (tmp_path / "old" / "actor_inputs_rank0_timeless.pkl").write_bytes(pickle.dumps(make_dump(timestamp="yesterday")))
    assert main(["convert", str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    out = capsys.readouterr().out
    refused = ("actor_inputs_rank0_broken.pkl", "actor_inputs_rank0_timeless.pkl")
    assert out.startswith(describe_conversion(tmp_path, 3, without=refused))
    assert "refused    actor_inputs_rank0_broken.pkl" in out
    assert "its time is 'yesterday'" in out
    assert len(capture_files(tmp_path / "new")) == 3


@pytest.mark.parametrize("command", ["convert", "redact"])
def test_nothing_is_written_where_something_is(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept").write_text("mine")
    assert main([command, str(find_sample_folder()), str(tmp_path)]) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("tokens", ["permute", "zero"])
def test_redact_keeps_the_shape_of_things_and_no_text(
    tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_secrets(_make_folder(tmp_path / "in"))
    assert main(["redact", str(source), str(tmp_path / "out"), "--tokens", tokens]) == 0
    printed = f"redacted   1 passes to {tmp_path / 'out'}, tokens: {tokens}\nblanked    advantages\n"
    assert capsys.readouterr().out == printed
    before, after = (read_micro_batch(capture_files(folder)[0]) for folder in (source, tmp_path / "out"))
    assert after.attention_mask_BS.equal(before.attention_mask_BS)
    assert after.extra_tensors["position_ids"].equal(before.extra_tensors["position_ids"])
    assert not after.extra_tensors["advantages"].any()
    assert after.labels_BS is not None
    assert before.labels_BS is not None
    assert (after.labels_BS == -100).equal(before.labels_BS == -100)
    assert (after.origin.rank, after.origin.step, after.origin.time) == (0, 3, before.origin.time)
    assert after.call_facts == {"prompt": "", "temperature": 0.7, "return_output": True}
    real_BS = before.attention_mask_BS
    assert not after.sequences_BS[~real_BS].any()
    if tokens == "zero":
        assert not after.sequences_BS.any()
    else:
        # There are as many different tokens as before.
        assert len(set(after.sequences_BS[real_BS].tolist())) == 16
        assert after.sequences_BS[real_BS].tolist() != before.sequences_BS[real_BS].tolist()
        assert int(after.sequences_BS.max()) < 2000
        labels_own_BS = (before.labels_BS == before.sequences_BS) & real_BS
        assert after.labels_BS[labels_own_BS].equal(after.sequences_BS[labels_own_BS])
        assert after.labels_BS[1, 6] == after.sequences_BS[1, 7]
    written = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    for text in (b"secret", b"somebody", b"/home"):
        assert text not in written
    assert main(["check", str(tmp_path / "out")]) == 0


def test_two_redactions_do_not_share_a_permutation(tmp_path: Path) -> None:
    source = write_secrets(_make_folder(tmp_path / "in"))
    for name in ("a", "b"):
        assert main(["redact", str(source), str(tmp_path / name)]) == 0
    first_BS, second_BS = (read_micro_batch(capture_files(tmp_path / name)[0]).sequences_BS for name in ("a", "b"))
    assert not first_BS.equal(second_BS)


def test_a_redacted_folder_still_replays(tmp_path: Path, one_world: None) -> None:
    assert main(["redact", str(find_sample_folder()), str(tmp_path / "out")]) == 0
    arguments = ["--inputs", str(tmp_path / "out"), "--max-inputs", "2", "--quiet", "--log-folder", str(tmp_path)]
    assert replay_main(arguments) == 0


def test_check_names_each_kind_of_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dumps(tmp_path / "old")
    whole = tmp_path / "new"
    assert main(["convert", str(tmp_path / "old"), str(whole)]) == 0
    files = capture_files(whole)
    # A copy that no manifest has, a damaged file, and a whole file with another file's content.
    shutil.copy(files[0], whole / "actor_inputs_rank0_20990101_000000_000000_00000009.pkl")
    data = bytearray(files[1].read_bytes())
    data[-30] ^= 1
    files[1].write_bytes(bytes(data))
    shutil.copy(files[0], files[2])
    gone = whole / "actor_inputs_rank7_20990101_000000_000000_00000000.pkl"
    manifest = next(whole.glob("manifest_rank0_*.json"))
    content = json.loads(manifest.read_text())
    content["files"].append({**content["files"][0], "name": gone.name})
    manifest.write_text(json.dumps(content))
    capsys.readouterr()
    assert main(["check", str(whole)]) == 1
    out = capsys.readouterr().out
    assert "1 of them in no manifest" in out
    assert f"damaged    {files[1].name}" in out
    assert f"damaged    {files[2].name}: reads, but is not the file that the manifest has" in out
    assert f"missing    {gone.name}" in out


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dumps(tmp_path / "old")
    assert main(["convert", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    manifest = next((tmp_path / "new").glob("manifest_rank0_*.json"))
    manifest.write_text(manifest.read_text().replace("actor_inputs_rank0", "../actor_inputs_rank0", 1))
    assert main(["check", str(tmp_path / "new")]) == 1
    assert "outside its folder" in capsys.readouterr().out


@pytest.mark.parametrize("max_bytes", [60_000, 120_000, 10_000_000])
def test_a_package_stays_below_its_size(max_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.zip"
    assert main(["pack", str(find_sample_folder()), str(target), "--max-bytes", str(max_bytes)]) == 0
    assert os.path.getsize(target) <= max_bytes
    with zipfile.ZipFile(target) as package:
        package.extractall(tmp_path)
    files = capture_files(tmp_path / "out")
    originals = capture_files(find_sample_folder())
    assert [path.name for path in files] == [path.name for path in originals[: len(files)]]
    assert (len(files) == len(originals)) == (max_bytes == 10_000_000)
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"packed     {len(files)} passes in {target}, {os.path.getsize(target):,} bytes"
    num_excluded = len(originals) - len(files)
    excluded = [
        f"excluded   {num_excluded} passes, from {path.name} on: more than {max_bytes:,} bytes"
        for path in originals[len(files) :][:1]
    ]
    assert others == [*excluded, "           it holds what was captured; to take the text out first: capture redact"]
    for path, original in zip(files, originals, strict=False):
        assert path.read_bytes() == original.read_bytes()
    assert (tmp_path / "out" / "actor.json").exists()


def test_a_package_is_refused_rather_than_empty_or_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.zip"
    assert main(["pack", str(find_sample_folder()), str(target), "--max-bytes", "100B"]) == 2
    assert "Try: a larger --max-bytes" in capsys.readouterr().err
    assert main(["pack", str(find_sample_folder()), str(target), "--max-bytes", "10 gigabytes"]) == 2
    assert "--max-bytes must be a size, such as 64MB" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    target.write_text("mine")
    assert main(["pack", str(find_sample_folder()), str(target)]) == 2
    assert target.read_text() == "mine"


def _make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder
