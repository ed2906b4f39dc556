"""What the ends of the random generators prove, on plain data."""

from dataclasses import replace
from typing import Any

import pytest

from replay.tolerances.job_bounds import GRAD_NORM, LOSS
from replay.verdict.dropout_masks import MASKS, OTHER_MASKS, MaskStatus, compare_masks, drew_same_masks
from replay.verdict.findings import FindingStatus, VerdictSettings
from replay.verdict.judge import PassEvidence, judge
from replay.verdict.outcomes import Outcome, Verdict
from replay.verdict.random_draws import RandomDraws
from replay.verdict.recorded_pass import Claim, RecordedPass, ReplayedPass, WeightComparison
from tests.helpers.made_records import record

ENVIRONMENT = {"device": "CPU", "attention": "sdpa", "torch": "2.13.0", "compiled": "no"}
SETTING = VerdictSettings(
    dtype="float32",
    num_layers=2,
    num_data_ranks=1,
    grad_accumulation=1,
    dropout=["attention_dropout"],
    environment=ENVIRONMENT,
)
ON_GPU = replace(SETTING, environment={**ENVIRONMENT, "device": "H100"})
RIGHT, WRONG = (Claim(name=LOSS, values=[value], num_tokens=[80]) for value in (1.5, 1.6))
RIGHT_NORM, WRONG_NORM = (Claim(name=GRAD_NORM, values=[value]) for value in (4.0, 8.0))


def make_draws(end: bytes, device: str = "cpu", **changes: Any) -> RandomDraws:
    return RandomDraws(**{"before": {device: b"0"}, "after": {device: end}, "cpu_kind": b"torch", **changes})


NONE, FIVE, SIX = (make_draws(end) for end in (b"0", b"5", b"6"))
FIVE_ON_GPU, SIX_ON_GPU = (make_draws(end, "cuda") for end in (b"5", b"6"))


def make_recorded(*claims: Claim, draws: RandomDraws | None = FIVE, **changes: Any) -> RecordedPass:
    values: dict[str, Any] = {
        "rank": 0,
        "forward_number": 0,
        "world_size": 1,
        "trains": True,
        "weight_comparison": WeightComparison(compared=("a",), num_parameters=1),
        "num_frozen": 0,
        "dtypes": ["float32"],
        "environment": {**ENVIRONMENT, **({"device": "H100"} if draws is not None and "cuda" in draws.after else {})},
    }
    return RecordedPass(**{**values, "claims": claims, "draws": draws, **changes})


def make_replayed(draws: RandomDraws = FIVE, *, was_fed_as_captured: bool = True) -> ReplayedPass:
    return ReplayedPass(draws=draws, was_fed_as_captured=was_fed_as_captured)


def judge_pass(
    recorded: RecordedPass, replayed: ReplayedPass, setting: VerdictSettings = SETTING, **values: Any
) -> Verdict:
    """Judge a pass beside a replay's loss of 1.5 over 80 tokens, and a gradient norm of 4."""
    own = record(0, row_action_tokens=[30, 50], grad_norm=4.0, row_log_probs=[-30.0, -100.0], **values)
    return judge([PassEvidence(own, recorded, replayed)], setting)


def test_with_the_jobs_masks_a_number_that_is_off_differs_and_a_right_one_is_reproduced() -> None:
    assert judge_pass(make_recorded(WRONG), make_replayed()).outcome is Outcome.DIFFERS
    right = judge_pass(make_recorded(RIGHT, RIGHT_NORM), make_replayed())
    assert (right.outcome, right.windows[0].findings[0].status) == (Outcome.REPRODUCED, FindingStatus.AGREES)
    # One norm alone does not tell over how many passes it was accumulated, so it is unsettled, and not left out.
    wrong_norm = judge_pass(make_recorded(RIGHT, WRONG_NORM), make_replayed())
    assert wrong_norm.windows[0].findings[0].status is FindingStatus.UNSETTLED


@pytest.mark.parametrize("claim", [RIGHT, WRONG])
def test_with_other_masks_nothing_is_judged_though_it_agrees(claim: Claim) -> None:
    """The rows are packed here: the forward drew another number of random numbers."""
    verdict = judge_pass(
        make_recorded(claim, RIGHT_NORM), make_replayed(SIX, was_fed_as_captured=False), replace(SETTING, packs=True)
    )
    assert (verdict.outcome, verdict.window_counts) == (Outcome.CANNOT_TELL, {Outcome.CANNOT_TELL: 1})
    assert verdict.reason == f"{OTHER_MASKS}: rows are packed here, and other rows in the job. Try: --no-packing"
    assert {finding.status for finding in verdict.passes[0].findings} == {FindingStatus.NOT_JUDGED}


