"""Feed an open actor the inputs one by one, record each pass, and say what they come to: on all ranks together."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

from actor_init.as_json import to_json
from actor_init.model import ModelSource, strip_config
from actor_init.world import World
from capture.file_format.actor_config import read_actor_config
from capture.file_format.capture_file import Call
from replay.objective.objective import Objective
from replay.options.resolved import ResolvedReplay
from replay.options.spec import VerdictRule
from replay.output.text import Pairs, counted, not_recorded
from replay.processes.exit_code import repeat_for_torchrun
from replay.resolution.job_defaults import inputs_folder
from replay.resolution.selection import Selection
from replay.runlog.records import PassRecord
from replay.runlog.run_file import RunEnd, RunWork
from replay.runlog.summary import summarize
from replay.runlog.writer import INTERRUPTED, Logbook
from replay.runner.checkpoint import Saver, SavingError, digest_of_weights, not_saved
from replay.runner.header import Header, differences_from_job
from replay.runner.meter import Meter
from replay.runner.non_finite import first_non_finite
from replay.runner.replayer import ReopenedActor, ReopeningError, Replayer
from replay.runner.reruns import Found, Reruns
from replay.runner.result import Conclusion, Run, conclude
from replay.runner.rounding_floor import Again
from replay.runner.states import Earlier
from replay.runner.text import Console
from replay.tracing.writer import RunTrace
from replay.verdict.findings import Setting
from replay.verdict.judge import Outcome, Pass
from replay.verdict.text import verdict_lines
from replay.verdict.weight_check import SameWeights
from replay.watch.progress import Phase
from replay.watch.watcher import Watch


def _not_replayed(num_inputs: int) -> Pairs:
    """Say that a training ended with a pass that failed, if there were inputs left."""
    why = "with --step a pass that fails loses the weights of the steps so far. Try: without its input"
    return [("ended", f"{counted(num_inputs, 'input')} not replayed: {why}")] if num_inputs else []


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The result of the passes: records of all ranks, what was saved, and why the run ended early, if it did."""

    passes: Sequence[Pass]
    saved: Pairs
    ended: BaseException | None
    found: Found = field(default_factory=Found)  # by --profile and --memory-snapshot
    earlier: Sequence[PassRecord] = ()  # of passes that were done before this process began

    @property
    def records(self) -> list[PassRecord]:
        return [*self.earlier, *(record for record, _, _ in self.passes)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """The parts of one run on this rank. All ranks must call its methods, in order."""

    world: World
    spec: ResolvedReplay
    selection: Selection
    source: ModelSource
    folder: Path
    watch: Watch
    show_traceback: bool
    meter: Meter
    logbook: Logbook
    console: Console | None  # on rank 0
    same_weights: SameWeights
    setting: Setting
    saver: Saver
    earlier: Earlier  # under --resume
    objective: Objective | None  # None: the loss is the negated mean log-prob
    begun_with: ModelSource  # before the first pass in the log

    def describe(self, actor: ReopenedActor, first: Call | None) -> None:
        """Begin run.json and print the header, on rank 0."""
        world, source = self.world, self.source
        devices = world.gather("CPU" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device))
        num_inputs = world.gather(len(self.selection.inputs))
        if self.console:
            folder_of_inputs = inputs_folder(self.spec.inputs)
            header = Header(
                resolved=self.spec,
                selection=self.selection,
                facts=actor.backend.facts(),
                devices=devices,
                num_inputs=num_inputs,
                objective=self.objective,
                first=first,
                earlier=self.earlier,
                same_weights=self.same_weights,
                dropout=self.setting.dropout,
                other_config=differences_from_job(self.spec.actor, source, read_actor_config(folder_of_inputs)),
                world=world,
            )
            self.logbook.begin(
                self.spec,
                facts=header.run_facts(),
                work=RunWork(weights=digest_of_weights(self.begun_with.weights), config=_config_of(source)),
                inputs=self.selection.describe(),
                memory_kind=self.meter.memory_kind,
                devices=devices,
            )
            self.console.header(header.lines(), num_passes=len(self.selection.inputs))
        # run.json exists before any rank can fail
        self.logbook.run = world.gather(self.logbook.run)[0]

    def repeat_earlier(self) -> None:
        """Begin this rank's log with the passes that were done before."""
        for record in self.earlier.records:
            if record.rank == self.world.rank:
                self.logbook.write(record)

    def replay_each(self, actor: ReopenedActor) -> Done:
        """Replay the inputs one by one, record each pass, and save what --save-state and --save-model ask for."""
        spec, world, tracker = self.spec, self.world, self.watch.tracker
        trace = RunTrace.of(self.folder, spec.actor, self.source, world, actor.backend) if spec.measure.trace else None
        replayer = Replayer(
            spec,
            world,
            actor,
            self.meter,
            tracker,
            self.same_weights,
            trace,
            self.selection.rounds,
            self.folder,
        )
        passes: list[Pass] = []
        saved: Pairs = []
        begin = replayer.num_settled = self.earlier.num_passes
        try:
            for index, path in islice(enumerate(self.selection.inputs), begin, None):
                ranks, error = self._replay_one(replayer, index, path, [record for record, _, _ in passes])
                passes += ranks
                has_failed = error is not None
                del error  # its frames hold the pass's tensors
                if has_failed and spec.measure.step:
                    saved = [*_not_replayed(len(self.selection.inputs) - index - 1), *not_saved(spec.state)]
                    break
                replayer.mend()
                if self.saver.is_due(has_stepped=ranks[world.rank].record.result.grad_norm is not None):
                    tracker.at(Phase.SAVING)
                    self.saver.keep(actor.backend, replayer.num_settled)
            tracker.has_passed(len(self.selection.inputs), Phase.OUT_OF_INPUTS)
            self.watch.meet()
            tracker.has_passed(len(self.selection.inputs), Phase.SAVING)
            if not any(record.error for record, _, _ in passes):
                num_passes = begin + len(passes) // world.world_size
                saved = self.saver.at_end(actor.backend, replayer.num_settled, num_passes)
            found = self._reruns(replayer).found([*self.earlier.records, *(record for record, _, _ in passes)])
            tracker.has_passed(len(self.selection.inputs), Phase.CLOSING)
        except (KeyboardInterrupt, ReopeningError, SavingError) as reason:
            if isinstance(reason, SavingError) and world.world_size > 1:
                raise  # the other ranks wait for this one
            return Done(passes=passes, saved=saved, ended=reason, earlier=self.earlier.records)
        return Done(passes=passes, saved=saved, ended=None, found=found, earlier=self.earlier.records)

    def _reruns(self, replayer: Replayer) -> Reruns:
        return Reruns(
            spec=self.spec,
            world=self.world,
            source=self.source,
            inputs=self.selection.inputs,
            folder=self.folder,
            watch=self.watch,
            meter=self.meter,
            replayer=replayer,
        )

    def _replay_one(
        self, replayer: Replayer, index: int, path: Path, before: Sequence[PassRecord]
    ) -> tuple[list[Pass], Exception | None]:
        """Replay one input on every rank. A pass that fails ends a run of several ranks.

        before  records of this run's earlier passes
        """
        own, error = self._reruns(replayer).watched(index, path)
        self.logbook.write(own.record)
        if error and self.show_traceback:
            traceback.print_exception(error)
        if error and self.world.world_size > 1:
            self._reruns(replayer).tell_ran_out([*before, own.record])
            self.watch.stop_all(error)
        self.watch.tracker.at(Phase.GATHERING)
        ranks: list[Pass] = self.world.gather(own)
        if replayer.search.is_wanted([rank.record for rank in ranks]):
            own = own._replace(record=replayer.with_first_non_finite(own.record))
            self.logbook.write_again(own.record)
            ranks = self.world.gather(own)
        if replayer.wants_again(records := [rank.record for rank in ranks]):
            own = own._replace(record=replayer.with_second_run(own.record, records))
            self.logbook.write_again(own.record)
            ranks = self.world.gather(own)
        if self.console:
            self.console.passed([rank.record for rank in ranks])
        return ranks, error

    def conclude(self, done: Done) -> Conclusion:
        """Judge the passes against the job. All ranks must call this."""
        again = Again(
            world=self.world,
            spec=self.spec,
            selection=self.selection,
            tracker=self.watch.tracker,
            has_dropout=bool(self.setting.dropout),
        )
        is_resumed = self.earlier.folder is not None
        return conclude(again, done.passes, self.setting, is_resumed=is_resumed, broke_off=done.ended is not None)

    def report(self, done: Done, conclusion: Conclusion) -> Run:
        """Return the run; on rank 0 finish run.json and print the summary."""
        is_refused = conclusion.verdict.outcome in (Outcome.DIFFERS, Outcome.UNSETTLED)
        is_strict = self.spec.measure.verdict is VerdictRule.STRICT
        failed = done.ended or self.selection.damaged or any(record.error for record in done.records)
        exit_code = 1 if failed or (is_refused and is_strict) else 0
        if isinstance(done.ended, KeyboardInterrupt):
            exit_code = INTERRUPTED
        if failed:
            damaged, broken = len(self.selection.damaged), [record for record in done.records if record.error]
            repeat_for_torchrun(
                f"replay: {counted(len(broken), 'pass')} failed and {counted(damaged, 'file')} "
                f"{'is' if damaged == 1 else 'are'} damaged, see {self.folder / 'run.json'}"
            )
        end = RunEnd(
            statistics=summarize(done.records),
            verdict=conclusion.verdict.to_dict(),
            profile=to_json(done.found.profile),
            memory=to_json(done.found.memory),
            out_of_memory=to_json(done.found.ran_out),
            first_non_finite=first_non_finite(done.records),
        )
        file = self.logbook.finish(end, exit_code=exit_code)
        run = Run(folder=self.folder, file=file, records=done.records)
        if self.console:
            self.console.finish(
                run,
                self.selection,
                verdict=[
                    *verdict_lines(conclusion.verdict),
                    *not_recorded(self.selection.not_recorded),
                    *conclusion.remarks,
                ],
                saved=done.saved or not_saved(self.spec.state),
                missing=done.found.missing,
            )
        self.logbook.close()
        return run


def _config_of(source: ModelSource) -> dict[str, object]:
    """Return the model's config, with its adapter, as two runs have to share it."""
    adapter = source.adapter
    adapted = {} if adapter is None else {"adapter": {"name": adapter.name, **adapter.settings}}
    return strip_config(source.config) | adapted
