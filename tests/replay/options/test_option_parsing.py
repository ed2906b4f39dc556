"""A dataclass field with a default and a help text is an option, and what was typed is a spec again."""

import json
import re
from pathlib import Path

import pytest

from actor_init.spec import ActorSpec, Attention, Compile, ParallelSpec, TpPlan, UsageError
from capture.facts import Setting
from replay.command_line.cli import parse_command_line
from replay.options.option_parsing import (
    describe_error,
    format_command_line,
    format_error_with_flags,
    list_options,
    spec_from_dict,
    spec_to_dict,
)
from replay.options.spec import InputsSpec, MeasureSpec, Passes, ReplaySpec, StateSpec
from replay.processes.child_job import ChildJob


def parse(*arguments: str) -> ReplaySpec:
    spec = parse_command_line(list(arguments)).args[0].spec
    assert isinstance(spec, ReplaySpec)
    return spec


def test_without_options_the_dataclasses_defaults_hold() -> None:
    assert parse() == ReplaySpec()


@pytest.mark.parametrize(
    ("typed", "spec"),
    [
        ("--backend fsdp2", ReplaySpec(actor=ActorSpec(backend="fsdp2"))),
        ("--no-packing", ReplaySpec(actor=ActorSpec(packing=False))),
        ("--packing", ReplaySpec(actor=ActorSpec(packing=True))),
        ("--compile", ReplaySpec(actor=ActorSpec(compile=Compile.BLOCKS))),
        ("--deepcompile", ReplaySpec(actor=ActorSpec(compile=Compile.DEEPCOMPILE))),
        ("--flash-attn", ReplaySpec(actor=ActorSpec(attention=Attention.FLASH))),
        ("--no-flash-attn", ReplaySpec(actor=ActorSpec(attention=Attention.SDPA))),
        ("--attention sdpa --no-flash-attn", ReplaySpec(actor=ActorSpec(attention=Attention.SDPA))),
        ("--compile --compile", ReplaySpec(actor=ActorSpec(compile=Compile.BLOCKS))),
        ("--zero-stage 0", ReplaySpec(actor=ActorSpec(zero_stage=0))),
        ("--learning-rate 3e-4", ReplaySpec(actor=ActorSpec(learning_rate=3e-4))),
        ("--max-norm 1", ReplaySpec(actor=ActorSpec(max_norm=1.0))),
        ("--inputs some/folder", ReplaySpec(inputs=InputsSpec(inputs=Path("some/folder")))),
        ("--passes all --max-inputs 3", ReplaySpec(inputs=InputsSpec(passes=Passes.ALL, max_inputs=3))),
        ("--no-backward --warmup 0", ReplaySpec(measure=MeasureSpec(backward=False, warmup=0))),
        ("--save-state runs/a", ReplaySpec(state=StateSpec(save_state=Path("runs/a")))),
        (
            "--skip-inputs 3 --load-state a",
            ReplaySpec(inputs=InputsSpec(skip_inputs=3), state=StateSpec(load_state=Path("a"))),
        ),
        ("--local_rank=1 --max-inputs 3", ReplaySpec(inputs=InputsSpec(max_inputs=3))),
        ("--local-rank 1", ReplaySpec()),
    ],
)
def test_what_is_typed_arrives_in_its_field(typed: str, spec: ReplaySpec) -> None:
    assert parse(*typed.split()) == spec


@pytest.mark.parametrize(
    ("typed", "both"),
    [
        ("--compile --deepcompile", ("--compile", "--deepcompile")),
        ("--flash-attn --no-flash-attn", ("--flash-attn", "--no-flash-attn")),
        ("--attention eager --flash-attn", ("--attention eager", "--flash-attn")),
        ("--no-flash-attn --attention flash", ("--attention flash", "--no-flash-attn")),
    ],
)
def test_two_ways_to_contradict_oneself_are_refused_by_name(typed: str, both: tuple[str, str]) -> None:
    with pytest.raises(UsageError) as refusal:
        parse(*typed.split())
    assert str(refusal.value).startswith(f"{both[0]} and {both[1]} exclude each other")


