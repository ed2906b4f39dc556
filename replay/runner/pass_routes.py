"""Prepare what the routers of a mixture of experts do in a pass, and describe what they did."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn
from transformers import PretrainedConfig

from actor_init.inputs.packing import ActorInputs, count_action_tokens
from actor_init.routes import PassRoutes, RouterFlips, match_routers, place_routes
from actor_init.schedule_and_norm import TORCH_DTYPES
from actor_init.spec import Routing
from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import MicroBatch
from capture.record.routers import find_routers
from replay.objective.router_loss import (
    RouterLoss,
    RouterLossTerm,
    TrainingLoopLoss,
    asks_for_router_loss,
    computes_router_loss,
    find_router_loss,
)
from replay.options.declarations.recorded import FROM_LOGIT_GRADIENT
from replay.options.resolved import ResolvedReplay
from replay.options.spec import LossName, is_objective
from replay.runlog.records import RoutesSection
from replay.tolerances.job_bounds import LOSS, compute_bound
from replay.verdict.recorded_pass import JobRouterLoss, list_job_dtypes, scale_to_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRouting:
    """What a run does with the routers of its model.

    routers            the routers' names; empty: the model is dense
    router_loss        the routers' loss that the model's forward may add to its own loss; None: it never adds one
    routing            RECORDED: the routers are made to choose the job's experts; LIVE: they choose themselves
    loss               the loss that the replay computes
    dtype              the dtype that the replay computes in
    has_reversed_rows  the rows are fed from the last to the first
    """

    routers: tuple[str, ...]
    router_loss: RouterLoss | None
    routing: Routing
    loss: str
    config: PretrainedConfig
    dtype: str = "float32"
    has_reversed_rows: bool = False

    @classmethod
    def open(cls, model: nn.Module, spec: ResolvedReplay) -> Self:
        routers = tuple(find_routers(model))
        router_loss = find_router_loss(model) if routers else None
        parallel = spec.actor.parallel
        splits = f"--ring {parallel.ring}" if parallel.ring > 1 else "--sequence-parallel"
        if router_loss is not None and (parallel.ring > 1 or parallel.sequence_parallel):
            router_loss = router_loss.without(f"{splits} gives each rank a share of the tokens, and it is over all")
        return cls(
            routers=routers,
            router_loss=router_loss,
            routing=spec.actor.routing,
            loss=spec.measure.loss,
            config=spec.source.config,
            dtype=str(TORCH_DTYPES[spec.actor.dtype]).removeprefix("torch."),
            has_reversed_rows=spec.inputs.reverse_rows,
        )

    def find_router_loss(self, call: CapturedCall) -> RouterLoss | None:
        """Return the routers' loss that the job's model added to its own loss in this pass; None: it added none."""
        return self.router_loss if asks_for_router_loss(call, self.config) else None

    def prepare(
        self, call: CapturedCall, batch: MicroBatch, actor_inputs: ActorInputs
    ) -> tuple[PassRoutes | None, RouterLossTerm | None]:
        """Return what the routers do in a pass, and the routers' loss as a term of the pass's loss.

        If the loss is a mean over the labels, as the model's own loss is, the term is what the model added. If the
        job's loop computed the loss from logits, the loss that the loop noted tells whether to add the term, and with
        which factor. For any other loss there is no term.

        The first is None if the routers are left alone, the second if there is no term.
        """
        router_loss, loop_loss = self.find_router_loss(call), None
        if self._may_loop_add_router_loss(call):
            router_loss, loop_loss = self.router_loss, self._read_training_loop_loss(call, batch)
        elif is_objective(self.loss) or (self.loss != LossName.SFT and batch.action_mask_BA is not None):
            router_loss = None
        if router_loss is not None and router_loss.why_not_computable is not None:
            router_loss = None
        recorded = place_recorded_routes(
            call,
            (batch.num_rows, batch.sequences_BS.shape[1]),
            actor_inputs.captured_index,
            self.routers,
            has_reversed_rows=self.has_reversed_rows,
        )
        if router_loss is None:
            return (PassRoutes(recorded=recorded, forces=self._forces) if recorded else None), None
        is_real_T = actor_inputs.captured_index.flatten() >= 0
        return (
            PassRoutes(recorded=recorded, forces=self._forces, logits_index=router_loss.logits_index),
            RouterLossTerm(
                loss=router_loss,
                is_real_T=is_real_T,
                scale=scale_to_mean(call, batch) if loop_loss is None else 1.0,
                training_loop_loss=loop_loss,
            ),
        )

    def describe_router_loss_of_training_loop(self, call: CapturedCall, factor: Tensor | None) -> JobRouterLoss | None:
        """Describe the routers' loss that the job's training loop may have added to its own loss.

        None: it had none to add.
        """
        if not self._may_loop_add_router_loss(call) or self.router_loss is None:
            return None
        return JobRouterLoss(
            coefficient=self.router_loss.coefficient,
            factor=math.nan if factor is None else factor.item(),
            is_noted=isinstance(call.outputs.get("noted_loss"), float),
        )

    def _may_loop_add_router_loss(self, call: CapturedCall) -> bool:
        """Tell whether the job's loop computed its loss from logits, and the model returned a routers' loss to add."""
        return self.loss == FROM_LOGIT_GRADIENT.name and call.trains and computes_router_loss(call, self.config)

    def _read_training_loop_loss(self, call: CapturedCall, batch: MicroBatch) -> TrainingLoopLoss:
        value = call.outputs.get("noted_loss")
        dtypes = [*(list_job_dtypes(call) or ["bfloat16"]), self.dtype]
        num_layers = self.config.get_text_config().num_hidden_layers
        bound = compute_bound(LOSS, dtypes, num_layers, count_action_tokens(batch), is_mixture=True)
        return TrainingLoopLoss(noted_value=value if isinstance(value, float) else None, bound=bound)

    def has_job_routes(self, flips: Sequence[RouterFlips]) -> bool:
        """Tell whether every router of the model sent each token to the experts that the job chose."""
        return self._forces and bool(flips) and {router_flips.router for router_flips in flips} == set(self.routers)

    def describe(self, flips: Sequence[RouterFlips], router_loss: Tensor | None) -> RoutesSection:
        """Describe whose experts the tokens of a pass went to, and how many tokens would choose other experts."""
        if not self.routers:
            return RoutesSection()
        return RoutesSection(
            routing=(Routing.RECORDED if self.has_job_routes(flips) else Routing.LIVE).value,
            routed_tokens=sum(router_flips.num_tokens for router_flips in flips),
            flipped_tokens=sum(len(router_flips.distances) for router_flips in flips),
            flips_by_router={
                router_flips.router: len(router_flips.distances) for router_flips in flips if router_flips.distances
            },
            router_loss=(router_loss.item() or None) if router_loss is not None else None,
        )

    @property
    def _forces(self) -> bool:
        return self.routing is Routing.RECORDED


def place_recorded_routes(
    call: CapturedCall,
    shape: tuple[int, int],
    captured_index: Tensor,
    routers: Collection[str],
    *,
    has_reversed_rows: bool,
) -> dict[str, Tensor]:
    """Return, by the name of each router here, the experts that the job chose for each fed token.

    A router is left out if the capture holds no choice for it, or not one choice for each captured token.

    shape           rows of the capture, and tokens in a row
    captured_index  the index of each fed token in the flattened capture; -1: it is padding
    routers         the routers' names here
    """
    recorded = {}
    for name, job_name in match_routers(call.routes, routers).items():
        choice_TK = call.routes[job_name]
        if choice_TK.ndim != 2 or len(choice_TK) != shape[0] * shape[1]:
            continue
        if has_reversed_rows:
            choice_TK = choice_TK.view(*shape, -1).flip(0).flatten(0, 1)
        recorded[name] = place_routes(choice_TK, captured_index)
    return recorded
