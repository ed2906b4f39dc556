"""How far two traced runs are apart, on made traces of few numbers, worked out by hand."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actor_init.spec import UsageError
from replay.tracing.distances import TensorDistance, measure_distances
from replay.tracing.trace_file import (
    FED,
    FED_POSITIONS,
    LOG_PROBS,
    PREDICTED,
    PREDICTED_POSITIONS,
    TensorKey,
    TensorKind,
    TracedPass,
    TraceFile,
    write_trace,
)

FORWARD = TensorKey(TensorKind.FORWARD, "model.layers.0.mlp", "output")
GRADIENT = TensorKey(TensorKind.GRADIENT, "model.layers.0.mlp", "output")
LATER = TensorKey(TensorKind.GRADIENT, "model.layers.0", "output")
SCORES = TensorKey(TensorKind.FORWARD, LOG_PROBS, "output")
WEIGHT, BIAS = (TensorKey(TensorKind.PARAMETER, f"model.layers.0.mlp.{part}", "weight") for part in ("w", "b"))
OF_WEIGHT = TensorKey(TensorKind.PARAMETER_GRADIENT, "model.layers.0.mlp.w", "gradient")
POSITIONS = [0, 1, 2, 6]  # of rows of four tokens
TOKENS = [[1, 11, 0, 0], [1, 12, 1, 1], [1, 13, 2, 2], [1, 21, 0, 0]]
Tables = Mapping[TensorKey, Sequence[float]]


class MadeRun:
    """A traced run of one rank, as its log and its trace would tell; `Any` to what reads real ones."""

    def __init__(self, home: Path, *, steps: bool = False) -> None:
        self.home = home
        home.mkdir()
        self.run = SimpleNamespace(folder=home, measure=SimpleNamespace(steps=steps))
        self.passes: list[Any] = []
        self.windows: list[Any] = []
        self.files: dict[str, TraceFile] = {}
        self.parameters = self.write("parameters", {})

    def write(self, name: str, tables: Tables, inputs: Mapping[str, Any] | None = None) -> TraceFile:
        made = {str(key): torch.tensor(values).reshape(len(values), -1) for key, values in tables.items()}
        made |= {key: torch.tensor(values) for key, values in (inputs or {}).items()}
        metadata = {"order": [str(key) for key in tables], "blocks": "model.layers", "seen": "modules"}
        write_trace(self.home / name, made, metadata)
        return TraceFile.open(self.home / name)

    def add(
        self,
        tables: Tables,
        *,
        name: str = "a.pkl",
        digest: str = "",
        step: int = 0,
        fed: Sequence[Sequence[int]] = TOKENS,
        positions: Sequence[int] = POSITIONS,
        gradients: Tables | None = None,
    ) -> "MadeRun":
        inputs = {
            FED_POSITIONS: positions,
            FED: fed,
            PREDICTED_POSITIONS: [1, 2],
            PREDICTED: [[0, 12], [1, 13]],
        }
        self.files[name] = self.write(name, {**tables, **(gradients or {})}, inputs)
        peers = [SimpleNamespace(input=SimpleNamespace(input_digest=digest or name))]
        self.passes.append(SimpleNamespace(source=name, peers=peers, num_windows_before=step))
        if gradients is not None:
            self.windows.append(SimpleNamespace(inputs=(name,)))
        return self

    def open_pass(self, traced: Any) -> TracedPass:
        file = self.files[traced.source]
        return TracedPass(source=traced.source, num_columns=4, order=file.order, parts=frozenset(), files={0: [file]})

    def open_window_end(self, window: Any) -> TraceFile:
        return self.files[window.inputs[-1]]


def measure(reference: Any, other: Any) -> list[TensorDistance]:
    return measure_distances(reference, other)


def find(distances: Sequence[TensorDistance], key: TensorKey) -> TensorDistance:
    [distance] = [distance for distance in distances if distance.key == key]
    return distance


def compare(tmp_path: Path, tables: Tables, other: Tables, **changes: Any) -> list[TensorDistance]:
    return measure(MadeRun(tmp_path / "a").add(tables), MadeRun(tmp_path / "b").add(other, **changes))


@pytest.mark.parametrize(
    ("key", "values", "other", "relative", "place"),
    [
        (FORWARD, (1.0, 2.0, 2.0, 4.0), (1.0, 2.0, 2.0, 4.0), 0.0, (0, 0)),
        # Of a row smaller than the median the median is the size; of a larger one its own.
        (FORWARD, (1.0, 2.0, 2.0, 4.0), (1.5, 2.0, 2.0, 4.0), 0.25, (0, 0)),
        (FORWARD, (1.0, 2.0, 2.0, 4.0), (1.0, 2.0, 2.0, 6.0), 0.5, (1, 2)),
        # Rows of 0 are no typical ones.
        (FORWARD, (0.0, 0.0, 0.0, 4.0), (1.0, 0.0, 0.0, 4.0), 0.25, (0, 0)),
        # A tenth of a gradient's rows exceed the typical one: 1 + 0.7 x 9 of these four.
        (GRADIENT, (1.0, 1.0, 1.0, 10.0), (2.0, 1.0, 1.0, 10.0), 1 / 7.3, (0, 0)),
        (FORWARD, (1.0, math.nan, 2.0, 4.0), (1.0, math.nan, 2.0, 4.0), 0.0, (0, 0)),
        (FORWARD, (1.0, 2.0, 2.0, 4.0), (1.0, math.nan, 2.0, 4.0), math.inf, (0, 1)),
        (FORWARD, (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0), math.inf, (0, 2)),
    ],
)
def test_a_tensor_is_as_far_off_as_its_farthest_token(
    key: TensorKey,
    values: Sequence[float],
    other: Sequence[float],
    relative: float,
    place: tuple[int, int],
    tmp_path: Path,
) -> None:
    distance = find(compare(tmp_path, {key: values}, {key: other}), key)
    assert distance.relative == pytest.approx(relative)
    assert (distance.source, distance.row, distance.token) == ("a.pkl", *place)


def test_a_log_prob_near_0_is_held_against_1(tmp_path: Path) -> None:
    distance = find(compare(tmp_path, {SCORES: (-0.01, -3.0)}, {SCORES: (-0.02, -3.0)}), SCORES)
    assert distance.relative == pytest.approx(0.01 / 1.505)
    assert distance.token == 1
    (tmp_path / "sure").mkdir()
    sure = compare(tmp_path / "sure", {SCORES: (-0.01, -0.02)}, {SCORES: (-0.02, -0.02)})
    assert find(sure, SCORES).relative == pytest.approx(0.01)


def test_inputs_are_off_by_the_share_of_tokens_that_differ(tmp_path: Path) -> None:
    """One token has another position id, and one token is fed by the reference alone."""
    fed = [TOKENS[0], [1, 12, 5, 1], TOKENS[2]]
    distances = compare(tmp_path, {}, {}, fed=fed, positions=POSITIONS[:3])
    shares = {distance.key.name: distance for distance in distances}
    # A token of one of them alone counts once, in the first column.
    assert {name: distance.relative for name, distance in shares.items()} == {
        "attention_mask": 0.25,
        "input_ids": 0.0,
        "position_ids": 0.25,
        "documents": 0.0,
        "action_mask": 0.0,
        "labels": 0.0,
    }
    assert (shares["attention_mask"].row, shares["attention_mask"].token) == (1, 2)
    assert (shares["position_ids"].row, shares["position_ids"].token) == (0, 1)
    # The same of one that the other run feeds alone.
    (tmp_path / "more").mkdir()
    runs = [
        MadeRun(tmp_path / "more" / "x").add({}, fed=TOKENS[:3], positions=POSITIONS[:3]),
        MadeRun(tmp_path / "more" / "y").add({}),
    ]
    first = measure(*runs)[0]
    assert (first.key.name, first.relative, first.row, first.token) == ("attention_mask", 0.25, 1, 2)


def test_a_gradient_that_never_came_back_is_infinitely_far(tmp_path: Path) -> None:
    """Where the other run traced gradients at all, and computed the tensor in its forward."""
    row = (1.0, 2.0, 2.0, 4.0)
    reference = {FORWARD: row, GRADIENT: row, LATER: row}
    distances = compare(tmp_path, reference, {FORWARD: row, LATER: row})
    assert find(distances, GRADIENT).relative == math.inf
    (tmp_path / "more").mkdir()
    kinds = [distance.key.kind for distance in compare(tmp_path / "more", reference, {FORWARD: row})]
    assert TensorKind.GRADIENT not in kinds
    (tmp_path / "none").mkdir()
    assert GRADIENT not in [distance.key for distance in compare(tmp_path / "none", reference, {LATER: row})]


@pytest.mark.parametrize(
    ("steps", "expected"), [(False, [(0, 0.5, "b.pkl")]), (True, [(0, 0.5, "b.pkl"), (1, 0.25, "c.pkl")])]
)
def test_of_several_passes_of_a_step_the_farthest_counts(
    steps: bool, expected: list[tuple[int, float, str]], tmp_path: Path
) -> None:
    own = {FORWARD: (1.0, 2.0, 2.0, 4.0)}
    half, quarter = {FORWARD: (1.0, 2.0, 2.0, 6.0)}, {FORWARD: (1.5, 2.0, 2.0, 4.0)}
    runs = [MadeRun(tmp_path / name, steps=steps) for name in "xy"]
    for name, step, tables in (("a.pkl", 0, quarter), ("b.pkl", 0, half), ("c.pkl", 1, quarter)):
        runs[0].add(own, name=name, step=step)
        runs[1].add(tables, name=name, step=step)
    # The other run went through its inputs in another order.
    runs[1].passes.reverse()
    found = [distance for distance in measure(*runs) if distance.key == FORWARD]
    assert [(each.num_steps_before, each.relative, each.source) for each in found] == expected


def test_the_gradient_of_a_parameter_comes_behind_that_of_its_modules_output(tmp_path: Path) -> None:
    row = (1.0, 2.0, 2.0, 4.0)
    tables = {FORWARD: row, LATER: row, GRADIENT: row}
    runs = [MadeRun(tmp_path / name).add(tables, gradients={OF_WEIGHT: (1.0, 2.0)}) for name in "xy"]
    runs[0].parameters = runs[1].parameters = runs[0].write("p", {WEIGHT: (1.0, 2.0)})
    keys = [distance.key for distance in measure(*runs) if distance.key.kind is not TensorKind.INPUT]
    assert keys == [WEIGHT, FORWARD, LATER, GRADIENT, OF_WEIGHT]


def test_a_bias_is_held_against_its_module(tmp_path: Path) -> None:
    """Its own gradient may cancel; a hundredth of the largest in its module counts. It is one row of a sketch."""
    reference, other = MadeRun(tmp_path / "x").add({}), MadeRun(tmp_path / "y").add({})
    reference.parameters = reference.write("p", {WEIGHT: (300.0, 400.0), BIAS: (1.0,)})
    other.parameters = other.write("p", {WEIGHT: (300.0, 400.0), BIAS: (2.0,)})
    bias = find(measure(reference, other), BIAS)
    assert bias.relative == pytest.approx(1 / 5)
    assert (bias.source, bias.row, bias.token) == (None, 0, None)


def test_runs_without_an_input_in_common_are_refused(tmp_path: Path) -> None:
    first = MadeRun(tmp_path / "x").add({})
    with pytest.raises(UsageError, match="have no input in common"):
        measure(first, MadeRun(tmp_path / "y").add({}, name="b.pkl"))
    with pytest.raises(UsageError, match=r"a\.pkl holds other tensors in "):
        measure(first, MadeRun(tmp_path / "z").add({}, digest="another"))
