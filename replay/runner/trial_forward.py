"""Open an actor for trials, and run forwards through it with rows as the job had them.

Shape letters: B rows, S tokens a row, N log-probs, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actor_init.attention.exact_mask import see_exactly
from actor_init.backends.protocol import free_closed_backends
from actor_init.declarations.attention.plain import has_sdpa
from actor_init.inputs.documents import KeptLogits
from actor_init.inputs.packing import ActorInputs
from actor_init.model_form import HeadForm
from actor_init.option_values import Attention
from actor_init.spec import Compile
from actor_init.world import World
from capture.file_format.tensor_codec import RandomStates
from replay.options.resolved import ResolvedReplay
from replay.options.spec import StepMode
from replay.runner.replayer import ReopenableActor
from replay.runner.run_pass import PassInputs, run_pass
from replay.runner.trial_feeds import CapturedRows, Feed, feed_as_captured
from replay.watch.progress import Tracker

# Log-probs that are asked for at once where whole logits are computed, which each takes a row of the vocabulary.
MIN_TARGETS_AT_ONCE = 1024

ModelChange = Callable[[PreTrainedModel], AbstractContextManager[None]]


def make_trial_spec(spec: ResolvedReplay, world: World) -> ResolvedReplay:
    """Return a spec whose actor takes rows as they were captured, by a kernel that reads masks, uncompiled.

    All ranks must call this.
    """
    actor = replace(spec.actor, packing=False, pad_tokens=None, compile=Compile.OFF, gradient_checkpointing=False)
    if not actor.has_user_model:
        kernel = Attention.SDPA if has_sdpa(spec.source.config) else Attention.EAGER
        actor = replace(actor, attention=kernel)
    measure = replace(spec.measure, trace=False, details=False, step=StepMode.OFF)
    return spec.derive_variant(world, why="a trial feeds rows as the job had them", actor=actor, measure=measure)


@dataclass(kw_only=True, slots=True)
class TrialActor:
    """An open actor, and the rows that it is fed.

    trains         the pass ran in the model's train mode
    random_states  what the random generators are set to before each forward, so that dropout draws the job's masks
    num_forwards   that ran so far
    """

    actor: ReopenableActor
    head: HeadForm | None
    rows: CapturedRows
    trains: bool
    world: World
    tracker: Tracker
    random_states: RandomStates
    num_forwards: int = 0

    @classmethod
    @contextmanager
    def open(
        cls,
        spec: ResolvedReplay,
        rows: CapturedRows,
        world: World,
        tracker: Tracker,
        *,
        trains: bool,
        random_states: RandomStates,
    ) -> Iterator[Self]:
        """Open an actor, and free its memory at the end. All ranks must call this."""
        free_closed_backends()
        actor = ReopenableActor(
            spec.actor, spec.source, world, on_progress=lambda num_filled: tracker.report_progress()
        )
        try:
            yield cls(
                actor=actor,
                head=spec.source.head,
                rows=rows,
                trains=trains,
                world=world,
                tracker=tracker,
                random_states=random_states,
            )
        finally:
            actor.backend.close()
            del actor
            free_closed_backends()

    @property
    def model(self) -> PreTrainedModel:
        return self.actor.backend.model

    @contextmanager
    def lend(self, rows: CapturedRows, *, trains: bool, random_states: RandomStates) -> Iterator[None]:
        """Let the actor run another pass, of these rows, within this context."""
        own = self.rows, self.trains, self.random_states
        self.rows, self.trains, self.random_states = rows, trains, random_states
        try:
            yield
        finally:
            self.rows, self.trains, self.random_states = own

    def compute(self, feed: Feed, change: ModelChange | None = None) -> Tensor:
        """Return the replay's log-probs [B, A], in double precision on the host. All ranks must call this.

        change  changes the model within a context; then its logits are computed whole, as a job does
        """
        prepared = self.rows.prepared
        head = self.head if change is None else None
        with change(self.model) if change is not None else nullcontext():
            log_probs_N = self._run(feed, head, prepared.predictor_N, prepared.target_ids_N)
        return self.place(log_probs_N)

    def compute_targets(self, predictor_N: Tensor, target_N: Tensor) -> Tensor:
        """Return log-probs [N] of other targets, as `compute` does, of the unchanged pass.

        Where logits are computed whole, no more are asked for at once than a pass may have.
        """
        feed = feed_as_captured(self.rows)
        if self.head is not None and not self.head.is_whole:
            return self._run(feed, self.head, predictor_N, target_N)
        size = max(len(self.rows.prepared.predictor_N), MIN_TARGETS_AT_ONCE)
        # Every rank runs as many forwards, since a backend may gather weights in them.
        num_parts = max(self.world.gather(-(-len(predictor_N) // size)))
        parts = zip(predictor_N.tensor_split(num_parts), target_N.tensor_split(num_parts), strict=True)
        # The compiled loss has one target for each token.
        head = None if self.head is None else replace(self.head, compiled=None)
        return torch.cat([self._run(feed, head, predictors, targets) for predictors, targets in parts])

    def measure_logits(self) -> tuple[Tensor, Tensor]:
        """Return of each of the replay's log-probs what a smoothed loss and a z-loss need. All ranks must call this.

        Returns the mean log-prob of the vocabulary [N], and the logarithm of the sum of the logits' exponentials [N].
        """
        kept_logits = KeptLogits()
        measured: list[tuple[Tensor, Tensor]] = []

        def measure(log_probs_1N: Tensor) -> Tensor:
            logits_NV, _ = kept_logits.select_actions()
            log_sums_N = logits_NV.logsumexp(dim=1)
            measured.append(((logits_NV.mean(dim=1) - log_sums_N).double().cpu(), log_sums_N.double().cpu()))
            return log_probs_1N.sum()

        prepared = self.rows.prepared
        feed = feed_as_captured(self.rows)
        self._run(feed, None, prepared.predictor_N, prepared.target_ids_N, kept_logits, measure)
        return measured[0]

    def read_logits(self, predictor_N: Tensor, target_N: Tensor) -> Tensor:
        """Return the logits [N, V] of the unchanged pass that predict some targets, in double precision on the host.

        All ranks must call this.
        """
        kept_logits = KeptLogits()
        read: list[Tensor] = []

        def keep(log_probs_1N: Tensor) -> Tensor:
            read.append(kept_logits.select_actions()[0].double().cpu())
            return log_probs_1N.sum()

        self._run(feed_as_captured(self.rows), None, predictor_N, target_N, kept_logits, keep)
        return read[0]

    def measure_entropies(self) -> Tensor:
        """Return the entropies [B, A] of the distributions of the replay's tokens. All ranks must call this."""
        kept_logits = KeptLogits()
        measured: list[Tensor] = []

        def measure(log_probs_1N: Tensor) -> Tensor:
            measured.append(kept_logits.compute_entropies().detach().double().cpu().flatten())
            return log_probs_1N.sum()

        prepared = self.rows.prepared
        feed = feed_as_captured(self.rows)
        self._run(feed, None, prepared.predictor_N, prepared.target_ids_N, kept_logits, measure)
        return self.place(measured[0])

    def place(self, log_probs_N: Tensor) -> Tensor:
        """Return the replay's log-probs [B, A] with these values."""
        prepared = self.rows.prepared
        flat = torch.zeros(prepared.action_mask_BA.numel(), dtype=torch.float64)
        return flat.index_put((prepared.slot_N,), log_probs_N).view(prepared.action_mask_BA.shape)

    def _run(
        self,
        feed: Feed,
        head: HeadForm | None,
        predictor_N: Tensor,
        target_N: Tensor,
        kept_logits: KeptLogits | None = None,
        compute_loss: Callable[[Tensor], Tensor] = torch.sum,
    ) -> Tensor:
        """Return log-probs [N] of these targets, in double precision on the host."""
        rows, table = self.rows, feed.table
        self.num_forwards += 1
        self.tracker.report_progress()
        inputs = ActorInputs(
            input_ids=rows.ids_BS,
            position_ids=torch.zeros_like(rows.ids_BS) if feed.position_BS is None else feed.position_BS,
            attention_mask_BS=rows.real_BS if rows.has_mask and table is None else None,
            cu_seq_lens=None,
            max_length=rows.ids_BS.shape[1],
            predictor_N=predictor_N,
            target_ids_N=target_N,
            slot_N=torch.arange(len(predictor_N)),
            action_mask_BA=torch.ones(1, len(predictor_N), dtype=torch.bool),
            captured_index=torch.arange(rows.ids_BS.numel()).view_as(rows.ids_BS),
            head=head,
            kept_logits=kept_logits,
            makes_positions=feed.position_BS is None,
        ).to(self.world.device)
        if table is not None:
            table = replace(table, visible_BSS=table.visible_BSS.to(self.world.device))
        pass_inputs = PassInputs(
            actor_inputs=inputs,
            compute_loss=compute_loss,
            train_mode=self.trains,
            builds_graph=False,
            runs_backward=False,
            random_states=self.random_states,
            captured_row_length=rows.ids_BS.shape[1],
        )
        with see_exactly(table):
            outcome = run_pass(self.actor.backend, pass_inputs)
        return outcome.log_probs_BA.double().cpu().flatten()
