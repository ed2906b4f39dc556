"""Weights that go back to those of an earlier step, and weights that only a step explains: made samples."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from actor_init.spec import ActorSpec
from capture.file_format.optimizer_step import Sample
from replay.tolerances.job_bounds import LOSS, STEPPED
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.table import find_causes
from replay.verdict.causes.weight_rules import (
    find_changed_frozen_weights,
    find_other_update,
    find_other_weights,
    find_ranks_with_other_weights,
    find_weights_of_earlier_step,
)
from replay.verdict.model_facts import ModelDifference, ModelDifferenceKind
from replay.verdict.outcomes import OTHER_WEIGHTS, Outcome
from replay.verdict.pass_weights import find_weights_of_ranks
from replay.verdict.recorded_pass import DifferingElement, SteppedSample, WeightComparison
from tests.replay.verdict.causes.made_evidence import (
    SETTINGS,
    draw_gradients,
    make_forward_evidence,
    make_gradient_evidence,
    make_window,
)


def find_cause(versions: Sequence[int]) -> Cause | None:
    """The cause where the passes before each step had these versions of the weights."""
    gradients = draw_gradients()
    passes = []
    for index, version in enumerate(versions):
        [compared] = make_window([gradients], gradients, index=index)
        samples = [
            Sample(name=name, dtype="float32", shape=(4,), start=0, values=(float(version), 0.5)) for name in "abcdef"
        ]
        passes.append(replace(compared, recorded=replace(compared.recorded, samples=samples)))
    return find_weights_of_earlier_step(replace(make_forward_evidence(LOSS), passes=passes))


def test_weights_that_come_back_are_named_with_their_steps() -> None:
    cause = find_cause([0, 1, 2, 1])
    assert cause is not None
    assert (cause.name, cause.sureness) == (CauseName.WEIGHTS_CHANGED, Sureness.IS)
    assert {STEPPED, LOSS} <= set(cause.explains)
    assert cause.sentence.startswith("the job's weights before step 4 are again those before step 2")


@pytest.mark.parametrize("versions", [[0, 1, 2, 3], [0, 0, 0, 0], [0], [0, 1], [0, 0, 1, 1], [0, 1, 1, 2]])
def test_weights_that_move_on_or_never_move_are_no_sign(versions: Sequence[int]) -> None:
    assert find_cause(versions) is None


def test_weights_that_stayed_while_others_moved_did_not_come_back() -> None:
    """Frozen layers are sampled before and behind two steps of the others, as where they are unfrozen in between."""
    gradients = draw_gradients()
    passes = []
    for index, names in enumerate(("abcdefgh", "abcd", "efgh")):
        [compared] = make_window([gradients], gradients, index=index)
        samples = [
            Sample(name=name, dtype="float32", shape=(1,), start=0, values=(float(index) if name in "abcd" else 0.5,))
            for name in names
        ]
        passes.append(replace(compared, recorded=replace(compared.recorded, samples=samples)))
    assert find_weights_of_earlier_step(replace(make_forward_evidence(LOSS), passes=passes)) is None


def test_weights_come_back_on_a_rank_and_not_from_another_one() -> None:
    """Rank 1 has before its third step what rank 0 had before its first."""
    gradients = draw_gradients()

    def find(*versions: tuple[int, int]) -> Cause | None:
        passes = []
        for index, of_ranks in enumerate(versions):
            for version, compared in zip(of_ranks, make_window([gradients] * 2, gradients, index=index), strict=True):
                samples = [
                    Sample(name=name, dtype="float32", shape=(4,), start=0, values=(float(version),))
                    for name in "abcdef"
                ]
                passes.append(replace(compared, recorded=replace(compared.recorded, samples=samples)))
        return find_weights_of_earlier_step(replace(make_forward_evidence(LOSS), passes=passes))

    assert find((0, 7), (1, 8), (2, 0)) is None
    for last in ((1, 4), (4, 8)):
        cause = find((0, 7), (1, 8), (2, 9), last)
        assert cause is not None
        assert cause.sentence.startswith("the job's weights before step 4 are again those before step 2")


@pytest.mark.parametrize(
    ("values", "differing", "is_found"),
    [((0.5, 0.25), ("a",), True), ((0.5, 0.5), ("a",), False), ((0.5, 0.25), (), False)],
)
def test_a_rank_that_begins_with_other_weights_is_named(
    values: Sequence[float], differing: tuple[str, ...], is_found: bool
) -> None:
    gradients = draw_gradients()
    passes = []
    for value, compared in zip(values, make_window([gradients, gradients], gradients), strict=True):
        sample = Sample(name="a", dtype="float32", shape=(4,), start=2, values=(1.0, value))
        weights = WeightComparison(compared=("a",), differing=differing)
        recorded = replace(compared.recorded, samples=[sample])
        passes.append(replace(compared, recorded=recorded, weight_comparison=weights))
    cause = find_ranks_with_other_weights(replace(make_forward_evidence(LOSS), passes=passes))
    [*findings] = find_weights_of_ranks(passes, passes, SETTINGS)
    assert len(findings) == is_found
    assert (cause is not None) is is_found
    if cause is not None:
        assert (cause.name, cause.sureness) == (CauseName.OTHER_WEIGHTS, Sureness.IS)
        assert "element 3 of a is 0.5 on rank 0, 0.25 on rank 1, before step 1" in cause.sentence


def test_weights_that_moved_between_two_passes_of_one_rank_are_no_difference_of_ranks() -> None:
    """Both ranks stepped copies of the parameters between two forwards before one step."""
    gradients = draw_gradients()
    passes = []
    for index, value in enumerate((0.5, 0.25)):
        for compared in make_window([gradients] * 2, gradients, index=index):
            sample = Sample(name="a", dtype="float32", shape=(4,), start=2, values=(value,))
            recorded = replace(compared.recorded, samples=[sample], num_steps_before=0)
            weights = WeightComparison(compared=("a",), differing=("a",))
            passes.append(replace(compared, recorded=recorded, weight_comparison=weights))
    by_rank = sorted(passes, key=lambda compared: compared.recorded.rank or 0)
    evidence = replace(make_forward_evidence(LOSS), passes=by_rank[:2])
    assert find_ranks_with_other_weights(evidence) is None
    # Before another step, in another dtype, or of shards, values differ for other reasons.
    first, other = passes[0], passes[3]
    for changed in (
        replace(other.recorded, num_steps_before=1),
        replace(other.recorded, samples=[replace(other.recorded.samples[0], dtype="bfloat16")]),
        replace(other.recorded, samples=[replace(other.recorded.samples[0], start=3)]),
        replace(other.recorded, weight_comparison=WeightComparison(is_sharded=True)),
    ):
        assert (
            find_ranks_with_other_weights(replace(evidence, passes=[first, replace(other, recorded=changed)])) is None
        )
    assert find_ranks_with_other_weights(replace(evidence, passes=[first, other])) is not None


def find_cause_of_frozen(after: float, num_held: int, wrong: int = 1) -> Cause | None:
    """The cause where sixteen elements of each of two frozen parameters are this behind the first step.

    num_held  parameters in the job's optimizer, of which seven are trained
    wrong     the pass that is the first one to be wrong
    """
    gradients = draw_gradients()
    passes = []
    for index, value in enumerate((0.7501, after)):
        [compared] = make_window([gradients], gradients, index=index)
        assert compared.recorded.step_after is not None
        weights = replace(compared.recorded.weight_comparison, num_parameters=9)
        samples = [
            Sample(name=name, dtype="float32", shape=(16,), start=0, values=(value,) * 16) for name in ("ma", "mb")
        ]
        step = replace(compared.recorded.step_after, settings=({"num_parameters": num_held},))
        recorded = replace(compared.recorded, samples=samples, num_frozen=2, weight_comparison=weights, step_after=step)
        passes.append(replace(compared, recorded=recorded))
    evidence = make_forward_evidence(LOSS)
    verdicts = [replace(evidence.verdicts[0], index=wrong)]
    return find_changed_frozen_weights(replace(evidence, passes=passes, verdicts=verdicts))


@pytest.mark.parametrize(
    ("after", "num_held", "sureness", "says"),
    [
        (0.75, 9, Sureness.IS, "; most are values of bfloat16 now, and were not before"),
        (0.7502, 7, Sureness.IS, "(element 0 of ma was 0.7501, and is 0.7502)"),
        # It may have decayed them by gradients of 0.
        (0.7502, 9, Sureness.PROBABLY, "(element 0 of ma was 0.7501, and is 0.7502)"),
    ],
)
def test_frozen_weights_that_changed_are_named(after: float, num_held: int, sureness: Sureness, says: str) -> None:
    cause = find_cause_of_frozen(after, num_held)
    assert cause is not None
    assert (cause.name, cause.sureness) == (CauseName.WEIGHTS_CHANGED, sureness)
    assert cause.sentence.startswith("frozen weights of the job are other ones behind step 1: ma, mb (")
    assert cause.sentence.endswith(says)


def test_frozen_weights_that_stay_or_change_after_the_first_wrong_pass_are_no_cause() -> None:
    assert find_cause_of_frozen(0.7501, 7) is None
    assert find_cause_of_frozen(0.75, 7, wrong=0) is None


@pytest.mark.parametrize(
    ("settings", "random", "try_next"),
    [
        ({}, "", "--model FOLDER, with"),
        ({"has_user_model": True}, "", "--weights FOLDER, with"),
        (
            {"has_user_model": True, "lacks_weights": True},
            "those here are random, since --weights was",
            "--weights FOLDER,",
        ),
    ],
)
def test_other_weights_are_sought_with_the_option_that_gives_them(settings: Any, random: str, try_next: str) -> None:
    gradients = draw_gradients()
    [compared] = make_window([gradients], gradients)
    evidence = make_forward_evidence(LOSS, **settings)
    verdict = replace(evidence.verdicts[0], outcome=Outcome.CANNOT_TELL, reason=OTHER_WEIGHTS)
    weights = WeightComparison(compared=("a",), differing=("a",))
    cause = find_other_weights(
        replace(evidence, passes=[replace(compared, weight_comparison=weights)], verdicts=[verdict])
    )
    assert cause is not None
    assert cause.try_next is not None
    assert cause.try_next.startswith(try_next)
    assert ("random" in cause.sentence) is bool(random)
    assert random in cause.sentence


def judge_update(
    moves: Sequence[float],
    max_norm: float | None = None,
    loss_scale: float | None = None,
    num_ranks: int = 1,
    factors: Sequence[float] = (1.0,) * 8,
    groups: Sequence[str] = (),
    **settings: Any,
) -> Cause:
    """The first cause where the job's step moved each of eight parameters by so many of the replay's steps.

    loss_scale  what the weights of each rank's loss add up to in the job
    factors     what the job multiplied each parameter's weights by besides
    groups      the parameters of each group of its optimizers
    """
    gradients = draw_gradients()
    first = []
    for compared in make_window([gradients] * num_ranks, gradients):
        assert compared.recorded.step_after is not None
        recorded_groups = tuple({"num_parameters": 8, "parameters": group} for group in groups)
        step = replace(compared.recorded.step_after, max_norm=max_norm, settings=recorded_groups)
        recorded = replace(compared.recorded, step_after=step, has_job_weights_of_tokens=loss_scale is not None)
        weights = replace(compared.replayed.log_prob_weights, total=1.0 if loss_scale is None else loss_scale)
        first.append(
            replace(compared, recorded=recorded, replayed=replace(compared.replayed, log_prob_weights=weights))
        )
    [second] = make_window([gradients], gradients, index=1)
    stepped = [
        SteppedSample(
            name=f"model.layers.{number}.weight",
            dtype="float32",
            start=0,
            job_values=tuple(factors[number] * (value + 0.01 * moved) for value in (1.0, 2.0, 3.0, 4.0)),
            replay_values=(1.01, 2.01, 3.01, 4.01),
            initial_values=(1.0, 2.0, 3.0, 4.0),
        )
        for number, moved in enumerate(moves)
    ]
    result = replace(second.record.result, num_steps=1)
    second = replace(
        second,
        record=replace(second.record, result=result),
        replayed=replace(second.replayed, weights_before_pass=stepped),
    )
    evidence = make_gradient_evidence([second], first, names=(STEPPED,))
    return find_causes(replace(evidence, settings=replace(evidence.settings, **settings)))[0]


def test_weights_that_are_decayed_besides_the_step_are_told_with_the_factor() -> None:
    cause = judge_update([1.0] * 8, factors=[0.99] * 6 + [1.0] * 2)
    assert (cause.name, cause.sureness) == (CauseName.WEIGHTS_CHANGED, Sureness.PROBABLY)
    assert "multiplies model.layers.[0-5].weight by 0.99 besides the step" in cause.sentence
    assert "multiplies" not in judge_update([1.0] * 8, factors=[0.99, 0.9] * 4).sentence


def test_parameters_of_two_optimizers_are_moved_twice() -> None:
    cause = judge_update([1.0] * 6 + [2.0] * 2, groups=["0-5", "6-7", "7"])
    assert (cause.name, cause.sureness) == (CauseName.OPTIMIZER, Sureness.PROBABLY)
    assert "two optimizers of the job hold 1 parameter both" in cause.sentence
    assert "optimizers" not in judge_update([1.0] * 6 + [2.0] * 2, groups=["0-5", "6-7"]).sentence


def test_parameters_that_no_step_moves_are_in_no_optimizer() -> None:
    cause = judge_update([1.0] * 6 + [0.0] * 2)
    assert (cause.name, cause.sureness) == (CauseName.OPTIMIZER, Sureness.PROBABLY)
    assert "model.layers.[6-7].weight" in cause.sentence
    assert cause.sentence.endswith("the job's optimizer does not hold them")
    # The gradients of a job that clips were recorded before its step.
    clipped = judge_update([1.0] * 6 + [0.0] * 2, max_norm=1.0)
    assert clipped.sentence.endswith("or the gradient was gone between the clipping and the step")


def judge_third_step(earlier_move: float) -> Cause:
    """The first cause where four frozen parameters are trained from the third step on, and that step leaves them.

    earlier_move  how far one of them was from its first value behind the second step
    """
    gradients = draw_gradients()
    passes = []
    for index, moves in enumerate(([], [1.0] * 4, [2.0] * 4, [3.0] * 4)):
        stepped = [
            SteppedSample(
                name=f"model.layers.{number}.weight",
                dtype="float32",
                start=0,
                job_values=(1.0 + 0.01 * moved,),
                replay_values=(1.0 + 0.01 * moved if number < 4 else 1.0 + 0.01 * (index == 3),),
                initial_values=(1.0,),
            )
            for number, moved in enumerate([*moves, *([0.0, 0.0, 0.0, earlier_move * (index == 2)] if moves else [])])
        ]
        [compared] = make_window([gradients], gradients, index=index)
        result = replace(compared.record.result, num_steps=index)
        replayed = replace(compared.replayed, weights_before_pass=stepped)
        passes.append(replace(compared, record=replace(compared.record, result=result), replayed=replayed))
    evidence = make_gradient_evidence(*[[compared] for compared in passes[:3]], names=(STEPPED,))
    return find_causes(replace(evidence, passes=passes))[0]


def test_parameters_that_no_later_step_moves_are_in_no_optimizer() -> None:
    cause = judge_third_step(0.0)
    assert (cause.name, cause.sureness) == (CauseName.OPTIMIZER, Sureness.PROBABLY)
    assert cause.sentence.startswith("no step of the job moves model.layers.[4-7].weight, since the job's step 3")
    # One that a step before has moved is in the optimizer.
    assert "no step of the job moves model.layers.[4-6].weight," in judge_third_step(1.0).sentence


def test_weights_farther_off_than_a_step_moves_them_are_not_those_of_the_pass() -> None:
    cause = judge_update([30.0, -25.0, 40.0, -9.0, 12.0, 1.0, 1.0, 70.0])
    assert (cause.name, cause.sureness) == (CauseName.WEIGHTS_CHANGED, Sureness.PROBABLY)
    assert "many times what a step moves them" in cause.sentence
    assert "something besides the optimizer changed them" in judge_update([1.5, 0.5] * 4).sentence


def test_a_step_that_moves_all_weights_by_one_factor_is_told_with_the_factor() -> None:
    cause = judge_update([1.5] * 8)
    assert (cause.name, cause.sureness) == (CauseName.WEIGHTS_CHANGED, Sureness.PROBABLY)
    assert "moves all weights 1.5 times as far" in cause.sentence


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("scale", "max_norm", "is_early"), [(64.0, 1.0, True), (64.0, None, False), (2.0, 1.0, False)])
def test_a_loss_scale_that_leaves_behind_the_clipping_is_clipped_early(
    scale: float, max_norm: float | None, is_early: bool, num_ranks: int
) -> None:
    cause = judge_update([1 / 64] * 8, max_norm=max_norm, loss_scale=scale, num_ranks=num_ranks)
    assert (cause.name is CauseName.CLIPPED_EARLY) == is_early
    assert ("gradients are clipped before they are unscaled" in cause.sentence) == is_early


def judge_average(shares: Sequence[float]) -> Cause:
    """The first cause where the weights behind the second step are this sum of those before and behind each step."""
    gradients = draw_gradients()
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(6, 4, generator=generator) for _ in range(3)]
    job = sum(share * values for share, values in zip(shares, drawn, strict=True))
    passes = []
    for index in range(3):
        [compared] = make_window([gradients], gradients, index=index)
        samples = [
            Sample(name=name, dtype="float32", shape=(4,), start=0, values=tuple(drawn[index][row].tolist()))
            for row, name in enumerate("abcdef")
        ]
        recorded = replace(compared.recorded, samples=samples, num_steps_before=index)
        record = replace(compared.record, result=replace(compared.record.result, num_steps=index))
        passes.append(replace(compared, recorded=recorded, record=record))
    assert isinstance(job, torch.Tensor)
    stepped = [
        SteppedSample(
            name=name,
            dtype="float32",
            start=0,
            job_values=tuple(job[row].tolist()),
            replay_values=tuple(drawn[2][row].tolist()),
            initial_values=tuple(drawn[0][row].tolist()),
        )
        for row, name in enumerate("abcdef")
    ]
    passes[2] = replace(passes[2], replayed=replace(passes[2].replayed, weights_before_pass=stepped))
    return find_causes(make_gradient_evidence([passes[2]], [passes[0]], [passes[1]], names=(STEPPED,)))[0]


def test_an_average_of_earlier_weights_is_told_with_its_shares() -> None:
    cause = judge_average([0.81, 0.09, 0.1])
    assert (cause.name, cause.sureness) == (CauseName.WEIGHTS_CHANGED, Sureness.PROBABLY)
    assert "an average of its earlier ones: 0.81 of those before step 1, 0.09 of those before step 2" in cause.sentence
    assert "average" not in judge_average([0.0, 0.5, 0.5]).sentence
    assert "average" not in judge_average([0.9, -0.9, 1.0]).sentence


def test_an_optimizer_of_the_users_own_that_steps_otherwise_is_told_first() -> None:
    """Whatever the size of the steps, as of an Adam without the correction of its second moment's bias."""
    cause = judge_update([30.0] * 8, stepping_actor=ActorSpec(optimizer="own.py:build"))
    assert (cause.name, cause.sureness) == (CauseName.OPTIMIZER, Sureness.PROBABLY)
    assert "the job's optimizer does not step as own.py:build does" in cause.sentence


