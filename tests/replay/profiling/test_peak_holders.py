"""`--memory-snapshot` says what held the peak: blocks found in the allocator's history, each charged to one part."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actor_init.option_values import Dtype
from actor_init.spec import ActorSpec, OptimizerName
from replay.command_line.cli import main
from replay.profiling.memory_advice import PassSize, predict_savings
from replay.profiling.peak_holders import (
    AllocationHistory,
    CudaAllocator,
    find_head_name,
    find_peak_holders,
    group_holders,
)
from replay.profiling.profile_records import Holder, HolderKind, MemoryPeak, MemoryProfile
from replay.profiling.snapshot_peak import AllocatorEvent, PythonFrame, SegmentBlock, Snapshot, find_snapshot_peak
from replay.profiling.text import build_holder_table, list_memory_remarks
from replay.runner.meter import HostInstrument
from tests.helpers.made_time import at_the_meter

GATHERING: list[PythonFrame] = [
    {"filename": "/site/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "line": 1, "name": "gather"}
]
ELSEWHERE: list[PythonFrame] = [{"filename": "/job/loss.py", "line": 7, "name": "loss"}]


def make_event(action: str, address: int, size: int, frames: Sequence[PythonFrame] = ()) -> AllocatorEvent:
    return {"action": action, "addr": address, "size": size, "frames": list(frames)}


def snapshot(*events: AllocatorEvent, at_end: dict[int, int], reserved: int) -> Snapshot:
    blocks: list[SegmentBlock] = [
        {"address": address, "size": size, "state": "active_allocated"} for address, size in at_end.items()
    ]
    blocks.append({"address": 9_000, "size": 5, "state": "inactive"})
    return {"device_traces": [list(events)], "segments": [{"device": 0, "total_size": reserved, "blocks": blocks}]}


HISTORY = snapshot(
    make_event("segment_alloc", 0, 400),
    make_event("alloc", 200, 50),  # 0, a block's activation
    make_event("alloc", 300, 70, GATHERING),  # 1
    make_event("free_requested", 300, 70),
    make_event("free_completed", 300, 70),
    make_event("alloc", 300, 20, ELSEWHERE),  # 2, at an address that was used before
    make_event("free_completed", 150, 30),  # from before the history
    make_event("alloc", 400, 60),  # 3, the head: the peak
    make_event("free_completed", 200, 50),
    make_event("alloc", 500, 40),  # 4, a gradient
    make_event("segment_free", 0, 100),
    at_end={100: 1_000, 300: 20, 400: 60, 500: 40},
    reserved=1_500,
)


def test_the_peak_counts_what_was_there_before_and_what_was_freed() -> None:
    # by hand: before 1,000 + 30; 1,080; 1,150 (the peak so far); 1,080; 1,100; 1,070; 1,130; 1,080; 1,120
    peak = find_snapshot_peak(HISTORY, 0)

    assert (peak.allocated_bytes, peak.number, peak.num_allocations) == (1_150, 1, 5)
    assert {block.address: block.num_bytes for block in peak.blocks} == {100: 1_000, 150: 30, 200: 50, 300: 70}
    assert peak.reserved_bytes == 1_600, (
        "1,500 at the end, 400 more and 100 less on the way, but the 100 were not yet back"
    )


def test_what_comes_after_the_measured_phases_is_no_peak() -> None:
    more = snapshot(
        make_event("alloc", 200, 50),  # 0
        make_event("free_completed", 200, 50),
        make_event("alloc", 200, 500),  # 1, of what ends the pass
        at_end={100: 7, 200: 500},
        reserved=600,
    )

    assert find_snapshot_peak(more, 0).allocated_bytes == 507
    assert (found := find_snapshot_peak(more, 0, until=1)).allocated_bytes == 57
    assert [block.num_bytes for block in found.blocks] == [7, 50]


def test_a_history_without_events_holds_what_lives() -> None:
    peak = find_snapshot_peak(snapshot(at_end={100: 7}, reserved=20), 0)

    assert (peak.allocated_bytes, peak.reserved_bytes, peak.number) == (7, 20, -1)


def test_each_block_is_charged_to_one_part() -> None:
    more = snapshot(
        *HISTORY["device_traces"][0], make_event("alloc", 600, 900), at_end={**AT_END, 600: 900}, reserved=1_500
    )
    begins = [(0, "model.layers.3.mlp"), (1, None), (3, "lm_head"), (4, None)]
    history = AllocationHistory(device=torch.device("cpu"), module_borders=begins)
    history.forward_end, history.gradients = 4, {500: 40}

    holders = group_holders(find_snapshot_peak(more, 0), history, weights=[110], blocks={"model.layers.3"})

    assert {(holder.kind, holder.name): holder.num_bytes for holder in holders} == {
        (HolderKind.WEIGHTS, ""): 1_000,
        (HolderKind.BACKWARD, ""): 900,
        (HolderKind.HEAD, ""): 60,
        (HolderKind.GRADIENTS, ""): 40,
        (HolderKind.OTHER, "loss.py:7 in loss"): 20,
    }
    first = group_holders(find_snapshot_peak(HISTORY, 0), history, weights=[110], blocks={"model.layers.3"})
    assert {(holder.kind, holder.name): holder.num_bytes for holder in first} == {
        (HolderKind.WEIGHTS, ""): 1_000,
        (HolderKind.COMMUNICATION, ""): 70,
        (HolderKind.ACTIVATIONS, "model.layers.*.mlp"): 50,
        (HolderKind.OPTIMIZER, ""): 30,
    }


AT_END = {100: 1_000, 300: 20, 400: 60, 500: 40}


def test_the_table_adds_up_and_the_remarks_hold_it_against_the_allocator() -> None:
    holders = [Holder(kind=HolderKind.OTHER, name=f"a.py:{n} in f", num_bytes=2**30, count=1) for n in range(25)]
    rank = MemoryProfile(
        peak_bytes=25 * 2**30,
        counted_bytes=25 * 2**30,
        reserved_bytes=27 * 2**30,
        ran_out="CUDA out of memory. Tried to allocate 9 GiB.\nmore",
        holders=holders,
        snapshot="rank1.memory.pickle",
    )
    small = MemoryProfile(
        peak_bytes=1, counted_bytes=1, reserved_bytes=1, ran_out=None, holders=(), snapshot="rank0.memory.pickle"
    )
    peak = MemoryPeak(index=2, source="a.pkl", ranks=[small, rank])

    table = build_holder_table(peak)
    assert (len(table["GiB"]), table["held at the peak"][-1], table["GiB"][-1]) == (21, "5 smaller ones", "5.000")
    said = dict(list_memory_remarks(peak))
    assert said["peak held"].startswith("pass 3 once more, rank 1, a.pkl; these are 25.00 GiB")
    assert "2.000 GiB more were reserved" in said["peak held"]
    assert said["ran out"] == "CUDA out of memory. Tried to allocate 9 GiB."


SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "vocab_size": 8,
}


class Allocator(CudaAllocator):
    """In the place of CUDA's: a history of one block, and an observer of memory that runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.recording: list[str | None] = []
        self.observers: list[Callable[..., None]] = []
        self.num_snapshots = 0

    def synchronize(self, device: torch.device) -> None: ...

    def switch_history(self, events: str | None) -> None:
        self.recording.append(events)

    def count_allocations(self, device: torch.device) -> int:
        return 3

    def take_snapshot(self, device: torch.device) -> Snapshot:
        self.num_snapshots += 1
        at = 1_000 * self.num_snapshots
        return snapshot(make_event("alloc", 7, at), at_end={7: at}, reserved=at + 1)

    def find_device_index(self, device: torch.device) -> int:
        return 0

    def attach_observer(self, observer: Callable[..., None]) -> None:
        self.observers.append(observer)

    def runs_out(self) -> None:
        for observer in self.observers:
            observer(0, 1, 2, 3)


