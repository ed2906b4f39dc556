"""Choose how log-probs come from the model's head: as the job computed its loss, where its captures show it.

A model that returned logits made them of all tokens at once. One that returned a loss and no logits had a loss in
chunks of tokens. Where nothing shows which, whole logits are taken if they fit, by a prediction from bytes.
"""

import os
from dataclasses import replace

import torch

from actor_init.declarations.backends import find_declaration
from actor_init.model import ModelSource
from actor_init.model_form import HeadForm
from actor_init.optimizer import TORCH_DTYPES
from actor_init.probe.head_probe import explain_whole_head, probe_head_on_first
from actor_init.spec import ActorSpec, Compile, Head, UsageError
from actor_init.world import World
from capture.facts import Setting
from capture.file_format.capture_file import Call
from replay.options.option_parsing import spell_setting
from replay.options.resolved import HEAD, ChosenBy, ResolvedChoice
from replay.options.spec import MeasureSpec
from replay.output.text import format_gibibytes
from replay.profiling.memory_advice import compute_declared_bytes
from replay.profiling.profile_records import HolderKind
from replay.resolution.selection import Selection

# Of what weights, gradients and optimizer leave of a device's memory, the part that whole logits may take. The rest is
# for activations, which nothing predicts before a pass was measured.
LOGITS_SHARE = 0.5
FP32_BYTES = 4


def choose_head(
    actor: ActorSpec,
    measure: MeasureSpec,
    source: ModelSource,
    selection: Selection,
    first_call: Call | None,
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
    needs_whole = explain_whole_head(actor, source) or why_whole_logits
    choice: ResolvedChoice
    if actor.head is not Head.AUTO:
        choice = ResolvedChoice(setting=HEAD, value=actor.head, by=ChosenBy.TYPED)
        why = spell_setting(Setting("head", actor.head))
    else:
        choice = (
            _choose_whole(actor, needs_whole, why_whole_logits)
            if needs_whole
            else world.from_first(
                _choose_from_job(first_call) or _choose_by_bytes(actor, measure, source, selection, world)
                if world.rank == 0
                else None
            )
        )
        why = choice.why
    if choice.value is Head.WHOLE:
        return HeadForm(kind=Head.WHOLE, why=why), choice
    form = HeadForm(kind=Head.WHOLE, why=needs_whole) if needs_whole else probe_head_on_first(source, world)
    if form.in_chunks:
        return replace(form, why=why), choice
    if choice.by is ChosenBy.TYPED:
        raise UsageError(
            Setting("head", actor.head),
            f"is no form of this run, which has whole logits: {form.why}",
            f"Try: {Setting('head', Head.WHOLE)}",
        )
    return form, replace(choice, value=Head.WHOLE, by=ChosenBy.MODEL, why=form.why)


def _choose_whole(actor: ActorSpec, needs_whole: str, why_whole_logits: str) -> ResolvedChoice:
    is_option = (
        bool(why_whole_logits)
        or actor.compile is Compile.DEEPCOMPILE
        or (actor.parallel.tp > 1 and not find_declaration(actor.backend).splits_head)
    )
    by = ChosenBy.OPTION if is_option else ChosenBy.MODEL
    return ResolvedChoice(setting=HEAD, value=Head.WHOLE, by=by, why=needs_whole)


def _choose_from_job(first_call: Call | None) -> ResolvedChoice | None:
    """Return the form that the job's first pass shows; None if it shows none."""
    outputs = first_call.outputs if first_call is not None else {}
    # Log-probs of single tokens are recorded of logits alone.
    if "logits_dtype" in outputs or "token_log_probs" in outputs:
        return ResolvedChoice(setting=HEAD, value=Head.WHOLE, by=ChosenBy.JOB, why="the job's model returned logits")
    if "loss_dtype" in outputs:
        why = "the job's model returned a loss without logits"
        return ResolvedChoice(setting=HEAD, value=Head.CHUNKS, by=ChosenBy.JOB, why=why)
    return None


def _choose_by_bytes(
    actor: ActorSpec, measure: MeasureSpec, source: ModelSource, selection: Selection, world: World
) -> ResolvedChoice:
    """Choose whole logits if those of the largest pass are predicted to fit beside what the model holds."""
    needed = predict_logits_bytes(actor, source, selection)
    declared = compute_declared_bytes(source.config, actor, measure, world.num_data_ranks)
    # Of a model with an adapter no backend declares what its trained parts take, which is little.
    held = declared[HolderKind.WEIGHTS] if source.adapter is not None else sum(declared.values())
    left = max(0, _measure_device_bytes(world.device) - held)
    fits = needed < LOGITS_SHARE * left
    words = f"{format_gibibytes(needed)} GiB by prediction, {'less' if fits else 'more'} than half of"
    words = f"{words} the {format_gibibytes(left)} GiB that the model leaves"
    why = f"the captures do not show the job's; whole logits {'take' if fits else 'would take'} {words}"
    return ResolvedChoice(setting=HEAD, value=Head.WHOLE if fits else Head.CHUNKS, by=ChosenBy.MACHINE, why=why)


def predict_logits_bytes(actor: ActorSpec, source: ModelSource, selection: Selection) -> float:
    """Predict what whole logits of the largest pass take at most: twice in the compute dtype and twice in fp32.

    Those are the model's logits and the rows of them that predict a token, and of these the logits and log-probs of
    the softmax, which backward turns into gradients of the same sizes.
    """
    packs = source.layout_under(actor).packs
    most_tokens = max(
        (each.most_real_tokens if packs else each.most_padded_tokens for each in selection.rounds), default=0
    )
    vocabulary: int = source.config.get_text_config().vocab_size
    token_bytes = vocabulary / actor.parallel.tp * 2 * (TORCH_DTYPES[actor.dtype].itemsize + FP32_BYTES)
    return most_tokens / actor.parallel.ring * token_bytes


def _measure_device_bytes(device: torch.device) -> int:
    """Return the memory of a GPU, or this process's share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host_bytes // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