@pytest.mark.parametrize(
    ("recorded", "replayed", "setting", "why"),
    [
        (make_recorded(), make_replayed(was_fed_as_captured=False), SETTING, "the rows have another shape"),
        (
            make_recorded(environment={**ENVIRONMENT, "attention": "eager"}),
            make_replayed(),
            SETTING,
            "--attention eager",
        ),
        (make_recorded(environment={**ENVIRONMENT, "compiled": "yes"}), make_replayed(), SETTING, "compiled"),
        (make_recorded(draws=replace(FIVE, cpu_kind=b"mkl")), make_replayed(), SETTING, "this CPU draws"),
        (make_recorded(), make_replayed(), replace(SETTING, why_other_draws="--tp 2"), "--tp 2"),
        (make_recorded(), make_replayed(replace(FIVE, before={"cpu": b"1"})), SETTING, "did not begin where"),
        (make_recorded(draws=FIVE_ON_GPU), make_replayed(FIVE), SETTING, "the job ran on H100, this is CPU"),
        (make_recorded(draws=FIVE_ON_GPU, dtypes=["bfloat16"]), make_replayed(FIVE_ON_GPU), ON_GPU, "dtype"),
        (
            make_recorded(draws=FIVE_ON_GPU, environment={**ON_GPU.environment, "torch": "2.11.0"}),
            make_replayed(FIVE_ON_GPU),
            ON_GPU,
            "torch 2.11.0",
        ),
    ],
)
def test_equal_ends_prove_no_masks_under_other_conditions(
    recorded: RecordedPass, replayed: ReplayedPass, setting: VerdictSettings, why: str
) -> None:
    masks = compare_masks(recorded, replayed, setting)
    assert masks.status is not MaskStatus.SAME
    assert why in str(masks.why)
    assert judge_pass(replace(recorded, claims=[WRONG]), replayed, setting).outcome is Outcome.CANNOT_TELL


def test_the_kernel_of_attention_matters_where_dropout_acts_inside_it() -> None:
    outside = replace(SETTING, dropout=["resid_pdrop"], environment={**ENVIRONMENT, "attention": "eager"})
    assert compare_masks(make_recorded(), make_replayed(), outside).status is MaskStatus.SAME
    inside = replace(outside, dropout=["attn_pdrop"])
    assert compare_masks(make_recorded(), make_replayed(), inside).status is MaskStatus.NOT_PROVEN


def test_masks_that_are_not_proven_are_trusted_in_fp32_alone_where_all_numbers_agree() -> None:
    replayed = make_replayed(was_fed_as_captured=False)
    assert judge_pass(make_recorded(RIGHT), replayed).outcome is Outcome.REPRODUCED
    in_bf16 = judge_pass(make_recorded(RIGHT, dtypes=["bfloat16"]), replayed, replace(SETTING, dtype="bfloat16"))
    assert in_bf16.outcome is Outcome.CANNOT_TELL


def test_dropout_that_acts_in_the_job_alone_is_a_finding() -> None:
    setting = replace(SETTING, dropout=())
    verdict = judge_pass(
        make_recorded(WRONG, WRONG_NORM, draws=replace(FIVE, num_drawn=5)), make_replayed(NONE), setting
    )
    assert (verdict.outcome, verdict.window_counts) == (Outcome.DIFFERS, {Outcome.CANNOT_TELL: 1})
    finding, *others = verdict.passes[0].findings
    said = "the job's forward drew 5 random numbers, the replay's drew none"
    assert (finding.name, finding.values_as_text) == (MASKS, said)
    assert {other.status for other in others} == {FindingStatus.NOT_JUDGED}


def test_dropout_of_an_adapter_that_is_not_built_here_explains_that_none_acts() -> None:
    setting = replace(SETTING, dropout=(), why_no_draws="the adapter is not built")
    verdict = judge_pass(make_recorded(WRONG), make_replayed(NONE), setting)
    assert (verdict.outcome, verdict.reason) == (Outcome.CANNOT_TELL, f"{OTHER_MASKS}: the adapter is not built")


