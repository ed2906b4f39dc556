"""Check the tokens that a job fed: padding under the mask, labels of other tokens, rows that come again, positions."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from replay.lint.remark import LintRemark, LintSubject, Weight
from replay.output.text import pluralise
from replay.verdict.causes.cause import CauseName
from replay.verdict.recorded_pass import RecordedPass
from replay.verdict.token_traits import (
    NUM_FIRST_TOKENS,
    RowTraits,
    TokenTraits,
    describe_crossing,
    describe_inverted_mask,
    describe_other_side,
)

# A run of padding at a row's edge is no chance from this length on; a shorter one has to stand in several rows.
_CERTAIN_RUN = 4
_MIN_ROWS_OF_SHORT_RUNS = 2
# An id that ends a text may stand there twice: a template writes it, and a tokenizer.
_NUM_ENDS = 2
# Rows that begin alike have a prompt in common from this many tokens on.
_MIN_PROMPT = 4
_MIN_ROWS_WITH_PROMPT = 4
# So many steps on the same rows are no chance.
_MIN_STEPS = 3
# Fewer steps may come in one order twice by chance.
_MIN_STEPS_OF_EPOCH = 4
# A last label may be the row's first token by chance.
_MIN_WRAPPED = 4
# Of rows that were cut off, this share is many; and of others, this share is most.
_MANY, _MOST = 0.1, 0.9
# Fewer rows than these may begin or end alike by chance.
_MIN_ALIKE = 4


def check_tokens(subject: LintSubject) -> Iterator[LintRemark]:
    """Check the tokens of all passes."""
    traits = [recorded.tokens for recorded in subject.trained if recorded.tokens is not None]
    if (text := describe_inverted_mask(traits)) is not None:
        on_padding = sum(tokens.num_on_padding for tokens in traits)
        text += f", with {pluralise(on_padding, 'label')}" if on_padding else ""
        yield LintRemark(topic="mask", text=text, weight=Weight.WRONG_TARGETS, cause=CauseName.MASK)
        # What else these masks seem to say of padding says the same.
        traits = [replace(tokens, num_on_padding=0, num_between=0, padding_ids={}) for tokens in traits]
    yield from _check_loss_gradients(traits)
    yield from _check_loss_mask(traits)
    yield from _check_left_out(traits)
    yield from _check_actions(traits)
    yield from _check_targets(traits)
    yield from _check_unlabelled(traits)
    yield from _check_labelled_padding(traits, subject)
    yield from _check_padding(traits, subject)
    yield from _check_outside_mask(traits, subject)
    yield from _check_vocabulary(traits, subject)
    yield from _check_positions(traits, subject)
    yield from _check_prompts(traits)
    yield from _check_begins(traits, subject)
    yield from _check_template(traits)
    yield from _check_ends(traits, subject)
    yield from _check_turn_ends(traits, subject)
    yield from _check_cut_ends(traits, subject)
    yield from _check_cut_begins(traits)
    yield from _check_inner_begins(traits)
    yield from _check_inner_ends(traits, subject)
    yield from _check_rows(subject.trained)


def _check_loss_gradients(traits: Sequence[TokenTraits]) -> Iterator[LintRemark]:
    """Say so where the job's loss gave its logits a gradient that is not finite, and at which tokens."""
    broken = [tokens for tokens in traits if tokens.num_not_finite]
    if broken:
        number = sum(tokens.num_not_finite for tokens in broken)
        on_padding = sum(tokens.num_not_finite_on_padding for tokens in broken)
        places = "all of them before padding" if on_padding == number else f"{on_padding:,} of them before padding"
        hint = ": fill what is masked with a finite number before exp, log or a division, not behind it"
        yield LintRemark(
            topic="gradient",
            text=f"the job's loss gave its logits a gradient that is not finite at {pluralise(number, 'position')}, "
            f"{places}, in {len(broken)} of {pluralise(len(traits), 'training pass')}{hint if on_padding else ''}",
            weight=Weight.WRONG_TARGETS,
        )


