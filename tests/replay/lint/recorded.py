"""Recorded passes with known contents, for the tests of the checks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import Origin
from capture.file_format.optimizer_step import OptimizerStep, ParameterSamples, Sample
from replay.lint.lint import lint
from replay.lint.remark import LintSubject
from replay.options.spec import LossName
from replay.verdict.recorded_pass import RecordedPass, WeightComparison, read_recorded_pass
from replay.verdict.special_tokens import SpecialTokens

PAD, IGNORED = 0, -100


def make_rows(lengths: Sequence[int], *, seed: int = 0, left: bool = False) -> dict[str, Tensor]:
    """Padded rows of random tokens whose first two have no labels, as a sound job feeds them."""
    generator, width = torch.Generator().manual_seed(seed), max(lengths)
    ids_BS = torch.full((len(lengths), width), PAD)
    mask_BS = torch.zeros_like(ids_BS)
    for row, length in enumerate(lengths):
        first = width - length if left else 0
        ids_BS[row, first : first + length] = torch.randint(1, 500, (length,), generator=generator)
        mask_BS[row, first : first + length] = 1
    labels_BS = ids_BS.masked_fill(mask_BS == 0, IGNORED)
    labels_BS[:, :2] = IGNORED
    return {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": labels_BS}


def make_sample(
    name: str = "layers.0.weight", value: float = 1.0, dtype: str = "float32", shape: tuple[int, ...] = (8,)
) -> Sample:
    return Sample(name=name, dtype=dtype, shape=shape, start=0, values=(value,))


def make_step(number: int = 0, **values: Any) -> OptimizerStep:
    settings = {"lr": 1e-3, "num_parameters": 1}
    known: dict[str, Any] = {
        "passes": (number,),
        "shares": (1.0,),
        "optimizer": "AdamW",
        "library": "torch",
        "settings": (settings,),
    }
    return OptimizerStep(number=number, **(known | values))


def make_samples(*samples: Sample, num_frozen: int = 0) -> ParameterSamples:
    number = len(samples) + num_frozen
    return ParameterSamples(samples=samples, num_parameters=number, num_frozen=num_frozen, is_sharded=False)


def make_pass(
    tensors: Mapping[str, Tensor] | None = None,
    *,
    rank: int = 0,
    number: int = 0,
    special_tokens: SpecialTokens | None = None,
    **values: Any,
) -> RecordedPass:
    """What a recording has of a training pass that an optimizer's step follows, whose weights move by each step."""
    known: dict[str, Any] = {
        "step": make_step(number),
        "weights": make_samples(make_sample(value=1.0 + number)),
        "optimizer_step": number,
        "trains": True,
    }
    call = CapturedCall(
        tensors=make_rows([9, 12, 10], seed=100 * rank + number) if tensors is None else tensors,
        call_facts={},
        left_out={},
        origin=Origin(source="", rank=rank, world_size=2, step=number),
        **(known | values),
    )
    samples = call.weights
    weights = WeightComparison(num_parameters=0 if samples is None else samples.num_parameters)
    return read_recorded_pass(call, call.micro_batch(), LossName.STAND_IN, weights, special_tokens or SpecialTokens())


def say(passes: Sequence[RecordedPass], **subject: Any) -> list[str]:
    """What the checks say of these passes, as `topic: text`."""
    return [f"{remark.topic}: {remark.text}" for remark in lint(LintSubject(passes=passes, **subject))]
