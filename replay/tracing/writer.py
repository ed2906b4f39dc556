"""Write what `--trace` keeps of a run for `first_difference`, pass by pass, on one rank.

Shape letters: B rows, S tokens a row as captured, A trailing tokens a row with an action mask, T real tokens that this
rank fed, N action tokens whose log-probs it gives.
"""

from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from actor_init.backends.protocol import Backend
from actor_init.inputs.packing import ActorInputs
from actor_init.model import ModelSource, find_blocks
from actor_init.sketching import sketch_parameter
from actor_init.spec import ActorSpec
from actor_init.tracing import TRACED_PARTS, LayerTracer
from actor_init.world import World
from replay.tracing.trace_file import (
    FED,
    FED_PLACES,
    FOLDER,
    LOG_PROBS,
    PARAMETERS,
    PREDICTED,
    PREDICTED_PLACES,
    Key,
    Kind,
    pass_file,
    write_trace,
)


class RunTrace:
    """Follows the passes of one rank: `begin`, `end_forward`, `end_window` where a window ends, `write`."""

    def __init__(self, folder: Path, spec: ActorSpec, source: ModelSource, world: World, backend: Backend) -> None:
        self._folder = folder / FOLDER
        self._spec = spec
        self._source = source
        self._world = world
        self._log_probs: dict[Key, Tensor] = {}
        self._parameter_gradients: dict[Key, Tensor] = {}
        self.attach(backend)

    @classmethod
    def of(cls, folder: Path, spec: ActorSpec, source: ModelSource, world: World, backend: Backend) -> Self:
        """Open the trace and write down the parameters as they are before the first pass. For all ranks to call."""
        trace = cls(folder, spec, source, world, backend)
        trace._folder.mkdir(exist_ok=True)
        sketches = trace._sketches(Kind.PARAMETER, "weight")
        if world.rank == 0:
            trace._write(PARAMETERS, sketches)
        return trace

    def attach(self, backend: Backend) -> None:
        """Follow this backend from now on: a pass that broke off opens another one."""
        self._backend = backend
        self._layers = LayerTracer(backend.model, self._source.config, self._spec, self._world)

    def begin(self, inputs: ActorInputs) -> None:
        self._inputs = inputs
        self._log_probs, self._parameter_gradients = {}, {}
        self._loss_factor = self._backend.loss_scale() / self._spec.num_accumulated
        self._layers.begin(inputs, self._loss_factor)

    def end_forward(self, log_probs_BA: Tensor) -> None:
        self._layers.end_forward()
        self._sees_log_probs(Kind.FORWARD, 1.0, log_probs_BA.detach())
        if log_probs_BA.requires_grad:
            sees_gradient = partial(self._sees_log_probs, Kind.GRADIENT, self._loss_factor)
            log_probs_BA.register_hook(sees_gradient)

    def _sees_log_probs(self, kind: Kind, factor: float, values_BA: Tensor) -> None:
        own_N = values_BA.flatten()[self._inputs.slot_N].float() / factor
        self._log_probs[Key(kind, LOG_PROBS, "output")] = own_N[:, None].cpu()

    def end_window(self) -> None:
        """Keep the gradients, after the last backward of a window and before its end. For all ranks to call."""
        self._parameter_gradients = self._sketches(Kind.PARAMETER_GRADIENT, "gradient")

    def _sketches(self, kind: Kind, what: str) -> dict[Key, Tensor]:
        """Sketch every parameter, or its gradient, on rank 0; the others help to gather them."""
        sketches = {}
        with torch.no_grad():
            tensors = self._backend.weights() if kind is Kind.PARAMETER else self._backend.gradients()
            for name, tensor in tensors:
                if self._world.rank == 0:
                    sketches[Key(kind, name, what)] = sketch_parameter(tensor).cpu()
        return sketches

    def write(self, index: int, source: str, *, num_columns: int) -> None:
        """Write the pass that was seen, which replayed a capture of rows of `num_columns` tokens."""
        seen = self._layers.take()
        names = {False: Kind.FORWARD, True: Kind.GRADIENT}
        layers = {Key(names[one.is_gradient], one.name, one.what): one for one in seen}
        tables = {key: one.sketch_TK for key, one in layers.items()} | self._log_probs
        in_order = {key: tables[key] for kind in names.values() for key in _in_order(tables, kind)}
        self._write(
            pass_file(index, self._world.rank),
            in_order | self._parameter_gradients,
            {name: tensor.cpu() for name, tensor in _fed(self._inputs, num_columns).items()},
            source=source,
            num_columns=num_columns,
            tp_rank=self._world.mesh.get_local_rank("tp"),
            parts=[str(key) for key, one in layers.items() if one.is_part],
        )

    def _write(
        self, name: str, tables: dict[Key, Tensor], fed: dict[str, Tensor] | None = None, **about: str | int | list[str]
    ) -> None:
        blocks = find_blocks(self._backend.model)[0][0].rpartition(".")[0]
        about |= {"order": [str(key) for key in tables], "blocks": blocks, "seen": TRACED_PARTS[self._spec.compile]}
        write_trace(self._folder / name, {str(key): table for key, table in tables.items()} | (fed or {}), about)


def _in_order(tables: dict[Key, Tensor], kind: Kind) -> list[Key]:
    """Place the log-probs: last in forward, first in backward."""
    keys = [key for key in tables if key.kind is kind]
    return sorted(keys, key=lambda key: (key.name == LOG_PROBS) is (kind is Kind.FORWARD))


def _fed(inputs: ActorInputs, num_columns: int) -> dict[str, Tensor]:
    """Tabulate what the model was given for each real token and what was asked of it, whatever the layout."""
    places = inputs.captured_index
    is_real = places >= 0
    attended = torch.ones_like(is_real) if inputs.attention_mask_BS is None else inputs.attention_mask_BS
    columns = (attended.long(), inputs.input_ids, inputs.position_ids, _places_in_document(inputs, attended))
    num_actions = inputs.action_mask_BA.shape[1]
    row_N, action_N = inputs.slot_N // num_actions, inputs.slot_N % num_actions
    return {
        FED_PLACES: places[is_real],
        FED: torch.stack([column.expand_as(places)[is_real] for column in columns], dim=1),
        PREDICTED_PLACES: row_N * num_columns + num_columns - num_actions + action_N,
        PREDICTED: torch.stack([places.flatten()[inputs.predictor_N], inputs.target_ids_N], dim=1),
    }


def _places_in_document(inputs: ActorInputs, attended: Tensor) -> Tensor:
    """Count the tokens of its document that come before each token, in the shape of the ids."""
    if inputs.cu_seq_lens is None:
        return attended.long().cumsum(dim=1) - 1
    borders = inputs.cu_seq_lens.long()
    index = inputs.ring.local_index_L if inputs.ring else torch.arange(inputs.input_ids.shape[1], device=borders.device)
    return (index - borders[torch.bucketize(index, borders, right=True) - 1]).unsqueeze(0)
