"""Describe what a trial of `replay minimise` replays, and cut captures down to it: to some rows and some columns.

Shape letters: B rows, S tokens a row, A columns of the action mask (the last tokens of each row).

What the job recorded of a pass is kept where it is exact for what is left: row sums of log-probs whose tokens are all
there, values by token. A loss, a gradient and a norm are of all rows, and go with the first cut.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from actor_init.as_json import to_json
from capture.file_format.capture_file import CapturedCall, read_call
from capture.file_format.folder_layout import ACTOR_CONFIG_NAME, find_recording_folder
from capture.file_format.micro_batch import CaptureError
from capture.file_format.model_facts import copy_model_facts
from replay.options.option_parsing import DeclaredOption, format_command_line, list_options, replace_values
from replay.options.spec import ReplaySpec
from replay.tolerances.job_bounds import ACTION_TOKENS, LOG_PROBS, TOKEN_LOG_PROBS
from replay.verdict.recorded_pass import TOKEN_POSITIONS_KEY, read_token_positions

# Options that name files or folders.
FILE_OPTIONS = ("--loss", "--model", "--weights", "--adapter", "--deepspeed-config", "--load-state")
# Fields that minimise sets itself in every trial.
FIELDS_OF_TRIALS = ("inputs", "input_file", "recording", "skip_inputs", "max_inputs", "log_folder")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The rows, and the columns from `first` to before `end`, of the capture with the number `source`."""

    source: int
    rows: tuple[int, ...]
    first: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """What a trial replays: `spec` has the defaults of what minimise sets in every trial."""

    cuts: tuple[Cut, ...]
    spec: ReplaySpec
    num_processes: int = 1

    @classmethod
    def from_spec(cls, cuts: Sequence[Cut], spec: ReplaySpec, num_processes: int) -> "Candidate":
        return cls(cuts=tuple(cuts), spec=remove_inputs(spec), num_processes=num_processes)

    @property
    def arguments(self) -> list[str]:
        return format_command_line(self.spec)

    @property
    def inputs_digest(self) -> str:
        """Return a digest of what its inputs hold."""
        return hashlib.sha256(json.dumps(to_json(self.cuts)).encode()).hexdigest()

    @property
    def changed_options(self) -> list[DeclaredOption]:
        """Return the options that are given."""
        return find_changed_options(self.spec)

    def with_cut(self, place: int, **changes: Any) -> "Candidate":
        cuts = list(self.cuts)
        cuts[place] = replace(cuts[place], **changes)
        return replace(self, cuts=tuple(cuts))

    def without_options(self, dropped: Sequence[DeclaredOption]) -> "Candidate":
        """Return the candidate without these options. Raises UsageError if the rest contradict each other."""
        return replace(self, spec=replace_values(self.spec, [(option, option.default) for option in dropped]))

    def with_option(self, flag: str, value: Any) -> "Candidate":
        """Return the candidate with the option `flag` set. Raises UsageError if that contradicts the others."""
        option = next(declared for declared in list_options() if declared.flag == flag)
        return replace(self, spec=replace_values(self.spec, [(option, value)]))


def find_changed_options(spec: ReplaySpec) -> list[DeclaredOption]:
    """Return the options of a spec that are not at their default and that minimise does not set itself."""
    options: dict[tuple[str, str], DeclaredOption] = {}
    for option in list_options():
        value = option.read_value(spec)
        is_default = value == option.default or (option.is_switch and option.switch_value != value)
        if option.field not in FIELDS_OF_TRIALS and not is_default:
            # Of a field's options its own comes first, then its switches. The first one that fits is kept.
            options.setdefault((option.part, option.field), option)
    return list(options.values())


def remove_inputs(spec: ReplaySpec) -> ReplaySpec:
    """Return the spec with the defaults of what minimise sets in every trial."""
    defaults = {option.field: option.default for option in list_options() if option.field in FIELDS_OF_TRIALS}
    log_folder = defaults.pop("log_folder")
    return replace(spec, inputs=replace(spec.inputs, **defaults), measure=replace(spec.measure, log_folder=log_folder))


