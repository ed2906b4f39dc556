"""Log-probs that were noted for other sequences than they are of are told from those of another model."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from replay.verdict.judge import PassEvidence
from replay.verdict.recorded_pass import ReplayedPass
from replay.verdict.reference_remarks import describe_reference
from tests.helpers.made_records import record
from tests.replay.lint.recorded import make_pass, make_sample, make_samples

LENGTHS = [9, 11, 14, 10, 13, 12, 15, 8]
SUMS = [-5.5 * length + number / 8 for number, length in enumerate(LENGTHS)]
# Each number is one that the policy gives another sequence, but for the last.
MOVED = [*SUMS[1:7], SUMS[0], SUMS[7]]


def make_evidence(
    notes: dict[str, Tensor], *, index: int = 0, sums: Sequence[float] = SUMS, dtype: str = "float32"
) -> PassEvidence:
    made = record(index)
    result = replace(made.result, row_log_probs=list(sums), row_action_tokens=LENGTHS)
    ids_BS = torch.ones(len(LENGTHS), 4, dtype=torch.long)
    recorded = make_pass(
        {"input_ids": ids_BS}, number=index, notes=notes, weights=make_samples(make_sample(dtype=dtype))
    )
    return PassEvidence(replace(made, result=result), recorded, ReplayedPass())


def note_pairs(values: Sequence[float], *, is_alternate: bool = False) -> dict[str, Tensor]:
    numbers = torch.tensor(values)
    chosen, rejected = (numbers[0::2], numbers[1::2]) if is_alternate else numbers.chunk(2)
    return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}


@pytest.mark.parametrize(
    "notes", [note_pairs(SUMS), note_pairs(SUMS, is_alternate=True), {"ref_log_probs": torch.tensor(SUMS)}, {}]
)
def test_a_reference_that_is_the_policy_of_the_start_is_no_matter(notes: dict[str, Tensor]) -> None:
    assert describe_reference([make_evidence(notes, index=index) for index in range(3)]) == []


@pytest.mark.parametrize(("name", "label"), [("ref_log_probs", "reference"), ("old_per_token_logps", "old policy")])
def test_numbers_of_other_sequences_of_the_pass_are_told_by_what_the_policy_gives_those(name: str, label: str) -> None:
    [(kind, text)] = describe_reference([make_evidence({name: torch.tensor(MOVED)})])
    assert (kind, text) == (
        "note",
        f"{label}: 7 of 8 sequences before the first step have the noted log-prob of another one, as the policy gives "
        "it: that of row 0 of pass 1 is row 1's",
    )


@pytest.mark.parametrize(
    ("first", "moved", "dtype", "says"),
    [
        (0, 0.0, "float32", False),
        (3, 0.0, "float32", True),
        (3, 1e-3, "float32", False),
        # Rounding hides what few steps move.
        (3, 0.0, "bfloat16", False),
    ],
)
def test_a_reference_that_moves_with_the_policy_is_told_by_numbers_that_stay_the_policys(
    first: int, moved: float, dtype: str, says: bool
) -> None:
    noted = note_pairs([value * (1 + moved) for value in SUMS])
    texts = [
        text
        for _, text in describe_reference(
            [make_evidence(noted, index=index, dtype=dtype) for index in range(first, first + 2)]
        )
    ]
    assert any("is it the same object as the policy" in text for text in texts) is says


def test_after_a_step_the_policy_is_not_the_reference() -> None:
    assert describe_reference([make_evidence(note_pairs(MOVED), index=1)]) == []


@pytest.mark.parametrize("is_shuffled", [True, False])
def test_numbers_of_sequences_elsewhere_do_not_go_with_the_lengths(is_shuffled: bool) -> None:
    """The reference is another model, in a dtype in which no two sums are equal."""
    draws = random.Random(0)
    passes = []
    for index in range(3):
        noted = [-6.0 * length + draws.gauss(0, 3) for length in LENGTHS]
        if is_shuffled:
            draws.shuffle(noted)
        passes.append(make_evidence({"ref_log_probs": torch.tensor(noted)}, index=index, dtype="bfloat16"))
    lines = describe_reference(passes)
    assert bool(lines) is is_shuffled
    assert all("24 sequences do not go with their lengths" in text for _, text in lines)
    # A few sequences tell nothing.
    assert describe_reference(passes[:1]) == []


def test_log_probs_of_tokens_are_summed_where_the_action_mask_is() -> None:
    mask_BA = torch.tensor([[1, 1, 0], [0, 1, 1]])
    tensors = {"input_ids": torch.ones(2, 4, dtype=torch.long)}
    values_BA = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    recorded = make_pass(tensors, notes={"ref_per_token_logps": values_BA, "action_mask": mask_BA})
    assert recorded.noted_log_probs == {"reference": [3.0, 48.0]}
