"""Hold log-probs that a trial computed against what the job recorded of the pass.

Shape letters: B rows, A columns of the action mask (the last tokens of each row).
"""

from dataclasses import dataclass, replace

from torch import Tensor

from actor_init.inputs.packing import ActorInputs, find_targets_equal_to_input_tokens
from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import MicroBatch
from replay.tolerances.job_bounds import LOG_PROBS, LOSS, TOKEN_LOG_PROBS, measure_difference
from replay.verdict.findings import Finding, VerdictSettings, compare_pass, list_dtypes
from replay.verdict.judge import PassEvidence
from replay.verdict.recorded_pass import list_action_log_probs, list_log_probs_at, read_token_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialEvaluator:
    """What a pass's log-probs are held against.

    own_pass       as the replay ran it
    prepared       the log-probs that the replay computes, by place in the captured rows
    has_objective  the replay's loss is an objective, which a trial does not compute
    """

    own_pass: PassEvidence
    settings: VerdictSettings
    call: CapturedCall
    batch: MicroBatch
    prepared: ActorInputs
    has_objective: bool

    def evaluate(self, log_probs_BA: Tensor, loss: float | None = None) -> PassEvidence:
        """Return the pass as if the replay had computed these log-probs, and this loss; None: the replay's function."""
        record, recorded, replayed = self.own_pass
        prepared = self.prepared
        is_target_BA, first_column = find_targets_equal_to_input_tokens(self.batch)
        if loss is None and not self.has_objective:
            loss = float(-log_probs_BA.sum() / prepared.action_mask_BA.sum().clamp(min=1))
        result = replace(record.result, loss=loss, row_log_probs=log_probs_BA.sum(dim=1).tolist())
        positions = read_token_positions(self.call, *self.batch.sequences_BS.shape)
        replayed = replace(
            replayed,
            log_probs_at_recorded_positions=list_log_probs_at(
                log_probs_BA,
                prepared.action_mask_BA & is_target_BA,
                positions,
                first_column=first_column,
                is_reversed=False,
            ),
            all_action_log_probs=list_action_log_probs(log_probs_BA, prepared.action_mask_BA, is_reversed=False)
            if replayed.all_action_log_probs
            else (),
        )
        return PassEvidence(replace(record, result=result), recorded, replayed)

    def find(
        self, log_probs_BA: Tensor, loss: float | None = None, settings: VerdictSettings | None = None
    ) -> list[Finding]:
        record, recorded, replayed = self.evaluate(log_probs_BA, loss)
        return [] if recorded is None else compare_pass(record, recorded, replayed, settings or self.settings)

    def _list_tokens(self, log_probs_BA: Tensor) -> list[tuple[int, int, bool]]:
        """List the sampled tokens: their row, the column that predicts them, and whether their log-prob is wrong."""
        record, recorded, replayed = self.evaluate(log_probs_BA)
        claim = next((claim for claim in recorded.claims if claim.name == TOKEN_LOG_PROBS), None) if recorded else None
        if recorded is None or claim is None:
            return []
        bound = self.settings.choose_bound(TOKEN_LOG_PROBS, list_dtypes(recorded, self.settings), 1, record.index)
        positions = read_token_positions(self.call, *self.batch.sequences_BS.shape)
        return [
            (row, column - 1, measure_difference(job_value, value) > bound)
            for (row, column), job_value, value in zip(
                positions, claim.values, replayed.log_probs_at_recorded_positions, strict=False
            )
            if value is not None
        ]

    def find_parting_column(self, log_probs_BA: Tensor) -> int | None:
        """Find the first column whose prediction is wrong, if that of the column before it is right in some row."""
        tokens = self._list_tokens(log_probs_BA)
        first = min((column for _, column, is_wrong in tokens if is_wrong), default=None)
        is_sharp = first is not None and any(column == first - 1 for _, column, is_wrong in tokens if not is_wrong)
        return first if is_sharp else None

    def find_suspect_token(self, log_probs_BA: Tensor) -> int | None:
        """Find the one token id behind which, and in whose rows alone, the predictions are wrong; None without one."""
        tokens = self._list_tokens(log_probs_BA)
        suspects: set[int] | None = None
        acquitted: set[int] = set()
        for row in {row for row, _, _ in tokens}:
            ids = self.batch.sequences_BS[row].tolist()
            first = min((column for other, column, is_wrong in tokens if other == row and is_wrong), default=len(ids))
            before = [column for other, column, is_wrong in tokens if other == row and column < first]
            num_right = max(before, default=-1) + 1
            acquitted.update(ids[:num_right])
            if first < len(ids):
                own = set(ids[num_right : first + 1])
                suspects = own if suspects is None else suspects & own
        left = (suspects or set()) - acquitted
        return left.pop() if len(left) == 1 and acquitted else None

    def has_other_numbers(self, log_probs_BA: Tensor, other: PassEvidence) -> bool:
        """Tell whether the pass with these log-probs has other numbers than `other`, beyond what rounding explains."""
        record, recorded, replayed = self.evaluate(log_probs_BA)
        dtypes = [] if recorded is None else list_dtypes(recorded, self.settings)
        result, other_result = record.result, other.record.result
        pairs = [
            (TOKEN_LOG_PROBS, number, other_number, 1)
            for number, other_number in zip(
                replayed.log_probs_at_recorded_positions, other.replayed.log_probs_at_recorded_positions, strict=False
            )
            if number is not None and other_number is not None
        ]
        rows = zip(result.row_log_probs, other_result.row_log_probs, result.row_action_tokens, strict=False)
        pairs += [
            (LOG_PROBS, number / tokens, other_sum / tokens, tokens) for number, other_sum, tokens in rows if tokens
        ]
        if result.loss is not None and other_result.loss is not None:
            pairs.append((LOSS, result.loss, other_result.loss, sum(result.row_action_tokens)))
        return any(
            measure_difference(number, other_number) > self.settings.choose_bound(name, dtypes, tokens, record.index)
            for name, number, other_number, tokens in pairs
        )
