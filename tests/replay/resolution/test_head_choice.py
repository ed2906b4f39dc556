"""Log-probs come from the head as the job computed its loss: told from recordings of tiny real jobs alone."""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from actor_init.compiling import compile_function
from actor_init.head import whole_logits
from actor_init.model_form import KIND_WORDS, HeadForm, LogitStep
from actor_init.spec import Head, UsageError
from actor_init.world import World
from capture import note, recording
from replay.command_line.cli import main as replay_main
from replay.options.resolved import HEAD, ChosenBy, ResolvedChoice, ResolvedReplay
from replay.profiling.memory_advice import compute_declared_bytes
from replay.resolution import head_choice
from replay.resolution.resolve import choose_loss, resolve
from replay.resolution.selection import Selection, read_first_call, select
from tests.helpers.liger_on_a_cpu import liger_on_a_cpu, losses
from tests.helpers.replay_worker import graphs_alone
from tests.helpers.typed import spec_of

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
TOKENS_A_CHUNK = 5


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def compute_own_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1).float(), labels_BS[:, 1:].flatten())


def compute_chunked_loss(model: LlamaForCausalLM, input_ids: Tensor, labels: Tensor, use_cache: bool) -> Any:
    """The forward of a model whose loss is patched: cross entropy of a few tokens' logits after the other."""
    hidden_ND = model.model(input_ids=input_ids, use_cache=use_cache).last_hidden_state[:, :-1].flatten(0, 1)
    label_N = labels[:, 1:].flatten()
    chunks = zip(hidden_ND.split(TOKENS_A_CHUNK), label_N.split(TOKENS_A_CHUNK), strict=True)
    losses = [F.cross_entropy(model.lm_head(hidden_CD), label_C, reduction="sum") for hidden_CD, label_C in chunks]
    return CausalLMOutputWithPast(loss=torch.stack(losses).sum() / len(label_N))


class PolicyActor(nn.Module):
    """An actor as OpenRLHF has it: it returns the log-probs of its rows' tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.config = self.model.config

    def forward(self, sequences: Tensor, attention_mask: Tensor) -> Tensor:
        logits_BSV: Tensor = self.model(input_ids=sequences, attention_mask=attention_mask).logits
        log_probs_BSV = logits_BSV[:, :-1].float().log_softmax(-1)
        return log_probs_BSV.gather(2, sequences[:, 1:, None])[:, :, 0]


class LogitsAlone(nn.Module):
    """A model whose forward returns a tensor: the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.config = self.model.config

    def forward(self, input_ids: Tensor) -> Tensor:
        logits_BSV: Tensor = self.model(input_ids=input_ids).logits
        return logits_BSV


# How a job computes the loss of one pass.
LossOf = Callable[[Any, Tensor], Tensor]


def model_loss(model: Any, ids_BS: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids_BS, labels=ids_BS, use_cache=False)["loss"]
    return loss


def own_loss(model: Any, ids_BS: Tensor) -> Tensor:
    return compute_own_loss(model(input_ids=ids_BS, use_cache=False).logits, ids_BS)


def tuple_loss(model: Any, ids_BS: Tensor) -> Tensor:
    loss, _ = model(input_ids=ids_BS, labels=ids_BS, use_cache=False, return_dict=False)
    assert isinstance(loss, Tensor)
    return loss


