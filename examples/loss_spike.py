r"""A training job with three mistakes: in how it loads a checkpoint, in its own code of an MLP, and in its labels.

    python examples/loss_spike.py --steps 150 --save runs/step-150
    capture run --to inputs/restart \
        examples/loss_spike.py --resume runs/step-150 --first-step 150 --steps 4

Its loss spikes after the restart: the checkpoint is loaded with one layer's weight transposed.

    python examples/loss_spike.py --steps 0 --save runs/start
    capture run --to inputs/fast examples/loss_spike.py --steps 4 --fast-mlp

Here one layer's MLP is computed by a function of the job's own, which takes two projections for each other.

    capture run --to inputs/shifted examples/loss_spike.py --steps 4 --shift-labels

Here the labels are shifted by the job, and by the model once more.

README.md walks from each to its cause.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

TEXT = Path(__file__).parent / "tiny_ppo" / "text.md"
NUM_ROWS, NUM_TOKENS = 4, 128


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def compute_mlp(mlp: LlamaMLP, hidden_BSD: Tensor) -> Tensor:
    """Compute an MLP in the job's own way. The mistake is here: the activation is of the wrong projection."""
    output_BSD: Tensor = mlp.down_proj(mlp.act_fn(mlp.up_proj(hidden_BSD)) * mlp.gate_proj(hidden_BSD))
    return output_BSD


def build() -> LlamaForCausalLM:
    """Build the model with the job's own MLP, for `replay --model examples/loss_spike.py:build` too."""
    model = new_model()
    mlp = model.model.layers[2].mlp
    mlp.forward = partial(compute_mlp, mlp)
    return model


def load(model: LlamaForCausalLM, folder: Path) -> None:
    """Load a checkpoint. The mistake is here: a square matrix fits either way round, so nothing complains."""
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = weights[name].T.contiguous()
    model.load_state_dict(weights)


def batch(number: int) -> Tensor:
    """Rows of the text's bytes, others at every step."""
    text = torch.tensor(list(TEXT.read_bytes()))
    places = torch.randint(len(text) - NUM_TOKENS, (NUM_ROWS,), generator=torch.Generator().manual_seed(number))
    return torch.stack([text[place : place + NUM_TOKENS] for place in places.tolist()])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--first-step", type=int, default=0)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--fast-mlp", action="store_true", help="compute one layer's MLP by the job's own function")
    parser.add_argument("--shift-labels", action="store_true", help="shift the labels, which the model does too")
    options = parser.parse_args()

    model = build() if options.fast_mlp else new_model()
    if options.resume:
        load(model, options.resume)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.first_step, options.first_step + options.steps):
        tokens_BS = batch(step)
        labels_BS = tokens_BS.roll(-1, dims=1) if options.shift_labels else tokens_BS
        loss = model(input_ids=tokens_BS, labels=labels_BS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.3f}", flush=True)
    if options.save:
        model.save_pretrained(options.save)


if __name__ == "__main__":
    main()
