"""The formulas of --loss policy and dpo against the papers' formulas, written out here; their settings and refusals.

Shape letters: B rows, A columns of the action mask (the last tokens of each row).
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actor_init.inputs.documents import KeptLogits
from actor_init.spec import UsageError
from replay.objective.dpo import compute_dpo_loss
from replay.objective.inputs import ObjectiveData, ObjectiveError, ObjectiveInputs
from replay.objective.objective import Objective, measure_log_prob_weights
from replay.objective.policy import compute_policy_loss
from replay.options.option_parsing import build_replay_spec, format_error_with_flags
from replay.options.spec import KlEstimator, ObjectiveSpec, PairOrder, Reduction
from tests.helpers.objective_inputs import ACTIONS, BOUND, ROWS, agree, fields_of, gradient, made
from tests.helpers.policy_job import by_sequences, by_tokens, token_losses


def plain(inputs: ObjectiveInputs, spec: ObjectiveSpec) -> Tensor:
    """The papers' formulas, a token at a time."""
    high = spec.clip_low if spec.clip_high is None else spec.clip_high
    old_BA, advantages_BA = inputs.tensors["old_log_probs"], inputs.tensors["advantages"]
    losses_BA = token_losses(
        inputs.log_probs_BA, old_BA, advantages_BA, low=spec.clip_low, high=high, dual=spec.dual_clip
    )
    log_ratio_BA = inputs.tensors["ref_log_probs"] - inputs.log_probs_BA
    # http://joschu.net/blog/kl-approx.html, with r = p / q where x is drawn from q, here the policy
    estimates = {"k1": -log_ratio_BA, "k2": log_ratio_BA**2 / 2, "k3": log_ratio_BA.exp() - 1 - log_ratio_BA}
    estimates["k3-weighted"] = (inputs.log_probs_BA - old_BA).exp() * estimates["k3"]
    losses_BA = losses_BA + spec.kl_coefficient * estimates[spec.kl]
    mask_BA = inputs.action_mask_BA
    match spec.reduction:
        case Reduction.TOKENS | Reduction.WINDOW_TOKENS:
            return by_tokens(losses_BA, mask_BA)
        case Reduction.SEQUENCES:
            return by_sequences(losses_BA, mask_BA)
        case Reduction.DIVISOR:  # https://arxiv.org/abs/2503.20783, listing 1
            assert spec.divisor is not None
            return losses_BA[mask_BA].sum() / spec.divisor / len(mask_BA)


SPECS = [
    {},
    {"clip_low": 0.1, "clip_high": 0.4},
    {"dual_clip": 1.1},
    {"reduction": Reduction.SEQUENCES},
    {"reduction": Reduction.WINDOW_TOKENS},
    {"reduction": Reduction.DIVISOR, "divisor": 16.0},
    {"kl": KlEstimator.K1, "kl_coefficient": 0.3},
    {"kl": KlEstimator.K2, "kl_coefficient": 0.3},
    {"kl": KlEstimator.K3_WEIGHTED, "kl_coefficient": 0.3},
    {"kl": KlEstimator.K3, "kl_coefficient": 0.3, "reduction": Reduction.SEQUENCES, "dual_clip": 1.2},
]


@pytest.mark.parametrize("settings", SPECS, ids=str)
def test_the_policy_loss_is_the_papers(settings: dict[str, Any]) -> None:
    inputs, spec = made(), ObjectiveSpec(**settings)
    agree(compute_policy_loss(inputs, spec), plain(inputs, spec), inputs)


@pytest.mark.parametrize("settings", SPECS[1:], ids=str)
def test_each_setting_changes_the_loss(settings: dict[str, Any]) -> None:
    """Else the test above would show nothing; of a lone pass, the window's tokens are its own."""
    inputs = made()
    apart = (
        compute_policy_loss(inputs, ObjectiveSpec(**settings)).item()
        - compute_policy_loss(inputs, ObjectiveSpec()).item()
    )
    assert (abs(apart) < 1e-6) == (settings == {"reduction": Reduction.WINDOW_TOKENS})


