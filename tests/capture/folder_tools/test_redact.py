"""What a redacted folder still holds of each part of a recording, and what it must not hold."""

import json
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from capture.black_box.incidents import make_incident, write_incidents
from capture.cli import main
from capture.file_format.actor_config import (
    read_actor_config,
    read_adapter_configs,
    read_frozen_names,
    read_parameter_names,
    write_actor_config,
)
from capture.file_format.capture_file import CapturedCall, read_call
from capture.file_format.end_record import EndRecord, write_end_record
from capture.file_format.gradient_signature import GradientSignature
from capture.file_format.listing import capture_files
from capture.file_format.micro_batch import LOSS_GRADIENTS, LOSS_MISFIT, LOSS_TARGETS, Origin
from capture.file_format.model_facts import ModelFacts, write_model_facts
from capture.file_format.optimizer_step import OptimizerStep, ParameterSamples
from capture.folder_tools.convert import FolderWriter
from capture.folder_tools.redact import TokenRedaction, redact_folder

SECRET = "/home/somebody/secret-project"
# Row 1 is padded on the right; the tokens are far from 0, and some come twice.
IDS = [[901, 902, 903, 901, 905, 906], [907, 901, 909, 910, 3, 3]]
MASK = [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
LABELS = [[-100, -100, 903, 901, 905, 906], [-100, 901, 909, 910, -100, -100]]
NEXT = [[902, 903, 901, 905, 906, -1], [901, -100, 910, 3, -1, -1]]
# By argument: what is kept, and what becomes 0.
GEOMETRY: dict[str, Any] = {
    "attention_mask": torch.tensor(MASK),
    "position_ids": torch.arange(6).expand(2, 6).clone(),
    "cu_seq_lens_q": torch.tensor([0, 6, 10], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 6, 10], dtype=torch.int32),
    "max_length_q": torch.tensor(6),
    "token_type_ids": torch.tensor(MASK),
}
NUMBERS = {"advantages": torch.rand(2, 6), "inputs_embeds_extra": torch.ones(2, 6, 3), "mask_of_prompts": torch.ones(2)}
PERMUTED, ZERO = TokenRedaction.PERMUTE, TokenRedaction.ZERO


def make_call(**more: Any) -> CapturedCall:
    values: dict[str, Any] = {
        "tensors": {
            "input_ids": torch.tensor(IDS),
            "labels": torch.tensor(LABELS),
            "shift_labels": torch.tensor(NEXT),
            **GEOMETRY,
            **NUMBERS,
        },
        "call_facts": {
            "prompt": "secret",
            "use_cache": False,
            "nested": {"texts": ["secret", b"secret", 3, 0.5, None]},
        },
        "left_out": {"processor": "mine.Processor"},
        "trains": True,
        "origin": Origin(
            source="",
            rank=1,
            world_size=2,
            step=3,
            time="2026-03-01T09:12:44.000000+00:00",
            model_name=SECRET,
            versions={"torch": "2.13.0"},
        ),
        "outputs": {"loss": 1.5, "log_probs_values": [0.5]},
        "random": {"python": {"version": 3, "state": b"12", "gauss": None}},
        "random_after": {"cpu": b"12"},
        "training": {"model": True, "parts": ["dropout"]},
        "environment": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        "weights": ParameterSamples(samples=(), num_parameters=1, num_frozen=0, is_sharded=False),
        "optimizer_step": 4,
        "step": OptimizerStep(number=4, passes=(2, 3), shares=(0.5, 0.5), grad_norm=2.0, max_norm=1.0),
        "notes": {
            "action_mask": torch.tensor([[1, 1], [0, 1]]),
            "old_log_probs": torch.rand(2, 2),
            LOSS_TARGETS: torch.tensor(NEXT, dtype=torch.int32),
            LOSS_GRADIENTS: torch.rand(2, 6),
            LOSS_MISFIT: torch.rand(1),
        },
        "recording": "2026-03-01T09:00:00+00:00",
        "routes": {"layers.0.gate": torch.ones(12, 2, dtype=torch.int16)},
    }
    return CapturedCall(**(values | more))


def redact(call: CapturedCall, folder: Path, tokens: TokenRedaction = ZERO) -> CapturedCall:
    source = folder / "in"
    source.mkdir(exist_ok=True)
    call.write(source)
    assert redact_folder(source, folder / "out", tokens).refused == {}
    [path] = capture_files(folder / "out")
    return read_call(path)


