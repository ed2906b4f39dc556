"""An unversioned dump of OpenRLHF's actor."""

from typing import Any

import torch

IDS_BS = torch.tensor([[128_000, 5, 128_255, 7], [3, 3, 0, 0]])


MASK_BS = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])


ACTION_MASK_BA = torch.tensor([[True, False], [True, True]])


def make_dump(**changes: Any) -> dict[str, Any]:
    return {
        "sequences": IDS_BS,
        "action_mask": ACTION_MASK_BA,
        "attention_mask": MASK_BS,
        "return_output": True,
        "allgather_logits": False,
        "return_logprobs": False,
        "packed_seq_lens": None,
        "return_entropy": False,
        "timestamp": "20250619_052608_430740",
        "rank": 1,
        "batch_size": 2,
        "seq_len": 4,
    } | changes
