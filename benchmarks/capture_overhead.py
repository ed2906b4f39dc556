"""Measure what recording costs a training step: steps of several kinds alternate in one process, with a control.

    python -m benchmarks capture_overhead --steps 50
    python -m benchmarks capture_overhead --steps 100 --model llama-3.1-8b --inputs inputs/my-run
    python -m benchmarks capture_overhead --read-loss step --steps 480 --model llama-3.1-8b --num-layers 8 --tokens 2048
    torchrun --nproc-per-node 2 -m benchmarks capture_overhead --read-loss step --sharded fsdp2 --keep FOLDER

A step is forward, backward, clipping and fused AdamW of a Hugging Face model in bf16 (fp32 on a CPU) on captured
micro-batches, the same ones for every kind. Prints ratios to the bare steps of the same round, the 99th percentiles,
the time that the job's thread spends in the hooks and in a bare copy of the same tensors, how often the host waits for
the device, and bytes per pass and those of torch.save.

With --read-loss it prints only what recording costs a job that reads its loss in each step, and so begins each step
with an idle device: ratios, the time until the first layer runs, in which the device is idle, the device's time from
there to the end of the step, where the job's thread spent the time, and what the writer's took of a processor. Kinds
alternate in blocks of --block steps, each of which is a recording of its own: its first steps cost more than later
ones. Half a percent shows with ten blocks.

--sharded makes it a job of several ranks, under FSDP2 (fp32 masters, bf16 compute) or DeepSpeed's ZeRO 3 (bf16), each
rank with batches of its own; rank 0 prints. --keep records its first step to FOLDER, from weights that `replay
--random-weights` makes again.
"""

import argparse
import io
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from actor_init.model import build_on_meta, find_model, materialise
from actor_init.spec import ActorSpec, ParallelSpec
from actor_init.world import World
from benchmarks.harness import Answers, Column, Sample, alternate, make_parser, table
from capture import Recorder, capture_files, read_actor_config, read_micro_batch, recording

STEPS_A_ROUND = 4
THROTTLE = 100
PARTS = ("forward", "backward", "clipping and optimizer", "reading the loss")
Kind = Callable[[], AbstractContextManager[Recorder | None]]


class Job:
    def __init__(self, given: argparse.Namespace) -> None:
        on_cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if on_cuda else "cpu")
        spec = ActorSpec(model=given.model, num_layers=given.num_layers, random_weights=True)
        source = find_model(spec, read_actor_config(given.inputs), str(given.inputs))
        half = on_cuda and given.sharded != "fsdp2"
        model = build_on_meta(source.config, attention="sdpa", dtype=torch.bfloat16 if half else torch.float32)
        materialise(model, source.weights, self.device)
        self.model: Any = self.wrapped(model)
        self.optimizer = self.make_optimizer()
        torch.manual_seed(int(os.environ.get("RANK", "0")))
        vocabulary = source.config.vocab_size
        self.batches = list(self._captured(given) if given.tokens is None else self._drawn(given, vocabulary))
        # Of the device's time from the first layer on: before that it waits for the hooks of the job's thread.
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_cuda else []
        first_layer = next(module for module in self.model.modules() if isinstance(module, nn.Embedding))
        first_layer.register_forward_pre_hook(self.begin_first_layer)
        self.first_layer_began = 0.0

    def wrapped(self, model: Any) -> Any:
        return model

    def make_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip_and_step(self, recorder: Recorder | None = None) -> None:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if recorder is not None:
            recorder.note(grad_norm=norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _captured(self, given: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
        captured = [batch for path in capture_files(given.inputs) if (batch := read_micro_batch(path)).trains]
        for batch in captured[: given.num_batches]:
            yield {
                "input_ids": batch.sequences_BS.to(self.device),
                "attention_mask": batch.attention_mask_BS.long().to(self.device),
                "labels": batch.sequences_BS.masked_fill(~batch.attention_mask_BS, -100).to(self.device),
            }

    def _drawn(self, given: argparse.Namespace, vocabulary: int) -> Iterator[dict[str, Tensor]]:
        for number in range(given.num_batches):
            num_tokens = given.tokens[number % len(given.tokens)]
            ids_BS = torch.randint(vocabulary, (given.rows, num_tokens), device=self.device)
            yield {"input_ids": ids_BS, "attention_mask": torch.ones_like(ids_BS), "labels": ids_BS.clone()}

    def step(self, number: int, recorder: Recorder | None) -> float:
        self.wait()
        began = time.perf_counter()
        self.backward(self.model(**self.batches[number % len(self.batches)], use_cache=False).loss)
        self.clip_and_step(recorder)
        self.wait()
        return time.perf_counter() - began

    def parts_of_step(self, number: int, *, reads_before_backward: bool) -> list[float]:
        """Do a step that reads its loss, as loops do; return the seconds of PARTS, and of the device's idling."""
        times = [time.perf_counter()]
        loss = self.model(**self.batches[number % len(self.batches)], use_cache=False).loss
        times.append(time.perf_counter())
        if reads_before_backward:
            loss.item()
            read = time.perf_counter() - times[-1]
        self.backward(loss)
        times.append(time.perf_counter())
        self.clip_and_step()
        self.mark(1)
        times.append(time.perf_counter())
        if reads_before_backward:
            self.wait()
        else:
            loss.item()
        times.append(time.perf_counter())
        parts = [end - begin for begin, end in pairwise(times)]
        if reads_before_backward:
            parts[1] -= read
            parts[3] += read
        return [*parts, self.first_layer_began - times[0]]

    def begin_first_layer(self, module: nn.Module, args: object) -> None:
        self.first_layer_began = time.perf_counter()
        self.mark(0)

    def mark(self, number: int) -> None:
        if self.events:
            self.events[number].record()

    def read_device_seconds(self) -> dict[str, float]:
        """Return the device's time of the latest step, which has ended; nothing on a CPU."""
        return {"device": self.events[0].elapsed_time(self.events[1]) / 1e3} if self.events else {}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class FSDP2Job(Job):
    def wrapped(self, model: Any) -> Any:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in model.model.layers:
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)


class ZeRO3Job(Job):
    def wrapped(self, model: Any) -> Any:
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": 1.0,
                "zero_optimization": {"stage": 3},
                "bf16": {"enabled": self.device.type == "cuda"},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True, "fused": True}},
            },
        )
        return engine

    def make_optimizer(self) -> Any:
        return self.model.optimizer

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def clip_and_step(self, recorder: Recorder | None = None) -> None:
        self.model.step()


