"""Writes `skyrl_0.3.0.pkl` with SkyRL's own `TrainingInputBatch`.

    pip install --no-deps skyrl==0.3.0 jaxtyping wadler-lindig
    python -m tests.foreign.write_skyrl

The package imports inference engines and, under Python 3.11, ends in an error of pydantic's; its folders are therefore
entered without their `__init__.py`. The module that writes is imported as it is.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from tests.foreign.expected import ACTIONS, ADVANTAGES, ATTENTION, IDS, LOG_PROBS, STEP


def main() -> None:
    spec = find_spec("skyrl")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    for name in ("", ".backends", ".backends.skyrl_train", ".backends.skyrl_train.utils"):
        package = ModuleType(f"skyrl{name}")
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[f"skyrl{name}"] = package
    from skyrl.backends.skyrl_train.training_batch import TensorList, TrainingInputBatch

    batch = TrainingInputBatch(
        {
            "sequences": torch.tensor(IDS),
            "attention_mask": torch.tensor(ATTENTION),
            "loss_mask": torch.tensor(ACTIONS, dtype=torch.float32),
            "response_mask": torch.ones(3, 3, dtype=torch.int64),
            "action_log_probs": torch.tensor(LOG_PROBS),
            "advantages": torch.tensor(ADVANTAGES).bfloat16(),
            "values": None,
            "pixel_values": TensorList([torch.zeros(2, 2)] * 3),
        }
    )
    batch.metadata = {"response_length": 3, "uids": ["a", "a", "b"], "global_step": STEP}
    batch.save(str(Path(__file__).resolve().parent / "skyrl_0.3.0.pkl"))


if __name__ == "__main__":
    main()
