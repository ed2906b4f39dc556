"""Bound passes whose answer is known because they do the same work in another way: `replay diagnose`."""

from actor_init.spec import Dtype

LOSS_BOUND = 1e-3  # relative
PEERS_BOUND = 1e-6  # relative: they sum the same numbers
# Of the norm of a parameter's difference, relative to its own: another order of sums in fp32, 8 and 11 significant bits
# in the others. Measured on small models: 5e-7 in fp32, 2e-2 in bf16. A fault that scales or drops a gradient gives 0.3
# and more.
GRADIENT_BOUNDS = {Dtype.FP32: 1e-4, Dtype.BF16: 1e-1, Dtype.FP16: 5e-2}
# Of the whole gradient's norm. A smaller gradient may be the rounding error of larger ones.
SMALLEST_SHARE = 1e-3
# Replaces a norm or a loss of 0.
TINY = 1e-30
