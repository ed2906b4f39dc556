"""Declare torch.nn.attention.varlen."""

from actor_init.declarations.attention.declaration import Form, Kernel, Limits
from actor_init.toggles import Attention
from capture.facts import Setting

LIMITS = Limits(
    title="torch's varlen attention",
    devices=("cuda",),
    has_fp32=False,
    fp32="fp32 kernel",
    lacks={"dropout": "dropout", "softcap": "softcap", "s_aux": "sinks"},
    refusal=f"torch's varlen attention has no dropout, softcap or sinks. Try: {Setting('attention', Attention.EAGER)}",
)
VARLEN = Kernel(
    word=Attention.VARLEN,
    packed=Form(name="torch_varlen_attn", limits=LIMITS, function="actor_init.attention.kernels:torch_varlen_attn"),
    padded=None,
)
