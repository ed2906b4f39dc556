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
from replay.runner.run_pass import PassInputs, PassObserver, run_pass

MAX_SEARCHES = 4  # per run: once weights are not finite, every pass is affected
NOT_AGAIN = "nothing, when the pass was run again"
WAS_STEPPED = "unknown: the step was taken with this gradient. Try: the same without --step"
IN_WINDOW = "a gradient of this accumulation window. Try: --grad-accumulation 1"
NO_LAYERS = "unknown: DeepCompile's graph is the whole model. Try: without --deepcompile"


def is_finite(record: PassRecord) -> bool:
    """Are the loss and gradient norm finite? Callers skip an fp16 gradient norm: it overflows in healthy runs."""
    numbers = [
        *record.result.row_log_probs,
        *(n for n in (record.result.loss, record.result.grad_norm) if n is not None),
    ]
    return record.error is not None or all(map(math.isfinite, numbers))


def first_non_finite(records: Iterable[PassRecord]) -> FirstNonFinite | None:
    """Return the run's first non-finite tensor."""
    for record in records:
        if (what := record.first_non_finite) is not None:
            return FirstNonFinite(index=record.index, source=record.source, rank=record.rank, what=what)
    return None


@dataclass(kw_only=True, slots=True)
class Search:
    """Search for the first non-finite tensor on all ranks together. Calls `goes_on` after each layer."""

    spec: ActorSpec
    world: World
    goes_on: Callable[[], None]
    num_left: int = MAX_SEARCHES

    def is_wanted(self, ranks: Iterable[PassRecord]) -> bool:
        """Is a search needed? The answer is the same on every rank, given the records of all ranks."""
        ranks = list(ranks)
        if self.num_left == 0 or any(record.first_non_finite is not None for record in ranks):
            return False
        return not all(is_finite(self._judged(record)) for record in ranks)

    def _judged(self, record: PassRecord) -> PassRecord:
        return (
            replace(record, result=replace(record.result, grad_norm=None)) if self.spec.dtype is Dtype.FP16 else record
        )

    def is_any(self, loss: Tensor) -> bool:
        """Is the loss of any rank not finite? Waits for the device."""
        flag = (~torch.isfinite(loss.detach())).float().reshape(1)
        if self.world.world_size > 1:
            dist.all_reduce(flag)
        return bool(flag.item()) and self.num_left > 0

    def run(self, backend: Backend, inputs: PassInputs, *, is_stepped: bool) -> str | None:
        """Return the first non-finite tensor on this rank, None if only other ranks have one.

        inputs      those of a pass that has completed its backward
        is_stepped  a step has changed the weights since

        All ranks must call this.
        """
        self.num_left -= 1
        if is_stepped:
            return WAS_STEPPED
        if name := _of_weights(backend, self.goes_on):
            return f"parameter {name}"
        if self.spec.compile is Compile.DEEPCOMPILE:
            return NO_LAYERS
        own = self._search(backend, inputs, backward=False)
        if not any(self.world.gather(own is not None)):
            if self.spec.num_accumulated > 1:
                return IN_WINDOW
            if inputs.backward and self.spec.dtype is not Dtype.FP16:
                own = self._search(backend, inputs, backward=True)
            if not any(self.world.gather(own is not None)):
                return NOT_AGAIN
        return own

    def _search(self, backend: Backend, inputs: PassInputs, *, backward: bool) -> str | None:
        """Run the pass once more, uncompiled and without an update, and look at every tensor of it."""
        eager = torch.compiler.set_stance("force_eager") if self.spec.compile is Compile.BLOCKS else nullcontext()
        parallel = {"tp": self.spec.parallel.tp, "tp_rank": self.world.mesh.get_local_rank("tp")}
        again = replace(
            inputs,
            fed=replace(inputs.fed, head=None),
            loss_of=inputs.loss_of if backward else torch.sum,
            autograd=backward,
            backward=backward,
            weight=1.0,
            ends_window=backward,
            steps=False,
        )
        eye = _Eye(inputs=again, backend=backend, parallel=parallel, goes_on=self.goes_on)
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        with torch.random.fork_rng(devices), eager, eye.on(backend.model):
            run_pass(backend, again, observers=[eye])
        for module in backend.model.modules():
            if isinstance(module, FSDPModule):  # a forward without a backward leaves its parameters gathered
                module.reshard()
        return eye.first


@dataclass(kw_only=True, slots=True)
class _Eye(PassObserver):
    """Watch the output and gradient of every module during one pass, through hooks."""

    inputs: PassInputs
    backend: Backend
    parallel: dict[str, int]
    goes_on: Callable[[], None]
    is_forward: bool = True
    first: str | None = None

    def after_forward(self, log_probs_BA: Tensor, loss: Tensor) -> None:
        self.look("log-probs", log_probs_BA)
        self.is_forward = False

    def after_backward(self) -> None:
        if not self.inputs.backward:
            return
        for name, gradient in self.backend.gradients():
            if self.first is None and not _all_finite(gradient):
                self.first = f"gradient of {name}"
            self.goes_on()

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        named = [(name, module) for name, module in model.named_modules() if name]
        handles = [module.register_forward_hook(partial(self._sees, name)) for name, module in named]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _sees(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.goes_on()
        if not self.is_forward:  # recomputation by gradient checkpointing
            return
        for tensor in _tensors_of(output):
            self.look(f"output of {name}", tensor)
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(partial(self._sees_gradient, name))

    def _sees_gradient(self, name: str, gradient: Tensor) -> None:
        self.goes_on()
        self.look(f"gradient of the output of {name}", gradient)

    @torch.no_grad()
    def look(self, what: str, tensor: Tensor) -> None:
        if self.first is None and (place := self._place(tensor)) is not None:
            self.first = what + place

    def _place(self, tensor: Tensor) -> str | None:
        """Return the first position that is not finite, in words; None if there is none, or only in padding."""
        if not tensor.is_floating_point() or _all_finite(tensor):
            return None
        index = self.inputs.fed.captured_index
        tp, tp_rank = self.parallel["tp"], self.parallel["tp_rank"]
        held = locate_token_rows(tensor, *index.shape, width=None, tp=tp, tp_rank=tp_rank)
        if held is None:
            return ""
        own = index[:, held.first_token : held.first_token + held.values_BLF.shape[1]]
        is_bad = ~torch.isfinite(held.values_BLF).all(dim=-1) & (own >= 0)
        if not is_bad.any():
            return None
        row, token = divmod(int(own[is_bad].min()), self.inputs.num_columns)
        if self.inputs.reverses:
            row = self.inputs.fed.action_mask_BA.shape[0] - 1 - row
        return f", row {row}, token {token}"


def _tensors_of(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return [value for value in values if isinstance(value, Tensor)]


def _all_finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(torch.isfinite(local).all())


def _of_weights(backend: Backend, goes_on: Callable[[], None]) -> str | None:
    """Return the first parameter that is not finite. Gathers all parameters, so all ranks must call this."""
    first_name = None
    for name, tensor in backend.weights():
        if first_name is None and not _all_finite(tensor):
            first_name = name
        goes_on()
    return first_name
