"""Tell why the job's optimizer stepped otherwise than the replay's: its settings, its schedule, its state."""

from replay.output.text import pluralise
from replay.tolerances.job_bounds import GRADIENT_QUANTITIES, STEPPED
from replay.verdict.causes.cause import Cause, CauseName, Sureness
from replay.verdict.causes.evidence import CauseEvidence, CauseRule, name_time
from replay.verdict.causes.model_rules import FORWARD_FINDINGS
from replay.verdict.cleared_passes import find_cleared_passes
from replay.verdict.findings import RANKS_DIFFER, Finding
from replay.verdict.gradient_findings import list_steps
from replay.verdict.optimizer_facts import (
    StateFactKind,
    count_stepped_parameters,
    find_facts_of_ranks,
    read_step_count,
)
from replay.verdict.outcomes import PassVerdict
from replay.verdict.recorded_pass import MOVED, OPTIMIZER, OPTIMIZER_STATE
from replay.verdict.step_remarks import holds_no_trained_parameter

# A step that is another one explains the weights after it, and every number of later passes.
OF_STEP = (OPTIMIZER, OPTIMIZER_STATE, MOVED, STEPPED)
EXPLAINED = (*OF_STEP, *FORWARD_FINDINGS, *GRADIENT_QUANTITIES)
RATE, CLIPPED = "learning rate", "clipped to "
MISCOUNTS = {
    StateFactKind.COUNTS_TOO_FEW: CauseName.STEPS_SKIPPED,
    StateFactKind.COUNTS_TOO_MANY: CauseName.STEPS_SKIPPED,
}


def find_other_state(evidence: CauseEvidence) -> Cause | None:
    """Tell that the optimizer's own count of steps is not that of the steps it was seen to take."""
    if evidence.first_wrong is None:
        return None
    recorded_passes = [compared.recorded for compared in evidence.passes]
    facts = find_facts_of_ranks(recorded_passes)
    facts = [fact for fact in facts if is_followed_by_wrong_number(evidence, fact.step)]
    if evidence.settings.loaded_counts is not None:
        # The replay was given the state that the job began with.
        facts = [fact for fact in facts if fact.kind is not StateFactKind.BEGINS_WITH_STATE]
    if not facts:
        return None
    if find_repeated_steps(evidence) is not None:
        return None
    # An optimizer that counts otherwise than it steps may look at its first step as if it had an older state.
    fact = next((fact for fact in facts if fact.kind in MISCOUNTS), facts[0])
    last = max(recorded.step_after.number for recorded in recorded_passes if recorded.step_after is not None)
    if fact.kind is StateFactKind.UNEVEN and fact.step == last:
        # What steps behind it held is taken for a part of it, where no recorded pass comes between.
        return Cause(
            name=CauseName.STEPS_SKIPPED,
            sureness=Sureness.PROBABLY,
            sentence=f"behind step {fact.step + 1}, the last with a recorded pass, the optimizer takes "
            f"{pluralise((fact.counted or 0) - (fact.expected or 0), 'step')} more, or counts its parameters unevenly",
            try_next="look for training passes that are not recorded: the job may call the module inside of its "
            "wrapper, which then reduces nothing",
            explains=EXPLAINED,
        )
    name = MISCOUNTS.get(fact.kind, CauseName.OPTIMIZER_STATE)
    advice = {
        CauseName.STEPS_SKIPPED: "look for steps that are taken twice, or left out, in the job's loop",
        CauseName.OPTIMIZER_STATE: "load the optimizer's state with the weights; or --optimizer-state PATH here",
    }
    try_next = advice[name]
    if fact.kind is StateFactKind.LOST:
        try_next = "keep the optimizer, and add parameters by add_param_group; or load its state into the new one"
    return Cause(name=name, sureness=Sureness.IS, sentence=fact.describe(), try_next=try_next, explains=EXPLAINED)


