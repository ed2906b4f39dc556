"""`replay worst` finds a planted law of costs, ranks inputs by it, says what fits, and sees where it does not hold."""

import gc
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import replay
from actor_init.backends.protocol import open_backend
from actor_init.declarations.backends import BACKENDS
from actor_init.inputs.packing import prepare_inputs, unpack
from actor_init.model import count_parameters
from actor_init.spec import ActorSpec
from actor_init.world import World
from capture import capture_files
from capture.file_format.capture_file import read_call
from replay.api.logs import PastCampaign
from replay.campaign.campaign import PlannedRun
from replay.command_line.cli import main
from replay.commands.worst.measuring import DeviceMemory, Fits, MemoryRoom, measure, read_host_memory
from replay.objective.objective import compute_negated_mean
from replay.options.spec import ReplaySpec, find_sample_folder
from replay.processes.pool import ProcessResult, Task
from replay.profiling.prediction import PredictionErrors, RowLayout, choose_spread, fit_costs, read_shapes
from replay.resolution.job_defaults import find_source
from replay.resolution.selection import select
from replay.runlog.records import PassRecord, PhaseCost
from replay.runner.run_pass import prepare_actor_inputs
from tests.helpers.children import end_each_task, replay_here
from tests.helpers.made_captures import write_pass
from tests.helpers.made_logs import write_log
from tests.helpers.made_records import record
from tests.helpers.schemas import assert_valid
from tests.helpers.typed import spec_of

Captured = pytest.CaptureFixture[str]
MIB = 2**20


@cache
def size_of_model(num_layers: int | None) -> tuple[int, int]:
    """Layers and elements of the sample's model."""
    config = find_source(ReplaySpec(actor=ActorSpec(num_layers=num_layers))).config
    return config.num_hidden_layers, count_parameters(config)


@dataclass
class Law:
    """In the place of the processes: logs of passes that cost what a formula says."""

    fails: Callable[[int], bool] = lambda tokens: False
    slower: dict[str, float] = field(default_factory=dict)  # by source, how much
    after: int = 10**9  # records that are written before the process is killed
    runs: list[ReplaySpec] = field(default_factory=list)
    breaks_at: int | None = None  # the run in whose place Ctrl-C comes

    def __call__(self, task: Task) -> ProcessResult:
        spec = task.job.spec
        if len(self.runs) == self.breaks_at:
            self.breaks_at = None
            raise KeyboardInterrupt
        self.runs.append(spec)
        parallel = spec.actor.parallel
        num_ranks = task.num_processes
        num_data_ranks = num_ranks // (parallel.tp * parallel.ring)
        accumulation = spec.actor.grad_accumulation
        columns = [
            select(spec.inputs, rank, num_data_ranks, grad_accumulation=accumulation).inputs
            for rank in range(num_data_ranks)
        ]
        records = [
            self.passed(spec, index, rank, columns[rank % num_data_ranks][index], num_data_ranks)
            for index in range(len(columns[0]))
            for rank in range(num_ranks)
        ]
        log = task.logs / "20261123-000000-replay"
        task.output.parent.mkdir(parents=True, exist_ok=True)
        task.output.write_text("")
        is_whole = len(records) <= self.after
        write_log(log, records[: self.after], spec=spec, exit_code=0 if is_whole else None)
        return ProcessResult(exit_code=0 if is_whole else -9, seconds=1.0, output=task.output, logs=task.logs)

    def passed(self, spec: ReplaySpec, index: int, rank: int, path: Path, num_data_ranks: int) -> Any:
        batch = read_call(path).micro_batch()
        lengths = batch.attention_mask_BS.sum(1).tolist()
        tokens, squares = sum(lengths), sum(length**2 for length in lengths)
        layers, elements = size_of_model(spec.actor.num_layers)
        first = 3.0 if index % 4 == 0 else 1.0  # of a repeated input, as if something were loaded
        factor = first * self.slower.get(path.name, 1.0)
        stage = spec.actor.resolved_zero_stage
        of_ranks = elements * 4 / num_data_ranks  # fp32 masters; at stage 3 weights and gradients are shared too
        later = elements * 4 if stage == 1 else of_ranks
        held = of_ranks + later
        phases = {
            "forward": (layers * (1e-3 + 1e-6 * tokens + 2e-9 * squares), held + layers * 1e3 * tokens),
            "backward": (layers * (2e-3 + 3e-6 * tokens), held + later + max(50 * MIB, layers * 2e3 * tokens)),
        }
        if not batch.trains:
            phases = {"forward": (layers * 1e-6 * tokens, held + 500.0 * tokens)}
        known = {
            "source": path.name,
            "rank": rank,
            "fed_tokens": tokens,
            "real_tokens": tokens,
            "row_tokens": lengths,
            "trains": batch.trains,
            "first_uses": ["library"] if index % 4 == 0 else [],
        }
        if self.fails(tokens):
            return record(index, **known, phases={}, error="out of memory", error_type="OutOfMemoryError")
        costs = {
            name: PhaseCost(
                seconds=seconds * factor,
                allocated_bytes=None,
                peak_allocated_bytes=int(peak),
                peak_reserved_bytes=int(peak * 1.25),
            )
            for name, (seconds, peak) in phases.items()
        }
        return record(index, **known, phases=costs)


