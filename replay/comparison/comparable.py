"""Decide whether two runs did the same work, so that numbers can be compared; list the settings that differ."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from itertools import takewhile
from typing import Any

from actor_init.as_json import to_json
from replay.options.option_parsing import DeclaredOption, list_options
from replay.options.spec import USER_LOSS_PATTERN, ObjectiveSpec
from replay.output.text import pluralise
from replay.runlog.reader import GradientWindow, PastRun, SharedPass

ALWAYS_SAME = ("loss", "window", "backward", "step", *(field.name for field in fields(ObjectiveSpec)))
SAME_UNDER_STEP = (
    *("optimizer", "learning_rate", "lr_warmup_steps", "max_norm"),
    *("weight_decay", "beta1", "beta2", "eps", "momentum"),
)
IGNORED_SETTINGS = (
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
    "trials",
)
MAX_NAMED = 3
# Keys that the config of a model from a user's file has.
FILE_DIGEST = "model_file_sha256"
FUNCTION = "model_function"


def find_reasons_to_refuse(
    reference: PastRun,
    other: PastRun,
    pairs: Sequence[tuple[SharedPass, SharedPass]],
    windows: Sequence[GradientWindow],
    other_windows: Sequence[GradientWindow],
) -> list[str]:
    """List why the numbers of `other` cannot be compared with those of `reference`; empty if they can.

    Under --step a loss depends on every step before it. So a matched pass must come after the same steps, each on the
    same inputs: another order of inputs, or another number of data ranks, is another training.
    """
    return [
        *_compare_models(reference, other),
        *_compare_work_settings(reference, other),
        *_compare_inputs(reference, pairs, other),
        *(_compare_steps(pairs, windows, other_windows) if reference.measure.steps and other.measure.steps else []),
    ]


def list_tolerated_differences(reference: PastRun, other: PastRun) -> list[str]:
    """List the differences in spite of which two runs are compared, since they may be the question.

    These are other code of the model or the loss, and another --window. Other code may name its parameters differently,
    and so have other files of weights; another loss has other settings.
    """
    differences = _compare_models(reference, other) if _has_other_code(reference, other) else []
    losses = [run.measure.loss for run in (reference, other)]
    names = ["window"]
    if losses[0] != losses[1] and any(USER_LOSS_PATTERN.fullmatch(loss) for loss in losses):
        names += ["loss", *(field.name for field in fields(ObjectiveSpec))]
    return [*differences, *_compare_values(reference, other, names), *_compare_loss_files(reference, other)]


def _has_other_code(reference: PastRun, other: PastRun) -> bool:
    return any(reference.config.get(key) != other.config.get(key) for key in (FILE_DIGEST, FUNCTION))


def _compare_models(reference: PastRun, other: PastRun) -> list[str]:
    """Compare the keys that both configs have: another version of transformers may have more keys."""
    shared = sorted(reference.config.keys() & other.config.keys())
    keys = [key for key in shared if reference.config[key] != other.config[key]]
    reasons = []
    if FUNCTION in keys or (FUNCTION in reference.config) != (FUNCTION in other.config):
        keys = [key for key in keys if key != FUNCTION]
        reasons.append(f"the model is {other.facts['model']}, not {reference.facts['model']}")
    if FILE_DIGEST in keys:
        keys.remove(FILE_DIGEST)
        file = other.facts["model_file"]
        digests = f"{_file_digest(other)}, not {_file_digest(reference)}"
        reasons.append(f"{file} has changed, or is another file: its sha256 is {digests}")
    reasons += [f"{key} is {other.config[key]}, not {reference.config[key]}" for key in keys[:MAX_NAMED]]
    if len(keys) > MAX_NAMED:
        reasons.append(f"and {len(keys) - MAX_NAMED} more of the model's config")
    if reference.weights != other.weights:
        source, reference_source = other.facts["weights"], reference.facts["weights"]
        reasons.append(
            f"weights are {source}, not {reference_source}"
            if source != reference_source
            else f"weights are other ones, both {source}"
        )
    return reasons


def _file_digest(run: PastRun) -> str:
    return str(run.config[FILE_DIGEST])[:12]


def _compare_work_settings(reference: PastRun, other: PastRun) -> list[str]:
    both_step = reference.measure.steps and other.measure.steps
    names = ALWAYS_SAME + (SAME_UNDER_STEP if both_step else ())
    return [*_compare_values(reference, other, names), *_compare_loss_files(reference, other)]


def _compare_values(reference: PastRun, other: PastRun, names: Collection[str]) -> list[str]:
    values = [
        (option, option.read_value(other), option.read_value(reference))
        for option in list_options()
        # A switch sets a field that has an option of its own here.
        if option.field in names and not option.is_switch
    ]
    return [
        f"{_format_typed(option, value)}, not {_format_typed(option, reference_value)}"
        for option, value, reference_value in values
        if value != reference_value
    ]


def _compare_loss_files(reference: PastRun, other: PastRun) -> list[str]:
    loss = other.measure.loss
    is_same = reference.facts.get("loss_sha256") == other.facts.get("loss_sha256")
    if is_same or reference.measure.loss != loss:
        return []
    return [f"--loss {loss} is other code: its file has changed in between"]


def _format_typed(option: DeclaredOption, value: Any) -> str:
    return f"no {option.flag}" if value is None else " ".join(option.format_arguments(value))


def _compare_inputs(reference: PastRun, pairs: Sequence[tuple[SharedPass, SharedPass]], other: PastRun) -> list[str]:
    if not pairs:
        reference_kind, kind = reference.inputs.passes, other.inputs.passes
        kinds = "" if kind == reference_kind else f" ({kind} passes, not {reference_kind})"
        return [f"no input in common{kinds}: {other.records[0].source}, not {reference.records[0].source}"]
    inputs = [(first.source, first.peers[0].input, second.peers[0].input) for first, second in pairs]
    changed = [source for source, first, second in inputs if first.input_digest != second.input_digest]
    if changed:
        return [f"{changed[0]} holds other tensors" + (f", and {len(changed) - 1} more do" if changed[1:] else "")]
    trained_once = [source for source, first, second in inputs if first.trains != second.trains]
    return [f"{trained_once[0]} was a training pass in one of them alone"] if trained_once else []


def _compare_steps(
    pairs: Sequence[tuple[SharedPass, SharedPass]],
    windows: Sequence[GradientWindow],
    other_windows: Sequence[GradientWindow],
) -> list[str]:
    because = " (--step makes every loss depend on the steps before it)"
    window_pairs = zip(windows, other_windows, strict=False)
    num_shared = len(list(takewhile(lambda pair: pair[0].inputs == pair[1].inputs, window_pairs)))
    for reference_pass, other_pass in pairs:
        source, num_before = reference_pass.source, reference_pass.num_windows_before
        if other_pass.num_windows_before != num_before:
            steps = pluralise(other_pass.num_windows_before, "step")
            return [f"{source} came after {steps}, not {num_before}{because}"]
        if num_before > num_shared:
            return [
                f"{source} came after steps on other inputs: step {num_shared + 1} was on "
                f"{other_windows[num_shared].name}, not {windows[num_shared].name}{because}"
            ]
    return []


def list_settings(run: PastRun) -> dict[str, str]:
    """Describe how a run was done, by setting; a resolved value replaces the typed one."""
    typed: dict[str, object] = {}
    for part in (run.actor, run.inputs, run.measure, run.state, run.objective):
        typed |= {name: value for name, value in _flatten(to_json(part)).items() if name not in IGNORED_SETTINGS}
    texts = {name.replace("_", " "): _format_value(value) for name, value in {**typed, **run.facts}.items()}
    devices = [f"{run.devices.count(name)} x {name}" for name in dict.fromkeys(run.devices)]
    return {
        **texts,
        "data ranks": str(run.num_data_ranks),
        "devices": ", ".join(devices),
        "memory": run.memory_kind,
        **{name: _format_value(number) for name, number in run.versions.items()},
    }


def _flatten(part: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in part.items():
        flat |= _flatten(value) if isinstance(value, Mapping) else {name: value}
    return flat


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def compare_settings(runs: Sequence[PastRun]) -> dict[str, list[str]]:
    """Map each setting that differs to the values that the runs have."""
    by_run = [list_settings(run) for run in runs]
    names = dict.fromkeys(name for settings in by_run for name in settings)
    table = {name: [settings.get(name, "none") for settings in by_run] for name in names}
    return {name: row for name, row in table.items() if len(set(row)) > 1}