def test_a_window_of_tokens_counts_all_ranks_passes() -> None:
    """Two ranks average their gradients, so each one's loss is twice its share."""
    inputs = made()
    recorded = ObjectiveInputs(
        log_probs_BA=inputs.log_probs_BA,
        action_mask_BA=inputs.action_mask_BA,
        recorded=ObjectiveData(**{**fields_of(inputs.recorded), "num_job_ranks": 2}),
        num_window_tokens=100,
        num_window_passes=4,
    )
    spec = ObjectiveSpec(reduction=Reduction.WINDOW_TOKENS)
    own = int(inputs.action_mask_BA.sum())
    agree(compute_policy_loss(recorded, spec), compute_policy_loss(inputs, ObjectiveSpec()) * own / 100 * 2, inputs)


def test_on_policy_the_gradient_is_that_of_the_plain_policy_gradient() -> None:
    inputs = made()
    mask_BA, advantages_BA = inputs.action_mask_BA, inputs.tensors["advantages"]
    ours = compute_policy_loss(inputs, ObjectiveSpec(on_policy=True))
    expected = gradient(-(advantages_BA * inputs.log_probs_BA)[mask_BA].mean(), inputs)
    torch.testing.assert_close(gradient(ours, inputs), expected, rtol=BOUND, atol=BOUND)


