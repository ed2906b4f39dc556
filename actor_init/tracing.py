"""Sketch what the layers compute in one pass and the gradients they receive, with hooks that change no value.

A traced tensor has a row for each real token that this rank was fed, independent of row, slice or padding.

Shape letters: B rows and S tokens a row as fed, T real tokens among them, K signs of a sketch.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from actor_init.inputs.packing import ActorInputs
from actor_init.model import find_blocks, share_meta_model
from actor_init.parallel.token_rows import locate_token_rows
from actor_init.spec import ActorSpec, Compile
from actor_init.world import World

# What of a model is traced, in the words of a trace.
TRACED_PARTS = {
    Compile.OFF: "modules",
    Compile.BLOCKS: "blocks",
    Compile.DEEPCOMPILE: "no layer",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedTensor:
    """One tensor of a pass.

    name       the module's name in Hugging Face's model
    what       "output" or "input"; numbered from the second element of a tuple and from the second call on
    is_part    the parts of all tp ranks add up to the whole
    sketch_TK  fp32, on the host
    """

    name: str
    what: str
    is_gradient: bool
    is_part: bool
    sketch_TK: Tensor


class LayerTracer:
    """Trace modules of `model` through hooks: between `begin` and `take` they record forward, then backward.

    Compiled blocks are seen from outside only, because hooks inside would change the graph. Under DeepCompile, whose
    graph is the whole model, nothing is traced.
    """

    def __init__(self, model: PreTrainedModel, config: PretrainedConfig, spec: ActorSpec, world: World) -> None:
        self._ranks = {"tp": spec.parallel.tp, "tp_rank": world.mesh.get_local_rank("tp")}
        self._inputs: ActorInputs | None = None
        self._takes_forward = False
        self._gradient_scale = 1.0
        self._traced: list[TracedTensor] = []
        self._calls: Counter[tuple[str, str]] = Counter()
        # A module may call itself, as with functional_call: only the outermost call is traced.
        self._call_depth: Counter[str] = Counter()
        # The tensors traced in this block are kept alive, so that no other tensor gets their memory: `_is_same`
        # compares addresses.
        self._live_tensors: list[Tensor] = []
        # The widths are those of the whole model, because a module's own width may be a rank's share.
        self._widths = {
            name: (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (module.nx, module.nf)
            for name, module in share_meta_model(config).named_modules()
            if isinstance(module, (nn.Linear, Conv1D))
        }
        self._with_all_heads = {
            name for name, module in model.named_modules() if getattr(module, "has_all_heads", False)
        }
        blocks = dict(find_blocks(model))
        for name, module in list_traced_modules(model, spec.compile):
            module.register_forward_pre_hook(partial(self._record_input, name))
            module.register_forward_hook(partial(self._record_output, name, name in blocks))

    def begin(self, inputs: ActorInputs, loss_factor: float) -> None:
        """Begin a pass whose loss backward multiplies by `loss_factor`. Untaken tensors of an earlier pass are
        dropped.
        """
        self._inputs = inputs
        self._takes_forward = True
        # Ring attention multiplies the gradient by the ring's size: see sum_over_ring.
        self._gradient_scale = loss_factor * (inputs.ring.group.size() if inputs.ring else 1)
        self._traced, self._live_tensors = [], []
        self._calls.clear()
        self._call_depth.clear()

    def end_forward(self) -> None:
        """Mark the end of forward: what runs from here on is backward and recomputation."""
        self._takes_forward = False
        self._live_tensors = []

    def take(self) -> list[TracedTensor]:
        """Return the tensors traced since `begin`, in order of execution."""
        self._inputs = None
        taken, self._traced = self._traced, []
        return taken

    def _record_input(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep what a norm is given, and what a projection is given unless it is another module's output: the result of
        attention or of an activation function.
        """
        if not self._takes_forward:
            return
        self._call_depth[name] += 1
        has_parameters = any(True for _ in module.parameters(recurse=False))
        if self._call_depth[name] == 1 and has_parameters and args and isinstance(args[0], Tensor):
            is_projection = name in self._widths
            width = self._widths[name][0] if is_projection else None
            self._record(name, "input", args[0], width, is_sum=not is_projection)

    def _record_output(self, name: str, is_block: bool, module: nn.Module, args: Any, output: Any) -> None:
        if not self._takes_forward:
            return
        self._call_depth[name] -= 1
        if self._call_depth[name]:
            return
        width = self._widths[name][1] if name in self._widths else None
        for number, tensor in enumerate(find_result_tensors(output)):
            self._record(name, f"output {number + 1}" if number else "output", tensor, width)
        if is_block:
            self._live_tensors = []

    @torch.no_grad()
    def _record(self, name: str, what: str, tensor: Tensor, width: int | None, *, is_sum: bool = False) -> None:
        """Sketch a tensor, and its gradient later.

        is_sum  what a norm is given: the sum with the residual, or a module's output in code that leaves one out, so it
                is kept in any case. Its gradient is not: under ZeRO 3 a norm is given another tensor than the residual
                goes on with.
        """
        if not tensor.is_floating_point():
            return
        if not is_sum and any(_is_same(tensor, other) for other in self._live_tensors):
            return
        number = self._calls[name, what]
        called = f"{what}, call {number + 1}" if number else what
        traced = self._sketch_tensor(name, called, tensor, width)
        if traced is None:
            return
        self._calls[name, what] += 1
        if not is_sum:
            self._live_tensors.append(tensor)
        self._traced.append(traced)
        if not is_sum and tensor.requires_grad:
            tensor.register_hook(partial(self._record_gradient, name, called, width))

    @torch.no_grad()
    def _record_gradient(self, name: str, what: str, width: int | None, gradient: Tensor) -> None:
        if self._inputs is None:
            return
        traced = self._sketch_tensor(name, what, gradient, width)
        assert traced is not None, f"the gradient of {name} has another shape than its {what}"
        self._traced.append(replace(traced, is_gradient=True, sketch_TK=traced.sketch_TK / self._gradient_scale))

    def _sketch_tensor(self, name: str, what: str, tensor: Tensor, width: int | None) -> TracedTensor | None:
        assert self._inputs is not None
        rows, num_tokens = self._inputs.captured_index.shape
        all_heads = name in self._with_all_heads
        held_rows = locate_token_rows(tensor, rows, num_tokens, width=width, has_all_heads=all_heads, **self._ranks)
        if held_rows is None:
            return None
        row_T, token_T = (self._inputs.captured_index >= 0).nonzero(as_tuple=True)
        sketch_TK = held_rows.sketch_tokens(row_T, token_T).cpu()
        return TracedTensor(name=name, what=what, is_gradient=False, is_part=held_rows.is_part, sketch_TK=sketch_TK)


