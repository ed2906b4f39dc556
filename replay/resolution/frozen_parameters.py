"""Find the parameters that a job did not train: throughout, or before or after some of its steps."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from actor_init.declarations.backends import find_backend_declaration
from actor_init.model import ModelSource
from actor_init.spec import ActorSpec
from capture.file_format.actor_config import read_frozen_names
from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import CaptureError
from capture.file_format.model_facts import ModelFacts, read_model_facts, select_part
from capture.file_format.name_patterns import PatternTable
from capture.record.model_facts_taker import MAX_CHANGES
from capture.record.trained_flags import NUM_A_PASS
from replay.options.spec import ReplayParts
from replay.resolution.job_defaults import find_inputs_folder
from replay.resolution.windows import InputRound
from replay.verdict.weight_check import WeightChecker


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenParameters:
    """The names here of the parameters that the job did not train.

    always  those that it trained in no pass
    later   those that it did not train besides, by the forward from which on that is so; empty: they are the same in
            all passes, or this backend cannot change what it trains
    first_forward_with_other_trained_parameters  the job's first forward that trained other parameters than the forwards
            before it, if this backend cannot change what it trains; else None
    """

    always: frozenset[str] = frozenset()
    later: Mapping[int, frozenset[str]] = field(default_factory=dict)
    first_forward_with_other_trained_parameters: int | None = None


def find_frozen_in_job(
    spec: ReplayParts,
    source: ModelSource,
    checker: WeightChecker,
    first_call: CapturedCall | None,
    rounds: Sequence[InputRound],
) -> FrozenParameters:
    """Find the parameters that the job did not train.

    A plain module has no config in a file beside its captures: what the recording states of its parameters tells them.

    Where the job had an adapter, none are returned: the job froze all other parameters, and if the adapter is merged
    into the weights here, those are trained. The names that lie beside the captures are returned only if the first pass
    had as many frozen parameters.
    """
    if first_call is None or source.adapter is not None:
        return FrozenParameters()
    folder = find_inputs_folder(spec.inputs)
    try:
        all_facts = read_model_facts(folder)
    except CaptureError:
        # The comparison of the models says which file cannot be read. Nothing is known of what was frozen.
        all_facts = []
    stated = [
        select_part(facts, checker.names)
        for facts in all_facts
        if facts.recording == first_call.recording and facts.trains
    ]
    later = date_changes(stated, checker.names, rounds)
    first_forward_with_other_trained_parameters = (
        sorted(later)[1] if later and not _can_change_frozen(spec.actor) else None
    )
    if later and first_forward_with_other_trained_parameters is None:
        always = frozenset.intersection(*later.values())
        return FrozenParameters(
            always=always, later={forward: names - always for forward, names in sorted(later.items())}
        )
    names: Sequence[str] = read_frozen_names(folder)
    if not names and stated:
        names = sorted(_list_frozen_first(stated[0], checker.names))
    num_frozen = None if first_call.weights is None else first_call.weights.num_frozen
    if not names or num_frozen != len(names):
        return FrozenParameters(first_forward_with_other_trained_parameters=first_forward_with_other_trained_parameters)
    return FrozenParameters(
        always=checker.translate_names(names),
        first_forward_with_other_trained_parameters=first_forward_with_other_trained_parameters,
    )


def _can_change_frozen(actor: ActorSpec) -> bool:
    """Tell whether the optimizer can pass over a parameter in a step; one that steps flat pieces of several cannot."""
    return not find_backend_declaration(actor.backend).cuts_parameters(actor)


def _list_frozen_first(facts: ModelFacts, names: Collection[str]) -> frozenset[str]:
    """List the parameters of a model that the facts of the job's model call frozen in the first pass that trained."""
    table = PatternTable(facts.parameters)
    entries = {name: table.find(name) for name in names}
    return frozenset(name for name, entry in entries.items() if entry is not None and not entry[1]["trained"])


def date_changes(
    stated: Sequence[ModelFacts], names: Collection[str], rounds: Sequence[InputRound]
) -> dict[int, frozenset[str]]:
    """Return what was frozen, by the first forward of a step; empty where that is not known of all changes.

    stated  of each rank, of passes that train
    """
    by_rank = [_date_changes_of_rank(facts, names, rounds) for facts in stated if facts.frozen_later]
    is_known = len({facts.rank for facts in stated}) == len(by_rank) and all(
        changes == by_rank[0] for changes in by_rank
    )
    return by_rank[0] if by_rank and is_known else {}


def _date_changes_of_rank(
    facts: ModelFacts, names: Collection[str], rounds: Sequence[InputRound]
) -> dict[int, frozenset[str]]:
    """Return what `date_changes` does, from the facts of one rank."""
    # The recorder looks at so many modules in a pass, in turn, so that it notes a change up to so many passes late.
    num_modules = len({name.rpartition(".")[0] for name in names})
    num_late = -(-num_modules // NUM_A_PASS) - 1
    changes = {int(forward): patterns for forward, patterns in facts.frozen_later.items()}
    passes = [
        (job_pass.forward, job_pass.num_steps_before)
        for input_round in rounds
        for job_pass in input_round.job_passes
        if input_round.trains and job_pass.rank == facts.rank and job_pass.forward is not None
    ]
    firsts = {after for (_, number), (after, other) in pairwise(passes) if number != other}
    if len(changes) >= MAX_CHANGES or not passes:
        return {}
    dated = {passes[0][0]: _list_frozen_first(facts, names)}
    for noted, patterns in sorted(changes.items()):
        affected = {
            next((forward for forward, _ in passes if forward >= change), None)
            for change in range(noted - num_late, noted + 1)
        }
        at_steps = [forward for forward in affected if forward in firsts]
        if len(at_steps) != 1 and affected != {None}:
            return {}
        table = PatternTable(dict.fromkeys(patterns, True))
        dated |= {forward: frozenset(name for name in names if table.find(name) is not None) for forward in at_steps}
    return dated if len(dated) > 1 else {}
