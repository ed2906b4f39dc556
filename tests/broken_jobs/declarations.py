"""What a job is: how it trains, as its user believes, and what is broken in it.

The setup is what the user believes: the weights folder, the captured inputs and the options of the replay follow from
it. A fault is applied to the job's own process alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from torch import Tensor, nn

from replay.verdict.causes.cause import CauseName


class Kind(StrEnum):
    """What trains: a loop in plain torch or transformers' Trainer, in one process or under a wrapper in two."""

    PLAIN = "plain"
    TRAINER = "trainer"
    TRAINER_DDP = "trainer-ddp"
    DDP = "ddp"
    FSDP2 = "fsdp2"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"

    @property
    def num_ranks(self) -> int:
        return 1 if self in (Kind.PLAIN, Kind.TRAINER) else 2

    @property
    def is_trainer(self) -> bool:
        return self in (Kind.TRAINER, Kind.TRAINER_DDP)

    @property
    def zero_stage(self) -> int:
        return int(self.value[-1]) if self.value.startswith("zero") else 0


class FaultClass(StrEnum):
    GRADIENT_SCALE = "gradient scale"
    DETACHED = "detached part"
    REDUCTION = "reduction"
    WEIGHTING = "weighting"
    MASKING = "masking"
    POSITIONS = "positions"
    KERNEL = "kernel"
    OPTIMIZER = "optimizer"
    DTYPE = "dtype"
    WEIGHTS = "weights"
    DROPOUT = "dropout"
    TARGETS = "targets"
    POLICY = "policy"


class Layout(StrEnum):
    RIGHT = "right"  # rows of unequal length, padded on the right
    LEFT = "left"
    PACKED = "packed"  # one row of several documents with position ids and no mask
    FULL = "full"  # rows of one length, each with as many labels


class Weighting(StrEnum):
    """How the losses of a step's micro-batches, on all ranks, become one."""

    TOKENS = "tokens"  # the model divides by num_items_in_batch, as in transformers' Trainer
    BY_HAND = "by hand"  # the loop weights each mean by its tokens
    MEANS = "means"  # the mean of the means
    SUM = "sum"  # of the means


class Objective(StrEnum):
    MODEL = "model"  # the model's own loss of labels
    LOOP = "loop"  # the loop's cross entropy of the model's logits, each row's targets shifted by one
    POLICY = "policy"  # PPO's clipped loss of the labelled tokens, whose parts are noted