def is_followed_by_wrong_number(evidence: CauseEvidence, step: int) -> bool:
    """Tell whether the first wrong number of the run may come of this step of the job: none before it does."""
    first = evidence.first_wrong
    if first is None:
        return False
    if first.optimizer_step is not None:
        is_of_step = any(finding.is_wrong and finding.name in OF_STEP for finding in first.findings)
        return first.optimizer_step > step or (first.optimizer_step == step and is_of_step)
    counts = [
        compared.recorded.num_steps_before for compared in evidence.passes if compared.record.index == first.index
    ]
    return not counts or counts[0] is None or counts[0] > step


def find_repeated_steps(evidence: CauseEvidence) -> Cause | None:
    """Tell that the optimizer counts several steps for each that the job's loop takes."""
    by_number: dict[int, int] = {}
    for compared in evidence.passes:
        step = compared.recorded.step_after
        if step is not None and (count := read_step_count(step)) is not None:
            by_number[step.number] = count
    counts = [by_number[number] for number in sorted(by_number)]
    numbers = sorted(by_number)
    advances = {
        (counts[place + 1] - counts[place]) / (numbers[place + 1] - numbers[place]) for place in range(len(counts) - 1)
    }
    if evidence.first_wrong is None or len(counts) < 3 or len(advances) != 1 or min(advances) < 2:
        return None
    return Cause(
        name=CauseName.STEPS_SKIPPED,
        sureness=Sureness.IS,
        sentence=f"the optimizer takes {min(advances):g} steps for each that the job's loop seems to take: it has "
        f"counted {counts[0]} before step {numbers[0] + 1} and {counts[-1]} before step {numbers[-1] + 1}",
        try_next="look for a second call of optimizer.step(), or a step that a wrapper takes too",
        explains=EXPLAINED,
    )


def find_untaken_passes(evidence: CauseEvidence) -> Cause | None:
    """Name a training pass, between others whose gradients were taken, that no step took."""
    taken: dict[int, set[int]] = {}
    for compared in evidence.passes:
        if compared.recorded.step_after is not None:
            taken.setdefault(compared.recorded.rank or 0, set()).update(compared.recorded.step_after.passes)
    for compared in evidence.passes:
        recorded = compared.recorded
        forwards = taken.get(recorded.rank or 0, set())
        number = recorded.forward_number
        is_between = number is not None and forwards and min(forwards) < number < max(forwards)
        if evidence.first_wrong is not None and recorded.trains and is_between and number not in forwards:
            cleared = find_cleared_passes(compared.recorded for compared in evidence.passes)
            of_pass = f"pass {compared.record.index + 1} ({compared.record.source})"
            return Cause(
                name=CauseName.STEPS_SKIPPED,
                sureness=Sureness.PROBABLY,
                sentence=f"no step of the job takes the gradient of {of_pass}: a step is left out there"
                if cleared is None
                else cleared.describe(),
                try_next="look for a step that is skipped, or gradients that are cleared before it",
                explains=EXPLAINED,
            )
    return None


def find_other_optimizer(evidence: CauseEvidence) -> Cause | None:
    """Tell that the job stepped with other settings than the replay was told to."""
    wrong = [(verdict, finding) for verdict, finding in evidence.wrong if finding.name == OPTIMIZER]
    if not wrong:
        return None
    if find_repeated_steps(evidence) is not None:
        # It holds moments before the first step that was seen, because that was not its first.
        return None
    verdict, finding = wrong[0]
    said = str(finding.values_as_text)
    differences = said.split("; ")
    # A rate that is another one in some steps alone is one of another schedule.
    is_rate_alone = all(
        RATE in difference for _, other in wrong for difference in str(other.values_as_text).split("; ")
    )
    is_schedule = is_rate_alone and (
        len(wrong) < len(evidence.windows) or len({str(f.values_as_text) for _, f in wrong}) > 1
    )
    if not all(" in the job, " in difference for difference in differences):
        return None
    name = CauseName.SCHEDULE if is_schedule else CauseName.OPTIMIZER
    if all(difference.startswith(CLIPPED) for difference in differences):
        name = CauseName.CLIPPING
    return Cause(
        name=name,
        sureness=Sureness.IS,
        sentence=f"{said}, {name_time(verdict)}",
        try_next="without these options the replay steps with the job's own settings",
        explains=EXPLAINED,
    )


