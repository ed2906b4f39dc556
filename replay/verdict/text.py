"""Write a verdict as text.

verdict    DIFFERS: loss of pass 2, actor_inputs_[...]_00000001.pkl: 1.71204 in the job, 1.81377 here, 0.0594 apart, ...
           ... bound 0.0041; 1 of 3 passes, 2 REPRODUCED
weights    as the job's in 291 of its 291 parameters, sampled
here       torch 2.13.0 (2.11.0 in the job), device CPU (NVIDIA H200 in the job)
"""

from collections import Counter

from replay.output.text import Pairs, pluralise
from replay.tolerances.job_bounds import GRADIENT
from replay.verdict.findings import ROUNDING_HIDES, Finding, FindingStatus
from replay.verdict.judge import count_reasons
from replay.verdict.outcomes import OTHER_WEIGHTS, Outcome, PassVerdict, Verdict
from replay.verdict.pass_values import MISSING_GRADIENT, WeightComparison

SEVERITY = (FindingStatus.AGREES, FindingStatus.NOT_JUDGED, FindingStatus.UNSETTLED, FindingStatus.DIFFERS)
# The findings that name a parameter, the more telling one last.
PARAMETER_FINDINGS = (GRADIENT, MISSING_GRADIENT)
MAX_OTHER_FINDINGS = 2


def format_verdict(verdict: Verdict) -> Pairs:
    """Return the lines of a verdict, each with its label."""
    lines: Pairs = [("verdict", f"{verdict.outcome}: {_describe_outcome(verdict)}")]
    lines += [("not judged", _describe_open_finding(finding)) for finding in verdict.open]
    if verdict.weights is not None and verdict.weights.num_parameters:
        other = next((judged_pass for judged_pass in verdict.passes if judged_pass.reason == OTHER_WEIGHTS), None)
        place = "" if other is None else f" (pass {other.index + 1}, {other.source})"
        lines.append(("weights", format_weights(verdict.weights) + place))
    if verdict.environment and any(judged_pass.findings for judged_pass in verdict.passes):
        differences = [
            f"{name} {replay_value} ({job_value} in the job)"
            for name, (job_value, replay_value) in verdict.environment.items()
        ]
        lines.append(("here", ", ".join(differences)))
    return lines


def format_weights(weights: WeightComparison) -> str:
    """Say what the samples of one pass tell about the weights."""
    if (first := weights.first) is not None:
        share = f"{len(weights.differing)} of {pluralise(len(weights.compared), 'sampled parameter')}"
        return (
            f"other than the job's: {share} differ, first {first.name}, element {first.index}: "
            f"{first.recorded:.6g} in the job, {first.replayed:.6g} here"
        )
    if not weights.compared:
        return weights.doubt or "this rank holds no samples of the job's sharded weights"
    doubt = "" if weights.doubt is None else f", but {weights.doubt}"
    num_parameters = pluralise(weights.num_parameters, "parameter")
    return f"as the job's in {len(weights.compared)} of its {num_parameters}, sampled{doubt}"


def _describe_outcome(verdict: Verdict) -> str:
    """Write the headline: the first wrong number or the worst agreeing ones, passes by outcome, and dtypes."""
    num_passes = sum(verdict.counts.values())
    share = f"{verdict.counts.get(verdict.outcome, 0)} of {pluralise(num_passes, 'pass')}"
    if num_windows := sum(verdict.window_counts.values()):
        share += f" and {verdict.window_counts.get(verdict.outcome, 0)} of {pluralise(num_windows, 'gradient')}"
    both = Counter(verdict.counts) + Counter(verdict.window_counts)
    for outcome, number in both.items():
        if outcome not in (verdict.outcome, Outcome.CANNOT_TELL):
            share += f", {number} {outcome}"
    reasons = count_reasons([*verdict.passes, *verdict.windows])
    share += "".join(f", {number} {Outcome.CANNOT_TELL} ({reason})" for reason, number in reasons.items())
    match verdict.outcome:
        case Outcome.CANNOT_TELL:
            more = [f"of {number} others: {reason}" for reason, number in reasons.items() if reason != verdict.reason]
            return "; ".join([str(verdict.reason), *more])
        case Outcome.REPRODUCED:
            worst = ", ".join(
                f"{finding.name} to {finding.difference:.2g} (bound {finding.bound:.2g})" for finding in verdict.worst
            )
            return f"{share}; {worst}; computed in {_describe_dtypes(verdict)}"
        case _:
            first = verdict.first
            assert first is not None
            wrong, *others = sorted(first.findings, key=_headline_sort_key, reverse=True)
            others = [finding for finding in others if finding.status is wrong.status and finding.doubt == wrong.doubt]
            why = f" ({verdict.reason})" if verdict.outcome is Outcome.UNSETTLED else ""
            also = "".join(
                f"; also {_label_of(finding)}: {_describe_difference(finding)}"
                for finding in others[:MAX_OTHER_FINDINGS]
            )
            headline = f"{_describe_place(first, wrong)}: {_describe_difference(wrong)}{why}{also}"
            return f"{headline}; {share}; computed in {_describe_dtypes(verdict)}"


def _headline_sort_key(finding: Finding) -> tuple[int, int]:
    """Return what the headline is chosen by: how wrong a number is, then whether it names a parameter."""
    names_parameter = finding.name in PARAMETER_FINDINGS
    return SEVERITY.index(finding.status), PARAMETER_FINDINGS.index(finding.name) if names_parameter else -1


def _describe_place(first: PassVerdict, wrong: Finding) -> str:
    """Say which number of which pass, or of which of the job's steps."""
    if first.optimizer_step is None:
        return f"{_label_of(wrong)} of pass {first.index + 1}, {first.source}"
    return f"{_label_of(wrong)} of the job's step {first.optimizer_step + 1}, which ends with pass {first.index + 1}"


def _label_of(finding: Finding) -> str:
    return finding.name if finding.where is None else f"{finding.name} ({finding.where})"


def _describe_difference(finding: Finding) -> str:
    if finding.said is not None:
        return finding.said
    if finding.difference is None or finding.bound is None:
        return f"{finding.recorded:.6g} in the job, {_describe_replayed(finding)} here, not judged"
    return (
        f"{finding.recorded:.6g} in the job, {finding.replayed:.6g} here, {finding.difference:.2g} apart, "
        f"bound {finding.bound:.2g}"
    )


def _describe_replayed(finding: Finding) -> str:
    return "nothing" if finding.replayed is None else f"{finding.replayed:.6g}"


def _describe_open_finding(finding: Finding) -> str:
    if finding.said is not None:
        return f"{_label_of(finding)}: {finding.said}: {finding.doubt}"
    replayed = _describe_replayed(finding)
    bound = f" (bound {finding.bound:.2g})" if finding.doubt == ROUNDING_HIDES else ""
    return f"{_label_of(finding)}: {finding.recorded:.6g} in the job, {replayed} here: {finding.doubt}{bound}"


def _describe_dtypes(verdict: Verdict) -> str:
    job_dtype, replay_dtype = verdict.dtypes
    return replay_dtype if job_dtype == replay_dtype else f"{job_dtype} in the job, {replay_dtype} here"
