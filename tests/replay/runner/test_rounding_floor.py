"""A few passes measure the floors of all; where the kernel has to stay, rows in another order tell nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig, PretrainedConfig

from actor_init.spec import ActorSpec, Attention, Dtype, ParallelSpec
from capture import recording
from replay.command_line.cli import main as replay_main
from replay.options.resolved import ChosenBy
from replay.options.spec import InputsSpec, MeasureSpec
from replay.runner.rounding_floor import (
    RunRepeater,
    compute_floors,
    count_passes_to_measure,
    keep_limits,
    make_rounding_variant,
    measure_step_floors,
)
from replay.tolerances.job_bounds import (
    GRAD_NORM,
    LOG_PROBS,
    LOSS,
    TOKEN_LOG_PROBS,
    TOKENS_RMS,
    NoiseFloor,
    name_signature_floor,
)
from replay.verdict.judge import PassEvidence
from replay.verdict.random_draws import RandomDraws
from replay.verdict.recorded_pass import ReplayedPass
from tests.helpers.made_records import record
from tests.replay.lint.recorded import make_pass as make_recorded_pass
from tests.replay.lint.recorded import make_sample, make_samples
from tests.trainers.common import make_batches, make_model


def repeater_of(must_keep_padding: bool = False, **actor: Any) -> RunRepeater:
    spec = SimpleNamespace(
        actor=ActorSpec(attention=Attention.SDPA, backend="fsdp2", **actor),
        source=SimpleNamespace(config=LlamaConfig()),
        find_chooser=lambda setting: ChosenBy.MACHINE,
    )
    parts: dict[str, Any] = {
        "world": None,
        "spec": spec,
        "selection": SimpleNamespace(must_keep_padding=must_keep_padding),
        "tracker": None,
        "weight_checker": None,
        "dropout": (),
    }
    return RunRepeater(**{name: cast(Any, part) for name, part in parts.items()})


def make_resolved(device: str, **actor: Any) -> Any:
    return SimpleNamespace(
        actor=ActorSpec(backend="fsdp2", **{"dtype": Dtype.BF16, **actor}),
        source=SimpleNamespace(config=LlamaConfig(num_attention_heads=1, num_hidden_layers=1)),
        inputs=InputsSpec(),
        measure=MeasureSpec(),
        device=torch.device(device),
        find_chooser=lambda _: None,
        derive_variant=lambda world, **parts: SimpleNamespace(**parts),
    )


def test_a_plain_replay_has_another_kernel() -> None:
    assert repeater_of().why_kernel_must_stay is None


@pytest.mark.parametrize("parallel", [{"ring": 2}, {"tp": 2, "sequence_parallel": True}])
def test_ranks_that_share_a_row_have_no_other_kernel(parallel: dict[str, Any]) -> None:
    repeater = repeater_of(parallel=ParallelSpec(**parallel), packing=True)
    assert repeater.why_kernel_must_stay == "attention that ranks share has no other kernel"
    assert repeater.keeps_kernel


def test_padding_that_predicts_keeps_the_kernel() -> None:
    why = repeater_of(must_keep_padding=True, packing=False).why_kernel_must_stay
    assert why is not None
    assert "padding that predicts a label" in why


@pytest.mark.parametrize(("window", "inputs", "measured"), [(1, 40, 4), (2, 40, 4), (3, 40, 3), (8, 40, 8), (1, 2, 2)])
def test_at_most_four_passes_are_measured_or_one_window(window: int, inputs: int, measured: int) -> None:
    spec = cast(Any, SimpleNamespace(actor=SimpleNamespace(resolved_grad_accumulation=window)))
    assert count_passes_to_measure(spec, inputs) == measured


def make_pass(index: int, loss: float) -> PassEvidence:
    """A pass of one rank, each of which ends with a step."""
    return PassEvidence(record(index, loss=loss, num_steps=index), None, ReplayedPass(draws=NO_DRAWS))


# A forward without dropout, which leaves the generators where they were.
NO_DRAWS = RandomDraws(before={"cpu": b"state"}, after={"cpu": b"state"})


def make_stepping_spec() -> Any:
    return SimpleNamespace(actor=ActorSpec(backend="ddp", grad_accumulation=1, packing=False), inputs=InputsSpec())


def make_repeater(make_repeated_pass: Callable[[int], PassEvidence]) -> Any:
    """Make what repeats the first of ten inputs, each with the pass that `make_repeated_pass` makes for its index."""
    return SimpleNamespace(
        spec=make_stepping_spec(),
        selection=SimpleNamespace(inputs=range(10)),
        dropout=(),
        make_rounding_variant=lambda passes: make_stepping_spec(),
        replay_inputs=lambda variant, number: list(map(make_repeated_pass, range(number))),
    )


def test_behind_the_measured_passes_a_floor_grows_as_the_number_of_steps() -> None:
    repeater = make_repeater(lambda index: make_pass(index, 2.0 * (1 + 1e-3 * index)))
    floors, num_run = measure_step_floors(repeater, [make_pass(index, 2.0) for index in range(10)])
    assert num_run == 4
    # Of a loss there is one value a pass, so the largest of all measured ones counts for each of them.
    assert [floors[index][LOSS].value for index in (0, 3, 6, 9)] == pytest.approx([3e-3, 3e-3, 6e-3, 9e-3])


def make_token_pass(index: int, *log_probs: float | None, rank: int = 0) -> PassEvidence:
    replayed = ReplayedPass(log_probs_at_recorded_positions=log_probs, draws=NO_DRAWS)
    return PassEvidence(record(index, loss=None, num_steps=index, rank=rank), None, replayed)


def test_of_tokens_a_step_lets_the_floor_drift_and_before_it_nothing_does() -> None:
    repeater = make_repeater(lambda index: make_token_pass(index, -0.5 - 1e-3 * (index + 1)))
    floors, _ = measure_step_floors(repeater, [make_token_pass(index, -0.5) for index in range(10)])
    drift = 3.0  # as docs/tolerances.md has it
    # Behind the last pass that was measured, with three steps before it, six steps are twice as many.
    expected = {0: 1e-3, 1: 2e-3 * drift, 3: 4e-3 * drift, 6: 2 * 4e-3 * drift}
    assert {index: floors[index][TOKEN_LOG_PROBS].value for index in expected} == pytest.approx(expected)


def test_a_floor_is_the_largest_difference_of_passes_with_the_same_place() -> None:
    passes = [make_token_pass(0, -0.5, None, -0.25), make_token_pass(0, -0.5, rank=1), make_token_pass(2, -0.5)]
    others = [
        make_token_pass(1, -9.0),  # of another pass
        make_token_pass(0, -0.5, rank=1),
        make_token_pass(0, -0.5 - 3e-3, -9.0, -0.25 + 4e-3),
    ]
    floors = compute_floors(passes, others)
    assert set(floors) == {TOKEN_LOG_PROBS, TOKENS_RMS}
    assert floors[TOKEN_LOG_PROBS].value == pytest.approx(4e-3)
    assert floors[TOKEN_LOG_PROBS].num_values == 3
    assert floors[TOKENS_RMS].value == pytest.approx(((3e-3**2 + 4e-3**2) / 3) ** 0.5)


def test_a_rows_floor_is_of_its_mean_log_prob_and_no_rank_is_left_out() -> None:
    def make_rows(rank: int, sums: list[float], tokens: list[int], loss: float, norm: float | None) -> PassEvidence:
        made = record(0, rank=rank, row_log_probs=sums, row_action_tokens=tokens, loss=loss, grad_norm=norm)
        return PassEvidence(made, None, ReplayedPass())

    passes = [make_rows(0, [-2.0, 0.0], [4, 0], 0.5, 2.0), make_rows(1, [-2.0], [2], 0.5, None)]
    others = [make_rows(0, [-2.08, 5.0], [4, 0], 0.5 + 1e-3, 2.5), make_rows(1, [-2.06], [2], 0.5 + 2e-3, 9.0)]
    floors = compute_floors(passes, others)
    # 0.08 over 4 tokens, and 0.06 over 2; a row without a token of the loss has none.
    assert floors[LOG_PROBS].value == pytest.approx(0.03)
    assert floors[LOG_PROBS].num_values == 2
    assert floors[LOSS].value == pytest.approx(2e-3)
    assert floors[GRAD_NORM].value == pytest.approx(0.25)
    assert floors[GRAD_NORM].num_values == 1


@pytest.mark.parametrize(("changed_at", "num_measured"), [(0, 4), (1, 4), (5, 8), (9, 10)])
def test_passes_behind_a_change_of_what_is_trained_are_measured_too(changed_at: int, num_measured: int) -> None:
    frozen = [int(index < changed_at) for index in range(10)]
    passes = [
        PassEvidence(
            record(index, loss=2.0, num_steps=index),
            make_recorded_pass(number=index, weights=make_samples(make_sample(), num_frozen=number)),
            ReplayedPass(draws=NO_DRAWS),
        )
        for index, number in enumerate(frozen)
    ]
    repeater = make_repeater(lambda index: make_pass(index, 2.0))
    assert measure_step_floors(repeater, passes)[1] == num_measured


@pytest.mark.parametrize(
    ("dtype", "other_dtype", "own", "keeps_all"),
    [
        (Dtype.BF16, Dtype.BF16, {"model": "net.py:build"}, False),
        (Dtype.BF16, Dtype.FP32, {"model": "net.py:build"}, False),
        (Dtype.FP32, Dtype.FP32, {"model": "net.py:build"}, True),
        (Dtype.BF16, Dtype.BF16, {}, True),
    ],
)
def test_of_a_users_model_in_bf16_the_sums_over_rows_alone_are_limits(
    dtype: Dtype, other_dtype: Dtype, own: dict[str, Any], keeps_all: bool
) -> None:
    """Its rows in another order are the same numbers, and the job's other casts would not be."""
    spec, variant = (SimpleNamespace(actor=ActorSpec(backend="fsdp2", dtype=d, **own)) for d in (dtype, other_dtype))
    measured = NoiseFloor(value=0.1, num_values=9)
    floors = {TOKENS_RMS: measured, name_signature_floor("w"): measured}
    kept = keep_limits(floors, cast(Any, spec), cast(Any, variant))
    assert kept == (floors if keeps_all else {name_signature_floor("w"): replace(measured, is_least=True)})


