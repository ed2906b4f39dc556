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
POLICY = Setup(objective=Objective.POLICY, weighting=Weighting.MEANS, layout=Layout.FULL)
RAGGED_POLICY = Setup(objective=Objective.POLICY, weighting=Weighting.MEANS)
DIVERGENCE = Setup(objective=Objective.POLICY, weighting=Weighting.MEANS, divergence=0.05)
# What the user believes of the loss is typed.
TYPED_DIVERGENCE = {"replays": (("--loss", "policy", "--kl-coefficient", "0.05"),)}
BEGIN, END = 94, 95
TEXTS = Setup(config={"bos_token_id": BEGIN, "eos_token_id": END}, num_steps=5)
# A mean over no label is no number, but a sum divided by the step's tokens is 0.
WINDOWS = Setup(accumulation=2, num_steps=3)
DROPOUT = Setup(config={"attention_dropout": 0.1}, learning_rate=0.0)

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
        ("ends-cut-off", PLAIN, (), "long rows are cut off, and have no end", TEXTS,
         Fault(process=q.cut_off(9)), {"note": "tokens without token 95, which ends a text"}),
        ("ddp-begins-cut-off", DDP, (), "long rows are cut off at their beginning", TEXTS,
         Fault(process=q.cut_off(10, keeps_end=True)), {"note": "do not begin with token 94, as all shorter ones do"}),
        ("padding-labelled", PLAIN, (), "rows are padded with the token that ends them, and no mask tells it", TEXTS,
         Fault(process=q.padding_labelled(END)), {"note": "end in token 95 again and again"}),
        ("answers-cut-away", PLAIN, (), "some micro-batches have no label", WINDOWS,
         Fault(process=q.without_labels_now_and_then), {"note": "no token has a label in 2 of 6 training passes"}),
    ),
    *broken_jobs(
        FaultClass.DROPOUT,
        ("ddp-one-seed", DDP, (), "all ranks have one seed, and drop out alike", DROPOUT, Fault(has_one_seed=True),
         {"note": "which are fed other rows, began passes with one random state"}),
    ),
    *broken_jobs(
        FaultClass.POLICY,
        ("policy-old-shifted", PLAIN, (), "the old policy's log-probs stand one place too early", RAGGED_POLICY,
         Fault(noted=q.old_log_probs_shifted),
         {"note": "old policy: the noted log-probs of"}),
        ("policy-shifts-old-itself", PLAIN, C.OBJECTIVE, "the loss moves the old policy's log-probs by a place",
         RAGGED_POLICY, Fault(used=q.old_log_probs_shifted)),
        ("ddp-policy-old-of-other-rows", DDP, (), "the old policy's log-probs are of other rows of the micro-batch",
         POLICY, Fault(noted=q.old_log_probs_of_other_rows),
         {"note": "sequences have the noted log-probs of another one of their step"}),
        ("policy-old-of-another-temperature", PLAIN, (), "the old policy's log-probs are of another temperature",
         RAGGED_POLICY, Fault(noted=q.old_log_probs_of_another_temperature),
         {"note": "old policy: before the first step the noted log-probs"}),
        ("policy-without-advantages", PLAIN, (), "all rewards are alike", RAGGED_POLICY, Fault(noted=q.no_advantages),
         {"note": "advantages: all are 0 in 3 of 3"}),
        ("policy-without-divergence", PLAIN, C.OBJECTIVE, "the KL divergence's coefficient never comes to the loss",
         DIVERGENCE, Fault(setup={"divergence": 0.0}), TYPED_DIVERGENCE),
    ),
]  # fmt: skip