def test_dropout_that_acts_here_alone_is_a_finding_and_the_jobs_mode_is_said() -> None:
    mode = {"model": False, "parts": []}
    verdict = judge_pass(make_recorded(WRONG, draws=NONE, training=mode), make_replayed())
    assert verdict.outcome is Outcome.DIFFERS
    assert verdict.passes[0].findings[0].values_as_text == (
        "the job's forward, in eval mode, drew no random numbers, the replay's drew random numbers by attention_dropout"
    )


def test_a_pass_without_autograd_that_drew_masks_is_a_finding() -> None:
    """As where old log-probs are computed by a model that is still in training mode."""
    mode = {"model": True, "parts": []}
    verdict = judge_pass(make_recorded(WRONG, trains=False, training=mode), make_replayed(NONE))
    assert verdict.outcome is Outcome.DIFFERS
    assert "in training mode without autograd, drew random numbers" in str(verdict.passes[0].findings[0].values_as_text)


def test_another_number_on_a_gpu_may_be_of_another_kernel_of_attention() -> None:
    verdict = judge_pass(make_recorded(WRONG, draws=FIVE_ON_GPU), make_replayed(SIX_ON_GPU), ON_GPU)
    assert (verdict.outcome, "several kernels" in str(verdict.reason)) == (Outcome.CANNOT_TELL, True)
    outside = replace(ON_GPU, dropout=["resid_pdrop"])
    assert judge_pass(make_recorded(WRONG, draws=FIVE_ON_GPU), make_replayed(SIX_ON_GPU), outside).outcome is (
        Outcome.DIFFERS
    )


def test_random_numbers_that_no_number_shows_are_said_and_settle_nothing_in_bf16() -> None:
    """A job may draw for something else, such as a number that it logs."""
    setting = replace(SETTING, dropout=())
    in_fp32 = judge_pass(make_recorded(RIGHT, RIGHT_NORM), make_replayed(NONE), setting)
    assert (in_fp32.outcome, in_fp32.windows[0].findings[0].status) == (Outcome.REPRODUCED, FindingStatus.AGREES)
    assert MASKS in [finding.name for finding in in_fp32.open]
    in_bf16 = judge_pass(make_recorded(RIGHT, dtypes=["bfloat16"]), make_replayed(NONE), setting)
    assert (in_bf16.outcome, "rounding may hide" in str(in_bf16.reason)) == (Outcome.UNSETTLED, True)


def test_a_job_that_draws_another_number_under_the_same_conditions_is_a_finding() -> None:
    verdict = judge_pass(make_recorded(WRONG, draws=SIX), make_replayed(FIVE))
    assert (verdict.outcome, verdict.passes[0].findings[0].name) == (Outcome.DIFFERS, MASKS)


def test_where_neither_draws_the_numbers_are_judged_whatever_the_config_says() -> None:
    assert judge_pass(make_recorded(WRONG, draws=NONE), make_replayed(NONE)).outcome is Outcome.DIFFERS


def test_of_another_accelerator_nothing_is_known() -> None:
    """The generators of the CPU did not move, and that of the device is not recorded."""
    recorded = make_recorded(WRONG, draws=NONE, environment={**ENVIRONMENT, "device": "NPU"})
    assert compare_masks(recorded, make_replayed(), SETTING).status is MaskStatus.NOT_RECORDED


@pytest.mark.parametrize(
    ("own", "other", "conditions", "is_same"),
    [
        (FIVE, FIVE, {}, True),
        (FIVE, SIX, {}, False),
        (NONE, NONE, {"has_same_rows": False}, True),
        (FIVE, FIVE, {"has_same_rows": False}, False),
        (FIVE, FIVE, {"draws_alike_on_gpu": False}, True),
        (FIVE_ON_GPU, FIVE_ON_GPU, {"draws_alike_on_gpu": False}, False),
        (FIVE_ON_GPU, SIX_ON_GPU, {}, False),
    ],
)
def test_what_is_between_two_replays_is_rounding_only_with_the_same_masks(
    own: RandomDraws, other: RandomDraws, conditions: dict[str, bool], is_same: bool
) -> None:
    passes, other_passes = ([(record(0), make_replayed(draws))] for draws in (own, other))
    known = {"has_same_rows": True, "draws_alike_on_gpu": True, **conditions}
    assert drew_same_masks(passes, other_passes, **known) is is_same
