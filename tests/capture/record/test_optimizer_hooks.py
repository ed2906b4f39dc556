"""What a recording keeps of optimizer steps: the gradients that autograd gives for the same passes, in any sharding."""

import functools
import gc
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from inspect import getmembers, isfunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate
from torch.nn.utils import clip_grad_norm_ as imported_before
from torch.optim import optimizer as torch_optimizer

from capture import capture_files, recording
from capture.file_format.capture_file import CapturedCall, read_call
from capture.file_format.end_record import read_end_records
from capture.file_format.gradient_signature import MAX_SIGNATURE_ELEMENTS, GradientSignature
from capture.file_format.optimizer_state import StateSample
from capture.file_format.optimizer_step import (
    OptimizerStep,
    ParameterSamples,
    Sample,
    choose_sampled_tokens,
    merge_steps,
    parse_numbers,
)
from capture.folder_tools.redact import TokenRedaction, redact_folder
from capture.record.optimizer_hooks import OptimizerHooks, RunningStepHook
from capture.record.parameter_sampler import NUM_PER_STEP, ParameterSampler
from capture.record.recorder import Recorder
from capture.record.sharding import copy_local_norm
from tests.helpers.ranks import run_ranks
from tests.helpers.stepping_job import MAX_NORM, NUM_BATCHES
from tests.trainers.common import make_batches, make_model

ROOT = Path(__file__).resolve().parents[3]
IDS_BS = torch.tensor([[0, 5, 9, 7], [3, 3, 0, 1]])


class Model(nn.Module):
    """Answers as transformers' models do; its second head is of no use."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(num_layers))
        self.head = nn.Linear(6, 16)
        self.other_head = nn.Linear(6, 2)

    def forward(self, input_ids: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        logits_BSV = self.head(hidden)
        flat = logits_BSV[:, :-1].reshape(-1, 16)
        return {"loss": scale * nn.functional.cross_entropy(flat, input_ids[:, 1:].reshape(-1)), "logits": logits_BSV}


@pytest.fixture(autouse=True)
def nothing_is_left_in_torch() -> Iterator[None]:
    modules = nn.utils, nn.utils.clip_grad
    before = [getmembers(module, isfunction) for module in modules]
    yield
    assert before == [getmembers(module, isfunction) for module in modules]
    assert not torch_optimizer._global_optimizer_pre_hooks


def read_calls(folder: Path) -> list[CapturedCall]:
    return [read_call(path) for path in capture_files(folder)]


def read_steps(folder: Path) -> list[OptimizerStep]:
    return [call.step for call in read_calls(folder) if call.step is not None]


def compute_gradients(*passes: Callable[[Model], Tensor], model: Model | None = None) -> dict[str, Tensor]:
    """By autograd, of the sum of what the passes return, for a model of its own."""
    model = model or Model()
    torch.stack([run_pass(model) for run_pass in passes]).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def find_sampled_values(sample: Sample, whole: Tensor) -> list[float]:
    return whole.detach().flatten()[sample.start : sample.start + len(sample.values)].double().tolist()


def find_signed_values(signature: GradientSignature, whole: Tensor) -> list[float]:
    values: Tensor = whole.detach().flatten()[signature.start :: signature.stride][: len(signature.values)]
    return values.double().tolist()


def assert_samples_are(step: OptimizerStep, expected: dict[str, Tensor], rel: float = 1e-6) -> None:
    assert step.gradients is not None
    assert {sample.name for sample in step.gradients.samples} == expected.keys()
    for sample in step.gradients.samples:
        assert sample.shape == tuple(expected[sample.name].shape)
        found = find_sampled_values(sample, expected[sample.name])
        assert sample.values == pytest.approx(found, rel=rel, abs=1e-9), sample.name
    assert {signature.name for signature in step.signatures} == expected.keys()
    for signature in step.signatures:
        whole = expected[signature.name]
        assert (signature.shape, signature.is_part) == (tuple(whole.shape), False)
        assert signature.norm == pytest.approx(float(whole.norm()), rel=1e-5)
        assert signature.values == pytest.approx(find_signed_values(signature, whole), rel=rel, abs=1e-9)
        assert len(signature.values) == min(whole.numel(), MAX_SIGNATURE_ELEMENTS)


def compute_norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def compute_loss(model: nn.Module, ids_BS: Tensor = IDS_BS, **more: Any) -> Tensor:
    loss: Tensor = model(ids_BS, **more)["loss"]
    return loss


def clip_in_two(model: nn.Module) -> None:
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    nn.utils.clip_grads_with_norm_(list(model.parameters()), 0.01, norm)


def clip_after_measuring(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


CLIPPING: dict[str, tuple[Callable[[nn.Module], Any], float | None]] = {
    "not": (lambda model: None, None),
    "by torch.nn.utils": (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01), 0.01),
    "by a name imported before": (lambda model: imported_before(list(model.parameters()), max_norm=0.01), 0.01),
    "in two calls": (clip_in_two, 0.01),
    "after its norm was measured by a limit of infinity": (clip_after_measuring, 0.01),
    "by a norm that is never reached": (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e9), 1e9),
}


@pytest.mark.parametrize("given", ["by place", "by name"])
def test_a_step_that_is_given_its_pass_as_a_closure_has_that_pass(given: str, tmp_path: Path) -> None:
    """As Lightning steps: the closure empties the gradients, and runs forward, backward and clipping."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = compute_loss(model)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return loss.item()

    with recording(model, tmp_path, reproduce=True):
        losses = [optimizer.step(closure) if given == "by place" else optimizer.step(closure=closure) for _ in "ab"]
    first, second = read_steps(tmp_path)
    assert [(step.number, step.passes, step.max_norm) for step in (first, second)] == [(0, (0,), 0.01), (1, (1,), 0.01)]
    assert_samples_are(first, compute_gradients(compute_loss), rel=0)
    assert losses == [call.outputs["loss"] for call in read_calls(tmp_path)]


@pytest.mark.parametrize(("error", "passes"), [(KeyboardInterrupt, (0, 2)), (ValueError, (0, 1, 2))])
def test_a_forward_that_never_ended_is_no_pass_of_its_step(
    error: type[BaseException], passes: tuple[int, ...], tmp_path: Path
) -> None:
    """In a notebook a job goes on after an interrupt. torch calls a hook at the end of a forward that fails alone."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(module: nn.Module, args: Any) -> None:
        raise error

    with recording(model, tmp_path, reproduce=True):
        compute_loss(model).backward()
        hook = model.register_forward_pre_hook(fail)
        with pytest.raises(error):
            compute_loss(model)
        hook.remove()
        compute_loss(model).backward()
        optimizer.step()
    assert [(step.number, step.passes) for step in read_steps(tmp_path)] == [(0, passes)]


def test_a_recording_that_a_closure_opens_is_told_of_its_step(tmp_path: Path) -> None:
    """As under `capture run`, which opens it in the first pass."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late, opened = RunningStepHook(), list[Recorder]()

    def closure() -> Tensor:
        if not opened:
            opened.append(recording(model, tmp_path, reproduce=True))
        optimizer.zero_grad()
        loss = compute_loss(model)
        loss.backward()
        return loss

    optimizer.step(closure)
    late.remove()
    optimizer.step(closure)
    opened[0].close()
    assert [(step.number, step.passes) for step in read_steps(tmp_path)] == [(0, (0,)), (1, (1,))]
    assert_samples_are(read_steps(tmp_path)[0], compute_gradients(compute_loss), rel=0)


