"""Register the attention kernels. To add one, write a file that declares it, its function, and one entry here."""

from collections import ChainMap
from collections.abc import Collection, Iterator
from typing import Any

from actor_init.declarations.attention import cudnn, flash, flex, plain, varlen
from actor_init.declarations.attention.declaration import AttentionForm, AttentionKernel
from actor_init.declarations.attention.kernel_order import RING_WITH_CUDNN, WITH_CUDNN
from actor_init.option_values import Attention, UsageError

KERNELS: dict[str, AttentionKernel] = {
    kernel.option_value: kernel
    for kernel in (
        flash.FLASH,
        cudnn.CUDNN,
        varlen.VARLEN,
        flex.FLEX,
        plain.SDPA,
        plain.EAGER,
    )
}
# The values of --attention. It is a live view, because kernels may be registered later.
ATTENTION_VALUES: Collection[str] = ChainMap[str, Any](KERNELS, {Attention.AUTO: None})


def find_kernel(option_value: str) -> AttentionKernel:
    """Return the kernel that a value of --attention chooses. Raises UsageError for an unknown one."""
    if option_value not in KERNELS:
        raise UsageError.not_allowed("attention", option_value, f"Give one of {', '.join(ATTENTION_VALUES)}")
    return KERNELS[option_value]


def find_job_kernel(name: str) -> AttentionKernel | None:
    """Return the kernel that a capture names; None if it is not known here."""
    return next((kernel for kernel in KERNELS.values() if name in kernel.job_names), None)


def list_forms() -> Iterator[AttentionForm]:
    """Yield every form that rows may be computed by."""
    for kernel in KERNELS.values():
        yield from kernel.list_forms()
    yield from (*WITH_CUDNN.values(), *RING_WITH_CUDNN.values(), plain.OWN)


def find_attention_form(name: str) -> AttentionForm:
    """Return the form of that name, as the header and run.json have it."""
    return {form.name: form for form in list_forms()}[name]
