"""Choose the exit code of a replay that ran to its report. `run_to_exit_code` gives refused options exit code 2."""

from replay.options.spec import VerdictRule
from replay.runlog.writer import INTERRUPTED
from replay.verdict.outcomes import Outcome


def choose_exit_code(outcome: Outcome, rule: VerdictRule, *, has_failed: bool, end_reason: BaseException | None) -> int:
    """Return 1 if something failed or, under --verdict strict, if the run is DIFFERS or UNSETTLED; else 0.

    has_failed  a pass failed, a file was damaged, or the run ended early
    end_reason  why the run ended early; None: it did not. Ctrl-C has an exit code of its own
    """
    if isinstance(end_reason, KeyboardInterrupt):
        return INTERRUPTED
    is_not_reproduced = outcome in (Outcome.DIFFERS, Outcome.UNSETTLED)
    return 1 if has_failed or (is_not_reproduced and rule is VerdictRule.STRICT) else 0
