"""What the checks say of a training of several ranks and steps: each step counts once, and each rank by itself."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from capture.file_format.end_record import EndRecord
from capture.file_format.gradient_signature import GradientSignature
from replay.lint.lint import lint
from replay.lint.remark import LintSubject, Weight
from replay.verdict.random_draws import RandomDraws
from replay.verdict.recorded_pass import RecordedPass
from tests.replay.lint.recorded import make_pass, make_rows, make_sample, make_samples, make_step, say

RANKS = (0, 1)


def end(rank: int, **values: Any) -> EndRecord:
    return EndRecord(rank=rank, world_size=3, num_passes=9, num_steps=9, place="", opened="", time="", **values)


def make_ranks(*steps: Mapping[str, Any], ranks: Sequence[int] = RANKS, **values: Any) -> list[RecordedPass]:
    """A pass of each rank for each of these optimizer steps, rank by rank, on rows of its own."""
    return [
        make_pass(rank=rank, number=number, step=make_step(number, **step), **values)
        for rank in ranks
        for number, step in enumerate(steps)
    ]


def say_about(topic: str, passes: Sequence[RecordedPass], **subject: Any) -> list[str]:
    return [text for text in say(passes, **subject) if text.startswith(f"{topic}: ")]


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([end(0)], None),
        # The most that one rank took, and where it began first; a rank that took none has no such place.
        (
            [end(0, num_unseen_steps=2, unseen_after=9), end(1, num_unseen_steps=5, unseen_after=7), end(2)],
            "stepped 5 times without a recorded forward, first after forward 7: ",
        ),
        (
            [end(0), end(1, num_unseen_steps=1, unseen_after=4), end(2, num_unseen_steps=1, unseen_after=6)],
            "stepped 1 time without a recorded forward, first after forward 4: ",
        ),
    ],
)
def test_steps_without_a_forward_are_those_of_the_rank_with_most(ends: Sequence[EndRecord], said: str | None) -> None:
    texts = say_about("steps", make_ranks({}, {}), ends=ends)
    assert [text.startswith(f"steps: the optimizer {said}") for text in texts] == [True] * (said is not None)


def test_clippings_are_counted_by_steps_and_not_by_ranks() -> None:
    late = [end(0, num_late_clippings=2), end(1, num_late_clippings=3), end(2)]
    assert say_about("clipping", make_ranks({}, {}), ends=late) == [
        "clipping: gradients are clipped after the step, in 3 steps, and not before it, so the step is not clipped"
    ]
    passes = make_ranks({"clips_otherwise": True}, {}, {"clips_otherwise": True}, {"unapplied_norm": 0.5})
    [idle, other] = say_about("clipping", passes)
    assert other.startswith("clipping: gradients are clipped by another rule than to their length, in 2 of 4 steps: ")
    assert idle.startswith("clipping: clipping to a norm of 0.5 found no gradient in 1 of 4 steps and changed nothing")


def with_norms(*norms: Sequence[float | None]) -> list[RecordedPass]:
    """Passes of ranks whose norm in each step is given by rank."""
    return [
        make_pass(rank=rank, number=number, step=make_step(number, grad_norm=norm))
        for number, of_step in enumerate(norms)
        for rank, norm in enumerate(of_step)
    ]


@pytest.mark.parametrize(
    ("norms", "said"),
    [
        ([(1.0, 1.0), (2.0, 2.0)], None),
        ([(1.0, 1.0009), (2.0, 2.0)], None),
        (
            [(1.0, 1.0), (2.0, 2.5), (3.0, 3.5)],
            "in 2 of 3 steps, as in step 2: 2 on rank 0, 2.5 on rank 1",
        ),
        # Of many ranks those that are farthest apart are named.
        ([(1.0, 1.0, 1.0, 2.0, 1.5)], "in 1 of 1 step, as in step 1: 1 on rank 0, 2 on rank 3"),
        ([(2.0, 2.0, 1.0, 2.0)], "in 1 of 1 step, as in step 1: 2 on rank 0, 1 on rank 2"),
        ([(2.0, 1.0, 2.0)], "in 1 of 1 step, as in step 1: 2 on rank 0, 1 on rank 1, 2 on rank 2"),
        # What one rank alone measured is compared with nothing.
        ([(1.0, None), (None, 2.0)], None),
    ],
)
def test_norms_are_compared_within_each_step(norms: Sequence[Sequence[float | None]], said: str | None) -> None:
    texts = say_about("ranks", with_norms(*norms))
    assert texts == ([] if said is None else [f"ranks: each rank had a gradient norm of its own {said}"])
    # Each rank's part of a norm is another number.
    parts = [
        replace(recorded, step_after=replace(recorded.step_after, is_part_of_norm=True))
        for recorded in with_norms(*norms)
        if recorded.step_after is not None
    ]
    assert say_about("ranks", parts) == []


def test_a_schedule_is_counted_by_steps() -> None:
    passes = make_ranks(*({"num_schedule_steps": number} for number in (0, 4, 1, 2)))
    assert say_about("learning rate", passes) == [
        "learning rate: its schedule was stepped 2 times between two optimizer steps, in 2 of 4"
    ]


def sign(name: str) -> GradientSignature:
    return GradientSignature(name=name, shape=(8,), is_part=False, norm=1.0, start=0, stride=1, values=(1.0,) * 8)


def test_a_parameter_with_a_gradient_on_any_rank_or_in_any_step_has_one() -> None:
    names = ("a.weight", "b.weight", "c.weight")
    weights = make_samples(*map(make_sample, names))
    settings = ({"lr": 1e-3, "num_parameters": 3},)
    first = {"gradients": make_samples(make_sample("a.weight")), "without_gradient": names[1:], "settings": settings}
    second = {"signatures": (sign("b.weight"),), "without_gradient": ("c.weight",), "settings": settings}
    moved = [
        replace(recorded, samples=[make_sample(name, 1.0 + place) for name in names])
        for place, recorded in enumerate(make_ranks(first, second, weights=weights))
    ]
    assert say_about("gradients", moved) == ["gradients: 1 trainable parameter had no gradient in 2 steps: c.weight"]
    of_first_steps = [recorded for recorded in moved if recorded.forward_number == 0]
    assert say_about("gradients", of_first_steps) == [
        "gradients: 2 trainable parameters had no gradient in 1 step: b.weight, c.weight"
    ]


def test_the_mode_is_counted_over_the_passes_that_tell_theirs() -> None:
    modes = [{"model": False, "parts": []}, {"model": True, "parts": ["h.1"]}, None, {"model": False, "parts": ["h.2"]}]
    passes = [make_pass(number=number, training=mode) for number, mode in enumerate(modes)]
    assert say_about("dropout", passes, dropout=["attn_pdrop", "resid_pdrop"]) == [
        "dropout: the model was in eval mode in 2 of 3 training passes, so its attn_pdrop did nothing",
        "dropout: parts of the model were in eval mode while it trained: h.1",
    ]
    # A job without steps, as an evaluation with gradients, trains nothing.
    idle = [replace(recorded, step_after=None) for recorded in passes]
    assert say_about("dropout", idle, dropout=["attn_pdrop"]) == []


def drew(recorded: RecordedPass, before: bytes, after: bytes = b"after") -> RecordedPass:
    return replace(recorded, draws=RandomDraws(before={"cpu": before}, after={"cpu": after}))


def test_masks_repeat_within_a_rank_and_are_shared_within_a_step() -> None:
    """Two ranks of three steps, each pass with the letter of the state that it began with."""

    def say_of(*states: str) -> list[str]:
        passes = make_ranks({}, {}, {}, ranks=range(len(states)))
        letters = "".join(states)
        return say_about(
            "dropout", [drew(recorded, letter.encode()) for recorded, letter in zip(passes, letters, strict=True)]
        )

    assert say_of("abc", "def") == []
    # That another rank began another step so is a repetition of nobody's masks.
    assert say_of("abc", "cde") == []
    [repeated] = say_of("aba", "def")
    assert repeated.startswith(
        "dropout: 2 of 6 passes that drew random numbers began with the random state of a pass of another step, as "
        "forwards 0, 2 did: masks repeat."
    )
    [shared] = say_of("abc", "dbf")
    assert shared == (
        "dropout: ranks 0, 1, which are fed other rows, began passes with one random state in 1 of 3 steps, so that "
        "they drop out alike. Try: a seed for each rank"
    )
    [shared] = say_of("abc", "dbc", "ebc")
    assert shared.startswith(
        "dropout: ranks 0, 1, 2, which are fed other rows, began passes with one random state in 2 "
    )
    assert len(say_of("aac", "adf")) == 2


@pytest.mark.parametrize(
    ("largest", "weight", "said"),
    [
        ((0.0, 0.0, 1.0, 1.0), Weight.FACT, "all are 0 in 2 of 4 training passes"),
        ((0.0, 0.0, 1.0, 1.0, 1.0), None, ""),
        ((0.0, 0.0, None, None, None), Weight.NO_TRAINING, "all are 0 in 2 of 2 training passes"),
        ((0.0, 1.0), None, ""),
        ((0.0, None), None, ""),
    ],
)
def test_passes_without_an_advantage_are_counted_of_those_that_have_some(
    largest: Sequence[float | None], weight: Weight | None, said: str
) -> None:
    passes = [replace(make_pass(number=number), largest_advantage=value) for number, value in enumerate(largest)]
    remarks = [remark for remark in lint(LintSubject(passes=passes)) if remark.topic == "advantages"]
    assert [remark.weight for remark in remarks] == ([] if weight is None else [weight])
    assert all(remark.text.startswith(said) for remark in remarks)


@pytest.mark.parametrize(
    ("world_size", "passes", "said"),
    [(1, (0,), None), (1, (0, 1, 2), 3), (2, (0,), 2), (4, (0, 1), 8)],
)
def test_a_sum_of_gradients_is_of_the_passes_of_all_ranks(
    world_size: int, passes: tuple[int, ...], said: int | None
) -> None:
    values = torch.randn(20, generator=torch.Generator().manual_seed(0)).bfloat16().float().tolist()
    gradients = make_samples(*(make_sample(f"layers.{number}.weight", value) for number, value in enumerate(values)))
    step = {"gradients": gradients, "passes": passes, "shares": (1.0,) * len(passes)}
    made = [replace(recorded, world_size=world_size) for recorded in make_ranks(step, ranks=(0,))]
    texts = say_about("gradient precision", made)
    assert [f"sums of {said} passes" in text for text in texts] == [True] * (said is not None)


def test_passes_that_were_not_kept_are_those_of_their_own_rank() -> None:
    """Rank 1 kept its passes 0 and 1, and rank 0 the second one alone."""
    step = {"passes": (0, 1), "shares": (0.5, 0.5)}
    last = [make_pass(rank=rank, number=1, step=make_step(0, **step)) for rank in RANKS]
    first = make_pass(rank=1, number=0, step=None, optimizer_step=0)
    [text] = say_about("passes", [*last, first], is_whole=True)
    assert text.startswith("passes: 1 of 4 training passes that went into recorded steps were not kept")
    assert say_about("passes", [*last, first], is_whole=True, not_recorded={"given a cache": 1}) == []
    assert say_about("passes", last, is_whole=True, not_recorded={"given a cache": 1})


def test_what_is_frozen_at_first_and_later_goes_by_the_numbers_of_forwards() -> None:
    samples = [make_sample(name) for name in ("a.weight", "b.weight")]
    passes = [
        make_pass(number=number, weights=make_samples(*samples[num_frozen:], num_frozen=num_frozen), step=None)
        for number, num_frozen in ((2, 0), (0, 2), (1, 1))
    ]
    [text] = say_about("frozen", passes, frozen=["a.weight"])
    assert text == "frozen: 2 of 2 parameters were not trained at first: a.weight; 0 later"
    # Where nothing changed there is no later.
    assert say_about("frozen", passes[2:], frozen=["a.weight"]) == [
        "frozen: 1 of 2 parameters were not trained: a.weight"
    ]
    assert say_about("frozen", passes[:1]) == []


def test_a_reference_is_held_against_the_training_pass_of_its_rank_step_and_rows() -> None:
    def make(number: int, rank: int, seed: int, value: float, *, trains: bool, steps: int) -> RecordedPass:
        return make_pass(
            make_rows([9, 12], seed=seed),
            rank=rank,
            number=number,
            trains=trains,
            outputs={"token_log_probs": [value]},
            optimizer_step=steps,
            step=make_step(steps) if trains else None,
        )

    def make_all(*values: float, **changes: Any) -> list[RecordedPass]:
        rollouts = [
            make(number, rank, rank, values[rank], trains=False, steps=1, **changes)
            for number, rank in enumerate(RANKS)
        ]
        trained = [make(2 + rank, rank, rank, -1.0 - rank, trains=True, steps=1) for rank in RANKS]
        return [*rollouts, *trained]

    [text] = say_about("reference", make_all(-1.0, -2.0), has_adapter=True)
    assert text.startswith("reference: 2 of 2 passes without a gradient, behind the first step, have the log-probs of ")
    # The numbers of the other rank's rows are another policy's.
    assert say_about("reference", make_all(-2.0, -1.0), has_adapter=True) == []
    assert say_about("reference", make_all(-1.0, -2.5), has_adapter=True) == []
    # One alone may be the policy's for a reason.
    assert say_about("reference", make_all(-1.0, -2.0)[1:], has_adapter=True) == []
