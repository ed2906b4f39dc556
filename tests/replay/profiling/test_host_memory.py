"""On a CPU the parts of a pass's memory are those of the process's resident peak, and add up to it."""

import gzip
import json
import mmap
from pathlib import Path

import pytest
import torch

from capture.file_format.actor_config import write_actor_config
from replay.command_line.cli import main
from replay.profiling.host_memory import PROCESS_ADDRESS, TraceEvent, find_peak
from replay.profiling.peak_holders import AllocationHistory, group_holders
from replay.profiling.profile_records import Holder, HolderKind, MemoryPeak, MemoryProfile
from replay.profiling.residency import LEAST_MAPPED_BYTES, ResidencyReader, parse_mappings
from replay.profiling.snapshot_peak import Block
from replay.profiling.text import list_memory_remarks
from tests.helpers.made_captures import write_pass
from tests.helpers.read_logs import read_log

Captured = pytest.CaptureFixture[str]
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA has the allocator's history")
HIDDEN, LAYERS, INNER, VOCABULARY = 256, 4, 688, 512
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
NUM_PARAMETERS = (
    2 * VOCABULARY * HIDDEN + LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INNER + 2 * HIDDEN) + HIDDEN
    # Embedding and head, blocks, the last norm.
)


def range_of(name: str, begin: float, end: float) -> TraceEvent:
    return {"name": name, "ts": begin, "dur": end - begin}


def make_event(at: float, address: int, num_bytes: int) -> TraceEvent:
    return {"name": "[memory]", "ts": at, "args": {"Device Type": 0, "Addr": address, "Bytes": num_bytes}}


EVENTS = [
    range_of("phase: forward", 0, 100),
    range_of("module: model.layers.0", 10, 30),
    range_of("module: model.layers.0.mlp", 15, 25),
    range_of("module: lm_head", 50, 60),
    range_of("phase: backward", 110, 200),
    range_of("FSDP::post_backward_reduce", 150, 160),
    make_event(5, 500, 7),  # 0, before all modules
    make_event(12, 510, 20),  # 1, the block's own
    make_event(16, 520, 40),  # 2, the block's MLP
    make_event(26, 530, 9),  # 3, the block's own again
    make_event(27, 530, -9),
    make_event(55, 540, 60),  # 4, the head
    make_event(70, 540, -60),
    make_event(120, 550, 80),  # 5, backward
    make_event(155, 560, 30),  # 6, communication: the peak
    make_event(170, 100, -50),  # a weight's copy from before is freed
    make_event(180, 570, 10),  # 7
]
BEFORE = [
    Block(address=at, num_bytes=size, number=None, frames=())
    for at, size in ((100, 50), (200, 200), (PROCESS_ADDRESS, 1_000))
]


def test_a_trace_s_allocations_are_charged_to_what_ran_then() -> None:
    history = AllocationHistory(device=torch.device("cpu"), gradients={550: 80, 9_000: 300})

    peak = find_peak(reversed(EVENTS), BEFORE, history)

    # what C++ alone holds of the gradients, 300, was the process's
    assert peak.allocated_bytes == 50 + 200 + 1_000 + 7 + 20 + 40 + 80 + 30
    assert (peak.number, peak.num_allocations) == (6, 8)
    holders = group_holders(peak, history, weights=[210], blocks={"model.layers.0"})
    assert {(holder.kind, holder.name): holder.num_bytes for holder in holders} == {
        (HolderKind.PROCESS, ""): 700,
        (HolderKind.WEIGHTS, ""): 200,
        (HolderKind.GRADIENTS, ""): 80 + 300,
        (HolderKind.OPTIMIZER, ""): 50,
        (HolderKind.ACTIVATIONS, "model.layers.*"): 20,
        (HolderKind.ACTIVATIONS, "model.layers.*.mlp"): 40,
        (HolderKind.COMMUNICATION, ""): 30,
        (HolderKind.OTHER, ""): 7,
    }
    in_head = find_peak(EVENTS[:12], BEFORE, history)
    assert (HolderKind.HEAD, "") in {
        (holder.kind, holder.name) for holder in group_holders(in_head, history, [], set())
    }


def test_the_text_of_smaps_is_read() -> None:
    text = """7f0000000000-7f0004000000 rw-p 00000000 00:00 0
Size:              65536 kB
Rss:                  12 kB
VmFlags: rd wr
55e0c0000000-55e0c0001000 r--p 00000000 fe:01 131 /usr/lib/a b.so
Size:                  4 kB
Rss:                   4 kB
"""
    assert parse_mappings(text, 3.5) == [(3.5, 0x7F0000000000, 0x7F0004000000, 12 * 1024)]


