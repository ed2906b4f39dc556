"""Run `replay worst`: measure a few inputs, fit, rank all of them, say whether the largest fits, and check.

`worst.json` (campaign.py) has what is known in its result, written whenever more is; seconds and bytes. `ranking` holds
all inputs, the slowest first:

    {"rows": {...}, "memory": {...}, "measured": [{"number": 4, "source": "a.pkl", "seconds": {"forward": 0.01},
     "peaks": {"forward": 1000}}], "error": {...}, "fits": {...}, "ranking": [{"number": 7, ...}], "others": [...],
     "checked": {...}}
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actor_init.spec import ActorSpec, UsageError
from replay.campaign.campaign import Campaign, ShapedInputs, until_interrupted
from replay.campaign.executor import ThisMachine
from replay.commands.worst.configuration import Configuration, WorstPlan
from replay.commands.worst.configuration_costs import Bounds, predict_configuration
from replay.commands.worst.console import WorstConsole
from replay.commands.worst.measuring import Fits, Measuring, Ranked, Room, measure, memory_here
from replay.options.option_parsing import command_line, in_flags
from replay.output.text import pluralise
from replay.processes.pool import Machine, RunLimits
from replay.profiling.prediction import (
    LEAST_FOR_HOLDING_OUT,
    Cost,
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
from replay.runlog.writer import INTERRUPTED

NUM_CHECKED = 3  # of the slowest, of those with the highest peaks, and at random


def begin(plan: WorstPlan, typed: Sequence[str], limits: RunLimits) -> int:
    """Rank the inputs and return the exit code: 0 if all fit and nothing failed. `typed` are the words of own options.

    Raises UsageError before anything has run if there is nothing to replay, or too few devices, and afterwards if no
    pass could be measured.
    """
    inputs = _inputs_of(plan)
    campaign = Campaign.begin(
        "worst", plan.spec.measure.log_folder, plan, words=[*typed, *command_line(plan.spec)], machine=Machine.detect()
    )
    return _run(campaign, inputs, limits)


def go_on(folder: Path, limits: RunLimits) -> int:
    """Run what has not run yet, and report all of it. Raises UsageError if there is no such folder."""
    campaign = Campaign.read("worst", folder, WorstPlan)
    campaign.refuse_elsewhere(ThisMachine())
    return _run(campaign, _inputs_of(campaign.plan), limits)


def _inputs_of(plan: WorstPlan) -> ShapedInputs:
    spec = plan.spec
    return ShapedInputs.of(spec.inputs, loss=spec.measure.loss, grad_accumulation=spec.actor.grad_accumulation)


def _run(campaign: Campaign[WorstPlan], inputs: ShapedInputs, limits: RunLimits) -> int:
    campaign.open(ThisMachine(), limits)
    campaign.result = {}
    console = WorstConsole(
        campaign.command, inputs.shapes, inputs.damaged, full_names=campaign.plan.spec.measure.full_names
    )
    work = _Work(campaign=campaign, selection=inputs.selection, shapes=inputs.shapes, console=console)
    is_fine = False
    with until_interrupted() as interruption:
        is_fine = work.run()
    if interruption.happened:
        return INTERRUPTED
    return 0 if is_fine and not inputs.damaged else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    campaign: Campaign[WorstPlan]
    selection: Selection
    shapes: Sequence[InputShape]
    console: WorstConsole

    @property
    def plan(self) -> WorstPlan:
        return self.campaign.plan

    def run(self) -> bool:
        """Do all that was asked for, and tell whether nothing failed and all fits."""
        chosen = self._chosen()
        measuring = self._measure(self.plan.spec.actor, chosen)
        measured = _measured(chosen, measuring)
        self.console.measured(measured, chosen, measuring)
        self._add(
            run=measuring.log,
            measured=[_row(one.shape, one.cost) for one in measured],
            failed=[{"source": chosen[place].source, "error": error} for place, error in measuring.failed.items()],
            ended=measuring.ended,
        )
        if not measured:
            raise UsageError(f"no pass could be measured: {measuring.ended or next(iter(measuring.failed.values()))}")
        model = CostModel.fit(measured)
        ranked = sorted(
            (Ranked(shape=shape, cost=cost) for shape in self.shapes if (cost := model.predict(shape)) is not None),
            key=lambda one: (-one.cost.total_seconds, -one.shape.real_tokens),
        )
        ran_out = [chosen[place] for place, error in measuring.failed.items() if describes_out_of_memory(error)]
        peaks = [cost.peak_bytes for shape in ran_out if (cost := model.predict(shape)) is not None]
        elsewhere = Room(memory=memory_here(), overhead=measuring.overhead, error=model.error)
        room = replace(elsewhere, ran_out_at=min(peaks, default=None))
        num_ranks = self.plan.spec.actor.parallel.tp * self.plan.spec.actor.parallel.ring
        self.console.ranked(ranked, model, room, num_ranks, measured, self.plan.num_shown)
        highest = max(one.cost.peak_bytes for one in ranked)
        self._add(
            memory=room.memory,
            overhead=room.overhead,
            rows={kind: predictor.rows for kind, predictor in _by_kind(model)},
            fits={kind: {"seconds": one.seconds, "peaks": one.peaks} for kind, one in _by_kind(model)},
            held_out=[{**_row(one.shape, one.cost), "predicted": cost} for one, cost in model.held_out],
            error=model.error,
            fits_here=room.fits(highest, num_ranks).value,
            ranking=[_row(one.shape, one.cost) for one in ranked],
        )
        is_fine = not measuring.failed and not measuring.ended and room.fits(highest, num_ranks) is not Fits.NO
        if self.plan.checks:
            is_fine &= self._check(ranked, measured)
        for other in self.plan.others:
            is_fine &= self._other(other, measured, [one.shape for one in measured], elsewhere)
        self.console.finish(self.campaign.path)
        return is_fine

    def _chosen(self) -> list[InputShape]:
        """Choose the inputs to measure: of both kinds in proportion, but of neither too few for a fit."""
        kinds = [[shape for shape in self.shapes if shape.trains == trains] for trains in (False, True)]
        chosen: list[InputShape] = []
        for own in kinds:
            share = round(self.plan.num_measured * len(own) / len(self.shapes))
            chosen += choose_spread(own, max(share, min(LEAST_FOR_HOLDING_OUT, self.plan.num_measured)))
        return chosen

    def _measure(self, actor: ActorSpec, chosen: Sequence[InputShape]) -> Measuring:
        return measure(
            self.campaign,
            replace(self.plan.spec, actor=actor),
            [shape.number for shape in chosen],
            window=self.selection.grad_accumulation,
        )

    def _add(self, **known: Any) -> None:
        """Add to what worst.json has in its result."""
        self.campaign.result = {**(self.campaign.result or {}), **known}
        self.campaign.write()

    def _add_to(self, name: str, entry: Any) -> None:
        """Append to a list in the result."""
        self._add(**{name: [*(self.campaign.result or {}).get(name, []), entry]})

    def _check(self, ranked: Sequence[Ranked], measured: Sequence[MeasuredPass]) -> bool:
        """Run the worst inputs that were not measured, and some at random; tell whether predictions were near."""
        done = {one.shape.number for one in measured}
        chosen = _to_check([one for one in ranked if one.shape.number not in done])
        if not chosen:
            self.console.line("checked", "nothing: every input was measured")
            return True
        measuring = self._measure(self.plan.spec.actor, [one.shape for one in chosen])
        pairs = [(chosen[place], cost) for place, cost in sorted(measuring.costs.items())]
        error = PredictionErrors.compare([(guess.cost, cost) for guess, cost in pairs]) if pairs else None
        failed = [(chosen[place].shape, said) for place, said in sorted(measuring.failed.items())]
        self._add(
            checked={
                "run": measuring.log,
                "inputs": [{**_row(one.shape, cost), "predicted": one.cost} for one, cost in pairs],
                "failed": [{"source": shape.source, "error": said} for shape, said in failed],
                "ended": measuring.ended,
                "error": error,
            }
        )
        self.console.checked(pairs, error, failed, measuring.ended)
        return error is not None and error.is_near and not failed and not measuring.ended

    def _other(
        self, other: Configuration, base: Sequence[MeasuredPass], chosen: Sequence[InputShape], room: Room
    ) -> bool:
        """Predict another configuration, and measure it if --check asks for it and the machine can."""
        measured_with: list[dict[str, Any]] = []

        def measured_again(actor: ActorSpec) -> list[MeasuredPass]:
            measuring = self._measure(actor, chosen)
            measured = _measured(chosen, measuring)
            measured_with.append({"run": measuring.log, "layers": actor.num_layers, "zero_stage": actor.zero_stage})
            if len(measured) < len(chosen):
                said = measuring.ended or next(iter(measuring.failed.values()))
                raise UsageError(f"--predict {other.text!r}: what it is made from could not be measured: {said}")
            return measured

        window = self.selection.grad_accumulation
        try:
            predicts = predict_configuration(other, self.plan.spec, base, measured_again, accumulates=window > 1)
        except UsageError as error:
            self.console.line("predicted", in_flags(error))
            return False
        rounds = self._rounds(other.ranks)
        bounds = {number: found for number, one in rounds.items() if (found := predicts.bounds(one)) is not None}
        if not bounds:
            self.console.line("predicted", f"{other.text}: nothing, there are fewer inputs than data ranks")
            return False
        worst = max(bounds.values(), key=lambda one: one.most.total_seconds)
        highest = max(bounds.values(), key=lambda one: one.most.peak_bytes)
        fits = room.fits(highest.most.peak_bytes, other.num_processes, least=highest.least.peak_bytes)
        self.console.other(other, predicts.num_layers, worst, highest, room, fits)
        entry = {
            "text": other.text,
            "num_layers": predicts.num_layers,
            "num_parameters": predicts.num_parameters,
            "measured_with": measured_with,
            "fits_here": fits.value,
            "passes": [
                {"sources": [shape.source for shape in rounds[number]], "least": one.least, "most": one.most}
                for number, one in bounds.items()
            ],
        }
        self._add_to("others", entry)
        return (not self.plan.checks or self._check_other(other, bounds)) and fits is not Fits.NO

    def _rounds(self, num_data_ranks: int) -> dict[int, list[InputShape]]:
        """Return the inputs that data ranks are fed at the same time, by the number that --pick-inputs knows."""
        if num_data_ranks == 1:
            return {shape.number: [shape] for shape in self.shapes}
        by_path = {self.selection.inputs[shape.number]: shape for shape in self.shapes}
        try:
            columns = [select(self.plan.spec.inputs, rank, num_data_ranks).inputs for rank in range(num_data_ranks)]
        except UsageError:
            return {}
        more = sorted({path for column in columns for path in column} - set(self.selection.inputs))  # by --max-inputs
        more_shapes, _ = read_shapes(more, self.plan.spec.measure.loss)
        by_path |= {more[shape.number]: shape for shape in more_shapes}
        rounds = enumerate(zip(*columns, strict=True))
        return {number: [by_path[path] for path in paths] for number, paths in rounds if set(paths) <= set(by_path)}

    def _check_other(self, other: Configuration, bounds: Mapping[int, Bounds]) -> bool:
        """Run some of the passes predicted for another configuration, if this machine has the devices for it."""
        machine = Machine.detect()
        if machine.has_gpus and machine.num_devices < other.num_processes:
            self.console.line("checked", f"{other.text}: not here, it needs {pluralise(other.num_processes, 'GPU')}")
            return True
        slowest = sorted(bounds, key=lambda number: -bounds[number].most.total_seconds)[:NUM_CHECKED]
        rest = sorted(set(bounds) - set(slowest))
        numbers = sorted([*slowest, *random.Random(0).sample(rest, min(NUM_CHECKED, len(rest)))])
        measuring = measure(
            self.campaign,
            replace(self.plan.spec, actor=other.actor),
            numbers,
            num_data_ranks=other.ranks,
            window=self.selection.grad_accumulation,
        )
        pairs = [(bounds[numbers[place]], cost) for place, cost in sorted(measuring.costs.items())]
        error = PredictionErrors.compare([(one.nearest(cost), cost) for one, cost in pairs]) if pairs else None
        self._add_to(
            "others_checked",
            {
                "text": other.text,
                "run": measuring.log,
                "passes": [{"least": one.least, "most": one.most, "measured": cost} for one, cost in pairs],
                "failed": list(measuring.failed.values()),
                "ended": measuring.ended,
                "error": error,
            },
        )
        self.console.other_checked(other, error, [*measuring.failed.values(), *filter(None, [measuring.ended])])
        return error is not None and error.is_near and not measuring.failed and not measuring.ended


def _to_check(ranked: Sequence[Ranked]) -> list[Ranked]:
    """Choose the slowest, those with the highest peaks, and some at random; return them by size."""
    chosen = {one.shape.number: one for one in ranked[:NUM_CHECKED]}
    by_peak = sorted(ranked, key=lambda one: -one.cost.peak_bytes)
    chosen |= {one.shape.number: one for one in by_peak[:NUM_CHECKED]}
    rest = [one for one in ranked if one.shape.number not in chosen]
    chosen |= {one.shape.number: one for one in random.Random(0).sample(rest, min(NUM_CHECKED, len(rest)))}
    return sorted(chosen.values(), key=lambda one: one.shape.real_tokens)


def _measured(chosen: Sequence[InputShape], measuring: Measuring) -> list[MeasuredPass]:
    return [
        MeasuredPass(shape=chosen[place], fed_tokens=measuring.fed_tokens[place], cost=cost)
        for place, cost in sorted(measuring.costs.items())
    ]


def _row(shape: InputShape, cost: Cost) -> dict[str, Any]:
    return {
        "number": shape.number,
        "source": shape.source,
        "trains": shape.trains,
        "rows": shape.rows,
        "real_tokens": shape.real_tokens,
        "seconds": cost.seconds,
        "peaks": cost.peaks,
    }


def _by_kind(model: CostModel) -> list[tuple[str, Predictor]]:
    return [("train" if trains else "rollout", one) for trains, one in model.predictors.items()]
