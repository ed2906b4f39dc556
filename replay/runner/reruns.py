"""Run a pass once more, behind all others and outside the log: under the profiler, or with its allocations' history.

    found = Reruns(...).found(records)

A pass that failed on one of several ranks cannot be run again: the others stand in it. So on several ranks
`replay` keeps the history of each pass, and a rank that ran out of memory writes what held it before the run ends.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from actor_init.model import ModelSource
from actor_init.spec import ActorSpec
from actor_init.world import World
from replay.options.option_parsing import in_flags
from replay.options.resolved import ResolvedReplay
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import Pairs, one_line
from replay.profiling.shares import MemoryPeak, MemoryProfile, Profile
from replay.profiling.text import holder_table, memory_remarks
from replay.runlog.records import PassRecord, is_out_of_memory
from replay.runlog.summary import peak_bytes, summarize
from replay.runner.meter import Meter
from replay.runner.observers import HistoryMarker
from replay.runner.out_of_memory import Known, OutOfMemory
from replay.runner.replayer import Replayer
from replay.runner.run_pass import PassObserver
from replay.verdict.judge import Pass
from replay.watch.progress import Phase
from replay.watch.watcher import Watch

if TYPE_CHECKING:
    from replay.profiling.memory import History


SAME_PEAK = 0.99  # of the highest, on a CPU: what a pass frees stays resident, and hides how much later ones need

FoundT = TypeVar("FoundT", Profile, MemoryPeak)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What passes that ran once more have shown, and why one that was asked for is not there."""

    profile: Profile | None = None  # of --profile
    memory: MemoryPeak | None = None  # of --memory-snapshot
    ran_out: OutOfMemory | None = None
    missing: Pairs = field(default_factory=list)


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

    def found(self, records: Sequence[PassRecord]) -> Found:
        """Do what --profile and --memory-snapshot ask for, given the records of all passes."""
        profile: Profile | None = None
        memory: MemoryPeak | None = None
        missing: Pairs = []
        if self.spec.measure.profile:
            profile, why = self._kept_apart(lambda: self._profiled(records))
            missing += [("profiled", why)] if profile is None else []
        if self.spec.measure.memory_snapshot:
            memory, why = self._kept_apart(lambda: self._memory(records))
            missing += [("peak held", why)] if memory is None else []
        ran_out = self.known_of(records)
        if memory is not None and ran_out is not None and ran_out.needed is not None:
            memory = replace(memory, ranks=[replace(one, savings=[]) for one in memory.ranks])
        return Found(profile=profile, memory=memory, ran_out=ran_out, missing=missing)

    def _kept_apart(self, find: Callable[[], tuple[FoundT | None, str]]) -> tuple[FoundT | None, str]:
        """Call `find`. In a process alone an error of its own is said and leaves the run's report as it is."""
        try:
            return find()
        except Exception as error:
            if self.world.world_size > 1:
                raise  # the other ranks wait for this one
            return None, f"unknown: {_named(error)}"

    def known_of(self, records: Sequence[PassRecord]) -> OutOfMemory | None:
        """Return what is known of a pass that ran out of memory on this rank, if one did."""
        own = [record for record in records if record.rank == self.world.rank]
        head = self.source.head
        known = Known(
            actor=self._advised,
            measure=self.spec.measure,
            has_whole_logits=head is None or bool(head.why_whole),
            world=self.world,
            config=self.source.config,
            inputs=self.inputs,
            has_adapter=self.source.adapter is not None,
        )
        return known.of(own, self.replayer.actor.backend.model)

    @property
    def _advised(self) -> ActorSpec:
        """The options to advise on: not --whole-logits where something else needs whole logits."""
        actor = self.spec.actor
        return replace(actor, whole_logits=False) if self.spec.wants_logits else actor

    def _profiled(self, records: Sequence[PassRecord]) -> tuple[Profile | None, str]:
        """Profile the slowest pass that counts, else the last that finished; or say why there is none."""
        from replay.profiling.profiler import profiled

        place = summarize(records).slowest
        index = place.index if place is not None else max(_finished(records), default=None)
        if index is None:
            return None, "nothing: no pass finished"
        errors: list[Exception] = []

        def run() -> bool:
            _, error = self._once_more(index)
            errors.extend([error] if error is not None else [])
            return error is None

        self._into_window(records, index)
        device = self.world.device
        file = self.folder / f"rank{self.world.rank}.profile.json.gz"
        rank = profiled(run, self.replayer.actor.backend.model, self.spec.actor, device, file)
        if errors:
            self._stop_ranks(errors[0], index)
            return None, f"nothing: pass {index + 1} failed when it was run once more: {_named(errors[0])}"
        assert rank is not None
        profile = Profile(
            index=index, source=self.inputs[index].name, device=device.type, ranks=self.world.gather(rank)
        )
        return profile, ""

    def _memory(self, records: Sequence[PassRecord]) -> tuple[MemoryPeak | None, str]:
        """Run the pass that ran out of memory, else that with the highest peak, with the history of its allocations."""
        if (index := _with_highest_peak(records, self.world.device.type)) is None:
            return None, "unknown: no pass finished"
        source = self.inputs[index].name
        self._into_window(records, index)
        own = [one for one in records if (one.index, one.rank, one.error) == (index, self.world.rank, None)]
        rank, _, error = self._with_history(
            index,
            source,
            lambda observers: self._once_more(index, observers),
            is_once_more=True,
            before=peak_bytes(own[0]) if own else None,
        )
        assert rank is not None
        if error is not None:
            self._stop_ranks(error, index)
        return MemoryPeak(index=index, source=source, ranks=self.world.gather(rank)), ""

    def watched(self, index: int, path: Path) -> tuple[Pass, Exception | None]:
        """Run a pass for the first time; on several ranks under --memory-snapshot with its history."""
        if not self.spec.measure.memory_snapshot or self.world.world_size == 1:
            return self.replayer.replay(index, path)
        _, own, error = self._with_history(
            index, path.name, lambda observers: self.replayer.replay(index, path, observers), is_once_more=False
        )
        return own, error

    def _with_history(
        self,
        index: int,
        source: str,
        replay: Callable[[Sequence[PassObserver]], tuple[Pass, Exception | None]],
        *,
        is_once_more: bool,
        before: int | None = None,
    ) -> tuple[MemoryProfile | None, Pass, Exception | None]:
        """Call `replay` with the history on. A rank of several that ran out says what held its memory."""
        from replay.profiling.memory import held_at_peak

        done: list[tuple[Pass, Exception | None]] = []
        is_alone = self.world.world_size == 1
        ending = "pickle" if self.world.device.type == "cuda" else "json.gz"
        with ExitStack() as unbroken:

            def run(history: "History") -> Exception | None:
                own, error = replay([HistoryMarker(history, self.replayer.actor.backend.model)])
                done.append((own, error))
                record = own.record
                history.num_tokens = (
                    record.input.fed_tokens or record.input.real_tokens
                ) // self.spec.actor.parallel.ring
                history.trains = record.input.trains is not False
                history.peak = peak_bytes(record) or self.meter.peak_bytes()
                if is_out_of_memory(error) and not is_alone:
                    unbroken.enter_context(self.watch.unbroken())
                return error

            rank = held_at_peak(
                run,
                self.replayer.actor.backend.model,
                self.source.config,
                self._advised,
                self.world.device,
                self.folder / f"rank{self.world.rank}.memory.{ending}",
                rank=self.world.rank,
                resident=self.meter.held_bytes,
                before=before,
                only_if_it_ran_out=not is_once_more,
            )
            if rank is not None and rank.ran_out is not None and not is_alone:
                self._tell(MemoryPeak(index=index, source=source, ranks=[rank], is_once_more=is_once_more))
        return rank, *done[0]

    def tell_ran_out(self, records: Sequence[PassRecord]) -> None:
        """Say what this rank's pass would have needed, if it ran out of memory: the run ends without a report."""
        if (ran_out := self.known_of(records)) is not None:
            with self.watch.unbroken():
                print_pairs(open_console(sys.stderr), ran_out.lines(has_snapshot=self.spec.measure.memory_snapshot))

    def _tell(self, memory: MemoryPeak) -> None:
        """Say, and write, what held the memory of this rank: the run ends without a report."""
        with (self.folder / f"rank{self.world.rank}.memory.txt").open("w", encoding="utf-8") as file:
            for out in (open_console(file), open_console(sys.stderr)):
                print_line(out, f"rank {self.world.rank} ran out of memory in pass {memory.index + 1}")
                print_table(out, holder_table(memory))
                print_pairs(out, memory_remarks(memory))

    def _into_window(self, records: Sequence[PassRecord], index: int) -> None:
        """Bring the accumulation window to where it was before that pass ran first: its gradient is there, too."""
        self.replayer.mend()
        if not self.spec.measure.backward or self.spec.actor.num_accumulated == 1:
            return
        done = [
            record.index
            for record in records
            if record.rank == self.world.rank and record.input.trains and record.error is None
        ]
        while self.replayer.window.num_passes and self._fills(done[-1]):
            pass
        before = [one for one in done if one < index]
        for one in before[len(before) - len(before) % self.spec.actor.num_accumulated :]:
            self._fills(one)

    def _fills(self, index: int) -> bool:
        _, error = self._once_more(index)
        if error is not None:
            self._stop_ranks(error, index)
            self.replayer.mend()
        return error is None

    def _once_more(self, index: int, observers: Sequence[PassObserver] = ()) -> tuple[Pass, Exception | None]:
        self.watch.tracker.has_passed(len(self.inputs), Phase.PROFILING)
        return self.replayer.replay(len(self.inputs), self.inputs[index], observers)

    def _stop_ranks(self, error: Exception, index: int) -> None:
        """End the run if there are several ranks: the others stand in the pass that failed on this one."""
        if self.world.world_size > 1:
            text = f"rank {self.world.rank}: pass {index + 1} failed when it was run once more, behind all passes"
            print_pairs(open_console(sys.stderr), [("once more", f"{text}, whose records are in {self.folder}")])
            self.watch.stop_all(error)


def _with_highest_peak(records: Sequence[PassRecord], device_type: str) -> int | None:
    """Return the pass that ran out of memory, else that with the highest peak; of equal ones on a CPU the largest."""
    out = [record.index for record in records if record.ran_out_of_memory]
    finished = [record for record in records if record.error is None]
    if out or not finished:
        return out[0] if out else None
    place, top = summarize(records).highest_peak, max(finished, key=peak_bytes)
    index, highest = (top.index, peak_bytes(top)) if place is None else (place.index, place.value)
    if device_type != "cpu":
        return index
    equal = [record for record in finished if peak_bytes(record) >= SAME_PEAK * highest]
    return max(equal, key=lambda record: record.input.fed_tokens).index


def _finished(records: Sequence[PassRecord]) -> list[int]:
    return [record.index for record in records if record.error is None]


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(in_flags(error))}"