@pytest.mark.parametrize("tokens", TokenRedaction)
def test_each_part_of_a_call_is_kept_or_goes(tokens: TokenRedaction, tmp_path: Path) -> None:
    call = make_call()
    redacted = redact(call, tmp_path, tokens)
    gone: dict[str, Any] = {"outputs": {}, "random": {}, "random_after": {}, "weights": None, "routes": {}}
    for name, value in gone.items():
        assert getattr(redacted, name) == value, name
    kept = {"format", "left_out", "trains", "training", "environment", "optimizer_step", "recording"}
    for name in kept:
        assert getattr(redacted, name) == getattr(call, name), name
    assert redacted.call_facts == {"prompt": "", "use_cache": False, "nested": {"texts": ["", "", 3, 0.5, None]}}
    assert call.step is not None
    assert redacted.step == OptimizerStep(number=4, passes=(2, 3), shares=(0.5, 0.5), max_norm=1.0)
    origin = redacted.origin
    assert (origin.rank, origin.world_size, origin.step, origin.time) == (1, 2, 3, call.origin.time)
    assert (origin.model_name, origin.versions) == (None, {"torch": "2.13.0"})
    assert redacted.tensors.keys() == call.tensors.keys()
    for name, tensor in GEOMETRY.items():
        assert redacted.tensors[name].equal(tensor), name
    for name, tensor in NUMBERS.items():
        assert redacted.tensors[name].equal(torch.zeros_like(tensor)), name
    # Targets and gradients of the loss tell the tokens.
    assert redacted.notes.keys() == {"action_mask", "old_log_probs"}
    assert redacted.notes["action_mask"].tolist() == [[1, 1], [0, 1]]
    assert not redacted.notes["old_log_probs"].any()
    looked_at = {"call_facts", "step", "origin", "tensors", "notes"}
    assert {field.name for field in fields(CapturedCall)} == gone.keys() | kept | looked_at


@pytest.mark.parametrize("tokens", TokenRedaction)
def test_which_tokens_have_a_label_stays_and_no_label_tells_a_token(tokens: TokenRedaction, tmp_path: Path) -> None:
    redacted = redact(make_call(), tmp_path, tokens)
    labels_BS, next_BS = redacted.tensors["labels"], redacted.tensors["shift_labels"]
    assert (labels_BS == -100).equal(torch.tensor(LABELS) == -100)
    # Any negative number is no label.
    assert next_BS.tolist() == [[0, 0, 0, 0, 0, -100], [0, -100, 0, 0, -100, -100]]
    ids_BS = redacted.tensors["input_ids"]
    assert ids_BS[1, 4:].tolist() == [0, 0]
    labelled_BS = labels_BS != -100
    # Each label was its own position's token, and is the new one.
    assert labels_BS[labelled_BS].equal(ids_BS[labelled_BS])
    if tokens is ZERO:
        assert not ids_BS.any()


@pytest.mark.parametrize("tokens", TokenRedaction)
def test_a_call_without_labels_and_without_a_step_is_redacted_too(tokens: TokenRedaction, tmp_path: Path) -> None:
    """As OpenRLHF's actor is called: the token ids have another name, and an action mask says what counts."""
    tensors = {
        "sequences": torch.tensor(IDS, dtype=torch.int32),
        "attention_mask": torch.tensor(MASK),
        "action_mask": torch.tensor([[1, 1], [0, 1]]),
    }
    redacted = redact(make_call(tensors=tensors, step=None, notes={}), tmp_path, tokens)
    assert (redacted.tensors.keys(), redacted.step, redacted.notes) == (tensors.keys(), None, {})
    ids_BS = redacted.tensors["sequences"]
    assert ids_BS.dtype == torch.int32
    assert redacted.tensors["action_mask"].equal(tensors["action_mask"])
    assert ids_BS.tolist() != IDS
    assert bool(ids_BS.any()) == (tokens is PERMUTED)


