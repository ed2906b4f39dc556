"""Specify one run: the actor, its inputs, and what is measured. The whole spec is written into run.json."""

import os
import re
import reprlib
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Self

from actor_init.declarations.backends import find_backend_declaration, find_backends
from actor_init.spec import RANDOM_WEIGHTS, ActorSpec, UsageError, option
from capture.facts import Setting
from replay.options.declarations import OBJECTIVES, list_objectives_with


class Passes(StrEnum):
    TRAIN = "train"
    ROLLOUT = "rollout"
    ALL = "all"


class InputOrder(StrEnum):
    RECORDED = "recorded"
    WORST = "worst"


class LossName(StrEnum):
    """Losses that are means of log-probs; `replay/options/declarations` has the objectives, which --loss may be too.

    AUTO is an objective whose loss the job noted; else, for each micro-batch, SFT where it has labels, and the stand-in
    otherwise.
    """

    AUTO = "auto"
    STAND_IN = "stand-in"
    SFT = "sft"


class Reduction(StrEnum):
    TOKENS = "tokens"
    WINDOW_TOKENS = "window-tokens"
    SEQUENCES = "sequences"
    DIVISOR = "divisor"


class KlEstimator(StrEnum):
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K3_WEIGHTED = "k3-weighted"


class PairOrder(StrEnum):
    HALVES = "halves"
    ALTERNATE = "alternate"


STEP_SETTING, TRACE_SETTING, RESUME_SETTING = Setting("step", "on"), Setting("trace", True), Setting("resume", True)
PICKED_NUMBERS = re.compile(r"\d{1,9}(,\d{1,9})*")
USER_LOSS_PATTERN = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_]\w*)")


def is_objective(loss: str) -> bool:
    """Is it a job's own objective, which has its reduction and needs more than tokens?"""
    return loss not in list(LossName)


def _describe_losses() -> str:
    objectives = " ".join(f"{name}: {objective.help}." for name, objective in OBJECTIVES.items())
    return (
        "auto: policy where the job noted its loss and what it needs, recorded where the job computed its loss from "
        "the model's logits, sft where the captures have labels, else stand-in. "
        "stand-in: the mean cross entropy of the action tokens. sft: of the label tokens, or of all real tokens. "
        f"{objectives} FILE.py:FUNCTION: your own (docs/objectives.md)."
    )


def _list_loss_words() -> str:
    return "|".join([*LossName, *OBJECTIVES, "FILE.py:FUNCTION"])


class WindowWeights(StrEnum):
    JOB = "job"
    TOKENS = "tokens"
    MEAN_OF_MEANS = "mean-of-means"


class StepMode(StrEnum):
    AUTO = "auto"
    ON = "on"
    OFF = "off"


class VerdictRule(StrEnum):
    REPORT = "report"
    STRICT = "strict"


