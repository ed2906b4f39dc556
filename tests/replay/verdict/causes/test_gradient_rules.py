"""Which cause explains a wrong gradient: made gradients, whose faults are known."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from capture.file_format.optimizer_step import Sample
from replay.tolerances.job_bounds import GRAD_NORM, GRADIENT, NoiseFloor, name_signature_floor
from replay.verdict.causes.cause import CauseName, Sureness
from replay.verdict.causes.gradient_rules import find_earlier_gradients
from replay.verdict.causes.table import find_causes
from replay.verdict.dropout_masks import PROVEN_MASKS
from replay.verdict.findings import judge_number
from replay.verdict.gradient_findings import UNKNOWN_OBJECTIVE
from replay.verdict.gradient_mix import SinglePassGradient
from replay.verdict.model_facts import ModelDifference, ModelDifferenceKind
from replay.verdict.recorded_pass import MISSING_GRADIENT, OPTIMIZER
from tests.replay.verdict.causes.made_evidence import (
    NAMES,
    Gradients,
    draw_gradients,
    make_gradient_evidence,
    make_verdict,
    make_window,
    measure_norm,
    sample_replay,
    scale_gradients,
    transpose_gradient,
)

SOUND = draw_gradients()
OTHER = draw_gradients(1)
Q_PROJ = NAMES[1]


def add_gradients(*parts: tuple[float, Gradients]) -> Mapping[str, Sequence[float]]:
    return {
        name: [sum(factor * part[name][place] for factor, part in parts) for place in range(len(SOUND[name]))]
        for name in NAMES
    }


@pytest.mark.parametrize(
    ("job", "name", "words"),
    [
        (scale_gradients(SOUND, 10), CauseName.GRADIENTS_SCALED, "each gradient is 10 times that of the loss"),
        (scale_gradients(SOUND, 1024), CauseName.GRADIENTS_SCALED, "a loss scale?"),
        (scale_gradients(SOUND, -1, "mlp"), CauseName.GRADIENTS_SCALED, "mlp.up_proj.weight is -1 times"),
        (scale_gradients(SOUND, 0.5, "layers.1."), CauseName.GRADIENTS_SCALED, "0.5 times that of the loss"),
        ({**SOUND, Q_PROJ: transpose_gradient(SOUND[Q_PROJ])}, CauseName.GRADIENTS_CHANGED, f"gradient of {Q_PROJ}"),
        (scale_gradients(SOUND, 0, "mlp"), CauseName.NO_GRADIENT, "mlp.up_proj.weight is zero in the job"),
    ],
)
def test_what_is_wrong_with_a_gradient_of_one_rank(job: Gradients, name: CauseName, words: str) -> None:
    cause = find_causes(make_gradient_evidence(make_window([job], SOUND)))[0]
    # Without a hook that was recorded, it may come of a term that the loop added to the loss.
    is_sure = name is not CauseName.GRADIENTS_CHANGED
    assert (cause.name, cause.sureness) == (name, Sureness.IS if is_sure else Sureness.PROBABLY)
    assert words in cause.sentence
    assert ("a term that the loop adds" in (cause.try_next or "")) is not is_sure
    assert "since the job's step 1" in cause.sentence


def test_a_factor_behind_a_step_that_was_another_one_is_no_cause_of_its_own() -> None:
    """Its gradient is of other weights, as where the job clips and the replay does not."""
    windows = [make_window([SOUND], SOUND), make_window([scale_gradients(SOUND, 0.9988, "embed")], SOUND, index=1)]
    evidence = make_gradient_evidence(*windows)
    [cause] = find_causes(evidence)
    # A factor so near to 1 may come of a term that the loop added to the loss.
    assert (cause.name, cause.sureness) == (CauseName.GRADIENTS_SCALED, Sureness.PROBABLY)
    assert "a term that the loop adds" in (cause.try_next or "")
    step = judge_number(OPTIMIZER, 1.0, 0.0, difference=1.0, bound=0.1)
    step = replace(step, values_as_text="clipped to 1 in the job, to nothing here")
    first = make_verdict(0, [step], optimizer_step=0)
    causes = find_causes(replace(evidence, verdicts=[first, *evidence.verdicts]))
    assert [cause.name for cause in causes] == [CauseName.CLIPPING]


@pytest.mark.parametrize(("factor", "sureness"), [(1.3, Sureness.PROBABLY), (3.0, Sureness.IS)])
def test_a_factor_that_rounding_may_give_is_not_sure(factor: float, sureness: Sureness) -> None:
    """By these floors rounding may take the norm of a single parameter 0.4 from itself."""
    floors = {name_signature_floor("model.layers.*.mlp.up_proj.weight"): NoiseFloor(value=0.2, num_values=64)}
    evidence = make_gradient_evidence(make_window([scale_gradients(SOUND, factor, "mlp")], SOUND, dtype="bfloat16"))
    cause = find_causes(replace(evidence, settings=replace(evidence.settings, floors=floors)))[0]
    assert (cause.name, cause.sureness) == (CauseName.GRADIENTS_SCALED, sureness)


@pytest.mark.parametrize(("of_one", "sureness"), [(1.7, Sureness.PROBABLY), (1.5, Sureness.IS)])
def test_one_factor_of_all_is_sure_where_rounding_explains_what_single_ones_are_off(
    of_one: float, sureness: Sureness
) -> None:
    job = {**scale_gradients(SOUND, 1.5), Q_PROJ: [of_one * value for value in SOUND[Q_PROJ]]}
    cause = find_causes(make_gradient_evidence(make_window([job], SOUND, dtype="bfloat16")))[0]
    assert (cause.name, cause.sureness) == (CauseName.GRADIENTS_SCALED, sureness)
    assert "each gradient is 1.5 times" in cause.sentence


@pytest.mark.parametrize(("num_tokens", "is_padding"), [(49, True), (60, False)])
def test_a_factor_that_is_the_losss_share_of_all_positions_is_a_mean_over_padding(
    num_tokens: int, is_padding: bool
) -> None:
    """Two rows of 50 tokens have 98 positions that predict one."""
    window = make_window([scale_gradients(SOUND, 0.5)], SOUND)
    window = [replace(member, recorded=replace(member.recorded, num_tokens=num_tokens)) for member in window]
    cause = find_causes(make_gradient_evidence(window))[0]
    assert ("the loss's tokens are 0.5 of all positions" in cause.sentence) is is_padding
    assert cause.sureness is (Sureness.PROBABLY if is_padding else Sureness.IS)


def test_a_loss_that_is_divided_by_tokens_without_a_loss_is_told_from_a_factor() -> None:
    """As transformers' Trainer counts labels that its model's shift leaves out."""
    window = make_window([scale_gradients(SOUND, 277 / 279)], SOUND)
    window = [replace(each, recorded=replace(each.recorded, num_tokens=277, divisor=279.0)) for each in window]
    [cause] = find_causes(make_gradient_evidence(window))
    assert cause.sentence.startswith(
        "the job's loss is divided by 279 tokens (num_items_in_batch), and 277 of the step"
    )


def test_changed_gradients_lead_to_what_the_recording_states() -> None:
    stated = ModelDifference(
        kind=ModelDifferenceKind.FORWARD, where="model.layers.*.mlp.gate", job="own.py:fused_gate", replay=None
    )
    evidence = make_gradient_evidence(make_window([{**SOUND, Q_PROJ: OTHER[Q_PROJ]}], SOUND))
    evidence = replace(evidence, settings=replace(evidence.settings, model_differences=[stated]))
    cause = find_causes(evidence)[0]
    assert (cause.name, cause.sureness) == (CauseName.GRADIENTS_CHANGED, Sureness.PROBABLY)
    assert cause.try_next is not None
    assert "own.py:fused_gate" in cause.try_next


@pytest.mark.parametrize(("where", "is_its_own"), [("model.embed_tokens", True), ("model.layers.1.mlp.up_proj", False)])
def test_a_setting_of_the_only_module_whose_gradient_is_another_one_is_no_other_model(
    where: str, is_its_own: bool
) -> None:
    """As `scale_grad_by_freq` of an embedding: another forward would change the gradients around it too."""
    stated = ModelDifference(
        kind=ModelDifferenceKind.ATTRIBUTE, where=where, key="scale_grad_by_freq", job="True", replay="False"
    )
    name = "model.embed_tokens.weight"
    evidence = make_gradient_evidence(make_window([{**SOUND, name: OTHER[name]}], SOUND))
    first = find_causes(replace(evidence, settings=replace(evidence.settings, model_differences=[stated])))[0]
    assert (first.name is CauseName.GRADIENTS_CHANGED) is is_its_own
    assert (first.sureness is Sureness.IS) is is_its_own
    assert "scale_grad_by_freq" in f"{first.sentence} {first.try_next}"


@pytest.mark.parametrize(
    ("gradient", "name"),
    [(OTHER, CauseName.GRADIENTS_CHANGED), (scale_gradients(SOUND, 3), CauseName.GRADIENTS_SCALED)],
)
def test_a_hook_on_the_only_parameter_whose_gradient_is_another_one_is_named_with_it(
    gradient: Gradients, name: CauseName
) -> None:
    stated = ModelDifference(
        kind=ModelDifferenceKind.PARAMETER_HOOK, where=Q_PROJ, key="gradient hook", job="job.py:<lambda>", replay=None
    )
    evidence = make_gradient_evidence(make_window([{**SOUND, Q_PROJ: gradient[Q_PROJ]}], SOUND))
    cause = find_causes(replace(evidence, settings=replace(evidence.settings, model_differences=[stated])))[0]
    assert (cause.name, cause.sureness) == (name, Sureness.IS)
    assert cause.sentence.endswith(f"; the job has a gradient hook of {Q_PROJ}: job.py:<lambda>")


def test_a_gradient_whose_sampled_elements_are_the_losss_is_not_scaled() -> None:
    """As where `padding_idx` leaves a row of an embedding without a gradient: the norm shows it, and no sample may."""
    window = make_window([SOUND], SOUND)
    step = window[0].recorded.step_after
    assert step is not None
    signatures = [replace(each, norm=0.98 * each.norm) if "embed" in each.name else each for each in step.signatures]
    window[0] = replace(
        window[0], recorded=replace(window[0].recorded, step_after=replace(step, signatures=signatures))
    )
    cause = find_causes(make_gradient_evidence(window))[0]
    assert cause.name is CauseName.GRADIENTS_CHANGED
    assert "0.98 times the length, and the elements that were sampled of it are the loss's" in cause.sentence


def test_a_sound_gradient_has_no_cause() -> None:
    causes = find_causes(make_gradient_evidence(make_window([SOUND], SOUND)))
    # Though the evidence says that its norm differs, nothing is known about why.
    assert {cause.sureness for cause in causes} == {Sureness.MAY_BE}


def test_a_factor_that_was_recorded_is_one_on_the_loss() -> None:
    [cause] = find_causes(make_gradient_evidence(make_window([scale_gradients(SOUND, 10)], SOUND, share=10.0)))
    assert cause.sentence.startswith("the job differentiates 10 times its loss")


def test_a_short_last_window_is_not_divided_by_the_number_of_a_full_one() -> None:
    full, pair = make_window([SOUND], SOUND), make_window([SOUND], SOUND, index=1)
    short = make_window([scale_gradients(SOUND, 0.5)], SOUND, index=2, share=0.5)
    [cause] = find_causes(make_gradient_evidence([*full, *pair], short))
    assert (cause.name, cause.sureness) == (CauseName.WINDOW_WEIGHTS, Sureness.IS)
    assert cause.sentence.startswith("each loss is divided by the 2 passes of a full step, and the job's step 3 has 1")
    # Where all steps have one pass, it is a factor like any other.
    [cause] = find_causes(make_gradient_evidence(full, short))
    assert cause.name is CauseName.GRADIENTS_SCALED


def test_parameters_without_a_gradient_are_named_with_their_module() -> None:
    without = [name for name in NAMES if "layers.1.self_attn" in name]
    evidence = make_gradient_evidence(
        make_window([SOUND], SOUND, without=without), names=(MISSING_GRADIENT, GRAD_NORM, GRADIENT)
    )
    cause = find_causes(evidence)[0]
    assert (cause.name, cause.sureness) == (CauseName.NO_GRADIENT, Sureness.IS)
    # A loop may have dropped what the backward made: the sentence is true of both.
    assert cause.sentence.startswith("the job steps without a gradient for model.layers.1.self_attn")
    assert "set to None" in str(cause.try_next)


def test_ranks_with_gradients_of_their_own_did_not_reduce_them() -> None:
    evidence = make_gradient_evidence(make_window([SOUND, OTHER], add_gradients((0.5, SOUND), (0.5, OTHER))))
    cause = find_causes(evidence)[0]
    assert (cause.name, cause.sureness) == (CauseName.NOT_REDUCED, Sureness.IS)
    assert "all 7 parameters" in cause.sentence


@pytest.mark.parametrize(
    ("later_of_other_rank", "max_norm", "name", "sureness", "words"),
    [
        # What the optimizer steps with is each rank's own, as the weights show.
        (0.75, 0.5, CauseName.NOT_REDUCED, Sureness.IS, "each steps with its own"),
        (0.5, 0.5, CauseName.CLIPPING, Sureness.PROBABLY, "each rank clips its own gradient to a norm of 0.5 before"),
        (0.5, None, CauseName.NOT_REDUCED, Sureness.PROBABLY, "only in the optimizer's step"),
        # No pass behind the step tells, and what is clipped may be averaged later.
        (None, 0.5, CauseName.NOT_REDUCED, Sureness.PROBABLY, "each steps with its own"),
        # The step moved no weight: equal ones tell nothing.
        (1.0, None, CauseName.NOT_REDUCED, Sureness.IS, "each steps with its own"),
    ],
)
def test_ranks_with_the_same_weights_after_a_step_averaged_their_own_gradients(
    later_of_other_rank: float | None, max_norm: float | None, name: CauseName, sureness: Sureness, words: str
) -> None:
    """All weights are 1 before the step; rank 0's are 0.5 after it, or 1 where the step moved none."""
    window = [
        replace(member, recorded=replace(member.recorded, step_after=replace(step, max_norm=max_norm)))
        for member in make_window([SOUND, OTHER], add_gradients((0.5, SOUND), (0.5, OTHER)))
        if (step := member.recorded.step_after) is not None
    ]
    later = [] if later_of_other_rank is None else make_window([SOUND, SOUND], SOUND, index=1)
    evidence = make_gradient_evidence(window)
    first_value = 1.0 if later_of_other_rank == 1.0 else 0.5
    passes = [
        replace(member, recorded=replace(member.recorded, samples=sample_weights(value)))
        for member, value in zip([*window, *later], (1.0, 1.0, first_value, later_of_other_rank or 0.0), strict=False)
    ]
    evidence = replace(evidence, passes=passes)
    cause = find_causes(evidence)[0]
    assert (cause.name, cause.sureness) == (name, sureness)
    assert words in cause.sentence
    # What each pass's own gradient tells is no surer.
    own = [
        SinglePassGradient(index=0, data_rank=rank, rank=rank, forward=0, weight=0.5, gradient=sample_replay(gradients))
        for rank, gradients in enumerate((SOUND, OTHER))
    ]
    cause = find_causes(replace(evidence, single_pass_gradients=own))[0]
    assert (cause.name, cause.sureness) == (name, sureness)


