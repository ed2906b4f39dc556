"""Tell when the job's model, its loss or its wrapper is known to be another one than the replay's.

The recording states what the job's model was, so these causes need no number. But a difference that is stated need not
be what makes the numbers wrong: a hook may only look. So a stated difference *is* the cause where it alone can make the
first wrong number wrong, and it changes what is computed by what it is; otherwise it *probably* is.
"""

from collections.abc import Sequence

from capture.file_format.name_patterns import PatternTable
from replay.output.text import pluralise
from replay.tolerances.job_bounds import (
    ACTION_TOKENS,
    GRADIENT_QUANTITIES,
    LOG_PROBS,
    LOSS,
    STEPPED,
    TOKEN_LOG_PROBS,
    TOKENS_RMS,
)
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.evidence import CauseEvidence, CauseRule, name_time
from replay.verdict.causes.wrong_gradient import find_wrong_gradient
from replay.verdict.dropout_masks import JOB_IN_EVAL_MODE, MASKS
from replay.verdict.findings import FindingStatus
from replay.verdict.model_facts import ALL_ZEROS, BUFFER_DTYPE, OTHER_TEXT, ModelDifference, ModelDifferenceKind
from replay.verdict.outcomes import Outcome, PassVerdict
from replay.verdict.recorded_pass import MISSING_GRADIENT, MOVED, NOTED_LOSS, OPTIMIZER_STATE
from replay.verdict.route_findings import ROUTES

Kind = ModelDifferenceKind
FORWARD_FINDINGS = (LOSS, TOKEN_LOG_PROBS, TOKENS_RMS, LOG_PROBS, ACTION_TOKENS)
# A wrong forward or gradient makes the steps after it wrong, too.
ALL_FINDINGS = (*FORWARD_FINDINGS, *GRADIENT_QUANTITIES, MISSING_GRADIENT, OPTIMIZER_STATE, MOVED, STEPPED)

# Kinds that can make a forward wrong, and those that can make a gradient wrong after a right forward.
FORWARD_KINDS = (
    Kind.CONFIG,
    Kind.MODULE,
    Kind.CLASS,
    Kind.FORWARD,
    Kind.FUNCTION,
    Kind.ATTENTION_FUNCTION,
    Kind.HOOK,
    Kind.ATTRIBUTE,
    Kind.BUFFER,
    Kind.TIED,
    Kind.DTYPE,
)
LOSS_KINDS = (Kind.LOSS_FUNCTION, Kind.FORWARD, Kind.FUNCTION, Kind.HOOK, Kind.CONFIG)
# What makes the forward another one, however little its numbers show of that: a gradient may show more.
OTHER_FORWARD_KINDS = (Kind.BUFFER, Kind.MODULE, Kind.ATTRIBUTE)
# What is another computation by what it is, and no setting of the config: not code that may only look.
COMPUTED_KINDS = (
    *OTHER_FORWARD_KINDS,
    Kind.CLASS,
    Kind.FORWARD,
    Kind.FUNCTION,
    Kind.ATTENTION_FUNCTION,
    Kind.LOSS_FUNCTION,
    Kind.TIED,
)
# What the recording states of the gradient itself, and code that may have changed it on its way.
STATED_GRADIENT_KINDS = (Kind.WRAPPER, Kind.FROZEN, Kind.TIED, *OTHER_FORWARD_KINDS)
GRADIENT_CODE_KINDS = (
    Kind.WRAPPER,
    Kind.PARAMETER_HOOK,
    Kind.HOOK,
    Kind.FORWARD,
    Kind.FUNCTION,
    Kind.ATTENTION_FUNCTION,
    Kind.CLASS,
)
GRADIENT_KINDS = (*STATED_GRADIENT_KINDS, *GRADIENT_CODE_KINDS)
COMPUTE_BUFFERS = (
    "compute the model's buffers after meta init or to_empty(), as its constructor does on a real device: a checkpoint "
    "has none of them"
)
# The key of a wrapper that leaves the ranks' gradients apart.
GRADIENT_SYNC = "gradient sync"
# What these state cannot be without effect on a forward.
CERTAIN_KINDS = (Kind.CONFIG, Kind.ATTRIBUTE, Kind.BUFFER, Kind.TIED, Kind.MODULE)
# A setting of these kinds is at work in every pass.
VALUE_KINDS = (Kind.CONFIG, Kind.ATTRIBUTE, Kind.BUFFER)
# The same of a gradient.
CERTAIN_GRADIENT_KINDS = (Kind.TIED, Kind.FROZEN)
# Words in the name of a setting that tell what it is a setting of.
SETTING_CAUSES = (
    (("dropout", "jitter", "layerdrop"), CauseName.DROPOUT),
    (("rope", "position", "inv_freq", "theta"), CauseName.POSITIONS),
    (("sliding_window", "is_causal"), CauseName.MASK),
    (("aux_loss", "z_loss"), CauseName.ROUTER_LOSS),
    (("norm_topk_prob", "top_k", "num_experts_per_tok"), CauseName.ROUTES),
    (("attn_implementation",), CauseName.KERNEL),
    (("tie_word",), CauseName.TIED_WEIGHTS),
)


