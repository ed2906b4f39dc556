"""Run `replay worst`: measure a few inputs, fit, rank all of them, say whether the largest fits, and check.

`worst.json` (campaign.py) has what is known in its result, written whenever more is; seconds and bytes. `ranking` holds
all inputs, the slowest first:

    {"rows": {...}, "memory": {...}, "measured": [{"number": 4, "source": "a.pkl", "seconds": {"forward": 0.01},
     "peaks": {"forward": 1000}}], "error": {...}, "fits": {...}, "ranking": [{"number": 7, ...}], "others": [...],
     "checked": {...}}
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from actor_init.spec import ActorSpec, UsageError
from capture.facts import Setting
from replay.campaign.campaign import Campaign, catch_interruption
from replay.campaign.executor import ThisMachine
from replay.campaign.feedable_inputs import FeedableInputs
from replay.campaign.result import CampaignResult
from replay.commands.worst.configuration import OtherConfiguration, WorstPlan
from replay.commands.worst.configuration_costs import Bounds, predict_configuration
from replay.commands.worst.console import WorstConsole
from replay.commands.worst.measuring import Fits, MeasuringRun, MemoryRoom, RankedInput, measure, read_device_memory
from replay.commands.worst.sections import (
    CheckedOther,
    CheckedPass,
    CheckedRanking,
    FailedInput,
    InputCost,
    KindFits,
    MeasuredWith,
    OtherPrediction,
    PredictedInput,
    PredictedPass,
    WorstOutcome,
)
from replay.options.option_parsing import format_command_line, format_error_with_flags
from replay.output.text import describe_damaged_files, pluralise
from replay.processes.pool import Machine, RunLimits
from replay.profiling.prediction import (
    LEAST_FOR_HOLDING_OUT,
    CostModel,
    InputShape,
    MeasuredPass,
    PredictionErrors,
    Predictor,
    choose_spread,
    read_shapes,
)
from replay.resolution.selection import Selection, select
from replay.runlog.records import describes_out_of_memory

# Inputs to check: so many of the slowest, of those with the highest peaks, and at random.
NUM_CHECKED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstResult(CampaignResult):
    """What was measured and predicted; `result["ranking"]` has all inputs, the slowest first."""

    def _list_rows(self) -> Iterable[dict[str, Any]]:
        for ranked in self.result["ranking"]:
            row = {name: value for name, value in ranked.items() if name not in ("seconds", "peaks")}
            row |= {f"{phase}_seconds": seconds for phase, seconds in ranked["seconds"].items()}
            yield row | {f"{phase}_peak_bytes": peak for phase, peak in ranked["peaks"].items()}


def begin(plan: WorstPlan, words: Sequence[str], limits: RunLimits, *, screen: IO[str]) -> WorstResult:
    """Rank the inputs. The exit code is 0 if all fit and nothing failed. `words` are those of its own options.

    Raises UsageError before anything has run if there is nothing to replay, or too few devices, and afterwards if no
    pass could be measured.
    """
    inputs = _read_inputs(plan)
    campaign = Campaign.begin(
        "worst",
        plan.spec.measure.log_folder,
        plan,
        arguments=[*words, *format_command_line(plan.spec)],
        machine=Machine.detect(),
    )
    return _run(campaign, inputs, limits, screen)


def resume(folder: Path, limits: RunLimits, *, screen: IO[str]) -> WorstResult:
    """Run what has not run yet, and report all of it. Raises UsageError if there is no such folder."""
    campaign = Campaign.read("worst", folder, WorstPlan)
    campaign.check_can_continue(ThisMachine())
    return _run(campaign, _read_inputs(campaign.plan), limits, screen)


def _read_inputs(plan: WorstPlan) -> FeedableInputs:
    spec = plan.spec
    return FeedableInputs.read(spec.inputs, loss=spec.measure.loss, grad_accumulation=spec.actor.grad_accumulation)


def _run(campaign: Campaign[WorstPlan], inputs: FeedableInputs, limits: RunLimits, screen: IO[str]) -> WorstResult:
    campaign.open(ThisMachine(), limits)
    campaign.result = WorstOutcome(damaged=[text for _, text in describe_damaged_files(inputs.unfeedable)])
    console = WorstConsole(
        campaign.command_line,
        inputs.shapes,
        inputs.unfeedable,
        full_names=campaign.plan.spec.measure.full_names,
        file=screen,
    )
    work = _RankingRun(campaign=campaign, selection=inputs.selection, shapes=inputs.shapes, console=console)
    is_fine = False
    with catch_interruption() as interruption:
        is_fine = work.run()
    interruption.reraise(campaign.folder)
    return WorstResult.from_campaign(campaign, exit_code=0 if is_fine and not inputs.unfeedable else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankingRun:
    campaign: Campaign[WorstPlan]
    selection: Selection
    shapes: Sequence[InputShape]
    console: WorstConsole

    @property
    def plan(self) -> WorstPlan:
        return self.campaign.plan

    def run(self) -> bool:
        """Rank the inputs, and tell whether nothing failed and all fits.

        A few inputs are measured in one run. A model of the cost is fitted to them and predicts all inputs. The
        largest prediction is held against the memory. Then the worst inputs are checked, and other configurations are
        predicted, as far as the options ask for it. Each result is printed and written as soon as it is known.
        """
        chosen = self._choose_inputs()
        measuring = self._measure(self.plan.spec.actor, chosen)
        measured = _pair_costs(chosen, measuring)
        self.console.show_measured(measured, chosen, measuring)
        self._add_result(
            run=measuring.log,
            measured=[InputCost.from_shape(measurement.shape, measurement.cost) for measurement in measured],
            failed=[FailedInput(source=chosen[place].source, error=error) for place, error in measuring.failed.items()],
            ended=measuring.ended,
        )
        if not measured:
            raise UsageError(f"no pass could be measured: {measuring.ended or next(iter(measuring.failed.values()))}")
        model = CostModel.fit(measured)
        ranked = sorted(
            (
                RankedInput(shape=shape, cost=cost)
                for shape in self.shapes
                if (cost := model.predict(shape)) is not None
            ),
            key=lambda ranking: (-ranking.cost.total_seconds, -ranking.shape.real_tokens),
        )
        ran_out = [chosen[place] for place, error in measuring.failed.items() if describes_out_of_memory(error)]
        peaks = [cost.peak_bytes for shape in ran_out if (cost := model.predict(shape)) is not None]
        elsewhere = MemoryRoom(memory=read_device_memory(), overhead=measuring.overhead, error=model.error)
        room = replace(elsewhere, ran_out_at=min(peaks, default=None))
        num_ranks = self.plan.spec.actor.parallel.tp * self.plan.spec.actor.parallel.ring
        self.console.show_ranking(ranked, model, room, num_ranks, measured, self.plan.num_shown)
        highest = max(ranking.cost.peak_bytes for ranking in ranked)
        self._add_result(
            memory=room.memory,
            overhead=room.overhead,
            rows={kind: predictor.rows for kind, predictor in _list_predictors(model)},
            fits={
                kind: KindFits(seconds=predictor.seconds, peaks=predictor.peaks)
                for kind, predictor in _list_predictors(model)
            },
            held_out=[
                PredictedInput.from_shape(measurement.shape, measurement.cost, predicted=cost)
                for measurement, cost in model.held_out
            ],
            error=model.error,
            fits_here=room.fits(highest, num_ranks),
            ranking=[InputCost.from_shape(ranking.shape, ranking.cost) for ranking in ranked],
        )
        is_fine = not measuring.failed and not measuring.ended and room.fits(highest, num_ranks) is not Fits.NO
        if self.plan.checks:
            is_fine &= self._check_ranking(ranked, measured)
        for other in self.plan.others:
            is_fine &= self._predict_other(other, measured, [measurement.shape for measurement in measured], elsewhere)
        self.console.finish(self.campaign.path)
        return is_fine

    def _choose_inputs(self) -> list[InputShape]:
        """Choose the inputs to measure: of both kinds in proportion, but of neither too few for a fit."""
        kinds = [[shape for shape in self.shapes if shape.trains == trains] for trains in (False, True)]
        chosen: list[InputShape] = []
        for kind_shapes in kinds:
            share = round(self.plan.num_measured * len(kind_shapes) / len(self.shapes))
            chosen += choose_spread(kind_shapes, max(share, min(LEAST_FOR_HOLDING_OUT, self.plan.num_measured)))
        return chosen

    def _measure(self, actor: ActorSpec, chosen: Sequence[InputShape]) -> MeasuringRun:
        return measure(
            self.campaign,
            replace(self.plan.spec, actor=actor),
            [shape.number for shape in chosen],
            window=self.selection.grad_accumulation,
        )

    def _add_result(self, **values: Any) -> None:
        """Add to what worst.json has in its result."""
        self.campaign.result = replace(self.campaign.result, **values)
        self.campaign.write()

    def _check_ranking(self, ranked: Sequence[RankedInput], measured: Sequence[MeasuredPass]) -> bool:
        """Run the worst inputs that were not measured, and some at random; tell whether predictions were near."""
        measured_numbers = {measurement.shape.number for measurement in measured}
        checks = _choose_checks([ranking for ranking in ranked if ranking.shape.number not in measured_numbers])
        if not checks:
            self.console.line("checked", "nothing: every input was measured")
            return True
        measuring = self._measure(self.plan.spec.actor, [ranking.shape for ranking in checks])
        pairs = [(checks[place], cost) for place, cost in sorted(measuring.costs.items())]
        error = PredictionErrors.compare([(guess.cost, cost) for guess, cost in pairs]) if pairs else None
        failed = [(checks[place].shape, message) for place, message in sorted(measuring.failed.items())]
        self._add_result(
            checked=CheckedRanking(
                run=measuring.log,
                inputs=[
                    PredictedInput.from_shape(ranking.shape, cost, predicted=ranking.cost) for ranking, cost in pairs
                ],
                failed=[FailedInput(source=shape.source, error=message) for shape, message in failed],
                ended=measuring.ended,
                error=error,
            )
        )
        self.console.show_check(pairs, error, failed, measuring.ended)
        return error is not None and error.is_near and not failed and not measuring.ended

    def _predict_other(
        self, other: OtherConfiguration, base: Sequence[MeasuredPass], chosen: Sequence[InputShape], room: MemoryRoom
    ) -> bool:
        """Predict another configuration, and tell whether it fits and, with --check, whether predictions were near.

        What one rank can run of the configuration is measured again. From it each pass of the data ranks gets a lower
        and an upper bound. The slowest and the largest pass are printed, and all are written.
        """
        measured_with: list[MeasuredWith] = []

        def measure_again(actor: ActorSpec) -> list[MeasuredPass]:
            measuring = self._measure(actor, chosen)
            measured = _pair_costs(chosen, measuring)
            measured_with.append(MeasuredWith(run=measuring.log, layers=actor.num_layers, zero_stage=actor.zero_stage))
            if len(measured) < len(chosen):
                message = measuring.ended or next(iter(measuring.failed.values()))
                raise UsageError(
                    Setting("predict", other.text), f": what it is made from could not be measured: {message}"
                )
            return measured

        window = self.selection.grad_accumulation
        try:
            predictor = predict_configuration(other, self.plan.spec, base, measure_again, accumulates=window > 1)
        except UsageError as error:
            self.console.line("predicted", format_error_with_flags(error))
            return False
        rounds = self._deal_rounds(other.ranks)
        bounds = {
            number: pass_bounds
            for number, shapes in rounds.items()
            if (pass_bounds := predictor.predict_bounds(shapes)) is not None
        }
        if not bounds:
            self.console.line("predicted", f"{other.text}: nothing, there are fewer inputs than data ranks")
            return False
        worst = max(bounds.values(), key=lambda pass_bounds: pass_bounds.most.total_seconds)
        highest = max(bounds.values(), key=lambda pass_bounds: pass_bounds.most.peak_bytes)
        fits = room.fits(highest.most.peak_bytes, other.num_processes, least=highest.least.peak_bytes)
        self.console.show_prediction(other, predictor.num_layers, worst, highest, room, fits)
        prediction = OtherPrediction(
            text=other.text,
            num_layers=predictor.num_layers,
            num_parameters=predictor.num_parameters,
            measured_with=measured_with,
            fits_here=fits,
            passes=[
                PredictedPass(
                    sources=[shape.source for shape in rounds[number]], least=pass_bounds.least, most=pass_bounds.most
                )
                for number, pass_bounds in bounds.items()
            ],
        )
        self._add_result(others=[*self.campaign.result.others, prediction])
        return (not self.plan.checks or self._check_other(other, bounds)) and fits is not Fits.NO

    def _deal_rounds(self, num_data_ranks: int) -> dict[int, list[InputShape]]:
        """Return the inputs that data ranks are fed at the same time, by the number that --pick-inputs knows."""
        if num_data_ranks == 1:
            return {shape.number: [shape] for shape in self.shapes}
        by_path = {self.selection.inputs[shape.number]: shape for shape in self.shapes}
        try:
            columns = [select(self.plan.spec.inputs, rank, num_data_ranks).inputs for rank in range(num_data_ranks)]
        except UsageError:
            return {}
        # With --max-inputs, more data ranks take more inputs of the folder.
        more_paths = sorted({path for column in columns for path in column} - set(self.selection.inputs))
        more_shapes, _ = read_shapes(more_paths, self.plan.spec.measure.loss)
        by_path |= {more_paths[shape.number]: shape for shape in more_shapes}
        rounds = enumerate(zip(*columns, strict=True))
        return {number: [by_path[path] for path in paths] for number, paths in rounds if set(paths) <= set(by_path)}

    def _check_other(self, other: OtherConfiguration, bounds: Mapping[int, Bounds]) -> bool:
        """Run some of the passes predicted for another configuration, if this machine has the devices for it."""
        machine = Machine.detect()
        if machine.has_gpus and machine.num_devices < other.num_processes:
            self.console.line("checked", f"{other.text}: not here, it needs {pluralise(other.num_processes, 'GPU')}")
            return True
        slowest = sorted(bounds, key=lambda number: -bounds[number].most.total_seconds)[:NUM_CHECKED]
        faster = sorted(set(bounds) - set(slowest))
        numbers = sorted([*slowest, *random.Random(0).sample(faster, min(NUM_CHECKED, len(faster)))])
        measuring = measure(
            self.campaign,
            replace(self.plan.spec, actor=other.actor),
            numbers,
            num_data_ranks=other.ranks,
            window=self.selection.grad_accumulation,
        )
        pairs = [(bounds[numbers[place]], cost) for place, cost in sorted(measuring.costs.items())]
        error = (
            PredictionErrors.compare([(pass_bounds.find_nearest(cost), cost) for pass_bounds, cost in pairs])
            if pairs
            else None
        )
        checked = CheckedOther(
            text=other.text,
            run=measuring.log,
            passes=[
                CheckedPass(least=pass_bounds.least, most=pass_bounds.most, measured=cost)
                for pass_bounds, cost in pairs
            ],
            failed=list(measuring.failed.values()),
            ended=measuring.ended,
            error=error,
        )
        self._add_result(others_checked=[*self.campaign.result.others_checked, checked])
        self.console.show_other_check(other, error, [*measuring.failed.values(), *filter(None, [measuring.ended])])
        return error is not None and error.is_near and not measuring.failed and not measuring.ended


def _choose_checks(ranked: Sequence[RankedInput]) -> list[RankedInput]:
    """Choose the slowest, those with the highest peaks, and some at random; return them by size."""
    by_number = {ranking.shape.number: ranking for ranking in ranked[:NUM_CHECKED]}
    by_peak = sorted(ranked, key=lambda ranking: -ranking.cost.peak_bytes)
    by_number |= {ranking.shape.number: ranking for ranking in by_peak[:NUM_CHECKED]}
    unchosen = [ranking for ranking in ranked if ranking.shape.number not in by_number]
    by_number |= {
        ranking.shape.number: ranking for ranking in random.Random(0).sample(unchosen, min(NUM_CHECKED, len(unchosen)))
    }
    return sorted(by_number.values(), key=lambda ranking: ranking.shape.real_tokens)


def _pair_costs(chosen: Sequence[InputShape], measuring: MeasuringRun) -> list[MeasuredPass]:
    return [
        MeasuredPass(shape=chosen[place], fed_tokens=measuring.fed_tokens[place], cost=cost)
        for place, cost in sorted(measuring.costs.items())
    ]


def _list_predictors(model: CostModel) -> list[tuple[str, Predictor]]:
    return [("train" if trains else "rollout", predictor) for trains, predictor in model.predictors.items()]
