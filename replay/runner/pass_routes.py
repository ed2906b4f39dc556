"""Prepare the routes of a pass through a mixture of experts, and describe what its routers did with them."""

from collections.abc import Collection, Sequence

from actor_init.inputs.packing import ActorInputs
from actor_init.routes import PassRoutes, RouterFlips, match_routers, place_routes
from actor_init.spec import Routing
from capture.file_format.capture_file import Call
from replay.runlog.records import RoutesSection


def prepare_routes(
    call: Call,
    shape: tuple[int, int],
    actor_inputs: ActorInputs,
    routers: Collection[str],
    *,
    routing: Routing,
    has_reversed_rows: bool,
) -> PassRoutes | None:
    """Place the experts that the job chose at the tokens that are fed; None where there is nothing to do.

    Left out are routers that the capture knows nothing of, or in another number of tokens than it has.

    shape              rows and tokens a row of the capture
    routers            the names that the model's routers have here
    has_reversed_rows  the rows are fed from the last to the first
    """
    matches = match_routers(call.routes, routers)
    recorded = {}
    for name, job_name in matches.items():
        choice_TK = call.routes[job_name]
        if choice_TK.ndim != 2 or len(choice_TK) != shape[0] * shape[1]:
            continue
        if has_reversed_rows:
            choice_TK = choice_TK.view(*shape, -1).flip(0).flatten(0, 1)
        recorded[name] = place_routes(choice_TK, actor_inputs.captured_index)
    return PassRoutes(recorded=recorded, forces=routing is Routing.RECORDED) if recorded else None


def has_job_routes(routes: PassRoutes | None, flips: Sequence[RouterFlips], routers: Collection[str]) -> bool:
    """Tell whether every router of the model sent each token to the experts that the job chose."""
    return routes is not None and routes.forces and {router.router for router in flips} == set(routers)


def describe_routes(*, is_recorded: bool, flips: Sequence[RouterFlips], routers: Collection[str]) -> RoutesSection:
    """Describe where the tokens of a pass went, and how many would choose otherwise."""
    return RoutesSection(
        routing=(Routing.RECORDED.value if is_recorded else Routing.LIVE.value) if routers else None,
        routed_tokens=sum(router.num_tokens for router in flips),
        flipped_tokens=sum(len(router.distances) for router in flips),
        flips_by_router={router.router: len(router.distances) for router in flips if router.distances},
    )
