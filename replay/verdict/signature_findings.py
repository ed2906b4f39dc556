"""Judge the signatures of a gradient: norms by parameter and by kind, and the elements of each signature together."""

import math
from collections.abc import Sequence
from dataclasses import replace

from replay.tolerances.difference import absolute_difference
from replay.tolerances.job_bounds import GRADIENT, GRADIENT_NORMS, GRADIENT_RMS, HIDING_BOUND, compute_norm_bound
from replay.verdict.findings import Finding, FindingStatus, VerdictSettings, make_finding
from replay.verdict.gradient_evidence import ComparedGradient, GradientEvidence, name_kind
from replay.verdict.sample_pairs import ROUTED_PARAMETERS

# Fewer elements than this say little together.
LEAST_ELEMENTS = 8


def judge_signatures(
    evidence: GradientEvidence, settings: VerdictSettings, dtypes: Sequence[str], index: int, doubt: str | None
) -> list[Finding]:
    """Judge a window's signatures, of the norms and of the elements the worst; those that rounding may hide beside.

    Where a parameter's norm differs, it is named; else the kind whose norm differs, or all parameters together.

    index  of the window's last pass
    doubt  why a different gradient would prove nothing
    """
    bounds = {name: settings.choose_signature_bound(name_kind(name), dtypes, index) for name in evidence.parameters}
    groups = [*evidence.kinds.values(), *([evidence.whole] if evidence.whole is not None else [])]
    norms = [
        finding
        for compared in evidence.parameters.values()
        if (finding := _judge_norm(compared, bounds, settings, dtypes, index, doubt)) is not None
    ]
    if not any(finding.status is FindingStatus.DIFFERS for finding in norms):
        together = (_judge_norm(compared, bounds, settings, dtypes, index, doubt) for compared in groups)
        norms += [finding for finding in together if finding is not None]
    elements = [
        finding
        for compared in evidence.parameters.values()
        if (finding := _judge_elements(compared, bounds[compared.name], settings, dtypes, index, doubt)) is not None
    ]
    return [*_select_worst(norms), *_select_worst(elements)]


def do_some_signatures_agree(
    evidence: GradientEvidence, settings: VerdictSettings, dtypes: Sequence[str], index: int
) -> bool:
    """Tell whether a signature agrees that would not if the job had differentiated another loss.

    The bound has to be so small that a gradient that vanished, or changed its sign, would not agree.
    """
    for compared in evidence.parameters.values():
        bound = settings.choose_signature_bound(name_kind(compared.name), dtypes, index)
        is_near = compared.difference is not None and compared.difference <= bound <= HIDING_BOUND
        if is_near and compared.num_values >= LEAST_ELEMENTS and (compared.size or 0.0) > 2 * bound:
            return True
    return False


def _judge_norm(
    compared: ComparedGradient,
    bounds: dict[str, float],
    settings: VerdictSettings,
    dtypes: Sequence[str],
    index: int,
    doubt: str | None,
) -> Finding | None:
    """Judge the norm of one parameter's gradient, or of several together; None where the job's is not known."""
    if compared.job_norm is None:
        return None
    bound = compute_norm_bound(max(bounds[name] for name in compared.names), dtypes, len(compared.names))
    distance = absolute_difference(compared.job_norm, compared.replay_norm)
    least_norm = max(compared.replay_norm, compared.least_norm)
    difference = distance / least_norm if least_norm and math.isfinite(least_norm) else distance
    return make_finding(
        GRADIENT_NORMS,
        compared.job_norm,
        compared.replay_norm,
        difference=difference,
        bound=bound,
        counts=True,
        where=compared.name,
        doubt=doubt or _doubt_routes(compared, difference, settings, dtypes, index),
    )


def _judge_elements(
    compared: ComparedGradient,
    bound: float,
    settings: VerdictSettings,
    dtypes: Sequence[str],
    index: int,
    doubt: str | None,
) -> Finding | None:
    """Judge the elements of one parameter's signature; None where they would not show that the gradient vanished."""
    if compared.difference is None or compared.size is None or compared.num_values < LEAST_ELEMENTS:
        return None
    job_size = compared.job_size or 0.0
    if max(job_size, compared.size) <= bound:
        return None
    return make_finding(
        GRADIENT_RMS,
        job_size,
        compared.size,
        difference=compared.difference,
        bound=bound,
        doubt=doubt or _doubt_routes(compared, compared.difference, settings, dtypes, index),
        counts=True,
        where=compared.name,
        num_values=compared.num_values,
    )


def _doubt_routes(
    compared: ComparedGradient, difference: float, settings: VerdictSettings, dtypes: Sequence[str], index: int
) -> str | None:
    is_routed = any(word in compared.name for word in ROUTED_PARAMETERS)
    least_floor = HIDING_BOUND if is_routed else 0.0
    return settings.doubt_expert_routes(GRADIENT, difference, dtypes, index, least_floor=least_floor)


def _select_worst(findings: Sequence[Finding]) -> list[Finding]:
    """Keep of those that were judged, and of those that rounding may hide, the worst each.

    What differs without doubt is worse than what is farther off and doubted.
    """
    hidden = [finding for finding in findings if finding.status is FindingStatus.NOT_JUDGED]
    judged = [finding for finding in findings if finding.status is not FindingStatus.NOT_JUDGED]
    worst: list[Finding] = []
    if judged:
        finding = max(judged, key=lambda finding: (finding.status is FindingStatus.DIFFERS, finding.share_of_bound))
        num_values = sum(finding.num_values for finding in judged)
        worst.append(replace(finding, num_values=num_values))
    if hidden:
        finding = max(hidden, key=lambda finding: finding.bound or 0.0)
        others = f" and {len(hidden) - 1} more" if len(hidden) > 1 else ""
        worst.append(replace(finding, where=f"{finding.where}{others}", num_values=len(hidden)))
    return worst
