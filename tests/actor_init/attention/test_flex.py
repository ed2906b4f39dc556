"""Flex attention: who may choose it, that its masks are those of eager attention, and that its gradients are.

On a CPU it has a forward alone, without attention sinks, and runs here without a compiler.
"""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedModel

from actor_init.action_log_probs import number_documents
from actor_init.attention.document_masks import mask_between_documents
from actor_init.attention.flex import flex_attention
from actor_init.attention.kernel_choice import BOUND, choose_kernel_name, measure_error
from actor_init.attention.kernels import register
from actor_init.compiling import compile_blocks
from actor_init.declarations.attention import find_kernel
from actor_init.spec import ActorSpec, Attention, ParallelSpec, UsageError
from capture.file_format.capture_file import CapturedCall
from replay.options.option_parsing import format_error_with_flags
from replay.options.spec import ReplaySpec
from replay.resolution.job_defaults import choose_job_kernel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLEX = ActorSpec(attention=Attention.FLEX)
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "use_cache": False}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2}
WINDOW = 6
# Windows in both layers, in one of two beside a softcap, and in one of two beside sinks.
MISTRAL = ("mistral", {"sliding_window": WINDOW})
GEMMA2 = ("gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0})
GPT_OSS = ("gpt_oss", {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2})
LENGTHS = (7, 1, 13)
# The second row has padding on its left, the third on its right.
MASK_BS = torch.tensor([[1] * 21, [0] * 9 + [1] * 12, [1] * 15 + [0] * 6])


def make_config(kind: str, settings: Mapping[str, Any]) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model(kind, **SIZES, **HEADS, **settings)
    return config


def build(config: PretrainedConfig, kernel: str) -> PreTrainedModel:
    register()
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=kernel, dtype=torch.float32)
    return model.eval()


def make_ids(rows: int = 1, num_tokens: int = sum(LENGTHS)) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (rows, num_tokens), generator=torch.Generator().manual_seed(1))


def count_positions(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


@pytest.fixture
def no_compiler() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        yield


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("kind", "settings"), [("llama", {}), MISTRAL, GEMMA2])
def test_tokens_see_what_they_see_in_eager_attention(kind: str, settings: Mapping[str, Any]) -> None:
    flex, eager = (build(make_config(kind, settings), kernel) for kernel in ("flex_attention", "eager"))
    packed: dict[str, Any] = {"input_ids": make_ids(), "position_ids": count_positions()}
    torch.testing.assert_close(flex(**packed).logits, eager(**packed).logits)
    padded = {"input_ids": make_ids(rows=3), "attention_mask": MASK_BS}
    real_BS = MASK_BS.bool()
    torch.testing.assert_close(flex(**padded).logits[real_BS], eager(**padded).logits[real_BS])
    # Each document alone gives the same, so packed ones do not see each other, in either kernel.
    for document_1S, logits_1SV in zip(
        make_ids().split(LENGTHS, dim=1), flex(**packed).logits.split(LENGTHS, dim=1), strict=True
    ):
        torch.testing.assert_close(flex(input_ids=document_1S).logits, logits_1SV)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_documents_are_kept_apart_for_a_model_that_gives_its_masks_no_positions() -> None:
    flex = build(make_config(*MISTRAL), "flex_attention")
    apart = flex(input_ids=make_ids(), position_ids=count_positions()).logits
    borders = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    position_1S = torch.arange(sum(LENGTHS))[None]  # rotary embeddings see differences alone
    assert float((flex(input_ids=make_ids(), position_ids=position_1S).logits - apart).abs().max()) > 0.01
    with mask_between_documents(number_documents(borders, sum(LENGTHS))):
        masked = flex(input_ids=make_ids(), position_ids=position_1S).logits
    torch.testing.assert_close(masked, apart, rtol=1e-4, atol=1e-4)


def test_it_is_for_gpus_and_a_cpu_is_told_what_to_type() -> None:
    with pytest.raises(UsageError) as refusal:
        choose_kernel_name(FLEX, CPU, LlamaConfig())
    assert format_error_with_flags(refusal.value) == (
        "the backward of flex attention has no CPU kernel. Try: --attention sdpa, or --attention eager"
    )
    for packing in (True, False):
        spec = ActorSpec(attention=Attention.FLEX, packing=packing)
        assert choose_kernel_name(spec, CUDA, make_config(*GPT_OSS)) == "flex_attention"
    assert choose_kernel_name(ActorSpec(), CUDA, make_config(*GPT_OSS)) == "eager"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (AutoConfig.for_model("bloom"), "transformers has no flex_attention for bloom. Try: attention="),
        (LlamaConfig(hidden_size=32, num_attention_heads=4), "flex attention has no heads of less than 16 (here 8)"),
    ],
)
def test_models_that_it_cannot_compute_are_refused(config: PretrainedConfig, says: str) -> None:
    with pytest.raises(UsageError) as refusal:
        choose_kernel_name(FLEX, CUDA, config)
    assert str(refusal.value).startswith(says)


