"""What of a model is traced: each line of a block lies between two traced tensors, so that a wrong one can be named.

Shape letters: B rows, S tokens a row, T tokens, K signs.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from actor_init.inputs.packing import prepare_inputs
from actor_init.sketching import sketch
from actor_init.spec import ActorSpec
from actor_init.tracing import LayerTracer, TracedTensor
from actor_init.world import World
from capture.file_format.micro_batch import MicroBatch, Origin

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 16, "vocab_size": 32, "num_attention_heads": 2}
NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
IN_LLAMA = [
    *("input_layernorm input", "input_layernorm output"),
    *("self_attn.q_proj output", "self_attn.k_proj output", "self_attn.v_proj output"),
    *("self_attn.o_proj input", "self_attn.o_proj output"),
    *("post_attention_layernorm input", "post_attention_layernorm output"),
    *("mlp.gate_proj output", "mlp.up_proj output", "mlp.down_proj input", "mlp.down_proj output"),
]
IN_QWEN3 = [
    *IN_LLAMA[:2],
    *("self_attn.q_proj output", "self_attn.q_norm input", "self_attn.q_norm output"),
    *("self_attn.k_proj output", "self_attn.k_norm input", "self_attn.k_norm output"),
    *IN_LLAMA[4:],
]
IN_GPT2 = [
    *("ln_1 input", "ln_1 output", "attn.c_attn output", "attn.c_proj input", "attn.c_proj output"),
    *("ln_2 input", "ln_2 output", "mlp.c_fc output", "mlp.c_proj input", "mlp.c_proj output"),
]


def make_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **NO_IDS, intermediate_size=24))


def make_qwen3() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, intermediate_size=24, head_dim=8, num_key_value_heads=2))


def make_gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, vocab_size=32, n_head=2, n_positions=8, **NO_IDS))


def trace(model: PreTrainedModel, world: World) -> list[TracedTensor]:
    """Return what one forward and backward leave in a trace."""
    # Dropout would give copies.
    model.eval()
    tracer = LayerTracer(model, model.config, ActorSpec(), world)
    ids_BS = torch.arange(10).view(2, 5)
    real_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    batch = MicroBatch(sequences_BS=ids_BS, attention_mask_BS=real_BS, trains=True, origin=Origin(source="tiny"))
    tracer.begin(prepare_inputs(batch, packing=False), 1.0)
    loss = model(input_ids=ids_BS, use_cache=False).logits.square().sum()
    tracer.end_forward()
    loss.backward()
    return tracer.take()


@pytest.mark.parametrize(
    ("make", "blocks", "names"),
    [
        (make_llama, "model.layers", IN_LLAMA),
        (make_qwen3, "model.layers", IN_QWEN3),
        (make_gpt2, "transformer.h", IN_GPT2),
    ],
)
def test_sums_norms_and_projections_of_a_block_are_traced_once_each(
    make: Callable[[], PreTrainedModel], blocks: str, names: list[str], world: World
) -> None:
    traced = [tensor for tensor in trace(make(), world) if tensor.name.startswith(blocks)]
    forward = [f"{tensor.name} {tensor.what}" for tensor in traced if not tensor.is_gradient]
    assert forward == [
        f"{blocks}.{number}{name}" for number in range(2) for name in (*(f".{name}" for name in names), " output")
    ]
    backward = {f"{tensor.name} {tensor.what}" for tensor in traced if tensor.is_gradient}
    assert backward == {name for name in forward if not re.search(r"(norm|ln_.) input$", name)}


def test_what_gpt2_s_projection_is_given_is_sketched_as_it_is(world: World) -> None:
    model, name = make_gpt2(), "transformer.h.0.attn.c_proj"
    given: list[Tensor] = []
    model.get_submodule(name).register_forward_pre_hook(lambda _, args: given.append(args[0].detach()))
    [forward, _] = [tensor for tensor in trace(model, world) if (tensor.name, tensor.what) == (name, "input")]
    torch.testing.assert_close(forward.sketch_TK, sketch(given[0].flatten(0, 1)))
