"""Replace the modules of a built model that have a fused form, and say which."""

from collections import Counter

import torch
from torch import nn

from actor_init.fused.liger import check_liger, liger_version
from actor_init.fused.rms_norm import replace_norm
from actor_init.fused.rotary import replace_rotary
from actor_init.fused.swiglu import replace_swiglu
from actor_init.spec import Kernels

OWN = "the model's own"
NONE_FOUND = f"{OWN}: no module of it is shown to have a fused form"


def fuse_as_asked(model: nn.Module, asked: Kernels, where: torch.device) -> str | None:
    """Call `fuse` under --kernels fused. Returns its description, or None under any other.

    Raises UsageError where Liger's kernels cannot run.
    """
    check_liger(asked, where)
    return fuse(model, where) if asked is Kernels.FUSED else None


def fuse(model: nn.Module, where: torch.device) -> str:
    """Give each module of `model` that is shown to have a fused form that form, and describe what was replaced.

    where  the device that the model will run on: the forms are tried there

    The model may be on the meta device. Call it before hooks, adapters and compilers are added.
    """
    found: Counter[str] = Counter()
    forms = {"RMSNorm": replace_norm, "SwiGLU": replace_swiglu, "rope": replace_rotary}
    for module in model.modules():
        if done := next((name for name, replace in forms.items() if replace(module, where)), None):
            found[done] += 1
    if not found:
        return NONE_FOUND
    counts = [name if name == "rope" else f"{found[name]} {name}" for name in forms if found[name]]
    return f"fused ({', '.join(counts)}; liger {liger_version()})"
