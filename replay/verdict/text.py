"""Write a verdict as text.

verdict    DIFFERS: loss of pass 2, actor_inputs_[...]_00000001.pkl: 1.71204 in the job, 1.81377 here, 0.0594 apart, ...
           ... bound 0.0041; 1 of 3 passes, 2 REPRODUCED
weights    as the job's in 291 of its 291 parameters, sampled
here       torch 2.13.0 (2.11.0 in the job), device CPU (NVIDIA H200 in the job)
"""

from collections import Counter

from replay.output.text import Pairs, pluralise
from replay.tolerances.job_bounds import GRADIENT
from replay.verdict.findings import ROUNDING_HIDES, Finding, Status
from replay.verdict.job_values import MISSING_GRADIENT, WeightComparison
from replay.verdict.judge import OTHER_WEIGHTS, Outcome, PassVerdict, Verdict, reasons_of

SEVERITY = (Status.AGREES, Status.NOT_JUDGED, Status.UNSETTLED, Status.DIFFERS)
PLACES = (GRADIENT, MISSING_GRADIENT)  # findings that name a parameter, the more telling one last
MAX_OTHERS = 2  # findings that are shown beside the headline's


def verdict_lines(verdict: Verdict) -> Pairs:
    lines: Pairs = [("verdict", f"{verdict.outcome}: {_outcome_text(verdict)}")]
    lines += [("not judged", _open_line(one)) for one in verdict.open]
    if verdict.weights is not None and verdict.weights.num_parameters:
        others = next(
            (f" (pass {one.index + 1}, {one.source})" for one in verdict.passes if one.reason == OTHER_WEIGHTS), ""
        )
        lines.append(("weights", weights_line(verdict.weights) + others))
    if verdict.environment and any(one.findings for one in verdict.passes):
        said = [f"{name} {here} ({there} in the job)" for name, (there, here) in verdict.environment.items()]
        lines.append(("here", ", ".join(said)))
    return lines


def weights_line(weights: WeightComparison) -> str:
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


def _outcome_text(verdict: Verdict) -> str:
    num_passes = sum(verdict.counts.values())
    share = f"{verdict.counts.get(verdict.outcome, 0)} of {pluralise(num_passes, 'pass')}"
    if num_windows := sum(verdict.window_counts.values()):
        share += f" and {verdict.window_counts.get(verdict.outcome, 0)} of {pluralise(num_windows, 'gradient')}"
    both = Counter(verdict.counts) + Counter(verdict.window_counts)
    for outcome, number in both.items():
        if outcome not in (verdict.outcome, Outcome.CANNOT_TELL):
            share += f", {number} {outcome}"
    reasons = reasons_of([*verdict.passes, *verdict.windows])
    share += "".join(f", {number} {Outcome.CANNOT_TELL} ({reason})" for reason, number in reasons.items())
    match verdict.outcome:
        case Outcome.CANNOT_TELL:
            more = [f"of {number} others: {reason}" for reason, number in reasons.items() if reason != verdict.reason]
            return "; ".join([str(verdict.reason), *more])
        case Outcome.REPRODUCED:
            return f"{share}; {_worst_text(verdict)}; computed in {_dtypes(verdict)}"
        case _:
            first = verdict.first
            assert first is not None
            wrong, *others = sorted(first.findings, key=_weight, reverse=True)
            others = [finding for finding in others if finding.status is wrong.status and finding.doubt == wrong.doubt]
            why = f" ({verdict.reason})" if verdict.outcome is Outcome.UNSETTLED else ""
            also = "".join(f"; also {_named(finding)}: {_difference_text(finding)}" for finding in others[:MAX_OTHERS])
            said = f"{_place(first, wrong)}: {_difference_text(wrong)}{why}{also}"
            return f"{said}; {share}; computed in {_dtypes(verdict)}"


def _weight(finding: Finding) -> tuple[int, int]:
    """Return what a headline is chosen by: how wrong a number is, then whether it names a parameter."""
    return SEVERITY.index(finding.status), PLACES.index(finding.name) if finding.name in PLACES else -1


def _worst_text(verdict: Verdict) -> str:
    return ", ".join(f"{one.name} to {one.difference:.2g} (bound {one.bound:.2g})" for one in verdict.worst)


def _place(first: PassVerdict, wrong: Finding) -> str:
    """Say which number of which pass, or of which of the job's steps."""
    if first.optimizer_step is None:
        return f"{_named(wrong)} of pass {first.index + 1}, {first.source}"
    return f"{_named(wrong)} of the job's step {first.optimizer_step + 1}, which ends with pass {first.index + 1}"


def _named(finding: Finding) -> str:
    return finding.name if finding.where is None else f"{finding.name} ({finding.where})"


def _difference_text(finding: Finding) -> str:
    if finding.said is not None:
        return finding.said
    if finding.difference is None or finding.bound is None:
        here = "nothing" if finding.replayed is None else f"{finding.replayed:.6g}"
        return f"{finding.recorded:.6g} in the job, {here} here, not judged"
    return (
        f"{finding.recorded:.6g} in the job, {finding.replayed:.6g} here, {finding.difference:.2g} apart, "
        f"bound {finding.bound:.2g}"
    )


def _open_line(finding: Finding) -> str:
    if finding.said is not None:
        return f"{_named(finding)}: {finding.said}: {finding.doubt}"
    here = "nothing" if finding.replayed is None else f"{finding.replayed:.6g}"
    hidden = f" (bound {finding.bound:.2g})" if finding.doubt == ROUNDING_HIDES else ""
    return f"{_named(finding)}: {finding.recorded:.6g} in the job, {here} here: {finding.doubt}{hidden}"


def _dtypes(verdict: Verdict) -> str:
    there, here = verdict.dtypes
    return here if there == here else f"{there} in the job, {here} here"
