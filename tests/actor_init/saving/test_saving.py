"""What is saved opens in Hugging Face; what goes on from a saved state is what had never stopped."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from replay.runlog.records import PassRecord
from tests.helpers.contract import LOSS_BOUND, NORM_BOUND, records_of
from tests.helpers.made_captures import write_pass
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import Reference
from tests.helpers.sharded import SIZES

pytestmark = pytest.mark.slow

# The three steps after a load are the last two of the warm-up and one behind it.
LEARNING_RATE, MAX_NORM, WARMUP_STEPS = 1e-2, 0.5, 4
TRAINING = f"--step --learning-rate {LEARNING_RATE} --max-norm {MAX_NORM} --lr-warmup-steps {WARMUP_STEPS}"
# Relative to the whole update. AdamW divides sums, which are added in another order, by their own size.
UPDATE_BOUND = 2e-3

STRATEGIES = {
    **{f"deepspeed {stage}": f"--zero-stage {stage} --dtype fp32" for stage in range(4)},
    "fsdp2 2": "--backend fsdp2 --zero-stage 2 --dtype fp32",
    "fsdp2 3": "--backend fsdp2 --dtype fp32",
    "deepspeed 0 bf16": "--zero-stage 0 --dtype bf16",
    "deepspeed 2 bf16": "--zero-stage 2 --dtype bf16",
    "fsdp2 3 bf16": "--backend fsdp2 --dtype bf16",
    "fsdp2 3 fp16": "--backend fsdp2 --dtype fp16",
    "fsdp2 3 sgd": "--backend fsdp2 --dtype fp32 --optimizer sgd",
    "deepspeed 1 sgd": "--zero-stage 1 --dtype fp32 --optimizer sgd",
    "deepspeed 3 tied": "--zero-stage 3 --dtype fp32",
    "fsdp2 3 tied": "--backend fsdp2 --dtype fp32",
    "deepspeed 1 tp 2": "--zero-stage 1 --tp 2 --dtype fp32",
    "deepspeed 3 tp 2": "--zero-stage 3 --tp 2 --dtype fp32",
    "fsdp2 3 tp 2": "--backend fsdp2 --tp 2 --dtype fp32",
    "fsdp2 3 tp 2 tied": "--backend fsdp2 --tp 2 --dtype fp32",
}
TWO_RANKS = [f"deepspeed {stage}" for stage in range(4)] + ["fsdp2 3", "deepspeed 2 bf16", "fsdp2 3 tied"]
# The strategies that run in each world. A world is a number of processes, or tp.
WORLDS = {
    "1": [name for name in STRATEGIES if "tp" not in name],
    "2": TWO_RANKS,
    "tp": [name for name in STRATEGIES if "tp" in name],
}
ALONE = [(world, name) for world, names in WORLDS.items() for name in names]
# What data ranks save in fp32 is looked at once, after steps; all else also as it was opened, and replayed again.
TWICE = [(world, name) for world, name in ALONE if world != "2" or "bf16" in name]
# States that are saved in one world and loaded in another: world and strategy of both.
MOVES = [
    *[("2", f"deepspeed {stage}", "1", f"deepspeed {stage}") for stage in range(4)],
    ("1", "deepspeed 1", "2", "deepspeed 1"),
    ("1", "deepspeed 3", "2", "deepspeed 3"),
    ("1", "fsdp2 3", "2", "fsdp2 3"),
    ("2", "fsdp2 3", "1", "fsdp2 2"),
    ("2", "fsdp2 3", "tp", "fsdp2 3 tp 2"),
    ("2", "fsdp2 3 tied", "tp", "fsdp2 3 tp 2 tied"),
    ("tp", "fsdp2 3 tp 2", "1", "fsdp2 3"),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    home: Path
    models: dict[bool, Path]

    @property
    def inputs(self) -> Path:
        return self.home / "inputs"

    def model_of(self, strategy: str) -> Path:
        return self.models["tied" in strategy]

    def folder(self, kind: str, world: str, strategy: str, first_world: str = "") -> Path:
        return self.home / f"{kind} {world} {strategy} {first_world}".strip().replace(" ", "-")

    def command(self, kind: str, world: str, strategy: str, flags: str, first_world: str = "") -> list[str]:
        logs = ["--log-folder", str(self.folder(f"log {kind}", world, strategy, first_world))]
        where = ["--model", str(self.model_of(strategy)), "--inputs", str(self.inputs), *logs, "--quiet"]
        return [*STRATEGIES[strategy].split(), *where, "--warmup", "0", *flags.split()]

    def records(self, kind: str, world: str, strategy: str, first_world: str = "") -> list[PassRecord]:
        return records_of(self.folder(f"log {kind}", world, strategy, first_world))

    def run(self, world: str, commands: list[list[str]]) -> None:
        table = self.home / f"commands-{len(list(self.home.iterdir()))}.json"
        table.write_text(json.dumps(commands))
        worker = ["-m", "tests.helpers.replay_worker", str(table), "2" if world == "tp" else "1"]
        run_ranks(worker, 1 if world == "1" else 2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Everything that is saved, in one process a rank; then everything that is loaded, in new ones."""
    models = {}
    for tied in (False, True):
        models[tied] = tmp_path_factory.mktemp("model")
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", tie_word_embeddings=tied, **SIZES)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(models[tied])
    runs = Runs(home=tmp_path_factory.mktemp("runs"), models=models)
    for number in range(12):
        write_pass(
            runs.inputs,
            rank=number % 2,
            step=number,
            length=40 + number,
            num_real=40 + number - number % 3,
            num_actions=30,
            vocabulary=264,
        )
    for world, names in WORLDS.items():
        commands = []
        for name in names:
            model, opened, first = (runs.folder(kind, world, name) for kind in ("trained", "opened", "state"))
            if (world, name) in TWICE:
                commands.append(runs.command("opened", world, name, f"--max-inputs 1 --save-model {opened}"))
            commands += [
                runs.command("whole", world, name, f"{TRAINING} --max-inputs 6 --save-state {first}-6"),
                runs.command(
                    "first", world, name, f"{TRAINING} --max-inputs 3 --save-model {model} --save-state {first}"
                ),
            ]
        runs.run(world, commands)
    for world, names in WORLDS.items():
        commands = []
        for name in names:
            state, last = runs.folder("state", world, name), runs.folder("last", world, name)
            going_on = f"{TRAINING} --skip-inputs 3 --max-inputs 3 --load-state {state} --save-state {last}"
            commands.append(runs.command("second", world, name, going_on))
            if (world, name) in TWICE:
                again = f"--skip-inputs 3 --max-inputs 1 --model {runs.folder('trained', world, name)}"
                commands.append(runs.command("again", world, name, again))
        for first_world, saver, _, loader in [move for move in MOVES if move[2] == world]:
            going_on = (
                f"{TRAINING} --skip-inputs 3 --max-inputs 3 --load-state {runs.folder('state', first_world, saver)}"
            )
            commands.append(runs.command("moved", world, loader, going_on, first_world))
        runs.run(world, commands)
    return runs


