"""How many operations the hooks give to the job's device in a step: a device starts each anew, however small it is."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from capture import recording

# Operations that start nothing on a device.
VIEWS = frozenset({"as_strided", "detach", "view", "slice", "select", "unbind", "split", "empty", "alias", "item", "t"})
STEPS = 3


class Layers(nn.Module):
    """A model with three parameters and one more for each layer."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(num_layers))
        self.head = nn.Linear(8, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        hidden_BSH = self.embedding(input_ids)
        for scale_H in self.scales:
            hidden_BSH = hidden_BSH * scale_H
        logits_BSV = self.head(hidden_BSH)
        return {"loss": nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels.flatten()), "logits": logits_BSV}


class OperationCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket.__name__.strip("_") not in VIEWS
        return function(*args, **(kwargs or {}))


def count_operations(num_layers: int, folder: Path | None, **settings: Any) -> list[int]:
    """Count the operations of each of a job's steps but the first, which finds out where to look."""
    torch.manual_seed(0)
    model = Layers(num_layers).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids_BS = torch.arange(12).view(1, 12)
    counts = []
    with nullcontext() if folder is None else recording(model, folder, **settings):
        for _ in range(STEPS):
            with OperationCounter() as counter:
                model(input_ids=ids_BS, labels=ids_BS)["loss"].backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            counts.append(counter.count)
    return counts[1:]


# Two arguments go in a copy each, since they begin sooner than a pack would, and the loss in one. A step that is
# to be judged computes log-probs, takes samples of weights, gradients and state, signs the gradients, and copies all of
# that once a forward's end and once a step.
@pytest.mark.parametrize(("settings", "most"), [({}, 3), ({"reproduce": True}, 23)])
def test_the_operations_of_a_step_are_few_and_do_not_grow_with_the_model(
    settings: Mapping[str, Any], most: int, tmp_path: Path
) -> None:
    added = []
    for num_layers in (20, 60):
        bare = count_operations(num_layers, None)
        recorded = count_operations(num_layers, tmp_path / str(num_layers), **settings)
        added.append([with_hooks - without for with_hooks, without in zip(recorded, bare, strict=True)])
    assert added[0] == added[1]
    assert max(added[0]) <= most