def _check_loss_mask(traits: Sequence[TokenTraits]) -> Iterator[LintRemark]:
    """Say so where the job's own loss is of tokens that its mask leaves out. A token in it may have no gradient."""
    if outside := sum(tokens.num_outside_mask for tokens in traits):
        total = sum(tokens.num_with_gradient for tokens in traits)
        yield LintRemark(
            topic="loss",
            text=f"{outside} of {pluralise(total, 'position')} that the job's loss gives a gradient are outside of the "
            "mask that the job gave for it: is the mask of other places, or not applied?",
            weight=Weight.WRONG_TARGETS,
            cause=CauseName.OTHER_TOKENS,
        )


def _check_left_out(traits: Sequence[TokenTraits]) -> Iterator[LintRemark]:
    """Say so where the job's own loss leaves tokens out at regular places inside of what it is of."""
    spacings = Counter(tokens.left_out_spacing for tokens in traits if tokens.left_out_spacing is not None)
    if spacings:
        [(spacing, _)] = spacings.most_common(1)
        number = sum(tokens.num_left_out for tokens in traits)
        yield LintRemark(
            topic="loss",
            text=f"{number} positions between others that the job's loss gives a gradient have none, one every "
            f"{spacing} tokens, in {_count(spacings.total(), len(traits))}: does each chunk of the loss lose a target?",
            weight=Weight.WRONG_TARGETS,
        )


def _check_actions(traits: Sequence[TokenTraits]) -> Iterator[LintRemark]:
    if idle := sum(tokens.num_idle_actions for tokens in traits):
        total = sum(tokens.num_actions for tokens in traits)
        yield LintRemark(
            topic="action mask",
            text=f"{idle} of {pluralise(total, 'action token')} are padding, outside the attention mask or behind the "
            "token that ends a row's text: does the loss count them?",
            weight=Weight.WRONG_TARGETS,
        )


def _check_targets(traits: Sequence[TokenTraits]) -> Iterator[LintRemark]:
    """Say so where all labels of a pass stand in another place than the model takes them to stand."""
    texts = {
        (False, -1): "labels are the tokens before, so each token predicts itself",
        (False, 1): "labels are the next tokens already: a model that shifts them itself makes each token predict the "
        "one after the next",
        (False, 2): "labels are the tokens two places later, so a model that shifts them predicts three ahead",
        (True, -1): "shift_labels are the tokens before",
        (True, 0): "shift_labels are the tokens themselves, so each token predicts itself",
        (True, 2): "shift_labels are the tokens two places later, so each token predicts the one after the next",
    }
    found: Counter[str] = Counter()
    for tokens in traits:
        text = None if tokens.label_offset is None else texts.get((tokens.has_shifted_labels, tokens.label_offset))
        found.update([] if text is None else [text])
    for text, number in found.items():
        yield LintRemark(
            topic="labels",
            text=f"in {_count(number, len(traits))} the {text}",
            weight=Weight.WRONG_TARGETS,
            cause=CauseName.OTHER_TOKENS,
        )
    num_rows = sum(tokens.num_last_labels for tokens in traits)
    if (crossing := describe_crossing(traits)) is not None:
        yield LintRemark(topic="labels", text=crossing, weight=Weight.WRONG_TARGETS, cause=CauseName.OTHER_TOKENS)
    elif sum(tokens.num_wrapped for tokens in traits) == num_rows >= _MIN_WRAPPED:
        yield LintRemark(
            topic="labels",
            text=f"in {pluralise(num_rows, 'row')} the last token is to predict the row's first one, as after a roll",
            weight=Weight.WRONG_TARGETS,
            cause=CauseName.OTHER_TOKENS,
        )
    if (other_side := describe_other_side(traits)) is not None:
        yield LintRemark(topic="labels", text=other_side, weight=Weight.WRONG_TARGETS, cause=CauseName.OTHER_TOKENS)
        return
    # Where each token is its own target, the last one of a row stands where the next would be padding.
    if not found and (on_padding := sum(tokens.num_on_padding for tokens in traits if tokens.has_mask)):
        total = sum(tokens.num_labels for tokens in traits)
        # A mask of the tokens that predict lets through the first padding alone.
        is_past_end = sum(tokens.num_past_end for tokens in traits if tokens.has_mask) == on_padding
        how = ", as where a loss mask is not shifted with the labels" if is_past_end else ""
        yield LintRemark(
            topic="labels",
            text=f"{on_padding} of {pluralise(total, 'label')} are of padding, outside the attention mask{how}",
            weight=Weight.WRONG_TARGETS,
        )
    if not found and (of_others := sum(tokens.num_of_others for tokens in traits)):
        total = sum(tokens.num_labels for tokens in traits)
        num_rows = sum(tokens.num_rows_of_others for tokens in traits)
        whose = f", and those of {pluralise(num_rows, 'row')} are the tokens of another row" if num_rows else ""
        yield LintRemark(
            topic="labels",
            text=f"{of_others} of {pluralise(total, 'label')} are not the token at their place{whose}: are they labels "
            "of other rows?",
            weight=Weight.WRONG_TARGETS,
        )


