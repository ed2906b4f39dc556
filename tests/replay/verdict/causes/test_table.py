"""The table of causes: its order, what it leaves out, what it documents, and the jobs that it names."""

from dataclasses import replace
from pathlib import Path

import pytest

from docs.generated_block import insert_lines
from docs.write_causes import PAGE, SKILL, list_causes, list_meanings
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.evidence import CauseEvidence, CauseRule
from replay.verdict.causes.table import RULES, find_causes, may_lie_in_layer, split_unexplained
from replay.verdict.findings import VerdictSettings, judge_number
from replay.verdict.judge import judge
from replay.verdict.outcomes import Outcome, PassVerdict
from tests.broken_jobs.table import JOBS

SETTINGS = VerdictSettings(dtype="float32", num_layers=2, num_data_ranks=1, grad_accumulation=1)


def make_evidence(*names: str) -> CauseEvidence:
    """A pass in which the quantities of these names differ."""
    findings = [judge_number(name, 2.0, 1.0, difference=1.0, bound=0.1) for name in names]
    verdict = PassVerdict(index=0, source="a.pkl", rank=0, outcome=Outcome.DIFFERS, reason=None, findings=findings)
    return CauseEvidence(passes=[], windows=[], verdicts=[verdict], settings=SETTINGS, environment={})


def make_rule(name: CauseName, sureness: Sureness, *explains: str) -> CauseRule:
    cause = Cause(name=name, sureness=sureness, sentence=str(name), explains=explains)
    return CauseRule(name=name, find=lambda evidence: cause, means="", told_by="", job="")


def test_a_sure_cause_stands_before_an_unsure_one_that_is_earlier_in_the_table() -> None:
    rules = [
        make_rule(CauseName.KERNEL, Sureness.MAY_BE, "loss", "tokens"),
        make_rule(CauseName.MASK, Sureness.PROBABLY, "loss", "tokens"),
        make_rule(CauseName.DTYPE, Sureness.IS, "loss"),
    ]
    found = find_causes(make_evidence("loss", "tokens"), rules)
    # The one that may be explains nothing that the probable one does not explain.
    assert [cause.name for cause in found] == [CauseName.DTYPE, CauseName.MASK]


def test_two_sure_causes_are_both_named() -> None:
    rules = [make_rule(CauseName.MASK, Sureness.IS, "loss"), make_rule(CauseName.DTYPE, Sureness.IS, "loss")]
    assert [cause.name for cause in find_causes(make_evidence("loss"), rules)] == [CauseName.MASK, CauseName.DTYPE]


@pytest.mark.parametrize("sureness", [Sureness.IS, Sureness.PROBABLY])
def test_a_cause_that_explains_no_more_is_not_named_twice(sureness: Sureness) -> None:
    """A sure one of another name is, and one that explains more."""
    rules = [make_rule(CauseName.MASK, Sureness.IS, "loss"), make_rule(CauseName.MASK, sureness, "loss", "tokens")]
    assert len(find_causes(make_evidence("loss"), rules)) == 1
    assert len(find_causes(make_evidence("loss", "tokens"), rules)) == 2
    other = [rules[0], make_rule(CauseName.DTYPE, sureness, "loss")]
    assert len(find_causes(make_evidence("loss"), other)) == (2 if sureness is Sureness.IS else 1)


def test_a_sure_cause_that_one_before_it_entails_is_left_out() -> None:
    first = replace(make_cause(CauseName.MASK, "loss"), entails=(CauseName.OTHER_TOKENS,))
    rules = [
        CauseRule(name=first.name, find=lambda evidence: first, means="", told_by="", job=""),
        make_rule(CauseName.OTHER_TOKENS, Sureness.IS, "loss"),
        make_rule(CauseName.DTYPE, Sureness.IS, "loss"),
    ]
    assert [cause.name for cause in find_causes(make_evidence("loss"), rules)] == [CauseName.MASK, CauseName.DTYPE]


def test_what_no_cause_explains_stays() -> None:
    evidence = make_evidence("loss", "gradient norm")
    causes = find_causes(evidence, [make_rule(CauseName.MASK, Sureness.IS, "loss")])
    assert split_unexplained(evidence, causes) == (["gradient norm"], [])
    assert split_unexplained(evidence, []) == (["loss", "gradient norm"], [])


def make_cause(name: CauseName, *explains: str) -> Cause:
    return Cause(name=name, sureness=Sureness.IS, sentence=str(name), explains=explains)


