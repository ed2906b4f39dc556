"""Log-probs that a job noted are held against the policy's of the same tokens, of their neighbours, of other rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from replay.verdict.noted_log_probs import (
    NotedLogProbs,
    collect_noted_log_probs,
    describe_absent_divergence,
    describe_noted_log_probs,
    place_own_log_probs,
)

ROWS, TOKENS, ACTIONS = 4, 24, 20


def draw(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


OWN_BS = -3 + 2 * draw(0, ROWS, TOKENS)
# Prompts of four tokens; the answers of two rows end sooner.
HAS_BS = (torch.arange(TOKENS) >= 4) & (torch.arange(TOKENS) < torch.tensor([[24], [20], [24], [16]]))
IDS_BS = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
NEAR_BA = (OWN_BS + 0.05 * draw(1, ROWS, TOKENS))[:, -ACTIONS:]


def collect(noted_BA: Tensor, *, name: str = "old_log_probs", own_BS: Tensor = OWN_BS) -> NotedLogProbs:
    collected = collect_noted_log_probs({name: noted_BA}, IDS_BS, own_BS, HAS_BS)
    assert collected is not None
    return collected


def describe(noted_BA: Tensor, *, name: str = "old_log_probs") -> list[str]:
    collected = collect(noted_BA, name=name)
    return [text for _, text in describe_noted_log_probs([(0, collected)], [(0, collected)])]


@pytest.mark.parametrize(
    ("name", "label"),
    [("old_per_token_logps", "old policy"), ("ref_log_prob", "reference"), ("rollout_log_probs", "rollout engine")],
)
@pytest.mark.parametrize(("places", "neighbour"), [(1, "before"), (-1, "after")])
def test_log_probs_of_the_neighbouring_tokens_are_told(name: str, label: str, places: int, neighbour: str) -> None:
    assert describe(NEAR_BA, name=name) == []
    [text] = describe(NEAR_BA.roll(places, 1), name=name)
    # The first or the last action token of each row has no neighbour that is one.
    assert text.startswith(
        f"{label}: the noted log-probs of 64 tokens are those of the token {neighbour} each: they are"
    )


def test_zeros_outside_of_the_mask_are_no_log_probs() -> None:
    has_BA = HAS_BS[:, -ACTIONS:]
    assert describe(NEAR_BA.masked_fill(~has_BA, 0.0)) == []
    [text] = describe(NEAR_BA.masked_fill(~has_BA, 0.0).roll(1, 1))
    assert "of the token before each" in text


def test_log_probs_of_other_rows_are_told() -> None:
    [text] = describe(NEAR_BA.roll(1, 0))
    assert text == (
        "old policy: 4 of 4 sequences have the noted log-probs of another one of their step, as the policy gives "
        "these: were rows sorted or shuffled without them?"
    )
    one_swapped = NEAR_BA.clone()
    one_swapped[0] = NEAR_BA[2]
    collected = collect(one_swapped)
    assert describe_noted_log_probs([(1, collected)], [(1, collected)]) == []


def test_rows_are_sought_in_other_passes_of_the_same_step_alone() -> None:
    other_BS = -3 + 2 * draw(7, ROWS, TOKENS)
    passes = [collect(other_BS[:, -ACTIONS:]), collect(OWN_BS[:, -ACTIONS:], own_BS=other_BS)]
    [(_, text)] = describe_noted_log_probs([(0, noted) for noted in passes], [])
    assert "8 of 8 sequences have the noted log-probs of another one" in text
    assert describe_noted_log_probs(list(enumerate(passes)), []) == []


def test_log_probs_of_something_else_are_told_where_the_replay_has_the_jobs_weights() -> None:
    foreign = collect(-3 + 2 * draw(5, ROWS, ACTIONS))
    assert describe_noted_log_probs([(0, foreign)], []) == []
    [(_, text)] = describe_noted_log_probs([(0, foreign)], [(0, foreign)])
    assert text.startswith("old policy: the noted log-probs of 68 tokens do not go with the policy's (correlation ")


@pytest.mark.parametrize(
    ("moved", "noted_later", "says"),
    [
        # The policy of the later step; the policy of the first one, as it should be; and a far one.
        (0.2, lambda own_BS: own_BS, True),
        (0.2, lambda own_BS: OWN_BS, False),
        (0.2, lambda own_BS: own_BS + 0.4 * draw(9, ROWS, TOKENS), False),
        # A policy that rounding alone moves.
        (1e-7, lambda own_BS: own_BS, False),
    ],
)
def test_an_old_policy_that_is_renewed_between_steps_on_the_same_rows_is_told(
    moved: float, noted_later: Callable[[Tensor], Tensor], says: bool
) -> None:
    later_BS = OWN_BS + moved * draw(8, ROWS, TOKENS)
    passes = [collect(OWN_BS), collect(noted_later(later_BS), own_BS=later_BS)]
    texts = [text for _, text in describe_noted_log_probs(list(enumerate(passes)), [])]
    assert any("4 sequences came again in a later step" in text for text in texts) is says


@pytest.mark.parametrize(("apart", "step", "says"), [(0.05, 0, False), (0.3, 0, True), (0.3, 1, False)])
def test_an_old_policy_that_is_another_one_before_the_first_step_is_told(apart: float, step: int, says: bool) -> None:
    """As of log-probs that were taken at another temperature. Later, the old policy is another one by right."""
    collected = collect(OWN_BS + apart * draw(4, ROWS, TOKENS).sign())
    lines = describe_noted_log_probs([(step, collected)], [(step, collected)])
    said = "old policy: before the first step the noted log-probs of 68 tokens are 0.3 from the policy's on average"
    assert [text.startswith(said) for _, text in lines] == [True] * says
    assert describe_noted_log_probs([(step, collected)], []) == []


@pytest.mark.parametrize(
    ("spread", "asks"),
    [
        (0.0, "is the temperature or dtype another one?"),
        (1.0, "are they of the logits at each token, and not of those"),
    ],
)
def test_what_an_old_policy_may_be_of_is_asked_by_how_it_goes_with_the_policy(spread: float, asks: str) -> None:
    [(_, text)] = describe_noted_log_probs(
        *[[(0, collect(OWN_BS / 0.6 + spread * draw(4, ROWS, TOKENS)))]] * 2  # at temperature 0.6
    )
    assert asks in text


def test_a_loss_without_a_divergence_from_a_noted_reference_is_told() -> None:
    far = collect(OWN_BS + 0.5 * draw(3, ROWS, TOKENS), name="ref_log_probs")
    [(kind, text)] = describe_absent_divergence([(far, 1e-5)])
    assert kind == "note"
    assert text.startswith(
        "reference: its log-probs were noted, and the job's loss holds no KL divergence from it in 1"
    )
    # The bound would hide a usual weight; a reference that is the policy has no divergence; and none was noted.
    assert describe_absent_divergence([(far, 1e-2)]) == []
    assert describe_absent_divergence([(collect(OWN_BS, name="ref_log_probs"), 1e-5)]) == []
    assert describe_absent_divergence([(collect(OWN_BS), 1e-5)]) == []


def test_what_is_no_number_of_single_tokens_is_left_alone() -> None:
    for noted in (torch.zeros(ROWS), torch.zeros(ROWS, TOKENS + 1), torch.zeros(2, ACTIONS)):
        assert collect_noted_log_probs({"old_log_probs": noted}, IDS_BS, OWN_BS, HAS_BS) is None
    assert collect_noted_log_probs({"advantages": OWN_BS}, IDS_BS, OWN_BS, HAS_BS) is None
    nan_BA = NEAR_BA.masked_fill(torch.rand(ROWS, ACTIONS, generator=torch.Generator().manual_seed(0)) < 0.1, torch.nan)
    assert describe(nan_BA) == []


def test_own_log_probs_stand_at_their_tokens() -> None:
    own_BS, has_BS = place_own_log_probs(
        torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]]), first_column=2, num_tokens=4
    )
    assert (own_BS.tolist(), has_BS.tolist()) == ([[0.0, 0.0, 1.0, 2.0]], [[False, False, True, False]])
    # Targets beside the tokens that predict them have one more place, which is no token.
    own_BS, _ = place_own_log_probs(torch.arange(4.0)[None], torch.ones(1, 4) > 0, first_column=1, num_tokens=4)
    assert own_BS.tolist() == [[0.0, 0.0, 1.0, 2.0]]
    # More log-probs than tokens: the first ones are of none.
    own_BS, has_BS = place_own_log_probs(torch.arange(4.0)[None], torch.ones(1, 4) > 0, first_column=-1, num_tokens=3)
    assert (own_BS.tolist(), has_BS.tolist()) == ([[1.0, 2.0, 3.0]], [[True, True, True]])
