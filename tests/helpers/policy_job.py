"""A small PPO-like job, whose loss is written here from the papers' formulas, and a DPO job beside it.

Shape letters: B rows, S tokens a row, A columns of the action mask (the last tokens of each row).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from capture import recording
from tests.trainers.common import make_model

NUM_ACTIONS = 6
LENGTHS = ((12, 9), (7, 12), (10, 8), (9, 11))  # real tokens of each micro-batch's rows; padded on the right


def make_rollouts(seed: int = 0, num_rows: int = 2) -> list[dict[str, Tensor]]:
    """Micro-batches with all that a policy's loss needs; the old policy's log-probs are off by up to a half."""
    generator = torch.Generator().manual_seed(seed)
    rollouts = []
    for number, pair in enumerate(LENGTHS):
        lengths = (pair * num_rows)[:num_rows]
        ids_BS = torch.randint(3, 60, (num_rows, 12), generator=generator)
        real_BS = torch.arange(12)[None] < torch.tensor(lengths)[:, None]
        size = (num_rows, NUM_ACTIONS)
        rollouts.append(
            {
                "input_ids": ids_BS,
                "attention_mask": real_BS.long(),
                "action_mask": real_BS[:, -NUM_ACTIONS:] & (torch.rand(size, generator=generator) > 0.2 * (number % 2)),
                "advantages": torch.randn(size, generator=generator),
                "old_noise": torch.rand(size, generator=generator) - 0.5,
                "ref_noise": torch.rand(size, generator=generator) - 0.5,
            }
        )
    return rollouts


def log_probs_of(model: nn.Module, rollout: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the actions' log-probs [B, A] and entropies [B, A] of one forward, whose logits [B, A, V] are kept."""
    logits_BSV = model(input_ids=rollout["input_ids"], attention_mask=rollout["attention_mask"]).logits
    rollout["logits"] = logits_BSV[:, -NUM_ACTIONS - 1 : -1].float()
    log_probs_BSV = rollout["logits"].log_softmax(-1)
    chosen_BA = log_probs_BSV.gather(-1, rollout["input_ids"][:, -NUM_ACTIONS:, None])[..., 0]
    return chosen_BA, -(log_probs_BSV.exp() * log_probs_BSV).sum(-1)


def token_losses(
    log_probs_BA: Tensor,
    old_BA: Tensor,
    advantages_BA: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate (https://arxiv.org/abs/1707.06347, equation 7), as a loop over the tokens; with the
    lower bound of https://arxiv.org/abs/1912.09729, equation 5.
    """
    losses = []
    for log_prob, old, advantage in zip(log_probs_BA.flatten(), old_BA.flatten(), advantages_BA.flatten(), strict=True):
        ratio = torch.exp(log_prob - old)
        bounded = min(max(ratio, torch.tensor(1 - low)), torch.tensor(1 + high))
        gain = min(ratio * advantage, bounded * advantage)
        if dual is not None and advantage < 0:
            gain = max(gain, dual * advantage)
        losses.append(-gain)
    return torch.stack(losses).view_as(log_probs_BA)


def by_sequences(losses_BA: Tensor, mask_BA: Tensor) -> Tensor:
    """GRPO (https://arxiv.org/abs/2402.03300, equation 3): the mean over sequences of each one's mean over tokens."""
    means = [row[mask].mean() for row, mask in zip(losses_BA, mask_BA, strict=True) if mask.any()]
    return torch.stack(means).mean()


def by_tokens(losses_BA: Tensor, mask_BA: Tensor) -> Tensor:
    """DAPO (https://arxiv.org/abs/2503.14476, equation 8) over one micro-batch."""
    return losses_BA[mask_BA].mean()


Loss = Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]  # of log-probs, entropies and a rollout


def plain_policy(log_probs_BA: Tensor, entropies_BA: Tensor, rollout: dict[str, Tensor]) -> Tensor:
    old_BA = log_probs_BA.detach() + rollout["old_noise"]
    return by_tokens(token_losses(log_probs_BA, old_BA, rollout["advantages"]), rollout["action_mask"])


def train(
    folder: Path,
    loss_of: Loss = plain_policy,
    *,
    num_passes: int = 2,
    weigh: Callable[[Tensor, int], Tensor] = lambda loss, number: loss / 2,
    notes_first: bool = False,
    notes: tuple[str, ...] = ("advantages", "action_mask", "old_log_probs", "ref_log_probs"),
    settings: dict[str, Any] | None = None,
    seed: int = 0,
    rollouts: Sequence[dict[str, Tensor]] | None = None,
) -> Path:
    """Train for four passes, `num_passes` to a step at learning rate 0; `folder/model` has the weights.

    weigh        what is differentiated, of a pass's loss and its number
    notes_first  note before the forward; else behind it
    rollouts     None: those that `make_rollouts` makes of the seed
    """
    model: Any = make_model(folder, saves=False).train()
    model.save_pretrained(folder / "model")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, folder / "captures", **(settings or {"reproduce": True})) as recorder:
        for number, rollout in enumerate(make_rollouts(seed) if rollouts is None else rollouts):
            with torch.no_grad():
                now_BA, _ = log_probs_of(model, rollout)
            noted = {
                **{name: rollout[name] for name in ("advantages", "action_mask")},
                "old_log_probs": now_BA + rollout["old_noise"],
                "ref_log_probs": now_BA + rollout["ref_noise"],
                "rollout_log_probs": now_BA + rollout["old_noise"] / 10,
                "divisor": 16.0,
            }
            noted = {name: value for name, value in noted.items() if name in notes}
            if notes_first:
                recorder.note_next(**noted)
            log_probs_BA, entropies_BA = log_probs_of(model, rollout)
            if not notes_first:
                recorder.note(**noted)
            loss = loss_of(log_probs_BA, entropies_BA, rollout)
            recorder.note(loss=loss)
            weigh(loss, number).backward()
            if (number + 1) % num_passes == 0:
                recorder.note(grad_norm=nn.utils.clip_grad_norm_(model.parameters(), 1e9))
                optimizer.step()
                optimizer.zero_grad()
    return folder
