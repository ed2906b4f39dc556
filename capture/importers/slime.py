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

from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import CaptureError
from capture.importers.declaration import DumpFile, Importer
from capture.importers.dump_rows import DumpRows, check_size, describe_kind, pad_left
from capture.importers.record_pickle import Array
from capture.importers.torch_zip import ZIP_START, load_torch_zip

# Of two names the first stands in training data, the second in rollout data.
_RESPONSE_LENGTH_NAMES = ("response_lengths", "response_length")
_LOSS_MASK_NAMES = ("loss_masks", "loss_mask")
_LAYOUT_NAMES = ("partition", "sample_indices", "micro_batch_indices", "num_microbatches", "global_batch_sizes")

Sample = Mapping[str, Any]
# The numbers of the samples of each micro-batch.
MicroBatchIndices = list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankData:
    """What one rank trained on.

    samples   the samples in the rank's order
    indices   the rank's micro-batches, by the numbers of their samples; None where they are not known
    left_out  reason by name of what is not taken over
    """

    rank: int | None
    samples: list[Sample]
    indices: MicroBatchIndices | None
    left_out: Mapping[str, str]


def read_slime(dump: DumpFile, num_rows: int | None) -> Iterator[CapturedCall]:
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
    for rank_data in _read_ranks(saved, source):
        num_samples, micro_batches = len(rank_data.samples), rank_data.indices
        if num_rows is not None or micro_batches is None:
            size = num_rows or max(num_samples, 1)
            starts = range(0, num_samples, size)
            micro_batches = [list(range(start, min(start + size, num_samples))) for start in starts]
        indices = sorted(index for micro_batch in micro_batches for index in micro_batch)
        if indices != list(range(num_samples)) or not all(micro_batches):
            raise CaptureError(f"{source}: micro_batch_indices do not have each of {num_samples} samples once")
        for micro_batch in micro_batches:
            yield _make_call([rank_data.samples[index] for index in micro_batch], facts, rank_data, source)


def _read_ranks(saved: Mapping[Any, Any], source: str) -> Iterator[_RankData]:
    """Yield what each rank trained on, by the three forms of slime's files. Raises CaptureError for any other file."""
    match saved:
        case {"rollout_data": {"tokens": list(tokens)} as columns}:
            sample_columns = {
                str(name): values
                for name, values in columns.items()
                if name not in _LAYOUT_NAMES and _count_values(values) == len(tokens)
            }
            others = {name: value for name, value in columns.items() if name not in sample_columns}
            yield _RankData(
                rank=_parse_rank(saved.get("rank"), source),
                samples=[
                    {name: values[index] for name, values in sample_columns.items()} for index in range(len(tokens))
                ],
                indices=_parse_indices(columns.get("micro_batch_indices"), source),
                left_out=_describe_left_out(others),
            )
        case {"samples": list(samples), "dp_shards": list(shards)} if _are_dicts(samples) and _are_dicts(shards):
            by_data_rank: dict[int, list[Sample]] = {}
            for sample in samples:
                data_rank = _parse_rank(sample.get("data_parallel_rank"), source) or 0
                by_data_rank.setdefault(data_rank, []).append(sample)
            for shard in shards:
                shard_samples = by_data_rank.pop(_parse_rank(shard.get("data_parallel_rank"), source) or 0, None)
                if shard_samples is None:
                    raise CaptureError(f"{source}: two of dp_shards have the same samples, or one has none")
                yield _RankData(
                    rank=_parse_rank(shard.get("rank"), source),
                    samples=_sort_samples(shard_samples, shard, source),
                    indices=_parse_indices(shard.get("micro_batch_indices"), source),
                    left_out=_describe_left_out({**saved, **shard}),
                )
            if by_data_rank:
                first = min(by_data_rank)
                raise CaptureError(f"{source}: samples of data_parallel_rank {first}, which no dp_shard has")
        case {"samples": list(samples)} if _are_dicts(samples):
            yield _RankData(rank=None, samples=samples, indices=None, left_out=_describe_left_out(saved))
        case _:
            raise CaptureError(
                f"{source}: a file of torch.save, but none of slime's debug data: it has "
                f"{str(sorted(map(str, saved)))[:200]}"
            )


def _describe_left_out(values: Mapping[Any, Any]) -> dict[str, str]:
    """Give the reason by name of values that belong to no sample, without the names that slime's files always have."""
    known_names = ("rollout_id", "rank", "format_version", "samples", "dp_shards", "data_parallel_rank", *_LAYOUT_NAMES)
    return {
        str(name)[:100]: f"of no sample: {describe_kind(value)}"
        for name, value in values.items()
        if name not in known_names
    }


def _are_dicts(values: list[Any]) -> bool:
    return all(isinstance(value, dict) for value in values)


