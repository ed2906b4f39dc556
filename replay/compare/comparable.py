"""Decide whether two runs did the same work, so that numbers can be compared; list the settings that differ."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import takewhile
from typing import Any

from replay.option_parsing import Toggle, spec_to_dict, toggles
from replay.report.text import counted
from replay.runlog.matching import Pass, Window
from replay.runlog.reader import PastRun
from replay.spec import ObjectiveSpec

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


def reasons_to_refuse(
    reference: PastRun,
    other: PastRun,
    pairs: Sequence[tuple[Pass, Pass]],
    windows: Sequence[Window],
    other_windows: Sequence[Window],
) -> list[str]:
    """List why the numbers of `other` cannot be held against those of `reference`; empty if they can.

    Under --step a loss depends on every step before it. So a matched pass must have come after the same steps, each on
    the same inputs: other orders, and other numbers of data ranks, are other trainings.
    """
    return [
        *_of_model(reference, other),
        *_of_settings(reference, other),
        *_of_inputs(reference, pairs, other),
        *(_of_steps(pairs, windows, other_windows) if reference.spec.measure.step and other.spec.measure.step else []),
    ]


def _of_model(reference: PastRun, other: PastRun) -> list[str]:
    """Compare the keys that both configs have: others came with another version of transformers."""
    shared = sorted(reference.config.keys() & other.config.keys())
    keys = [key for key in shared if reference.config[key] != other.config[key]]
    reasons = []
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
    both_step = reference.spec.measure.step and other.spec.measure.step
    names = ALWAYS_SAME + (SAME_UNDER_STEP if both_step else ())
    values = [
        (toggle, toggle.value_in(other.spec), toggle.value_in(reference.spec))
        for toggle in toggles()
        if toggle.field in names
    ]
    reasons = [f"{_typed(toggle, b)}, not {_typed(toggle, a)}" for toggle, b, a in values if b != a]
    if not reasons and reference.facts.get("loss_sha256") != other.facts.get("loss_sha256"):
        reasons.append(f"--loss {other.spec.measure.loss} is other code: its file has changed in between")
    return reasons


def _typed(toggle: Toggle, value: Any) -> str:
    return f"no {toggle.flag}" if value is None else " ".join(toggle.as_typed(value))


def _of_inputs(reference: PastRun, pairs: Sequence[tuple[Pass, Pass]], other: PastRun) -> list[str]:
    if not pairs:
        ours, theirs = reference.spec.inputs.passes, other.spec.inputs.passes
        kinds = "" if ours == theirs else f" ({theirs} passes, not {ours})"
        return [f"no input in common{kinds}: {other.records[0].source}, not {reference.records[0].source}"]
    changed = [one.source for one, partner in pairs if one.peers[0].input_digest != partner.peers[0].input_digest]
    if changed:
        return [f"{changed[0]} holds other tensors" + (f", and {len(changed) - 1} more do" if changed[1:] else "")]
    switched = [one.source for one, partner in pairs if one.peers[0].trains != partner.peers[0].trains]
    return [f"{switched[0]} was a training pass in one of them alone"] if switched else []


def _of_steps(
    pairs: Sequence[tuple[Pass, Pass]], windows: Sequence[Window], other_windows: Sequence[Window]
) -> list[str]:
    because = " (--step makes every loss depend on the steps before it)"
    both = zip(windows, other_windows, strict=False)
    num_shared = len(list(takewhile(lambda pair: pair[0].inputs == pair[1].inputs, both)))
    for one, partner in pairs:
        before, theirs = one.num_windows_before, partner.num_windows_before
        if before != theirs:
            return [f"{one.source} came after {counted(theirs, 'step')}, not {before}{because}"]
        if before > num_shared:
            return [
                f"{one.source} came after steps on other inputs: step {num_shared + 1} was on "
                f"{other_windows[num_shared].name}, not {windows[num_shared].name}{because}"
            ]
    return []


def settings(run: PastRun) -> dict[str, str]:
    """Describe how a run was done, by setting; what was resolved replaces what was asked for."""
    asked: dict[str, Any] = {}
    for part in spec_to_dict(run.spec).values():
        asked |= {name: value for name, value in _flat(part).items() if name not in MEANS_NOTHING}
    shown = {name.replace("_", " "): _value_text(value) for name, value in {**asked, **run.facts}.items()}
    devices = [f"{run.devices.count(name)} x {name}" for name in dict.fromkeys(run.devices)]
    return {
        **shown,
        "data ranks": str(run.num_data_ranks),
        "devices": ", ".join(devices),
        "memory": run.memory_kind,
        **{name: _value_text(number) for name, number in run.versions.items()},
    }


def _flat(part: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in part.items():
        flat |= _flat(value) if isinstance(value, Mapping) else {name: value}
    return flat


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def settings_that_differ(runs: Sequence[PastRun]) -> dict[str, list[str]]:
    """Map each setting to what each run has there."""
    said = [settings(run) for run in runs]
    names = dict.fromkeys(name for one in said for name in one)
    table = {name: [one.get(name, "none") for one in said] for name in names}
    return {name: row for name, row in table.items() if len(set(row)) > 1}
