"""One function runs every pass: in which order, who looks on, and what is left of it."""

import ast
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from actor_init.inputs.documents import KeptLogits
from actor_init.inputs.packing import ActorInputs, prepare_inputs
from actor_init.optimizer import StepSettings
from capture import capture_files, read_micro_batch
from capture.file_format.tensor_codec import RandomStates
from replay.options.spec import find_sample_folder
from replay.runlog.records import CostSection
from replay.runner.observers import LossCheck
from replay.runner.run_pass import PassInputs, PassObserver, run_pass
from replay.watch.progress import RankPhase

ROOT = Path(__file__).parents[3]
ONLY_RUN_PASS = {"forward", "backward", "end_window"}


class Backend:
    """One parameter. Writes down what is called."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.weight = torch.tensor(2.0, requires_grad=True)
        self.fails_in = ""

    def forward(self, inputs: ActorInputs, *, train_mode: bool) -> Tensor:
        self.events.append(f"forward, {'trains' if train_mode else 'evaluates'}")
        if self.fails_in == "forward":
            raise RuntimeError("the forward failed")
        return self.weight * inputs.action_mask_BA.float()

    def skip_passes(self, num_passes: int) -> None:
        self.events.append(f"{num_passes} skipped")

    def backward(self, loss: Tensor) -> None:
        self.events.append(f"backward of {loss.item():g}")
        if self.fails_in == "backward":
            raise RuntimeError("the backward failed")
        loss.backward()

    def end_window(self, *, step: bool, settings: StepSettings | None = None) -> float:
        self.events.append("step" if step else "clear")
        assert self.weight.grad is not None
        norm = float(self.weight.grad)
        self.weight.grad = None
        return norm


class Clock:
    """Measures nothing, and writes down what it would have measured."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def wait_for_all_ranks(self) -> None:
        self.events.append("meet")

    def start(self) -> None:
        self.events.append("start")

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        self.events.append(f"{name} begins")
        try:
            yield
        finally:
            self.events.append(f"{name} ends")

    def wait_for_slowest_rank(self) -> None:
        self.events.append("wait")

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.events.append("pause")
        yield
        self.events.append("go on")

    def stop(self) -> CostSection:
        self.events.append("stop")
        return CostSection(seconds=1.0)


