"""Verdicts that a test makes of a few findings."""

from replay.tolerances.job_bounds import LOSS
from replay.verdict.findings import VerdictSettings, judge_number
from replay.verdict.judge import judge
from replay.verdict.outcomes import Outcome, PassVerdict, Verdict


def make_verdict(*judged: tuple[int, str, int | None]) -> Verdict:
    """A verdict with a finding for each pass or window: its index, the wrong number (or none), the job's step."""
    settings = VerdictSettings(dtype="float32", num_layers=2, num_data_ranks=1, grad_accumulation=1)
    verdicts = [
        PassVerdict(
            index=index,
            source="a.pkl",
            rank=0,
            outcome=Outcome.DIFFERS if name else Outcome.REPRODUCED,
            reason=None,
            findings=[judge_number(name or LOSS, 1.0, 1.0, difference=0.1 if name else 0.0, bound=1e-5)],
            first_index=None if step is None else index,
            optimizer_step=step,
        )
        for index, name, step in judged
    ]
    empty = judge([], settings)
    passes = [verdict for verdict in verdicts if not verdict.is_window]
    windows = [verdict for verdict in verdicts if verdict.is_window]
    return Verdict(
        **{**{name: getattr(empty, name) for name in Verdict.__slots__}, "passes": passes, "windows": windows}
    )
