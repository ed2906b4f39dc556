"""One function runs every pass: in which order, who looks on, and what is left of it."""

import ast
import gc
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from actor_init.inputs.documents import KeptLogits
from actor_init.inputs.packing import ActorInputs, prepare_inputs
from actor_init.schedule_and_norm import StepSettings
from capture import capture_files, read_micro_batch
from capture.file_format.tensor_codec import RandomStates
from capture.record.random_states import read_host_states
from replay.options.spec import find_sample_folder
from replay.runlog.records import CostSection
from replay.runner.observers import LossCheck
from replay.runner.run_pass import (
    MeterClock,
    NullClock,
    PassInputs,
    PassObserver,
    PassOutcome,
    StepTiming,
    WindowEnd,
    run_pass,
    run_pass_again,
)
from replay.watch.progress import RankPhase
from tests.helpers.made_records import cost

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

    @property
    def model(self) -> Any:
        return SimpleNamespace(named_parameters=lambda: [("weight", self.weight)])

    def end_window(self, *, step: bool, settings: StepSettings | None = None) -> float:
        self.events.append(("step" if step else "clear") + (f" at {settings.groups}" if settings is not None else ""))
        if self.fails_in == "step":
            raise RuntimeError("the step failed")
        if self.weight.grad is None:
            return 0.0
        norm = float(self.weight.grad)
        self.weight.grad = None
        return norm


