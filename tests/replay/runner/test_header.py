"""What the lines above the passes say of the optimizer with which a job began, of weights, and of what is frozen."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from actor_init.model import ModelSource
from actor_init.spec import ActorSpec
from actor_init.weights import RandomWeights
from replay.resolution.selection import ChosenRecording
from replay.runner.header import Header, _format_config_line, describe_missing_weights, list_frozen
from replay.runner.state_store import EarlierPasses
from tests.helpers.made_logs import SELECTION
from tests.helpers.made_replays import MadeReplay
from tests.helpers.typed import spec_of


def test_what_is_frozen_in_a_part_of_the_passes_is_named_with_its_pass() -> None:
    source = ModelSource(config=LlamaConfig(), weights=RandomWeights(seed=0, std=0.02), name="a")
    assert list_frozen(source) == ""
    later = {0: frozenset({"b", "c"}), 4: frozenset[str]()}
    source = replace(source, frozen=frozenset({"a"}), frozen_later=later)
    assert list_frozen(source) == "a; b and 1 more from pass 1 on; no other from pass 5 on"


def test_a_model_of_the_users_own_without_weights_is_said_to_be_random() -> None:
    assert describe_missing_weights(ActorSpec(model="mine.py:build")) == {
        "weights": "random: --model mine.py:build builds a model without values. Try: --weights FOLDER, with the job's"
    }


@pytest.mark.parametrize(
    "actor",
    [
        ActorSpec(model="mine.py:build", weights=Path("ckpt.pt")),
        ActorSpec(model="mine.py:build", random_weights=True),
        ActorSpec(),
    ],
)
def test_weights_that_were_given_or_wanted_random_are_no_matter(actor: ActorSpec) -> None:
    assert describe_missing_weights(actor) == {}


def make_header(*typed: str, **parts: Any) -> Header:
    """A header of which only some parts are known."""
    values: dict[str, Any] = {declared.name: None for declared in fields(Header)}
    return Header(**values | {"resolved": MadeReplay.of(spec_of(typed))} | parts)


RESUMES = ("--step", "--save-state", "states", "--save-every", "2", "--resume")


@pytest.mark.parametrize(
    ("typed", "earlier", "lines"),
    [
        ((), EarlierPasses(), {}),
        (RESUMES, EarlierPasses(), {"resumed": "from the beginning: no state was saved yet"}),
        (
            RESUMES,
            EarlierPasses(folder=Path("states"), num_steps=2, num_passes=4),
            {"resumed": "behind 2 steps, 4 of 6 passes on each rank"},
        ),
        (
            RESUMES,
            EarlierPasses(folder=Path("states"), num_steps=1, num_passes=6),
            {"resumed": "behind 1 step, 6 of 6 passes on each rank"},
        ),
    ],
)
def test_a_run_that_goes_on_says_behind_how_many_of_all_its_passes(
    typed: tuple[str, ...], earlier: EarlierPasses, lines: dict[str, str]
) -> None:
    selection = replace(SELECTION, inputs=[Path(f"{number}.pkl") for number in range(6)])
    assert make_header(*typed, earlier=earlier, selection=selection)._describe_resumption() == lines


@pytest.mark.parametrize(
    ("num_inputs", "says"),
    [
        ([1], "1 input from captures, in recorded order"),
        ([6], "6 inputs from captures, in recorded order"),
        ([6, 6], "6 inputs a rank from captures, in recorded order"),
        ([6, 5, 6], "6, 5, 6 inputs by rank from captures, in recorded order"),
    ],
)
def test_the_inputs_of_each_rank_are_counted(num_inputs: list[int], says: str) -> None:
    header = make_header("--inputs", "captures", selection=SELECTION, num_inputs=num_inputs)
    assert header._describe_inputs() == says


@pytest.mark.parametrize(
    ("number", "num_recordings", "says"),
    [
        (1, 1, None),
        (2, 2, "2 of 2, begun 9:00; --recording 1 takes the other"),
        (1, 2, "1 of 2, begun 9:00; --recording 2 takes the other"),
        (3, 3, "3 of 3, begun 9:00; --recording N takes another"),
    ],
)
def test_the_recording_that_is_replayed_is_said_where_there_are_others(
    number: int, num_recordings: int, says: str | None
) -> None:
    chosen = ChosenRecording(number=number, num_recordings=num_recordings, begin="begun 9:00")
    header = make_header(selection=replace(SELECTION, recording=chosen))
    assert header._describe_recording() == ({} if says is None else {"recording": says})


def test_the_line_of_the_config_counts_what_it_does_not_name() -> None:
    differences = [f"a{number} 1 in the job, 2 here" for number in range(9)]
    assert _format_config_line([]) == {}
    assert _format_config_line(differences[:1]) == {"config": f"other than the job's: {differences[0]}"}
    [line] = _format_config_line(differences).values()
    named = line.count(" in the job")
    assert line.endswith(f"; and {9 - named} more, in run.json")
