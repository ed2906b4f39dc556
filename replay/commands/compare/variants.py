"""Replay one pass of a logged run again, traced: as it was, and with other code or other options, to be compared.

    replay compare logs/20261125-101500 mine.py:build attention=eager

The pass is the first that the run's verdict found wrong, or the first of all. What differs between the replays is what
was asked for alone: both begin with the weights that the run began with, and neither steps.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actor_init.as_json import to_json
from actor_init.hub import find_folder
from actor_init.spec import USER_FUNCTION, ActorSpec, Attention, Head, Kernels, UsageError
from capture.facts import Setting
from replay.campaign.campaign import Campaign, PlannedRun, catch_interruption
from replay.campaign.executor import ThisMachine
from replay.options.option_parsing import list_options, parse_value, replace_values, spec_from_dict
from replay.options.spec import ReplaySpec, StateSpec, VerdictRule
from replay.output.printing import open_console, print_pairs
from replay.processes.pool import Machine, RunLimits
from replay.runlog.reader import find_run_folder, read_run_below
from replay.runlog.run_file import RUN_FILE
from replay.runner.result import Run

PYTHON = "python"
RUN_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparePlan:
    """What is compared: a logged run, and the words of each variant."""

    log: str
    variants: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A replay that differs from the logged run in what `word` says.

    python  path of another environment's interpreter; empty: this one
    """

    word: str
    spec: ReplaySpec
    python: str = ""


def replay_variants(log: Path, words: Sequence[str]) -> list[Path]:
    """Replay the first wrong pass of `log` as it was and as each word says; return the folders of their runs.

    Raises UsageError for a word that means nothing, and where a replay fails.
    """
    folder = find_run_folder(log)
    run = Run.read(folder)
    base = make_traced_spec(spec_from_dict(run.start.spec, source=f"{folder / RUN_FILE}, spec"), run)
    if any(USER_FUNCTION.fullmatch(word) for word in words):
        base = replace(base, actor=replace(base.actor, packing=False))
    variants = [Variant(word="as logged", spec=base)]
    variants += [make_variant(base, word) for word in words]
    campaign = Campaign.begin(
        "compare",
        base.measure.log_folder,
        ComparePlan(log=str(log), variants=list(words)),
        arguments=[str(log), *words],
        machine=Machine.detect(),
    )
    campaign.open(ThisMachine(), RunLimits(run_limit_seconds=RUN_SECONDS, total_seconds=None, at_once=None))
    out = open_console(sys.stderr)
    folders: list[Path] = []
    with catch_interruption() as interruption:
        for number, variant in enumerate(variants):
            print_pairs(out, [("replays", f"{variant.word}, traced")])
            folders.append(_replay(campaign, variant, number, run.start.world_size))
    if interruption.happened:
        raise UsageError(f"interrupted after {len(folders)} of {len(variants)} replays. Try: {campaign.command_line}")
    campaign.result = {"runs": [str(run_folder) for run_folder in folders]}
    campaign.write()
    return folders


def _replay(campaign: Campaign[ComparePlan], variant: Variant, number: int, num_processes: int) -> Path:
    planned_run = PlannedRun(
        home=f"runs/{number}", spec=variant.spec, num_processes=num_processes, python=variant.python
    )
    child = campaign.run(planned_run)
    folder, _, _ = read_run_below(child.logs)
    if child.exit_code != 0 or folder is None:
        raise UsageError(f"{variant.word}: {child.error or 'it left no log'}")
    return folder


def make_traced_spec(spec: ReplaySpec, run: Run) -> ReplaySpec:
    """Return the spec of a run that replays, traced, the window of the first wrong pass, or of the first pass."""
    first = None if run.verdict is None else run.verdict.first
    last_index = 0 if first is None else first.index
    first_index = last_index if first is None or first.first_index is None else first.first_index
    indices = range(first_index, last_index + 1)
    picked = spec.inputs.picked_numbers
    numbers = [str(index if picked is None else picked[index]) for index in indices]
    return replace(
        spec,
        # The trace needs whole logits, whatever was typed.
        actor=replace(spec.actor, grad_accumulation=len(indices), head=Head.AUTO),
        inputs=replace(spec.inputs, pick_inputs=",".join(numbers)),
        measure=replace(
            spec.measure, trace=True, details=True, noise_floor=False, trials=False, verdict=VerdictRule.REPORT
        ),
        state=StateSpec(),
    )


def make_variant(base: ReplaySpec, word: str) -> Variant:
    """Return the replay that a variant's word means. Raises UsageError if it means none."""
    name, equals, value = word.partition("=")
    if not equals:
        actor = _make_custom(base.actor, word) if USER_FUNCTION.fullmatch(word) else _make_stock(base.actor)
        return Variant(word=word, spec=replace(base, actor=actor))
    if name == PYTHON:
        return Variant(word=word, spec=base, python=value)
    option = next((option for option in list_options() if option.flag == f"--{name}" and not option.is_switch), None)
    if option is None:
        raise UsageError(
            f"{word} is no variant. Give a log, stock, FILE.py:FUNCTION, python=PATH, or an option and its value, such "
            "as attention=eager or window=mean-of-means"
        )
    return Variant(word=word, spec=replace_values(base, [(option, to_json(parse_value(option, value)))]))


def _make_custom(actor: ActorSpec, function: str) -> ActorSpec:
    """Return an actor of a user's function, with the weights of the run's model.

    Nothing is known about the attention inside, so the rows are fed as captured and no kernel is chosen.
    """
    weights = actor.weights
    if weights is None and actor.model is not None and not actor.has_user_model:
        weights = find_folder(Setting("model", actor.model))
    return replace(actor, model=function, weights=weights, packing=None, attention=Attention.AUTO, kernels=Kernels.AUTO)


def _make_stock(actor: ActorSpec) -> ActorSpec:
    """Return an actor of transformers' own code, with the weights of the user's function."""
    if not actor.has_user_model:
        raise UsageError("stock: the log's run has transformers' own code already. Give FILE.py:FUNCTION")
    if actor.weights is None:
        raise UsageError(f"stock: the log's run names no {Setting('weights')}, whose folder would have the config")
    return replace(actor, model=str(actor.weights), weights=None)
