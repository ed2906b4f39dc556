"""Make the choices that the job's captures decide, and find the model of a run.

The choices are dtype, packing, fused modules, accumulation, routing and the attention kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from actor_init.attention.kernel_choice import find_kernel_obstacle
from actor_init.declarations.attention import find_job_kernel
from actor_init.declarations.backends import find_backend_declaration
from actor_init.fused.liger import find_liger_lack
from actor_init.inputs.documents import BORDER_NAMES
from actor_init.model import ModelSource, find_model
from actor_init.spec import ActorSpec, Attention, Dtype, Kernels, Routing, UsageError
from actor_init.world import World, try_on_all_ranks
from capture.facts import Setting
from capture.file_format.actor_config import read_actor_config, read_adapter_configs
from capture.file_format.capture_file import CapturedCall
from capture.file_format.folder_layout import find_recording_folder
from capture.file_format.micro_batch import CaptureError
from replay.options.option_parsing import format_error_with_flags
from replay.options.resolved import KERNELS, PACKING, ROUTING, ChosenBy, ResolvedChoice
from replay.options.spec import InputsSpec, ReplayParts, VerdictRule, find_sample_folder
from replay.resolution.selection import Selection
from replay.tolerances.difference import roundoff
from replay.verdict.random_draws import RandomDraws
from replay.verdict.recorded_pass import list_job_dtypes

DTYPES = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16}
WHY_PADDING_IS_KEPT = "padding before or between the tokens of its rows predicts some of them"


def choose_from_job(
    spec: ReplayParts, first_call: CapturedCall | None, selection: Selection, device_type: str
) -> list[ResolvedChoice]:
    """Choose dtype, packing, fused modules, accumulation and routing: as typed, else as `first_call`, one of the job's.

    Without a capture, and where it does not say, the usual defaults apply. Where padding predicts a label of the loss,
    rows are padded, as the job's were. Raises UsageError for a routing that was typed and cannot be had.
    """
    return [
        _choose_dtype(spec.actor, first_call, device_type),
        _choose_packing(spec, first_call, selection),
        _choose_fused_kernels(spec.actor, first_call, device_type),
        _choose_accumulation(spec.actor, selection),
        _choose_routing(spec.actor, first_call),
    ]


def apply_choices(actor: ActorSpec, choices: Sequence[ResolvedChoice]) -> ActorSpec:
    """Return `actor` with the values of `choices` in its fields."""
    return replace(actor, **{choice.setting.removeprefix("actor."): choice.value for choice in choices})


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenAttention:
    """A value of --attention: what was typed, or the job's; auto where another has yet to be chosen.

    why  the reason, for the header; empty where nobody would ask for one
    """

    option_value: str
    why: str = ""


def choose_job_kernel(
    spec: ActorSpec, first_call: CapturedCall | None, device: torch.device, config: PretrainedConfig
) -> ChosenAttention:
    """Return what was typed, else the kernel that the job had, if it can be had here; else auto, with the reason."""
    if spec.attention != Attention.AUTO or spec.has_user_model or spec.parallel.ring > 1:
        return ChosenAttention(option_value=spec.attention)
    on_cuda = device.type == "cuda"
    job_kernel = None if first_call is None else first_call.environment.get("attention")
    instead = "the fastest here that the kernel check finds right" if on_cuda else "what a CPU has"
    if job_kernel is None:
        why = f"{instead}; the captures do not name the job's" if on_cuda else ""
        return ChosenAttention(option_value=Attention.AUTO, why=why)
    kernel = find_job_kernel(job_kernel)
    if kernel is None:
        return ChosenAttention(option_value=Attention.AUTO, why=f"{instead}; the job's {job_kernel} is not known here")
    lack = find_kernel_obstacle(kernel.option_value, device, spec.dtype)
    if lack is not None:
        return ChosenAttention(option_value=Attention.AUTO, why=f"{instead}; of the job's {job_kernel}: {lack.text}")
    if kernel.find_obstacle(config):
        return ChosenAttention(
            option_value=Attention.AUTO, why=f"{instead}; {config.model_type} does not take the job's {job_kernel}"
        )
    computes_all_pairs = kernel.packed.reads_mask and not kernel.packed.skips_blocks
    if on_cuda and computes_all_pairs and spec.packs and _is_padded(first_call):
        why = f"{instead}; the job's {job_kernel} had padded rows, and packed ones need a mask of all pairs of tokens"
        return ChosenAttention(option_value=Attention.AUTO, why=why)
    return ChosenAttention(option_value=kernel.option_value, why=f"as the job's {job_kernel}" if on_cuda else "")


def _choose_dtype(actor: ActorSpec, first_call: CapturedCall | None, device_type: str) -> ResolvedChoice:
    def choose(value: Dtype, by: ChosenBy, why: str = "") -> ResolvedChoice:
        return ResolvedChoice(setting="actor.dtype", value=value, by=by, why=why)

    if actor.dtype is not Dtype.AUTO:
        return choose(actor.dtype, ChosenBy.TYPED)
    if first_call is None or not (job_dtypes := list_job_dtypes(first_call)):
        return choose(Dtype.BF16, ChosenBy.DEFAULT, "the inputs do not say what the job computed in")
    coarsest = max(job_dtypes, key=roundoff)
    dtype = DTYPES.get(coarsest, Dtype.FP32)
    if dtype is Dtype.FP16 and (why := explain_missing_fp16(actor, device_type)) is not None:
        return choose(Dtype.FP32, ChosenBy.MACHINE, why)
    return choose(dtype, ChosenBy.JOB, f"it computed in {coarsest}")


def explain_missing_fp16(actor: ActorSpec, device_type: str) -> str | None:
    """Say why the backend cannot compute in a job's fp16 on a CPU; None on other devices and if it can."""
    if device_type != "cpu":
        return None
    why = find_backend_declaration(actor.backend).find_obstacle(replace(actor, dtype=Dtype.FP16), device_type)
    return None if why is None else f"the job computed in float16, and {format_error_with_flags(why)}"


