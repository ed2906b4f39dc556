"""Hold the model that a job ran against the one that a replay builds, once, when its actor is open."""

from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from actor_init.adapters import Adapter, add_adapter
from actor_init.model import ModelSource, build_on_meta, find_model, make_trainable, to_plain_config
from actor_init.spec import ActorSpec, UsageError
from actor_init.world import World
from capture.file_format.actor_config import read_actor_config, read_adapter_configs
from capture.file_format.micro_batch import CaptureError
from capture.file_format.model_facts import ModelFacts, read_model_facts, select_part
from capture.file_format.optimizer_step import strip_wrappers
from capture.record.model_facts import collect_model_facts, describe_buffers
from replay.options.resolved import ResolvedReplay
from replay.resolution.job_defaults import find_inputs_folder
from replay.verdict.model_comparison import OwnModel, OwnParameter, compare_models, find_usual_dtype
from replay.verdict.model_facts import ModelDifference, compare_configs, make_config_difference

# Where a class of transformers says which of its parameters stay in fp32 when weights are loaded.
_NAMES_OF_FP32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFindings:
    """What came of comparing the job's model with the replay's.

    problem  why they could not be compared; None: they were, or the recording states nothing of the model
    """

    differences: Sequence[ModelDifference] = ()
    problem: str | None = None


def find_model_differences(
    spec: ResolvedReplay, model: nn.Module, recording_ids: Container[str | None], world: World
) -> ModelFindings:
    """Find what the job's model had other than the replay's, on all ranks alike. All ranks must call this.

    model          the open actor's, whose buffers have values
    recording_ids  of the recording that the inputs are of
    """
    findings = ModelFindings()
    if world.rank == 0:
        try:
            findings = ModelFindings(differences=_compare(spec, model, recording_ids))
        except CaptureError as error:
            findings = ModelFindings(problem=error.text)
        except Exception as error:
            # The other ranks wait for this one in a collective, and the passes can be replayed all the same.
            findings = ModelFindings(problem=f"{type(error).__name__}: {error}")
    shared: ModelFindings = world.broadcast_from_rank0(findings)
    return shared


def _compare(spec: ResolvedReplay, model: nn.Module, recording_ids: Container[str | None]) -> list[ModelDifference]:
    folder = find_inputs_folder(spec.inputs)
    job = [facts for facts in read_model_facts(folder) if facts.recording in recording_ids]
    changed_settings: dict[str, object] = {}
    for facts in job:
        changed_settings |= facts.config
    differences = find_config_differences(spec.actor, spec.source, read_actor_config(folder), changed_settings)
    if job:
        own = describe_own_model(spec.source, model, read_adapter_configs(folder), job[0])
        differences += compare_models([select_part(facts, own.facts.parameters) for facts in job], own)
    return differences


def describe_own_model(
    source: ModelSource, model: nn.Module, adapters: Mapping[str, Mapping[str, object]], job: ModelFacts
) -> OwnModel:
    """Describe the replay's model as it is built: before it is sharded, compiled or fused, with the job's adapter.

    model     the open actor's: its buffers are described
    adapters  configs of the job's adapters; the actor may have them merged into its weights
    """
    kernel = job.attention["name"] if job.attention is not None else "eager"
    # Some classes give a few parameters a dtype of their own, whatever that of the model is.
    dtype = getattr(torch, find_usual_dtype(job), None)
    dtype = dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
    try:
        built: Any = build_on_meta(source.config, attention=kernel, dtype=dtype)
    except UsageError:
        # The kernel is not installed here, or is one that the job's own code registered.
        built = build_on_meta(source.config, attention="eager", dtype=dtype)
    frozen_by_class = {id(parameter) for parameter in built.parameters() if not parameter.requires_grad}
    if source.adapter is None and adapters:
        # Of an adapter that cannot be built here nothing is compared.
        with suppress(UsageError):
            add_adapter(built, Adapter.from_configs(adapters, source.name))
    make_trainable(built, source)
    facts = collect_model_facts(built, forward=0, trains=True).to_model_facts(in_patterns=False)
    in_fp32 = {part for name in _NAMES_OF_FP32 for part in getattr(built, name, None) or ()}
    parameters = {
        strip_wrappers(name): OwnParameter(
            is_frozen_by_class=id(parameter) in frozen_by_class,
            is_followed=any(name in names for names in source.frozen_later.values()),
            may_be_fp32=any(part in name for part in in_fp32),
        )
        for name, parameter in built.named_parameters(remove_duplicate=False)
    }
    return OwnModel(facts=replace(facts, buffers=describe_buffers(model)), parameters=parameters)


def find_config_differences(
    spec: ActorSpec,
    source: ModelSource,
    captured: Mapping[str, object] | None,
    changed_settings: Mapping[str, object],
) -> list[ModelDifference]:
    """List the settings in which the replay's model computes otherwise than the job's config says.

    captured          the config in the job's actor.json; None without one
    changed_settings  what the running model's config had other than that
    """
    is_job_config = spec.model is None and not changed_settings
    if is_job_config or spec.has_user_model or captured is None:
        return []
    try:
        job_config = find_model(
            ActorSpec(num_layers=spec.num_layers), {**captured, **changed_settings}, "the job"
        ).config
    except UsageError:
        # The transformers that is installed has no such model type, or the job's model has fewer layers than this run.
        job_type, own_type = captured.get("model_type"), source.config.model_type
        return [make_config_difference("model_type", job_type, own_type)] if job_type != own_type else []
    return compare_configs(to_plain_config(job_config), to_plain_config(source.config))
