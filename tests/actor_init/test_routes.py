"""Tokens go to the experts that were recorded, with the model's own weights, in every way to run a model."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import Tensor, nn
from transformers import PreTrainedModel

from actor_init.routes import PassRoutes, RouterFlips, collect_flips, match_routers, place_routes, steer_routers
from capture.record.route_recorder import RouteRecorder
from tests.helpers.families import tiny_config, tiny_model

IDS_BS = torch.tensor([[3, 5, 9, 7, 4, 8], [3, 3, 6, 1, 2, 5]])
TOKENS, EXPERTS = 12, 4
# Softmax before and after the choice; sigmoids with a bias; scores in place of numbers; a block that chooses.
FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "llama4_text", "dbrx", "granitemoe"]


def run(model: PreTrainedModel, routes: PassRoutes | None) -> tuple[Tensor, dict[str, Tensor], list[RouterFlips]]:
    """The logits, the experts of each router as the job's recorder sees them, and the flips."""
    recorder = RouteRecorder()
    recorder.attach(model)
    recorder.begin(TOKENS)
    with steer_routers(model, routes or PassRoutes()) as states:
        logits = model(input_ids=IDS_BS).logits
        flips = collect_flips(states)
    choices = {name: choice for names, joined in recorder.take() for name, choice in zip(names, joined, strict=True)}
    recorder.remove()
    return logits, choices, flips


