"""Say that log-probs which a job noted are of other tokens or other sequences than the policy's own beside them.

note       old policy: the noted log-probs of 96 tokens are those of the token before each: [...]
note       reference: 6 of 8 sequences have the noted log-probs of another one: [...]

A policy that a few steps moved, a reference and a rollout engine give a token nearly the log-prob that the policy gives
it, and neighbouring tokens and other sequences others. The loss is computed as the job did, so this judges nothing.

Shape letters: B rows, S tokens a row, A columns of a noted tensor (a row's last tokens), W columns that are kept.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import StatisticsError, correlation

import torch
from torch import Tensor

from replay.options.declarations.tensor_names import OLD_LOG_PROBS, REF_LOG_PROBS, ROLLOUT_LOG_PROBS
from replay.output.text import Pairs, pluralise

OLD_POLICY, REFERENCE, ROLLOUT = "old policy", "reference", "rollout engine"
# The names under which a job notes the log-probs of each source.
NOTE_NAMES_BY_SOURCE = {OLD_POLICY: OLD_LOG_PROBS, REFERENCE: REF_LOG_PROBS, ROLLOUT: ROLLOUT_LOG_PROBS}
# So many columns are kept, from the first one with an action on.
MAX_COLUMNS = 256
# Other tokens' log-probs are so many times as far from the policy's as those of the same tokens.
LEAST_FARTHER = 4.0
# Fewer tokens, of all passes and of a sequence, may be near by chance; and fewer sequences.
LEAST_TOKENS, LEAST_TOKENS_OF_ROW, LEAST_ROWS = 16, 6, 2
# A sequence whose log-probs are nearer to the policy's is not sought among others, nor are more than so many.
LEAST_APART, MAX_SOUGHT = 0.1, 64
# Log-probs of so many tokens that go with the policy's no better than this are of something else.
MANY_TOKENS, GOES_NOT_WITH = 64, 0.3
# Log-probs of the same logits at another temperature, or in another dtype, go with the policy's this well.
GOES_WITH = 0.98
# A mean distance, in nats, up to which two lists are of one model.
SAME_LOG_PROBS = 1e-6
# Engines and dtypes of one policy are nearer than this mean distance.
FAR_LOG_PROBS = 0.1
# The largest weight of a divergence that a job's loss may have unseen; jobs have 0.001 to 0.1.
MAX_UNSEEN_WEIGHT = 5e-4

Row = Sequence[float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class NotedLogProbs:
    """Log-probs of a pass that the job noted, beside the replay's own of the same tokens; None where there is none.

    digests  of each row's tokens
    own      [B, W] the replay's, of action tokens
    noted    [B, W] the job's, by whose they are
    """

    digests: Sequence[int] = ()
    own: Sequence[Row] = ()
    noted: Mapping[str, Sequence[Row]] = field(default_factory=dict)


def has_noted_log_probs(names: Container[str]) -> bool:
    """Tell whether log-probs are among the tensors with these names."""
    return any(name in names for names_of_source in NOTE_NAMES_BY_SOURCE.values() for name in names_of_source)


def collect_noted_log_probs(
    tensors: Mapping[str, Tensor], ids_BS: Tensor, own_BS: Tensor, has_own_BS: Tensor
) -> NotedLogProbs | None:
    """Collect the log-probs that the job noted of a pass. None if it noted none, or only sums of rows.

    tensors     those that the job gave the model, and those that it noted
    own_BS      the replay's log-probs, each in the place of its token
    has_own_BS  True where `own_BS` has the log-prob of an action token
    """
    found = {
        source: next((tensors[name] for name in names if name in tensors), None)
        for source, names in NOTE_NAMES_BY_SOURCE.items()
    }
    noted = {label: tensor for label, tensor in found.items() if tensor is not None and _fits(tensor, ids_BS)}
    if not noted or not bool(has_own_BS.any()):
        return None
    num_columns = min(tensor.shape[1] for tensor in noted.values())
    has_own_BA = has_own_BS[:, -num_columns:]
    if not bool(has_own_BA.any()):
        return None
    first = int(has_own_BA.any(dim=0).nonzero()[0])
    columns = slice(first, first + MAX_COLUMNS)
    has_own_BW = has_own_BA[:, columns]

    def keep(values_BA: Tensor) -> list[list[float | None]]:
        pairs = zip(values_BA[:, -num_columns:][:, columns].tolist(), has_own_BW.tolist(), strict=True)
        return [[value if has else None for value, has in zip(*pair, strict=True)] for pair in pairs]

    return NotedLogProbs(
        digests=[hash(tuple(row)) for row in ids_BS.tolist()],
        own=keep(own_BS.double()),
        noted={label: keep(tensor.detach().double().cpu()) for label, tensor in noted.items()},
    )


def _fits(tensor: Tensor, ids_BS: Tensor) -> bool:
    return tensor.ndim == 2 and len(tensor) == len(ids_BS) and 1 < tensor.shape[1] <= ids_BS.shape[1]


def describe_noted_log_probs(
    steps: Sequence[tuple[int | None, NotedLogProbs]], with_job_weights: Sequence[tuple[int | None, NotedLogProbs]]
) -> Pairs:
    """Describe noted log-probs that are not of their own tokens.

    steps             the number of steps before each pass, and what was noted of it
    with_job_weights  those of passes that are known to run on the job's weights here
    """
    passes = [noted for _, noted in steps]
    labels = dict.fromkeys(label for noted in passes for label in noted.noted)
    lines: Pairs = []
    for label in labels:
        text = (
            _describe_shift(label, passes)
            or _describe_other_rows(label, steps)
            or _describe_unlike(label, [noted for _, noted in with_job_weights])
        )
        if text is None and label == OLD_POLICY:
            first = [noted for step, noted in with_job_weights if step == 0]
            text = _describe_renewal(steps) or _describe_first_step(first)
        lines += [] if text is None else [("note", f"{label}: {text}")]
    return lines


def _describe_shift(label: str, passes: Sequence[NotedLogProbs]) -> str | None:
    """Say that the log-probs stand one place before or after their tokens."""
    rows = _pair_rows(label, passes)
    for places, neighbour in ((1, "before"), (-1, "after")):
        # Each number is held against both tokens, so that the two distances are of the same numbers.
        own, other, values = _align(rows, places)
        if len(values) < LEAST_TOKENS:
            continue
        apart, apart_moved = _measure(own, values), _measure(other, values)
        if apart_moved * LEAST_FARTHER < apart:
            return (
                f"the noted log-probs of {pluralise(len(values), 'token')} are those of the token {neighbour} each: "
                f"they are {apart_moved:.2g} from the policy's of that one, and {apart:.2g} from the token's own"
            )
    return None


def _pair_rows(label: str, passes: Sequence[NotedLogProbs]) -> list[tuple[Row, Row]]:
    """Pair each row of the policy's log-probs with the noted ones."""
    return [
        pair for noted in passes if label in noted.noted for pair in zip(noted.own, noted.noted[label], strict=True)
    ]


