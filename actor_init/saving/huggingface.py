"""Write folders completely or not at all, and a model in Hugging Face's format.

FOLDER/config.json, generation_config.json
FOLDER/model.safetensors                    or, above MAX_SHARD_SIZE,
FOLDER/model-00001-of-00004.safetensors ... and model.safetensors.index.json
"""

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from actor_init.custom.config import CustomConfig
from actor_init.model import build_on_meta
from actor_init.schedule_and_norm import TORCH_DTYPES
from actor_init.spec import Dtype, UsageError
from actor_init.world import World
from capture.facts import Setting

MAX_SHARD_SIZE = "5GB"


def check_folder(folder: Path, setting: str) -> None:
    """Raise UsageError unless `folder`, the value of the setting, can be created, or exists and is empty."""
    typed = Setting(setting, folder)
    advice = f"Try: {typed.with_value(f'{folder}-2')}"
    if folder.is_dir():
        if any(folder.iterdir()):
            raise UsageError(typed, "is not empty, and is never overwritten", advice)
    elif folder.exists():
        raise UsageError(typed, "is a file", advice)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent):
            pass
    except OSError as error:
        why = f": {error.strerror}"
        raise UsageError(typed, why, "Give a folder where you may write") from None


@contextmanager
def create_whole_folder(folder: Path, world: World) -> Iterator[Path]:
    """Yield an empty folder for all ranks to write into, beside `folder`; it is renamed once the last rank has
    written.

    On an error it is removed, and `folder` is not created. Raises OSError.
    """
    unfinished = None
    if world.rank == 0:
        unfinished = folder.parent / f".{folder.name}.unfinished-{uuid.uuid4().hex[:8]}"
        unfinished.mkdir()
    unfinished = world.broadcast_from_rank0(unfinished)
    assert unfinished is not None
    try:
        yield unfinished
        world.gather(None)
        if world.rank == 0:
            os.replace(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    # No rank goes on before the folder has its name.
    world.gather(None)


def write_model(
    folder: Path, config: PretrainedConfig, dtype: Dtype, model: PreTrainedModel, gather: Callable[[Tensor], Tensor]
) -> None:
    """Write `model`'s weights in `dtype` into `folder`, in the format of `from_pretrained`. All ranks must call this.

    `gather` returns a full tensor from shards, on all ranks. Each is copied to rank 0's host before the next is
    gathered; the host must hold them all. A tied parameter is written once. Of a user's model there is one safetensors
    file, for --weights. Raises OSError.
    """
    weights: dict[str, Tensor] = {}
    saved_names = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved_names}
    tensors = dict(model.named_parameters()) | buffers
    for name, tensor in tensors.items():
        full = gather(tensor).detach()
        if dist.get_rank() == 0:
            weights[name] = full.to("cpu", TORCH_DTYPES[dtype] if full.is_floating_point() else None, copy=True)
        del full
    if dist.get_rank() == 0:
        if isinstance(config, CustomConfig):
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
            return
        empty = build_on_meta(config, attention="eager", dtype=TORCH_DTYPES[dtype])
        with _hide_progress_bar():
            empty.save_pretrained(folder, state_dict=weights, max_shard_size=MAX_SHARD_SIZE)


@contextmanager
def _hide_progress_bar() -> Iterator[None]:
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
