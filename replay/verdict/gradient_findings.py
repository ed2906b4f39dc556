"""Hold the gradient of a job's optimizer step against that of a replay's window: norm, elements, missing gradients."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from capture.file_format.optimizer_step import OptimizerStep, Sample
from replay.output.text import pluralise
from replay.runlog.records import PassRecord
from replay.tolerances.difference import absolute_difference, is_coarse, relative_difference
from replay.tolerances.job_bounds import GRAD_NORM, GRADIENT, HIDING_BOUND, LEAST_RMS, LOSS, SAME_SHARES
from replay.verdict.findings import (
    ROUNDING_HIDES,
    Finding,
    Setting,
    Status,
    dtypes_of,
    finding,
    not_judged,
    other_settings,
    other_weighting,
)
from replay.verdict.job_values import MISSING_GRADIENT, GradientSamples, Recorded, Replayed, own_name
from replay.verdict.optimizer_settings import differences

ANOTHER_LOSS = "the job differentiated another loss than the one that its model returned"
ROUTED = ("expert", "router", ".gate.")  # in names of parameters
MAX_NAMED = 4  # parameters, or ranks
MAX_FORWARDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One pass of a window, on one of the ranks that shared it."""

    record: PassRecord
    recorded: Recorded
    replayed: Replayed
    findings: Sequence[Finding]  # its own
    follows_a_norm: bool  # the job's very pass before it, by the same rank, has a gradient norm of its own

    @property
    def loss(self) -> Finding | None:
        return next((one for one in self.findings if one.name == LOSS), None)


def windows_of(members: Sequence[Member]) -> list[list[Member]]:
    """Group the passes by the gradient that they went into, one for each data rank and index."""
    windows: list[list[Member]] = []
    window: list[Member] = []
    seen: set[tuple[int, int]] = set()
    for member in members:
        place = member.record.index, member.record.data_rank
        if place in seen or not member.record.input.trains:
            continue
        seen.add(place)
        if window and member.record.index > window[-1].record.index and window[-1].record.result.grad_norm is not None:
            windows.append(window)
            window = []
        window.append(member)
    return windows + ([window] if window else [])


def why_steps_differ(window: Sequence[Member], setting: Setting, number: int) -> list[str]:
    """List why weights differ from the job's after step `number` of a replay with --step; empty if they should not."""
    assert setting.steps is not None
    steps = [one.recorded.optimizer for one in window if one.recorded.optimizer is not None]
    if not steps:
        return ["the replay has stepped since, so its weights are known before the first step alone"]
    if reason := _why_not_comparable(window, steps, setting):
        return [reason]
    return differences(steps[-1], setting.steps, number, _norms(window, steps))


def _norms(window: Sequence[Member], steps: Sequence[OptimizerStep]) -> tuple[float | None, float | None]:
    """Return the norm of the gradient in the job, if it is known, and here."""
    return next((there for _, there in _noted(window, steps)), None), window[-1].record.result.grad_norm


def why_not_judged(window: Sequence[Member], setting: Setting, number: int) -> list[str]:
    """Say why nobody knows whether the gradient of step `number` was the job's; empty where it is known.

    A step at a learning rate of 0 moves nothing, whatever its gradient.
    """
    rates = [group.get("lr") for member in window if (step := member.recorded.optimizer) for group in step.settings]
    if rates and not any(rates):
        return []
    findings = _of_gradient(window, setting)
    if any(finding.counts and finding.status in (Status.AGREES, Status.DIFFERS) for finding in findings):
        return []
    reason = next((finding.doubt for finding in findings if finding.doubt is not None), "the job recorded none of it")
    last = window[-1].recorded.optimizer_step
    named = "the step before" if last is None else f"the job's step {last + 1}"
    return [f"the gradient of {named} could not be judged: {reason}"]


def window_findings(window: Sequence[Member], setting: Setting, number: int) -> list[Finding]:
    """Hold what the job recorded of its gradient against the replay's; empty where it recorded nothing.

    number  of the window among the replay's
    """
    return [*_of_gradient(window, setting), *_of_settings(window, setting, number)]


def _of_settings(window: Sequence[Member], setting: Setting, number: int) -> list[Finding]:
    if setting.steps is None or all(one.recorded.optimizer is None for one in window):
        return []
    differing = why_steps_differ(window, setting, number)
    return [other_settings(differing)] if differing else []