def choose_cause_name(difference: ModelDifference, *, is_forward: bool) -> CauseName:
    """Choose what a person would call this difference."""
    where = f"{difference.where}.{difference.key}".lower()
    match difference.kind:
        case Kind.TIED:
            return CauseName.TIED_WEIGHTS
        case Kind.FROZEN:
            return CauseName.FROZEN
        case Kind.DTYPE:
            return CauseName.DTYPE
        case Kind.LOSS_FUNCTION:
            return CauseName.OBJECTIVE
        case Kind.ATTENTION_FUNCTION:
            return CauseName.KERNEL
        case Kind.FUNCTION if "attention" in where:
            return CauseName.KERNEL
        case Kind.PARAMETER_HOOK:
            return CauseName.GRADIENTS_CHANGED
        case Kind.WRAPPER:
            return CauseName.NOT_REDUCED
        case Kind.CONFIG | Kind.ATTRIBUTE | Kind.BUFFER:
            if "lora" in where or ("scaling" in where and difference.job and difference.job.startswith("{")):
                return CauseName.ADAPTER_SCALE
            by_word = (name for words, name in SETTING_CAUSES if any(word in where for word in words))
            return next(by_word, CauseName.MODEL_CONFIG if difference.kind is Kind.CONFIG else CauseName.MODEL_CODE)
        case _:
            return CauseName.MODEL_CODE if is_forward else CauseName.GRADIENTS_CHANGED


def describe_model_difference(difference: ModelDifference) -> str:
    """Describe a difference, as `scaling of model.layers.*.self_attn is 0.125 in the job, 0.354 here`."""
    what = f"{difference.key} of {difference.where}" if difference.key else difference.where
    ranks = f" (rank {', '.join(map(str, difference.ranks))})" if difference.ranks else ""
    job, replay = ("none" if value is None else value for value in (difference.job, difference.replay))
    if difference.job == OTHER_TEXT:
        return f"the source of {what} in the job{ranks} is not that of {replay} here"
    match difference.kind:
        case Kind.CONFIG:
            return f"the config's {what} is {job} in the job{ranks}, {replay} here"
        case Kind.HOOK | Kind.PARAMETER_HOOK:
            return f"the job has {'a ' if difference.key else ''}{what}: {job}{ranks}"
        case Kind.FORWARD:
            return f"the job runs another forward of {what}: {job}{ranks}"
        case Kind.CLASS:
            return f"the class of {what} is {job} in the job{ranks}, {replay} here"
        case Kind.ATTENTION_FUNCTION | Kind.LOSS_FUNCTION:
            own = replay if difference.replay is not None else "the usual one"
            return f"the {difference.kind} is {job} in the job{ranks}, {own} here"
        case Kind.TIED | Kind.FROZEN:
            return f"{what}: {job} in the job{ranks}, {replay} here"
        case Kind.BUFFER if job == ALL_ZEROS:
            return f"the buffer {what} is all zeros in the job{ranks}, {replay} here: the job never computed it"
        case _:
            return f"the {difference.kind} {what} is {job} in the job{ranks}, {replay} here"


