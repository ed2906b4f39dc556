"""Choose whether the optimizer steps, and how: as was typed, else as the job did, where that can be followed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actor_init.declarations.backends import find_obstacle, list_whole_backend
from actor_init.model import ModelSource, list_parameter_names
from actor_init.optimizers.saved_state import STATE_FILES
from actor_init.spec import ActorSpec, OptimizerName
from actor_init.world import World
from capture.facts import Setting
from capture.file_format.actor_config import read_parameter_names
from capture.file_format.capture_file import CapturedCall
from capture.file_format.optimizer_step import ParameterSamples
from replay.options.option_parsing import format_error_with_flags
from replay.options.resolved import STEP, ChosenBy, ResolvedChoice
from replay.options.spec import InputOrder, LossName, Passes, ReplayParts, StepMode
from replay.resolution.job_defaults import explain_missing_fp16, find_inputs_folder
from replay.resolution.job_steps import FollowedSteps, explain_missing_start, find_followed_steps
from replay.resolution.job_windows import JobWindow, list_job_windows
from replay.resolution.selection import Selection
from replay.verdict.recorded_pass import list_job_dtypes, match_parameter_name
from replay.verdict.weight_check import WeightChecker


@dataclass(frozen=True, kw_only=True, slots=True)
class StepChoice:
    """Whether the optimizer steps.

    followed_steps  the job's steps that are taken as the job took them; None: steps are taken as typed, or none are
    why        if --step was not typed: why the optimizer does not step, or why it stops before the last window of the
               job; empty where there is nothing to say
    """

    mode: StepMode
    by: ChosenBy
    followed_steps: FollowedSteps | None = None
    why: str = ""

    def apply(self, actor: ActorSpec) -> ActorSpec:
        """Return `actor` with the optimizer and the clipping of the steps."""
        if self.followed_steps is None:
            return actor.with_step_defaults()
        return replace(
            actor, optimizer=self.followed_steps.optimizer, max_norm=self.followed_steps.max_norm
        ).with_step_defaults()

    def apply_to_spec(self, spec: ReplayParts) -> ReplayParts:
        """Return the spec with the mode of the steps, and with their optimizer and clipping."""
        return replace(spec, actor=self.apply(spec.actor), measure=replace(spec.measure, step=self.mode))

    def apply_to_source(self, source: ModelSource) -> ModelSource:
        """Return the model with the groups of parameters that the job's optimizer had, if its steps are taken."""
        return source if self.followed_steps is None else replace(source, optimizer_groups=self.followed_steps.groups)

    def list_choices(self, typed: ActorSpec) -> Iterator[ResolvedChoice]:
        """Yield whether the optimizer steps and, unless they were typed, which one it is and what norm it clips to."""
        yield ResolvedChoice(setting=STEP, value=self.mode, by=self.by, why=self.why)
        if typed.optimizer == OptimizerName.AUTO:
            value, by = self.apply(typed).optimizer, ChosenBy.DEFAULT if self.followed_steps is None else ChosenBy.JOB
            yield ResolvedChoice(setting="actor.optimizer", value=value, by=by)
        if self.followed_steps is None:
            return
        if typed.max_norm is None:
            yield ResolvedChoice(setting="actor.max_norm", value=self.followed_steps.max_norm, by=ChosenBy.JOB)


def choose_steps(
    spec: ReplayParts,
    source: ModelSource,
    checker: WeightChecker,
    selection: Selection,
    first_call: CapturedCall | None,
    world: World,
) -> StepChoice:
    """Choose whether and how the optimizer steps, on all ranks together. All ranks must call this.

    spec     with the accumulation and the loss chosen
    checker  of the source's weights
    """
    recorded = None if first_call is None else first_call.weights
    has_other_weights = may_follow_other_weights(spec.measure.step, checker, recorded, world)
    choice: StepChoice = world.broadcast_from_rank0(
        _choose_on_rank(spec, source, checker, selection, first_call, world, has_other_weights)
    )
    return choice


