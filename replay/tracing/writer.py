"""Write what `--trace` keeps of a run for `find_first_difference`, pass by pass, on one rank.

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
    FED_POSITIONS,
    FOLDER,
    LOG_PROBS,
    PARAMETERS,
    PREDICTED,
    PREDICTED_POSITIONS,
    TensorKey,
    TensorKind,
    name_pass_file,
    write_trace,
)


class TraceWriter:
    """Follows the passes of one rank: `begin_pass`, `end_forward`, `end_window` where a window ends, `write_pass`."""

    def __init__(self, folder: Path, spec: ActorSpec, source: ModelSource, world: World, backend: Backend) -> None:
        self._folder = folder / FOLDER
        self._spec = spec
        self._source = source
        self._world = world
        self._log_probs: dict[TensorKey, Tensor] = {}
        self._parameter_gradients: dict[TensorKey, Tensor] = {}
        self.attach(backend)

    @classmethod
    def open(cls, folder: Path, spec: ActorSpec, source: ModelSource, world: World, backend: Backend) -> Self:
        """Open the trace and write the parameters as they are before the first pass. All ranks must call this."""
        writer = cls(folder, spec, source, world, backend)
        writer._folder.mkdir(exist_ok=True)
        sketches = writer._sketch_parameters(TensorKind.PARAMETER, "weight")
        if world.rank == 0:
            writer._write_file(PARAMETERS, sketches)
        return writer

    def attach(self, backend: Backend) -> None:
        """Follow this backend from now on: after a pass that failed, the actor is opened again."""
        self._backend = backend
        self._layers = LayerTracer(backend.model, self._source.config, self._spec, self._world)

    def begin_pass(self, inputs: ActorInputs, window_factor: float = 1.0) -> None:
        self._inputs = inputs
        self._log_probs, self._parameter_gradients = {}, {}
        self._loss_factor = self._backend.loss_scale() * window_factor / self._spec.resolved_grad_accumulation
        self._layers.begin(inputs, self._loss_factor)

    def end_forward(self, log_probs_BA: Tensor) -> None:
        self._layers.end_forward()
        self._keep_log_probs(TensorKind.FORWARD, 1.0, log_probs_BA.detach())
        if log_probs_BA.requires_grad:
            log_probs_BA.register_hook(partial(self._keep_log_probs, TensorKind.GRADIENT, self._loss_factor))

    def _keep_log_probs(self, kind: TensorKind, factor: float, values_BA: Tensor) -> None:
        """Keep the log-probs of this rank, or their gradient, divided by the factor on the loss."""
        values_N = values_BA.flatten()[self._inputs.slot_N].float() / factor
        self._log_probs[TensorKey(kind, LOG_PROBS, "output")] = values_N[:, None].cpu()

    def end_window(self) -> None:
        """Keep the gradients, after the last backward of a window and before its end. All ranks must call this."""
        self._parameter_gradients = self._sketch_parameters(TensorKind.PARAMETER_GRADIENT, "gradient")

    def _sketch_parameters(self, kind: TensorKind, what: str) -> dict[TensorKey, Tensor]:
        """Sketch every parameter, or its gradient, on rank 0; the other ranks take part in gathering each."""
        sketches = {}
        with torch.no_grad():
            tensors = self._backend.weights() if kind is TensorKind.PARAMETER else self._backend.gradients()
            for name, tensor in tensors:
                if self._world.rank == 0:
                    sketches[TensorKey(kind, name, what)] = sketch_parameter(tensor).cpu()
        return sketches

    def write_pass(self, index: int, source: str, *, num_columns: int) -> None:
        """Write the latest pass, which replayed a capture of rows of `num_columns` tokens."""
        kinds = {False: TensorKind.FORWARD, True: TensorKind.GRADIENT}
        layer_tensors = {
            TensorKey(kinds[tensor.is_gradient], tensor.name, tensor.what): tensor for tensor in self._layers.take()
        }
        tables = {key: tensor.sketch_TK for key, tensor in layer_tensors.items()} | self._log_probs
        ordered_tables = {key: tables[key] for kind in kinds.values() for key in _sort_keys(tables, kind)}
        self._write_file(
            name_pass_file(index, self._world.rank),
            ordered_tables | self._parameter_gradients,
            {name: tensor.cpu() for name, tensor in _tabulate_inputs(self._inputs, num_columns).items()},
            source=source,
            num_columns=num_columns,
            tp_rank=self._world.mesh.get_local_rank("tp"),
            parts=[str(key) for key, tensor in layer_tensors.items() if tensor.is_part],
        )

    def _write_file(
        self,
        name: str,
        tables: dict[TensorKey, Tensor],
        inputs: dict[str, Tensor] | None = None,
        **metadata: str | int | list[str],
    ) -> None:
        blocks = find_blocks(self._backend.model)[0][0].rpartition(".")[0]
        metadata |= {"order": [str(key) for key in tables], "blocks": blocks, "seen": TRACED_PARTS[self._spec.compile]}
        write_trace(self._folder / name, {str(key): table for key, table in tables.items()} | (inputs or {}), metadata)


def _sort_keys(tables: dict[TensorKey, Tensor], kind: TensorKind) -> list[TensorKey]:
    """Return the keys of a kind as the pass computed them: log-probs come last in forward and first in backward."""
    keys = [key for key in tables if key.kind is kind]
    return sorted(keys, key=lambda key: (key.name == LOG_PROBS) is (kind is TensorKind.FORWARD))


def _tabulate_inputs(inputs: ActorInputs, num_columns: int) -> dict[str, Tensor]:
    """Tabulate what the model was given for each real token and what was asked of it, whatever the layout."""
    places = inputs.captured_index
    is_real = places >= 0
    attended = torch.ones_like(is_real) if inputs.attention_mask_BS is None else inputs.attention_mask_BS
    columns = (attended.long(), inputs.input_ids, inputs.position_ids, _count_tokens_before(inputs, attended))
    num_actions = inputs.action_mask_BA.shape[1]
    row_N, action_N = inputs.slot_N // num_actions, inputs.slot_N % num_actions
    return {
        FED_POSITIONS: places[is_real],
        FED: torch.stack([column.expand_as(places)[is_real] for column in columns], dim=1),
        PREDICTED_POSITIONS: row_N * num_columns + num_columns - num_actions + action_N,
        PREDICTED: torch.stack([places.flatten()[inputs.predictor_N], inputs.target_ids_N], dim=1),
    }


def _count_tokens_before(inputs: ActorInputs, attended: Tensor) -> Tensor:
    """Count the tokens of its document that come before each token, in the shape of the ids."""
    if inputs.cu_seq_lens is None:
        return attended.long().cumsum(dim=1) - 1
    borders = inputs.cu_seq_lens.long()
    index = inputs.ring.local_index_L if inputs.ring else torch.arange(inputs.input_ids.shape[1], device=borders.device)
    return (index - borders[torch.bucketize(index, borders, right=True) - 1]).unsqueeze(0)
