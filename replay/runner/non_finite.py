"""Find the first tensor of a pass that held a NaN or an infinity, by running the pass once more.

    parameter model.layers.0.mlp.up_proj.weight
    output of model.layers.3.mlp.down_proj, row 1, token 17
    gradient of the output of model.layers.3.self_attn, row 1, token 17
    gradient of model.embed_tokens.weight

A pass whose values are finite is not searched. The repeated pass is not timed, runs uncompiled and changes no weights.
Rows and tokens are counted from 0, as in a trace: positions in the captured micro-batch, including padding.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from actor_init.backends.protocol import Backend
from actor_init.parallel.token_rows import locate_token_rows
from actor_init.spec import ActorSpec, Compile, Dtype
from actor_init.world import World
from replay.runlog.records import PassRecord
from replay.runlog.run_file import FirstNonFinite
from replay.runner.run_pass import PassInputs, PassObserver, run_pass_again

# Of one run: once weights are not finite, every pass is affected, and a search costs up to two passes.
MAX_SEARCHES = 4
NOT_AGAIN = "nothing, when the pass was run again"
STEP_WAS_TAKEN = "unknown: the step was taken with this gradient. Try: the same without --step"
IN_WINDOW = "a gradient of this accumulation window. Try: --grad-accumulation 1"
NO_LAYERS = "unknown: DeepCompile's graph is the whole model. Try: without --deepcompile"


def has_finite_results(record: PassRecord) -> bool:
    """Are log-probs, loss and gradient norm of a pass finite? True of a pass that failed, which has none.

    Callers skip an fp16 gradient norm: it overflows in healthy runs.
    """
    numbers = [
        *record.result.row_log_probs,
        *(number for number in (record.result.loss, record.result.grad_norm) if number is not None),
    ]
    return record.error is not None or all(map(math.isfinite, numbers))


def find_first_non_finite(records: Iterable[PassRecord]) -> FirstNonFinite | None:
    """Return the run's first non-finite tensor."""
    for record in records:
        if (tensor := record.first_non_finite) is not None:
            return FirstNonFinite(index=record.index, source=record.source, rank=record.rank, what=tensor)
    return None


@dataclass(kw_only=True, slots=True)
class NonFiniteSearch:
    """Search for the first non-finite tensor on all ranks together. Calls `report_progress` after each layer."""

    spec: ActorSpec
    world: World
    report_progress: Callable[[], None]
    num_searches_left: int = MAX_SEARCHES

    def is_needed(self, rank_records: Iterable[PassRecord]) -> bool:
        """Is a search needed? The answer is the same on every rank, given the records of all ranks."""
        rank_records = list(rank_records)
        if self.num_searches_left == 0 or any(record.first_non_finite is not None for record in rank_records):
            return False
        return not all(has_finite_results(self._without_fp16_norm(record)) for record in rank_records)

    def _without_fp16_norm(self, record: PassRecord) -> PassRecord:
        if self.spec.dtype is not Dtype.FP16:
            return record
        return replace(record, result=replace(record.result, grad_norm=None))

    def is_needed_for_loss(self, loss: Tensor) -> bool:
        """Is a search needed because a rank's loss is not finite? Waits for the device. All ranks must call this."""
        num_non_finite = (~torch.isfinite(loss.detach())).float().reshape(1)
        if self.world.world_size > 1:
            dist.all_reduce(num_non_finite)
        return bool(num_non_finite.item()) and self.num_searches_left > 0

    def find_first(self, backend: Backend, inputs: PassInputs, *, have_weights_changed: bool) -> str | None:
        """Return the first non-finite tensor on this rank, None if only other ranks have one.

        Parameters come first: what they make non-finite says nothing more. Then the forward is run again, and only if
        that is finite on every rank, the backward too.

        inputs                those of a pass whose backward has ended
        have_weights_changed  a step has changed the weights since the forward of that pass

        All ranks must call this.
        """
        self.num_searches_left -= 1
        if have_weights_changed:
            return STEP_WAS_TAKEN
        if name := _find_non_finite_parameter(backend, self.report_progress):
            return f"parameter {name}"
        if self.spec.compile is Compile.DEEPCOMPILE:
            return NO_LAYERS
        tensor = self._search_repeated_pass(backend, inputs, runs_backward=False)
        if not any(self.world.gather(tensor is not None)):
            if self.spec.resolved_grad_accumulation > 1:
                return IN_WINDOW
            # In fp16 gradients overflow in healthy runs: the loss scale is lowered after them.
            if inputs.runs_backward and self.spec.dtype is not Dtype.FP16:
                tensor = self._search_repeated_pass(backend, inputs, runs_backward=True)
            if not any(self.world.gather(tensor is not None)):
                return NOT_AGAIN
        return tensor

    def _search_repeated_pass(self, backend: Backend, inputs: PassInputs, *, runs_backward: bool) -> str | None:
        """Run the pass once more, uncompiled and without an update, and look at every tensor of it."""
        is_compiled = self.spec.compile is Compile.BLOCKS
        eager_mode = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
        inputs = replace(
            inputs,
            actor_inputs=replace(inputs.actor_inputs, head=None),
            # Without a backward no loss is looked at.
            compute_loss=inputs.compute_loss if runs_backward else torch.sum,
            builds_graph=runs_backward,
            runs_backward=runs_backward,
        )
        observer = _NonFiniteObserver(
            inputs=inputs,
            backend=backend,
            tp=self.spec.parallel.tp,
            tp_rank=self.world.mesh.get_local_rank("tp"),
            report_progress=self.report_progress,
        )
        with eager_mode, observer.hook_modules(backend.model):
            run_pass_again(backend, inputs, self.world.device, observers=[observer])
        # FSDP2 leaves parameters gathered after a forward without a backward.
        for module in backend.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return observer.first_tensor