def may_follow_other_weights(
    mode: StepMode, checker: WeightChecker, recorded: ParameterSamples | None, world: World
) -> bool:
    """Are the weights on any rank not those of the job's first pass here, where nobody typed whether to step?

    All ranks must call this, and get the same: each has samples of a part of the parameters.

    recorded  the samples of the first pass
    """
    return mode is StepMode.AUTO and any(world.gather(bool(checker.check(recorded).differing)))


def _choose_on_rank(
    spec: ReplayParts,
    source: ModelSource,
    checker: WeightChecker,
    selection: Selection,
    first_call: CapturedCall | None,
    world: World,
    has_other_weights: bool,
) -> StepChoice:
    """Choose as `choose_steps` does, from what this rank knows.

    has_other_weights  on some rank the weights are not those of the job's first pass here
    """
    recorded = None if first_call is None else first_call.weights
    job_dtypes = [] if first_call is None else list_job_dtypes(first_call)
    mode = spec.measure.step
    if mode is StepMode.OFF:
        return StepChoice(mode=mode, by=ChosenBy.TYPED)
    windows = list_job_windows(selection.rounds, spec.actor.resolved_grad_accumulation)
    followed = _find_steps_to_follow(spec, source, checker, windows, recorded)
    if mode is StepMode.ON:
        return StepChoice(mode=mode, by=ChosenBy.TYPED, followed_steps=None if isinstance(followed, str) else followed)

    def refuse(why: str, by: ChosenBy = ChosenBy.JOB) -> StepChoice:
        return StepChoice(mode=StepMode.OFF, by=by, why=why)

    if spec.measure.details:
        return refuse("", ChosenBy.DEFAULT)
    job_passes = [job_pass for input_round in selection.rounds for job_pass in input_round.job_passes]
    leaves_out_training = spec.inputs.passes is Passes.ROLLOUT and selection.num_left_out_passes > 0
    if not leaves_out_training and not any(job_pass.step for job_pass in job_passes):
        return refuse("", ChosenBy.DEFAULT)
    if (option := _find_excluding_option(spec)) is not None:
        return refuse(format_error_with_flags(option), ChosenBy.OPTION)
    if world.num_data_ranks > max(job_pass.world_size for job_pass in job_passes):
        return refuse(f"{world.num_data_ranks} data ranks replay the inputs of fewer ranks", ChosenBy.OPTION)
    missing_fp16 = explain_missing_fp16(spec.actor, world.device.type)
    if "float16" in job_dtypes and missing_fp16 is not None:
        return refuse(missing_fp16, ChosenBy.MACHINE)
    if has_other_weights:
        return refuse("the weights are not those that the job's first pass here had")
    if (foreign := _find_foreign_parameter(spec, checker, recorded)) is not None:
        return refuse(f"the job's {foreign} is no parameter of this model", ChosenBy.MODEL)
    if isinstance(followed, str):
        return refuse(format_error_with_flags(followed))
    stepping = replace(spec.actor, optimizer=followed.optimizer, max_norm=followed.max_norm).with_step_defaults()
    if (why := find_obstacle(stepping, world.device.type)) is not None:
        return refuse(format_error_with_flags(why), ChosenBy.MACHINE)
    if spec.state.optimizer_state is None and (why := explain_missing_start(windows[0])) is not None:
        return refuse(format_error_with_flags(f"{why}. Try: {_name_state_options(spec, source)}"))
    # A step that no pass follows is not taken. Steps at a rate of 0 move nothing.
    last_index = len(selection.rounds) - 1
    settings = {index: step for index, step in followed.settings.items() if index < last_index}
    moves = any(group.get("lr", spec.actor.base_rate) for step in settings.values() for group in step.groups)
    if not moves:
        return refuse("", ChosenBy.DEFAULT)
    why = format_error_with_flags(followed.why_no_more)
    return StepChoice(mode=StepMode.ON, by=ChosenBy.JOB, followed_steps=replace(followed, settings=settings), why=why)