@pytest.mark.parametrize(
    ("device", "dtype", "measured"),
    [("cpu", Dtype.BF16, Dtype.FP32), ("cuda", Dtype.BF16, Dtype.BF16), ("cpu", Dtype.FP32, Dtype.FP32)],
)
def test_on_a_cpu_a_users_model_in_bf16_is_held_against_itself_in_fp32(
    device: str, dtype: Dtype, measured: Dtype
) -> None:
    """There LayerNorm adds up a bias's gradient over all tokens in bf16: rows in another order are as far off."""
    spec = make_resolved(device, model="net.py:build", dtype=dtype)
    variant = make_rounding_variant(spec, [], cast(Any, None), has_dropout=False, keeps_kernel=False)
    assert (variant.actor.dtype, variant.inputs.reverse_rows) == (measured, True)


@pytest.mark.parametrize(
    ("fed_tokens", "packs", "typed", "recomputes"),
    [
        (2_000, False, False, False),
        # 2^14 tokens of two rows are 2^27 pairs a head and layer; of one packed row they are twice as many.
        (2**14, False, False, False),
        (2**14, True, False, True),
        (2**15, False, False, True),
        (2_000, False, True, True),
    ],
)
def test_scores_of_the_eager_kernel_are_computed_again_only_where_they_are_many(
    fed_tokens: int, packs: bool, typed: bool, recomputes: bool
) -> None:
    spec = make_resolved("cpu", attention=Attention.SDPA, packing=packs, gradient_checkpointing=typed)
    made = record(0)
    passes = [
        PassEvidence(replace(made, input=replace(made.input, fed_tokens=fed_tokens, rows=2)), None, ReplayedPass())
    ]
    variant = make_rounding_variant(spec, passes, cast(Any, None), has_dropout=False, keeps_kernel=False)
    assert variant.actor.attention == Attention.EAGER
    assert variant.actor.gradient_checkpointing is recomputes


