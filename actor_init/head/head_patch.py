"""Patch a model's head so that it computes log-probs itself, and nothing of the size of its logits is made.

The head's module is called as always, so that hooks on its call still run: ZeRO 3 and FSDP2 gather its weight
there, tensor parallelism prepares its input. In place of logits it returns a few samples, which the model treats as
logits. In the graph they depend on the log-probs, so that a hook that waits for the gradient of logits still sees it
before any other gradient.

Shape letters: B rows, S tokens a row, T tokens of all rows, N of them whose log-prob is requested, H hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from transformers import PreTrainedModel

from actor_init.head.chunks import LogProbRequest, compute_log_probs
from actor_init.head.liger_head import compute_liger_log_probs
from actor_init.model_form import HeadForm
from actor_init.option_values import Head, UsageError
from actor_init.parallel.split_linear import sum_gradient
from actor_init.parallel.vocab_parallel import find_vocabulary_share, to_local_ids
from capture.facts import Setting

TRY_WHOLE_LOGITS = f"Try: {Setting('head', Head.WHOLE)}"
# They stand for logits in what the model does after its head.
SAMPLES = (-30.0, -1.0, -0.01, 0.0, 0.5, 3.0, 40.0)
# The heads whose model was seen to treat the samples as its form says.
_checked_heads: WeakSet[nn.Module] = WeakSet()


@dataclass(slots=True)
class PatchedHead:
    """A head during one forward, and what it computed."""

    form: HeadForm
    head: nn.Module
    log_probs_N: Tensor | None = None
    entropy_N: Tensor | None = None
    samples: Tensor | None = None

    def take_results(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hand over log-probs [N] and entropies [N], given the samples that the model returned as logits.

        Raises UsageError if the model did something else with the samples than the form says.
        """
        logits = logits.to_local() if isinstance(logits, DTensor) else logits
        if self.log_probs_N is None or self.samples is None:
            why = ", the head, was not called in forward"
            raise UsageError(type(self.head).__name__, why, TRY_WHOLE_LOGITS)
        if self.head not in _checked_heads:
            expected = self.form.apply_steps(self.samples)
            if logits.dtype is not expected.dtype or not torch.equal(logits.detach(), expected):
                why = "does something else with its head's logits than a small copy of it did"
                why = f"{why} ({self.form.describe()})"
                raise UsageError("the model", why, TRY_WHOLE_LOGITS)
            _checked_heads.add(self.head)
        return _LogProbsAfterLogits.apply(self.log_probs_N, logits), self.entropy_N


@contextmanager
def patch_head(
    model: Callable[..., Any],
    form: HeadForm,
    *,
    predictor_N: Tensor,
    target_ids_N: Tensor,
    has_uniform_gradient: bool,
    with_entropies: bool,
) -> Iterator[PatchedHead]:
    """Compute log-probs inside the head of `model`, or of the model that it wraps, while the block runs.

    predictor_N           index into the T tokens, each at most once
    target_ids_N          the token whose log-prob is requested there
    has_uniform_gradient  backward gives each log-prob the same gradient
    """
    head: Any = find_head(model)
    patched = PatchedHead(form=form, head=head)
    instance_forward = head.__dict__.get("forward")

    def forward(hidden_BSH: Tensor) -> Tensor:
        if patched.log_probs_N is not None:
            raise UsageError("the model", "calls its head more than once", TRY_WHOLE_LOGITS)
        hidden_TH, weight, group, max_share = _read_whole_input(hidden_BSH, head)
        local_ids_N, owned_N = target_ids_N, None
        if group is not None:
            local_ids_N, owned_N = to_local_ids(
                target_ids_N, *find_vocabulary_share(head.weight.shape[0], head.weight.device_mesh)
            )
        request = LogProbRequest(
            predictor_N=predictor_N,
            target_N=local_ids_N,
            owned_N=owned_N,
            max_share=max_share,
            group=group,
            has_uniform_gradient=has_uniform_gradient,
            with_entropies=with_entropies,
        )
        bias = head.bias.to_local() if isinstance(head.bias, DTensor) else head.bias
        # Under DDP parameters are fp32, whatever dtype the forward computes in.
        dtype = hidden_TH.dtype
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        if form.kind is Head.LIGER:
            patched.log_probs_N = compute_liger_log_probs(hidden_TH, weight, bias, form, request)
        else:
            patched.log_probs_N, patched.entropy_N = compute_log_probs(hidden_TH, weight, bias, form, request)
        patched.samples = hidden_TH.new_tensor(SAMPLES).view(1, -1, 1)
        samples: Tensor = _Samples.apply(patched.log_probs_N, patched.samples)
        if group is None:
            return samples
        return DTensor.from_local(samples, head.weight.device_mesh, [Shard(2)], run_check=False)

    head.forward = forward
    try:
        yield patched
    finally:
        if instance_forward is None:
            del head.forward
        else:
            head.forward = instance_forward


def find_head(model: Callable[..., Any]) -> nn.Module | None:
    """Return the head of a causal LM, or of the one that DDP or DeepSpeed's engine wraps."""
    wrapped: Any = model
    while not isinstance(wrapped, PreTrainedModel):
        wrapped = wrapped.module
    head: nn.Module | None = wrapped.get_output_embeddings()
    return head


def _read_whole_input(hidden: Tensor, head: Any) -> tuple[Tensor, Tensor, Any, int]:
    """Return the hidden states [T, H] and the weight that this rank computes with, the group of the ranks that hold the
    other shares of the vocabulary (None: there are none), and the largest share's size.
    """
    weight = head.weight
    if not isinstance(weight, DTensor):
        return hidden.flatten(0, -2), weight, None, len(weight)
    mesh = weight.device_mesh
    # Under --sequence-parallel the hidden states are a DTensor; each rank's gradient is that of its share.
    if isinstance(hidden, DTensor):
        hidden = hidden.to_local(grad_placements=[Partial()])
    else:
        hidden = sum_gradient(hidden, mesh.get_group())
    return hidden.flatten(0, -2), weight.to_local(), mesh.get_group(), -(-weight.shape[0] // mesh.size())


class _Samples(torch.autograd.Function):
    """Return samples that depend on the log-probs in the graph alone."""

    @staticmethod
    def forward(ctx: Any, log_probs_N: Tensor, samples: Tensor) -> Tensor:
        ctx.shape = log_probs_N.shape
        return samples.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.shape, dtype=torch.float32), None


class _LogProbsAfterLogits(torch.autograd.Function):
    """Return the log-probs unchanged; backward visits the logits before them, with a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, log_probs_N: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return log_probs_N.view_as(log_probs_N)

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, Tensor]:
        return gradient_N, torch.zeros_like(*ctx.saved_tensors)
