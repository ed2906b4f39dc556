"""What a recording tells an observer beside it, such as the black box, and all that it knows of one."""

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
TRAINING_PHASES: tuple[TrainingPhase, ...] = get_args(TrainingPhase)  # in the order in which a pass goes through them


@dataclass(kw_only=True, slots=True)
class JobPosition:
    """Where a job is, as the hooks of its recording saw it last.

    forward        number of the forward that began last; -1 before the first
    last_backward  number of the pass whose loss was differentiated last; -1: none was seen
    """

    forward: int = -1
    last_backward: int = -1
    place: TrainingPhase = "before any forward"


class Recording(Protocol):
    """A recording as an observer sees it.

    opened  the time of its beginning (ISO 8601, UTC), which its files have in their names
    place   the rank, and the folder of its files, as the writer's thread knows them
    """

    position: JobPosition
    rank: int
    world_size: int
    opened: str

    @property
    def place(self) -> tuple[int, Path]: ...

    def flush(self, *, max_seconds: float) -> bool:
        """Wait until all that was handed over is done. Returns False if it took longer."""

    def do_in_writer(self, action: Callable[[], None]) -> None:
        """Have the writer's thread do `action` soon, after what was handed over before."""

    def write_held(self) -> list[Path]:
        """Write the passes that are held, in the writer's thread. Raises OSError."""

    def commit(self) -> None:
        """List in manifests what was written, in the writer's thread. Raises OSError."""


class Observer:
    """Is told what happens in one recording; this one does nothing about it.

    Its methods do not raise. Exception: those of the writer's thread may raise OSError, which ends the recording.
    """

    hears_signals = False

    # in the job's thread, which must not wait

    def on_open(self, recording: Recording) -> None:
        """The recording begins; there is no folder yet, and nothing is recorded if it cannot be made."""

    def on_attach(self) -> None:
        """The folder is there, and the model will be hooked."""

    def on_move(self) -> None:
        """The recording's position has changed."""

    def on_error(self, error: BaseException, where: str) -> None:
        """A forward has raised `error`, or the loop that is recorded has."""

    def on_close(self) -> None:
        """The recording has ended, and its files are written."""

    # in the writer's thread

    def seconds_left(self) -> float | None:
        """Return how long the writer may sleep before `on_deadline`; None without a deadline."""
        return None

    def on_deadline(self) -> None: ...

    def on_settle(self) -> None:
        """The recording has come to another place, and nothing is written there yet."""

    def on_hold(self, encoded: EncodedCall) -> None:
        """A pass is held in memory, or what is held of it has changed."""

    def on_release(self, encoded: EncodedCall) -> None:
        """A pass is held no longer: it was written or let go."""

    def on_idle(self) -> None:
        """What was handed over is done, or waits for a device."""

    def on_numbers(self, forward: int, numbers: Mapping[str, Output]) -> None:
        """These outputs and notes of a pass have come."""

    def on_lost_copy(self) -> None:
        """A copy from a device failed or came too late."""

    def on_end(self, failed: bool) -> None:
        """The writer's thread ends."""
