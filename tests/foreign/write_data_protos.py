"""Writes `verl_0.9.1.dp`, `verl_0.9.1_numpy.dp` and `roll_0.3.0.pkl`.

    pip install --no-deps verl==0.9.1 tensordict==0.15.3 ray==2.60.0 ...    # and what these import
    python -m tests.foreign.write_data_protos

verl's own `DataProto` writes the first two. ROLL is on no package index: its class is stood in for here by one of the
same name and state (`roll/distributed/scheduler/protocol.py`, 0.3.0), whose batch tensordict itself consolidates.
"""

import io
import os
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto

from tests.foreign.expected import (
    ACTIONS,
    ADVANTAGES,
    ANSWERS,
    ATTENTION,
    IDS,
    LOG_PROBS,
    POSITIONS,
    PROMPTS,
    STEP,
)

HERE = Path(__file__).resolve().parent


def tensors() -> dict[str, torch.Tensor]:
    return {
        "prompts": torch.tensor(PROMPTS),
        "responses": torch.tensor(ANSWERS),
        "input_ids": torch.tensor(IDS),
        "attention_mask": torch.tensor(ATTENTION),
        "position_ids": torch.tensor(POSITIONS),
        "response_mask": torch.tensor(ACTIONS),
        "old_log_probs": torch.tensor(LOG_PROBS),
        "advantages": torch.tensor(ADVANTAGES).bfloat16(),
    }


def others() -> dict[str, Any]:
    # It is the same object in each row, as repeat() leaves it.
    question = {"role": "user", "content": "why?"}
    messages = np.empty(3, dtype=object)
    messages[:] = [[question]] * 3
    return {
        "uid": np.array(["a", "a", "b"], dtype=object),
        "raw_prompt": messages,
        "score": np.array([0.5, 0.0, 1.0]),
    }


def meta(name: str) -> dict[str, Any]:
    return {name: STEP, "temperature": 0.75, "eos_token_id": [1, 2], "mean": np.float64(0.5)}


def write_verl() -> None:
    batch = DataProto.from_dict(tensors=tensors(), non_tensors=others(), meta_info=meta("global_steps"))
    batch.save_to_disk(HERE / "verl_0.9.1.dp")
    os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = "numpy"
    batch.save_to_disk(HERE / "verl_0.9.1_numpy.dp")


class RollDataProto:
    def __getstate__(self) -> tuple[Any, ...]:
        whole_BS = torch.cat([torch.zeros(3, 3, dtype=torch.int64), torch.tensor(ACTIONS)], dim=1).bool()
        of_tokens = tensors() | {"response_mask": whole_BS}
        buffer = io.BytesIO()
        torch.save(TensorDict(of_tokens, batch_size=[3]).contiguous().consolidate(), buffer)
        return buffer, others(), None, meta("global_step")


def write_roll() -> None:
    name = "roll.distributed.scheduler.protocol"
    for parent in ("roll", "roll.distributed", "roll.distributed.scheduler", name):
        sys.modules[parent] = ModuleType(parent)
    RollDataProto.__module__, RollDataProto.__qualname__ = name, "DataProto"
    sys.modules[name].DataProto = RollDataProto  # type: ignore[attr-defined]
    (HERE / "roll_0.3.0.pkl").write_bytes(pickle.dumps(RollDataProto(), protocol=pickle.HIGHEST_PROTOCOL))


if __name__ == "__main__":
    write_verl()
    write_roll()
