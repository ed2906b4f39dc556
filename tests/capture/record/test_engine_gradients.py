"""DeepSpeed's norm is read without a wait for a device, and a parameter's gradient is found in its partitions."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from capture.record.engine_gradients import (
    EngineGradients,
    count_skipped_steps,
    find_engine_optimizer,
    has_engine_stepped,
    read_engine_loss_scale,
)
from capture.record.parameter_sampler import ParameterSlot


def test_a_norm_on_the_host_moves_to_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = SimpleNamespace(_global_grad_norm=torch.tensor(4.0), clip_grad=0.5)
    engine = EngineGradients(wrapper=wrapper, partitions=[torch.ones(2, device="meta")])
    monkeypatch.setattr(torch.Tensor, "to", None, raising=False)
    assert engine.grad_norm == 4.0
    assert engine.undo_clipping(torch.ones(2, device="meta")).is_meta
    assert engine.undo_clipping(torch.ones(2)).tolist() == pytest.approx([8.0, 8.0], rel=1e-5)
    assert engine.can_undo_clipping


@pytest.mark.parametrize(
    ("scale", "more", "expected"),
    [(None, {}, 4.0), (8.0, {}, 4.0), (8.0, {"fp32_groups": []}, 0.5), (None, {"fp32_groups": []}, 4.0)],
)
def test_a_loss_scale_is_taken_out_of_the_norm_where_the_engine_leaves_it_in(
    scale: float | None, more: dict[str, Any], expected: float
) -> None:
    """DeepSpeed's unfused optimizer, which has a copy of each parameter, is the only one that does."""
    config = SimpleNamespace(**({} if scale is None else {"cur_scale": scale}))
    for norm in (4.0, torch.tensor(4.0), torch.tensor([4.0])):
        wrapper = SimpleNamespace(_global_grad_norm=norm, loss_scale_config=config, clip_grad=1.0, **more)
        engine = EngineGradients(wrapper=wrapper, partitions=[torch.ones(2)])
        assert engine.grad_norm == expected
        # What was not clipped is not undone.
        assert engine.undo_clipping(torch.ones(2)).tolist() == pytest.approx([max(1.0, expected)] * 2, rel=1e-5)


@pytest.mark.parametrize(("limit", "expected"), [(0.5, 0.5), (2, 2.0), (0.0, None), (-1.0, None), (None, None)])
def test_a_limit_of_0_is_none(limit: float | None, expected: float | None) -> None:
    engine = EngineGradients(wrapper=SimpleNamespace(clip_grad=limit, _global_grad_norm=4.0), partitions=[])
    assert engine.max_norm == expected
    assert engine.undo_clipping(torch.ones(1)).tolist() == pytest.approx([4.0 / expected if expected else 1.0])
    assert EngineGradients(wrapper=SimpleNamespace(), partitions=[]).grad_norm is None


@pytest.mark.parametrize(
    ("wrapper", "scale"),
    [
        ({"loss_scale": 128.0}, 128.0),
        ({"loss_scale": 0}, 1.0),
        ({}, 1.0),
        # Of stage 0 the config has it, and the attribute is none of a scale.
        ({"loss_scale_config": SimpleNamespace(cur_scale=512.0), "loss_scale": 128.0}, 512.0),
        ({"loss_scale_config": SimpleNamespace()}, 1.0),
    ],
)
def test_the_engines_loss_scale_is_where_its_optimizer_keeps_it(wrapper: dict[str, Any], scale: float) -> None:
    model = torch.nn.Linear(2, 2)
    assert read_engine_loss_scale(model) == 1.0
    vars(model)["optimizer"] = SimpleNamespace(**wrapper)
    assert read_engine_loss_scale(model) == scale
    # Of a model inside an engine, the parameters have the engine's optimizer.
    inside = torch.nn.Linear(2, 2)
    vars(inside.weight)["_z3_optimizer" if scale > 200 else "_zero_optimizer"] = SimpleNamespace(**wrapper)
    assert read_engine_loss_scale(inside) == scale
    assert read_engine_loss_scale(None) == 1.0