class Both(torch.autograd.Function):
    """Passes two tensors through, as DDP does: the gradient of one that nobody differentiates is None."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return loss.clone(), logits.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return gradients


class AsTuple(Model):
    """Answers as nanoGPT does, after DDP."""

    def forward(self, input_ids: Tensor, scale: float = 1.0) -> Any:
        output = super().forward(input_ids, scale)
        loss, logits = Both.apply(output["loss"], output["logits"])
        return logits, loss, torch.tensor(3)


def test_loss_and_logits_in_a_tuple_are_found(tmp_path: Path) -> None:
    named, model = Model(), AsTuple()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(named, tmp_path / "named", reproduce=True), recording(model, tmp_path / "tuple", reproduce=True):
        named(IDS_BS)
        (0.5 * model(IDS_BS)[1]).backward()
        optimizer.step()
    [expected], [found] = read_calls(tmp_path / "named"), read_calls(tmp_path / "tuple")
    assert found.outputs["loss"] == expected.outputs["loss"]
    assert found.outputs["token_log_probs"] == expected.outputs["token_log_probs"]
    assert found.step is not None
    assert found.step.shares == (0.5,)


def test_a_loss_that_nobody_differentiates_has_no_share_and_ends_nothing(tmp_path: Path) -> None:
    model = AsTuple()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path, reproduce=True):
        model(IDS_BS)[0].square().mean().backward()
        optimizer.step()
    [step] = read_steps(tmp_path)
    assert step.shares == (None,)


def test_hidden_states_are_no_logits(tmp_path: Path) -> None:
    """Without a name they are told apart by the size of the vocabulary."""
    model = nn.Sequential(nn.Embedding(16, 6))
    with recording(model, tmp_path, reproduce=True, arguments={"input": "input_ids"}):
        model(IDS_BS)
    [call] = read_calls(tmp_path)
    assert "token_log_probs" not in call.outputs


@pytest.mark.parametrize("clipping", CLIPPING)
def test_a_step_has_the_gradients_of_its_passes_as_they_were_before_clipping(clipping: str, tmp_path: Path) -> None:
    clip, max_norm = CLIPPING[clipping]
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with recording(model, tmp_path, reproduce=True):
        compute_loss(model).backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        model(IDS_BS)
    first, second = read_calls(tmp_path)
    assert (first.optimizer_step, second.optimizer_step, second.step) == (0, 1, None)
    expected = compute_gradients(compute_loss)
    step = first.step
    assert step is not None
    assert_samples_are(step, expected, rel=0)
    assert set(step.without_gradient) == {"other_head.weight", "other_head.bias"}
    assert (step.number, step.passes, step.shares, step.max_norm) == (0, (0,), (1.0,), max_norm)
    assert (step.num_clipped, step.is_part_of_norm, step.is_unclipped, step.has_state) == (None, False, True, False)
    assert step.grad_norm == (None if max_norm is None else pytest.approx(compute_norm(expected), rel=1e-6))
    assert first.outputs.get("grad_norm") == step.grad_norm


def test_clipping_of_another_kind_leaves_the_gradients_and_says_no_norm(tmp_path: Path) -> None:
    for kind in ("by value", "by the largest"):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with recording(model, tmp_path / kind, reproduce=True):
            compute_loss(model).backward()
            if kind == "by value":
                nn.utils.clip_grad_value_(model.parameters(), 1e-4)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-4, norm_type=math.inf)
            optimizer.step()
            optimizer.zero_grad()
            compute_loss(model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
            optimizer.step()
        step, later = read_steps(tmp_path / kind)
        assert_samples_are(step, compute_gradients(compute_loss), rel=0)
        assert (step.grad_norm, step.max_norm, step.is_unclipped, step.clips_early) == (None, None, True, False)
        assert (step.clips_otherwise, later.clips_otherwise) == (True, False)
        order = None if kind == "by value" else math.inf
        assert (step.clippings, later.clippings) == (((order, 1e-4),), ())


def test_a_clipping_by_value_after_one_by_norm_is_told(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, tmp_path, reproduce=True):
        compute_loss(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        optimizer.step()
    [step] = read_steps(tmp_path)
    assert (step.max_norm, step.clips_otherwise) == (1e-2, True)
    assert step.clippings == ((2.0, 1e-2), (None, 1e-4))


@pytest.mark.parametrize("kind", ["of a part", "before the last pass"])
def test_clippings_of_a_part_of_a_steps_gradient_are_not_listed(tmp_path: Path, kind: str) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, tmp_path, reproduce=True):
        compute_loss(model).backward()
        nn.utils.clip_grad_value_(list(model.parameters())[: 1 if kind == "of a part" else None], 1e-4)
        if kind == "before the last pass":
            compute_loss(model).backward()
        optimizer.step()
    [step] = read_steps(tmp_path)
    assert (step.clips_otherwise, step.clippings) == (True, ())


def clip_as_before_torch_2_6() -> Callable[..., Tensor]:
    """torch 2.4's `clip_grad_norm_`: one function that measures and clips, in a decorator that closes over it."""

    def no_grad(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(func)
        def decorated(*args: Any, **kwargs: Any) -> Tensor:
            with torch.no_grad():
                return func(*args, **kwargs)

        return decorated

    @no_grad
    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm: Tensor = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g, norm_type) for g in grads]), norm_type
        )
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    return clip_grad_norm_


