"""Hold a replay and what it came to, as it ended here or as its log tells, and judge its passes against the job."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from actor_init.backends.protocol import free_closed_backends
from actor_init.dropout_settings import find_acting_dropouts
from actor_init.model import ModelSource, to_plain_config
from actor_init.schedule_and_norm import TORCH_DTYPES
from actor_init.spec import Compile, UsageError
from actor_init.world import World
from capture.black_box.incidents import Incident, read_incidents
from capture.file_format.actor_config import read_adapter_configs
from capture.file_format.micro_batch import CaptureError
from capture.record.job_facts import read_device_name, read_environment
from capture.record.job_facts import read_versions as loaded_versions
from replay.options.option_parsing import describe_error, spec_from_dict
from replay.options.resolved import ChosenBy, ResolvedReplay
from replay.output.text import Pairs, join_lines, pluralise
from replay.profiling.profile_records import MemoryPeak, Profile
from replay.resolution.job_defaults import find_inputs_folder
from replay.resolution.selection import Selection
from replay.runlog.reader import describe_missing_passes, find_run_folder, read_lines_so_far
from replay.runlog.records import PassRecord, to_line
from replay.runlog.run_file import RUN_FILE, RecordingRemark, RunEnd, RunFile, RunStart, Values, read_section
from replay.runlog.summary import Statistics, find_reason_to_leave_out, summarize
from replay.runner import rounding_floor
from replay.runner.job_optimizer_state import count_loaded_steps
from replay.runner.notes import list_notes
from replay.runner.out_of_memory import OutOfMemory
from replay.runner.rounding_floor import RunRepeater
from replay.runner.single_pass_gradients import measure_single_pass_gradients
from replay.runner.trials import run_trials
from replay.tolerances.job_bounds import GRADIENT, GRADIENT_RMS, NoiseFloor
from replay.verdict.causes.trial import TrialReport
from replay.verdict.exchanged_states import find_exchanged_states
from replay.verdict.findings import VerdictSettings
from replay.verdict.judge import JudgedRun, PassEvidence, judge, judge_without_causes
from replay.verdict.loss_remarks import describe_loss_weights
from replay.verdict.model_facts import ModelDifference
from replay.verdict.outcomes import Outcome, Verdict
from replay.verdict.recorded_pass import is_mixture
from replay.verdict.reference_remarks import describe_divergence, describe_reference
from replay.verdict.route_findings import (
    describe_absent_router_loss,
    describe_flips,
    describe_router_loss,
    note_job_routes,
)
from replay.verdict.text import format_verdict
from replay.verdict.training_remarks import describe_weighting, list_training_remarks
from replay.verdict.weight_check import WeightChecker

SectionT = TypeVar("SectionT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One replay: its log's folder, run.json, and passes by number and rank.

    problems  why its log is not whole
    """

    folder: Path
    file: RunFile
    records: Sequence[PassRecord]
    problems: Sequence[str] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the run in the folder `path`, or the only one below it, as far as it came.

        Raises UsageError if it is no run's folder, or one of another format.
        """
        folder = find_run_folder(path)
        file = RunFile.read(folder)
        if file.start is None:
            raise UsageError(f"{folder}: run.json names no devices, so it is damaged. Give a folder that a run left")
        problems: list[str] = []
        records: list[PassRecord] = []
        for rank in range(len(file.start.devices)):
            rank_records, problem = read_lines_so_far(folder / f"rank{rank}.jsonl")
            records += rank_records
            if problem is None and (lack := describe_missing_passes(file, len(rank_records))):
                problem = f"rank{rank}.jsonl {lack}"
            problems += [problem] if problem else []
        records.sort(key=lambda record: (record.index, record.rank))
        if file.exit_code is None:
            problems.append("run.json has no end: the run goes on, or was killed")
        if failure := file.failure:
            problems.append(f"the run broke off{file.describe_failed_rank()}: {failure.error or failure.kind}")
        if failed := len({record.index for record in records if record.error is not None}):
            problems.append(f"{pluralise(failed, 'pass')} failed")
        return cls(folder=folder, file=file, records=records, problems=problems)

    @property
    def start(self) -> RunStart:
        """What was known before the first pass."""
        assert self.file.start is not None, "read() and a run that ended have one"
        return self.file.start

    @property
    def inputs_folder(self) -> Path:
        """The folder of captures that was replayed."""
        return find_inputs_folder(spec_from_dict(self.start.spec, source=f"{self.folder / RUN_FILE}, spec").inputs)

    @property
    def exit_code(self) -> int:
        """What the process ended with; 1 of a run that has no end."""
        return 1 if self.file.exit_code is None else self.file.exit_code

    @property
    def statistics(self) -> Statistics:
        return summarize(self.records)

    @property
    def verdict(self) -> Verdict | None:
        """The verdict, None without an end. This and what follows raise UsageError for what another version wrote."""
        return self._section(Verdict, "verdict", self._end.verdict)

    @property
    def profile(self) -> Profile | None:
        return self._section(Profile, "profile", self._end.profile)

    @property
    def memory(self) -> MemoryPeak | None:
        return self._section(MemoryPeak, "memory", self._end.memory)

    @property
    def out_of_memory(self) -> OutOfMemory | None:
        return self._section(OutOfMemory, "out_of_memory", self._end.out_of_memory)

    @property
    def ranks(self) -> list[int]:
        return sorted({record.rank for record in self.records})

    def marks(self) -> dict[int, str]:
        """Return why passes are left out of the statistics, by pass."""
        records_by_pass: dict[int, list[PassRecord]] = {}
        for record in self.records:
            records_by_pass.setdefault(record.index, []).append(record)
        reasons = {index: find_reason_to_leave_out(rank_records) for index, rank_records in records_by_pass.items()}
        return {index: reason for index, reason in reasons.items() if reason}

    def to_dict(self) -> dict[str, Any]:
        """Return the log as JSON has it: its folder, what is wrong with it, run.json, and the lines of its passes."""
        return {
            "folder": str(self.folder),
            "problems": list(self.problems),
            "run": self.file.to_dict(),
            "passes": [to_line(record) for record in self.records],
        }

    @property
    def _end(self) -> RunEnd:
        return self.file.end or RunEnd(statistics=self.statistics)

    def _section(self, kind: type[SectionT], name: str, values: Values | None) -> SectionT | None:
        return read_section(kind, values, source=f"{self.folder / RUN_FILE}: {name}")


# How `Incident.place` names a forward.
IN_FORWARD = "in forward"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conclusion:
    """The verdict on a run, and remarks about it.

    recording_remarks  on what the job recorded; None: not looked for, since the run was resumed
    """

    verdict: Verdict
    remarks: Pairs
    recording_remarks: Sequence[RecordingRemark] | None = None


def make_verdict_settings(
    spec: ResolvedReplay,
    weight_checker: WeightChecker,
    world: World,
    facts: Mapping[str, object],
    model_differences: Sequence[ModelDifference],
) -> VerdictSettings:
    """Return the settings of this run that its passes are judged by: numbers, ranks, kernels and model."""
    source = spec.source
    dtype = str(TORCH_DTYPES[spec.actor.dtype]).removeprefix("torch.")
    kernel = {
        "attention": str(facts["attention_kernel"]),
        "kernels": _name_kernels(str(facts.get("kernels", ""))),
        "dtype": dtype,
        "compiled": "no" if spec.actor.compile is Compile.OFF else "yes",
    }
    return VerdictSettings(
        dtype=dtype,
        num_layers=source.config.get_text_config().num_hidden_layers,
        num_data_ranks=world.num_data_ranks,
        grad_accumulation=spec.actor.resolved_grad_accumulation,
        stepping_actor=spec.actor if spec.measure.steps else None,
        follows_frozen=bool(source.frozen_later),
        is_dtype_typed=spec.find_chooser("actor.dtype") is ChosenBy.TYPED,
        has_user_model=spec.actor.has_user_model,
        lacks_weights=spec.actor.lacks_weights,
        setting_names_from_job=spec.setting_names_from_job,
        job_code_clip_norm=spec.job_code_clip_norm,
        steps_unasked=spec.steps_unasked,
        loaded_counts=count_loaded_steps(source),
        dropout=[
            *find_acting_dropouts(to_plain_config(source.config)),
            *(["lora_dropout"] if source.adapter and source.adapter.settings.get("lora_dropout") else []),
        ],
        packs=spec.actor.packs and spec.actor.parallel.ring == 1,
        why_other_draws=_explain_other_draws(spec),
        why_no_draws=_find_reason_for_no_draws(spec),
        is_mixture=is_mixture(weight_checker.names),
        model_differences=model_differences,
        environment={**loaded_versions(), **read_environment(), "device": read_device_name(world.device), **kernel},
    )


def _note_exchanged_states(
    settings: VerdictSettings, passes: Sequence[PassEvidence], source: ModelSource
) -> VerdictSettings:
    """Note whose given state the job's optimizer held before the first step of the replay."""
    steps = [recorded.step_after for _, recorded, _ in passes if recorded is not None and recorded.step_after]
    if source.optimizer_state is None or not steps:
        return settings
    first = min(step.number for step in steps)
    samples = [sample for step in steps if step.number == first for sample in step.state]
    return replace(settings, exchanged_states=find_exchanged_states(samples, source.optimizer_state.by_name))


