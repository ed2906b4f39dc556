"""Log-probs in chunks are those of whole logits, without a tensor of their size; a probe says for which models."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from actor_init.action_log_probs import action_log_probs
from actor_init.adapters import Adapter
from actor_init.head.chunks import LogProbRequest, choose_chunk_size, compute_log_probs
from actor_init.head.liger_head import compute_liger_log_probs
from actor_init.inputs.documents import KeptLogits
from actor_init.inputs.packing import prepare_inputs
from actor_init.model import ModelSource, make_random_weights
from actor_init.model_form import HeadForm, LogitStep
from actor_init.probe.head_probe import explain_whole_head, probe_head
from actor_init.probe.packing_probe import build_small_model, make_one_document
from actor_init.spec import ActorSpec, Compile, Head, ParallelSpec, UsageError
from replay.command_line.cli import main as replay_main
from tests.helpers.commands import LIMIT
from tests.helpers.liger_on_a_cpu import liger_on_a_cpu
from tests.helpers.sharded import SIZES
from tests.helpers.thread_ranks import Threads

T, N, H, V = 60, 53, 6, 40
CAP = tuple(LogitStep(function=name, numbers=numbers) for name, numbers in (("div", (5,)), ("tanh", ()), ("mul", (5,))))
# Bytes of seven tokens' fp32 logits.
SMALL = 7 * V * 4
METHODS: dict[str, dict[str, Any]] = {
    "one chunk": {"chunk_bytes": None},
    "one chunk, entropies": {"chunk_bytes": None, "with_entropies": True},
    "gradients in forward": {"chunk_bytes": SMALL, "has_uniform_gradient": True},
    "logits recomputed in backward": {"chunk_bytes": SMALL},
    "logits recomputed in backward, entropies": {"chunk_bytes": SMALL, "with_entropies": True},
    "Liger's": {"chunk_bytes": None, "has_uniform_gradient": True, "kind": Head.LIGER},
}
CPU = torch.device("cpu")


class Case:
    """Hidden states, weight and bias, and a loss of what is computed from them."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        torch.manual_seed(0)
        shapes = ((T, H), (V, H), (V,))
        self.leaves = [torch.randn(*shape).to(device, dtype).requires_grad_() for shape in shapes]
        self.predictor_N, self.target_N = torch.randperm(T)[:N].to(device), torch.randint(V, (N,)).to(device)
        self.factors_2N = torch.rand(2, N).to(device)

    def request(self, *, has_uniform_gradient: bool = False, with_entropies: bool = False) -> LogProbRequest:
        if has_uniform_gradient:
            self.factors_2N = torch.full_like(self.factors_2N, 0.7)
        return LogProbRequest(
            predictor_N=self.predictor_N,
            target_N=self.target_N,
            owned_N=None,
            max_share=V,
            group=None,
            has_uniform_gradient=has_uniform_gradient,
            with_entropies=with_entropies,
        )

    def run(self, form: HeadForm, request: LogProbRequest) -> tuple[Tensor, Tensor | None]:
        hidden_TH, weight_VH, bias_V = self.leaves
        if form.kind is Head.LIGER:
            on_a_cpu = liger_on_a_cpu() if hidden_TH.device.type == "cpu" else nullcontext()
            with on_a_cpu:
                return compute_liger_log_probs(hidden_TH, weight_VH, bias_V, form, request), None
        return compute_log_probs(hidden_TH, weight_VH, bias_V, form, request)

    def loss(self, log_probs_N: Tensor, entropy_N: Tensor | None) -> Tensor:
        loss = (self.factors_2N[0] * log_probs_N).sum()
        return loss if entropy_N is None else loss + (self.factors_2N[1] * entropy_N).sum()

    def compute_in_fp64(
        self, steps: tuple[LogitStep, ...], *, with_entropies: bool
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Log-probs, entropies and gradients from whole logits in fp64."""
        hidden_TH, weight_VH, bias_V = leaves = [leaf.detach().double().requires_grad_() for leaf in self.leaves]
        logits_NV = hidden_TH[self.predictor_N] @ weight_VH.T + bias_V
        if steps:
            logits_NV = 5 * torch.tanh(logits_NV / 5)
        log_NV = torch.log_softmax(logits_NV, dim=-1)
        log_probs_N = log_NV.gather(1, self.target_N[:, None])[:, 0]
        entropy_N = -(log_NV.exp() * log_NV).sum(dim=-1) if with_entropies else None
        return log_probs_N, entropy_N, list(torch.autograd.grad(self.loss(log_probs_N, entropy_N), leaves))


@pytest.mark.parametrize("steps", [(), CAP], ids=["plain", "capped"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_numbers_are_those_of_whole_logits_in_fp64(
    method: str, steps: tuple[LogitStep, ...], dtype: torch.dtype, bound: float, device: str
) -> None:
    """A bf16 logit is rounded to 2**-9 of itself, and so is each gradient."""
    case, settings = Case(dtype, device), dict(METHODS[method])
    kind, chunk_bytes = settings.pop("kind", Head.CHUNKS), settings.pop("chunk_bytes")
    form = HeadForm(kind=kind, steps=steps, chunk_bytes=chunk_bytes)
    log_probs_N, entropy_N = case.run(form, case.request(**settings))
    gradients = torch.autograd.grad(case.loss(log_probs_N, entropy_N), case.leaves)
    expected_N, expected_entropy_N, expected_gradients = case.compute_in_fp64(
        steps, with_entropies=entropy_N is not None
    )
    pairs = [(log_probs_N, expected_N), *zip(gradients, expected_gradients, strict=True)]
    pairs += [] if entropy_N is None or expected_entropy_N is None else [(entropy_N, expected_entropy_N)]
    for actual, expected in pairs:
        assert float((actual.double() - expected).detach().norm() / expected.detach().norm()) < bound
    assert [gradient.dtype for gradient in gradients] == [dtype] * 3


class SharedVocabulary:
    """Ranks that are threads of this process, and hold a share of the vocabulary each: the last one a smaller one."""

    def __init__(self, shares: Sequence[slice]) -> None:
        self.shares = shares
        self._ranks = Threads(len(shares))

    def run(
        self, case: Case, form: HeadForm, rank: int, **settings: bool
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """One rank's log-probs, entropies and gradients of hidden states, and of its shares of weight and bias."""
        share, (whole_TH, whole_VH, whole_V) = self.shares[rank], case.leaves
        hidden_TH, weight_VH, bias_V = leaves = [
            leaf.detach().clone().requires_grad_() for leaf in (whole_TH, whole_VH[share], whole_V[share])
        ]
        request = replace(
            case.request(**settings),
            target_N=(case.target_N - share.start).clamp(0, share.stop - share.start - 1),
            owned_N=(share.start <= case.target_N) & (case.target_N < share.stop),
            max_share=max(each.stop - each.start for each in self.shares),
            group=cast(Any, SimpleNamespace(rank=rank, size=lambda: len(self.shares))),
        )
        log_probs_N, entropy_N = compute_log_probs(hidden_TH, weight_VH, bias_V, form, request)
        return log_probs_N, entropy_N, list(torch.autograd.grad(case.loss(log_probs_N, entropy_N), leaves))

    def gather(self, gathered: Tensor, local: Tensor, group: Any) -> None:
        gathered.copy_(torch.cat(self._ranks.exchange(group.rank, local.clone())))


@pytest.mark.parametrize("steps", [(), CAP], ids=["plain", "capped"])
@pytest.mark.parametrize("method", [method for method in METHODS if method != "Liger's"])
def test_shares_of_the_vocabulary_give_the_numbers_of_the_whole(
    method: str, steps: tuple[LogitStep, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has all log-probs and entropies; what it has of the hidden states' gradient adds up."""
    case, settings = Case(), dict(METHODS[method])
    form = HeadForm(steps=steps, chunk_bytes=settings.pop("chunk_bytes"))
    case.request(**settings)
    vocabulary = SharedVocabulary([slice(0, 14), slice(14, 28), slice(28, V)])
    monkeypatch.setattr("actor_init.head.chunks.dist.all_gather_into_tensor", vocabulary.gather)
    with ThreadPoolExecutor(len(vocabulary.shares)) as threads:
        ranks = list(
            threads.map(partial(vocabulary.run, case, form, **settings), range(len(vocabulary.shares)), timeout=LIMIT)
        )
    log_probs_N, entropy_N, (hidden_TH, weight_VH, bias_V) = case.compute_in_fp64(
        steps, with_entropies="with_entropies" in settings
    )
    shares = list(zip(*(gradients for _, _, gradients in ranks), strict=True))
    pairs = [
        (torch.stack(shares[0]).sum(dim=0), hidden_TH),
        (torch.cat(shares[1]), weight_VH),
        (torch.cat(shares[2]), bias_V),
    ]
    pairs += [(own_N, log_probs_N) for own_N, _, _ in ranks]
    if entropy_N is not None:
        pairs += [(cast(Tensor, own_N), entropy_N) for _, own_N, _ in ranks]
    for actual, expected in pairs:
        # The bound of whole logits in fp32, above.
        assert float((actual.double() - expected).detach().norm() / expected.detach().norm()) < 2e-6


def test_the_weight_s_gradient_is_rounded_once() -> None:
    """Sums over chunks in bf16 would be rounded with each chunk."""
    case = Case(torch.bfloat16)

    def error(chunk_bytes: int | None) -> float:
        log_probs_N, _ = case.run(HeadForm(chunk_bytes=chunk_bytes), case.request())
        _, gradient_VH, _ = torch.autograd.grad(case.loss(log_probs_N, None), case.leaves)
        expected_VH = case.compute_in_fp64((), with_entropies=False)[2][1]
        return float((gradient_VH.double() - expected_VH).norm() / expected_VH.norm())

    assert error(V * 2) < 1.3 * error(None)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest floating tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [
            value for value in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(value, Tensor)
        ]
        self.elements = max([self.elements, *(tensor.numel() for tensor in tensors if tensor.is_floating_point())])
        return result


@pytest.mark.parametrize("method", [method for method, settings in METHODS.items() if settings["chunk_bytes"]])
@pytest.mark.parametrize("steps", [(), CAP], ids=["plain", "capped"])
def test_nothing_of_the_size_of_logits_is_made(method: str, steps: tuple[LogitStep, ...]) -> None:
    case, settings = Case(), dict(METHODS[method])
    form = HeadForm(steps=steps, chunk_bytes=settings.pop("chunk_bytes"))
    with LargestTensor() as largest:
        results = case.run(form, case.request(**settings))
        torch.autograd.grad(case.loss(*results), case.leaves)
    assert largest.elements == max(T * H, 7 * V) < N * V / 5
    # With one chunk the same measure shows a tensor of that size, so it does measure.
    with LargestTensor() as largest:
        torch.autograd.grad(case.loss(*case.run(HeadForm(), case.request())), case.leaves)
    assert largest.elements == N * V


@pytest.mark.parametrize("kind", [Head.CHUNKS, Head.LIGER])
def test_gradients_that_are_not_all_the_same_as_was_said_are_not_silently_wrong(kind: Head) -> None:
    case = Case()
    request = case.request(has_uniform_gradient=True)
    log_probs_N, _ = case.run(HeadForm(kind=kind, chunk_bytes=SMALL), request)
    factors_N = torch.ones(N).index_fill(0, torch.tensor([3]), 2.0)
    gradients = torch.autograd.grad((factors_N * log_probs_N).sum(), case.leaves)
    assert all(bool(gradient.isnan().any()) for gradient in gradients)


@pytest.mark.parametrize("has_uniform_gradient", [False, True])
def test_a_second_backward_is_refused(has_uniform_gradient: bool) -> None:
    case = Case()
    form = HeadForm(chunk_bytes=SMALL if has_uniform_gradient else None)
    log_probs_N, _ = case.run(form, case.request(has_uniform_gradient=has_uniform_gradient))
    torch.autograd.grad(log_probs_N.sum(), case.leaves, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(log_probs_N.sum(), case.leaves)


@pytest.mark.parametrize(
    ("kind", "has_uniform_gradient"), [(Head.CHUNKS, False), (Head.CHUNKS, True), (Head.LIGER, True)]
)
def test_no_log_prob_is_wanted_of_a_rank(kind: Head, has_uniform_gradient: bool) -> None:
    """A ring's slice may have none; its gradients are zeros, which the other ranks' are added to."""
    case = Case()
    none = torch.zeros(0, dtype=torch.long)
    request = replace(case.request(has_uniform_gradient=has_uniform_gradient), predictor_N=none, target_N=none)
    log_probs_N, _ = case.run(HeadForm(kind=kind, chunk_bytes=SMALL), request)
    gradients = torch.autograd.grad(log_probs_N.sum(), case.leaves)
    assert [float(gradient.abs().sum()) for gradient in gradients] == [0.0] * 3


@pytest.mark.parametrize(("memory_gib", "chunk_mib"), [(140, 2048), (79, 2048), (63, 1024), (24, 512), (7, 128)])
def test_a_chunk_takes_a_32nd_of_a_gpu_s_memory_at_most(
    memory_gib: int, chunk_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(total_memory=memory_gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert HeadForm().choose_chunk_bytes(torch.device("cuda")) == chunk_mib << 20
    assert HeadForm(chunk_bytes=5).choose_chunk_bytes(torch.device("cuda")) == 5
    assert HeadForm().choose_chunk_bytes(torch.device("cpu")) == 64 << 20


@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 129, 1000, 4096, 4097, 16384, 100_003])
@pytest.mark.parametrize("limit", [1, 7, 128, 200, 4186])
def test_chunks_are_as_few_as_their_bytes_allow_and_about_equal(num_tokens: int, limit: int) -> None:
    size = choose_chunk_size(num_tokens, 10, 10 * limit + 9)
    assert 1 <= size <= limit
    aligned = limit - limit % 128 if limit > 128 else limit
    assert -(-num_tokens // size) <= -(-num_tokens // aligned)


def make_config(model_type: str, **values: Any) -> PretrainedConfig:
    known = AutoConfig.for_model(model_type)
    sizes = {name: value for name, value in {**SIZES, **values}.items() if hasattr(known, name)}
    config: PretrainedConfig = AutoConfig.for_model(model_type, **sizes)
    return config


@pytest.mark.parametrize(
    ("config", "description"),
    [
        (make_config("llama"), "log-probs in chunks"),
        (make_config("llama", tie_word_embeddings=True), "log-probs in chunks"),
        (make_config("gpt2"), "log-probs in chunks"),
        (make_config("phi"), "log-probs in chunks"),  # whose head has a bias
        (make_config("opt", ffn_dim=48, word_embed_proj_dim=32), "log-probs in chunks"),
        (make_config("gemma2", final_logit_softcapping=7.0), "log-probs in chunks, div 7, tanh, mul 7"),
        (make_config("cohere", logit_scale=0.125), "log-probs in chunks, mul 0.125"),
        (make_config("granite", logits_scaling=4.0), "log-probs in chunks, div 4"),
        (make_config("granite", logits_scaling=1.0), "log-probs in chunks"),
        (make_config("mamba", state_size=8, intermediate_size=64), "log-probs in chunks, float"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else value,
)
def test_what_a_model_does_to_its_logits_is_found_out(config: PretrainedConfig, description: str) -> None:
    assert probe_head(config, CPU).describe() == description


def change_llama(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> PretrainedConfig:
    original_forward = LlamaForCausalLM.forward

    def forward(self: LlamaForCausalLM, *args: Any, **kwargs: Any) -> Any:
        output = original_forward(self, *args, **kwargs)
        output.logits = change(output.logits)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    return make_config("llama")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda logits: logits.flip(-1), "the model does flip with its head's logits"),
        (lambda logits: logits * torch.arange(logits.shape[-1]), "the model does mul with its head's logits"),
        (lambda logits: logits.clamp_(-0.5, 0.5), "the model does clamp_ with its head's logits"),
        (lambda logits: torch.where(logits > 0, logits, 0.0), "the model does gt, where with its head's logits"),
    ],
    ids=["flip", "by column", "in place", "where"],
)
def test_a_model_that_does_more_keeps_whole_logits_and_says_so(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor], why: str
) -> None:
    assert probe_head(change_llama(monkeypatch, change), CPU).describe() == f"whole logits ({why})"


def test_chunks_with_other_numbers_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actor_init.head.chunks.add_product", lambda total, left, right, is_whole_sum: left @ right)
    description = probe_head(make_config("llama"), CPU).describe()
    assert description.startswith("whole logits (a small copy's numbers are ")


def test_a_model_that_differs_from_its_small_copy_is_refused() -> None:
    model: PreTrainedModel = build_small_model(
        make_config("cohere", logit_scale=0.125, vocab_size=128), "eager", 0, CPU
    )
    inputs = replace(prepare_inputs(make_one_document(), packing=False), head=HeadForm())
    with pytest.raises(UsageError, match=r"does something else .* Try: head='whole'"):
        action_log_probs(model, inputs)
    assert "forward" not in vars(model.get_output_embeddings())


@pytest.mark.parametrize("has_uniform_gradient", [False, True])
def test_a_loss_of_entropies_has_its_gradient_though_that_of_the_log_probs_is_uniform(
    has_uniform_gradient: bool,
) -> None:
    """Forward could compute a uniform gradient of log-probs ahead, and none of entropies."""
    model = build_small_model(make_config("llama", vocab_size=128), "eager", 0, CPU)
    inputs = prepare_inputs(make_one_document(), packing=False)

    def compute_gradients(head: HeadForm) -> tuple[Tensor, ...]:
        kept = KeptLogits()
        log_probs_BA = action_log_probs(
            model, replace(inputs, head=head, kept_logits=kept, has_uniform_gradient=has_uniform_gradient)
        )
        loss = log_probs_BA.sum() + kept.compute_entropies().square().sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    whole, chunked = (
        compute_gradients(head) for head in (HeadForm(kind=Head.WHOLE), HeadForm(chunk_bytes=7 * 128 * 4))
    )
    for gradient, expected in zip(chunked, whole, strict=True):
        # fp32 sums in another order.
        assert float((gradient - expected).norm() / expected.norm()) < 1e-4


def make_adapter(module: str) -> Adapter:
    return Adapter(name="default", settings={"target_modules": [module], "r": 2})


@pytest.mark.parametrize(
    ("spec", "adapter", "why"),
    [
        (ActorSpec(compile=Compile.DEEPCOMPILE), None, "DeepCompile's graph is the whole model"),
        (ActorSpec(parallel=ParallelSpec(tp=2)), None, "deepspeed gives every tp rank the whole vocabulary"),
        (ActorSpec(), make_adapter("lm_head"), "the head is peft's Linear"),
        (ActorSpec(), make_adapter("q_proj"), ""),
        (ActorSpec(backend="fsdp2", parallel=ParallelSpec(tp=2)), None, ""),
    ],
)
def test_what_needs_whole_logits_is_known(spec: ActorSpec, adapter: Adapter | None, why: str) -> None:
    config = make_config("llama")
    source = ModelSource(config=config, weights=make_random_weights(config, 0), name="", adapter=adapter)
    assert explain_whole_head(spec, source) == why


@pytest.mark.usefixtures("one_world")
def test_a_run_says_where_its_log_probs_come_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    descriptions, losses = [], []
    for number, typed in enumerate((["--head", "chunks"], ["--head", "whole"], ["--trace"])):
        logs = tmp_path / str(number)
        code = replay_main(["--backend", "fsdp2", "--max-inputs", "1", "--log-folder", str(logs), *typed])
        assert code == 0
        [run] = logs.glob("*/run.json")
        [record] = [line for path in logs.glob("*/rank0.jsonl") for line in path.read_text().splitlines()]
        descriptions.append(json.loads(run.read_text())["facts"]["head"])
        losses.append(json.loads(record)["loss"])
        assert ("whole logits" in capsys.readouterr().out) == (number > 0)
    assert descriptions == [
        "log-probs in chunks (--head chunks)",
        "whole logits (--head whole)",
        "whole logits (the trace holds them)",
    ]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-4)  # bf16: the same logits, rounded alike
