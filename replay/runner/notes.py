"""Say what the checks of `replay/lint` remark on the replayed passes: all in run.json, a few on the console."""

import json
from collections.abc import Sequence
from pathlib import Path

from actor_init.model import ModelSource, list_broken_ties, to_plain_config
from actor_init.model_positions import counts_padding
from capture.facts import Setting
from capture.file_format.actor_config import read_actor_config, read_adapter_configs, read_parameter_names
from capture.file_format.end_record import EndRecord, read_end_records
from capture.file_format.micro_batch import CaptureError
from capture.file_format.optimizer_step import OptimizerStep
from replay.lint.lint import (
    format_notes,
    has_router_loss,
    keep_one_of_each,
    lint,
    read_unreplayed_pass,
)
from replay.lint.remark import LintSubject
from replay.lint.token_checks import leaves_positions_to_model
from replay.options.option_parsing import spell_setting
from replay.options.spec import InputsSpec
from replay.output.text import Pairs
from replay.resolution.job_defaults import find_inputs_folder, shorten_path
from replay.resolution.selection import Selection
from replay.runlog.run_file import RecordingRemark
from replay.runner.header import format_config_differences
from replay.verdict.causes.model_rules import COMPUTED_KINDS, describe_model_difference
from replay.verdict.findings import VerdictSettings
from replay.verdict.judge import PassEvidence
from replay.verdict.outcomes import Verdict
from replay.verdict.special_tokens import SpecialTokens

# What transformers' Trainer writes into a checkpoint, with the steps that it had taken.
TRAINER_STATE = "trainer_state.json"


def list_notes(
    inputs: InputsSpec,
    selection: Selection,
    source: ModelSource,
    passes: Sequence[PassEvidence],
    settings: VerdictSettings,
    verdict: Verdict,
    remarks: Pairs,
    *,
    is_whole: bool,
) -> tuple[list[RecordingRemark], Pairs]:
    """List the remarks on what the job recorded, and the most telling as lines under the verdict.

    The lines leave out what the verdict and its `remarks` say already.

    is_whole  these are all passes of the recording
    """
    folder = find_inputs_folder(inputs)
    try:
        job_config, adapters = read_actor_config(folder), read_adapter_configs(folder)
        parameter_names: Sequence[str] = read_parameter_names(folder)
    except CaptureError:
        # The ids of padding are the model's then, and `replay inspect` names the file.
        job_config, adapters, parameter_names = None, {}, ()
    config = job_config or to_plain_config(source.config)
    special_tokens = SpecialTokens.from_config(config)
    recorded_passes = keep_one_of_each([recorded for _, recorded, _ in passes if recorded is not None])
    # A replay of what trains leaves out a rollout, of which dropout alone is remarked.
    left_out = selection.left_out if settings.dropout else ()
    not_replayed = (read_unreplayed_pass(capture, special_tokens) for capture in left_out)
    subject = LintSubject(
        passes=[*recorded_passes, *(recorded for recorded in not_replayed if recorded is not None)],
        is_whole=is_whole,
        pad_token_id=special_tokens.pad_token_id,
        eos_token_ids=special_tokens.eos_token_ids,
        vocabulary=source.config.get_text_config().vocab_size,
        dropout=settings.dropout,
        parameter_names=parameter_names,
        frozen=sorted(source.frozen),
        counts_padding=leaves_positions_to_model(recorded_passes) and counts_padding(source.config),
        has_router_loss=has_router_loss(config),
        has_adapter=source.adapter is not None or bool(adapters),
        broken_ties=[] if source.adapter is None else list_broken_ties(source.config, source.adapter),
        config_differences=format_config_differences(settings.model_differences),
        code_differences=[
            describe_model_difference(difference)
            for difference in settings.model_differences
            if not verdict.causes and (difference.kind in COMPUTED_KINDS or difference.forward is not None)
        ],
        not_recorded=selection.not_recorded,
        given_rates=() if source.optimizer_state is None else source.optimizer_state.learning_rates,
        ends=_read_ends(folder, passes),
    )
    typed = "" if inputs.recording is None else f" {spell_setting(Setting('recording', inputs.recording))}"
    found = lint(subject)
    notes = format_notes(
        found,
        told={topic for topic, _ in remarks},
        causes={cause.name for cause in verdict.causes},
        command=f"replay inspect {shorten_path(folder)}{typed}",
    )
    steps = [recorded.step_after for _, recorded, _ in passes if recorded is not None and recorded.step_after]
    lost_state = explain_lost_state(steps[0], source.name) if steps else ""
    notes = [*([("note", f"optimizer: {lost_state}")] if lost_state else []), *notes]
    return [RecordingRemark(topic=remark.topic, text=remark.text, cause=remark.cause) for remark in found], notes


def _read_ends(folder: Path, passes: Sequence[PassEvidence]) -> list[EndRecord]:
    """Read how the ranks of these passes' recording closed it; none where that cannot be read."""
    ids = {recorded.recording for _, recorded, _ in passes if recorded is not None}
    try:
        return [end for end in read_end_records(folder) if end.recording in ids]
    except CaptureError:
        # `replay inspect` names the file.
        return []


def explain_lost_state(step: OptimizerStep, model: str) -> str:
    """Say that the job's optimizer began anew with the weights of a Trainer's checkpoint; empty where it did not.

    step  the first that was recorded
    """
    table = Path(model) / TRAINER_STATE
    if step.number or step.has_state is not False or not table.is_file():
        return ""
    try:
        content = json.loads(table.read_text(encoding="utf-8"))
    except ValueError:
        # The file is no part of the model, and nothing else is read from it.
        return ""
    num_steps = content.get("global_step") if isinstance(content, dict) else None
    if not isinstance(num_steps, int) or num_steps < 1:
        return ""
    return (
        f"it began without a state, and {model} is of step {num_steps} of a job: was one resumed without its "
        "optimizer (save_only_model)?"
    )
