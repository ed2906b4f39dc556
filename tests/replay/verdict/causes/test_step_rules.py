"""Steps that are taken twice or left out, and clipping by another norm: made steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from actor_init.spec import ActorSpec
from capture.file_format.optimizer_state import StateSample
from replay.tolerances.job_bounds import GRAD_NORM, GRADIENT_NORMS, LOSS, STEPPED
from replay.verdict.causes.cause import CauseName, Sureness
from replay.verdict.causes.clipping import find_other_norm
from replay.verdict.causes.evidence import CauseEvidence
from replay.verdict.causes.step_rules import (
    EXPLAINED,
    find_left_out_parameters,
    find_other_moments,
    find_other_optimizer,
    find_other_state,
    find_repeated_steps,
    find_settings_of_ranks,
    find_untaken_passes,
)
from replay.verdict.findings import FindingStatus, judge_number
from replay.verdict.pass_weights import find_miscounted_steps
from replay.verdict.pass_weights import find_settings_of_ranks as find_settings_of_rank_windows
from replay.verdict.recorded_pass import MISSING_GRADIENT, OPTIMIZER, OPTIMIZER_STATE
from tests.replay.verdict.causes.made_evidence import (
    SETTINGS,
    draw_gradients,
    make_forward_evidence,
    make_gradient_evidence,
    make_verdict,
    make_window,
)

SOUND = draw_gradients()


def make_steps(
    counts: Sequence[tuple[int, ...]],
    left_out: Sequence[int] = (),
    *,
    begins_with_state: bool = True,
    numbers: Sequence[int] | None = None,
) -> CauseEvidence:
    """Passes of which each ends a step before which the optimizer had counted so many; some are in no step.

    numbers  of the steps that are recorded; None: all are
    """
    passes = []
    for index, state_steps in zip(numbers or range(len(counts)), counts, strict=True):
        [compared] = make_window([SOUND], SOUND, index=index)
        step = compared.recorded.step_after
        assert step is not None
        step = (
            None
            if index in left_out
            else replace(step, has_state=begins_with_state or index > 0, state_steps=state_steps)
        )
        passes.append(replace(compared, recorded=replace(compared.recorded, step_after=step)))
    return replace(make_forward_evidence(LOSS), passes=passes)


def test_an_optimizer_that_counts_two_for_each_step_takes_two() -> None:
    cause = find_repeated_steps(make_steps([(1,), (2, 3), (4, 5), (6, 7)]))
    assert cause is not None
    assert (cause.name, cause.sureness) == (CauseName.STEPS_SKIPPED, Sureness.IS)
    assert "takes 2 steps for each" in cause.sentence


@pytest.mark.parametrize(
    ("numbers", "counts", "num_each"),
    [
        # Every second or third step is recorded, or some are, of an optimizer that counts as the loop does.
        ([0, 2, 4], [0, 2, 4], None),
        ([0, 3, 6, 9], [0, 3, 6, 9], None),
        ([0, 1, 4], [0, 1, 4], None),
        ([5, 7, 9], [105, 107, 109], None),
        # It takes two or three for each.
        ([0, 2, 4], [0, 4, 8], 2),
        ([0, 1, 3], [0, 2, 6], 2),
        ([1, 3, 7], [3, 9, 21], 3),
        # What it takes is not the same for each, or no whole number of at least two.
        ([0, 2, 4], [0, 4, 6], None),
        ([0, 2, 4], [0, 3, 6], None),
        ([0, 2, 4], [0, 1, 2], None),
    ],
)
def test_of_steps_that_are_recorded_with_gaps_those_between_are_counted(
    numbers: list[int], counts: list[int], num_each: int | None
) -> None:
    cause = find_repeated_steps(make_steps([(count,) for count in counts], numbers=numbers))
    assert (cause is None) is (num_each is None)
    if cause is not None:
        assert f"takes {num_each} steps for each" in cause.sentence
        said = f"counted {counts[0]} before step {numbers[0] + 1} and {counts[-1]} before step {numbers[-1] + 1}"
        assert said in cause.sentence


@pytest.mark.parametrize(
    ("counts", "name", "words"),
    [
        ([0, 2, 4], None, ""),
        ([0, 2, 0], CauseName.OPTIMIZER_STATE, "had counted 0 steps before step 5, after 4 in the recording"),
        ([0, 2, 3], CauseName.STEPS_SKIPPED, "had counted 3 steps before step 5, and was seen to take 4"),
        ([0, 3, 5], CauseName.STEPS_SKIPPED, "had counted 3 steps before step 3, and was seen to take 2"),
        ([0, 2, 6], CauseName.STEPS_SKIPPED, "had counted 6 steps before step 5, and was seen to take 4"),
    ],
)
def test_the_counts_of_steps_that_are_recorded_with_gaps_tell_what_those_of_all_tell(
    counts: list[int], name: CauseName | None, words: str
) -> None:
    evidence = make_steps([(count,) for count in counts], numbers=[0, 2, 4])
    wrong = judge_number(OPTIMIZER_STATE, 2.0, 1.0, difference=1.0, bound=0.1)
    evidence = replace(evidence, verdicts=[make_verdict(4, [wrong], optimizer_step=4)])
    cause = find_other_state(evidence)
    assert (None if cause is None else cause.name) == name
    assert words in ("" if cause is None else cause.sentence)
    # Which step the further ones came behind is not known, and those that are not recorded are no further ones.
    assert not any(find_miscounted_steps([compared], evidence.passes, SETTINGS) for compared in evidence.passes)
    # Nor is a pass of a step that is not recorded one that no step took.
    assert find_untaken_passes(evidence) is None


@pytest.mark.parametrize(
    ("counts", "name", "sureness"),
    [
        # As where the job goes on with the module inside of its wrapper: no pass of the last three steps is recorded.
        ([(0,), (1,), (2, 5)], CauseName.STEPS_SKIPPED, Sureness.PROBABLY),
        ([(0,), (1, 5), (2, 6)], CauseName.OPTIMIZER_STATE, Sureness.IS),
    ],
)
def test_uneven_counts_of_the_last_recorded_step_may_be_of_steps_behind_it(
    counts: Sequence[tuple[int, ...]], name: CauseName, sureness: Sureness
) -> None:
    evidence = make_steps(counts)
    wrong = judge_number(OPTIMIZER_STATE, 2.0, 1.0, difference=1.0, bound=0.1)
    evidence = replace(evidence, verdicts=[make_verdict(9, [wrong], optimizer_step=2)])
    cause = find_other_state(evidence)
    assert cause is not None
    assert (cause.name, cause.sureness, cause.explains) == (name, sureness, EXPLAINED)
    assert (find_other_moments(evidence) is None) is (name is CauseName.STEPS_SKIPPED)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([{"lr": 0.5}, {"lr": 0.25}], "learning rate 0.5 on rank 0, 0.25 on rank 1"),
        ([{"lr": 0.5, "weight_decay": 0.1}, {"lr": 0.5}], "weight decay 0.1 on rank 0, nothing on rank 1"),
        ([{"lr": 0.5}, {"lr": 0.5}], ""),
        # Each rank steps parameters of its own.
        ([{"lr": 0.5, "parameters": "0"}, {"lr": 0.25, "parameters": "1"}], ""),
    ],
)
def test_ranks_that_hold_whole_models_and_step_with_other_settings(
    settings: Sequence[dict[str, Any]], says: str, is_sharded: bool
) -> None:
    window = []
    for compared, group in zip(make_window([SOUND, SOUND], SOUND), settings, strict=True):
        step = compared.recorded.step_after
        assert step is not None
        comparison = replace(compared.recorded.weight_comparison, is_sharded=is_sharded)
        step = replace(step, settings=[{"num_parameters": 1, **group}])
        window.append(
            replace(compared, recorded=replace(compared.recorded, step_after=step, weight_comparison=comparison))
        )
    findings = find_settings_of_rank_windows(window)
    evidence = replace(make_forward_evidence(), verdicts=[make_verdict(1, findings, optimizer_step=0)])
    cause = find_settings_of_ranks(evidence)
    assert [cause is not None, bool(findings)] == [bool(says) and not is_sharded] * 2
    if cause is not None:
        assert (cause.name, cause.sureness) == (CauseName.OPTIMIZER, Sureness.IS)
        assert f" in step 1: {says}: " in cause.sentence
        assert findings[0].status is FindingStatus.UNSETTLED


def test_an_optimizer_without_a_state_had_counted_no_step() -> None:
    assert find_repeated_steps(make_steps([(), (2,), (4,)])) is None
    evidence = make_steps([(), (2,), (4,)], begins_with_state=False)
    cause = find_repeated_steps(evidence)
    assert cause is not None
    assert "it has counted 0 before step 1 and 4 before step 3" in cause.sentence
    assert find_miscounted_steps([evidence.passes[0]], evidence.passes, SETTINGS)


@pytest.mark.parametrize("counts", [[(0,), (1,), (2,)], [(0,), (2,)], [(0,), (2,), (3,)], [(), (), ()]])
def test_an_optimizer_that_counts_as_it_steps_has_no_such_cause(counts: Sequence[tuple[int, ...]]) -> None:
    assert find_repeated_steps(make_steps(counts)) is None


@pytest.mark.parametrize(
    ("counts", "numbers"),
    [
        ([(1,), (2, 3), (4, 5)], [0, 1]),  # as where each step of two optimizers is taken twice
        ([(0,), (1,), (2,)], []),
        ([(4,), (4, 5), (3, 6)], []),  # an expert that no token took counts fewer
        ([(), (1,), (2,)], []),
        ([(2,), (1,), (2,)], []),
    ],
)
def test_a_step_behind_which_more_are_counted_is_unsettled_where_none_is_replayed(
    counts: Sequence[tuple[int, ...]], numbers: Sequence[int]
) -> None:
    passes = make_steps(counts).passes
    stepping = replace(SETTINGS, stepping_actor=ActorSpec())

    found = [find_miscounted_steps([compared], passes, SETTINGS) for compared in passes]

    assert [index for index, findings in enumerate(found) if findings] == numbers
    assert all((finding.name, finding.is_evidence) == (OPTIMIZER, False) for findings in found for finding in findings)
    assert not any(find_miscounted_steps([compared], passes, stepping) for compared in passes)


def test_a_pass_between_others_that_no_step_took_is_named() -> None:
    cause = find_untaken_passes(make_steps([(0,), (1,), (1,), (2,)], left_out=[1]))
    assert cause is not None
    assert (cause.name, cause.sureness) == (CauseName.STEPS_SKIPPED, Sureness.PROBABLY)
    assert "the gradient of pass 2" in cause.sentence
    # The last pass of a recording may have been cut off before its step.
    assert find_untaken_passes(make_steps([(0,), (1,), (2,), (3,)], left_out=[3])) is None


@pytest.mark.parametrize(
    ("off", "missing", "is_found"), [(0.0, [], True), (1.0, [], False), (0.0, [MISSING_GRADIENT], False)]
)
def test_a_norm_that_is_not_that_of_the_parts_is_one_of_another_clipping(
    off: float, missing: Sequence[str], is_found: bool
) -> None:
    """Where parameters have no gradient in the job, its norm is of the others."""
    findings = [
        *(judge_number(name, 0.0, 3.0, difference=1.0, bound=0.0) for name in missing),
        judge_number(GRAD_NORM, 5.0, 4.0, difference=0.25, bound=1e-4),
        judge_number(GRADIENT_NORMS, 1.0 + off, 1.0, difference=off, bound=1e-3),
    ]
    evidence = CauseEvidence(
        passes=[], windows=[], verdicts=[make_verdict(0, findings, optimizer_step=0)], settings=SETTINGS, environment={}
    )
    cause = find_other_norm(evidence)
    assert (cause is not None) is is_found
    assert cause is None or cause.name is CauseName.CLIPPING


@pytest.mark.parametrize(("off", "is_found"), [(0.0, True), (1.0, False)])
def test_moments_of_another_gradient_are_told_where_the_gradient_agrees(off: float, is_found: bool) -> None:
    findings = [
        judge_number(GRADIENT_NORMS, 1.0 + off, 1.0, difference=off, bound=1e-3),
        judge_number(OPTIMIZER_STATE, 0.1, 0.9, difference=1.0, bound=1e-3),
    ]
    evidence = CauseEvidence(
        passes=[], windows=[], verdicts=[make_verdict(1, findings, optimizer_step=1)], settings=SETTINGS, environment={}
    )
    cause = find_other_moments(evidence)
    assert (cause is not None) is is_found
    assert cause is None or (cause.name, cause.sureness) == (CauseName.GRADIENTS_CHANGED, Sureness.PROBABLY)


@pytest.mark.parametrize(("squares", "is_reset"), [((0.0, 0.0), True), ((0.0, 0.1), False)])
def test_moments_that_are_all_0_behind_a_step_were_reset(squares: tuple[float, ...], is_reset: bool) -> None:
    [compared] = make_window([SOUND], SOUND, index=1)
    assert compared.recorded.step_after is not None
    state = StateSample(name="a", shape=(2,), start=0, values={"exp_avg": (0.1, 0.2), "exp_avg_sq": squares})
    step = replace(compared.recorded.step_after, state=(state,))
    window = [replace(compared, recorded=replace(compared.recorded, step_after=step))]
    cause = find_other_moments(make_gradient_evidence(window, names=(OPTIMIZER_STATE,)))
    assert cause is not None
    assert (cause.name is CauseName.OPTIMIZER_STATE, cause.sureness is Sureness.IS) == (is_reset, is_reset)
    assert ("exp_avg_sq was 0 before the job's step 2" in cause.sentence) is is_reset


def make_state_evidence(
    counts: Sequence[tuple[int, ...]], *, step: int | None = 2, name: str = OPTIMIZER_STATE, **settings: Any
) -> CauseEvidence:
    """Steps before which the optimizer had counted so many; `name` is wrong at `step`, or in a forward behind all."""
    evidence = make_steps(counts)
    wrong = judge_number(name, 2.0, 1.0, difference=1.0, bound=0.1)
    verdict = make_verdict(len(counts) - 1, [wrong], optimizer_step=step)
    return replace(evidence, verdicts=[verdict], settings=replace(SETTINGS, **settings))


@pytest.mark.parametrize(
    ("counts", "name", "words"),
    [
        ([(0,), (1,), (0,)], CauseName.OPTIMIZER_STATE, "had counted 0 steps before step 3, after 2 in the recording"),
        ([(0,), (9,), (4,)], CauseName.STEPS_SKIPPED, "had counted 9 steps before step 2, and was seen to take 1"),
        ([(5,), (6,), (7,)], CauseName.OPTIMIZER_STATE, "held the state of 5 steps before step 1"),
        ([(5,), (6,), (4,)], CauseName.OPTIMIZER_STATE, "held the state of 5 steps before step 1"),
        ([(0,), (1,), (1,)], CauseName.STEPS_SKIPPED, "had counted 1 step before step 3, and was seen to take 2"),
    ],
)
def test_what_the_counts_of_an_optimizer_tell(counts: Sequence[tuple[int, ...]], name: CauseName, words: str) -> None:
    cause = find_other_state(make_state_evidence(counts))
    assert cause is not None
    assert (cause.name, cause.sureness, cause.explains) == (name, Sureness.IS, EXPLAINED)
    assert words in cause.sentence


@pytest.mark.parametrize(
    ("step", "name", "is_found"),
    [
        (2, OPTIMIZER_STATE, True),
        (2, STEPPED, True),
        # A wrong gradient comes before the step that it is of.
        (2, GRAD_NORM, False),
        (3, GRAD_NORM, True),
        (1, OPTIMIZER_STATE, False),
        # A forward behind three steps of the job.
        (None, LOSS, True),
    ],
)
def test_a_state_explains_what_is_wrong_behind_its_step_alone(step: int | None, name: str, is_found: bool) -> None:
    evidence = make_state_evidence([(0,), (1,), (0,), (1,)], step=step, name=name)
    assert (find_other_state(evidence) is not None) is is_found


def test_a_state_that_the_replay_was_given_is_no_cause() -> None:
    counts = [(5,), (6,), (7,)]
    assert find_other_state(make_state_evidence(counts)) is not None
    assert find_other_state(make_state_evidence(counts, loaded_counts=[5])) is None
    # Steps that are taken twice have a rule of their own.
    assert find_other_state(make_state_evidence([(0,), (2,), (4,)])) is None
    assert find_other_state(replace(make_state_evidence(counts), verdicts=[])) is None


def test_a_lost_state_says_how_to_keep_it() -> None:
    lost = find_other_state(make_state_evidence([(0,), (1,), (0,)]))
    begun = find_other_state(make_state_evidence([(5,), (6,), (7,)]))
    assert lost is not None
    assert begun is not None
    assert str(lost.try_next).startswith("keep the optimizer")
    assert str(begun.try_next).startswith("load the optimizer's state with the weights")


def make_optimizer_evidence(*texts: str, num_windows: int) -> CauseEvidence:
    """As many windows, the first of which have these words about their optimizers' settings."""
    windows = [make_window([SOUND], SOUND, index=index) for index in range(num_windows)]
    verdicts = []
    for index, text in enumerate(texts):
        finding = replace(judge_number(OPTIMIZER, 1.0, 2.0, difference=1.0, bound=0.0), values_as_text=text)
        verdicts.append(make_verdict(index, [finding], optimizer_step=index))
    passes = [compared for window in windows for compared in window]
    return replace(make_forward_evidence(), passes=passes, windows=windows, verdicts=verdicts)