def put_older_clipping(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have torch clip as before 2.6, and return the function that does."""
    older = clip_as_before_torch_2_6()
    for module in (nn.utils.clip_grad, nn.utils):
        monkeypatch.setattr(module, "clip_grad_norm_", older)
        monkeypatch.delattr(module, "_clip_grads_with_norm_", raising=False)
        monkeypatch.delattr(module, "_get_total_norm", raising=False)
    return older


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("by_name", [False, True], ids=["looked up in torch", "imported before"])
def test_clipping_by_an_older_torch_is_seen_where_the_job_looks_it_up(
    by_name: bool, norm_type: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that was imported before is left alone: its norm has to be noted, and nobody says "unclipped"."""
    older = put_older_clipping(monkeypatch)
    torchs = nn.utils.clip_grad
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = compute_gradients(compute_loss)
    with recording(model, tmp_path, reproduce=True) as recorder:
        compute_loss(model).backward()
        norm = (older if by_name else nn.utils.clip_grad_norm_)(model.parameters(), 0.01, norm_type)
        optimizer.step()
        if by_name:
            recorder.note(grad_norm=norm)
    assert nn.utils.clip_grad_norm_ is torchs.clip_grad_norm_ is older
    monkeypatch.undo()
    [step] = read_steps(tmp_path)
    if by_name:
        assert step.grad_norm == pytest.approx(float(norm))
        assert (step.max_norm, step.is_unclipped) == (None, False)
        return
    assert_samples_are(step, expected, rel=0)
    seen = (pytest.approx(compute_norm(expected), rel=1e-6), 0.01) if norm_type == 2 else (None, None)
    assert (step.grad_norm, step.max_norm) == seen
    assert step.is_unclipped


@pytest.mark.parametrize("sees_all", [True, False])
def test_gradients_are_unclipped_only_where_a_clipping_would_have_been_seen(
    sees_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sees_all:
        put_older_clipping(monkeypatch)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, tmp_path, reproduce=True):
        compute_loss(model).backward()
        optimizer.step()
    monkeypatch.undo()
    assert [step.is_unclipped for step in read_steps(tmp_path)] == [sees_all]


def test_passes_have_the_shares_that_the_job_gave_them(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    windows = [[0.5, 0.5], [0.25, 0.75], [1.0]]
    with recording(model, tmp_path, reproduce=True):
        for window in windows:
            for number, share in enumerate(window):
                (share * compute_loss(model, IDS_BS + number)).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = read_calls(tmp_path)
    assert [call.optimizer_step for call in found] == [0, 0, 1, 1, 2]
    assert [call.step.number if call.step else None for call in found] == [None, 0, None, 1, 2]
    assert [step.shares for step in read_steps(tmp_path)] == [tuple(window) for window in windows]
    assert [step.passes for step in read_steps(tmp_path)] == [(0, 1), (2, 3), (4,)]
    for step, window in zip(read_steps(tmp_path), windows, strict=True):
        shares = enumerate(window)
        assert_samples_are(
            step, compute_gradients(*[lambda m, n=n, s=s: s * compute_loss(m, IDS_BS + n) for n, s in shares])
        )


def test_two_passes_before_one_backward_and_a_loss_that_the_loop_computed(tmp_path: Path) -> None:
    """The second pass has no share: what was differentiated is not known to be its loss."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path, reproduce=True):
        chosen, rejected = model(IDS_BS), model(IDS_BS + 1)
        (3 * chosen["loss"] + rejected["logits"].square().mean()).backward()
        optimizer.step()
    [step] = read_steps(tmp_path)
    assert (step.passes, step.shares) == ((0, 1), (3.0, None))


def test_other_models_optimizers_and_clippings_are_none_of_ours(tmp_path: Path) -> None:
    model, other = Model(), Model()
    mine, others = (torch.optim.SGD(trained.parameters(), lr=0.1) for trained in (model, other))
    with recording(model, tmp_path, reproduce=True):
        (compute_loss(model) + compute_loss(other)).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.01)
        others.step()
        mine.step()
        model(IDS_BS)
    [step] = read_steps(tmp_path)
    assert (step.grad_norm, step.number) == (None, 0)
    assert_samples_are(step, compute_gradients(compute_loss), rel=0)


def test_two_optimizers_of_one_model_are_one_step(tmp_path: Path) -> None:
    model = Model()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    optimizers = [torch.optim.AdamW(matrices, lr=1e-3), torch.optim.SGD(vectors, lr=1e-2, nesterov=True, momentum=0.5)]
    with recording(model, tmp_path, reproduce=True):
        for _ in range(2):
            compute_loss(model).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    first, second = read_steps(tmp_path)
    assert_samples_are(first, compute_gradients(compute_loss), rel=0)
    assert (first.number, second.number, first.optimizer) == (0, 1, "AdamW, SGD")
    assert [(group["num_parameters"], group["lr"]) for group in first.settings] == [(5, 1e-3), (4, 1e-2)]
    assert [(group["optimizer"], group["library"]) for group in first.settings] == [
        ("AdamW", "torch"),
        ("SGD", "torch"),
    ]
    assert {key for sample in second.state for key in sample.values} == {"exp_avg", "exp_avg_sq", "momentum_buffer"}
    # Each optimizer has one group, and which parameters it has is known all the same.
    numbers = [set(parse_numbers(group["parameters"])) for group in first.settings]
    assert numbers == [
        {number for number, p in enumerate(model.parameters()) if (p.ndim > 1) is wanted} for wanted in (True, False)
    ]
    assert len(first.without_gradient) == 2


def test_an_optimizers_settings_are_kept_by_group(tmp_path: Path) -> None:
    model = Model()
    decayed, others = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": decayed[:2]}, {"params": decayed[2:]}]
    groups += [{"params": others, "weight_decay": 0.0, "lr": torch.tensor(0.5)}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
    with recording(model, tmp_path, reproduce=True):
        for _ in range(2):
            compute_loss(model).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 2e-3
    first, second = read_steps(tmp_path)
    assert (first.has_state, second.has_state) == (False, True)
    assert [group["lr"] for group in first.settings] == [1e-3, 0.5]
    assert [group["num_parameters"] for group in first.settings] == [5, 4]
    assert [group["lr"] for group in second.settings] == [2e-3, 1e-3, 0.5]
    for group in first.settings:
        assert (group["betas"], group["eps"], group["maximize"]) == ([0.8, 0.95], 1e-6, False)


def test_a_large_model_is_sampled_in_turns_weights_and_gradients_alike(tmp_path: Path) -> None:
    model = Model(num_layers=60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path, reproduce=True):
        for _ in range(3):
            for _ in range(2):
                compute_loss(model, scale=100.0).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = read_calls(tmp_path)
    sampled = [{sample.name for sample in call.weights.samples} for call in found if call.weights is not None]
    assert [len(names) for names in sampled] == [125, 8, NUM_PER_STEP, 8, NUM_PER_STEP, 8]
    seen: set[str] = set()
    for begin, end in ((0, 1), (2, 3), (4, 5)):
        step = found[end].step
        assert step is not None
        assert step.gradients is not None
        names = {sample.name for sample in step.gradients.samples}
        assert names | (set(step.without_gradient) & sampled[begin]) == sampled[begin]
        # The step is signed, so it names all of them.
        assert set(step.without_gradient) == {"other_head.weight", "other_head.bias"}
        assert len(step.signatures) == 123
        seen |= names if begin else set()
    # Each later step samples sixteen others.
    assert len(seen) == 2 * NUM_PER_STEP


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_step_that_a_scaler_leaves_out_is_none(
    tmp_path: Path, fused: bool, set_to_none: bool, unscales: bool
) -> None:
    """A fused optimizer is called all the same, with gradients that are scaled if the loop has not unscaled them."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with recording(model, tmp_path, reproduce=True):
        for number in range(4):
            scaler.scale(compute_loss(model, IDS_BS + number) * (math.inf if number == 1 else 1)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)
    steps = read_steps(tmp_path)
    assert [(step.number, step.passes) for step in steps] == [(0, (0,)), (1, (2,)), (2, (3,))]
    assert [step.state_steps for step in steps] == [(), (1,), (2,)]
    assert [call.optimizer_step for call in read_calls(tmp_path)] == [0, 1, 1, 2]
    for number, step in zip([0, 2, 3], steps, strict=True):
        own = compute_gradients(lambda m, number=number: compute_loss(m, IDS_BS + number))  # type: ignore[misc]
        assert_samples_are(step, own, rel=1e-6)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_step_that_a_scaler_leaves_out_for_one_of_two_optimizers_is_the_others(
    tmp_path: Path, is_first: bool
) -> None:
    model = Model()
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("head")]
    of_head, of_rest = (torch.optim.AdamW(group, lr=0.0, fused=True) for group in (model.head.parameters(), rest))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with recording(model, tmp_path, reproduce=True):
        for number in range(3):
            scaler.scale(compute_loss(model)).backward()
            if number == 1:
                assert model.head.weight.grad is not None
                model.head.weight.grad.fill_(math.inf)
            for optimizer in (of_head, of_rest) if is_first else (of_rest, of_head):
                scaler.step(optimizer)
            scaler.update()
            of_head.zero_grad()
            of_rest.zero_grad()
    steps = read_steps(tmp_path)
    assert [(step.number, step.passes) for step in steps] == [(0, (0,)), (1, (1,)), (2, (2,))]
    has_head = [
        any(sample.name.startswith("head") for sample in step.gradients.samples) for step in steps if step.gradients
    ]
    assert has_head == [True, False, True]


def test_a_step_that_the_job_left_out_is_none(tmp_path: Path) -> None:
    """As fp16's scaler does: the gradients are emptied, and the optimizer is not called."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path, reproduce=True):
        for number in range(3):
            compute_loss(model, IDS_BS + number).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if number != 1:
                optimizer.step()
            optimizer.zero_grad()
    assert [(step.number, step.passes) for step in read_steps(tmp_path)] == [(0, (0,)), (1, (2,))]
    assert_samples_are(read_steps(tmp_path)[1], compute_gradients(lambda m: compute_loss(m, IDS_BS + 2)), rel=0)


@pytest.mark.parametrize("is_by_micro_batch", [False, True])
def test_schedule_steps_are_counted(tmp_path: Path, is_by_micro_batch: bool) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    with recording(model, tmp_path, reproduce=True):
        for _ in range(3):
            for _ in range(2):
                compute_loss(model).backward()
                if is_by_micro_batch:
                    schedule.step()
            optimizer.step()
            if not is_by_micro_batch:
                schedule.step()
            optimizer.zero_grad()
    assert [step.num_schedule_steps for step in read_steps(tmp_path)] == ([2, 2, 2] if is_by_micro_batch else [0, 1, 1])


def test_the_schedule_steps_that_accelerate_takes_for_each_rank_are_not_counted(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    linear = torch.optim.lr_scheduler.LinearLR(optimizer)
    schedule = AcceleratedScheduler(linear, [optimizer], step_with_optimizer=False)
    with recording(model, tmp_path, reproduce=True):
        for _ in range(2):
            compute_loss(model).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    steps = read_steps(tmp_path)
    assert [step.num_schedule_steps for step in steps] == [0, 0]
    assert [step.schedule_count for step in steps] == [None, 1]


@pytest.mark.parametrize("kind", ["plain", "chained", "sequential"])
def test_a_schedule_has_counted_the_steps_before_the_recording_too(tmp_path: Path, kind: str) -> None:
    """Schedules that are made of others are stepped once a step, and count as a whole."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    schedule: Any = {
        "plain": lambda: parts[0],
        "chained": lambda: torch.optim.lr_scheduler.ChainedScheduler(parts),
        "sequential": lambda: torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2]),
    }[kind]()
    for _ in range(3):
        optimizer.step()
        schedule.step()
    with recording(model, tmp_path, reproduce=True):
        for _ in range(3):
            compute_loss(model).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    steps = read_steps(tmp_path)
    assert [step.schedule_count for step in steps] == [None, 4, 5]
    assert [step.num_schedule_steps for step in steps] == [0, 1, 1]