def _explain_other_draws(spec: ResolvedReplay) -> str | None:
    """Say why dropout cannot draw the job's masks here, whatever the rows are; None if nothing prevents it."""
    if spec.actor.parallel.tp > 1 or spec.actor.parallel.ring > 1:
        return "several ranks share a row here, and each draws masks of its part. Try: without --tp and --ring"
    return None


def _find_reason_for_no_draws(spec: ResolvedReplay) -> str | None:
    """Say why dropout of the job's adapter cannot act here; None if it can, or the job has none."""
    adapters = read_adapter_configs(find_inputs_folder(spec.inputs)) if spec.source.adapter is None else {}
    if not any(settings.get("lora_dropout") for settings in adapters.values()):
        return None
    return "the job's adapter has dropout, and is not built here. Try: --adapter FOLDER"


def conclude(
    repeater: RunRepeater,
    passes: Sequence[PassEvidence],
    settings: VerdictSettings,
    *,
    is_resumed: bool,
    ended_early: bool,
) -> Conclusion:
    """Judge the passes against the job, measuring the rounding floor first where the dtype is coarse.

    repeater     runs the passes once more
    is_resumed   passes of an earlier process are not among them
    ended_early  inputs were left

    All ranks must call this.
    """
    measure = repeater.spec.measure
    settings = _note_exchanged_states(note_job_routes(settings, passes), passes, repeater.spec.source)
    fp32_verdict: Verdict | None = None
    remarks: Pairs = []
    passes_with_incidents = add_incidents(passes, find_inputs_folder(repeater.spec.inputs))
    judged_run: JudgedRun | None = None
    is_measuring = measure.noise_floor or measure.second_opinion
    if is_measuring and not (is_resumed or ended_early) and rounding_floor.is_floor_needed(repeater, passes):
        if not (measure.second_opinion or rounding_floor.has_coarse_dtype(repeater.spec, passes)):
            # Floors would only widen the bounds. What agrees without them needs none.
            judged_run = judge_without_causes(passes_with_incidents, settings)
        if judged_run is None or not judged_run.agrees_throughout:
            settings, fp32_verdict, remarks = _measure_rounding(repeater, passes, settings)
            judged_run = None
    judged_run = judged_run or judge_without_causes(passes_with_incidents, settings)
    verdict = judged_run.add_causes()
    if fp32_verdict is not None and _is_worse(fp32_verdict, verdict):
        verdict = replace(fp32_verdict, environment=verdict.environment)
    elif measure.trials and not (is_resumed or ended_early):
        report = run_trials(repeater, passes, verdict, settings)
        if report is not None:
            verdict = judged_run.add_causes(report)
            remarks = [*remarks, *describe_trials(report)]
        single_pass_gradients, why_not = measure_single_pass_gradients(repeater, passes, verdict)
        if why_not is not None:
            remarks = [*remarks, ("no trial", why_not)]
        if single_pass_gradients:
            verdict = judged_run.add_causes(report, single_pass_gradients)
            number = pluralise(len(single_pass_gradients), "pass")
            remarks = [*remarks, ("also ran", f"{number} of one window, each alone, for its own gradient")]
    recording_remarks: Sequence[RecordingRemark] | None = None
    if not is_resumed:
        is_whole = not ended_early and repeater.selection.is_whole
        job_end = describe_job_end(repeater.selection, find_inputs_folder(repeater.spec.inputs))
        # A job that broke off may not have come to its first step.
        is_whole = is_whole and not job_end
        training_remarks = list_training_remarks(passes, verdict, is_whole=is_whole)
        recording_remarks, notes = list_notes(
            repeater.spec.inputs,
            repeater.selection,
            repeater.spec.source,
            passes,
            settings,
            verdict,
            training_remarks,
            is_whole=is_whole,
        )
        remarks = [
            *job_end,
            *describe_weighting(passes),
            *describe_loss_weights(passes),
            *describe_reference(passes),
            *describe_divergence(passes, verdict, repeater.spec),
            *describe_flips(passes),
            *describe_router_loss(passes),
            *describe_absent_router_loss(passes, has_same_gradient=_has_same_gradient(verdict)),
            *(("note", f"{topic}: {text}") for topic, text in training_remarks),
            *notes,
            *remarks,
        ]
    return Conclusion(verdict=verdict, remarks=remarks, recording_remarks=recording_remarks)


