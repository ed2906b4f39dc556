"""Hold an open actor, and open it again after a pass that failed."""

from pathlib import Path

from actor_init.backends.protocol import Backend, free_closed, open_backend
from actor_init.model import ModelSource
from actor_init.spec import ActorSpec
from actor_init.weights import OnProgress, unheard
from actor_init.world import World


class ReopeningError(RuntimeError):
    """Raised if the actor could not be opened again after a pass failed."""


class ReopenedActor:
    """Hold a backend and open it again after a failed pass, whose leftover state would corrupt the next pass."""

    def __init__(
        self,
        spec: ActorSpec,
        source: ModelSource,
        world: World,
        load_state: Path | None = None,
        on_progress: OnProgress = unheard,
    ) -> None:
        self._arguments = (spec, source, world, on_progress)
        self._load_state = load_state
        self.backend: Backend = self._opened()

    def _opened(self) -> Backend:
        backend = open_backend(*self._arguments)
        if self._load_state is not None:
            backend.load_state(self._load_state)
        return backend

    def reopen(self) -> None:
        self.backend.close()
        del self.backend
        free_closed(failed=True)
        try:
            self.backend = self._opened()
        except Exception as error:
            raise ReopeningError(f"the actor could not be opened again after the failed pass: {error}") from error
