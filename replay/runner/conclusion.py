"""Judge the passes of a run against the job, within the rounding that is measured where it matters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actor_init.backends.protocol import free_closed
from actor_init.dropout_settings import acting_dropouts
from actor_init.model import lasting_config
from actor_init.optimizer import TORCH_DTYPES
from actor_init.world import World
from capture.black_box.incidents import Incident, read_incidents
from capture.file_format.micro_batch import CaptureError
from capture.record.job_facts import device_name
from capture.record.job_facts import versions as loaded_versions
from capture.record.rng_and_outputs import environment
from replay.options.resolved import ResolvedReplay
from replay.options.wording import in_flags
from replay.output.text import Pairs, one_line
from replay.resolution.model_source import inputs_folder
from replay.runner import rounding_floor
from replay.runner.rounding_floor import Again
from replay.tolerances.job import Floor
from replay.verdict.findings import Setting
from replay.verdict.job_values import is_mixture
from replay.verdict.judge import Outcome, Pass, Verdict, judge
from replay.verdict.text import verdict_lines
from replay.verdict.training_remarks import remarks_on_training
from replay.verdict.weight_check import SameWeights

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
            *acting_dropouts(lasting_config(source.config)),
            *(["lora_dropout"] if source.adapter and source.adapter.settings.get("lora_dropout") else []),
        ],
        packs=spec.actor.packs and spec.actor.parallel.ring == 1,
        is_mixture=is_mixture(same_weights.names),
        environment={**loaded_versions(), **environment(), "device": device_name(world.device), **kernel},
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
    free_closed()
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