JOBS = {None: Job, "fsdp2": FSDP2Job, "zero3": ZeRO3Job}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=50, help="of each kind; 0: nothing is measured")
    parser.add_argument("--peer-steps", type=int, default=20, help="of torch.save, torch.profiler and a slow disk")
    parser.add_argument("--inputs", type=Path, default=Path("inputs/sample"))
    parser.add_argument("--model", help="a preset, model folder or config.json. Default: the config beside the inputs")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--num-batches", type=int, default=8, help="micro-batches to alternate between")
    parser.add_argument("--tokens", type=int, nargs="+", help="draw micro-batches of so many tokens a row, in turn")
    parser.add_argument("--rows", type=int, default=1, help="of a micro-batch that is drawn")
    parser.add_argument("--read-loss", choices=("forward", "step"), help="a job that reads its loss after either")
    parser.add_argument("--block", type=int, default=48, help="steps of one kind in a row, with --read-loss")
    parser.add_argument("--sharded", choices=[name for name in JOBS if name], help="over the ranks of torchrun")
    parser.add_argument("--keep", type=Path, help="record the first step to this folder")
    given = parser.parse_args()
    if given.sharded and not given.read_loss:
        parser.error("--sharded needs --read-loss: the other measurements are of one process")
    with World.from_env(ParallelSpec()) if given.sharded else nullcontext():
        measure(given)
    return 0