# Recorded quantities that are by row or by token, so that a cut can keep them.
BY_ROW = (LOG_PROBS, ACTION_TOKENS, TOKEN_LOG_PROBS)
# A token, and one that it predicts.
MIN_COLUMNS = 2
# Captures that stay in memory.
KEPT_CALLS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureShape:
    """What the search needs to know of a capture.

    name            of its file
    real            for each row the first column with a real token, and the one behind the last
    has_values      the job's log-probs are there token by token, so that a part of a row's can be compared
    can_cut_rows    everything it holds is by row, or of the whole pass
    can_cut_columns likewise by column: no borders of packed documents
    """

    num_rows: int
    num_columns: int
    name: str = ""
    real: tuple[tuple[int, int], ...]
    has_values: bool = False
    can_cut_rows: bool = True
    can_cut_columns: bool = True

    @classmethod
    def read(cls, call: CapturedCall) -> Self:
        """Return the shape of a capture. Raises CaptureError for one without token ids."""
        batch = call.micro_batch()
        num_rows, num_columns = batch.sequences_BS.shape
        real = [row_S.nonzero().flatten().tolist() or [0, num_columns - 1] for row_S in batch.attention_mask_BS]
        tensors = {**call.tensors, **call.notes}
        has_borders = any(name.startswith(("cu_seq", "max_length", "seq_idx")) for name in (*tensors, *call.call_facts))
        has_half_rows = any(
            tensor.ndim >= 1 and num_rows > 1 and 2 * len(tensor) == num_rows for tensor in call.notes.values()
        )
        return cls(
            num_rows=num_rows,
            num_columns=num_columns,
            name=call.origin.source,
            real=tuple((columns[0], columns[-1] + 1) for columns in real),
            has_values=any(name.endswith("_values") or name == "token_log_probs" for name in call.outputs),
            can_cut_rows=not has_borders and not has_half_rows,
            can_cut_columns=not has_borders,
        )


def cut_call(call: CapturedCall, cut: Cut) -> CapturedCall:
    """Return the part of a capture that `cut` names; the capture itself if that is all of it.

    Raises CaptureError for a cut that leaves no micro-batch.
    """
    batch = call.micro_batch()
    num_rows, num_columns = batch.sequences_BS.shape
    if (list(cut.rows), cut.first, cut.end) == (list(range(num_rows)), 0, num_columns):
        return call
    if not cut.rows or cut.end - cut.first < MIN_COLUMNS:
        raise CaptureError(f"{call.origin.source}: nothing is left of it")
    cutter = _Cutter(cut=cut, num_rows=num_rows, num_columns=num_columns)
    num_actions = 0 if batch.action_mask_BA is None else batch.action_mask_BA.shape[1]
    cut_down = replace(
        call,
        tensors={name: cutter.cut_tensor(tensor, num_trailing=num_actions) for name, tensor in call.tensors.items()},
        notes={name: cutter.cut_tensor(tensor, num_trailing=None) for name, tensor in call.notes.items()},
        outputs=_cut_outputs(call, cut, cutter),
        # A part of the rows gets other masks than the whole did.
        random_after={},
        routes={name: cutter.cut_routes(choice) for name, choice in call.routes.items()},
        step=None,
    )
    cut_down.micro_batch()
    return cut_down


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cutter:
    cut: Cut
    num_rows: int
    num_columns: int

    def cut_tensor(self, tensor: Tensor, *, num_trailing: int | None) -> Tensor:
        """Cut the dimensions that are rows or columns.

        num_trailing  the number of columns of a tensor that covers a row's last tokens; None: any number, as notes have
        """
        part = tensor
        has_rows = tensor.ndim > 0 and len(tensor) == self.num_rows and (self.num_rows > 1 or tensor.ndim > 1)
        if has_rows:
            part = part[list(self.cut.rows)]
        for dim in range(1, tensor.ndim):
            if tensor.shape[dim] == self.num_columns:
                part = part.narrow(dim, self.cut.first, self.cut.end - self.cut.first)
        is_shorter = has_rows and tensor.ndim == 2 and 0 < tensor.shape[1] < self.num_columns
        if is_shorter and num_trailing in (None, tensor.shape[1]):
            part = self.cut_trailing(part)
        return part.contiguous().clone()

    def cut_routes(self, choice: Tensor) -> Tensor:
        """Cut the chosen experts [rows * columns, experts], one line for each token."""
        by_row = choice.view(self.num_rows, self.num_columns, -1)
        return by_row[list(self.cut.rows), self.cut.first : self.cut.end].flatten(0, 1).contiguous()

    def cut_trailing(self, kept_BA: Tensor) -> Tensor:
        """Cut the columns of what covers a row's last tokens; a row's first token is never among them."""
        skipped = self.num_columns - kept_BA.shape[1]
        first, end = max(self.cut.first + 1 - skipped, 0), self.cut.end - skipped
        if end <= 0:
            return torch.zeros_like(kept_BA[:, :1])
        return kept_BA[:, first:end]


