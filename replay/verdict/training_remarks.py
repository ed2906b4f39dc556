"""Say beside the verdict what a job trained otherwise than was meant: nothing, not all, or labels shifted twice.

trained    no optimizer step was recorded in 6 training passes, and none of 21 sampled parameters moved: ...

Such a job is reproduced all the same: a replay computes its passes, and nothing says what they were to train.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from capture.file_format.optimizer_step import OptimizerStep, Sample
from replay.output.text import Pairs, pluralise
from replay.tolerances.difference import relative_difference
from replay.tolerances.job_bounds import LOSS
from replay.verdict.job_values import MOVED, NEXT_TOKENS, Recorded, own_name
from replay.verdict.judge import Pass, Verdict

LABEL = "trained"
SAME_ON_RANKS = 1e-3  # relative: averaged gradients are equal, but may have been added up in another order


def remarks_on_training(passes: Sequence[Pass], verdict: Verdict, *, is_whole: bool) -> Pairs:
    """Say what the passes' training lacks; nothing of a recording that says nothing of steps.

    is_whole  these are all passes of the recording, so that a step that is not among them was not seen
    """
    steps = [(LABEL, said) for said in _of_steps(passes, verdict, is_whole=is_whole)]
    return [*_of_labels(verdict), *_of_ranks(passes), *steps]


def _of_ranks(passes: Sequence[Pass]) -> Pairs:
    """Say so where two ranks of the job that hold whole models had other weights, or other gradients, at one step."""
    whole = [
        recorded
        for _, recorded, _ in passes
        if recorded is not None and not recorded.weights.is_sharded and recorded.optimizer_step is not None
    ]
    steps = [(recorded, recorded.optimizer) for recorded in whole if recorded.optimizer is not None]
    weights = _apart_on_ranks([(recorded, recorded.samples) for recorded in whole], least=0.0)
    gradients = _apart_on_ranks(
        [(recorded, step.gradients.samples) for recorded, step in steps if step.gradients is not None],
        least=SAME_ON_RANKS,
    )
    found = [("weights before", weights), ("gradients, which were not averaged, in", gradients)]
    in_time = sorted((step, what, said) for what, apart in found if apart is not None for step, said in [apart])
    return [("ranks", f"the job's ranks had different {what} step {step}: {said}") for step, what, said in in_time]


def _apart_on_ranks(samples: Sequence[tuple[Recorded, Sequence[Sample]]], *, least: float) -> tuple[int, str] | None:
    """Find the first element that two ranks sampled at the same step and that is not the same.

    Returns the number of the step, from 1 on, and the element with both values.

    least  a relative difference up to which elements are the same
    """
    seen: dict[tuple[int | None, str, int], tuple[int | None, Sequence[float]]] = {}
    for recorded, own in samples:
        # a rank's slice of a parameter has another shape than this model's, and was not compared
        compared = set(recorded.weights.compared)
        for sample in own:
            if own_name(sample.name, compared) is None:
                continue
            key = (recorded.optimizer_step, sample.name, sample.start)
            rank, values = seen.setdefault(key, (recorded.rank, sample.values))
            pairs = enumerate(zip(values, sample.values, strict=False))
            apart = next((place for place, pair in pairs if relative_difference(*pair) > least), None)
            if rank != recorded.rank and apart is not None:
                said = (
                    f"{sample.name}, element {sample.start + apart}, is {values[apart]:.6g} on rank {rank} and "
                    f"{sample.values[apart]:.6g} on rank {recorded.rank}"
                )
                return (recorded.optimizer_step or 0) + 1, said
    return None


def _of_labels(verdict: Verdict) -> Pairs:
    """Say so where the job's loss is that of labels which were shifted once more than they should be."""
    losses = [one for judged in verdict.passes for one in judged.findings if one.name == LOSS and one.agrees]
    if not any(one.doubt is not None and one.doubt.startswith(NEXT_TOKENS) for one in losses):
        return []
    return [
        ("labels", f"{NEXT_TOKENS}, and the model shifted them once more: each token predicts the one after the next")
    ]


