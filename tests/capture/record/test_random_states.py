import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from capture.file_format.capture_file import read_call
from capture.file_format.listing import capture_files
from capture.record import random_states
from capture.record.generator_marks import CPU, mark_recorded_states, mark_state
from capture.record.random_states import NUM_QUIET, HostStateFollower, HostStates, PassKind, read_host_states
from capture.recordings import recording


@pytest.mark.parametrize(
    ("draws", "num_begins_read", "wrong"),
    [
        ("nothing", NUM_QUIET, []),
        ("between passes", 2 * NUM_QUIET - 1, []),
        ("in forwards that train", 2 * NUM_QUIET, []),
        ("in forwards that train, behind others", NUM_QUIET + 6, []),
        # The forward that is the first of its kind to draw cannot be told from draws before it.
        ("in a forward", 2 * NUM_QUIET - 3, [NUM_QUIET + 2]),
    ],
)
def test_a_pass_has_the_state_of_the_cpus_generator_that_it_began_with_also_if_only_its_end_is_read(
    draws: str, num_begins_read: int, wrong: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_begin, real_get_state, num_read = HostStateFollower.begin, torch.default_generator.get_state, 0

    def begin_on_gpu(follower: HostStateFollower, kind: PassKind, may_wait: bool) -> HostStates:
        return real_begin(follower, kind, may_wait=True)

    def get_state() -> torch.Tensor:
        nonlocal num_read
        num_read += 1
        return real_get_state()

    monkeypatch.setattr(HostStateFollower, "begin", begin_on_gpu)
    monkeypatch.setattr(torch, "default_generator", SimpleNamespace(get_state=get_state))
    model = nn.Sequential(nn.Embedding(8, 4), nn.Dropout(0.5))
    before = []
    with recording(model, tmp_path, reproduce=True, arguments={"input": "input_ids"}):
        for number in range(2 * NUM_QUIET):
            if draws == "between passes":
                torch.rand(1)
            is_late = number >= NUM_QUIET + 2
            trains = draws == "in forwards that train" or (draws == "in forwards that train, behind others" and is_late)
            model.train(trains)
            model[1].train(trains or (draws == "in a forward" and number == NUM_QUIET + 2))
            before.append(mark_state(bytes(real_get_state().tolist())))
            model(torch.tensor([[1, 2]]))
    calls = [read_call(path) for path in capture_files(tmp_path)]
    recorded = [mark_recorded_states(call.random)[CPU] for call in calls]
    differs = [number for number, pair in enumerate(zip(recorded, before, strict=True)) if pair[0] != pair[1]]
    assert differs == wrong
    # Nothing is said of what a forward drew whose state may have changed in it or before it.
    unsaid = [number for number, call in enumerate(calls) if not call.random_after]
    assert unsaid == (wrong or ([NUM_QUIET] if draws == "between passes" else []))
    # Each end is read.
    assert num_read == 2 * NUM_QUIET + num_begins_read


def make_states(number: int) -> HostStates:
    return HostStates(python=(3, (number,), None), numpy=None, cpu=torch.tensor([number], dtype=torch.uint8))


def test_a_draw_in_a_pass_of_one_kind_has_passes_of_all_kinds_read_at_both_ends_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follower, kinds = HostStateFollower(), [(True, True), (False, False)]
    generators, num_read = {"states": make_states(1)}, 0

    def read(cpu_state: torch.Tensor | None = None) -> HostStates:
        nonlocal num_read
        num_read += cpu_state is None
        return generators["states"]

    monkeypatch.setattr(random_states, "read_host_states", read)

    def run_pass(kind: PassKind, state_after: int | None = None) -> tuple[bool, bool]:
        """Return whether the states were read at the beginning, and whether the recorded ones were wrong."""
        num_before = num_read
        follower.begin(kind, may_wait=True)
        if state_after is not None:
            generators["states"] = make_states(state_after)
        return num_read > num_before, follower.end(generators["states"].cpu) is not None

    for _ in range(NUM_QUIET):
        assert [run_pass(kind) for kind in kinds] == [(True, False)] * 2
    assert [run_pass(kind) for kind in kinds] == [(False, False)] * 2
    # Whether the forward drew or what came before it is not known.
    assert run_pass(kinds[0], state_after=2) == (False, True)
    assert [run_pass(kind) for kind in kinds] == [(True, False)] * 2
    # On a CPU nothing waits for a device, and each state is read.
    assert follower.begin(kinds[0], may_wait=False) == generators["states"]
    generators["states"] = make_states(3)
    assert follower.end(generators["states"].cpu) is None


@pytest.mark.parametrize("generator", ["python", "numpy", "torch"])
@pytest.mark.parametrize("where", ["between passes", "in each forward"])
def test_a_pass_has_the_states_of_all_generators_that_it_began_with(
    generator: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may draw from any of them, where only the ends of its passes are read after a while."""
    numpy = pytest.importorskip("numpy")
    real_begin = HostStateFollower.begin
    monkeypatch.setattr(HostStateFollower, "begin", lambda self, kind, may_wait: real_begin(self, kind, may_wait=True))
    draw = {"python": random.random, "numpy": numpy.random.rand, "torch": lambda: torch.rand(1)}[generator]
    model = nn.Embedding(8, 4)
    if where == "in each forward":
        model.register_forward_pre_hook(lambda module, args: draw() and None)
    before = []
    with recording(model, tmp_path, reproduce=True, arguments={"input": "input_ids"}):
        for number in range(2 * NUM_QUIET):
            if where == "between passes" and number >= NUM_QUIET + 2:
                draw()
            before.append(read_host_states().to_plain())
            model(torch.tensor([[1, 2]]))
    assert [read_call(path).random for path in capture_files(tmp_path)] == before


def test_a_snapshot_of_random_states_is_right_after_each_use_of_a_generator() -> None:
    """A state is taken again only after a use; a normal number that NumPy keeps leaves no other trace."""
    numpy = pytest.importorskip("numpy")
    numpy_before = numpy.random.get_state()
    # Each draw makes two numbers, and keeps the second for the next draw.
    kept_normals = (random.gauss, numpy.random.standard_normal)
    seeded = (lambda: (random.seed(3), numpy.random.seed(3)), lambda: (random.random(), numpy.random.rand(2)))
    again = (seeded[0], lambda: (random.gauss(), numpy.random.randn()))
    uses = (random.random, numpy.random.rand, *kept_normals, *kept_normals, lambda: None)
    for use in (*uses, lambda: numpy.random.set_state(numpy_before), *seeded, *again, lambda: None):
        use()
        taken = read_host_states()
        assert taken.python == random.getstate()
        name, keys, *rest = numpy.random.get_state()
        assert taken.numpy is not None
        kept = taken.numpy["state"]["pos"], taken.numpy["has_gauss"], taken.numpy["gauss"]
        assert (taken.numpy["bit_generator"], list(taken.numpy["state"]["key"]), *kept) == (name, list(keys), *rest)
        assert read_host_states().numpy is taken.numpy or taken.numpy["has_gauss"]
