"""What a diagnosis is made of, beside plain torch: differences, rows, chunked losses, curves."""

import math
import tomllib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GptOssConfig, LlamaConfig, PretrainedConfig

from actor_init.inputs.documents import find_documents
from actor_init.inputs.packing import prepare_inputs
from actor_init.spec import ActorSpec, Attention
from capture.file_format.micro_batch import IGNORED_LABEL, MicroBatch, Origin
from replay.commands.diagnose.checks import (
    LearningCurve,
    choose_inputs_goal,
    choose_row_goal,
    compare_gradients,
    compare_peers,
    compute_shares,
    repeat_rows,
    split_rows,
    train_until_learned,
)
from replay.commands.diagnose.reference_losses import choose_attention, compute_chunked_loss
from replay.commands.diagnose.untimed_actor import select_rows, split_documents
from tests.helpers.commands import ROOT

INF = math.inf


def batch_of(ids: Sequence[Sequence[int]], **changes: object) -> MicroBatch:
    """Rows in which 0 is padding."""
    sequences_BS = torch.tensor(ids)
    return MicroBatch(
        sequences_BS=sequences_BS,
        attention_mask_BS=sequences_BS != 0,
        trains=True,
        origin=Origin(source="made"),
        **changes,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("config", "attention", "kernel"),
    [
        (LlamaConfig(), Attention.FLEX, "sdpa"),
        (GptOssConfig(), Attention.FLEX, "eager"),
        (LlamaConfig(), Attention.EAGER, "eager"),
    ],
)
def test_the_plain_model_has_a_kernel_that_its_class_has(
    config: PretrainedConfig, attention: Attention, kernel: str
) -> None:
    assert choose_attention(ActorSpec(attention=attention), config) == kernel


@pytest.mark.parametrize(
    ("found", "worst"),
    [
        ({"a": [3.0, 4.0], "b": [0.0]}, 0.0),
        ({"a": [3.0, 4.5], "b": [0.0]}, 0.1),
        # Relative to a thousandth of the whole norm, as b has no norm.
        ({"a": [3.0, 4.0], "b": [0.0005]}, 0.1),
        ({"a": [3.0, 4.0]}, INF),
        ({"a": [3.0, 4.0], "b": [0.0], "c": [1.0]}, INF),
        ({"a": [3.0, math.nan], "b": [0.0]}, INF),
    ],
)
def test_a_difference_is_that_of_the_worst_parameter(found: dict[str, list[float]], worst: float) -> None:
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}
    named = {name: torch.tensor(values) for name, values in found.items()}
    assert compare_gradients(named.items(), expected).relative == pytest.approx(worst, rel=1e-5)


def test_gradients_that_are_all_zero_are_equal() -> None:
    assert compare_gradients([("a", torch.zeros(2))], {"a": torch.zeros(2)}).relative == 0


def test_peers_are_compared_with_the_first_of_their_data_rank() -> None:
    assert compare_peers([(0, 2.0), (0, 2.0), (1, 3.0), (1, 3.3)]) == pytest.approx(0.1)
    assert compare_peers([(0, 2.0), (1, 3.0)]) == 0
    assert compare_peers([(0, 2.0), (0, math.nan)]) == INF


def test_rows_are_taken_with_all_that_belongs_to_them() -> None:
    labels_BS = torch.tensor([[-100, 2, 3, -100], [-100, 5, -100, -100], [-100, -100, 8, 9]])
    batch = batch_of([[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 9]], labels_BS=labels_BS)
    taken = select_rows(batch, [2, 0, 2])
    assert taken.sequences_BS.tolist() == [[6, 7, 8, 9], [1, 2, 3, 0], [6, 7, 8, 9]]
    assert taken.labels_BS is not None
    assert taken.labels_BS.tolist() == labels_BS[[2, 0, 2]].tolist()
    assert taken.attention_mask_BS.sum(dim=1).tolist() == [4, 3, 4]
    assert [half.num_rows for half in split_rows(batch)] == [1, 2]
    assert [half.num_rows for half in split_rows(select_rows(batch, [1]))] == [1, 1]


@pytest.mark.parametrize(
    "extra",
    [
        {"cu_seq_lens_q": torch.tensor([0, 2, 5])},
        {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])},
        {"cu_seq_lens_q": torch.tensor([0, 2, 5]), "position_ids": torch.tensor([[0, 1, 2, 3, 4]])},
    ],
    ids=["borders", "positions", "both, positions that go on"],
)
def test_packed_documents_stay_apart_when_rows_are_repeated(extra: dict[str, torch.Tensor]) -> None:
    doubled = repeat_rows(batch_of([[1, 2, 3, 4, 5]], extra_tensors=extra))
    assert find_documents(doubled).measure_lengths(doubled.attention_mask_BS).tolist() == [2, 3, 2, 3]


