"""What is judged of a gradient's signatures, and by which bounds: made evidence."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from replay.tolerances.job_bounds import (
    GRAD_NORM,
    GRADIENT_NORMS,
    GRADIENT_RMS,
    LOSS,
    NoiseFloor,
    compute_norm_bound,
    compute_signature_bound,
    name_signature_floor,
)
from replay.verdict.findings import Finding, FindingStatus, VerdictSettings, judge_number
from replay.verdict.gradient_evidence import ComparedGradient, GradientEvidence, name_kind
from replay.verdict.signature_findings import do_some_signatures_agree, judge_signatures

BF16 = ["bfloat16", "bfloat16"]
Q_PROJS = [f"model.layers.{layer}.q_proj.weight" for layer in range(4)]
NORM = "model.norm.weight"
FLOORS = {
    name_signature_floor(name_kind(Q_PROJS[0])): NoiseFloor(value=0.03, num_values=16),
    name_signature_floor(NORM): NoiseFloor(value=0.01, num_values=4),
}
SETTINGS = VerdictSettings(dtype="bfloat16", num_layers=4, num_data_ranks=1, grad_accumulation=1, floors=FLOORS)


def make_compared(name: str, **changes: object) -> ComparedGradient:
    """Make a gradient that is the job's but for rounding."""
    sound = ComparedGradient(
        name=name,
        names=(name,),
        job_norm=2.01,
        replay_norm=2.0,
        least_norm=2.0,
        num_values=64,
        scale=1.0,
        cosine=0.9995,
        difference=0.03,
        job_size=1.0,
        size=1.0,
    )
    return replace(sound, **changes)  # type: ignore[arg-type]


def make_evidence(changed: Mapping[str, Mapping[str, object]]) -> GradientEvidence:
    names = [*Q_PROJS, NORM]
    parameters = {name: make_compared(name, **changed.get(name, {"difference": 0.01})) for name in names}
    kind = name_kind(Q_PROJS[0])
    together = replace(make_compared(kind, **changed.get(kind, {})), names=tuple(Q_PROJS))
    return GradientEvidence(parameters=parameters, kinds={kind: together})


def judge(
    changed: Mapping[str, Mapping[str, object]], settings: VerdictSettings = SETTINGS, doubt: str | None = None
) -> dict[str, Finding]:
    findings = judge_signatures(make_evidence(changed), settings, BF16, 0, doubt)
    return {finding.name: finding for finding in findings}


def test_a_sound_gradient_agrees_and_is_evidence() -> None:
    found = judge({})
    assert found.keys() == {GRADIENT_NORMS, GRADIENT_RMS}
    assert all(finding.agrees and finding.is_evidence for finding in found.values())
    assert (found[GRADIENT_NORMS].num_values, found[GRADIENT_RMS].num_values) == (6, 5 * 64)


@pytest.mark.parametrize(
    ("change", "quantity"),
    [
        ({"job_norm": 2.4}, GRADIENT_NORMS),
        ({"job_norm": 0.0}, GRADIENT_NORMS),
        ({"job_norm": float("inf")}, GRADIENT_NORMS),
        ({"difference": 2.0, "cosine": -1.0}, GRADIENT_RMS),
        ({"difference": 1.4, "cosine": 0.0}, GRADIENT_RMS),
    ],
)
def test_a_changed_gradient_differs(change: Mapping[str, object], quantity: str) -> None:
    found = judge({Q_PROJS[2]: change})
    assert (found[quantity].status, found[quantity].where) == (FindingStatus.DIFFERS, Q_PROJS[2])
    doubted = judge({Q_PROJS[2]: change}, doubt="another loss")
    assert doubted[quantity].status is FindingStatus.UNSETTLED


def test_a_kind_is_named_where_none_of_its_parameters_differs_alone() -> None:
    kind = name_kind(Q_PROJS[0])
    found = judge({kind: {"job_norm": 2.1}, **{name: {"job_norm": 2.1} for name in Q_PROJS}})
    assert (found[GRADIENT_NORMS].status, found[GRADIENT_NORMS].where) == (FindingStatus.DIFFERS, kind)


def test_a_kind_is_named_where_all_of_its_parameters_differ() -> None:
    kind = name_kind(Q_PROJS[0])
    longer = {"job_norm": 3.0}
    found = judge({kind: longer, **dict.fromkeys(Q_PROJS, longer)})
    assert (found[GRADIENT_NORMS].status, found[GRADIENT_NORMS].where) == (FindingStatus.DIFFERS, kind)
    found = judge({kind: longer, **dict.fromkeys((*Q_PROJS, NORM), longer)})
    assert found[GRADIENT_NORMS].where in (*Q_PROJS, NORM)


def test_each_ranks_own_whole_gradient_is_judged() -> None:
    evidence = make_evidence({})
    own = {**evidence.parameters, NORM: make_compared(NORM, job_norm=2.6, difference=1.0)}
    evidence = replace(evidence, ranks={0: evidence.parameters, 1: own})
    found = judge_signatures(evidence, SETTINGS, BF16, 0, None)
    assert [finding.where for finding in found if finding.status is FindingStatus.DIFFERS] == [f"{NORM}, rank 1"] * 2