RATE, OTHER_RATE = "learning rate 0.1 in the job, 0.01 here", "learning rate 0.2 in the job, 0.01 here"
CLIPPED, BETAS = "clipped to 1 in the job, to nothing here", "betas 0.9 in the job, 0.8 here"


@pytest.mark.parametrize(
    ("texts", "num_windows", "name"),
    [
        ([RATE, RATE], 2, CauseName.OPTIMIZER),
        ([RATE], 2, CauseName.SCHEDULE),
        ([RATE, OTHER_RATE], 2, CauseName.SCHEDULE),
        ([BETAS], 2, CauseName.OPTIMIZER),
        ([f"{RATE}; {BETAS}"], 2, CauseName.OPTIMIZER),
        ([f"{CLIPPED}"], 1, CauseName.CLIPPING),
        ([f"{CLIPPED}; {BETAS}"], 1, CauseName.OPTIMIZER),
        (["the job's optimizer is not known"], 1, None),
        ([], 1, None),
    ],
)
def test_settings_that_differ_are_of_the_optimizer_the_schedule_or_the_clipping(
    texts: Sequence[str], num_windows: int, name: CauseName | None
) -> None:
    cause = find_other_optimizer(make_optimizer_evidence(*texts, num_windows=num_windows))
    assert (cause is None) is (name is None)
    if cause is not None:
        assert (cause.name, cause.sureness, cause.explains) == (name, Sureness.IS, EXPLAINED)
        assert cause.sentence == f"{texts[0]}, since the job's step 1"


