"""Choose how log-probs come from the model's head: as the job computed its loss, where its captures show it.

A model that returned logits made them of all tokens at once. One that returned a loss and no logits had a loss in
chunks of tokens, or Liger's. Where nothing shows which, whole logits are taken if they fit, by a prediction from bytes.
"""

import os
import shutil
from dataclasses import replace

import torch

from actor_init.declarations.backends import find_backend_declaration
from actor_init.fused.liger import find_liger_lack
from actor_init.model import ModelSource
from actor_init.model_form import HeadForm
from actor_init.probe import head_probe
from actor_init.probe.head_probe import explain_whole_head
from actor_init.schedule_and_norm import TORCH_DTYPES
from actor_init.spec import ActorSpec, Compile, CompileLengths, Head, UsageError
from actor_init.world import World, compute_on_rank0
from capture.facts import Setting
from capture.file_format.capture_file import CapturedCall
from replay.options.option_parsing import spell_setting
from replay.options.resolved import HEAD, ChosenBy, ResolvedChoice
from replay.options.spec import MeasureSpec, ReplayParts, is_objective
from replay.output.text import format_gibibytes
from replay.profiling.memory_advice import compute_declared_bytes
from replay.profiling.profile_records import HolderKind
from replay.resolution.selection import Selection

# Of what weights, gradients and optimizer leave of a device's memory, the part that whole logits may take. The rest is
# for activations, which nothing predicts before a pass was measured.
LOGITS_SHARE = 0.5
FP32_BYTES = 4


def choose_head(
    spec: ReplayParts,
    actor: ActorSpec,
    source: ModelSource,
    selection: Selection,
    first_call: CapturedCall | None,
    world: World,
    *,
    why_whole_logits: str,
) -> tuple[HeadForm, ResolvedChoice]:
    """Return how log-probs come from the head, and who chose it.

    actor             with every choice made but that of the head
    source            with the layout of rows
    why_whole_logits  what of the run needs whole logits; empty if nothing does

    All ranks must call this, and get the same. Raises UsageError for what was typed and cannot be had.
    """
    liger_lack = next(filter(None, world.gather(find_liger_lack(world.device))), None)
    needs_whole = explain_whole_head(actor, source) or why_whole_logits

    def choose() -> tuple[HeadForm, ResolvedChoice]:
        if actor.head is not Head.AUTO:
            choice = ResolvedChoice(setting=HEAD, value=actor.head, by=ChosenBy.TYPED)
        elif needs_whole:
            choice = _choose_whole(actor, needs_whole, why_whole_logits)
        else:
            choice = _choose_from_job(first_call) or choose_by_bytes(
                actor,
                spec.measure,
                source,
                selection,
                num_data_ranks=world.num_data_ranks,
                device_bytes=measure_device_bytes(world.device),
            )
        if choice.value is not Head.WHOLE:
            if needs_whole:
                form = HeadForm(kind=Head.WHOLE, why=needs_whole)
            else:
                form = head_probe.probe_head(source.config, world.device)
            choice = _allow(choice, form, find_liger_obstacle(spec.measure, actor, form, liger_lack))
            if choice.value is not Head.WHOLE:
                return replace(form, kind=choice.value, why=_explain(choice)), choice
        compiled, lack = _choose_loss_compiler(actor, choice.by, first_call, world.device)
        why = f"{_explain(choice)}, which it is not here: {lack}" if lack else _explain(choice)
        return HeadForm(kind=Head.WHOLE, why=why, compiled=compiled), choice

    return compute_on_rank0(world, choose)


def _explain(choice: ResolvedChoice) -> str:
    return choice.why or spell_setting(Setting("head", choice.value))


def _allow(choice: ResolvedChoice, form: HeadForm, liger_obstacle: tuple[ChosenBy, str] | None) -> ResolvedChoice:
    """Return the choice of chunks or of Liger's loss, or of what has to be in its place.

    form  what the model allows: chunks, or whole logits alone

    Raises UsageError for what was typed and cannot be had.
    """
    is_typed, setting = choice.by is ChosenBy.TYPED, Setting("head", choice.value)
    if form.is_whole:
        if is_typed:
            why = f"is no form of this run, which has whole logits: {form.why}"
            raise UsageError(setting, why, f"Try: {setting.with_value(Head.WHOLE)}")
        return replace(choice, value=Head.WHOLE, by=ChosenBy.MODEL, why=form.why)
    if choice.value is Head.CHUNKS or liger_obstacle is None:
        return choice
    by, lack = liger_obstacle
    if is_typed:
        raise UsageError(setting, lack, f"Try: {setting.with_value(Head.CHUNKS)}")
    return replace(choice, value=Head.CHUNKS, by=by, why=f"{choice.why}, which {lack}")


def _choose_whole(actor: ActorSpec, needs_whole: str, why_whole_logits: str) -> ResolvedChoice:
    is_option = (
        bool(why_whole_logits)
        or actor.compile is Compile.DEEPCOMPILE
        or (actor.parallel.tp > 1 and not find_backend_declaration(actor.backend).splits_head)
    )
    by = ChosenBy.OPTION if is_option else ChosenBy.MODEL
    return ResolvedChoice(setting=HEAD, value=Head.WHOLE, by=by, why=needs_whole)


