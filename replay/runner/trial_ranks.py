"""Say what a trial is on one rank, and join what the ranks found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from actor_init.world import World
from replay.options.resolved import ResolvedReplay
from replay.runner.trial_feeds import Feed
from replay.runner.trial_forward import ModelChange
from replay.verdict.causes.cause import CauseName
from replay.verdict.causes.trial import TrialMatch, TrialResult, join_matches


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialForward:
    """What one forward of a trial is: what it is fed, and what the model is changed to.

    feed      None: these rows cannot tell the hypothesis, and the unchanged pass runs in its place
    change    None: the model stays as it is
    coarsens  the numbers are those of a coarser dtype
    is_stated, is_of_stated_code  as in `TrialResult`
    """

    cause: CauseName
    says: str
    try_next: str
    feed: Feed | None
    change: ModelChange | None = None
    coarsens: bool = False
    is_stated: bool = False
    is_of_stated_code: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialVariant:
    """A trial that needs an actor of its own.

    derive_spec  of the actor. Raises UsageError where it is not possible here
    is_stated    the recording states the change
    """

    name: str
    cause: CauseName
    says: str
    try_next: str
    derive_spec: Callable[[], ResolvedReplay]
    coarsens: bool = False
    is_stated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTrial:
    """What a trial came to on this rank; the fields are those of `TrialResult`."""

    match: TrialMatch
    cause: CauseName
    says: str
    try_next: str
    is_stated: bool = False
    is_of_stated_code: bool = False
    is_of_gradient: bool = False


def join_ranks(own: Mapping[str, OwnTrial], world: World, *, is_wrong: bool) -> list[TrialResult]:
    """Join what the ranks found: a hypothesis has to hold on each rank whose unchanged pass is wrong.

    own       this rank's trials by name
    is_wrong  this rank's unchanged pass is wrong

    All ranks must call this.
    """
    are_wrong: list[bool] = world.gather(is_wrong)
    ranks = [rank for rank, is_rank_wrong in enumerate(are_wrong) if is_rank_wrong]
    where = "" if all(are_wrong) else f", on rank {', '.join(map(str, ranks))} alone"
    by_rank: list[Mapping[str, OwnTrial]] = world.gather(own)
    wrong_ranks = [by_rank[rank] for rank in ranks]
    results: list[TrialResult] = []
    for name in dict.fromkeys(name for trials in wrong_ranks for name in trials):
        found = [trials.get(name) for trials in wrong_ranks]
        first = next(trial for trial in found if trial is not None)
        joined = join_matches([TrialMatch(agrees=False) if trial is None else trial.match for trial in found])
        results.append(
            TrialResult(
                name=name,
                cause=first.cause,
                says=f"{first.says}{where}",
                try_next=first.try_next,
                agrees=joined.agrees,
                gain=joined.gain,
                num_values=joined.num_values,
                is_stated=first.is_stated,
                is_of_stated_code=first.is_of_stated_code,
                is_of_gradient=first.is_of_gradient,
            )
        )
    return results