@pytest.mark.parametrize(
    ("in_groups", "num_frozen", "is_found"),
    [([4, 5], 0, True), ([5, 5], 0, False), ([4, 5], 1, False), ([0, 0], 0, False)],
)
def test_an_optimizer_of_fewer_parameters_than_are_trained_left_some_out(
    in_groups: Sequence[int], num_frozen: int, is_found: bool
) -> None:
    """The model has ten parameters."""
    evidence = make_steps([(0,), (1,)])
    passes = []
    for compared in evidence.passes:
        recorded = compared.recorded
        assert recorded.step_after is not None
        step = replace(recorded.step_after, settings=tuple({"num_parameters": number} for number in in_groups))
        weights = replace(recorded.weight_comparison, num_parameters=10)
        passes.append(
            replace(
                compared, recorded=replace(recorded, step_after=step, weight_comparison=weights, num_frozen=num_frozen)
            )
        )
    cause = find_left_out_parameters(replace(evidence, passes=passes))
    assert (cause is not None) is is_found
    if cause is not None:
        assert (cause.name, cause.sureness, cause.explains) == (CauseName.OPTIMIZER, Sureness.PROBABLY, EXPLAINED)
        assert "has 9 of 10 parameters that are trained" in cause.sentence
    assert find_left_out_parameters(replace(evidence, passes=passes, verdicts=[])) is None
    assert find_left_out_parameters(replace(evidence, passes=[])) is None


