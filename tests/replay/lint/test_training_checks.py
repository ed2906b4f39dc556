"""What the checks say of what was trained, each of a seeded fault, and nothing of the sound recording beside it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from capture.file_format.end_record import EndRecord
from capture.file_format.micro_batch import LOSS_GRADIENTS
from capture.file_format.optimizer_state import StateSample
from replay.lint.lint import lint
from replay.lint.remark import LintSubject, Weight
from replay.verdict.random_draws import RandomDraws
from replay.verdict.recorded_pass import RecordedPass, WeightComparison
from tests.replay.lint.recorded import make_pass, make_rows, make_sample, make_samples, make_step, say


def make_passes(number: int = 3, *, rank: int = 0, **values: Any) -> list[RecordedPass]:
    return [make_pass(rank=rank, number=place, **values) for place in range(number)]


def test_nothing_is_said_of_a_sound_training() -> None:
    assert say([*make_passes(), *make_passes(rank=1)], is_whole=True) == []


def test_a_job_without_steps_is_said_only_of_a_whole_recording() -> None:
    passes = make_passes(step=None, optimizer_step=0, weights=make_samples(make_sample()))
    assert say(passes) == []
    [text] = say(passes, is_whole=True)
    assert text.startswith("trained: no optimizer step was recorded in 3 training passes, and none of 1 sampled ")


def test_passes_that_go_into_no_step_are_said_if_they_are_more_than_a_step_takes() -> None:
    """As where a guard leaves out each step from the third on. A job that was cut short leaves fewer."""
    stepping = [make_pass(number=place, step=make_step(passes=(place,), shares=(1.0,))) for place in range(2)]
    left = [make_pass(number=place, step=None, optimizer_step=2) for place in range(2, 5)]
    assert say([*stepping, *left[:1]], is_whole=True) == []
    assert say([*stepping, *left]) == []
    [text] = say([*stepping, *left], is_whole=True)
    assert text.startswith("trained: the last 3 of 5 training passes go into no step: the job took none after step 2")


def test_a_tie_that_the_adapter_breaks_is_a_note() -> None:
    subject = LintSubject(passes=make_passes(), has_adapter=True, broken_ties=[(["lm_head"], ["model.embed_tokens"])])
    [remark] = lint(subject)
    assert f"{remark.topic}: {remark.text}" == (
        "adapter: lm_head is trained by itself, and model.embed_tokens, which it is tied to in the model, is not: the "
        "tie is broken (PEFT keeps it with ensure_weight_tying)"
    )
    assert remark.weight is not Weight.FACT
    [both] = say(make_passes(), has_adapter=True, broken_ties=[(["model.embed_tokens", "lm_head"], [])])
    assert both.startswith("adapter: model.embed_tokens and lm_head, which are tied in the model, are each trained by")


def test_clipping_by_another_rule_than_the_length_is_said() -> None:
    clipped = [make_pass(number=place, step=make_step(place, clips_otherwise=place > 0)) for place in range(3)]
    [text] = say(clipped)
    assert text.startswith("clipping: gradients are clipped by another rule than to their length, in 2 of 3 steps")


def test_clipping_that_found_no_gradient_is_said() -> None:
    said = (
        "clipping: clipping to a norm of 0.5 found no gradient in 1 of 2 steps and changed nothing: it came before the "
        "backward, was given no parameter (a generator that was used up), or an engine holds the gradients"
    )

    def say_of(**values: Any) -> list[str]:
        return say([make_pass(step=make_step(**values)), make_pass(number=1)])

    assert say_of(unapplied_norm=0.5) == [said]
    assert say_of(unapplied_norm=0.5, max_norm=1.0) == [f"{said}; the gradient was clipped to 1 elsewhere"]
    assert say_of(unapplied_norm=0.5, max_norm=0.5) == say_of(max_norm=0.5) == []


def test_steps_without_a_recorded_forward_are_said() -> None:
    known: dict[str, Any] = {"world_size": 2, "num_passes": 4, "num_steps": 2, "place": "", "opened": "", "time": ""}
    ends = [EndRecord(rank=rank, num_unseen_steps=3, unseen_after=3 + rank, **known) for rank in (0, 1)]
    [text] = say(make_passes(), ends=ends)
    assert text.startswith("steps: the optimizer stepped 3 times without a recorded forward, first after forward 3: ")
    assert say(make_passes(), ends=[EndRecord(rank=0, **known)]) == []


def test_clipping_after_the_step_is_said() -> None:
    known: dict[str, Any] = {"world_size": 1, "num_passes": 4, "num_steps": 4, "place": "", "opened": "", "time": ""}
    ends = [EndRecord(rank=0, num_late_clippings=4, **known)]
    assert say(make_passes(), ends=ends) == [
        "clipping: gradients are clipped after the step, in 4 steps, and not before it, so the step is not clipped"
    ]
    assert say(make_passes(), ends=[EndRecord(rank=0, **known)]) == []


def test_a_rate_of_0_is_said() -> None:
    step = make_step(settings=({"lr": 0.0, "num_parameters": 1},))
    assert say(make_passes(1, step=step)) == ["trained: the learning rate was 0 in the 1 recorded step"]


def test_ranks_with_gradient_norms_of_their_own_are_said() -> None:
    def say_of_norms(*norms: float, **values: Any) -> list[str]:
        return say([make_pass(rank=rank, step=make_step(grad_norm=norm, **values)) for rank, norm in enumerate(norms)])

    assert say_of_norms(1.09, 1.0900001) == []
    assert say_of_norms(1.09, 0.71, is_part_of_norm=True) == []
    said = (
        "ranks: each rank had a gradient norm of its own in 1 of 1 step, as in step 1: 1.09 on rank 0, 0.71 on rank 1"
    )
    assert say_of_norms(1.09, 0.71) == [said]


def test_norms_of_ranks_that_hold_parts_of_parameters_are_not_compared() -> None:
    passes = [make_pass(rank=rank, step=make_step(grad_norm=1.0 + rank)) for rank in (0, 1)]
    assert say([replace(recorded, weight_comparison=WeightComparison(is_sharded=True)) for recorded in passes]) == []
    sliced = replace(make_sample(), shape=(4,))
    of_tp = make_pass(rank=1, step=make_step(grad_norm=2.0), weights=make_samples(sliced))
    assert say([passes[0], of_tp]) == []


def test_parameters_that_never_had_a_gradient_are_said_by_pattern() -> None:
    names = [f"layers.{layer}.{part}.weight" for layer in range(3) for part in ("q", "v")]
    weights = make_samples(*(make_sample(name) for name in names))
    gradients = make_samples(*(make_sample(name) for name in names if "q" in name))
    without = tuple(name for name in names if "v" in name)
    step = make_step(gradients=gradients, without_gradient=without, settings=({"lr": 1e-3, "num_parameters": 6},))
    texts = say([make_pass(step=step, weights=weights)])
    assert texts == ["gradients: 3 trainable parameters had no gradient in 1 step: layers.*.v.weight"]
    later = make_step(1, gradients=weights, settings=step.settings)
    assert say([make_pass(step=step, weights=weights), make_pass(number=1, step=later, weights=weights)]) == [
        "trained: none of 6 sampled parameters moved in 2 recorded steps"
    ]


def test_dropout_that_a_model_in_eval_mode_does_not_do_is_said() -> None:
    passes = make_passes(2, training={"model": False, "parts": []})
    assert say(passes) == []  # there is no dropout
    said = "dropout: the model was in eval mode in 2 of 2 training passes, so its attn_pdrop did nothing"
    assert say(passes, dropout=["attn_pdrop"]) == [said]
    assert say(make_passes(2, training={"model": True, "parts": []}), dropout=["attn_pdrop"]) == []
    texts = say(make_passes(2, training={"model": True, "parts": ["h.0"]}), dropout=["attn_pdrop"])
    assert texts == ["dropout: parts of the model were in eval mode while it trained: h.0"]


def test_passes_of_different_steps_that_draw_the_same_random_numbers_are_said() -> None:
    def say_of_states(*states: tuple[bytes, bytes], steps: tuple[int, ...] = (0, 1, 2)) -> list[str]:
        passes = [
            replace(recorded, num_steps_before=step, draws=RandomDraws(before={"cpu": before}, after={"cpu": after}))
            for recorded, step, (before, after) in zip(make_passes(), steps, states, strict=True)
        ]
        return [text for text in say(passes) if text.startswith("dropout")]

    assert say_of_states((b"a", b"b"), (b"b", b"c"), (b"c", b"d")) == []
    assert say_of_states((b"a", b"b"), (b"c", b"d"), (b"a", b"b")) == [
        "dropout: 2 of 3 passes that drew random numbers began with the random state of a pass of another step, as "
        "forwards 0, 2 did: masks repeat. Does something seed inside the loop?"
    ]
    assert say_of_states((b"a", b"a"), (b"a", b"a"), (b"a", b"a")) == []  # nothing was drawn
    assert say_of_states((b"a", b"b"), (b"c", b"d"), (b"a", b"b"), steps=(0, 1, 0)) == []


@pytest.mark.parametrize(
    ("states", "has_same_rows", "says"),
    [
        (((b"a", b"b"), (b"a", b"c")), False, True),
        (((b"a", b"b"), (b"d", b"c")), False, False),
        # Ranks of tensor parallelism; and nothing was drawn.
        (((b"a", b"b"), (b"a", b"b")), True, False),
        (((b"a", b"a"), (b"a", b"a")), False, False),
    ],
)
def test_ranks_that_draw_the_same_random_numbers_for_other_rows_are_said(
    states: tuple[tuple[bytes, bytes], ...], has_same_rows: bool, says: bool
) -> None:
    passes = [
        replace(
            make_pass(make_rows([9, 12, 10], seed=0 if has_same_rows else rank), rank=rank),
            draws=RandomDraws(before={"cpu": before}, after={"cpu": after}),
        )
        for rank, (before, after) in enumerate(states)
    ]
    texts = [text for text in say(passes) if text.startswith("dropout")]
    said = "dropout: ranks 0, 1, which are fed other rows, began passes with one random state in 1 of 1 step, so that"
    assert [text.startswith(said) for text in texts] == [True] * says


@pytest.mark.parametrize(
    ("dtype", "moment", "values", "is_said"),
    [
        ("bfloat16", 0.5, {}, True),
        ("float32", 0.5, {}, False),
        ("bfloat16", 0.1, {}, False),  # of masters: bf16 does not hold it
        ("bfloat16", 0.0, {}, False),  # which tells nothing
        ("bfloat16", 0.5, {"library": "deepspeed"}, False),
        ("bfloat16", 0.5, {"optimizer": "SGD"}, False),
    ],
)
def test_weights_in_bf16_that_adam_steps_without_masters_are_said(
    dtype: str, moment: float, values: dict[str, Any], is_said: bool
) -> None:
    name = "layers.0.weight"
    moments = {"exp_avg": (moment,) * 3, "exp_avg_sq": (moment,) * 3}
    state = (StateSample(name=name, shape=(8,), start=0, values=moments),)
    passes = [
        make_pass(
            number=number,
            step=make_step(number, state=state, **values),
            weights=make_samples(make_sample(name, 1.0 + number, dtype)),
        )
        for number in range(2)
    ]
    texts = say(passes)
    assert [text.partition(":")[0] for text in texts] == ["precision"] * is_said


def test_passes_that_went_into_a_step_and_were_not_kept_are_said_of_a_whole_recording() -> None:
    passes = [make_pass(number=3, step=make_step(passes=(0, 1, 2, 3), shares=(0.25,) * 4))]
    assert say(passes) == []
    assert say(passes, is_whole=True, not_recorded={"given a cache of earlier tokens": 3}) == []
    [text] = say(passes, is_whole=True)
    assert text.startswith("passes: 3 of 4 training passes that went into recorded steps were not kept")


def test_the_model_folders_other_config_is_said() -> None:
    texts = say(make_passes(), config_differences=["rope_theta 1 in the job, 2 here"] * 5)
    three = "; ".join(["rope_theta 1 in the job, 2 here"] * 3)
    assert texts == [f"config: the model folder's is not the job's: {three} and 2 more"]


def test_other_code_that_no_number_shows_is_said() -> None:
    other = "the source of net.py:rotary in the job is not that of net.py here"
    assert say(make_passes(), code_differences=[other]) == [f"model: {other}; yet all numbers that were judged agree"]


def test_frozen_parameters_and_other_dtypes_are_facts() -> None:
    names = [f"layers.{layer}.weight" for layer in range(3)]
    samples = [make_sample(name, dtype="float32" if name.startswith("layers.1") else "bfloat16") for name in names]
    passes = [make_pass(weights=make_samples(*samples, num_frozen=2), step=None)]
    assert say(passes, frozen=["embed.weight", "head.weight"]) == [
        "frozen: 2 of 5 parameters were not trained: embed.weight, head.weight",
        "dtypes: sampled parameters are 2 bfloat16, 1 float32: layers.1.weight are other than the rest",
    ]
    assert say(passes, has_adapter=True) == []
    passes.append(make_pass(weights=make_samples(*samples), number=1, step=None))
    [remark, *_] = say(passes, frozen=["embed.weight", "head.weight"])
    assert remark == "frozen: 2 of 5 parameters were not trained at first: embed.weight, head.weight; 0 later"


@pytest.mark.parametrize(
    ("frozen", "says"),
    [((1, 10, 11), True), ((0, 1, 10, 11), True), ((0, 1), False), ((10, 11), False), ((1, 11), False)],
)
def test_layers_that_are_frozen_by_the_beginning_of_a_number_are_said(frozen: tuple[int, ...], says: bool) -> None:
    names = [f"layers.{layer}.weight" for layer in range(12)]
    passes = [make_pass(weights=make_samples(*map(make_sample, names), num_frozen=len(frozen)), step=None)]
    texts = say(passes, frozen=[names[layer] for layer in frozen])
    assert any("the numbers begin alike" in text for text in texts) == says


@pytest.mark.parametrize(("decays", "says"), [((0.1,), True), ((0.1, 0.0), False), ((0.0,), False)])
def test_a_decay_of_norms_is_a_fact(decays: tuple[float, ...], says: bool) -> None:
    settings = tuple({"lr": 1e-3, "weight_decay": decay, "num_parameters": 1} for decay in decays)
    weights = make_samples(make_sample("norm.weight"))
    found = [text for text in say(make_passes(step=make_step(settings=settings), weights=weights)) if "decay" in text]
    assert found == (["decay: weight decay 0.1 acts on all parameters, on norm.weight, too"] if says else [])


@pytest.mark.parametrize(("decaying", "says"), [("1", True), ("0", False), ("0-1", False)])
def test_a_decay_of_norms_alone_is_a_note(decaying: str, says: bool) -> None:
    """As where the test for the group without decay is negated."""
    rest = {"0": "1", "1": "0", "0-1": ""}[decaying]
    settings = (
        {"lr": 1e-3, "weight_decay": 0.1, "num_parameters": 1, "parameters": decaying},
        {"lr": 1e-3, "weight_decay": 0.0, "num_parameters": 1, "parameters": rest},
    )
    weights = make_samples(make_sample("up.weight", shape=(4, 4)), make_sample("norm.weight"))
    passes = make_passes(step=make_step(settings=settings), weights=weights)
    text = "decay: weight decay acts on norms or biases alone (norm.weight) and on no matrix: are the groups swapped?"
    assert (text in say(passes, parameter_names=["up.weight", "norm.weight"])) is says
    # Without the names of what a group's numbers stand for nothing is known.
    assert text not in say(passes)


@pytest.mark.parametrize(("decay", "weights"), [(0.1, [Weight.SETTING]), (0.01, [])])
def test_a_decay_that_was_chosen_is_worth_a_note(decay: float, weights: list[Weight]) -> None:
    step = make_step(settings=({"lr": 1e-3, "weight_decay": decay, "num_parameters": 1},))
    passes = make_passes(step=step, weights=make_samples(make_sample("norm.weight")))
    assert [remark.weight for remark in lint(LintSubject(passes=passes)) if remark.topic == "decay"] == weights


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ((0.3, 0.2, 0.1), (0.3, 0.2, 0.1), None),
        ((0.3, 0.3, 0.3), (0.1, 0.1, 0.1), None),
        ((0.3, 0.2, 0.1), (0.3, 0.3, 0.3), "is 0.3 in all 3 recorded steps, while a schedule changes others'"),
        ((0.3, 0.3, 0.3), (0.0, 0.0, 0.0), "is 0 in all 3 recorded steps, and others' is not"),
        ((0.3, 0.2), (0.3, 0.3), None),
    ],
)
def test_a_rate_that_a_schedule_leaves_out_is_said(
    first: tuple[float, ...], second: tuple[float, ...], text: str | None
) -> None:
    passes = []
    for number, rates in enumerate(zip(first, second, strict=True)):
        groups = tuple({"lr": rate, "num_parameters": 1, "parameters": str(place)} for place, rate in enumerate(rates))
        passes.append(make_pass(number=number, step=make_step(number, settings=groups)))
    found = [said for said in say(passes, parameter_names=["head.weight", "norm.weight"]) if "learning rate: " in said]
    assert len(found) == (text is not None)
    assert all(f"learning rate: the rate of norm.weight {text}" in said for said in found)


@pytest.mark.parametrize(("shares", "is_said"), [((1.0,), True), ((None,), False)])
def test_gradients_that_are_emptied_before_each_step_are_said(shares: tuple[float | None], is_said: bool) -> None:
    """Without a backward of the loss, as where another loss is differentiated, it is not known where they went."""
    passes = [
        make_pass(number=place, step=make_step(place, shares=shares, without_gradient=("layers.0.weight",)))
        for place in range(3)
    ]
    [text] = [text for text in say(passes) if text.startswith("gradients: ")]
    assert text.startswith("gradients: no parameter had a gradient in 3 steps, though the losses") is is_said


@pytest.mark.parametrize(("numbers", "says"), [((0, 1, 1), False), ((0, 4, 4), True)])
def test_a_schedule_that_is_stepped_by_each_micro_batch_is_said(numbers: tuple[int, ...], says: bool) -> None:
    passes = [
        make_pass(number=place, step=make_step(place, num_schedule_steps=number))
        for place, number in enumerate(numbers)
    ]
    told = "learning rate: its schedule was stepped 4 times between two optimizer steps, in 2 of 3"
    assert [text for text in say(passes) if text.startswith("learning rate")] == ([told] if says else [])


@pytest.mark.parametrize(
    ("rates", "counts", "given", "says"),
    [
        ([0.0, 0.00025], (8,), [0.0009], "(0 at the first step here, 0.0009 in the state of 8 steps)"),
        ([0.0001, 0.0002], (8,), [0.0009], "(0.0001 at the first step here, 0.0009 in the state of 8 steps)"),
        ([0.0, 0.00025], (8,), [], "(0 at the first step here, with the optimizer's state of 8 steps)"),
        ([0.0], (8,), [0.0009], "(0 at the first step here, 0.0009 in the state of 8 steps)"),
        # It goes on, is smaller than the state's for good, or is of an optimizer that has not stepped.
        ([0.0009, 0.00095], (8,), [0.0009], ""),
        ([0.0001, 0.0001], (8,), [0.0009], ""),
        ([0.0002, 0.0001], (8,), [0.0009], ""),
        ([0.0, 0.00025], (), [], ""),
    ],
)
def test_a_schedule_that_begins_anew_behind_a_restart_is_said(
    rates: list[float], counts: tuple[int, ...], given: list[float], says: str
) -> None:
    passes = [
        make_pass(
            number=number, step=make_step(number, settings=({"lr": rate, "num_parameters": 1},), state_steps=counts)
        )
        for number, rate in enumerate(rates)
    ]
    told = [f"learning rate: it begins anew {says}: was the schedule restored?"] if says else []
    assert [text for text in say(passes, given_rates=given) if text.startswith("learning rate")] == told


@pytest.mark.parametrize(
    ("counts", "values", "says"),
    [
        ([None, 7, 8], {}, "7 steps before step 2, and the optimizer 1"),
        # It is stepped once for each of two ranks.
        ([None, 14, 16], {}, "14 steps before step 2, and the optimizer 1"),
        ([None, 7], {"num_schedule_steps": 1}, "7 steps before step 2, and the optimizer 1"),
        ([None, 43, 44], {"dtype": "float16"}, "43 steps before step 2, and the optimizer 1"),
        # Its own beginning, by steps, ranks and micro-batches; a schedule that is stepped before the first step.
        ([None, 1, 2], {}, ""),
        ([None, 2, 4], {}, ""),
        ([4, 8, 12], {}, ""),
        ([1, 2, 3], {}, ""),
        # Steps that fp16 left out; a schedule of epochs; a restored state; an optimizer without one.
        ([None, 17, 18], {"dtype": "float16"}, ""),
        ([None, 7, 7], {}, ""),
        ([None, 7, 8], {"counted": 6}, ""),
        ([None, 7, 8], {"settings": ({"lr": 1e-3, "num_parameters": 1},)}, ""),
        ([None, 7, 9, 10], {}, ""),
    ],
)
def test_a_schedule_that_goes_on_without_the_optimizers_state_is_said(
    counts: list[int | None], values: dict[str, Any], says: str
) -> None:
    settings = ({"lr": 1e-3, "betas": [0.9, 0.999], "num_parameters": 1},)
    counted, dtype = values.pop("counted", 0), values.pop("dtype", "float32")
    passes = []
    for number, count in enumerate(counts):
        known = {"settings": settings, "has_state": counted + number > 0, "schedule_count": count} | values
        known |= {"state_steps": (counted + number,)} if counted + number else {}
        weights = make_samples(make_sample(value=1.0 + number, dtype=dtype))
        passes.append(make_pass(number=number, step=make_step(number, **known), weights=weights))
    told = [text for text in say(passes) if "in the midst of the schedule" in text]
    assert len(told) == bool(says)
    assert all(text.startswith(f"learning rate: its schedule had counted {says}: ") for text in told)


@pytest.mark.parametrize(
    ("settings", "optimizer", "says"),
    [
        ({"betas": [0.999, 0.9]}, "AdamW", "the betas of AdamW are 0.999 and 0.9: are they swapped?"),
        ({"betas": [0.95, 0.95], "eps": 1e-5}, "AdamW", ""),
        ({"eps": 0.1}, "Adam", "eps of Adam is 0.1, more than the gradients that it is added to"),
        ({"lr": 3.0}, "AdamW", "the learning rate of AdamW is 3: a step moves weights by as much"),
        ({"lr": 3.0}, "SGD", ""),
        ({"maximize": True}, "SGD", "SGD maximises (maximize=True): each step makes the loss larger"),
    ],
)
def test_settings_that_nobody_means_are_said(settings: dict[str, Any], optimizer: str, says: str) -> None:
    """They are said once, however many steps have them."""
    group = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "maximize": False, "num_parameters": 1} | settings
    passes = [
        make_pass(number=number, step=make_step(number, settings=(group,), optimizer=optimizer)) for number in range(2)
    ]
    told = [f"settings: {says}"] if says else []
    assert [text for text in say(passes) if text.startswith("settings")] == told


@pytest.mark.parametrize(
    ("dtype", "rounds", "says"), [("float32", True, True), ("float32", False, False), ("bfloat16", True, False)]
)
def test_fp32_gradients_that_were_added_up_in_bf16_are_said(dtype: str, rounds: bool, says: bool) -> None:
    sums = torch.randn(20, generator=torch.Generator().manual_seed(0))
    values = (sums.bfloat16().float() if rounds else sums).tolist()
    gradients = make_samples(
        *(make_sample(f"layers.{number}.weight", value, dtype) for number, value in enumerate(values))
    )
    said = [text for text in say([make_pass(step=make_step(gradients=gradients))]) if "gradient precision" in text]
    passes_said = "fp32 gradients, sums of 2 passes, are values of bfloat16"
    told = f"gradient precision: {passes_said}: they were added up or reduced in it"
    assert said == ([told] if says else [])


def test_a_step_that_is_missing_behind_gradients_that_are_not_finite_is_no_riddle() -> None:
    rows = make_rows([9, 12])
    notes = {LOSS_GRADIENTS: torch.full(rows["input_ids"].shape, torch.nan)}
    passes = [make_pass(rows, number=number, notes=notes, step=None, optimizer_step=0) for number in range(2)]
    [said] = [text for text in say(passes, is_whole=True) if text.startswith("trained")]
    assert said == (
        "trained: no optimizer step was recorded in 2 training passes: gradients were not finite, and an engine or a "
        "scaler leaves out such a step"
    )


@pytest.mark.parametrize(
    ("is_training", "has_drawn", "is_said"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_dropout_in_passes_without_a_gradient_is_said(is_training: bool, has_drawn: bool, is_said: bool) -> None:
    draws = RandomDraws(before={"cpu": b"a"}, after={"cpu": b"b" if has_drawn else b"a"})
    mode = {"model": is_training, "parts": []}
    passes = [replace(make_pass(trains=False, step=None, training=mode), draws=draws), *make_passes(2)]
    assert say(passes) == []  # there is no dropout
    texts = [text for text in say(passes, dropout=["attn_pdrop"]) if "without a gradient" in text]
    assert bool(texts) is is_said
    if is_said:
        assert texts[0].startswith(
            "dropout: passes without a gradient drew masks of attn_pdrop, 1 of 1 that were read: their log-probs"
        )


@pytest.mark.parametrize(
    ("has_adapter", "reference", "is_said"), [(True, -1.0, True), (True, -1.5, False), (False, -1.0, False)]
)
def test_a_reference_that_is_the_policy_is_a_fact(has_adapter: bool, reference: float, is_said: bool) -> None:
    """Two steps of a job whose passes without a gradient gave `reference` where the training passes gave -1."""
    passes = []
    for number in range(3):
        rows, step = make_rows([9, 12], seed=number), make_step(number)
        for place, (trains, value) in enumerate([(False, reference), (True, -1.0)]):
            outputs = {"token_log_probs": [value, value]}
            own: dict[str, Any] = {
                "trains": trains,
                "outputs": outputs,
                "optimizer_step": number,
                "step": step if trains else None,
            }
            passes.append(make_pass(rows, number=2 * number + place, **own))
    texts = [text for text in say(passes, has_adapter=has_adapter) if text.startswith("reference")]
    assert bool(texts) is is_said
    if is_said:
        assert texts[0].startswith(
            "reference: 2 of 2 passes without a gradient, behind the first step, have the log-pro"
        )


@pytest.mark.parametrize(
    ("values", "decays", "says"),
    [
        ({"optimizer": "Adam"}, (0.0, 0.1), True),
        ({"optimizer": "Adam8bit", "library": "bitsandbytes"}, (0.1,), True),
        ({"optimizer": "Adam"}, (0.0,), False),
        ({"optimizer": "AdamW"}, (0.0, 0.1), False),
        ({"optimizer": "SGD"}, (0.1,), False),
        # What a class of the job's own does is not known.
        ({"optimizer": "Adam", "library": "__main__"}, (0.1,), False),
    ],
)
def test_a_decay_that_adam_adds_to_the_gradient_is_said(
    values: dict[str, Any], decays: tuple[float, ...], says: bool
) -> None:
    settings = tuple({"lr": 1e-3, "weight_decay": decay, "num_parameters": 1} for decay in decays)
    said = (
        f"decay: {values['optimizer']} adds its weight decay of 0.1 to the gradient, so its moments scale it: is "
        "AdamW meant, which decays the weights themselves?"
    )
    steps = [make_step(number, settings=settings, **values) for number in range(2)]
    passes = [make_pass(number=number, step=step) for number, step in enumerate(steps)]
    assert [text for text in say(passes) if text.startswith("decay: Adam")] == ([said] if says else [])
    decoupled = tuple({**group, "decoupled_weight_decay": True} for group in settings)
    if values == {"optimizer": "Adam"}:
        assert not say([make_pass(step=make_step(settings=decoupled, **values))])


@pytest.mark.parametrize(("zeros", "says"), [((0, 1), True), ((0,), False), ((), False)])
def test_advantages_that_are_all_0_are_said(zeros: tuple[int, ...], says: bool) -> None:
    """A noted mask leaves out what is no action."""
    advantages = {number: torch.zeros(3, 4) if number in zeros else torch.ones(3, 4) for number in (0, 1)}
    mask_BA = torch.tensor([[1, 1, 1, 0]] * 3)
    for values in advantages.values():
        values[:, 3] = 5.0
    passes = [
        make_pass(number=number, notes={"advantages": values, "action_mask": mask_BA})
        for number, values in advantages.items()
    ]
    said = "advantages: all are 0 in 2 of 2 training passes, whose policy loss then trains nothing"
    assert any(text.startswith(said) for text in say(passes)) is says
