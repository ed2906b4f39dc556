"""Send the tokens of a mixture of experts to the experts that the job chose, in place of those chosen here.

A router computes its scores as ever, and its call of `topk` chooses: that call is answered with the recorded experts
and their scores here, so what the model makes of scores (a softmax, a norm over the chosen ones, a factor) stays its
own. Where groups of experts are chosen first, those of the recorded experts are among them. A graph of torch.compile
holds the change like any code.

Each answer is held against the choice that the scores make here. A token *flips* where the two are other experts. Its
*distance* is the error of the router's logits, relative to their root mean square, that explains the flip: two experts'
scores may change places by rounding if they are that close.

Shape letters: T fed tokens, E experts, K experts a token, G groups of experts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from capture.record.routers import calls_topk, find_routers

TOPK = (torch.topk, Tensor.topk)
SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
SIGMOID = (torch.sigmoid, Tensor.sigmoid, F.sigmoid)
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# A sigmoid's slope is a quarter at most, a group's score adds two of them, and two groups are compared.
SIGMOID_GROUP_SLOPE = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRoutes:
    """What the routers of one pass are to do.

    recorded      by router, the job's experts [T, K] of each token that is fed, -1 where they are not known
    forces        the tokens go to the recorded experts; otherwise these are only compared with the choice made here
    logits_index  by each router whose logits are kept for a loss, which of its outputs they are
    """

    recorded: Mapping[str, Tensor] = field(default_factory=dict)
    forces: bool = True
    logits_index: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterFlips:
    """How one router's choice here differs from the job's.

    num_tokens  how many tokens the job's choice is known of
    distances   of each token that flips, on the CPU
    """

    router: str
    num_tokens: int
    distances: Sequence[float]


class RouterState:
    """What one router is to do in the running pass, and what was seen of it.

    Compiled code reads and sets these attributes.
    """

    def __init__(self) -> None:
        self.recorded_TK: Tensor | None = None
        self.forces = True
        self.logits_index: int | None = None
        self.logits_TE: Tensor | None = None
        self.is_flipped_T: Tensor | None = None
        self.distance_T: Tensor | None = None

    def begin(self, recorded_TK: Tensor | None, *, forces: bool = True, logits_index: int | None = None) -> None:
        self.recorded_TK, self.forces, self.logits_index = recorded_TK, forces, logits_index
        self.logits_TE = self.is_flipped_T = self.distance_T = None

    def keep_logits(self, output: Any) -> None:
        """Keep the logits in a router's output. A layer that is computed again, in a backward, is not seen anew."""
        if self.logits_index is not None and self.logits_TE is None:
            self.logits_TE = output[self.logits_index] if isinstance(output, tuple) else output