def test_the_engines_optimizer_is_the_one_around_that_which_steps() -> None:
    model, inside = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    mine, others = (torch.optim.SGD(torch.nn.Linear(2, 2).parameters()) for _ in range(2))
    for name in ("optimizer", "backup_optimizer"):
        wrapper = SimpleNamespace(**{name: mine})
        vars(model)["optimizer"] = wrapper
        vars(inside.weight)["_zero_optimizer"] = wrapper
        for trained in (model, inside):
            assert find_engine_optimizer(trained, mine) is wrapper
            assert find_engine_optimizer(trained, others) is None
    assert find_engine_optimizer(torch.nn.Linear(2, 2), mine) is None
    assert find_engine_optimizer(None, mine) is None


@pytest.mark.parametrize(
    ("engine", "num_skipped", "has_stepped"),
    [
        ({}, 0, None),
        ({"skipped_steps": 3, "global_steps": 0}, 3, False),
        ({"skipped_steps": 0, "global_steps": 1}, 0, True),
        ({"skipped_steps": None, "global_steps": None}, 0, None),
    ],
)
def test_the_engine_tells_how_many_steps_it_took_and_left_out(
    engine: dict[str, Any], num_skipped: int, has_stepped: bool | None
) -> None:
    model = torch.nn.Linear(2, 2)
    vars(model).update(engine)
    assert (count_skipped_steps(model), has_engine_stepped(model)) == (num_skipped, has_stepped)
    assert (count_skipped_steps(None), has_engine_stepped(None)) == (0, None)


@pytest.mark.parametrize(
    "names",
    [
        ("single_partition_of_fp32_groups", "bit16_groups"),
        ("fp32_groups_flat_partition", "bf16_groups"),
        ("fp32_partitioned_groups_flat", "fp16_groups"),
        ("fp32_groups_flat", "fp16_groups"),
    ],
)
def test_the_parameters_of_a_step_are_those_of_the_partitions_that_have_gradients(names: tuple[str, str]) -> None:
    """DeepSpeed steps on one group after the other, and gives the others no gradient meanwhile."""
    partitions = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    groups = [[torch.ones(1) for _ in range(2)] for _ in partitions]
    wrapper = SimpleNamespace(**dict(zip(names, (partitions, groups), strict=True)))
    optimizer = torch.optim.SGD([{"params": [partition]} for partition in partitions])
    for stepping in ([0], [1], [0, 2], [0, 1, 2]):
        for number, partition in enumerate(partitions):
            partition.grad = torch.ones(2) if number in stepping else None
        engine = EngineGradients.from_optimizer(wrapper, optimizer)
        assert [id(partition) for partition in engine.partitions] == [id(partitions[number]) for number in stepping]
        assert [id(group) for group in engine.list_parameters()] == [id(groups[number]) for number in stepping]
        assert engine.device_type == "cpu"


def test_parameters_without_flat_partitions_are_the_models_where_their_copies_are_as_many() -> None:
    parameters, copies = [[torch.ones(1), torch.ones(1)], [torch.ones(1)]], [[torch.zeros(1)] * 2, [torch.zeros(1)]]
    for groups, copied, expected in (
        (parameters, copies, parameters),
        (parameters, copies[:1], copies[:1]),
        (parameters[::-1], copies, copies),
        (parameters, [], []),
    ):
        wrapper = SimpleNamespace(fp16_groups=groups, fp32_groups=copied)
        found = EngineGradients(wrapper=wrapper, partitions=[]).list_parameters()
        assert [[id(member) for member in group] for group in found] == [
            [id(member) for member in group] for group in expected
        ]
    assert EngineGradients(wrapper=SimpleNamespace(), partitions=[]).device_type is None


@pytest.mark.parametrize(
    ("norm", "limit", "device", "can_undo"),
    [
        (4.0, 1.0, "cpu", True),
        (None, None, "cpu", True),
        (None, 1.0, "cpu", False),
        (torch.ones(1, device="meta"), 1.0, "meta", True),
        (torch.ones(1, device="meta"), 1.0, "cpu", False),
        (torch.ones(1, device="meta"), None, "cpu", True),
        # Of several numbers it is not known which is the norm.
        (torch.ones(2), 1.0, "cpu", False),
    ],
)
def test_a_clipping_is_undone_where_its_norm_lies_with_the_gradients(
    norm: Any, limit: float | None, device: str, can_undo: bool
) -> None:
    wrapper = SimpleNamespace(_global_grad_norm=norm, clip_grad=limit)
    engine = EngineGradients(wrapper=wrapper, partitions=[torch.ones(2, device=device)])
    assert engine.can_undo_clipping == can_undo
    if not can_undo:
        values = torch.ones(2)
        assert engine.undo_clipping(values) is values


