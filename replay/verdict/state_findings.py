"""Compare what the job's optimizer held before a step with what the replay's held before the same step."""

from collections.abc import Sequence
from dataclasses import replace

from replay.tolerances.difference import absolute_difference, as_share
from replay.tolerances.job_bounds import GRADIENT, HIDING_BOUND, LEAST_RMS, STATE_FACTOR
from replay.verdict.findings import Finding, VerdictSettings, judge_number, list_dtypes
from replay.verdict.recorded_pass import OPTIMIZER_STATE, RecordedPass, ReplayedPass, match_parameter_name

# States that are averages of squares: they are off by twice what the gradients are.
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "variance")


def compare_states(
    passes: Sequence[tuple[RecordedPass, ReplayedPass]], index: int, settings: VerdictSettings
) -> list[Finding]:
    """Compare the sampled elements, relative to the root mean square of their state; keep the farthest.

    A state is an average of the gradients of the steps before, so its bound is a multiple of a gradient's. That a state
    agrees is no evidence of the step's own gradient. Where the bound would hide a state that is off by its own size, an
    agreement says nothing, and is left out.

    passes  of one window: what the job recorded, and what the replay computed
    index   of the window's last pass
    """
    if not settings.follows_steps:
        return []
    dtypes = [dtype for recorded, _ in passes for dtype in list_dtypes(recorded, settings)]
    gradient_bound = settings.choose_bound(GRADIENT, dtypes, 1, index)
    gradients = [replayed.gradient for _, replayed in passes]
    # A gradient that is nothing but rounding has a state that is nothing else.
    least = LEAST_RMS * max((gradient.whole_rms for gradient in gradients if gradient is not None), default=0.0)
    findings: list[Finding] = []
    for recorded, replayed in passes:
        step, elements = recorded.step_after, replayed.state
        names = {name for name, _, _ in elements}
        for sample in step.state if step is not None else ():
            name = match_parameter_name(sample.name, names)
            for key, job_values in sample.values.items():
                run = None if name is None else elements.get((name, sample.start, key))
                scale = 0.0 if run is None else max(run.scale, least**2 if key in SQUARES else least)
                if run is None or len(run.values) != len(job_values) or not scale:
                    continue
                differences = [absolute_difference(*pair) for pair in zip(run.values, job_values, strict=True)]
                worst = max(range(len(differences)), key=differences.__getitem__)
                factor = 2 * STATE_FACTOR if key in SQUARES else STATE_FACTOR
                findings.append(
                    judge_number(
                        OPTIMIZER_STATE,
                        job_values[worst],
                        run.values[worst],
                        difference=as_share(differences[worst], scale),
                        bound=factor * gradient_bound,
                        is_evidence=False,
                        where=f"{key} of {name}, element {sample.start + worst}",
                    )
                )
    if not findings:
        return []
    farthest = max(findings, key=lambda finding: finding.share_of_bound)
    if farthest.agrees and (farthest.bound or 0.0) > HIDING_BOUND:
        return []
    return [replace(farthest, num_values=len(findings))]
