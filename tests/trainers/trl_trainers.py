"""TRL's trainers: python trl_trainers.py FOLDER sft | packed-sft | detached-sft | dpo | noted-dpo | grpo | noted-grpo

The losses of DPO and GRPO are not a mean of log-probs, so what is left for comparison is minus the mean log-prob of the
completions' tokens, as these trainers computed it from the model they train.
"""

import string
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import capture
from tests.trainers.common import make_model, write_losses

PROMPTS = ["the cat", "a dog and", "one", "two of them are"]
ANSWERS = ["sat on the mat", "ran", "was not here today", "blue"]
OTHERS = ["no", "did what it does", "x", "neither is"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token a character."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", "<unk>", *string.ascii_lowercase])}
    vocabulary["\u2581"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token=None
    )


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "trainer"),
        "learning_rate": 0.0,
        "logging_steps": 1,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }


def sft(folder: Path, *, is_detached: bool = False, **more: Any) -> list[float]:
    """Fine-tune. With `is_detached` no gradient reaches one layer's queries."""
    data = Dataset.from_dict({"prompt": PROMPTS, "completion": ANSWERS})
    model = make_model(folder)
    if is_detached:
        model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda _, __, output: output.detach())
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**settings(folder), **more),
        train_dataset=data,
        processing_class=make_tokenizer(),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(trainer: Any) -> list[float]:
    """Train, and return what the trainer kept of each pass."""
    kept: list[float] = []
    trainer.kept = kept
    trainer.train()
    return kept


class CompletionsDPO(DPOTrainer):  # type: ignore[misc]
    """Keeps what it computed: minus the mean log-prob of the completions' tokens."""

    kept: list[float]

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool) -> Any:
        result = super()._compute_loss(model, inputs, return_outputs)
        sums = [self._metrics["train"][f"logps/{side}"][-1] for side in ("chosen", "rejected")]
        num_tokens = int(inputs["completion_mask"][:, 1:].sum())
        self.kept.append(-sum(sums) * (len(inputs["input_ids"]) // 2) / num_tokens)
        return result


def make_dpo(cls: type[DPOTrainer], folder: Path, **more: Any) -> DPOTrainer:
    return cls(
        model=make_model(folder),
        ref_model=make_model(folder, saves=False),
        args=DPOConfig(**{**settings(folder), **more}),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS, "chosen": ANSWERS, "rejected": OTHERS}),
        processing_class=make_tokenizer(),
    )


def dpo(folder: Path) -> list[float]:
    return train(make_dpo(CompletionsDPO, folder))


class NotedDPO(DPOTrainer):  # type: ignore[misc]
    """As docs/start.md says of it. Keeps its losses."""

    kept: list[float]

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool) -> Any:
        noted = {name: inputs[name] for name in ("ref_chosen_logps", "ref_rejected_logps")}
        capture.note_next(action_mask=inputs["completion_mask"], **noted)
        result = super()._compute_loss(model, inputs, return_outputs)
        loss = result[0] if return_outputs else result
        capture.note(loss=loss)
        self.kept.append(loss.item())
        return result


def noted_dpo(folder: Path) -> list[float]:
    return train(make_dpo(NotedDPO, folder, precompute_ref_log_probs=True, learning_rate=1e-3))


class CompletionsGRPO(GRPOTrainer):  # type: ignore[misc]
    """Keeps what it computed under autograd: minus the mean log-prob of the completions' tokens."""

    kept: list[float]

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, *a: Any, **k: Any
    ) -> Any:
        result = super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, *a, **k)
        if torch.is_grad_enabled():
            real = attention_mask[:, -logits_to_keep:].bool()
            self.kept.append(-result[0][real].mean().item())
        return result


def make_grpo(cls: type[GRPOTrainer], folder: Path, **more: Any) -> GRPOTrainer:
    model = make_model(folder)
    model.config._name_or_path = str(folder / "model")  # asked for by the trainer
    return cls(
        model=model,
        reward_funcs=lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids],
        args=GRPOConfig(**{**settings(folder), "num_generations": 2, "max_completion_length": 6, **more}),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=make_tokenizer(),
    )


def grpo(folder: Path) -> list[float]:
    return train(make_grpo(CompletionsGRPO, folder, beta=0.1))


NOTED = "advantages", "old_per_token_logps", "ref_per_token_logps"


class NotedGRPO(GRPOTrainer):  # type: ignore[misc]
    """The trainer of docs/start.md. Keeps its losses."""

    kept: list[float]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        noted = {name: inputs[name] for name in NOTED if inputs.get(name) is not None}
        share = self.current_gradient_accumulation_steps / self.args.steps_per_generation
        noted["num_items_in_batch"] = inputs["num_items_in_batch"] * share
        capture.note_next(action_mask=inputs["completion_mask"], **noted)
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        capture.note(loss=loss)
        self.kept.append(loss.item())
        return loss


def noted_grpo(folder: Path) -> list[float]:
    """Take two steps of two passes on each batch of samples: from the second one on the policy is not the old one."""
    trained = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "max_steps": 4}
    return train(make_grpo(NotedGRPO, folder, beta=0.1, **trained))


def main(folder: Path, kind: str) -> None:
    match kind:
        case "sft":
            losses = sft(folder, max_length=64)
        case "packed-sft":
            losses = sft(folder, max_length=40, packing=True)
        case "detached-sft":
            losses = sft(folder, is_detached=True, max_length=64)
        case "dpo":
            losses = dpo(folder)
        case "noted-dpo":
            losses = noted_dpo(folder)
        case "grpo":
            losses = grpo(folder)
        case "noted-grpo":
            losses = noted_grpo(folder)
        case _:
            raise ValueError(f"{kind!r} is none of sft, packed-sft, detached-sft, dpo, noted-dpo, grpo, noted-grpo")
    write_losses(folder, losses)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