def _correlate(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the correlation of the first numbers with the second; None where all of either are equal."""
    try:
        return correlation(*zip(*pairs, strict=True))
    except StatisticsError:
        return None


def _align(rows: Sequence[tuple[Row, Row]], places: int) -> tuple[list[float], list[float], list[float]]:
    """List the policy's log-prob of a token and of the one `places` before it, and the noted one of the token."""
    triples = [
        (own[place], own[place - places], noted[place])
        for own, noted in rows
        for place in range(max(0, places), len(own) + min(0, places))
    ]
    known = [
        (own, other, value)
        for own, other, value in triples
        if own is not None and other is not None and value is not None and math.isfinite(own + other + value)
    ]
    return [own for own, _, _ in known], [other for _, other, _ in known], [value for _, _, value in known]


def _measure(own: Sequence[float], noted: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(own, noted, strict=True)) / len(noted)


def _measure_rows(own: Row, noted: Row) -> float | None:
    """Measure the mean distance where both have a number; None where too few have."""
    pairs = _list_pairs(own, noted)
    return _measure(*zip(*pairs, strict=True)) if len(pairs) >= LEAST_TOKENS_OF_ROW else None


def _list_pairs(own: Row, noted: Row) -> list[tuple[float, float]]:
    return [
        (a, b)
        for a, b in zip(own, noted, strict=False)
        if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)
    ]


def _describe_other_rows(label: str, steps: Sequence[tuple[int | None, NotedLogProbs]]) -> str | None:
    """Say how many sequences have the log-probs of another one of the passes before the same step."""
    by_step: dict[int | None, list[tuple[Row, Row]]] = {}
    for step, noted in steps:
        if label in noted.noted:
            by_step.setdefault(step, []).extend(zip(noted.own, noted.noted[label], strict=True))
    num_rows = num_sought = num_moved = 0
    for rows_of_step in by_step.values():
        for own, noted_row in rows_of_step:
            apart = _measure_rows(own, noted_row)
            if apart is None or num_sought == MAX_SOUGHT:
                continue
            num_rows += 1
            if apart < LEAST_APART:
                continue
            num_sought += 1
            others = (_measure_rows(other, noted_row) for other, _ in rows_of_step)
            least = min((value for value in others if value is not None), default=math.inf)
            num_moved += least * LEAST_FARTHER < apart
    if num_moved < LEAST_ROWS:
        return None
    return (
        f"{num_moved} of {pluralise(num_rows, 'sequence')} have the noted log-probs of another one of their step, as "
        "the policy gives these: were rows sorted or shuffled without them?"
    )


