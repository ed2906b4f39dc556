"""Say that log-probs of the reference, or of the old policy, were noted for other sequences, or of another model.

note       reference: 4 of 8 sequences before the first step have the noted log-prob of another one, [...]

Before a job's first step the policy is its reference, so each sequence has one log-prob under both. Later they are two
models; but any model gives a longer sequence a smaller log-prob. The loss is computed as the job did in either case,
so this judges nothing.
"""

from collections.abc import Sequence
from statistics import StatisticsError, correlation

from replay.options.declarations.policy import POLICY
from replay.options.spec import ReplayParts
from replay.output.text import Pairs, pluralise
from replay.runlog.records import PassRecord
from replay.tolerances.difference import relative_difference
from replay.tolerances.job_bounds import LOSS
from replay.verdict.judge import PassEvidence
from replay.verdict.noted_log_probs import NotedLogProbs, describe_absent_divergence, describe_noted_log_probs
from replay.verdict.outcomes import Verdict
from replay.verdict.recorded_pass import RecordedPass

Passes = Sequence[tuple[PassRecord, RecordedPass]]
# Two sums of one sequence's log-probs in fp32 are no further apart, of other kernels and other padding.
SAME_SUM = 1e-4
# Of a policy that so many steps moved, a sequence's sum is farther than this from that of the policy before them.
LEAST_STEPS, UNMOVED_SUM = 3, 1e-5
REFERENCE = "reference"
# So many sequences of another one's log-prob are no chance.
LEAST_MOVED = 2
# Of so many sequences, log-probs go with lengths from the first correlation on, and do not up to the second.
LEAST_SEQUENCES, GOES_WITH, GOES_NOT_WITH = 16, 0.7, 0.3


def describe_reference(passes: Sequence[PassEvidence]) -> Pairs:
    """Describe noted log-probs that belong to other sequences, by what they are of."""
    known = [(record, recorded) for record, recorded, _ in passes if recorded is not None and record.error is None]
    labels = dict.fromkeys(label for _, recorded in known for label in recorded.noted_log_probs)
    noted = [
        (recorded, replayed.noted_log_probs)
        for _, recorded, replayed in passes
        if recorded is not None and recorded.trains and replayed.noted_log_probs is not None
    ]
    lines = describe_noted_log_probs(
        [(recorded.num_steps_before, log_probs) for recorded, log_probs in noted],
        [
            (recorded.num_steps_before, log_probs)
            for recorded, log_probs in noted
            if recorded.weight_comparison.are_same
        ],
    )
    # What single tokens tell, the sums of sequences need not tell again.
    told = [text.partition(":")[0] for _, text in lines]
    for label in labels:
        if label in told:
            continue
        text = _describe_moved(label, known) or _describe_lengths(label, known)
        text = text or (_describe_following(known) if label == REFERENCE else None)
        lines += [] if text is None else [("note", f"{label}: {text}")]
    return lines


def describe_divergence(passes: Sequence[PassEvidence], verdict: Verdict, spec: ReplayParts) -> Pairs:
    """Say so where the replay's policy loss has no KL divergence, is the job's, and the job noted a reference."""
    if spec.measure.loss != POLICY.name or spec.objective.kl_coefficient:
        return []
    losses = {
        (judged.index, judged.rank): finding
        for judged in verdict.passes
        for finding in judged.findings
        if finding.name == LOSS and finding.is_evidence and finding.agrees
    }
    known: list[tuple[NotedLogProbs, float]] = []
    for record, _, replayed in passes:
        finding = losses.get((record.index, record.rank))
        if finding is not None and finding.bound is not None and replayed.noted_log_probs is not None:
            known.append((replayed.noted_log_probs, finding.bound * max(1.0, abs(record.result.loss or 0.0))))
    return describe_absent_divergence(known)


def _describe_moved(label: str, passes: Passes) -> str | None:
    """Say which sequences have the number that the policy gives another one of their pass, before the first step."""
    moved: list[str] = []
    num_sequences = 0
    for record, recorded in passes:
        has_first_weights = recorded.num_steps_before == 0 and not recorded.weight_comparison.differing
        if not has_first_weights or set(recorded.dtypes) != {"float32"}:
            continue
        sums = record.result.row_log_probs
        own = _choose_order(recorded.noted_log_probs.get(label, ()), sums)
        num_sequences += len(own)
        for row, value in enumerate(own):
            matches = [other for other, sum_ in enumerate(sums) if relative_difference(value, sum_) <= SAME_SUM]
            if matches and row not in matches:
                moved.append(f"that of row {row} of pass {record.index + 1} is row {matches[0]}'s")
    if len(moved) < LEAST_MOVED:
        return None
    return (
        f"{len(moved)} of {pluralise(num_sequences, 'sequence')} before the first step have the noted log-prob of "
        f"another one, as the policy gives it: {moved[0]}"
    )


def _describe_lengths(label: str, passes: Passes) -> str | None:
    """Say that sequences are noted with log-probs that do not go with their lengths, as the policy's do."""
    triples = [
        triple
        for record, recorded in passes
        for triple in zip(
            record.result.row_action_tokens,
            record.result.row_log_probs,
            _choose_order(recorded.noted_log_probs.get(label, ()), record.result.row_log_probs),
            strict=False,
        )
    ]
    if len(triples) < LEAST_SEQUENCES:
        return None
    lengths, sums, noted = zip(*triples, strict=True)
    try:
        policy, other, both = -correlation(lengths, sums), -correlation(lengths, noted), correlation(sums, noted)
    except StatisticsError:
        # All are equal.
        return None
    if policy < GOES_WITH or other > GOES_NOT_WITH or both > GOES_NOT_WITH:
        return None
    return (
        f"the noted log-probs of {pluralise(len(triples), 'sequence')} do not go with their lengths (correlation "
        f"{other:.2f}, the policy's {policy:.2f}): they may be those of other sequences"
    )


def _describe_following(passes: Passes) -> str | None:
    """Say that the reference still has the policy's own log-probs after steps that moved the policy."""
    numbers = [
        (value, sum_)
        for record, recorded in passes
        if (recorded.num_steps_before or 0) >= LEAST_STEPS and set(recorded.dtypes) == {"float32"}
        for value, sum_ in zip(
            _choose_order(recorded.noted_log_probs.get(REFERENCE, ()), record.result.row_log_probs),
            record.result.row_log_probs,
            strict=False,
        )
    ]
    if len(numbers) < LEAST_MOVED or any(relative_difference(*pair) > UNMOVED_SUM for pair in numbers):
        return None
    return (
        f"from step {LEAST_STEPS + 1} on its log-probs, noted of {pluralise(len(numbers), 'sequence')}, equal the "
        "policy's of the same pass: is it the same object as the policy, and trained with it?"
    )


def _choose_order(noted: Sequence[float], sums: Sequence[float]) -> Sequence[float]:
    """Return the noted numbers in the order of the sequences; none where there are others than sequences.

    Numbers of pairs are all chosen, then all rejected ones. A pass may have each chosen one before its rejected one.
    """
    if len(noted) != len(sums):
        return ()
    half = len(noted) // 2
    alternate = [value for pair in zip(noted[:half], noted[half:], strict=False) for value in pair]
    distance, other_distance = (
        sum(abs(a - b) for a, b in zip(order, sums, strict=False)) for order in (noted, alternate)
    )
    return alternate if len(alternate) == len(sums) and 2 * other_distance < distance else noted
