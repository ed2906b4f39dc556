"""Plan a suite: its configurations, and the processes and accumulation that give each the same batches.

With --shuffle-inputs all data ranks together go through one order of inputs, whatever their number. A step of `d` data
ranks that accumulate `a` passes takes the next d x a inputs, so steps are the same wherever d x a is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, lcm
from pathlib import Path
from typing import Any

from actor_init.declarations.backends import BACKENDS
from actor_init.spec import ActorSpec, Dtype, OptimizerName, ParallelSpec, UsageError
from capture.facts import Setting
from replay.options.spec import InputsSpec, LossName, MeasureSpec, ReplaySpec, StateSpec, StepMode
from replay.processes.pool import PROCESSES_ON_A_CPU, Machine

# configurations compared with: plain unsharded DDP by an absolute bound, DeepSpeed, the most common, by a relative one
DDP, DEEPSPEED = "ddp", "deepspeed"
# Steps between two states, where --save-every does not say how many.
SAVE_EVERY = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteConfiguration:
    name: str
    backend: str
    zero_stage: int | None = None
    tp: bool = False
    ring: bool = False
    # Standard configurations decide whether the suite passes.
    is_standard: bool = True

    @property
    def groups(self) -> set[str]:
        return {self.backend, *(["tp"] if self.tp else []), *(["ring"] if self.ring else [])}


def read_configurations() -> tuple[SuiteConfiguration, ...]:
    """Return what the backends declare: the reference, the standard configurations, the others."""
    every = [
        SuiteConfiguration(
            name=f"{name}{training.suffix}",
            backend=name,
            zero_stage=training.zero_stage,
            tp=training.tp,
            ring=training.ring,
            is_standard=training.is_standard,
        )
        for name, declared in BACKENDS.items()
        for training in declared.suite_trainings
    ]
    return tuple(sorted(every, key=lambda configuration: (configuration.name != DDP, not configuration.is_standard)))


CONFIGURATIONS = read_configurations()


def find_others(names: Sequence[str]) -> frozenset[str]:
    """Return the configurations without these names; none if there are no names. Raises UsageError for unknown ones."""
    every = {configuration.name for configuration in CONFIGURATIONS}
    if unknown := sorted(set(names) - every):
        raise UsageError(Setting("only", unknown[0]), "is no configuration", f"Give one of {', '.join(sorted(every))}")
    return frozenset(every - set(names)) if names else frozenset()


def find_skipped(names: Sequence[str], groups: Sequence[str]) -> frozenset[str]:
    """Return the configurations with these names, and those that belong to a group (deepspeed, fsdp2, tp, ring)."""
    return frozenset(names) | {
        configuration.name for configuration in CONFIGURATIONS if not configuration.groups.isdisjoint(groups)
    }


def _option(default: Any, help: str, **shape: Any) -> Any:
    """Return a field that is an option of the command line too; `shape` is what typer.Option takes besides."""
    return field(default=default, metadata={"help": help, **shape})


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteSpec:
    """The options of a suite. Raises UsageError for invalid ones."""

    dataset: Path | None = _option(
        None,
        "Captures, or a .jsonl or .parquet with a column text. Default: the sample.",
        envvar="DATASET",
        metavar="PATH",
    )
    model: str | None = _option(
        None, "As of `replay`. For texts a folder with a tokenizer.", envvar="MODEL", metavar="NAME|PATH"
    )
    num_layers: int | None = _option(None, "Build only the first N transformer layers.", min=1)
    dtype: Dtype = _option(Dtype.BF16, "Compute dtype; master weights are fp32.")
    gradient_checkpointing: bool = _option(False, "Recompute each layer's activations in backward.")
    learning_rate: float = _option(1e-4, "Of AdamW.", min=0)
    steps: int = _option(20, "Optimizer steps of each configuration.", min=2)
    max_samples: int | None = _option(
        None, "Train on the first N inputs, over and over. Default: at most 8.", min=1, envvar="MAX_SAMPLES"
    )
    processes: int | None = _option(
        None, "Use N GPUs, or N processes on a CPU. Default: all; 2 on a CPU.", min=1, envvar="NUM_GPUS"
    )
    tp: int = _option(2, "Ranks that share each layer's weights, where any do.", min=2, envvar="TP_SIZE")
    ring: int = _option(2, "Ranks that share each packed row, where any do.", min=2, envvar="RING_SIZE")
    data_ranks: int | None = _option(
        None, "Data ranks of each configuration. Default: as many as the GPUs are enough for.", min=1
    )
    init_weights: str | None = _option(
        None, "Begin with the weights in this model folder. Default: those of --model.", metavar="FOLDER"
    )
    save_init_weights: bool = _option(False, "Write the weights to begin with, in fp32, and begin with that file.")
    output_dir: Path | None = _option(
        None,
        "Where the folder inputs, on which all train, is made. Default: with the logs.",
        envvar="OUTPUT_DIR",
        metavar="FOLDER",
    )
    run_limit: float = _option(1800.0, "For one configuration.", min=1, metavar="SECONDS")
    skip: frozenset[str] = field(default_factory=frozenset)
    # Steps between two states; None where no states are kept.
    save_every: int | None = None
    # Folder or URI for the states; None for a folder beside the logs.
    storage: str | None = None

    def __post_init__(self) -> None:
        names = [configuration.name for configuration in CONFIGURATIONS]
        if unknown := sorted(self.skip - set(names)):
            raise UsageError(Setting("skip", unknown[0]), "is no configuration", f"Give one of {', '.join(names)}")
        if set(names) <= self.skip:
            raise UsageError("every configuration is skipped. Skip fewer, and mind SKIP_... in the environment")
        if self.save_init_weights and self.init_weights is not None:
            raise UsageError.mutually_exclusive(Setting("init_weights"), Setting("save_init_weights"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTraining:
    """A configuration on this machine. It is not run if `reason` says why."""

    configuration: SuiteConfiguration
    num_processes: int
    num_data_ranks: int
    reason: str = ""

    @property
    def name(self) -> str:
        return self.configuration.name


def plan_trainings(spec: SuiteSpec, machine: Machine) -> list[PlannedTraining]:
    """Plan each configuration with as many of the machine's devices as it can use."""
    plan = []
    for configuration in CONFIGURATIONS:
        share = (spec.tp if configuration.tp else 1) * (spec.ring if configuration.ring else 1)
        fits, num_needed = machine.num_devices // share, spec.data_ranks or 1
        # On a CPU, processes stand in for GPUs.
        num_data_ranks = spec.data_ranks or fits or 1
        reason = ""
        if machine.has_gpus and fits < num_needed:
            limit = "this machine has" if spec.processes is None else "--processes is"
            num_data_ranks, reason = 0, f"needs {share * num_needed} GPUs, {limit} {machine.num_devices}"
        if _is_custom(spec) and (configuration.tp or configuration.ring):
            reason = f"{'tp' if configuration.tp else 'ring'} is not there for --model {spec.model}"
        if configuration.name in spec.skip:
            reason = "skipped"
        plan.append(
            PlannedTraining(
                configuration=configuration,
                num_processes=num_data_ranks * share,
                num_data_ranks=num_data_ranks,
                reason=reason,
            )
        )
    return plan


