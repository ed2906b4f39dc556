"""Hold what was asked of `replay worst`, and parse what `--predict` asks for: a configuration that was not measured."""

from dataclasses import dataclass, replace

from actor_init.spec import ActorSpec, UsageError
from capture.facts import Setting
from replay.options.spec import ReplaySpec

PREDICTED_OPTIONS = ("num-layers", "zero-stage", "ranks", "tp", "ring")
EXAMPLE = Setting("predict", "num-layers=32,zero-stage=3,ranks=8")


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherConfiguration:
    """Another configuration: `actor` is all of it, `alone` is what one rank can run of it, to be measured."""

    text: str
    actor: ActorSpec
    alone: ActorSpec
    # Data ranks, each of which is fed inputs of its own.
    ranks: int

    @property
    def num_processes(self) -> int:
        return self.ranks * self.actor.parallel.tp * self.actor.parallel.ring


def parse_configuration(text: str, actor: ActorSpec) -> OtherConfiguration:
    """Read `num-layers=32,ranks=8` as a change of `actor`. Raises UsageError for anything else."""
    numbers: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in PREDICTED_OPTIONS or name in numbers or not number.isascii() or not number.isdigit():
            advice = f"Give each of {', '.join(PREDICTED_OPTIONS)} at most once, as {EXAMPLE}"
            raise UsageError(Setting("predict", text), f": {part!r} is not allowed", advice)
        numbers[name] = int(number)
        if numbers[name] < 1 and name != "zero-stage":
            raise UsageError(Setting("predict", text), f": {name} is at least 1", f"Try: {EXAMPLE}")
    if (actor.parallel.tp > 1 and "tp" in numbers) or (actor.parallel.ring > 1 and "ring" in numbers):
        why = f"needs a measurement without {Setting('tp')} and {Setting('ring')}"
        raise UsageError(Setting("predict", text), why, "Leave them out")
    alone = replace(actor, zero_stage=numbers.get("zero-stage", actor.zero_stage))
    parallel = replace(
        actor.parallel, tp=numbers.get("tp", actor.parallel.tp), ring=numbers.get("ring", actor.parallel.ring)
    )
    whole_actor = replace(alone, num_layers=numbers.get("num-layers", actor.num_layers), parallel=parallel)
    return OtherConfiguration(text=text, actor=whole_actor, alone=alone, ranks=numbers.get("ranks", 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstPlan:
    """Which inputs to rank, how many of them to measure, and which other configurations to predict."""

    spec: ReplaySpec
    num_measured: int
    num_shown: int
    checks: bool
    predict: list[str]

    @property
    def others(self) -> list[OtherConfiguration]:
        """Return the other configurations. Raises UsageError for one that cannot be."""
        return [parse_configuration(text, self.spec.actor) for text in self.predict]
