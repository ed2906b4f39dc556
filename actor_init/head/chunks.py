"""Compute log-probs from hidden states and the head's weight, forward and backward, without whole logits.

A chunk's logits are computed as the head's module would, in its dtype; softmax is fp32. What backward needs of them
comes from one of three ways:

    KEPT   there is one chunk: its logits stay until backward
    AHEAD  backward is known to give every log-prob the same gradient: forward computes the gradients for 1, and
           backward multiplies. Three matrix multiplications, as with whole logits
    AGAIN  else: backward computes the logits again. Four matrix multiplications

The weight's gradient is summed over chunks in fp32, and rounded once, when it is multiplied.

Shape letters: T tokens that the head was fed, N of them with a log-prob that is wanted, C of these in a chunk, H hidden
size, V vocabulary, or a rank's share of it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

from actor_init.model_form import HeadForm

FP32_PRODUCTS = "2.8"  # of half-precision matrices, on CUDA
ALIGNED = 128  # tokens: the sizes that matrix multiplication on a GPU is fastest at are multiples of it


class Way(StrEnum):
    KEPT = "kept"
    AHEAD = "ahead"
    AGAIN = "again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Which log-probs are wanted of a head.

    predictor_N  index into the T tokens, each at most once
    target_N     index into this rank's share of the vocabulary
    owned_N      is the target in this rank's share? None: it holds the whole vocabulary
    width        the largest share of the vocabulary that a rank holds
    group        the ranks that hold the other shares; None: there are none
    is_even      backward gives every log-prob the same gradient; if it does not, the weight's becomes NaN
    entropies    also compute the entropies of the distributions
    """

    predictor_N: Tensor
    target_N: Tensor
    owned_N: Tensor | None
    width: int
    group: dist.ProcessGroup | None
    is_even: bool
    entropies: bool


def log_probs_in_chunks(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, form: HeadForm, wanted: Wanted
) -> tuple[Tensor, Tensor | None]:
    """Return fp32 log-probs [N], and entropies [N] in nats if they are wanted.

    Where shares of the vocabulary are spread over ranks, all of them must call this; the gradient of `hidden_TH` is
    that of this rank's share.
    """
    log_probs_N, entropy_N = _LogProbs.apply(hidden_TH, weight_VH, bias_V, form, wanted)
    return log_probs_N, entropy_N if wanted.entropies else None