def _choose_packing(spec: ReplayParts, first_call: CapturedCall | None, selection: Selection) -> ResolvedChoice:
    """Choose whether rows are packed, as long as the probe has nothing against it."""

    def choose(value: bool, by: ChosenBy, why: str = "") -> ResolvedChoice:
        return ResolvedChoice(setting=PACKING, value=value, by=by, why=why)

    actor = spec.actor
    if actor.packing is not None:
        return choose(actor.packing, ChosenBy.TYPED)
    if actor.has_user_model:
        return choose(False, ChosenBy.MODEL)
    if actor.parallel.ring > 1:
        return choose(True, ChosenBy.OPTION, f"--ring {actor.parallel.ring} slices packed rows")
    if selection.must_keep_padding:
        return choose(False, ChosenBy.JOB, WHY_PADDING_IS_KEPT)
    if spec.measure.verdict is VerdictRule.STRICT and _is_padded(first_call):
        return choose(False, ChosenBy.JOB, "its rows were padded, and --verdict strict was given")
    if _is_padded(first_call) and _draws_masks(first_call):
        return choose(False, ChosenBy.JOB, "it drew dropout masks for padded rows")
    return choose(True, ChosenBy.MODEL)


def _choose_fused_kernels(actor: ActorSpec, first_call: CapturedCall | None, device_type: str) -> ResolvedChoice:
    if actor.kernels is not Kernels.AUTO:
        return ResolvedChoice(setting=KERNELS, value=actor.kernels, by=ChosenBy.TYPED)
    if first_call is not None and first_call.environment.get("kernels") == "liger":
        if lack := find_liger_lack(torch.device(device_type)):
            return ResolvedChoice(
                setting=KERNELS, value=Kernels.MODEL, by=ChosenBy.MACHINE, why=f"the job used Liger, which {lack}"
            )
        return ResolvedChoice(setting=KERNELS, value=Kernels.FUSED, by=ChosenBy.JOB, why="it used Liger")
    return ResolvedChoice(setting=KERNELS, value=Kernels.MODEL, by=ChosenBy.DEFAULT)


