"""Evidence of a job that was never run: passes and gradients with known numbers."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from capture.file_format.gradient_signature import GradientSignature, choose_signature_elements
from capture.file_format.optimizer_step import OptimizerStep
from replay.tolerances.job_bounds import GRAD_NORM, GRADIENT, LOSS, TOKEN_LOG_PROBS
from replay.verdict.causes.evidence import CauseEvidence
from replay.verdict.findings import Finding, VerdictSettings, judge_number
from replay.verdict.gradient_findings import ComparedPass
from replay.verdict.gradient_samples import GradientSamples
from replay.verdict.outcomes import Outcome, PassVerdict
from replay.verdict.recorded_pass import RecordedPass, ReplayedPass, WeightComparison
from tests.helpers.made_records import record

SHAPE = (40, 30)
NAMES = [
    "model.embed_tokens.weight",
    *(f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(2) for part in "qo"),
    *(f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(2)),
]
SETTINGS = VerdictSettings(dtype="float32", num_layers=2, num_data_ranks=1, grad_accumulation=1)
Gradients = Mapping[str, Sequence[float]]


def draw_gradients(seed: int = 0) -> dict[str, Sequence[float]]:
    draws = random.Random(seed)
    return {name: [draws.gauss(0, 1) for _ in range(math.prod(SHAPE))] for name in NAMES}


def scale_gradients(gradients: Gradients, factor: float, only: str = "") -> dict[str, Sequence[float]]:
    """Multiply the gradients of those parameters that have `only` in their names."""
    return {
        name: [factor * value for value in values] if only in name else values for name, values in gradients.items()
    }


def transpose_gradient(values: Sequence[float]) -> list[float]:
    rows, columns = SHAPE
    return [values[index % rows * columns + index // rows] for index in range(len(values))]


def sign_gradients(gradients: Gradients) -> tuple[GradientSignature, ...]:
    signatures = []
    for name, values in gradients.items():
        start, stride, count = choose_signature_elements(name, SHAPE)
        signatures.append(
            GradientSignature(
                name=name,
                shape=SHAPE,
                is_part=False,
                norm=math.hypot(*values),
                start=start,
                stride=stride,
                values=tuple(values[start + number * stride] for number in range(count)),
            )
        )
    return tuple(signatures)


def sample_replay(gradients: Gradients) -> GradientSamples:
    return GradientSamples(
        norms={name: math.hypot(*values) for name, values in gradients.items()},
        sizes={name: len(values) for name, values in gradients.items()},
        values={},
        signatures={(signature.name, signature.start): signature.values for signature in sign_gradients(gradients)},
    )


def measure_norm(gradients: Gradients) -> float:
    return math.hypot(*(value for values in gradients.values() for value in values))


def make_window(
    job: Sequence[Gradients],
    replay: Gradients,
    *,
    index: int = 0,
    share: float = 1.0,
    without: Sequence[str] = (),
    dtype: str = "float32",
) -> list[ComparedPass]:
    """A window of one pass for each rank of the job.

    job      the gradients that each rank signed
    share    what each rank multiplied its loss by
    without  parameters that had no gradient in the job
    dtype    that the job computed in
    """
    samples = sample_replay(replay)
    return [
        ComparedPass(
            record=replace(record(index, grad_norm=measure_norm(replay)), rank=rank, data_rank=rank),
            recorded=RecordedPass(
                rank=rank,
                forward_number=index,
                world_size=len(job),
                trains=True,
                claims=(),
                weight_comparison=WeightComparison(compared=("a",)),
                num_frozen=0,
                dtypes=[dtype],
                num_steps_before=index,
                step_after=OptimizerStep(
                    number=index,
                    passes=(index,),
                    shares=(share,),
                    signatures=sign_gradients({name: values for name, values in own.items() if name not in without}),
                    without_gradient=tuple(without),
                ),
            ),
            replayed=ReplayedPass(gradient=samples),
            findings=(),
            weight_comparison=WeightComparison(compared=("a",)),
            previous_pass_has_grad_norm=False,
        )
        for rank, own in enumerate(job)
    ]


def make_gradient_evidence(
    *windows: Sequence[ComparedPass], names: Sequence[str] = (GRAD_NORM, GRADIENT)
) -> CauseEvidence:
    """Evidence in which the forwards agree, and the last window's gradient differs in the quantities `names`."""
    last = windows[-1][-1]
    job_norm = math.hypot(*(signature.norm for signature in sign_of(last)))
    findings = [
        judge_number(name, job_norm, float(last.record.result.grad_norm or 0.0), difference=1.0, bound=1e-4)
        for name in names
    ]
    return CauseEvidence(
        passes=[compared for window in windows for compared in window],
        windows=windows,
        verdicts=[make_verdict(last.record.index, findings, optimizer_step=last.recorded.num_steps_before)],
        settings=SETTINGS,
        environment={},
    )


def sign_of(compared: ComparedPass) -> Sequence[GradientSignature]:
    step = compared.recorded.step_after
    return () if step is None else step.signatures


def make_verdict(index: int, findings: Sequence[Finding], *, optimizer_step: int | None = None) -> PassVerdict:
    return PassVerdict(
        index=index,
        source="a.pkl",
        rank=0,
        outcome=Outcome.DIFFERS,
        reason=None,
        findings=findings,
        first_index=None if optimizer_step is None else index,
        optimizer_step=optimizer_step,
    )


def make_forward_evidence(*wrong: str, **settings: Any) -> CauseEvidence:
    """Evidence of one pass whose quantities `wrong` differ, and whose other ones of loss and tokens agree."""
    findings = [
        judge_number(name, 2.0, 1.0 if name in wrong else 2.0, difference=float(name in wrong), bound=0.1)
        for name in (LOSS, TOKEN_LOG_PROBS)
    ]
    return CauseEvidence(
        passes=[],
        windows=[],
        verdicts=[make_verdict(0, findings)],
        settings=replace(SETTINGS, **settings),
        environment={"torch": ("2.11.0", "2.13.0")},
    )