def _of_gradient(window: Sequence[Member], setting: Setting) -> list[Finding]:
    steps = [one.recorded.optimizer for one in window if one.recorded.optimizer is not None]
    noted = _noted(window, steps)
    if not steps and not noted:
        return []
    if not any(step.gradients or step.grad_norm is not None or step.without_gradient for step in steps) and not noted:
        return []
    here = window[-1].record.result.grad_norm
    why_not = _why_not_comparable(window, steps, setting)
    if why_not is not None or here is None:
        reason = why_not or "the replay ran no backward, or its window was cut short"
        findings = [not_judged(GRAD_NORM, there, reason, here) for _, there in noted[:1]]
        samples = _sampled(steps)
        if samples:
            findings.append(not_judged(GRADIENT, _rms(list(samples.values())), reason))
        return findings
    index = window[-1].record.index
    dtypes = [dtype for member in window for dtype in dtypes_of(member.recorded, setting)]
    gradient = _gradient(window)
    doubt = _doubt(window, steps)
    if gradient is not None and doubt is not None and doubt.startswith(ANOTHER_LOSS):
        doubt = None if _some_agree(steps, gradient, setting.bound(GRADIENT, dtypes, 1, index)) else doubt
    missing = [] if gradient is None else _missing(gradient, steps, doubt)
    weighting = _weighting(window, noted, here) if doubt is None else None
    if weighting is not None:
        doubt = weighting.doubt
    findings = [_norm(value, rank, here, gradient, steps, window, setting, dtypes, doubt) for rank, value in noted]
    findings = [*_worst(findings, noted), *missing]
    if gradient is not None:
        findings += _elements(gradient, window, steps, setting, dtypes, doubt)
    return findings if weighting is None else [*findings, weighting]


def _noted(window: Sequence[Member], steps: Sequence[OptimizerStep]) -> list[tuple[int, float]]:
    """List the job's global norms by rank. Parts of one norm are added up."""
    parts = [one.grad_norm for one in steps if one.is_part_of_norm and one.grad_norm is not None]
    if parts:
        return [(0, math.sqrt(sum(part * part for part in parts)))]
    norms: dict[int, float] = {}
    for one in window:
        rank = one.recorded.rank or 0
        claims = [claim.values[0] for claim in one.recorded.claims if claim.name == GRAD_NORM]
        step = one.recorded.optimizer
        if claims:
            norms[rank] = claims[0]
        elif step is not None and step.grad_norm is not None:
            norms[rank] = step.grad_norm
    return sorted(norms.items())


