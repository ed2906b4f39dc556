"""Import what a replay imports, in the fork server of `forkserver.py`, and make what each fork would make for itself.

What fails or prints here does so again in the run.
"""

import gc
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from actor_init.declarations.backends import BACKENDS

MODULES = (
    *(backend.engine.partition(":")[0] for backend in BACKENDS.values()),
    *(library for backend in BACKENDS.values() for library in backend.libraries),
    "flash_attn",
    "replay.command_line.cli",
    "replay.output.printing",
    "replay.runner.run",
    "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama",
    # What a replay imports late, some of it during its first pass.
    "actor_init.attention.flex",
    "replay.api.run",
    "replay.objective.policy",
    "replay.output.frames",
)
# What a replay makes once in its process: readers of options and messages, and the versions of packages. No tensor: on
# a machine with GPUs autograd would start threads, which a fork does not have.
FIRST_USES: Mapping[str, Sequence[Any]] = {
    "replay.command_line.cli:parse_command_line": ([],),
    "replay.runlog.writer:list_versions": (),
    "replay.watch.watcher:make_message_readers": (),
}


def preload() -> None:
    # DeepSpeed selects its accelerator while it is imported: the one that World selects.
    os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"
    # To look for garbage takes a fifth of the time of the imports.
    gc.disable()
    for name in MODULES:
        with suppress(Exception):
            import_module(name)
    for name, arguments in FIRST_USES.items():
        module, _, function = name.partition(":")
        with suppress(Exception):
            getattr(import_module(module), function)(*arguments)
    gc.collect()
    # The first collection in each fork would otherwise copy every page.
    gc.freeze()
    gc.enable()


# What the imports print would come once, from the server, and belong to no run: their output goes nowhere meanwhile.
terminal = [os.dup(number) for number in (1, 2)]
nowhere = os.open(os.devnull, os.O_WRONLY)
for number in (1, 2):
    os.dup2(nowhere, number)
preload()
for number, duplicate in zip((1, 2), terminal, strict=True):
    os.dup2(duplicate, number)
    os.close(duplicate)
os.close(nowhere)