def measure(given: argparse.Namespace) -> None:
    job = JOBS[given.sharded](given)
    if given.keep:
        with recording(job.model, given.keep, reproduce=True):
            job.step(0, None)
    if not given.steps:
        return
    for number in range(2 * given.num_batches):  # kernels are selected for each length
        job.step(number, None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds: dict[str, Kind] = {
            "every pass a file": lambda: recording(job.model, folder / "files"),
            "every pass a file, to be judged": lambda: recording(job.model, folder / "judged", reproduce=True),
            "flight recorder of 64": lambda: recording(job.model, folder / "flight", flight_recorder=64),
        }
        bare: dict[str, Kind] = {"bare": nullcontext, "bare again": nullcontext}
        if given.read_loss is not None:
            compare_blocks(job, given, bare | kinds)
            return
        compare_hook(job, folder / "hook")
        count_waits(job, folder / "waits")
        compare_bytes(job, folder / "bytes")
        compare_steps(job, given, "recorded", given.steps, bare | kinds)
        compare_steps(
            job,
            given,
            "peers",
            given.peer_steps,
            bare
            | {
                "disk slowed down": lambda: on_slow_disk(job, folder / "slow"),
                "torch.save in a hook": lambda: saving(job, folder / "saved.pt"),
                "torch.profiler": profiling,
            },
        )


def compare_steps(job: Job, given: argparse.Namespace, title: str, num_steps: int, kinds: dict[str, Kind]) -> None:
    """Time steps: every round has a few steps of each kind, and a first one that is not counted."""

    def steps(kind: Kind, number: int) -> list[Sample]:
        with kind() as recorder:
            job.step(number * STEPS_A_ROUND, recorder)
            return [{"s": job.step(number * STEPS_A_ROUND + i, recorder)} for i in range(STEPS_A_ROUND)]

    answers = Answers(given, f"capture_overhead {title}")
    series = {name: partial(steps, kind) for name, kind in kinds.items()}
    figures = alternate(series, answers, rounds=-(-num_steps // STEPS_A_ROUND))
    columns = (
        Column("median ms", "s", ".2f", 1e3),
        Column("of bare", "s", ".4f", of="bare"),
        Column("p99 ms", "s", ".2f", 1e3, reduce=p99),
    )
    print(
        f"\n{answers.machine}: {len(figures['bare'])} steps of each kind\n\n{table('kind of step', figures, columns)}"
    )


def compare_blocks(job: Job, given: argparse.Namespace, kinds: dict[str, Kind]) -> None:
    """Time steps that read their loss, in blocks of one kind after the other; all are counted."""

    num_steps = min(given.block, given.steps)

    def block(kind: Kind, number: int) -> list[Sample]:
        job.wait()
        samples: list[Sample] = []
        with kind():
            began = time.process_time()
            for i in range(num_steps):
                step = job.parts_of_step(number * num_steps + i, reads_before_backward=given.read_loss == "forward")
                *parts, idle = step
                sample = {"s": sum(parts), "idle": idle, **dict(zip(PARTS, parts, strict=True))}
                samples.append(sample | job.read_device_seconds())
            of_processor, of_writer = time.process_time() - began, writer_seconds()
        shares = {"processor": of_processor / num_steps, "writer": of_writer / num_steps}
        return [{**sample, **shares} for sample in samples]

    answers = Answers(given, "capture_overhead blocks", writes=os.environ.get("RANK", "0") == "0")
    series = {name: partial(block, kind) for name, kind in kinds.items()}
    figures = alternate(series, answers, rounds=-(-given.steps // num_steps), warmup=0)
    if int(os.environ.get("RANK", "0")):
        return
    columns = (
        Column("median ms", "s", ".2f", 1e3),
        Column("of bare", "s", ".4f", of="bare"),
        Column("mean ms", "s", ".2f", 1e3, reduce=mean),
        Column("ms to first layer", "idle", ".3f", 1e3),
        Column("device ms", "device", ".2f", 1e3),
        Column("processor ms", "processor", ".2f", 1e3, reduce=mean),
        Column("of the writer", "writer", ".2f", 1e3, reduce=mean),
        *(Column(part, part, ".2f", 1e3) for part in PARTS),
    )
    print(f"\n{answers.machine}: {len(figures['bare'])} steps of each kind that read their loss")
    print(table("kind of step", figures, columns), flush=True)


def writer_seconds() -> float:
    """Return what the writers' threads have taken of a processor."""
    idents = [thread.ident for thread in threading.enumerate() if thread.name == "capture-writer"]
    clocks = [time.pthread_getcpuclockid(ident) for ident in idents if ident is not None]
    return sum(map(time.clock_gettime, clocks))


def p99(seconds: Sequence[float]) -> float:
    return quantiles(seconds, n=100, method="inclusive")[98]


@contextmanager
def on_slow_disk(job: Job, folder: Path) -> Iterator[Recorder]:
    """Make every flush to the disk take 100 times as long, with a short queue of waiting passes."""
    real = os.fsync

    def slow(descriptor: int) -> None:
        began = time.perf_counter()
        real(descriptor)
        time.sleep((THROTTLE - 1) * (time.perf_counter() - began))

    with ExitStack() as stack:
        stack.callback(setattr, os, "fsync", real)
        vars(os)["fsync"] = slow
        recorder = stack.enter_context(recording(job.model, folder, max_queued=2))
        yield recorder
    print(f"disk slowed down: {recorder.num_dropped} of {recorder.num_seen} passes dropped", flush=True)


@contextmanager
def saving(job: Job, path: Path) -> Iterator[None]:
    def save(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        torch.save({name: value for name, value in kwargs.items() if isinstance(value, Tensor)}, path)

    with job.model.register_forward_pre_hook(save, with_kwargs=True):
        yield None


@contextmanager
def profiling() -> Iterator[None]:
    with torch.profiler.profile():
        yield None


def compare_hook(job: Job, folder: Path) -> None:
    """Time the hooks alone, called as the model would call them."""
    batch = job.batches[0]

    def copy() -> Any:
        pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in batch.values()]
        return [host.copy_(t, non_blocking=True) for host, t in zip(pinned, batch.values(), strict=True)]

    print(f"a bare copy of the same tensors takes {microseconds(job, copy):.0f} us of the job's thread")
    for name, num_passes in (("every pass a file", None), ("flight recorder of 64", 64)):
        with recording(job.model, folder / name, flight_recorder=num_passes, max_queued=10_000) as recorder:

            def hook(recorder: Recorder = recorder) -> None:
                recorder._forward_hooks.before_forward(job.model, (), batch)
                recorder._forward_hooks.after_forward(job.model, (), None)

            print(f"the hook, {name}: {microseconds(job, hook):.0f} us", flush=True)
    output = job.model(**batch, use_cache=False)
    output.loss.backward()
    parameters, norm = list(job.model.parameters()), torch.ones((), device=job.device)
    with recording(job.model, folder / "judged", reproduce=True, max_queued=10_000) as recorder:
        parts = {
            "a pass begins": lambda: recorder._forward_hooks.before_forward(job.model, (), batch),
            "a pass ends": lambda: recorder._forward_hooks.after_forward(job.model, (), output),
            "clipping": lambda: recorder.before_clipping(parameters, 1.0, norm),
            "the optimizer's step": lambda: recorder.before_step(job.optimizer),
        }
        taken: dict[str, list[float]] = {name: [] for name in parts}
        for _ in range(100):
            for name, part in parts.items():
                job.wait()
                began = time.perf_counter()
                part()
                taken[name].append(time.perf_counter() - began)
            time.sleep(0.005)  # stands for the step, during which the writer works
    print(f"the hooks of a step that is to be judged, {len(parameters)} parameters:")
    for name, seconds in taken.items():
        print(f"    {name}: {median(seconds) * 1e6:.0f} us, the first {seconds[0] * 1e6:.0f}", flush=True)
    job.optimizer.zero_grad()


def microseconds(job: Job, call: Callable[[], object], num_calls: int = 100) -> float:
    taken = []
    for _ in range(num_calls):
        job.wait()
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
        time.sleep(0.005)  # stands for the step, during which the writer works
    return median(taken) * 1e6


def count_waits(job: Job, folder: Path) -> None:
    """Count the operations at which the host waits for the device, with torch's own warnings."""
    if job.device.type == "cpu":
        return
    counts = {}
    kinds: dict[str, Kind] = {
        "bare": nullcontext,
        "recorded": lambda: recording(job.model, folder),
        "judged": lambda: recording(job.model, folder / "judged", reproduce=True),
    }
    for name, kind in kinds.items():
        with kind() as recorder, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            job.wait()
            torch.cuda.set_sync_debug_mode("warn")
            loss = job.model(**job.batches[0], use_cache=False).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
            if recorder is not None:
                recorder.note(grad_norm=norm)
                if name == "judged":
                    recorder.before_step(job.optimizer)
            torch.cuda.set_sync_debug_mode("default")
        job.optimizer.zero_grad()
        counts[name] = sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
    print(
        f"the host waits for the device {counts['bare']} times in a bare step, {counts['recorded']} in a recorded one, "
        f"{counts['judged']} in one that is to be judged"
    )


def compare_bytes(job: Job, folder: Path) -> None:
    saved = io.BytesIO()
    torch.save({name: tensor.cpu() for name, tensor in job.batches[0].items()}, saved)
    for name, reproduce in (("files", False), ("with random states", True)):
        with recording(job.model, folder / name, reproduce=reproduce):
            job.step(0, None)
        [path] = capture_files(folder / name)
        size = path.stat().st_size
        print(f"{size:,} bytes a pass, {name}; torch.save {saved.tell():,}: {size / saved.tell():.2f}", flush=True)
