"""Read what each recorded rank did in each pass, as far as that decides which collectives the rank entered."""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from capture.file_format.capture_file import CapturedCall, read_call
from capture.file_format.end_record import EndRecord, read_end_records
from capture.file_format.listing import CaptureLocation, list_captures
from capture.file_format.micro_batch import ID_NAMES
from capture.file_format.optimizer_step import OptimizerStep

# Of a folder with more passes, only captures with an optimizer step are read; of the others the segments' indexes are.
MAX_READ_PASSES = 20_000
# Files of other names are converted dumps, which are no passes of a loop.
_RANK_CAPTURE = re.compile(r"actor_inputs_rank\d{1,9}_\d{8}_.*")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPass:
    """One pass of one rank. What the capture does not tell is None.

    source          name of the capture
    number          of the forward, from 0
    shape           rows, and tokens of a row with padding
    longest         columns from the first to the last that hold a real token of any row
    digest          of the token ids
    optimizer_step  how many steps this rank had made before the pass
    step            the optimizer step after the pass
    num_trained     parameters that are not frozen
    is_sharded      the rank holds shards of the weights
    computed_in     the dtype in which the model computes
    """

    source: str
    number: int
    trains: bool
    shape: tuple[int, int] | None
    longest: int | None = None
    digest: int | None = None
    optimizer_step: int | None = None
    step: OptimizerStep | None = None
    num_trained: int | None = None
    is_sharded: bool | None = None
    computed_in: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSchedule:
    """One recording of one rank: the passes that are known, by number, and its end if the recording was closed."""

    rank: int
    passes: Mapping[int, PlannedPass]
    end: EndRecord | None

    @property
    def num_passes(self) -> int:
        return self.end.num_passes if self.end is not None else max(self.passes) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What several ranks did in one recording.

    world_size  of the job; 0: not known
    left_out    why some captures are not among them
    """

    ranks: Sequence[RankSchedule]
    world_size: int
    left_out: Sequence[str] = field(default_factory=tuple)

    @property
    def num_passes(self) -> int:
        return max((rank.num_passes for rank in self.ranks), default=0)


def read_schedules(folder: Path) -> list[Schedule]:
    """Read the folder's recordings, in order; the last one alone where some ranks recorded more often than others.

    A rank that begins another recording counts its passes from the start again: where the number of a pass does not
    grow, a new recording begins.

    Raises CaptureError for a damaged capture.
    """
    captures = list_captures(folder)
    captures_of_ranks = [capture for capture in captures if _RANK_CAPTURE.fullmatch(capture.path.name)]
    num_others = len(captures) - len(captures_of_ranks)
    left_out = [f"{num_others} captures with names of another kind"] if num_others else []
    reads_all = len(captures_of_ranks) <= MAX_READ_PASSES
    recordings: dict[int, list[dict[int, PlannedPass]]] = {}
    world_size = 0
    for capture in captures_of_ranks:
        rank, world, planned = _read_pass(capture, recordings, reads_all)
        world_size = max(world_size, world)
        rank_recordings = recordings.setdefault(rank, [{}])
        if rank_recordings[-1] and planned.number <= next(reversed(rank_recordings[-1])):
            rank_recordings.append({})
        rank_recordings[-1][planned.number] = planned
    ends = sorted(read_end_records(folder), key=lambda end: end.opened)
    most = max((len(rank_recordings) for rank_recordings in recordings.values()), default=0)
    if any(len(rank_recordings) < most for rank_recordings in recordings.values()):
        left_out.append("recordings before the last one: ranks have different numbers of them")
        recordings = {rank: rank_recordings[-1:] for rank, rank_recordings in recordings.items()}
        most = 1
    return [
        Schedule(
            ranks=[
                RankSchedule(rank=rank, passes=rank_recordings[number], end=_find_end(rank, number - most, most, ends))
                for rank, rank_recordings in sorted(recordings.items())
            ],
            world_size=world_size,
            left_out=tuple(left_out),
        )
        for number in range(most)
    ]


def _find_end(rank: int, number: int, most: int, ends: Sequence[EndRecord]) -> EndRecord | None:
    """Find the end of one of a rank's recordings; None where some of its recordings left no end.

    number  of the recording, counted from the last one, which is -1
    """
    rank_ends = [end for end in ends if end.rank == rank]
    return rank_ends[number] if len(rank_ends) == most else None


def _read_pass(
    capture: CaptureLocation, recordings: Mapping[int, Sequence[Mapping[int, PlannedPass]]], reads_all: bool
) -> tuple[int, int, PlannedPass]:
    """Return the rank, the job's world size (0: not known) and the pass, from the segment's index if that suffices.

    recordings  what was read before, which gives a pass without a number the next one
    """
    record = capture.record
    if record is not None and not reads_all and record.window is None and record.forward is not None:
        counts = record.counts
        planned = PlannedPass(
            source=capture.path.name,
            number=record.forward,
            trains=record.trains,
            shape=None if counts is None else (counts.rows, counts.row_length),
            optimizer_step=record.optimizer_step,
        )
        return capture.rank, 0, planned
    call = read_call(capture.path)
    rank = capture.rank if call.origin.rank is None else call.origin.rank
    rank_recordings = recordings.get(rank, [{}])
    number = call.origin.step if call.origin.step is not None else len(rank_recordings[-1])
    return rank, call.origin.world_size or 0, _describe_call(call, number)


def _describe_call(call: CapturedCall, number: int) -> PlannedPass:
    ids_BS = next((call.tensors[name] for name in ID_NAMES if name in call.tensors), None)
    has_rows = ids_BS is not None and ids_BS.ndim == 2
    weights = call.weights
    return PlannedPass(
        source=call.origin.source,
        number=number,
        trains=call.trains,
        shape=(int(ids_BS.shape[0]), int(ids_BS.shape[1])) if ids_BS is not None and has_rows else None,
        longest=_count_real_columns(call.tensors.get("attention_mask")),
        digest=None if ids_BS is None else zlib.crc32(ids_BS.contiguous().numpy().tobytes(), ids_BS.numel()),
        optimizer_step=call.optimizer_step,
        step=call.step,
        num_trained=None if weights is None else weights.num_parameters - weights.num_frozen,
        is_sharded=None if weights is None else weights.is_sharded,
        computed_in=call.environment.get("computed_in"),
    )


def _count_real_columns(mask_BS: Tensor | None) -> int | None:
    """Count the columns from the first to the last that hold a real token."""
    if mask_BS is None or mask_BS.ndim != 2:
        return None
    columns = mask_BS.bool().any(0).nonzero().flatten()
    return int(columns[-1] - columns[0]) + 1 if len(columns) else 0


def list_optimizer_steps(rank: RankSchedule) -> Iterator[OptimizerStep]:
    """Yield the rank's optimizer steps in order."""
    for number in sorted(rank.passes):
        if (step := rank.passes[number].step) is not None:
            yield step
