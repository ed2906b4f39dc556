"""The routes of a capture are placed at the tokens of a pass, whatever the order of its rows."""

from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor
from transformers import MixtralConfig

from actor_init.inputs.packing import ActorInputs
from actor_init.routes import RouterFlips
from actor_init.spec import Routing
from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import MicroBatch, Origin
from replay.objective.router_loss import RouterLoss
from replay.runner.pass_routes import PassRouting, place_recorded_routes

ROUTERS = ("layers.0.gate", "layers.1.gate")
# Each token's first expert is its own place in the capture.
CHOICE_TK = torch.stack([torch.arange(6), torch.zeros(6, dtype=torch.int64)], dim=1).to(torch.int16)
LOSS = RouterLoss(
    function=lambda logits, num_experts, num_chosen, mask: torch.tensor(3.0),
    coefficient=0.5,
    num_experts=4,
    num_chosen=2,
    logits_index={"layers.0.gate": 0},
)
FLIPS = [
    RouterFlips(router=ROUTERS[0], num_tokens=4, distances=[]),
    RouterFlips(router=ROUTERS[1], num_tokens=4, distances=[0.1]),
]
IDS_BS = torch.arange(6).view(2, 3)


def place(captured_index: Tensor, routes: dict[str, Tensor], *, has_reversed_rows: bool = False) -> dict[str, Tensor]:
    call = cast(CapturedCall, SimpleNamespace(routes=routes))
    return place_recorded_routes(call, (2, 3), captured_index, ROUTERS, has_reversed_rows=has_reversed_rows)


def routing_of(
    routing: Routing = Routing.RECORDED, loss: RouterLoss | None = None, routers: tuple[str, ...] = ROUTERS
) -> PassRouting:
    config = MixtralConfig(output_router_logits=True)
    return PassRouting(routers=routers, router_loss=loss, routing=routing, loss="sft", config=config)


def call_of(**facts: object) -> CapturedCall:
    return CapturedCall(
        tensors={"input_ids": IDS_BS, "labels": IDS_BS},
        call_facts=facts,
        left_out={},
        trains=True,
        origin=Origin(source="a.pkl"),
        routes={"layers.1.gate": CHOICE_TK},
    )


def inputs_of(captured_index: Tensor) -> ActorInputs:
    return cast(ActorInputs, SimpleNamespace(captured_index=captured_index))


def test_each_fed_token_gets_its_own_route() -> None:
    placed = place(torch.tensor([[0, 1, 3, 4, -1]]), {"layers.1.gate": CHOICE_TK})
    assert list(placed) == ["layers.1.gate"]
    assert placed["layers.1.gate"][:, 0].tolist() == [0, 1, 3, 4, -1]


def test_reversed_rows_get_the_routes_of_their_tokens() -> None:
    # What is fed first is the capture's second row, whose tokens stand first in the reversed micro-batch.
    placed = place(torch.tensor([[0, 1, 2, 3]]), {"layers.0.gate": CHOICE_TK}, has_reversed_rows=True)
    assert placed["layers.0.gate"][:, 0].tolist() == [3, 4, 5, 0]


def test_routes_of_another_number_of_tokens_are_left_out() -> None:
    assert place(torch.tensor([[0]]), {"layers.0.gate": CHOICE_TK[:5]}) == {}
    assert place(torch.tensor([[0]]), {}) == {}


def test_a_pass_has_the_job_s_routes_where_all_its_routers_took_them() -> None:
    assert routing_of().has_job_routes(FLIPS)
    assert not routing_of().has_job_routes(FLIPS[:1])
    assert not routing_of().has_job_routes([])
    assert not routing_of(Routing.LIVE).has_job_routes(FLIPS)
    section = routing_of().describe(FLIPS, torch.tensor(0.25))
    assert (section.routing, section.routed_tokens, section.flipped_tokens) == ("recorded", 8, 1)
    assert (section.flips_by_router, section.router_loss) == ({"layers.1.gate": 1}, 0.25)
    assert routing_of(Routing.LIVE).describe(FLIPS, None).routing == "live"


def test_a_dense_pass_has_no_routing() -> None:
    assert routing_of(routers=()).describe([], None).routing is None


def prepare_term(routing: PassRouting, call: CapturedCall) -> float | None:
    batch: MicroBatch = call.micro_batch()
    _, term = routing.prepare(call, batch, inputs_of(torch.tensor([[0, 1, 2, 3, 4, 5, -1]])))
    if term is None:
        return None
    assert term.is_real_T.tolist() == [True] * 6 + [False]
    kept = SimpleNamespace(logits_TE=torch.zeros(7, 4))
    return float(term.compute({"layers.0.gate": kept}))  # type: ignore[dict-item]


def test_the_routers_loss_is_a_term_where_the_job_asked_for_it() -> None:
    assert prepare_term(routing_of(loss=LOSS), call_of()) == 1.5
    assert prepare_term(routing_of(loss=LOSS), call_of(output_router_logits=False)) is None
    assert prepare_term(routing_of(loss=None), call_of()) is None
    assert prepare_term(routing_of(loss=LOSS.without("no way")), call_of()) is None


def test_the_routers_loss_has_the_unit_of_the_loss_that_it_is_added_to() -> None:
    """The job divided the sum over its four labels by 8, so what it added counts twice as much beside their mean."""
    assert prepare_term(routing_of(loss=LOSS), call_of(num_items_in_batch=8)) == 3.0