@pytest.mark.parametrize(
    ("typed", "allowed"),
    [
        ("--backend zero", "deepspeed, fsdp2, ddp"),
        ("--max-inputs 0", "at least 1"),
        ("--skip-inputs=-1", "at least 0"),
        ("--lr-warmup-steps few", "a whole number"),
        ("--max-inputs 2.5", "a whole number"),
        ("--zero-stage 4", "from 0 to 3"),
        ("--zero-stage -1", "from 0 to 3"),
        ("--tp-plan theirs", "auto, model, builtin"),
        ("--max-norm nan", "a number of at least 0"),
        ("--learning-rate inf", "finite"),
        ("--max-norm=-1", "of at least 0"),
        ("--learning-rate=-1", "at least 0"),
        ("--learning-rate much", "a finite number"),
        ("--inputs=", "a path"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(typed: str, allowed: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse(*typed.split())
    text = format_error_with_flags(refusal.value)
    assert allowed in text
    assert typed.replace("=", " ").split()[0] in text


def test_a_field_without_help_is_no_option() -> None:
    assert "parallel" not in {option.field for option in list_options()}


FULL = ReplaySpec(
    actor=ActorSpec(
        backend="fsdp2",
        compile=Compile.BLOCKS,
        packing=False,
        max_norm=0.5,
        zero_stage=2,
        parallel=ParallelSpec(tp=2, tp_plan=TpPlan.BUILTIN, sequence_parallel=True),
    ),
    inputs=InputsSpec(inputs=Path("in puts"), skip_inputs=2, max_inputs=7, shuffle_inputs=True, random_seed=123),
    measure=MeasureSpec(backward=False, warmup=0, quiet=True, log_folder=Path("/elsewhere"), name="night"),
    state=StateSpec(load_state=Path("a"), save_state=Path("b c"), save_model=Path("d")),
)


@pytest.mark.parametrize("spec", [ReplaySpec(), FULL, ReplaySpec(actor=ActorSpec(attention=Attention.FLASH))])
def test_a_spec_can_be_repeated_from_its_log_and_from_its_command_line(spec: ReplaySpec) -> None:
    assert spec_from_dict(json.loads(json.dumps(spec_to_dict(spec)))) == spec
    assert parse(*format_command_line(spec)) == spec
    assert ChildJob.parse(ChildJob(spec=spec).text, source="a job").spec == spec


def test_the_command_line_of_a_spec_is_the_shortest() -> None:
    assert format_command_line(ReplaySpec()) == []
    assert format_command_line(parse("--compile", "--tp", "1", "--max-inputs", "5")) == [
        "--compile",
        "--max-inputs",
        "5",
    ]


def test_a_saved_spec_keeps_what_is_no_option() -> None:
    spec = ReplaySpec(actor=ActorSpec(parallel=ParallelSpec(ring=2)))
    assert spec_from_dict(spec_to_dict(spec)) == spec


@pytest.mark.parametrize(
    ("saved", "complaint"),
    [
        ({"actor": {"colour": "blue"}}, "actor.colour"),
        ({"actor": {"backend": "zero"}}, "backend 'zero' is not allowed. Give one of deepspeed, fsdp2, ddp"),
        ({"inputs": {"max_inputs": "5"}}, "inputs.max_inputs"),
        ({"inputs": {"max_inputs": 0}}, "at least 1"),
        ({"inputs": {"passes": None}}, "allowed is 'train', 'rollout' or 'all'"),
        ({"measure": {"backward": 1}}, "bool"),
        ({"measure": 3}, "measure"),
    ],
)
def test_a_saved_spec_that_no_spec_can_be_is_refused(saved: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint.replace(".", r"\.")):
        spec_from_dict(saved)


def test_no_page_gives_a_switch_a_value() -> None:
    switches = {
        flag for option in list_options() if option.value_type is bool for flag in (option.flag, option.negation)
    }
    root = Path(__file__).parents[3]
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    typed = [words.split() for page in pages for words in re.findall("`(--[^`]+)`", page.read_text())]
    assert ["--grad-accumulation", "1"] in typed
    assert [words for words in typed if words[0] in switches and words[1:] and not words[1].startswith("--")] == []


def test_a_refusal_shows_its_sentence_alone_and_another_error_its_type() -> None:
    refusal = UsageError("DeepSpeed", "has no fp16 on a CPU", f"Try: {Setting('backend', 'fsdp2')}")
    assert describe_error(refusal) == "DeepSpeed has no fp16 on a CPU. Try: --backend fsdp2"
    assert describe_error(ValueError("no events")) == "ValueError: no events"