def test_documents_alone_have_the_targets_that_the_actor_has() -> None:
    batch = batch_of(
        [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 0, 0]],
        action_mask_BA=torch.tensor([[True, False, True], [True, True, True]]),
    )
    alone = [
        (ids_1L[0, :-1][kept], label_1L[0, 1:][kept])
        for ids_1L, _, label_1L in split_documents(batch)
        for kept in [label_1L[0, 1:] != IGNORED_LABEL]
    ]
    inputs = prepare_inputs(batch, packing=True)
    assert [ids for before, _ in alone for ids in before.tolist()] == inputs.input_ids[0, inputs.predictor_N].tolist()
    assert [target for _, after in alone for target in after.tolist()] == inputs.target_ids_N.tolist() == [3, 5, 9]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
def test_a_loss_in_chunks_is_torch_s(softcap: float | None, bias: bool) -> None:
    torch.manual_seed(0)
    hidden_ND, head, target_N = torch.randn(8, 5), nn.Linear(5, 23, bias=bias), torch.randint(23, (8,))
    logits_NV = head(hidden_ND)
    expected = F.cross_entropy(
        logits_NV if softcap is None else softcap * torch.tanh(logits_NV / softcap), target_N, reduction="sum"
    )
    with torch.no_grad():
        loss = compute_chunked_loss(hidden_ND, head, target_N, softcap, num_tokens=3, num_words=7)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)


@pytest.mark.parametrize(
    ("losses", "advice"),
    [
        ((5.0, 1.0, 0.09), ""),
        # Below 0.1, but not below half of the first loss.
        ((0.15, 0.09), "still falling"),
        ((5.0, 4.0, 3.0, 2.0, 1.0), "it is still falling. Try: --steps 16"),
        ((5.0, 5.0, 5.0), "it hardly moves"),
        ((5.0, 6.0, 9.0), "it rises: the steps are too large, or go the wrong way. Try: --learning-rate 0.001"),
        ((5.0, 1.0, 4.0), "it fell to 1 and rose again"),
        ((5.0, 2.0, 1.0, 1.0, 1.0), "it stands at 1"),
        ((5.0, 30.0, math.nan), "it is nan at step 2: the steps are too large"),
    ],
)
def test_the_shape_of_a_curve_says_what_to_look_at(losses: tuple[float, ...], advice: str) -> None:
    check = LearningCurve(losses=losses, goal=choose_row_goal(losses[0]), learning_rate=0.01).check("one row learned")
    assert check.fails is bool(advice)
    assert advice in check.advice


class LearningActor:
    """In the place of an actor: its passes have these losses before each step; another rank's are 2 higher."""

    spec = ActorSpec(learning_rate=0.01)

    def __init__(self, losses: Sequence[Sequence[float]]) -> None:
        self.losses = iter(losses)
        self.steps: list[bool] = []
        self.world = SimpleNamespace(gather=lambda loss: [loss, loss + 2.0])

    def train(self, batches: Sequence[str], *, steps: bool) -> list[float]:
        self.steps.append(steps)
        return list(next(self.losses))


@pytest.mark.parametrize(
    ("losses", "learned", "steps"),
    [
        # The mean of both passes and of both ranks; the last pass takes no step.
        ([[5.0, 3.0], [4.0, 3.0], [3.5, 3.5], [3.0, 3.0]], (5.0, 4.5, 4.5, 4.0), [True, True, True, False]),
        # The goal, four fifths of the first loss, is that of the mean too.
        ([[5.0, 3.0], [3.0, 3.0]], (5.0, 4.0), [True, True]),
        ([[5.0, 3.0], [4.0, math.nan]], (5.0, math.nan), [True, True]),
    ],
)
def test_all_ranks_learn_until_the_mean_of_their_losses_is_at_the_goal(
    losses: Sequence[Sequence[float]], learned: tuple[float, ...], steps: list[bool]
) -> None:
    actor = LearningActor(losses)
    curve = train_until_learned(cast(Any, actor), cast(Any, ["a", "b"]), num_steps=3, choose_goal=choose_inputs_goal)
    assert curve.losses == pytest.approx(learned, nan_ok=True)
    assert curve.goal == pytest.approx(4.0)
    assert curve.learning_rate == 0.01
    assert actor.steps == steps


def test_passes_of_uneven_length_weigh_by_their_action_tokens() -> None:
    """As in `num_tokens / all tokens`, by as many as there are passes, over which a backend averages."""
    layout = SimpleNamespace(joins_rows=True)
    actor = SimpleNamespace(spec=ActorSpec(), source=SimpleNamespace(layout_under=lambda spec: layout))
    parts = [batch_of([[1, 2, 3, 0], [1, 2, 0, 0]]), batch_of([[1, 2, 3, 4, 5, 6]])]  # 3 and 5 tokens are predicted
    assert compute_shares(parts, cast(Any, actor)) == pytest.approx([2 * 3 / 8, 2 * 5 / 8])


def test_tox_asks_for_markers_that_pytest_knows() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    markers = {line.partition(":")[0] for line in tool["pytest"]["ini_options"]["markers"]}
    environments = tool["tox"]["env"]
    assert set(environments) == set(tool["tox"]["env_list"]) == {"gpu-single", "gpu-multi", "gpu-overfit"}
    for environment in environments.values():
        [command] = environment["commands"]
        assert command[command.index("-m", 3) + 1] in markers