class Clock:
    """Measures nothing, and writes down what it would have measured."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def wait_for_all_ranks(self) -> None:
        self.events.append("barrier")

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
        window_end=WindowEnd.COMPLETE,
        captured_row_length=1,
    )


def count_tokens(inputs: PassInputs) -> int:
    return int(inputs.actor_inputs.action_mask_BA.sum())


def keep_logits() -> tuple[KeptLogits, "weakref.ref[Tensor]"]:
    """Logits that a forward kept for its loss, and what tells whether they are still there."""
    kept, logits = KeptLogits(), torch.zeros(1, 1)
    places = torch.zeros(1, dtype=torch.int64)
    kept.keep(logits, places, places, (1, 1), None)
    return kept, weakref.ref(logits)


def test_a_step_is_measured_and_all_that_is_looked_at_is_not(events: list[str], inputs: PassInputs) -> None:
    backend: Any = Backend(events)
    number = count_tokens(inputs)
    outcome = run_pass(
        backend,
        replace(inputs, step_timing=StepTiming.MEASURED, loss_weight=0.5),
        Clock(events),
        [Marker(events), PausingObserver(events, backend)],
    )
    assert events == [
        "begin",
        "barrier",
        "at forward",
        "start",
        "forward begins",
        "forward, trains",
        "forward ends",
        "pause",
        f"sees loss {2 * number}",
        "go on",
        "at waiting_for_ranks",
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
        "at device_sync",
        "stop",
        "reads counters",
        "at pass_end",
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
    assert run_pass(backend, replace(inputs, window_end=WindowEnd.NONE)).grad_norm is None
    assert backend.weight.grad == count_tokens(inputs)


def test_a_forward_alone_builds_no_graph(events: list[str], inputs: PassInputs) -> None:
    backend: Any = Backend(events)
    graphs: list[bool] = []

    def compute_loss(log_probs_BA: Tensor) -> Tensor:
        graphs.append(log_probs_BA.requires_grad)
        return log_probs_BA.sum()

    alone = replace(
        inputs,
        compute_loss=compute_loss,
        train_mode=False,
        builds_graph=False,
        runs_backward=False,
        window_end=WindowEnd.NONE,
    )
    run_pass(backend, alone)
    assert (events, graphs) == (["forward, evaluates"], [False])


@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
def test_a_pass_that_fails_closes_its_observers_with_the_error(
    phase: str, events: list[str], inputs: PassInputs
) -> None:
    backend: Any = Backend(events)
    backend.fails_in = phase
    with pytest.raises(RuntimeError, match=f"the {phase} failed"):
        run_pass(
            backend,
            replace(inputs, step_timing=StepTiming.MEASURED),
            Clock(events),
            [Marker(events), PausingObserver(events, backend)],
        )
    assert events[-1] == f"closed: the {phase} failed"
    assert events[-2] == f"{phase} ends"


class Fails(PassObserver):
    """Fails in one of its methods."""

    def __init__(self, method: str, error: BaseException) -> None:
        self.error = error
        setattr(self, method, self.fail)

    def fail(self, *_: object) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("method", "last"),
    [
        ("after_forward", "forward ends"),
        ("after_backward", "backward ends"),
        ("before_step", "backward ends"),
        ("after_measurement", "stop"),
    ],
)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()])
def test_whatever_breaks_a_pass_off_its_observers_are_closed_and_its_logits_dropped(
    method: str, last: str, error: BaseException, events: list[str], inputs: PassInputs
) -> None:
    backend: Any = Backend(events)
    kept, logits = keep_logits()
    inputs = replace(
        inputs, step_timing=StepTiming.MEASURED, actor_inputs=replace(inputs.actor_inputs, kept_logits=kept)
    )
    with pytest.raises(type(error)):
        run_pass(backend, inputs, Clock(events), [Marker(events), Fails(method, error)])
    shown = [event for event in events if not event.startswith("at ")]
    assert shown[-2:] == [last, f"closed: {error}"]
    assert logits() is None
    # Autograd is again as it was before the pass.
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_runs_to_the_end(value: float, events: list[str], inputs: PassInputs) -> None:
    """What is known to break is run: the log says it, and the search for its cause runs the pass again."""
    backend: Any = Backend(events)
    outcome = run_pass(backend, replace(inputs, compute_loss=lambda log_probs_BA: log_probs_BA.sum() * value))
    assert str(outcome.loss.item()) == str(value)
    assert outcome.grad_norm is not None
    assert not math.isfinite(outcome.grad_norm)
    assert events[-1] == "clear"


def run_window(events: list[str], inputs: PassInputs, **changes: Any) -> tuple[PassOutcome, Any]:
    backend: Any = Backend(events)
    return run_pass(backend, replace(inputs, **changes), Clock(events)), backend


def test_a_step_that_nobody_asked_for_is_taken_behind_the_clock(events: list[str], inputs: PassInputs) -> None:
    settings = StepSettings(groups=())
    outcome, _ = run_window(events, inputs, step_timing=StepTiming.UNMEASURED, step_settings=settings)
    assert events[-2:] == ["stop", "step at ()"]
    assert outcome.grad_norm == count_tokens(inputs)


def test_a_window_that_lacks_a_pass_is_cleared_and_has_no_norm(events: list[str], inputs: PassInputs) -> None:
    outcome, backend = run_window(events, inputs, window_end=WindowEnd.INCOMPLETE)
    assert events[-2:] == ["stop", "clear"]
    assert outcome.grad_norm is None
    assert backend.weight.grad is None


@pytest.mark.parametrize(
    ("frozen", "end", "norm"),
    [
        ({"weight"}, WindowEnd.COMPLETE, 0.0),
        ({"weight"}, WindowEnd.NONE, None),
        ({"other"}, WindowEnd.COMPLETE, 1.0),
        (set(), WindowEnd.COMPLETE, 1.0),
    ],
)
def test_what_the_job_did_not_train_has_no_gradient_at_the_windows_end(
    frozen: set[str], end: WindowEnd, norm: float | None, events: list[str], inputs: PassInputs
) -> None:
    outcome, _ = run_window(events, inputs, window_end=end, frozen=frozenset(frozen))
    assert outcome.grad_norm == (None if norm is None else norm * count_tokens(inputs))


def test_the_loss_is_weighed_in_the_backward_alone(events: list[str], inputs: PassInputs) -> None:
    number = count_tokens(inputs)
    outcome, _ = run_window(events, inputs, loss_weight=0.5, window_factor=4.0)
    assert f"backward of {4 * number}" in events
    assert (outcome.loss.item(), outcome.grad_norm) == (2.0 * number, 2.0 * number)


def test_the_routers_loss_is_a_part_of_the_loss(events: list[str], inputs: PassInputs) -> None:
    term: Any = SimpleNamespace(compute=lambda routers: torch.tensor(3.0), training_loop_loss=None)
    outcome, _ = run_window(events, inputs, router_loss_term=term)
    assert outcome.router_loss is not None
    assert (outcome.loss.item(), outcome.router_loss.item()) == (2.0 * count_tokens(inputs) + 3.0, 3.0)


@pytest.mark.parametrize(("share", "added"), [(0.0, 0.0), (1.0, 3.0), (0.25, 0.75), (math.nan, 0.0)])
def test_the_routers_loss_is_added_as_often_as_the_noted_loss_holds_it(
    share: float, added: float, events: list[str], inputs: PassInputs
) -> None:
    noted = SimpleNamespace(find_factor=lambda loss, log_probs_BA, term: torch.tensor(share))
    term: Any = SimpleNamespace(compute=lambda routers: torch.tensor(3.0), training_loop_loss=noted)
    outcome, _ = run_window(events, inputs, router_loss_term=term)
    assert outcome.loss.item() == 2.0 * count_tokens(inputs) + added
    assert outcome.router_loss_factor is not None
    assert outcome.router_loss_factor.item() == pytest.approx(share, nan_ok=True)


def test_a_pass_that_runs_again_steps_nothing_and_draws_nothing(events: list[str], inputs: PassInputs) -> None:
    """Whatever its place in the window was, it is a window of its own; its backward is that of the pass."""
    backend: Any = Backend(events)

    def draw(log_probs_BA: Tensor) -> Tensor:
        return log_probs_BA.sum() + 0 * torch.rand(1).sum()

    state = torch.get_rng_state()
    again = replace(
        inputs,
        compute_loss=draw,
        window_end=WindowEnd.INCOMPLETE,
        step_timing=StepTiming.MEASURED,
        loss_weight=0.5,
    )
    outcome = run_pass_again(backend, again, torch.device("cpu"))
    assert events == ["forward, trains", f"backward of {count_tokens(inputs)}", "clear"]
    assert outcome.grad_norm == 0.5 * count_tokens(inputs)
    assert torch.equal(torch.get_rng_state(), state)
    # Without a backward there is no gradient to clear.
    events.clear()
    run_pass_again(backend, replace(again, runs_backward=False, builds_graph=False), torch.device("cpu"))
    assert events == ["forward, trains"]


class World:
    def __init__(self, world_size: int, events: list[str]) -> None:
        self.world_size, self.events = world_size, events

    def barrier(self) -> None:
        self.events.append("barrier")


class Meter:
    """Writes down what it measures; each phase takes a second."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.names = events, list[str]()

    def start_pass(self) -> None:
        self.events.append("start")

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.events.append("pause")
        yield

    def end_pass(self) -> tuple[dict[str, Any], float]:
        return {name: cost(1.0) for name in self.names}, float(len(self.names))


