"""What a recording keeps of the weights: the elements themselves, at the same places from any sharding."""

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from capture import capture_files, recording
from capture.file_format.capture_file import read_call
from capture.file_format.optimizer_step import ParameterSamples, Sample, choose_sampled_run, strip_wrappers
from capture.record.parameter_sampler import NUM_PER_PASS, NUM_PER_STEP, ParameterSampler
from capture.record.sharding import list_local_indices, locate_run

IDS_BS = torch.tensor([[0, 5, 9, 7], [3, 3, 0, 0]])


class Model(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(num_layers))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        total: Tensor = hidden.sum()
        return total


def read_weight_samples(folder: Path) -> list[ParameterSamples | None]:
    return [read_call(path).weights for path in capture_files(folder)]


def is_sample_of(sample: Sample, parameter: Tensor) -> bool:
    flat = parameter.detach().flatten().double()
    return sample.values == tuple(flat[sample.start : sample.start + len(sample.values)].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_pass_has_elements_of_the_weights_that_it_was_done_with(dtype: torch.dtype, tmp_path: Path) -> None:
    model, before = Model().to(dtype), []
    with recording(model, tmp_path, reproduce=True):
        for _ in range(3):
            before.append({name: p.detach().clone() for name, p in model.named_parameters()})
            model(IDS_BS).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                # ZeRO updates weights so: the storage changes, and the version of the tensor does not.
                parameter.data = parameter.data - parameter.grad
            model.zero_grad()
    for found, weights in zip(read_weight_samples(tmp_path), before, strict=True):
        assert found is not None
        assert {sample.name for sample in found.samples} == weights.keys()
        assert (found.num_parameters, found.left_out, found.is_sharded) == (5, {}, False)
        for sample in found.samples:
            assert (sample.shape, sample.dtype) == (tuple(weights[sample.name].shape), str(dtype).partition(".")[2])
            assert is_sample_of(sample, weights[sample.name])


def test_a_plain_recording_keeps_none(tmp_path: Path) -> None:
    model = Model()
    with recording(model, tmp_path):
        model(IDS_BS)
    assert read_weight_samples(tmp_path) == [None]


def test_a_large_model_is_sampled_in_turns(tmp_path: Path) -> None:
    model = Model(num_layers=10)
    names = dict(model.named_parameters()).keys()
    with recording(model, tmp_path, reproduce=True):
        for _ in range(4):
            model(IDS_BS)
    first, *others = [samples for samples in read_weight_samples(tmp_path) if samples is not None]
    assert {sample.name for sample in first.samples} == names
    assert [len(samples.samples) for samples in others] == [NUM_PER_PASS] * 3
    assert {sample.name for samples in others for sample in samples.samples} == names


def test_the_first_pass_that_trains_has_all_parameters_also_behind_rollouts() -> None:
    model = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(100))
    sampler = ParameterSampler(model)
    counts = []
    for begins_window in (False, False, True, True, False):
        samples = sampler.sample_weights(begins_window=begins_window)
        assert samples is not None
        counts.append(len(samples.locations))
    assert counts == [100, NUM_PER_PASS, 100, NUM_PER_STEP, NUM_PER_PASS]


def test_frozen_parameters_are_sampled_anew_behind_steps_in_turns(tmp_path: Path) -> None:
    model = Model(num_layers=10)
    for layer in model.layers[:7]:
        layer.requires_grad_(False)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.0)
    with recording(model, tmp_path, reproduce=True):
        for _ in range(5):
            model(IDS_BS).backward()
            optimizer.step()
            optimizer.zero_grad()
    first, *others = [{sample.name for sample in found.samples} for found in read_weight_samples(tmp_path) if found]
    assert len(first) == len(others[0] - frozen) + len(frozen) == 21
    # Fewer than those that are trained.
    assert [len(names & frozen) for names in others] == [4, 4, 4, 4]
    assert frozen == set().union(*others) & frozen


def test_a_model_that_the_job_lets_go_is_freed() -> None:
    model = Model()
    sampler = ParameterSampler(model)
    sampler.sample_weights()
    parameter = weakref.ref(model.layers[0].weight)
    del model
    gc.collect()
    assert parameter() is None


def test_a_failure_with_the_samples_is_a_warning_and_the_pass_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("out of bounds")

    monkeypatch.setattr(ParameterSampler, "sample_weights", fails)
    model = Model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with recording(model, tmp_path, reproduce=True) as recorder:
            model(IDS_BS)
            model(IDS_BS)
    assert len(caught) == 1
    assert "no samples of the weights" in str(caught[0].message)
    assert (recorder.num_written, recorder.failure, read_weight_samples(tmp_path)) == (2, None, [None, None])


