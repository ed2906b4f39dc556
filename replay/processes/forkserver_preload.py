"""Import what a replay imports, in the fork server of `forkserver.py`.

An import that fails or prints here does so again in the run.
"""

import gc
import os
from contextlib import suppress
from importlib import import_module

import torch

from actor_init.declarations.backends import BACKENDS

MODULES = (
    *(one.engine.partition(":")[0] for one in BACKENDS.values()),
    *(library for one in BACKENDS.values() for library in one.libraries),
    "flash_attn",
    "replay.command_line.cli",
    "replay.output.printing",
    "replay.runner.run",
    "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama",
)


def preload() -> None:
    os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"  # as World selects its device
    for name in MODULES:
        with suppress(Exception):
            import_module(name)
    gc.collect()
    gc.freeze()  # otherwise the first collection in each fork copies every page


terminal = [os.dup(number) for number in (1, 2)]
nowhere = os.open(os.devnull, os.O_WRONLY)
for number in (1, 2):
    os.dup2(nowhere, number)
preload()
for number, kept in zip((1, 2), terminal, strict=True):
    os.dup2(kept, number)
    os.close(kept)
os.close(nowhere)
