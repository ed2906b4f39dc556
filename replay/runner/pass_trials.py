"""Run the trials of one pass: which change of its forward gives the numbers that the job recorded.

The unchanged pass is run first, with the rows as the job had them. Its log-probs have to be the replay's own, and the
log-probs under an explicit mask have to be those of the model's own mask: else no other mask can be tried.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actor_init.spec import Compile, Dtype
from capture.file_format.actor_config import read_actor_config
from capture.file_format.capture_file import CapturedCall, read_call
from capture.file_format.micro_batch import IGNORED_LABEL, LOSS_GRADIENTS, LOSS_TARGETS, MicroBatch
from capture.file_format.tensor_codec import RandomStates
from replay.objective.inputs import ObjectiveData, ObjectiveInputs
from replay.objective.objective import is_of_log_probs, select_loss_tokens
from replay.options.declarations import OBJECTIVES
from replay.options.declarations.policy import POLICY
from replay.options.declarations.tensor_names import ADVANTAGES, OLD_LOG_PROBS
from replay.options.option_parsing import describe_error
from replay.options.resolved import ResolvedReplay
from replay.options.spec import is_objective
from replay.output.text import pluralise
from replay.resolution.job_defaults import find_inputs_folder
from replay.runner.rounding_floor import RunRepeater
from replay.runner.trial_changes import divide_logits, list_model_trials
from replay.runner.trial_code import list_code_trials
from replay.runner.trial_configs import ConfigTrial, build_config, list_config_trials
from replay.runner.trial_feeds import (
    CapturedRows,
    feed_as_captured,
    feed_by_table,
    list_mask_trials,
    list_position_trials,
)
from replay.runner.trial_findings import TrialEvaluator
from replay.runner.trial_forward import TrialActor, make_trial_spec
from replay.runner.trial_logits import (
    MAX_COARSE_RESIDUAL,
    TargetLogits,
    are_rounded,
    choose_positions,
    match_logit_trials,
)
from replay.runner.trial_losses import (
    MEND_LOSS,
    LogitStatistics,
    LossTables,
    TargetRows,
    is_same_loss,
    list_loss_trials,
)
from replay.runner.trial_objectives import PolicyCase, fit_temperature, list_policy_trials
from replay.runner.trial_ranks import OwnTrial, TrialForward, TrialVariant, join_ranks
from replay.tolerances.difference import is_coarse
from replay.tolerances.job_bounds import LOSS
from replay.verdict.causes.cause import CauseName
from replay.verdict.causes.trial import (
    SURE_GAIN_A_TRIAL,
    TrialMatch,
    TrialReport,
    TrialResult,
    confirm_results,
    match_coarse_findings,
    match_findings,
    needs_confirmation,
)
from replay.verdict.causes.trial_rules import LIKELY_GAIN
from replay.verdict.findings import Finding, VerdictSettings, compare_pass, list_dtypes
from replay.verdict.judge import PassEvidence
from replay.verdict.model_facts import ModelDifferenceKind
from replay.verdict.tried_losses import TriedLoss

MAX_FORWARDS = 48
# Relative: how far the gradient of a policy's loss may be from the job's; the replay's own has to be so much farther.
MAX_POLICY_RESIDUAL, MIN_POLICY_GAIN = 1e-3, 10.0
# The dtype that a trial may coarsen numbers to, as torch names it.
COARSER_DTYPE = "bfloat16"
# Where a number is off by more than this many times the bound of a coarser dtype, none is tried.
COARSE_REACH = 4.0


@dataclass(kw_only=True, slots=True)
class PassTrials:
    """The trials of one pass on this rank.

    others        further passes of the same weights whose loss is wrong: they decide where one loss agrees by chance
    confirmed_by  the indices of those whose losses were tried, too
    unchanged     the findings of the pass without a change
    not_run       what was not tried, each with the reason
    """

    repeater: RunRepeater
    settings: VerdictSettings
    own_pass: PassEvidence
    call: CapturedCall
    batch: MicroBatch
    rows: CapturedRows
    targets: TargetRows
    evaluator: TrialEvaluator
    others: Sequence[PassEvidence] = ()
    confirmed_by: list[int] = field(default_factory=list)
    unchanged: Sequence[Finding] = ()
    not_run: list[str] = field(default_factory=list)
    num_forwards: int = 0
    _needs_other_actors: bool = False
    _may_round: bool = False

    @classmethod
    def open(
        cls,
        repeater: RunRepeater,
        own_pass: PassEvidence,
        settings: VerdictSettings,
        others: Sequence[PassEvidence] = (),
    ) -> "PassTrials":
        """Read the capture of the pass. Raises what reading a capture raises."""
        spec = repeater.spec
        call = read_call(repeater.selection.inputs[own_pass.record.index])
        padding_predicts_label = (
            repeater.selection.must_keep_padding and not spec.source.layout_under(spec.actor).joins_rows
        )
        captured = replace(call.micro_batch(), padding_predicts_label=padding_predicts_label)
        batch = select_loss_tokens(spec.measure.loss, captured)
        rows = CapturedRows.from_call(call, batch)
        evaluator = TrialEvaluator(
            own_pass=own_pass,
            settings=settings,
            call=call,
            batch=batch,
            prepared=rows.prepared,
            has_objective=is_objective(spec.measure.loss),
        )
        return cls(
            repeater=repeater,
            settings=settings,
            own_pass=own_pass,
            call=call,
            batch=batch,
            rows=rows,
            targets=TargetRows.from_batch(batch),
            evaluator=evaluator,
            others=others,
        )

    def run(self) -> TrialReport:
        """Run the trials. All ranks must call this."""
        spec = make_trial_spec(self.repeater.spec, self.repeater.world)
        with self._open(spec) as actor:
            results = self._run_on(actor, spec)
            self.num_forwards = actor.num_forwards
        if self._needs_other_actors:
            results += [*self._try_configs(spec), *self._try_bf16(spec)]
        loss = next((finding for finding in self.unchanged if finding.name == LOSS), None)
        return TrialReport(
            index=self.own_pass.record.index,
            confirmed_by=self.confirmed_by,
            results=results,
            num_forwards=self.num_forwards,
            log_probs_agree=self._has_right_forward,
            recorded_loss=None if loss is None else loss.recorded,
            replayed_loss=None if loss is None else loss.replayed,
            not_run=self.not_run,
        )

    def _open(self, spec: ResolvedReplay) -> AbstractContextManager[TrialActor]:
        repeater = self.repeater
        return TrialActor.open(
            spec,
            self.rows,
            repeater.world,
            repeater.tracker,
            trains=self.batch.trains,
            random_states=self.random_states,
        )

    @property
    def random_states(self) -> RandomStates:
        """What the random generators are set to, so that dropout draws the job's masks."""
        return self.call.random if self._has_dropout else RandomStates()

    @property
    def _has_dropout(self) -> bool:
        return bool(self.settings.dropout) and self.batch.trains

    @property
    def _is_wrong(self) -> bool:
        return any(finding.is_wrong for finding in self.unchanged)

    @property
    def _has_right_forward(self) -> bool:
        """Do log-probs of tokens or rows agree, and is nothing wrong but the loss?"""
        wrong = {finding.name for finding in self.unchanged if finding.is_wrong}
        has_agreeing = any(finding.agrees and finding.name != LOSS for finding in self.unchanged)
        return has_agreeing and wrong <= {LOSS}

    @property
    def _has_judged_log_probs(self) -> bool:
        """Did the job record more of the forward than its loss?"""
        return any(finding.name != LOSS and finding.difference is not None for finding in self.unchanged)

    def _run_on(self, actor: TrialActor, spec: ResolvedReplay) -> list[TrialResult]:
        """Run the trials that need no other actor. All ranks must call this."""
        unchanged_BA = actor.compute(feed_as_captured(self.rows))
        if self._has_other_numbers(unchanged_BA, self.own_pass):
            return self._try_kernel(spec, unchanged_BA)
        self.unchanged = self.evaluator.find(unchanged_BA)
        of_logits = self._try_logits(actor)
        if any(result.agrees for result in of_logits):
            return of_logits
        if self._is_policy and not any(self._gather(self._is_wrong)):
            self.unchanged = self._find_with_own_loss(unchanged_BA)
            return self._confirm(actor, self._try_losses(actor, unchanged_BA))
        if is_objective(self.repeater.spec.measure.loss) and not any(self._gather(self._is_wrong)):
            if self.repeater.spec.measure.loss not in OBJECTIVES:
                self.not_run.append("no other loss is known that a job may have taken for the function of --loss")
            return []
        is_right = all(self._gather(self._has_right_forward or not self._is_wrong))
        has_log_probs = any(self._gather(self._has_judged_log_probs))
        results: list[TrialResult] = []
        if is_right or not has_log_probs:
            results = self._confirm(actor, self._try_losses(actor, unchanged_BA))
        if not is_right:
            is_fp32 = self.repeater.spec.actor.dtype is Dtype.FP32
            self._may_round = is_fp32 and all(self._gather(self._is_near_in_coarser_dtype(unchanged_BA)))
            self._needs_other_actors = True
            results += [*self._try_feeds(actor, spec, unchanged_BA), *self._try_models(actor, unchanged_BA)]
        return results

    def _try_kernel(self, spec: ResolvedReplay, unchanged_BA: Tensor) -> list[TrialResult]:
        """Hold the rows as the job had them against the job: the replay's own pass gave other numbers of them."""
        if any(self._gather(self._has_dropout)):
            self.not_run.append("rows as the job had them draw other dropout masks here than the replay did")
            return []
        own_record, recorded, own_replayed = self.own_pass
        if recorded is not None:
            self.unchanged = compare_pass(own_record, recorded, own_replayed, self.settings)
        own_spec = self.repeater.spec
        is_compiled = own_spec.actor.compile is not Compile.OFF
        own_form = f"{'compiled' if is_compiled else own_spec.kernel}{', packed' if own_spec.actor.packs else ''}"
        self.not_run.append(f"rows as the job had them give other numbers by {spec.kernel} than by {own_form}")
        match = match_findings(self.unchanged, self.evaluator.find(unchanged_BA))
        trial = OwnTrial(
            # Which part of the replay errs is not known, so this is no more than probable.
            match=replace(match, gain=min(match.gain, LIKELY_GAIN)),
            cause=CauseName.KERNEL,
            says=f"the replay itself ({own_form}) computes other numbers than the same rows padded, uncompiled and by "
            f"{spec.kernel}, which are the job's",
            try_next=f"--no-packing --attention {spec.actor.attention}, and report what the replay computes otherwise",
        )
        return self._join({"rows as the job had them": trial})

    def _has_other_numbers(self, log_probs_BA: Tensor, other: PassEvidence) -> bool:
        """Tell whether the pass with these log-probs has other numbers than `other`, on any rank."""
        return any(self._gather(self.evaluator.has_other_numbers(log_probs_BA, other)))

    # Losses

    def _try_logits(self, actor: TrialActor) -> list[TrialResult]:
        """Hold the gradient that the job's logits had against those of other losses. All ranks must call this."""
        targets = self._select_targets()
        if not any(self._gather(targets is not None)):
            return []
        # A rank without such a loss runs the same forward.
        place_N = torch.zeros(1, dtype=torch.long) if targets is None else targets[0]
        target_N = self.rows.ids_BS.flatten()[place_N] if targets is None else targets[1]
        logits_NV: Tensor | None = None
        error: Exception | None = None
        try:
            logits_NV = actor.read_logits(place_N, target_N)
        except Exception as reason:
            error = reason
        if any(self._gather(error is not None)):
            why = "they failed on another rank" if error is None else describe_error(error)
            self.not_run.append(f"losses of whole logits: {why}")
            return []
        own: dict[str, OwnTrial] = {}
        if targets is not None and logits_NV is not None:
            own = self._match_logits(TargetLogits(logits_NV=logits_NV, target_N=target_N, gradient_N=targets[2]))
        return self._join(own, is_wrong=targets is not None)

    def _match_logits(self, logits: TargetLogits) -> dict[str, OwnTrial]:
        is_rounded = bool(self._dtypes) and is_coarse(self._dtypes)
        positions = pluralise(len(logits.target_N), "position")
        own = {
            trial.name: OwnTrial(
                match=match,
                cause=CauseName.OBJECTIVE,
                says=f"the job's loss {trial.says}: that has the gradient of the job's logits at {positions}, to "
                f"{trial.residual:.1g}",
                try_next=MEND_LOSS,
                is_of_gradient=True,
            )
            for trial, match in match_logit_trials(logits, is_coarse=is_rounded)
        }
        if not own and not is_rounded and are_rounded(logits.gradient_N):
            own["loss in bf16"] = OwnTrial(
                match=TrialMatch(agrees=True, gain=LIKELY_GAIN, num_values=len(logits.target_N)),
                cause=CauseName.DTYPE,
                says=f"the job's loss computes in bf16: the gradient of its logits at {positions} is of that dtype",
                try_next="look for what casts the logits in the job, or let its loss compute in fp32",
                is_of_gradient=True,
            )
        return own

    def _select_targets(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Select places in the flattened rows, their targets' ids and the gradients of these; None where log-probs do.

        A policy's tokens have weights of their own, which these losses do not have.
        """
        notes = self.call.notes
        target_BS, gradient_BS = notes.get(LOSS_TARGETS), notes.get(LOSS_GRADIENTS)
        if target_BS is None or gradient_BS is None or is_of_log_probs(self.call, self._dtypes):
            return None
        if is_objective(self.repeater.spec.measure.loss):
            return None
        place_N = (target_BS.flatten() != IGNORED_LABEL).nonzero()[:, 0]
        gradient_N = gradient_BS.flatten()[place_N].double()
        if not len(place_N) or not bool(gradient_N.isfinite().all()):
            return None
        place_N = choose_positions(place_N)
        return place_N, target_BS.flatten()[place_N].long(), gradient_BS.flatten()[place_N].double()

    def _try_losses(self, actor: TrialActor, log_probs_BA: Tensor) -> list[TrialResult]:
        """Try other losses of the same log-probs. All ranks must call this."""
        if self._is_policy:
            return self._try_policies(actor, log_probs_BA)
        recorded = self.own_pass.recorded
        num_tokens = sum(self.own_pass.record.result.row_action_tokens)
        tables = LossTables(
            rows=self.targets,
            tables_3BS=actor.compute_targets(*self.targets.list_targets()).view(3, *self.targets.target_BS.shape),
            logits=self._measure_logits(actor),
            divisor=None if recorded is None else recorded.divisor,
            num_tokens=max(num_tokens, 1),
        )
        job_loss = next((finding.recorded for finding in self.unchanged if finding.name == LOSS), math.nan)
        replayed_loss = self.own_pass.record.result.loss
        mean = f"the mean over the replay's {pluralise(num_tokens, 'token')} is {replayed_loss:.6g}"
        numbers = f"the job has {job_loss:.6g}, and {mean}"
        own: dict[str, OwnTrial] = {}
        losses: list[float] = []
        for trial in list_loss_trials(tables):
            if any(is_same_loss(trial.loss, loss) for loss in losses):
                continue
            losses.append(trial.loss)
            own[trial.name] = OwnTrial(
                match=match_findings(self.unchanged, self.evaluator.find(log_probs_BA, trial.loss)),
                cause=trial.cause,
                says=f"the job's loss {trial.says}; that gives {trial.loss:.6g}, {numbers}",
                try_next=trial.try_next,
            )
        return self._join(own)

    @property
    def _dtypes(self) -> Sequence[str]:
        """The dtypes in which the job and the replay computed the pass; none where nothing was recorded of it."""
        recorded = self.own_pass.recorded
        return [] if recorded is None else list_dtypes(recorded, self.settings)

    @property
    def _is_policy(self) -> bool:
        return self.repeater.spec.measure.loss == POLICY.name

    def _find_with_own_loss(self, log_probs_BA: Tensor) -> list[Finding]:
        """Hold log-probs against the job's, and the loss that the replay had: a trial computes no objective."""
        own_loss = self.own_pass.record.result.loss if self.evaluator.has_objective else None
        return self.evaluator.find(log_probs_BA, own_loss)

    def _try_policies(self, actor: TrialActor, log_probs_BA: Tensor) -> list[TrialResult]:
        """Try policy losses that need whole logits: with an entropy, or a temperature. All ranks must call this.

        Losses of log-probs alone were tried in the pass itself (loss_variants.py).
        """
        data = ObjectiveData.collect(self.call, self.batch)
        is_known = is_of_log_probs(self.call, self._dtypes)
        if all(self._gather(is_known)):
            return []
        entropy_BA = actor.measure_entropies()
        cases = [("", self._make_case(log_probs_BA, data, None if is_known else entropy_BA))]
        temperature = self._fit_temperature(actor, cases[0][1], is_known=is_known)
        temperatures = [found for found in self._gather(temperature) if found is not None]
        if temperatures:
            divided_BA = actor.compute(feed_as_captured(self.rows), partial(divide_logits, temperature=temperatures[0]))
            cases.append((f"divides its logits by {temperatures[0]:g}", self._make_case(divided_BA, data, None)))
        own: dict[str, OwnTrial] = {}
        num_changes: dict[str, int] = {}
        bound = MAX_COARSE_RESIDUAL if is_coarse(self._dtypes) else MAX_POLICY_RESIDUAL
        for words, case in cases:
            for trial in list_policy_trials(case) if not words else [case.make_plain_trial(words)]:
                num_changes[trial.name] = trial.num_changes
                own[trial.name] = OwnTrial(
                    match=self._match_policy(log_probs_BA, trial, case, bound),
                    cause=CauseName.OBJECTIVE,
                    says=f"the job's policy loss {trial.says}; that gives {trial.loss:.6g}, the job has "
                    f"{case.job_loss:.6g}, and the replay's settings give {self.own_pass.record.result.loss:.6g}",
                    try_next=trial.try_next,
                )
        results = self._join(own)
        # Two changes that do what one does are no rival of it.
        fewest = min((num_changes.get(result.name, 2) for result in results if result.agrees), default=0)
        return [result for result in results if not result.agrees or num_changes.get(result.name, 2) == fewest]

    def _make_case(self, log_probs_BA: Tensor, data: ObjectiveData, entropy_BA: Tensor | None) -> PolicyCase:
        mask_BA = self.rows.prepared.action_mask_BA
        inputs = ObjectiveInputs(
            log_probs_BA=log_probs_BA.detach().clone().requires_grad_(),
            action_mask_BA=mask_BA,
            recorded=data,
            num_window_tokens=int(mask_BA.sum()),
            num_window_passes=1,
        )
        job_loss = next((finding.recorded for finding in self.unchanged if finding.name == LOSS), math.nan)
        return PolicyCase.make(inputs, self.repeater.spec.objective, job_loss, entropy_BA)

    def _match_policy(self, log_probs_BA: Tensor, trial: TriedLoss, case: PolicyCase, bound: float) -> TrialMatch:
        """Hold a policy loss against the job's; its gradient, too, where that tells it from the replay's own."""
        match = match_findings(self.unchanged, self.evaluator.find(log_probs_BA, trial.loss))
        plain = case.plain_residual
        is_told = trial.gradient_apart is not None and plain is not None and plain > MIN_POLICY_GAIN * bound
        if trial.is_fitted and not is_told:
            return TrialMatch(agrees=False)
        if not match.agrees or trial.gradient_apart is None or plain is None:
            return match
        if trial.gradient_apart > bound:
            return TrialMatch(agrees=False)
        if not is_told:
            return match
        gain = min(match.gain, plain / max(trial.gradient_apart, bound / SURE_GAIN_A_TRIAL))
        return replace(match, gain=gain, num_values=match.num_values + case.num_gradients)

    def _fit_temperature(self, actor: TrialActor, case: PolicyCase, *, is_known: bool) -> float | None:
        """Fit the temperature of the policy's loss to the gradient of the job's logits. All ranks must call this."""
        places = None if is_known else case.select_gradients()
        if not any(self._gather(places is not None)):
            return None
        slot_N = self.rows.prepared.slot_N[:1] if places is None else places
        of_slot = {int(slot): place for place, slot in enumerate(self.rows.prepared.slot_N.tolist())}
        place_N = torch.tensor([of_slot[int(slot)] for slot in slot_N])
        prepared = self.rows.prepared
        target_N = prepared.target_ids_N[place_N]
        logits_NV = actor.read_logits(prepared.predictor_N[place_N], target_N)
        if places is None or case.gradient_BA is None:
            return None
        gradient_N = case.gradient_BA.flatten()[slot_N]
        logits = TargetLogits(logits_NV=logits_NV, target_N=target_N, gradient_N=gradient_N)
        advantage_N, old_N = (
            case.inputs.of_tokens(*names).flatten()[slot_N].double() for names in (ADVANTAGES, OLD_LOG_PROBS)
        )
        temperature, residual = fit_temperature(logits, advantage_N, old_N, case.spec)
        return temperature if residual <= MAX_COARSE_RESIDUAL and abs(temperature - 1) > residual else None

    def _confirm(self, actor: TrialActor, results: list[TrialResult]) -> list[TrialResult]:
        """Try the same losses of further passes, as long as a doubt is left. All ranks must call this."""
        for own_pass in self.others:
            if not needs_confirmation(results):
                break
            other = PassTrials.open(self.repeater, own_pass, self.settings)
            with actor.lend(other.rows, trains=other.batch.trains, random_states=other.random_states):
                more = other.try_losses_again(actor)
            if more is not None:
                results = confirm_results(results, more)
                self.confirmed_by.append(own_pass.record.index)
        return results

    def try_losses_again(self, actor: TrialActor) -> list[TrialResult] | None:
        """Try other losses of this further pass; None if its forward is another one than the job's, too."""
        unchanged_BA = actor.compute(feed_as_captured(self.rows))
        if self._has_other_numbers(unchanged_BA, self.own_pass):
            return None
        self.unchanged = self._find_with_own_loss(unchanged_BA)
        is_right = self._has_right_forward or not self._is_wrong or not self._has_judged_log_probs
        return self._try_losses(actor, unchanged_BA) if all(self._gather(is_right)) else None

    def _measure_logits(self, actor: TrialActor) -> LogitStatistics | None:
        """Measure whole logits; None where they do not fit, on any rank."""
        statistics: LogitStatistics | None = None
        error: Exception | None = None
        try:
            uniform_N, log_sums_N = actor.measure_logits()
            statistics = LogitStatistics(uniform=float(uniform_N.mean()), square=float(log_sums_N.square().mean()))
        except Exception as reason:
            error = reason
        if any(self._gather(error is not None)):
            why = "they failed on another rank" if error is None else describe_error(error)
            self.not_run.append(f"losses of whole logits: {why}")
            return None
        return statistics

    # Masks and positions

    def _try_feeds(self, actor: TrialActor, spec: ResolvedReplay, unchanged_BA: Tensor) -> list[TrialResult]:
        """Try other masks and positions, a forward each. All ranks must call this."""
        if spec.actor.has_user_model:
            self.not_run.append("a user's model makes its masks itself")
            return []
        usual = self.evaluator.evaluate(unchanged_BA)
        if self._has_other_numbers(actor.compute(feed_by_table(self.rows)), usual):
            self.not_run.append("the model does not take its masks from transformers, so no other mask can be tried")
            return []
        config = spec.source.config
        columns = self._gather(self.evaluator.find_parting_column(unchanged_BA))
        first_column = min((column for column in columns if column is not None), default=None)
        feeds = {
            trial.name: TrialForward(cause=trial.cause, says=trial.says, try_next=trial.try_next, feed=trial.feed)
            for trial in (*list_mask_trials(self.rows, config), *list_position_trials(self.rows, config, first_column))
        }
        return self._run_forwards(actor, feeds)

    def _try_models(self, actor: TrialActor, unchanged_BA: Tensor) -> list[TrialResult]:
        """Try what the model may have computed otherwise of the same rows. All ranks must call this."""
        trials = {
            trial.name: TrialForward(
                cause=trial.cause,
                says=trial.says,
                try_next=trial.try_next,
                feed=feed_as_captured(self.rows),
                change=trial.change,
                coarsens=trial.coarsens,
                is_stated=trial.is_stated,
                is_of_stated_code=trial.is_of_stated_code,
            )
            for trial in (
                *list_code_trials(actor.model, self.settings.model_differences),
                *list_model_trials(
                    actor.model,
                    self.rows.see(all_keys=True).to(self.repeater.world.device),
                    may_round=self._may_round,
                    differences=self.settings.model_differences,
                    suspect_id=self.evaluator.find_suspect_token(unchanged_BA),
                ),
            )
        }
        return self._run_forwards(actor, trials)

    def _run_forwards(self, actor: TrialActor, trials: Mapping[str, TrialForward]) -> list[TrialResult]:
        """Run a forward for each trial. All ranks must call this.

        Every rank runs the same forwards, since a backend may gather weights in them.
        """
        names = list(dict.fromkeys(name for rank_names in self._gather(list(trials)) for name in rank_names))
        own: dict[str, OwnTrial] = {}
        num_left = max(MAX_FORWARDS - actor.num_forwards, 0)
        self.not_run += [f"{name}: {MAX_FORWARDS} forwards ran already" for name in names[num_left:]]
        for name in names[:num_left]:
            trial = trials.get(name)
            log_probs_BA, error = self._compute_or_fail(actor, trial)
            if any(self._gather(error is not None)):
                self.not_run.append(f"{name}: {error or 'failed on another rank'}")
                # What a forward that failed leaves behind in a sharding library would spoil the next.
                if self.repeater.world.world_size > 1:
                    break
                continue
            if trial is not None and log_probs_BA is not None:
                own[name] = OwnTrial(
                    match=self._match(log_probs_BA, coarsens=trial.coarsens),
                    cause=trial.cause,
                    says=trial.says,
                    try_next=trial.try_next,
                    is_stated=trial.is_stated,
                    is_of_stated_code=trial.is_of_stated_code,
                )
        return self._join(own)

    def _match(self, log_probs_BA: Tensor, *, coarsens: bool) -> TrialMatch:
        """Hold the pass with these log-probs against the job's, if need be within the bounds of a coarser dtype."""
        match = match_findings(self.unchanged, self.evaluator.find(log_probs_BA))
        if match.agrees or not coarsens:
            return match
        return match_coarse_findings(self.unchanged, self._find_coarsely(log_probs_BA))

    def _find_coarsely(self, log_probs_BA: Tensor) -> list[Finding]:
        """Hold log-probs against the job's within the bounds of a coarser dtype."""
        coarse = replace(self.settings, dtype=COARSER_DTYPE, floors={}, step_floors={})
        return self.evaluator.find(log_probs_BA, settings=coarse)

    def _is_near_in_coarser_dtype(self, log_probs_BA: Tensor) -> bool:
        """Tell whether rounding to a coarser dtype can make numbers as wrong as these."""
        return all(finding.share_of_bound <= COARSE_REACH for finding in self._find_coarsely(log_probs_BA))

    def _compute_or_fail(self, actor: TrialActor, trial: TrialForward | None) -> tuple[Tensor | None, str | None]:
        """Return the replay's log-probs in a trial, None for the unchanged pass, or the error."""
        try:
            if trial is None or trial.feed is None:
                return actor.compute(feed_as_captured(self.rows)), None
            return actor.compute(trial.feed, trial.change), None
        except Exception as error:
            return None, describe_error(error)

    # Configs

    def _try_configs(self, spec: ResolvedReplay) -> list[TrialResult]:
        """Run the pass under the job's own settings, where its config states others. All ranks must call this."""
        captured = read_actor_config(find_inputs_folder(spec.inputs))
        if captured is None or spec.actor.has_user_model:
            return []

        def derive(trial: ConfigTrial) -> ResolvedReplay:
            # The model's head may be one of what differs, so its logits are computed whole.
            source = replace(spec.source, config=build_config(trial), head=None)
            return spec.derive_variant(self.repeater.world, why="a trial under the job's config", source=source)

        return self._run_variants(
            TrialVariant(
                name=trial.name,
                cause=CauseName.MODEL_CONFIG,
                says=trial.says,
                try_next=trial.try_next,
                derive_spec=partial(derive, trial),
                is_stated=True,
            )
            for trial in list_config_trials(spec.source.config, spec.actor.num_layers, captured, self._config_keys)
        )

    def _try_bf16(self, spec: ResolvedReplay) -> list[TrialResult]:
        """Run the pass in bf16, where the replay computes in fp32. All ranks must call this."""
        if not self._may_round or spec.actor.has_user_model:
            return []

        def derive() -> ResolvedReplay:
            actor = replace(spec.actor, dtype=Dtype.BF16)
            # What the job computes its logits in is bf16 then, before any cast.
            source = replace(spec.source, head=None)
            return spec.derive_variant(self.repeater.world, why="a trial in bf16", actor=actor, source=source)

        variant = TrialVariant(
            name="all in bf16",
            cause=CauseName.DTYPE,
            says="the job's model computes in bf16 throughout",
            try_next="--dtype bf16",
            derive_spec=derive,
            coarsens=True,
        )
        return self._run_variants([variant])

    def _run_variants(self, variants: Iterable[TrialVariant]) -> list[TrialResult]:
        """Run the pass once through an actor of each variant. All ranks must call this."""
        own: dict[str, OwnTrial] = {}
        for variant in variants:
            error: Exception | None = None
            try:
                with self._open(variant.derive_spec()) as actor:
                    log_probs_BA = actor.compute(feed_as_captured(self.rows))
                self.num_forwards += 1
                own[variant.name] = OwnTrial(
                    match=self._match(log_probs_BA, coarsens=variant.coarsens),
                    cause=variant.cause,
                    says=variant.says,
                    try_next=variant.try_next,
                    is_stated=variant.is_stated,
                )
            except Exception as reason:
                error = reason
            if any(self._gather(error is not None)):
                why = "failed on another rank" if error is None else describe_error(error)
                self.not_run.append(f"{variant.name}: {why}")
                own.pop(variant.name, None)
                if self.repeater.world.world_size > 1:
                    break
        return self._join(own)

    @property
    def _config_keys(self) -> list[str]:
        """The settings of the config in which the job's model is another one."""
        differences = self.settings.model_differences
        return [difference.where for difference in differences if difference.kind is ModelDifferenceKind.CONFIG]

    # All ranks together

    def _gather(self, value: Any) -> list[Any]:
        return self.repeater.world.gather(value)

    def _join(self, own: Mapping[str, OwnTrial], *, is_wrong: bool | None = None) -> list[TrialResult]:
        is_wrong = self._is_wrong if is_wrong is None else is_wrong
        return join_ranks(own, self.repeater.world, is_wrong=is_wrong)
