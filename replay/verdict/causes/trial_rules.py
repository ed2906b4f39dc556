"""Tell the cause of a wrong forward from trials: which change of the pass gives the job's numbers."""

from collections.abc import Sequence
from functools import partial

from replay.tolerances.job_bounds import GRADIENT_QUANTITIES, STEPPED
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.evidence import CauseEvidence, CauseRule
from replay.verdict.causes.model_rules import choose_cause_name, describe_model_difference
from replay.verdict.causes.trial import FORWARD_FINDINGS, OF_CONFIG, SURE_GAIN_A_TRIAL, TrialReport, TrialResult
from replay.verdict.model_facts import ModelDifference, ModelDifferenceKind
from replay.verdict.recorded_pass import OPTIMIZER_STATE

Kind = ModelDifferenceKind
# What of the job's model may give the numbers that a guess gives, the surest first, and words in its name.
RELATED_KINDS = (
    Kind.BUFFER,
    Kind.CONFIG,
    Kind.ATTRIBUTE,
    Kind.FUNCTION,
    Kind.ATTENTION_FUNCTION,
    Kind.FORWARD,
    Kind.CLASS,
)
_ATTENTION_WORDS = ("attn", "attention", "mask", "causal", "sliding_window")
RELATED_WORDS = {
    CauseName.POSITIONS: ("rope", "rotary", "rotate", "position", "inv_freq", "wpe", "attn"),
    CauseName.MASK: _ATTENTION_WORDS,
    CauseName.DOCUMENTS_MEET: _ATTENTION_WORDS,
}
# What a wrong forward explains: its gradient is another one, too.
EXPLAINED = (*FORWARD_FINDINGS, *GRADIENT_QUANTITIES, OPTIMIZER_STATE, STEPPED)
# A trial that is so many times farther from the job than the best one is not told from rounding, and not named.
RIVAL_FACTOR = 10.0
# So many times nearer than the unchanged pass a trial has to come to be sure, and to be likely.
SURE_GAIN, LIKELY_GAIN = 10.0, 3.0
# A trial that puts fewer numbers right may do so by chance, the likelier the more trials there are.
MANY_VALUES = 8
# For each trial that ran, then.
LIKELY_GAIN_A_TRIAL = 3.0
# And in each pass that it was tried in: a loss that is near the job's for a reason is so in every pass.
SURE_GAIN_A_PASS = 20.0


def select_agreeing(report: TrialReport | None) -> Sequence[TrialResult]:
    """Select the trials that agree, without those that are much farther from the job than the best.

    A change that the recording itself states goes before all guesses.
    """
    agreeing = [result for result in report.results if result.agrees] if report is not None else []
    stated = [result for result in agreeing if result.is_stated]
    agreeing = stated or agreeing
    best = max((result.gain for result in agreeing), default=0.0)
    return [result for result in agreeing if result.gain * RIVAL_FACTOR > best]


def find_by_trial(name: CauseName, evidence: CauseEvidence) -> Cause | None:
    """Name the cause `name` if a trial of it gives the job's numbers."""
    agreeing = select_agreeing(evidence.trials)
    own = [result for result in agreeing if result.cause is name]
    if not own or evidence.trials is None:
        return None
    if not (evidence.is_forward_wrong or own[0].is_of_gradient):
        return None
    # Of code that is known to be another one a mistake is likelier than of what nothing is known of.
    best = max(own, key=lambda result: (result.is_of_stated_code, result.gain))
    others = "".join(f"; or {result.says}, which gives the same numbers" for result in agreeing if result is not best)
    has_rival = len(own) < len(agreeing) or len({result.is_of_stated_code for result in agreeing}) > 1
    known = _find_known_difference(best, evidence)
    if known is not None:
        others += f"; or {describe_model_difference(known)}, which may give them"
    sureness = _choose_sureness(best, evidence.trials, has_rival=has_rival or known is not None)
    return Cause(
        name=name,
        # What a buffer holds is at work in each pass, and the rule of model differences names it.
        sureness=Sureness.MAY_BE if known is not None and known.kind is Kind.BUFFER else sureness,
        sentence=f"{best.says}{others} ({_name_passes(evidence.trials)}, run again)",
        try_next=best.try_next,
        explains=EXPLAINED,
    )


def _find_known_difference(result: TrialResult, evidence: CauseEvidence) -> ModelDifference | None:
    """Find what the recording states to be another one in the job, and what may give the numbers of this guess."""
    words = RELATED_WORDS.get(result.cause, ())
    if result.is_stated or result.is_of_stated_code or evidence.trials is None:
        return None
    # Settings of the config are tried themselves, where that is possible.
    were_configs_tried = any(other.name.startswith(OF_CONFIG) for other in evidence.trials.results)
    related = [
        difference
        for difference in evidence.settings.model_differences
        if difference.kind in RELATED_KINDS
        and not (difference.kind is Kind.CONFIG and were_configs_tried)
        and any(word in f"{difference.where}.{difference.key}".lower() for word in words)
        # A setting that says what the guess says is no rival of it.
        and (
            difference.kind is not Kind.ATTRIBUTE or choose_cause_name(difference, is_forward=True) is not result.cause
        )
    ]
    return min(related, key=lambda difference: RELATED_KINDS.index(difference.kind), default=None)


