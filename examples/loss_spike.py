r"""A training job whose loss spikes after a restart: the checkpoint is loaded with one layer's weight transposed.

    python examples/loss_spike.py --steps 150 --save runs/step-150
    capture run --to inputs/restart \
        examples/loss_spike.py --resume runs/step-150 --first-step 150 --steps 4

README.md walks from the spike to the name of that layer.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

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
    options = parser.parse_args()

    model = new_model()
    if options.resume:
        load(model, options.resume)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.first_step, options.first_step + options.steps):
        tokens_BS = batch(step)
        loss = model(input_ids=tokens_BS, labels=tokens_BS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.3f}", flush=True)
    if options.save:
        model.save_pretrained(options.save)


if __name__ == "__main__":
    main()