def _of_steps(passes: Sequence[Pass], verdict: Verdict, *, is_whole: bool) -> list[str]:
    trained = {
        (one.rank, one.step): one
        for _, one, _ in passes
        if one is not None and one.trains and one.optimizer_step is not None
    }
    steps = [one.optimizer for one in trained.values() if one.optimizer is not None]
    has_stepped = any(one.optimizer_step for one in trained.values())
    if steps:
        is_said = any(finding.name == MOVED for window in verdict.windows for finding in window.findings)
        found = (
            _of_rate(steps),
            None if is_said else _of_weights([*trained.values()], steps),
            _of_share(trained, steps),
        )
        return [said for said in found if said is not None]
    return [_without_steps([*trained.values()])] if is_whole and len(trained) > 1 and not has_stepped else []


def _without_steps(trained: Sequence[Recorded]) -> str:
    said = f"no optimizer step was recorded in {pluralise(len(trained), 'training pass')}"
    moved, still = _moved(trained)
    if moved:
        return f"{said}, though {moved[0]} moved: what stepped has other parameters than the model's own"
    if not still:
        return said
    return (
        f"{said}, and none of {pluralise(len(still), 'sampled parameter')} moved. Does the optimizer have the model's "
        "parameters? One that was made before fully_shard has others"
    )


def _of_rate(steps: Sequence[OptimizerStep]) -> str | None:
    rates = [group.get("lr") for step in steps for group in step.settings]
    if not rates or any(rate != 0 for rate in rates):
        return None
    return f"the learning rate was 0 in {_steps(steps)}"


def _of_weights(trained: Sequence[Recorded], steps: Sequence[OptimizerStep]) -> str | None:
    """Say so if no weight moved, not even one that was given a gradient, though the learning rate was not 0."""
    given = {sample.name for step in steps if step.gradients is not None for sample in step.gradients.samples}
    moved, still = _moved(trained)
    if moved or not given.intersection(still) or _of_rate(steps) is not None:
        return None
    number = len({step.number for step in steps})
    return f"none of {pluralise(len(still), 'sampled parameter')} moved in {pluralise(number, 'recorded step')}"


def _of_share(trained: Mapping[Any, Recorded], steps: Sequence[OptimizerStep]) -> str | None:
    """Say so if each step was of fewer parameters than are trainable."""
    whole = max(one.weights.num_parameters - one.num_frozen for one in trained.values())
    shares = {sum(group["num_parameters"] for group in step.settings) for step in steps}
    if not shares or max(shares) >= whole or min(shares) == 0:  # 0: not known
        return None
    return f"the job's optimizer stepped {max(shares)} of {whole} trainable parameters in {_steps(steps)}"


def _steps(steps: Sequence[OptimizerStep]) -> str:
    number = len({step.number for step in steps})
    return "the 1 recorded step" if number == 1 else f"all {number} recorded steps"


def _moved(trained: Sequence[Recorded]) -> tuple[list[str], list[str]]:
    """Name the parameters that were sampled before and behind a step, or twice where none was seen.

    Returns those whose samples differ, and those whose samples are the same.
    """
    seen: dict[tuple[int | None, str, int], list[tuple[int | None, Sequence[float]]]] = {}
    has_stepped = any(one.optimizer_step for one in trained)
    for one in trained:
        for sample in one.samples:
            seen.setdefault((one.rank, sample.name, sample.start), []).append((one.optimizer_step, sample.values))
    names: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for (_, name, _), values in seen.items():
        pairs = [pair for pair in combinations(values, 2) if pair[0][0] != pair[1][0] or not has_stepped]
        if pairs:
            names[any(before != behind for (_, before), (_, behind) in pairs)][name] = None
    return list(names[True]), [name for name in names[False] if name not in names[True]]