@pytest.fixture
def allocator() -> Allocator:
    return Allocator()


def find_holders(
    run: Callable[[AllocationHistory], Exception | None], file: Path, allocator: Allocator, **options: Any
) -> MemoryProfile | None:
    config = LlamaConfig(**SMALL)
    spec = ActorSpec(backend="ddp", dtype=Dtype.FP32)
    device, model = torch.device("cuda"), LlamaForCausalLM(config)
    return find_peak_holders(
        run, model, config, spec, device, file, rank=1, resident=lambda: None, allocator=allocator, **options
    )


def test_a_pass_that_ran_out_is_seen_at_that_moment(allocator: Allocator, tmp_path: Path) -> None:
    def run(history: AllocationHistory) -> Exception:
        allocator.runs_out()
        return torch.OutOfMemoryError("CUDA out of memory")

    for number in (1, 2):
        found = find_holders(run, tmp_path / "a.pickle", allocator, only_if_it_ran_out=True)
        assert found is not None
        assert (found.ran_out, found.rank, found.device) == ("CUDA out of memory", 1, "cuda")
        assert (found.peak_bytes, found.reserved_bytes) == (1_000 * number, 1_000 * number + 1), "one snapshot a pass"
        assert pickle.loads((tmp_path / "a.pickle").read_bytes())["device_traces"][0][0]["size"] == 1_000 * number
    assert allocator.recording == ["all", None] * 2
    assert len(allocator.observers) == 1, "torch keeps each for good"


