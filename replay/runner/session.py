"""Feed an open actor the inputs one by one, record each pass, and say what they come to: on all ranks together."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

from actor_init.as_json import to_json
from actor_init.model import ModelSource, to_plain_config
from actor_init.training_mode import list_missing_parts
from actor_init.world import World
from capture.file_format.capture_file import CapturedCall
from replay.objective.objective import Objective
from replay.options.resolved import ResolvedReplay
from replay.output.text import Pairs, describe_unrecorded, pluralise
from replay.processes.error_reports import repeat_for_torchrun
from replay.resolution.selection import Selection
from replay.runlog.records import PassRecord
from replay.runlog.run_file import RunEnd, RunWork
from replay.runlog.summary import summarize
from replay.runlog.writer import Logbook
from replay.runner.checkpoint import Saver, SavingError, describe_unsaved, digest_weights
from replay.runner.exit_code import choose_exit_code
from replay.runner.header import Header, format_config_differences
from replay.runner.meter import Meter
from replay.runner.non_finite import find_first_non_finite
from replay.runner.replayer import ReopenableActor, ReopeningError, Replayer
from replay.runner.reruns import RerunResults, Reruns
from replay.runner.result import Conclusion, Run, conclude
from replay.runner.rounding_floor import RunRepeater
from replay.runner.state_store import EarlierPasses
from replay.runner.text import Console
from replay.tracing.writer import TraceWriter
from replay.verdict.causes.table import may_lie_in_layer
from replay.verdict.findings import VerdictSettings
from replay.verdict.judge import PassEvidence
from replay.verdict.outcomes import Outcome
from replay.verdict.recorded_pass import list_modules_in_other_mode
from replay.verdict.text import format_verdict
from replay.verdict.weight_check import WeightChecker
from replay.watch.progress import RankPhase
from replay.watch.watcher import Watch

# A user types a file and a function in its place.
CODE = "FILE.py:FUNCTION"


def _describe_unreplayed(num_inputs: int) -> Pairs:
    """Say that a run with --step ended with a pass that failed, if there were inputs left."""
    why = "with --step a pass that fails loses the weights of the steps so far. Try: without its input"
    return [("ended", f"{pluralise(num_inputs, 'input')} not replayed: {why}")] if num_inputs else []


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedInputs:
    """What the passes of a run came to.

    passes           of all ranks
    saved_lines      what was saved, in lines of the summary
    end_reason       why the run ended early; None: it did not
    reruns           what --profile and --memory-snapshot asked for
    earlier_records  of passes that had run before this process began
    step_lines       what came of the steps that were taken without --step, in lines of the summary
    """

    passes: Sequence[PassEvidence]
    saved_lines: Pairs
    end_reason: BaseException | None
    reruns: RerunResults = field(default_factory=RerunResults)
    earlier_records: Sequence[PassRecord] = ()
    step_lines: Pairs = field(default_factory=list)

    @property
    def records(self) -> list[PassRecord]:
        return [*self.earlier_records, *(record for record, _, _ in self.passes)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """The parts of one run on this rank. All ranks must call its methods, in order.

    source           the model, with the weights that the first pass of this process begins with
    console          on rank 0; None on the others
    earlier          what the run had done before this process began, under --resume
    model_problem    why the job's model could not be compared with the replay's; None: it was
    objective        None: the loss is the mean cross entropy
    original_source  the model, with the weights that the first pass in the log began with
    """

    world: World
    spec: ResolvedReplay
    selection: Selection
    source: ModelSource
    folder: Path
    watch: Watch
    show_traceback: bool
    meter: Meter
    logbook: Logbook
    console: Console | None
    weight_checker: WeightChecker
    model_problem: str | None
    settings: VerdictSettings
    saver: Saver
    earlier: EarlierPasses
    objective: Objective | None
    original_source: ModelSource

    def begin_log(self, actor: ReopenableActor, first_call: CapturedCall | None) -> None:
        """Begin run.json and print the header, on rank 0."""
        world, source = self.world, self.source
        devices = world.gather("CPU" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device))
        num_inputs = world.gather(len(self.selection.inputs))
        if self.console:
            parts = () if first_call is None else list_modules_in_other_mode(first_call)
            header = Header(
                resolved=self.spec,
                selection=self.selection,
                facts=actor.backend.facts(),
                devices=devices,
                num_inputs=num_inputs,
                objective=self.objective,
                first_call=first_call,
                earlier=self.earlier,
                weight_checker=self.weight_checker,
                dropout=self.settings.dropout,
                config_differences=format_config_differences(self.settings.model_differences),
                model_problem=self.model_problem,
                missing_parts=list_missing_parts(actor.backend.model, parts),
                world=world,
            )
            self.logbook.begin(
                self.spec,
                facts=header.collect_facts(),
                work=RunWork(weights=digest_weights(self.original_source.weights), config=_read_lasting_config(source)),
                inputs=self.selection.describe(),
                memory_kind=self.meter.memory_kind,
                devices=devices,
            )
            self.console.print_header(header.collect_lines(), num_passes=len(self.selection.inputs))
        # After this gather run.json exists, so that any rank that fails can write its failure into it.
        self.logbook.run = world.gather(self.logbook.run)[0]

    def log_earlier_passes(self) -> None:
        """Begin this rank's log with the passes that ran before this process."""
        for record in self.earlier.records:
            if record.rank == self.world.rank:
                self.logbook.write(record)

    def replay_inputs(self, actor: ReopenableActor) -> ReplayedInputs:
        """Replay the inputs one by one, record each pass, and save what --save-state and --save-model ask for.

        A pass that fails ends a run with --step, since it loses the steps so far; otherwise the actor is opened again
        and the next input follows. After the last pass come, on all ranks together: the states and models to save, then
        the passes that run once more for --profile and --memory-snapshot. Ctrl-C, or an actor that cannot be opened
        again, ends the run early with what there is.
        """
        spec, world, tracker = self.spec, self.world, self.watch.tracker
        trace = (
            TraceWriter.open(self.folder, spec.actor, self.source, world, actor.backend) if spec.measure.trace else None
        )
        replayer = Replayer(
            spec,
            world,
            actor,
            self.meter,
            tracker,
            self.weight_checker,
            trace,
            self.selection.rounds,
            self.folder,
        )
        passes: list[PassEvidence] = []
        saved_lines: Pairs = []
        num_inputs = len(self.selection.inputs)
        first_index = replayer.num_inputs_completed = self.earlier.num_passes
        try:
            for index, path in islice(enumerate(self.selection.inputs), first_index, None):
                rank_passes, error = self._replay_input(replayer, index, path, [record for record, _, _ in passes])
                passes += rank_passes
                has_failed = error is not None
                # The frames of the error's traceback hold the tensors of the pass.
                del error
                if has_failed and spec.measure.steps and not spec.steps_unasked:
                    saved_lines = [*_describe_unreplayed(num_inputs - index - 1), *describe_unsaved(spec.state)]
                    break
                replayer.reopen_after_failure()
                own_result = rank_passes[world.rank].record.result
                if self.saver.is_due(latest_pass_has_stepped=own_result.grad_norm is not None):
                    tracker.enter_phase(RankPhase.SAVING)
                    self.saver.save_state(actor.backend, replayer.num_inputs_completed)
            tracker.enter_phase_after_passes(num_inputs, RankPhase.OUT_OF_INPUTS)
            self.watch.meet()
            tracker.enter_phase_after_passes(num_inputs, RankPhase.SAVING)
            if not any(record.error for record, _, _ in passes):
                num_passes = first_index + len(passes) // world.world_size
                saved_lines = self.saver.save_at_end(actor.backend, replayer.num_inputs_completed, num_passes)
            records = [*self.earlier.records, *(record for record, _, _ in passes)]
            reruns = self._make_reruns(replayer).run_requested(records)
            tracker.enter_phase_after_passes(num_inputs, RankPhase.CLOSING)
        except (KeyboardInterrupt, ReopeningError, SavingError) as reason:
            # On several ranks a rank that could not save must not go on alone: the others wait for it in a collective.
            if isinstance(reason, SavingError) and world.world_size > 1:
                raise
            return ReplayedInputs(
                passes=passes, saved_lines=saved_lines, end_reason=reason, earlier_records=self.earlier.records
            )
        return ReplayedInputs(
            passes=passes,
            saved_lines=saved_lines,
            end_reason=None,
            reruns=reruns,
            earlier_records=self.earlier.records,
            step_lines=replayer.step_follower.describe(),
        )

    def _make_reruns(self, replayer: Replayer) -> Reruns:
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

    def _replay_input(
        self, replayer: Replayer, index: int, path: Path, earlier_records: Sequence[PassRecord]
    ) -> tuple[list[PassEvidence], Exception | None]:
        """Replay one input on every rank. A pass that fails ends a run of several ranks.

        Each rank writes its record at once, so that it is in the log if another rank fails. Then all ranks look at all
        records and decide alike whether to search the pass for its first non-finite tensor, and whether to run it a
        second time; what that tells replaces the record in the log.

        earlier_records  of this process's passes so far
        """
        own_pass, error = self._make_reruns(replayer).replay_first_time(index, path)
        self.logbook.write(own_pass.record)
        if error and self.show_traceback:
            traceback.print_exception(error)
        if error and self.world.world_size > 1:
            self._make_reruns(replayer).print_out_of_memory([*earlier_records, own_pass.record])
            self.watch.stop_all(error)
        self.watch.tracker.enter_phase(RankPhase.GATHERING)
        rank_passes: list[PassEvidence] = self.world.gather(own_pass)
        if replayer.non_finite_search.is_needed([rank_pass.record for rank_pass in rank_passes]):
            own_pass = own_pass._replace(record=replayer.find_non_finite_in_latest_pass(own_pass.record))
            self.logbook.write_again(own_pass.record)
            rank_passes = self.world.gather(own_pass)
        rank_records = [rank_pass.record for rank_pass in rank_passes]
        if replayer.needs_second_run(rank_records):
            own_pass = own_pass._replace(record=replayer.time_second_run(own_pass.record, rank_records))
            self.logbook.write_again(own_pass.record)
            rank_passes = self.world.gather(own_pass)
        else:
            replayer.learn_times(rank_records)
        if self.console:
            self.console.show_pass([rank_pass.record for rank_pass in rank_passes])
        return rank_passes, error

    def conclude(self, replayed: ReplayedInputs) -> Conclusion:
        """Judge the passes against the job. All ranks must call this."""
        repeater = RunRepeater(
            world=self.world,
            spec=self.spec,
            selection=self.selection,
            tracker=self.watch.tracker,
            weight_checker=self.weight_checker,
            dropout=self.settings.dropout,
        )
        return conclude(
            repeater,
            replayed.passes,
            self.settings,
            is_resumed=self.earlier.folder is not None,
            ended_early=replayed.end_reason is not None,
        )

    def report(self, replayed: ReplayedInputs, conclusion: Conclusion) -> Run:
        """Return the run; on rank 0 finish run.json and print the summary."""
        is_not_reproduced = conclusion.verdict.outcome in (Outcome.DIFFERS, Outcome.UNSETTLED)
        has_failed = (
            replayed.end_reason is not None
            or len(self.selection.damaged) > 0
            or any(record.error for record in replayed.records)
        )
        if has_failed:
            num_damaged, failed = len(self.selection.damaged), [record for record in replayed.records if record.error]
            repeat_for_torchrun(
                f"replay: {pluralise(len(failed), 'pass')} failed and {pluralise(num_damaged, 'file')} "
                f"{'is' if num_damaged == 1 else 'are'} damaged, see {self.folder / 'run.json'}"
            )
        end = RunEnd(
            statistics=summarize(replayed.records),
            verdict=conclusion.verdict.to_dict(),
            profile=to_json(replayed.reruns.profile),
            memory=to_json(replayed.reruns.memory),
            out_of_memory=to_json(replayed.reruns.out_of_memory),
            first_non_finite=find_first_non_finite(replayed.records),
            remarks=conclusion.recording_remarks,
        )
        exit_code = choose_exit_code(
            conclusion.verdict.outcome,
            self.spec.measure.verdict,
            has_failed=has_failed,
            end_reason=replayed.end_reason,
        )
        file = self.logbook.finish(end, exit_code=exit_code)
        run = Run(folder=self.folder, file=file, records=replayed.records)
        if self.console:
            self.console.finish(
                run,
                self.selection,
                verdict=[
                    *format_verdict(conclusion.verdict),
                    *(self._lead_to_layer() if is_not_reproduced and may_lie_in_layer(conclusion.verdict) else []),
                    *describe_unrecorded(self.selection.not_recorded),
                    *conclusion.remarks,
                    *replayed.step_lines,
                ],
                saved_lines=replayed.saved_lines or describe_unsaved(self.spec.state),
                missing_lines=replayed.reruns.missing_lines,
            )
        self.logbook.close()
        return run

    def _lead_to_layer(self) -> Pairs:
        """Say how to find the layer in which the job's code computes otherwise than the replay's."""
        actor = self.spec.actor
        other, whose = CODE, "the job's own model"
        if actor.has_user_model and actor.weights is not None and (actor.weights / "config.json").is_file():
            other, whose = "stock", "transformers' own code"
        elif actor.has_user_model:
            # There is no config that transformers could build the model of.
            whose = f"other code than {actor.model}, such as the job's own"
        return [("layer", f"replay compare {self.folder} {other}, with {whose}: names the first layer that differs")]


def _read_lasting_config(source: ModelSource) -> dict[str, object]:
    """Return what two runs have to share of the model's config, with its adapter."""
    adapter = source.adapter
    adapter_config = {} if adapter is None else {"adapter": {"name": adapter.name, **adapter.settings}}
    return to_plain_config(source.config) | adapter_config