@pytest.mark.parametrize(
    ("wrapped", "name"),
    [
        ("module.model.norm.weight", "model.norm.weight"),
        ("module._orig_mod.module.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.weight", "model.layers.0.mlp.weight"),
        ("_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.weight", "model.layers.0.mlp.weight"),
        ("module.base_model.model.model.norm.weight", "model.norm.weight"),
        ("weight", "weight"),
    ],
)
def test_names_are_the_models_own(wrapped: str, name: str) -> None:
    assert strip_wrappers(wrapped) == name


def test_what_cannot_be_sampled_is_left_out_and_said(tmp_path: Path) -> None:
    model = Model()
    model.layers[1]._fsdp_wrapped_module = nn.Linear(2, 2, bias=False)
    model.counter = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    with recording(model, tmp_path, reproduce=True):
        model(IDS_BS)
    [found] = read_weight_samples(tmp_path)
    assert found is not None
    assert found.left_out == {"in flat shards (FSDP1)": 1, "of torch.int8 on cpu": 1}
    assert (len(found.samples), found.num_parameters, found.num_frozen) == (5, 7, 1)


def test_a_parameter_that_is_trained_later_counts_as_frozen_no_more(tmp_path: Path) -> None:
    model = Model()
    weight = next(model.parameters())
    with recording(model, tmp_path, reproduce=True):
        for is_trained in (False, False, True):
            weight.requires_grad_(is_trained)
            model(IDS_BS)
    samples = read_weight_samples(tmp_path)
    assert [found.num_frozen for found in samples if found is not None] == [1, 1, 0]


class Mesh:
    """A mesh as one of its ranks sees it."""

    def __init__(self, sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> None:
        self.sizes, self.coordinate = sizes, coordinate

    def size(self, axis: int) -> int:
        return self.sizes[axis]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.coordinate


def shards(whole: Tensor, sizes: tuple[int, ...], placements: list[Any]) -> list[Any]:
    """What each rank of a mesh holds, cut by torch's own placements."""
    found = []
    for coordinate in torch.cartesian_prod(*map(torch.arange, sizes)).view(-1, len(sizes)).tolist():
        local = whole
        for axis, placement in enumerate(placements):
            if not isinstance(placement, Replicate):
                pieces, _ = placement._split_tensor(local, sizes[axis], with_padding=False)
                local = pieces[coordinate[axis]]
        parameter = SimpleNamespace(shape=whole.shape, placements=placements, _local_tensor=local)
        parameter.device_mesh = Mesh(sizes, tuple(coordinate))
        found.append(parameter)
    return found


@pytest.mark.parametrize(
    ("sizes", "placements"),
    [
        ((4,), [Shard(0)]),
        # Three ranks shard unevenly, and there are more ranks than rows where a tensor has two.
        ((3,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((5,), [Shard(1)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 3), [Replicate(), Shard(1)]),
        # FSDP2 over column-wise tp shards so.
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 2), [Shard(0), Shard(0)]),
    ],
)
@pytest.mark.parametrize("shape", [(8, 12), (7, 5), (1, 6)])
def test_the_shards_of_a_parameter_hold_the_whole_ones_samples(
    shape: tuple[int, int], sizes: tuple[int, ...], placements: list[Placement]
) -> None:
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    start, count = choose_sampled_run("a.weight", shape)
    held: dict[int, float] = {}
    for parameter in shards(whole, sizes, placements):
        place = locate_run(parameter, lambda full: choose_sampled_run("a.weight", full))
        local = parameter._local_tensor
        for number in range(place.count):
            value = local.as_strided((1,), (1,), local.storage_offset() + place.offset + number * place.stride)
            held[place.start + number] = value.item()
    assert held == {index: float(index) for index in range(start, start + count)}


@pytest.mark.parametrize("size", [1, 5, 8, 13])
@pytest.mark.parametrize("placement", [Shard(0), _StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)])
def test_indices_of_a_shard_are_torchs(placement: Any, size: int) -> None:
    factor = getattr(placement, "split_factor", 1)
    pieces, _ = placement._split_tensor(torch.arange(size), 3, with_padding=False)
    for rank, piece in enumerate(pieces):
        assert list_local_indices(size, [(3, rank, factor)]).tolist() == piece.tolist()


def test_partitions_of_zero_3_hold_the_whole_ones_samples(become_rank: Callable[[int, int], None]) -> None:
    whole = torch.arange(35, dtype=torch.float32)
    padded = torch.cat([whole, torch.zeros(1)])
    held: dict[int, float] = {}
    for rank in range(4):
        become_rank(rank, 4)
        part = padded[9 * rank : 9 * rank + 9].clone()
        parameter = SimpleNamespace(ds_tensor=part, ds_shape=torch.Size((7, 5)), ds_process_group=None)
        # These four elements lie on both sides of a border between ranks.
        place = locate_run(parameter, lambda shape: (7, 4))
        held |= {place.start + i: part[place.offset + i].item() for i in range(place.count)}
    assert held == {7: 7.0, 8: 8.0, 9: 9.0, 10: 10.0}
