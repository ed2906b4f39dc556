"""Decide when the optimizer of an open actor steps and with which settings, and count its steps and their memory.

With --step the optimizer steps at the end of each complete window, and the step is a measured part of the pass. Without
--step it follows the job's steps: it steps where the job did, with the settings that the job had there. Such a step is
not measured, and must not spoil a pass that would succeed without it. If it might, the job's steps are followed no
further.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from actor_init.backends.protocol import Backend
from actor_init.declarations.backends import find_backend_declaration
from actor_init.schedule_and_norm import TORCH_DTYPES
from actor_init.world import World
from capture.file_format.optimizer_step import ParameterSamples
from replay.options.resolved import ResolvedReplay
from replay.output.text import Pairs, format_gibibytes, pluralise
from replay.runlog.records import CostSection
from replay.runner.run_pass import PassInputs, StepTiming, WindowEnd
from replay.verdict.gradient_samples import copy_elements, fetch_together
from replay.verdict.recorded_pass import SteppedSample
from replay.verdict.weight_check import WeightChecker

MEMORY_INFO = Path("/proc/meminfo")
# The optimizer's state may take this share of the memory that is free before the first step. The rest is kept free,
# since later passes may be larger.
MOST_OF_FREE_MEMORY = 0.5


@dataclass(kw_only=True, slots=True)
class StepFollower:
    """Decides and counts the steps of a run on one rank.

    num_steps    steps that the optimizer has taken since the actor was opened
    latest_pass_has_stepped  the optimizer stepped at the end of the latest pass, so weights have changed since
    state_bytes  the memory of the optimizer's state if steps without --step made it, else 0
    why_stopped  why the job's steps are not followed any more; empty: they are still followed
    num_taken    steps without --step in the whole run, also those before the actor was opened again
    largest_state_bytes  the most memory that the state of such steps took in the whole run
    read_memory  returns the bytes that the optimizer's state will take, and the bytes that are free; None: not known
    """

    spec: ResolvedReplay
    world: World
    num_steps: int = 0
    latest_pass_has_stepped: bool = False
    state_bytes: int = 0
    why_stopped: str = ""
    num_taken: int = 0
    largest_state_bytes: int = 0
    read_memory: Callable[[ResolvedReplay, World, Backend], tuple[int, int | None]] = field(
        default=lambda spec, world, backend: (
            _predict_state_bytes(spec, world, backend),
            _read_free_bytes(world.device),
        )
    )
    # The backend's count of steps when the actor was opened, which is not 0 if a state was loaded. None: no pass has
    # been planned since.
    _first_num_steps: int | None = field(default=None, init=False)

    def plan_step(self, inputs: PassInputs, index: int, backend: Backend) -> PassInputs:
        """Return the inputs of pass `index`, to which are added whether a step ends the pass, and the step's settings.

        All ranks must call this.
        """
        self.latest_pass_has_stepped = False
        if self._first_num_steps is None:
            self._first_num_steps = backend.progress().num_steps
        if inputs.window_end is not WindowEnd.COMPLETE or not self.spec.measure.steps:
            return inputs
        settings = self.spec.step_settings.get(index)
        if not self.spec.steps_unasked:
            return replace(inputs, step_timing=StepTiming.MEASURED, step_settings=settings)
        if settings is None or self.why_stopped:
            return inputs
        if not self.num_steps and (why := self._explain_lack_of_memory(backend)) is not None:
            self.why_stopped = why
            return inputs
        # A step with a gradient that is not finite would spoil the weights.
        settings = replace(settings, needs_finite=True)
        return replace(inputs, step_timing=StepTiming.UNMEASURED, step_settings=settings)

    def stop_following_steps(self, why: str) -> None:
        """Follow no more of the job's steps."""
        self.why_stopped = self.why_stopped or why

    def count_step(self, inputs: PassInputs, backend: Backend) -> None:
        """Count the step of a pass that succeeded, if the optimizer took one, and the memory of its state."""
        if inputs.step_timing is StepTiming.NONE:
            return
        num_steps = backend.progress().num_steps - (self._first_num_steps or 0)
        self.latest_pass_has_stepped, self.num_steps = num_steps > self.num_steps, num_steps
        if inputs.step_timing is StepTiming.MEASURED:
            return
        self.num_taken += self.latest_pass_has_stepped
        self.state_bytes = backend.count_state_bytes()
        self.largest_state_bytes = max(self.largest_state_bytes, self.state_bytes)
        if not self.latest_pass_has_stepped:
            self.why_stopped = f"the gradient of step {num_steps + 1} is not finite here"

    def forget_steps(self, why: str) -> None:
        """Stop following steps: the actor was opened anew, with the weights that the run began with.

        why  why the job's steps cannot be followed any more
        """
        self.num_steps, self.latest_pass_has_stepped, self.state_bytes, self._first_num_steps = 0, False, 0, None
        self.stop_following_steps(why)

    @torch.no_grad()
    def sample_weights(
        self, backend: Backend, recorded: ParameterSamples | None, checker: WeightChecker
    ) -> list[SteppedSample]:
        """Return the elements of the weights that the job sampled before a pass. All ranks must call this.

        Empty before the first step, since then the weights are those of the model's files.
        """
        if not self.num_steps:
            return []
        samples = checker.match_to_parameters(recorded.samples if recorded is not None else ())
        names = {name for rank_names in self.world.gather(list(samples)) for name in rank_names}
        taken: dict[str, Tensor] = {}
        for name, weight in backend.masters(names):
            if (sample := samples.get(name)) is not None:
                taken[name] = copy_elements(weight, sample.start, len(sample.values))
        values = dict(zip(taken, fetch_together(list(taken.values())), strict=True))
        initial = checker.read_initial_values(samples)
        return [
            SteppedSample(
                name=name,
                dtype=sample.dtype,
                start=sample.start,
                job_values=sample.values,
                replay_values=self._undo_rounding(values[name], initial[name]),
                initial_values=tuple(initial[name]),
            )
            for name, sample in samples.items()
            if name in values and name in initial and sample.values
        ]

    def _undo_rounding(self, values: Sequence[float], initial_values: Sequence[float]) -> tuple[float, ...]:
        """Return weights after steps as they would be if the masters had begun with the weights of the model's files.

        Some backends make the masters from weights in a 16-bit dtype. Such masters begin with rounded values, and
        rounding moves a weight farther than a small step does.
        """
        if not find_backend_declaration(self.spec.actor.backend).rounds_masters:
            return tuple(values)
        rounded = torch.tensor(initial_values, dtype=torch.double).to(TORCH_DTYPES[self.spec.actor.dtype]).tolist()
        return tuple(
            value - start + initial for value, start, initial in zip(values, rounded, initial_values, strict=True)
        )

    def subtract_optimizer_state_bytes(self, cost: CostSection) -> CostSection:
        """Return the cost of a pass without the memory of the optimizer's state that steps without --step have made.

        Call this before `count_step`: the first of these steps makes the state after the pass has been measured.
        """
        if not self.state_bytes:
            return cost
        phases = {
            name: replace(
                phase,
                allocated_bytes=None if phase.allocated_bytes is None else phase.allocated_bytes - self.state_bytes,
                peak_allocated_bytes=phase.peak_allocated_bytes - self.state_bytes,
            )
            for name, phase in cost.phases.items()
        }
        return replace(cost, phases=phases)

    def describe(self) -> Pairs:
        """Say what came of the steps without --step, and their memory; empty: no steps of the job are followed."""
        if not self.spec.steps_unasked:
            return []
        taken = f"{pluralise(self.num_taken, 'step')} between the passes, outside their times"
        taken += "" if self.why_stopped else "; behind the last pass none is needed"
        stopped = f"; no more are followed: {self.why_stopped}" if self.why_stopped else ""
        size = f"{format_gibibytes(self.largest_state_bytes)} GiB, which no peak here holds"
        return [("stepped", f"as the job, {taken}; the optimizer's state took {size}{stopped}")]

    def _explain_lack_of_memory(self, backend: Backend) -> str | None:
        """Say that the optimizer's state would leave too little memory on a rank; None: it leaves enough on each.

        All ranks must call this.
        """
        needed, free = self.read_memory(self.spec, self.world, backend)
        lacks = self.world.gather(free is not None and needed > MOST_OF_FREE_MEMORY * free)
        if not any(lacks):
            return None
        sizes = f"{format_gibibytes(needed)} GiB, and {format_gibibytes(free or 0)} GiB are free"
        return f"the optimizer's state needs {sizes}. Try: --step"


def _predict_state_bytes(spec: ResolvedReplay, world: World, backend: Backend) -> int:
    """Predict how many bytes the optimizer's state will take on a rank."""
    declaration = find_backend_declaration(spec.actor.backend)
    holding = declaration.predict_memory(spec.actor, True)
    share_elsewhere = 1 - 1 / world.num_data_ranks
    per_parameter = holding.total.moments - share_elsewhere * holding.partitioned.moments
    return int(int(backend.facts()["num_parameters"]) / spec.actor.parallel.tp * per_parameter)


def _read_free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated; None: the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = MEMORY_INFO.read_text().splitlines()
    except OSError:
        return None
    sizes = {name: size.split()[0] for name, _, size in (line.partition(":") for line in lines) if size}
    return int(sizes["MemAvailable"]) * 1024 if "MemAvailable" in sizes else None