def _describe_unlike(label: str, passes: Sequence[NotedLogProbs]) -> str | None:
    """Say that the log-probs have nothing to do with the policy's."""
    pairs = [pair for rows in _pair_rows(label, passes) for pair in _list_pairs(*rows)]
    if len(pairs) < MANY_TOKENS:
        return None
    both = _correlate(pairs)
    if both is None or both > GOES_NOT_WITH:
        return None
    return (
        f"the noted log-probs of {pluralise(len(pairs), 'token')} do not go with the policy's (correlation "
        f"{both:.2f}): they may be of other tokens"
    )


def _describe_first_step(passes: Sequence[NotedLogProbs]) -> str | None:
    """Say that the old policy's log-probs are not the policy's before it has been stepped."""
    pairs = [pair for rows in _pair_rows(OLD_POLICY, passes) for pair in _list_pairs(*rows)]
    if len(pairs) < LEAST_TOKENS:
        return None
    apart = _measure(*zip(*pairs, strict=True))
    if apart < FAR_LOG_PROBS:
        return None
    both = _correlate(pairs) or 0.0
    question = (
        "is the temperature or dtype another one?"
        if both > GOES_WITH
        else "are they of the logits at each token, and not of those before it, with dropout, or of another model?"
    )
    return (
        f"before the first step the noted log-probs of {pluralise(len(pairs), 'token')} are {apart:.2g} from the "
        f"policy's on average (correlation {both:.2g}), and the old policy is the policy then: {question}"
    )


def _describe_renewal(steps: Sequence[tuple[int | None, NotedLogProbs]]) -> str | None:
    """Say that the old policy is renewed between the steps on the same rows, so that it is never an old one."""
    first: dict[int, tuple[int, Row]] = {}
    num_again = num_renewed = 0
    for step, noted in steps:
        if step is None or OLD_POLICY not in noted.noted:
            continue
        for digest, row, own in zip(noted.digests, noted.noted[OLD_POLICY], noted.own, strict=True):
            first_step, first_row = first.setdefault(digest, (step, row))
            apart = _measure_rows(row, first_row) if step != first_step else None
            if apart is None:
                continue
            num_again += 1
            from_own = _measure_rows(own, row)
            num_renewed += apart > SAME_LOG_PROBS and from_own is not None and from_own * LEAST_FARTHER < apart
    if num_renewed < LEAST_ROWS or num_renewed != num_again:
        return None
    return (
        f"{pluralise(num_renewed, 'sequence')} came again in a later step, and with log-probs of the policy of that "
        "step: each ratio is 1, and nothing is clipped. Compute them once, before the first step on the rows"
    )


def describe_absent_divergence(passes: Sequence[tuple[NotedLogProbs, float]]) -> Pairs:
    """Say that the job's loss holds no KL divergence to the reference whose log-probs it noted.

    In a first step the policy is its reference, whose divergence is 0, so a pass without a divergence tells nothing.

    passes  whose loss is the job's and has no divergence, each with the largest difference that would not be seen
    """
    weights = []
    for noted, bound in passes:
        divergences = list(list_divergences(noted))
        mean = sum(divergences) / max(len(divergences), 1)
        weights += [bound / mean] if mean > 0 else []
    known = [weight for weight in weights if weight <= MAX_UNSEEN_WEIGHT]
    if not known:
        return []
    text = (
        f"its log-probs were noted, and the job's loss holds no KL divergence from it in "
        f"{pluralise(len(known), 'pass')} (at most {max(known):.1g} times one): its coefficient is 0, or never came to "
        "the loss. Right where the rewards hold it"
    )
    return [("note", f"{REFERENCE}: {text}")]


def list_divergences(noted: NotedLogProbs) -> Iterator[float]:
    """Yield the estimate k3 of the KL divergence of the policy to the reference, of each token."""
    for own, reference in zip(noted.own, noted.noted.get(REFERENCE, ()), strict=False):
        for value, other in _list_pairs(own, reference):
            yield math.expm1(min(other - value, 20.0)) - (other - value)


def place_own_log_probs(
    log_probs_BA: Tensor, has_BA: Tensor, *, first_column: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Place log-probs [B, A], and where there are any, at their tokens, [B, S].

    first_column  where the first of the A log-probs belongs. It is negative where there are more of them than tokens:
                  the first ones belong to none
    """
    num_before, begin = max(0, -first_column), max(0, first_column)
    width = num_tokens - begin
    own_BS = log_probs_BA.new_zeros(len(log_probs_BA), num_tokens)
    has_BS = torch.zeros_like(own_BS, dtype=torch.bool)
    own_BS[:, begin:] = log_probs_BA[:, num_before : num_before + width]
    has_BS[:, begin:] = has_BA[:, num_before : num_before + width]
    return own_BS, has_BS
