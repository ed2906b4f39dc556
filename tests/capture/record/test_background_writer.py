"""When the recorder's thread works: as it is woken, or soon after; and what it may leave for later."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from capture import capture_files, recording
from capture.file_format.capture_file import ReadBackCheck, encode_call, read_call
from capture.file_format.micro_batch import CaptureError, Origin
from capture.file_format.safe_unpickler import MAX_INSTRUCTIONS
from capture.record import background_writer
from capture.record.background_writer import MAX_QUEUED_BYTES, BackgroundWriter
from capture.record.host_copy import ArgumentCopier, copy_packed
from capture.record.parameter_sampler import ParameterSampler

SECONDS = 60
IDS_BS = torch.tensor([[0, 5, 9, 7], [3, 3, 0, 0]])


class Handled:
    """What a writer's thread did, in its order."""

    def __init__(self, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self.done: list[str] = []
        self._changed = threading.Condition()
        self.writer = BackgroundWriter[str](
            self.note, max_queued=8, max_queued_bytes=max_queued_bytes, on_idle=lambda: self.note("idle")
        )

    def note(self, what: str) -> None:
        with self._changed:
            self.done.append(what)
            self._changed.notify_all()

    def wait_for(self, *done: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.done) >= len(done), SECONDS), self.done
            assert self.done == list(done)


@pytest.fixture
def handled() -> Iterator[Handled]:
    handled = Handled()
    yield handled
    handled.writer.close(max_seconds=SECONDS)


@pytest.fixture
def no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_writer, "MAX_DELAY_SECONDS", 10.0**6)


@pytest.mark.usefixtures("no_timeout")
def test_a_forwards_end_has_the_thread_do_what_came_before_it(handled: Handled) -> None:
    handled.writer.queue_pass("pass 0", 1)
    handled.writer.wake("outputs 0")
    handled.wait_for("pass 0", "idle")
    handled.writer.queue_small_item("step 0")
    handled.writer.queue_pass("pass 1", 1)
    handled.writer.wake("outputs 1")
    handled.wait_for("pass 0", "idle", "outputs 0", "step 0", "pass 1", "idle")


@pytest.mark.usefixtures("no_timeout")
def test_an_incident_has_it_do_all(handled: Handled) -> None:
    handled.writer.queue_pass("pass 0", 1)
    handled.writer.queue_small_item("incident", is_urgent=True)
    handled.wait_for("pass 0", "incident", "idle")


@pytest.mark.usefixtures("no_timeout")
@pytest.mark.parametrize("how", ["drain", "close"])
def test_what_waits_is_done_when_asked_for(how: str, handled: Handled) -> None:
    handled.writer.queue_pass("pass 0", 1)
    handled.writer.wake("outputs 0")
    getattr(handled.writer, how)(max_seconds=SECONDS)
    assert [what for what in handled.done if what != "idle"] == ["pass 0", "outputs 0"]


def test_without_a_forwards_end_it_works_soon_after(handled: Handled) -> None:
    handled.writer.queue_pass("pass 0", 1)
    handled.writer.queue_small_item("outputs 0")
    handled.wait_for("pass 0", "outputs 0", "idle")


@pytest.mark.usefixtures("no_timeout")
def test_a_pass_larger_than_the_queue_waits_alone() -> None:
    handled = Handled(max_queued_bytes=10)
    assert handled.writer.queue_pass("large", 11)
    with pytest.warns(RuntimeWarning, match="the disk is slower than the job"):
        assert not handled.writer.queue_pass("small", 1)
    handled.writer.wake()
    handled.wait_for("large", "idle")
    assert handled.writer.queue_pass("small", 1)
    handled.writer.close(max_seconds=SECONDS)


def read_messages(recwarn: pytest.WarningsRecorder) -> list[str]:
    """What was warned of so far, in the writer's thread too."""
    return [str(warning.message) for warning in recwarn]


class Refusing:
    """A writer's thread that refuses each item called `refused`."""

    def __init__(self, on_idle: Callable[[], None] = lambda: None) -> None:
        self.writer = BackgroundWriter[str](self.handle, max_queued=8, on_idle=on_idle)

    def handle(self, item: str) -> None:
        if item == "refused":
            raise CaptureError("it is no micro-batch")


