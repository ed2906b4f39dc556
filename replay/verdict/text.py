"""Write a verdict as text.

verdict    DIFFERS: gradient norm of the job's step 1, which ends with pass 2: 12.3 in the job, 1.23 here, 9 apart, ...
cause      each gradient is 10 times that of the loss, since the job's step 1
try        look for a factor on the loss or on the gradients in the job's loop
evidence   loss to 8.6e-08 (bound 1.7e-05); computed in float32
open       passes 3 and 4: other weights
coverage   2 of 4 passes and 1 of 2 steps judged
weights    as the job's in 291 of its 291 parameters, sampled
environment differs  torch 2.13.0 (2.11.0 in the job), device CPU (NVIDIA H200 in the job)
"""

from collections.abc import Sequence
from itertools import groupby

from replay.output.text import Pairs, pluralise
from replay.tolerances.job_bounds import GRADIENT, GRADIENT_NORMS, GRADIENT_RMS
from replay.verdict.causes.cause import Cause, Sureness
from replay.verdict.findings import ROUNDING_HIDES, Finding, FindingStatus
from replay.verdict.outcomes import FINER_DTYPE, OTHER_WEIGHTS, Coverage, Outcome, PassVerdict, Verdict
from replay.verdict.recorded_pass import MISSING_GRADIENT, WeightComparison

SEVERITY = (FindingStatus.AGREES, FindingStatus.NOT_JUDGED, FindingStatus.UNSETTLED, FindingStatus.DIFFERS)
# The findings that name a parameter, the more telling one last.
PARAMETER_FINDINGS = (GRADIENT, GRADIENT_RMS, GRADIENT_NORMS, MISSING_GRADIENT)
MAX_OTHER_FINDINGS = 2
MAX_CAUSES = 3
# Of the numbers that agree; run.json has all.
MAX_NUMBERS = 4
MAX_REASONS = 3


def format_verdict(verdict: Verdict) -> Pairs:
    """Return the lines of a verdict, each with its label: what, why, what to try, and what it rests on."""
    lines: Pairs = [("verdict", format_outcome(verdict))]
    lines += [("cause", _describe_cause(cause)) for cause in verdict.causes[:MAX_CAUSES]]
    lines += [("try", cause.try_next) for cause in verdict.causes[:1] if cause.try_next is not None]
    if verdict.causes and verdict.unexplained:
        lines.append(("also wrong", f"{', '.join(verdict.unexplained)}, which no cause above explains"))
    if verdict.may_follow:
        names = ", ".join(verdict.may_follow)
        lines.append(("also wrong", f"{names}, but only after that step, which may be why"))
    lines += [("evidence", evidence) for evidence in _list_evidence(verdict)]
    lines += [("not judged", text) for text in _list_open_findings(verdict)]
    lines += [("open", _describe_open_passes(verdict))] if verdict.outcome is not Outcome.CANNOT_TELL else []
    if verdict.coverage.num_passes:
        lines.append(("coverage", _describe_coverage(verdict.coverage)))
    if verdict.weights is not None and verdict.weights.num_parameters:
        other = next((judged_pass for judged_pass in verdict.passes if judged_pass.reason == OTHER_WEIGHTS), None)
        place = "" if other is None else f" (pass {other.index + 1}, {other.source})"
        lines.append(("weights", format_weights(verdict.weights) + place))
    if verdict.environment and any(judged_pass.findings for judged_pass in verdict.passes):
        differences = [
            f"{name} {replay_value} ({job_value} in the job)"
            for name, (job_value, replay_value) in verdict.environment.items()
        ]
        lines.append(("environment differs", ", ".join(differences)))
    return [(label, text) for label, text in lines if text]


def format_weights(weights: WeightComparison) -> str:
    """Say what the samples of one pass tell about the weights."""
    if (first := weights.first) is not None:
        why = "" if weights.doubt is None else f"; {weights.doubt}"
        share = f"{len(weights.differing)} of {pluralise(len(weights.compared), 'sampled parameter')}"
        return (
            f"other than the job's: {share} differ, first {first.name}, element {first.index}: "
            f"{first.recorded:.6g} in the job, {first.replayed:.6g} here{why}"
        )
    if not weights.compared:
        return weights.doubt or "this rank holds no samples of the job's sharded weights"
    doubt = "" if weights.doubt is None else f", but {weights.doubt}"
    num_parameters = pluralise(weights.num_parameters, "parameter")
    until = ", until a step of the job gave other ones" if weights.differing and not doubt else ""
    return f"as the job's in {len(weights.compared)} of its {num_parameters}, sampled{until}{doubt}"


