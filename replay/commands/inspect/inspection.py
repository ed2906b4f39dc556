"""Summarise a folder of captures: files of one pass are read, of segments their indexes; damage is listed by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actor_init.as_json import to_json
from actor_init.spec import UsageError
from capture.black_box.incidents import Incident, read_incidents
from capture.black_box.salvage import salvage_for_reading
from capture.file_format.actor_config import read_actor_config
from capture.file_format.end_record import not_recorded_in
from capture.file_format.listing import lone_files, segment_files
from capture.file_format.micro_batch import CaptureError
from replay.commands.inspect.totals import KindFacts, Odd, Totals, one_thread
from replay.options.given_paths import check_folder
from replay.options.wording import in_flags
from replay.output.text import Pairs
from replay.post_mortem.last_seen import last_seen
from replay.post_mortem.text import post_mortem


@dataclass(frozen=True, kw_only=True, slots=True)
class RankIncident:
    """An incident that made a rank write its passes. `num_others` came later; nothing was written for those."""

    rank: int
    incident: Incident
    num_others: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What a folder of captures holds."""

    folder: Path
    model: str
    num_by_format: Mapping[str, int]
    first_time: str | None
    last_time: str | None
    versions: list[str] = field(default_factory=list)
    kinds: list[KindFacts] = field(default_factory=list)
    damaged: list[tuple[Path, str]] = field(default_factory=list)
    unreplayable: list[tuple[Path, str]] = field(default_factory=list)
    missing_ranks: list[int] = field(default_factory=list)  # of the job's world, of which there is no pass
    world_size: int = 0
    not_recorded: Mapping[str, int] = field(default_factory=dict)  # training passes, by the reason
    incidents: list[RankIncident] = field(default_factory=list)
    hang: Pairs = field(default_factory=list)  # which rank was behind, and a line for each rank
    in_memory: str | None = None  # passes of dead processes that could not be written from memory to the folder
    longest: list[Odd] = field(default_factory=list)
    odd: list[Odd] = field(default_factory=list)  # the first ones
    num_odd: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the inspection as JSON has it."""
        files = {"damaged": self.damaged, "unreplayable": self.unreplayable}
        named = {name: [{"path": str(path), "error": error} for path, error in pairs] for name, pairs in files.items()}
        return {**to_json(self), **named, "hang": dict(self.hang)}


def inspect_folder(folder: Path) -> Inspection:
    """Summarise the captures in `folder`, and the passes that dead processes of this host left in memory.

    Of a pass in a segment only what stands out is read; whether the others are damaged is for `capture check`. Raises
    UsageError if there is no such folder, or it holds no captures or incidents.
    """
    check_folder(folder, "Try: replay inspect inputs/sample")
    in_memory = salvage_for_reading(folder)
    damaged: list[tuple[Path, str]] = []
    incidents, hang, not_recorded = _records_of(folder, damaged)
    files, segments = lone_files(folder), segment_files(folder)
    if not (files or segments or incidents or not_recorded) and in_memory is None:
        raise UsageError(f"{folder} holds no captures (*.pkl, or segments, *.seg). Try: replay inspect inputs/sample")
    totals = Totals(damaged)
    for path in files:
        totals.add_file(path)
    with one_thread():
        for path in segments:
            totals.add_segment(path)
    model = _model_of(folder, damaged)
    return Inspection(
        folder=folder,
        model=model,
        num_by_format=totals.num_by_format | ({"damaged": len(damaged)} if damaged else {}),
        first_time=totals.first_time,
        last_time=totals.last_time,
        versions=sorted(totals.versions),
        kinds=[kind.facts(name) for name, kind in totals.kinds.items() if kind.num_passes],
        damaged=damaged,
        unreplayable=totals.unreplayable,
        missing_ranks=totals.missing_ranks(),
        world_size=totals.world_size,
        not_recorded=not_recorded,
        incidents=incidents,
        hang=hang,
        in_memory=in_memory,
        longest=totals.longest(),
        odd=totals.odd,
        num_odd=totals.num_odd,
    )


def _records_of(folder: Path, damaged: list[tuple[Path, str]]) -> tuple[list[RankIncident], Pairs, Mapping[str, int]]:
    """Return the incidents, which rank was behind, and the training passes that are missing, by the reason.

    Where these cannot be read, return none, and say so in `damaged`.
    """
    try:
        records = read_incidents(folder)
        hang = post_mortem(last_seen(folder))
        not_recorded = not_recorded_in(folder)
    except CaptureError as error:
        damaged.append((folder, in_flags(error)))
        return [], [], {}
    incidents = [
        RankIncident(rank=record.rank, incident=one, num_others=record.num_others)
        for record in records
        for one in record.incidents
    ]
    return incidents, hang, not_recorded


def _model_of(folder: Path, damaged: list[tuple[Path, str]]) -> str:
    """Describe the model of actor.json; where that cannot be read, say so in `damaged`."""
    try:
        config = read_actor_config(folder)
    except CaptureError as error:
        damaged.append((folder / "actor.json", in_flags(error)))
        return "actor.json cannot be read"
    return "no actor.json: replay needs --model" if config is None else describe_model(config)


def describe_model(config: Mapping[str, object]) -> str:
    """Describe a model's config in one line; missing fields are left out."""
    sizes = {"num_hidden_layers": "layers", "hidden_size": "hidden", "vocab_size": "vocabulary"}
    said = [f"{word} {config[key]}" for key, word in sizes.items() if key in config]
    return ", ".join([str(config.get("model_type", "unnamed")), *said])
