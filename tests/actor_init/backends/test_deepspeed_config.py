"""A file of DeepSpeed's settings adds to what the options say, is refused where it contradicts them, and is logged."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from actor_init.declarations.backends import deepspeed_config, find_obstacle
from actor_init.declarations.backends.deepspeed_config import build_config
from actor_init.spec import ActorSpec, ParallelSpec, UsageError
from replay.agreement.plan import MatrixContext, Role, plan_matrix
from replay.options.option_parsing import format_error_with_flags
from replay.runlog.reader import PastRun
from tests.helpers.commands import ROOT
from tests.helpers.planning import CONFIG


def write_config(folder: Path, content: Any) -> Path:
    path = folder / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_what_no_option_says_is_added_and_auto_is_the_option_s(tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 1000, "stage": "auto"},
        "data_types": {"grad_accum_dtype": "bf16"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "optimizer": "auto",
        "bf16": {"enabled": True},
        "steps_per_print": 10,
    }
    merged = build_config(
        ActorSpec(deepspeed_config=write_config(tmp_path, config), zero_stage=2, max_norm=0.5).with_defaults()
    )
    assert merged["zero_optimization"] == {
        "stage": 2,
        "memory_efficient_linear": True,
        "overlap_comm": True,
        "reduce_bucket_size": 1000,
    }
    assert merged["data_types"] == {"grad_accum_dtype": "bf16"}
    assert (merged["gradient_clipping"], merged["steps_per_print"]) == (0.5, 10)
    assert "optimizer" not in merged
    assert "train_batch_size" not in merged


def test_an_offloaded_optimizer_is_torch_s(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    assert build_config(ActorSpec(deepspeed_config=path))["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage is 2; here it is 1, which --zero-stage says. "),
        ({"gradient_accumulation_steps": 4}, "here it is 1, .* and try: --grad-accumulation 4"),
        ({"gradient_clipping": 1.0}, "here it is 0.0, which --max-norm says. Leave it out, and try: --max-norm 1.0"),
        ({"bf16": {"enabled": False}}, "bf16.enabled is false; here it is true, which --dtype says"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true; here it is false, which --dtype says"),
        ({"train_micro_batch_size_per_gpu": 4}, "here it is 1. Leave it out"),
        ({"train_batch_size": 8}, "a pass is one micro-batch as it was captured"),
        ({"optimizer": {"type": "AdamW"}}, "which --optimizer and --learning-rate choose. Leave it out"),
        ({"zero_optimization": 3}, "it is a section with keys of its own. Give an object"),
        (
            {"compile": {"deepcompile": True}},
            "compile.deepcompile is true; here it is false, which --compile deepcompile says|which --deepcompile says",
        ),
        ([], "holds a list. Give a JSON file"),
        ("{", "cannot be read: .* Give a JSON file"),
    ],
)
def test_what_contradicts_an_option_is_refused_with_what_to_type(tmp_path: Path, config: Any, says: str) -> None:
    with pytest.raises(UsageError) as refusal:
        build_config(ActorSpec(deepspeed_config=write_config(tmp_path, config)).with_defaults())
    assert re.search(says, format_error_with_flags(refusal.value))


def test_a_part_of_what_an_option_decides_is_that_option_s(tmp_path: Path) -> None:
    """AutoTP's section has two keys, and both are those of --tp."""
    parallel = ParallelSpec(tp=2)
    for key, value in (("autotp_size", 4), ("vocab_parallel_lm_head", True)):
        path = write_config(tmp_path, {"tensor_parallel": {key: value}})
        with pytest.raises(UsageError) as refusal:
            build_config(ActorSpec(deepspeed_config=path, parallel=parallel).with_defaults())
        assert f"tensor_parallel.{key} is" in format_error_with_flags(refusal.value)
        assert "which --tp says" in format_error_with_flags(refusal.value)
    path = write_config(tmp_path, {"tensor_parallel": {"autotp_size": 2}})
    assert build_config(ActorSpec(deepspeed_config=path, parallel=parallel))["tensor_parallel"]["autotp_size"] == 2


def test_other_backends_have_no_such_file() -> None:
    with pytest.raises(UsageError, match=r"deepspeed_config='ds.json' is deepspeed's, and the backend is fsdp2"):
        ActorSpec(deepspeed_config=Path("ds.json"), backend="fsdp2")


def test_parity_gives_it_to_deepspeed_s_runs_alone_and_a_matrix_may_list_several(tmp_path: Path) -> None:
    context = MatrixContext(device="cpu", num_devices=1, num_inputs=2, config=CONFIG, must_pack=False)
    path = str(write_config(tmp_path, {"zero_optimization": {"overlap_comm": True}}))
    bad = tmp_path / "bad.json"
    bad.write_text('{"gradient_clipping": 1}')
    settings = [{"backend": backend, "dtype": "fp32", "zero_stage": 3} for backend in ("deepspeed", "fsdp2")]
    cells = plan_matrix(settings, {"deepspeed_config": path}, context).cells
    config_by_backend = {
        cell.spec.actor.backend: cell.spec.actor.deepspeed_config for cell in cells if cell.role is Role.CELL
    }
    assert config_by_backend == {"deepspeed": Path(path)}
    assert not any(cell.spec.actor.deepspeed_config for cell in cells if cell.spec.actor.backend == "fsdp2")
    listed = plan_matrix(
        [{"dtype": "fp32", "deepspeed_config": config_path} for config_path in (path, str(bad))], {}, context
    )
    assert f"deepspeed fp32 packed auto deepspeed-config {path}" in [cell.name for cell in listed.cells]
    assert "gradient_clipping is 1" in listed.refused[f"deepspeed fp32 packed auto deepspeed-config {bad}"]


def test_the_log_has_what_the_file_said(tmp_path: Path, one_world: None, world: Any) -> None:
    from replay.command_line.cli import parse_command_line
    from replay.runner.run import run_in

    path = write_config(tmp_path, {"zero_optimization": {"round_robin_gradients": True}})
    inputs = str(ROOT / "inputs" / "edges" / "rows")
    typed = ["--deepspeed-config", str(path), "--inputs", inputs, "--max-inputs", "1", "--zero-stage", "2"]
    spec = parse_command_line([*typed, "--quiet", "--log-folder", str(tmp_path / "logs")]).args[0].spec
    assert run_in(world, spec).exit_code == 0
    path.unlink()
    facts = PastRun.read(tmp_path / "logs").facts
    assert json.loads(str(facts["deepspeed_config"]))["zero_optimization"]["round_robin_gradients"] is True


def test_where_deepspeed_is_not_installed_another_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ActorSpec(backend="deepspeed", optimizer="adamw")
    assert find_obstacle(spec, "cpu") is None
    monkeypatch.setattr(deepspeed_config, "find_spec", lambda name: None)
    said = find_obstacle(spec, "cpu")
    assert said is not None
    assert said.startswith("DeepSpeed is not installed. Try: ")
    assert "fsdp2" in said