def find_model_difference(evidence: CauseEvidence) -> Cause | None:
    """Name the stated difference that may explain the first wrong number, if there is one."""
    first = evidence.first_wrong
    differences = evidence.settings.model_differences
    if first is None or not differences or evidence.has_stated_trial:
        return None
    if evidence.is_config_acquitted:
        differences = [difference for difference in differences if difference.kind is not Kind.CONFIG]
    wrong_names = {finding.name for verdict, finding in evidence.wrong if verdict is first}
    is_forward = evidence.is_forward_wrong
    is_loss_alone = is_forward and wrong_names == {LOSS} and _were_tokens_judged(evidence)
    kinds: Sequence[Kind] = LOSS_KINDS if is_loss_alone else FORWARD_KINDS if is_forward else STATED_GRADIENT_KINDS
    if (wrong := find_wrong_gradient(evidence)) is not None:
        # The rule of changed gradients names such a setting beside the parameter whose gradient it changes.
        differences = [
            difference
            for difference in differences
            if difference.kind not in OTHER_FORWARD_KINDS or not wrong.is_confined_to(difference.where)
        ]
        if evidence.have_ranks_same_weights_after(wrong.window):
            # What the wrapper leaves apart, the job averages by itself.
            differences = [difference for difference in differences if difference.key != GRADIENT_SYNC]
    if is_forward and _has_stepped_before(evidence):
        # A parameter that is frozen stays behind, so the forward after a step is another one.
        kinds = (Kind.FROZEN, *kinds)
    return _name_difference(evidence, first, differences, kinds)


def find_gradient_code(evidence: CauseEvidence) -> Cause | None:
    """Name the code that may have changed a wrong gradient on its way, if the recording states any."""
    first = evidence.first_wrong
    if first is None or evidence.is_forward_wrong:
        return None
    # Another loss function may have a backward that is not that of its own forward.
    kinds = (*GRADIENT_CODE_KINDS, Kind.LOSS_FUNCTION)
    return _name_difference(evidence, first, evidence.settings.model_differences, kinds)


def _fits(difference: ModelDifference, kinds: Sequence[Kind]) -> bool:
    """Tell whether a difference of these kinds belongs here.

    That a wrapper does not reduce is stated. What its hook or its factor does to a gradient, the numbers tell better.
    """
    if difference.kind is not Kind.WRAPPER:
        return True
    return (difference.key == GRADIENT_SYNC) is (kinds is STATED_GRADIENT_KINDS)


def _name_difference(
    evidence: CauseEvidence, first: PassVerdict, differences: Sequence[ModelDifference], kinds: Sequence[Kind]
) -> Cause | None:
    """Name the difference of the first of these kinds that there is; None without one."""
    fitting = [difference for difference in differences if difference.kind in kinds and _fits(difference, kinds)]
    if not fitting:
        return None
    fitting.sort(key=lambda difference: kinds.index(difference.kind))
    chosen, is_forward = fitting[0], evidence.is_forward_wrong
    certain_kinds = (*CERTAIN_KINDS, Kind.FROZEN) if is_forward else CERTAIN_GRADIENT_KINDS
    is_certain = len(fitting) == 1 and chosen.kind in certain_kinds and chosen.key != BUFFER_DTYPE
    sureness = Sureness.IS if is_certain else Sureness.PROBABLY
    if is_forward and chosen.kind in VALUE_KINDS and _is_acquitted(evidence, chosen):
        sureness = Sureness.MAY_BE
    more = "".join(f"; also {describe_model_difference(second)}" for second in fitting[1:2])
    more += f"; {len(fitting) - 2} more in run.json" if fitting[2:] else ""
    return Cause(
        name=choose_cause_name(chosen, is_forward=is_forward),
        sureness=sureness,
        sentence=f"{describe_model_difference(chosen)}, and the numbers differ {name_time(first)}{more}",
        try_next=COMPUTE_BUFFERS
        if chosen.kind is Kind.BUFFER and chosen.job == ALL_ZEROS
        else "replay the job's own code with --model FILE.py:function, or take the change out of the job",
        explains=(*ALL_FINDINGS, ROUTES) if _is_of_wrong_router(evidence, chosen) else ALL_FINDINGS,
    )