def _cut_outputs(call: CapturedCall, cut: Cut, cutter: _Cutter) -> dict[str, Any]:
    outputs: dict[str, Any] = {
        name: value for name, value in call.outputs.items() if name in ("logits_dtype", "loss_dtype", "loss_function")
    }
    outputs |= _cut_token_log_probs(call, cut, cutter)
    mask = call.micro_batch().action_mask_BA
    for name in ("log_probs", "output"):
        sums, values = call.outputs.get(f"{name}_row_sums"), call.outputs.get(f"{name}_values")
        shape = call.outputs.get(f"{name}_shape")
        if mask is None or not isinstance(sums, list) or len(sums) != cutter.num_rows:
            continue
        is_cut_BA = torch.ones_like(mask)
        skipped = cutter.num_columns - mask.shape[1]
        is_cut_BA[:, max(cut.first + 1 - skipped, 0) : max(cut.end - skipped, 0)] = False
        is_whole = not bool((is_cut_BA & mask)[list(cut.rows)].any())
        if isinstance(values, list) and shape == list(mask.shape):
            values_BA = cutter.cut_trailing(torch.tensor(values, dtype=torch.float64).view(mask.shape)[list(cut.rows)])
            outputs |= {f"{name}_values": values_BA.flatten().tolist(), f"{name}_shape": list(values_BA.shape)}
        if is_whole:
            outputs[f"{name}_row_sums"] = [sums[row] for row in cut.rows]
        elif f"{name}_values" in outputs:
            tokens_BA = cutter.cut_trailing(mask[list(cut.rows)])
            values_BA = torch.tensor(outputs[f"{name}_values"], dtype=torch.float64).view(tokens_BA.shape)
            outputs[f"{name}_row_sums"] = torch.where(tokens_BA, values_BA, 0.0).sum(dim=1).tolist()
    return outputs


def _cut_token_log_probs(call: CapturedCall, cut: Cut, cutter: _Cutter) -> dict[str, Any]:
    """Return the values of what is left of the sampled tokens, and where those are now; empty if none is left."""
    values = call.outputs.get("token_log_probs")
    places = read_token_positions(call, cutter.num_rows, cutter.num_columns)
    if not isinstance(values, list) or len(values) != len(places):
        return {}
    row_now = {row: number for number, row in enumerate(cut.rows)}
    left = [
        (value, row_now[row], column - cut.first)
        for value, (row, column) in zip(values, places, strict=True)
        if row in row_now and cut.first < column < cut.end
    ]
    if not left:
        return {}
    return {
        "token_log_probs": [value for value, _, _ in left],
        TOKEN_POSITIONS_KEY: [number for _, row, column in left for number in (row, column)],
    }


@lru_cache(maxsize=KEPT_CALLS)
def read_source(path: Path) -> CapturedCall:
    """Read a capture, which is cut again and again."""
    return read_call(path)


def write_inputs(folder: Path, sources: Sequence[Path], candidate: Candidate) -> None:
    """Write the captures of a candidate, and the config beside them, into a new folder. Raises CaptureError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    for cut in candidate.cuts:
        cut_call(read_source(sources[cut.source]), cut).write(folder)
    recording_folder = find_recording_folder(sources[0])
    copy_model_facts(recording_folder, folder)
    config = recording_folder / ACTOR_CONFIG_NAME
    if config.is_file():
        shutil.copy(config, folder)
