"""Which runs parity plans: references and equivalents of each dtype, the cells, and what is refused with its reason."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GPTNeoConfig, LlamaConfig

from actor_init.spec import Attention, Dtype, UsageError
from replay.agreement.matrix import read_settings
from replay.agreement.plan import Cell, MatrixContext, ParityPlan, Role, plan_matrix
from replay.options.option_parsing import build_replay_spec
from tests.helpers.planning import CONFIG, planned


def named(found: ParityPlan) -> dict[str, Cell]:
    assert len({cell.name for cell in found.cells}) == len(found.cells)
    return {cell.name: cell for cell in found.cells}


def test_every_dtype_has_a_reference_and_equivalents_before_its_cells() -> None:
    found = planned([{"dtype": "fp32"}, {"dtype": "bf16"}])
    for dtype in (Dtype.FP32, Dtype.BF16):
        own = [cell for cell in found.cells if cell.spec.actor.dtype is dtype]
        assert [cell.role for cell in own] == [Role.REFERENCE, *[Role.EQUIVALENT] * 5, Role.CELL]
        assert [cell.varies for cell in own[1:6]] == ["the same again", "row order", "kernel", "reduction order", "tp"]
        assert {cell.reference for cell in own} == {own[0].name}
        actor = own[0].spec.actor
        assert (actor.backend, actor.packing, actor.attention) == ("fsdp2", False, Attention.SDPA)


def test_every_backend_has_cells_and_of_the_quick_matrix_only_kernels_that_are_not_here_are_refused() -> None:
    found = planned(read_settings("quick", 2))
    cells = [cell.spec.actor for cell in found.cells if cell.role is Role.CELL]
    assert {actor.backend for actor in cells} == {"deepspeed", "fsdp2", "ddp"}
    kernels = {Attention.FLASH, Attention.CUDNN, Attention.VARLEN}
    absent = {*(f" {kernel}" for kernel in kernels), " kernels fused"}
    assert all(any(words in name for words in absent) for name in found.refused), found.refused


def test_a_cell_that_cannot_run_is_refused_with_its_reason_and_the_others_are_planned() -> None:
    reasons: dict[str, dict[str, Any]] = {
        "--zero-stage 1 does not exist under fsdp2": {"backend": "fsdp2", "zero_stage": 1},
        "flash-attn has no CPU kernel": {"attention": "flash"},
        "--tp 4 does not divide the model's 4 heads, 2 key-value heads": {"tp": 4},
        "--ring 2 slices packed rows": {"ring": 2, "packing": False},
        "needs 6 processes, and there are 4": {"tp": 2, "data": 3},
        "4 data ranks need as many inputs, and there are 3": {"data": 4},
        "--tp 'two' is not allowed": {"tp": "two"},
    }
    found = planned([*reasons.values(), {"backend": "fsdp2"}], num_devices=4, num_inputs=3)
    for said, (name, reason) in zip(reasons, found.refused.items(), strict=False):
        assert reason.startswith(said), name
    assert [cell.name for cell in found.cells if cell.role is Role.CELL] == []  # it is one of the equivalents
    with pytest.raises(UsageError, match="no cell of the matrix can run here: flash-attn has no CPU kernel"):
        planned([{"attention": "flash"}])


def test_what_parity_is_asked_for_chooses_among_the_cells_and_holds_for_all() -> None:
    settings = [
        {"backend": backend, "dtype": dtype} for backend in ("deepspeed", "fsdp2") for dtype in ("fp32", "bf16")
    ]
    common = {"dtype": "fp32", "backend": "deepspeed", "num_layers": "2", "gradient_checkpointing": True}
    found = planned(settings, common)
    assert [cell.name for cell in found.cells if cell.role is Role.CELL] == [
        "deepspeed fp32 packed auto gradient-checkpointing"
    ]
    assert {cell.spec.actor.dtype for cell in found.cells} == {Dtype.FP32}
    assert {cell.spec.actor.num_layers for cell in found.cells} == {2}
    assert found.cells[-1].spec.actor.gradient_checkpointing
    assert not found.cells[0].spec.actor.gradient_checkpointing  # the reference stays plain
    with pytest.raises(UsageError, match="no cell of the matrix can run here: the options leave no cell"):
        planned(settings, {"dtype": "fp16"})


def test_what_a_matrix_does_not_vary_is_as_it_was_typed() -> None:
    [cell] = [cell for cell in planned([{"packing": True}], {"dtype": "fp32"}).cells if cell.role is Role.CELL]
    assert (cell.name, cell.spec.actor.dtype) == ("deepspeed fp32 packed auto", Dtype.FP32)


def test_a_run_that_was_asked_for_twice_is_planned_once() -> None:
    twice: list[dict[str, Any]] = [{"attention": "auto"}, {"attention": "sdpa"}, {"zero_stage": 1}]
    twice.append({"backend": "fsdp2", "attention": "sdpa"})
    found = planned(twice)
    assert [cell.name for cell in found.cells if cell.role is Role.CELL] == ["deepspeed bf16 packed auto"]
    assert named(found)["fsdp2 bf16 packed sdpa"].role is Role.EQUIVALENT


def test_data_ranks_are_held_against_a_reference_that_accumulates_as_many_passes() -> None:
    cells = named(planned([{"dtype": "fp32", "data": 2}]))
    [cell] = [cell for cell in cells.values() if cell.role is Role.CELL]
    reference = cells[cell.reference]
    assert (cell.num_processes, cell.num_data_ranks, cell.spec.inputs.max_inputs) == (2, 2, 4)
    assert (reference.num_processes, reference.spec.inputs.max_inputs) == (1, 8)
    assert reference.spec.actor.grad_accumulation == 2
    assert cells[reference.reference].spec.actor.grad_accumulation == 1
    assert {cell.spec.inputs.shuffle_inputs for cell in cells.values()} == {True}  # dealt in turn: the same windows


def test_rows_of_several_documents_are_packed_in_the_reference_too() -> None:
    found = planned([{"packing": True}, {"packing": False}], must_pack=True)
    assert found.cells[0].spec.actor.packing
    assert found.refused["deepspeed bf16 padded auto"].startswith("captured rows hold several documents")


def test_one_device_has_no_control_with_another_tp() -> None:
    found = planned([{"dtype": "fp32"}], num_devices=1)
    assert "tp" not in {cell.varies for cell in found.cells}
    assert found.refused["fsdp2 fp32 padded sdpa tp 2"] == ("needs 2 processes, and there are 1. See --processes")


def test_under_step_other_windows_are_another_training_with_a_reference_of_its_own() -> None:
    found = planned([{"dtype": "fp32", "data": 2}], {"step": "on"})
    references = [cell for cell in found.cells if cell.role is Role.REFERENCE]
    assert [cell.reference == cell.name for cell in references] == [True, True]


def test_a_cell_with_what_the_reference_is_spared_has_a_name_of_its_own() -> None:
    found = planned([{"backend": "fsdp2", "attention": "sdpa"}], {"gradient_checkpointing": True})
    assert {"fsdp2 bf16 packed sdpa", "fsdp2 bf16 packed sdpa gradient-checkpointing"} <= named(found).keys()


def test_the_matrix_arranges_what_can_run_alone() -> None:
    settings: list[dict[str, Any]] = [{"attention": "flash"}, *({"zero_stage": stage} for stage in (2, 3, 0))]
    facts = MatrixContext(device="cpu", num_devices=1, num_inputs=8, config=CONFIG, must_pack=False)
    found = plan_matrix(settings, {}, facts, lambda able: [able[2], able[0]])
    assert [cell.name for cell in found.cells if cell.role is Role.CELL] == [
        "deepspeed stage 0 bf16 packed auto",
        "deepspeed stage 2 bf16 packed auto",
    ]


def test_accumulation_is_held_against_a_reference_that_accumulates_as_many_over_all_ranks() -> None:
    axis = {"dtype": "fp32", "grad_accumulation": 2}
    found = planned([axis, {**axis, "data": 2}, {**axis, "data": 2, "grad_accumulation": 8}])
    cells = named(found)
    assert cells["deepspeed fp32 packed auto grad-accumulation 2"].reference == "fsdp2 fp32 padded sdpa, accumulated 2"
    both = cells["deepspeed fp32 packed auto data 2 grad-accumulation 2"]
    assert both.reference == "fsdp2 fp32 padded sdpa, accumulated 4"
    assert cells[both.reference].spec.actor.grad_accumulation == 4
    assert {cell.spec.actor.grad_accumulation for cell in found.cells if "accumul" not in cell.name} == {1}
    [reason] = [reason for name, reason in found.refused.items() if name.endswith("grad-accumulation 8")]
    assert reason == "2 data ranks that accumulate 8 passes need as many inputs each, and there are 8"


def test_a_model_without_sdpa_has_an_eager_reference_and_no_equivalent_of_a_kernel_that_is_not_there() -> None:
    found = planned(read_settings("quick", 1, Attention.EAGER), config=GPTNeoConfig(), num_devices=1)
    cells = named(found)
    assert cells["fsdp2 fp32 padded eager"].role is Role.REFERENCE
    assert {cell.spec.actor.attention for cell in found.cells} == {Attention.EAGER}
    assert [cell.varies for cell in found.cells if cell.varies and cell.spec.actor.dtype is Dtype.FP32] == [
        "the same again",
        "row order",
        "reduction order",
    ]
    assert "transformers has no sdpa attention for gpt_neo" in found.refused["fsdp2 fp32 packed sdpa"]


def test_the_quick_matrix_has_every_stage_accumulation_and_checkpointing_of_every_backend() -> None:
    actors = [cell.spec.actor for cell in planned(read_settings("quick", 2)).cells if cell.role is Role.CELL]
    assert {(actor.backend, actor.resolved_zero_stage) for actor in actors} == {
        *(("deepspeed", stage) for stage in range(4)),
        *(("fsdp2", stage) for stage in (2, 3)),
        ("ddp", 0),
    }
    for is_asked in (lambda actor: actor.grad_accumulation > 1, lambda actor: actor.gradient_checkpointing):
        assert {actor.backend for actor in actors if is_asked(actor)} == {"deepspeed", "fsdp2", "ddp"}


def test_fp16_is_in_full_where_the_device_and_the_backend_have_it() -> None:
    settings = [
        setting
        for setting in read_settings("full", 1)
        if setting["dtype"] == Dtype.FP16 and setting["attention"] == "sdpa"
    ]
    found = planned(settings, num_devices=1)
    assert {cell.spec.actor.backend for cell in found.cells} == {"fsdp2", "ddp"}
    assert any("DeepSpeed has no fp16 on a CPU" in reason for reason in found.refused.values())


def test_a_group_has_names_references_and_a_ground_of_its_own() -> None:
    [cell, *_] = [cell for cell in planned([{"dtype": "fp32"}], group="edge rows").cells if cell.role is Role.CELL]
    assert cell.name == "edge rows: deepspeed fp32 packed auto"
    assert cell.reference == "edge rows: fsdp2 fp32 padded sdpa"
    assert cell.baseline == ("edge rows", Dtype.FP32)


def test_matrices_without_a_file_run_the_edge_shapes_too(tmp_path: Path) -> None:
    from replay.commands.parity.runs import plan_edges

    spec = build_replay_spec({"dtype": "fp32", "model": "somewhere"})
    here = MatrixContext(device="cpu", num_devices=2, num_inputs=8, config=CONFIG, must_pack=False)
    plans = list(plan_edges("quick", {"dtype": "fp32", "model": "somewhere"}, spec, here))
    assert [{cell.group for cell in plan.cells} for plan in plans] == [{"edge rows"}, {"edge documents"}]
    rows, documents = ([cell.spec for cell in plan.cells] for plan in plans)
    assert {spec.actor.packing for spec in rows} == {True, False}
    assert {spec.actor.packing for spec in documents} == {True}
    assert {spec.actor.model for spec in [*rows, *documents]} == {"somewhere"}
    few = MatrixContext(device="cpu", num_devices=2, num_inputs=8, config=LlamaConfig(vocab_size=20), must_pack=False)
    said = [reason for plan in plan_edges("quick", {}, spec, few) for reason in plan.refused.values()]
    assert [reason.partition(" go up to ")[0] for reason in said] == ["their token ids"] * 2
    assert all(reason.endswith("and the model's vocabulary is of 20") for reason in said)
    assert list(plan_edges(str(tmp_path), {}, spec, here)) == []