def _is_of_wrong_router(evidence: CauseEvidence, difference: ModelDifference) -> bool:
    """Tell whether the router of the first other routes, or the module that holds it, has this difference."""
    found = evidence.find_wrong(ROUTES)
    router = "" if found is None else found[1].where or ""
    modules = PatternTable({difference.where: difference})
    return any(name and modules.find(name) is not None for name in (router, router.rpartition(".")[0]))


def _is_acquitted(evidence: CauseEvidence, difference: ModelDifference) -> bool:
    """Tell whether a pass of the job has the replay's numbers although its model had this difference."""
    agreeing = {(verdict.index, verdict.rank) for verdict in evidence.verdicts if _has_same_forward(verdict)}
    return any(
        (compared.record.index, compared.record.rank) in agreeing
        and (not difference.ranks or compared.recorded.rank in difference.ranks)
        and (compared.recorded.forward_number or 0) >= (difference.forward or 0)
        for compared in evidence.passes
    )


def _has_same_forward(verdict: PassVerdict) -> bool:
    has_agreed = any(finding.agrees and finding.is_evidence for finding in verdict.findings)
    return has_agreed and not verdict.is_window and not any(finding.is_wrong for finding in verdict.findings)


def _has_stepped_before(evidence: CauseEvidence) -> bool:
    """Tell whether the replay took a step before the first wrong number."""
    first = evidence.first_wrong
    has_ended = first is not None and any(window[-1].record.index < first.index for window in evidence.windows)
    return has_ended and evidence.settings.follows_steps


def _were_tokens_judged(evidence: CauseEvidence) -> bool:
    """Tell whether the log-probs of single tokens were held against the job's in the first wrong pass, and agree."""
    first = evidence.first_wrong
    return first is not None and any(
        finding.agrees for finding in first.findings if finding.name in (TOKEN_LOG_PROBS, ACTION_TOKENS, LOG_PROBS)
    )


def find_other_versions(evidence: CauseEvidence) -> Cause | None:
    """Tell that libraries or devices differ, where nothing else is known to explain a wrong number."""
    first = evidence.first_wrong
    names = ("torch", "transformers", "deepspeed", "flash_attn", "device", "attention", "kernels")
    differing = [name for name in names if name in evidence.environment]
    if first is None or not differing:
        return None
    texts = [
        f"{name} {evidence.environment[name][0]} in the job, {evidence.environment[name][1]} here" for name in differing
    ]
    return Cause(
        name=CauseName.VERSIONS,
        sureness=Sureness.MAY_BE,
        sentence=f"{'; '.join(texts)}: one may compute otherwise than the other",
        try_next="replay parity --python OTHER, with the job's versions",
        explains=ALL_FINDINGS,
    )