@dataclass(frozen=True, kw_only=True, slots=True)
class InputsSpec:
    """Which micro-batches to replay, in which order.

    No option sets `reverse_rows`: parity measures by it what rounding does. It feeds each micro-batch's last row first,
    which gives the same numbers but for rounding. The log keeps the rows' order.
    """

    inputs: Path | None = option(
        None,
        "Folder of captures. Default: the sample that ships with the project.",
        metavar="FOLDER",
        brief="Captures. Default: the sample.",
    )
    input_file: Path | None = option(
        None, "Replay this one capture instead of a folder.", metavar="FILE", brief="Replay this one capture."
    )
    recording: int | None = option(
        None,
        "Of several recordings in the folder take number N, which `replay inspect` lists. Default: the latest.",
        min=1,
    )
    skip_inputs: int = option(0, "Leave out the first N inputs on each data rank.", min=0)
    max_inputs: int | None = option(
        None, "At most N inputs on each data rank.", min=1, brief="At most N inputs on each data rank."
    )
    epochs: int = option(1, "Go through the inputs N times, in the same order; --max-inputs counts them all.", min=1)
    uneven: bool = option(False, "Every data rank replays all its inputs, even if others have fewer: jobs hang so.")
    passes: Passes = option(Passes.TRAIN, "train: captured with autograd on; rollout: with autograd off.")
    shuffle_inputs: bool = option(False, "Deal the inputs to the data ranks in random order.")
    random_seed: int = option(0, "Seed of --shuffle-inputs.", min=0)
    order: InputOrder = option(
        InputOrder.RECORDED,
        "worst: the inputs with most tokens first, whatever windows the job had; with --max-inputs N, the N largest.",
    )
    pick_inputs: str | None = option(
        None,
        "Replay only these, in this order: numbers that each data rank's inputs have without this option, from 0, as "
        "in a log. Repeats are allowed.",
        metavar="N,N,...",
    )
    reverse_rows: bool = False

    def __post_init__(self) -> None:
        if self.inputs is not None and self.input_file is not None:
            raise UsageError.mutually_exclusive(Setting("inputs"), Setting("input_file"))
        if self.order is InputOrder.WORST and self.shuffle_inputs:
            raise UsageError.mutually_exclusive(Setting("order", self.order), Setting("shuffle_inputs", True))
        if self.pick_inputs is not None and not PICKED_NUMBERS.fullmatch(self.pick_inputs):
            advice = f"Give numbers with commas between. Try: {Setting('pick_inputs', '4,0,17')}"
            raise UsageError.not_allowed("pick_inputs", self.pick_inputs, advice)
        if self.pick_inputs is not None and self.uneven:
            why = f"leaves inputs out, and {Setting('uneven', True)} replays all"
            raise UsageError(Setting("pick_inputs"), why, "Give one of the two")

    @property
    def picked_numbers(self) -> list[int] | None:
        """The numbers of --pick-inputs; None if it was not given."""
        return None if self.pick_inputs is None else [int(number) for number in self.pick_inputs.split(",")]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSpec:
    """What each pass does and where it is logged.

    No option sets `details`: parity keeps by it what `keeps_details` names, and counts no label that padding predicts,
    since it compares runs that lay the same tokens out in different ways. No option sets `trials`: campaigns turn it
    off in their replays, whose verdicts tell no causes.
    """

    loss: str = option(
        LossName.AUTO.value, _describe_losses, metavar=_list_loss_words, brief="auto: the job's where it is known."
    )
    window: WindowWeights = option(
        WindowWeights.JOB,
        "What a pass weighs in a gradient of several, over --grad-accumulation and data ranks. tokens: its share of "
        "the tokens that have a loss; mean-of-means: as much as every other pass; job: the one of the two that the "
        "captures show, else tokens.",
    )
    verdict: VerdictRule = option(
        VerdictRule.REPORT,
        "strict: exit code 1 where the verdict is DIFFERS or UNSETTLED, and rows padded where the job's were; "
        "report: say so.",
        brief="strict: exit 1 for DIFFERS and UNSETTLED.",
    )
    noise_floor: bool = option(
        True,
        "For a verdict in bf16 or fp16, replay up to four inputs again by another kernel and in another order, to "
        "measure how far rounding moves their numbers. Kept beside the inputs.",
    )
    second_opinion: bool = option(
        False,
        "Replay in fp32, too, whose bounds are narrower than those of bf16 or fp16; the worse verdict counts.",
        brief="Replay in fp32, too; the worse verdict counts.",
    )
    backward: bool = option(True, "Run backward after a training pass's forward.")
    step: StepMode = option(
        StepMode.AUTO,
        "Step the optimizer at the end of each window: as the job did, where the inputs hold its steps. auto: where "
        "they hold every pass from the optimizer's first step on, so that passes behind it can be judged; the step is "
        "then not part of a pass's time. on (as --step alone): always, and as part of the pass.",
        flags={"--no-step": StepMode.OFF},
        bare=StepMode.ON,
        brief="Step the optimizer as the job did.",
    )
    trace: bool = option(
        False,
        "Keep each token's log-prob and sketches of every layer's output and gradient, and of every parameter's "
        "gradient, for `replay compare`.",
        brief="Keep sketches, for `replay compare`.",
    )
    details: bool = False
    trials: bool = True
    profile: bool = option(
        False,
        "Run the slowest pass once more under torch.profiler: where its time went, and a Chrome trace a rank. It is "
        "not among the timed passes.",
        brief="Where the slowest pass's time went.",
    )
    memory_snapshot: bool = option(
        False,
        "Run the pass with the highest peak, or one that ran out of memory, once more with the allocator's history: "
        "what held the peak, and a snapshot a rank. On a CPU: what held the resident memory. On several ranks the "
        "history is on in every pass, which makes them slower.",
        brief="What held the highest peak.",
    )
    warmup: int = option(1, "Leave the first N passes out of the statistics; they are recorded and marked.", min=0)
    timeout: float = option(
        120.0,
        "End the run if no rank makes progress for so long, and name the rank that it waits for.",
        min=1,
        metavar="SECONDS",
    )
    quiet: bool = option(
        False, "Print the answer and the summary alone.", brief="Print the answer and the summary alone."
    )
    full_names: bool = option(False, "Print names of captures whole, and not as `rank0 #4`.")
    # It is not called --logs, since torchrun has an option --logs-specs.
    log_folder: Path = option(
        Path("logs"),
        "Where the folder of this run is made.",
        aliases=("-o",),
        metavar="FOLDER",
        brief="Where the run's folder is made.",
    )
    name: str = option("replay", "Last part of that folder's name.")

    def __post_init__(self) -> None:
        words = [*LossName, *OBJECTIVES]
        if self.loss not in words and not USER_LOSS_PATTERN.fullmatch(self.loss):
            raise UsageError.not_allowed("loss", self.loss, f"Give one of {', '.join(words)}, or FILE.py:FUNCTION")
        if is_objective(self.loss) and self.window is WindowWeights.MEAN_OF_MEANS:
            loss, window = Setting("loss", self.loss), Setting("window")
            why = f"is for {loss.with_value(LossName.STAND_IN)} and sft; {loss} weighs each pass by its own reduction"
            raise UsageError(
                window.with_value(self.window), why, f"Try: without {window}, and with {Setting('reduction')}"
            )

    @property
    def steps(self) -> bool:
        """Does the optimizer step? Of `auto` it is not known before the run is resolved."""
        return self.step is StepMode.ON

    @property
    def keeps_details(self) -> bool:
        """Are each token's log-prob and a sketch of each parameter's gradient kept?"""
        return self.trace or self.details


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSpec:
    """Settings of the objectives, which declare the ones they take; docs/objectives.md has the formulas."""

    clip_low: float = option(0.2, "policy: the ratio is clipped to no less than 1 - X.", min=0, max=1)
    clip_high: float | None = option(
        None, "policy: the ratio is clipped to no more than 1 + X. Default: as --clip-low.", min=0
    )
    dual_clip: float | None = option(
        None, "policy: where the advantage is negative, a token's loss is at most X times its size.", min=1
    )
    reduction: Reduction = option(
        Reduction.TOKENS,
        "policy: what the loss of a pass is. tokens: the mean over its tokens; window-tokens: their sum divided by the "
        "tokens of all passes of the step, times the job's ranks; sequences: the mean of each sequence's mean; "
        "divisor: the sum divided by --divisor times the number of sequences.",
    )
    divisor: float | None = option(
        None, "policy: of --reduction divisor; without it the job's noted `divisor`, a number.", min=0
    )
    on_policy: bool = option(
        False,
        "policy: the old log-probs are the pass's own, so that the ratio is 1, as in a first step on new samples.",
    )
    kl: KlEstimator = option(
        KlEstimator.K3,
        "policy: estimator of the KL divergence to the reference. k3-weighted: k3 times the ratio to the old policy.",
    )
    kl_coefficient: float = option(0.0, "policy: X times that divergence is added.", min=0)
    entropy_coefficient: float = option(0.0, "policy: X times the entropy is subtracted.", min=0)
    dpo_beta: float = option(0.1, "dpo: scale of the log-ratio to the reference.", min=0)
    label_smoothing: float = option(0.0, "dpo: share of the pairs that count as reversed.", min=0, max=0.5)
    pairs: PairOrder = option(
        PairOrder.HALVES,
        "dpo: where a pair's sequences are. halves: all chosen, then all rejected; alternate: each chosen one before "
        "its rejected one.",
    )
    average_log_probs: bool = option(False, "dpo: a sequence counts by its mean log-prob, not by the sum.")

    def __post_init__(self) -> None:
        if self.divisor == 0:
            raise UsageError(Setting("divisor", 0), "is not allowed", "Give a number above 0")
        if self.divisor is not None and self.reduction is not Reduction.DIVISOR:
            typed, owner = Setting("divisor", f"{self.divisor:g}"), Setting("reduction", Reduction.DIVISOR)
            raise UsageError(typed, f"is a setting of {owner}", f"Try: {owner} {typed}")

    def check(self, loss: str) -> None:
        """Raise UsageError for an option that was given for another loss than `loss`."""
        for declared in fields(self):
            owners = list_objectives_with(declared.name)
            if loss not in owners and getattr(self, declared.name) != declared.default:
                owner = Setting("loss", owners[0])
                raise UsageError(Setting(declared.name), f"is a setting of {owner}", f"Try: {owner}")