def test_after_a_refused_pass_the_thread_is_idle_as_after_any(recwarn: pytest.WarningsRecorder) -> None:
    is_idle = threading.Event()
    writer = Refusing(is_idle.set).writer
    writer.queue_pass("refused", 1)
    writer.wake()
    assert is_idle.wait(SECONDS)
    writer.close(max_seconds=SECONDS)
    assert (writer.num_dropped, writer.refusal, writer.failure) == (1, "it is no micro-batch", None)
    said = "capture: a pass cannot be kept and is dropped: it is no micro-batch. Further such passes are counted"
    assert read_messages(recwarn) == [f"{said} without a warning"]


def test_to_drain_waits_until_the_thread_is_idle() -> None:
    is_idle, may_go_on = threading.Event(), threading.Event()

    def be_idle() -> None:
        is_idle.set()
        assert may_go_on.wait(SECONDS)

    writer = Refusing(be_idle).writer
    writer.queue_pass("written", 1)
    writer.wake()
    assert is_idle.wait(SECONDS)
    assert not writer.drain(max_seconds=0)
    may_go_on.set()
    assert writer.drain(max_seconds=SECONDS)
    writer.close(max_seconds=SECONDS)


def queue_item(writer: BackgroundWriter[str], kind: str) -> None:
    """Queue an item of a kind, and make it ready."""
    match kind:
        case "a pass":
            assert writer.queue_pass("item", 1)
        case "a small item":
            writer.queue_small_item("item")
        case "the outputs of a forward that ended":
            writer.wake("item")
        case "an urgent item":
            writer.queue_small_item("item", is_urgent=True)
            return
    writer.wake()


KINDS = ["a pass", "a small item", "the outputs of a forward that ended", "an urgent item"]


class Blocked:
    """A writer's thread that begins each item and goes on with it only once it may."""

    def __init__(self, max_queued: int = 8) -> None:
        self.done: list[str] = []
        self.has_begun, self.may_go_on, self.has_ended = threading.Event(), threading.Event(), threading.Event()
        self.writer = BackgroundWriter[str](
            self.handle, max_queued=max_queued, on_end=lambda failed: self.has_ended.set()
        )

    def handle(self, item: str) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(SECONDS)
        self.done.append(item)

    def finish(self) -> None:
        self.may_go_on.set()
        self.writer.close(max_seconds=SECONDS)


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    blocked = Blocked()
    yield blocked
    blocked.finish()


@pytest.mark.usefixtures("no_timeout")
@pytest.mark.parametrize("kind", KINDS)
def test_to_drain_waits_for_the_item_that_the_thread_is_in_the_midst_of(kind: str, blocked: Blocked) -> None:
    queue_item(blocked.writer, kind)
    assert blocked.has_begun.wait(SECONDS)
    assert not blocked.writer.drain(max_seconds=0)
    # What copies from a device are waited for only briefly, in this item too.
    assert blocked.writer.flush_requested.is_set()
    blocked.may_go_on.set()
    assert blocked.writer.drain(max_seconds=SECONDS)
    assert blocked.done == ["item"]
    assert not blocked.writer.flush_requested.is_set()


@pytest.mark.usefixtures("no_timeout")
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_thread_is_in_the_midst_of_when_writing_stops_is_lost_if_it_is_a_pass(
    kind: str, blocked: Blocked, recwarn: pytest.WarningsRecorder
) -> None:
    queue_item(blocked.writer, kind)
    assert blocked.has_begun.wait(SECONDS)
    blocked.writer.close(max_seconds=0)
    assert blocked.writer.num_dropped == (kind == "a pass")
    assert blocked.writer.drain(max_seconds=0)
    blocked.may_go_on.set()
    assert blocked.has_ended.wait(SECONDS)
    # It was written after all.
    assert (blocked.writer.num_dropped, blocked.done) == (0, ["item"])
    assert len(read_messages(recwarn)) == 1


