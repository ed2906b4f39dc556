"""Tell that the tokens which a job fed are not what they were meant to be."""

from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.evidence import CauseEvidence, CauseRule, name_time
from replay.verdict.causes.trial_rules import EXPLAINED
from replay.verdict.token_traits import TokenTraits, describe_crossing, describe_inverted_mask, describe_other_side


def find_mask_of_padding(evidence: CauseEvidence) -> Cause | None:
    """Tell that the attention mask hides the texts and shows the padding, so that the loss here is of no token."""
    first = evidence.first_wrong
    text = describe_inverted_mask(_list_token_traits(evidence))
    if first is None or not evidence.is_forward_wrong or text is None:
        return None
    return Cause(
        name=CauseName.MASK,
        sureness=Sureness.IS,
        sentence=f"{text}, {name_time(first)}",
        try_next="an attention mask of 1 for tokens and 0 for padding",
        explains=EXPLAINED,
        entails=(CauseName.OTHER_TOKENS,),
    )


def find_labels_of_other_side(evidence: CauseEvidence) -> Cause | None:
    """Tell that labels are padded on the other side than the tokens that they are of."""
    text = describe_other_side(_list_token_traits(evidence))
    return _name_other_targets(evidence, text, "pad labels on the side on which the tokenizer pads")


def find_targets_of_next_rows(evidence: CauseEvidence) -> Cause | None:
    """Tell that the last place of each row is trained on the first token of the next one."""
    text = describe_crossing(_list_token_traits(evidence))
    return _name_other_targets(evidence, text, "in the job's loss shift each row: logits[:, :-1] against labels[:, 1:]")


def _name_other_targets(evidence: CauseEvidence, text: str | None, try_next: str) -> Cause | None:
    """Name what the recorded tokens say of their targets, `text`, as the cause, if a number is wrong."""
    first = evidence.first_wrong
    if first is None or text is None:
        return None
    return Cause(
        name=CauseName.OTHER_TOKENS,
        sureness=Sureness.IS,
        sentence=f"{text}, {name_time(first)}",
        try_next=try_next,
        explains=EXPLAINED,
    )


def _list_token_traits(evidence: CauseEvidence) -> list[TokenTraits]:
    """List the tokens of the passes that train."""
    passes = (compared.recorded for compared in evidence.passes if compared.recorded.trains)
    return [recorded.tokens for recorded in passes if recorded.tokens is not None]


RULES = (
    CauseRule(
        name=CauseName.MASK,
        find=find_mask_of_padding,
        means="the attention mask is 1 for padding and 0 for tokens",
        told_by="the tokens that the mask calls real, which are all of one id, and those that it hides",
        job="mask-inverted",
    ),
    CauseRule(
        name=CauseName.OTHER_TOKENS,
        find=find_labels_of_other_side,
        means="labels are padded on the other side than the tokens",
        told_by="labels that are their row's own tokens, moved by the length of its padding",
        job="labels-on-other-side",
    ),
    CauseRule(
        name=CauseName.OTHER_TOKENS,
        find=find_targets_of_next_rows,
        means="the last place of a row is trained on the first token of the next row",
        told_by="the targets of the job's loss in the rows' last places, which are the next rows' first tokens",
        job="shifted-across-rows",
    ),
)
