"""Record which experts a mixture of experts chose for each token of a pass.

Hooks on the routers keep references to what they chose; at the end of the pass these are joined on their device, and
copied to the host as all else is. A forward inside a backward, by which activation checkpointing computes a layer
again, is not looked at, and neither is a compiled layer.

Shape letters: R routers, T tokens, E experts, K experts a token.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from capture.record.background_writer import warn
from capture.record.forward_hooks import is_in_backward
from capture.record.job_facts import is_compiled
from capture.record.routers import find_choice, find_routers

# The number of an expert has 16 bits on the way to the host.
_MOST_EXPERTS = 2**15


# Names of routers R, and the experts that each chose [R, T, K].
JoinedChoices = tuple[tuple[str, ...], Tensor]


class RouteRecorder:
    """Records the chosen experts of the pass that is open.

    num_routers  how many routers are looked at; 0 in a dense model
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._choices: dict[str, list[Tensor]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.num_routers = 0

    def __reduce__(self) -> tuple[type["RouteRecorder"], tuple[()]]:
        """Have deepcopy and pickle make a recorder that records nothing: the copy of a model is another model."""
        return type(self), ()

    def attach(self, model: nn.Module) -> None:
        """Hook the routers of `model`, in front of hooks that change what they return, as expert parallelism's do."""
        compiled = [name for name, module in model.named_modules() if is_compiled(module)]
        for name, router in find_routers(model).items():
            if any(outer == "" or f"{name}.".startswith(f"{outer}.") for outer in compiled):
                continue
            self._handles.append(router.register_forward_hook(_OutputHook(self, name), prepend=True))
            experts = getattr(router, "experts", None)
            if isinstance(experts, nn.Module):
                self._handles.append(
                    experts.register_forward_pre_hook(_InputHook(self, name), with_kwargs=True, prepend=True)
                )
            self.num_routers += 1

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.begin(0)

    def begin(self, num_tokens: int) -> None:
        """Begin a pass of so many tokens, 0 for one that is not recorded, and forget the one before."""
        self._num_tokens, self._choices = num_tokens, {}

    def take(self) -> list[JoinedChoices]:
        """End the pass, and return what its routers chose, int16 on its device: one tensor for those of one shape.

        Left out are routers that ran more than once, or chose for another number of tokens than the pass has, as where
        the job took the padding out before.
        """
        choices, num_tokens = self._choices, self._num_tokens
        self.begin(0)
        by_shape: dict[tuple[Any, ...], dict[str, Tensor]] = {}
        for name, tensors in choices.items():
            choice_TK = tensors[0]
            if len(tensors) == 1 and len(choice_TK) == num_tokens and type(choice_TK) is Tensor:
                alike = by_shape.setdefault((choice_TK.shape, choice_TK.device, choice_TK.dtype), {})
                alike[name] = choice_TK.detach()
        return [
            (tuple(alike), torch.stack(list(alike.values())).to(torch.int16)) for alike in by_shape.values() if alike
        ]

    def add(self, name: str, choice: Tensor | None) -> None:
        if choice is not None:
            self._choices.setdefault(name, []).append(choice)

    def is_looking(self) -> bool:
        return self._num_tokens > 0 and not torch.compiler.is_compiling() and not is_in_backward()

    def stop(self, error: Exception) -> None:
        """Record no more routes: a failure must not reach the job."""
        self.remove()
        self.num_routers = 0
        warn(f"capture: no routes of experts are kept from here on: {type(error).__name__}: {error}")


class _OutputHook:
    """Keeps what a router has chosen. It holds the recorder weakly: a copy of the model must not copy a pass."""

    def __init__(self, recorder: RouteRecorder | None = None, name: str = "") -> None:
        self._recorder = weakref.ref(recorder) if recorder is not None else None
        self._name = name

    def __reduce__(self) -> tuple[type["_OutputHook"], tuple[()]]:
        return type(self), ()

    def __call__(self, router: nn.Module, args: Any, output: Any) -> None:
        self._keep(lambda: _read_choice(router, output))

    def _keep(self, read_choice: Callable[[], Tensor | None]) -> None:
        recorder = self._recorder() if self._recorder is not None else None
        if recorder is None or not recorder.is_looking():
            return
        try:
            recorder.add(self._name, read_choice())
        except Exception as error:
            recorder.stop(error)


class _InputHook(_OutputHook):
    """Keeps the choice that a block gave to its experts."""

    def __call__(self, experts: nn.Module, args: Any, kwargs: Any) -> None:
        self._keep(lambda: find_choice((*args, *kwargs.values())))


def _read_choice(router: nn.Module, output: Any) -> Tensor | None:
    """Read the chosen experts [T, K] of a router's output: numbers, or scores [T, E] that are 0 for all others."""
    if (choice := find_choice(output)) is not None:
        return choice
    num_chosen, num_experts = getattr(router, "top_k", None), getattr(router, "num_experts", None)
    scores_TE = output[0] if isinstance(output, tuple) and output else None
    if not isinstance(num_chosen, int) or type(scores_TE) is not Tensor or not scores_TE.is_floating_point():
        return None
    if len(output) < 2 or scores_TE.ndim != 2 or scores_TE.shape[1] != num_experts or num_experts > _MOST_EXPERTS:
        return None
    return scores_TE.detach().topk(num_chosen, dim=1).indices