def chunk_size(num_tokens: int, token_bytes: int, chunk_bytes: int) -> int:
    """Return how many tokens a chunk has: equally many in each chunk, as far as they can be."""
    most = max(1, chunk_bytes // token_bytes)
    if most > ALIGNED:
        most -= most % ALIGNED
    each = math.ceil(num_tokens / math.ceil(num_tokens / most)) if num_tokens else 1
    return min(most, math.ceil(each / ALIGNED) * ALIGNED) if num_tokens > most else each


@dataclass(frozen=True, kw_only=True, slots=True)
class _Softmax:
    """What each token's softmax is made of, over the whole vocabulary: its probabilities are exp(x - max - log_sum)."""

    max_C: Tensor
    log_sum_C: Tensor
    entropy_C: Tensor | None

    @classmethod
    def at(cls, chunk: slice, max_N: Tensor, log_sum_N: Tensor, entropy_N: Tensor | None) -> "_Softmax":
        entropy_C = None if entropy_N is None else entropy_N[chunk]
        return cls(max_C=max_N[chunk], log_sum_C=log_sum_N[chunk], entropy_C=entropy_C)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, form: HeadForm, wanted: Wanted
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden_TH, weight_VH, bias_V, form, wanted)
        needs = tuple(ctx.needs_input_grad[:3])
        way = head.way() if any(needs) else None
        gradients = _Gradients(head, needs) if way is Way.AHEAD else None
        found = _Found.empty(head)
        kept_NV: Tensor | None = None
        for chunk in head.chunks():
            # a function of its own, so that no chunk's logits are alive beside the next one's
            kept_NV = _run_chunk(head, chunk, found, gradients, keeps=way is Way.KEPT)
        ctx.way, ctx.needs, ctx.form, ctx.wanted = way, needs, form, wanted
        if gradients is not None:
            ctx.save_for_backward(*gradients.sums())
            ctx.dtypes = (hidden_TH.dtype, weight_VH.dtype, weight_VH.dtype)
        elif way is not None:
            statistics = (found.max_N, found.log_sum_N, found.entropy_N)
            ctx.save_for_backward(hidden_TH, weight_VH, bias_V, kept_NV, *statistics)
        return found.log_probs_N, found.entropy_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor, of_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.way is Way.AHEAD:
            return (*_scaled(ctx.saved_tensors, ctx.dtypes, gradient_N), None, None)
        hidden_TH, weight_VH, bias_V, kept_NV, max_N, log_sum_N, entropy_N = ctx.saved_tensors
        head = _Head(hidden_TH, weight_VH, bias_V, ctx.form, ctx.wanted)
        gradients = _Gradients(head, ctx.needs)
        wants_entropies = ctx.wanted.entropies
        for chunk in head.chunks():
            softmax = _Softmax.at(chunk, max_N, log_sum_N, entropy_N if wants_entropies else None)
            of_entropy_C = of_entropy_N[chunk] if wants_entropies else None
            gradients.add(chunk, head.gradient(kept_NV, chunk, softmax, gradient_N[chunk], of_entropy_C))
        return (*gradients.taken(), None, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """What forward finds, filled a chunk at a time; without entropies, `entropy_N` is empty."""

    log_probs_N: Tensor
    max_N: Tensor
    log_sum_N: Tensor
    entropy_N: Tensor

    @classmethod
    def empty(cls, head: "_Head") -> "_Found":
        def empty(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.float32, device=head.hidden_TH.device)

        num_tokens = head.num_tokens
        return cls(
            log_probs_N=empty(num_tokens),
            max_N=empty(num_tokens),
            log_sum_N=empty(num_tokens),
            entropy_N=empty(num_tokens if head.wanted.entropies else 0),
        )


def _run_chunk(
    head: "_Head", chunk: slice, found: _Found, gradients: "_Gradients | None", *, keeps: bool
) -> Tensor | None:
    """Fill `found` at `chunk`, and add to `gradients` if there are any. Return the head's logits if it `keeps` them."""
    logits_CV = head.logits(chunk)
    target_C, found.max_N[chunk], found.log_sum_N[chunk], mean_C = head.statistics(logits_CV, chunk)
    found.log_probs_N[chunk] = target_C - found.log_sum_N[chunk]
    if mean_C is not None:
        found.entropy_N[chunk] = found.log_sum_N[chunk] - mean_C
    if gradients is not None:
        softmax = _Softmax.at(chunk, found.max_N, found.log_sum_N, None)
        gradients.add(chunk, head.gradient(logits_CV, chunk, softmax, torch.ones_like(target_C), None))
    return logits_CV if keeps else None


class _Head:
    """The head's computation, a chunk of tokens at a time."""

    def __init__(
        self, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, form: HeadForm, wanted: Wanted
    ) -> None:
        self.hidden_TH, self.weight_VH, self.bias_V = hidden_TH, weight_VH, bias_V
        self.form, self.wanted = form, wanted
        self.num_tokens = len(wanted.predictor_N)
        token_bytes = wanted.width * hidden_TH.element_size()
        self._size = chunk_size(self.num_tokens, token_bytes, form.choose_chunk_bytes(hidden_TH.device))

    def way(self) -> Way:
        if self.num_tokens <= self._size:
            return Way.KEPT
        # fp16 has no room below the probabilities: there, gradients come scaled
        return Way.AHEAD if self.wanted.is_even and self.hidden_TH.dtype is not torch.float16 else Way.AGAIN

    def chunks(self) -> Iterator[slice]:
        for start in range(0, self.num_tokens, self._size):
            yield slice(start, min(start + self._size, self.num_tokens))

    @property
    def is_one_chunk(self) -> bool:
        return self.num_tokens <= self._size

    def hidden(self, chunk: slice) -> Tensor:
        return self.hidden_TH[self.wanted.predictor_N[chunk]]

    def logits(self, chunk: slice) -> Tensor:
        """Return the head's logits [C, V], before the model's steps."""
        hidden_CH, weight_HV = self.hidden(chunk), self.weight_VH.t()
        return hidden_CH @ weight_HV if self.bias_V is None else torch.addmm(self.bias_V, hidden_CH, weight_HV)

    def statistics(self, logits_CV: Tensor, chunk: slice) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return, over the whole vocabulary: target minus maximum, maximum, log of the sum of exp(x - maximum), and, if
        entropies are wanted, the mean of x - maximum.
        """
        wanted = self.wanted
        owned_C = None if wanted.owned_N is None else wanted.owned_N[chunk]
        shown_CV = self.form.apply_steps(logits_CV) if self.form.changes_values else logits_CV
        parts = _row_sums(shown_CV, wanted.target_N[chunk], wanted.entropies)
        max_C, sum_C, target_C, weighted_C = parts
        if wanted.group is not None:
            assert owned_C is not None
            target_C = target_C.masked_fill(~owned_C, 0)
            own = torch.stack([max_C, sum_C, target_C, sum_C if weighted_C is None else weighted_C])
            every = own.new_empty(wanted.group.size() * 4, own.shape[1])
            dist.all_gather_into_tensor(every, own, group=wanted.group)
            max_RC, sum_RC, target_RC, weighted_RC = every.view(-1, 4, own.shape[1]).unbind(dim=1)
            max_C = max_RC.amax(dim=0)
            lower_RC = max_RC - max_C
            weighted_C = None if weighted_C is None else ((weighted_RC + lower_RC * sum_RC) * lower_RC.exp()).sum(dim=0)
            sum_C, target_C = (sum_RC * lower_RC.exp()).sum(dim=0), target_RC.sum(dim=0)
        mean_C = None if weighted_C is None else weighted_C / sum_C
        return target_C - max_C, max_C, sum_C.log(), mean_C

    def gradient(
        self, logits_CV: Tensor | None, chunk: slice, softmax: _Softmax, gradient_C: Tensor, of_entropy_C: Tensor | None
    ) -> Tensor:
        """Return the gradient of the head's logits, perhaps written over them; logits of None are computed again."""
        logits_CV = self.logits(chunk) if logits_CV is None else logits_CV
        target_C, owned_N = self.wanted.target_N[chunk], self.wanted.owned_N
        onehot_C = gradient_C if owned_N is None else gradient_C.masked_fill(~owned_N[chunk], 0)
        if not self.form.changes_values:
            return _softmax_gradient(logits_CV, target_C, softmax, gradient_C, onehot_C, of_entropy_C)
        with torch.enable_grad():
            leaf_CV = logits_CV.detach().requires_grad_()
            shown_CV = self.form.apply_steps(leaf_CV)
        of_shown_CV = _softmax_gradient(
            shown_CV.detach().clone(), target_C, softmax, gradient_C, onehot_C, of_entropy_C
        )
        (gradient_CV,) = torch.autograd.grad(shown_CV, leaf_CV, of_shown_CV)
        return gradient_CV


class _Gradients:
    """Sums of gradients over chunks, of what needs one: hidden states, weight, bias."""

    def __init__(self, head: _Head, needs: tuple[bool, ...]) -> None:
        self._head = head
        self._hidden_TH = torch.zeros_like(head.hidden_TH) if needs[0] else None
        self._weight_VH: Tensor | None = None
        self._bias_V: Tensor | None = None
        self._needs = needs

    def add(self, chunk: slice, gradient_CV: Tensor) -> None:
        head = self._head
        if self._hidden_TH is not None:
            self._hidden_TH[head.wanted.predictor_N[chunk]] = gradient_CV @ head.weight_VH
        if self._needs[1]:
            self._weight_VH = _plus_product(
                self._weight_VH, gradient_CV.t(), head.hidden(chunk), is_all=head.is_one_chunk
            )
        if self._needs[2]:
            of_bias_V = gradient_CV.sum(dim=0, dtype=torch.float32)
            self._bias_V = of_bias_V if self._bias_V is None else self._bias_V.add_(of_bias_V)

    def sums(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients; those of weight and bias in the dtype that they were summed in."""
        head = self._head
        weight_VH, self._weight_VH = self._weight_VH, None
        if self._needs[1] and weight_VH is None:  # no token has a log-prob
            weight_VH = torch.zeros_like(head.weight_VH)
        bias_V = self._bias_V
        if self._needs[2] and bias_V is None:
            bias_V = torch.zeros_like(head.weight_VH[:, 0])
        return self._hidden_TH, weight_VH, bias_V

    def taken(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return each gradient in the dtype of its tensor."""
        hidden_TH, weight_VH, bias_V = self.sums()
        dtype = self._head.weight_VH.dtype
        return (
            hidden_TH,
            None if weight_VH is None else weight_VH.to(dtype),
            None if bias_V is None else bias_V.to(dtype),
        )


def _plus_product(total: Tensor | None, left: Tensor, right: Tensor, *, is_all: bool) -> Tensor:
    """Add a product of matrices to `total`, in fp32 for half precision; a product that `is_all` keeps its dtype."""
    if is_all:
        return left @ right
    if left.dtype not in (torch.bfloat16, torch.float16):
        return left @ right if total is None else total.addmm_(left, right)
    if left.device.type != "cuda" or not _has_fp32_products():
        product = (left @ right).float()
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


@cache
def _has_fp32_products() -> bool:
    return TorchVersion(torch.__version__) >= FP32_PRODUCTS


def _scaled(
    gradients: tuple[Tensor | None, ...], dtypes: tuple[torch.dtype, ...], gradient_N: Tensor
) -> tuple[Tensor | None, ...]:
    """Multiply the gradients for 1 by the one gradient that all log-probs have, by NaN if they differ, and round."""
    least, most = gradient_N.aminmax()
    scale = torch.where(least == most, least, math.nan)
    return tuple(
        None if one is None else _times(one, scale, dtype) for one, dtype in zip(gradients, dtypes, strict=True)
    )


def _times(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if gradient.device.type == "cuda":
        from actor_init.head.softmax_kernels import scaled

        return scaled(gradient, scale, dtype)
    # a tensor with dims: one without would be rounded to the gradient's dtype first
    return gradient.mul_(scale.view([1] * gradient.ndim)).to(dtype)


def _row_sums(shown_CV: Tensor, target_C: Tensor, entropies: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return each row's maximum, sum of exp(x - maximum), x at the target, and, for entropies, the sum of
    exp(x - maximum) * (x - maximum); fp32.
    """
    if shown_CV.device.type == "cuda":
        from actor_init.head.softmax_kernels import row_sums

        return row_sums(shown_CV, target_C, entropies)
    max_C = shown_CV.amax(dim=1).float()
    lower_CV = shown_CV.float() - max_C[:, None]
    raised_CV = lower_CV.exp()
    weighted_C = torch.linalg.vecdot(raised_CV, lower_CV) if entropies else None
    return max_C, raised_CV.sum(dim=1), shown_CV.gather(1, target_C[:, None])[:, 0].float(), weighted_C


def _softmax_gradient(
    shown_CV: Tensor,
    target_C: Tensor,
    softmax: _Softmax,
    gradient_C: Tensor,
    onehot_C: Tensor,
    of_entropy_C: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits, written over them.

    gradient_C    of the log-probs
    onehot_C      the same, 0 where another rank holds the target
    of_entropy_C  of the entropies; None where there are none
    """
    if shown_CV.device.type == "cuda":
        from actor_init.head.softmax_kernels import softmax_gradient

        entropy_C = softmax.entropy_C
        return softmax_gradient(
            shown_CV, target_C, softmax.max_C, softmax.log_sum_C, gradient_C, onehot_C, entropy_C, of_entropy_C
        )
    log_CV = shown_CV.float() - softmax.max_C[:, None] - softmax.log_sum_C[:, None]
    probability_CV = log_CV.exp()
    if of_entropy_C is None:
        gradient_CV = probability_CV.mul_(-gradient_C[:, None])
    else:
        assert softmax.entropy_C is not None
        factor_CV = log_CV.add_(softmax.entropy_C[:, None]).mul_(of_entropy_C[:, None]).add_(gradient_C[:, None])
        gradient_CV = probability_CV.mul_(factor_CV).neg_()
    gradient_CV.scatter_add_(1, target_C[:, None], onehot_C[:, None])
    return shown_CV.copy_(gradient_CV)
