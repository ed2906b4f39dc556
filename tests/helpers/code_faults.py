"""Ten models with a fault of code in one layer, each a function for `--model FILE.py:function`, and their sound code.

`FAULTS` says what `replay compare LOG FILE.py:function` has to name first. `train` is the job.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from capture import recording
from replay.tracing.trace_file import TensorKind

NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES: dict[str, Any] = {
    **NO_IDS,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.1,
}


def llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))


def wrong_activation() -> Any:
    model = llama()
    model.model.layers[1].mlp.act_fn = nn.GELU()
    return model


def residual_left_out() -> Any:
    model = llama()
    layer = model.model.layers[1]

    def forward(hidden: Tensor, **arguments: Any) -> Any:
        attended = layer.self_attn(hidden_states=layer.input_layernorm(hidden), **arguments)[0]
        return attended + layer.mlp(layer.post_attention_layernorm(attended))

    layer.forward = forward
    return model


def qwen3() -> Any:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8))


def wrong_rope_base() -> Any:
    model = qwen3()
    attention = model.model.layers[2].self_attn
    forward, tables = attention.forward, type(model.model.rotary_emb)(hf.Qwen3Config(**SIZES, head_dim=8))
    tables.inv_freq = 100.0 ** -(torch.arange(0, 8, 2) / 8)

    def with_own_tables(hidden_states: Tensor, position_embeddings: Any, **arguments: Any) -> Any:
        position_BS = torch.arange(hidden_states.shape[1])[None]
        return forward(hidden_states, position_embeddings=tables(hidden_states, position_BS), **arguments)

    attention.forward = with_own_tables
    return model


def gemma2() -> Any:
    config = hf.Gemma2Config(**SIZES, head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=0.5)
    config._attn_implementation = "eager"
    return hf.Gemma2ForCausalLM(config)


def softcap_forgotten() -> Any:
    model = gemma2()
    model.model.layers[1].self_attn.attn_logit_softcapping = None
    return model


def gpt2() -> Any:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "initializer_range": 0.1}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **dropout, **NO_IDS))


def heads_swapped() -> Any:
    model = gpt2()
    attention = model.transformer.h[1].attn

    def forward(hidden_BSD: Tensor, *ignored: Any, **also_ignored: Any) -> Any:
        rows, tokens = hidden_BSD.shape[:2]
        parts = attention.c_attn(hidden_BSD).split(32, dim=2)
        q, k, v = (part.view(rows, tokens, 4, 8).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, [0, 2, 1, 3]]
        return attention.c_proj(attended.transpose(1, 2).reshape(rows, tokens, 32)), None

    attention.forward = forward
    return model


def bias_dropped() -> Any:
    model = gpt2()
    projection = model.transformer.h[2].mlp.c_fc
    projection.forward = lambda hidden: hidden @ projection.weight
    return model


def mixture() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, **experts, head_dim=8))


def router_weights_as_they_are() -> Any:
    model = mixture()
    model.model.layers[1].mlp.gate.norm_topk_prob = False
    return model


def qwen2() -> Any:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES))


def branch_detached() -> Any:
    model = qwen2()
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: forward(hidden.detach())
    return model


def mistral() -> Any:
    return hf.MistralForCausalLM(hf.MistralConfig(**SIZES, head_dim=8, sliding_window=4))


def window_ignored() -> Any:
    model = mistral()
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def without_window(hidden_states: Tensor, attention_mask: Any = None, **arguments: Any) -> Any:
        num_tokens = hidden_states.shape[1]
        mask = torch.full((1, 1, num_tokens, num_tokens), -torch.inf, dtype=hidden_states.dtype).triu(1)
        return forward(hidden_states=hidden_states, attention_mask=mask, **arguments)

    attention.forward = without_window
    return model


class Plain(nn.Module):
    """A model of no library."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh()) for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def projection_transposed() -> Any:
    model = Plain()
    projection: Any = model.get_submodule("layers.1.1")
    projection.forward = lambda hidden: hidden @ projection.weight + projection.bias
    return model


class CodeFault(NamedTuple):
    """The code without the fault, and the first tensor that has to be named."""

    stock: Callable[[], Any]
    first: tuple[TensorKind, str, str]
    dtype: torch.dtype = torch.float32


FORWARD = TensorKind.FORWARD
FAULTS: Mapping[str, CodeFault] = {
    "wrong_activation": CodeFault(llama, (FORWARD, "model.layers.1.mlp.down_proj", "input")),
    "residual_left_out": CodeFault(llama, (FORWARD, "model.layers.1.post_attention_layernorm", "input")),
    "wrong_rope_base": CodeFault(qwen3, (FORWARD, "model.layers.2.self_attn.o_proj", "input")),
    "softcap_forgotten": CodeFault(gemma2, (FORWARD, "model.layers.1.self_attn.o_proj", "input")),
    "heads_swapped": CodeFault(gpt2, (FORWARD, "transformer.h.1.attn.c_proj", "input")),
    "bias_dropped": CodeFault(gpt2, (FORWARD, "transformer.h.2.mlp.c_fc", "output")),
    "router_weights_as_they_are": CodeFault(mixture, (FORWARD, "model.layers.1.mlp.experts", "output")),
    "branch_detached": CodeFault(qwen2, (TensorKind.GRADIENT, "model.layers.1.post_attention_layernorm", "output")),
    "window_ignored": CodeFault(mistral, (FORWARD, "model.layers.1.self_attn.o_proj", "input"), torch.bfloat16),
    "projection_transposed": CodeFault(Plain, (FORWARD, "layers.1.1", "output")),
}


def train(name: str, home: Path) -> None:
    """Save the weights that the job begins with, as `weights`, and record one step of the faulty model in `inputs`."""
    torch.manual_seed(0)
    stock = FAULTS[name].stock().to(FAULTS[name].dtype)
    for parameter_name, parameter in stock.named_parameters():
        if parameter_name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    if isinstance(stock, Plain):
        torch.save(stock.state_dict(), home / "weights.pt")
    else:
        stock.save_pretrained(home / "weights")
    model = globals()[name]().to(FAULTS[name].dtype)
    model.load_state_dict(stock.state_dict())
    ids_BS = torch.randint(64, (2, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    with recording(model, home / "inputs", reproduce=True):
        if isinstance(model, Plain):
            loss = F.cross_entropy(model(ids_BS)[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())
        else:
            loss = model(input_ids=ids_BS, labels=ids_BS, use_cache=False).loss
        loss.backward()
        optimizer.step()
