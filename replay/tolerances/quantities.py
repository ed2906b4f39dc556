"""Name the quantities of a pass and of a step that a tolerance is given for, as verdicts and logs name them."""

LOSS, LOG_PROBS, GRAD_NORM = "loss", "log-probs", "gradient norm"
TOKENS, ACTION_TOKENS = "token log-probs", "log-probs by token"
GRADIENT = "gradient samples"
