"""Which exit code a replay has that ran to its report."""

import pytest

from replay.options.spec import VerdictRule
from replay.runner.exit_code import choose_exit_code
from replay.verdict.outcomes import Outcome


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("rule", list(VerdictRule))
def test_a_verdict_fails_a_run_only_under_strict(outcome: Outcome, rule: VerdictRule) -> None:
    fails = rule is VerdictRule.STRICT and outcome in {Outcome.DIFFERS, Outcome.UNSETTLED}
    assert choose_exit_code(outcome, rule, has_failed=False, end_reason=None) == int(fails)


@pytest.mark.parametrize(("end_reason", "exit_code"), [(None, 1), (RuntimeError(), 1), (KeyboardInterrupt(), 130)])
def test_a_failure_is_exit_code_1_whatever_the_verdict_and_ctrl_c_130(
    end_reason: BaseException | None, exit_code: int
) -> None:
    outcome, rule = Outcome.REPRODUCED, VerdictRule.REPORT
    assert choose_exit_code(outcome, rule, has_failed=True, end_reason=end_reason) == exit_code
