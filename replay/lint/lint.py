"""Run all checks on the recorded passes of a job. What they say never changes a verdict."""

from collections.abc import Collection, Mapping, Sequence

from capture.file_format.capture_file import read_call
from capture.file_format.listing import CaptureLocation
from capture.file_format.micro_batch import CaptureError
from replay.lint.remark import LintRemark, LintSubject, Weight
from replay.lint.token_checks import check_tokens
from replay.lint.training_checks import check_training
from replay.options.spec import LossName
from replay.output.text import Pairs
from replay.verdict.causes.cause import CauseName
from replay.verdict.recorded_pass import RecordedPass, WeightComparison, read_recorded_pass
from replay.verdict.special_tokens import SpecialTokens, merge_text_config

# Under a verdict.
MAX_NOTES = 3


def lint(subject: LintSubject) -> list[LintRemark]:
    """Return the remarks on a recording, the most telling first."""
    return sorted([*check_tokens(subject), *check_training(subject)], key=lambda remark: remark.weight)


def format_notes(
    remarks: Sequence[LintRemark], *, told: Collection[str], causes: Collection[CauseName], command: str
) -> Pairs:
    """Return the first remarks as lines under a verdict, and how many more there are.

    told     topics that other lines below the verdict have told already
    causes   those that the verdict names
    command  shows all remarks
    """
    new = [
        remark
        for remark in remarks
        if remark.weight is not Weight.FACT and remark.topic not in told and remark.cause not in causes
    ]
    notes = [("note", f"{remark.topic}: {remark.text}") for remark in new[:MAX_NOTES]]
    num_more = len(new) - len(notes)
    return [*notes, ("note", f"and {num_more} more: {command}")] if num_more else notes


def keep_one_of_each(passes: Sequence[RecordedPass]) -> list[RecordedPass]:
    """Return one of each rank and forward: a replay may feed a pass several times, or to several ranks."""
    return list({(recorded.rank, recorded.forward_number): recorded for recorded in reversed(passes)}.values())[::-1]


def read_unreplayed_pass(capture: CaptureLocation, special_tokens: SpecialTokens) -> RecordedPass | None:
    """Read what the job recorded of a pass that is not replayed; None where that cannot be read."""
    try:
        call = read_call(capture.path)
        samples = call.weights
        weights = WeightComparison(
            num_parameters=0 if samples is None else samples.num_parameters,
            is_sharded=samples is not None and samples.is_sharded,
        )
        return read_recorded_pass(call, call.micro_batch(), LossName.STAND_IN, weights, special_tokens)
    except CaptureError:
        return None


def read_vocab_size(config: Mapping[str, object]) -> int | None:
    """Return how many token ids a model of this config knows; None where the config does not say."""
    vocab_size = merge_text_config(config).get("vocab_size")
    return vocab_size if isinstance(vocab_size, int) else None


def has_router_loss(config: Mapping[str, object]) -> bool:
    """Tell whether a model of this config adds a loss of its routers to its own."""
    settings = merge_text_config(config)
    return bool(settings.get("output_router_logits") and settings.get("router_aux_loss_coef"))