def test_a_ring_and_dropout_are_refused() -> None:
    with pytest.raises(UsageError) as refusal:
        ActorSpec(attention=Attention.FLEX, parallel=ParallelSpec(ring=2))
    assert format_error_with_flags(refusal.value).startswith("--attention flex has no ring. Try: --ring 2 --attention ")
    heads = torch.rand(1, 4, 10, 16)
    with pytest.raises(UsageError, match=r"^flex attention has no dropout, which this model needs\. Try: attention="):
        flex_attention(torch.nn.Identity(), heads, heads, heads, None, dropout=0.1)


@pytest.mark.parametrize(
    ("where", "config", "word", "why"),
    [
        (CUDA, make_config(*GPT_OSS), Attention.FLEX, "as the job's flex_attention"),
        (CPU, make_config(*GPT_OSS), Attention.AUTO, "of the job's flex_attention: the backward of flex attention"),
        (CUDA, GPT2Config(n_embd=32, n_head=4), Attention.AUTO, "gpt2 does not take the job's flex_attention"),
    ],
)
@pytest.mark.parametrize("is_padded", [True, False])
def test_a_replay_takes_it_where_the_job_did(
    where: torch.device, config: PretrainedConfig, word: str, why: str, is_padded: bool
) -> None:
    mask_BS = MASK_BS if is_padded else torch.ones_like(MASK_BS)
    job = SimpleNamespace(
        environment={"attention": "flex_attention"}, tensors={"attention_mask": mask_BS}, weights=None, outputs={}
    )
    found = choose_job_kernel(ReplaySpec().actor.with_defaults(), cast(CapturedCall, job), where, config)
    assert found.option_value == word
    assert why in found.why


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_compiled_block_has_one_graph_for_all_lengths_and_a_constant_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the first: what is in a mask is a symbol as soon as it was seen to change."""
    graphs: list[GraphModule] = []
    compile_anything = torch.compile

    def keep_graph(graph: GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    # What transformers compiles itself runs as it is.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    flex, eager = (build(make_config(*MISTRAL), kernel) for kernel in ("flex_attention", "eager"))
    monkeypatch.setattr(
        torch, "compile", lambda function, **more: compile_anything(function, **more, backend=keep_graph)
    )
    compile_blocks(flex.model.layers)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    num_graphs = []
    for lengths in ((120, 50), (200, 80), (100, 9, 30), (70, 300)):
        packed = {"input_ids": make_ids(num_tokens=sum(lengths)), "position_ids": count_positions(lengths)}
        with torch.no_grad():
            torch.testing.assert_close(flex(**packed).logits, eager(**packed).logits, rtol=1e-4, atol=1e-4)
        num_graphs.append(len(graphs))
    assert num_graphs == [1, 2, 2, 2]
    given = [node.meta["example_value"] for node in graphs[1].graph.nodes if node.op == "placeholder"]
    symbols = {value.node.hint for value in given if isinstance(value, torch.SymInt)}
    assert symbols
    assert symbols.isdisjoint({WINDOW, 128})


@pytest.mark.gpu
def test_the_kernel_check_finds_it_right() -> None:
    assert measure_error(find_kernel("flex"), CUDA) < BOUND / 2


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(("kind", "settings"), [MISTRAL, GEMMA2, GPT_OSS])
def test_training_passes_have_eager_attention_s_loss_and_gradients(
    kind: str, settings: Mapping[str, Any], is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch.compiler.config, "dynamic_sources", "")
    flex, eager = (build(make_config(kind, settings), kernel).to(CUDA) for kernel in ("flex_attention", "eager"))
    if is_compiled:
        compile_blocks(flex.model.layers)
    for lengths in (LENGTHS, (120, 50), (1, 300), (64,)):
        ids = make_ids(num_tokens=sum(lengths)).to(CUDA)
        compare_passes(flex, eager, ids, position_ids=count_positions(lengths).to(CUDA))
    compare_passes(flex, eager, make_ids(rows=3).to(CUDA), attention_mask=MASK_BS.to(CUDA))


def compare_passes(flex: PreTrainedModel, eager: PreTrainedModel, ids: Tensor, **options: Tensor) -> None:
    """Compare the loss of the real tokens and every gradient, in fp32: sums in another order, over two layers.

    A token whose predecessor is padding has no label: padding sees nothing, of which each kernel makes what it likes.
    """
    losses, labels = [], ids
    if "attention_mask" in options:
        is_real = options["attention_mask"].bool()
        labels = ids.where(is_real & is_real.roll(1, dims=1), -100)
    for model in (flex, eager):
        model.zero_grad()
        losses.append(model(input_ids=ids, labels=labels, **options).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    expected = dict(eager.named_parameters())
    for name, parameter in flex.named_parameters():
        gradient, other = parameter.grad, expected[name].grad
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            assert float((gradient - other).norm()) <= 1e-3 * float(other.norm()) + 1e-7, name
