"""Read every file in a folder of captures and summarise it; damaged files are listed by name."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from actor_init.spec import UsageError
from capture.file_format.actor_config import read_actor_config
from capture.file_format.capture_file import capture_files, read_call
from capture.file_format.micro_batch import CaptureError, MicroBatch
from capture.record.flight_recorder import dead_spools
from capture.record.incidents import Incident, read_incidents
from capture.record.retention import Keep
from capture.record.salvage import salvage


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    least: int
    median: float
    most: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KindFacts:
    """Facts about all passes of one kind: train or rollout."""

    name: str
    num_files: int
    ranks: list[int | None]
    rows: Spread
    row_length: Spread  # S, padding included
    padded_tokens: int
    real_tokens: int
    action_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankIncident:
    """An incident that made a rank write its passes. `num_others` came later; nothing was written for those."""

    rank: int
    incident: Incident
    num_others: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Odd:
    """A pass that stands out, and the reason."""

    source: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderFacts:
    folder: Path
    model: str
    num_by_format: Mapping[str, int]
    first_time: str | None
    last_time: str | None
    versions: list[str] = field(default_factory=list)
    kinds: list[KindFacts] = field(default_factory=list)
    damaged: list[tuple[Path, str]] = field(default_factory=list)
    incidents: list[RankIncident] = field(default_factory=list)
    in_memory: str | None = None  # passes of dead processes that could not be written from memory to the folder
    longest: list[Odd] = field(default_factory=list)
    odd: list[Odd] = field(default_factory=list)


def inspect_folder(folder: Path) -> FolderFacts:
    """Read every capture in `folder`, and the passes that dead processes of this host left in memory.

    Raises UsageError if there is no such folder, or it holds no captures or incidents.
    """
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}. Try: replay inspect inputs/sample")
    in_memory = _salvage(folder)
    paths = capture_files(folder)
    damaged: list[tuple[Path, str]] = []
    incidents: list[RankIncident] = []
    try:
        records = read_incidents(folder)
    except CaptureError as error:
        records = []
        damaged.append((folder, str(error)))
    for record in records:
        incidents.extend(
            RankIncident(rank=record.rank, incident=one, num_others=record.num_others) for one in record.incidents
        )
    if not paths and not incidents and in_memory is None:
        raise UsageError(f"{folder} holds no captures (*.pkl). Try: replay inspect inputs/sample")
    batches: list[MicroBatch] = []
    odd: list[Odd] = []
    num_by_format: Counter[str] = Counter()
    for path in paths:
        try:
            call = read_call(path)
            batches.append(batch := call.micro_batch())
            odd.extend(Odd(source=path.name, reason=reason) for reason in _oddities(batch, call.outputs))
            num_by_format["OpenRLHF dumps" if call.format is None else f"of format {call.format}"] += 1
        except CaptureError as error:
            damaged.append((path, str(error)))
    model = "no actor.json: replay needs --model"
    try:
        if (config := read_actor_config(folder)) is not None:
            model = describe_model(config)
    except CaptureError as error:
        damaged.append((folder / "actor.json", str(error)))
        model = "actor.json cannot be read"
    times = sorted(batch.origin.time for batch in batches if batch.origin.time is not None)
    kinds = [("train", [b for b in batches if b.trains]), ("rollout", [b for b in batches if not b.trains])]
    return FolderFacts(
        folder=folder,
        model=model,
        num_by_format=num_by_format | ({"damaged": len(damaged)} if damaged else {}),
        first_time=times[0] if times else None,
        last_time=times[-1] if times else None,
        versions=sorted({f"{name} {number}" for batch in batches for name, number in batch.origin.versions.items()}),
        kinds=[_kind_facts(name, members) for name, members in kinds if members],
        damaged=damaged,
        incidents=incidents,
        in_memory=in_memory,
        longest=_longest(batches),
        odd=odd,
    )


def _salvage(folder: Path) -> str | None:
    """Write the flight recorders of killed ranks into `folder`; if that fails, return what to type as which user."""
    try:
        ranks = sorted({spool.rank for spool in dead_spools(folder) if spool.calls or spool.num_cut_short})
    except OSError:
        return None
    if not ranks:
        return None
    try:
        salvage(folder, Keep())
    except OSError as error:
        named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        return (
            f"{named} died without an incident file, and the last passes are in this host's memory: {error.strerror}. "
            f"Try, as a user who may write there: capture salvage {folder}"
        )
    return None


def _oddities(batch: MicroBatch, outputs: Mapping[str, Any]) -> list[str]:
    reasons = [
        f"{name} was {value}"
        for name, value in outputs.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    if num_empty := int((batch.attention_mask_BS.sum(1) == 0).sum()):
        reasons.append(f"{num_empty} of {batch.num_rows} rows have no real token")
    if batch.action_mask_BA is not None and not batch.action_mask_BA.any():
        reasons.append("no token is an action")
    if batch.num_real_tokens * 5 < batch.num_padded_tokens:
        reasons.append(f"{1 - batch.num_real_tokens / batch.num_padded_tokens:.0%} is padding")
    return reasons


def _longest(batches: Sequence[MicroBatch]) -> list[Odd]:
    """Return the pass with the most tokens, if there are several kinds or ranks."""
    if len({batch.num_padded_tokens for batch in batches}) < 2:
        return []
    most = max(batches, key=lambda batch: batch.num_padded_tokens)
    rows, length = most.sequences_BS.shape
    return [Odd(source=most.origin.source, reason=f"{rows} rows of {length}, {most.num_real_tokens:,} tokens real")]


def describe_model(config: Mapping[str, Any]) -> str:
    """Describe a model's config in one line; missing fields are left out."""
    sizes = {"num_hidden_layers": "layers", "hidden_size": "hidden", "vocab_size": "vocabulary"}
    said = [f"{word} {config[key]}" for key, word in sizes.items() if key in config]
    return ", ".join([str(config.get("model_type", "unnamed")), *said])


def _kind_facts(name: str, batches: Sequence[MicroBatch]) -> KindFacts:
    ranks = {batch.origin.rank for batch in batches}
    return KindFacts(
        name=name,
        num_files=len(batches),
        ranks=sorted(ranks, key=lambda rank: -1 if rank is None else rank),
        rows=_spread([batch.num_rows for batch in batches]),
        row_length=_spread([batch.sequences_BS.shape[1] for batch in batches]),
        padded_tokens=sum(batch.num_padded_tokens for batch in batches),
        real_tokens=sum(batch.num_real_tokens for batch in batches),
        action_tokens=sum(int(b.action_mask_BA.sum()) for b in batches if b.action_mask_BA is not None),
    )


def _spread(values: Sequence[int]) -> Spread:
    return Spread(least=min(values), median=median(values), most=max(values))