def test_segments_become_segments_of_at_most_the_largest_ones_size(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    with FolderWriter(source, segment=2**20) as writer:
        for step in range(8):
            # Rank 0 has a segment of one pass, and rank 1 one of seven.
            origin = replace(make_call().origin, rank=int(step > 0), step=step)
            writer.write(make_call(origin=origin, step=None))
    sizes = sorted(path.stat().st_size for path in source.rglob("*.seg"))
    assert len(sizes) == 2
    assert redact_folder(source, target, ZERO).num_written == 8
    redacted = [path.stat().st_size for path in target.rglob("*.seg")]
    assert len(redacted) == 2
    assert max(redacted) <= sizes[1]
    assert not list(target.rglob("*.pkl"))


@pytest.mark.parametrize("vocabulary_size", [None, 10**6, 10])
def test_permuted_tokens_are_as_often_the_same_and_of_the_vocabulary(
    vocabulary_size: int | None, tmp_path: Path
) -> None:
    """Without a size, or with one that is too small, a vocabulary is as large as the largest id or label needs."""
    (tmp_path / "in").mkdir()
    if vocabulary_size is not None:
        write_actor_config(tmp_path / "in", {"vocab_size": vocabulary_size}, None)
    labels_BS = torch.tensor(LABELS)
    labels_BS[0, 2] = 950
    call = make_call()
    redacted = redact(make_call(tensors={**call.tensors, "labels": labels_BS}), tmp_path, PERMUTED)
    real_BS = torch.tensor(MASK).bool()
    before, after = torch.tensor(IDS)[real_BS].tolist(), redacted.tensors["input_ids"][real_BS].tolist()
    assert sorted(Counter(after).values()) == sorted(Counter(before).values()) == [1] * 7 + [3]
    assert after != before
    limit = 10**6 if vocabulary_size == 10**6 else 951
    # Ten ids of a million are not all among the first thousand.
    assert (max(after) > 951) == (limit == 10**6)
    assert 0 <= min(after) <= max(after) < limit
    assert max(redacted.tensors["labels"].flatten().tolist()) < limit


def test_a_folder_keeps_its_config_without_paths_and_nothing_else_beside_its_captures(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "_name_or_path": "llama",
        "vocab_size": 2000,
        "rope": {"file": SECRET, "factor": 2.0},
        "text_config": {"_name_or_path": "secret", "hidden_size": 8},
        "files": ["C:\\\\secret", "silu", 3, None, True],
    }
    adapters: dict[str, dict[str, object]] = {
        "default": {"base_model_name_or_path": SECRET, "r": 8},
        "other": {"base_model_name_or_path": "secret"},
    }
    write_actor_config(source, config, SECRET, adapters, ["a.weight"], ["a.weight", "b.weight"])
    write_model_facts(
        source,
        ModelFacts(rank=1, recording="", forward=0, trains=True, python="", config={"name": "secret"}),
        stamp="x",
    )
    write_incidents(source, [make_incident("exception", "loop", 3, "secret")], num_others=0, rank=1, stamp="x")
    end = EndRecord(rank=1, world_size=2, num_passes=4, num_steps=4, place="secret", opened="", time="")
    write_end_record(source, end, stamp="x")
    redact(make_call(), tmp_path)
    target = tmp_path / "out"
    assert read_actor_config(target) == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 2000,
        "rope": {"file": "", "factor": 2.0},
        "text_config": {"hidden_size": 8},
        "files": ["", "silu", 3, None, True],
    }
    # The name of the model that an adapter is for is the model's own.
    assert read_adapter_configs(target) == {"default": {"r": 8}, "other": {}}
    assert (read_frozen_names(target), read_parameter_names(target)) == (["a.weight"], ["a.weight", "b.weight"])
    assert json.loads((target / "actor.json").read_text())["model_name"] is None
    names = {path.name.partition("_rank")[0] for path in target.iterdir()}
    assert names == {"actor.json", "actor_inputs", "manifest"}
    assert all(b"somebody" not in path.read_bytes() for path in target.iterdir())
    assert (target.stat().st_mode & 0o777, {path.stat().st_mode & 0o777 for path in target.iterdir()}) == (
        0o700,
        {0o600},
    )


def test_what_was_refused_is_named_and_what_was_blanked_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    make_call(optimizer_step=None).write(source)
    broken = source / "actor_inputs_rank1_20990101_000000_000000_00000009.pkl"
    broken.write_bytes(b"no capture")
    assert main(["redact", str(source), str(tmp_path / "out")]) == 1
    redacted, blanked, refused = capsys.readouterr().out.splitlines()
    assert redacted == f"redacted   1 passes to {tmp_path / 'out'}, tokens: permute"
    names = {*NUMBERS, "shift_labels", "old_log_probs", LOSS_TARGETS, LOSS_GRADIENTS, LOSS_MISFIT}
    assert blanked == f"blanked    {', '.join(sorted(names))}"
    assert refused.startswith(f"refused    {broken.name}")


def test_of_a_step_no_signature_and_no_name_without_gradient_stays(tmp_path: Path) -> None:
    signature = GradientSignature(name="a", shape=(1,), is_part=False, norm=1.0, start=0, stride=1, values=(1.0,))
    step = OptimizerStep(
        number=1,
        passes=(3,),
        shares=(None,),
        signatures=(signature,),
        without_gradient=("b",),
        grad_norm=3.0,
        is_part_of_norm=True,
        unapplied_norm=0.5,
        num_schedule_steps=2,
        state_steps=(1,),
    )
    known = OptimizerStep(
        number=1, passes=(3,), shares=(None,), unapplied_norm=0.5, num_schedule_steps=2, state_steps=(1,)
    )
    assert redact(make_call(step=step), tmp_path).step == known
