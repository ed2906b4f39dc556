"""Tell which parameters the job trained, and report those of them that had no gradient."""

from collections.abc import Sequence
from dataclasses import replace

from capture.file_format.optimizer_step import OptimizerStep
from replay.output.text import name_some
from replay.verdict.findings import Finding, judge_number
from replay.verdict.gradient_samples import GradientSamples, compute_scale
from replay.verdict.recorded_pass import MISSING_GRADIENT, match_parameter_name

MAX_NAMED = 4


def find_trained_parameters(
    steps: Sequence[OptimizerStep], num_frozen: int, gradient: GradientSamples
) -> set[str] | None:
    """Name all parameters that the job trained; None where not all were sampled, and the replay trains others."""
    rank_samples = [step.gradients for step in steps if step.gradients is not None]
    names = {sample.name for gradients in rank_samples for sample in gradients.samples}
    names |= {signature.name for step in steps for signature in step.signatures}
    names |= {name for step in steps for name in step.without_gradient}
    num_parameters = max((gradients.num_parameters for gradients in rank_samples), default=0)
    if len(names) + num_frozen >= num_parameters > 0:
        return names
    has_all = names and all(match_parameter_name(name, gradient.norms) is not None for name in names)
    return set(gradient.norms) if has_all and len(gradient.norms) + num_frozen == num_parameters else None


def is_among(name: str, job_names: set[str]) -> bool:
    """Tell whether one of the job's names is this one, or ends with it: the job may have wrapped the model."""
    return name in job_names or any(job_name.endswith(f".{name}") for job_name in job_names)


def find_missing_gradients(
    gradient: GradientSamples, steps: Sequence[OptimizerStep], doubt: str | None
) -> list[Finding]:
    """Report the parameters that had no gradient in the job's step and have one in the replay. No bound covers that."""
    job_names = dict.fromkeys(name for step in steps for name in step.without_gradient)
    matches = [match_parameter_name(job_name, gradient.norms) for job_name in job_names]
    sizes = {name: gradient.compute_rms(name) for name in matches if name is not None}
    missing = [name for name, size in sizes.items() if size >= compute_scale(gradient, name) > 0]
    if not missing:
        return []
    have = "has" if len(missing) == 1 else "have"
    where = f"{name_some(missing, MAX_NAMED)}, which {have} no gradient in the job"
    size = sizes[missing[0]]
    finding = judge_number(
        MISSING_GRADIENT, 0.0, size, difference=1.0, bound=0.0, doubt=doubt, is_evidence=True, where=where
    )
    return [
        replace(finding, num_values=len(missing), values_as_text=f"none in the job, root mean square {size:.3g} here")
    ]
