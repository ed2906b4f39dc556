"""Jobs whose numbers are those of their own wrong inputs: targets, and noted log-probs. A note tells of most of them.

Each has a sound twin without that note.
"""

from replay.verdict.causes.cause import CauseName as C
from tests.broken_jobs import quiet_faults as q
from tests.broken_jobs.declarations import Fault, FaultClass, Job, Kind, Layout, Objective, Setup, Weighting
from tests.broken_jobs.lines import broken_jobs

PLAIN, DDP = Kind.PLAIN, Kind.DDP
LOOP = Setup(objective=Objective.LOOP, weighting=Weighting.MEANS, has_prompts=False)
FULL_LOOP = Setup(objective=Objective.LOOP, weighting=Weighting.MEANS, has_prompts=False, layout=Layout.FULL)

NEXT_ROW = {"note": "the last place is to predict the first token of the next row"}

QUIET_JOBS: list[Job] = [
    *broken_jobs(
        FaultClass.TARGETS,
        ("shifted-across-rows", PLAIN, C.OTHER_TOKENS, "the rows are joined before their targets are shifted", LOOP,
         Fault(loop_loss=q.shifted_across_rows)),
        ("shifted-across-full-rows", PLAIN, (), "the same, of rows without padding", FULL_LOOP,
         Fault(loop_loss=q.shifted_across_rows), NEXT_ROW),
        ("ddp-shifted-across-rows", DDP, C.OTHER_TOKENS, "the rows are joined before their targets are shifted", LOOP,
         Fault(loop_loss=q.shifted_across_rows)),
    ),
]  # fmt: skip
