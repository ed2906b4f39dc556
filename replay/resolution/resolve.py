"""Make the choices of a run once, on all ranks together, before its actor (the model under a backend) is opened.

A few choices are filled in later, from the open actor (`ResolvedReplay.complete`).

A setting that was typed keeps its value. Every other setting gets the job's value, which the captures tell, if the
model, this machine and the other options allow it. Probes of a small copy tell what the model allows. Otherwise the
setting gets the value that the model, the machine or another option requires, and otherwise the default. Rank 0 makes
the choices for all ranks. Each rank checks its own files and the attention kernel.

`ReplaySpec` (as typed) and `ResolvedReplay` (every choice made) are both `ReplayParts`. A function that takes
`ReplayParts` works before a choice and after it.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from actor_init.attention.kernel_choice import choose_kernel_name_on_all_ranks
from actor_init.declarations.backends import find_backend_declaration
from actor_init.declarations.optimizers import OPTIMIZERS
from actor_init.model import ModelSource
from actor_init.model_form import Layout
from actor_init.probe.layout_choice import choose_layout
from actor_init.spec import ActorSpec, Attention, Dtype, Kernels, TpPlan
from actor_init.world import World, compute_on_rank0
from capture.facts import Setting
from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import CaptureError
from replay.objective.objective import Objective, explain_unusable_logit_gradient, name_loss
from replay.options.declarations import list_objectives_with
from replay.options.declarations.recorded import FROM_LOGIT_GRADIENT
from replay.options.option_parsing import format_error_with_flags, list_options
from replay.options.resolved import (
    ATTENTION,
    FUSED_MODULES,
    KNOWN_WHEN_OPEN,
    LOSS,
    LOSS_SCALE,
    PACKING,
    TP_PLAN,
    ChosenBy,
    PartT,
    ResolvedChoice,
    ResolvedReplay,
    replace_auto_attention,
)
from replay.options.spec import InputsSpec, LossName, Passes, ReplayParts, ReplaySpec, WindowWeights
from replay.output.text import name_some
from replay.resolution.frozen_parameters import find_frozen_in_job
from replay.resolution.head_choice import choose_head
from replay.resolution.job_defaults import (
    WHY_PADDING_IS_KEPT,
    ChosenAttention,
    apply_choices,
    choose_from_job,
    choose_job_kernel,
    find_inputs_folder,
    find_model_source_on_all_ranks,
)
from replay.resolution.selection import Selection
from replay.resolution.step_choice import choose_steps
from replay.verdict.recorded_pass import list_job_dtypes
from replay.verdict.weight_check import WeightChecker

WHY_KERNEL_OF_PROBE = "packed documents stay apart with it, and not with the kernel that was to be taken first"


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelAndLayout:
    """The attention kernel and the layout of rows, before and after the probe of the model.

    actor_before_probe  options of the actor with the kernel that was typed, or else the job's, if this can be had here;
                        otherwise the kernel is `auto`
    actor               the same options with the layout that the probe chose, and with another kernel if the probe took
                        one in place of `auto`
    attention_reason    why that kernel; empty: neither `choose_job_kernel` nor the probe gave a reason
    """

    actor_before_probe: ActorSpec
    actor: ActorSpec
    layout: Layout
    attention_reason: str


def resolve(
    spec: ReplaySpec,
    selection: Selection,
    first_call: CapturedCall | None,
    world: World,
    loss: ResolvedChoice,
    objective: Objective | None,
) -> ResolvedReplay:
    """Choose what the options leave open.

    Each stage needs the choices of the stages before it:
    1. what the job's captures tell: dtype, packing, fused modules, accumulation, routing
    2. the model, found on every rank, and which of its parameters the job froze
    3. whether and how the optimizer steps
    4. the attention kernel (typed, the job's, or still `auto`) and the layout of rows, with a probe of the model
    5. how log-probs come from the head
    6. the attention kernel if it is still `auto`; each rank checks that it has it
    7. the settings that are left and have a default: those of the backend, the optimizer, the inputs and the objective

    Each choice is listed with who made it and why. A variable whose name begins with `actor` is an ActorSpec, the
    options of the actor; no actor is open yet.

    spec        what was typed
    selection   the inputs of this rank, and what the captures tell of the job's windows
    first_call  what this rank's first capture holds; None if it cannot be read
    loss        what `choose_loss` chose
    objective   the objective that `loss` names; None for sft and for the stand-in (the negated mean log-prob, which
                serves if the loss is unknown)

    All ranks must call this. Raises UsageError, on all of them, for what cannot run here.
    """
    # Rank 0 chooses for all ranks, since the ranks' files and hardware may differ. All ranks take its spec too, since a
    # rank may have been started with other options.
    typed, job_choices = compute_on_rank0(
        world, lambda: (spec, choose_from_job(spec, first_call, selection, world.device.type))
    )
    spec_from_job = replace(typed, actor=apply_choices(typed.actor, job_choices))

    model_source, weight_checker, first_forward_with_other_trained_parameters = _find_model(
        spec_from_job, selection, first_call, world
    )

    spec_with_loss = replace(spec_from_job, measure=replace(spec_from_job.measure, loss=loss.value))
    step_choice = choose_steps(spec_with_loss, model_source, weight_checker, selection, first_call, world)
    spec_with_steps = step_choice.apply_to_spec(spec_with_loss)
    model_source = step_choice.apply_to_source(model_source)

    probed = _choose_kernel_and_layout(typed.actor, spec_with_steps, model_source, selection, first_call, world)
    model_source = replace(model_source, layout=probed.layout)

    # `head_form` has all that the forward needs: the kind of head, what the model does to the logits, such as a soft
    # cap, how large a chunk of tokens is, and whether the loss is compiled. `head_choice` has the value of --head, and
    # who chose it.
    why_whole_logits = explain_whole_logits(spec_with_steps, objective)
    head_form, head_choice = choose_head(
        spec_with_steps, probed.actor, model_source, selection, first_call, world, why_whole_logits=why_whole_logits
    )
    model_source = replace(model_source, head=head_form)
    actor_with_head = replace(probed.actor, head=head_choice.value)

    kernel_name = choose_kernel_name_on_all_ranks(actor_with_head, world, model_source.config)
    actor_with_kernel = replace_auto_attention(actor_with_head, kernel_name)

    remaining_choices = [
        *_list_backend_and_optimizer_settings(actor_with_head),
        *_list_inputs_settings(spec_with_steps.inputs, selection),
        *_choose_clip_high_default(spec_with_steps),
    ]
    choices = [
        *_list_job_choices(job_choices, actor_with_head, probed.layout),
        explain_attention(probed, kernel_name, typed.actor),
        *_explain_model(spec_with_steps, model_source),
        head_choice,
        *_list_choices_left_to_actor(actor_with_head),
        loss,
        *step_choice.list_choices(typed.actor),
        *remaining_choices,
    ]
    # To follow the job's steps is to take a step where the job did, with the settings that it had there.
    followed_steps = step_choice.followed_steps
    return ResolvedReplay(
        actor=_apply_to_part(actor_with_kernel, "actor", remaining_choices),
        inputs=_apply_to_part(spec_with_steps.inputs, "inputs", remaining_choices),
        measure=spec_with_steps.measure,
        state=spec_with_steps.state,
        objective=_apply_to_part(spec_with_steps.objective, "objective", remaining_choices),
        source=model_source,
        device=world.device,
        kernel=kernel_name,
        choices=tuple(_add_typed(choices, typed)),
        attention_reason=probed.attention_reason,
        why_whole_logits=why_whole_logits,
        step_settings=followed_steps.settings if followed_steps is not None else {},
        setting_names_from_job=followed_steps.setting_names_from_job if followed_steps is not None else frozenset(),
        # A recording sees calls of `clip_grad_norm_`, but not a clipping that the job wrote itself. In that case
        # the norm to which the job clipped is inferred from the recorded gradients.
        job_code_clip_norm=followed_steps.job_code_clip_norm if followed_steps is not None else None,
        first_forward_with_other_trained_parameters=first_forward_with_other_trained_parameters,
    )


def _find_model(
    spec: ReplayParts, selection: Selection, first_call: CapturedCall | None, world: World
) -> tuple[ModelSource, WeightChecker, int | None]:
    """Find the model, and which of its parameters the job froze, on all ranks together.

    Returns the model's source, a checker of its weights, and the first forward in which the job trained other
    parameters than before. The third value is None if no such forward is known, or if the replay follows the change
    (`source.frozen_later`), since this backend can change what it trains.
    """
    source = find_model_source_on_all_ranks(spec, world)
    # A checker builds a model to list its parameters. To save this time, one checker serves here and for later choices.
    weight_checker = WeightChecker(source)
    frozen = world.broadcast_from_rank0(find_frozen_in_job(spec, source, weight_checker, first_call, selection.rounds))
    source = replace(source, frozen=frozen.always, frozen_later=frozen.later)
    return source, weight_checker, frozen.first_forward_with_other_trained_parameters


def _choose_kernel_and_layout(
    typed_actor: ActorSpec,
    spec: ReplayParts,
    source: ModelSource,
    selection: Selection,
    first_call: CapturedCall | None,
    world: World,
) -> KernelAndLayout:
    """Choose the attention kernel that was typed, else the job's, if it can be had here, and probe the model with it.

    If rows are to be packed, the probe tells whether documents stay apart with this kernel. If they do not, and the
    kernel is still `auto`, the kernel that every device has is tried. If that does not help, the rows are padded. All
    ranks must call this. Raises UsageError, on all of them, for what was typed and cannot be had.
    """
    attention: ChosenAttention = world.broadcast_from_rank0(
        choose_job_kernel(spec.actor, first_call, world.device, source.config)
    )
    actor_before_probe = replace(spec.actor, attention=attention.option_value)
    is_packing_typed = typed_actor.packing is not None
    actor, layout = choose_layout(
        actor_before_probe,
        source.config,
        world,
        is_typed=is_packing_typed,
        trains=spec.inputs.passes is not Passes.ROLLOUT,
    )
    # If padding has to stay, `choose_from_job` has chosen padded rows. The layout gets this reason, which the user is
    # told. A ring packs its rows all the same, so its layout gets no such reason.
    keeps_padding = selection.must_keep_padding and not is_packing_typed and not layout.packs
    if keeps_padding and not layout.why_unusual:
        layout = replace(layout, why_unusual=WHY_PADDING_IS_KEPT)
    return KernelAndLayout(
        actor_before_probe=actor_before_probe,
        actor=actor,
        layout=layout,
        attention_reason=attention.why if actor.attention == actor_before_probe.attention else WHY_KERNEL_OF_PROBE,
    )


def choose_loss(spec: ReplayParts, selection: Selection, first_call: CapturedCall | None) -> ResolvedChoice:
    """Choose the loss.

    A loss that was typed stays. Otherwise the loss is the job's objective, if every training pass shows it and no
    option is against it. A pass shows it by a noted loss beside advantages and old log-probs, or by the recorded
    gradient of the logits. Otherwise the loss is sft if the first capture has labels, else the stand-in.

    first_call  None if it cannot be read; then labels do not count
    """
    loss = spec.measure.loss
    if loss != LossName.AUTO:
        return ResolvedChoice(setting=LOSS, value=loss, by=ChosenBy.TYPED)
    shown_objective, obstacle = selection.shown_objective, _find_shown_loss_obstacle(spec)
    # `details` keeps each token's log-prob and sketches of gradients. No option sets it. Parity and `replay compare`
    # do. They compare runs with each other and not with the job, and differentiate a mean of log-probs. So the job's
    # objective is not taken. No reason is given, since no user chose this. `check-upgrade` sets `details` too, after
    # it has chosen the loss by `set_loss_of_job`.
    may_take_shown_objective = shown_objective is not None and not spec.measure.details
    if may_take_shown_objective and obstacle is None:
        why = "it noted its loss, advantages and old log-probs"
        if shown_objective == FROM_LOGIT_GRADIENT.name:
            why = "it computes its loss from the model's logits, whose gradient was recorded"
        return ResolvedChoice(setting=LOSS, value=shown_objective, by=ChosenBy.JOB, why=why)
    try:
        loss_by_labels = LossName.STAND_IN if first_call is None else name_loss(loss, first_call.micro_batch())
    except CaptureError:
        # The pass itself will report what is wrong with the capture.
        first_call, loss_by_labels = None, LossName.STAND_IN
    if loss_by_labels != LossName.STAND_IN:
        return ResolvedChoice(setting=LOSS, value=str(loss_by_labels), by=ChosenBy.JOB, why="its captures have labels")
    if may_take_shown_objective and obstacle is not None:
        return ResolvedChoice(setting=LOSS, value=str(loss_by_labels), by=ChosenBy.OPTION, why=obstacle)
    why = "" if shown_objective is not None else _explain_stand_in(selection, first_call)
    return ResolvedChoice(setting=LOSS, value=str(loss_by_labels), by=ChosenBy.DEFAULT, why=why)


def _explain_stand_in(selection: Selection, first_call: CapturedCall | None) -> str:
    """Say why the job's loss is not known."""
    if first_call is None:
        return "the first input cannot be read"
    if (why := explain_unusable_logit_gradient(first_call, list_job_dtypes(first_call))) is not None:
        return why
    if len(selection.shown_objectives) > 1:
        return "the passes do not all show the same loss"
    return "the inputs have no labels, and no noted loss of a policy"


def set_loss_of_job(spec: ReplaySpec, selection: Selection) -> ReplaySpec:
    """Return the spec with the objective that the job's captures show; the same spec if none is to be taken.

    For child replays that could not choose it themselves: `check-upgrade` sets `details`, with which `choose_loss` does
    not take the job's objective, and the parts of captures that `minimise` makes have no noted loss. The
    children see for themselves whether captures have labels.
    """
    # Without a first call, labels do not count.
    loss = choose_loss(spec, selection, None)
    return replace(spec, measure=replace(spec.measure, loss=loss.value)) if loss.by is ChosenBy.JOB else spec


def _find_shown_loss_obstacle(spec: ReplayParts) -> str | None:
    """Say which option is against taking an objective that captures show and nobody typed; None: no option is."""
    inputs, measure = spec.inputs, spec.measure
    if inputs.passes is not Passes.TRAIN:
        why = "takes rollout passes, too" if inputs.passes is Passes.ALL else "takes rollout passes"
        return format_error_with_flags(f"{Setting('passes', inputs.passes)} {why}, of which no loss was noted")
    if measure.window is not WindowWeights.JOB:
        return format_error_with_flags(f"{Setting('window', measure.window)} is for a mean of log-probs")
    return None


def explain_whole_logits(spec: ReplayParts, objective: Objective | None) -> str:
    """Return why the trace or the objective needs the logits of all tokens at once; empty: neither does."""
    if spec.measure.trace:
        return "the trace holds them"
    return f"--loss {objective.loss} may ask for them" if objective and objective.needs_whole_logits else ""


def explain_attention(probed: KernelAndLayout, kernel_name: str, typed_actor: ActorSpec) -> ResolvedChoice:
    """Tell who chose the attention kernel, and why."""
    # `before.attention` is still `auto` if nobody typed a kernel and `choose_job_kernel` did not take the job's. So is
    # `after.attention`, unless the probe took another kernel.
    before, after = probed.actor_before_probe, probed.actor
    if typed_actor.attention != Attention.AUTO:
        by = ChosenBy.TYPED
    elif typed_actor.has_user_model or after.attention != before.attention:
        by = ChosenBy.MODEL
    elif before.attention == Attention.AUTO:
        by = ChosenBy.MACHINE
    else:
        by = ChosenBy.JOB
    machine_reason = (
        "the fastest of a ring's kernels that can be had here" if after.parallel.ring > 1 else "what a CPU has"
    )
    # `choose_job_kernel` gives no reason for a typed kernel, a user's own model or a ring. Otherwise it always gives
    # one on CUDA, and on a CPU only if the captures name a kernel that cannot be had here.
    default_reasons = {ChosenBy.JOB: "its captures name it", ChosenBy.MACHINE: machine_reason}
    why = probed.attention_reason or default_reasons.get(by, "")
    return ResolvedChoice(setting=ATTENTION, value=kernel_name, by=by, why=why)


def _list_job_choices(
    job_choices: Sequence[ResolvedChoice], actor: ActorSpec, layout: Layout
) -> Iterator[ResolvedChoice]:
    """Yield all of `job_choices`; the one of packing with the reason, and its final value: the probe may change it."""
    for choice in job_choices:
        yield _explain_packing(choice, actor, layout) if choice.setting == PACKING else choice


def _explain_packing(packing: ResolvedChoice, actor: ActorSpec, layout: Layout) -> ResolvedChoice:
    by = ChosenBy.MODEL if packing.value != actor.packs else packing.by
    if by is ChosenBy.TYPED and not layout.why_unusual:
        return replace(packing, value=actor.packs, by=by, why="")
    # A packing choice that has a reason already is one that the probe cannot change. For others the probe gives one.
    why = packing.why or layout.why_unusual or ("its packed documents stay apart" if actor.packs else "")
    return replace(packing, value=actor.packs, by=by, why=why)


def _explain_model(spec: ReplayParts, source: ModelSource) -> Iterator[ResolvedChoice]:
    is_typed = spec.actor.model is not None
    by, why = (ChosenBy.TYPED, "") if is_typed else (ChosenBy.JOB, "its config lies beside the inputs")
    yield ResolvedChoice(setting="actor.model", value=source.name, by=by, why=why)
    if source.adapter is not None:
        by = ChosenBy.JOB if spec.actor.adapter is None else ChosenBy.TYPED
        yield ResolvedChoice(setting="actor.adapter", value=source.adapter.describe(), by=by)
    if source.frozen:
        yield ResolvedChoice(
            setting="frozen", value=describe_frozen(source.frozen), by=ChosenBy.JOB, why="it did not train them"
        )


def describe_frozen(names: Collection[str]) -> str:
    """Name the first of the parameters that are not trained, and say how many more there are."""
    return name_some(sorted(names), 1)


def _list_choices_left_to_actor(actor: ActorSpec) -> Iterator[ResolvedChoice]:
    """Yield the choices that only an open actor can tell; `ResolvedReplay.complete` fills them in."""
    if actor.parallel.tp > 1:
        by = ChosenBy.MODEL if actor.parallel.tp_plan is TpPlan.AUTO else ChosenBy.TYPED
        yield ResolvedChoice(setting=TP_PLAN, value=KNOWN_WHEN_OPEN, by=by)
    if actor.kernels is Kernels.FUSED:
        yield ResolvedChoice(setting=FUSED_MODULES, value=KNOWN_WHEN_OPEN, by=ChosenBy.MODEL)
    if actor.dtype is Dtype.FP16:
        yield ResolvedChoice(setting=LOSS_SCALE, value=KNOWN_WHEN_OPEN, by=ChosenBy.DEFAULT)


def _list_backend_and_optimizer_settings(actor: ActorSpec) -> Iterator[ResolvedChoice]:
    """Yield the ZeRO stage of the backend, and the settings of the optimizer except its learning rate."""
    if find_backend_declaration(actor.backend).shards:
        by, why = ChosenBy.TYPED, ""
        if actor.zero_stage is None:
            by, why = ChosenBy.DEFAULT, f"{actor.backend}'s"
            if not actor.has_optimizer:
                why += " without an optimizer"
        yield ResolvedChoice(setting="actor.zero_stage", value=actor.resolved_zero_stage, by=by, why=why)
    declaration = OPTIMIZERS.get(actor.optimizer)
    if declaration is None:
        return
    for setting in declaration.settings:
        # A setting without a command-line option has no `options`, and is not listed. One with several has a value for
        # each.
        value_or_values = setting.read_options(actor)
        values = value_or_values if len(setting.options) > 1 else [value_or_values]
        for name, value in zip(setting.options, values, strict=False):
            is_typed = getattr(actor, name) is not None
            why = "" if is_typed else f"{declaration.packages[0]}'s, of {actor.optimizer}"
            by = ChosenBy.TYPED if is_typed else ChosenBy.DEFAULT
            yield ResolvedChoice(setting=f"actor.{name}", value=value, by=by, why=why)


def _list_inputs_settings(inputs: InputsSpec, selection: Selection) -> Iterator[ResolvedChoice]:
    if inputs.input_file is None:
        by, why = (
            (ChosenBy.TYPED, "") if inputs.inputs else (ChosenBy.DEFAULT, "the sample that ships with the project")
        )
        yield ResolvedChoice(setting="inputs.inputs", value=find_inputs_folder(inputs), by=by, why=why)
    chosen = selection.recording
    if inputs.recording is None and chosen is not None and chosen.num_recordings > 1:
        # A repetition of this run takes the same recording, even if a later one exists by then.
        why = f"the latest of {chosen.num_recordings}"
        yield ResolvedChoice(setting="inputs.recording", value=chosen.number, by=ChosenBy.DEFAULT, why=why)


def _choose_clip_high_default(spec: ReplayParts) -> Iterator[ResolvedChoice]:
    objective = spec.objective
    if spec.measure.loss in list_objectives_with("clip_high") and objective.clip_high is None:
        value, why = objective.clip_low, "as --clip-low"
        yield ResolvedChoice(setting="objective.clip_high", value=value, by=ChosenBy.DEFAULT, why=why)


def _apply_to_part(part: PartT, name: str, choices: Sequence[ResolvedChoice]) -> PartT:
    """Return `part` with the values that the choices give to its settings.

    part  a part of a spec (`ReplayParts`)
    name  the field of the spec that holds the part: actor, inputs, measure or objective
    """
    values = {choice.setting.removeprefix(f"{name}."): choice.value for choice in choices}
    return replace(part, **{field.name: values[field.name] for field in fields(part) if field.name in values})


def _add_typed(choices: Sequence[ResolvedChoice], spec: ReplaySpec) -> list[ResolvedChoice]:
    """Return the choices, and a new choice for each option that was typed and has none.

    An option counts as typed if its value is not its default. The choices are in the order of the options. Last come
    the choices that no option sets, such as the frozen parameters.
    """
    by_setting = {choice.setting: choice for choice in choices}
    in_option_order: dict[str, ResolvedChoice] = {}
    for option in list_options():
        setting, value = f"{option.part}.{option.field}", option.read_value(spec)
        if setting in by_setting:
            in_option_order[setting] = by_setting[setting]
        elif value != option.default:
            in_option_order[setting] = ResolvedChoice(setting=setting, value=value, by=ChosenBy.TYPED)
    return list((in_option_order | by_setting).values())