def test_entropy_is_subtracted() -> None:
    inputs = made()
    logits = torch.randn(ROWS, ACTIONS, 11, requires_grad=True)
    kept = KeptLogits()
    kept.keep(logits, torch.arange(ROWS * ACTIONS), torch.arange(ROWS * ACTIONS), (ROWS, ACTIONS), None)
    inputs = ObjectiveInputs(**{**fields_of(inputs), "kept_logits": kept})
    with_entropy = compute_policy_loss(inputs, ObjectiveSpec(entropy_coefficient=0.5))
    entropies_BA = torch.distributions.Categorical(logits=logits).entropy()
    expected = compute_policy_loss(inputs, ObjectiveSpec()) - 0.5 * entropies_BA[inputs.action_mask_BA].mean()
    torch.testing.assert_close(with_entropy, expected, rtol=BOUND, atol=BOUND)
    ours, theirs = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (with_entropy, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("pairs", PairOrder)
@pytest.mark.parametrize("reference", ["tokens", "sequences", "pairs"])
def test_the_dpo_loss_is_the_papers(smoothing: float, averages: bool, pairs: PairOrder, reference: str) -> None:
    """https://arxiv.org/abs/2305.18290, equation 7, and https://ericmitchell.ai/cdpo.pdf, equation 3."""
    inputs = made()
    mask_BA, ref_BA = inputs.action_mask_BA, inputs.tensors["ref_log_probs"]

    def number(values_BA: Tensor, row: int) -> Tensor:
        own = values_BA[row][mask_BA[row]]
        return own.mean() if averages else own.sum()

    order = [(0, 2), (1, 3)] if pairs is PairOrder.HALVES else [(0, 1), (2, 3)]
    losses = []
    for chosen, rejected in order:
        ours = number(inputs.log_probs_BA, chosen) - number(inputs.log_probs_BA, rejected)
        theirs = number(ref_BA, chosen) - number(ref_BA, rejected)
        margin = 0.3 * (ours - theirs)
        losses.append(-(1 - smoothing) * margin.sigmoid().log() - smoothing * (-margin).sigmoid().log())
    numbers = torch.stack([number(ref_BA, row) for row in range(ROWS)])
    noted = {
        "tokens": {"ref_log_probs": ref_BA},
        "sequences": {"ref_log_probs": numbers},
        "pairs": {
            "ref_chosen_logps": numbers[[chosen for chosen, _ in order]],
            "ref_rejected_logps": numbers[[rejected for _, rejected in order]],
        },
    }[reference]
    inputs = made(0, **noted)
    spec = ObjectiveSpec(dpo_beta=0.3, label_smoothing=smoothing, average_log_probs=averages, pairs=pairs)
    losses_of = torch.stack(losses).mean()
    ours_of = compute_dpo_loss(inputs, spec)
    assert abs(ours_of.item() - losses_of.item()) <= BOUND
    assert gradient(ours_of, inputs).abs().max() > 1e-3


@pytest.mark.parametrize("numbers", [(2, 1), (1, 2), (3, 2), (4, 4)])
def test_noted_numbers_of_pairs_are_as_many_as_there_are_pairs(numbers: tuple[int, int]) -> None:
    chosen, rejected = (torch.zeros(number) for number in numbers)
    inputs = made(0, ref_chosen_logps=chosen, ref_rejected_logps=rejected)
    with pytest.raises(ObjectiveError, match="must have one number for each of 2 pairs, not shapes "):
        compute_dpo_loss(inputs, ObjectiveSpec())


def test_sequences_of_a_packed_row_are_its_documents() -> None:
    """A row of three documents has the loss of three rows."""
    inputs = made()
    rows = inputs.recorded
    packed = ObjectiveInputs(
        log_probs_BA=inputs.log_probs_BA.reshape(1, -1),
        action_mask_BA=inputs.action_mask_BA.reshape(1, -1),
        recorded=ObjectiveData(
            **{
                **fields_of(rows),
                "tensors": {name: tensor.reshape(1, -1) for name, tensor in rows.tensors.items()},
                "sequence_BA": rows.sequence_BA.reshape(1, -1),
            }
        ),
        num_window_tokens=1,
        num_window_passes=1,
    )
    spec = ObjectiveSpec(reduction=Reduction.SEQUENCES, kl_coefficient=0.1)
    agree(compute_policy_loss(packed, spec), compute_policy_loss(inputs, spec), inputs)
    agree(compute_dpo_loss(packed, ObjectiveSpec()), compute_dpo_loss(inputs, ObjectiveSpec()), inputs)


def test_a_row_without_tokens_is_no_sequence_of_the_mean() -> None:
    inputs = made()
    mask_BA = inputs.action_mask_BA.clone()
    mask_BA[1] = False
    without = ObjectiveInputs(**{**fields_of(inputs), "action_mask_BA": mask_BA})
    spec = ObjectiveSpec(reduction=Reduction.SEQUENCES)
    agree(compute_policy_loss(without, spec), plain(without, spec), inputs)


@pytest.mark.parametrize(
    ("advantages", "as_BA"),
    [
        (torch.tensor(0.5), torch.full((ROWS, ACTIONS), 0.5)),
        (torch.arange(4.0), torch.arange(4.0)[:, None].expand(ROWS, ACTIONS)),
        (torch.arange(40.0).view(ROWS, 10), torch.arange(40.0).view(ROWS, 10)[:, 3:]),
    ],
)
def test_numbers_of_rows_and_of_longer_rows_are_put_in_place(advantages: Tensor, as_BA: Tensor) -> None:
    inputs = made(advantages=advantages)
    assert torch.equal(inputs.of_tokens("advantages"), torch.where(inputs.action_mask_BA, as_BA, 0.0))


def test_what_does_not_cover_the_action_tokens_is_refused() -> None:
    with pytest.raises(ObjectiveError, match="advantages covers the last 5 tokens of a row"):
        compute_policy_loss(made(advantages=torch.zeros(ROWS, 5)), ObjectiveSpec())
    with pytest.raises(ObjectiveError, match=r"advantages has shape \[3, 7\]"):
        compute_policy_loss(made(advantages=torch.zeros(3, 7)), ObjectiveSpec())


def test_padding_that_is_not_finite_leaves_the_loss_alone() -> None:
    """Trainers fill up with anything, where no action is."""
    inputs = made()
    expected = compute_policy_loss(inputs, ObjectiveSpec())
    for name, tensor in list(inputs.tensors.items()):
        inputs.tensors[name][~inputs.action_mask_BA] = torch.nan
        assert tensor.isnan().any()
    ours = compute_policy_loss(inputs, ObjectiveSpec())
    assert ours.item() == expected.item()
    assert bool(gradient(ours, inputs).isfinite().all())


def test_what_is_missing_is_named() -> None:
    inputs = made()
    lacks = ObjectiveData(**{**fields_of(inputs.recorded), "tensors": {"input_ids": torch.zeros(1)}})
    policy = Objective.open(build_replay_spec({"loss": "policy"}))
    dpo = Objective.open(build_replay_spec({"loss": "dpo"}))
    assert policy is not None
    assert dpo is not None
    with pytest.raises(
        ObjectiveError, match=r"no advantages in this capture, which has input_ids. Try: recorder.note\("
    ):
        policy.check(lacks)
    with pytest.raises(ObjectiveError, match="no ref_log_probs in this capture"):
        dpo.check(lacks)
    refused = ObjectiveData(**{**fields_of(lacks), "left_out": {"advantages": "noted with shape [3]"}})
    with pytest.raises(ObjectiveError, match=r"advantages was noted with shape \[3\]"):
        policy.check(refused)
    by_divisor = Objective.open(build_replay_spec({"loss": "policy", "reduction": "divisor"}))
    assert by_divisor is not None
    with pytest.raises(ObjectiveError, match=r"no divisor in this capture, .*; or divisor='X'"):
        by_divisor.check(inputs.recorded)
    by_divisor.check(ObjectiveData(**{**fields_of(inputs.recorded), "numbers": {"divisor": 16.0}}))
    with pytest.raises(ObjectiveError, match="no action mask, no labels"):
        policy.check(ObjectiveData(**{**fields_of(inputs.recorded), "has_action_mask": False}))
    with pytest.raises(ObjectiveError, match="3 sequences are no pairs"):
        compute_dpo_loss(
            ObjectiveInputs(
                **{**fields_of(inputs), "recorded": ObjectiveData(**{**fields_of(lacks), "num_sequences": 3})}
            ),
            ObjectiveSpec(),
        )


def test_log_probs_weigh_one_in_a_mean_and_in_a_policy_as_much_as_its_advantages() -> None:
    inputs = made()
    weights = measure_log_prob_weights(-inputs.log_probs_BA[inputs.action_mask_BA].mean(), inputs.log_probs_BA)
    assert (weights.total, weights.size) == pytest.approx((1, 1))
    assert weights.least == weights.most == pytest.approx(1 / int(inputs.action_mask_BA.sum()))
    assert sum(row.total for row in weights.rows) == pytest.approx(1)
    assert [row.num_targets for row in weights.rows] == inputs.action_mask_BA.sum(dim=1).tolist()
    large = made(advantages=100 * inputs.tensors["advantages"])
    spec = ObjectiveSpec(on_policy=True)
    ours, hundredfold = (
        measure_log_prob_weights(compute_policy_loss(case, spec), case.log_probs_BA).size for case in (inputs, large)
    )
    assert hundredfold == pytest.approx(100 * ours)


LOSS_FILE = """
import torch

def halved(inputs):
    logits_NV, _ = inputs.logits()
    return -(inputs.log_probs_BA * inputs.of_tokens("advantages")).sum() / 2 + 0 * logits_NV.sum()

def wrong(inputs):
    return inputs.log_probs_BA

def constant(inputs):
    return torch.tensor(1.0)
"""


def test_a_file_is_loaded_and_its_sha256_known(tmp_path: Path) -> None:
    import hashlib

    (tmp_path / "own.py").write_text(LOSS_FILE)
    objective = Objective.open(build_replay_spec({"loss": f"{tmp_path}/own.py:halved"}))
    assert objective is not None
    assert objective.sha256 == hashlib.sha256(LOSS_FILE.encode()).hexdigest()
    assert objective.needs_logits_or_entropies
    wrong = Objective.open(build_replay_spec({"loss": f"{tmp_path}/own.py:wrong"}))
    assert wrong is not None
    with pytest.raises(ObjectiveError, match=r"returned a tensor of shape \[4, 7\]; it must return a tensor of one"):
        wrong(made())
    constant = Objective.open(build_replay_spec({"loss": f"{tmp_path}/own.py:constant"}))
    assert constant is not None
    with pytest.raises(ObjectiveError, match=r"own.py:constant' returned a number without a gradient. Compute it from"):
        constant(made())


def test_a_loss_imports_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "beside_the_loss.py").write_text("factor = 3.0")
    text = "from beside_the_loss import factor\ndef loss(inputs):\n    return factor * inputs.log_probs_BA.sum()\n"
    (tmp_path / "own.py").write_text(text)
    objective, inputs = Objective.open(build_replay_spec({"loss": f"{tmp_path}/own.py:loss"})), made()
    assert objective is not None
    assert objective(inputs).item() == pytest.approx(3 * inputs.log_probs_BA.sum().item())


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"loss": "ppo"}, "Give one of auto, stand-in, sft, policy, dpo, recorded, or FILE.py:FUNCTION"),
        ({"clip_low": "0.3"}, "--clip-low is a setting of --loss policy"),
        ({"loss": "policy", "dpo_beta": "0.3"}, "--dpo-beta is a setting of --loss dpo"),
        ({"loss": "policy", "divisor": "3"}, "Try: --reduction divisor --divisor 3"),
        ({"loss": "policy", "reduction": "divisor", "divisor": "0"}, "Give a number above 0"),
        ({"loss": "dpo", "window": "mean-of-means"}, "--loss dpo weighs each pass by its own reduction"),
    ],
)
def test_settings_that_have_no_effect_are_refused(typed: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as refusal:
        build_replay_spec(typed)
    assert said in format_error_with_flags(refusal.value)


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (None, "loss", "No such file or directory"),
        ("def other(inputs): ...", "loss", r"--loss own.py:loss: .*own.py has no function loss. It has other"),
        ("1 / 0", "loss", r"--loss own.py:loss: it raised ZeroDivisionError: division by zero, at .*own.py:1"),
        ("raise SystemExit(0)", "loss", "it raised SystemExit: 0"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, text: str | None, name: str, said: str) -> None:
    if text is not None:
        (tmp_path / "own.py").write_text(text)
    with pytest.raises(UsageError) as refusal:
        Objective.open(build_replay_spec({"loss": f"{tmp_path}/own.py:{name}"}))
    assert re.search(said, format_error_with_flags(refusal.value))


def test_log_probs_weigh_what_the_loss_moves_by() -> None:
    """Weights of any sign: their sum, the sum of their sizes, and the least and the most of them."""
    weights_BA = torch.tensor([[0.5, -0.25, 0.0], [0.75, 0.0, 0.0], [0.0, 0.0, 0.0]])
    # Of a target that is all but certain little is known.
    log_probs_BA = torch.tensor([[-1.0, -2.0, -3.0], [-0.01, -1.0, -1.0], [-1.0, -1.0, -1.0]], requires_grad=True)
    weights = measure_log_prob_weights(-(weights_BA * log_probs_BA).sum(), log_probs_BA)
    assert (weights.total, weights.size, weights.least, weights.most) == (1.0, 1.5, -0.25, 0.75)
    assert [(row.total, row.num_targets, row.least, row.most) for row in weights.rows] == [
        (0.25, 2, -0.25, 0.5),
        (0.75, 1, 0.0, 0.0),
    ]
