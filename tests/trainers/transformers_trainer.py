"""transformers' Trainer, by itself or with the callback that records it.

python transformers_trainer.py FOLDER [callback]
"""

import sys
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from capture.integrations import CaptureCallback
from tests.trainers.common import make_batches, make_model, write_losses


class Losses(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.logged: list[float] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.logged += [logs["loss"]] if "loss" in logs else []


def main(folder: Path, *with_callback: str) -> None:
    losses = Losses()
    trainer = Trainer(
        model=make_model(folder),
        args=TrainingArguments(
            output_dir=str(folder / "trainer"),
            learning_rate=0.0,
            logging_steps=1,
            num_train_epochs=1,
            per_device_train_batch_size=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            gradient_checkpointing=True,
        ),
        train_dataset=make_batches(),
        data_collator=lambda samples: samples[0],
        callbacks=[losses, *([CaptureCallback(folder / "captures", reproduce=True)] if with_callback else [])],
    )
    trainer.train()
    write_losses(folder, losses.logged)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