def test_a_cause_of_the_step_needs_its_weights_to_be_wrong_first() -> None:
    gradients = draw_gradients()
    evidence = make_gradient_evidence(make_window([gradients], gradients), names=(STEPPED,))
    assert find_other_update(evidence) is not None
    assert find_other_update(make_forward_evidence(LOSS)) is None
    # What the job froze stays where it is, and the replay's step moves it.
    frozen = ModelDifference(kind=ModelDifferenceKind.FROZEN, where="w", job="frozen", replay="trained")
    settings = replace(evidence.settings, model_differences=[frozen])
    assert find_other_update(replace(evidence, settings=settings)) is None
    [forward] = make_forward_evidence(LOSS).verdicts
    assert find_other_update(replace(evidence, verdicts=[forward, *evidence.verdicts])) is None
    # Without weights behind the step it is said in general.
    cause = find_other_update(evidence)
    assert cause is not None
    assert (cause.name, cause.sureness) == (CauseName.WEIGHTS_CHANGED, Sureness.PROBABLY)
    assert {STEPPED, LOSS} <= set(cause.explains)


def find_cause_of_weights(
    *, differing: Sequence[str], compared: Sequence[str], steps: Sequence[int | None] = (0,), **changes: Any
) -> Cause | None:
    """The cause where all passes of a replay, after so many steps of the job, ran on other weights."""
    gradients = draw_gradients()
    evidence = make_forward_evidence(LOSS)
    weights = WeightComparison(compared=tuple(compared), differing=tuple(differing), **changes)
    passes, verdicts = [], []
    for index, step in enumerate(steps):
        [made] = make_window([gradients], gradients, index=index)
        passes.append(replace(made, weight_comparison=weights, recorded=replace(made.recorded, num_steps_before=step)))
        verdicts.append(replace(evidence.verdicts[0], index=index, outcome=Outcome.CANNOT_TELL, reason=OTHER_WEIGHTS))
    return find_other_weights(replace(evidence, passes=passes, verdicts=verdicts))