def test_what_was_clipped_before_the_last_pass_is_said_to_be(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path, reproduce=True):
        for clips_at_the_end in (True, False):
            for number in range(2):
                compute_loss(model).backward()
                if clips_at_the_end or not number:
                    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    first, second = read_steps(tmp_path)
    assert first.clips_early
    assert second.clips_early
    assert (first.is_unclipped, first.max_norm) == (False, 0.01)
    assert first.grad_norm is not None
    assert first.grad_norm > norm
    assert (second.is_unclipped, second.grad_norm) == (False, None)


@pytest.mark.parametrize(("limit", "said"), [(0.01, 0.01), (math.inf, None)])
def test_a_clipping_that_finds_no_gradient_is_none_and_its_limit_is_kept(
    limit: float, said: float | None, tmp_path: Path
) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path, reproduce=True):
        for clips_early in (True, False):
            loss = compute_loss(model)
            if clips_early:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    early, later = read_steps(tmp_path)
    assert (early.unapplied_norm, early.max_norm, early.grad_norm, early.clips_early) == (said, None, None, False)
    assert_samples_are(early, compute_gradients(compute_loss), rel=0)
    assert later.unapplied_norm is None


def test_steps_without_a_forward_of_the_recorded_model_are_counted(tmp_path: Path) -> None:
    """As where a loop calls the module inside a wrapper from some step on: no hook sees these forwards."""
    model = Model()
    optimizer = torch.optim.Adam(model.embedding.parameters(), lr=0.1)
    other = torch.optim.Adam(model.layers.parameters(), lr=0.1)
    with recording(model, tmp_path, reproduce=True) as recorder:
        for forward in (model, model.forward, model.forward, model):
            optimizer.zero_grad()
            other.zero_grad()
            forward(IDS_BS)["loss"].backward()
            optimizer.step()
            if forward is model:
                other.step()
        assert recorder.num_unseen_steps == 2
        # Without a gradient nothing is trained.
        optimizer.zero_grad()
        optimizer.step()
    assert recorder.num_unseen_steps == 2
    [end] = read_end_records(tmp_path)
    assert (end.num_unseen_steps, end.unseen_after) == (2, 0)
    first, second = read_steps(tmp_path)
    assert (first.has_state, first.state_steps) == (False, ())
    assert second.state_steps == (1, 3)


