"""The state of a job's optimizer is read from each form that trainers write, and runs no code."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from actor_init.optimizers.saved_state import DCP_TABLE, OptimizerState, find_shape, read_state
from actor_init.spec import UsageError


def make_state() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("key", [None, "optimizer", "optimizer_state_dict"])
def test_a_file_of_torch_save_is_read_by_numbers(key: str | None, tmp_path: Path) -> None:
    _, optimizer = make_state()
    content = optimizer.state_dict()
    torch.save(content if key is None else {"epoch": 3, key: content}, tmp_path / "state.pt")
    state = OptimizerState.read(tmp_path / "state.pt")
    assert [group.numbers for group in state.groups] == [(0, 1)]
    assert (state.list_counts(), state.learning_rates) == ((2,), (0.1,))
    assert find_shape(state.by_number[0]["exp_avg"]) == (2, 3)
    assert torch.equal(dict(read_state(state.by_number[0]))["exp_avg"], content["state"][0]["exp_avg"])


def test_a_checkpoint_folder_of_trainer_is_read(tmp_path: Path) -> None:
    _, optimizer = make_state()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert OptimizerState.read(tmp_path).path == tmp_path / "optimizer.pt"


def test_a_folder_of_dcp_is_read_by_names(tmp_path: Path) -> None:
    model, optimizer = make_state()
    names = [name for name, _ in model.named_parameters()]
    content: dict[str, Any] = optimizer.state_dict()["state"]
    save({"optimizer": {"state": dict(zip(names, content.values(), strict=True))}}, checkpoint_id=tmp_path / "dcp")
    state = OptimizerState.read(tmp_path / "dcp")
    assert set(state.by_name) == {"weight", "bias"}
    assert state.list_counts() == (2,)
    for number, name in enumerate(names):
        found = dict(read_state(state.by_name[name]))
        assert all(torch.equal(found[key], value) for key, value in content[number].items())  # type: ignore[index]


def test_a_folder_of_dcp_below_a_checkpoint_is_found(tmp_path: Path) -> None:
    _, optimizer = make_state()
    content = {"state": {"weight": optimizer.state_dict()["state"][0]}}
    save({"optimizer": content}, checkpoint_id=tmp_path / "optimizer_0")
    assert set(OptimizerState.read(tmp_path).by_name) == {"weight"}
    # FSDP numbers the optimizers of a job that has several: the first is the model's.
    save({"optimizer": {"state": {"other": content["state"]["weight"]}}}, checkpoint_id=tmp_path / "optimizer_1")
    assert set(OptimizerState.read(tmp_path).by_name) == {"weight"}


class Evil:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_file_is_run(tmp_path: Path) -> None:
    torch.save({"state": {}, "param_groups": [], "x": Evil(tmp_path / "ran")}, tmp_path / "optimizer.pt")
    with pytest.raises(UsageError, match="cannot be read without running code"):
        OptimizerState.read(tmp_path / "optimizer.pt")
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / DCP_TABLE).write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(UsageError, match=r"it names posix\.mkdir"):
        OptimizerState.read(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"model": {}}, "holds no `state` and `param_groups`"),
        ([1, 2], "holds no `state` and `param_groups`"),
    ],
)
def test_a_file_without_a_state_is_refused(content: Any, why: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(UsageError, match=why):
        OptimizerState.read(tmp_path / "model.pt")


def test_what_is_no_state_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        OptimizerState.read(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"holds none of optimizer\.pt"):
        OptimizerState.read(tmp_path)
    (tmp_path / "damaged.pt").write_bytes(b"no zip")
    with pytest.raises(UsageError, match="cannot be read"):
        OptimizerState.read(tmp_path / "damaged.pt")
    folder = tmp_path / "global_step3"
    folder.mkdir()
    (folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    with pytest.raises(UsageError, match="is a checkpoint of DeepSpeed's"):
        OptimizerState.read(tmp_path)