def _choose_from_job(first_call: CapturedCall | None) -> ResolvedChoice | None:
    """Return the form that the job's first pass shows; None if it shows none."""
    outputs = first_call.outputs if first_call is not None else {}
    # Log-probs of single tokens are recorded of logits alone.
    if "logits_dtype" in outputs or "token_log_probs" in outputs:
        why = "the job's model returned logits"
        why += ", and its loss was compiled" if _had_compiled_loss(first_call) else ""
        return ResolvedChoice(setting=HEAD, value=Head.WHOLE, by=ChosenBy.JOB, why=why)
    if "loss_dtype" not in outputs:
        return None
    if _read_loss_function(first_call).startswith("Liger"):
        return ResolvedChoice(setting=HEAD, value=Head.LIGER, by=ChosenBy.JOB, why="the job's loss is Liger's")
    why = "the job's model returned a loss without logits"
    return ResolvedChoice(setting=HEAD, value=Head.CHUNKS, by=ChosenBy.JOB, why=why)


def _read_loss_function(first_call: CapturedCall | None) -> str:
    return str(first_call.outputs.get("loss_function", "")) if first_call is not None else ""


def _had_compiled_loss(first_call: CapturedCall | None) -> bool:
    return _read_loss_function(first_call).startswith("CompiledFunction")


def _choose_loss_compiler(
    actor: ActorSpec, by: ChosenBy, first_call: CapturedCall | None, device: torch.device
) -> tuple[CompileLengths | None, str]:
    """Return the lengths that a loss of whole logits is compiled for, None if it is not, and why the job's is not here.

    It is compiled where blocks are, and where the job's was. Where ranks share the vocabulary their exchange stays
    outside a graph, and so does all of the loss.
    """
    was_compiled = by is ChosenBy.JOB and _had_compiled_loss(first_call)
    if actor.parallel.tp > 1 and find_backend_declaration(actor.backend).splits_head:
        return None, f"{spell_setting(Setting('tp', actor.parallel.tp))} splits it" if was_compiled else ""
    if actor.compile is Compile.BLOCKS:
        return actor.compile_lengths, ""
    if was_compiled and device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        return None, "no C++ compiler was found"
    return CompileLengths.DYNAMIC if was_compiled else None, ""


def find_liger_obstacle(
    measure: MeasureSpec, actor: ActorSpec, form: HeadForm, lack: str | None
) -> tuple[ChosenBy, str] | None:
    """Return what is against Liger's loss, and who decides so; None if it can be had.

    lack  why a rank's device has no Liger
    """
    if lack is not None:
        return ChosenBy.MACHINE, lack
    if is_objective(measure.loss):
        loss = spell_setting(Setting("loss", measure.loss))
        return ChosenBy.OPTION, f"gives each log-prob the same gradient, and {loss} does not"
    if actor.parallel.tp > 1:
        tp = spell_setting(Setting("tp", actor.parallel.tp))
        return ChosenBy.OPTION, f"takes the whole vocabulary on a rank, and {tp} splits it"
    try:
        form.find_soft_cap()
    except ValueError as error:
        return ChosenBy.MODEL, f"does not know what the model does to its logits ({error})"
    return None


def choose_by_bytes(
    actor: ActorSpec,
    measure: MeasureSpec,
    source: ModelSource,
    selection: Selection,
    *,
    num_data_ranks: int,
    device_bytes: int,
) -> ResolvedChoice:
    """Choose whole logits if those of the largest pass are predicted to fit beside what the model holds.

    device_bytes  the memory that a rank may count on
    """
    needed = predict_logits_bytes(actor, source, selection)
    declared = compute_declared_bytes(source.config, actor, measure, num_data_ranks)
    # Of a model with an adapter no backend declares what its trained parts take, which is little.
    held = declared[HolderKind.WEIGHTS] if source.adapter is not None else sum(declared.values())
    left = max(0, device_bytes - held)
    fits = needed < LOGITS_SHARE * left
    comparison = f"{'less' if fits else 'more'} than half of the {format_gibibytes(left)} GiB that the model leaves"
    why = f"the captures do not show the job's; whole logits {'take' if fits else 'would take'}"
    why = f"{why} {format_gibibytes(needed)} GiB by prediction, {comparison}"
    return ResolvedChoice(setting=HEAD, value=Head.WHOLE if fits else Head.CHUNKS, by=ChosenBy.MACHINE, why=why)


def predict_logits_bytes(actor: ActorSpec, source: ModelSource, selection: Selection) -> float:
    """Predict what whole logits of the largest pass take at most: twice in the compute dtype and twice in fp32.

    Those are the model's logits and the rows of them that predict a token, and of these the logits and log-probs of
    the softmax, which backward turns into gradients of the same sizes.
    """
    packs = source.layout_under(actor).packs
    most_tokens = max(
        (input_round.most_real_tokens if packs else input_round.most_padded_tokens for input_round in selection.rounds),
        default=0,
    )
    vocabulary: int = source.config.get_text_config().vocab_size
    token_bytes = vocabulary / actor.parallel.tp * 2 * (TORCH_DTYPES[actor.dtype].itemsize + FP32_BYTES)
    return most_tokens / actor.parallel.ring * token_bytes


def measure_device_bytes(device: torch.device) -> int:
    """Return the memory of a GPU, or this process's share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host_bytes // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
