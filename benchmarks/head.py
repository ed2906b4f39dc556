"""Compare log-probs in chunks with those of whole logits, forward and backward: time, and peak memory.

    python -m benchmarks.head --tokens 16384                                       # an H200: half a minute
    python -m benchmarks.head --tokens 512 --vocabulary 4096 --hidden 256          # any CPU

Head and mean log-prob of a bf16 model. The contestants alternate in rounds, in a new random order each time; a round's
ratio is between neighbours in time, and the table has the medians of the ratios. `again` is the control: the first
contestant a second time. `Liger` is its fused linear cross entropy of a sum, where liger-kernel is installed.
`recomputed` is ours for a loss that does not give every log-prob the same gradient. Peak is what is allocated above the
weights, their gradients, and the input with its gradient; "-" without CUDA.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actor_init.head.chunks import LogProbRequest, compute_log_probs
from actor_init.model_form import HeadForm

WARMUP = 2
Contestant = Callable[[Tensor, Tensor, Tensor], Tensor]  # of hidden states, weight and targets: the loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--chunk-mib", type=int, default=None, help="logits of a chunk; default: as in a replay")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    made = partial(torch.randn, device=device, dtype=torch.bfloat16)
    hidden_TH = made(given.tokens, given.hidden).requires_grad_()
    weight_VH = made(given.vocabulary, given.hidden).mul_(given.hidden**-0.5).requires_grad_()
    target_T = torch.randint(given.vocabulary, (given.tokens,), device=device)
    form = HeadForm(chunk_bytes=None if given.chunk_mib is None else given.chunk_mib << 20)
    figures = compare(contestants(form), hidden_TH, weight_VH, target_T, given.rounds)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"{where}, torch {torch.__version__}: {given.tokens:,} tokens, vocabulary {given.vocabulary:,}, "
        f"hidden {given.hidden:,}, bf16\n\n{table(figures)}"
    )
    return 0


def contestants(form: HeadForm) -> dict[str, Contestant]:
    found: dict[str, Contestant] = {
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


def compare(
    functions: dict[str, Contestant], hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, num_rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds, peak MiB (NaN on a CPU), loss and gradient norms of each contestant, by round."""
    order = random.Random(0)
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in functions}
    for number in range(num_rounds + WARMUP):
        for name in order.sample(list(functions), len(functions)):
            one = measured(functions[name], hidden_TH, weight_VH, target_T)
            if number >= WARMUP:
                for key, value in one.items():
                    figures[name].setdefault(key, []).append(value)
    return figures


def measured(function: Contestant, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor) -> dict[str, float]:
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
    milliseconds, peak = (time.perf_counter() - began) * 1e3, float("nan")
    if on_cuda:
        stop.record()
        torch.cuda.synchronize()
        milliseconds = float(start.elapsed_time(stop))
        peak = (torch.cuda.max_memory_allocated() - before) / (1 << 20)
    assert hidden_TH.grad is not None
    assert weight_VH.grad is not None
    norms = [float(torch.linalg.vector_norm(one, dtype=torch.float32)) for one in (hidden_TH.grad, weight_VH.grad)]
    return {"ms": milliseconds, "MiB": peak, "loss": loss.item(), "hidden": norms[0], "weight": norms[1]}


def table(figures: dict[str, dict[str, list[float]]]) -> str:
    lines = [
        "| contestant | median ms | time / plain | / compiled | peak MiB | / plain | loss | norms of gradients |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in figures.items():
        ratios = [_ratio(one["ms"], figures[other]["ms"]) for other in ("plain", "plain, compiled")]
        peak, of_plain = (median(each["MiB"]) for each in (one, figures["plain"]))
        memory = f"{peak:,.0f} | {peak / of_plain:.3f}" if peak == peak else "- | -"
        numbers = f"{one['loss'][-1]:.6f} | {one['hidden'][-1]:.6g}, {one['weight'][-1]:.6g}"
        lines.append(f"| {name} | {median(one['ms']):.2f} | {ratios[0]:.3f} | {ratios[1]:.3f} | {memory} | {numbers} |")
    return "\n".join(lines)


def _ratio(one: list[float], other: list[float]) -> float:
    return median(a / b for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    sys.exit(main())
