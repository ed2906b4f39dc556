"""transformers' Trainer: python trainer.py ARGUMENTS_JSON FOLDER"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments

from benchmarks.published_bugs.jobs.common import make_batches, make_model


def main(arguments: dict[str, Any], folder: Path) -> None:
    batches = make_batches(4, unequal=True, prompt=arguments.pop("prompt", 0))
    trainer = Trainer(
        model=make_model(folder),
        args=TrainingArguments(
            output_dir=str(folder / "trainer"),
            learning_rate=0.0,
            logging_steps=1,
            num_train_epochs=1,
            per_device_train_batch_size=1,
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=batches,
        data_collator=lambda samples: samples[0],
    )
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