def _why_not_comparable(window: Sequence[Member], steps: Sequence[OptimizerStep], setting: Setting) -> str | None:
    """Say why the replay's window is not the job's, which took the same passes of all its ranks; None if it is."""
    first = window[0].recorded
    world_size = first.world_size or 1
    if not steps:  # the job noted a norm for each pass, and nothing saw its steps
        is_whole = len(window) == world_size == len({one.recorded.rank for one in window})
        return None if is_whole and setting.grad_accumulation == 1 else "how many passes it was of was not recorded"
    by_rank: dict[int, list[int | None]] = {}
    for one in window:
        by_rank.setdefault(one.recorded.rank or 0, []).append(one.recorded.step)
    wanted = {one.recorded.rank or 0: list(one.recorded.optimizer.passes) for one in window if one.recorded.optimizer}
    if len(wanted) == world_size and by_rank == wanted:
        return None
    size = world_size * len(steps[-1].passes)
    num_here = len(window)
    ranks = f" of {world_size} ranks" if world_size > 1 else ""
    grad_accumulation = max(size // setting.num_data_ranks, 1)
    if grad_accumulation != setting.grad_accumulation:
        return (
            f"the job's step took {pluralise(size, 'pass')}{ranks}, and this gradient is of {num_here}. "
            f"Try: --grad-accumulation {grad_accumulation}, without --max-inputs"
        )
    steps_here = ", ".join(str(member.recorded.step) for member in window[:MAX_FORWARDS])
    return (
        f"the job's step took {pluralise(size, 'pass')}{ranks}, and this gradient is of {num_here}, not all the same: "
        f"here forward {steps_here}, in the job {_forwards(wanted)}. Try: all of the job's inputs in its order, "
        "without --max-inputs and --shuffle-inputs"
    )


def _forwards(by_rank: Mapping[int, Sequence[int]]) -> str:
    """Name the forwards of a step, as `0, 1` or `0, 1 of rank 0; 0, 1 of rank 1`."""
    named = {rank: ", ".join(map(str, forwards[:MAX_FORWARDS])) for rank, forwards in sorted(by_rank.items())}
    if len(named) == 1:
        return next(iter(named.values()))
    return "; ".join(f"{forwards} of rank {rank}" for rank, forwards in named.items())


def _doubt(window: Sequence[Member], steps: Sequence[OptimizerStep]) -> str | None:
    """Say why a different gradient would prove nothing; None if it would."""
    if any(member.loss is None or not member.loss.counts for member in window):
        return "the gradient is of the job's objective, which the replay may not compute"
    if any(share is None for step in steps for share in step.shares):
        shares = _as_shares([member.record.result.weight for member in window])
        if _largest_difference(shares, _equal_weights(window)) <= SAME_SHARES:
            return ANOTHER_LOSS
        return f"{ANOTHER_LOSS}, or weighed its passes otherwise. Try: --window mean-of-means"
    if not steps and not all(one.follows_a_norm for one in window):
        return "one gradient norm does not tell how many passes it was accumulated over"
    if len(window) > 1 and job_weights(window) is None:
        by_tokens = [one.recorded.num_tokens for one in window]
        if not sum(by_tokens) or _largest_difference(_as_shares(by_tokens), _equal_weights(window)) > SAME_SHARES:
            return "what each pass weighed in the job is not known. Try: --window mean-of-means"
    return None


def _weighting(window: Sequence[Member], noted: Sequence[tuple[int, float]], here: float) -> Finding | None:
    """Report that the job weighed its passes otherwise than the replay. Only shares count, not their sum."""
    weights = job_weights(window) if len(window) > 1 else None
    if weights is None:
        return None
    there, ours = _as_shares(weights), _as_shares([one.record.result.weight for one in window])
    if _largest_difference(there, ours) <= SAME_SHARES:
        return None
    norm = f" (gradient norm {noted[0][1]:.6g})" if noted else ""
    if _largest_difference(there, _equal_weights(window)) <= SAME_SHARES:
        why = f"the job averaged means{norm}; by tokens the norm is {here:.6g}. Try: --window mean-of-means"
    else:
        why = f"the job weighed its passes otherwise{norm}; here the norm is {here:.6g}"
    return other_weighting(there, ours, why)


def _as_shares(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [one / total for one in weights] if total else list(weights)


def _equal_weights(window: Sequence[Member]) -> list[float]:
    return [1 / len(window)] * len(window)


def job_weights(window: Sequence[Member]) -> list[float] | None:
    """Compute what each pass's mean loss weighed in the job's gradient, ranks averaged; None where it is not known."""
    shares: dict[tuple[int, int], float | None] = {}
    for one in window:
        if (step := one.recorded.optimizer) is not None:
            for forward, share in zip(step.passes, step.shares, strict=True):
                shares[one.recorded.rank or 0, forward] = share
    weights: list[float] = []
    for one in window:
        share = shares.get((one.recorded.rank or 0, one.recorded.step if one.recorded.step is not None else -1))
        if share is None:
            return None
        tokens = one.recorded.num_tokens
        divisor = one.recorded.divisor
        weights.append(share * (1.0 if divisor is None else tokens / divisor) / (one.recorded.world_size or 1))
    return weights


def _largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def _gradient(window: Sequence[Member]) -> GradientSamples | None:
    """Return the replay's gradient, with all places that some rank of the job sampled."""
    gradients = [one.replayed.gradient for one in window if one.replayed.gradient is not None]
    if not gradients:
        return None
    values = {(name, place): value for one in gradients for (name, place), value in one.values.items()}
    return GradientSamples(norms=gradients[0].norms, sizes=gradients[0].sizes, values=values)


def _norm(
    there: float,
    rank: int,
    here: float,
    gradient: GradientSamples | None,
    steps: Sequence[OptimizerStep],
    window: Sequence[Member],
    setting: Setting,
    dtypes: Sequence[str],
    doubt: str | None,
) -> Finding:
    num_frozen = max(one.recorded.num_frozen for one in window)
    if num_frozen and gradient is not None and doubt is None:
        trained = _trained(steps, num_frozen, gradient)
        if trained is None:
            doubt = f"the job did not train {pluralise(num_frozen, 'parameter')}, and not all that it trained is known"
        else:
            here = math.sqrt(sum(norm**2 for name, norm in gradient.norms.items() if _is_among(name, trained)))
    elif num_frozen:
        doubt = doubt or f"the job did not train {pluralise(num_frozen, 'parameter')}"
    bound = setting.bound(GRAD_NORM, dtypes, 1, window[-1].record.index)
    where = f"rank {rank}" if (window[0].recorded.world_size or 1) > 1 else None
    apart = relative_difference(here, there)
    return finding(
        GRAD_NORM,
        there,
        here,
        difference=apart,
        bound=bound,
        doubt=doubt or setting.doubt_of_routes(GRAD_NORM, apart, dtypes, window[-1].record.index),
        counts=doubt is None,
        where=where,
    )


def _trained(steps: Sequence[OptimizerStep], num_frozen: int, gradient: GradientSamples) -> set[str] | None:
    """Name all parameters that the job trained; None where not all were sampled, and the replay trains others."""
    fingerprints = [one.gradients for one in steps if one.gradients is not None]
    names = {sample.name for one in fingerprints for sample in one.samples}
    names |= {name for one in steps for name in one.without_gradient}
    num_parameters = max((one.num_parameters for one in fingerprints), default=0)
    if len(names) + num_frozen >= num_parameters > 0:
        return names
    has_all = names and all(own_name(name, gradient.norms) is not None for name in names)
    return set(gradient.norms) if has_all and len(gradient.norms) + num_frozen == num_parameters else None


def _is_among(name: str, job_names: set[str]) -> bool:
    return name in job_names or any(job.endswith(f".{name}") for job in job_names)


def _sampled(steps: Sequence[OptimizerStep]) -> dict[str, float]:
    return {
        sample.name: max(sample.values, key=abs)
        for step in steps
        if step.gradients is not None
        for sample in step.gradients.samples
        if sample.values
    }


def _missing(gradient: GradientSamples, steps: Sequence[OptimizerStep], doubt: str | None) -> list[Finding]:
    """Report the parameters that had no gradient in the job's step and have one in the replay. No bound covers that."""
    names = dict.fromkeys(name for step in steps for name in step.without_gradient)
    own_names = [own for name in names if (own := own_name(name, gradient.norms)) is not None]
    sizes = {name: gradient.norms[name] / math.sqrt(gradient.sizes[name]) for name in own_names}
    there = [name for name, size in sizes.items() if size >= scale_of(gradient, name) > 0]
    if not there:
        return []
    others = f" and {len(there) - MAX_NAMED} more" if len(there) > MAX_NAMED else ""
    where = (
        f"{', '.join(there[:MAX_NAMED])}{others}, which {'has' if len(there) == 1 else 'have'} no gradient in the job"
    )
    found = finding(
        MISSING_GRADIENT, 0.0, sizes[there[0]], difference=1.0, bound=0.0, doubt=doubt, counts=True, where=where
    )
    return [replace(found, num_values=len(there), said=f"none in the job, root mean square {sizes[there[0]]:.3g} here")]


def _elements(
    gradient: GradientSamples,
    window: Sequence[Member],
    steps: Sequence[OptimizerStep],
    setting: Setting,
    dtypes: Sequence[str],
    doubt: str | None,
) -> list[Finding]:
    """Judge sampled elements, relative to the root mean square of their parameter's gradient; keep the worst.

    Within a bound of more than HIDING_BOUND nothing is judged: a gradient that vanished would agree. So it is where all
    sampled elements are smaller than the bound.
    """
    index = window[-1].record.index
    bound = setting.bound(GRADIENT, dtypes, 1, index)
    if any(not step.is_unclipped for step in steps):
        doubt = doubt or "the job's gradients were clipped or scaled before they were sampled"
    if setting.unknown_rounding is not None and is_coarse(dtypes):
        doubt = doubt or f"how far rounding moves it could not be measured: {setting.unknown_rounding}"
    has_ranks = (window[0].recorded.world_size or 1) > 1
    findings: list[Finding] = []
    tells = False
    for member in window:
        step = member.recorded.optimizer
        for pair in _pairs(step, gradient) if step is not None else ():
            rank = f", rank {member.recorded.rank}" if has_ranks else ""
            tells |= pair.tells(bound)
            findings.append(
                finding(
                    GRADIENT,
                    pair.job_value,
                    pair.replay_value,
                    difference=pair.difference,
                    bound=bound,
                    doubt=doubt
                    or setting.doubt_of_routes(
                        GRADIENT, pair.difference, dtypes, index, least_floor=HIDING_BOUND if pair.is_routed else 0.0
                    ),
                    counts=True,
                    where=f"{pair.name}, element {pair.sample.start + pair.worst}{rank}",
                )
            )
    if not findings:
        return []
    # one that differs for sure comes before one that is further off and doubted
    worst = max(findings, key=lambda finding: (finding.status is Status.DIFFERS, finding.share))
    worst = replace(worst, num_values=len(findings))
    if worst.agrees and (bound > HIDING_BOUND or not tells):
        return [replace(worst, status=Status.NOT_JUDGED, doubt=ROUNDING_HIDES, counts=False)]
    return [worst]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """A sample of the job's gradient and the replay's gradient at that place; `worst` is the farthest element."""

    name: str
    sample: Sample
    replayed: Sequence[float]
    scale: float  # the root mean square of the parameter's gradient
    worst: int

    @property
    def is_routed(self) -> bool:
        """Tell whether the parameter is an expert's or a router's: one token's other route moves it by its own size."""
        return any(word in self.name for word in ROUTED)

    def tells(self, bound: float) -> bool:
        """Tell whether one of the two would be found to have vanished, by a bound on this parameter's elements."""
        return max(map(abs, (*self.sample.values, *self.replayed))) > bound * self.scale

    @property
    def job_value(self) -> float:
        return self.sample.values[self.worst]

    @property
    def replay_value(self) -> float:
        return self.replayed[self.worst]

    @property
    def difference(self) -> float:
        return absolute_difference(self.replay_value, self.job_value) / self.scale if self.scale else 0.0


def _pairs(step: OptimizerStep, gradient: GradientSamples) -> Iterator[_Pair]:
    for sample in step.gradients.samples if step.gradients is not None else ():
        name = own_name(sample.name, gradient.norms)
        replayed = gradient.values.get((name, sample.start)) if name is not None else None
        if name is None or replayed is None or len(replayed) != len(sample.values) or not replayed:
            continue
        worst = max(range(len(replayed)), key=lambda place: absolute_difference(replayed[place], sample.values[place]))
        yield _Pair(name=name, sample=sample, replayed=replayed, scale=scale_of(gradient, name), worst=worst)


def _some_agree(steps: Sequence[OptimizerStep], gradient: GradientSamples, bound: float) -> bool:
    """Tell whether a sampled gradient agrees that would not if it were of another loss.

    It has to be so far from zero that one that vanished, or turned around, would not agree.
    """
    return any(
        pair.difference <= bound <= HIDING_BOUND and max(map(abs, pair.replayed)) > 2 * bound * pair.scale
        for step in steps
        for pair in _pairs(step, gradient)
    )


def scale_of(gradient: GradientSamples, name: str) -> float:
    """Return the root mean square of a parameter's gradient, or LEAST_RMS of all parameters' if that is more."""
    everything = math.sqrt(sum(n * n for n in gradient.norms.values()) / max(sum(gradient.sizes.values()), 1))
    return max(gradient.norms[name] / math.sqrt(gradient.sizes[name]), LEAST_RMS * everything)


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / max(len(values), 1))


def _worst(findings: Sequence[Finding], noted: Sequence[tuple[int, float]]) -> list[Finding]:
    """Keep the farthest finding. All ranks have one norm; where they do not, say which has which."""
    if not findings:
        return []
    farthest = max(findings, key=lambda finding: finding.share)
    if all(relative_difference(value, noted[0][1]) <= (farthest.bound or 0.0) for _, value in noted):
        return [farthest]
    norms = ", ".join(f"rank {rank} has {value:.6g}" for rank, value in noted[:MAX_NAMED])
    return [replace(farthest, where=f"{farthest.where}; the job's ranks have several norms: {norms}")]
