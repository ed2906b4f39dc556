"""What a run does is chosen once: each choice has who made it and why, and nothing below knows what was left open."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from actor_init.as_json import to_json
from actor_init.model_form import Layout
from actor_init.probe.layout_choice import choose_layout
from actor_init.saving.state_file import SavedState
from actor_init.schedule_and_norm import Progress
from actor_init.spec import ActorSpec, Attention, Dtype, Kernels, OptimizerName, ParallelSpec, UsageError
from actor_init.world import World
from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import LOSS_MISFIT
from replay.command_line.cli import main
from replay.options.option_parsing import spec_to_dict
from replay.options.resolved import (
    ATTENTION,
    HEAD,
    KERNELS,
    KNOWN_WHEN_OPEN,
    LOSS_SCALE,
    PACKING,
    STEP,
    TP_PLAN,
    ChosenBy,
    ResolvedChoice,
    ResolvedReplay,
)
from replay.options.spec import MeasureSpec, ReplaySpec, StepMode
from replay.resolution.job_defaults import choose_from_job, choose_job_kernel
from replay.resolution.resolve import (
    WHY_KERNEL_OF_PROBE,
    KernelAndLayout,
    choose_loss,
    explain_attention,
    resolve,
)
from replay.resolution.selection import Selection, read_first_call, select
from replay.resolution.windows import InputRound, JobPass
from replay.runner.checkpoint import load_state_weights
from tests.helpers.families import tiny_config
from tests.helpers.made_replays import MadeReplay
from tests.helpers.thread_ranks import call_on_ranks
from tests.helpers.typed import spec_of

ROOT = Path(__file__).resolve().parents[3]
SELECTION = Selection(inputs=[], num_left_out_passes=0, num_left_over=0, damaged=[], dealing="")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.from_env(ParallelSpec()) as world:
        yield world


def resolve_typed(
    world: World, *typed: str, max_inputs: int = 1, outputs: dict[str, Any] | None = None
) -> ResolvedReplay:
    """The sample's replay under these options, as if its first pass had had these outputs besides its own."""
    spec = spec_of([*typed, "--max-inputs", str(max_inputs)])
    selection = select(spec.inputs, 0, 1, grad_accumulation=spec.actor.grad_accumulation)
    first_call = read_first_call(selection)
    if outputs is not None and first_call is not None:
        first_call = replace(first_call, outputs={**first_call.outputs, **outputs})
    loss = choose_loss(spec, selection, first_call)
    return resolve(spec, selection, first_call, world, loss, None)


def map_choosers(replay: ResolvedReplay) -> dict[str, ChosenBy]:
    return {choice.setting: choice.by for choice in replay.choices}