def test_a_pass_that_did_not_run_out_leaves_nothing_if_only_such_are_wanted(
    allocator: Allocator, tmp_path: Path
) -> None:
    file = tmp_path / "a.pickle"

    assert find_holders(lambda _: None, file, allocator, only_if_it_ran_out=True) is None
    assert find_holders(lambda _: ValueError("other"), file, allocator, only_if_it_ran_out=True) is None

    assert allocator.recording == ["all", None] * 2
    assert not file.exists()
    assert allocator.num_snapshots == 0


def test_memory_that_ran_out_on_the_way_and_was_found_is_no_failure(allocator: Allocator, tmp_path: Path) -> None:
    def run(history: AllocationHistory) -> None:
        allocator.runs_out()

    found = find_holders(run, tmp_path / "a.pickle", allocator)

    assert found is not None
    assert (found.ran_out, found.failed, found.peak_bytes) == (None, None, 2_000), "as it was at the pass's end"


def test_a_users_own_model_has_the_usual_head() -> None:
    assert find_head_name(torch.nn.Linear(1, 1)) == "lm_head"
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    model.get_output_embeddings = lambda: model.model.layers[1].mlp.up_proj
    assert find_head_name(model) == "model.layers.1.mlp.up_proj"


def test_a_device_without_the_counters_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on macOS, which has no /proc.
    at_the_meter(monkeypatch, lambda _: HostInstrument(tmp_path / "proc"))

    assert main(["--memory-snapshot", "--log-folder", str(tmp_path)]) == 2

    assert "this system says its peak alone. Try: without --memory-snapshot" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


TEN_LAYERS = PassSize(
    num_layers=10, block_share=0.5, compute_bytes=2, weight_bytes=2, trains=True, residual_bytes=5, logits_bytes=0
)


def holders_of(held: dict[HolderKind, int], *, unit: int = 1) -> list[Holder]:
    return [Holder(kind=kind, name="", num_bytes=size * unit, count=1) for kind, size in held.items()]


