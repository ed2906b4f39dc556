"""Fused modules: what is replaced gives the model's own numbers, and what is not of the form is left alone."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from actor_init.fused import liger, rotary
from actor_init.fused.liger import computes_same, find_liger_lack, make_random_numbers
from actor_init.fused.rms_norm import replace_norm
from actor_init.fused.rotary import NONE_FOUND, fuse, fuse_if_requested
from actor_init.fused.swiglu import replace_swiglu
from actor_init.spec import Kernels, UsageError
from tests.helpers import liger_on_a_cpu as stand_in
from tests.helpers.read_logs import read_log
from tests.helpers.sharded import FEW, MODELS, ONE, SIZES, Job, Outcome, replay_jobs, save_models

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LACK = find_liger_lack
LLAMA, QWEN3, GEMMA = "llama", "qwen3, norms on heads", "gemma3, sliding window, softcap"
BIASED = "llama, tied, biases, uneven"
FAMILIES = {  # and what of two layers is replaced; a gemma's layers have gelu
    "llama": "fused (5 RMSNorm, 2 SwiGLU, rope; liger in torch)",
    "qwen3": "fused (9 RMSNorm, 2 SwiGLU, rope; liger in torch)",
    "gemma": "fused (5 RMSNorm, rope; liger in torch)",
    "gemma3_text": "fused (13 RMSNorm, rope; liger in torch)",
    "olmo2": "fused (9 RMSNorm, 2 SwiGLU, rope; liger in torch)",
    "phi3": "fused (5 RMSNorm, 2 SwiGLU, rope; liger in torch)",
    "gpt_neox": "fused (rope; liger in torch)",  # of a part of each head
    "cohere": "fused (2 SwiGLU; liger in torch)",  # LayerNorm, and pairs of neighbours turn
    "opt": NONE_FOUND,
}
JOBS = [
    Job(BIASED, 1, f"--kernels fused --compile {FEW}"),
    Job(GEMMA, 1, f"--kernels fused --gradient-checkpointing --no-packing {FEW}"),
    Job(QWEN3, 1, f"--kernels fused {ONE}", backend="ddp"),
    *[Job(model, 2, f"--kernels fused --tp 2 {ONE}") for model in (BIASED, GEMMA)],
    Job(QWEN3, 2, f"--kernels fused --tp 2 --sequence-parallel {ONE}"),
    Job(QWEN3, 2, f"--kernels fused --tp 2 --zero-stage 1 {ONE}", backend="deepspeed"),
    Job(LLAMA, 2, f"--kernels fused --ring 2 {ONE}"),
    Job(QWEN3, 2, f"--kernels fused --zero-stage 3 {ONE}", backend="deepspeed"),
]


@pytest.fixture(autouse=True)
def liger_is_here(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stand in for Liger's kernels, but in a test of the kernels themselves."""
    with nullcontext() if request.node.get_closest_marker("gpu") else stand_in.liger_on_a_cpu():
        yield


