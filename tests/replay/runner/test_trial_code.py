"""Mistakes of a job's code are tried as the job makes them: logits of a tiny model, broken and under the trial."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from replay.runner.trial_code import list_code_trials
from replay.verdict.causes.cause import CauseName
from replay.verdict.model_facts import ModelDifference, ModelDifferenceKind
from tests.broken_jobs import faults
from tests.broken_jobs.models import make_model

Kind = ModelDifferenceKind
IDS_BS = torch.randint(1, 90, (2, 9), generator=torch.Generator().manual_seed(0))


def state(where: str, kind: ModelDifferenceKind = Kind.FORWARD) -> list[ModelDifference]:
    return [ModelDifference(kind=kind, where=where, job="job.py:own", replay=None)]


ATTENTION = state("torch.nn.functional:scaled_dot_product_attention", Kind.FUNCTION)
ROTATION = state("transformers.models.llama.modeling_llama:apply_rotary_pos_emb", Kind.FUNCTION)
NORMS, MLPS = state("model.layers.*.post_attention_layernorm"), state("model.layers.*.mlp")


@pytest.fixture
def model() -> Any:
    return make_model("llama", {"num_hidden_layers": 2}).eval()


def patch_attention(change: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    return lambda model, patch: patch.setattr(F, "scaled_dot_product_attention", change(F.scaled_dot_product_attention))


def rotate_pairs(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Multiply neighbours, taken for complex numbers, by what each of their elements is given as cosine and sine."""

    def rotate(tensor: Tensor) -> Tensor:
        pairs = torch.view_as_complex(tensor.reshape(*tensor.shape[:-1], -1, 2).contiguous())
        real, imaginary = torch.view_as_real(pairs).unbind(-1)
        even, odd = (..., slice(0, None, 2)), (..., slice(1, None, 2))
        turned = (
            real * cos[:, None][even] - imaginary * sin[:, None][even],
            imaginary * cos[:, None][odd] + real * sin[:, None][odd],
        )
        return torch.stack(turned, dim=-1).flatten(-2)

    return rotate(query), rotate(key)


def patch_rotation(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate_pairs)


def centre_norms(model: Any, patch: pytest.MonkeyPatch) -> None:
    def forward(norm: Any, given: Tensor) -> Tensor:
        return F.layer_norm(given, given.shape[-1:], norm.weight, None, norm.variance_epsilon)

    patch.setattr(modeling_llama.LlamaRMSNorm, "forward", forward)


def widen_eps(model: Any, patch: pytest.MonkeyPatch) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            patch.setattr(module, "variance_epsilon", 1e-3)


def set_gelu(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU()


@pytest.mark.parametrize(
    ("breaks", "differences", "name", "cause"),
    [
        (patch_attention(faults.unscaled), ATTENTION, "unscaled scores", CauseName.KERNEL),
        (patch_attention(faults.heads_interleaved), ATTENTION, "interleaved heads", CauseName.KERNEL),
        (patch_rotation, ROTATION, "interleaved rotation", CauseName.POSITIONS),
        (centre_norms, NORMS, "centred norm", CauseName.MODEL_CODE),
        (widen_eps, NORMS, "eps of 0.001", CauseName.MODEL_CODE),
        (
            lambda model, _: faults.mlps_with_gate_and_up_swapped(model),
            MLPS,
            "gate and up swapped",
            CauseName.MODEL_CODE,
        ),
        (set_gelu, state("model.layers.*.mlp.act_fn", Kind.CLASS), "mlp by gelu", CauseName.MODEL_CODE),
    ],
)
@torch.no_grad()
def test_one_trial_alone_computes_what_the_broken_job_does(
    model: Any,
    breaks: Callable[[Any, pytest.MonkeyPatch], None],
    differences: list[ModelDifference],
    name: str,
    cause: CauseName,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = model(IDS_BS).logits
    tried: dict[str, Tensor] = {}
    trials = {trial.name: trial for trial in list_code_trials(model, differences)}
    for trial in trials.values():
        with trial.change(model):
            tried[trial.name] = model(IDS_BS).logits
    torch.testing.assert_close(model(IDS_BS).logits, usual, rtol=0, atol=0)
    breaks(model, monkeypatch)
    job = model(IDS_BS).logits
    same = [found for found, logits in tried.items() if torch.allclose(logits, job, rtol=1e-4, atol=1e-4)]
    assert not torch.allclose(usual, job, rtol=1e-4, atol=1e-4)
    assert (same, trials[name].cause) == ([name], cause)


def test_nothing_is_tried_of_code_that_is_not_stated_to_be_another(model: Any) -> None:
    assert list(list_code_trials(model, [])) == []
    stated = ModelDifference(kind=Kind.ATTRIBUTE, where="model.layers.*.mlp", key="scale", job="1", replay="2")
    assert list(list_code_trials(model, [stated])) == []
