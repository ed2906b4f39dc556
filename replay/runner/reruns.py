"""Run a pass once more, after all others and outside the log: under the profiler, or with its allocations' history.

    results = Reruns(...).run_requested(records)

A pass that failed on one of several ranks cannot be run again: the other ranks wait in its collectives. So on several
ranks `replay` keeps the allocation history of each pass, and a rank that runs out of memory writes what held its memory
before the run ends.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from actor_init.model import ModelSource
from actor_init.probe.head_probe import explain_whole_head, probe_head
from actor_init.spec import ActorSpec, Head
from actor_init.world import World
from replay.options.option_parsing import describe_error
from replay.options.resolved import ResolvedReplay
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import Pairs
from replay.profiling.profile_records import MemoryPeak, MemoryProfile, Profile
from replay.profiling.text import build_holder_table, list_memory_remarks
from replay.runlog.records import PassRecord, is_out_of_memory
from replay.runlog.summary import find_peak_bytes, summarize
from replay.runner.meter import Meter
from replay.runner.observers import AllocationHistoryMarker
from replay.runner.out_of_memory import OutOfMemory, OutOfMemoryAnalysis
from replay.runner.replayer import Replayer
from replay.runner.run_pass import PassObserver
from replay.verdict.judge import PassEvidence
from replay.watch.progress import RankPhase
from replay.watch.watcher import Watch

if TYPE_CHECKING:
    from replay.profiling.peak_holders import AllocationHistory


# On a CPU passes count as equal from this share of the highest peak on: what a pass frees stays resident, and hides how
# much later ones need.
EQUAL_PEAK_SHARE = 0.99

ResultT = TypeVar("ResultT", Profile, MemoryPeak)


@dataclass(frozen=True, kw_only=True, slots=True)
class RerunResults:
    """What passes that ran once more have shown.

    profile        of --profile
    memory         of --memory-snapshot
    out_of_memory  what is known of a pass that ran out of memory
    missing_lines  why a result that was asked for is not there
    """

    profile: Profile | None = None
    memory: MemoryPeak | None = None
    out_of_memory: OutOfMemory | None = None
    missing_lines: Pairs = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reruns:
    """What it takes to run passes once more. All ranks must call its methods, in order."""

    spec: ResolvedReplay
    world: World
    source: ModelSource
    inputs: Sequence[Path]
    folder: Path
    watch: Watch
    meter: Meter
    replayer: Replayer

    def run_requested(self, records: Sequence[PassRecord]) -> RerunResults:
        """Do what --profile and --memory-snapshot ask for, given the records of all passes."""
        profile: Profile | None = None
        memory: MemoryPeak | None = None
        missing_lines: Pairs = []
        if self.spec.measure.profile:
            profile, reason = self._contain_errors(lambda: self._profile_slowest_pass(records))
            missing_lines += [("profiled", reason)] if profile is None else []
        if self.spec.measure.memory_snapshot:
            memory, reason = self._contain_errors(lambda: self._snapshot_highest_peak(records))
            missing_lines += [("peak held", reason)] if memory is None else []
        out_of_memory = self.analyze_out_of_memory(records)
        # The prediction for the pass that ran out says already what other options would save.
        if memory is not None and out_of_memory is not None and out_of_memory.needed is not None:
            memory = replace(memory, ranks=[replace(rank, savings=[]) for rank in memory.ranks])
        return RerunResults(profile=profile, memory=memory, out_of_memory=out_of_memory, missing_lines=missing_lines)

    def _contain_errors(self, rerun: Callable[[], tuple[ResultT | None, str]]) -> tuple[ResultT | None, str]:
        """Return what `rerun` returns. In a single process its error becomes the reason, and the report stays whole."""
        try:
            return rerun()
        except Exception as error:
            # On several ranks the others wait for this one in a collective, so the run has to end.
            if self.world.world_size > 1:
                raise
            return None, f"unknown: {describe_error(error)}"

    def analyze_out_of_memory(self, records: Sequence[PassRecord]) -> OutOfMemory | None:
        """Return what is known of a pass that ran out of memory on this rank, if one did."""
        own_records = [record for record in records if record.rank == self.world.rank]
        if not any(record.ran_out_of_memory for record in own_records):
            return None
        head = self.source.head
        analysis = OutOfMemoryAnalysis(
            actor=self._actor_to_advise,
            measure=self.spec.measure,
            has_whole_logits=head is None or head.is_whole,
            world=self.world,
            config=self.source.config,
            inputs=self.inputs,
            has_adapter=self.source.adapter is not None,
        )
        return analysis.describe_first_failure(own_records, self.replayer.reopenable_actor.backend.model)

    @property
    def _actor_to_advise(self) -> ActorSpec:
        """The options to advise on: no other head where something needs whole logits."""
        actor, source = self.spec.actor, self.source
        if actor.head is not Head.WHOLE:
            return actor
        needs_whole = self.spec.why_whole_logits or explain_whole_head(actor, source)
        can_chunk = not needs_whole and not probe_head(source.config, self.world.device).is_whole
        return actor if can_chunk else replace(actor, head=Head.AUTO)

    def _profile_slowest_pass(self, records: Sequence[PassRecord]) -> tuple[Profile | None, str]:
        """Profile the slowest pass that counts, else the last that finished; or say why there is none."""
        from replay.profiling.profiler import profile_pass

        slowest = summarize(records).slowest
        index = slowest.index if slowest is not None else max(_list_finished_indices(records), default=None)
        if index is None:
            return None, "nothing: no pass finished"
        errors: list[Exception] = []

        def run() -> bool:
            _, error = self._replay_again(index)
            errors.extend([error] if error is not None else [])
            return error is None

        self.restore_window(records, index)
        device = self.world.device
        file = self.folder / f"rank{self.world.rank}.profile.json.gz"
        rank = profile_pass(run, self.replayer.reopenable_actor.backend.model, self.spec.actor, device, file)
        if errors:
            self._stop_other_ranks(errors[0], index)
            return None, f"nothing: pass {index + 1} failed when it was run once more: {describe_error(errors[0])}"
        assert rank is not None
        profile = Profile(
            index=index, source=self.inputs[index].name, device=device.type, ranks=self.world.gather(rank)
        )
        return profile, ""

    def _snapshot_highest_peak(self, records: Sequence[PassRecord]) -> tuple[MemoryPeak | None, str]:
        """Run the pass that ran out of memory, else that with the highest peak, with the history of its allocations."""
        if (index := find_highest_peak(records, self.world.device.type)) is None:
            return None, "unknown: no pass finished"
        source = self.inputs[index].name
        self.restore_window(records, index)
        finished_before = [
            record for record in records if (record.index, record.rank, record.error) == (index, self.world.rank, None)
        ]
        rank, _, error = self._replay_with_history(
            index,
            source,
            lambda observers: self._replay_again(index, observers),
            is_rerun=True,
            peak_before=find_peak_bytes(finished_before[0]) if finished_before else None,
        )
        assert rank is not None
        if error is not None:
            self._stop_other_ranks(error, index)
        return MemoryPeak(index=index, source=source, ranks=self.world.gather(rank)), ""

    def replay_first_time(self, index: int, path: Path) -> tuple[PassEvidence, Exception | None]:
        """Run a pass for the first time; on several ranks under --memory-snapshot with its allocation history."""
        if not self.spec.measure.memory_snapshot or self.world.world_size == 1:
            return self.replayer.replay(index, path)
        _, own_pass, error = self._replay_with_history(
            index, path.name, lambda observers: self.replayer.replay(index, path, observers), is_rerun=False
        )
        return own_pass, error

    def _replay_with_history(
        self,
        index: int,
        source: str,
        replay: Callable[[Sequence[PassObserver]], tuple[PassEvidence, Exception | None]],
        *,
        is_rerun: bool,
        peak_before: int | None = None,
    ) -> tuple[MemoryProfile | None, PassEvidence, Exception | None]:
        """Call `replay` while allocations are recorded. A rank of several that ran out says what held its memory.

        replay       runs the pass under the observers that it is given
        is_rerun     the pass ran before, so that its history is wanted even if it does not run out of memory
        peak_before  the peak of this rank when the pass ran before; None: it did not, or it failed

        Returns what held the memory of this rank at the peak, None in a first run that did not run out, and what
        `replay` returned.
        """
        from replay.profiling.peak_holders import find_peak_holders

        results: list[tuple[PassEvidence, Exception | None]] = []
        is_single_process = self.world.world_size == 1
        suffix = "pickle" if self.world.device.type == "cuda" else "json.gz"
        with ExitStack() as stack:

            def run(history: "AllocationHistory") -> Exception | None:
                own_pass, error = replay(
                    [AllocationHistoryMarker(history, self.replayer.reopenable_actor.backend.model)]
                )
                results.append((own_pass, error))
                record = own_pass.record
                history.num_tokens = (
                    record.input.fed_tokens or record.input.real_tokens
                ) // self.spec.actor.parallel.ring
                history.trains = record.input.trains is not False
                history.peak = find_peak_bytes(record) or self.meter.read_peak_bytes()
                # Another rank's failure must not end this rank before it has printed what held its memory.
                if is_out_of_memory(error) and not is_single_process:
                    stack.enter_context(self.watch.postpone_shutdown())
                return error

            rank = find_peak_holders(
                run,
                self.replayer.reopenable_actor.backend.model,
                self.source.config,
                self._actor_to_advise,
                self.world.device,
                self.folder / f"rank{self.world.rank}.memory.{suffix}",
                rank=self.world.rank,
                resident=self.meter.read_held_bytes,
                before=peak_before,
                only_if_it_ran_out=not is_rerun,
            )
            if rank is not None and rank.ran_out is not None and not is_single_process:
                self._print_memory_holders(MemoryPeak(index=index, source=source, ranks=[rank], is_once_more=is_rerun))
        return rank, *results[0]

    def print_out_of_memory(self, records: Sequence[PassRecord]) -> None:
        """Say what this rank's pass would have needed, if it ran out of memory: the run ends without a report."""
        if (out_of_memory := self.analyze_out_of_memory(records)) is not None:
            with self.watch.postpone_shutdown():
                print_pairs(
                    open_console(sys.stderr), out_of_memory.lines(has_snapshot=self.spec.measure.memory_snapshot)
                )

    def _print_memory_holders(self, memory: MemoryPeak) -> None:
        """Print what held the memory of this rank, and write it into the log folder: the run ends without a report."""
        with (self.folder / f"rank{self.world.rank}.memory.txt").open("w", encoding="utf-8") as file:
            for out in (open_console(file), open_console(sys.stderr)):
                print_line(out, f"rank {self.world.rank} ran out of memory in pass {memory.index + 1}")
                print_table(out, build_holder_table(memory))
                print_pairs(out, list_memory_remarks(memory))

    def restore_window(self, records: Sequence[PassRecord], index: int) -> None:
        """Bring the accumulation window, with its gradient, to where it was before pass `index` ran first."""
        self.replayer.reopen_after_failure()
        if not self.spec.measure.backward or self.spec.actor.resolved_grad_accumulation == 1:
            return
        trained_indices = [
            record.index
            for record in records
            if record.rank == self.world.rank and record.input.trains and record.error is None
        ]
        # First the window that the run left open is filled and ends, with any pass; then the passes follow that the
        # window of pass `index` had before it.
        while self.replayer.window.num_passes_ended and self._fill_window(trained_indices[-1]):
            pass
        ends = [record.index for record in records if record.result.grad_norm is not None and record.index < index]
        begin = next((record.window for record in records if record.index == index and record.window is not None), 0)
        begin = max(begin, max(ends, default=-1) + 1)
        for trained_index in trained_indices:
            if begin <= trained_index < index:
                self._fill_window(trained_index)

    def _fill_window(self, index: int) -> bool:
        """Run a pass to have its gradient in the window. Return whether it succeeded."""
        _, error = self._replay_again(index)
        if error is not None:
            self._stop_other_ranks(error, index)
            self.replayer.reopen_after_failure()
        return error is None

    def _replay_again(
        self, index: int, observers: Sequence[PassObserver] = ()
    ) -> tuple[PassEvidence, Exception | None]:
        self.watch.tracker.enter_phase_after_passes(len(self.inputs), RankPhase.PROFILING)
        return self.replayer.replay(len(self.inputs), self.inputs[index], observers)

    def _stop_other_ranks(self, error: Exception, index: int) -> None:
        """End the run if there are several ranks: the others wait in the pass that failed on this one."""
        if self.world.world_size > 1:
            text = f"rank {self.world.rank}: pass {index + 1} failed when it was run once more, behind all passes"
            print_pairs(open_console(sys.stderr), [("once more", f"{text}, whose records are in {self.folder}")])
            self.watch.stop_all(error)


def find_highest_peak(records: Sequence[PassRecord], device_type: str) -> int | None:
    """Return the pass that ran out of memory, else that with the highest peak; of equal ones on a CPU the largest."""
    failed_indices = [record.index for record in records if record.ran_out_of_memory]
    finished = [record for record in records if record.error is None]
    if failed_indices or not finished:
        return failed_indices[0] if failed_indices else None
    counted_peak, highest = summarize(records).highest_peak, max(finished, key=find_peak_bytes)
    if counted_peak is None:
        index, highest_bytes = highest.index, float(find_peak_bytes(highest))
    else:
        index, highest_bytes = counted_peak.index, counted_peak.value
    if device_type != "cpu":
        return index
    equal_records = [record for record in finished if find_peak_bytes(record) >= EQUAL_PEAK_SHARE * highest_bytes]
    return max(equal_records, key=lambda record: record.input.fed_tokens).index


def _list_finished_indices(records: Sequence[PassRecord]) -> list[int]:
    return [record.index for record in records if record.error is None]
