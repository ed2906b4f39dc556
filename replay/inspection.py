"""What a folder of captures holds: every file is read, the damaged ones are kept by name."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from actor_init.spec import UsageError
from capture.capture_file import capture_files, read_actor_config, read_call
from capture.micro_batch import CaptureError, MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    least: int
    median: float
    most: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KindFacts:
    """All passes of one kind: train or rollout."""

    name: str
    num_files: int
    ranks: list[int | None]
    rows: Spread
    row_length: Spread  # S, padding included
    padded_tokens: int
    real_tokens: int
    action_tokens: int


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


def inspect_folder(folder: Path) -> FolderFacts:
    """Read every capture in `folder`. Raises UsageError if there is no such folder or it holds none."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}. Try: replay inspect inputs/sample")
    paths = capture_files(folder)
    if not paths:
        raise UsageError(f"{folder} holds no captures (*.pkl). Try: replay inspect inputs/sample")
    batches: list[MicroBatch] = []
    damaged: list[tuple[Path, str]] = []
    num_by_format: Counter[str] = Counter()
    for path in paths:
        try:
            call = read_call(path)
            batches.append(call.micro_batch())
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
    )


def describe_model(config: Mapping[str, Any]) -> str:
    """One line out of a model's config; what a config does not say is left out."""
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