class Marker(PassObserver):
    """Hears of phases alone, and of the end."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def before_phase(self, phase: RankPhase) -> None:
        self.events.append(f"at {phase.name.lower()}")

    def close(self, error: BaseException | None) -> None:
        self.events.append(f"closed: {error}")


class PausingObserver(PassObserver):
    """Looks at everything, with the clock paused."""

    pauses_clock_after: ClassVar[frozenset[RankPhase]] = frozenset({RankPhase.FORWARD, RankPhase.BACKWARD})

    def __init__(self, events: list[str], backend: Backend) -> None:
        self.events, self.backend = events, backend

    def before_pass(self, inputs: PassInputs) -> None:
        self.events.append("begin")

    def after_forward(self, log_probs_BA: Tensor, loss: Tensor) -> None:
        self.events.append(f"sees loss {loss.item():g}")

    def after_backward(self) -> None:
        self.events.append(f"sees gradient {self.backend.weight.grad}")

    def before_step(self, loss: Tensor) -> None:
        self.events.append("before the step")

    def after_measurement(self) -> None:
        self.events.append("reads counters")


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def inputs() -> PassInputs:
    laid_out = prepare_inputs(read_micro_batch(capture_files(find_sample_folder())[0]), packing=False)
    return PassInputs(
        actor_inputs=laid_out,
        compute_loss=torch.sum,
        train_mode=True,
        builds_graph=True,
        runs_backward=True,
        ends_window=True,
        captured_row_length=1,
    )


def count_tokens(inputs: PassInputs) -> int:
    return int(inputs.actor_inputs.action_mask_BA.sum())


def test_a_step_is_measured_and_all_that_is_looked_at_is_not(events: list[str], inputs: PassInputs) -> None:
    backend: Any = Backend(events)
    number = count_tokens(inputs)
    outcome = run_pass(
        backend,
        replace(inputs, takes_step=True, loss_weight=0.5),
        Clock(events),
        [Marker(events), PausingObserver(events, backend)],
    )
    assert events == [
        "begin",
        "meet",
        "at forward",
        "start",
        "forward begins",
        "forward, trains",
        "forward ends",
        "pause",
        f"sees loss {2 * number}",
        "go on",
        "at waiting",
        "wait",
        "at backward",
        "backward begins",
        f"backward of {number}",
        "backward ends",
        "pause",
        f"sees gradient {float(number) / 2}",
        "go on",
        "pause",
        "before the step",
        "go on",
        "at step",
        "step begins",
        "step",
        "step ends",
        "at device_wait",
        "stop",
        "reads counters",
        "at ending",
        "closed: None",
    ]
    assert (outcome.loss.item(), outcome.grad_norm, outcome.cost.seconds) == (2.0 * number, number / 2, 1.0)


def test_a_window_that_ends_without_a_step_is_cleared_behind_the_clock(events: list[str], inputs: PassInputs) -> None:
    backend: Any = Backend(events)
    outcome = run_pass(backend, inputs, Clock(events))
    assert events[-2:] == ["stop", "clear"]
    assert outcome.grad_norm == count_tokens(inputs)


def test_a_pass_in_the_middle_of_a_window_leaves_its_gradient(events: list[str], inputs: PassInputs) -> None:
    backend: Any = Backend(events)
    assert run_pass(backend, replace(inputs, ends_window=False)).grad_norm is None
    assert backend.weight.grad == count_tokens(inputs)


def test_a_forward_alone_builds_no_graph(events: list[str], inputs: PassInputs) -> None:
    backend: Any = Backend(events)
    graphs: list[bool] = []

    def compute_loss(log_probs_BA: Tensor) -> Tensor:
        graphs.append(log_probs_BA.requires_grad)
        return log_probs_BA.sum()

    alone = replace(
        inputs, compute_loss=compute_loss, train_mode=False, builds_graph=False, runs_backward=False, ends_window=False
    )
    run_pass(backend, alone)
    assert (events, graphs) == (["forward, evaluates"], [False])


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_pass_that_fails_closes_its_observers_with_the_error(
    phase: str, events: list[str], inputs: PassInputs
) -> None:
    backend: Any = Backend(events)
    backend.fails_in = phase
    with pytest.raises(RuntimeError, match=f"the {phase} failed"):
        run_pass(backend, inputs, Clock(events), [Marker(events), PausingObserver(events, backend)])
    assert events[-1] == f"closed: the {phase} failed"
    assert events[-2] == f"{phase} ends"


def test_an_observer_that_cannot_begin_closes_those_that_have_begun(events: list[str], inputs: PassInputs) -> None:
    class Failing(PassObserver):
        def before_pass(self, inputs: PassInputs) -> None:
            raise RuntimeError("no counters")

    backend: Any = Backend(events)
    with pytest.raises(RuntimeError, match="no counters"):
        run_pass(backend, inputs, Clock(events), [Marker(events), Failing()])
    assert events == ["closed: no counters"]


def test_the_check_of_the_loss_before_a_step_is_in_no_pass_s_seconds(events: list[str], inputs: PassInputs) -> None:
    def is_needed(loss: Tensor) -> bool:
        events.append("looks at the loss")
        return False

    backend: Any = Backend(events)
    run_pass(backend, replace(inputs, takes_step=True), Clock(events), [LossCheck(is_needed, lambda inputs: None)])
    begin = events.index("looks at the loss")
    assert events[begin - 1 : begin + 2] == ["pause", "looks at the loss", "go on"]


def test_a_pass_keeps_no_graph_and_no_logits_of_its_own(events: list[str], inputs: PassInputs) -> None:
    backend: Any = Backend(events)
    seen: list[Any] = []

    def compute_loss(log_probs_BA: Tensor) -> Tensor:
        seen.append(weakref.ref(log_probs_BA))
        return log_probs_BA.sum()

    kept = KeptLogits()
    kept._logits = torch.zeros(1)
    outcome = run_pass(
        backend, replace(inputs, actor_inputs=replace(inputs.actor_inputs, kept_logits=kept), compute_loss=compute_loss)
    )
    gc.collect()
    assert seen[0]() is None
    assert kept._logits is None
    assert not outcome.log_probs_BA.requires_grad
    assert not outcome.loss.requires_grad


def test_random_states_are_those_given_and_the_same_pass_draws_the_same(
    events: list[str], inputs: PassInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored: list[Any] = []
    monkeypatch.setattr("replay.runner.run_pass.restore_random_states", restored.append)
    backend: Any = Backend(events)
    states: RandomStates = {"torch": {"cpu": bytes(3)}}
    run_pass(backend, replace(inputs, random_states=states))
    run_pass(backend, inputs)
    assert restored == [states]


def find_backend_calls(tree: ast.AST) -> Iterator[str]:
    """Yield the calls of a backend's methods that only `run_pass` may make."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ONLY_RUN_PASS:
            owner = ast.unparse(node.func.value)
            if owner.rpartition(".")[2].lstrip("_") in ("backend", "actor", "engine"):
                yield f"{owner}.{node.func.attr}"


MODULES = sorted(path for path in (ROOT / "replay").rglob("*.py") if path.name != "run_pass.py")


def test_nothing_else_in_replay_runs_a_pass() -> None:
    found = {str(path.relative_to(ROOT)): [*find_backend_calls(ast.parse(path.read_text()))] for path in MODULES}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source", ["backend.forward(x)", "self.actor.backend.backward(loss)", "trial.backend.end_window(step=True)"]
)
def test_a_pass_that_is_run_elsewhere_is_found(source: str) -> None:
    assert [*find_backend_calls(ast.parse(source))] != []
