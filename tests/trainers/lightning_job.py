"""Lightning's Trainer on CPUs: python lightning_job.py FOLDER DEVICES [STRATEGY] [callback]

With two devices and strategy `ddp` Lightning starts this script again for rank 1; with `ddp_fork` it forks, and with
`ddp_spawn` it spawns.
"""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from capture.integrations import LightningCaptureCallback
from tests.trainers.common import make_batches, make_model, write_losses


class Language(lightning.LightningModule):  # type: ignore[misc]
    """Trains; the validation epoch in between runs without autograd."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.model = make_model(folder)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("held out", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self) -> Any:
        return _loader()

    def val_dataloader(self) -> Any:
        return _loader(1)

    def on_train_end(self) -> None:
        write_losses(self.folder, self.losses)


def _loader(*num_batches: int) -> DataLoader[Any]:
    """Wrap the batches: of a bare list of dicts Lightning makes a loader for each key."""
    batches: Any = make_batches(*num_batches)
    return DataLoader(batches, batch_size=None)


def main(folder: Path, devices: int, strategy: str = "auto", *with_callback: str) -> None:
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
        callbacks=[LightningCaptureCallback(folder / "captures", reproduce=True)] if with_callback else [],
    )
    trainer.fit(Language(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