def _choose_routing(actor: ActorSpec, first_call: CapturedCall | None) -> ResolvedChoice:
    """Choose the job's experts where the captures hold them. Raises UsageError if they were typed and are not there."""

    def choose(value: Routing, by: ChosenBy, why: str = "") -> ResolvedChoice:
        return ResolvedChoice(setting=ROUTING, value=value, by=by, why=why)

    recorded, live = Setting("routing", Routing.RECORDED), Setting("routing", Routing.LIVE)
    has_routes = first_call is not None and bool(first_call.routes)
    sequence_parallel = Setting("sequence_parallel", True)
    if actor.routing is Routing.RECORDED and actor.parallel.sequence_parallel:
        why = f"gives each router all tokens of a row, and {sequence_parallel} gives it a share"
        raise UsageError(recorded, why, f"Try: {live}")
    if actor.routing is Routing.RECORDED and first_call is not None and not has_routes:
        raise UsageError(recorded, "needs routes of experts, and the captures hold none", f"Try: {live}")
    if actor.routing is not Routing.AUTO:
        return choose(actor.routing, ChosenBy.TYPED)
    if not has_routes:
        return choose(Routing.LIVE, ChosenBy.DEFAULT, "the captures hold no routes of experts")
    if actor.parallel.sequence_parallel:
        return choose(Routing.LIVE, ChosenBy.OPTION, f"{sequence_parallel} gives each router a share of the tokens")
    return choose(Routing.RECORDED, ChosenBy.JOB, "its captures hold the experts of each token")


def _choose_accumulation(actor: ActorSpec, selection: Selection) -> ResolvedChoice:
    by = ChosenBy.TYPED if actor.grad_accumulation else ChosenBy.JOB if selection.has_job_windows else ChosenBy.DEFAULT
    why = "as many passes as make its windows" if by is ChosenBy.JOB else ""
    return ResolvedChoice(setting="actor.grad_accumulation", value=selection.grad_accumulation, by=by, why=why)


def _is_padded(first_call: CapturedCall | None) -> bool:
    """Is each row of the capture one document? Positions or borders would tell of several documents in a row."""
    return first_call is not None and not {"position_ids", *BORDER_NAMES} & first_call.tensors.keys()


def _draws_masks(first_call: CapturedCall | None) -> bool:
    """Is the first pass known to have drawn random numbers while it trained?"""
    draws = None if first_call is None or not first_call.trains else RandomDraws.from_call(first_call)
    return draws is not None and draws.has_any


def find_source(spec: ReplayParts) -> ModelSource:
    """Find the model of a run: the one that --model names, or the job's, whose config lies beside the inputs.

    Raises UsageError if there is none, or if it has an adapter, and whole models are to be saved.
    """
    folder = find_inputs_folder(spec.inputs)
    try:
        captured = read_actor_config(folder) if spec.actor.model is None or spec.actor.has_user_model else None
        adapters = {} if spec.actor.has_user_model else read_adapter_configs(folder)
    except CaptureError as error:
        raise UsageError(*error.args) from error
    source = find_model(spec.actor, captured, str(shorten_path(folder / "actor.json")), adapters)
    if source.adapter is not None and spec.state.save_model is not None:
        why = "writes whole models, and this one has an adapter"
        raise UsageError(Setting("save_model"), why, f"Try: {Setting('save_state')}")
    return source


def find_model_source_on_all_ranks(spec: ReplayParts, world: World) -> ModelSource:
    """Find the model on every rank. Raises UsageError on all of them if one lacks it, or has another file of it."""
    source = try_on_all_ranks(world, lambda: find_source(spec))
    first_facts, *_ = rank_facts = world.gather(dict(source.facts))
    for rank, facts in enumerate(rank_facts):
        if facts.get("model_file_sha256") != first_facts.get("model_file_sha256"):
            raise UsageError(
                f"{facts['model_file']} is another file on rank {rank} than {first_facts['model_file']} on rank 0. "
                "Copy one to all nodes"
            )
    return source


def find_inputs_folder(spec: InputsSpec) -> Path:
    if spec.input_file is not None:
        return find_recording_folder(spec.input_file)
    return spec.inputs if spec.inputs is not None else find_sample_folder()


def shorten_path(path: Path) -> Path:
    """Return the path relative to the current folder, if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