# Of a run with --save-every: the last states.
NUM_KEPT_STATES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """What to load before the first pass, and save after the last or every few steps.

    A folder to save into must be new or empty; under --resume it may hold the states of the run that was begun.
    """

    load_state: Path | None = option(
        None,
        "Go on from what --save-state wrote. Runs code from the folder's pickles: load only your own.",
        metavar="FOLDER",
    )
    optimizer_state: Path | None = option(
        None,
        "Begin with the state of the job's optimizer: its moments and count of steps. optimizer.pt of a Trainer's "
        "checkpoint or its folder, a file of torch.save, or a folder of torch.distributed.checkpoint; read without "
        "running code.",
        metavar="PATH",
    )
    save_state: Path | None = option(
        None, "Folder for weights, optimizer, schedule and step, to go on from.", metavar="FOLDER"
    )
    save_every: int | None = option(
        None, "Save a state below --save-state after every N optimizer steps, and the last; keep the last two.", min=1
    )
    resume: bool = option(False, "Go on from the latest state of --save-every, if there is one.")
    save_model: Path | None = option(
        None, "Folder for the weights in --dtype, as from_pretrained and --model open it.", metavar="FOLDER"
    )

    def __post_init__(self) -> None:
        every, folder = Setting("save_every"), Setting("save_state", "FOLDER")
        if self.save_every is not None and self.save_state is None:
            raise UsageError(
                every.with_value(self.save_every),
                "needs a folder",
                f"Try: {folder} {every.with_value(self.save_every)}",
            )
        if self.resume and self.save_every is None:
            raise UsageError(
                RESUME_SETTING, f"goes on from what {every} saved", f"Try: {folder} {every.with_value('N')}"
            )
        if self.resume and self.load_state is not None:
            raise UsageError.mutually_exclusive(RESUME_SETTING, Setting("load_state"))
        if self.optimizer_state is not None and (self.load_state is not None or self.resume):
            other = RESUME_SETTING if self.resume else Setting("load_state")
            raise UsageError.mutually_exclusive(Setting("optimizer_state"), other)
        if self.save_state is not None and self.save_state == self.save_model:
            model = Setting("save_model")
            advice = f"Try: {model.with_value(f'{self.save_model}-model')}"
            raise UsageError(Setting("save_state"), f"and {model} are both {self.save_state}", advice)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayParts:
    """What a replay is specified by. Raises UsageError for parts that contradict each other."""

    actor: ActorSpec = field(default_factory=ActorSpec)
    inputs: InputsSpec = field(default_factory=InputsSpec)
    measure: MeasureSpec = field(default_factory=MeasureSpec)
    state: StateSpec = field(default_factory=StateSpec)
    objective: ObjectiveSpec = field(default_factory=ObjectiveSpec)

    def __post_init__(self) -> None:
        self.objective.check(self.measure.loss)
        drop_one, optimizer = "Drop one of the two", Setting("optimizer")
        no_optimizer = f"needs an optimizer, but {optimizer.with_value('none')} was given"
        if self.measure.trace and self.inputs.reverse_rows:
            raise UsageError(TRACE_SETTING, "tells rows by their place, and these are fed in reverse", drop_one)
        if self.measure.steps and not self.measure.backward:
            raise UsageError(
                STEP_SETTING, f"needs the gradients that {Setting('backward', False)} leaves out", drop_one
            )
        if self.measure.steps and self.actor.optimizer == "none":
            raise UsageError(STEP_SETTING, no_optimizer, f"Try: {optimizer.with_value('adamw')}")
        if self.state.save_every is not None and not self.measure.steps:
            every = Setting("save_every", self.state.save_every)
            raise UsageError(every, "counts optimizer steps", f"Try: {STEP_SETTING} {every}")
        if self.state.resume and (self.measure.trace or self.measure.details):
            traced = TRACE_SETTING if self.measure.trace else "details of every token"
            raise UsageError(traced, f"needs every pass, and {RESUME_SETTING} leaves out those done", drop_one)
        if self.state.optimizer_state is not None and not self.actor.has_optimizer:
            advice = f"Try: {optimizer.with_value('adamw')}"
            raise UsageError(Setting("optimizer_state", self.state.optimizer_state), no_optimizer, advice)
        if self.state.save_state or self.state.load_state:
            state, model = Setting("load_state" if self.state.load_state else "save_state"), Setting("save_model")
            if self.actor.optimizer == "none":
                advice = f"Try: {model} and {Setting('model')} for weights alone"
                raise UsageError(state, no_optimizer, advice)
            if find_backend_declaration(self.actor.backend).state_format is None:
                other = Setting("backend", find_backends(lambda declaration: declaration.state_format is not None)[0])
                advice = f"Try: {other}, or {model} for weights alone"
                raise UsageError(state, f"is not there for {self.actor.backend}", advice)
        if self.state.load_state and self.actor.random_weights:
            raise UsageError.mutually_exclusive(RANDOM_WEIGHTS, Setting("load_state"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySpec(ReplayParts):
    """What somebody typed. `auto`, and None where it is no value, is not typed: `resolve` chooses it."""

    def without_unasked_steps(self) -> Self:
        """Return the spec of a run that steps only if --step was typed, as those that are compared do."""
        if self.measure.step is not StepMode.AUTO:
            return self
        return replace(self, measure=replace(self.measure, step=StepMode.OFF))

    def make_child_spec(self) -> Self:
        """Return the spec of one run of a campaign: it does nothing besides what was typed."""
        spec = self.without_unasked_steps()
        return replace(spec, measure=replace(spec.measure, trials=False))


def find_sample_folder() -> Path:
    """Find the folder of the sample inputs that ship with the project, in a checkout or an installed package."""
    return _find_shipped_folder("sample")


def find_edge_folder(name: str) -> Path:
    """Find one of the folders of edge shapes that ship with the project."""
    return _find_shipped_folder("edges") / name


def _find_shipped_folder(name: str) -> Path:
    # In a checkout it is a link to inputs/, and resolved, so that the header names the folder that people know.
    return (Path(__file__).parents[1] / name).resolve()


# Commands call the checks below before they import what they work with: torch and transformers alone take seconds.

EXAMPLE = "logs/20261121-141757-replay"


def check_inputs(spec: InputsSpec) -> None:
    """Raise UsageError if --inputs is no folder, or --input-file is no file and no pass of a segment's file."""
    file, folder = spec.input_file, spec.inputs
    setting = Setting("input_file", file)
    if file is not None and file.is_dir():
        raise UsageError(setting, "is a folder", f"Try: replay {Setting('inputs', file)}")
    if file is not None and not file.is_file() and not file.parent.is_file():
        raise UsageError(setting, "does not exist", f"Try: replay inspect {file.parent}")
    setting = Setting("inputs", folder)
    if file is not None and spec.recording is not None:
        raise UsageError.mutually_exclusive(Setting("input_file", file), Setting("recording", spec.recording))
    if folder is not None and folder.is_file():
        raise UsageError(setting, "is a file", f"Try: replay {Setting('input_file', folder)}")
    if folder is not None and not folder.is_dir():
        raise UsageError(setting, ": no such folder", "Try: replay, for the sample that ships with the project")


def check_folder(folder: Path, advice: str) -> None:
    """Raise UsageError, with what to type instead, if there is no such folder."""
    if not folder.is_dir():
        if not folder.is_absolute():
            check_working_folder()
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UsageError(folder, what, advice)


def check_working_folder() -> None:
    """Raise UsageError if the working folder, where relative paths and processes begin, was deleted."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"this process's working folder is gone: {error.strerror}. Change to one that is there"
        ) from error


def check_log(folder: Path) -> None:
    """Raise UsageError if there is no such folder for a run's log to lie in."""
    check_folder(folder, f"Give one that a run left, such as {EXAMPLE}")


def find_log(log: object) -> Path:
    """Return the folder of a log, for which a run or its path stands. Raises UsageError for anything else."""
    folder = getattr(log, "folder", log)
    if not isinstance(folder, (str, os.PathLike)):
        raise UsageError(f"{reprlib.repr(log)} is no log. Give a run, or the folder of one, such as {EXAMPLE}")
    check_log(path := Path(folder))
    return path


def check_result_folder(command: str, folder: Path, *, option: str = "continue_") -> None:
    """Raise UsageError if `folder`, the value of `option`, holds nothing of that command's."""
    check_working_folder()
    if not (folder / f"{command}.json").is_file():
        advice = f"Give a folder that `replay {command}` left"
        raise UsageError(Setting(option, folder), f"holds no {command}.json", advice)
