"""What the job's optimizer held before a step is held against what the replay's held."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from capture.file_format.optimizer_state import StateSample
from replay.tolerances.job_bounds import STATE_FACTOR
from replay.verdict.findings import Finding, FindingStatus
from replay.verdict.gradient_samples import GradientSamples
from replay.verdict.recorded_pass import ReplayedPass
from replay.verdict.state_findings import compare_states
from replay.verdict.state_samples import StateRun

BOUND = 0.01


def compare(
    job: Mapping[str, tuple[float, ...]], replayed: Mapping[str, StateRun], *, bound: float = BOUND
) -> list[Finding]:
    """Compare the states of one parameter before a step; its first sampled element is the fifth."""
    sample = StateSample(name="module.weight", shape=(8,), start=5, values=job)
    gradient = GradientSamples(norms={"weight": 1.0}, sizes={"weight": 1}, values={})
    recorded: Any = SimpleNamespace(step_after=SimpleNamespace(state=(sample,)), dtypes=["float32"], num_steps_before=0)
    state = {("weight", 5, key): run for key, run in replayed.items()}
    steps = {"follows_steps": True, "step_dtype": None, "num_steps_before": 0}
    settings: Any = SimpleNamespace(**steps, dtype="float32", choose_bound=lambda *_: bound)
    return compare_states([(recorded, ReplayedPass(state=state, gradient=gradient))], 0, settings)


def test_equal_states_agree_and_are_no_evidence_of_the_gradient() -> None:
    [finding] = compare({"exp_avg": (0.5, 0.25)}, {"exp_avg": StateRun(values=(0.5, 0.25), scale=0.5)})
    assert (finding.status, finding.is_evidence) == (FindingStatus.AGREES, False)


def test_the_farthest_element_is_named() -> None:
    [finding] = compare(
        {"exp_avg": (0.5, 0.25), "exp_avg_sq": (0.1, 0.1)},
        {"exp_avg": StateRun(values=(0.5, 0.75), scale=0.5), "exp_avg_sq": StateRun(values=(0.1, 0.1), scale=0.1)},
    )
    assert finding.status is FindingStatus.DIFFERS
    assert finding.where == "exp_avg of weight, element 6"
    assert (finding.recorded, finding.replayed, finding.difference) == (0.25, 0.75, 1.0)
    assert (finding.bound, finding.num_values) == (STATE_FACTOR * BOUND, 2)


def test_averages_of_squares_may_be_twice_as_far_off() -> None:
    distance = 1.5 * STATE_FACTOR * BOUND
    [average] = compare({"exp_avg": (1.0,)}, {"exp_avg": StateRun(values=(1.0 + distance,), scale=1.0)})
    [squares] = compare({"exp_avg_sq": (1.0,)}, {"exp_avg_sq": StateRun(values=(1.0 + distance,), scale=1.0)})
    assert (average.status, squares.status) == (FindingStatus.DIFFERS, FindingStatus.AGREES)


def test_a_state_that_is_rounding_alone_is_measured_by_all_gradients() -> None:
    assert compare({"exp_avg": (1e-9,)}, {"exp_avg": StateRun(values=(-1e-9,), scale=1e-9)})[0].agrees


def test_a_bound_that_hides_a_lost_state_judges_no_agreement() -> None:
    hidden = {"exp_avg": StateRun(values=(0.0,), scale=1.0)}
    assert compare({"exp_avg": (1.0,)}, hidden, bound=0.3) == []
    [finding] = compare({"exp_avg": (9.0,)}, hidden, bound=0.3)
    assert finding.status is FindingStatus.DIFFERS


def test_what_either_does_not_hold_is_not_compared() -> None:
    assert compare({"momentum_buffer": (1.0,)}, {"exp_avg": StateRun(values=(1.0,), scale=1.0)}) == []
    assert compare({}, {}) == []
