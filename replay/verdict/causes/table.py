"""List the rules that tell the cause of what differs, and apply them.

Each rule is a small function over the evidence. The table stands in the order from cause to consequence: other weights
explain any number, a wrong loss explains a wrong gradient, a wrong gradient explains a wrong step. A rule further down
is left out of the answer where all that it explains is explained by a surer rule above it. docs/verdict.md lists this
table.
"""

from collections.abc import Sequence

from replay.tolerances.job_bounds import GRADIENT_QUANTITIES
from replay.verdict.causes import (
    dtype_rules,
    gradient_rules,
    missing_rules,
    mix_rules,
    model_rules,
    objective_rules,
    route_rules,
    step_rules,
    token_rules,
    trial_rules,
    weight_rules,
)
from replay.verdict.causes.cause import LOOP_CAUSES, SETTLED_CAUSES, Cause, Sureness
from replay.verdict.causes.evidence import CauseEvidence, CauseRule
from replay.verdict.outcomes import Outcome, Verdict
from replay.verdict.recorded_pass import MISSING_GRADIENT
from replay.verdict.route_findings import ROUTES

RULES = (
    *weight_rules.RULES,
    *step_rules.RULES,
    *weight_rules.STEP_RULES,
    *route_rules.RULES,
    *token_rules.RULES,
    *objective_rules.RULES,
    *trial_rules.RULES,
    *model_rules.FIRST_RULES,
    *missing_rules.RULES,
    *dtype_rules.RULES,
    *mix_rules.RULES,
    *gradient_rules.RULES,
    *model_rules.LAST_RULES,
)
# What a layer that computes otherwise changes first. Draws, steps and states tell of no layer.
_OF_LAYERS = frozenset({*model_rules.FORWARD_FINDINGS, ROUTES, *GRADIENT_QUANTITIES, MISSING_GRADIENT})
SURENESS_ORDER = (Sureness.IS, Sureness.PROBABLY, Sureness.MAY_BE)


def find_causes(evidence: CauseEvidence, rules: Sequence[CauseRule] = RULES) -> list[Cause]:
    """Return the causes that the evidence shows, the sure ones first, else in the order of the table.

    A cause is left out if one before it entails it, or if those before it explain all that is wrong and that it
    explains, unless it is sure and no other of its name is. One of the first wrong number needs to be more than a
    second reason for what may follow from that: a hook may only look.
    """
    wrong = set(evidence.list_wrong_names())
    first_names = {finding.name for verdict, finding in evidence.wrong if verdict is evidence.first_wrong}
    candidates = [cause for rule in rules if (cause := rule.find(evidence)) is not None]
    causes: list[Cause] = []
    for sureness in SURENESS_ORDER:
        for cause in candidates:
            # What may be is said only where nothing better is known.
            if cause.sureness is not sureness or (sureness is Sureness.MAY_BE and causes):
                continue
            if any(cause.name in other.entails for other in causes):
                continue
            explained = {name for other in causes for name in other.explains}
            if first_names <= set(cause.explains):
                explained.update(split_unexplained(evidence, causes)[1])
            is_explained = set(cause.explains) & wrong <= explained
            is_named = any(other.name is cause.name for other in causes)
            if not is_explained or (sureness is Sureness.IS and not is_named):
                causes.append(cause)
    return causes


def split_unexplained(evidence: CauseEvidence, causes: Sequence[Cause]) -> tuple[list[str], list[str]]:
    """Name the findings that differ or are unsettled, and that no cause explains.

    Returns two lists. If the first wrong number is that of a step, and a cause explains it, the job went on with other
    weights than the replay. Then a finding that is wrong only in later passes is in the second list: it may be a
    consequence of that step, or a second fault. All others are in the first list.
    """
    explained = {name for cause in causes for name in cause.explains}
    first = evidence.first_wrong
    is_step_explained = first is not None and first.is_window and not evidence.is_forward_wrong
    is_step_explained &= all(finding.name in explained for verdict, finding in evidence.wrong if verdict is first)
    unexplained: list[str] = []
    possible_consequences: list[str] = []
    for name in evidence.list_wrong_names():
        if name not in explained:
            wrong = evidence.find_wrong(name)
            is_later = wrong is not None and wrong[0] is not first
            (possible_consequences if is_step_explained and is_later else unexplained).append(name)
    return unexplained, possible_consequences


def may_lie_in_layer(verdict: Verdict) -> bool:
    """Does a forward or a gradient differ, or is unsettled, which no cause outside of layers explains?"""
    wrong_outcomes = (Outcome.DIFFERS, Outcome.UNSETTLED)
    wrong_names = {
        finding.name
        for pass_verdict in (*verdict.passes, *verdict.windows)
        if pass_verdict.outcome in wrong_outcomes
        for finding in pass_verdict.findings
        if finding.is_wrong
    }
    enough, others = set[str](), set[str]()
    for cause in verdict.causes:
        is_settled = cause.name in SETTLED_CAUSES and cause.sureness is Sureness.IS
        (enough if is_settled or cause.name in LOOP_CAUSES else others).update(cause.explains)
    return bool((wrong_names & _OF_LAYERS) - (enough - others) - set(verdict.may_follow))
