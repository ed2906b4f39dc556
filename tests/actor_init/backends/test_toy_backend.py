"""A backend that is one file and one entry in the registry keeps the contract, and is in every list of backends."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from actor_init.declarations.backends import BACKENDS
from actor_init.spec import ActorSpec, Attention, Dtype, UsageError
from replay.agreement.matrix import BuiltInMatrix, make_edge_settings, read_settings
from replay.agreement.plan import MatrixContext, Role, plan_matrix
from replay.commands.suite.plan import CONFIGURATIONS, read_configurations
from replay.options.option_parsing import build_replay_spec, format_error_with_flags
from replay.options.spec import ReplaySpec
from replay.output.text import describe_engine
from tests.helpers.contract import (
    FEW,
    MANY,
    STEPPING,
    Row,
    check_clipped_steps,
    check_losses_and_norms,
    replayed,
    save_model,
)
from tests.helpers.liger_on_a_cpu import liger_on_a_cpu
from tests.helpers.reference import Reference
from tests.helpers.toy_backend import DECLARATION

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
WORKER = "tests.helpers.toy_backend"
TABLE = [
    Row("toy", 1, True, True, False, 2, MANY),
    Row("toy", 1, False, False, True, 1, FEW),
    Row("toy", 2, True, False, False, 2, MANY),
    Row("toy", 2, False, False, True, 1, FEW),
]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, DECLARATION.name, DECLARATION)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Reference:
    return Reference(model_folder)


@pytest.fixture(scope="module")
def logs(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("logs")
    folders: dict[str, Path] = {}
    for num_ranks in (1, 2):
        runs = {row.name: row.arguments() for row in TABLE if row.num_ranks == num_ranks}
        if num_ranks == 1:
            runs["steps"] = [*STEPPING.split(), "--backend", "toy"]
        folders |= replayed(runs, num_ranks, model_folder, home, WORKER)
    return folders


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_its_losses_and_norms_are_the_reference_s(row: Row, logs: dict[str, Path], reference: Reference) -> None:
    check_losses_and_norms(row, logs[row.name], reference)


def test_its_clipped_steps_lead_where_a_plain_loop_leads(logs: dict[str, Path], model_folder: Path) -> None:
    check_clipped_steps(logs["steps"], model_folder)


def test_help_lists_it() -> None:
    process = subprocess.run(
        [sys.executable, "-m", WORKER, "replay", "--help-all"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    words = " ".join(process.stdout.split())
    assert "--backend deepspeed|fsdp2|ddp|toy" in words
    assert "toy: a plain model, for tests." in words
    assert "ddp: nothing ever. toy: nothing ever." in words


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("matrix", list(BuiltInMatrix))
def test_every_named_matrix_has_cells_of_it_that_differ_in_nothing_that_it_lacks(matrix: str) -> None:
    cells = [cell for cell in read_settings(matrix, 2) if cell["backend"] == "toy"]
    assert {cell.get("data", 1) for cell in cells} == {1, 2}
    assert not any({"zero_stage", "tp", "ring"} & cell.keys() for cell in cells)
    edges = make_edge_settings(matrix, 2, Attention.SDPA)
    assert all("toy" in {cell["backend"] for cell in group} for group in edges.values())


@pytest.mark.usefixtures("registered")
def test_parity_plans_its_cells_and_says_why_it_refuses_the_others() -> None:
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, hidden_size=32)
    context = MatrixContext(device="cpu", num_devices=2, num_inputs=8, config=config, must_pack=False)
    with liger_on_a_cpu():
        plan = plan_matrix(read_settings("quick", 2), {}, context)
    cells = {cell.name for cell in plan.cells if cell.role is Role.CELL and cell.spec.actor.backend == "toy"}
    assert {"toy fp32 packed sdpa", "toy fp32 padded sdpa", "toy fp32 packed sdpa data 2"} <= cells
    refused = {name: reason for name, reason in plan.refused.items() if name.startswith("toy")}
    assert set(refused) == {
        "toy bf16 packed sdpa",
        "toy bf16 padded sdpa",
        "toy bf16 packed sdpa kernels fused",
    }
    assert set(refused.values()) == {"toy computes in fp32, not in bf16. Try: --dtype fp32"}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ({"zero_stage": "1"}, "--zero-stage 1 shards, and under toy every rank holds the whole model"),
        ({"tp": "2"}, "--tp 2 shards, and under toy every rank holds the whole model"),
        ({"deepcompile": True}, "--deepcompile belongs to deepspeed"),
        ({"deepspeed_config": "ds.json"}, "--deepspeed-config ds.json is deepspeed's, and the backend is toy"),
        ({"save_state": "a"}, "--save-state is not there for toy. Try: --backend deepspeed"),
    ],
)
def test_what_it_does_not_declare_is_refused(typed: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError) as refusal:
        build_replay_spec({"backend": "toy", **typed})
    assert format_error_with_flags(refusal.value).startswith(says)


@pytest.mark.usefixtures("registered")
def test_texts_and_specs_know_it() -> None:
    assert describe_engine("toy", 0) == "toy"
    assert ReplaySpec(actor=ActorSpec(backend="toy", dtype=Dtype.FP32)).actor.resolved_zero_stage == 0
    with pytest.raises(UsageError, match="Give one of deepspeed, fsdp2, ddp, toy"):
        build_replay_spec({"backend": "zero"})


@pytest.mark.usefixtures("registered")
def test_the_suite_trains_it_as_it_declares() -> None:
    before = [configuration.name for configuration in CONFIGURATIONS]
    assert [configuration.name for configuration in read_configurations()] == [*before, "toy"]


def test_without_its_entry_nobody_knows_it() -> None:
    with pytest.raises(UsageError, match=r"'toy' is not allowed. Give one of deepspeed, fsdp2, ddp$"):
        ActorSpec(backend="toy")
    with pytest.raises(UsageError, match="backend 'toy' is not allowed"):
        build_replay_spec({"backend": "toy"})