def test_a_parameter_has_the_floor_of_its_kind_or_the_largest() -> None:
    kind = name_kind(Q_PROJS[0])
    assert SETTINGS.choose_signature_bound(kind, BF16, 0) == pytest.approx(0.12)
    # A floor of few values is less sure.
    assert SETTINGS.choose_signature_bound(NORM, BF16, 0) == pytest.approx(0.06)
    assert SETTINGS.choose_signature_bound("lm_head.weight", BF16, 0) == pytest.approx(0.12)
    assert replace(SETTINGS, floors={}).choose_signature_bound(NORM, BF16, 0) == pytest.approx(24 * 2 * 2**-8)
    assert replace(SETTINGS, floors={}).choose_signature_bound(NORM, ["float32"], 0) == 1e-3


def test_a_noisy_kind_hides_itself_alone() -> None:
    noisy = {name_signature_floor(NORM): NoiseFloor(value=0.9, num_values=4)}
    settings = replace(SETTINGS, floors={**FLOORS, **noisy})
    findings = judge_signatures(make_evidence({NORM: {"difference": 1.5}}), settings, BF16, 0, None)
    hidden = [finding for finding in findings if finding.status is FindingStatus.NOT_JUDGED]
    assert {finding.where for finding in hidden} == {NORM}
    assert {finding.name for finding in findings if finding.agrees} == {GRADIENT_NORMS, GRADIENT_RMS}


def test_elements_that_would_not_show_a_vanished_gradient_are_not_judged() -> None:
    """As of an embedding, few of whose rows have a gradient."""
    tiny = {"difference": 0.0, "size": 0.05, "job_size": 0.05}
    assert judge({})[GRADIENT_RMS].num_values - judge({Q_PROJS[0]: tiny})[GRADIENT_RMS].num_values == 64


def test_one_signature_that_agrees_shows_that_the_job_differentiated_this_loss() -> None:
    turned = {name: {"difference": 1.4} for name in Q_PROJS}
    assert do_some_signatures_agree(make_evidence(turned), SETTINGS, BF16, 0)
    assert not do_some_signatures_agree(make_evidence({**turned, NORM: {"difference": 1.4}}), SETTINGS, BF16, 0)


def test_a_sum_over_many_passes_in_bf16_has_a_wider_bound() -> None:
    floor = NoiseFloor(value=0.03, num_values=16)
    assert compute_signature_bound(BF16, 4, floor, 2) == pytest.approx(0.12, rel=0.01)
    assert compute_signature_bound(BF16, 4, floor, 256) == pytest.approx(0.135, rel=0.01)
    assert compute_signature_bound(["float32"], 4, None, 256) == 1e-3
    # A floor that is a lower limit widens the formula's bound, and narrows it not.
    formula = compute_signature_bound(BF16, 4, None)
    for value, bound in ((1e-4, formula), (1.0, 4.0)):
        limit = NoiseFloor(value=value, num_values=100, is_least=True)
        assert compute_signature_bound(BF16, 4, limit) == pytest.approx(bound)


def test_after_steps_bounds_are_those_of_the_passes_so_far_and_wider() -> None:
    kind = name_kind(Q_PROJS[0])
    later = {name_signature_floor(kind): NoiseFloor(value=0.05, num_values=16),
             GRAD_NORM: NoiseFloor(value=0.01, num_values=1)}  # fmt: skip
    settings = replace(SETTINGS, floors={}, step_floors={3: later})
    assert settings.choose_signature_bound(kind, BF16, 3) == pytest.approx(0.2)
    assert settings.choose_signature_bound(kind, BF16, 3, has_stepped=True) == pytest.approx(0.4)
    # The outlier factor of a single norm is beyond all use.
    assert later[GRAD_NORM].bound > 1
    assert settings.choose_bound(GRAD_NORM, BF16, 1, 3) == pytest.approx(0.2)


def test_norms_of_several_parameters_have_a_sharper_bound() -> None:
    bound = compute_signature_bound(BF16, 4, NoiseFloor(value=0.1, num_values=64))
    assert compute_norm_bound(bound, BF16) == pytest.approx(0.2)
    assert compute_norm_bound(bound, BF16, 4) == pytest.approx(0.1)
    assert compute_norm_bound(bound, BF16, 10_000) == pytest.approx(12 * 2**-8)


@pytest.mark.parametrize("name", [LOSS, GRADIENT_NORMS])
def test_a_bound_of_half_its_size_judges_no_loss_and_no_gradient(name: str) -> None:
    hidden = judge_number(name, 1.0, 1.4, difference=0.4, bound=0.51)
    assert (hidden.status, hidden.is_evidence) == (FindingStatus.NOT_JUDGED, False)
    assert judge_number(name, 1.0, 1.6, difference=0.6, bound=0.51).status is FindingStatus.DIFFERS
    assert judge_number(name, 1.0, 1.4, difference=0.4, bound=0.49).agrees


def test_what_each_rank_has_whole_is_judged_by_rank_and_not_once_more() -> None:
    """Two ranks have the norm whole, and of the projections each has a part, which is judged with the other's."""
    whole = {rank: {NORM: make_compared(NORM)} for rank in (0, 1)}
    parameters = {name: make_compared(name) for name in (NORM, *Q_PROJS)}
    norms, elements = judge_signatures(GradientEvidence(parameters=parameters, ranks=whole), SETTINGS, BF16, 0, None)
    assert (norms.num_values, elements.num_values) == (6, 6 * 64)
    # A rank's own that differs is named with the rank, though the first one's agrees.
    whole[1][NORM] = make_compared(NORM, difference=1.5, job_norm=5.0)
    found = judge_signatures(GradientEvidence(parameters=parameters, ranks=whole), SETTINGS, BF16, 0, None)
    assert [finding.where for finding in found] == [f"{NORM}, rank 1"] * 2
    assert {finding.status for finding in found} == {FindingStatus.DIFFERS}
