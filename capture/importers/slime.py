"""Read slime's debug data: what `torch.save` wrote of the samples of a rollout.

slime up to 0.3.1, `slime/utils/train_dump_utils.py` (`--save-debug-train-data`, a file a rank): {"rollout_id", "rank",
"rollout_data": {column: [a value a sample]}}. After it (624b824, `slime/observability/train_data_utils.py`, a file for
all ranks): {"format_version": 2, "rollout_id", "rank", "samples": [{column: value}], "dp_shards": [each rank's "rank",
"data_parallel_rank", "partition", "micro_batch_indices"]}. `--save-debug-rollout-data`: {"rollout_id", "samples"}, each
what `Sample.to_dict` gives.

A sample is not padded: `tokens`, the last `response_lengths` of them generated, `loss_masks` and log-probs of as many
elements, numbers. Rows get zeros before them, so that their ends, and the last A tokens, stand below each other. A
rank's `micro_batch_indices` are the micro-batches that it trained on; slime packs their rows, here they are padded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from capture.file_format.capture_file import Call
from capture.file_format.micro_batch import CaptureError
from capture.importers.declaration import DumpFile, Importer
from capture.importers.record_pickle import Array
from capture.importers.rows import Dump, fits, kind_of, padded_left
from capture.importers.torch_zip import ZIP_START, load_torch_zip

_RESPONSE_LENGTH = ("response_lengths", "response_length")  # in training data, in rollout data
_LOSS_MASK = ("loss_masks", "loss_mask")
_LAYOUT = ("partition", "sample_indices", "micro_batch_indices", "num_microbatches", "global_batch_sizes")

Sample = Mapping[str, Any]
Groups = list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    """What one rank trained on: its samples in its order, its micro-batches if they are known, and what is left out."""

    rank: int | None
    samples: list[Sample]
    groups: Groups | None
    left_out: Mapping[str, str]


def slime_calls(dump: DumpFile, num_rows: int | None) -> Iterator[Call]:
    """Read a file. A micro-batch is `num_rows` samples of a rank, or what the dump says. Its step is its rollout_id.

    Raises CaptureError.
    """
    source = dump.source
    saved = load_torch_zip(dump.read(), source=source)
    if not isinstance(saved, dict):
        raise CaptureError(f"{source}: a saved {type(saved).__name__}; slime saves a dict")
    facts: dict[str, Any] = {"imported_from": "slime"}
    if type(saved.get("rollout_id")) is int:
        facts["training_step"] = saved["rollout_id"]
    for rank in _ranks(saved, source):
        num, groups = len(rank.samples), rank.groups
        if num_rows is not None or groups is None:
            size = num_rows or max(num, 1)
            groups = [list(range(start, min(start + size, num))) for start in range(0, num, size)]
        if sorted(index for group in groups for index in group) != list(range(num)) or not all(groups):
            raise CaptureError(f"{source}: micro_batch_indices do not have each of {num} samples once")
        for group in groups:
            yield _call([rank.samples[index] for index in group], facts, rank, source)


def _ranks(saved: Mapping[Any, Any], source: str) -> Iterator[_Rank]:
    match saved:
        case {"rollout_data": {"tokens": list(tokens)} as columns}:
            of_samples = {
                str(name): values
                for name, values in columns.items()
                if name not in _LAYOUT and _num_values(values) == len(tokens)
            }
            yield _Rank(
                rank=_rank(saved.get("rank"), source),
                samples=[{name: values[i] for name, values in of_samples.items()} for i in range(len(tokens))],
                groups=_groups(columns.get("micro_batch_indices"), source),
                left_out=_no_sample({name: value for name, value in columns.items() if name not in of_samples}),
            )
        case {"samples": list(samples), "dp_shards": list(shards)} if _are_dicts(samples) and _are_dicts(shards):
            of_rank: dict[int, list[Sample]] = {}
            for sample in samples:
                of_rank.setdefault(_rank(sample.get("data_parallel_rank"), source) or 0, []).append(sample)
            for shard in shards:
                its = of_rank.pop(_rank(shard.get("data_parallel_rank"), source) or 0, None)
                if its is None:
                    raise CaptureError(f"{source}: two of dp_shards have the same samples, or one has none")
                yield _Rank(
                    rank=_rank(shard.get("rank"), source),
                    samples=_in_order(its, shard, source),
                    groups=_groups(shard.get("micro_batch_indices"), source),
                    left_out=_no_sample({**saved, **shard}),
                )
            if of_rank:
                raise CaptureError(f"{source}: samples of data_parallel_rank {min(of_rank)}, which no dp_shard has")
        case {"samples": list(samples)} if _are_dicts(samples):
            yield _Rank(rank=None, samples=samples, groups=None, left_out=_no_sample(saved))
        case _:
            raise CaptureError(
                f"{source}: a file of torch.save, but none of slime's debug data: it has "
                f"{str(sorted(map(str, saved)))[:200]}"
            )


def _no_sample(values: Mapping[Any, Any]) -> dict[str, str]:
    known = ("rollout_id", "rank", "format_version", "samples", "dp_shards", "data_parallel_rank", *_LAYOUT)
    return {str(name)[:100]: f"of no sample: {kind_of(value)}" for name, value in values.items() if name not in known}


def _are_dicts(values: list[Any]) -> bool:
    return all(isinstance(value, dict) for value in values)


def _in_order(samples: list[Sample], shard: Mapping[Any, Any], source: str) -> list[Sample]:
    """Sort samples as the rank had them: a dump sorts them by their position in the rollout, and records that."""
    for column, name in (("partition", "rollout_position"), ("sample_indices", "sample_index")):
        order = shard.get(column)
        if isinstance(order, list) and all(type(place) is int for place in order):
            placed: dict[int, Sample] = {}
            for sample in samples:
                if isinstance(place := sample.get(name), int):
                    placed[place] = sample
            if len(placed) == len(samples) and sorted(placed) == sorted(order):
                return [placed[place] for place in order]
            raise CaptureError(f"{source}: {column} of a shard does not have each of its {len(samples)} samples once")
    return samples


def _groups(indices: Any, source: str) -> Groups | None:
    if indices is None:
        return None
    match indices:
        case list() if all(isinstance(group, list) and all(type(i) is int for i in group) for group in indices):
            return list(indices)
    raise CaptureError(f"{source}: micro_batch_indices are no lists of integers")


def _rank(rank: Any, source: str) -> int | None:
    if rank is not None and (type(rank) is not int or not 0 <= rank < 2**31):
        raise CaptureError(f"{source}: rank must be a number, not {str(rank)[:40]}")
    return rank


def _call(samples: Sequence[Sample], facts: Mapping[str, Any], rank: _Rank, source: str) -> Call:
    num_tokens = max(_num_values(sample.get("tokens")) or 0 for sample in samples)
    names = dict.fromkeys(str(name) for sample in samples for name in sample)
    fits(len(samples), [num_tokens] * (2 + len(names)), source)
    rows = [_numbers(sample.get("tokens")) for sample in samples]
    tokens = [row for row in rows if row is not None and row.ndim == 1 and not row.is_floating_point()]
    if len(tokens) != len(samples):
        raise CaptureError(f"{source}: a sample without tokens")
    lengths = [_length(sample, len(row), source) for sample, row in zip(samples, tokens, strict=True)]
    num_actions = max(lengths)
    tensors = {
        "sequences": padded_left([row.long() for row in tokens], num_tokens),
        "attention_mask": padded_left([torch.ones(len(row), dtype=torch.bool) for row in tokens], num_tokens),
    }
    left_out = dict(rank.left_out)
    for name in names:
        column = _column([sample.get(name) for sample in samples], lengths, tokens)
        if name in ("tokens", "total_lengths", *_RESPONSE_LENGTH):
            continue
        if isinstance(column, str):
            left_out[name] = column
        else:
            tensors["action_mask" if name in _LOSS_MASK else name] = column
    if not any(name in names for name in _LOSS_MASK) or any(name in left_out for name in _LOSS_MASK):
        mask = [torch.ones(length, dtype=torch.bool) for length in lengths]
        tensors["action_mask"] = padded_left(mask, num_actions)
    dump = Dump(source=source, tensors=tensors, facts=facts, left_out=left_out, rank=rank.rank)
    (call,) = dump.calls(None)
    return replace(call, call_facts=facts)


def _column(values: list[Any], lengths: list[int], tokens: list[Tensor]) -> Tensor | str:
    """Stack a column: [B, A] with an element for each action, [B, S] for each token, [B] for each sample.

    A text says what the column is instead.
    """
    rows = [_numbers(value) for value in values]
    found = [row for row in rows if row is not None]
    if len(found) != len(rows) or len({row.dtype for row in found}) > 1:
        return kind_of(next((value for value in values if _numbers(value) is None), "numbers of several kinds"))
    sizes = [tuple(row.shape) for row in found]
    if sizes == [()] * len(found):
        return torch.stack(found)
    for widths in (lengths, [len(row) for row in tokens]):
        if sizes == [(width,) for width in widths]:
            return padded_left(found, max(widths))
    return f"{found[0].dtype} of shape {list(found[0].shape)}, for a sample of {len(tokens[0])} tokens"


def _numbers(value: Any) -> Tensor | None:
    """Read a number, a list of numbers, or a tensor of any shape; None for anything else."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Array):
        return value.tensor()
    values = value if isinstance(value, list) else [value]
    if not values or not all(type(item) in (int, float, bool) and abs(item) < 2**53 for item in values):
        return None
    return torch.tensor(value)


def _num_values(value: Any) -> int | None:
    is_column = isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.ndim > 0)
    return len(value) if is_column else None


def _length(sample: Sample, num_tokens: int, source: str) -> int:
    given = [sample[name] for name in _RESPONSE_LENGTH if name in sample]
    number = int(given[0]) if given and isinstance(given[0], int | Tensor) and _is_scalar(given[0]) else 0
    if not 0 <= number < num_tokens:
        raise CaptureError(f"{source}: a sample of {num_tokens} tokens whose response is not shorter")
    return number


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or (value.ndim == 0 and not value.is_floating_point())


SLIME = Importer(
    project="slime",
    suffixes=(".pt",),
    is_its=lambda start: start.startswith(ZIP_START),
    calls=slime_calls,
)