def _find_steps_to_follow(
    spec: ReplayParts,
    source: ModelSource,
    checker: WeightChecker,
    windows: Sequence[JobWindow],
    recorded: ParameterSamples | None,
) -> FollowedSteps | str:
    state = spec.state
    if state.save_every or state.resume:
        return "a state is of one optimizer, with one learning rate"
    job_names: Sequence[str] = read_parameter_names(find_inputs_folder(spec.inputs))
    if not job_names and recorded is not None:
        # A plain module has no config in a file beside its captures. The same module has the same parameters here.
        own_names = list_parameter_names(source.config, source.adapter)
        job_names = own_names if len(own_names) == recorded.num_parameters else ()
    return find_followed_steps(windows, spec.actor, checker.names, job_names)


def _name_state_options(spec: ReplayParts, source: ModelSource) -> str:
    """Name the options that give the optimizer's state, whole, since some backends cannot begin with one."""
    is_beside_model = any((Path(source.name) / name).is_file() for name in STATE_FILES)
    given = Setting("optimizer_state", source.name if is_beside_model else "FOLDER")
    return " ".join(map(str, [given, *list_whole_backend(spec.actor)]))


def _find_foreign_parameter(spec: ReplayParts, checker: WeightChecker, recorded: ParameterSamples | None) -> str | None:
    """Find a parameter of the job that this model does not have, as those of an adapter that is merged here."""
    job_names: Sequence[str] = read_parameter_names(find_inputs_folder(spec.inputs))
    if not job_names and recorded is not None:
        job_names = [sample.name for sample in recorded.samples]
    return next((name for name in job_names if match_parameter_name(name, checker.names) is None), None)


def _find_excluding_option(spec: ReplayParts) -> str | None:
    """Name the option with which `auto` does not step, and say why."""
    inputs, measure, state = spec.inputs, spec.measure, spec.state
    other_order = "has another order of passes than the job"
    saved = "saves the weights as they were loaded"
    is_stand_in, stand_in = measure.loss == LossName.STAND_IN, Setting("loss", LossName.STAND_IN)
    why_stand_in = f"takes passes of which no loss was noted, and {stand_in} is not the job's objective"
    conflicts = (
        (not measure.backward, Setting("backward", False), "leaves out the gradients"),
        (not spec.actor.has_optimizer, Setting("optimizer", OptimizerName.NONE), "was given"),
        (inputs.passes is Passes.ROLLOUT, Setting("passes", inputs.passes), "leaves out the training passes"),
        (inputs.input_file is not None, Setting("input_file"), "replays one pass alone"),
        (inputs.shuffle_inputs, Setting("shuffle_inputs", True), other_order),
        (inputs.order is InputOrder.WORST, Setting("order", inputs.order), other_order),
        (inputs.pick_inputs is not None, Setting("pick_inputs"), other_order),
        (inputs.epochs > 1, Setting("epochs", inputs.epochs), other_order),
        (inputs.uneven, Setting("uneven", True), other_order),
        (state.load_state is not None, Setting("load_state"), "has other weights than the job's first step"),
        (state.save_state is not None, Setting("save_state"), saved),
        (state.save_model is not None, Setting("save_model"), saved),
        (measure.trace, Setting("trace", True), "traces passes on the weights as they were loaded"),
        (measure.profile, Setting("profile", True), "runs a pass again"),
        (measure.memory_snapshot, Setting("memory_snapshot", True), "runs a pass again"),
        (is_stand_in and inputs.passes is Passes.ALL, Setting("passes", inputs.passes), why_stand_in),
        (is_stand_in, stand_in, "is not the job's objective"),
    )
    return next((f"{setting} {why}" for holds, setting, why in conflicts if holds), None)