@pytest.mark.parametrize(("config", "other"), [(LlamaConfig(), Attention.SDPA), (GptOssConfig(), Attention.EAGER)])
def test_flex_attention_is_held_against_a_kernel_that_the_model_has(config: PretrainedConfig, other: str) -> None:
    spec = make_resolved("cuda", attention=Attention.FLEX)
    spec.source.config = config
    passes = [PassEvidence(record(0), None, ReplayedPass())]
    variant = make_rounding_variant(spec, passes, cast(Any, None), has_dropout=False, keeps_kernel=False)
    assert variant.actor.attention == other


@pytest.mark.parametrize(
    ("gradient_factor", "dtype", "measures"), [(1.0, "fp32", False), (1.5, "fp32", True), (1.0, "bf16", True)]
)
def test_in_fp32_what_agrees_without_a_floor_needs_none(
    gradient_factor: float,
    dtype: str,
    measures: bool,
    tmp_path: Path,
    one_world: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model: Any = make_model(tmp_path, saves=False)
    model.save_pretrained(tmp_path / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with recording(model, tmp_path / "captures", reproduce=True):
        for batch in make_batches(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                loss = model(**batch).loss
            (loss * gradient_factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    command = [
        "--inputs",
        str(tmp_path / "captures"),
        "--model",
        str(tmp_path / "model"),
        "--log-folder",
        str(tmp_path),
    ]

    replay_main([*command, "--backend", "ddp"])

    out = capsys.readouterr().out
    assert f"verdict    {'DIFFERS' if gradient_factor != 1.0 else 'REPRODUCED'}" in out
    assert ("for the rounding floor" in out) == measures
