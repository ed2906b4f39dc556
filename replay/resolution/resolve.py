"""Make every choice of a run once, on all ranks together, before its actor is opened.

What is typed stays. Of the rest the job decides what its captures say, then what the model allows, which its probes
show, then what this machine has; a default is left. Rank 0 chooses; files and probes are checked on each rank.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, replace

from actor_init.declarations.backends import find_declaration
from actor_init.model import ModelSource
from actor_init.model_form import Layout
from actor_init.probe.head_probe import choose_head
from actor_init.probe.layout_choice import choose_layout
from actor_init.spec import ActorSpec, Attention, Compile, Dtype, Kernels, OptimizerName, TpPlan
from actor_init.world import World
from capture.file_format.capture_file import Call
from replay.objective.objective import Objective
from replay.options.declarations import objectives_with
from replay.options.option_parsing import toggles
from replay.options.resolved import (
    ATTENTION,
    FUSED_MODULES,
    LOSS_SCALE,
    ONCE_OPEN,
    PACKING,
    TP_PLAN,
    By,
    Choice,
    PartT,
    ResolvedReplay,
    with_kernel,
)
from replay.options.spec import InputsSpec, Parts, Passes, ReplaySpec
from replay.resolution.job_defaults import (
    PADDING_PREDICTS,
    ChosenKernel,
    from_job,
    frozen_in_job,
    inputs_folder,
    job_kernel,
    settled,
    source_of_all,
)
from replay.resolution.selection import Selection

# The settings of torch's optimizers that torch has a default for.
OPTIMIZER_SETTINGS = {
    OptimizerName.ADAMW: ("weight_decay", "beta1", "beta2", "eps"),
    OptimizerName.SGD: ("weight_decay", "momentum"),
    OptimizerName.NONE: (),
}


def resolve(
    spec: ReplaySpec, selection: Selection, first: Call | None, world: World, objective: Objective | None
) -> ResolvedReplay:
    """Choose what the options leave open.

    first      the first capture; None if it cannot be read
    objective  what --loss names; None for the negated mean log-prob

    All ranks must call this. Raises UsageError, on all of them, for what cannot run here.
    """
    spec, chosen = world.from_first((spec, from_job(spec, first, selection, world.device.type)))
    run = replace(spec, actor=settled(spec.actor, chosen))
    source = source_of_all(run, world)
    source = replace(source, frozen=world.from_first(frozen_in_job(run, source, first)))
    kernel: ChosenKernel = world.from_first(job_kernel(run.actor, first, world.device, source.config))
    asked = replace(run.actor, attention=kernel.attention)
    trains = run.inputs.passes is not Passes.ROLLOUT
    packing_is_given = spec.actor.packing is not None
    actor, layout = choose_layout(asked, source.config, world, is_given=packing_is_given, trains=trains)
    if selection.padding_predicts and not packing_is_given and not layout.why:
        layout = replace(layout, why=PADDING_PREDICTS)
    wants_logits = what_wants_logits(run, objective)
    head = choose_head(actor, source, world, wants_logits=wants_logits)
    source = replace(source, layout=layout, head=head)
    named, kernel_name = with_kernel(actor, world.device, source.config)
    by = _by_whom(spec.actor, asked, actor)
    usual = {By.JOB: "its captures name it", By.MACHINE: "what a CPU has"}
    attention = Choice(setting=ATTENTION, value=kernel_name, by=by, why=kernel.why or usual.get(by, ""))
    filled = [*_of_engine(actor), *_of_inputs(run.inputs), *_of_objective(run)]
    choices = [
        *(_with_layout(choice, actor, layout) if choice.setting == PACKING else choice for choice in chosen),
        attention,
        *_of_model(run, source),
        _of_head(actor, source, wants_logits),
        *_once_open(actor),
        *filled,
    ]
    return ResolvedReplay(
        actor=_filled(named, "actor", filled),
        inputs=_filled(run.inputs, "inputs", filled),
        measure=run.measure,
        state=run.state,
        objective=_filled(run.objective, "objective", filled),
        source=source,
        device=world.device,
        kernel=kernel_name,
        choices=tuple(_with_typed(choices, spec)),
        attention_reason=kernel.why,
        wants_logits=wants_logits,
    )


def what_wants_logits(spec: Parts, objective: Objective | None) -> str:
    """Return what of a run needs whole logits, whatever --whole-logits says; empty if nothing does."""
    if spec.measure.trace:
        return "the trace holds them"
    return f"--loss {objective.loss} may ask for them" if objective and objective.needs_whole_logits else ""


def _by_whom(typed: ActorSpec, asked: ActorSpec, chosen: ActorSpec) -> By:
    """Tell who chose the attention kernel: `asked` has the job's, and `chosen` the one that is right for the layout."""
    if typed.attention != Attention.AUTO:
        return By.TYPED
    if typed.is_custom or chosen.attention != asked.attention:
        return By.MODEL
    return By.MACHINE if asked.attention == Attention.AUTO else By.JOB


