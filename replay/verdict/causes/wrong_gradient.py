"""Find the first gradient of a run that is not the job's, and compare it parameter by parameter."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from capture.file_format.name_patterns import PatternTable
from replay.output.text import name_some, pluralise
from replay.tolerances.difference import is_coarse
from replay.tolerances.job_bounds import GRADIENT_QUANTITIES, STEPPED, compute_norm_bound
from replay.verdict.causes.evidence import CauseEvidence
from replay.verdict.findings import list_dtypes
from replay.verdict.gradient_evidence import ComparedGradient, GradientEvidence, name_kind
from replay.verdict.gradient_findings import ComparedPass, collect_gradient_evidence, list_steps
from replay.verdict.outcomes import PassVerdict
from replay.verdict.recorded_pass import MISSING_GRADIENT, OPTIMIZER_STATE

GRADIENT_FINDINGS = (MISSING_GRADIENT, *GRADIENT_QUANTITIES, OPTIMIZER_STATE, STEPPED)
# A gradient that is this much longer or shorter, and whose direction is this near, is the same but for rounding.
SAME_RATIO = {False: 1e-3, True: 0.08}
SAME_COSINE = {False: 0.9999, True: 0.9}


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongGradient:
    """The first window whose gradient is another one, with the gradients of its parameters.

    is_first     no number before it is wrong; else it may be one of other weights, which an earlier step left
    is_coarse    rounding in a 16-bit dtype lies between the two
    norm_bounds  by parameter, how far rounding takes its norm from the job's, relatively
    """

    verdict: PassVerdict
    window: Sequence[ComparedPass]
    gradient: GradientEvidence
    is_first: bool
    is_coarse: bool
    norm_bounds: Mapping[str, float]

    def is_scaled(self, parameter: ComparedGradient) -> bool:
        """Tell whether a parameter's gradient is the replay's times a number.

        The sampled elements then have the factor that the whole norm has. If they have another one, the gradient is
        another one elsewhere, as where a row of an embedding gets none.
        """
        if parameter.cosine is None:
            return True
        factor = find_factor(parameter)
        has_one_factor = factor is None or parameter.scale is None
        has_one_factor |= math.isclose(parameter.scale or 0.0, factor or 0.0, rel_tol=4 * SAME_RATIO[self.is_coarse])
        return abs(parameter.cosine) >= SAME_COSINE[self.is_coarse] and has_one_factor

    def is_same(self, parameter: ComparedGradient) -> bool:
        """Tell whether a parameter's gradient is the replay's."""
        factor = find_factor(parameter)
        return factor is not None and abs(factor - 1) <= SAME_RATIO[self.is_coarse] and self.is_scaled(parameter)

    def list_off(self) -> list[ComparedGradient]:
        """List the parameters whose gradient is another one, while others have the replay's; none if no others have."""
        off = [parameter for parameter in self.gradient.parameters.values() if not self.is_same(parameter)]
        return off if len(off) < len(self.gradient.parameters) else []

    def is_confined_to(self, pattern: str) -> bool:
        """Tell whether these parameters, or these modules', are off alone: no other forward of theirs does that.

        What a module computes otherwise changes the gradients of the layers around it as well.
        """
        table = PatternTable({pattern: True})
        places = [(parameter.name, parameter.name.rpartition(".")[0]) for parameter in self.list_off()]
        return bool(places) and all(any(table.find(place) is not None for place in both) for both in places)

    def is_sure(self, parameters: Iterable[ComparedGradient], factor: float = 1.0, *, is_off: bool) -> bool:
        """Tell whether these are surely off `factor` times the replay's gradient, or surely are that, each by itself.

        In fp32 that is sure wherever a rule finds it, on the job's weights. In a coarser dtype a parameter's rounding
        has to allow no other answer: what is known of several parameters together alone may be one error that they
        share.
        """
        return self.is_first and (
            not self.is_coarse
            or all(
                (self._measure_distance(parameter, factor) > self.norm_bounds[parameter.name]) is is_off
                for parameter in parameters
            )
        )

    def _measure_distance(self, parameter: ComparedGradient, factor: float) -> float:
        """Measure how far a norm is from `factor` times the replay's, relatively; infinite for another direction."""
        found = find_factor(parameter)
        return math.inf if found is None or not self.is_scaled(parameter) else abs(found / factor - 1)


def find_factor(parameter: ComparedGradient) -> float | None:
    """Find the number that the replay's gradient of a parameter is multiplied by in the job, if it is one number."""
    if parameter.ratio is None:
        return None
    return -parameter.ratio if (parameter.cosine or 0.0) < 0 else parameter.ratio


def find_farthest(parameters: Iterable[ComparedGradient]) -> ComparedGradient:
    """Find the parameter whose gradient points farthest from the replay's."""
    return min(parameters, key=lambda parameter: 1.0 if parameter.cosine is None else parameter.cosine)


def find_wrong_gradient(evidence: CauseEvidence) -> WrongGradient | None:
    """Find the first window whose gradient differs, if the job recorded enough of it."""
    wrong = evidence.find_wrong_window(MISSING_GRADIENT, *GRADIENT_QUANTITIES)
    gradient = None if wrong is None else collect_gradient_evidence(wrong[2])
    if wrong is None or gradient is None or not gradient.parameters:
        return None
    verdict, _, window = wrong
    settings, index = evidence.settings, window[-1].record.index
    dtypes = [dtype for compared in window for dtype in list_dtypes(compared.recorded, settings)]
    num_passes = max((len(step.passes) for step in list_steps(window)), default=1)
    has_stepped = settings.follows_steps and window[0].record.index > 0
    bounds = {
        name: settings.choose_signature_bound(name_kind(name), dtypes, index, num_passes, has_stepped=has_stepped)
        for name in gradient.parameters
    }
    return WrongGradient(
        verdict=verdict,
        window=window,
        gradient=gradient,
        is_first=evidence.first_wrong is verdict,
        is_coarse=is_coarse(dtypes),
        norm_bounds={name: compute_norm_bound(bound, dtypes) for name, bound in bounds.items()},
    )


def name_parameters(names: Sequence[str], all_names: Sequence[str]) -> str:
    """Name parameters in few words: by their module where all of it is meant, else by their kind where all of that is.

    A kind is `model.layers.*.mlp.up_proj.weight`, which many layers have.
    """
    if len(names) == len(all_names):
        return f"all {pluralise(len(all_names), 'parameter')}" if len(all_names) > 1 else names[0]
    modules = list(dict.fromkeys(_find_whole_module(name, names, all_names) for name in names))
    sizes: dict[str, int] = {}
    for name in all_names:
        sizes[name_kind(name)] = sizes.get(name_kind(name), 0) + 1
    by_kind: dict[str, list[str]] = {}
    for name in names:
        by_kind.setdefault(name_kind(name), []).append(name)
    kinds = [
        text
        for kind, members in by_kind.items()
        for text in ([kind] if len(members) == sizes[kind] and len(members) > 1 else members)
    ]
    return name_some(modules if len(modules) < len(kinds) else kinds, 3)


def _find_whole_module(name: str, names: Sequence[str], all_names: Sequence[str]) -> str:
    """Find the outermost module of a parameter all of whose parameters, two at least, are among `names`."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        module = ".".join(parts[:end])
        members = [other for other in all_names if other.startswith(f"{module}.")]
        if len(members) > 1 and set(members) <= set(names):
            return module
    return name