def autocast_loss(model: Any, ids_BS: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model_loss(model, ids_BS)


def noted_loss(model: Any, ids_BS: Tensor) -> Tensor:
    loss = own_loss(model, ids_BS)
    note(loss=loss)
    return loss


def compiled_loss(model: Any, ids_BS: Tensor) -> Tensor:
    """As torchtitan: the loss function is compiled, and the model is not called with labels."""
    compute = torch.compile(compute_own_loss, backend="aot_eager")
    loss: Tensor = compute(model(input_ids=ids_BS, use_cache=False).logits, ids_BS)
    note(loss=loss * 1.0)
    return loss


def trl_sft_loss(model: Any, ids_BS: Tensor) -> Tensor:
    """As TRL's SFTTrainer: the Trainer passes the number of labels, and the logits are looked at for its metrics."""
    num_labels = torch.tensor(ids_BS[:, 1:].numel())
    output = model(input_ids=ids_BS, labels=ids_BS, use_cache=False, num_items_in_batch=num_labels)
    with torch.no_grad():
        output.logits.softmax(-1)
    loss: Tensor = output.loss
    return loss


def trl_grpo_loss(model: Any, ids_BS: Tensor) -> Tensor:
    """As TRL's GRPOTrainer: logits of the completion alone, and one more."""
    logits_BAV: Tensor = model(input_ids=ids_BS, use_cache=False, logits_to_keep=5).logits[:, :-1]
    return -logits_BAV.log_softmax(-1).gather(2, ids_BS[:, -4:, None]).mean()


def actor_loss(model: Any, ids_BS: Tensor) -> Tensor:
    loss: Tensor = -model(ids_BS, torch.ones_like(ids_BS)).mean()
    return loss


def patch_forward(forward: Callable[..., Any]) -> LlamaForCausalLM:
    model: Any = make_model()
    model.forward = forward.__get__(model)
    assert isinstance(model, LlamaForCausalLM)
    return model


class LigerFusedLinearCrossEntropyFunction(torch.autograd.Function):
    """What autograd sees of Liger's loss: a function of this name, whose gradients are computed in forward."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, label_N: Tensor) -> Tensor:
        loss_N, *gradients, _ = losses(hidden_ND, weight_VD, None, label_N, None, needs_gradient=True)
        ctx.save_for_backward(*gradients)
        return loss_N.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD = ctx.saved_tensors
        return gradient * hidden_ND, gradient * weight_VD, None


def compute_liger_s_loss(model: LlamaForCausalLM, input_ids: Tensor, labels: Tensor, use_cache: bool) -> Any:
    """The forward that Liger puts in the place of a model's: a loss, and no logits."""
    hidden_ND = model.model(input_ids=input_ids, use_cache=use_cache).last_hidden_state[:, :-1].flatten(0, 1)
    label_N = labels[:, 1:].flatten()
    total = LigerFusedLinearCrossEntropyFunction.apply(hidden_ND, model.lm_head.weight, label_N)
    return CausalLMOutputWithPast(loss=total / len(label_N))


def compile_whole(model: LlamaForCausalLM) -> nn.Module:
    compiled = torch.compile(model, backend="aot_eager")
    assert isinstance(compiled, nn.Module)
    return compiled


class Job:
    """A job of one step.

    make       makes the model that it calls
    reproduce  as for a recording
    form       the form that is right for it
    compiled   its loss is
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        loss_of: LossOf,
        form: Head,
        by: ChosenBy = ChosenBy.JOB,
        *,
        reproduce: bool = True,
        compiled: bool = False,
    ) -> None:
        self.make, self.loss_of, self.form, self.by, self.reproduce = make, loss_of, form, by, reproduce
        self.compiled = compiled

    def record(self, folder: Path) -> float:
        """Record one step of two passes, and return the loss of the first."""
        model = self.make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with recording(model, folder, reproduce=self.reproduce):
            for number in range(2):
                torch.manual_seed(number)
                loss = self.loss_of(model, torch.randint(1, SIZES["vocab_size"], (2, 12)))
                (loss / 2).backward()
                losses.append(float(loss.detach()))
            optimizer.step()
        return losses[0]


JOBS = {
    "labels through the model": Job(make_model, model_loss, Head.WHOLE),
    "labels, a tuple": Job(make_model, tuple_loss, Head.WHOLE),
    "labels, autocast": Job(make_model, autocast_loss, Head.WHOLE),
    "own cross entropy": Job(make_model, own_loss, Head.WHOLE),
    "own cross entropy of a tensor": Job(LogitsAlone, lambda model, ids: compute_own_loss(model(ids), ids), Head.WHOLE),
    "own cross entropy, noted": Job(make_model, noted_loss, Head.WHOLE),
    "compiled loss, noted": Job(make_model, compiled_loss, Head.WHOLE, compiled=True),
    "TRL's SFT": Job(make_model, trl_sft_loss, Head.WHOLE),
    "TRL's GRPO": Job(make_model, trl_grpo_loss, Head.WHOLE),
    "compiled model": Job(lambda: compile_whole(make_model()), model_loss, Head.WHOLE, compiled=True),
    "loss in chunks": Job(lambda: patch_forward(compute_chunked_loss), model_loss, Head.CHUNKS),
    # No Liger runs on a CPU, so chunks have to do.
    "Liger's loss": Job(lambda: patch_forward(compute_liger_s_loss), model_loss, Head.CHUNKS, ChosenBy.MACHINE),
    "log-probs of an actor": Job(PolicyActor, actor_loss, Head.WHOLE, ChosenBy.MACHINE),
    "outputs not recorded": Job(make_model, model_loss, Head.WHOLE, ChosenBy.MACHINE, reproduce=False),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("jobs")
    recorded = {name: home / str(number) for number, name in enumerate(JOBS)}
    for name, folder in recorded.items():
        JOBS[name].record(folder)
    return recorded


def resolve_inputs(world: World, folder: Path, *typed: str) -> tuple[ResolvedReplay, Selection]:
    spec = spec_of(["--inputs", str(folder), *typed])
    selection = select(spec.inputs, 0, 1, grad_accumulation=spec.actor.grad_accumulation)
    first_call = read_first_call(selection)
    loss = choose_loss(spec, selection, first_call)
    return resolve(spec, selection, first_call, world, loss, None), selection


def choose(world: World, folder: Path, *typed: str) -> tuple[Any, ResolvedChoice]:
    """The form of a replay of these inputs, and the choice that `--explain` prints."""
    resolved, _ = resolve_inputs(world, folder, *typed)
    [choice] = [choice for choice in resolved.choices if choice.setting == HEAD]
    assert resolved.actor.head is choice.value
    return resolved.source.head, choice


@pytest.mark.parametrize("name", JOBS)
def test_the_form_is_the_job_s(name: str, folders: dict[str, Path], world: World) -> None:
    form, choice = choose(world, folders[name])
    assert (form.kind, choice.value, choice.by) == (JOBS[name].form, JOBS[name].form, JOBS[name].by)
    assert form.why == choice.why != ""
    assert (form.compiled is not None) == JOBS[name].compiled


def test_liger_s_loss_is_taken_where_it_can_be_had(folders: dict[str, Path], world: World) -> None:
    folder = folders["Liger's loss"]
    form, choice = choose(world, folder)
    assert choice.why == "the job's loss is Liger's, which has no CPU kernels"
    with liger_on_a_cpu():
        form, choice = choose(world, folder)
        assert (form.kind, choice.by) == (Head.LIGER, ChosenBy.JOB)
        assert form.describe() == "log-probs by Liger's fused loss (the job's loss is Liger's)"
        form, choice = choose(world, folder, "--loss", "dpo")
        assert (form.kind, choice.by) == (Head.CHUNKS, ChosenBy.OPTION)
        assert (
            choice.why
            == "the job's loss is Liger's, which gives each log-prob the same gradient, and --loss dpo does not"
        )


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("", "has no CPU kernels"),
        ("--loss dpo", "gives each log-prob the same gradient, and --loss dpo does not"),
        ("--backend fsdp2 --tp 2", "takes the whole vocabulary on a rank, and --tp 2 splits it"),
    ],
)
def test_liger_s_loss_is_refused_where_it_cannot_be_had(
    typed: str, why: str, folders: dict[str, Path], world: World
) -> None:
    lend = liger_on_a_cpu() if typed else nullcontext()
    with lend, pytest.raises(UsageError, match=f"head='liger' {why}. Try: head='chunks'"):
        choose(world, folders["labels through the model"], "--head", "liger", *typed.split())


def test_liger_s_loss_knows_no_scale_of_logits() -> None:
    scaled = HeadForm(kind=Head.LIGER, steps=(LogitStep(function="mul", numbers=(0.125,)),))
    actor, measure = spec_of(["--backend", "fsdp2"]).actor, spec_of([]).measure
    obstacle = head_choice.find_liger_obstacle(measure, actor, scaled, None)
    assert obstacle == (ChosenBy.MODEL, "does not know what the model does to its logits (mul 0.125)")


@pytest.mark.parametrize(("spare", "form"), [(1, Head.WHOLE), (0, Head.CHUNKS)])
def test_a_form_that_nobody_knows_is_chosen_by_bytes(
    spare: int, form: Head, folders: dict[str, Path], world: World
) -> None:
    """By hand: 24 tokens of 64 logits, two in fp32 and two in the compute dtype, which is fp32."""
    needed = 24 * 64 * (4 + 4 + 4 + 4)
    resolved, selection = resolve_inputs(world, folders["outputs not recorded"], "--dtype", "fp32")
    held = int(sum(compute_declared_bytes(resolved.source.config, resolved.actor, resolved.measure, 1).values()))
    choice = head_choice.choose_by_bytes(
        resolved.actor,
        resolved.measure,
        resolved.source,
        selection,
        num_data_ranks=1,
        device_bytes=held + 2 * needed + spare,
    )
    assert (choice.value, choice.by) == (form, ChosenBy.MACHINE)
    assert ("less than half" in choice.why, "more than half" in choice.why) == (form is Head.WHOLE, form is Head.CHUNKS)


def test_bytes_are_those_of_the_largest_pass(folders: dict[str, Path]) -> None:
    rounds = [SimpleNamespace(most_real_tokens=real, most_padded_tokens=24) for real in (3, 20, 7)]
    selection: Any = SimpleNamespace(rounds=rounds)
    source: Any = SimpleNamespace(config=LlamaConfig(**SIZES), layout_under=lambda actor: SimpleNamespace(packs=True))
    actor = spec_of(["--dtype", "bf16", "--backend", "fsdp2"]).actor
    assert head_choice.predict_logits_bytes(actor, source, selection) == 20 * 64 * (2 + 2 + 4 + 4)
    halves = replace(actor, parallel=replace(actor.parallel, ring=2))
    assert head_choice.predict_logits_bytes(halves, source, selection) == 10 * 64 * (2 + 2 + 4 + 4)


def test_a_process_counts_on_its_share_of_its_own_host_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of eight ranks on two hosts share the memory of this one."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert head_choice.measure_device_bytes(torch.device("cpu")) == host_bytes // 4


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("--deepcompile", "DeepCompile's graph is the whole model"),
        ("--trace", "the trace holds them"),
    ],
)
def test_what_needs_whole_logits_gets_them_and_refuses_another_form(
    typed: str, why: str, folders: dict[str, Path], world: World
) -> None:
    form, choice = choose(world, folders["loss in chunks"], typed)
    assert (form.kind, form.why, choice.by) == (Head.WHOLE, why, ChosenBy.OPTION)
    with pytest.raises(UsageError, match=f"head='chunks' is no form of this run.* {why}. Try: head='whole'"):
        choose(world, folders["loss in chunks"], typed, "--head", "chunks")


def test_a_model_that_has_no_chunks_keeps_whole_logits_and_says_so(
    folders: dict[str, Path], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_forward = LlamaForCausalLM.forward

    def forward(self: LlamaForCausalLM, *args: Any, **kwargs: Any) -> Any:
        output = own_forward(self, *args, **kwargs)
        output.logits = output.logits.flip(-1)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    form, choice = choose(world, folders["loss in chunks"])
    assert (form.kind, choice.by) == (Head.WHOLE, ChosenBy.MODEL)
    assert form.why == choice.why == "the model does flip with its head's logits"
    with pytest.raises(UsageError, match=r"the model does flip with its head's logits\. Try: head='whole'"):
        choose(world, folders["loss in chunks"], "--head", "chunks")


@pytest.mark.usefixtures("one_world", "proofs_once")
@pytest.mark.parametrize("name", ["labels through the model", "own cross entropy", "loss in chunks", "Liger's loss"])
def test_each_form_gives_the_job_s_numbers(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The job's loss is torch's of the job's own model, and its gradients are recorded: the verdict judges them."""
    inputs, model = tmp_path / "inputs", make_model()
    job = JOBS[name]
    model.save_pretrained(tmp_path / "model")
    loss = job.record(inputs)
    shared = ["--backend", "ddp", "--inputs", str(inputs), "--model", str(tmp_path / "model"), "--loss", "sft"]
    shared += ["--verdict", "strict"]
    job_form = Head.LIGER if name == "Liger's loss" else job.form
    for typed in ("auto", "whole", "chunks", "liger"):
        words = KIND_WORDS[job_form if typed == "auto" else Head(typed)]
        words += " (the job" if typed == "auto" else f" (--head {typed})"
        logs = tmp_path / typed
        with liger_on_a_cpu():
            assert replay_main([*shared, "--head", typed, "--log-folder", str(logs)]) == 0
        assert f"head       {words}" in capsys.readouterr().out
        [run], [lines] = logs.glob("*/run.json"), logs.glob("*/rank0.jsonl")
        written = json.loads(run.read_text())
        assert written["facts"]["head"].startswith(words)
        assert written["verdict"]["outcome"] == "REPRODUCED"
        assert json.loads(lines.read_text().splitlines()[0])["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("one_world", "proofs_once")
@pytest.mark.parametrize(
    ("name", "typed"),
    [("compiled loss, noted", ""), ("own cross entropy", "--compile"), ("own cross entropy", "--trace")],
)
def test_a_loss_is_compiled_where_the_job_s_was_and_where_blocks_are(
    name: str, typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model().save_pretrained(tmp_path / "model")
    loss = JOBS[name].record(tmp_path / "inputs")
    words = ["--backend", "fsdp2", "--inputs", str(tmp_path / "inputs"), "--model", str(tmp_path / "model")]
    words += [*typed.split(), "--loss", "sft", "--verdict", "strict", "--log-folder", str(tmp_path / "logs")]
    with graphs_alone(), patch.object(whole_logits, "compile_function", wraps=compile_function) as compiles:
        whole_logits.compile_losses.cache_clear()
        assert replay_main(words) == 0
    is_compiled = typed != "--trace"
    assert compiles.called == is_compiled
    assert ("whole logits, the loss compiled (" in capsys.readouterr().out) == is_compiled
    [lines] = (tmp_path / "logs").glob("*/rank0.jsonl")
    assert json.loads(lines.read_text().splitlines()[0])["loss"] == pytest.approx(loss, rel=1e-6)