@pytest.mark.usefixtures("no_timeout")
def test_passes_and_small_items_take_no_room_from_each_other(recwarn: pytest.WarningsRecorder) -> None:
    """Two passes may wait, and eight small items; what the thread has taken waits no more, nor do its bytes."""
    blocked = Blocked(max_queued=2)
    assert blocked.writer.queue_pass("taken", MAX_QUEUED_BYTES)
    blocked.writer.wake()
    assert blocked.has_begun.wait(SECONDS)
    assert blocked.writer.queue_pass("first", 1)
    for number in range(9):
        blocked.writer.queue_small_item(str(number))
    assert [blocked.writer.queue_pass(name, 1) for name in ("second", "third")] == [True, False]
    blocked.writer.queue_small_item("left out")
    blocked.writer.queue_small_item("urgent", is_urgent=True)
    assert blocked.writer.num_dropped == 1
    blocked.finish()
    assert blocked.done == ["taken", "first", *map(str, range(8)), "second", "urgent"]
    assert len(read_messages(recwarn)) == 1


def test_a_deadline_that_cannot_be_read_stops_writing_with_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    class Unreadable:
        def seconds_left(self) -> float | None:
            raise OSError("no clock")

    ends: list[bool] = []
    writer = BackgroundWriter[str](lambda item: None, max_queued=8, on_end=ends.append, deadline=Unreadable())
    writer.close(max_seconds=SECONDS)
    assert (type(writer.failure), ends) == (OSError, [True])
    assert ["no clock" in message for message in read_messages(recwarn)] == [True]


def test_a_refused_item_that_is_no_pass_is_told_and_stops_writing(recwarn: pytest.WarningsRecorder) -> None:
    writer = Refusing().writer
    writer.queue_small_item("refused", is_urgent=True)
    writer.close(max_seconds=SECONDS)
    assert isinstance(writer.failure, CaptureError)
    assert ["it is no micro-batch" in message for message in read_messages(recwarn)] == [True]


def test_what_fails_after_a_pass_was_handled_does_not_lose_it(recwarn: pytest.WarningsRecorder) -> None:
    def fail() -> None:
        raise OSError("no space")

    writer = Refusing(fail).writer
    writer.queue_pass("written", 1)
    writer.close(max_seconds=SECONDS)
    assert isinstance(writer.failure, OSError)
    assert writer.num_dropped == 0


class Model(nn.Module):
    """Has weights of 1 in its forward, and of 2 and more once the forward has ended and `changed` was called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, input_ids: Tensor) -> Tensor:
        loss: Tensor = (self.weight[: input_ids.numel()] * input_ids.flatten()).sum()
        return loss


@pytest.mark.usefixtures("no_timeout")
@pytest.mark.parametrize("breaks", [False, True])
def test_the_last_pass_is_whole_at_the_end(breaks: bool, tmp_path: Path) -> None:
    """Its weights are those that it was done with, though they are read when it has ended, and the job changes them."""
    model = Model()
    try:
        with recording(model, tmp_path, flight_recorder=2 if breaks else None, reproduce=True):
            for number in range(1, 4):
                with torch.no_grad():
                    model.weight.fill_(number)
                loss = model(IDS_BS)
            with torch.no_grad():
                model.weight.fill_(9)
            if breaks:
                raise ArithmeticError
    except ArithmeticError:
        pass
    last = max(map(read_call, capture_files(tmp_path)), key=lambda call: call.origin.step or 0)
    assert last.origin.step == 2
    assert last.outputs["loss"] == loss.item()
    assert last.weights is not None
    assert set(last.weights.samples[0].values) == {3.0}


def test_a_pass_that_fails_has_its_weights(tmp_path: Path) -> None:
    model = Model()
    with recording(model, tmp_path, flight_recorder=2):
        model(IDS_BS)
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 4, dtype=torch.long))
    calls = sorted(map(read_call, capture_files(tmp_path)), key=lambda call: call.origin.step or 0)
    assert [call.weights is not None for call in calls] == [True, True]
    assert ["loss" in call.outputs for call in calls] == [True, False]


class Sharded(nn.Parameter):
    """As a sharding library's parameter, of a class of its own."""


def test_weights_that_a_library_holds_otherwise_are_sampled_before_the_forward() -> None:
    plain, sharded = Model(), Model()
    sharded.weight = Sharded(torch.ones(8))
    samplers = [ParameterSampler(model) for model in (plain, sharded)]
    assert [sampler.is_same_after_forward for sampler in samplers] == [True, False]


