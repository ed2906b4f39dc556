"""Step with several optimizers as one: the schedule, the loss scale and a saved state see one optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class CombinedOptimizer(Optimizer):
    """Several optimizers with one list of groups and one state. They step in their order.

    A job may step on its matrices with one class and on its vectors with another, and a group may be of either.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = tuple(members)
        self._num_groups = [len(member.param_groups) for member in members]
        super().__init__([group for member in members for group in member.param_groups], {})
        self._share_state()

    def _share_state(self) -> None:
        """Let the members have this optimizer's groups and state, which loading a state replaces."""
        begin = 0
        for member, num_groups in zip(self.members, self._num_groups, strict=True):
            member.param_groups = self.param_groups[begin : begin + num_groups]
            member.state = self.state
            begin += num_groups

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share_state()
        # A member's own rule gives settings that an older state lacks their defaults.
        for member in self.members:
            member.__setstate__({"state": self.state, "param_groups": member.param_groups})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            member.step()
        return loss
