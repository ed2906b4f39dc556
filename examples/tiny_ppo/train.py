"""Train a tiny Llama with PPO for a few seconds and capture every micro-batch that goes through it.

    torchrun --nproc-per-node 2 examples/tiny_ppo/train.py --out inputs/my-run

    rollout  0  4 rows of 1024 tokens,  74% real  mean log-prob -5.64
    ...
    train    0  2 rows of  912 tokens,  53% real  loss -0.6560  ratio 1.0000
    train    1  2 rows of  871 tokens,  53% real  loss -0.9724  ratio 1.2043
    ...

The answers are read from text.md instead of being sampled, because an untrained model samples nothing but noise. The
rest is what a PPO trainer does: rollouts under no_grad, padded to fixed limits, then clipped policy updates on
shuffled micro-batches, each cut to its own longest prompt and longest answer. One row of each rank is a single token,
and the last micro-batch of an epoch is a single row: trainers meet both.

Shape letters: B rows, S tokens a row (padding included), A trailing tokens of a row that hold its answer, N answers of
one rank, V vocabulary, T tokens of one answer.
"""

import argparse
import os
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from actor_init.model import make_random_weights
from capture import Recorder, recording

BOS, EOS, PAD = 256, 257, 258  # after the 256 byte values
PROMPT_LIMIT, ANSWER_LIMIT = 320, 704  # tokens; one row of a rollout has both
NUM_ANSWERS, NUM_EPOCHS = 15, 2  # per rank; the last answer of an epoch is a micro-batch of one row
ROLLOUT_ROWS, TRAIN_ROWS = 4, 2
CLIP_RANGE = 0.2