@pytest.fixture
def law(monkeypatch: pytest.MonkeyPatch) -> Law:
    made = Law()
    end_each_task(made, monkeypatch)
    return made


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
    memory = DeviceMemory(device="a device", free_bytes=int(num_bytes), total_bytes=2**40, is_shared=False)
    monkeypatch.setattr("replay.commands.worst.runs.read_device_memory", lambda: memory)


def worst(logs: Path, *typed: str) -> tuple[int, dict[str, Any]]:
    # The law is of passes that are windows of their own.
    code = main(["worst", *typed, "--grad-accumulation", "1", "--dtype", "fp32", "--log-folder", str(logs)])
    (path,) = logs.glob("*-worst/worst.json")
    return code, json.loads(path.read_text())["result"]


def tokens_of(name: str) -> int:
    return int(read_call(find_sample_folder() / name).micro_batch().attention_mask_BS.sum())


def test_a_planted_law_is_found_and_all_inputs_are_ranked_by_it(law: Law, tmp_path: Path, capsys: Captured) -> None:
    code, log = worst(tmp_path, "--check", "--passes", "all")
    assert code == 0
    assert len(log["ranking"]) == len(capture_files(find_sample_folder()))
    for ranking in log["ranking"]:
        path = find_sample_folder() / ranking["source"]
        true = law.passed(spec_of([]), 1, 0, path, 1)
        for name, cost in true.cost.phases.items():
            assert ranking["seconds"][name] == pytest.approx(cost.seconds, rel=1e-6)
            assert ranking["peaks"][name] == pytest.approx(cost.peak_allocated_bytes, rel=1e-6)
    totals = [sum(ranking["seconds"].values()) for ranking in log["ranking"]]
    assert totals == sorted(totals, reverse=True)
    assert log["error"]["most_of_peak"] < 1e-6
    assert log["error"]["most_of_seconds"] < 1e-6
    kinds = [measurement["trains"] for measurement in log["measured"]]
    assert [kinds.count(True), kinds.count(False), len(log["held_out"])] == [10, 6, 5]
    measured = {measurement["number"] for measurement in log["measured"]}
    assert measured.isdisjoint(check["number"] for check in log["checked"]["inputs"])
    said = capsys.readouterr().out
    assert "checked    within 5% and 10%: off by at most 0.0% of a peak and 0.0% of a time" in said
    (folder,) = tmp_path.iterdir()
    assert main(["worst", "--continue", str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["result"] | {"memory": log["memory"]} == log
    assert_valid("worst", printed)
    table = replay.worst(continue_=folder).to_frame()
    assert capsys.readouterr().out == ""
    assert list(table.source) == [ranking["source"] for ranking in log["ranking"]]
    assert list(table.forward_seconds) == [ranking["seconds"]["forward"] for ranking in log["ranking"]]
    past = replay.open(folder)
    assert isinstance(past, PastCampaign)
    assert [len(past[name].records) for name in past] == [len(run.inputs.picked_numbers or []) for run in law.runs]
    assert [len(run.inputs.picked_numbers or []) for run in law.runs] == [
        4 * len(measured),
        4 * len(log["checked"]["inputs"]),
    ]


@pytest.mark.slow
def test_what_was_measured_before_ctrl_c_is_not_measured_again(law: Law, tmp_path: Path, capsys: Captured) -> None:
    typed = ("--check", "--predict", "num-layers=2")
    whole = worst(tmp_path / "whole", *typed)
    runs = [*law.runs]
    law.runs.clear()
    law.breaks_at = 1
    code, log = worst(tmp_path / "logs", *typed)
    assert (code, len(law.runs), log["checked"]) == (130, 1, None)
    (folder,) = (tmp_path / "logs").iterdir()
    assert main(["worst", "--continue", str(folder)]) == whole[0]
    assert [run.inputs.picked_numbers for run in law.runs] == [run.inputs.picked_numbers for run in runs]
    again = json.loads((folder / "worst.json").read_text())["result"]
    in_place = json.dumps(again).replace(str(folder), str(*(tmp_path / "whole").iterdir()))
    unlike = re.compile(r'"(free_bytes|total_bytes)": \d+')
    assert unlike.sub("", in_place) == unlike.sub("", json.dumps(whole[1]))


def test_an_input_that_breaks_the_law_is_seen_by_check(law: Law, tmp_path: Path, capsys: Captured) -> None:
    log = replay.worst(grad_accumulation=1, dtype="fp32", log_folder=tmp_path / "before").result
    measured = {measurement["source"] for measurement in log["measured"]}
    odd = next(ranking["source"] for ranking in log["ranking"] if ranking["source"] not in measured)
    law.slower = {odd: 1.25}
    code, log = worst(tmp_path / "after", "--check")
    assert code == 1
    assert log["checked"]["error"]["most_of_seconds"] == pytest.approx(0.2, abs=1e-3)  # predicted 1, took 1.25
    assert "checked    beyond 5% and 10%" in capsys.readouterr().out


def test_the_error_is_no_smaller_than_that_of_the_largest_which_is_never_held_out(
    law: Law, tmp_path: Path, capsys: Captured
) -> None:
    _, log = worst(tmp_path / "before")
    assert "on all that are measured" not in capsys.readouterr().out
    law.slower = {log["ranking"][0]["source"]: 2.0}
    _, log = worst(tmp_path / "after")
    (error,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]
    assert re.search(r"; at most 0\.0% and (2|3|4)\d\.\d% on all that are measured$", error), error


@pytest.mark.parametrize(("free_share", "said", "code"), [(2.0, "fits", 0), (0.5, "does not fit", 1)])
def test_the_largest_is_held_against_the_memory_here(
    free_share: float,
    said: str,
    code: int,
    law: Law,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    largest = max(select(spec_of([]).inputs, 0, 1).inputs, key=lambda path: tokens_of(path.name))
    peak = max(cost.peak_allocated_bytes for cost in law.passed(spec_of([]), 1, 0, largest, 1).cost.phases.values())
    free(monkeypatch, free_share * 1.25 * peak)  # the allocator reserves a quarter more
    came, log = worst(tmp_path)
    assert (came, log["fits_here"]) == (code, said)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("largest"))
    assert f": {said}, " in line
    assert line.endswith("(50%) are left" if code == 0 else "(100%) are lacking")


def test_what_runs_out_of_memory_is_named_and_the_rest_is_ranked(law: Law, tmp_path: Path, capsys: Captured) -> None:
    law.fails = lambda tokens: tokens > 1200
    code, log = worst(tmp_path)
    assert code == 1
    assert log["failed"]
    assert all(tokens_of(failure["source"]) > 1200 for failure in log["failed"])
    assert all(measurement["real_tokens"] <= 1200 for measurement in log["measured"])
    assert len(log["ranking"]) == 32
    said = capsys.readouterr().out
    assert "OutOfMemoryError: out of memory" in said
    (largest,) = [line for line in said.splitlines() if line.startswith("largest")]
    assert "GiB by prediction, but does not fit: an input that is predicted to need no more ran out" in largest
    assert log["fits_here"] == "does not fit"


def test_what_a_killed_run_had_written_counts(law: Law, tmp_path: Path, capsys: Captured) -> None:
    law.after = 20
    code, log = worst(tmp_path)
    assert (code, len(log["measured"])) == (1, 5)
    assert "the run that measures ended early: ended by SIGKILL" in capsys.readouterr().out


def test_layers_stages_and_ranks_are_predicted_from_one_rank(law: Law, tmp_path: Path, capsys: Captured) -> None:
    asked = "num-layers=4,zero-stage=3,ranks=2"
    code, log = worst(tmp_path, "--num-layers", "2", "--predict", asked, "--check", "--max-inputs", "14")
    assert code == 0, capsys.readouterr().out
    (other,) = log["others"]
    assert len(other["passes"]) == 14  # of two inputs each, more than one rank ranked
    spec = spec_of(["--num-layers", "4", "--zero-stage", "3", "--dtype", "fp32"])
    for prediction in other["passes"]:
        true = [law.passed(spec, 1, 0, find_sample_folder() / source, 2) for source in prediction["sources"]]
        for name in ("forward", "backward"):
            assert prediction["most"]["seconds"][name] == pytest.approx(
                max(r.cost.phases[name].seconds for r in true), rel=1e-6
            )
            peaks = [r.cost.phases[name].peak_allocated_bytes for r in true]
            assert prediction["most"]["peaks"][name] == pytest.approx(max(peaks), rel=1e-6)
    ran = law.runs[-1]
    assert (ran.actor.num_layers, ran.actor.zero_stage) == (4, 3)
    assert log["others_checked"][0]["error"]["most_of_seconds"] < 1e-6
    assert [run.actor.num_layers for run in law.runs] == [2, 2, 2, 1, 4]


def test_tp_is_predicted_as_bounds(law: Law, tmp_path: Path, capsys: Captured) -> None:
    _, log = worst(tmp_path, "--predict", "tp=2")
    (other,) = log["others"]
    for prediction in other["passes"]:
        for name in ("forward", "backward"):
            assert prediction["least"]["peaks"][name] < prediction["most"]["peaks"][name]
            assert prediction["least"]["seconds"][name] == pytest.approx(prediction["most"]["seconds"][name] / 2)
    assert " GiB a rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("layers=3", "'layers=3' is not allowed. Give each of num-layers"),
        ("num-layers=0", "num-layers is at least 1"),
        ("num-layers=2,num-layers=3", "'num-layers=3' is not allowed"),
        ("zero-stage=7", "--zero-stage 7 does not exist under deepspeed"),
    ],
)
def test_what_cannot_be_predicted_is_one_line(typed: str, said: str, capsys: Captured) -> None:
    assert main(["worst", "--predict", typed]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_layers_that_the_model_lacks_are_said_and_the_ranking_stays(law: Law, tmp_path: Path, capsys: Captured) -> None:
    code, log = worst(tmp_path, "--predict", "num-layers=400")
    assert code == 1
    assert len(log["ranking"]) == 32
    assert "predicted  " in capsys.readouterr().out


def test_shapes_count_what_a_pass_is_fed() -> None:
    paths = capture_files(find_sample_folder())
    shapes, wrong = read_shapes(paths, "stand-in")
    assert wrong == []
    for path, shape in zip(paths, shapes, strict=True):
        batch = read_call(path).micro_batch()
        packed, padded = prepare_inputs(batch, packing=True), prepare_inputs(batch, packing=False)
        assert shape.count_fed_tokens(RowLayout.PACKED) == packed.input_ids.numel()
        assert shape.count_fed_tokens(RowLayout.PADDED) == padded.input_ids.numel()
        assert shape.count_fed_tokens(RowLayout.DOCUMENTS) == unpack(packed).input_ids.numel()
        assert shape.action_tokens == len(packed.predictor_N)


def test_inputs_to_measure_are_spread_from_the_smallest_to_the_largest(tmp_path: Path) -> None:
    paths = [
        write_pass(tmp_path, step=step, length=100, num_real=real) for step, real in enumerate([9, 90, *[20] * 30])
    ]
    shapes, _ = read_shapes(paths, "stand-in")
    chosen = [shape.real_tokens for shape in choose_spread(shapes, 4)]
    assert chosen == [18, 40, 40, 180]
    assert len({shape.number for shape in choose_spread(shapes, 4)}) == 4
    assert [shape.real_tokens for shape in choose_spread(shapes, 1)] == [180]
    assert len(choose_spread(shapes, 99)) == 32


def test_fits_have_no_negative_coefficient_and_find_a_floor() -> None:
    torch.manual_seed(0)
    tokens = torch.linspace(10, 1000, 12).tolist()
    terms = [
        [1.0, t, t * t / 2, t * share, t * t * share] for t, share in zip(tokens, torch.rand(12).tolist(), strict=True)
    ]
    falling = fit_costs(terms, [10 - t / 200 for t in tokens])
    assert min(falling.coefficients) >= 0
    fit = fit_costs(terms, [max(7.0, 0.02 * t) for t in tokens])
    assert fit([1.0, 5000.0, 0.0, 0.0, 0.0]) == pytest.approx(100, rel=1e-6)
    assert fit([1.0, 1.0, 0.0, 0.0, 0.0]) == pytest.approx(7, rel=1e-6)
    noisy = [5 + 0.01 * t * (1 + 0.01 * float(torch.randn(()))) for t in tokens]
    assert fit_costs(terms, noisy)(terms[-1]) == pytest.approx(15, rel=0.02)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_shares_no_more_than_it_holds(backend: str) -> None:
    for stage in BACKENDS[backend].stages or [None]:
        holding = BACKENDS[backend].predict_memory(replace(ActorSpec(backend=backend), zero_stage=stage), True)
        for gradients in (True, False):
            assert 0 <= holding.partitioned.bytes(gradients=gradients) <= holding.total.bytes(gradients=gradients)


STAGING_BYTES = 2 * 500_000_000  # DeepSpeed's bucket: it lets go of it behind a backward, and once was seen to keep it


def bytes_of_tensors() -> int:
    """The storage of all tensors that this process holds."""
    gc.collect()
    objects = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), torch.Tensor)]
    tensors = [
        tensor for tensor in objects if not tensor.is_meta and not isinstance(tensor, FakeTensor)
    ]  # fakes of a compiler
    local = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in local}
    return sum(size for size in sizes.values() if size != STAGING_BYTES)