def list_traced_modules(model: PreTrainedModel, compiled: Compile) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules outside the blocks, the blocks, and in these their children and modules with parameters.

    Without those inside compiled blocks, where hooks would change the graph; none at all under DeepCompile.
    """
    if compiled is Compile.DEEPCOMPILE:
        return
    blocks = dict(find_blocks(model))
    # For the block "model.layers.0" the trunk is "model".
    trunk = next(iter(blocks)).rpartition(".")[0].rpartition(".")[0]
    for name, module in model.named_modules():
        above, _, _ = name.rpartition(".")
        block = next((block for block in blocks if name.startswith(f"{block}.")), None)
        if block is not None:
            is_traced = compiled is Compile.OFF and (above == block or any(True for _ in module.parameters(False)))
        else:
            is_traced = bool(name) and name != trunk and above in ("", trunk) and not isinstance(module, nn.ModuleList)
        if name in blocks or is_traced:
            yield name, module


def find_result_tensors(output: Any) -> list[Tensor]:
    """Return a module's result; for a tuple the first, or all if they are alike, such as cosines and sines."""
    if isinstance(output, Tensor):
        return [output]
    tensors = [tensor for tensor in output if isinstance(tensor, Tensor)] if isinstance(output, (tuple, list)) else []
    return tensors if len({tensor.shape for tensor in tensors}) == 1 else tensors[:1]


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Are the values the same, perhaps in another object? Libraries pass tensors through functions that only hook
    backward.
    """
    first, second = (value.to_local() if isinstance(value, DTensor) else value for value in (tensor, other))
    has_same_memory = first.data_ptr() == second.data_ptr() and first.shape == second.shape
    return has_same_memory and first._version == second._version


@contextmanager
def watch_modules(
    model: PreTrainedModel, compiled: Compile, on_begin: Callable[[str], None], on_end: Callable[[str, Any], None]
) -> Iterator[None]:
    """Call `on_begin` with a module's name, and `on_end` with its name and output, around each forward.

    The modules are those that a trace would tell apart. `on_end` is called too where a forward raises.
    """

    def before(name: str) -> Callable[..., None]:
        return lambda *_: on_begin(name)

    def after(name: str) -> Callable[..., None]:
        return lambda _module, _arguments, output: on_end(name, output)

    with ExitStack() as hooks:
        for name, module in list_traced_modules(model, compiled):
            hooks.callback(module.register_forward_pre_hook(before(name)).remove)
            hooks.callback(module.register_forward_hook(after(name), always_call=True).remove)
        yield