class Actor(nn.Module):
    """Map token ids to the log-probs of the answers, as OpenRLHF's actor does."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaForCausalLM(config)

    def forward(self, sequences: Tensor, action_mask: Tensor, attention_mask: Tensor) -> Tensor:
        # A row's first real token has position 0, regardless of the padding before it.
        positions_BS = (attention_mask.cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        output = self.model(sequences, attention_mask=attention_mask, position_ids=positions_BS, use_cache=False)
        log_probs_BSV: Tensor = output.logits[:, :-1].float().log_softmax(-1)
        log_probs_BS = log_probs_BSV.gather(-1, sequences[:, 1:, None]).squeeze(-1)
        return log_probs_BS[:, -action_mask.shape[1] :] * action_mask


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    prompt: list[int]
    answer: list[int]
    reward: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience:
    sample: Sample
    advantage: float
    old_log_probs_T: Tensor


def read_samples(rank: int, world_size: int, seed: int) -> list[Sample]:
    """Return this rank's share of text.md, as bytes, cut at the limits. A cut answer has no EOS, like any other."""
    text = (Path(__file__).parent / "text.md").read_text(encoding="utf-8").rstrip()
    pairs = [block.split("\n\nA: ") for block in text.split("\n\nQ: ")[1:]]
    if world_size > (most := len(pairs) // NUM_ANSWERS):
        raise ValueError(f"text.md is enough for {most} ranks, not {world_size}. Try: --nproc-per-node {most}")
    random.Random(seed).shuffle(pairs)
    samples = [
        Sample(
            prompt=[BOS, *question.encode()][:PROMPT_LIMIT],
            answer=[*answer.encode(), EOS][:ANSWER_LIMIT],
            reward=reward(question, answer),
        )
        for question, answer in pairs[rank::world_size][: NUM_ANSWERS - 1]
    ]
    return [*samples, Sample(prompt=[BOS], answer=[], reward=0.0)]  # an empty question and answer: a row of 1 token


def reward(question: str, answer: str) -> float:
    """Return the share of the answer's words that repeat one of the question's."""
    asked = set(question.lower().split())
    words = answer.lower().split()
    return sum(word in asked for word in words) / len(words)


def pad_rows(samples: list[Sample], num_prompt: int, num_answer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of `[padding prompt][answer padding]`, so that all answers begin in the same column."""
    sequences_BS = torch.full((len(samples), num_prompt + num_answer), PAD)
    attention_mask_BS = torch.zeros_like(sequences_BS)
    for row, sample in enumerate(samples):
        real = slice(num_prompt - len(sample.prompt), num_prompt + len(sample.answer))
        sequences_BS[row, real] = torch.tensor(sample.prompt + sample.answer)
        attention_mask_BS[row, real] = 1
    return sequences_BS, attention_mask_BS[:, num_prompt:].bool(), attention_mask_BS


def policy_loss(ratio_BA: Tensor, advantages_B: Tensor, action_mask_BA: Tensor) -> Tensor:
    """Return PPO's clipped objective, negated: the mean over all tokens of all answers."""
    clipped_BA = ratio_BA.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
    gain_BA = torch.minimum(ratio_BA * advantages_B[:, None], clipped_BA * advantages_B[:, None])
    return -(gain_BA * action_mask_BA).sum() / action_mask_BA.sum()


def describe(attention_mask_BS: Tensor) -> str:
    num_rows, num_tokens = attention_mask_BS.shape
    return f"{num_rows} rows of {num_tokens:4} tokens, {attention_mask_BS.float().mean().item():4.0%} real"


@torch.no_grad()
def roll_out(actor: nn.Module, samples: list[Sample], verbose: bool) -> list[Experience]:
    rewards_N = torch.tensor([sample.reward for sample in samples])
    advantages_N = (rewards_N - rewards_N.mean()) / (rewards_N.std() + 1e-8)
    old_log_probs: list[Tensor] = []
    for first in range(0, len(samples), ROLLOUT_ROWS):
        rows = samples[first : first + ROLLOUT_ROWS]
        sequences_BS, action_mask_BA, attention_mask_BS = pad_rows(rows, PROMPT_LIMIT, ANSWER_LIMIT)
        log_probs_BA = actor(sequences_BS, action_mask_BA, attention_mask_BS)
        old_log_probs += [row_A[mask_A] for row_A, mask_A in zip(log_probs_BA, action_mask_BA, strict=True)]
        if verbose:
            mean = log_probs_BA[action_mask_BA].mean().item()
            print(f"rollout {first // ROLLOUT_ROWS:2}  {describe(attention_mask_BS)}  mean log-prob {mean:.2f}")
    return [
        Experience(sample=sample, advantage=advantage, old_log_probs_T=old_log_probs_T)
        for sample, advantage, old_log_probs_T in zip(samples, advantages_N.tolist(), old_log_probs, strict=True)
    ]


def train(
    actor: nn.Module, experiences: list[Experience], shuffler: random.Random, recorder: Recorder, verbose: bool
) -> None:
    optimizer = torch.optim.AdamW(actor.parameters(), lr=3e-4, betas=(0.9, 0.95))
    steps_an_epoch = -(-NUM_ANSWERS // TRAIN_ROWS)
    for step in range(NUM_EPOCHS * steps_an_epoch):
        first = step % steps_an_epoch * TRAIN_ROWS
        if first == 0:
            shuffler.shuffle(experiences)
            # the empty answer goes to the end, but not into the last micro-batch, where it would be alone
            experiences.sort(key=lambda one: not one.sample.answer)
            experiences.insert(-2, experiences.pop())
        rows = experiences[first : first + TRAIN_ROWS]
        num_prompt = max(len(row.sample.prompt) for row in rows)
        num_answer = max(len(row.sample.answer) for row in rows)
        sequences_BS, action_mask_BA, attention_mask_BS = pad_rows([row.sample for row in rows], num_prompt, num_answer)
        old_log_probs_BA = pad_sequence([row.old_log_probs_T for row in rows], batch_first=True)
        advantages_B = torch.tensor([row.advantage for row in rows])

        log_probs_BA = actor(sequences_BS, action_mask_BA, attention_mask_BS)
        ratio_BA = (log_probs_BA - old_log_probs_BA).exp()
        # Before the first update the policy is still that of the rollouts; only the padding has changed.
        assert step > 0 or torch.allclose(ratio_BA, torch.ones_like(ratio_BA), atol=1e-3)
        loss = policy_loss(ratio_BA, advantages_B, action_mask_BA)
        # With these a replay computes the same loss, and judges it and its gradients (docs/objectives.md).
        recorder.note(advantages=advantages_B, old_log_probs=old_log_probs_BA, loss=loss)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
        optimizer.step()
        if verbose:
            ratio = ratio_BA[action_mask_BA].mean().item()
            print(f"train   {step:2}  {describe(attention_mask_BS)}  loss {loss.item():7.4f}  ratio {ratio:.4f}")


def run(out: Path, seed: int, rank: int, world_size: int) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=264,  # 256 bytes and 3 specials, rounded up so that tensor parallelism can split it
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    actor: nn.Module = Actor(config)
    weights = make_random_weights(config, seed)  # the same as a replay's, which so needs no checkpoint
    for name, parameter in actor.get_submodule("model").named_parameters():
        weights.fill(name, parameter)
    if world_size > 1:
        actor = DistributedDataParallel(actor)
    samples = read_samples(rank, world_size, seed)
    # The only line needed for capturing.
    with recording(actor, out, reproduce=True) as recorder:
        experiences = roll_out(actor, samples, verbose=rank == 0)
        train(actor, experiences, random.Random(seed + rank), recorder, verbose=rank == 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a tiny Llama with PPO and capture its micro-batches.")
    parser.add_argument("--out", type=Path, default=Path("inputs/my-run"), help="folder for the captured micro-batches")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        run(arguments.out, arguments.seed, dist.get_rank(), dist.get_world_size())
        # run() has freed the model: a DDP model that is freed after its group can deadlock, pytorch/pytorch#56297.
        dist.destroy_process_group()
    else:
        run(arguments.out, arguments.seed, rank=0, world_size=1)
