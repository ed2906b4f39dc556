"""TRL's trainers: python trl_job.py sft|grpo ARGUMENTS_JSON FOLDER"""

import json
import string
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from benchmarks.published_bugs.jobs.common import make_model

PROMPTS = ["the cat", "a dog and", "one", "who"]
ANSWERS = ["sat on the mat and was not here today", "ran", "blue", "two of them are in the house that jack built"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token a character."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", "<unk>", *string.ascii_lowercase])}
    vocabulary["\u2581"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token=None
    )


def main(kind: str, arguments: dict[str, Any], folder: Path) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "output_dir": str(folder / "trainer"),
        "learning_rate": 0.0,
        "logging_steps": 1,
        "max_steps": 2,
        "per_device_train_batch_size": 1,
        "max_grad_norm": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        **arguments,
    }
    model, tokenizer = make_model(folder), make_tokenizer()
    model.config._name_or_path = str(folder / "model")  # asked for by the trainer of GRPO
    if kind == "sft":
        data = Dataset.from_dict({"prompt": PROMPTS, "completion": ANSWERS})
        trainer = SFTTrainer(model=model, args=SFTConfig(**settings), train_dataset=data, processing_class=tokenizer)
    else:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [float(len(completion)) for completion in completions],
            args=GRPOConfig(**settings),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer,
        )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
