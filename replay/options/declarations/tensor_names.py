"""List the names under which trainers and their dumps keep what an objective needs.

The first of each is the one to note.
"""

ADVANTAGES = ("advantages",)
# Beside ours: TRL's, two of SkyRL and OpenRLHF (the second is of the policy that the samples came from), NeMo-RL's
# and slime's.
OLD_LOG_PROBS = (
    "old_log_probs",
    "old_per_token_logps",
    "old_action_log_probs",
    "action_log_probs",
    "prev_logprobs",
    "log_probs",
)
# Beside ours: verl's, TRL's, that of SkyRL and OpenRLHF, and NeMo-RL's.
REF_LOG_PROBS = (
    "ref_log_probs",
    "ref_log_prob",
    "ref_per_token_logps",
    "base_action_log_probs",
    "reference_policy_logprobs",
)
# That of verl, slime and OpenRLHF, then SkyRL's, ROLL's, NeMo-RL's and TRL's.
ROLLOUT_LOG_PROBS = (
    "rollout_log_probs",
    "rollout_logprobs",
    "infer_logprobs",
    "generation_logprobs",
    "sampling_per_token_logps",
)
# TRL's, with a number for each pair.
REF_CHOSEN, REF_REJECTED = ("ref_chosen_logps",), ("ref_rejected_logps",)
DIVISOR = ("divisor",)
NUM_ITEMS = ("num_items_in_batch",)