@dataclass(kw_only=True, slots=True)
class _NonFiniteObserver(PassObserver):
    """Check the output of every module of one pass, and the gradient of each, through hooks.

    first_tensor  names the first tensor that was not finite; None: none so far
    """

    inputs: PassInputs
    backend: Backend
    tp: int
    tp_rank: int
    report_progress: Callable[[], None]
    is_in_forward: bool = True
    first_tensor: str | None = None

    def after_forward(self, log_probs_BA: Tensor, loss: Tensor) -> None:
        self.check("log-probs", log_probs_BA)
        self.is_in_forward = False

    def after_backward(self) -> None:
        if not self.inputs.runs_backward:
            return
        for name, gradient in self.backend.gradients():
            if self.first_tensor is None and not _is_finite(gradient):
                self.first_tensor = f"gradient of {name}"
            self.report_progress()

    @contextmanager
    def hook_modules(self, model: nn.Module) -> Iterator[None]:
        handles = [
            module.register_forward_hook(partial(self._check_output, name))
            for name, module in model.named_modules()
            if name
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.report_progress()
        # Gradient checkpointing computes outputs again in the backward.
        if not self.is_in_forward:
            return
        for tensor in _collect_tensors(output):
            self.check(f"output of {name}", tensor)
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(partial(self._check_gradient, name))

    def _check_gradient(self, name: str, gradient: Tensor) -> None:
        self.report_progress()
        self.check(f"gradient of the output of {name}", gradient)

    @torch.no_grad()
    def check(self, name: str, tensor: Tensor) -> None:
        if self.first_tensor is None and (position := self._describe_position(tensor)) is not None:
            self.first_tensor = name + position

    def _describe_position(self, tensor: Tensor) -> str | None:
        """Return the first position that is not finite, in words; None if there is none, or only in padding.

        The words are empty for a tensor whose rows cannot be told.
        """
        if not tensor.is_floating_point() or _is_finite(tensor):
            return None
        captured_index_BS = self.inputs.actor_inputs.captured_index
        rows = locate_token_rows(tensor, *captured_index_BS.shape, width=None, tp=self.tp, tp_rank=self.tp_rank)
        if rows is None:
            return ""
        end_token = rows.first_token + rows.values_BLF.shape[1]
        captured_index_BL = captured_index_BS[:, rows.first_token : end_token]
        is_non_finite_BL = ~torch.isfinite(rows.values_BLF).all(dim=-1) & (captured_index_BL >= 0)
        if not is_non_finite_BL.any():
            return None
        row, token = divmod(int(captured_index_BL[is_non_finite_BL].min()), self.inputs.captured_row_length)
        if self.inputs.has_reversed_rows:
            row = self.inputs.actor_inputs.action_mask_BA.shape[0] - 1 - row
        return f", row {row}, token {token}"


def _collect_tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return [value for value in values if isinstance(value, Tensor)]


def _is_finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(torch.isfinite(local).all())


def _find_non_finite_parameter(backend: Backend, report_progress: Callable[[], None]) -> str | None:
    """Return the first parameter that is not finite. Gathers all parameters, so all ranks must call this."""
    first_name = None
    for name, tensor in backend.weights():
        if first_name is None and not _is_finite(tensor):
            first_name = name
        report_progress()
    return first_name
