"""Register the attention kernels. To add one, write a file that declares it, its function, and one entry here."""

from collections import ChainMap
from collections.abc import Collection, Iterator
from typing import Any

from actor_init.declarations.attention import cudnn, flash, plain, varlen
from actor_init.declarations.attention.auto import RING_WITH_CUDNN, WITH_CUDNN
from actor_init.declarations.attention.declaration import Form, Kernel
from actor_init.toggles import Attention, UsageError

KERNELS: dict[str, Kernel] = {
    kernel.word: kernel
    for kernel in (
        flash.FLASH,
        cudnn.CUDNN,
        varlen.VARLEN,
        plain.SDPA,
        plain.EAGER,
    )
}
WORDS: Collection[str] = ChainMap[str, Any](KERNELS, {Attention.AUTO: None})  # of --attention: auto, and every kernel's


def kernel_of(word: str) -> Kernel:
    """Return what a word of --attention chooses. Raises UsageError for an unknown one."""
    if word not in KERNELS:
        raise UsageError.not_allowed("attention", word, f"Give one of {', '.join(WORDS)}")
    return KERNELS[word]


def kernel_of_job(name: str) -> Kernel | None:
    """Return the kernel that a capture names; None if it is not known here."""
    return next((kernel for kernel in KERNELS.values() if name in kernel.job_names), None)


def forms() -> Iterator[Form]:
    """Yield every form that rows may be computed by."""
    for kernel in KERNELS.values():
        yield from kernel.forms()
    yield from (*WITH_CUDNN.values(), *RING_WITH_CUDNN.values(), plain.OWN)


def form_of(name: str) -> Form:
    """Return the form of that name, as the header and run.json have it."""
    return {form.name: form for form in forms()}[name]
