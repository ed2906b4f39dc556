"""--loss policy and dpo against the loss code of TRL, verl and OpenRLHF, from their releases, where installed.

    pip install --no-deps trl==1.16.0 openrlhf==0.11.2 pylatexenc verl==0.9.1 tensordict codetiming hydra-core omegaconf

Seen with these versions. Their imports take most of the time.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from replay.objective.dpo import compute_dpo_loss
from replay.objective.inputs import ObjectiveData, ObjectiveInputs
from replay.objective.policy import compute_policy_loss, estimate_divergence
from replay.options.spec import KlEstimator, ObjectiveSpec, Reduction
from tests.helpers.objective_inputs import ACTIONS, BOUND, ROWS, agree, fields_of, made
from tests.trainers.openrlhf_actor import stand_in_for_flash_attn


def trl_grpo(inputs: ObjectiveInputs, **settings: Any) -> Tensor:
    """GRPOTrainer's own `_compute_loss`, given our log-probs as those of its model."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    mask_BA = inputs.action_mask_BA.long()
    own = SimpleNamespace(
        **{
            "aux_loss_enabled": False,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "importance_sampling_level": "token",
            "use_vllm": False,
            "_entropy_bonus_enabled": False,
            "current_gradient_accumulation_steps": 1,
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "loss_type": "grpo",
            "max_completion_length": 16,
            **settings,
        },
        args=SimpleNamespace(
            delta=settings.get("delta"),
            use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
            steps_per_generation=1,
        ),
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(
            gather=lambda tensor: tensor, reduce=lambda tensor, reduction: tensor, num_processes=1
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            inputs.log_probs_BA,
            torch.zeros_like(inputs.log_probs_BA),
            None,
        ),
    )
    prompt = torch.ones(ROWS, 1, dtype=torch.long)
    given = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": mask_BA,
        "completion_mask": mask_BA,
        "advantages": inputs.tensors["advantages"],
        "old_per_token_logps": inputs.tensors["old_log_probs"],
        "ref_per_token_logps": inputs.tensors["ref_log_probs"],
        "num_items_in_batch": mask_BA.sum(),
    }
    loss: Tensor = trainer._compute_loss(own, None, given)
    return loss


GRPO: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"loss_type": "grpo"}, {"reduction": Reduction.SEQUENCES}),
    ({"loss_type": "bnpo", "epsilon_high": 0.4}, {"clip_high": 0.4}),
    ({"loss_type": "dapo"}, {"reduction": Reduction.WINDOW_TOKENS}),
    ({"loss_type": "dr_grpo"}, {"reduction": Reduction.DIVISOR, "divisor": 16.0}),
    ({"loss_type": "bnpo", "delta": 1.5}, {"dual_clip": 1.5}),
    ({"loss_type": "grpo", "beta": 0.04}, {"reduction": Reduction.SEQUENCES, "kl_coefficient": 0.04}),
    (
        {"loss_type": "dapo", "beta": 0.04, "use_bias_correction_kl": True},  # TRL's default where beta is not 0
        {"reduction": Reduction.WINDOW_TOKENS, "kl_coefficient": 0.04, "kl": KlEstimator.K3_WEIGHTED},
    ),
]