def find_settings_of_ranks(evidence: CauseEvidence) -> Cause | None:
    """Tell that the job's ranks, which hold whole models, stepped them with other settings."""
    for verdict, finding in evidence.wrong:
        said = str(finding.values_as_text)
        if finding.name == OPTIMIZER and said.startswith(RANKS_DIFFER):
            return Cause(
                name=CauseName.OPTIMIZER,
                sureness=Sureness.IS,
                sentence=f"{said}: each rank holds a whole model, and these come apart from there on",
                try_next="make every rank's optimizer and schedule alike, and step them as often",
                explains=EXPLAINED if verdict is evidence.first_wrong else (),
            )
    return None


def find_other_moments(evidence: CauseEvidence) -> Cause | None:
    """Tell that the optimizer's moments are of another gradient than the one that was recorded, which agrees."""
    wrong = evidence.find_wrong(OPTIMIZER_STATE)
    if wrong is None or wrong[0] is not evidence.first_wrong:
        return None
    verdict, finding = wrong
    counts = find_other_state(evidence)
    if counts is not None and counts.name is CauseName.STEPS_SKIPPED:
        return None
    if any(other.is_wrong and other.name in GRADIENT_QUANTITIES for other in verdict.findings):
        return None
    if evidence.settings.loaded_counts is not None and evidence.find_window(verdict) is evidence.windows[0]:
        return _name_other_given_state(evidence, verdict, finding)
    where = "" if finding.where is None else f" ({finding.where})"
    if zeroed := _list_zeroed_moments(evidence, verdict):
        return Cause(
            name=CauseName.OPTIMIZER_STATE,
            sureness=Sureness.IS,
            sentence=f"the optimizer's {' and '.join(zeroed)} was 0 before {verdict.window_name}, though it had "
            "stepped, and its recorded gradients give another",
            try_next="look for moments that are set to 0, or made anew, while the optimizer goes on",
            explains=EXPLAINED,
        )
    return Cause(
        name=CauseName.GRADIENTS_CHANGED,
        sureness=Sureness.PROBABLY,
        sentence=f"the optimizer was given another gradient than the backward gave, before "
        f"{verdict.window_name}: the recorded gradients are the replay's, and its moments{where} are not",
        try_next="look for gradients that are clipped by value, scaled or changed after they were clipped by norm",
        explains=EXPLAINED,
    )


def _name_other_given_state(evidence: CauseEvidence, verdict: PassVerdict, finding: Finding) -> Cause:
    """Name a state that differs before the replay's first step: nothing but the given one comes before that."""
    exchanged = evidence.settings.exchanged_states
    if exchanged:
        (name, other), more = exchanged[0], len(exchanged) - 1
        others = f", and so of {pluralise(more, 'other parameter')} that {'was' if more == 1 else 'were'} sampled"
        return Cause(
            name=CauseName.OPTIMIZER_STATE,
            sureness=Sureness.IS,
            sentence=f"what the job's optimizer held of {name} before {verdict.window_name} is the given state of "
            f"{other}{others if more else ''}: the job loaded it in another order of the parameters than here",
            try_next="give the optimizer its parameters in the order in which it had them when its state was saved: "
            "load_state_dict goes by their order, not by their names",
            explains=EXPLAINED,
        )
    where = "" if finding.where is None else f": {finding.where}, differs"
    return Cause(
        name=CauseName.OPTIMIZER_STATE,
        sureness=Sureness.PROBABLY,
        sentence=f"the state that the job's optimizer held before {verdict.window_name} is not the given one{where}",
        try_next="give the state that the job loaded; or look for what loads another one, or changes it after loading",
        explains=EXPLAINED,
    )


