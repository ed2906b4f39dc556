"""Judge the signatures of a gradient: norms by parameter and by kind, and the elements of each signature together."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from replay.tolerances.difference import absolute_difference
from replay.tolerances.job_bounds import GRADIENT, GRADIENT_NORMS, GRADIENT_RMS, HIDING_BOUND, compute_norm_bound
from replay.verdict.findings import Finding, FindingStatus, VerdictSettings, choose_worst, judge_number
from replay.verdict.gradient_evidence import ComparedGradient, GradientEvidence, name_kind
from replay.verdict.sample_pairs import find_least_floor

# Fewer elements than this say little together.
LEAST_ELEMENTS = 8


def judge_signatures(
    evidence: GradientEvidence,
    settings: VerdictSettings,
    dtypes: Sequence[str],
    index: int,
    doubt: str | None,
    num_passes: int = 1,
    *,
    has_stepped: bool = False,
) -> list[Finding]:
    """Judge a window's signatures, and return the worst finding of the norms, and the worst of the elements.

    Beside each stands one for those that rounding may hide, if there are any.

    A norm that differs is named with all whose norms differ, if they are a kind or all parameters; else alone. Where
    none differs, kinds and all parameters together are judged besides, by sharper bounds.

    index       of the window's last pass
    doubt       why a different gradient would prove nothing
    num_passes  that each rank's gradient was accumulated over
    has_stepped  the job and the replay have made optimizer steps since their weights were the same
    """
    judge = _SignatureJudge(
        settings=settings,
        dtypes=dtypes,
        index=index,
        doubt=doubt,
        num_passes=num_passes,
        has_stepped=has_stepped,
    )
    norms: list[Finding] = []
    elements: list[Finding] = []
    differing: set[str] = set()
    for compared, rank in _list_parameters(evidence):
        norm, together = judge.judge_norm(compared, rank), judge.judge_elements(compared, rank)
        norms += [] if norm is None else [norm]
        elements += [] if together is None else [together]
        if norm is not None and norm.status is FindingStatus.DIFFERS:
            differing.add(compared.name)
    groups = [*evidence.kinds.values(), *([] if evidence.whole is None else [evidence.whole])]
    found = [(group, finding) for group in groups if (finding := judge.judge_norm(group)) is not None]
    if not differing:
        norms += [finding for _, finding in found]
    same = [finding for group, finding in found if set(group.names) == differing]
    return [*(same or _select_worst(norms)), *_select_worst(elements)]


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


def _list_parameters(evidence: GradientEvidence) -> Iterator[tuple[ComparedGradient, int | None]]:
    """List each parameter, and each rank's of those that the job's ranks had whole."""
    for rank, parameters in evidence.ranks.items():
        for compared in parameters.values():
            yield compared, rank
    of_ranks = {name for parameters in evidence.ranks.values() for name in parameters}
    for name, compared in evidence.parameters.items():
        if name not in of_ranks:
            yield compared, None


@dataclass(frozen=True, kw_only=True, slots=True)
class _SignatureJudge:
    """Judges one gradient after the other. The fields are the arguments of `judge_signatures`."""

    settings: VerdictSettings
    dtypes: Sequence[str]
    index: int
    doubt: str | None
    num_passes: int
    has_stepped: bool

    def judge_norm(self, compared: ComparedGradient, rank: int | None = None) -> Finding | None:
        """Judge the norm of one parameter's gradient, or of several together; None where the job's is not known."""
        if compared.job_norm is None:
            return None
        least_norm = max(compared.replay_norm, compared.least_norm)
        distance = absolute_difference(compared.job_norm, compared.replay_norm)
        difference = distance / least_norm if least_norm and math.isfinite(least_norm) else distance
        kinds = {name_kind(name) for name in compared.names}
        bound = max(map(self._choose_bound, kinds))
        return judge_number(
            GRADIENT_NORMS,
            compared.job_norm,
            compared.replay_norm,
            difference=difference,
            bound=compute_norm_bound(bound, self.dtypes, len(compared.names)),
            doubt=self.doubt or self._doubt_routes(compared, difference),
            is_evidence=True,
            where=_name_place(compared, rank),
        )

    def judge_elements(self, compared: ComparedGradient, rank: int | None) -> Finding | None:
        """Judge one parameter's signature; None where it would not show that the gradient had vanished."""
        if compared.difference is None or compared.size is None or compared.num_values < LEAST_ELEMENTS:
            return None
        bound = self._choose_bound(name_kind(compared.name))
        job_size = compared.job_size or 0.0
        if max(job_size, compared.size) <= bound:
            return None
        return judge_number(
            GRADIENT_RMS,
            job_size,
            compared.size,
            difference=compared.difference,
            bound=bound,
            doubt=self.doubt or self._doubt_routes(compared, compared.difference),
            is_evidence=True,
            where=_name_place(compared, rank),
            num_values=compared.num_values,
        )

    def _choose_bound(self, kind: str) -> float:
        return self.settings.choose_signature_bound(
            kind, self.dtypes, self.index, self.num_passes, has_stepped=self.has_stepped
        )

    def _doubt_routes(self, compared: ComparedGradient, difference: float) -> str | None:
        least_floor = find_least_floor(compared.name)
        return self.settings.doubt_expert_routes(GRADIENT, difference, self.dtypes, self.index, least_floor=least_floor)


def _name_place(compared: ComparedGradient, rank: int | None) -> str:
    return compared.name if rank is None else f"{compared.name}, rank {rank}"


def _select_worst(findings: Sequence[Finding]) -> list[Finding]:
    """Keep the worst of those that were judged, and the one with the widest bound of those that rounding may hide."""
    hidden = [finding for finding in findings if finding.status is FindingStatus.NOT_JUDGED]
    judged = [finding for finding in findings if finding.status is not FindingStatus.NOT_JUDGED]
    worst: list[Finding] = []
    if judged:
        worst.append(replace(choose_worst(judged), num_values=sum(finding.num_values for finding in judged)))
    if hidden:
        finding = max(hidden, key=lambda finding: finding.bound or 0.0)
        others = f" and {len(hidden) - 1} more" if len(hidden) > 1 else ""
        worst.append(replace(finding, where=f"{finding.where}{others}", num_values=len(hidden)))
    return worst