def sample_weights(value: float) -> list[Sample]:
    return [Sample(name=name, dtype="float32", shape=(1,), start=0, values=(value,)) for name in NAMES]


def test_gradients_that_are_as_many_times_the_mean_as_there_are_ranks_were_probably_summed() -> None:
    doubled = scale_gradients(SOUND, 2)
    cause = find_causes(make_gradient_evidence(make_window([doubled, doubled], SOUND)))[0]
    assert (cause.name, cause.sureness) == (CauseName.SUMMED, Sureness.PROBABLY)
    # One rank cannot add up.
    cause = find_causes(make_gradient_evidence(make_window([doubled], SOUND)))[0]
    assert cause.name is CauseName.GRADIENTS_SCALED


@pytest.mark.parametrize(
    ("turned", "name"), [(NAMES[:5], CauseName.DROPOUT), (NAMES[1:2], CauseName.GRADIENTS_CHANGED)]
)
def test_most_gradients_turn_where_a_backward_has_other_dropout_masks(turned: Sequence[str], name: CauseName) -> None:
    job = {parameter: OTHER[parameter] if parameter in turned else values for parameter, values in SOUND.items()}
    window = [replace(compared, masks=PROVEN_MASKS) for compared in make_window([job], SOUND)]
    evidence = make_gradient_evidence(window)
    evidence = replace(evidence, settings=replace(evidence.settings, dropout=["attn_pdrop"]))
    cause = find_causes(evidence)[0]
    assert (cause.name, cause.sureness) == (name, Sureness.PROBABLY)
    # The gradient of another objective turns too, and tells nothing of masks.
    [verdict] = evidence.verdicts
    doubted = [replace(finding, doubt=UNKNOWN_OBJECTIVE) for finding in verdict.findings]
    evidence = replace(evidence, verdicts=[replace(verdict, findings=doubted)])
    assert CauseName.DROPOUT not in {cause.name for cause in find_causes(evidence)}


