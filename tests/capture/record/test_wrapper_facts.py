"""What a wrapper does with gradients is stated, and functions of the job that stand in the place of its methods."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from capture.record.wrapper_facts import GradientSyncReader, collect_wrapper_facts, find_class


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group of one rank. Another test of this process may have left one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def make_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_ddp_is_described(group: None) -> None:
    model = make_layers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, hook)
    facts: Any
    [facts] = collect_wrapper_facts([wrapped], list(model.modules()))
    assert facts["class"] == "DistributedDataParallel"
    assert facts["parameters_to_ignore"] == ["1.weight"]
    assert [name for name, _ in facts["comm_hooks"]] == ["test_wrapper_facts.py:hook"]
    assert "replaced" not in facts


def test_whether_ddp_reduces_is_read_at_each_pass(group: None) -> None:
    wrapped = DistributedDataParallel(make_layers())
    reader = GradientSyncReader(wrapped)
    assert reader.read() == {"gradient_sync": "on"}
    with wrapped.no_sync():
        assert reader.read() == {"gradient_sync": "off"}
    assert GradientSyncReader(make_layers()).read() == {}


def test_fsdp2_is_described_by_the_settings_of_its_groups(group: None) -> None:
    model = make_layers()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.children():
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    first: Any = next(model.children())
    first.set_gradient_divide_factor(2.0)
    [facts] = collect_wrapper_facts([], list(model.modules()))
    assert (facts["class"], facts["param_dtype"], facts["reduce_dtype"]) == ("FSDPModule", "bfloat16", "float32")
    assert facts["gradient_divide_factor"] == [2.0, None]
    assert facts["reduce_grads"] is True
    assert find_class(first) is nn.Linear


def test_methods_that_the_job_replaced_are_named_and_callbacks_are_not() -> None:
    class Optimizer:
        gradient_average = False

        def average_tensor(self) -> None: ...

    class DeepSpeedEngine(nn.Module):
        communication_data_type = torch.float32

        def zero_optimization_stage(self) -> int:
            return 2

    optimizer, engine = Optimizer(), DeepSpeedEngine()
    optimizer.average_tensor = lambda: None  # type: ignore[method-assign]
    vars(engine).update(optimizer=optimizer, collate_fn=lambda rows: rows)
    facts: Any
    [facts] = collect_wrapper_facts([engine], [])
    assert list(facts.pop("replaced")) == ["average_tensor"]
    assert facts == {
        "class": "DeepSpeedEngine",
        "zero_optimization_stage": 2,
        "communication_data_type": "float32",
        "gradient_average": False,
    }


def test_other_wrappers_are_not_described() -> None:
    assert collect_wrapper_facts([nn.Identity()], [nn.Linear(1, 1), SimpleNamespace()]) == []  # type: ignore[list-item]