class Dtype(StrEnum):
    FP32 = "fp32"
    AUTOCAST = "autocast"  # fp32 weights, computed in bf16: the Trainer's bf16=True, FSDP2's mixed precision
    BF16 = "bf16"  # weights too; under DeepSpeed its bf16 engine
    FP16 = "fp16"  # autocast with a loss scale


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How a job trains."""

    model: str = "llama"  # of models.MODELS
    config: Mapping[str, Any] = field(default_factory=dict)  # on top of the model's
    layout: Layout = Layout.RIGHT
    has_prompts: bool = True  # whose tokens have no labels
    objective: Objective = Objective.MODEL
    divergence: float = 0.0  # the weight of a policy's KL divergence from its reference, in its loss
    passes_position_ids: bool = False  # of padded rows; packed ones always have them
    dtype: Dtype = Dtype.FP32
    num_steps: int = 3
    accumulation: int = 1
    weighting: Weighting = Weighting.TOKENS
    optimizer: str = "adamw"  # or sgd; or muon, for the layers' matrices, and adamw for the other parameters
    learning_rate: float = 1e-3
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the optimizer
    decay_groups: bool = False  # vectors are not decayed
    schedule: str = "constant"  # or linear or cosine, to zero; warmup or cosine-warmup, two steps from zero on
    max_norm: float | None = None
    checkpointing: bool = False
    compiled: bool = False
    frozen: str = ""  # parameters whose names have this in them
    lora: bool = False
    lora_dropout: float = 0.0
    loss_scale: float = 1024.0  # that fp16 begins with
    evaluates_average: bool = False  # a moving average of the weights is swapped in after each step, and out again
    saved_at: int = 0  # the step whose weights are saved, and replayed


@dataclass(frozen=True, kw_only=True, slots=True)
class At:
    """Where a job is."""

    rank: int = 0
    world_size: int = 1
    step: int = 0
    number: int = 0  # of the micro-batch in its window
    tokens: int = 1  # with a label, of this micro-batch
    window_tokens: int = 1  # of all micro-batches of all ranks in this step


Parameters = Mapping[str, nn.Parameter]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What is done to a job, and when. Each that is not given does nothing.

    process    patches a library before anything is built
    setup      settings that the job really has, in place of those in its setup
    config     the same of the model's config; the weights are those that were saved
    model      is given the model once its weights were saved, before it is wrapped
    wrapped    is given what the loop calls
    loss       what is differentiated, of the loss that the loop would differentiate
    loop_loss  the loop's loss of logits [B, S, V] and labels [B, S], in place of its cross entropy
    noted      what a policy's loss is computed of, and what is noted, in place of that
    used       what a policy's loss is computed of, in place of what is noted
    gradients  is given the parameters, with the gradients of a whole step, before they are clipped
    clip       in place of the clipping; returns the norm that the loop believes
    clips_each_pass  to what norm the loop clips after each backward as well
    optimizer  is given the optimizer before the first step; each of several
    after_step is given the parameters after each step
    """

    process: Callable[[], object] | None = None
    setup: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[Any], object] | None = None
    wrapped: Callable[[Any], object] | None = None
    loss: Callable[[Tensor, At], Tensor] | None = None
    loop_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    noted: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    used: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    gradients: Callable[[Parameters, At], object] | None = None
    clip: Callable[[Parameters, float], Any] | None = None
    clips_each_pass: float | None = None
    optimizer: Callable[[Any], object] | None = None
    after_step: Callable[[Parameters, At], object] | None = None
    skipped_steps: Sequence[int] = ()  # those that the loop does not take
    zero_grad: bool = True  # are gradients emptied after a step?
    has_one_seed: bool = False  # have all ranks the same one?
    unscales_first: bool = True  # is fp16's loss scale taken out before the clipping?


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job by its name.

    says        what is broken, or what is notable of a clean one, in one sentence
    causes      the names that are a right answer to what is wrong, the best first; none for a clean job
    note        what a line under the verdict has to have in it: the replay computes what the job does, wrong as that
                is, so the verdict is REPRODUCED; empty: a number of the job is wrong
    replays     the arguments of each replay of its recording, on top of those that all have
    as_fsdp2    it is replayed in two processes under FSDP2 too
    is_stepped  its replay is to step as the job did without being asked, so that later steps are judged as well
    below       why its effect is below what the dtype can carry, which is measured all the same; empty: it is not
    twin_of     the broken job whose unbroken twin this is; empty: a job of the table
    """

    name: str
    kind: Kind
    says: str
    setup: Setup
    fault_class: FaultClass | None = None
    fault: Fault = field(default_factory=Fault)
    replays: Sequence[tuple[str, ...]] = ((),)
    as_fsdp2: bool = False
    is_stepped: bool = False
    causes: Sequence[CauseName] = ()
    note: str = ""
    below: str = ""
    twin_of: str = ""

    @property
    def is_broken(self) -> bool:
        return self.fault_class is not None

    @property
    def twin(self) -> "Job":
        """The same job without its fault, replayed as the broken one is.

        It must not DIFFER, and nothing may be its cause, however likely what the broken job's cause is.
        """
        return replace(
            self,
            name=f"{self.name}-unbroken",
            says=f"without the fault: {self.says}",
            fault_class=None,
            fault=Fault(),
            causes=(),
            below="",
            twin_of=self.name,
        )

    @property
    def group(self) -> str:
        """Under which name its replays are counted."""
        return self.fault_class or ("twin" if self.twin_of else "clean")

    def is_trained_as(self, other: "Job") -> bool:
        """Do the two train alike where neither is broken, so that one recording of the unbroken job serves both?"""
        return (self.kind, self.setup) == (other.kind, other.setup)

    def is_replayed_as(self, other: "Job") -> bool:
        mine, theirs = ((tuple(job.replays), job.as_fsdp2, job.is_stepped) for job in (self, other))
        return mine == theirs

    def as_run(self, *, broken: bool) -> tuple[Setup, Fault]:
        """The setup that the job really has, and the fault; of its unbroken twin where not `broken`."""
        return (replace(self.setup, **self.fault.setup), self.fault) if broken else (self.setup, Fault())