@pytest.mark.parametrize(
    ("own", "earlier", "words", "name", "sureness"),
    [
        (1, 1, "still holds", CauseName.NOT_CLEARED, Sureness.IS),
        (0, 1, "is that of the step before", CauseName.GRADIENTS_CHANGED, Sureness.PROBABLY),
    ],
)
def test_a_gradient_that_holds_the_last_steps_was_not_cleared_or_is_late(
    own: float, earlier: float, words: str, name: CauseName, sureness: Sureness
) -> None:
    first = make_window([SOUND], SOUND)
    second = make_window([add_gradients((own, OTHER), (earlier, SOUND))], OTHER, index=1)
    cause = find_causes(make_gradient_evidence(first, second))[0]
    assert (cause.name, cause.sureness) == (name, sureness)
    assert words in cause.sentence
    assert "since the job's step 2" in cause.sentence


def test_each_rank_keeps_its_own_gradient_of_the_step_before() -> None:
    """Ranks that reduce nothing and clear nothing: each holds its own last gradient, and not the other's."""
    ranks = [SOUND, draw_gradients(5)]
    first = make_window(ranks, SOUND)
    second = make_window([add_gradients((1, OTHER), (1, own)) for own in ranks], OTHER, index=1)
    cause = find_earlier_gradients(make_gradient_evidence(first, second))
    assert cause is not None
    assert "it is 1 times the step's own and 1 times that of the step before" in cause.sentence
    exchanged = make_window([add_gradients((1, OTHER), (1, own)) for own in ranks[::-1]], OTHER, index=1)
    assert find_earlier_gradients(make_gradient_evidence(first, exchanged)) is None
    # The first window of a replay has none before it.
    assert find_earlier_gradients(make_gradient_evidence(second)) is None


