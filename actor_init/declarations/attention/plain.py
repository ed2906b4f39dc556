"""Declare the kernels that every device has in every dtype: transformers' sdpa and eager, and a user's model's own."""

from typing import Any

from actor_init.declarations.attention.declaration import (
    RING_REFUSAL,
    AttentionForm,
    AttentionKernel,
    KernelLimits,
    is_taken_by_class,
)
from actor_init.option_values import Attention
from capture.facts import Setting


def has_sdpa(config: Any) -> bool:
    """Can the model's class compute its attention through torch's SDPA? Softcapped scores and sinks cannot."""
    return is_taken_by_class(config, "_supports_sdpa")


def find_sdpa_obstacle(config: Any) -> str:
    if has_sdpa(config):
        return ""
    return f"transformers has no sdpa attention for {config.model_type}. Try: {Setting('attention', Attention.EAGER)}"


IN_TRANSFORMERS = KernelLimits()
GATHERED = KernelLimits(missing_features={"dropout": "dropout"}, refusal=RING_REFUSAL)
SDPA_FORM = AttentionForm(name="sdpa", limits=IN_TRANSFORMERS, reads_mask=True)
EAGER_FORM = AttentionForm(name="eager", limits=IN_TRANSFORMERS, reads_mask=True)

SDPA = AttentionKernel(
    option_value=Attention.SDPA,
    packed=SDPA_FORM,
    padded=SDPA_FORM,
    slices=AttentionForm(
        name="ring_gathered", limits=GATHERED, function="actor_init.attention.ring_attention:ring_sdpa"
    ),
    job_names=("sdpa",),
    find_obstacle=find_sdpa_obstacle,
    alternative="eager",
)
EAGER = AttentionKernel(
    option_value=Attention.EAGER, packed=EAGER_FORM, padded=EAGER_FORM, job_names=("eager",), is_checked=False
)
# Whatever the code of a model that a user's function builds computes.
OWN = AttentionForm(name="of its own", limits=IN_TRANSFORMERS)