def make_other_routes(choices: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.stack([torch.randperm(EXPERTS, generator=generator)[: choice.shape[1]] for _ in range(TOKENS)])
        for name, choice in choices.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_experts_are_taken_and_ones_own_change_nothing(family: str) -> None:
    model = tiny_model(tiny_config(family))
    logits, own, no_flips = run(model, None)
    assert own
    assert no_flips == []
    same_logits, _, flips = run(model, PassRoutes(recorded={name: choice.long() for name, choice in own.items()}))
    assert torch.equal(logits, same_logits)
    assert [(router.num_tokens, list(router.distances)) for router in flips] == [(TOKENS, [])] * len(own)
    other = make_other_routes(own)
    other_logits, taken, flips = run(model, PassRoutes(recorded=other))
    assert not torch.allclose(logits, other_logits)
    for name, choice in other.items():
        assert torch.equal(taken[name].long().sort(dim=1).values, choice.sort(dim=1).values)
    assert all(router.distances for router in flips)
    # Nothing is left behind.
    assert torch.equal(run(model, None)[0], logits)


@pytest.mark.parametrize("norm", [True, False])
def test_weights_are_the_models_own_scores_of_the_recorded_experts(norm: bool) -> None:
    model = tiny_model(tiny_config("qwen3_moe", norm_topk_prob=norm))
    router = model.model.layers[0].mlp.gate
    hidden_TH = torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(1))
    chosen_TK = torch.tensor([[2, 0]] * TOKENS)
    with steer_routers(model, PassRoutes(recorded={"model.layers.0.mlp.gate": chosen_TK})):
        _, weights_TK, index_TK = router(hidden_TH)
    expected_TK = F.linear(hidden_TH, router.weight).softmax(dim=1)[:, [2, 0]]
    expected_TK = expected_TK / expected_TK.sum(dim=1, keepdim=True) if norm else expected_TK
    assert torch.equal(index_TK, chosen_TK)
    torch.testing.assert_close(weights_TK, expected_TK)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_groups_that_would_not_be_chosen_here_hold_the_recorded_experts(family: str) -> None:
    more = {"topk_method": "group_limited_greedy"} if family == "deepseek_v2" else {}
    config = tiny_config(family, n_group=4, topk_group=2, num_experts=8, n_routed_experts=8, **more)
    model = tiny_model(config)
    _, own, _ = run(model, None)
    # Two experts of the two groups that hold none of the token's own.
    other = {}
    for name, choice in own.items():
        rows = []
        for experts in choice.tolist():
            free = [group for group in range(4) if group not in {expert // 2 for expert in experts}]
            rows.append([2 * free[0], 2 * free[1] + 1])
        other[name] = torch.tensor(rows)
    _, taken, flips = run(model, PassRoutes(recorded=other))
    for name, choice in other.items():
        assert torch.equal(taken[name].long().sort(dim=1).values, choice.sort(dim=1).values)
    assert all(len(router.distances) == TOKENS for router in flips)


def test_tokens_without_a_recorded_choice_choose_here() -> None:
    model = tiny_model(tiny_config("mixtral"))
    _, own, _ = run(model, None)
    recorded = {name: choice.long().flip(1) for name, choice in own.items()}
    for choice in recorded.values():
        choice[3:] = -1
    _, taken, flips = run(model, PassRoutes(recorded=recorded))
    first, *_ = own
    assert torch.equal(taken[first].sort(dim=1).values, own[first].sort(dim=1).values)
    assert [router.num_tokens for router in flips] == [3, 3]


def test_an_expert_that_the_model_does_not_have_is_chosen_here() -> None:
    model = tiny_model(tiny_config("mixtral"))
    _, own, _ = run(model, None)
    logits, taken, _ = run(model, PassRoutes(recorded={name: torch.full((TOKENS, 2), 99) for name in own}))
    assert torch.equal(logits, run(model, None)[0])
    assert all(torch.equal(taken[name], own[name]) for name in own)


def test_live_routing_only_compares() -> None:
    model = tiny_model(tiny_config("mixtral"))
    logits, own, _ = run(model, None)
    live_logits, taken, flips = run(model, PassRoutes(recorded=make_other_routes(own), forces=False))
    assert torch.equal(logits, live_logits)
    assert all(torch.equal(taken[name], own[name]) for name in own)
    assert all(router.distances for router in flips)


def test_a_pass_that_is_run_inside_another_leaves_the_other_s_flips() -> None:
    model = tiny_model(tiny_config("mixtral"))
    logits, own, _ = run(model, None)
    routes = PassRoutes(recorded=make_other_routes(own))
    _, _, flips = run(model, routes)
    assert flips
    with steer_routers(model, routes) as states:
        model(input_ids=IDS_BS)
        run(model, PassRoutes(recorded={name: choice.long() for name, choice in own.items()}))
        assert collect_flips(states) == flips
    assert torch.equal(run(model, None)[0], logits)


class SoftmaxRouter(nn.Module):
    """Chooses one of three experts by the logits that it is given."""

    top_k, num_experts = 1, 3

    def forward(self, logits_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = F.linear(logits_TE, torch.eye(3))
        values, index = torch.topk(logits_TE.softmax(dim=-1), self.top_k, dim=-1)
        return logits_TE, values, index


@pytest.fixture(params=["torch", "ZeRO 3"])
def linear(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `F.linear` is. DeepSpeed puts an autograd function in its place under ZeRO 3, for the process."""
    monkeypatch.setattr(F, "linear", torch._C._nn.linear if request.param == "torch" else zero3_linear_wrap)


@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize(("gap", "distance"), [(0.0, 0.0), (0.01, 0.005), (1.0, 0.462)])
def test_the_distance_is_the_error_of_the_logits_that_explains_a_flip(gap: float, distance: float) -> None:
    model = nn.ModuleDict({"router": SoftmaxRouter()})
    # The logits have a root mean square of 1 but for the gap: a half of it for each of the two experts.
    logits_TE = torch.tensor([[3**0.5 / 2**0.5 + gap, 3**0.5 / 2**0.5, 0.0]])
    size = float(logits_TE.square().mean().sqrt())
    with steer_routers(model, PassRoutes(recorded={"router": torch.tensor([[1]])})) as states:
        model["router"](logits_TE)
        [router] = collect_flips(states)
    assert router.num_tokens == 1
    assert len(router.distances) == 1
    if not gap:
        # Two experts of the same score are a flip, too, which nothing has to explain.
        assert list(router.distances) == [0.0]
    else:
        # A softmax's relative change is that of the logits to first order: tanh(gap / 2).
        assert list(router.distances) == pytest.approx([torch.tensor(gap / 2).tanh().item() / size], rel=0.01)
        assert list(router.distances) == pytest.approx([distance], rel=0.5)


@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_compiled_block_does_the_same_with_its_gradients(checkpoints: bool) -> None:
    def compute_gradients(compiles: bool) -> tuple[Tensor, Tensor, list[RouterFlips]]:
        model = tiny_model(tiny_config("qwen3_moe")).train()
        _, own, _ = run(model, None)
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if compiles:
            for layer in model.model.layers:
                layer.forward = torch.compile(layer.forward, backend="eager")
        with steer_routers(model, PassRoutes(recorded=make_other_routes(own))) as states:
            logits = model(input_ids=IDS_BS, use_cache=False).logits
            logits.square().mean().backward()
            flips = collect_flips(states)
        return logits.detach(), model.model.layers[0].mlp.gate.weight.grad.clone(), flips

    logits, gradient, flips = compute_gradients(False)
    compiled_logits, compiled_gradient, compiled_flips = compute_gradients(True)
    torch.testing.assert_close(compiled_logits, logits)
    torch.testing.assert_close(compiled_gradient, gradient)
    assert [len(router.distances) for router in compiled_flips] == [len(router.distances) for router in flips]
    assert gradient.any()


def test_routers_are_matched_by_the_ends_of_their_names() -> None:
    job = ["module.model.layers.1._checkpoint_wrapped_module.mlp.gate", "module.model.layers.11.mlp.gate"]
    here = ["model.layers.1.mlp.gate", "base_model.model.model.layers.11.mlp.gate", "model.layers.2.mlp.gate"]
    assert match_routers(job, here) == {here[0]: job[0], here[1]: job[1]}


def test_routes_are_placed_where_their_tokens_are_fed() -> None:
    choice_TK = torch.arange(8, dtype=torch.int16).view(4, 2)
    assert place_routes(choice_TK, torch.tensor([[3, -1, 0]])).tolist() == [[6, 7], [-1, -1], [0, 1]]


def test_a_dense_model_is_left_alone() -> None:
    model = tiny_model(tiny_config("llama"))
    with steer_routers(model, PassRoutes()) as states:
        assert states == {}
