"""An attention kernel in one file, for tests: softmax over all scores, written out, in fp32.

`python -m tests.helpers.toy_kernel ...` is `replay` with it.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from actor_init.declarations.attention import KERNELS
from actor_init.declarations.attention.declaration import AttentionForm, AttentionKernel, KernelLimits
from actor_init.option_values import Attention
from capture.facts import Setting

EAGER = Setting("attention", Attention.EAGER)
LIMITS = KernelLimits(
    title="toy",
    missing_features={"dropout": "dropout"},
    refusal=f"toy has no {{lacking}}. Try: {EAGER}",
)
FORM = AttentionForm(
    name="toy_softmax",
    limits=LIMITS,
    function="tests.helpers.toy_kernel:softmax_attention",
    mask_function="transformers.masking_utils:sdpa_mask",  # True where a token is seen; None: all before it
    reads_mask=True,
)
KERNEL = AttentionKernel(option_value="toy", packed=FORM, padded=FORM, job_names=("toy_of_a_job",))

num_calls = 0


def softmax_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """Attend in one formula. query is [B, H, S, D], key and value are [B, K, S, D]; returns [B, S, H, D]."""
    global num_calls
    num_calls += 1
    num_tokens, group_size = query.shape[2], query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(group_size, dim=1).float() for tensor in (key, value))
    scores = torch.einsum("bhqd,bhkd->bhqk", query.float(), keys) * more["scaling"]
    if attention_mask is None:
        attention_mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = (scores - scores.logsumexp(dim=-1, keepdim=True)).exp()
    return torch.einsum("bhqk,bhkd->bqhd", weights, values).to(query.dtype), None


def main() -> int:
    KERNELS[KERNEL.option_value] = KERNEL
    from replay.command_line.cli import main as replay

    return replay(sys.argv[1:])


if __name__ == "__main__":
    code = main()
    from replay.command_line.cli import leave

    leave(code)