def _sort_samples(samples: list[Sample], shard: Mapping[Any, Any], source: str) -> list[Sample]:
    """Sort samples as the rank had them: a dump sorts them by their position in the rollout, and records that."""
    for column, name in (("partition", "rollout_position"), ("sample_indices", "sample_index")):
        order = shard.get(column)
        if isinstance(order, list) and all(type(position) is int for position in order):
            by_position: dict[int, Sample] = {}
            for sample in samples:
                if isinstance(position := sample.get(name), int):
                    by_position[position] = sample
            if len(by_position) == len(samples) and sorted(by_position) == sorted(order):
                return [by_position[position] for position in order]
            raise CaptureError(f"{source}: {column} of a shard does not have each of its {len(samples)} samples once")
    return samples


def _parse_indices(indices: Any, source: str) -> MicroBatchIndices | None:
    if indices is None:
        return None
    match indices:
        case list() if all(
            isinstance(micro_batch, list) and all(type(index) is int for index in micro_batch)
            for micro_batch in indices
        ):
            return list(indices)
    raise CaptureError(f"{source}: micro_batch_indices are no lists of integers")


def _parse_rank(rank: Any, source: str) -> int | None:
    if rank is not None and (type(rank) is not int or not 0 <= rank < 2**31):
        raise CaptureError(f"{source}: rank must be a number, not {str(rank)[:40]}")
    return rank


def _make_call(samples: Sequence[Sample], facts: Mapping[str, Any], rank_data: _RankData, source: str) -> CapturedCall:
    num_tokens = max(_count_values(sample.get("tokens")) or 0 for sample in samples)
    names = dict.fromkeys(str(name) for sample in samples for name in sample)
    check_size(len(samples), [num_tokens] * (2 + len(names)), source)
    rows = [_read_numbers(sample.get("tokens")) for sample in samples]
    tokens = [row for row in rows if row is not None and row.ndim == 1 and not row.is_floating_point()]
    if len(tokens) != len(samples):
        raise CaptureError(f"{source}: a sample without tokens")
    lengths = [_read_length(sample, len(row), source) for sample, row in zip(samples, tokens, strict=True)]
    num_actions = max(lengths)
    tensors = {
        "sequences": pad_left([row.long() for row in tokens], num_tokens),
        "attention_mask": pad_left([torch.ones(len(row), dtype=torch.bool) for row in tokens], num_tokens),
    }
    left_out = dict(rank_data.left_out)
    for name in names:
        column = _stack_column([sample.get(name) for sample in samples], lengths, tokens)
        if name in ("tokens", "total_lengths", *_RESPONSE_LENGTH_NAMES):
            continue
        if isinstance(column, str):
            left_out[name] = column
        else:
            tensors["action_mask" if name in _LOSS_MASK_NAMES else name] = column
    if not any(name in names for name in _LOSS_MASK_NAMES) or any(name in left_out for name in _LOSS_MASK_NAMES):
        mask = [torch.ones(length, dtype=torch.bool) for length in lengths]
        tensors["action_mask"] = pad_left(mask, num_actions)
    dump = DumpRows(source=source, tensors=tensors, facts=facts, left_out=left_out, rank=rank_data.rank)
    (call,) = dump.make_calls(None)
    return replace(call, call_facts=facts)


def _stack_column(values: list[Any], lengths: list[int], tokens: list[Tensor]) -> Tensor | str:
    """Stack a column: [B, A] with an element for each action, [B, S] for each token, [B] for each sample.

    Where it is none of these, a text that says what it is is returned instead.
    """
    numbers = [_read_numbers(value) for value in values]
    rows = [row for row in numbers if row is not None]
    if len(rows) != len(numbers) or len({row.dtype for row in rows}) > 1:
        return describe_kind(
            next((value for value in values if _read_numbers(value) is None), "numbers of several kinds")
        )
    sizes = [tuple(row.shape) for row in rows]
    if sizes == [()] * len(rows):
        return torch.stack(rows)
    for widths in (lengths, [len(row) for row in tokens]):
        if sizes == [(width,) for width in widths]:
            return pad_left(rows, max(widths))
    return f"{rows[0].dtype} of shape {list(rows[0].shape)}, for a sample of {len(tokens[0])} tokens"


def _read_numbers(value: Any) -> Tensor | None:
    """Read a number, a list of numbers, or a tensor of any shape; None for anything else."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Array):
        return value.to_tensor()
    values = value if isinstance(value, list) else [value]
    if not values or not all(type(number) in (int, float, bool) and abs(number) < 2**53 for number in values):
        return None
    return torch.tensor(value)


def _count_values(value: Any) -> int | None:
    is_column = isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.ndim > 0)
    return len(value) if is_column else None


def _read_length(sample: Sample, num_tokens: int, source: str) -> int:
    lengths = [sample[name] for name in _RESPONSE_LENGTH_NAMES if name in sample]
    length = int(lengths[0]) if lengths and isinstance(lengths[0], int | Tensor) and _is_scalar(lengths[0]) else 0
    if not 0 <= length < num_tokens:
        raise CaptureError(f"{source}: a sample of {num_tokens} tokens whose response is not shorter")
    return length


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or (value.ndim == 0 and not value.is_floating_point())


SLIME = Importer(
    project="slime",
    suffixes=(".pt",),
    is_its=lambda start: start.startswith(ZIP_START),
    read=read_slime,
)