@pytest.mark.skipif("not __import__('pathlib').Path('/proc/self/smaps').exists()", reason="reads Linux's mappings")
def test_what_is_given_out_and_not_touched_takes_no_memory() -> None:
    with mmap.mmap(-1, 2 * LEAST_MAPPED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        with ResidencyReader(lambda: None) as touched:
            block[: LEAST_MAPPED_BYTES // 2] = bytes(LEAST_MAPPED_BYTES // 2)
        address = torch.frombuffer(block, dtype=torch.uint8).data_ptr()

        seen = touched.find_resident_bytes(address, 2 * LEAST_MAPPED_BYTES, 0.0, float("inf"), most=3)

    assert LEAST_MAPPED_BYTES // 2 <= seen < LEAST_MAPPED_BYTES
    assert touched.find_resident_bytes(address, 2 * LEAST_MAPPED_BYTES, -2.0, -1.0, most=3) == 3, "not seen then"
    assert touched.find_resident_bytes(address, 7, 0.0, float("inf"), most=3) == 7, "too small to be mapped by itself"


@on_cpu
def test_the_parts_add_up_to_the_resident_peak(tmp_path: Path, capsys: Captured) -> None:
    inputs = tmp_path / "inputs"
    for step, length in enumerate((64, 700, 300)):
        write_pass(inputs, step=step, num_rows=1, length=length, num_real=length, vocabulary=VOCABULARY)
    write_actor_config(inputs, LLAMA, "tiny")
    options = ["--backend", "ddp", "--inputs", str(inputs), "--log-folder", str(tmp_path / "logs"), "--warmup", "0"]

    assert main([*options, "--memory-snapshot", "--dtype", "fp32"]) == 0

    (folder,) = (tmp_path / "logs").iterdir()
    run, records = read_log(folder)
    assert len(records) == 3, "it is not among the measured passes"
    (rank,) = run["memory"]["ranks"]
    sizes = {
        kind: sum(holder["num_bytes"] for holder in rank["holders"] if holder["kind"] == kind) for kind in HolderKind
    }
    # The rotary embedding's buffers.
    frequencies = 2 * HIDDEN // 4 // 2
    assert sizes[HolderKind.WEIGHTS] == 4 * (NUM_PARAMETERS + frequencies)
    assert sum(sizes.values()) == rank["peak_bytes"] == pytest.approx(rank["counted_bytes"], rel=0.05)
    # what each block keeps of its MLP alone: its input and three inner tensors; the last one's may be gone by then
    assert run["memory"]["index"] == 1, "the longest: in pytest's process all may have the same peak"
    assert sizes[HolderKind.ACTIVATIONS] > (LAYERS - 1) * 700 * (HIDDEN + 3 * INNER) * 4
    with gzip.open(folder / rank["snapshot"]) as file:
        assert any(event.get("name") == "[memory]" for event in json.load(file)["traceEvents"])
    said = capsys.readouterr().out
    assert "snapshot   none on a CPU: of the process's resident memory\n" in said
    assert "resident at the peak" in said
    assert "in place of an allocator's snapshot on CUDA" in said


def test_the_text_says_how_far_the_sum_is_off() -> None:
    gib = 2**30

    def describe_peak(parts: float, resident: float) -> str:
        rank = MemoryProfile(
            device="cpu",
            rank=3,
            peak_bytes=int(parts * gib),
            counted_bytes=int(resident * gib),
            reserved_bytes=6 * gib,
            ran_out=None,
            holders=[Holder(kind=HolderKind.PROCESS, name="", num_bytes=int(parts * gib), count=1)],
            snapshot="rank3.memory.json.gz",
        )
        return dict(list_memory_remarks(MemoryPeak(index=0, source="a.pkl", ranks=[rank])))["peak held"]

    assert describe_peak(4.95, 5).endswith(
        "rank 3, a.pkl; these are 4.950 GiB, 1.0% less than the 5.000 GiB that were resident at most. In the run "
        "itself they were 6.000: what is freed stays resident there"
    )
    assert "10.0% less than the 5.000 GiB that were resident at most: libraries" in describe_peak(4.5, 5)
    assert "10.0% more than the 5.000 GiB that were resident at most: memory may be given out" in describe_peak(5.5, 5)
