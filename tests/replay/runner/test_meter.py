"""A phase pays for its own work, in seconds and in bytes."""

from pathlib import Path

import pytest
import torch

from replay.runner.meter import HostInstrument, Meter
from tests.helpers.made_time import at_the_meter

MIB = 2**20
CPU = torch.device("cpu")
on_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resets a peak through /proc")


@pytest.mark.parametrize("slow", ["forward", "backward"])
def test_seconds_land_in_the_phase_that_spent_them(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, meter = at_the_meter(monkeypatch), Meter.for_device(CPU)
    meter.start_pass()
    for name in ("forward", "backward"):
        with meter.measure(name):
            clock.now += 2.0 if name == slow else 0.5
    costs, host_seconds = meter.end_pass()
    [fast] = {"forward", "backward"} - {slow}
    assert (costs[slow].seconds, costs[fast].seconds, host_seconds) == (2.0, 0.5, 2.5)


def test_what_lies_between_phases_is_in_the_whole_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, meter = at_the_meter(monkeypatch), Meter.for_device(CPU)
    meter.start_pass()
    with meter.measure("forward"):
        clock.now += 0.5
    clock.now += 2.0
    with meter.pause():
        clock.now += 4.0
    costs, host_seconds = meter.end_pass()
    assert (costs["forward"].seconds, host_seconds) == (0.5, 2.5)


@on_linux
@pytest.mark.parametrize("big", ["forward", "backward"])
def test_a_peak_lands_in_the_phase_that_had_it(big: str) -> None:
    meter = Meter.for_device(CPU)
    assert meter.memory_kind == "resident set (VmHWM)"
    meter.start_pass()
    for name in ("forward", "backward"):
        with meter.measure(name):
            block = torch.ones(200 * MIB if name == big else 1, dtype=torch.uint8)
            del block
    costs, _ = meter.end_pass()
    [small] = {"forward", "backward"} - {big}
    assert costs[big].peak_allocated_bytes - costs[small].peak_allocated_bytes > 150 * MIB
    assert costs[big].peak_allocated_bytes - (costs[big].allocated_bytes or 0) > 150 * MIB


def test_a_phase_that_raises_still_has_its_cost() -> None:
    meter = Meter.for_device(CPU)
    meter.start_pass()
    with pytest.raises(RuntimeError), meter.measure("forward"):
        raise RuntimeError("broken")
    costs, _ = meter.end_pass()
    assert set(costs) == {"forward"}


def test_a_pass_begins_without_the_phases_of_the_one_before() -> None:
    meter = Meter.for_device(CPU)
    for names in (["forward", "backward"], ["forward"]):
        meter.start_pass()
        for name in names:
            with meter.measure(name):
                pass
        costs, _ = meter.end_pass()
        assert list(costs) == names


def test_where_the_peak_cannot_be_reset_the_kind_of_memory_says_so(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t    3072 kB\nVmRSS:\t    2048 kB\nVmLib:\t\n")
    # A folder of that name cannot be written like a file.
    (tmp_path / "clear_refs").mkdir()
    instrument = HostInstrument(proc=tmp_path)
    assert instrument.memory_kind == "resident set since process start"
    instrument.reset_peak()
    assert instrument.read_memory() == (2 * MIB, 3 * MIB, None)


def test_without_proc_only_the_peak_since_the_start_is_known(tmp_path: Path) -> None:
    instrument = HostInstrument(proc=tmp_path / "absent")
    assert instrument.memory_kind == "resident set since process start"
    memory = instrument.read_memory()
    assert memory.allocated_bytes is None
    assert memory.peak_allocated_bytes > 10 * MIB


def test_a_device_that_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="not on meta"):
        Meter.for_device(torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("slow", ["forward", "backward"])
def test_on_cuda_kernels_are_billed_to_the_phase_that_queued_them(slow: str) -> None:
    device = torch.device("cuda", 0)
    meter = Meter.for_device(device)
    # A tenth of a second at 2 GHz, in which the host goes on. The first such sleep comes before the pass, which must
    # not be charged for it.
    cycles = 200_000_000
    torch.cuda._sleep(cycles)
    meter.start_pass()
    for name in ("forward", "backward"):
        with meter.measure(name):
            if name == slow:
                torch.cuda._sleep(cycles)
    costs, host_seconds = meter.end_pass()
    [fast] = {"forward", "backward"} - {slow}
    assert costs[slow].seconds > 0.03
    assert costs[fast].seconds < costs[slow].seconds / 10
    assert host_seconds >= costs[slow].seconds


@pytest.mark.gpu
def test_on_cuda_a_peak_lands_in_the_phase_that_had_it() -> None:
    device = torch.device("cuda", 0)
    meter = Meter.for_device(device)
    assert meter.memory_kind == "cuda allocator"
    meter.start_pass()
    with meter.measure("forward"):
        block = torch.empty(200 * MIB, dtype=torch.uint8, device=device)
        del block
    with meter.measure("backward"):
        kept = torch.empty(10 * MIB, dtype=torch.uint8, device=device)
    costs, _ = meter.end_pass()
    forward, backward = costs["forward"], costs["backward"]
    assert forward.allocated_bytes is not None
    assert backward.allocated_bytes is not None
    assert forward.peak_allocated_bytes - forward.allocated_bytes == 200 * MIB
    assert backward.allocated_bytes - forward.allocated_bytes == kept.numel()
    assert backward.peak_allocated_bytes == backward.allocated_bytes
    assert forward.peak_reserved_bytes is not None
    assert forward.peak_reserved_bytes >= 200 * MIB
