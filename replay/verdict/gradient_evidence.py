"""Hold the gradient of a job's optimizer step beside the replay's, parameter by parameter and kind by kind.

A kind is the parameters that differ in numbers alone, such as the query projections of all layers. Rounding errors of
single elements are large in bf16 and mostly independent, so they average out over a signature, and more so over those
of a kind: lengths and directions are sharp there.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from capture.file_format.gradient_signature import GradientSignature
from capture.file_format.name_patterns import split_name
from replay.tolerances.job_bounds import LEAST_RMS
from replay.verdict.gradient_samples import GradientSamples, compute_scale
from replay.verdict.recorded_pass import RecordedPass, match_parameter_name

WHOLE = "all parameters"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedGradient:
    """The gradient of one parameter, or of several together, in the job and in the replay.

    Elements are compared as multiples of the root mean square of their parameter's gradient in the replay, so that each
    parameter of a kind counts alike.

    name         of the parameter, or of the kind: `model.layers.*.self_attn.q_proj.weight`
    names        the parameters
    job_norm     before clipping; None where not all ranks recorded their parts of it
    replay_norm  of the whole gradient
    least_norm   a norm of the replay below this may be rounding; differences are measured by it at least
    num_values   how many elements were compared; without any, those below are None
    scale        the number that the replay's elements are multiplied by to come nearest to the job's
    cosine       of the angle between the job's elements and the replay's; 0 where either are all zero
    difference   root mean square of the elements' differences
    job_size     root mean square of the job's elements
    size         that of the replay's, which is near 1
    """

    name: str
    names: tuple[str, ...]
    job_norm: float | None
    replay_norm: float
    least_norm: float = 0.0
    num_values: int = 0
    scale: float | None = None
    cosine: float | None = None
    difference: float | None = None
    job_size: float | None = None
    size: float | None = None

    @property
    def ratio(self) -> float | None:
        """The job's norm as a multiple of the replay's; None where either is not known, or the replay's is 0."""
        return None if self.job_norm is None or not self.replay_norm else self.job_norm / self.replay_norm


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientEvidence:
    """All that is known of a window's gradient, beside the replay's.

    parameters  by the replay's name; those that the job signed, and that have a gradient here
    kinds       by name: of several parameters each
    whole       all of them together; None where there are none
    ranks       by rank of the job, if there are several: that rank's own gradients of the parameters that each rank has
                whole, beside the replay's gradient of the whole window
    """

    parameters: Mapping[str, ComparedGradient]
    kinds: Mapping[str, ComparedGradient] = field(default_factory=dict)
    whole: ComparedGradient | None = None
    ranks: Mapping[int, Mapping[str, ComparedGradient]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SignedParameter:
    """The signatures of one parameter, of several ranks of the job or of one.

    least_norm  as of `ComparedGradient`
    pairs       elements of the job and of the replay, divided by the root mean square of the gradient in the replay
    """

    name: str
    job_norm: float | None
    replay_norm: float
    least_norm: float
    pairs: Sequence[tuple[float, float]]


def compare_signatures(recorded: Sequence[RecordedPass], gradient: GradientSamples) -> GradientEvidence | None:
    """Compare the signatures of a window's ranks with the replay's gradient; None where the job took none.

    recorded  the passes of the window
    """
    by_rank: dict[int, Sequence[GradientSignature]] = {}
    for recorded_pass in recorded:
        if recorded_pass.step_after is not None and recorded_pass.step_after.signatures:
            by_rank[recorded_pass.rank or 0] = recorded_pass.step_after.signatures
    if not by_rank:
        return None
    has_all_ranks = len(by_rank) == (recorded[0].world_size or 1)
    signed = _pair_by_parameter(by_rank, gradient, has_all_ranks=has_all_ranks)
    whole = {rank: [part for part in parts if not part.is_part] for rank, parts in by_rank.items()}
    ranks: dict[int, dict[str, ComparedGradient]] = {}
    if len(by_rank) > 1 and all(whole.values()):
        for rank, signatures in whole.items():
            own = _pair_by_parameter({rank: signatures}, gradient, has_all_ranks=True)
            ranks[rank] = {parameter.name: _compare(parameter.name, [parameter]) for parameter in own}
    by_kind: dict[str, list[_SignedParameter]] = {}
    for parameter in signed:
        by_kind.setdefault(name_kind(parameter.name), []).append(parameter)
    return GradientEvidence(
        parameters={parameter.name: _compare(parameter.name, [parameter]) for parameter in signed},
        kinds={kind: _compare(kind, members) for kind, members in by_kind.items() if len(members) > 1},
        whole=_compare(WHOLE, signed) if signed else None,
        ranks=ranks,
    )


def name_kind(name: str) -> str:
    """Name the kind of a parameter: its name, with * for each part that is a number."""
    return split_name(name)[0]


def _pair_by_parameter(
    by_rank: Mapping[int, Iterable[GradientSignature]], gradient: GradientSamples, *, has_all_ranks: bool
) -> list[_SignedParameter]:
    """Pair the job's elements with the replay's. Of ranks that have the same ones, the first rank's count."""
    signatures: dict[str, list[GradientSignature]] = {}
    for _, rank_signatures in sorted(by_rank.items()):
        for signature in rank_signatures:
            name = match_parameter_name(signature.name, gradient.norms)
            if name is not None and gradient.sizes[name] == math.prod(signature.shape):
                signatures.setdefault(name, []).append(signature)
    signed: list[_SignedParameter] = []
    for name, parts in signatures.items():
        scale = compute_scale(gradient, name)
        pairs: list[tuple[float, float]] = []
        for part in {part.start: part for part in reversed(parts) if part.values}.values():
            replayed = gradient.signatures.get((name, part.start), ())
            if len(replayed) == len(part.values) and _can_divide((*part.values, *replayed), scale):
                pairs += [(job / scale, own / scale) for job, own in zip(part.values, replayed, strict=True)]
        if not parts[0].is_part:
            job_norm: float | None = parts[0].norm
        else:
            job_norm = math.sqrt(math.fsum(part.norm**2 for part in parts)) if has_all_ranks else None
        signed.append(
            _SignedParameter(
                name=name,
                job_norm=job_norm,
                replay_norm=gradient.norms[name],
                least_norm=scale * math.sqrt(gradient.sizes[name]),
                pairs=tuple(pairs),
            )
        )
    return signed


def _can_divide(values: Sequence[float], scale: float) -> bool:
    """Tell whether numbers can be compared as multiples of `scale`: in fp16 a gradient may overflow."""
    return bool(scale) and math.isfinite(scale) and all(map(math.isfinite, values))


def measure_signature_distances(gradient: GradientSamples, other: GradientSamples) -> dict[str, list[float]]:
    """Measure by kind how far the signatures of two replays are apart: for each parameter the root mean square.

    A gradient that is 0, or next to it, as of a LoRA's first factor in the first step, tells nothing of later ones.
    """
    distances: dict[str, list[float]] = {}
    squares: dict[str, list[float]] = {}
    for (name, start), values in gradient.signatures.items():
        other_values, scale = other.signatures.get((name, start), ()), compute_scale(gradient, name)
        is_known = gradient.norms[name] > LEAST_RMS * gradient.whole_rms * math.sqrt(gradient.sizes[name])
        if is_known and len(values) == len(other_values) and _can_divide((*values, *other_values), scale):
            pairs = zip(values, other_values, strict=True)
            squares.setdefault(name, []).extend(((own - another) / scale) ** 2 for own, another in pairs)
    for name, parameter_squares in squares.items():
        distance = math.sqrt(math.fsum(parameter_squares) / max(len(parameter_squares), 1))
        distances.setdefault(name_kind(name), []).append(distance)
    return distances


def _compare(name: str, parameters: Sequence[_SignedParameter]) -> ComparedGradient:
    pairs = [pair for parameter in parameters for pair in parameter.pairs]
    job_norms = [parameter.job_norm for parameter in parameters if parameter.job_norm is not None]
    compared = ComparedGradient(
        name=name,
        names=tuple(parameter.name for parameter in parameters),
        job_norm=math.hypot(*job_norms) if len(job_norms) == len(parameters) else None,
        replay_norm=math.hypot(*(parameter.replay_norm for parameter in parameters)),
        least_norm=math.hypot(*(parameter.least_norm for parameter in parameters)),
    )
    if not pairs:
        return compared
    product = math.fsum(job * own for job, own in pairs)
    job_square = math.fsum(job * job for job, _ in pairs)
    own_square = math.fsum(own * own for _, own in pairs)
    mean_square = math.fsum((job - own) ** 2 for job, own in pairs) / len(pairs)
    return replace(
        compared,
        num_values=len(pairs),
        scale=product / own_square if own_square else None,
        cosine=product / math.sqrt(job_square * own_square) if job_square and own_square else 0.0,
        difference=math.sqrt(mean_square),
        job_size=math.sqrt(job_square / len(pairs)),
        size=math.sqrt(own_square / len(pairs)),
    )
