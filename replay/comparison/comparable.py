"""Decide whether two runs did the same work, so that numbers can be compared; list the settings that differ."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from itertools import takewhile
from typing import Any

from actor_init.as_json import to_json
from replay.options.option_parsing import Toggle, list_toggles
from replay.options.spec import USER_LOSS_PATTERN, ObjectiveSpec
from replay.output.text import pluralise
from replay.runlog.reader import GradientWindow, PastRun, SharedPass

ALWAYS_SAME = ("loss", "window", "backward", "step", *(one.name for one in fields(ObjectiveSpec)))
SAME_UNDER_STEP = (
    *("optimizer", "learning_rate", "lr_warmup_steps", "max_norm"),
    *("weight_decay", "beta1", "beta2", "eps", "momentum"),
)
MEANS_NOTHING = (
    "name",
    "log_folder",
    "quiet",
    "full_names",
    "timeout",
    "save_state",
    "save_model",
    "verdict",
    "noise_floor",
    "second_opinion",
)
MOST_NAMED = 3
FILE_DIGEST = "model_file_sha256"  # in the config of a user's model
FUNCTION = "model_function"


def reasons_to_refuse(
    reference: PastRun,
    other: PastRun,
    pairs: Sequence[tuple[SharedPass, SharedPass]],
    windows: Sequence[GradientWindow],
    other_windows: Sequence[GradientWindow],
) -> list[str]:
    """List why the numbers of `other` cannot be held against those of `reference`; empty if they can.

    Under --step a loss depends on every step before it. So a matched pass must have come after the same steps, each on
    the same inputs: other orders, and other numbers of data ranks, are other trainings.
    """
    return [
        *_of_model(reference, other),
        *_of_settings(reference, other),
        *_of_inputs(reference, pairs, other),
        *(_of_steps(pairs, windows, other_windows) if reference.measure.step and other.measure.step else []),
    ]


def differences_to_tell(reference: PastRun, other: PastRun) -> list[str]:
    """List what two runs are compared in spite of, since it may be the question: other code, and another --window.

    Other code has parameters of other names, and so other files of weights; another loss has other settings.
    """
    told = _of_model(reference, other) if _has_other_code(reference, other) else []
    losses = [run.measure.loss for run in (reference, other)]
    is_users = any(USER_LOSS_PATTERN.fullmatch(loss) for loss in losses)
    of_loss = ("loss", *(one.name for one in fields(ObjectiveSpec))) if is_users and losses[0] != losses[1] else ()
    return [*told, *_of_values(reference, other, ("window", *of_loss)), *_of_loss_file(reference, other)]


def _has_other_code(reference: PastRun, other: PastRun) -> bool:
    return any(reference.config.get(key) != other.config.get(key) for key in (FILE_DIGEST, FUNCTION))


def _of_model(reference: PastRun, other: PastRun) -> list[str]:
    """Compare the keys that both configs have: others came with another version of transformers."""
    shared = sorted(reference.config.keys() & other.config.keys())
    keys = [key for key in shared if reference.config[key] != other.config[key]]
    reasons = []
    if FUNCTION in keys or (FUNCTION in reference.config) != (FUNCTION in other.config):
        keys = [key for key in keys if key != FUNCTION]
        reasons.append(f"the model is {other.facts['model']}, not {reference.facts['model']}")
    if FILE_DIGEST in keys:
        keys.remove(FILE_DIGEST)
        file = other.facts["model_file"]
        reasons.append(
            f"{file} has changed, or is another file: its sha256 is {_digest(other)}, not {_digest(reference)}"
        )
    reasons += [f"{key} is {other.config[key]}, not {reference.config[key]}" for key in keys[:MOST_NAMED]]
    if len(keys) > MOST_NAMED:
        reasons.append(f"and {len(keys) - MOST_NAMED} more of the model's config")
    if reference.weights != other.weights:
        theirs, ours = other.facts["weights"], reference.facts["weights"]
        reasons.append(
            f"weights are {theirs}, not {ours}" if theirs != ours else f"weights are other ones, both {ours}"
        )
    return reasons


def _digest(run: PastRun) -> str:
    return str(run.config[FILE_DIGEST])[:12]


def _of_settings(reference: PastRun, other: PastRun) -> list[str]:
    both_step = reference.measure.step and other.measure.step
    names = ALWAYS_SAME + (SAME_UNDER_STEP if both_step else ())
    return [*_of_values(reference, other, names), *_of_loss_file(reference, other)]


def _of_values(reference: PastRun, other: PastRun, names: Collection[str]) -> list[str]:
    values = [
        (toggle, toggle.read_value(other), toggle.read_value(reference))
        for toggle in list_toggles()
        if toggle.field in names
    ]
    return [f"{_typed(toggle, b)}, not {_typed(toggle, a)}" for toggle, b, a in values if b != a]


def _of_loss_file(reference: PastRun, other: PastRun) -> list[str]:
    loss = other.measure.loss
    is_same = reference.facts.get("loss_sha256") == other.facts.get("loss_sha256")
    if is_same or reference.measure.loss != loss:
        return []
    return [f"--loss {loss} is other code: its file has changed in between"]


def _typed(toggle: Toggle, value: Any) -> str:
    return f"no {toggle.flag}" if value is None else " ".join(toggle.format_arguments(value))


def _of_inputs(reference: PastRun, pairs: Sequence[tuple[SharedPass, SharedPass]], other: PastRun) -> list[str]:
    if not pairs:
        ours, theirs = reference.inputs.passes, other.inputs.passes
        kinds = "" if ours == theirs else f" ({theirs} passes, not {ours})"
        return [f"no input in common{kinds}: {other.records[0].source}, not {reference.records[0].source}"]
    changed = [
        one.source for one, partner in pairs if one.peers[0].input.input_digest != partner.peers[0].input.input_digest
    ]
    if changed:
        return [f"{changed[0]} holds other tensors" + (f", and {len(changed) - 1} more do" if changed[1:] else "")]
    switched = [one.source for one, partner in pairs if one.peers[0].input.trains != partner.peers[0].input.trains]
    return [f"{switched[0]} was a training pass in one of them alone"] if switched else []


def _of_steps(
    pairs: Sequence[tuple[SharedPass, SharedPass]],
    windows: Sequence[GradientWindow],
    other_windows: Sequence[GradientWindow],
) -> list[str]:
    because = " (--step makes every loss depend on the steps before it)"
    both = zip(windows, other_windows, strict=False)
    num_shared = len(list(takewhile(lambda pair: pair[0].inputs == pair[1].inputs, both)))
    for one, partner in pairs:
        before, theirs = one.num_windows_before, partner.num_windows_before
        if before != theirs:
            return [f"{one.source} came after {pluralise(theirs, 'step')}, not {before}{because}"]
        if before > num_shared:
            return [
                f"{one.source} came after steps on other inputs: step {num_shared + 1} was on "
                f"{other_windows[num_shared].name}, not {windows[num_shared].name}{because}"
            ]
    return []


def settings(run: PastRun) -> dict[str, str]:
    """Describe how a run was done, by setting; what was resolved replaces what was asked for."""
    asked: dict[str, object] = {}
    for part in (run.actor, run.inputs, run.measure, run.state, run.objective):
        asked |= {name: value for name, value in _flat(to_json(part)).items() if name not in MEANS_NOTHING}
    shown = {name.replace("_", " "): _value_text(value) for name, value in {**asked, **run.facts}.items()}
    devices = [f"{run.devices.count(name)} x {name}" for name in dict.fromkeys(run.devices)]
    return {
        **shown,
        "data ranks": str(run.num_data_ranks),
        "devices": ", ".join(devices),
        "memory": run.memory_kind,
        **{name: _value_text(number) for name, number in run.versions.items()},
    }


def _flat(part: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in part.items():
        flat |= _flat(value) if isinstance(value, Mapping) else {name: value}
    return flat


def _value_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def settings_that_differ(runs: Sequence[PastRun]) -> dict[str, list[str]]:
    """Map each setting to what each run has there."""
    said = [settings(run) for run in runs]
    names = dict.fromkeys(name for one in said for name in one)
    table = {name: [one.get(name, "none") for one in said] for name in names}
    return {name: row for name, row in table.items() if len(set(row)) > 1}
