"""Runs a list of replays in one world: `python -m tests.helpers.replay_worker COMMANDS.json [TP [graphs]]`.

COMMANDS.json is a list of lists of `replay` arguments. Starting a process for each would take longer than the replays,
and so would trials of what the job did otherwise: most of these runs have another model. `graphs`: graphs_alone().
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import PretrainedConfig

from actor_init.model_form import HeadForm, Layout
from actor_init.probe import head_probe, layout_choice
from actor_init.spec import ActorSpec, ParallelSpec
from actor_init.world import World
from replay.command_line.cli import leave, parse_command_line
from replay.options.spec import ReplaySpec
from replay.runner.run import run_in

# The references are of this loss in windows of this size and weights, and not of what the sample's job had.
MEAN_LOSS = ("--loss", "stand-in", "--window", "tokens", "--grad-accumulation", "1")
# It would run passes of a step once more. What measures it in a world of several ranks types --noise-floor.
NO_FLOOR = ("--no-noise-floor",)
PATIENCE = ("--timeout", "3600")  # a machine under load is no hang


def graphs_alone() -> AbstractContextManager[Any]:
    """Let `--compile` make graphs, forward and backward, and run them without kernels, which take seconds each."""
    return patch.object(torch, "compile", partial(torch.compile, backend="aot_eager"))


@contextmanager
def proved_once() -> Iterator[None]:
    """Prove once in this process, and not in each replay, what a model's rows and its head allow."""
    chosen, form_of = layout_choice.choose_on_one_rank, head_probe.probe_head
    choices: dict[object, tuple[str, Layout]] = {}
    forms: dict[object, HeadForm] = {}

    def choose(spec: ActorSpec, config: PretrainedConfig, where: torch.device, is_typed: bool) -> tuple[str, Layout]:
        key = spec.packs, spec.attention, spec.dtype, spec.backend, spec.parallel, repr(config), where, is_typed
        if key not in choices:
            choices[key] = chosen(spec, config, where, is_typed)
        return choices[key]

    def form(config: PretrainedConfig, device: torch.device) -> HeadForm:
        key = repr(config), device
        if key not in forms:
            forms[key] = form_of(config, device)
        return forms[key]

    with patch.object(layout_choice, "choose_on_one_rank", choose), patch.object(head_probe, "probe_head", form):
        yield


def read_spec(command: Sequence[str]) -> ReplaySpec:
    """Read the spec of a replay that is held to a reference: it tries nothing of what the job did otherwise."""
    spec: ReplaySpec = parse_command_line([*MEAN_LOSS, *NO_FLOOR, *command, *PATIENCE]).args[0].spec
    return replace(spec, measure=replace(spec.measure, trials=False))


def main() -> int:
    torch.set_num_threads(1)
    tp = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    compiling = graphs_alone() if "graphs" in sys.argv[3:] else nullcontext()
    with World.from_env(ParallelSpec(tp=tp)) as world, proved_once(), compiling:
        codes = []
        for command in json.loads(Path(sys.argv[1]).read_text()):
            torch.compiler.reset()
            codes.append(run_in(world, read_spec(command), show_traceback=True).exit_code)
    return max(codes)


if __name__ == "__main__":
    leave(main())