def find_unstated_difference(evidence: CauseEvidence) -> Cause | None:
    """Say that nothing that was recorded tells why the first wrong number is wrong, and what is left."""
    first = evidence.first_wrong
    if first is None or evidence.settings.model_differences:
        return None
    wrong = [finding for verdict, finding in evidence.wrong if verdict is first]
    if all(finding.status is FindingStatus.UNSETTLED and finding.doubt is not None for finding in wrong):
        return Cause(
            name=CauseName.OBJECTIVE,
            sureness=Sureness.MAY_BE,
            sentence=f"{wrong[0].doubt}, {name_time(first)}",
            try_next="--loss with the job's objective; or labels and recorder.note(loss=...) in the job",
            explains=ALL_FINDINGS,
        )
    weights = (compared.weight_comparison.doubt for compared in evidence.passes if compared.record.index == first.index)
    doubt = next((doubt for doubt in weights if doubt is not None), None)
    # A gradient without a doubt of its own is left unsettled by the weights' alone.
    may_be_of_weights = evidence.is_forward_wrong or all(finding.doubt is None for finding in wrong)
    if doubt is not None and first.outcome is Outcome.UNSETTLED and may_be_of_weights:
        # The recording does say why: a replay on weights that are not known to be the job's proves nothing.
        what, _, advice = doubt.partition(". Try: ")
        other = "the weights may be other ones" if evidence.is_forward_wrong else "the gradient may be of other weights"
        return Cause(
            name=CauseName.OTHER_WEIGHTS,
            sureness=Sureness.MAY_BE,
            sentence=f"{what}, so {other}, {name_time(first)}",
            try_next=advice or "weights that the job had before this pass, and samples of all its parameters",
            explains=ALL_FINDINGS,
        )
    if (own_tokens := _find_own_tokens_as_labels(evidence, first)) is not None:
        return own_tokens
    if (objective := _find_noted_loss_alone(evidence, first)) is not None:
        return objective
    if evidence.is_forward_wrong:
        where = "the forward gives other numbers"
        rest = "code of the job that leaves no trace in the model's modules, or weights that no sample shows"
        name = CauseName.MODEL_CODE
    else:
        where = "the forward is the job's and the gradient is not"
        rest = "code of the job between the loss and the optimizer"
        name = CauseName.GRADIENTS_CHANGED
    return Cause(
        name=name,
        sureness=Sureness.MAY_BE,
        sentence=f"{where}, {name_time(first)}, and nothing that was recorded says why: {rest}",
        try_next="the command in the line `layer`, with the job's own code",
        explains=ALL_FINDINGS,
    )


def _find_noted_loss_alone(evidence: CauseEvidence, first: PassVerdict) -> Cause | None:
    """Say that a loss of an objective alone is wrong, where no log-prob of the job tells whether its forward is."""
    compared = evidence.find_pass(first)
    if compared is None or compared.replayed.tried_losses is None or _were_tokens_judged(evidence):
        return None
    if {finding.name for verdict, finding in evidence.wrong if verdict is first} != {LOSS}:
        return None
    return Cause(
        name=CauseName.OBJECTIVE,
        sureness=Sureness.MAY_BE,
        sentence=f"the noted loss is not the replay's, {name_time(first)}; without log-probs of the job nothing tells "
        "another objective from another forward",
        try_next="compare the line `loss` with the settings of the job's objective; then the line `layer`",
        explains=ALL_FINDINGS,
    )


def _find_own_tokens_as_labels(evidence: CauseEvidence, first: PassVerdict) -> Cause | None:
    """Tell that the targets of the job's own loss, as its gradient has them, are the tokens that should predict them.

    Where a row repeats a token, its gradient tells fewer targets, so a part of the passes is enough.
    """
    passes = [compared.recorded for compared in evidence.passes if compared.recorded.trains]
    tokens = [recorded.tokens for recorded in passes if recorded.tokens is not None]
    number = sum(pass_tokens.has_shifted_labels and pass_tokens.label_offset == 0 for pass_tokens in tokens)
    if evidence.is_forward_wrong or not number:
        return None
    return Cause(
        name=CauseName.OTHER_TOKENS,
        sureness=Sureness.PROBABLY,
        sentence=f"each token predicts itself in {number} of {pluralise(len(passes), 'training pass')}, "
        f"{name_time(first)}: the job's own loss does not shift its labels",
        try_next="compare logits[:, :-1] with labels[:, 1:]",
        explains=ALL_FINDINGS,
    )


