"""What is read of a pass as the job recorded it: its dtypes, the places of its samples, its recording."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import Origin
from capture.file_format.optimizer_step import ParameterSamples, Sample
from replay.tolerances.job_bounds import GRAD_NORM, LOSS, TOKEN_LOG_PROBS
from replay.verdict.recorded_pass import (
    Claim,
    RecordedPass,
    WeightComparison,
    describe_mixed_recordings,
    doubt_loss_and_grad_norm,
    is_mixture,
    list_job_dtypes,
    read_divisor,
    read_token_positions,
    scale_to_mean,
)
from tests.helpers.made_records import record


def make_call(**values: Any) -> CapturedCall:
    ids_BS = torch.arange(1, 13).view(2, 6)
    known: dict[str, Any] = {
        "tensors": {"input_ids": ids_BS, "labels": ids_BS},
        "call_facts": {},
        "left_out": {},
        "origin": Origin(source="a.pkl", rank=0),
        "trains": True,
    }
    return CapturedCall(**(known | values))


def weigh(*dtypes: str) -> ParameterSamples:
    samples = tuple(
        Sample(name=f"{place}", dtype=dtype, shape=(1,), start=0, values=(1.0,)) for place, dtype in enumerate(dtypes)
    )
    return ParameterSamples(samples=samples, num_parameters=9, num_frozen=0, is_sharded=False)


@pytest.mark.parametrize(
    ("environment", "values", "dtypes"),
    [
        ({}, {}, []),
        (
            {"autocast": "off", "ACCELERATE_MIXED_PRECISION": "no"},
            {"weights": weigh("float32", "float32")},
            ["float32"],
        ),
        ({}, {"weights": weigh("bfloat16", "float32")}, ["bfloat16", "float32"]),
        ({}, {"weights": weigh("float32"), "outputs": {"logits_dtype": "bfloat16"}}, ["bfloat16", "float32"]),
        ({}, {"outputs": {"logits_dtype": "int8"}}, []),
        ({"autocast": "bfloat16"}, {"weights": weigh("float32")}, ["bfloat16", "float32"]),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {"weights": weigh("float32")}, ["float16", "float32"]),
        # TF32 is a GPU's.
        ({"torch.float32_matmul_precision": "high", "device": "NVIDIA H200"}, {}, ["tf32"]),
        ({"torch.float32_matmul_precision": "high", "device": "CPU"}, {}, []),
        ({"torch.float32_matmul_precision": "highest", "device": "NVIDIA H200"}, {}, []),
    ],
)
def test_a_job_computes_in_all_dtypes_that_it_is_known_to_use(
    environment: Mapping[str, str], values: Mapping[str, Any], dtypes: Sequence[str]
) -> None:
    assert list_job_dtypes(make_call(environment=environment, **values)) == dtypes


def test_the_places_of_a_cut_captures_samples_are_read_from_it_within_its_rows() -> None:
    places = [0, 1, 0, 5, 1, 0, 1, 6, 2, 3, 1, 2, -1, 4]
    call = make_call(outputs={"token_log_probs_places": places})
    # No token predicts a row's first one, and the others are not in these rows.
    assert read_token_positions(call, 2, 6) == [(0, 1), (0, 5), (1, 2)]
    assert all(0 < column < 6 and row < 2 for row, column in read_token_positions(make_call(), 2, 6))


@pytest.mark.parametrize(
    ("divisor", "scale"),
    # Of two rows of six tokens ten labels are predicted.
    [({}, 1.0), ({"tensors": 20.0}, 2.0), ({"fact": 5}, 0.5), ({"tensors": 20.0, "fact": 5}, 2.0)],
)
def test_a_loss_that_a_trainer_divided_is_scaled_to_the_mean_over_its_labels(
    divisor: Mapping[str, float], scale: float
) -> None:
    call = make_call(call_facts={"num_items_in_batch": divisor["fact"]} if "fact" in divisor else {})
    tensors = {"num_items_in_batch": torch.tensor(divisor["tensors"])} if "tensors" in divisor else {}
    call = replace(call, tensors={**call.tensors, **tensors})
    assert read_divisor(call) == divisor.get("tensors", divisor.get("fact"))
    assert scale_to_mean(call, call.micro_batch()) == scale
    unlabelled = replace(call, tensors={**call.tensors, "labels": torch.full((2, 6), -100)})
    assert scale_to_mean(unlabelled, unlabelled.micro_batch()) == 1.0


def make_recorded(rank: int, recording: str | None, *claims: Claim) -> RecordedPass:
    return RecordedPass(
        rank=rank,
        forward_number=0,
        world_size=2,
        trains=True,
        claims=claims,
        weight_comparison=WeightComparison(),
        num_frozen=0,
        dtypes=["float32"],
        recording=recording,
    )


def describe(*recordings: tuple[int, str | None], has_claims: bool = True) -> str | None:
    claims = [Claim(name=LOSS, values=[1.0])] if has_claims else []
    return describe_mixed_recordings(
        [(record(index), make_recorded(rank, began, *claims)) for index, (rank, began) in enumerate(recordings)]
    )


def test_passes_of_several_recordings_of_one_rank_are_mixed() -> None:
    assert describe((0, "a"), (0, "a")) is None
    # Ranks begin at times of their own, and a converted pass has no recording.
    assert describe((0, "a"), (1, "b"), (0, "a"), (1, "b")) is None
    assert describe((0, "a"), (0, None), (0, "a")) is None
    assert describe((0, "a"), (0, "b"), has_claims=False) is None
    mixed = describe((0, "x"), (1, "c"), (1, "a"), (1, "b"), (0, "x"))
    assert mixed is not None
    assert mixed.startswith("these passes are of 3 recordings into one folder, which began a, b and c and whose files")


def test_a_routers_loss_leaves_a_doubt_of_the_loss_and_of_the_norm_alone() -> None:
    claims = [Claim(name=name, values=[1.0]) for name in (LOSS, TOKEN_LOG_PROBS, GRAD_NORM)]
    doubted = doubt_loss_and_grad_norm(make_recorded(0, None, *claims), "no coefficient")
    assert [claim.doubt is not None and claim.doubt.endswith(": no coefficient") for claim in doubted.claims] == [
        True,
        False,
        True,
    ]


def test_a_mixture_is_told_by_a_name_of_any_parameter() -> None:
    assert is_mixture(["model.embed.weight", "model.layers.0.mlp.experts.0.w1.weight"])
    assert is_mixture(["block_sparse_moe.router.weight", "model.embed.weight"])
    assert not is_mixture(["model.embed.weight", "model.layers.0.mlp.up_proj.weight"])