def walk_values(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from walk_values(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


@pytest.mark.parametrize("typed", [(), ("--backend", "ddp", "--no-packing"), ("--optimizer", "sgd", "--dtype", "bf16")])
def test_nothing_is_left_open(world: World, typed: tuple[str, ...]) -> None:
    replay = resolve_typed(world, *typed)
    parts = {name: to_json(getattr(replay, name)) for name in ("actor", "inputs", "measure", "state", "objective")}
    # nothing is split over one rank, and so there is no other word for a plan
    assert [name for name, value in walk_values(parts) if value == "auto"] == [TP_PLAN]
    assert parts["inputs"]["inputs"] is not None


def test_each_choice_says_who_made_it(world: World) -> None:
    chosen = map_choosers(resolve_typed(world, "--dtype", "bf16", "--gradient-checkpointing"))
    assert chosen["actor.dtype"] is chosen["actor.gradient_checkpointing"] is ChosenBy.TYPED
    assert chosen["actor.model"] is chosen[ATTENTION] is ChosenBy.JOB
    assert chosen[PACKING] is ChosenBy.MODEL
    assert chosen[HEAD] is ChosenBy.MACHINE
    assert chosen["actor.zero_stage"] is chosen["actor.beta1"] is chosen[KERNELS] is ChosenBy.DEFAULT
    assert "actor.num_layers" not in chosen, "a default that nothing had to choose is no choice"


def test_what_to_type_for_the_same_run_leaves_to_the_machine_what_it_chose(world: World) -> None:
    replay = resolve_typed(world)
    job_s = ActorSpec(
        dtype=Dtype.FP32, packing=True, attention=Attention.SDPA, kernels=Kernels.MODEL, grad_accumulation=2
    )
    typed = spec_of(["--max-inputs", "1"])
    assert spec_to_dict(replay.to_spec()) == spec_to_dict(replace(typed, actor=job_s))
    by_machine = [replace(choice, by=ChosenBy.MACHINE) for choice in replay.choices if choice.setting == ATTENTION]
    elsewhere = replace(replay, choices=tuple(by_machine))
    assert elsewhere.actor.attention is Attention.SDPA
    assert elsewhere.to_spec().actor.attention is Attention.AUTO


def make_half_call(**environment: str) -> CapturedCall:
    outputs = {"logits_dtype": "float16"}
    known: dict[str, Any] = {"weights": None, "routes": {}, "trains": True, "random": {}, "random_after": {}}
    return cast(CapturedCall, SimpleNamespace(environment=environment, tensors={}, outputs=outputs, **known))


def test_the_machine_chooses_where_it_cannot_do_what_the_job_did() -> None:
    on_cpu, on_cuda = (
        choose_from_job(ReplaySpec(), make_half_call(), SELECTION, device)[0] for device in ("cpu", "cuda")
    )
    assert (on_cpu.value, on_cpu.by) == (Dtype.FP32, ChosenBy.MACHINE)
    assert on_cpu.why == "the job computed in float16, and DeepSpeed has no fp16 on a CPU. Try: --backend fsdp2"
    assert (on_cuda.value, on_cuda.by) == (Dtype.FP16, ChosenBy.JOB)
    assert choose_from_job(ReplaySpec(), None, SELECTION, "cpu")[0].by is ChosenBy.DEFAULT


@pytest.mark.parametrize("backend", ["fsdp2", "ddp"])
def test_a_job_s_fp16_is_taken_on_a_cpu_where_the_backend_has_it(backend: str) -> None:
    spec = ReplaySpec(actor=ActorSpec(backend=backend))
    chosen = choose_from_job(spec, make_half_call(), SELECTION, "cpu")[0]
    assert (chosen.value, chosen.by) == (Dtype.FP16, ChosenBy.JOB)


def test_the_steps_of_a_job_in_fp16_are_taken_on_a_cpu_where_the_backend_has_it(world: World) -> None:
    def explain_steps(*typed: str) -> str:
        replay = resolve_typed(world, *typed, outputs={"logits_dtype": "float16"})
        return next(choice.why for choice in replay.choices if choice.setting == STEP)

    # The sample's steps cannot be followed for another reason, which is asked for last.
    why = "the job computed in float16, and DeepSpeed has no fp16 on a CPU. Try: --backend fsdp2"
    assert explain_steps() == why
    assert "float16" not in explain_steps("--backend", "fsdp2")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_reason_for_a_ring_s_kernel_is_true_on_each_device(device: str) -> None:
    spec = ActorSpec(parallel=ParallelSpec(ring=2)).with_defaults()
    kernel = choose_job_kernel(spec, None, torch.device(device), tiny_config("llama"))
    probed = KernelAndLayout(
        actor_before_probe=spec, actor=spec, layout=Layout(packs=True), attention_reason=kernel.why
    )
    choice = explain_attention(probed, "ring_fa2", spec)
    assert (choice.by, choice.why) == (
        ChosenBy.MACHINE,
        "the fastest of a ring's kernels that can be had here",
    )


def test_a_window_of_the_job_is_told_from_a_default() -> None:
    of_job = replace(SELECTION, grad_accumulation=3, has_job_windows=True)
    for spec, selection, by in (
        (ReplaySpec(), of_job, ChosenBy.JOB),
        (ReplaySpec(), SELECTION, ChosenBy.DEFAULT),
        (ReplaySpec(actor=ActorSpec(grad_accumulation=3)), replace(of_job, has_job_windows=False), ChosenBy.TYPED),
    ):
        choice = choose_from_job(spec, None, selection, "cpu")[3]
        assert (choice.value, choice.by) == (selection.grad_accumulation, by)


def make_noted_pass(objective: str | None) -> InputRound:
    job_pass = JobPass(
        rank=0, forward=0, world_size=1, num_steps_before=0, step=None, loss_per_mean=1.0, objective=objective
    )
    return InputRound(trains=True, num_tokens=[1], has_gradients=False, job_passes=[job_pass])


ROLLOUT_ROUND = InputRound(trains=False, num_tokens=[1], has_gradients=False)


@pytest.mark.parametrize(
    ("rounds", "typed", "loss", "by"),
    [
        ([make_noted_pass("policy"), ROLLOUT_ROUND, make_noted_pass("policy")], [], "policy", ChosenBy.JOB),
        ([make_noted_pass("policy"), make_noted_pass(None)], [], "stand-in", ChosenBy.DEFAULT),
        ([make_noted_pass("policy")], ["--loss", "sft"], "sft", ChosenBy.TYPED),
        ([make_noted_pass("policy")], ["--window", "mean-of-means"], "stand-in", ChosenBy.OPTION),
        ([make_noted_pass("policy")], ["--passes", "all"], "stand-in", ChosenBy.OPTION),
        ([], [], "stand-in", ChosenBy.DEFAULT),
    ],
)
def test_a_noted_loss_is_the_default(rounds: list[InputRound], typed: list[str], loss: str, by: ChosenBy) -> None:
    choice = choose_loss(spec_of(typed), replace(SELECTION, rounds=rounds), None)
    assert (choice.value, choice.by) == (loss, by)


def test_runs_that_parity_compares_have_no_noted_loss() -> None:
    spec = replace(ReplaySpec(), measure=MeasureSpec(details=True))
    assert choose_loss(spec, replace(SELECTION, rounds=[make_noted_pass("policy")]), None).value == "stand-in"


def test_an_open_actor_completes_what_it_alone_can_tell() -> None:
    choices = [
        ResolvedChoice(setting=setting, value=KNOWN_WHEN_OPEN, by=ChosenBy.MODEL) for setting in (TP_PLAN, LOSS_SCALE)
    ]
    done = MadeReplay.of(ReplaySpec(), *choices).complete({"tp_plan": "builtin"}, 1024.0)
    assert [choice.value for choice in done.choices] == ["builtin", 1024.0]


def test_what_one_rank_cannot_do_is_refused_on_all_when_a_variant_is_derived_or_a_state_loaded(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank that raised alone would leave the others in a collective."""
    replay = resolve_typed(world)

    def choose_kernel_name_here(spec: ActorSpec, where: torch.device, config: Any) -> str:
        if where.type == "cpu":
            raise UsageError("flash-attn has no CPU kernel")
        return "packed_fa2"

    monkeypatch.setattr("actor_init.attention.kernel_choice.choose_kernel_name", choose_kernel_name_here)
    devices = [torch.device("cuda"), torch.device("cpu")]
    results = call_on_ranks(lambda ranks: replay.derive_variant(ranks, why="to know"), devices)
    assert [str(result) for result in results] == ["on rank 1: flash-attn has no CPU kernel"] * 2
    folders = [tmp_path, tmp_path / "missing"]
    two_ranks: Any = SimpleNamespace(world_size=2)
    progress = Progress.from_schedule(None)
    state = SavedState.from_actor(replay.actor, replay.source, two_ranks, progress, num_inputs=1, versions={})
    state.write(tmp_path)
    results = call_on_ranks(
        lambda ranks: load_state_weights(replay, replay.source, ranks, folders[ranks.rank]), devices
    )
    says = "state.json cannot be read: No such file or directory. Give a folder that save_state wrote"
    assert [str(result) for result in results] == [f"on rank 1: load_state='{folders[1]}': {says}"] * 2


def test_a_variant_is_checked_again_and_says_why(world: World) -> None:
    replay = resolve_typed(world)
    eager = replay.derive_variant(world, why="to know", actor=replace(replay.actor, attention=Attention.EAGER))
    assert (eager.kernel, eager.source) == ("eager", replay.source)
    assert [(choice.setting, choice.why) for choice in eager.choices if choice not in replay.choices] == [
        (ATTENTION, "to know")
    ]
    auto = eager.derive_variant(
        world, why="anew", actor=replace(eager.actor, attention=Attention.AUTO, dtype=Dtype.BF16)
    )
    assert (auto.kernel, auto.actor.attention, auto.find_chooser(ATTENTION)) == (
        "sdpa",
        Attention.SDPA,
        ChosenBy.MACHINE,
    )
    mixed = ResolvedChoice(setting=ATTENTION, value="packed_fa2_or_cudnn", by=ChosenBy.MACHINE)
    actor = replace(replay.actor, attention=Attention.AUTO)
    elsewhere = replace(replay, actor=actor, kernel=mixed.value, choices=(mixed,))
    in_fp32 = elsewhere.derive_variant(world, why="no flash in fp32", actor=replace(elsewhere.actor, dtype=Dtype.FP32))
    assert [choice.value for choice in in_fp32.choices if choice.setting == ATTENTION] == ["sdpa"]
    with pytest.raises(UsageError, match="flash-attn has no CPU kernel"):
        replay.derive_variant(world, why="not here", actor=replace(replay.actor, attention=Attention.FLASH))
    without = replace(replay.actor, optimizer=OptimizerName.NONE, weight_decay=None, beta1=None, beta2=None, eps=None)
    with pytest.raises(UsageError, match="step='on' needs an optimizer"):
        replay.derive_variant(world, why="no step", actor=without, measure=replace(replay.measure, step=StepMode.ON))
    with pytest.raises(AssertionError, match=r"actor\.dtype: not resolved"):
        replay.derive_variant(world, why="open", actor=replace(replay.actor, dtype=Dtype.AUTO))


class FirstOfTwo:
    """The first of two ranks; the second waits for its choice."""

    rank, world_size, device = 0, 2, torch.device("cpu")

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def broadcast_from_rank0(self, value: Any) -> Any:
        self.sent.append(value)
        return value


def test_a_kernel_that_the_first_rank_refuses_is_refused_on_all() -> None:
    first = FirstOfTwo()
    spec = ActorSpec(attention=Attention.FLASH, dtype=Dtype.FP32).with_defaults()
    with pytest.raises(UsageError, match="flash-attn has no CPU kernel"):
        choose_layout(spec, tiny_config("llama"), cast(World, first), is_typed=False)
    assert "flash-attn has no CPU kernel" in str(first.sent[0])


def test_a_kernel_that_the_probe_chose_has_the_probe_as_its_reason(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose_eager(spec: ActorSpec, *arguments: Any, **options: Any) -> tuple[ActorSpec, Layout]:
        return replace(spec, packing=True, attention=Attention.EAGER), Layout(packs=True)

    monkeypatch.setattr("replay.resolution.resolve.choose_layout", choose_eager)
    replay = resolve_typed(world)
    [choice] = [choice for choice in replay.choices if choice.setting == ATTENTION]
    assert (choice.value, choice.by, choice.why) == ("eager", ChosenBy.MODEL, WHY_KERNEL_OF_PROBE)
    assert replay.attention_reason == WHY_KERNEL_OF_PROBE


def test_steps_are_chosen_where_the_first_input_cannot_be_read(world: World) -> None:
    """A segment's damaged pass is selected, and its round knows nothing of the job's passes."""
    spec = spec_of([])
    selection = select(spec.inputs, 0, 1, grad_accumulation=None)
    rounds = [replace(selection.rounds[0], job_passes=()), *selection.rounds[1:]]
    selection = replace(selection, rounds=rounds)
    first_call = read_first_call(selection)
    replay = resolve(spec, selection, first_call, world, choose_loss(spec, selection, first_call), None)
    [choice] = [choice for choice in replay.choices if choice.setting == STEP]
    assert (choice.value, choice.by) == (StepMode.OFF, ChosenBy.JOB)
    assert "not all passes of step 1 were recorded" in choice.why


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("--passes rollout", "--passes rollout leaves out the training passes"),
        (
            "--passes all",
            "--passes all takes passes of which no loss was noted, and --loss stand-in is not the job's objective",
        ),
        ("--memory-snapshot", "--memory-snapshot runs a pass again"),
    ],
)
def test_an_option_with_which_no_step_of_the_job_is_taken_is_named(world: World, typed: str, why: str) -> None:
    # The first passes of the sample are rollouts, and a training pass comes with the fifth.
    choices = resolve_typed(world, *typed.split(), max_inputs=6).choices
    [choice] = [choice for choice in choices if choice.setting == STEP]
    assert (choice.value, choice.why) == (StepMode.OFF, why)


@pytest.mark.parametrize(("num_further", "takes_last"), [(0, False), (1, True)])
def test_the_last_step_is_taken_where_a_pass_without_gradients_runs_behind_it(
    world: World, num_further: int, takes_last: bool
) -> None:
    spec = spec_of([])
    selection = select(spec.inputs, 0, 1, grad_accumulation=None)
    last_window = len(selection.rounds) - 1
    selection = replace(selection, rounds=[*selection.rounds, *[ROLLOUT_ROUND] * num_further])
    first_call = read_first_call(selection)
    replay = resolve(spec, selection, first_call, world, choose_loss(spec, selection, first_call), None)
    assert (last_window in (replay.step_settings or {})) is takes_last


def test_a_first_input_that_cannot_be_read_is_not_said_to_have_no_labels() -> None:
    assert choose_loss(ReplaySpec(), SELECTION, None).why == "the first input cannot be read"
    first_call = replace(read_sample_call(), tensors={})
    assert choose_loss(ReplaySpec(), SELECTION, first_call).why == "the first input cannot be read"


def read_sample_call() -> CapturedCall:
    """The sample's first capture, which has no labels."""
    first_call = read_first_call(select(spec_of(["--max-inputs", "1"]).inputs, 0, 1))
    assert first_call is not None
    return first_call


OTHER_FORM = (
    "{} of the gradient of the job's logits cannot come from a loss of log-probs; label smoothing, a temperature or an "
    "entropy may have made it"
)


@pytest.mark.parametrize(
    ("misfit", "dtype", "objectives", "why"),
    [
        (0.5, "float32", [None], OTHER_FORM.format("50.00%")),
        # The shares are of the gradient itself, so that a loss scale changes none of them.
        (0.5, "float16", [None], OTHER_FORM.format("50.00%")),
        (1e-3, "float32", [None], OTHER_FORM.format("0.10%")),
        (1e-3, "float16", [None], "the job's loss may have been scaled for float16 by a number that is not recorded"),
        (1e-3, "bfloat16", ["logits", None], "the passes do not all show the same loss"),
        (1e-3, "bfloat16", ["logits", "policy"], "the passes do not all show the same loss"),
        (1e-3, "bfloat16", [], "the inputs have no labels, and no noted loss of a policy"),
        (float("nan"), "float16", [None], "the inputs have no labels, and no noted loss of a policy"),
    ],
)
def test_why_the_logits_gradient_does_not_tell_the_loss_is_said_as_it_is(
    misfit: float, dtype: str, objectives: list[str | None], why: str
) -> None:
    notes = {LOSS_MISFIT: torch.tensor(misfit, dtype=torch.float64)}
    first_call = replace(
        read_sample_call(), notes=notes, outputs={"logits_dtype": dtype}, weights=None, environment={"device": "CPU"}
    )
    selection = replace(SELECTION, rounds=[make_noted_pass(objective) for objective in objectives])
    choice = choose_loss(ReplaySpec(), selection, first_call)
    assert (choice.value, choice.by, choice.why) == ("stand-in", ChosenBy.DEFAULT, why)


def test_explain_prints_the_table_and_opens_no_actor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replay.runner.run.ReopenableActor", None)
    typed = ["--max-inputs", "1", "--dtype", "fp16", "--backend", "ddp", "--log-folder", str(tmp_path / "logs")]
    assert main([*typed, "--explain"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["setting"].split() == ["setting", "value", "chosen", "by", "why"]
    assert rows["--dtype"].split() == ["--dtype", "fp16", "typed"]
    assert rows["--attention"].split()[1:4] == ["sdpa", "the", "job"]
    assert "known once the actor is open" in rows["loss"]
    assert not (tmp_path / "logs").exists()


def test_a_subcommand_does_not_drop_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--explain", "inspect", "x"]) == 2
    assert "--explain belongs to a replay, not to `inspect`" in capsys.readouterr().err


def test_few_modules_know_what_was_typed_and_none_below_resolve() -> None:
    knowing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "replay").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and any(alias.name == "ReplaySpec" for alias in node.names)
    }
    # A command builds specs of its own, and each new one adds a module or two.
    assert len([name for name in knowing if not name.startswith("replay/commands/")]) <= 12
    assert len(knowing) <= 32
    below = ("compare", "objective", "prediction", "profiling", "runlog", "tracing", "verdict", "watch")
    assert not [name for name in knowing if name.startswith(tuple(f"replay/{room}/" for room in below))]
    assert {name for name in knowing if name.startswith("replay/runner/")} == {"replay/runner/run.py"}