@pytest.mark.parametrize(
    ("changes", "is_found"),
    [({}, True), ({"trains": False}, False), ({"forward_number": None}, False), ({"rank": 1}, False)],
)
def test_a_pass_that_was_to_be_trained_on_is_missed_alone(changes: dict[str, Any], is_found: bool) -> None:
    """A rank that no step of is known may have taken its passes."""
    evidence = make_steps([(0,), (1,), (1,), (2,)], left_out=[1])
    passes = list(evidence.passes)
    passes[1] = replace(passes[1], recorded=replace(passes[1].recorded, **changes))
    cause = find_untaken_passes(replace(evidence, passes=passes))
    assert (cause is not None) is is_found
    assert cause is None or cause.explains == EXPLAINED
    assert find_untaken_passes(replace(evidence, passes=passes, verdicts=[])) is None


def test_moments_say_where_and_need_to_be_wrong_first() -> None:
    moments = judge_number(OPTIMIZER_STATE, 0.1, 0.9, difference=1.0, bound=1e-3, where="layers.0.weight")
    verdict = make_verdict(1, [moments], optimizer_step=1)
    evidence = replace(make_forward_evidence(), verdicts=[verdict])
    cause = find_other_moments(evidence)
    assert cause is not None
    assert cause.sentence.endswith("the recorded gradients are the replay's, and its moments (layers.0.weight) are not")
    assert cause.explains == EXPLAINED
    before = make_verdict(0, [judge_number(LOSS, 2.0, 1.0, difference=1.0, bound=0.1)])
    assert find_other_moments(replace(evidence, verdicts=[before, verdict])) is None


