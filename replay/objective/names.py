"""List the names under which trainers and their dumps keep what an objective needs; the first is the one to note."""

ADVANTAGES = ("advantages",)
OLD_LOG_PROBS = (
    "old_log_probs",
    "old_per_token_logps",  # TRL
    "old_action_log_probs",
    "action_log_probs",  # SkyRL, OpenRLHF: of the policy that the samples came from
    "prev_logprobs",  # NeMo-RL
    "log_probs",  # slime
)
REF_LOG_PROBS = (
    "ref_log_probs",
    "ref_log_prob",  # verl
    "ref_per_token_logps",  # TRL
    "base_action_log_probs",  # SkyRL, OpenRLHF
    "reference_policy_logprobs",  # NeMo-RL
)
ROLLOUT_LOG_PROBS = (
    "rollout_log_probs",  # verl, slime, OpenRLHF
    "rollout_logprobs",  # SkyRL
    "infer_logprobs",  # ROLL
    "generation_logprobs",  # NeMo-RL
    "sampling_per_token_logps",  # TRL
)
REF_CHOSEN, REF_REJECTED = ("ref_chosen_logps",), ("ref_rejected_logps",)  # TRL's, a number a pair
DIVISOR = ("divisor",)
NUM_ITEMS = ("num_items_in_batch",)
