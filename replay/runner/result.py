"""Hold a replay and what it came to: as it ended here, or as its log tells; also of one that failed or goes on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from actor_init.backends.protocol import free_closed_backends
from actor_init.dropout_settings import find_acting_dropouts
from actor_init.model import strip_config
from actor_init.optimizer import TORCH_DTYPES
from actor_init.spec import UsageError
from actor_init.world import World
from capture.black_box.incidents import Incident, read_incidents
from capture.file_format.micro_batch import CaptureError
from capture.record.job_facts import read_device_name
from capture.record.job_facts import read_versions as loaded_versions
from capture.record.rng_and_outputs import read_environment
from replay.options.option_parsing import in_flags
from replay.options.resolved import ResolvedReplay
from replay.output.text import Pairs, counted, one_line
from replay.profiling.shares import MemoryPeak, Profile
from replay.resolution.job_defaults import inputs_folder
from replay.runlog.reader import folder_of, lines_so_far
from replay.runlog.records import PassRecord
from replay.runlog.run_file import RUN_FILE, RunEnd, RunFile, RunStart, Values, read_section
from replay.runlog.summary import Statistics, reason_to_leave_out, summarize
from replay.runner import rounding_floor
from replay.runner.out_of_memory import OutOfMemory
from replay.runner.rounding_floor import Again
from replay.tolerances.job import Floor
from replay.verdict.findings import Setting
from replay.verdict.job_values import is_mixture
from replay.verdict.judge import Outcome, Pass, Verdict, judge
from replay.verdict.text import verdict_lines
from replay.verdict.training_remarks import remarks_on_training
from replay.verdict.weight_check import SameWeights

Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One replay: its log's folder, run.json, and passes by number and rank.

    problems  why the log is not whole
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
        folder = folder_of(path)
        file = RunFile.read(folder)
        if file.start is None:
            raise UsageError(f"{folder}: run.json names no devices, so it is damaged. Give a folder that a run left")
        problems: list[str] = []
        records: list[PassRecord] = []
        for rank in range(len(file.start.devices)):
            own, problem = lines_so_far(folder / f"rank{rank}.jsonl")
            records += own
            problems += [problem] if problem else []
        records.sort(key=lambda record: (record.index, record.rank))
        if file.exit_code is None:
            problems.append("run.json has no end: the run goes on, or was killed")
        if failure := file.failure:
            problems.append(f"the run broke off{file.where_it_broke_off()}: {failure.error or failure.kind}")
        if failed := len({record.index for record in records if record.error is not None}):
            problems.append(f"{counted(failed, 'pass')} failed")
        return cls(folder=folder, file=file, records=records, problems=problems)

    @property
    def start(self) -> RunStart:
        """What was known before the first pass."""
        assert self.file.start is not None, "read() and a run that ended have one"
        return self.file.start

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
        ranks: dict[int, list[PassRecord]] = {}
        for record in self.records:
            ranks.setdefault(record.index, []).append(record)
        reasons = {index: reason_to_leave_out(peers) for index, peers in ranks.items()}
        return {index: reason for index, reason in reasons.items() if reason}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of run.json."""
        return self.file.to_dict()

    @property
    def _end(self) -> RunEnd:
        return self.file.end or RunEnd(statistics=self.statistics)

    def _section(self, kind: type[Section], name: str, values: Values | None) -> Section | None:
        return read_section(kind, values, source=f"{self.folder / RUN_FILE}: {name}")


# Judge the passes of a run against the job, within the rounding that is measured where it matters.

IN_FORWARD = "in forward"  # of `Incident.place`


@dataclass(frozen=True, kw_only=True, slots=True)
class Conclusion:
    """The verdict on a run, and remarks about it."""

    verdict: Verdict
    remarks: Pairs


def setting_of(spec: ResolvedReplay, same_weights: SameWeights, world: World, facts: Mapping[str, object]) -> Setting:
    """Return what the passes are judged in: numbers, ranks and kernels of this run."""
    source = spec.source
    dtype = str(TORCH_DTYPES[spec.actor.dtype]).removeprefix("torch.")
    kernel = {
        "attention": str(facts["attention_kernel"]),
        "kernels": _kind_of(str(facts.get("kernels", ""))),
        "dtype": dtype,
    }
    return Setting(
        dtype=dtype,
        num_layers=source.config.get_text_config().num_hidden_layers,
        num_data_ranks=world.num_data_ranks,
        grad_accumulation=spec.actor.num_accumulated,
        steps=spec.actor if spec.measure.step else None,
        dropout=[
            *find_acting_dropouts(strip_config(source.config)),
            *(["lora_dropout"] if source.adapter and source.adapter.settings.get("lora_dropout") else []),
        ],
        packs=spec.actor.packs and spec.actor.parallel.ring == 1,
        is_mixture=is_mixture(same_weights.names),
        environment={**loaded_versions(), **read_environment(), "device": read_device_name(world.device), **kernel},
    )


