"""Compare log-probs in chunks with those of whole logits, forward and backward: time, and peak memory.

    python -m benchmarks head --tokens 16384                                       # an H200: half a minute
    python -m benchmarks head --tokens 512 --vocabulary 4096 --hidden 256          # any CPU

Head and mean log-prob of a bf16 model. `again` is the control: the first contestant a second time. `Liger` is its fused
linear cross entropy of a sum, where liger-kernel is installed. `recomputed` is ours for a loss that does not give every
log-prob the same gradient. Peak is what is allocated above the weights, their gradients, and the input with its
gradient; "-" without CUDA.
"""

import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actor_init.head.chunks import LogProbRequest, compute_log_probs
from actor_init.model_form import HeadForm
from benchmarks.harness import Answers, Column, Sample, alternate, make_parser, table

HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of hidden states, weight and targets
COLUMNS = (
    Column("median ms", "ms"),
    Column("time / plain", "ms", ".3f", of="plain"),
    Column("time / compiled", "ms", ".3f", of="plain, compiled"),
    Column("peak MiB", "MiB", ",.0f"),
    Column("peak / plain", "MiB", ".3f", of="plain"),
    Column("loss", "loss", ".6f"),
    Column("norm of hidden's gradient", "hidden", ".6g"),
    Column("of the weight's", "weight", ".6g"),
)


def main() -> int:
    parser = make_parser(__doc__, rounds=10)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--chunk-mib", type=int, default=None, help="logits of a chunk; default: as in a replay")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    made = partial(torch.randn, device=device, dtype=torch.bfloat16)
    hidden_TH = made(given.tokens, given.hidden).requires_grad_()
    weight_VH = made(given.vocabulary, given.hidden).mul_(given.hidden**-0.5).requires_grad_()
    target_T = torch.randint(given.vocabulary, (given.tokens,), device=device)
    form = HeadForm(chunk_bytes=None if given.chunk_mib is None else given.chunk_mib << 20)
    answers = Answers(given, "head")
    measuring = {
        name: partial(measured, function, hidden_TH, weight_VH, target_T)
        for name, function in contestants(form).items()
    }
    figures = alternate(measuring, answers, rounds=given.rounds, warmup=2)
    print(
        f"{answers.machine}: {given.tokens:,} tokens, vocabulary {given.vocabulary:,}, "
        f"hidden {given.hidden:,}, bf16\n\n{table('contestant', figures, COLUMNS)}"
    )
    return 0


def contestants(form: HeadForm) -> dict[str, HeadLoss]:
    found: dict[str, HeadLoss] = {
        "plain": plain,
        "plain, compiled": torch.compile(plain, dynamic=False),
        "Liger": liger,
        "ours": partial(ours, form, True),
        "ours, recomputed": partial(ours, form, False),
        "again": plain,
    }
    if find_spec("liger_kernel") is None or not torch.cuda.is_available():
        del found["Liger"]
    return found


def plain(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_TH, weight_VH).float(), target_T)


def liger(hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss: Tensor = LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight_VH, hidden_TH, target_T)
    return loss / len(target_T)


def ours(form: HeadForm, has_uniform_gradient: bool, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> Tensor:
    wanted = LogProbRequest(
        predictor_N=torch.arange(len(hidden_TH), device=hidden_TH.device),
        target_N=target_T,
        owned_N=None,
        max_share=len(weight_VH),
        group=None,
        has_uniform_gradient=has_uniform_gradient,
        with_entropies=False,
    )
    log_probs_N, _ = compute_log_probs(hidden_TH, weight_VH, None, form, wanted)
    return -log_probs_N.mean()


def measured(function: HeadLoss, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, number: int) -> list[Sample]:
    """Return milliseconds, peak MiB above what stays (none on a CPU), loss and gradient norms."""
    hidden_TH.grad = weight_VH.grad = None
    on_cuda = hidden_TH.device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated() + hidden_TH.nbytes + weight_VH.nbytes  # and gradients
        torch.cuda.reset_peak_memory_stats()
        start: Any = torch.cuda.Event(enable_timing=True)
        stop: Any = torch.cuda.Event(enable_timing=True)
        start.record()
    began = time.perf_counter()
    loss = function(hidden_TH, weight_VH, target_T)
    torch.autograd.backward(loss)
    milliseconds, peak = (time.perf_counter() - began) * 1e3, {}
    if on_cuda:
        stop.record()
        torch.cuda.synchronize()
        milliseconds = float(start.elapsed_time(stop))
        peak = {"MiB": (torch.cuda.max_memory_allocated() - before) / (1 << 20)}
    assert hidden_TH.grad is not None
    assert weight_VH.grad is not None
    norms = [float(torch.linalg.vector_norm(one, dtype=torch.float32)) for one in (hidden_TH.grad, weight_VH.grad)]
    return [{"ms": milliseconds, **peak, "loss": loss.item(), "hidden": norms[0], "weight": norms[1]}]