def _check_unlabelled(traits: Sequence[TokenTraits]) -> Iterator[LintRemark]:
    """Say so where rows have no label and others have. A rank of a ring has parts of rows, which begin elsewhere."""
    labelled = [tokens for tokens in traits if tokens.num_labels and not any(tokens.first_positions)]
    total = sum(len(tokens.rows) for tokens in labelled)
    if number := sum(tokens.num_unlabelled for tokens in labelled):
        yield LintRemark(
            topic="labels",
            text=f"{number} of {pluralise(total, 'row')} have no label, in passes that have some: are these answers "
            "that were truncated away?",
            weight=Weight.SETTING,
        )

    # A mean of no loss is no number, or 0.
    known = [
        tokens for tokens in traits if (tokens.num_labels or tokens.num_unlabelled) and not any(tokens.first_positions)
    ]
    if number := sum(not tokens.num_labels for tokens in known):
        yield LintRemark(
            topic="labels",
            text=f"no token has a label in {_count(number, len(known))}: are these answers that were truncated away, "
            "or passes that only fill a step up?",
            weight=Weight.NO_TRAINING if number == len(known) else Weight.SETTING,
        )


def _check_labelled_padding(traits: Sequence[TokenTraits], subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where rows end in padding with labels, which no mask tells: a job without one, or with one of ones."""
    ends = {*subject.eos_token_ids, subject.pad_token_id}
    rows = [
        row
        for tokens in traits
        if not tokens.has_actions
        for row in tokens.rows
        if row.num_labelled_tail > _NUM_ENDS and (row.trailing[0] in ends or row.trailing[1] >= _CERTAIN_RUN)
    ]
    if len(rows) >= _MIN_ROWS_OF_SHORT_RUNS:
        [(id_, _)] = Counter(row.trailing[0] for row in rows).most_common(1)
        num_rows = sum(len(tokens.rows) for tokens in traits)
        yield LintRemark(
            topic="labels",
            text=f"{len(rows)} of {pluralise(num_rows, 'row')} end in token {id_} again and again, with "
            f"{sum(row.num_labelled_tail for row in rows)} labels: is padding trained?",
            weight=Weight.WRONG_TARGETS,
        )


def _guess_padding_id(traits: Sequence[TokenTraits]) -> int | None:
    """Find the id that several rows end in, again and again; None without one."""
    ends = Counter(row.trailing[0] for tokens in traits for row in tokens.rows if row.trailing[1] >= _CERTAIN_RUN)
    return next((id_ for id_, number in ends.most_common(1) if number >= _MIN_ROWS_OF_SHORT_RUNS), None)


def _check_padding(traits: Sequence[TokenTraits], subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where rows begin or end in padding that the attention mask calls real.

    The id that pads is that of all masked tokens of the pass; else the config's; else one that looks like it.
    """
    numbers: list[int] = []
    ids: Counter[int] = Counter()
    num_rows = 0
    guessed_id = _guess_padding_id(traits) if subject.pad_token_id is None else None
    usual_id = guessed_id if subject.pad_token_id is None else subject.pad_token_id
    for tokens in traits:
        padding_id = next(iter(tokens.padding_ids)) if len(tokens.padding_ids) == 1 else usual_id
        num_rows += len(tokens.rows)
        if padding_id is None:
            continue
        with_trailing = tokens.has_mask or subject.has_router_loss
        for row in tokens.rows:
            if number := _count_edge_padding(row, padding_id, subject, with_trailing=with_trailing):
                numbers.append(number)
                ids[padding_id] += 1
    certain = [number for number in numbers if number >= _CERTAIN_RUN]
    short = [number for number in numbers if 1 < number < _CERTAIN_RUN]
    is_usual = len(numbers) > _MIN_ROWS_OF_SHORT_RUNS and 2 * len(numbers) > num_rows
    if not (certain or len(short) >= _MIN_ROWS_OF_SHORT_RUNS or is_usual):
        return
    id_ = ids.most_common(1)[0][0]
    doubt = ", if that is padding" if id_ == guessed_id else ""
    rows = f"{len(numbers)} of {pluralise(num_rows, 'row')} {'begins or ends' if len(numbers) == 1 else 'begin or end'}"
    what = "calls real" if any(tokens.has_mask for tokens in traits) else "would hide, and there is no mask"
    counted = ", which the routers' loss counts" if subject.has_router_loss else ""
    yield LintRemark(
        topic="padding",
        text=f"{rows} in padding (id {id_}{doubt}) that the attention mask {what}: "
        f"{pluralise(sum(numbers), 'token')}{counted}",
        weight=Weight.WRONG_TOKENS,
        cause=CauseName.MASK,
    )


def _count_edge_padding(row: RowTraits, padding_id: int, subject: LintSubject, *, with_trailing: bool) -> int:
    """Count the padding at a row's beginning and end, where an id that ends a text may stand, too.

    with_trailing  also that at the end, which no token before it sees
    """
    trailing_id, num_trailing = row.trailing
    leading_id, num_leading = row.leading
    allowed = _NUM_ENDS if padding_id in subject.eos_token_ids else 0
    num_behind = max(0, num_trailing - allowed) if with_trailing and trailing_id == padding_id else 0
    # One such id may begin a text.
    num_before = num_leading if num_leading > 1 and leading_id == padding_id else 0
    return num_before + num_behind


def _check_outside_mask(traits: Sequence[TokenTraits], subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where tokens outside the mask are padding in part.

    What pads is an id that at least half of them are, else the config's if some are that one.
    """
    if between := sum(tokens.num_between for tokens in traits):
        yield LintRemark(
            topic="mask",
            text=f"{pluralise(between, 'token')} outside the attention mask {'is' if between == 1 else 'are'} between "
            "the tokens of a row, which do not see them. Is the pad id a token of the texts, such as their end?",
            weight=Weight.WRONG_TOKENS,
            cause=CauseName.MASK,
        )
    others = total = 0
    examples: dict[int, None] = {}
    for tokens in traits:
        usual = [id_ for id_, number in tokens.padding_ids.items() if 2 * number >= tokens.num_padding]
        padding = usual or [id_ for id_ in tokens.padding_ids if id_ == subject.pad_token_id]
        if not padding:
            continue
        known = {*padding, *subject.eos_token_ids}
        others += tokens.num_padding - sum(number for id_, number in tokens.padding_ids.items() if id_ in known)
        total += tokens.num_padding
        examples |= dict.fromkeys(id_ for id_ in tokens.padding_ids if id_ not in known)
    if others and examples:
        yield LintRemark(
            topic="mask",
            text=f"{others} of {pluralise(total, 'token')} outside the attention mask are no padding, such as id "
            f"{next(iter(examples))}",
            weight=Weight.WRONG_TOKENS,
            cause=CauseName.MASK,
        )


def _check_vocabulary(traits: Sequence[TokenTraits], subject: LintSubject) -> Iterator[LintRemark]:
    largest = max((tokens.largest_id for tokens in traits), default=-1)
    if subject.vocabulary is not None and largest >= subject.vocabulary:
        yield LintRemark(
            topic="vocabulary",
            text=f"token ids go up to {largest}, and the model's config has a vocabulary of {subject.vocabulary}",
            weight=Weight.WRONG_TOKENS,
        )
    ranges = [tokens.label_range for tokens in traits if tokens.label_range is not None]
    largest_label = max((high for _, high in ranges), default=-1)
    if subject.vocabulary is not None and largest_label >= subject.vocabulary:
        text = f"labels go up to {largest_label}, and the model's config has a vocabulary of {subject.vocabulary}"
        yield LintRemark(topic="vocabulary", text=text, weight=Weight.WRONG_TOKENS)
    if (least := min((low for low, _ in ranges), default=0)) < 0:
        text = f"a label is {least}, which is no token, and not -100, which stands for none"
        yield LintRemark(topic="labels", text=text, weight=Weight.WRONG_TARGETS)


def leaves_positions_to_model(passes: Sequence[RecordedPass]) -> bool:
    """Tell whether any row is padded on the left, and has the position ids that the model makes."""
    return any(recorded.tokens is not None and recorded.tokens.num_left_to_model for recorded in passes)


def _check_positions(traits: Sequence[TokenTraits], subject: LintSubject) -> Iterator[LintRemark]:
    borders, continued = sum(tokens.num_borders for tokens in traits), sum(tokens.num_continued for tokens in traits)
    if continued:
        yield LintRemark(
            topic="positions",
            text=f"position ids go on at {continued} of {pluralise(borders, 'border')} between packed documents",
            weight=Weight.WRONG_TOKENS,
            cause=CauseName.POSITIONS,
        )
    if restarts := sum(tokens.num_other_restarts for tokens in traits):
        yield LintRemark(
            topic="positions",
            text=f"position ids restart at {pluralise(restarts, 'token')} inside documents",
            weight=Weight.WRONG_TOKENS,
            cause=CauseName.POSITIONS,
        )
    firsts = sum((Counter(tokens.first_positions) for tokens in traits), Counter[int]())
    if len(firsts) == 1 and 0 not in firsts and firsts.total() > 1:
        [(first, number)] = firsts.items()
        yield LintRemark(
            topic="positions",
            text=f"the position ids of all {number} rows begin with {first} and not with 0",
            weight=Weight.WRONG_TOKENS,
            cause=CauseName.POSITIONS,
        )
    elif late := sum(tokens.num_late_rows for tokens in traits):
        yield LintRemark(
            topic="positions",
            text=f"position ids count the padding of {pluralise(late, 'row')} padded on the left",
            weight=Weight.WRONG_TOKENS,
            cause=CauseName.POSITIONS,
        )
    if subject.counts_padding and (number := sum(tokens.num_left_to_model for tokens in traits)):
        yield LintRemark(
            topic="positions",
            text=f"the model was given no position ids, and counts the padding of {pluralise(number, 'row')} padded on "
            "the left. Try: position ids that count real tokens alone",
            weight=Weight.WRONG_TOKENS,
            cause=CauseName.POSITIONS,
        )


def _check_prompts(traits: Sequence[TokenTraits]) -> Iterator[LintRemark]:
    """Say so where all rows begin with the same tokens, as a template makes them, and these have labels."""
    rows = [row for tokens in traits for row in tokens.rows if row.digest is not None]
    if len({row.digest for row in rows}) < _MIN_ROWS_WITH_PROMPT:
        return
    first = rows[0].first_tokens
    common = 0
    while common < NUM_FIRST_TOKENS and all(row.first_tokens[: common + 1] == first[: common + 1] for row in rows):
        common += 1
    if common >= _MIN_PROMPT and all(row.num_labelled >= common - 1 for row in rows):
        at_least = "at least " if common == NUM_FIRST_TOKENS else ""
        yield LintRemark(
            topic="labels",
            text=f"all {len(rows)} rows begin with the same {at_least}{common} tokens, which have labels: "
            "is a prompt left in the loss?",
            weight=Weight.SAME_ROWS,
        )


def _check_begins(traits: Sequence[TokenTraits], subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where all rows begin with one token twice, unless that pads."""
    rows = [row for tokens in traits for row in tokens.rows]
    begins = {row.leading for row in rows}
    if len(begins) != 1 or len({row.digest for row in rows}) < _MIN_ALIKE:
        return
    [(id_, number)] = begins
    if number == 2 and id_ != subject.pad_token_id:
        yield LintRemark(
            topic="rows",
            text=f"all {len(rows)} rows begin with token {id_} twice: does a tokenizer add one to a text that has it?",
            weight=Weight.WRONG_TOKENS,
        )


def _check_template(traits: Sequence[TokenTraits]) -> Iterator[LintRemark]:
    """Say so where all rows begin with the same few tokens, and again with these."""
    rows = [row for tokens in traits for row in tokens.rows if row.digest is not None]
    if len({row.digest for row in rows}) < _MIN_ALIKE:
        return
    first = rows[0].first_tokens
    for length in range(2, NUM_FIRST_TOKENS // 2 + 1):
        begin = first[: 2 * length]
        is_twice = len(begin) == 2 * length and begin[:length] == begin[length:] and len({*begin}) > 1
        if is_twice and all(row.first_tokens[: 2 * length] == begin for row in rows):
            yield LintRemark(
                topic="rows",
                text=f"all {len(rows)} rows begin with the same {length} tokens twice: is the chat template applied to "
                "texts that have it?",
                weight=Weight.WRONG_TOKENS,
            )
            return


def _check_turn_ends(traits: Sequence[TokenTraits], subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where ends of turns have no label though the tokens before them have, and ends of rows have one."""
    rows = [row for tokens in traits if not tokens.has_actions for row in tokens.rows]
    number = sum(row.num_unlabelled_turn_ends for row in rows)
    if number < _MIN_ALIKE or number != sum(row.num_turn_ends for row in rows):
        return
    if any(row.ends_unlabelled and row.trailing[0] in subject.eos_token_ids for row in rows):
        return
    yield LintRemark(
        topic="labels",
        text=f"token {_name_ends(subject)}, which ends a text, has no label at any of {number} places inside the rows, "
        "though the tokens before it have: is only the last turn to end?",
        weight=Weight.SETTING,
    )


def _list_whole_rows(traits: Sequence[TokenTraits]) -> list[RowTraits]:
    """List the rows that hold one text each, and are not answers that a policy generated."""
    return [
        row
        for tokens in traits
        if tokens.num_labels and not tokens.has_actions
        for row in tokens.rows
        if row.digest is not None and row.has_end is not None
    ]


def _name_ends(subject: LintSubject) -> str:
    return " or ".join(map(str, sorted(subject.eos_token_ids)))


def _are_many(cut: Sequence[RowTraits], rows: Sequence[RowTraits]) -> bool:
    """Tell whether so many of these rows were cut off that it is no chance."""
    return len({row.digest for row in cut}) >= _MIN_ALIKE and len(cut) >= _MANY * len(rows)


def _check_cut_ends(traits: Sequence[TokenTraits], subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where many rows of the greatest length lack the end that the others have.

    Rows of one length without ends are chunks of long texts, unless each has a prompt.
    """
    rows = _list_whole_rows(traits)
    most = max((row.num_tokens for row in rows), default=0)
    cut = [row for row in rows if row.num_tokens == most and not row.has_end]
    shorter = [row for row in rows if row.num_tokens < most]
    num_ended = sum(bool(row.has_end) for row in rows)
    have_ends = num_ended >= _MIN_ALIKE and sum(bool(row.has_end) for row in shorter) >= _MOST * len(shorter)
    are_all = len(cut) == len(rows) and all(row.has_prompt for row in rows)
    if not _are_many(cut, rows) or not (have_ends or are_all):
        return
    yield LintRemark(
        topic="rows",
        text=f"{len(cut)} of {pluralise(len(rows), 'row')} end after {most} tokens without token "
        f"{_name_ends(subject)}, which ends a text: were they cut off at a maximal "
        "length? Nothing in them teaches where an answer ends",
        weight=Weight.WRONG_TOKENS,
    )


def _check_cut_begins(traits: Sequence[TokenTraits]) -> Iterator[LintRemark]:
    """Say so where many rows of the greatest length do not begin as all others do."""
    rows = _list_whole_rows(traits)
    most = max((row.num_tokens for row in rows), default=0)
    firsts = {row.first_tokens[0] for row in rows if row.num_tokens < most}
    num_others = len({row.digest for row in rows if row.num_tokens < most})
    if len(firsts) != 1 or num_others < _MIN_ALIKE:
        return
    [first] = firsts
    cut = [row for row in rows if row.num_tokens == most and row.first_tokens[0] != first]
    if not _are_many(cut, rows):
        return
    yield LintRemark(
        topic="rows",
        text=f"{len(cut)} of {pluralise(len(rows), 'row')}, each of {most} tokens, do not begin with token {first}, as "
        "all shorter ones do: were their prompts cut off at a maximal length?",
        weight=Weight.WRONG_TOKENS,
    )


def _check_ends(traits: Sequence[TokenTraits], subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where the token that ends the texts never has a label, though the token before it has one.

    Where the config names the ids that end a text, it is one of these: a template may write a line's end behind its own
    end of a text. Without a mask nothing else tells padding from the end of a text.
    """
    labelled = frozenset[int]().union(*(tokens.labelled_ends for tokens in traits))
    rows = [
        row
        for tokens in traits
        for row in tokens.rows
        if row.digest is not None and (tokens.has_mask or row.trailing[0] in subject.eos_token_ids)
    ]
    numbers = Counter(row.trailing[0] for row in rows if row.ends_unlabelled)
    for id_, number in numbers.items():
        is_end = id_ in subject.eos_token_ids or (not subject.eos_token_ids and number == len(rows))
        if number >= _MIN_ALIKE and is_end and id_ not in labelled:
            what = "never has a label, though the tokens before it have"
            if all(tokens.has_actions for tokens in traits):
                what = "is never an action, though the tokens before it are"
            yield LintRemark(
                topic="labels",
                text=f"token {id_} ends {number} of {pluralise(len(rows), 'row')} and {what}: is the end of a text "
                "taken for padding?",
                weight=Weight.WRONG_TARGETS,
            )


def _check_inner_begins(traits: Sequence[TokenTraits]) -> Iterator[LintRemark]:
    """Say so where most rows hold several texts, each of which attends to those before it."""
    rows = [row for tokens in traits for row in tokens.rows if row.digest is not None]
    numbers = [row.num_inner_begins for row in rows if row.num_inner_begins]
    if len(numbers) >= _MIN_ALIKE and 2 * len(numbers) > len(rows):
        yield LintRemark(
            topic="rows",
            text=f"token {traits[0].bos_token_id}, which begins a text, stands {sum(numbers)} times inside "
            f"{len(numbers)} of {pluralise(len(rows), 'row')}, where no position id begins again: each text sees "
            "those before it. Right for turns of one talk; are texts packed here?",
            weight=Weight.WRONG_TOKENS,
        )


def _check_inner_ends(traits: Sequence[TokenTraits], subject: LintSubject) -> Iterator[LintRemark]:
    """Say so where most rows have an end of a text inside, if no begin of one tells it already."""
    rows = [row for tokens in traits for row in tokens.rows if row.digest is not None]
    number = sum(row.num_inner_ends > 0 for row in rows)
    if number >= _MIN_ALIKE and 2 * number > len(rows) and not any(row.num_inner_begins for row in rows):
        yield LintRemark(
            topic="rows",
            text=f"most hold several documents or turns (token {_name_ends(subject)}, which ends a text, inside "
            f"{number} of {pluralise(len(rows), 'row')}), and neither positions nor a mask keep them apart: they see "
            "each other. Right for turns of one talk, and a choice for pretraining",
            weight=Weight.WRONG_TOKENS,
        )


def _check_rows(trained: Sequence[RecordedPass]) -> Iterator[LintRemark]:
    """Say so where rows come to several ranks in one step, twice to one rank in a step, or in each step again."""
    by_step: dict[int, dict[int | None, Counter[int]]] = {}
    for recorded in trained:
        step = recorded.num_steps_before if recorded.num_steps_before is not None else recorded.forward_number
        if recorded.tokens is None or step is None:
            continue
        digests = by_step.setdefault(step, {}).setdefault(recorded.rank, Counter())
        digests.update(row.digest for row in recorded.tokens.rows if row.digest is not None)
    yield from _check_rows_of_ranks(by_step)
    yield from _check_rows_of_steps(by_step)


def _check_rows_of_ranks(by_step: dict[int, dict[int | None, Counter[int]]]) -> Iterator[LintRemark]:
    num_rows = num_shared = num_twice = 0
    ranks_of_shared: set[int | None] = set()
    steps_of_shared: set[int] = set()
    for step, by_rank in by_step.items():
        owners: dict[int, list[int | None]] = {}
        for rank, digests in by_rank.items():
            for digest, number in digests.items():
                owners.setdefault(digest, []).append(rank)
                num_twice += number - 1
        num_rows += len(owners)
        shared = [ranks for ranks in owners.values() if len(ranks) > 1]
        num_shared += len(shared)
        ranks_of_shared |= {rank for ranks in shared for rank in ranks}
        steps_of_shared |= {step} if shared else set()
    if num_shared:
        ranks = ", ".join(str(rank) for rank in sorted(ranks_of_shared, key=str))
        steps = pluralise(len(steps_of_shared), "step")
        yield LintRemark(
            topic="rows",
            text=f"{num_shared} of {pluralise(num_rows, 'row')} came to several ranks ({ranks}) in {steps}: right for "
            "ranks of tensor parallelism. Ranks of data parallelism need a sampler that divides the rows among them",
            weight=Weight.SAME_ROWS,
        )
    if num_twice:
        text = f"{pluralise(num_twice, 'row')} came again to the same rank before the step was over"
        yield LintRemark(topic="rows", text=text, weight=Weight.SAME_ROWS)


def _check_rows_of_steps(by_step: dict[int, dict[int | None, Counter[int]]]) -> Iterator[LintRemark]:
    steps = [{rank: set(digests) for rank, digests in by_rank.items()} for by_rank in by_step.values()]
    if len(steps) >= _MIN_STEPS and any(steps[0].values()) and all(rows == steps[0] for rows in steps):
        text = f"each of the {len(steps)} steps was fed the same rows"
        yield LintRemark(topic="rows", text=text, weight=Weight.SAME_ROWS)
        return
    for period in range(_MIN_STEPS_OF_EPOCH, len(steps) // 2 + 1):
        are_alike = all(rows == other for rows, other in zip(steps, steps[period:], strict=False))
        if are_alike and any(steps[0].values()):
            yield LintRemark(
                topic="rows",
                text=f"the rows of {period} steps came again in the same order, for {len(steps) - period} steps: are "
                "they shuffled anew in each epoch (`set_epoch`)?",
                weight=Weight.SETTING,
            )
            return


def _count(number: int, total: int) -> str:
    return f"all {pluralise(total, 'training pass')}" if number == total else f"{number} of {total} training passes"