def conclude(
    again: Again, passes: Sequence[Pass], setting: Setting, *, is_resumed: bool, broke_off: bool
) -> Conclusion:
    """Judge the passes against the job, measuring the rounding floor first where the dtype is coarse.

    again       runs them once more
    is_resumed  passes of an earlier process are not among them

    All ranks must call this.
    """
    measure = again.spec.measure
    opinion: Verdict | None = None
    remarks: Pairs = []
    measures = measure.noise_floor or measure.second_opinion
    if measures and not (is_resumed or broke_off) and rounding_floor.is_worth_it(again, passes):
        setting, opinion, remarks = _rounded(again, passes, setting)
    verdict = judge(with_incidents(passes, inputs_folder(again.spec.inputs)), setting)
    if opinion is not None and _is_worse(opinion, verdict):
        verdict = replace(opinion, environment=verdict.environment)
    if not is_resumed:
        is_whole = not broke_off and again.selection.is_whole
        remarks = [*remarks_on_training(passes, verdict, is_whole=is_whole), *remarks]
    return Conclusion(verdict=verdict, remarks=remarks)


def _rounded(again: Again, passes: Sequence[Pass], setting: Setting) -> tuple[Setting, Verdict | None, Pairs]:
    """Return `setting` with the measured rounding floors, and the fp32 verdict if one was requested.

    If the floor cannot be measured, a remark says so and the formula bounds apply. All ranks must call this.
    """
    remarks: Pairs = []
    opinion: Verdict | None = None
    spec = again.spec
    free_closed_backends()
    try:
        if spec.measure.noise_floor:
            floors: Mapping[str, Floor] = {}
            step_floors: Mapping[int, Mapping[str, Floor]] = {}
            if spec.measure.step:
                step_floors = rounding_floor.grown(again, passes)
                first = step_floors[min(step_floors)]
            else:
                first = floors = rounding_floor.measured(again, passes, inputs_folder(spec.inputs))
            if setting.dropout and not rounding_floor.have_same_masks(first, setting, passes):
                unknown = "another attention kernel draws other dropout masks"
                remarks.append(("rounding", f"not measured: {unknown}"))
                setting = replace(setting, unknown_rounding=unknown)
            else:
                setting = replace(setting, floors=floors, step_floors=step_floors)
            if again.why_one_kernel is not None:
                setting = replace(setting, unknown_rounding=again.why_one_kernel)
        if spec.measure.second_opinion:
            fp32 = again.passes(rounding_floor.in_fp32(spec), len(again.selection.inputs))
            # this run's own distance from the more precise one
            apart = rounding_floor.floors_of(passes, fp32)
            if setting.dropout and not rounding_floor.have_same_masks(apart, setting, passes):
                apart = {}
            opinion = judge(fp32, replace(setting, floors=apart))
            remarks.append(("in fp32", verdict_lines(opinion)[0][1]))
    except Exception as error:
        if again.world.world_size > 1:
            raise  # the other ranks wait for this one
        unknown = f"{type(error).__name__}: {one_line(in_flags(error))}"
        remarks.append(("rounding", f"not measured: {unknown}"))
        setting = replace(setting, unknown_rounding=unknown)
    return setting, opinion, remarks


def _is_worse(one: Verdict, other: Verdict) -> bool:
    order = (Outcome.DIFFERS, Outcome.UNSETTLED, Outcome.REPRODUCED, Outcome.CANNOT_TELL)
    return order.index(one.outcome) < order.index(other.outcome)


def _kind_of(kernels: str) -> str:
    """Return the word that captures have for what a backend says that it fused: model or liger."""
    return "liger" if kernels.startswith("fused") else "model"


def with_incidents(passes: Sequence[Pass], folder: Path) -> Sequence[Pass]:
    """Name the incident of each pass that has no number of the job's. The folder is looked at if there is one."""
    if all(recorded is None or recorded.claims for _, recorded, _ in passes):
        return passes
    try:
        records = read_incidents(folder)
    except (CaptureError, OSError):  # `replay inspect` names the file
        return passes
    ended = [one for record in records for one in record.incidents if one.place == IN_FORWARD and _ends_job(one)]
    found = {(name, one.forward): one for one in ended for name in one.files}
    return [
        Pass(record, replace(recorded, broke_off=_how_it_broke_off(found[record.source, recorded.step])), replayed)
        if recorded is not None and not recorded.claims and (record.source, recorded.step) in found
        else Pass(record, recorded, replayed)
        for record, recorded, replayed in passes
    ]


def _ends_job(incident: Incident) -> bool:
    return incident.ends_job or incident.what == "died"


def _how_it_broke_off(incident: Incident) -> str:
    is_error = incident.what in ("exception", "out of memory")
    how = one_line(incident.message) if is_error else f"{incident.what}, {incident.where}"
    return f"the job broke off in the forward of this pass: {how}"