@pytest.mark.parametrize(("backend", "stage"), [("deepspeed", 1), ("fsdp2", 3)])
def test_a_backend_holds_what_it_declares(backend: str, stage: int, world: World) -> None:
    """Not stage 3 of DeepSpeed: its buffers, of a fixed size, are many times this model."""
    typed = ["--backend", backend, "--zero-stage", str(stage), "--dtype", "bf16", "--grad-accumulation", "1"]
    spec = spec_of(typed)
    source = find_source(spec)
    inputs = prepare_actor_inputs(
        read_call(select(spec.inputs, 0, 1).inputs[0]).micro_batch(), spec.actor, source, world
    )
    before = bytes_of_tensors()
    actor = open_backend(spec.actor, source, world)
    holding = BACKENDS[backend].predict_memory(spec.actor, True)
    for step in (True, False):
        actor.backward(compute_negated_mean(actor.forward(inputs, train_mode=True), inputs))
        with_gradients = bytes_of_tensors() - before
        actor.end_window(step=step)
    elements = count_parameters(source.config)
    # rotary tables and what a pass leaves are less than half a byte a parameter
    assert with_gradients / elements == pytest.approx(holding.total.bytes(gradients=True), abs=0.5)
    assert (bytes_of_tensors() - before) / elements == pytest.approx(holding.total.bytes(gradients=False), abs=0.5)
    actor.close()