@pytest.mark.parametrize(
    ("wrong", "causes", "may_follow", "is_sought"),
    [
        (["loss"], [], [], True),
        (["loss"], [make_cause(CauseName.MODEL_CODE, "loss")], [], True),
        (["gradient samples"], [], [], True),
        (["gradient samples"], [make_cause(CauseName.GRADIENTS_CHANGED, "gradient samples")], [], True),
        (["gradient samples"], [make_cause(CauseName.WINDOW_WEIGHTS, "gradient samples")], [], False),
        (["gradient norm"], [make_cause(CauseName.CLIPPED_EARLY, "gradient norm")], [], False),
        (["loss", "gradient norm"], [make_cause(CauseName.CLIPPING, "gradient norm")], [], True),
        (["loss", "gradient norm"], [make_cause(CauseName.CLIPPING, "gradient norm")], ["loss"], False),
        (["loss"], [make_cause(CauseName.SCHEDULE, "loss"), make_cause(CauseName.MODEL_CODE, "loss")], [], True),
        (["dropout masks"], [make_cause(CauseName.DROPOUT, "dropout masks")], [], False),
        (["optimizer state"], [], [], False),
        (["loss", "gradient norm"], [make_cause(CauseName.TIED_WEIGHTS, "loss", "gradient norm")], [], False),
        (["gradient norm"], [make_cause(CauseName.NO_GRADIENT, "gradient norm")], [], True),
        (["loss"], [replace(make_cause(CauseName.MASK, "loss"), sureness=Sureness.PROBABLY)], [], True),
    ],
)
def test_a_layer_is_sought_where_no_cause_outside_of_it_is_enough(
    wrong: list[str], causes: list[Cause], may_follow: list[str], is_sought: bool
) -> None:
    known = replace(judge([], SETTINGS), causes=causes, may_follow=may_follow)
    verdict = make_evidence(*wrong).verdicts[0]
    assert may_lie_in_layer(replace(known, passes=[verdict])) is is_sought
    assert not may_lie_in_layer(replace(known, passes=[replace(verdict, outcome=Outcome.CANNOT_TELL)]))


def test_what_is_wrong_behind_an_explained_step_may_follow_from_it() -> None:
    """But not what is wrong before that step, or in the step beside what a cause explains."""
    step, later = (make_evidence(name).verdicts[0] for name in ("gradient norm", "loss"))
    step = replace(step, first_index=0)
    causes = find_causes(make_evidence("gradient norm"), [make_rule(CauseName.CLIPPING, Sureness.IS, "gradient norm")])
    behind = replace(make_evidence("loss"), verdicts=[step, replace(later, index=1)])
    assert split_unexplained(behind, causes) == ([], ["loss"])
    assert split_unexplained(behind, []) == (["gradient norm", "loss"], [])
    before = replace(behind, verdicts=[later, replace(step, index=1)])
    assert split_unexplained(before, causes) == (["loss"], [])


def test_code_that_may_only_look_is_no_second_cause_of_what_may_follow_from_the_first() -> None:
    step = replace(make_evidence("gradient norm").verdicts[0], first_index=0)
    later = replace(make_evidence("loss").verdicts[0], index=1)
    evidence = replace(make_evidence("loss"), verdicts=[step, later])
    hook = make_rule(CauseName.GRADIENTS_CHANGED, Sureness.PROBABLY, "gradient norm", "loss")
    of_later = make_rule(CauseName.MASK, Sureness.PROBABLY, "loss")
    missing = make_rule(CauseName.NO_GRADIENT, Sureness.IS, "gradient norm")
    assert [cause.name for cause in find_causes(evidence, [missing, hook])] == [CauseName.NO_GRADIENT]
    assert [cause.name for cause in find_causes(evidence, [hook])] == [CauseName.GRADIENTS_CHANGED]
    # What explains the later numbers alone tells of a second fault.
    assert len(find_causes(evidence, [missing, of_later])) == 2


def test_without_a_wrong_number_there_is_no_cause() -> None:
    evidence = CauseEvidence(passes=[], windows=[], verdicts=[], settings=SETTINGS, environment={"torch": ("1", "2")})
    assert find_causes(evidence) == []


@pytest.mark.parametrize(("page", "lines"), [(PAGE, list_causes()), (SKILL, list_meanings())])
def test_the_pages_list_the_rules(page: Path, lines: list[str]) -> None:
    text = page.read_text()
    assert insert_lines(text, "causes", lines) == text, "run: python -m docs.write_causes"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.job)
def test_each_rule_names_a_broken_job(rule: CauseRule) -> None:
    assert JOBS[rule.job].is_broken