def opened_by_transformers(folder: Path) -> dict[str, Tensor]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    state: dict[str, Tensor] = model.state_dict()
    return state


def read_dtype(strategy: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(strategy.split()[-1], torch.float32)


def list_windows(records: list[PassRecord], inputs: Path) -> list[list[Path]]:
    """What all data ranks replayed in each pass."""
    sources: dict[int, dict[str, None]] = {}
    for record in records:
        sources.setdefault(record.index, {})[record.source] = None
    return [[inputs / name for name in sources[index]] for index in sorted(sources)]


def list_numbers(records: list[PassRecord]) -> list[tuple[int, str, float | None, float | None]]:
    return [(record.rank, record.source, record.result.loss, record.result.grad_norm) for record in records]


@pytest.mark.parametrize(("world", "strategy"), TWICE)
def test_a_model_saved_as_it_was_opened_has_the_very_same_tensors(world: str, strategy: str, runs: Runs) -> None:
    saved = opened_by_transformers(runs.folder("opened", world, strategy))
    expected = opened_by_transformers(runs.model_of(strategy))
    assert saved.keys() == expected.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == read_dtype(strategy), name
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


@pytest.mark.parametrize(("world", "strategy"), [row for row in ALONE if "16" not in row[1] and "sgd" not in row[1]])
def test_a_trained_model_has_the_tensors_of_a_plain_loop(world: str, strategy: str, runs: Runs) -> None:
    reference = Reference(runs.model_of(strategy))
    before = {name: tensor.clone() for name, tensor in reference.model.state_dict().items()}
    windows = list_windows(runs.records("first", world, strategy), runs.inputs)
    reference.trained(windows, learning_rate=LEARNING_RATE, max_norm=MAX_NORM, warmup_steps=WARMUP_STEPS)
    saved = opened_by_transformers(runs.folder("trained", world, strategy))
    for name, expected in reference.model.state_dict().items():
        update = (expected - before[name]).norm()
        assert update > 0
        assert (saved[name] - expected).norm() <= UPDATE_BOUND * update, name


@pytest.mark.parametrize(("world", "strategy"), ALONE)
def test_going_on_is_as_if_it_had_never_stopped(world: str, strategy: str, runs: Runs) -> None:
    """To the last bit: the same ranks add the same numbers in the same order."""
    whole = list_numbers(runs.records("whole", world, strategy))
    second = list_numbers(runs.records("second", world, strategy))
    assert len(second) == len(whole) // 2
    assert second == whole[len(second) :]
    uninterrupted, resumed = (
        json.loads((folder / "state.json").read_text())
        for folder in (Path(f"{runs.folder('state', world, strategy)}-6"), runs.folder("last", world, strategy))
    )
    assert uninterrupted == resumed
    assert (resumed["num_steps"], resumed["num_inputs"]) == (6, 6)
    halfway = json.loads((runs.folder("state", world, strategy) / "state.json").read_text())
    assert halfway["next_learning_rate"] == pytest.approx(LEARNING_RATE * 3 / WARMUP_STEPS)


@pytest.mark.parametrize(("world", "strategy"), TWICE)
def test_a_saved_model_replays_to_the_losses_of_the_actor_that_saved_it(world: str, strategy: str, runs: Runs) -> None:
    whole = [record.result.loss for record in runs.records("whole", world, strategy) if record.index == 3]
    assert [record.result.loss for record in runs.records("again", world, strategy)] == whole


@pytest.mark.parametrize(("first_world", "saver", "world", "loader"), MOVES)
def test_going_on_with_other_ranks_is_what_a_plain_loop_does(
    first_world: str, saver: str, world: str, loader: str, runs: Runs
) -> None:
    first, moved = runs.records("first", first_world, saver), runs.records("moved", world, loader, first_world)
    windows = list_windows(first, runs.inputs) + list_windows(moved, runs.inputs)
    assert len(windows) == 6
    expected = Reference(runs.model_of(saver)).trained(
        windows, learning_rate=LEARNING_RATE, max_norm=MAX_NORM, warmup_steps=WARMUP_STEPS
    )
    for record in moved:
        losses, norm = expected[3 + record.index]
        # Five steps of AdamW have added up rounding.
        assert record.result.loss == pytest.approx(losses[record.source], rel=10 * LOSS_BOUND)
        assert record.result.grad_norm == pytest.approx(norm, rel=10 * NORM_BOUND)