class _RouterMode(TorchFunctionMode):
    """Watches the calls of one router's forward until it has chosen experts."""

    def __init__(self, router: nn.Module, state: RouterState) -> None:
        super().__init__()
        self._state = state
        self._num_experts, self._group_counts = _count_experts(router), _count_groups(router)
        self._logits: Tensor | None = None
        self._activated: Tensor | None = None
        self._slope = ""
        self._groups_distance: Tensor | None = None
        self._has_chosen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._has_chosen:
            return output
        if func in SOFTMAX or func in SIGMOID:
            # Not the output of a linear layer: that of ZeRO 3 is an autograd function, in which torch.compile cannot
            # set an attribute. It would break the graph in this method, and the mode would answer its own call.
            self._logits = args[0] if args else (kwargs or {})["input"]
            self._activated, self._slope = output, "softmax" if func in SOFTMAX else "sigmoid"
        elif func in TOPK and args[0].ndim == 2:
            return self._choose(func, output, args, kwargs or {})
        return output

    def _choose(self, func: Callable[..., Any], output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of `topk` over groups or experts."""
        state, scores = self._state, args[0]
        recorded_TK = state.recorded_TK
        if scores.shape[1] in self._group_counts and scores.shape[1] != self._num_experts:
            if recorded_TK is None or not state.forces:
                return output
            return self._choose_groups(func, output, args, kwargs, recorded_TK)
        self._has_chosen = True
        if recorded_TK is None or output[1].shape != recorded_TK.shape:
            return output
        own_TK = output[1]
        is_known_TK = (recorded_TK >= 0) & (recorded_TK < scores.shape[1])
        chosen_TK = torch.where(is_known_TK, recorded_TK, own_TK)
        if state.is_flipped_T is None:
            state.is_flipped_T, state.distance_T = self._compare(scores.detach(), own_TK, chosen_TK)
        if not state.forces:
            return output
        return torch.return_types.topk((scores.gather(1, chosen_TK), chosen_TK))

    def _choose_groups(
        self,
        func: Callable[..., Any],
        output: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        recorded_TK: Tensor,
    ) -> Any:
        """Choose the groups of the recorded experts first, and those with the best scores for the places left."""
        scores_TG, own = args[0], output[1]
        num_groups = scores_TG.shape[1]
        if self._num_experts is None or self._num_experts % num_groups:
            return output
        group_TK = recorded_TK.clamp(min=0) // (self._num_experts // num_groups)
        needed_TG = torch.zeros_like(scores_TG, dtype=torch.int32)
        needed_TG = needed_TG.scatter_add(1, group_TK, (recorded_TK >= 0).to(torch.int32)) > 0
        chosen = func(scores_TG.detach().masked_fill(needed_TG, float("inf")), *args[1:], **kwargs)[1]
        self._groups_distance = self._measure_distance(scores_TG.detach(), own, chosen, of_groups=True)
        return torch.return_types.topk((scores_TG.gather(1, chosen), chosen))

    def _compare(self, scores_TE: Tensor, own_TK: Tensor, chosen_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tokens flip [T], and their distances [T]; 0 for the others."""
        distance_T = self._measure_distance(scores_TE, own_TK, chosen_TK, of_groups=False)
        if self._groups_distance is not None:
            distance_T = torch.maximum(distance_T, self._groups_distance)
        # A distance of 0 may be a flip, of two scores that are equal.
        return distance_T >= 0, distance_T.clamp(min=0)

    def _measure_distance(self, scores: Tensor, own: Tensor, chosen: Tensor, *, of_groups: bool) -> Tensor:
        """Measure the distance of each token, -1 where both chose the same.

        It is that of the farthest pair: the best of those that were chosen here alone, the worst of those that the job
        alone chose.
        """
        is_left_out = ~(own[:, :, None] == chosen[:, None, :]).any(dim=2)
        is_taken_instead = ~(chosen[:, :, None] == own[:, None, :]).any(dim=2)
        better, place = scores.gather(1, own).masked_fill(~is_left_out, float("-inf")).max(dim=1)
        worse, other_place = scores.gather(1, chosen).masked_fill(~is_taken_instead, float("inf")).min(dim=1)
        best_T1, worst_T1 = own.gather(1, place[:, None]), chosen.gather(1, other_place[:, None])
        logits = scores if self._logits is None else self._logits.detach()
        size_T = logits.float().square().mean(dim=1).sqrt()
        slope_T: Tensor | float = 2.0
        activated = self._activated.detach() if self._activated is not None else None
        if of_groups:
            slope_T = better + worse if self._slope == "softmax" else SIGMOID_GROUP_SLOPE
            slope_T = slope_T if self._slope else 2.0
        elif activated is not None and activated.shape == scores.shape:
            pair = activated.gather(1, torch.cat([best_T1, worst_T1], dim=1)).float()
            slope_T = (pair if self._slope == "softmax" else pair * (1 - pair)).sum(dim=1)
        distance_T = (better - worse).float() / (size_T * slope_T).clamp(min=1e-30)
        return torch.where(is_taken_instead.any(dim=1), distance_T.clamp(min=0), -1.0)


def _count_experts(router: nn.Module) -> int | None:
    """Return over how many experts a router chooses, by its attributes; None if none tells."""
    counts = [
        value
        for name, value in vars(router).items()
        if type(value) is int and name.endswith("experts") and not any(word in name for word in ("shared", "zero"))
    ]
    return max(counts, default=None)


def _count_groups(router: nn.Module) -> frozenset[int]:
    """Return the numbers of groups of experts that a router's attributes name."""
    return frozenset(
        value for name, value in vars(router).items() if type(value) is int and "group" in name and "top" not in name
    )


def attach_to_routers(model: nn.Module, others: Iterable[str] = ()) -> dict[str, RouterState]:
    """Wrap the forward of each router that chooses by `topk`, once, and return their states by name.

    others  names of modules to wrap besides, which compute a router's logits
    """
    states: dict[str, RouterState] = {}
    routers = list_steered_routers(model)
    for name, router in {**routers, **{name: model.get_submodule(name) for name in others}}.items():
        if "_route_state" not in router.__dict__:
            _wrap_forward(router)
        states[name] = router.__dict__["_route_state"]
    return states


def list_steered_routers(model: nn.Module) -> dict[str, nn.Module]:
    """List the routers whose choice can be made for them: those that choose by `topk`."""
    return {name: router for name, router in find_routers(model).items() if calls_topk(router)}


def _wrap_forward(router: nn.Module) -> None:
    state, forward = RouterState(), router.forward

    def choose_as_recorded(*args: Any, **kwargs: Any) -> Any:
        if state.recorded_TK is None:
            output = forward(*args, **kwargs)
        else:
            with _RouterMode(router, state):
                output = forward(*args, **kwargs)
        state.keep_logits(output)
        return output

    router.__dict__["_route_state"] = state
    router.__dict__["forward"] = choose_as_recorded


@contextmanager
def steer_routers(model: nn.Module, routes: PassRoutes) -> Iterator[Mapping[str, RouterState]]:
    """Have the routers of `model` do as `routes` say, in the forward and backward inside the block.

    A block inside another one leaves the other's states as they were: before a step, a pass may be searched for what is
    not finite. Yields the states of the routers by name, in the model's order.
    """
    states = attach_to_routers(model, routes.logits_index)
    outer_states = {name: dict(vars(state)) for name, state in states.items()}
    try:
        for name, state in states.items():
            recorded_TK = routes.recorded.get(name)
            if recorded_TK is not None:
                from torch._dynamo import maybe_mark_dynamic

                maybe_mark_dynamic(recorded_TK, 0)
            state.begin(recorded_TK, forces=routes.forces, logits_index=routes.logits_index.get(name))
        yield states
    finally:
        for name, state in states.items():
            vars(state).update(outer_states[name])


def collect_flips(states: Mapping[str, RouterState]) -> list[RouterFlips]:
    """Collect, of each router that was compared, the tokens that flip. Waits for the device."""
    flips = []
    for name, state in states.items():
        if state.recorded_TK is None or state.is_flipped_T is None or state.distance_T is None:
            continue
        distances = state.distance_T[state.is_flipped_T].double().tolist()
        num_tokens = int((state.recorded_TK[:, 0] >= 0).sum())
        flips.append(RouterFlips(router=name, num_tokens=num_tokens, distances=distances))
    return flips


def match_routers(job_names: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Match the routers of a job with those here: one of the two names ends with the other.

    Wrappers inside a name, as FSDP and activation checkpointing add them, do not count. Returns the job's name by the
    name here.
    """
    job_by_parts = {_split_name(name): name for name in job_names}
    matches: dict[str, str] = {}
    for name in names:
        parts = _split_name(name)
        for job_parts, job_name in job_by_parts.items():
            shorter = min(len(parts), len(job_parts))
            if parts[-shorter:] == job_parts[-shorter:]:
                matches[name] = job_name
    return matches


def _split_name(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split(".") if part not in WRAPPERS)


def place_routes(choice_TK: Tensor, captured_index: Tensor) -> Tensor:
    """Place a router's recorded experts at the tokens that are fed; -1 where a token is none of the capture's.

    choice_TK       by the captured ids, flattened
    captured_index  of each fed token; -1 for padding
    """
    index_T = captured_index.flatten()
    placed_TK = choice_TK.to(index_T.device, torch.int64)[index_T.clamp(min=0)]
    return torch.where(index_T[:, None] >= 0, placed_TK, -1)
