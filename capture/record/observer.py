"""What a recording reports to an observer, such as the black box, and all that the observer knows of the recording."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

from capture.file_format.capture_file import EncodedCall
from capture.file_format.tensor_codec import Output

TrainingPhase = Literal[
    "before any forward",
    "in forward",
    "after forward",
    "in backward",
    "after backward",
    "in the optimizer's step",
    "after the optimizer's step",
]
# In the order in which a pass goes through them.
TRAINING_PHASES: tuple[TrainingPhase, ...] = get_args(TrainingPhase)


@dataclass(kw_only=True, slots=True)
class JobPosition:
    """Where a job is, as the hooks of its recording saw it last.

    forward        number of the forward that began last; -1 before the first
    last_backward  number of the pass whose loss was differentiated last; -1 if none was seen
    """

    forward: int = -1
    last_backward: int = -1
    phase: TrainingPhase = "before any forward"


class Recording(Protocol):
    """A recording as an observer sees it.

    opened         the time of its beginning (ISO 8601, UTC), which its files have in their names
    rank_and_folder  the rank, and the folder of its files, as the writer's thread knows them
    """

    position: JobPosition
    rank: int
    world_size: int
    opened: str

    @property
    def rank_and_folder(self) -> tuple[int, Path]: ...

    def flush(self, *, max_seconds: float) -> bool:
        """Wait until all that was handed to the writer's thread is handled. Returns False if it took longer."""

    def run_in_writer(self, action: Callable[[], None]) -> None:
        """Have the writer's thread call `action` soon, after what was handed over before."""

    def write_held(self) -> list[Path]:
        """Write the passes that are held in memory. For the writer's thread. Raises OSError."""

    def commit(self) -> None:
        """List in manifests what was written. For the writer's thread. Raises OSError."""


class RecordingObserver:
    """Is called at what happens in one recording. This base class does nothing.

    No method raises, except that those that the writer's thread calls may raise OSError, which ends the recording.
    """

    handles_signals = False

    # The job's thread calls these. They must not wait.

    def on_open(self, recording: Recording) -> None:
        """The recording begins. There is no folder yet, and nothing is recorded if it cannot be made."""

    def on_attach(self) -> None:
        """The folder is there, and the model will be hooked."""

    def on_position_change(self) -> None:
        """The recording's position has changed."""

    def on_error(self, error: BaseException, where: str) -> None:
        """A forward has raised `error`, or the loop that is recorded has."""

    def on_close(self) -> None:
        """The recording has ended, and its files are written."""

    # The writer's thread calls these.

    def seconds_left(self) -> float | None:
        """Return how long the writer may sleep before `on_deadline`; None without a deadline."""
        return None

    def on_deadline(self) -> None:
        """`seconds_left` has come down to 0."""

    def on_new_rank_folder(self) -> None:
        """The rank, or the folder of its files, is another one from here on. Nothing is written there yet."""

    def on_hold(self, encoded: EncodedCall) -> None:
        """A pass is held in memory, or a pass that is held has changed."""

    def on_release(self, encoded: EncodedCall) -> None:
        """A pass is no longer held: it was written or dropped."""

    def on_idle(self) -> None:
        """All that was handed over is handled, or waits for a device."""

    def on_outputs(self, forward: int, outputs: Mapping[str, Output]) -> None:
        """These outputs and noted numbers of a pass have arrived."""

    def on_lost_copy(self) -> None:
        """A copy from a device failed or came too late."""

    def on_end(self, failed: bool) -> None:
        """The writer's thread ends."""