def format_outcome(verdict: Verdict) -> str:
    """Write the first line: the outcome, and the first wrong number or the reason of one that is open."""
    match verdict.outcome:
        case Outcome.REPRODUCED:
            return f"{verdict.outcome}{_limit_outcome(verdict)}"
        case Outcome.CANNOT_TELL:
            reasons = _group_open_passes(verdict)
            told = _shorten_reason(str(verdict.reason), verdict)
            more = [f"{places}: {reason}" for reason, places in reasons.items() if reason != told]
            return f"{verdict.outcome}: {'; '.join([str(verdict.reason), *more])}"
        case _:
            first = verdict.first
            assert first is not None
            if str(verdict.reason).startswith(FINER_DTYPE):
                return f"{verdict.outcome}: {verdict.reason}"
            wrong, *others = sorted(first.findings, key=_headline_sort_key, reverse=True)
            others = [finding for finding in others if finding.status is wrong.status and finding.doubt == wrong.doubt]
            why = f" ({verdict.reason})" if verdict.outcome is Outcome.UNSETTLED else ""
            also = "".join(
                f"; also {_label_of(finding)}: {_describe_difference(finding)}"
                for finding in others[:MAX_OTHER_FINDINGS]
            )
            return f"{verdict.outcome}: {_describe_place(first, wrong)}: {_describe_difference(wrong)}{why}{also}"


def _limit_outcome(verdict: Verdict) -> str:
    """Say of how much of the run REPRODUCED is said; nothing where it is all of it."""
    coverage = verdict.coverage
    if coverage.is_whole:
        return ""
    passes = pluralise(coverage.num_passes, "pass")
    if coverage.num_judged < coverage.num_passes and coverage.num_judged:
        return f" ({coverage.num_judged} of {passes})"
    if coverage.num_judged:
        return f" ({coverage.num_steps_judged} of {pluralise(coverage.num_steps, 'step')})"
    if coverage.num_forward_judged == coverage.num_passes:
        return " (forwards alone)"
    if coverage.num_forward_judged:
        return f" (the forward of {coverage.num_forward_judged} of {passes})"
    num_reproduced = verdict.counts.get(Outcome.REPRODUCED, 0)
    return f" (within wide bounds, {num_reproduced} of {passes})" if num_reproduced else " (gradients alone)"


def _describe_cause(cause: Cause) -> str:
    return cause.sentence if cause.sureness is Sureness.IS else f"{cause.sureness}: {cause.sentence}"


def _list_evidence(verdict: Verdict) -> list[str]:
    """List what was judged and agrees, the number nearest to its bound first, and the dtypes."""
    agreeing = sorted(
        (finding for finding in verdict.worst if finding.agrees),
        key=lambda finding: finding.share_of_bound,
        reverse=True,
    )
    if not agreeing:
        return [f"computed in {_describe_dtypes(verdict)}"] if verdict.worst else []
    numbers = [
        f"{finding.name} to {finding.difference:.2g} (bound {finding.bound:.2g})" for finding in agreeing[:MAX_NUMBERS]
    ]
    more = [f"{len(agreeing) - MAX_NUMBERS} more within their bounds"] if len(agreeing) > MAX_NUMBERS else []
    return [f"{', '.join([*numbers, *more])}; computed in {_describe_dtypes(verdict)}"]


def _describe_coverage(coverage: Coverage) -> str:
    text = f"{coverage.num_judged} of {pluralise(coverage.num_passes, 'pass')}"
    if coverage.num_steps:
        text += f" and {coverage.num_steps_judged} of {pluralise(coverage.num_steps, 'step')}"
    more = f"{pluralise(coverage.num_forward_judged, 'pass')}{' more' if coverage.num_judged else ''}"
    forward = f"; of {more} the forward alone" if coverage.num_forward_judged else ""
    return f"{text} judged{forward}"


def _describe_open_passes(verdict: Verdict) -> str:
    groups = [f"{places}: {reason}" for reason, places in _group_open_passes(verdict).items()]
    more = [f"{len(groups) - MAX_REASONS} more reasons are in run.json"] if len(groups) > MAX_REASONS + 1 else []
    return "; ".join([*groups[:MAX_REASONS], *more] if more else groups)


def _group_open_passes(verdict: Verdict) -> dict[str, str]:
    """Name the passes and steps that were not judged, by the reason: the doubt, whatever number is off in each."""
    by_reason: dict[str, list[PassVerdict]] = {}
    for judged in [*verdict.passes, *verdict.windows]:
        if judged.outcome is Outcome.CANNOT_TELL:
            by_reason.setdefault(_shorten_reason(str(judged.reason), verdict), []).append(judged)
    return {reason: _name_places(judged) for reason, judged in by_reason.items()}