WEIGHTS = ("layers.0.q.weight", "layers.0.o.weight", "layers.1.q.weight", "layers.1.o.weight", "norm.weight")
LOADED = "if the job loaded this folder"


@pytest.mark.parametrize(
    ("differing", "steps", "sentence", "checks_loading"),
    [
        (WEIGHTS[:1], (0, 1), "than pass 1 did: layers.0.q.weight differs", True),
        (WEIGHTS[:2], (None,), "than pass 1 did: layers.0.{o,q}.weight", True),
        (WEIGHTS[:4], (0,), "than pass 1 did: ", False),
        # Behind a step of the job that was not replayed, all weights are other ones.
        (WEIGHTS[:1], (1,), "than pass 1 did, which the job had after 1 step: layers.0.q.weight differs", False),
    ],
)
def test_other_weights_are_named_with_the_step_they_are_of(
    differing: Sequence[str], steps: Sequence[int | None], sentence: str, checks_loading: bool
) -> None:
    cause = find_cause_of_weights(differing=differing, compared=WEIGHTS, steps=steps)
    assert cause is not None
    assert (cause.name, cause.sureness) == (CauseName.OTHER_WEIGHTS, Sureness.IS)
    assert cause.sentence.startswith(f"the replay runs on other weights {sentence.partition('{')[0]}")
    assert str(cause.try_next).startswith(LOADED) is checks_loading


