"""Compute log-probs from hidden states and the head's weight, forward and backward, without whole logits.

The logits of a chunk of tokens are computed as the head's module would, in its dtype; the softmax is fp32. Backward
needs the logits once more, or something that was computed from them. There are three ways to give it that:

    KEEP_LOGITS           All tokens fit into one chunk: its logits stay in memory until backward.
    GRADIENTS_IN_FORWARD  It is known that backward will give every log-prob the same gradient. Forward computes the
                          gradients of hidden states, weight and bias for a gradient of 1, and backward multiplies them
                          by the true one. This takes three matrix multiplications, as with whole logits.
    RECOMPUTE_LOGITS      In all other cases backward computes each chunk's logits again: four matrix multiplications.

The weight's gradient is summed over chunks in fp32, and rounded once, when it is multiplied.

Shape letters: T tokens that the head was fed, N of them whose log-prob is requested, C of these in a chunk, H hidden
size, V vocabulary, or a rank's share of it, R ranks that share the vocabulary.
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

# The first torch whose matrix multiplication on CUDA can give the product of half-precision matrices in fp32.
FP32_PRODUCTS_SINCE = "2.8"
# Tokens. Matrix multiplication on a GPU is fastest at sizes that are multiples of it.
TOKEN_ALIGNMENT = 128


class BackwardMethod(StrEnum):
    """How backward gets what it needs of the logits; the module's docstring explains each."""

    KEEP_LOGITS = "keep logits"
    GRADIENTS_IN_FORWARD = "gradients in forward"
    RECOMPUTE_LOGITS = "recompute logits"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbRequest:
    """Which log-probs a head is to compute.

    predictor_N           index into the T tokens, each at most once
    target_N              index into this rank's share of the vocabulary
    owned_N               is the target in this rank's share? None: it holds the whole vocabulary
    max_share             the size of the largest share of the vocabulary that a rank holds
    group                 the ranks that hold the other shares; None: there are none
    has_uniform_gradient  backward gives every log-prob the same gradient; if it does not, the weight's becomes NaN
    with_entropies        also compute the entropies of the distributions
    """

    predictor_N: Tensor
    target_N: Tensor
    owned_N: Tensor | None
    max_share: int
    group: dist.ProcessGroup | None
    has_uniform_gradient: bool
    with_entropies: bool


def compute_log_probs(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, form: HeadForm, request: LogProbRequest
) -> tuple[Tensor, Tensor | None]:
    """Compute fp32 log-probs [N], and entropies [N] in nats if they are requested.

    Where shares of the vocabulary are spread over ranks, all of them must call this; the gradient of `hidden_TH` is
    that of this rank's share.
    """
    log_probs_N, entropy_N = _ChunkedLogProbs.apply(hidden_TH, weight_VH, bias_V, form, request)
    return log_probs_N, entropy_N if request.with_entropies else None


