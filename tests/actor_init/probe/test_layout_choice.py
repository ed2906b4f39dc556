"""What the probe decides for families that differ in it, and what is then run, against each document alone."""

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig

from actor_init.action_log_probs import action_log_probs
from actor_init.attention.kernel_choice import choose_kernel_name
from actor_init.inputs.packing import prepare_inputs
from actor_init.model import count_parameters
from actor_init.model_form import DocumentBorders, Layout
from actor_init.model_positions import add_model_positions
from actor_init.probe import layout_choice, packing_probe
from actor_init.probe.layout_choice import (
    ONE_DOCUMENT_PER_ROW,
    choose_layout,
    explain_no_slice,
    explain_not_packed,
    find_complaint_of_ranks,
)
from actor_init.probe.packing_probe import LENGTHS, NotProvedError, Probe, make_one_document
from actor_init.probe.small_config import make_small_configs
from actor_init.spec import ActorSpec, Attention, Dtype, UsageError
from actor_init.world import World
from capture.file_format.micro_batch import MicroBatch, Origin
from tests.helpers.commands import run
from tests.helpers.each_alone import BOUND, EachAlone
from tests.helpers.families import RELEASE, tiny_config, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.thread_ranks import CPU, call_on_ranks

PACKED = Layout(packs=True)
MASKED = Layout(packs=True, borders=DocumentBorders.MASK)
DECIDED: dict[str, Layout] = {
    "llama": PACKED,
    "gemma3_text": PACKED,  # sliding beside full attention
    # Chunked beside full attention; the chunks of transformers 5.17 go on over the borders of packed documents.
    "llama4_text": PACKED if RELEASE > (5, 17) else ONE_DOCUMENT_PER_ROW,
    "gpt2": PACKED,  # a table of positions
    "gpt_oss": MASKED,
    "falcon": MASKED,
    "bloom": MASKED,
    "deepseek_v32": PACKED,  # selects the keys that a query sees
    "mamba2": ONE_DOCUMENT_PER_ROW,
    "recurrent_gemma": ONE_DOCUMENT_PER_ROW,  # and sees padding on the left
    "qwen3_next": ONE_DOCUMENT_PER_ROW,  # refuses packed rows without kernels for CUDA
}


def make_spec(**options: Any) -> ActorSpec:
    return ActorSpec(backend="fsdp2", dtype=Dtype.FP32, **options).with_defaults()


@pytest.mark.parametrize("family", DECIDED)
def test_what_is_run_gives_what_each_document_gives_alone(family: str, world: World) -> None:
    config = tiny_config(family)
    alone = EachAlone(config)
    spec, layout = choose_layout(make_spec(), config, world, is_typed=False)
    assert (layout.packs, layout.borders, layout.as_captured) == (
        DECIDED[family].packs,
        DECIDED[family].borders,
        DECIDED[family].as_captured,
    )
    assert spec.packing is layout.packs
    assert bool(layout.why_unusual) is (DECIDED[family] is not PACKED)
    kernel = choose_kernel_name(spec, world.device, config)
    assert alone.off(kernel, layout) <= BOUND
    if layout.why_unusual and "does not run" not in layout.why_unusual:
        # Without the probe the numbers would be wrong.
        assert alone.off(kernel, PACKED) > 0.01


NUMBERED = Layout(packs=True, borders=DocumentBorders.NUMBERS)
PADDED = Layout(packs=False)
BOUND_OF_PROBE = packing_probe.BOUND
WRONG = 2 * BOUND_OF_PROBE
FOUND = "packed documents of llama see each other: a small copy's numbers are 0.002 off"