@pytest.mark.parametrize(("theirs", "ours"), GRPO, ids=str)
def test_trls_grpo_has_the_same_loss(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    inputs = made(1)
    agree(compute_policy_loss(inputs, ObjectiveSpec(**ours)), trl_grpo(inputs, **theirs), inputs)


def test_trls_dpo_has_the_same_loss() -> None:
    trainer = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    inputs = made(2)
    mask_BA = inputs.action_mask_BA
    sums = (inputs.tensors["ref_log_probs"] * mask_BA).sum(1)
    noted = {"ref_chosen_logps": sums[:2], "ref_rejected_logps": sums[2:]}
    own = MagicMock(
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=0.3,
        label_smoothing=0.0,
        use_weighting=False,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        accelerator=SimpleNamespace(
            device=torch.device("cpu"),
            gather=lambda tensor: tensor,
            gather_for_metrics=lambda tensor: tensor,
            num_processes=1,
        ),
        args=SimpleNamespace(),
    )
    masked_BA = torch.where(mask_BA, inputs.log_probs_BA, 0.0)
    zeros_BA = torch.zeros_like(masked_BA)
    outputs = SimpleNamespace(
        log_probs=masked_BA,
        entropy=zeros_BA,
        mean_logits=zeros_BA,
        is_top1=zeros_BA > 0,
        loss=None,
        num_correct_tokens=torch.tensor(0),
    )
    ids_BS = torch.ones(ROWS, ACTIONS + 1, dtype=torch.long)
    completion_mask = torch.cat([torch.zeros(ROWS, 1, dtype=torch.long), mask_BA.long()], dim=1)
    given = {"input_ids": ids_BS, "attention_mask": ids_BS, "completion_mask": completion_mask, **noted}
    theirs: Tensor = trainer._compute_loss(own, lambda **_: outputs, given, False)
    assert torch.is_tensor(theirs)
    agree(compute_dpo_loss(replace_tensors(inputs, noted), ObjectiveSpec(dpo_beta=0.3)), theirs, inputs)


def replace_tensors(inputs: ObjectiveInputs, noted: dict[str, Tensor]) -> ObjectiveInputs:
    recorded = ObjectiveData(**{**fields_of(inputs.recorded), "tensors": noted})
    return ObjectiveInputs(**{**fields_of(inputs), "recorded": recorded})


@pytest.mark.parametrize(
    ("mode", "ours"),
    [
        ("token-mean", {}),
        ("seq-mean-token-mean", {"reduction": Reduction.SEQUENCES}),
        ("seq-mean-token-sum-norm", {"reduction": Reduction.DIVISOR, "divisor": float(ACTIONS)}),
    ],
)
def test_verls_policy_loss_is_the_same(mode: str, ours: dict[str, Any]) -> None:
    core = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    inputs = made(3)
    tensors, mask_BA = inputs.tensors, inputs.action_mask_BA.float()
    theirs, *_ = core.compute_policy_loss(
        tensors["old_log_probs"],
        inputs.log_probs_BA,
        tensors["advantages"],
        mask_BA,
        cliprange_low=0.2,
        cliprange_high=0.3,
        clip_ratio_c=1.3,
        loss_agg_mode=mode,
    )
    agree(compute_policy_loss(inputs, ObjectiveSpec(clip_high=0.3, dual_clip=1.3, **ours)), theirs, inputs)
    kl_BA = core.kl_penalty_forward(inputs.log_probs_BA, tensors["ref_log_probs"], "low_var_kl")
    mine_BA = estimate_divergence(
        inputs.log_probs_BA, tensors["ref_log_probs"], tensors["old_log_probs"], KlEstimator.K3
    )
    torch.testing.assert_close(kl_BA, mine_BA, rtol=BOUND, atol=BOUND)
    whole = core.agg_loss(kl_BA, mask_BA, mode, dp_size=1)
    assert float(whole) > 0


@pytest.fixture
def openrlhf_loss() -> Iterator[Any]:
    pytest.importorskip("openrlhf", reason="pip install --no-deps openrlhf==0.11.2 pylatexenc")
    before = set(sys.modules)
    if "flash_attn" not in sys.modules and not torch.cuda.is_available():
        stand_in_for_flash_attn()
    try:
        yield pytest.importorskip("openrlhf.models.loss", exc_type=ImportError)
    finally:
        for name in [module for module in sys.modules if module not in before and module.startswith("flash_attn")]:
            del sys.modules[name]


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("dual_clip", [None, 1.3])
def test_openrlhfs_policy_loss_is_the_same(openrlhf_loss: Any, by_token: bool, dual_clip: float | None) -> None:
    inputs = made(4)
    tensors = inputs.tensors
    theirs = openrlhf_loss.PolicyLoss(0.2, 0.3, dual_clip, token_level_loss=by_token)
    loss, *_ = theirs(inputs.log_probs_BA, tensors["old_log_probs"], tensors["advantages"], inputs.action_mask_BA)
    reduction = Reduction.TOKENS if by_token else Reduction.SEQUENCES
    spec = ObjectiveSpec(clip_high=0.3, dual_clip=dual_clip, reduction=reduction)
    agree(compute_policy_loss(inputs, spec), loss, inputs)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_openrlhfs_dpo_loss_is_the_same(openrlhf_loss: Any, smoothing: float) -> None:
    inputs = made(5)
    ours, ref = (
        torch.where(inputs.action_mask_BA, log_probs_BA, 0.0).sum(1)
        for log_probs_BA in (inputs.log_probs_BA, inputs.tensors["ref_log_probs"])
    )
    theirs, *_ = openrlhf_loss.DPOLoss(0.2, smoothing)(ours[:2], ours[2:], ref[:2], ref[2:])
    agree(compute_dpo_loss(inputs, ObjectiveSpec(dpo_beta=0.2, label_smoothing=smoothing)), theirs, inputs)
