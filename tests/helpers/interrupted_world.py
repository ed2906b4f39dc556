"""A world in which Ctrl-C comes at a place that a test chooses."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from actor_init.world import World


@dataclass(frozen=True, kw_only=True)
class InterruptedWorld(World):
    """Ctrl-C comes as ranks tell each other a value of the chosen kind, behind as many such values."""

    is_chosen: Callable[[Any], bool]
    num_told_before: int
    told: list[Any] = field(default_factory=list)

    @classmethod
    def from_world(cls, world: World, is_chosen: Callable[[Any], bool], num_told_before: int) -> Self:
        return cls(
            rank=world.rank,
            world_size=world.world_size,
            device=world.device,
            mesh=world.mesh,
            weights_mesh=world.weights_mesh,
            is_chosen=is_chosen,
            num_told_before=num_told_before,
        )

    def gather(self, value: Any) -> list[Any]:
        if self.is_chosen(value):
            if len(self.told) == self.num_told_before:
                raise KeyboardInterrupt
            self.told.append(value)
        return super().gather(value)