def _list_zeroed_moments(evidence: CauseEvidence, verdict: PassVerdict) -> list[str]:
    """List the moments that were 0 in all samples before a step of the job that was not its first."""
    values: dict[str, list[float]] = {}
    for step in list_steps(evidence.find_window(verdict) or ()):
        for sample in step.state:
            for key, elements in sample.values.items():
                values.setdefault(key, []).extend(elements)
    has_stepped = bool(verdict.optimizer_step)
    return [key for key, elements in values.items() if has_stepped and not any(elements)]


def find_left_out_parameters(evidence: CauseEvidence) -> Cause | None:
    """Tell that the job's optimizer has fewer parameters than are trained."""
    steps = [compared.recorded.step_after for compared in evidence.passes if compared.recorded.step_after is not None]
    if evidence.first_wrong is None or not steps:
        return None
    num_trainable = max(
        compared.recorded.weight_comparison.num_parameters - compared.recorded.num_frozen
        for compared in evidence.passes
    )
    if holds_no_trained_parameter([compared.recorded for compared in evidence.passes]):
        return Cause(
            name=CauseName.OPTIMIZER,
            sureness=Sureness.IS,
            sentence=f"the optimizer holds none of the parameters that are trained ({num_trainable}): they "
            "have gradients and never move, and it never has a state",
            try_next="make the optimizer after all that makes new parameters (get_peft_model, fully_shard, "
            "resize_token_embeddings), of those that require a gradient",
            explains=EXPLAINED,
        )
    most = count_stepped_parameters(steps, num_trainable)
    if most is None:
        return None
    return Cause(
        name=CauseName.OPTIMIZER,
        sureness=Sureness.PROBABLY,
        sentence=f"the job's optimizer has {most} of {pluralise(num_trainable, 'parameter')} that are trained: the "
        "others get a gradient and never move",
        try_next="give the optimizer all parameters that require a gradient",
        explains=EXPLAINED,
    )


RULES = (
    CauseRule(
        name=CauseName.GRADIENTS_CHANGED,
        find=find_other_moments,
        means="the optimizer is given another gradient than the backward gave",
        told_by="samples of the optimizer's moments, beside the recorded gradients",
        job="clipped-by-value",
    ),
    CauseRule(
        name=CauseName.STEPS_SKIPPED,
        find=find_repeated_steps,
        means="the optimizer takes several steps where the job's loop seems to take one",
        told_by="the optimizer's own count of steps",
        job="steps-twice",
    ),
    CauseRule(
        name=CauseName.STEPS_SKIPPED,
        find=find_untaken_passes,
        means="a step is left out",
        told_by="a training pass that is in no step",
        job="step-left-out",
    ),
    CauseRule(
        name=CauseName.OPTIMIZER_STATE,
        find=find_other_state,
        means="the optimizer's state was lost, is an older one, or has counted other steps than it took",
        told_by="the optimizer's own count of steps, recorded at each step",
        job="stale-state",
    ),
    CauseRule(
        name=CauseName.OPTIMIZER,
        find=find_settings_of_ranks,
        means="the job's ranks step with other settings, so that their models come apart",
        told_by="the settings of each rank's optimizer, recorded at each step",
        job="ddp-rates-of-ranks",
    ),
    CauseRule(
        name=CauseName.OPTIMIZER,
        find=find_left_out_parameters,
        means="the job's optimizer was not given all parameters that are trained",
        told_by="the number of parameters in its groups",
        job="vectors-left-out",
    ),
    CauseRule(
        name=CauseName.OPTIMIZER,
        find=find_other_optimizer,
        means="the job's optimizer has another class or other settings than those that were typed, or another schedule",
        told_by="the settings of each step in the capture",
        job="rate-x10",
    ),
)
