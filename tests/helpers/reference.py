"""The independent reference: a plain Hugging Face model, unsharded, fp32, fed each row alone and without padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from capture.file_format.capture_file import read_micro_batch
from capture.file_format.micro_batch import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    loss: float
    num_tokens: int  # that it is the mean over
    gradients: dict[str, Tensor]  # fp64, by parameter name


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(dim=0)


class Reference:
    """Losses and gradients of captures under the model in `folder`, each computed once."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._answers: dict[Path, Answer] = {}

    def log_probs(self, batch: MicroBatch) -> Tensor:
        """[B, A], 0 where there is no action token, or none that has a real token before it."""
        assert batch.action_mask_BA is not None
        num_rows, num_actions = batch.action_mask_BA.shape
        num_tokens = batch.sequences_BS.shape[1]
        rows = []
        for row in range(num_rows):
            columns = batch.attention_mask_BS[row].nonzero()[:, 0]  # of the real tokens
            out_A = torch.zeros(num_actions)
            if len(columns) > 1:
                ids_T = batch.sequences_BS[row, columns]
                log_probs_TV = torch.log_softmax(self.model(input_ids=ids_T[None]).logits[0], dim=-1)
                chosen_T = log_probs_TV[:-1].gather(1, ids_T[1:, None])[:, 0]
                actions = columns[1:] - (num_tokens - num_actions)
                counts = (actions >= 0) & batch.action_mask_BA[row, actions.clamp(min=0)].bool()
                out_A[actions[counts]] = chosen_T[counts]
            rows.append(out_A)
        return torch.stack(rows)

    def answer(self, path: Path) -> Answer:
        if path not in self._answers:
            batch = read_micro_batch(path)
            log_probs_BA = self.log_probs(batch)
            num_tokens = int((log_probs_BA != 0).sum())
            loss = -log_probs_BA.sum() / num_tokens
            self.model.zero_grad()
            torch.autograd.backward(loss)
            gradients = {name: p.grad.double() for name, p in self.model.named_parameters()}
            self._answers[path] = Answer(loss=loss.item(), num_tokens=num_tokens, gradients=gradients)
        return self._answers[path]

    def gradients(self, paths: Sequence[Path]) -> dict[str, Tensor]:
        """By name, of the mean over all tokens of `paths`: the gradient of a window over its passes and data ranks."""
        each = [self.answer(path) for path in paths]
        total = sum(row.num_tokens for row in each)
        names = each[0].gradients
        return {name: sum_of([row.gradients[name] * (row.num_tokens / total) for row in each]) for name in names}

    def gradient_norm(self, paths: Sequence[Path]) -> float:
        """Return the norm of all those gradients."""
        return float(torch.stack([gradient.norm() for gradient in self.gradients(paths).values()]).norm())

    def trained(
        self, windows: list[list[Path]], *, learning_rate: float, max_norm: float, warmup_steps: int
    ) -> list[tuple[dict[str, float], float]]:
        """For each window of captures in turn: losses by file name, and the norm, before clipping, of the
        gradient of their tokens' mean. AdamW steps after each, its rate rising linearly from 0. Changes the model."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)
        found = []
        for number, paths in enumerate(windows):
            optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, number / max(1, warmup_steps))
            self._answers.clear()
            losses = {path.name: self.answer(path).loss for path in paths}
            gradients, norm = self.gradients(paths), self.gradient_norm(paths)
            assert norm > max_norm  # so that clipping is in what is compared
            for name, parameter in self.model.named_parameters():
                parameter.grad = (gradients[name] * (max_norm / norm)).to(parameter.dtype)
            optimizer.step()
            found.append((losses, norm))
        return found

    def clipped_steps(
        self,
        paths: list[Path],
        *,
        learning_rate: float,
        max_norm: float,
        kind: type[torch.optim.AdamW | torch.optim.SGD] = torch.optim.AdamW,
    ) -> list[tuple[float, float]]:
        """Loss and norm before clipping of each capture, the optimizer stepping after each. Changes the model."""
        optimizer = kind(self.model.parameters(), lr=learning_rate)
        found = []
        for path in paths:
            log_probs_BA = self.log_probs(read_micro_batch(path))
            num_tokens = int((log_probs_BA != 0).sum())
            loss = -log_probs_BA.sum() / num_tokens
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            assert norm > max_norm  # so that clipping is in what is compared
            optimizer.step()
            found.append((loss.item(), norm.item()))
        return found


def reference_of_a_small_llama(folder: Path) -> Reference:
    """Save a Llama of two layers and 97 tokens into `folder`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes, **heads)).save_pretrained(folder)
    return Reference(folder)