def _measure_rounding(
    repeater: RunRepeater, passes: Sequence[PassEvidence], settings: VerdictSettings
) -> tuple[VerdictSettings, Verdict | None, Pairs]:
    """Return `settings` with the measured rounding floors, and the fp32 verdict if one was requested.

    The floors come from a second replay that differs in rounding alone; under --step they are measured anew for each
    pass. With dropout they hold only if both replays drew the same masks. The fp32 verdict judges a replay in fp32,
    with the distance between that replay and this one as its floors. If anything cannot be measured, a remark says so
    and the formula's bounds apply.

    All ranks must call this.
    """
    remarks: Pairs = []
    fp32_verdict: Verdict | None = None
    spec = repeater.spec
    inputs_folder = find_inputs_folder(spec.inputs)
    free_closed_backends()
    try:
        if spec.measure.noise_floor:
            floors: Mapping[str, NoiseFloor] = {}
            step_floors: Mapping[int, Mapping[str, NoiseFloor]] = {}
            if spec.measure.steps:
                step_floors, num_run = rounding_floor.measure_step_floors(repeater, passes)
            else:
                floors, num_run = rounding_floor.measure_floors(repeater, passes, inputs_folder)
            if num_run:
                remarks.append(("also ran", f"{pluralise(num_run, 'pass')} for the rounding floor"))
            if not (floors or step_floors) and rounding_floor.draws_masks(passes):
                why_unknown = "another attention kernel draws other dropout masks"
                remarks.append(("rounding", f"not measured: {why_unknown}"))
                settings = replace(settings, why_no_floors=why_unknown)
            else:
                settings = replace(settings, floors=floors, step_floors=step_floors)
            if repeater.why_kernel_must_stay is not None:
                settings = replace(settings, why_no_floors=repeater.why_kernel_must_stay)
        if spec.measure.second_opinion:
            num_passes = len(repeater.selection.inputs)
            fp32_spec = rounding_floor.make_fp32_variant(spec, repeater.world)
            fp32_passes = repeater.replay_inputs(fp32_spec, num_passes)
            # The fp32 replay is judged within this run's own distance from it, which is this run's rounding.
            has_masks = rounding_floor.have_same_masks(spec, passes, fp32_spec, fp32_passes, settings.dropout)
            floors = rounding_floor.compute_floors(passes, fp32_passes) if has_masks else {}
            fp32_verdict = judge(fp32_passes, replace(settings, floors=floors))
            remarks.append(("in fp32", format_verdict(fp32_verdict)[0][1]))
    except Exception as error:
        # On several ranks the others wait for this one in a collective, so the run has to end.
        if repeater.world.world_size > 1:
            raise
        why_unknown = describe_error(error)
        remarks.append(("rounding", f"not measured: {why_unknown}"))
        settings = replace(settings, why_no_floors=why_unknown)
    return settings, fp32_verdict, remarks


