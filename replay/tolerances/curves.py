"""Bound how far the loss curve of one training may be from another's: `replay suite`."""

FROM_DEEPSPEED = 0.05  # relative, at every step
INITIAL_FROM_DDP = 0.001  # in nats, before the first step: the weights are the same
# In nats, the largest and the mean over the steps.
FROM_DDP = {
    "fsdp2-tp": (0.02, 0.001),
    "deepspeed-autotp": (0.5, 0.15),
}