@pytest.mark.parametrize(
    ("world_size", "barriers", "wait_seconds"),
    [(1, ["barrier", "start"], None), (2, ["barrier", "start", "barrier"], 1.0)],
)
def test_ranks_wait_for_each_other_and_the_wait_is_no_phase(
    world_size: int, barriers: list[str], wait_seconds: float | None, events: list[str], inputs: PassInputs
) -> None:
    backend, meter, world = Backend([]), Meter(events), World(world_size, events)
    outcome = run_pass(cast(Any, backend), inputs, MeterClock(cast(Any, meter), cast(Any, world)))
    assert events == barriers
    assert list(outcome.cost.phases) == ["forward", "backward"]
    assert outcome.cost.wait_seconds == wait_seconds
    assert outcome.cost.seconds == len(meter.names)


def test_without_a_clock_a_pass_costs_nothing_that_is_known(inputs: PassInputs) -> None:
    backend: Any = Backend([])
    assert run_pass(backend, inputs).cost == NullClock().stop() == CostSection()


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
    run_pass(
        backend,
        replace(inputs, step_timing=StepTiming.MEASURED),
        Clock(events),
        [LossCheck(is_needed, lambda inputs: None)],
    )
    begin = events.index("looks at the loss")
    assert events[begin - 1 : begin + 2] == ["pause", "looks at the loss", "go on"]


def test_a_pass_keeps_no_graph_and_no_logits_of_its_own(events: list[str], inputs: PassInputs) -> None:
    backend: Any = Backend(events)
    seen: list[Any] = []

    def compute_loss(log_probs_BA: Tensor) -> Tensor:
        seen.append(weakref.ref(log_probs_BA))
        return log_probs_BA.sum()

    kept, logits = keep_logits()
    outcome = run_pass(
        backend, replace(inputs, actor_inputs=replace(inputs.actor_inputs, kept_logits=kept), compute_loss=compute_loss)
    )
    gc.collect()
    assert seen[0]() is None
    assert logits() is None
    assert not outcome.log_probs_BA.requires_grad
    assert not outcome.loss.requires_grad


class DrawingBackend(Backend):
    """Draws a random number in each forward."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(events)
        self.draws: list[float] = []

    def forward(self, inputs: ActorInputs, *, train_mode: bool) -> Tensor:
        self.draws.append(torch.rand(()).item())
        return super().forward(inputs, train_mode=train_mode)


def test_random_states_are_those_given_and_the_same_pass_draws_the_same(events: list[str], inputs: PassInputs) -> None:
    """A pass without states leaves the generators as they are."""
    backend = DrawingBackend(events)
    torch.manual_seed(5)
    states = read_host_states().to_plain()
    first, second = torch.rand(2).tolist()
    for random_states in (states, states, RandomStates()):
        run_pass(cast(Any, backend), replace(inputs, random_states=random_states))
    assert backend.draws == [first, first, second]


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