def test_a_gradient_of_a_round_norm_was_clipped_by_the_jobs_own_code() -> None:
    clipped = scale_gradients(SOUND, 1 / measure_norm(SOUND))
    cause = find_causes(make_gradient_evidence(make_window([clipped], SOUND)))[0]
    assert (cause.name, cause.sureness) == (CauseName.CLIPPING, Sureness.PROBABLY)
    assert "a norm of 1" in cause.sentence


def test_a_buffer_of_other_values_probably_changes_a_gradient_that_shows_more_than_its_forward() -> None:
    zeros = ModelDifference(
        kind=ModelDifferenceKind.BUFFER, where="model.rotary_emb.inv_freq", job="0, 0", replay="1, 0.01"
    )
    evidence = make_gradient_evidence(make_window([{**SOUND, Q_PROJ: transpose_gradient(SOUND[Q_PROJ])}], SOUND))
    settings = replace(evidence.settings, model_differences=[zeros])
    cause = find_causes(replace(evidence, settings=settings))[0]
    assert (cause.name, cause.sureness) == (CauseName.POSITIONS, Sureness.PROBABLY)
    assert "model.rotary_emb.inv_freq is 0, 0 in the job" in cause.sentence


def test_a_stated_value_of_attention_goes_before_a_factor_of_some_gradients() -> None:
    """A cap of its scores may move the gradients of queries and keys alone, by nearly one factor."""
    cap = ModelDifference(
        kind=ModelDifferenceKind.ATTRIBUTE,
        where="model.layers.*.self_attn",
        key="attn_logit_softcapping",
        job="None",
        replay="50",
    )
    evidence = make_gradient_evidence(make_window([scale_gradients(SOUND, 1.002, "q_proj")], SOUND))
    settings = replace(evidence.settings, model_differences=[cap])
    cause = find_causes(replace(evidence, settings=settings))[0]
    assert (cause.name, cause.sureness) == (CauseName.MODEL_CODE, Sureness.PROBABLY)
    assert "attn_logit_softcapping" in cause.sentence
