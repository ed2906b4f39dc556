"""Tell whether the replay drew the job's dropout masks, from where the random generators stood before and after.

Equal states at both ends prove as many random numbers, and no masks: a generator's state does not tell the shapes that
were drawn. On a GPU a mask of any size moves it by little, and MKL draws a whole mask with one number. So the masks are
the job's only if besides the ends the rows, the attention kernel, the device and the form of the graph are the job's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from capture.record.generator_marks import CUDA
from replay.runlog.records import PassRecord
from replay.tolerances.difference import is_coarse
from replay.verdict.findings import Finding, FindingStatus, VerdictSettings, list_dtypes
from replay.verdict.random_draws import RandomDraws
from replay.verdict.recorded_pass import MISSING_GRADIENT, RecordedPass, ReplayedPass

MASKS = "dropout masks"
JOB_IN_EVAL_MODE = "in eval mode"
OTHER_MASKS = "the replay draws other dropout masks than the job"
# Settings that act outside attention: for these it does not matter which kernel computes attention.
_OUTSIDE_ATTENTION = (
    *("resid_pdrop", "embd_pdrop", "resid_dropout", "embedding_dropout", "embed_dropout", "hidden_dropout"),
    *("hidden_dropout_prob", "activation_dropout", "ffn_dropout", "layerdrop", "lora_dropout", "router_jitter_noise"),
)


class MaskStatus(StrEnum):
    """What is known of the masks of a pass.

    SAME          they are the job's, or neither drew any
    OTHER         they are not the job's
    NOT_PROVEN    as many numbers were drawn, and under other conditions: the masks may be other ones
    NOT_RECORDED  the job recorded no end of its generators
    """

    SAME = "same"
    OTHER = "other"
    NOT_PROVEN = "not proven"
    NOT_RECORDED = "not recorded"


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskComparison:
    """What is known of a pass's dropout masks.

    why          why they are not the job's, or may not be, with what to try
    unexplained  says that the job drew another number of random numbers than the replay, where nothing explains that
    """

    status: MaskStatus = MaskStatus.NOT_RECORDED
    why: str | None = None
    unexplained: str | None = None


PROVEN_MASKS = MaskComparison(status=MaskStatus.SAME)


def compare_masks(recorded: RecordedPass, replayed: ReplayedPass, settings: VerdictSettings) -> MaskComparison:
    """Compare what the forward drew in the job and in the replay.

    Where one of them drew nothing, that is certain whatever the conditions. Where both drew, other conditions explain
    another number; without one, another number is a fact of the job too.
    """
    job_draws, replay_draws = recorded.draws, replayed.draws
    if job_draws is None or replay_draws is None or not _has_generator_of_device(recorded, job_draws):
        return MaskComparison()
    if not job_draws.has_any and not replay_draws.has_any:
        return MaskComparison(status=MaskStatus.SAME)
    if job_draws.has_any and settings.why_no_draws is not None:
        return MaskComparison(status=MaskStatus.OTHER, why=f"{OTHER_MASKS}: {settings.why_no_draws}")
    if job_draws.has_any != replay_draws.has_any:
        difference = _describe_draws(recorded, job_draws, replay_draws, settings)
        return MaskComparison(status=MaskStatus.OTHER, why=f"{OTHER_MASKS}: {difference}", unexplained=difference)
    reason = _find_other_condition(recorded, replayed, job_draws, replay_draws, settings)
    if reason is None and replay_draws.before != job_draws.before:
        reason = "its generators did not begin where the job's did"
    if replay_draws.after == job_draws.after:
        return (
            MaskComparison(status=MaskStatus.SAME)
            if reason is None
            else MaskComparison(status=MaskStatus.NOT_PROVEN, why=f"{OTHER_MASKS}, as far as is known: {reason}")
        )
    if reason is None and CUDA in job_draws.after and may_drop_attention(settings.dropout):
        reason = "on a GPU torch takes one of several kernels for attention, and each draws its masks in its own way"
    if reason is not None:
        return MaskComparison(status=MaskStatus.OTHER, why=f"{OTHER_MASKS}: {reason}")
    difference = _describe_draws(recorded, job_draws, replay_draws, settings)
    return MaskComparison(status=MaskStatus.OTHER, why=f"{OTHER_MASKS}: {difference}", unexplained=difference)


def _has_generator_of_device(recorded: RecordedPass, job_draws: RandomDraws) -> bool:
    """Tell whether the generator of the job's device was recorded: that of another accelerator is not."""
    return recorded.environment.get("device") == "CPU" or CUDA in job_draws.after


def _describe_draws(
    recorded: RecordedPass, job_draws: RandomDraws, replay_draws: RandomDraws, settings: VerdictSettings
) -> str:
    mode = ""
    # The replay's mode is that of a pass that trains, or of one without autograd.
    if recorded.training is not None and recorded.training["model"] != recorded.trains:
        mode = f", {JOB_IN_EVAL_MODE}," if recorded.trains else ", in training mode without autograd,"
    by = f" by {', '.join(settings.dropout)}" if replay_draws.has_any and settings.dropout else ""
    replay_text = _name_number(replay_draws) if replay_draws.has_any else "none"
    return f"the job's forward{mode} drew {_name_number(job_draws)}, the replay's drew {replay_text}{by}"


def _name_number(draws: RandomDraws) -> str:
    if not draws.has_any:
        return "no random numbers"
    return "random numbers" if draws.num_drawn is None else f"{draws.num_drawn} random numbers"