def test_options_that_save_most_come_with_their_predicted_peaks() -> None:
    held = {
        HolderKind.WEIGHTS: 400,
        HolderKind.GRADIENTS: 100,
        HolderKind.OPTIMIZER: 800,
        HolderKind.ACTIVATIONS: 1_000,
        HolderKind.HEAD: 50,
    }
    holders = holders_of(held)
    size = replace(TEN_LAYERS, weight_bytes=4)

    found = predict_savings(holders, ActorSpec(backend="fsdp2"), size)

    # of 2,350 bytes: no states, and half of weights and gradients; half of the layers' activations, and a quarter of
    # what belongs to parameters; with checkpointing the activations are 150, and backward's end is the peak: 400
    # gradients beside 400 weights and 800 states
    assert [(saving.option, saving.peak_bytes) for saving in found] == [
        ("--optimizer none", 200 + 50 + 1_000 + 50),
        ("--num-layers 5", 300 + 75 + 600 + 500 + 50),
        ("--gradient-checkpointing", 400 + 400 + 800),
    ]
    checkpointed = ActorSpec(backend="fsdp2", gradient_checkpointing=True, optimizer=OptimizerName.NONE)
    assert [saving.option for saving in predict_savings(holders, checkpointed, size)] == [
        "--num-layers 5",
        "twice as many ranks",
    ]


def test_gradients_in_a_backends_own_buffers_are_not_counted_twice() -> None:
    held = {HolderKind.WEIGHTS: 400, HolderKind.OPTIMIZER: 800, HolderKind.COMMUNICATION: 600}
    holders = holders_of(held)
    size = replace(TEN_LAYERS, keeps_gradients=False)

    found = {
        saving.option: saving.peak_bytes for saving in predict_savings(holders, ActorSpec(backend="deepspeed"), size)
    }

    assert found["--num-layers 5"] == 0.75 * (400 + 800 + 600)
    assert found["--optimizer none"] == 400 + 600


def test_checkpointing_holds_a_blocks_activations_or_the_heads() -> None:
    held = {HolderKind.WEIGHTS: 10, HolderKind.ACTIVATIONS: 1_000, HolderKind.HEAD: 300}
    holders = holders_of(held)
    spec = ActorSpec(backend="ddp", optimizer=OptimizerName.NONE)
    for num_layers, expected in ((10, 10 + 300 + 10 * 5), (2, 10 + 500 + 2 * 5)):
        size = replace(TEN_LAYERS, num_layers=num_layers)

        found = {saving.option: saving.peak_bytes for saving in predict_savings(holders, spec, size)}

        assert found["--gradient-checkpointing"] == expected


def test_without_autograd_fewer_layers_keep_as_many_activations() -> None:
    held = {HolderKind.WEIGHTS: 400, HolderKind.ACTIVATIONS: 1_000}
    holders = holders_of(held)
    size = replace(TEN_LAYERS, trains=False)

    found = predict_savings(holders, ActorSpec(backend="ddp", optimizer=OptimizerName.NONE), size)

    assert [(saving.option, saving.peak_bytes) for saving in found] == [("--num-layers 5", 300 + 1_000)]


def test_predictions_agree_with_what_a_gpu_measured() -> None:
    """The holders and the peaks of Llama 3.1 8B with 8 and 4 layers, 8,192 tokens, on an H200, in MiB."""
    held = {
        HolderKind.WEIGHTS: 10_660,
        HolderKind.COMMUNICATION: 2_004,
        HolderKind.GRADIENTS: 2_004,
        HolderKind.ACTIVATIONS: 8_717,
        HolderKind.BACKWARD: 816,
        HolderKind.OPTIMIZER: 64,
    }
    holders = holders_of(held, unit=2**20)
    residual = 8_192 * 4_096 * 2
    size = replace(TEN_LAYERS, num_layers=8, block_share=0.624, weight_bytes=4, residual_bytes=residual)

    peaks = {
        saving.option: saving.peak_bytes / 2**30
        for saving in predict_savings(holders, ActorSpec(backend="fsdp2"), size)
    }

    assert peaks.pop("--num-layers 4") == pytest.approx(16.35, rel=0.02)
    assert peaks.pop("--optimizer none") == pytest.approx(17.95, rel=0.05)
    more = predict_savings(holders, ActorSpec(backend="fsdp2", optimizer=OptimizerName.NONE), size)
    by_option = {saving.option: saving.peak_bytes / 2**30 for saving in more}
    assert by_option["--gradient-checkpointing"] == pytest.approx(22.85, rel=0.02)
