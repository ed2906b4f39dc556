"""A resolved replay without a model or a machine, for what only writes its options down."""

from dataclasses import dataclass, replace
from typing import Any, Self, cast

from actor_init.spec import Head
from replay.options.resolved import ResolvedChoice, ResolvedReplay
from replay.options.spec import ReplaySpec


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeReplay(ResolvedReplay):
    typed: ReplaySpec

    @classmethod
    def of(cls, spec: ReplaySpec, *choices: ResolvedChoice) -> Self:
        """A replay whose log has the options of `spec`."""
        return cls(
            actor=replace(spec.actor.with_defaults(), head=Head.WHOLE),
            inputs=spec.inputs,
            measure=spec.without_unasked_steps().measure,
            state=spec.state,
            objective=spec.objective,
            source=cast(Any, None),
            device=cast(Any, None),
            kernel="sdpa",
            choices=choices,
            typed=spec,
        )

    def to_spec(self) -> ReplaySpec:
        return self.typed