WHOLE = torch.arange(12.0)


def make_slot(start: int, count: int) -> ParameterSlot:
    """Make a slot whose sample are these elements of its parameter."""
    return cast(ParameterSlot, SimpleNamespace(find_run=lambda shape: (start, count)))


def make_partition(gradient: torch.Tensor) -> torch.Tensor:
    partition = torch.zeros(len(gradient), requires_grad=True)
    partition.grad = gradient
    return partition


def hold_in_zero_1() -> tuple[EngineGradients, Any]:
    """Elements 2 to 8 of the parameter lie from place 3 on."""
    partition = make_partition(torch.cat([torch.full((3,), -1.0), WHOLE[2:9]]))
    parameter = torch.zeros(3, 4)
    held = SimpleNamespace(start=2, numel=7), SimpleNamespace(start=3)
    mapping = dict(zip(("lp_fragment_address", "hp_fragment_address"), held, strict=True))
    vars(parameter)["_hp_mapping"] = SimpleNamespace(hp_fragment=partition.detach()[3:10], **mapping)
    return EngineGradients(wrapper=SimpleNamespace(), partitions=[partition]), parameter


def hold_in_zero_3() -> tuple[EngineGradients, Any]:
    """The second of two ranks has elements 6 to 11 of the parameter, from place 2 of the sub-group on."""
    flat = make_partition(torch.cat([torch.full((2,), -1.0), WHOLE[6:]]))
    wrapper = SimpleNamespace(grad_position={5: (0, 2, 6)}, fp32_partitioned_groups_flat=[flat])
    parameter = SimpleNamespace(ds_id=5, ds_tensor=torch.zeros(6), ds_shape=(3, 4), ds_process_group=None)
    return EngineGradients(wrapper=wrapper, partitions=[flat]), parameter


def hold_in_copies() -> tuple[EngineGradients, Any]:
    """The optimizer of stage 0 in half precision has a flat copy of a group, in which the parameter is the second."""
    flat = make_partition(torch.cat([torch.full((2,), -1.0), WHOLE]))
    parameter = torch.zeros(3, 4)
    wrapper = SimpleNamespace(fp16_groups=[[torch.zeros(2), parameter]], fp32_groups_flat=[flat])
    return EngineGradients(wrapper=wrapper, partitions=[flat]), parameter


@pytest.mark.parametrize(
    ("hold", "begin", "end", "is_part"),
    [(hold_in_zero_1, 2, 9, True), (hold_in_zero_3, 6, 12, True), (hold_in_copies, 0, 12, False)],
)
def test_what_a_rank_holds_of_a_gradient_is_found_in_the_engines_partition(
    hold: Callable[[], tuple[EngineGradients, Any]],
    begin: int,
    end: int,
    is_part: bool,
    become_rank: Callable[[int, int], None],
) -> None:
    become_rank(1, 2)
    engine, parameter = hold()
    for start in range(9):
        found = engine.find(make_slot(start, 4), parameter)
        kept = WHOLE[max(start, begin) : min(start + 4, end)].tolist()
        assert ([] if found is None else found[1].view_in(found[0]).tolist()) == kept
        assert found is None or (found[1].start, found[1].is_sharded) == (kept[0], is_part)
    part = engine.find_part(make_slot(0, 4), parameter)
    assert part is not None
    gradient, held = part
    assert (held.first, held.end, held.is_part, held.shape) == (begin, end, is_part, (3, 4))
    assert gradient[held.offset : held.offset + held.count].tolist() == WHOLE[begin:end].tolist()


def test_under_mics_a_part_that_several_ranks_hold_is_sampled_and_not_signed(
    become_rank: Callable[[int, int], None],
) -> None:
    become_rank(1, 2)
    engine, parameter = hold_in_zero_3()
    wrapper = type("MiCS_Optimizer", (), vars(engine.wrapper))()
    engine = replace(engine, wrapper=wrapper)
    assert engine.find(make_slot(8, 4), parameter) is not None
    assert engine.find_part(make_slot(8, 4), parameter) is None