def test_the_first_element_that_differs_is_told() -> None:
    first = DifferingElement(name="norm.weight", index=3, recorded=1.0, replayed=0.5)
    cause = find_cause_of_weights(differing=["norm.weight"], compared=WEIGHTS, first=first)
    assert cause is not None
    assert ": element 3 of norm.weight is 1 in the job, 0.5 here" in cause.sentence


def test_a_pass_that_was_judged_or_another_reason_shows_no_other_weights() -> None:
    evidence = make_forward_evidence(LOSS)
    assert find_other_weights(evidence) is None
    assert find_other_weights(replace(evidence, verdicts=[])) is None
    other = replace(evidence.verdicts[0], index=1, outcome=Outcome.CANNOT_TELL, reason=OTHER_WEIGHTS)
    assert find_other_weights(replace(evidence, verdicts=[other, evidence.verdicts[0]])) is None
    failed = replace(evidence.verdicts[0], outcome=Outcome.CANNOT_TELL, reason="the pass failed")
    assert find_other_weights(replace(evidence, verdicts=[failed])) is None


@pytest.mark.parametrize(
    ("moves", "name", "words"),
    [
        # None moves in the job: that is no parameter that was left out.
        ([0.0] * 8, CauseName.WEIGHTS_CHANGED, "something besides the optimizer changed them"),
        ([1.0] * 3 + [30.0] * 5, CauseName.WEIGHTS_CHANGED, "most of 8 samples are off by many times"),
        ([1.0] * 5 + [30.0] * 3, CauseName.WEIGHTS_CHANGED, "something besides the optimizer changed them"),
        ([1.0] * 7 + [0.0], CauseName.OPTIMIZER, "no step of the job moves model.layers.7.weight"),
    ],
)
def test_how_far_the_weights_moved_tells_what_moved_them(moves: Sequence[float], name: CauseName, words: str) -> None:
    cause = judge_update(moves)
    assert (cause.name, cause.sureness) == (name, Sureness.PROBABLY)
    assert words in cause.sentence


def test_an_optimizer_of_torchs_own_is_not_named() -> None:
    assert judge_update([1.5] * 8, stepping_actor=ActorSpec()).name is CauseName.WEIGHTS_CHANGED