def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 2}
    if kind == "opt":
        sizes = {"hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
        sizes |= {"word_embed_proj_dim": 32, "dropout": 0.0, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 0.8, 0.3)
    assert isinstance(model, PreTrainedModel)
    return model


def numbers_of(model: PreTrainedModel) -> list[Tensor]:
    """Logits and every gradient."""
    logits = model(input_ids=torch.arange(24).view(2, 12), use_cache=False).logits
    logits.logsumexp(-1).sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_fused_model_has_its_own_numbers(kind: str) -> None:
    model = model_of(kind)
    wanted = numbers_of(model)
    model.zero_grad()
    assert fuse(model, CPU) == FAMILIES[kind]
    for found, own in zip(numbers_of(model), wanted, strict=True):
        torch.testing.assert_close(found, own, rtol=2e-5, atol=2e-6)


def test_a_fused_model_on_the_meta_device_is_that_of_one_with_values() -> None:
    config = AutoConfig.for_model("llama", **SIZES)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert fuse(model, CPU).startswith("fused (")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_other_models_in_the_process_keep_their_own_functions() -> None:
    own, other = modeling_llama.apply_rotary_pos_emb, model_of("llama")
    fuse(model_of("llama"), CPU)
    assert modeling_llama.apply_rotary_pos_emb is own
    assert all("forward" not in vars(module) for module in other.modules())


class Norm(nn.Module):
    """Has what an RMSNorm has, and the forward that it is given."""

    def __init__(self, computed: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.variance_epsilon = 1e-6
        self.computed = computed

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.computed(self, hidden_states)


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize(
    ("forward", "is_of_the_form"),
    [
        (lambda self, x: self.weight * rms(x.float(), 1e-6).to(x.dtype), True),
        (lambda self, x: ((1 + self.weight.float()) * rms(x.float(), 1e-6)).to(x.dtype), True),
        (lambda self, x: self.weight * rms(x.float(), 1e-5).to(x.dtype), False),  # no such number is in the module
        (lambda self, x: self.weight * rms(x.float() - x.float().mean(-1, keepdim=True), 1e-6).to(x.dtype), False),
        (lambda self, x: self.weight * F.normalize(x.float(), dim=-1).to(x.dtype) * 4, False),  # no epsilon in the root
        (lambda self, x: self.weight * rms(x.float(), 1e-6).to(x.dtype).detach(), False),
        (lambda self, x: self.weight * rms(x.float(), 1e-6).to(x.dtype) * 1.01, False),
    ],
)
def test_a_norm_is_replaced_if_it_has_the_numbers_of_the_form(
    forward: Callable[[Any, Tensor], Tensor], is_of_the_form: bool
) -> None:
    norm = Norm(forward)
    assert replace_norm(norm, CPU) is is_of_the_form
    assert ("forward" in vars(norm)) is is_of_the_form


class SwiGLU(nn.Module):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor], *, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.product, self.names = product, names
        for name, sizes in zip(names, ((8, 16), (8, 16), (16, 8)), strict=True):
            setattr(self, name, nn.Linear(*sizes, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        result: Tensor = down(self.product(gate(x), up(x)))
        return result


@pytest.mark.parametrize(
    ("product", "is_of_the_form"),
    [
        (lambda gate, up: F.silu(gate) * up, True),
        (lambda gate, up: gate * F.silu(up), True),  # the names do not say which is the gate
        (lambda gate, up: F.gelu(gate) * up, False),
        (lambda gate, up: F.silu(gate) + up, False),
        (lambda gate, up: 1.01 * F.silu(gate) * up, False),
        (lambda gate, up: F.dropout(F.silu(gate) * up, 0.5), False),
    ],
)
def test_a_layer_is_replaced_if_it_has_the_numbers_of_swiglu(
    product: Callable[[Tensor, Tensor], Tensor], is_of_the_form: bool
) -> None:
    layer = SwiGLU(product, names=("w1", "w3", "w2"))
    own = deepcopy(layer)
    assert replace_swiglu(layer, CPU) is is_of_the_form
    if is_of_the_form:
        x = torch.rand(2, 5, 8)
        torch.testing.assert_close(layer(x), own(x))


class Dropping(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, training=self.training))


def test_a_dropout_that_acts_in_training_alone_is_seen() -> None:
    layer = Dropping(lambda gate, up: F.silu(gate) * up, names=("gate", "up", "down"))
    assert not replace_swiglu(layer.eval(), CPU)


def test_no_block_s_graph_breaks() -> None:
    model = model_of("llama")
    fuse(model, CPU)
    block, hidden = model.model.layers[0], torch.rand(1, 6, model.config.hidden_size)
    positions = model.model.rotary_emb(hidden, torch.arange(6)[None])
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        compiled(hidden, position_embeddings=positions), block(hidden, position_embeddings=positions)
    )


def test_a_wrong_kernel_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof runs what will run: a turn by the wrong angle, as a broken build might do, is seen."""
    monkeypatch.setattr(rotary, "liger_rotary", lambda q, k, cos, sin: stand_in.rotary(q, k, cos, sin * 1.02))
    assert fuse(model_of("llama"), CPU) == "fused (5 RMSNorm, 2 SwiGLU; liger in torch)"
    monkeypatch.setattr("actor_init.fused.swiglu.liger_product", lambda gate, up: F.silu(gate) * up * 1.001)
    monkeypatch.setattr(F, "rms_norm", partial(F.rms_norm, eps=1e-3))
    assert fuse(model_of("llama"), CPU) == NONE_FOUND


@pytest.mark.gpu
@pytest.mark.skipif(find_liger_lack(torch.device("cuda")) is not None, reason="Liger is not installed")
def test_liger_s_kernels_compute_what_stands_in_for_them_on_a_cpu() -> None:
    gate, up = (make_random_numbers(6, 16, where=CUDA, seed=seed) for seed in (1, 2))
    weight = 0.1 * make_random_numbers(16, where=CUDA, seed=3)
    q, k = (make_random_numbers(2, heads, 5, 16, where=CUDA, seed=4) for heads in (4, 2))
    angles = make_random_numbers(1, 5, 8, where=CUDA, seed=5)
    cos, sin = (torch.cat((half, half), dim=-1) for half in (angles.cos(), angles.sin()))
    assert computes_same(
        stand_in.product, lambda gate, up: liger.liger_product(gate.clone(), up.clone()), (gate, up), 1e-5
    )
    assert computes_same(
        lambda x, weight: stand_in.norm(x, weight, 1e-6),
        lambda x, weight: liger.liger_norm(x, weight, 1e-6),
        (up, weight),
        1e-5,
    )
    assert computes_same(
        lambda q, k: stand_in.rotary(q, k, cos, sin),
        lambda q, k: liger.liger_rotary(q.clone(), k.clone(), cos, sin),
        (q, k),
        1e-5,
    )


@pytest.mark.parametrize(
    ("where", "is_installed", "why"),
    [
        ("cpu", True, "kernels='fused' is Liger's, which has no CPU kernels. Try: kernels='model'"),
        ("cuda", False, "kernels='fused' is Liger's, which is not installed (pip install liger-kernel). Try: "),
    ],
)
def test_without_liger_it_is_refused_with_what_to_install(
    where: str, is_installed: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liger, "find_liger_lack", LACK)
    monkeypatch.setattr(liger, "find_spec", lambda name: object() if is_installed else None)
    with pytest.raises(UsageError) as error:
        fuse_if_requested(nn.Linear(2, 2), Kernels.FUSED, torch.device(where))
    assert str(error.value).startswith(why)
    assert fuse_if_requested(nn.Linear(2, 2), Kernels.MODEL, torch.device(where)) is None


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Job, Outcome]:
    folders: dict[str, Path] = save_models(MODELS, tmp_path_factory.mktemp("models"))
    return replay_jobs(JOBS, folders, tmp_path_factory.mktemp("logs"))


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_losses_and_gradients_are_the_reference_s(job: Job, outcomes: dict[Job, Outcome]) -> None:
    (folder,) = outcomes[job].log.iterdir()
    header, _ = read_log(folder)
    assert str(header["facts"]["kernels"]).startswith("fused (")
    outcomes[job].check()