@pytest.mark.parametrize(
    ("calls", "number"),
    [
        (("step", "clip"), 2),
        (("step", "zero_grad", "clip"), 2),
        (("step", "clip", "clip"), 2),
        (("clip", "step"), 0),
        (("clip", "step", "clip"), 0),
        (("step", "measure"), 0),
        # Another optimizer's gradients are clipped before its own step.
        (("step", "clip_other", "step_other"), 0),
        # By value the gradients were clipped before the step, and by norm after it.
        (("clip_value", "step", "clip"), 0),
        (("measure", "step", "clip"), 0),
    ],
)
def test_steps_whose_gradients_are_clipped_after_them_are_counted(
    calls: Sequence[str], number: int, tmp_path: Path
) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.0)
    other = torch.optim.SGD(model.embedding.parameters(), lr=0.0)
    actions: dict[str, Callable[[], object]] = {
        "step": optimizer.step,
        "step_other": other.step,
        "zero_grad": optimizer.zero_grad,
        "clip": lambda: nn.utils.clip_grad_norm_(model.layers.parameters(), 0.1),
        "clip_other": lambda: nn.utils.clip_grad_norm_(model.embedding.parameters(), 0.1),
        "clip_value": lambda: nn.utils.clip_grad_value_(model.layers.parameters(), 0.1),
        "measure": lambda: nn.utils.clip_grad_norm_(model.layers.parameters(), math.inf),
    }
    with recording(model, tmp_path, reproduce=True):
        for _ in range(2):
            compute_loss(model).backward()
            for call in calls:
                actions[call]()
            optimizer.zero_grad()
    assert sum(end.num_late_clippings for end in read_end_records(tmp_path)) == number