def _name_passes(report: TrialReport) -> str:
    numbers = [index + 1 for index in (report.index, *report.confirmed_by)]
    return f"pass {numbers[0]}" if len(numbers) == 1 else f"passes {', '.join(map(str, numbers))}"


def _choose_sureness(best: TrialResult, report: TrialReport, *, has_rival: bool) -> Sureness:
    if best.is_stated:
        # That the job has this change is recorded; the trial shows that it is what makes the numbers wrong.
        is_sure = is_likely = best.gain >= LIKELY_GAIN
    elif best.num_values >= MANY_VALUES * (1 + len(report.confirmed_by)):
        is_sure, is_likely = best.gain >= SURE_GAIN, best.gain >= LIKELY_GAIN
    else:
        num_trials, gain_a_pass = len(report.results), best.gain ** (1 / (1 + len(report.confirmed_by)))
        is_sure = best.gain >= SURE_GAIN_A_TRIAL * num_trials and gain_a_pass >= SURE_GAIN_A_PASS
        is_likely = best.gain >= LIKELY_GAIN_A_TRIAL * num_trials
    if is_sure:
        return Sureness.PROBABLY if has_rival else Sureness.IS
    return Sureness.PROBABLY if is_likely and not has_rival else Sureness.MAY_BE


def _make_rule(name: CauseName, *, means: str, told_by: str, job: str) -> CauseRule:
    return CauseRule(name=name, find=partial(find_by_trial, name), means=means, told_by=told_by, job=job)


RULES = (
    _make_rule(
        CauseName.OTHER_WEIGHTS,
        means="the embedding of one token is zeros in the job",
        told_by="the numbers are wrong after that token alone, and the pass run again with zeros gives the job's",
        job="row-zeroed",
    ),
    _make_rule(
        CauseName.MODEL_CONFIG,
        means="a setting of the job's config is another one than in the model folder",
        told_by="the pass run again with the job's setting gives the job's numbers",
        job="rope-theta",
    ),
    _make_rule(
        CauseName.ADAPTER_SCALE,
        means="the job's adapter acts with another scale, or not at all",
        told_by="the pass run again with the adapter scaled gives the job's numbers",
        job="lora-dropout-adapter-twice",
    ),
    _make_rule(
        CauseName.KERNEL,
        means="attention errs: its scale, its groups of heads, its dtype; or the replay's own kernel does",
        told_by="the pass run again with other attention, or the job's rows by sdpa, gives its numbers",
        job="attention-in-bf16",
    ),
    _make_rule(
        CauseName.MODEL_CODE,
        means="the job's own norms or MLPs err: another eps, a subtracted mean, gate and up exchanged",
        told_by="the pass run again with each such mistake gives the job's numbers",
        job="gate-and-up-swapped",
    ),
    _make_rule(
        CauseName.MASK,
        means="tokens see other tokens in the job: padding, the next token, beyond the sliding window",
        told_by="the pass run again with other attention masks gives the job's numbers",
        job="causal-off-by-one",
    ),
    _make_rule(
        CauseName.DOCUMENTS_MEET,
        means="documents packed into one row see each other in the job",
        told_by="the pass run again without borders of documents gives the job's numbers",
        job="documents-visible",
    ),
    _make_rule(
        CauseName.POSITIONS,
        means="the job's model counts other positions: padding too, from 1, on from document to document",
        told_by="the pass run again with other position ids gives the job's numbers",
        job="gpt2-padding-counted",
    ),
    _make_rule(
        CauseName.DTYPE,
        means="the job rounds its logits or a module to 16 bits or TF32, or runs under autocast, in a replay of fp32",
        told_by="the pass run again in that dtype gives the job's numbers, far nearer than in fp32",
        job="logits-in-bf16",
    ),
    _make_rule(
        CauseName.OTHER_TOKENS,
        means="the job's loss counts other tokens: padding, prompts, labels shifted twice or not at all",
        told_by="the job's loss comes out over other tokens, of the same log-probs",
        job="shifted-twice",
    ),
    _make_rule(
        CauseName.OBJECTIVE,
        means="the job's loss is another function of the same log-probs or logits",
        told_by="the job's loss, or its logits' gradient, comes out of another function: a temperature, a clip",
        job="mean-of-rows",
    ),
)