def test_memory_on_a_cpu_is_bounded_by_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 5 kB\nMemAvailable: 800 kB\nHugePages_Total: 0\n")
    memory = read_host_memory(tmp_path, tmp_path)
    assert memory is not None
    assert (memory.free_bytes, memory.total_bytes, memory.is_shared) == (800 * 1024, 1000 * 1024, True)
    (tmp_path / "memory.max").write_text("600000\n")
    (tmp_path / "memory.current").write_text("200000\n")
    memory = read_host_memory(tmp_path, tmp_path)
    assert memory is not None
    assert (memory.free_bytes, memory.total_bytes) == (400000, 600000)
    (tmp_path / "memory.max").write_text("max\n")
    assert read_host_memory(tmp_path, tmp_path) == replace(memory, free_bytes=800 * 1024, total_bytes=1000 * 1024)
    assert read_host_memory(tmp_path / "none") is None


def test_a_real_replay_is_measured(one_world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_each_task(replay_here, monkeypatch)
    code, log = worst(tmp_path, "--num-layers", "1", "--measured", "2", "--max-inputs", "4")
    assert code == 0
    assert (len(log["measured"]), len(log["ranking"]), log["error"]) == (2, 4, None)
    assert log["rows"] == {"train": "packed"}
    assert all(ranking["peaks"]["backward"] > 100 * MIB for ranking in log["ranking"])


class OneRun:
    """In the place of a campaign: a log with these records."""

    def __init__(self, logs: Path, records: list[PassRecord], exit_code: int | None = 0) -> None:
        self.logs, self.records, self.exit_code = logs, records, exit_code

    def run(self, planned_run: PlannedRun) -> ProcessResult:
        self.planned_run = planned_run
        write_log(self.logs / "20261123-000000-replay", self.records, spec=planned_run.spec, exit_code=self.exit_code)
        output = self.logs / "output.txt"
        output.write_text("")
        return ProcessResult(exit_code=self.exit_code, seconds=1.0, output=output, logs=self.logs)


def make_repetition(
    index: int, rank_seconds: Sequence[float], rank_peaks: Sequence[int], **changes: Any
) -> list[PassRecord]:
    """A pass of as many ranks, each fed 10 tokens more than the one before."""
    return [
        record(
            index,
            rank=rank,
            fed_tokens=100 + 10 * rank,
            phases={
                "forward": PhaseCost(
                    seconds=seconds, allocated_bytes=None, peak_allocated_bytes=peak, peak_reserved_bytes=2 * peak
                )
            },
            **changes,
        )
        for rank, (seconds, peak) in enumerate(zip(rank_seconds, rank_peaks, strict=True))
    ]


def test_an_input_costs_the_least_seconds_and_the_highest_peak_of_the_repetitions_that_count(tmp_path: Path) -> None:
    repetitions = [
        make_repetition(0, [0.1, 0.1], [900, 900], first_uses=["library"]),
        make_repetition(1, [5.0, 4.0], [100, 300]),
        make_repetition(2, [2.0, 3.0], [400, 200]),  # 3 s, on the slower rank
        make_repetition(3, [6.0, 1.0], [200, 200]),
        # Of the second input no repetition counts, so its last one does.
        *(make_repetition(4 + number, [9.0 - number, 1.0], [10 + number] * 2, first_uses=["x"]) for number in range(4)),
        # Of the third one the first error is told, and the passes of both ranks without one.
        make_repetition(8, [1.0, 1.0], [50, 50], error="first", error_type="RuntimeError"),
        make_repetition(9, [1.0, 1.0], [50, 50], error="second", error_type="RuntimeError"),
    ]
    campaign = OneRun(tmp_path, [record for ranks in repetitions for record in ranks])
    measuring = measure(cast(Any, campaign), ReplaySpec(), [7, 4, 5], num_data_ranks=2)
    assert campaign.planned_run.spec.inputs.pick_inputs == "7,7,7,7,4,4,4,4,5,5,5,5"
    assert campaign.planned_run.num_processes == 2
    assert {place: cost.seconds["forward"] for place, cost in measuring.costs.items()} == {0: 3.0, 1: 6.0}
    assert {place: cost.peaks["forward"] for place, cost in measuring.costs.items()} == {0: 400.0, 1: 13.0}
    assert measuring.fed_tokens == {0: 110, 1: 110}
    assert measuring.failed == {2: "RuntimeError: first"}
    assert (measuring.overhead, measuring.ended) == (2.0, "")


def test_in_a_window_the_passes_that_end_it_are_measured(tmp_path: Path) -> None:
    # Of windows of many passes two are run: the second one holds the gradient of the first.
    repetitions = [make_repetition(index, [1.0 + index % 2], [100 * (1 + index % 2)]) for index in range(12)]
    campaign = OneRun(tmp_path, [record for ranks in repetitions for record in ranks])
    measuring = measure(cast(Any, campaign), ReplaySpec(), [3, 1], window=8)
    assert campaign.planned_run.spec.actor.grad_accumulation == 2
    assert campaign.planned_run.spec.inputs.pick_inputs == "3,3,3,3,3,3,1,1,1,1,1,1"
    assert {place: cost.seconds["forward"] for place, cost in measuring.costs.items()} == {0: 2.0, 1: 2.0}
    assert {place: cost.peaks["forward"] for place, cost in measuring.costs.items()} == {0: 200.0, 1: 200.0}


def test_a_pass_that_a_rank_did_not_finish_is_not_measured(tmp_path: Path) -> None:
    records = [*make_repetition(0, [1.0, 1.0], [10, 10]), *make_repetition(1, [2.0, 2.0], [10, 10])[:1]]
    measuring = measure(cast(Any, OneRun(tmp_path, records, exit_code=None)), ReplaySpec(), [0], num_data_ranks=2)
    assert {place: cost.seconds["forward"] for place, cost in measuring.costs.items()} == {0: 1.0}
    assert measuring.ended.startswith("not finished within 1 s")


@pytest.mark.parametrize(
    ("peak", "least", "num_ranks", "is_shared", "expected"),
    [
        # An allocator that reserves a quarter more than it gives out; predictions are a tenth off; 1,000 bytes free.
        (727.0, None, 1, False, Fits.YES),
        (728.0, None, 1, False, Fits.PERHAPS),
        (888.0, None, 1, False, Fits.PERHAPS),
        (889.0, None, 1, False, Fits.NO),
        (889.0, 880.0, 1, False, Fits.PERHAPS),
        (727.0, None, 2, False, Fits.YES),
        (363.0, None, 2, True, Fits.YES),
        (445.0, None, 2, True, Fits.NO),
        (950.0, 700.0, 1, False, Fits.NO),  # an input with that peak ran out here
    ],
)
def test_a_peak_fits_where_it_does_even_if_it_is_off_by_the_error(
    peak: float, least: float | None, num_ranks: int, is_shared: bool, expected: Fits
) -> None:
    memory = DeviceMemory(device="made", free_bytes=1000, total_bytes=4000, is_shared=is_shared)
    error = PredictionErrors(
        num_inputs=3, most_of_peak=0.1, median_of_peak=0.05, most_of_seconds=0.5, median_of_seconds=0.2
    )
    room = MemoryRoom(memory=memory, overhead=1.25, error=error, ran_out_at=950.0)
    assert room.fits(peak, num_ranks, least) is expected
    unknown = replace(room, memory=None)
    assert unknown.fits(peak, num_ranks, least) is (Fits.NO if peak >= 950 else Fits.UNKNOWN)