@pytest.mark.parametrize(("clips_all", "said"), [(False, 0.5), (True, None)])
@pytest.mark.filterwarnings("ignore:.*empty generator")
def test_a_clipping_that_is_given_no_parameter_is_kept_unless_another_clips(
    clips_all: bool, said: float | None, tmp_path: Path
) -> None:
    """The optimizer has used up the generator of the parameters."""
    model = Model()
    parameters = (parameter for parameter in model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    with recording(model, tmp_path, reproduce=True):
        compute_loss(model).backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        if clips_all:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    [step] = read_steps(tmp_path)
    assert (step.unapplied_norm, step.max_norm) == (said, 0.01 if clips_all else None)


def test_a_norm_that_was_measured_before_the_last_pass_is_no_clipping(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path, reproduce=True):
        for limits in ((math.inf, 0.01), (math.inf, None)):
            for limit in limits:
                compute_loss(model).backward()
                if limit is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
    for step, max_norm in zip(read_steps(tmp_path), (0.01, None), strict=True):
        assert_samples_are(step, compute_gradients(compute_loss, compute_loss), rel=1e-6)
        assert (step.is_unclipped, step.max_norm, step.grad_norm is None) == (True, max_norm, max_norm is None)


def test_a_norm_that_the_job_notes_is_the_steps_where_no_other_is_known(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path, reproduce=True) as recorder:
        for number in range(4):
            compute_loss(model).backward()
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if number >= 2:
                recorder.note(grad_norm=5.0)
            optimizer.step()
            if number < 2:
                recorder.note(grad_norm=5.0)
            optimizer.zero_grad()
    found = read_steps(tmp_path)
    own = pytest.approx(compute_norm(compute_gradients(compute_loss)), rel=1e-6)
    assert [step.grad_norm for step in found] == [5.0, own, 5.0, own]
    assert [step.is_unclipped for step in found] == [False, True, False, True]
    assert [call.outputs["grad_norm"] for call in read_calls(tmp_path)] == [5.0] * 4


def test_a_part_of_a_model_that_was_clipped(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path, reproduce=True):
        compute_loss(model).backward()
        nn.utils.clip_grad_norm_(model.head.parameters(), 0.01)
        optimizer.step()
    [step] = read_steps(tmp_path)
    assert step.num_clipped == 2
    assert_samples_are(step, compute_gradients(compute_loss), rel=0)


def test_passes_that_are_not_kept_count(tmp_path: Path) -> None:
    """Every fourth pass of windows of two: the second window has none that is kept, and its step is in no file."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path, reproduce=True, every=4):
        for number in range(8):
            compute_loss(model).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    found = read_calls(tmp_path)
    assert [call.optimizer_step for call in found] == [0, 2]
    assert [(step.number, step.passes) for step in read_steps(tmp_path)] == [(0, (0, 1)), (2, (4, 5))]
    assert [len(call.weights.samples) for call in found if call.weights] == [9, 9]


@pytest.mark.parametrize("holds_passes", [True, False])
def test_a_step_is_in_the_last_training_pass_before_it_that_is_not_written_yet(
    holds_passes: bool, tmp_path: Path
) -> None:
    """Without a flight recorder the training pass is written when the rollout behind it begins."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path, reproduce=True, flight_recorder=9 if holds_passes else None) as recorder:
        for _ in range(2):
            compute_loss(model).backward()
            with torch.no_grad():
                model(IDS_BS)
            optimizer.step()
            optimizer.zero_grad()
        recorder.note(loss=math.nan)
    calls = read_calls(tmp_path)
    assert [(call.trains, call.optimizer_step) for call in calls] == [(True, 0), (False, 0), (True, 1), (False, 1)]
    passes = [None if call.step is None else call.step.passes for call in calls]
    assert passes == ([(0,), None, (2,), None] if holds_passes else [None, (0,), None, (2,)])


def test_the_rings_passes_have_their_steps(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path, flight_recorder=3) as recorder:
        for _ in range(5):
            compute_loss(model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        recorder.flush()
        recorder.note(loss=math.nan)
    assert [step.number for step in read_steps(tmp_path)] == [2, 3, 4]
    for step in read_steps(tmp_path):
        assert_samples_are(step, compute_gradients(compute_loss), rel=0)


def test_a_norm_that_is_not_finite_is_an_incident_without_code(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path, flight_recorder=3):
        compute_loss(model).mul(math.inf).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert len(capture_files(tmp_path)) == 1
    [record] = tmp_path.glob("incidents_*.json")
    assert record.read_text().count('"not finite"') == 1


def test_a_plain_recording_keeps_no_steps_and_hooks_nothing(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path):
        assert not torch_optimizer._global_optimizer_pre_hooks
        compute_loss(model).backward()
        optimizer.step()
    [call] = read_calls(tmp_path)
    assert (call.optimizer_step, call.step, "token_log_probs" in call.outputs) == (None, None, False)


def test_a_failure_with_a_step_is_one_warning_and_the_passes_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of bounds")

    monkeypatch.setattr(ParameterSampler, "sample_gradients", fails)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with recording(model, tmp_path, reproduce=True) as recorder:
            for _ in range(2):
                compute_loss(model).backward()
                optimizer.step()
    assert ["no optimizer steps" in str(warning.message) for warning in caught] == [True]
    assert (recorder.num_written, recorder.failure, read_steps(tmp_path)) == (2, None, [])


def test_a_job_that_forks_is_heard_in_one_process() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    told = threading.Event()
    callbacks: Any = type("", (), {"before_step": lambda self, _: told.set(), "after_step": lambda self: None})()
    hooks = OptimizerHooks(callbacks)
    hooks.attach()
    try:
        compute_loss(model).backward()
        child = os.fork()
        if child == 0:
            optimizer.step()
            os._exit(int(told.is_set()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        optimizer.step()
        assert told.is_set()
    finally:
        hooks.remove()


def test_a_model_and_its_optimizer_that_the_job_lets_go_are_freed(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, tmp_path, reproduce=True):
        compute_loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        held = weakref.ref(model.layers[0].weight), weakref.ref(optimizer)
        del model, optimizer
        gc.collect()
        assert [reference() for reference in held] == [None, None]


class SlicedLogits(Model):
    """Returns logits that lie in memory with gaps between the rows."""

    def forward(self, input_ids: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        outputs = super().forward(input_ids, scale)
        logits_BSV = outputs["logits"]
        return outputs | {"logits": torch.cat((logits_BSV, -logits_BSV), dim=1)[:, : logits_BSV.shape[1]]}


@pytest.mark.parametrize("model_class", [Model, SlicedLogits])
def test_log_probs_of_tokens_are_those_of_the_logits(model_class: type[Model], tmp_path: Path) -> None:
    model = model_class().to(torch.bfloat16)
    with recording(model, tmp_path, reproduce=True):
        logits_BSV = model(IDS_BS)["logits"]
    [call] = read_calls(tmp_path)
    log_probs_BSV = logits_BSV.double().log_softmax(dim=-1)
    expected = [
        log_probs_BSV[row, column - 1, IDS_BS[row, column]].item()
        for row, column in choose_sampled_tokens(*IDS_BS.shape)
    ]
    assert len(expected) == 6
    assert call.outputs["token_log_probs"] == pytest.approx(expected, rel=1e-6)
    assert logits_BSV.is_contiguous() == (model_class is Model)
    assert (call.outputs["logits_dtype"], call.outputs["loss_dtype"]) == ("bfloat16", "bfloat16")


def test_an_id_without_a_logit_has_no_log_prob(tmp_path: Path) -> None:
    class Narrow(Model):
        def forward(self, input_ids: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
            return {"logits": super().forward(input_ids)["logits"][..., :4]}

    model = Narrow()
    with recording(model, tmp_path, reproduce=True):
        model(IDS_BS)
    [call] = read_calls(tmp_path)
    ids = [int(IDS_BS[place]) for place in choose_sampled_tokens(*IDS_BS.shape)]
    assert [math.isnan(value) for value in call.output_numbers("token_log_probs") or ()] == [
        token_id >= 4 for token_id in ids
    ]


def test_numbers_of_tokens_are_kept_as_they_are(tmp_path: Path) -> None:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.weight * input_ids[:, 1:].float() / 8

    model = Actor()
    with recording(model, tmp_path, reproduce=True) as recorder:
        output = model(IDS_BS)
        recorder.note(log_probs=-2 * output)
    [call] = read_calls(tmp_path)
    assert (call.outputs["output_shape"], call.outputs["log_probs_shape"]) == ([2, 3], [2, 3])
    assert call.outputs["output_values"] == output.flatten().tolist()
    assert call.outputs["log_probs_values"] == (-2 * output).flatten().tolist()
    assert call.outputs["output_row_sums"] == pytest.approx(output.sum(dim=1).tolist())


class AutocastInside(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.module(*args, **kwargs)


@pytest.mark.parametrize(
    ("wrap", "autocast", "dtype"),
    [
        (lambda: Model(), "off", "float32"),
        (lambda: Model().to(torch.bfloat16), "off", "bfloat16"),
        (lambda: AutocastInside(Model()), "bfloat16", "bfloat16"),
    ],
)
def test_what_a_model_computes_in_is_seen_inside(
    wrap: Callable[[], nn.Module], autocast: str, dtype: str, tmp_path: Path
) -> None:
    model = wrap()
    with recording(model, tmp_path, reproduce=True):
        for _ in range(2):
            model(IDS_BS)
    for call in read_calls(tmp_path):
        assert (call.environment["autocast"], call.environment["computed_in"]) == (autocast, dtype)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_redacted_step_keeps_its_windows_and_settings_and_no_gradient(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with recording(model, tmp_path / "whole", reproduce=True):
        compute_loss(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    redact_folder(tmp_path / "whole", tmp_path / "redacted", TokenRedaction.PERMUTE)
    [call] = read_calls(tmp_path / "redacted")
    assert call.step is not None
    assert (call.step.gradients, call.step.signatures, call.step.state, call.step.grad_norm) == (None, (), (), None)
    assert (call.step.without_gradient, call.outputs) == ((), {})
    assert (call.step.passes, call.step.max_norm, call.step.settings[0]["lr"]) == ((0,), 0.01, 0.25)


class Sharded(Tensor):
    """As a DTensor shows itself: on two times two ranks."""

    placements: list[Any]
    device_mesh = SimpleNamespace(size=lambda axis: 2)


@pytest.mark.parametrize(
    ("placements", "expected"),
    [([Replicate(), Partial()], 3 / math.sqrt(2)), ([Partial(), Partial()], 3.0), ([Replicate(), Replicate()], None)],
)
def test_of_a_norm_that_is_left_in_parts_the_ranks_squares_add_up(
    placements: list[Any], expected: float | None, become_rank: Callable[[int, int], None]
) -> None:
    become_rank(0, 4)
    norm = torch.tensor(3.0).as_subclass(Sharded)
    norm.placements = placements
    own, is_part = copy_local_norm(norm)
    assert own is not None
    assert is_part == (expected is not None)
    assert own.item() == pytest.approx(expected or 3.0)


# What two parts of a step say of one thing, and what the step has then. The first part's word counts before the
# second's, what either did was done, and what one of them does not know is not known.
MERGED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"unapplied_norm": 1.0}, {"unapplied_norm": 2.0}, {"unapplied_norm": 1.0}),
    ({}, {"unapplied_norm": 2.0}, {"unapplied_norm": 2.0}),
    # Norm, limit and number are of one clipping.
    ({"grad_norm": 3.0}, {"grad_norm": 4.0, "max_norm": 1.0, "num_clipped": 2}, {"grad_norm": 3.0}),
    ({"max_norm": 1.0}, {"grad_norm": 4.0, "is_part_of_norm": True}, {"max_norm": 1.0}),
    (
        {},
        {"grad_norm": 4.0, "is_part_of_norm": True, "max_norm": 1.0, "num_clipped": 2},
        {"grad_norm": 4.0, "is_part_of_norm": True, "max_norm": 1.0, "num_clipped": 2},
    ),
    ({"is_unclipped": False}, {}, {"is_unclipped": False}),
    ({}, {"is_unclipped": False}, {"is_unclipped": False}),
    ({"clips_early": True}, {}, {"clips_early": True}),
    ({}, {"clips_early": True}, {"clips_early": True}),
    ({"clips_otherwise": True}, {}, {"clips_otherwise": True}),
    ({}, {"clips_otherwise": True}, {"clips_otherwise": True}),
    ({"clippings": ((2.0, 1.0),)}, {"clippings": ((2.0, 1.0),)}, {"clippings": ((2.0, 1.0),)}),
    ({"clippings": ((2.0, 1.0),)}, {"clippings": ((2.0, 0.5),)}, {}),
    ({"clippings": ((2.0, 1.0),)}, {}, {}),
    ({"without_gradient": ("b", "a")}, {"without_gradient": ("c", "b")}, {"without_gradient": ("b", "a", "c")}),
    ({"num_schedule_steps": 1}, {"num_schedule_steps": 2}, {"num_schedule_steps": 2}),
    ({"num_schedule_steps": 2}, {"num_schedule_steps": 1}, {"num_schedule_steps": 2}),
    ({"schedule_count": 0}, {"schedule_count": 7}, {"schedule_count": 0}),
    ({}, {"schedule_count": 7}, {"schedule_count": 7}),
    ({"state_steps": (3, 5)}, {"state_steps": (1, 3)}, {"state_steps": (1, 3, 5)}),
    ({"optimizer": "A"}, {"optimizer": "A"}, {"optimizer": "A"}),
    ({"optimizer": "A"}, {"optimizer": "B"}, {"optimizer": "A, B"}),
    ({"optimizer": "A, B"}, {"optimizer": "B"}, {"optimizer": "A, B"}),
    ({}, {"optimizer": "B"}, {"optimizer": "B"}),
    # Equal groups of one optimizer are one; those of two are told apart, also where their classes have one name.
    (
        {"optimizer": "A", "library": "x", "settings": ({"num_parameters": 2, "parameters": "0-1"},)},
        {"optimizer": "A", "library": "x", "settings": ({"num_parameters": 1, "parameters": "5"},)},
        {"optimizer": "A", "library": "x", "settings": ({"num_parameters": 3, "parameters": "0-1,5"},)},
    ),
    (
        {"optimizer": "A", "library": "x", "settings": ({"num_parameters": 2, "parameters": "0-1"},)},
        {"optimizer": "A", "library": "x", "settings": ({"num_parameters": 1},)},
        {"optimizer": "A", "library": "x", "settings": ({"num_parameters": 3},)},
    ),
    (
        {"optimizer": "A", "library": "x", "settings": ({"num_parameters": 2},)},
        {"optimizer": "A", "library": "y", "settings": ({"num_parameters": 1},)},
        {
            "optimizer": "A",
            "library": "x",
            "settings": (
                {"optimizer": "A", "library": "x", "num_parameters": 2},
                {"optimizer": "A", "library": "y", "num_parameters": 1},
            ),
        },
    ),
]


@pytest.mark.parametrize(("first", "second", "expected"), MERGED)
def test_of_two_parts_of_a_step_each_value_is_kept_as_it_should_be(
    first: dict[str, Any], second: dict[str, Any], expected: dict[str, Any]
) -> None:
    known: dict[str, Any] = {"number": 3, "passes": (5,), "shares": (1.0,)}
    assert merge_steps(OptimizerStep(**known, **first), OptimizerStep(**known, **second)) == OptimizerStep(
        **known, **expected
    )


def test_the_samples_of_two_parts_of_a_step_are_those_of_both_and_the_firsts_count() -> None:
    def make_part(values: dict[str, float], norms: dict[str, float], state: dict[str, float]) -> OptimizerStep:
        samples = tuple(
            Sample(name=name, dtype="float32", shape=(4,), start=0, values=(value,)) for name, value in values.items()
        )
        return OptimizerStep(
            number=3,
            passes=(5,),
            shares=(1.0,),
            gradients=ParameterSamples(samples=samples, num_parameters=4, num_frozen=0, is_sharded=False),
            signatures=[
                GradientSignature(name=name, shape=(4,), is_part=False, norm=norm, start=0, stride=1, values=())
                for name, norm in norms.items()
            ],
            state=[
                StateSample(name=name, shape=(4,), start=0, values={"exp_avg": (value,)})
                for name, value in state.items()
            ],
        )

    both = merge_steps(
        make_part({"a": 1.0, "b": 2.0}, {"a": 10.0, "b": 20.0}, {"a": 100.0}),
        make_part({"b": 3.0, "c": 4.0}, {"b": 30.0, "c": 40.0}, {"c": 400.0}),
    )
    assert both.gradients is not None
    assert {sample.name: sample.values for sample in both.gradients.samples} == {"a": (1.0,), "b": (2.0,), "c": (4.0,)}
    assert {signature.name: signature.norm for signature in both.signatures} == {"a": 10.0, "b": 20.0, "c": 40.0}
    assert {sample.name: sample.values["exp_avg"] for sample in both.state} == {"a": (100.0,), "c": (400.0,)}
    first = make_part({"a": 1.0}, {}, {})
    for parts in ((replace(first, gradients=None), first), (first, replace(first, gradients=None))):
        assert merge_steps(*parts).gradients == first.gradients


def test_two_parts_of_a_step_are_one() -> None:
    first = OptimizerStep(number=3, passes=(5, 6), shares=(0.5, None), optimizer="A", settings=({"num_parameters": 2},))
    second = OptimizerStep(
        number=3, passes=(5, 6), shares=(None, 1.0), grad_norm=2.0, settings=({"num_parameters": 3},)
    )
    both = merge_steps(first, second)
    assert (both.shares, both.grad_norm, both.settings) == ((0.5, 1.0), 2.0, ({"num_parameters": 5},))
    assert OptimizerStep.from_json(both.to_json(), "x") == both


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [(True, False, True), (False, True, True), (False, False, False), (None, True, None), (False, None, None)],
)
def test_a_step_has_a_state_if_one_of_its_optimizers_has(
    first: bool | None, second: bool | None, both: bool | None
) -> None:
    """Plain SGD beside AdamW never has one."""
    parts = [OptimizerStep(number=3, passes=(5,), shares=(None,), has_state=has_state) for has_state in (first, second)]
    assert merge_steps(*parts).has_state is both


def test_hooks_that_are_removed_twice_are_removed() -> None:
    class Nobody:
        wants_norms = False

        def before_clipping(self, *_: Any) -> None: ...
        def after_clipping(self, *_: Any) -> None: ...
        def before_step(self, *_: Any) -> None: ...
        def after_scaled_step(self, *_: Any) -> None: ...
        def after_step(self) -> None: ...
        def after_schedule_step(self, *_: Any, **__: Any) -> None: ...

    hooks = [OptimizerHooks(Nobody()), OptimizerHooks(Nobody())]
    for hook in hooks:
        hook.attach()
    for attached in [*hooks, *hooks]:
        attached.remove()


# Two ranks


CASES = [
    "ddp-clipping",
    "ddp-accumulating",
    "fsdp2-clipping",
    "fsdp2-accumulating",
    "zero0-clipping",
    "zero0-bf16-clipping",
    "zero1-clipping",
    "zero1-bf16",
    "zero2-accumulating",
    "zero2-bf16-clipping",
    "zero3-clipping-subgroups",
    "zero3-accumulating",
    "zero3-bf16-clipping",
]
# Relative to a gradient's largest element: fp32 sums in another order, and bf16 against a reference in fp32.
FP32_BOUND = 2e-6
BF16_BOUND = 0.05


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stepping")
    run_ranks(["-m", "tests.helpers.stepping_job", str(folder), *CASES], 2)
    return folder


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """Return the mean of the ranks' gradients, by autograd, for each micro-batch number."""
    batches = [make_batches(NUM_BATCHES, of_rank=rank) for rank in range(2)]
    found = []
    for ranks in zip(*batches, strict=True):
        model = make_model(tmp_path_factory.mktemp("model"), saves=False)
        (sum(model(**batch).loss for batch in ranks) / 2).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_the_ranks_kept_is_together_the_whole_gradient(
    case: str, two_ranks: Path, references: list[dict[str, Tensor]]
) -> None:
    window = 2 if "accumulating" in case else 1
    found = read_steps(two_ranks / case)
    bound = BF16_BOUND if "bf16" in case else FP32_BOUND
    for number in range(NUM_BATCHES // window):
        passes = list(range(number * window, (number + 1) * window))
        expected = {name: torch.stack([references[n][name] for n in passes]).mean(dim=0) for name in references[0]}
        ours = [step for step in found if step.number == number]
        assert len(ours) == 2
        kept: dict[str, set[int]] = {name: set() for name in expected}
        signed: dict[str, set[int]] = {name: set() for name in expected}
        squares: dict[str, float] = dict.fromkeys(expected, 0.0)
        for step in ours:
            assert (list(step.passes), list(step.shares)) == (passes, [1 / window] * window)
            assert step.is_unclipped
            assert step.max_norm == (MAX_NORM if "clipping" in case else None)
            if "clipping" in case or (case.startswith("zero") and not case.startswith("zero0")):
                assert step.grad_norm == pytest.approx(compute_norm(expected), rel=bound)
                assert not step.is_part_of_norm
            assert [(group["num_parameters"], group["weight_decay"]) for group in step.settings] == [
                (16, 0.1),
                (5, 0.0),
            ]
            assert (step.optimizer, step.has_state) == ("AdamW", number > 0)
            assert step.gradients is not None
            assert step.gradients.is_sharded == (not case.startswith(("ddp", "zero0")))
            for sample in step.gradients.samples:
                largest = expected[sample.name].abs().max().item()
                assert sample.values == pytest.approx(
                    find_sampled_values(sample, expected[sample.name]), abs=bound * largest
                )
                kept[sample.name] |= set(range(sample.start, sample.start + len(sample.values)))
            for signature in step.signatures:
                whole = expected[signature.name]
                largest = whole.abs().max().item()
                assert signature.values == pytest.approx(find_signed_values(signature, whole), abs=bound * largest)
                places = range(signature.start, whole.numel(), signature.stride)[: len(signature.values)]
                signed[signature.name] |= set(places)
                squares[signature.name] += signature.norm**2 / (1 if signature.is_part else 2)
        assert all(len(places) == 4 for places in kept.values())
        assert all(len(places) == min(64, expected[name].numel()) for name, places in signed.items())
        norms = {name: math.sqrt(square) for name, square in squares.items()}
        expected_norms = {name: float(whole.norm()) for name, whole in expected.items()}
        assert norms == pytest.approx(expected_norms, rel=5 * bound)


@pytest.mark.parametrize("case", CASES)
def test_what_the_ranks_kept_of_the_state_is_what_the_step_before_made_of_its_gradient(
    case: str, two_ranks: Path, references: list[dict[str, Tensor]]
) -> None:
    window = 2 if "accumulating" in case else 1
    steps = read_steps(two_ranks / case)
    # At stage 0 in half precision DeepSpeed steps once with gradients of zero when it begins.
    num_before = 1 if case.startswith("zero0-bf16") else 0
    for step in [step for step in steps if step.number == 0]:
        assert step.state_steps == (num_before,) * num_before
        assert not any(value for sample in step.state for values in sample.values.values() for value in values)
    seconds = [step for step in steps if step.number == 1]
    gradients = {name: torch.stack([references[n][name] for n in range(window)]).mean(dim=0) for name in references[0]}
    shrunk = min(1.0, MAX_NORM / compute_norm(gradients)) if "clipping" in case else 1.0
    bound = BF16_BOUND if "bf16" in case else 5 * FP32_BOUND
    for step in seconds:
        assert (step.library, step.state_steps) == ("torch", (num_before + 1,))
        for sample in step.state:
            gradient = gradients[sample.name].flatten()[sample.start :].double() * shrunk
            # AdamW's averages after one step, with the betas of the job: torch's defaults.
            for key, whole in (("exp_avg", 0.1 * gradient), ("exp_avg_sq", 0.001 * gradient.square())):
                values = sample.values[key]
                largest = float(0.1 * shrunk * gradients[sample.name].abs().max())
                largest = largest if key == "exp_avg" else 0.1 * largest**2
                assert values == pytest.approx(whole[: len(values)].tolist(), abs=2 * bound * largest)
    assert {sample.name for step in seconds for sample in step.state}
