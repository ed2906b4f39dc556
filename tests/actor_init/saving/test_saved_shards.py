"""What ranks that are threads save of their shards is whole, and goes on in other shards."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from actor_init.model import ModelSource
from actor_init.saving.huggingface import create_whole_folder
from actor_init.spec import Dtype, ParallelSpec
from actor_init.world import World
from tests.helpers.thread_actors import ShardedCase
from tests.helpers.thread_ranks import run_with_groups

TIED = "llama, tied, biases, uneven"
OPTIONS: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 0.01, "lr_warmup_steps": 4}
CASES = {
    "whole": ShardedCase(model=TIED, num_ranks=1, options=OPTIONS),
    "tp": ShardedCase(model=TIED, num_ranks=2, parallel=ParallelSpec(tp=2), options=OPTIONS),
    "ring": ShardedCase(model=TIED, num_ranks=2, parallel=ParallelSpec(ring=2), options=OPTIONS),
}


def make_ready_source(case: ShardedCase) -> ModelSource:
    """Make the model, whose vectors one thread has asked for."""
    source = case.make_source()
    run_with_groups(lambda world: case.open_actor(source, world), 1, ParallelSpec())
    return source


def step(actor: Any, case: ShardedCase, source: ModelSource, world: World) -> None:
    [inputs] = case.make_inputs(source, world)
    actor.backward(-actor.forward(inputs, train_mode=True).mean())
    actor.end_window(step=True)


def read_weights(actor: Any) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in actor.weights()}


@pytest.mark.parametrize(("first", "second", "num_steps"), [("tp", "ring", 2), ("ring", "tp", 0)])
def test_a_state_goes_on_in_other_shards_as_it_would_have(
    first: str, second: str, num_steps: int, tmp_path: Path
) -> None:
    """The rate rises with each step, so that a count that was lost shows."""
    source = make_ready_source(CASES["whole"])

    def save(world: World) -> dict[str, Tensor]:
        actor = CASES[first].open_actor(source, world)
        for _ in range(num_steps):
            step(actor, CASES[first], source, world)
        with create_whole_folder(tmp_path / "state", world) as folder:
            actor.save_state(folder)
        step(actor, CASES[first], source, world)
        return read_weights(actor)

    def go_on(world: World) -> tuple[dict[str, Tensor], Any]:
        actor = CASES[second].open_actor(source, world)
        actor.load_state(tmp_path / "state")
        progress = actor.progress()
        step(actor, CASES[second], source, world)
        return read_weights(actor), progress

    expected, *_ = run_with_groups(save, CASES[first].num_ranks, CASES[first].parallel)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    for weights, progress in run_with_groups(go_on, CASES[second].num_ranks, CASES[second].parallel):
        assert (progress.num_steps, progress.learning_rate) == (num_steps, pytest.approx(0.01 * num_steps / 4))
        for name, weight in expected.items():
            # Adam divides by the size of a gradient, so a rounded one may turn a small step: a hundredth of it.
            torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.BF16])
def test_a_model_is_saved_whole_in_its_dtype_and_a_tied_weight_once(dtype: Dtype, tmp_path: Path) -> None:
    case = replace(CASES["tp"], options={**OPTIONS, "dtype": dtype})
    source = make_ready_source(CASES["whole"])

    def save(world: World) -> dict[str, Tensor]:
        actor = case.open_actor(source, world)
        with create_whole_folder(tmp_path / "model", world) as folder:
            actor.save_model(folder)
        return read_weights(actor)

    expected, *_ = run_with_groups(save, case.num_ranks, case.parallel)
    saved = load_file(tmp_path / "model" / "model.safetensors")
    # No buffer that the class makes itself, such as the frequencies of rotations.
    assert saved.keys() == expected.keys()
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    for name, parameter in opened.named_parameters():
        assert parameter.dtype is {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16}[dtype]
        assert torch.equal(parameter, expected[name]), name


def test_what_a_rank_could_not_write_leaves_no_folder(tmp_path: Path) -> None:
    def fail(world: World) -> None:
        with create_whole_folder(tmp_path / "state", world) as folder:
            # The other one has written all of its part, and waits.
            if world.rank == 1:
                (folder / "half").write_text("written")
                raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run_with_groups(fail, 2, ParallelSpec())
    assert list(tmp_path.iterdir()) == []