def describe_trials(report: TrialReport) -> Pairs:
    """Say what ran again besides, or why nothing could."""
    if not report.results:
        return [("no trial", why) for why in report.not_run[:1]]
    trials, forwards = pluralise(len(report.results), "trial"), pluralise(report.num_forwards, "forward")
    return [("also ran", f"{trials} of pass {report.index + 1}, in {forwards}")]


def _has_same_gradient(verdict: Verdict) -> bool:
    """Tell whether the job's gradient was judged by its elements, and agrees wherever it was."""
    elements = [finding for finding in verdict.worst if finding.name in (GRADIENT, GRADIENT_RMS)]
    return verdict.reproduced and any(finding.agrees for finding in elements)


def _is_worse(verdict: Verdict, other: Verdict) -> bool:
    worst_first = (Outcome.DIFFERS, Outcome.UNSETTLED, Outcome.REPRODUCED, Outcome.CANNOT_TELL)
    return worst_first.index(verdict.outcome) < worst_first.index(other.outcome)


def _name_kernels(kernels: str) -> str:
    """Return the word that captures have, model or liger, for the kernels that a backend names in its facts."""
    return "liger" if kernels.startswith("fused") else "model"


def add_incidents(passes: Sequence[PassEvidence], folder: Path) -> Sequence[PassEvidence]:
    """Name the incident of each pass of which the job recorded no number. The folder is read only if there is one."""
    if all(recorded is None or recorded.claims for _, recorded, _ in passes):
        return passes
    try:
        records = read_incidents(folder)
    except (CaptureError, OSError):
        # `replay inspect` names the file that cannot be read.
        return passes
    incidents = {
        (name, incident.forward): incident
        for record in records
        for incident in record.incidents
        if incident.place == IN_FORWARD and _ends_job(incident)
        for name in incident.files
    }
    return [
        PassEvidence(
            record,
            replace(recorded, incident=_describe_incident(incidents[record.source, recorded.forward_number])),
            replayed,
        )
        if recorded is not None and not recorded.claims and (record.source, recorded.forward_number) in incidents
        else PassEvidence(record, recorded, replayed)
        for record, recorded, replayed in passes
    ]


def describe_job_end(selection: Selection, folder: Path) -> Pairs:
    """Say how the job broke off, if the only recording of a folder tells: in the words of the rank that broke first."""
    if selection.recording is None or selection.recording.num_recordings > 1:
        return []
    try:
        records = read_incidents(folder)
    except (CaptureError, OSError):
        return []
    ends = [(record.rank, incident) for record in records for incident in record.incidents if _ends_job(incident)]
    if not ends:
        return []
    rank, incident = min(ends, key=lambda end: (end[1].follows_another, end[1].time))
    how = join_lines(incident.message) or f"{incident.what}, {incident.where}"
    forward = "" if incident.forward is None else f", forward {incident.forward}"
    return [("job", f"broke off on rank {rank}{forward} ({incident.place or incident.where}): {how}")]


def _ends_job(incident: Incident) -> bool:
    return incident.ends_job or incident.what == "died"


def _describe_incident(incident: Incident) -> str:
    is_error = incident.what in ("exception", "out of memory")
    how = join_lines(incident.message) if is_error else f"{incident.what}, {incident.where}"
    return f"the job broke off in the forward of this pass: {how}"
