"""Hold the experts that the job chose against those that the scores of a replay choose.

Where each token went to the job's experts, every router is judged by itself: what came before it is the job's but for
rounding. A token at a tie flips by rounding alone. One whose scores stand clearly in another order tells of another
router: other weights, another bias, another rule.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from actor_init.routes import RouterFlips
from replay.output.text import Pairs
from replay.runlog.records import PassRecord
from replay.tolerances.job_bounds import compute_flip_bound, compute_tie_distance
from replay.verdict.findings import Finding, VerdictSettings, judge_number, list_dtypes
from replay.verdict.recorded_pass import RecordedPass, ReplayedPass

ROUTES = "expert routes"
LAYER = re.compile(r"\.(\d+)(?:\.|$)")


def compare_routes(
    record: PassRecord, recorded: RecordedPass, replayed: ReplayedPass, settings: VerdictSettings
) -> list[Finding]:
    """Judge the first router that chooses otherwise than the job's did, or that which comes nearest to it.

    Nothing is judged where tokens chose their experts anew. A router that agrees is no evidence that the numbers of the
    pass agree.
    """
    if record.error is not None or not replayed.has_job_routes:
        return []
    tie = compute_tie_distance(list_dtypes(recorded, settings), settings.num_layers)
    findings = [_judge_router(router_flips, tie) for router_flips in replayed.router_flips if router_flips.num_tokens]
    differing = [finding for finding in findings if not finding.agrees]
    worst = max(findings, key=lambda finding: finding.share_of_bound, default=None)
    return differing[:1] or ([worst] if worst is not None else [])


def _judge_router(router_flips: RouterFlips, tie: float) -> Finding:
    share = sum(distance > tie for distance in router_flips.distances) / router_flips.num_tokens
    finding = judge_number(
        ROUTES,
        0.0,
        share,
        difference=share,
        bound=compute_flip_bound(router_flips.num_tokens),
        is_evidence=False,
        where=router_flips.router,
        num_values=router_flips.num_tokens,
    )
    if finding.agrees:
        return finding
    text = f"{share:.1%} of the tokens have scores that choose other experts than the job did, beyond a tie"
    return replace(finding, values_as_text=text)


def describe_flips(passes: Iterable[tuple[PassRecord, RecordedPass | None, ReplayedPass]]) -> Pairs:
    """Say what share of the tokens would choose other experts here, in passes with the job's weights."""
    flips: dict[str, int] = {}
    num_tokens, has_job_routes = 0, True
    for record, recorded, replayed in passes:
        if (
            record.error is None
            and recorded is not None
            and recorded.weight_comparison.are_same
            and replayed.router_flips
        ):
            num_tokens += record.routes.routed_tokens
            has_job_routes &= replayed.has_job_routes
            for router_flips in replayed.router_flips:
                name = router_flips.router
                flips[name] = flips.get(name, 0) + len(router_flips.distances)
    if not any(flips.values()):
        return []
    most = max(flips, key=lambda router: flips[router])
    how = "would choose others here" if has_job_routes else "chose others than in the job"
    share = sum(flips.values()) / num_tokens
    return [("experts", f"{share:.1%} of tokens {how}, most in {name_layer(most)}")]


def describe_router_loss(passes: Iterable[tuple[PassRecord, RecordedPass | None, ReplayedPass]]) -> Pairs:
    """Say what the routers' loss adds to the loss of the first pass that holds one."""
    for record, _, _ in passes:
        if record.routes.router_loss is not None:
            return [("routers", f"their loss adds {record.routes.router_loss:.4g} to that of pass {record.index + 1}")]
    return []


def describe_absent_router_loss(
    passes: Iterable[tuple[PassRecord, RecordedPass | None, ReplayedPass]], *, has_same_gradient: bool
) -> Pairs:
    """Say so where the job's loop did not add its model's routers' loss, though the model's config turns that on.

    has_same_gradient  the job's gradient was judged, and is the replay's
    """
    all_losses = [replayed.router_loss_of_training_loop for _, _, replayed in passes]
    losses = [loss for loss in all_losses if loss is not None]
    if not losses or any(loss.is_held for loss in losses):
        return []
    is_absent = losses[0].factor == 0
    places = [*(["the noted loss"] if is_absent else []), *(["the routers' gradient"] if has_same_gradient else [])]
    if not places:
        return []
    where = f"in neither {' nor '.join(places)}" if len(places) > 1 else f"not in {places[0]}"
    return [("note", f"routers: the config's routers' loss (coefficient {losses[0].coefficient:g}) is {where}")]


def name_layer(router: str) -> str:
    """Name the layer that a router stands in, as in `layer 5`; the router where its name has no number."""
    match = LAYER.search(router)
    return f"layer {match[1]}" if match else router


def note_job_routes(
    settings: VerdictSettings, passes: Sequence[tuple[PassRecord, RecordedPass | None, ReplayedPass]]
) -> VerdictSettings:
    """Return settings that say whether all tokens of all passes went to the experts that the job chose."""
    replayed_passes = [replayed for record, _, replayed in passes if record.error is None]
    has_job_routes = bool(replayed_passes) and all(replayed.has_job_routes for replayed in replayed_passes)
    return replace(settings, has_job_routes=has_job_routes)
