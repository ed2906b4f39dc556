"""A backend in one file, for tests: a plain model on every rank, in fp32, whose gradients are averaged by hand.

`python -m tests.helpers.toy_backend COMMANDS.json` is tests/helpers/replay_worker.py with it, and
`python -m tests.helpers.toy_backend replay ...`
is `replay` with it.
"""

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from actor_init.action_log_probs import action_log_probs
from actor_init.attention.kernel_choice import choose_kernel_name
from actor_init.compiling import compile_blocks
from actor_init.declarations.backends import BACKENDS
from actor_init.declarations.backends.declaration import ActorSettings, BackendDeclaration, SuiteTraining
from actor_init.inputs.packing import ActorInputs
from actor_init.model import ModelSource, build_on_meta, find_blocks, materialise
from actor_init.optimizers.build import list_named_parameters, make_optimizer
from actor_init.saving.huggingface import write_model
from actor_init.schedule_and_norm import Progress, StepSettings, allows_step, make_schedule
from actor_init.spec import ActorSpec, Compile, Dtype
from actor_init.weights import OnProgress, ignore_progress
from actor_init.world import World


def find_obstacle(spec: ActorSettings, device_type: str) -> str | None:
    return None if spec.dtype is Dtype.FP32 else f"toy computes in fp32, not in {spec.dtype}. Try: --dtype fp32"


DECLARATION = BackendDeclaration(
    name="toy",
    engine="tests.helpers.toy_backend:ToyBackend",
    help="a plain model, for tests",
    find_obstacle=find_obstacle,
    suite_trainings=(SuiteTraining(is_standard=False),),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyBackend:
    spec: ActorSpec
    model: PreTrainedModel
    source: ModelSource
    optimizer: Optimizer | None
    schedule: LambdaLR | None
    attention: str

    @classmethod
    def open(
        cls, spec: ActorSpec, source: ModelSource, world: World, on_progress: OnProgress = ignore_progress
    ) -> Self:
        attention = choose_kernel_name(spec, world.device, source.config)
        model = build_on_meta(source.config, attention=attention, dtype=torch.float32)
        materialise(model, source.weights, world.device, on_progress=on_progress)
        if spec.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if spec.compile is Compile.BLOCKS:
            compile_blocks((block for _, block in find_blocks(model)), lengths=spec.compile_lengths)
        optimizer = make_optimizer(spec, list_named_parameters(model))
        schedule = make_schedule(spec, optimizer) if optimizer else None
        return cls(spec=spec, model=model, source=source, optimizer=optimizer, schedule=schedule, attention=attention)

    def forward(self, inputs: ActorInputs, *, train_mode: bool) -> Tensor:
        self.model.train(train_mode)
        return action_log_probs(self.model, inputs)

    def skip_passes(self, num_passes: int) -> None:
        """Each window ends where `end_window` is called."""

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss / self.spec.resolved_grad_accumulation / dist.get_world_size())

    def end_window(self, *, step: bool, settings: StepSettings | None = None) -> float:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        max_norm = self.spec.max_norm if step and self.spec.max_norm else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        step = step and allows_step(settings, norm)
        if step:
            assert self.optimizer is not None
            assert self.schedule is not None
            if settings is not None:
                settings.apply(self.optimizer, self.schedule)
            self.optimizer.step()
            self.schedule.step()
        self.model.zero_grad(set_to_none=True)
        return float(norm)

    def facts(self) -> Mapping[str, str | int]:
        return {
            "backend": self.spec.backend,
            "num_parameters": self.model.num_parameters(),
            "zero_stage": self.spec.resolved_zero_stage,
            "attention_kernel": self.attention,
            "optimizer": self.spec.optimizer,
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def masters(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        return (named for named in self.weights() if named[0] in names)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Summed here, on a copy: `end_window` sums what backward left."""
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.clone()
                dist.all_reduce(gradient)
                yield name, gradient

    def optimizer_states(self, names: Collection[str]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        for name, parameter in self.model.named_parameters():
            if self.optimizer is not None and name in names and (state := self.optimizer.state.get(parameter)):
                yield name, state

    def loss_scale(self) -> float:
        return 1.0

    def save_model(self, folder: Path) -> None:
        write_model(folder, self.source.config, self.spec.dtype, self.model, lambda tensor: tensor)

    def save_state(self, folder: Path) -> None:
        raise AssertionError("the declaration has no states, and --save-state is refused")

    def load_state(self, folder: Path) -> None:
        raise AssertionError("the declaration has no states, and --load-state is refused")

    def progress(self) -> Progress:
        return Progress.from_schedule(self.schedule)

    def close(self) -> None:
        self.model.zero_grad(set_to_none=True)


def main() -> int:
    BACKENDS[DECLARATION.name] = DECLARATION
    if sys.argv[1] == "replay":
        from replay.command_line.cli import main as replay

        return replay(sys.argv[2:])
    from tests.helpers.replay_worker import graphs_alone
    from tests.helpers.replay_worker import main as replays

    with graphs_alone():
        return replays()


if __name__ == "__main__":
    code = main()
    from replay.command_line.cli import leave

    leave(code)