def _find_other_condition(
    recorded: RecordedPass,
    replayed: ReplayedPass,
    job_draws: RandomDraws,
    replay_draws: RandomDraws,
    settings: VerdictSettings,
) -> str | None:
    """Find what makes equal numbers of draws no proof of equal masks; None if nothing is known to."""
    replay_settings, job_settings = settings.environment, recorded.environment
    if job_settings.get("device") != replay_settings.get("device"):
        return f"the job ran on {job_settings.get('device')}, this is {replay_settings.get('device')}"
    if settings.why_other_draws is not None:
        return settings.why_other_draws
    if not replayed.was_fed_as_captured:
        return (
            "rows are packed here, and other rows in the job. Try: --no-packing"
            if settings.packs
            else "the rows have another shape than the job's"
        )
    if may_drop_attention(settings.dropout) and job_settings.get("attention") != replay_settings.get("attention"):
        kernel = job_settings.get("attention")
        return f"another kernel computes attention than the job's {kernel}. Try: --attention {kernel}"
    if job_settings.get("compiled", "no") != replay_settings.get("compiled", "no"):
        return "the forward is compiled in one of them"
    if CUDA not in job_draws.after:
        return None if job_draws.cpu_kind == replay_draws.cpu_kind else "this CPU draws masks otherwise than the job's"
    if job_settings.get("torch") != replay_settings.get("torch"):
        return f"the job ran torch {job_settings.get('torch')}, this is {replay_settings.get('torch')}"
    job_dtype = _find_dtype_of_hidden_states(recorded)
    if job_dtype != settings.dtype:
        return f"on a GPU masks depend on the dtype, which was {job_dtype} in the job"
    return None


def _find_dtype_of_hidden_states(recorded: RecordedPass) -> str:
    """Name the dtype that the job's masks were drawn for, as far as one is known.

    The first linear layer's input had it; autocast, under which hidden states are of several dtypes, is named.
    """
    autocast = recorded.environment.get("autocast", "off")
    if autocast != "off":
        return f"autocast's {autocast}"
    return recorded.environment.get("computed_in") or ", ".join(recorded.dtypes) or "unknown"


def may_drop_attention(dropout: Sequence[str]) -> bool:
    """Tell whether one of these settings may act inside attention, where each kernel draws in its own way."""
    return any(name not in _OUTSIDE_ATTENTION for name in dropout)


def leave_out_other_masks(
    findings: Sequence[Finding], masks: Sequence[MaskComparison], settings: VerdictSettings
) -> list[Finding]:
    """Return the findings of passes with these masks: if any are other masks, their numbers are not judged.

    Dropout cannot explain a parameter without a gradient: a mask leaves each parameter some. LayerDrop can, since it
    skips a layer whole.
    """
    if all(mask.status is not MaskStatus.OTHER for mask in masks):
        return list(findings)
    return [
        finding
        if finding.name == MISSING_GRADIENT and "layerdrop" not in settings.dropout
        else replace(finding, status=FindingStatus.NOT_JUDGED, doubt=OTHER_MASKS, is_evidence=False)
        for finding in findings
    ]


def revise_findings_for_masks(
    findings: Sequence[Finding], masks: MaskComparison, recorded: RecordedPass, settings: VerdictSettings
) -> tuple[list[Finding], MaskComparison]:
    """Return the findings of one pass as its masks change them, and what is known of the masks then.

    With other masks than the job's, findings are not judged. Where the job drew another number of random numbers there
    is a finding of that. In fp32 other masks change every number, so where all agree, the random numbers were drawn for
    something else. Where a coarse dtype may hide them, that is not known.
    """
    if masks.unexplained is None or not findings:
        return leave_out_other_masks(findings, [masks], settings), masks
    is_off = any(finding.is_wrong for finding in findings)
    agrees = any(finding.agrees and finding.is_evidence for finding in findings)
    if not is_off and agrees and not is_coarse(list_dtypes(recorded, settings)):
        unseen = _report_masks(masks.unexplained, FindingStatus.NOT_JUDGED, "no number shows it")
        return [*findings, unseen], PROVEN_MASKS
    if is_off:
        finding = _report_masks(masks.unexplained, FindingStatus.DIFFERS, None)
    else:
        doubt = f"{masks.unexplained}, and rounding may hide what it does"
        finding = _report_masks(masks.unexplained, FindingStatus.UNSETTLED, doubt)
    return [finding, *leave_out_other_masks(findings, [masks], settings)], masks


def _report_masks(difference: str, status: FindingStatus, doubt: str | None) -> Finding:
    return Finding(name=MASKS, status=status, recorded=0.0, doubt=doubt, is_evidence=False, values_as_text=difference)


def is_about_masks(doubt: str | None) -> bool:
    return doubt is not None and doubt.startswith(OTHER_MASKS)


def drew_same_masks(
    passes: Sequence[tuple[PassRecord, ReplayedPass]],
    other_passes: Sequence[tuple[PassRecord, ReplayedPass]],
    *,
    has_same_rows: bool,
    draws_alike_on_gpu: bool,
) -> bool:
    """Tell whether two replays drew the same masks, or none: then what is between them is rounding.

    has_same_rows       both were fed the same rows in the same order
    draws_alike_on_gpu  both have one dtype, and one kernel if dropout acts inside attention: on a GPU each draws in its
                        own way, and on a CPU all do alike
    """
    other_by_place = {(record.index, record.rank): replayed for record, replayed in other_passes}
    for record, replayed in passes:
        other = other_by_place.get((record.index, record.rank))
        if other is None:
            continue
        draws, other_draws = replayed.draws, other.draws
        if draws is None or other_draws is None:
            return False
        if not draws.has_any and not other_draws.has_any:
            continue
        has_same_ends = (draws.before, draws.after) == (other_draws.before, other_draws.after)
        if not (has_same_ends and has_same_rows and (draws_alike_on_gpu or CUDA not in draws.after)):
            return False
    return True