def test_small_tensors_go_in_one_copy_and_keep_their_forms() -> None:
    wanted = {
        "flag": torch.tensor([True, False, True]),
        "half": torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16),
        "ids": torch.arange(12).view(3, 4),
        "none": torch.empty(0, 4, dtype=torch.long),
        "one": torch.tensor(7),
        # Its strides are contiguous, though it is transposed.
        "turned": torch.arange(6).view(1, 6).t(),
        "double": torch.tensor([0.1, 1e300], dtype=torch.float64),
    }
    copies = copy_packed(wanted)
    assert len({copy.untyped_storage().data_ptr() for copy in copies.values()}) == 1
    assert copies.keys() == wanted.keys()
    for name, copy in copies.items():
        assert torch.equal(copy, wanted[name]), name
        assert (copy.shape, copy.dtype) == (wanted[name].shape, wanted[name].dtype)
    before = {name: tensor.clone() for name, tensor in wanted.items()}
    for tensor in wanted.values():
        tensor.zero_()
    assert all(torch.equal(copies[name], before[name]) for name in before)


def test_memory_of_arguments_is_used_again_once_it_is_given_back_and_not_before() -> None:
    copier = ArgumentCopier()
    wanted = {
        "flags": torch.tensor([[True], [False]]),
        "half": torch.tensor([1.5, -2.0, 3.25], dtype=torch.bfloat16),
        "ids": torch.arange(12).view(3, 4),
        "none": torch.empty(0, 4, dtype=torch.long),
        "one": torch.tensor(7),
        "expanded": torch.arange(3).expand(2, 3),
        "trained": nn.Parameter(torch.tensor([0.1, 1e300], dtype=torch.float64)),
    }
    # What is made in inference mode could not be written to outside of it.
    with torch.inference_mode():
        first = copier.copy(wanted)
    second = copier.copy({name: tensor + 1 for name, tensor in wanted.items() if name != "flags"})
    for name, copy in first.tensors.items():
        assert torch.equal(copy, wanted[name]), name
        assert (copy.dtype, copy.requires_grad) == (wanted[name].dtype, False)
    assert first.memory is not second.memory
    first.give_back()
    third = copier.copy({"ids": wanted["ids"] + 5, "one": torch.tensor(8)})
    assert third.memory is first.memory
    assert torch.equal(third.tensors["ids"], torch.arange(5, 17).view(3, 4))
    assert third.tensors["one"] == 8
    assert torch.equal(second.tensors["ids"], torch.arange(1, 13).view(3, 4))
    # What is too small then is let go.
    third.give_back()
    large = copier.copy({"ids": torch.arange(40_000)})
    assert large.memory is not third.memory
    assert torch.equal(large.tensors["ids"], torch.arange(40_000))
    assert copier.copy({"ids": torch.zeros(2**22)}).memory is not None
    assert copier.copy({"ids": torch.zeros(2**22 + 1)}).memory is None


def test_each_new_fact_is_read_back_and_one_like_the_last_is_not() -> None:
    read: list[str] = []

    def read_body(payload: bytes, source: str) -> None:
        read.append(source)
        if source == "unreadable":
            raise CaptureError("unreadable")

    checker = ReadBackCheck(read_body)

    def check(step: int, scale: float, source: str = "") -> None:
        origin = Origin(source="", step=step, rank=0)
        call = encode_call({"input_ids": IDS_BS + step}, {"scale": scale}, trains=True, origin=origin)
        checker.check(call, source)

    for step in range(3):
        check(step, scale=2.0)
    assert len(read) == 1
    check(3, scale=3.0)
    assert len(read) == 2
    # A fact that was refused once must not count as one that can be read.
    for _ in range(2):
        with pytest.raises(CaptureError):
            check(4, scale=4.0, source="unreadable")


def test_a_fact_that_the_reader_refuses_is_refused_each_time_it_is_encoded() -> None:
    facts = {"scales": [None] * MAX_INSTRUCTIONS}
    for step in range(2):
        with pytest.raises(CaptureError, match="instructions"):
            encode_call({"input_ids": IDS_BS}, facts, trains=True, origin=Origin(source="", step=step, rank=0))