def _name_places(verdicts: Sequence[PassVerdict]) -> str:
    """Name passes, the job's steps, and windows of a job that counted none: `passes 1 to 4 and step 2`."""
    passes = [judged.index + 1 for judged in verdicts if not judged.is_window]
    steps = [judged.optimizer_step + 1 for judged in verdicts if judged.optimizer_step is not None]
    windows = [judged.window_name for judged in verdicts if judged.is_window and judged.optimizer_step is None]
    places = [name_numbers("pass", passes), name_numbers("step", steps), *windows]
    return " and ".join(place for place in places if place)


def _shorten_reason(reason: str, verdict: Verdict) -> str:
    """Leave out of a reason what is another number in each pass, and what a cause says already."""
    doubt = reason.partition(", but ")[2] or reason
    general, _, detail = doubt.partition(": ")
    is_told = any(detail and cause.sentence.startswith(detail) for cause in verdict.causes)
    return general if is_told else doubt


def name_numbers(noun: str, numbers: Sequence[int]) -> str:
    """Name passes or steps by their numbers: `passes 1 to 4, 6`; nothing where there is none."""
    distinct = sorted(set(numbers))
    runs = [
        [number for _, number in group]
        for _, group in groupby(enumerate(distinct), key=lambda place: place[1] - place[0])
    ]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    plural = pluralise(len(distinct), noun).partition(" ")[2]
    return f"{plural} {', '.join(texts)}" if texts else ""


def _headline_sort_key(finding: Finding) -> tuple[int, int]:
    """Return what the headline is chosen by: how wrong a number is, then whether it names a parameter."""
    names_parameter = finding.name in PARAMETER_FINDINGS
    return SEVERITY.index(finding.status), PARAMETER_FINDINGS.index(finding.name) if names_parameter else -1


def _describe_place(first: PassVerdict, wrong: Finding) -> str:
    """Say which number of which pass, or of which window."""
    if not first.is_window:
        return f"{_label_of(wrong)} of pass {first.index + 1}, {first.source}"
    end = "" if first.optimizer_step is None else f", which ends with pass {first.index + 1}"
    return f"{_label_of(wrong)} of {first.window_name}{end}"


def _label_of(finding: Finding) -> str:
    return finding.name if finding.where is None else f"{finding.name} ({finding.where})"


def _describe_difference(finding: Finding) -> str:
    if finding.values_as_text is not None:
        return finding.values_as_text
    if finding.difference is None or finding.bound is None:
        return f"{finding.recorded:.6g} in the job, {_describe_replayed(finding)} here, not judged"
    return (
        f"{finding.recorded:.6g} in the job, {finding.replayed:.6g} here, {finding.difference:.2g} apart, "
        f"bound {finding.bound:.2g}"
    )


def _describe_replayed(finding: Finding) -> str:
    return "nothing" if finding.replayed is None else f"{finding.replayed:.6g}"


def _list_open_findings(verdict: Verdict) -> list[str]:
    """Describe the numbers that were not judged.

    Those that have none beside them here are told by their reason alone, together, unless whole passes or steps are
    open for it: then the line `open` has it.
    """
    told = _group_open_passes(verdict)
    # A first line of words has said already what is unsettled, and why.
    shown = verdict.first.findings[:1] if verdict.first is not None and verdict.outcome is Outcome.UNSETTLED else ()
    still_open = [finding for finding in verdict.open if finding.values_as_text is None or finding not in shown]
    compared = [finding for finding in still_open if finding.replayed is not None or finding.values_as_text]
    names_by_doubt: dict[str, list[str]] = {}
    for finding in still_open:
        if finding not in compared and _shorten_reason(str(finding.doubt), verdict) not in told:
            names_by_doubt.setdefault(str(finding.doubt), []).append(_label_of(finding))
    alone = [f"{', '.join(names)}: {doubt}" for doubt, names in names_by_doubt.items()]
    # What several numbers are not judged for is said once.
    numbers_by_reason: dict[str, list[str]] = {}
    for finding in compared:
        bound = f" (bound {finding.bound:.2g})" if finding.doubt == ROUNDING_HIDES else ""
        numbers_by_reason.setdefault(f"{finding.doubt}{bound}", []).append(_describe_open_numbers(finding))
    return [*(f"{'; '.join(numbers)}: {reason}" for reason, numbers in numbers_by_reason.items()), *alone]


def _describe_open_numbers(finding: Finding) -> str:
    if finding.values_as_text is not None:
        return f"{_label_of(finding)}: {finding.values_as_text}"
    return f"{_label_of(finding)}: {finding.recorded:.6g} in the job, {_describe_replayed(finding)} here"


def _describe_dtypes(verdict: Verdict) -> str:
    job_dtype, replay_dtype = verdict.dtypes
    return replay_dtype if job_dtype == replay_dtype else f"{job_dtype} in the job, {replay_dtype} here"
