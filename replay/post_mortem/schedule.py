"""Read what each rank of a folder did, pass by pass, as far as it decides which collectives the rank entered."""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from capture.file_format.capture_file import Call, read_call
from capture.file_format.end_record import EndRecord, read_end_records
from capture.file_format.listing import CaptureLocation, list_captures
from capture.file_format.micro_batch import ID_NAMES
from capture.file_format.optimizer_step import OptimizerStep

MOST_READ = 20_000  # passes; of a larger folder in segments their indexes are read, and of the rest what has a step
_OF_A_RANK = re.compile(r"actor_inputs_rank\d{1,9}_\d{8}_.*")  # a dump of another name is no pass of the loop


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPass:
    """One pass of one rank. What the capture does not say is None.

    number         of the forward, from 0
    shape          rows, and tokens of a row with padding
    longest        tokens up to the last real one of any row
    digest         of the token ids
    optimizer_step steps of this rank before the pass
    step           what the optimizer was given behind it
    num_trained    parameters that are not frozen
    is_sharded     the rank holds shards of the weights
    computed_in    dtype in which the model computes
    """

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
    """One recording of one rank: the passes that are known by number, and its end, if the rank said so."""

    rank: int
    passes: Mapping[int, PlannedPass]
    end: EndRecord | None

    @property
    def num_passes(self) -> int:
        return self.end.num_passes if self.end is not None else max(self.passes) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What several ranks did in one recording.

    left_out   why some captures are not among them
    world_size of the job; 0: not known
    """

    ranks: Sequence[RankSchedule]
    world_size: int
    left_out: Sequence[str] = field(default_factory=tuple)

    @property
    def num_passes(self) -> int:
        return max((rank.num_passes for rank in self.ranks), default=0)


def read_schedules(folder: Path) -> list[Schedule]:
    """Read the folder's recordings, in order; the last one alone where some ranks recorded more often than others.

    Raises CaptureError for a damaged capture.
    """
    captures = list_captures(folder)
    known = [one for one in captures if _OF_A_RANK.fullmatch(one.path.name)]
    left_out = (
        [f"{len(captures) - len(known)} captures with names of another kind"] if len(known) < len(captures) else []
    )
    reads_all = len(known) <= MOST_READ
    recordings: dict[int, list[dict[int, PlannedPass]]] = {}
    world_size = 0
    for one in known:
        rank, world, planned = _planned(one, recordings, reads_all)
        world_size = max(world_size, world)
        of_rank = recordings.setdefault(rank, [{}])
        if of_rank[-1] and planned.number <= next(reversed(of_rank[-1])):
            of_rank.append({})
        of_rank[-1][planned.number] = planned
    ends = sorted(read_end_records(folder), key=lambda end: end.opened)
    most = max((len(of_rank) for of_rank in recordings.values()), default=0)
    if any(len(of_rank) < most for of_rank in recordings.values()):
        left_out.append("recordings before the last one: ranks have different numbers of them")
        recordings = {rank: of_rank[-1:] for rank, of_rank in recordings.items()}
        most = 1
    return [
        Schedule(
            ranks=[
                RankSchedule(rank=rank, passes=of_rank[place], end=_end_of(rank, place - most, most, ends))
                for rank, of_rank in sorted(recordings.items())
            ],
            world_size=world_size,
            left_out=tuple(left_out),
        )
        for place in range(most)
    ]


def _end_of(rank: int, place: int, most: int, ends: Sequence[EndRecord]) -> EndRecord | None:
    """Find the end of a rank's recording, counted from the last one; none where some recordings left no end."""
    own = [end for end in ends if end.rank == rank]
    return own[place] if len(own) == most else None


def _planned(
    one: CaptureLocation, recordings: Mapping[int, Sequence[Mapping[int, PlannedPass]]], reads_all: bool
) -> tuple[int, int, PlannedPass]:
    record = one.record
    if record is not None and not reads_all and record.window is None and record.forward is not None:
        counts = record.counts
        planned = PlannedPass(
            number=record.forward,
            trains=record.trains,
            shape=None if counts is None else (counts.rows, counts.row_length),
            optimizer_step=record.optimizer_step,
        )
        return one.rank, 0, planned
    call = read_call(one.path)
    rank = one.rank if call.origin.rank is None else call.origin.rank
    of_rank = recordings.get(rank, [{}])
    number = call.origin.step if call.origin.step is not None else len(of_rank[-1])
    return rank, call.origin.world_size or 0, _planned_call(call, number)


def _planned_call(call: Call, number: int) -> PlannedPass:
    ids_BS = next((call.tensors[name] for name in ID_NAMES if name in call.tensors), None)
    has_rows = ids_BS is not None and ids_BS.ndim == 2
    weights = call.weights
    return PlannedPass(
        number=number,
        trains=call.trains,
        shape=(int(ids_BS.shape[0]), int(ids_BS.shape[1])) if ids_BS is not None and has_rows else None,
        longest=_longest(call.tensors.get("attention_mask")),
        digest=None if ids_BS is None else zlib.crc32(ids_BS.contiguous().numpy().tobytes(), ids_BS.numel()),
        optimizer_step=call.optimizer_step,
        step=call.step,
        num_trained=None if weights is None else weights.num_parameters - weights.num_frozen,
        is_sharded=None if weights is None else weights.is_sharded,
        computed_in=call.environment.get("computed_in"),
    )


def _longest(mask_BS: Tensor | None) -> int | None:
    """Return the columns from the first to the last that have a real token."""
    if mask_BS is None or mask_BS.ndim != 2:
        return None
    columns = mask_BS.bool().any(0).nonzero().flatten()
    return int(columns[-1] - columns[0]) + 1 if len(columns) else 0


def windows_of(rank: RankSchedule) -> Iterator[OptimizerStep]:
    """Yield the rank's optimizer steps in order."""
    for number in sorted(rank.passes):
        if (step := rank.passes[number].step) is not None:
            yield step
