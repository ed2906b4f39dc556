"""The routes of a capture are placed at the tokens of a pass, whatever the order of its rows."""

from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from actor_init.inputs.packing import ActorInputs
from actor_init.routes import PassRoutes, RouterFlips
from actor_init.spec import Routing
from capture.file_format.capture_file import Call
from replay.runner.pass_routes import describe_routes, has_job_routes, prepare_routes

ROUTERS = ["layers.0.gate", "layers.1.gate"]
# Each token's first expert is its own place in the capture.
CHOICE_TK = torch.stack([torch.arange(6), torch.zeros(6, dtype=torch.int64)], dim=1).to(torch.int16)


def prepare(captured_index: Tensor, routes: dict[str, Tensor], *, has_reversed_rows: bool = False) -> PassRoutes | None:
    call = cast(Call, SimpleNamespace(routes=routes))
    inputs = cast(ActorInputs, SimpleNamespace(captured_index=captured_index))
    return prepare_routes(call, (2, 3), inputs, ROUTERS, routing=Routing.RECORDED, has_reversed_rows=has_reversed_rows)


def test_each_fed_token_gets_its_own_route() -> None:
    routes = prepare(torch.tensor([[0, 1, 3, 4, -1]]), {"layers.1.gate": CHOICE_TK})
    assert routes is not None
    assert list(routes.recorded) == ["layers.1.gate"]
    assert routes.recorded["layers.1.gate"][:, 0].tolist() == [0, 1, 3, 4, -1]


def test_reversed_rows_get_the_routes_of_their_tokens() -> None:
    # What is fed first is the capture's second row, whose tokens stand first in the reversed micro-batch.
    routes = prepare(torch.tensor([[0, 1, 2, 3]]), {"layers.0.gate": CHOICE_TK}, has_reversed_rows=True)
    assert routes is not None
    assert routes.recorded["layers.0.gate"][:, 0].tolist() == [3, 4, 5, 0]


def test_routes_of_another_number_of_tokens_are_left_out() -> None:
    assert prepare(torch.tensor([[0]]), {"layers.0.gate": CHOICE_TK[:5]}) is None
    assert prepare(torch.tensor([[0]]), {}) is None


def test_a_pass_has_the_job_s_routes_where_all_its_routers_took_them() -> None:
    flips = [
        RouterFlips(router=ROUTERS[0], num_tokens=4, distances=[]),
        RouterFlips(router=ROUTERS[1], num_tokens=4, distances=[0.1]),
    ]
    assert has_job_routes(PassRoutes(), flips, ROUTERS)
    assert not has_job_routes(PassRoutes(), flips[:1], ROUTERS)
    assert not has_job_routes(PassRoutes(forces=False), flips, ROUTERS)
    assert not has_job_routes(None, [], ROUTERS)
    section = describe_routes(is_recorded=True, flips=flips, routers=ROUTERS)
    assert (section.routing, section.routed_tokens, section.flipped_tokens) == ("recorded", 8, 1)
    assert section.flips_by_router == {"layers.1.gate": 1}


def test_a_dense_pass_has_no_routing() -> None:
    assert describe_routes(is_recorded=False, flips=[], routers=[]).routing is None