def _with_layout(packing: Choice, actor: ActorSpec, layout: Layout) -> Choice:
    """Return the choice of packing as the probe leaves it, with the rows in words."""
    by = By.MODEL if packing.value != actor.packs else packing.by
    why = packing.why or layout.why or ("its packed documents stay apart" if actor.packs else "")
    return replace(packing, value=actor.packs, by=by, why="" if by is By.TYPED and not layout.why else why)


def _of_model(run: Parts, source: ModelSource) -> Iterator[Choice]:
    is_typed = run.actor.model is not None
    by, why = (By.TYPED, "") if is_typed else (By.JOB, "its config lies beside the inputs")
    yield Choice(setting="actor.model", value=source.name, by=by, why=why)
    if source.adapter is not None:
        by = By.JOB if run.actor.adapter is None else By.TYPED
        yield Choice(setting="actor.adapter", value=source.adapter.describe(), by=by)
    if source.frozen:
        yield Choice(setting="frozen", value=frozen_text(source.frozen), by=By.JOB, why="it did not train them")


def frozen_text(names: Collection[str]) -> str:
    """Name the first of the parameters that are not trained, and say how many there are."""
    first, *rest = sorted(names)
    return f"{first} and {len(rest)} more" if rest else first


def _of_head(actor: ActorSpec, source: ModelSource, wants_logits: str) -> Choice:
    assert source.head is not None
    is_whole_for_options = actor.compile is Compile.DEEPCOMPILE or (
        actor.parallel.tp > 1 and not find_declaration(actor.backend).splits_head
    )
    by = By.TYPED if actor.whole_logits else By.OPTION if wants_logits or is_whole_for_options else By.MODEL
    why = source.head.why_whole or "its head's logits are the same in chunks of tokens"
    return Choice(setting="actor.whole_logits", value=not source.head.in_chunks, by=by, why=why)


def _once_open(actor: ActorSpec) -> Iterator[Choice]:
    """Yield what is known of the open actor alone; `ResolvedReplay.completed` fills it in."""
    if actor.parallel.tp > 1:
        by = By.MODEL if actor.parallel.tp_plan is TpPlan.AUTO else By.TYPED
        yield Choice(setting=TP_PLAN, value=ONCE_OPEN, by=by)
    if actor.kernels is Kernels.FUSED:
        yield Choice(setting=FUSED_MODULES, value=ONCE_OPEN, by=By.MODEL)
    if actor.dtype is Dtype.FP16:
        yield Choice(setting=LOSS_SCALE, value=ONCE_OPEN, by=By.DEFAULT)


def _of_engine(actor: ActorSpec) -> Iterator[Choice]:
    """Yield what the backend and torch's optimizer have defaults of their own for."""
    if find_declaration(actor.backend).shards:
        by = By.DEFAULT if actor.zero_stage is None else By.TYPED
        why = "" if by is By.TYPED else f"{actor.backend}'s" + " without an optimizer" * (actor.optimizer == "none")
        yield Choice(setting="actor.zero_stage", value=actor.resolved_zero_stage, by=by, why=why)
    known = actor.optimizer_settings
    known |= dict(zip(("beta1", "beta2"), known.get("betas", ()), strict=False))
    for name in OPTIMIZER_SETTINGS[actor.optimizer]:
        is_typed = getattr(actor, name) is not None
        why = "" if is_typed else f"torch's, of {actor.optimizer}"
        yield Choice(setting=f"actor.{name}", value=known[name], by=By.TYPED if is_typed else By.DEFAULT, why=why)


def _of_inputs(inputs: InputsSpec) -> Iterator[Choice]:
    if inputs.input_file is None:
        by, why = (By.TYPED, "") if inputs.inputs else (By.DEFAULT, "the sample that ships with the project")
        yield Choice(setting="inputs.inputs", value=inputs_folder(inputs), by=by, why=why)


def _of_objective(run: Parts) -> Iterator[Choice]:
    objective = run.objective
    if run.measure.loss in objectives_with("clip_high") and objective.clip_high is None:
        value, why = objective.clip_low, "as --clip-low"
        yield Choice(setting="objective.clip_high", value=value, by=By.DEFAULT, why=why)


def _filled(part: PartT, name: str, choices: Sequence[Choice]) -> PartT:
    values = {choice.setting.removeprefix(f"{name}."): choice.value for choice in choices}
    return replace(part, **{field.name: values[field.name] for field in fields(part) if field.name in values})


def _with_typed(choices: Sequence[Choice], spec: ReplaySpec) -> list[Choice]:
    """Return the choices with all else that was typed, in the order of the options; what no option sets comes last."""
    by_setting = {choice.setting: choice for choice in choices}
    every: dict[str, Choice] = {}
    for toggle in toggles():
        setting, value = f"{toggle.part}.{toggle.field}", toggle.value_in(spec)
        if setting in by_setting:
            every[setting] = by_setting[setting]
        elif value != toggle.default:
            every[setting] = Choice(setting=setting, value=value, by=By.TYPED)
    return list((every | by_setting).values())