def find_other_loss_function(evidence: CauseEvidence) -> Cause | None:
    """Tell that the forward is right, token by token, and the loss is not: it is another function of the log-probs."""
    first = evidence.first_wrong
    if first is None or not evidence.is_forward_wrong or not _were_tokens_judged(evidence):
        return None
    wrong = [finding for verdict, finding in evidence.wrong if verdict is first]
    if {finding.name for finding in wrong} != {LOSS}:
        return None
    loss = wrong[0]
    if loss.doubt is not None and loss.doubt.startswith(NOTED_LOSS):
        return Cause(
            name=CauseName.OBJECTIVE,
            sureness=Sureness.MAY_BE,
            sentence=f"{loss.doubt}, {name_time(first)}",
            try_next="leave out --loss, --passes and --window: the replay then takes the objective that the recording "
            "shows; or --loss FILE.py:function, with the loss of the job's loop",
            explains=ALL_FINDINGS,
        )
    return Cause(
        name=CauseName.OBJECTIVE,
        sureness=Sureness.PROBABLY,
        sentence=f"each sampled token's log-prob is the job's, and the loss is {loss.recorded:.6g} in the job, "
        f"{loss.replayed:.6g} here, {name_time(first)}: it is another function of the tokens, or over others",
        try_next="compare the job's loss function, labels and divisor with --loss",
        explains=ALL_FINDINGS,
    )


def find_other_masks(evidence: CauseEvidence) -> Cause | None:
    """Tell that the job drew random numbers in a forward where the replay draws none, or the other way round."""
    wrong = evidence.find_wrong(MASKS)
    if wrong is None:
        return None
    verdict, finding = wrong
    text = str(finding.values_as_text or finding.doubt)
    return Cause(
        name=CauseName.DROPOUT,
        sureness=Sureness.IS,
        sentence=f"{text}, {name_time(verdict)}",
        try_next="call model.train() before each pass that trains, and so after each evaluation"
        if JOB_IN_EVAL_MODE in text
        else "look for noise that the job adds: NEFTune on the embeddings (neftune_noise_alpha), dropout of its own"
        if not evidence.settings.dropout
        else "compare the dropout settings of the config with those of the job's modules, and their train mode",
        explains=(MASKS, *ALL_FINDINGS),
    )


FIRST_RULES = (
    CauseRule(
        name=CauseName.DROPOUT,
        find=find_other_masks,
        means="dropout acts in the job and not here, or here and not in the job, or with another probability",
        told_by="how far the random generators moved in the forward, in the job and here",
        job="attention-dropout",
    ),
    CauseRule(
        name=CauseName.MODEL_CODE,
        find=find_model_difference,
        means="the job's model, loss function or wrapper is another one: code, settings, hooks, ties, dtypes",
        told_by="what the recording states of each module, parameter and function of the job",
        job="softmax-scale",
    ),
    CauseRule(
        name=CauseName.OBJECTIVE,
        find=find_other_loss_function,
        means="the loss is another function of the same log-probs, or is over other tokens",
        told_by="log-probs of single tokens agree, and the loss does not",
        job="label-smoothing",
    ),
)
LAST_RULES = (
    CauseRule(
        name=CauseName.GRADIENTS_CHANGED,
        find=find_gradient_code,
        means="code of the job may have changed the gradient: a hook, or a forward of its own",
        told_by="what the recording states of hooks and forwards",
        job="embedding-by-frequency",
    ),
    CauseRule(
        name=CauseName.VERSIONS,
        find=find_other_versions,
        means="other versions, devices or kernels, where no other cause is known",
        told_by="the environment in the capture",
        job="attention-in-bf16",
    ),
    CauseRule(
        name=CauseName.MODEL_CODE,
        find=find_unstated_difference,
        means="a difference that the recording does not show: code, or weights between the samples",
        told_by="no other rule applies",
        job="row-zeroed",
    ),
)
