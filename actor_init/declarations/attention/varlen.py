"""Declare torch.nn.attention.varlen."""

from actor_init.declarations.attention.declaration import AttentionForm, AttentionKernel, KernelLimits
from actor_init.option_values import Attention
from capture.facts import Setting

LIMITS = KernelLimits(
    title="torch's varlen attention",
    devices=("cuda",),
    has_fp32=False,
    fp32_name="fp32 kernel",
    missing_features={"dropout": "dropout", "softcap": "softcap", "s_aux": "sinks"},
    refusal=f"torch's varlen attention has no dropout, softcap or sinks. Try: {Setting('attention', Attention.EAGER)}",
)
VARLEN = AttentionKernel(
    option_value=Attention.VARLEN,
    packed=AttentionForm(
        name="torch_varlen_attn", limits=LIMITS, function="actor_init.attention.kernels:torch_varlen_attn"
    ),
    padded=None,
)