def choose_chunk_size(num_tokens: int, token_bytes: int, chunk_bytes: int) -> int:
    """Choose how many tokens a chunk has: equally many in each chunk, as far as they can be."""
    limit = max(1, chunk_bytes // token_bytes)
    if limit > TOKEN_ALIGNMENT:
        limit -= limit % TOKEN_ALIGNMENT
    if num_tokens == 0:
        return 1
    equal_size = math.ceil(num_tokens / math.ceil(num_tokens / limit))
    if num_tokens <= limit:
        return equal_size
    return min(limit, math.ceil(equal_size / TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SoftmaxStatistics:
    """Statistics of each token's softmax over the whole vocabulary; its probabilities are exp(x - max - log_sum)."""

    max_C: Tensor
    log_sum_C: Tensor
    entropy_C: Tensor | None

    @classmethod
    def slice_chunk(
        cls, chunk: slice, max_N: Tensor, log_sum_N: Tensor, entropy_N: Tensor | None
    ) -> "_SoftmaxStatistics":
        entropy_C = None if entropy_N is None else entropy_N[chunk]
        return cls(max_C=max_N[chunk], log_sum_C=log_sum_N[chunk], entropy_C=entropy_C)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, form: HeadForm, request: LogProbRequest
    ) -> tuple[Tensor, Tensor]:
        head = _ChunkedHead(hidden_TH, weight_VH, bias_V, form, request)
        needs_gradient = tuple(ctx.needs_input_grad[:3])
        method = head.choose_backward_method() if any(needs_gradient) else None
        gradients = _GradientSums(head, needs_gradient) if method is BackwardMethod.GRADIENTS_IN_FORWARD else None
        results = _ForwardResults.allocate(head)
        logits_NV: Tensor | None = None
        for chunk in head.split_tokens():
            # The loop's body is a function so that a chunk's logits are freed before those of the next one are made.
            logits_NV = _run_chunk(head, chunk, results, gradients, keeps_logits=method is BackwardMethod.KEEP_LOGITS)
        ctx.method, ctx.needs_gradient, ctx.form, ctx.request = method, needs_gradient, form, request
        if gradients is not None:
            ctx.save_for_backward(*gradients.take_sums())
            ctx.dtypes = (hidden_TH.dtype, weight_VH.dtype, weight_VH.dtype)
        elif method is not None:
            statistics = (results.max_N, results.log_sum_N, results.entropy_N)
            ctx.save_for_backward(hidden_TH, weight_VH, bias_V, logits_NV, *statistics)
        return results.log_probs_N, results.entropy_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor, entropy_gradient_N: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.method is BackwardMethod.GRADIENTS_IN_FORWARD:
            return (*scale_gradients(ctx.saved_tensors, ctx.dtypes, gradient_N), None, None)
        hidden_TH, weight_VH, bias_V, logits_NV, max_N, log_sum_N, entropy_N = ctx.saved_tensors
        head = _ChunkedHead(hidden_TH, weight_VH, bias_V, ctx.form, ctx.request)
        gradients = _GradientSums(head, ctx.needs_gradient)
        with_entropies = ctx.request.with_entropies
        for chunk in head.split_tokens():
            softmax = _SoftmaxStatistics.slice_chunk(chunk, max_N, log_sum_N, entropy_N if with_entropies else None)
            entropy_gradient_C = entropy_gradient_N[chunk] if with_entropies else None
            gradients.add_chunk(
                chunk,
                head.compute_logits_gradient(logits_NV, chunk, softmax, gradient_N[chunk], entropy_gradient_C),
            )
        return (*gradients.take_rounded(), None, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ForwardResults:
    """What forward computes, filled a chunk at a time; without entropies, `entropy_N` is empty."""

    log_probs_N: Tensor
    max_N: Tensor
    log_sum_N: Tensor
    entropy_N: Tensor

    @classmethod
    def allocate(cls, head: "_ChunkedHead") -> "_ForwardResults":
        def empty(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.float32, device=head.hidden_TH.device)

        num_tokens = head.num_tokens
        return cls(
            log_probs_N=empty(num_tokens),
            max_N=empty(num_tokens),
            log_sum_N=empty(num_tokens),
            entropy_N=empty(num_tokens if head.request.with_entropies else 0),
        )


def _run_chunk(
    head: "_ChunkedHead",
    chunk: slice,
    results: _ForwardResults,
    gradients: "_GradientSums | None",
    *,
    keeps_logits: bool,
) -> Tensor | None:
    """Fill `results` at `chunk`, and add to `gradients` if there are any. Return the logits if it `keeps_logits`."""
    logits_CV = head.compute_logits(chunk)
    target_C, results.max_N[chunk], results.log_sum_N[chunk], mean_C = head.compute_statistics(logits_CV, chunk)
    results.log_probs_N[chunk] = target_C - results.log_sum_N[chunk]
    if mean_C is not None:
        results.entropy_N[chunk] = results.log_sum_N[chunk] - mean_C
    if gradients is not None:
        softmax = _SoftmaxStatistics.slice_chunk(chunk, results.max_N, results.log_sum_N, None)
        gradients.add_chunk(
            chunk, head.compute_logits_gradient(logits_CV, chunk, softmax, torch.ones_like(target_C), None)
        )
    return logits_CV if keeps_logits else None


class _ChunkedHead:
    """The head's computation, a chunk of tokens at a time."""

    def __init__(
        self, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, form: HeadForm, request: LogProbRequest
    ) -> None:
        self.hidden_TH, self.weight_VH, self.bias_V = hidden_TH, weight_VH, bias_V
        self.form, self.request = form, request
        self.num_tokens = len(request.predictor_N)
        token_bytes = request.max_share * hidden_TH.element_size()
        self._chunk_size = choose_chunk_size(self.num_tokens, token_bytes, form.choose_chunk_bytes(hidden_TH.device))

    def choose_backward_method(self) -> BackwardMethod:
        if self.has_one_chunk:
            return BackwardMethod.KEEP_LOGITS
        # In fp16 small probabilities become 0. Loss scaling prevents that, but only the true gradient is scaled, and
        # forward would compute with a gradient of 1.
        if self.request.has_uniform_gradient and self.hidden_TH.dtype is not torch.float16:
            return BackwardMethod.GRADIENTS_IN_FORWARD
        return BackwardMethod.RECOMPUTE_LOGITS

    def split_tokens(self) -> Iterator[slice]:
        for start in range(0, self.num_tokens, self._chunk_size):
            yield slice(start, min(start + self._chunk_size, self.num_tokens))

    @property
    def has_one_chunk(self) -> bool:
        return self.num_tokens <= self._chunk_size

    def select_hidden(self, chunk: slice) -> Tensor:
        return self.hidden_TH[self.request.predictor_N[chunk]]

    def compute_logits(self, chunk: slice) -> Tensor:
        """Compute the head's logits [C, V], before the model's steps."""
        hidden_CH, weight_HV = self.select_hidden(chunk), self.weight_VH.t()
        return hidden_CH @ weight_HV if self.bias_V is None else torch.addmm(self.bias_V, hidden_CH, weight_HV)

    def compute_statistics(self, logits_CV: Tensor, chunk: slice) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Compute, over the whole vocabulary: target minus maximum, maximum, log of the sum of exp(x - maximum); for
        entropies, the mean of x - maximum.
        """
        request = self.request
        owned_C = None if request.owned_N is None else request.owned_N[chunk]
        model_logits_CV = self.form.apply_steps(logits_CV) if self.form.changes_values else logits_CV
        max_C, sum_C, target_C, weighted_C = _compute_row_sums(
            model_logits_CV, request.target_N[chunk], request.with_entropies
        )
        if request.group is not None:
            assert owned_C is not None
            target_C = target_C.masked_fill(~owned_C, 0)
            local_4C = torch.stack([max_C, sum_C, target_C, sum_C if weighted_C is None else weighted_C])
            chunk_length = local_4C.shape[1]
            gathered = local_4C.new_empty(request.group.size() * 4, chunk_length)
            dist.all_gather_into_tensor(gathered, local_4C, group=request.group)
            max_RC, sum_RC, target_RC, weighted_RC = gathered.view(-1, 4, chunk_length).unbind(dim=1)
            max_C = max_RC.amax(dim=0)
            shift_RC = max_RC - max_C
            weighted_C = None if weighted_C is None else ((weighted_RC + shift_RC * sum_RC) * shift_RC.exp()).sum(dim=0)
            sum_C, target_C = (sum_RC * shift_RC.exp()).sum(dim=0), target_RC.sum(dim=0)
        mean_C = None if weighted_C is None else weighted_C / sum_C
        return target_C - max_C, max_C, sum_C.log(), mean_C

    def compute_logits_gradient(
        self,
        logits_CV: Tensor | None,
        chunk: slice,
        softmax: _SoftmaxStatistics,
        gradient_C: Tensor,
        entropy_gradient_C: Tensor | None,
    ) -> Tensor:
        """Compute the gradient of the head's logits, perhaps written over them; logits of None are computed again."""
        logits_CV = self.compute_logits(chunk) if logits_CV is None else logits_CV
        target_C, owned_N = self.request.target_N[chunk], self.request.owned_N
        target_gradient_C = gradient_C if owned_N is None else gradient_C.masked_fill(~owned_N[chunk], 0)
        if not self.form.changes_values:
            return _write_softmax_gradient(
                logits_CV, target_C, softmax, gradient_C, target_gradient_C, entropy_gradient_C
            )
        with torch.enable_grad():
            leaf_CV = logits_CV.detach().requires_grad_()
            model_logits_CV = self.form.apply_steps(leaf_CV)
        model_gradient_CV = _write_softmax_gradient(
            model_logits_CV.detach().clone(), target_C, softmax, gradient_C, target_gradient_C, entropy_gradient_C
        )
        (gradient_CV,) = torch.autograd.grad(model_logits_CV, leaf_CV, model_gradient_CV)
        return gradient_CV


class _GradientSums:
    """Sums over chunks of the gradients that are needed, of hidden states, weight and bias."""

    def __init__(self, head: _ChunkedHead, needs_gradient: tuple[bool, ...]) -> None:
        self._head = head
        self._hidden_TH = torch.zeros_like(head.hidden_TH) if needs_gradient[0] else None
        self._weight_VH: Tensor | None = None
        self._bias_V: Tensor | None = None
        self._needs_gradient = needs_gradient

    def add_chunk(self, chunk: slice, gradient_CV: Tensor) -> None:
        head = self._head
        if self._hidden_TH is not None:
            self._hidden_TH[head.request.predictor_N[chunk]] = gradient_CV @ head.weight_VH
        if self._needs_gradient[1]:
            self._weight_VH = add_product(
                self._weight_VH, gradient_CV.t(), head.select_hidden(chunk), is_whole_sum=head.has_one_chunk
            )
        if self._needs_gradient[2]:
            chunk_bias_V = gradient_CV.sum(dim=0, dtype=torch.float32)
            self._bias_V = chunk_bias_V if self._bias_V is None else self._bias_V.add_(chunk_bias_V)

    def take_sums(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Hand over the gradients; those of weight and bias in the dtype that they were summed in."""
        head = self._head
        weight_VH, self._weight_VH = self._weight_VH, None
        # Where no token has a log-prob, no chunk was added; autograd still expects gradients.
        if self._needs_gradient[1] and weight_VH is None:
            weight_VH = torch.zeros_like(head.weight_VH)
        bias_V = self._bias_V
        if self._needs_gradient[2] and bias_V is None:
            bias_V = torch.zeros_like(head.weight_VH[:, 0])
        return self._hidden_TH, weight_VH, bias_V

    def take_rounded(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Hand over each gradient in the dtype of its tensor."""
        hidden_TH, weight_VH, bias_V = self.take_sums()
        dtype = self._head.weight_VH.dtype
        return (
            hidden_TH,
            None if weight_VH is None else weight_VH.to(dtype),
            None if bias_V is None else bias_V.to(dtype),
        )


def add_product(total: Tensor | None, left: Tensor, right: Tensor, *, is_whole_sum: bool) -> Tensor:
    """Add a product of matrices to `total`, in fp32 for half precision; a product that is the whole sum keeps its
    dtype.
    """
    if is_whole_sum:
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
    return TorchVersion(torch.__version__) >= FP32_PRODUCTS_SINCE


def scale_gradients(
    gradients: tuple[Tensor | None, ...], dtypes: tuple[torch.dtype, ...], gradient_N: Tensor
) -> tuple[Tensor | None, ...]:
    """Multiply gradients, computed for 1, by the gradient that all log-probs have, by NaN if they differ, and round."""
    smallest, largest = gradient_N.aminmax()
    scale = torch.where(smallest == largest, smallest, math.nan)
    return tuple(
        None if gradient is None else _scale_gradient(gradient, scale, dtype)
        for gradient, dtype in zip(gradients, dtypes, strict=True)
    )


def _scale_gradient(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if gradient.device.type == "cuda":
        from actor_init.head.softmax_kernels import scale_gradient

        return scale_gradient(gradient, scale, dtype)
    # The scale gets as many dimensions as the gradient: torch rounds a factor without any to the gradient's dtype.
    return gradient.mul_(scale.view([1] * gradient.ndim)).to(dtype)


def _compute_row_sums(
    logits_CV: Tensor, target_C: Tensor, with_entropies: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute each row's maximum, sum of exp(x - maximum), x at the target, and, for entropies, the sum of
    exp(x - maximum) * (x - maximum); fp32.
    """
    if logits_CV.device.type == "cuda":
        from actor_init.head.softmax_kernels import compute_row_sums

        return compute_row_sums(logits_CV, target_C, with_entropies)
    max_C = logits_CV.amax(dim=1).float()
    shifted_CV = logits_CV.float() - max_C[:, None]
    exponential_CV = shifted_CV.exp()
    weighted_C = torch.linalg.vecdot(exponential_CV, shifted_CV) if with_entropies else None
    return max_C, exponential_CV.sum(dim=1), logits_CV.gather(1, target_C[:, None])[:, 0].float(), weighted_C


def _write_softmax_gradient(
    logits_CV: Tensor,
    target_C: Tensor,
    softmax: _SoftmaxStatistics,
    gradient_C: Tensor,
    target_gradient_C: Tensor,
    entropy_gradient_C: Tensor | None,
) -> Tensor:
    """Write the gradient of the logits over them, and return them.

    gradient_C          of the log-probs
    target_gradient_C   the same, 0 where another rank holds the target
    entropy_gradient_C  of the entropies; None where there are none
    """
    if logits_CV.device.type == "cuda":
        from actor_init.head.softmax_kernels import write_softmax_gradient

        return write_softmax_gradient(
            logits_CV,
            target_C,
            softmax.max_C,
            softmax.log_sum_C,
            gradient_C,
            target_gradient_C,
            softmax.entropy_C,
            entropy_gradient_C,
        )
    log_prob_CV = logits_CV.float() - softmax.max_C[:, None] - softmax.log_sum_C[:, None]
    probability_CV = log_prob_CV.exp()
    if entropy_gradient_C is None:
        gradient_CV = probability_CV.mul_(-gradient_C[:, None])
    else:
        assert softmax.entropy_C is not None
        entropy_factor_CV = log_prob_CV.add_(softmax.entropy_C[:, None]).mul_(entropy_gradient_C[:, None])
        gradient_CV = probability_CV.mul_(entropy_factor_CV.add_(gradient_C[:, None])).neg_()
    gradient_CV.scatter_add_(1, target_C[:, None], target_gradient_C[:, None])
    return logits_CV.copy_(gradient_CV)