def _is_custom(spec: SuiteSpec) -> bool:
    return ActorSpec(model=spec.model).has_user_model


def count_ranks(spec: SuiteSpec) -> int:
    """Return the most processes that a configuration has on a CPU, where processes stand in for GPUs."""
    machine = Machine(num_devices=spec.processes or PROCESSES_ON_A_CPU, has_gpus=False)
    return max(training.num_processes for training in plan_trainings(spec, machine) if not training.reason)


def count_inputs_per_step(plan: list[PlannedTraining]) -> int:
    """Return the smallest number divisible by every number of data ranks, so that skipping a configuration changes
    none.
    """
    return lcm(*(training.num_data_ranks for training in plan if training.num_data_ranks))


def build_run_spec(
    training: PlannedTraining,
    spec: SuiteSpec,
    *,
    inputs: Path,
    num_inputs: int,
    inputs_a_step: int,
    loss: LossName,
    states: Path | None = None,
) -> ReplaySpec:
    """Return the replay of one configuration.

    states  folder for the states of --save-state

    Raises UsageError if its options contradict each other.
    """
    configuration, has_user_model = training.configuration, _is_custom(spec)
    num_passes = spec.steps * inputs_a_step
    return ReplaySpec(
        actor=ActorSpec(
            backend=configuration.backend,
            model=spec.model if has_user_model else spec.init_weights or spec.model,
            weights=Path(spec.init_weights) if has_user_model and spec.init_weights else None,
            num_layers=spec.num_layers,
            dtype=spec.dtype,
            zero_stage=configuration.zero_stage,
            gradient_checkpointing=spec.gradient_checkpointing,
            optimizer=OptimizerName.ADAMW,
            learning_rate=spec.learning_rate,
            grad_accumulation=inputs_a_step // training.num_data_ranks,
            parallel=ParallelSpec(tp=spec.tp if configuration.tp else 1, ring=spec.ring if configuration.ring else 1),
        ),
        inputs=InputsSpec(
            inputs=inputs,
            max_inputs=num_passes // training.num_data_ranks,
            epochs=ceil(num_passes / num_inputs),
            shuffle_inputs=True,
        ),
        measure=MeasureSpec(loss=loss, step=StepMode.ON, name=configuration.name),
        state=StateSpec(save_state=states, save_every=spec.save_every, resume=states is not None),
    )


def build_init_weights_spec(spec: SuiteSpec, *, inputs: Path, loss: LossName, folder: Path) -> ReplaySpec:
    """Return the replay that writes the weights, as all configurations begin, into `folder`: in fp32, as they are."""
    return ReplaySpec(
        actor=ActorSpec(backend=DDP, model=spec.model, num_layers=spec.num_layers, dtype=Dtype.FP32),
        inputs=InputsSpec(inputs=inputs, max_inputs=1),
        measure=MeasureSpec(loss=loss, backward=False, name="init-weights"),
        state=StateSpec(save_model=folder),
    )