@pytest.mark.parametrize(
    ("exchanged", "sureness", "words"),
    [
        (
            [("a", "b"), ("b", "a")],
            Sureness.IS,
            "held of a before the job's step 1 is the given state of b, and so of 1",
        ),
        ([], Sureness.PROBABLY, "is not the given one: exp_avg of a, element 3, differs"),
    ],
)
def test_moments_that_differ_before_the_first_step_of_a_replay_with_a_given_state_are_of_another_state(
    exchanged: Sequence[tuple[str, str]], sureness: Sureness, words: str
) -> None:
    wrong = judge_number(OPTIMIZER_STATE, 2.0, 1.0, difference=1.0, bound=0.1, where="exp_avg of a, element 3")
    windows = [make_window([SOUND], SOUND, index=index) for index in range(2)]
    given = replace(SETTINGS, loaded_counts=(6,), exchanged_states=exchanged)
    at_first, later = (
        replace(
            make_gradient_evidence(*windows),
            settings=given,
            verdicts=[make_verdict(index, [wrong], optimizer_step=index)],
        )
        for index in range(2)
    )
    cause = find_other_moments(at_first)
    assert cause is not None
    assert (cause.name, cause.sureness) == (CauseName.OPTIMIZER_STATE, sureness)
    assert words in cause.sentence
    # A later state is of the gradients of the steps between, too.
    for evidence in (later, replace(at_first, settings=SETTINGS)):
        cause = find_other_moments(evidence)
        assert cause is not None
        assert cause.name is CauseName.GRADIENTS_CHANGED