@pytest.mark.parametrize(
    ("right", "typed", "expected", "why"),
    [
        ([PACKED, MASKED], None, PACKED, ""),
        ([MASKED, NUMBERED], None, MASKED, "its own masks do not see where one begins"),
        ([NUMBERED, ONE_DOCUMENT_PER_ROW], None, NUMBERED, "its own masks do not see where one begins"),
        ([ONE_DOCUMENT_PER_ROW, PADDED], None, ONE_DOCUMENT_PER_ROW, FOUND),
        ([PADDED], None, ONE_DOCUMENT_PER_ROW, f"{FOUND}, and padded rows are not right either"),
        ([PACKED, PADDED], False, PADDED, ""),
        ([PACKED], False, PADDED, "llama sees padding on the left"),
    ],
)
def test_the_first_layout_that_is_right_is_taken_and_what_is_wrong_is_said(
    right: list[Layout], typed: bool | None, expected: Layout, why: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout is right where it is under one seed, and where its error is the bound."""

    def build(config: Any, device: torch.device, seed: int) -> Any:
        def measure_error(kernel: str, layout: Layout) -> float:
            is_right = any(replace(layout, why_unusual="") == other for other in right)
            return BOUND_OF_PROBE if is_right and seed == packing_probe.SEEDS[-1] else WRONG

        return SimpleNamespace(error=measure_error)

    monkeypatch.setattr(layout_choice, "Probe", SimpleNamespace(build=build))
    spec, layout = choose_layout(make_spec(packing=typed), tiny_config("llama"), world, is_typed=typed is not None)
    assert replace(layout, why_unusual="") == expected
    assert layout.why_unusual == why
    assert spec.packs is layout.packs


def test_packing_that_was_typed_is_refused_where_it_is_wrong(world: World) -> None:
    with pytest.raises(UsageError, match=r"packed documents of mamba see each other.* Try: packing=False"):
        choose_layout(make_spec(packing=True), tiny_config("mamba"), world, is_typed=True)


def test_padding_that_was_typed_is_as_captured_and_says_what_the_model_sees(world: World) -> None:
    spec, layout = choose_layout(make_spec(packing=False), tiny_config("rwkv"), world, is_typed=True)
    assert (spec.packs, layout.as_captured, layout.why_unusual) == (False, True, "rwkv sees padding on the left")
    _, layout = choose_layout(make_spec(packing=False), tiny_config("mamba"), world, is_typed=True)
    assert layout == Layout(packs=False)


def test_a_model_of_which_nothing_can_be_proved_is_padded(world: World) -> None:
    config = tiny_config("llama")
    config.hidden_act = "no such"
    _, layout = choose_layout(make_spec(), config, world, is_typed=False)
    assert not layout.packs
    assert "could not be proved that llama keeps packed documents apart: KeyError: 'no such'" in layout.why_unusual


def test_nothing_is_proved_by_a_copy_of_which_one_document_has_numbers_and_others_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = make_one_document()
    ids = batch.sequences_BS[batch.attention_mask_BS].unique()
    build = packing_probe.build_small_model

    def build_with_gaps(*arguments: Any) -> Any:
        model: Any = build(*arguments)
        weight = model.get_input_embeddings().weight.detach()
        numbers = weight[ids].clone()
        weight.fill_(math.nan)
        weight[ids] = numbers
        return model

    monkeypatch.setattr(packing_probe, "build_small_model", build_with_gaps)
    for ring in (False, True):
        with pytest.raises(NotProvedError, match="its log-probs are not finite"):
            Probe.build(tiny_config("llama"), CPU, 1, ring=ring)


def test_the_run_s_random_states_and_the_config_stay_as_they_are(world: World) -> None:
    config = tiny_config("gpt_oss")
    before, state = deepcopy(config.to_dict()), torch.get_rng_state()
    choose_layout(make_spec(), config, world, is_typed=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert config.to_dict() == before


def make_large_llama() -> PretrainedConfig:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    return LlamaConfig(vocab_size=128256, num_hidden_layers=32, **sizes)


def test_a_large_model_is_tried_as_a_narrow_one() -> None:
    small = next(make_small_configs(make_large_llama()))
    assert count_parameters(small) < 3e6
    assert (small.num_hidden_layers, small.num_attention_heads, small.num_key_value_heads) == (2, 2, 1)
    # The kernel sees heads of the same width.
    assert small.head_dim == 128
    assert not explain_not_packed(make_large_llama())


def test_the_copy_has_each_kind_of_layer() -> None:
    small = next(make_small_configs(Gemma3TextConfig(num_hidden_layers=26, sliding_window=4096)))
    assert small.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert small.sliding_window < max(LENGTHS)


def test_a_leak_that_only_a_deep_layer_has_is_found() -> None:
    config = tiny_config("granitemoehybrid", num_hidden_layers=4, layer_types=["full_attention"] * 3 + ["mamba"])
    assert "see each other" in explain_not_packed(config)


def test_documents_whose_positions_go_on_stay_apart_and_keep_them(world: World) -> None:
    config = tiny_config("gpt2")
    model = tiny_model(config, "sdpa")
    ids_BS = torch.arange(3, 15).view(2, 6)
    real_BS = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]).bool()
    batch = MicroBatch(sequences_BS=ids_BS, attention_mask_BS=real_BS, trains=True, origin=Origin(source="tiny"))
    inputs = prepare_inputs(add_model_positions(batch, config), packing=True)
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    with torch.no_grad():
        logits_BSV = model(input_ids=ids_BS, attention_mask=real_BS.long(), use_cache=False).logits
        found_BA = action_log_probs(model, inputs)
    expected_BA = torch.log_softmax(logits_BSV[:, :-1], -1).gather(2, ids_BS[:, 1:, None])[:, :, 0]
    mask_BA = inputs.action_mask_BA
    torch.testing.assert_close(found_BA[mask_BA], expected_BA[mask_BA], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_two_ranks_of_a_ring_refuse_what_they_would_do_wrong() -> None:
    families = ["llama", "gemma3_text", "afmoe", "llama4_text", "mamba"]
    output = run_ranks(["-m", "benchmarks", "packing_families", "--ring", "--only", *families], 2)
    lines = {line.split()[0]: line for line in output.splitlines() if line.startswith(tuple(families))}
    assert all(lines[family].endswith(" packed") for family in families[:3])
    for family in families[3:]:
        assert f"--ring 2 slices packed rows, and {family} does not keep its slices right" in lines[family]


def test_a_ring_refuses_dropout_that_its_kernel_lacks_before_the_actor_opens(tmp_path: Path) -> None:
    config = tiny_config("gpt2", vocab_size=264, n_positions=2048, attn_pdrop=0.1)
    tiny_model(config).save_pretrained(tmp_path / "model")
    process = run(f"replay --model {tmp_path / 'model'} --ring 2 --backend fsdp2 --max-inputs 1", tmp_path / "logs")
    assert (process.returncode, process.stdout) == (2, "")
    says = "--ring 2: gpt2's attention has dropout in training, and ring_gathered has none. Try: no --ring"
    assert f"replay: {says}" in process.stderr.splitlines()
    assert not list((tmp_path / "logs").glob("*"))


def test_no_other_kernel_is_taken_than_was_typed(world: World) -> None:
    spec, _ = choose_layout(make_spec(attention=Attention.EAGER), tiny_config("llama"), world, is_typed=False)
    assert spec.attention == Attention.EAGER


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("ring_gathered"), "its layers have no attention that a ring can replace"),
        (TypeError("forward() got an unexpected keyword argument 'ring'"), "its layers cannot run on a slice"),
        (TypeError("attention() missing 1 required argument: 'ring'"), "its layers do not tell their attention of the"),
        (UsageError("--attention flash needs CUDA. Try: sdpa"), "--attention flash needs CUDA"),
        (KeyError("other"), "its layers cannot run on a slice (KeyError: 'other')"),
    ],
    ids=str,
)
def test_what_a_ring_cannot_slice_is_said_in_words(error: Exception, message: str) -> None:
    assert explain_no_slice(error, "ring_gathered").startswith(message)


@pytest.mark.parametrize(
    ("errors", "why"),
    [
        ([(0.0, 0.0), (0.0, 0.0)], None),
        ([(0.0, 0.9), (0.0, 0.0)], None),
        # Another seed is tried where a rank is not right.
        ([(0.9, 0.0), (0.0, 0.0)], None),
        ([(0.0, 0.0), (0.9, 0.0)], None),
        ([(0.9, 0.9), (0.0, 0.0)], "off"),
        ([(0.0, 0.0), (0.9, 0.9)], "off"),
        # Each rank is right with one seed, and all of them with none.
        ([(0.9, 0.0), (0.0, 0.9)], "off"),
    ],
)
def test_a_ring_is_proved_by_all_ranks_with_one_seed(errors: list[tuple[float, float]], why: str | None) -> None:
    """A rank that went on alone would wait for the others in the next probe's collectives."""
    tried: dict[int, list[int]] = {0: [], 1: []}

    def search_on_rank(world: Any) -> str:
        def find_complaint(seed: int) -> str:
            tried[world.rank].append(seed)
            return "off" if errors[world.rank][seed] > 0.5 else ""

        return find_complaint_of_ranks(world, find_complaint, (0, 1))

    assert call_on_ranks(search_on_rank, [CPU] * 2) == [why or ""] * 2
    assert tried[0] == tried[1] == ([0] if max(errors[0][0], errors[1][0]) < 0.5 else [0, 1])
