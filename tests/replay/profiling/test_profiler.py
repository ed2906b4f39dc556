"""`--profile` runs one pass more, which is not measured, and says where its time went."""

import gzip
import json
from pathlib import Path

import pytest

from capture.file_format.actor_config import write_actor_config
from replay.command_line.cli import main
from replay.profiling.profile_records import (
    Interval,
    LongKernel,
    Profile,
    RankProfile,
    Work,
    classify_work,
    divide_seconds,
    find_waits,
    measure_hidden_seconds,
)
from replay.profiling.text import build_kernel_table, build_share_table, list_profile_remarks
from tests.helpers.made_captures import LLAMA, write_pass
from tests.helpers.read_logs import read_log

BUSY_LOSS = """
import torch

def loss(inputs):
    a = torch.randn(500, 500)
    for _ in range(10):
        a = torch.linalg.qr(a)[0]
    return -inputs.log_probs_BA.sum() + 0 * a.sum()
"""


def test_each_moment_belongs_to_one_kind_of_work() -> None:
    intervals = [
        Interval(1.0, 3.0, Work.MATMUL),
        Interval(2.0, 5.0, Work.ELEMENTWISE),  # on another stream; 2 to 3 is the matmul's
        Interval(4.0, 7.0, Work.COMMUNICATION),  # hidden until 5
        Interval(9.0, 12.0, Work.COPIES),  # the pass ends at 10
    ]

    assert divide_seconds(intervals, 0.0, 10.0) == {
        Work.MATMUL: 2.0,
        Work.ELEMENTWISE: 2.0,
        Work.COMMUNICATION: 2.0,
        Work.COPIES: 1.0,
        Work.GAPS: 3.0,
    }
    assert measure_hidden_seconds(intervals) == 1.0


def test_a_pass_without_kernels_is_all_gaps() -> None:
    assert divide_seconds([], 2.0, 5.0) == {Work.GAPS: 3.0}
    assert measure_hidden_seconds([]) == 0.0


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", Work.MATMUL),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", Work.MATMUL),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", Work.ATTENTION),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", Work.ATTENTION),
        ("triton_tem_fused_flex_attention_backward_mm_2", Work.ATTENTION),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Work.COMMUNICATION),
        ("Memcpy DtoH (Device -> Pinned)", Work.COPIES),
        ("triton_poi_fused_mul_silu_1", Work.ELEMENTWISE),
        ("aten::addmm", Work.MATMUL),
        ("aten::native_layer_norm", Work.ELEMENTWISE),
        ("gloo:all_reduce", Work.COMMUNICATION),
    ],
)
def test_a_name_says_the_kind_of_work(name: str, work: Work) -> None:
    assert classify_work(name) is work


def test_the_last_to_come_is_waited_for() -> None:
    assert find_waits([[0.5, 0.1], [0.1, 0.1], [0.4, 0.3]]) == pytest.approx([0.4, 0.0, 0.5])
    assert find_waits([[0.5], [0.1, 0.1]]) is None, "the ranks ran other collectives"
    assert find_waits([[], []]) is None


def test_the_text_names_the_rank_that_waits_and_for_whom() -> None:
    ranks = [
        RankProfile(
            seconds=1.0,
            seconds_by_work={"communication": waiting, "matmul": 1.0 - waiting},
            hidden_communication_seconds=0.0,
            longest=[LongKernel(name="k" * 60 + "_backward", module=None, count=2, seconds=0.5)],
            collective_seconds=[waiting],
            timeline=f"rank{number}.profile.json.gz",
        )
        for number, waiting in enumerate((0.1, 0.6))
    ]
    profile = Profile(index=4, source="a.pkl", device="cuda", ranks=ranks)

    assert ("waits", "rank 1 waited 500.0 ms in collectives, longest for rank 0") in list_profile_remarks(profile)
    assert build_share_table(profile) == {
        "profiled pass": ["matmul", "communication, exposed"],
        "ms 0": ["900.0", "100.0"],
        "share 0": ["90.0%", "10.0%"],
        "ms 1": ["400.0", "600.0"],
        "share 1": ["40.0%", "60.0%"],
    }
    assert build_kernel_table(profile)["kernel"][0].endswith("_backward")


def test_a_run_profiles_its_slowest_pass_and_does_not_measure_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = tmp_path / "inputs"
    for step, length in enumerate((8, 40, 300)):
        write_pass(inputs, step=step, num_rows=1, length=length, num_real=length, vocabulary=64)
    write_actor_config(inputs, LLAMA, "tiny")
    loss = tmp_path / "busy.py"
    loss.write_text(BUSY_LOSS)

    options = ["--backend", "ddp", "--inputs", str(inputs), "--log-folder", str(tmp_path / "logs"), "--warmup", "0"]
    assert main([*options, "--profile", "--loss", f"{loss}:loss"]) == 0

    (folder,) = (tmp_path / "logs").iterdir()
    run, records = read_log(folder)
    assert len(records) == 3
    profile = run["profile"]
    assert profile["index"] == run["statistics"]["slowest"]["index"]
    (rank,) = profile["ranks"]
    assert sum(rank["seconds_by_work"].values()) == pytest.approx(rank["seconds"])
    first = rank["longest"][0]
    assert (first["name"], first["module"]) == ("aten::linalg_qr", None), "the loss is no module"
    with gzip.open(folder / rank["timeline"]) as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert {"phase: forward", "phase: backward", "module: model.layers.1.mlp.down_proj"} <= names
    assert "aten::linalg_qr" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllGather_RING_LL"),
        ("void scale<float>(float*, int)", "void scale<float>"),
        ("aten::mm", "aten::mm"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
    ],
)
def test_a_kernel_is_shown_without_its_arguments(name: str, shown: str) -> None:
    rank = RankProfile(
        seconds=1.0,
        seconds_by_work={},
        hidden_communication_seconds=0.0,
        longest=[LongKernel(name=name, module=None, count=1, seconds=0.5)],
        collective_seconds=[],
        timeline="rank0.profile.json.gz",
    )
    assert build_kernel_table(Profile(index=0, source="a.pkl", device="cuda", ranks=[rank]))["kernel"] == [shown]
