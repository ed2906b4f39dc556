"""Find how much of each pass's own gradient a job's gradient holds.

A step's gradient is a sum of its passes' gradients, each times a weight. The replay measures the gradient of each pass
alone. The weights that give the job's elements are then a problem of least squares, with many more elements than
passes: a rank's gradient that was left out has weight 0, and one that counts twice has twice its weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from replay.verdict.gradient_samples import GradientSamples
from replay.verdict.recorded_pass import RecordedPass, match_parameter_name

# So many elements for each pass, at least: fewer would fit anything.
LEAST_ELEMENTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SinglePassGradient:
    """The gradient of one pass alone, as the replay computes it.

    index, data_rank  of the pass in the replay
    rank, forward     of the pass in the job
    weight            of the pass in the replay's gradient of the whole window: the gradients' weighted sum is that
    """

    index: int
    data_rank: int
    rank: int
    forward: int | None
    weight: float
    gradient: GradientSamples


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientMix:
    """What the gradient that one rank of the job recorded is made of.

    shares    by pass, in the order of the `SinglePassGradient`s: its weight in the job's gradient as a multiple of its
              weight here
    residual  the share of the job's gradient, of its sum of squares, that no weights explain
    """

    rank: int
    shares: tuple[float, ...]
    residual: float


def find_mixes(
    recorded: Sequence[RecordedPass], single_pass_gradients: Sequence[SinglePassGradient]
) -> list[GradientMix]:
    """Find what each rank's recorded gradient is made of; none of ranks with too few elements, or one not finite.

    recorded  the passes of the window
    """
    mixes: list[GradientMix] = []
    for recorded_pass in recorded:
        step = recorded_pass.step_after
        if step is None or not step.signatures:
            continue
        names: Mapping[str, float] = single_pass_gradients[0].gradient.norms
        rows: list[list[float]] = []
        values: list[float] = []
        for signature in step.signatures:
            name = match_parameter_name(signature.name, names)
            own = [
                gradient.gradient.signatures.get((name, signature.start), ()) if name is not None else ()
                for gradient in single_pass_gradients
            ]
            if any(len(elements) != len(signature.values) for elements in own) or not signature.values:
                continue
            # Each parameter counts alike, whatever the size of its gradient.
            scale = max(max(map(abs, elements)) for elements in own) or 1.0
            rows += [[element / scale for element in elements] for elements in zip(*own, strict=True)]
            values += [value / scale for value in signature.values]
        if len(values) < LEAST_ELEMENTS * len(single_pass_gradients):
            continue
        matrix_NP = torch.tensor(rows, dtype=torch.float64)
        job_N = torch.tensor(values, dtype=torch.float64)
        if not bool(matrix_NP.isfinite().all()) or not bool(job_N.isfinite().all()):
            continue
        weights_P = torch.linalg.lstsq(matrix_NP, job_N[:, None]).solution[:, 0]
        left_N = job_N - matrix_NP @ weights_P
        total = float(job_N.square().sum())
        shares = tuple(
            float(weight) / gradient.weight if gradient.weight else 0.0
            for weight, gradient in zip(weights_P, single_pass_gradients, strict=True)
        )
        residual = float(left_N.square().sum()) / total if total else 1.0
        mixes.append(GradientMix(rank=recorded_pass.rank or 0, shares=shares, residual=residual))
    return mixes
