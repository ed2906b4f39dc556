"""Select the captures that a data rank replays. Every rank computes the same rounds and takes its own column."""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import merge
from itertools import chain, groupby, islice
from pathlib import Path

from actor_init.inputs.packing import count_action_tokens, count_predicted_by_padding
from actor_init.spec import UsageError
from capture.black_box.incidents import Incident, read_incidents
from capture.facts import Setting
from capture.file_format.capture_file import Call, read_call
from capture.file_format.end_record import count_not_recorded
from capture.file_format.listing import CaptureLocation, list_captures
from capture.file_format.micro_batch import CaptureError, MicroBatch, NotReplayableError
from capture.file_format.segment import Segment, capture_exists
from capture.file_format.segment_record import SegmentRecord, digest_window
from replay.objective.objective import tokens_for
from replay.options.option_parsing import in_flags
from replay.options.spec import InputsSpec, LossName, Order, Passes, check_inputs, default_folder
from replay.output.text import not_recorded_text, one_line, unreplayable
from replay.resolution.windows import Captured, Round, WindowOrder
from replay.runlog.run_file import RunInputs, UnusedFile


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The inputs that one data rank replays, and those it does not.

    Only the files needed are read: with --max-inputs, files after the last selected one are not opened. Of segments the
    indexes are read, and of the passes those that are selected.
    """

    inputs: list[Path]
    num_left_out_passes: int  # of the kind that --passes does not select
    num_left_over: int  # inputs left because the data ranks hold unequal numbers
    damaged: list[tuple[Path, str]]
    dealing: str  # one sentence: how inputs were distributed over the data ranks
    unreplayable: list[tuple[Path, str]] = field(default_factory=list)  # whole, and of calls that no replay can make
    rounds: Sequence[Round] = ()  # one per input; inputs replayed beyond the rounds (--uneven) have none
    not_recorded: Mapping[str, int] = field(default_factory=dict)  # the job's training passes, by the reason
    grad_accumulation: int = 1  # as requested, else the number that reproduces the job's windows
    has_job_windows: bool = False  # that number was found in the captures
    padding_predicts: bool = False  # some label of the loss, so that rows have to be padded as captured
    is_whole: bool = False  # all passes of the kind, of every rank, are replayed

    def describe(self) -> RunInputs:
        """Return what is replayed and what is not, for run.json."""
        return RunInputs(
            num_inputs=len(self.inputs),
            dealing=self.dealing,
            num_left_out_passes=self.num_left_out_passes,
            num_left_over=self.num_left_over,
            not_recorded=self.not_recorded,
            damaged=[UnusedFile(path=str(path), error=error) for path, error in self.damaged],
            unreplayable=[UnusedFile(path=str(path), error=error) for path, error in self.unreplayable],
        )


@dataclass(kw_only=True, slots=True)
class Reader:
    """Read captures one by one, counting those of the other kind and those that cannot be read."""

    passes: Passes
    loss: str
    padding_predicts: bool = False  # labels that it predicts count
    num_left_out: int = 0
    damaged: list[tuple[Path, str]] = field(default_factory=list)
    unreplayable: list[tuple[Path, str]] = field(default_factory=list)

    def read(self, captures: Iterable[CaptureLocation]) -> Iterator[Captured]:
        for one in captures:
            record = one.record
            captured = self._opened(one) if record is None else self._recorded(one, record)
            if captured is None:
                continue
            if self.passes is Passes.ALL or captured.trains == (self.passes is Passes.TRAIN):
                yield captured
            else:
                self.num_left_out += 1

    def counted(self, captured: Captured) -> Captured:
        """Return it with the number of the loss's tokens; 0 for a pass that cannot be read: it will report why."""
        if captured.num_tokens is not None:
            return captured
        try:
            num_tokens, num_after_padding = self._counts(read_call(captured.path).micro_batch())
        except CaptureError:
            num_tokens = num_after_padding = 0
        return replace(captured, num_tokens=num_tokens, num_after_padding=num_after_padding)

    def _counts(self, batch: MicroBatch) -> tuple[int, int]:
        """Count the tokens of the loss, and those among them that padding predicts.

        Both are 0 for a micro-batch that no model accepts: its pass will report why.
        """
        try:
            batch = replace(tokens_for(self.loss, batch), padding_predicts=self.padding_predicts)
            return count_action_tokens(batch), count_predicted_by_padding(batch) if self.padding_predicts else 0
        except CaptureError:
            return 0, 0

    def _recorded(self, one: CaptureLocation, record: SegmentRecord) -> Captured | None:
        """Return what a segment's index knows of a pass."""
        if record.counts is None:
            return self._opened(one)
        assert isinstance(one.file, Segment)
        return Captured(
            capture=one,
            trains=record.trains,
            rank=one.file.head.rank,
            forward=record.forward,
            world_size=one.file.head.world_size,
            num_tokens=None,
            optimizer_step=record.optimizer_step,
            window=record.window,
            has_gradients=record.has_gradients,
            real_tokens=record.counts.real_tokens,
            padded_tokens=record.counts.rows * record.counts.row_length,
        )

    def _opened(self, one: CaptureLocation) -> Captured | None:
        try:
            call = read_call(one.path)
            batch = call.micro_batch()
        except NotReplayableError as error:
            self.unreplayable.append((one.path, in_flags(error)))
            return None
        except CaptureError as error:
            self.damaged.append((one.path, in_flags(error)))
            return None
        num_tokens, num_after_padding = self._counts(batch)
        return Captured(
            capture=one,
            trains=batch.trains,
            rank=batch.origin.rank,
            forward=batch.origin.step,
            world_size=batch.origin.world_size,
            num_tokens=num_tokens,
            optimizer_step=call.optimizer_step,
            window=None if call.step is None else digest_window(call.step.passes),
            has_gradients=call.step is not None and call.step.gradients is not None,
            real_tokens=batch.num_real_tokens,
            padded_tokens=batch.num_padded_tokens,
            num_after_padding=num_after_padding,
        )


def select(
    spec: InputsSpec,
    data_rank: int,
    num_data_ranks: int,
    *,
    loss: str = LossName.STAND_IN,
    grad_accumulation: int | None = 1,
    packs: bool = True,
    padding_predicts: bool = False,
) -> Selection:
    """Select the inputs of `data_rank` out of `num_data_ranks`. Raises UsageError if there is nothing to replay.

    Round i holds the i-th input of every data rank, all of one kind (train or rollout), so that all ranks run or skip
    the same backward. Unshuffled, data rank r replays what rank r captured, if as many ranks captured as replay;
    otherwise, and when shuffled, inputs are dealt to the ranks in turn. A single --input-file is replayed by every
    data rank. With --uneven, inputs that do not fill a round come after the rounds.

    Captures that record the optimizer step are ordered by step, unless shuffled. Without `grad_accumulation`, the
    number of passes in a window is chosen to reproduce the job's windows. With --order worst, inputs come by their
    tokens: real ones if rows are packed (`packs`), else padded ones. With `padding_predicts`, labels that padding
    predicts are tokens of the loss.
    """
    check_inputs(spec)
    reader = Reader(passes=spec.passes, loss=loss, padding_predicts=padding_predicts)
    order = WindowOrder(None if grad_accumulation is None else grad_accumulation * num_data_ranks)
    rest: list[list[Captured]] = []
    missing: Mapping[str, int] = {}
    if spec.input_file is not None:
        files = list(reader.read([CaptureLocation(_existing_file(spec.input_file))]))
        rounds = [tuple(files * num_data_ranks)] * (len(files) * spec.epochs)
        rounds = rounds[spec.skip_inputs :]
        dealing = f"{spec.input_file.name}" + (" on every data rank" if num_data_ranks > 1 else "")
    else:
        folder = spec.inputs if spec.inputs is not None else default_folder()
        captures = _captures_in(folder)
        missing = _not_recorded(folder)
        rounds, rest, dealing = _dealt(spec, reader, captures, num_data_ranks, order, packs)
    num_left_over = sum(len(captures) for captures in rest)
    if not rounds and not reader.damaged and not (spec.uneven and num_left_over):
        raise UsageError(_nothing_to_replay(spec, reader, num_left_over, num_data_ranks, missing))
    rounds = [tuple(map(reader.counted, members)) for members in _picked(rounds, spec)]
    inputs = [members[data_rank].path for members in rounds]
    job_windows = _of_the_job(order, num_data_ranks)
    if spec.uneven and spec.input_file is None:
        end = None if spec.max_inputs is None else spec.skip_inputs + spec.max_inputs
        more = [captured.path for captured in rest[data_rank]] if rest else []
        inputs = [*inputs, *more][spec.skip_inputs : end]
        dealing += "; uneven: none left over" if num_left_over else ""
        num_left_over = 0
    return Selection(
        inputs=inputs,
        num_left_out_passes=reader.num_left_out,
        num_left_over=num_left_over,
        damaged=reader.damaged,
        unreplayable=reader.unreplayable,
        not_recorded=missing,
        dealing=dealing + (f", {spec.epochs} times over" if spec.epochs > 1 else ""),
        rounds=[_round(members) for members in rounds],
        grad_accumulation=grad_accumulation or job_windows or 1,
        has_job_windows=grad_accumulation is None and job_windows is not None,
        padding_predicts=any(one.num_after_padding for members in rounds for one in members),
        is_whole=not (spec.input_file or spec.skip_inputs or spec.max_inputs or spec.pick_inputs or num_left_over)
        and not (reader.damaged or reader.unreplayable),
    )


def _picked(rounds: list[tuple[Captured, ...]], spec: InputsSpec) -> list[tuple[Captured, ...]]:
    """Return the rounds of --pick-inputs, or all without it. Raises UsageError for a number that none has."""
    if spec.picked is None:
        return rounds
    if beyond := [number for number in spec.picked if number >= len(rounds)]:
        picked, why = Setting("pick_inputs", beyond[0]), f": each data rank has {len(rounds)} inputs"
        raise UsageError(picked, why, f"Give numbers from 0 to {len(rounds) - 1}")
    return [rounds[number] for number in spec.picked]


def _round(members: Sequence[Captured]) -> Round:
    return Round(
        trains=members[0].trains,
        num_tokens=[one.num_tokens or 0 for one in members],
        has_gradients=any(one.has_gradients for one in members),
    )


def _of_the_job(order: WindowOrder, num_data_ranks: int) -> int | None:
    """Return the passes of each data rank in one window of the job; None if its windows cannot be reproduced."""
    num_passes = order.num_passes or 0
    return None if num_passes == 0 or num_passes % num_data_ranks else num_passes // num_data_ranks


def _existing_file(path: Path) -> Path:
    if not capture_exists(path):
        raise UsageError(Setting("input_file", path), "does not exist", f"Try: replay inspect {path.parent}")
    return path


def _not_recorded(folder: Path) -> dict[str, int]:
    """Count the training passes that the recording could not keep; none where its end cannot be read."""
    try:
        return count_not_recorded(folder)
    except CaptureError:  # `replay inspect` names the file
        return {}


def _first_incident(folder: Path) -> Incident | None:
    try:
        return next((one for record in read_incidents(folder) for one in record.incidents), None)
    except CaptureError:
        return None


def _captures_in(folder: Path) -> list[CaptureLocation]:
    captures, given = list_captures(folder), Setting("inputs", folder)
    if not captures and (missing := _not_recorded(folder)):
        raise UsageError(given, "holds no captures", f"Missing: {not_recorded_text(missing)}")
    if not captures and (happened := _first_incident(folder)) is not None:
        how = f"{happened.what}, {happened.where}" + (f": {one_line(happened.message)}" if happened.message else "")
        raise UsageError(given, f"holds no captures, but an incident: {how}", f"Try: replay inspect {folder}")
    if not captures:
        inside = sorted(one for one in folder.iterdir() if one.is_dir() and list_captures(one))
        if inside:
            names = ", ".join(one.name for one in inside[:5])
            why = f"holds no captures (*.pkl), but folders that do: {names}"
            raise UsageError(given, why, f"Try: {given.with_value(inside[0])}")
        advice = "Capture some with `capture.recording`, or try: replay"
        raise UsageError(given, "holds no captures (*.pkl)", advice)
    return captures


def _dealt(
    spec: InputsSpec,
    reader: Reader,
    folder: list[CaptureLocation],
    num_data_ranks: int,
    order: WindowOrder,
    packs: bool,
) -> tuple[list[tuple[Captured, ...]], list[list[Captured]], str]:
    """Return the rounds, the inputs left over on each data rank, and a sentence that describes the distribution."""
    if spec.shuffle_inputs:
        random.Random(spec.random_seed).shuffle(folder)
        read, said = reader.read(folder), f"shuffled with seed {spec.random_seed}"
    elif spec.order is Order.WORST:
        read = iter(sorted(reader.read(folder), key=partial(_size, packs=packs), reverse=True))
        said = f"most {'real' if packs else 'padded'} tokens first"
    else:
        read, said = _in_order(reader, folder, order)
    captures: Iterable[Captured] = _repeated(read, spec.epochs)
    dealing = f"{said}, dealt in turn to {num_data_ranks} data ranks" if num_data_ranks > 1 else said
    columns: list[int] | None = None
    if num_data_ranks > 1 and not spec.shuffle_inputs and spec.order is Order.RECORDED:
        captures = list(captures)
        ranks = {c.rank for c in captures}
        if len(ranks) == num_data_ranks and None not in ranks:
            column_of = {rank: column for column, rank in enumerate(sorted(r for r in ranks if r is not None))}
            columns = [column_of[c.rank] for c in captures if c.rank is not None]
            dealing = "in recorded order, each data rank what one rank captured"
    table = _Rounds(captures, columns, num_data_ranks)
    end = None if spec.max_inputs is None else spec.skip_inputs + spec.max_inputs
    rounds = list(table) if spec.uneven else list(islice(table, spec.skip_inputs, end))
    return rounds, table.left_over() if table.exhausted else [], dealing


def _in_order(reader: Reader, folder: list[CaptureLocation], order: WindowOrder) -> tuple[Iterator[Captured], str]:
    """Return the captures by step if the first one records its step, else by file name; and the order's name."""
    left = iter(folder)
    captures = reader.read(left)
    first = next(captures, None)
    if first is None or first.optimizer_step is None:
        return chain([] if first is None else [first], captures), "rank by rank in recorded order"
    streams = [reader.read(list(own)) for _, own in groupby(left, key=lambda one: one.rank)]
    return order.ordered(merge([first], *streams, key=_job_order)), "in the order of the job's steps"


def _size(captured: Captured, *, packs: bool) -> tuple[int, int]:
    sizes = captured.real_tokens, captured.padded_tokens
    return sizes if packs else (sizes[1], sizes[0])


def _job_order(captured: Captured) -> tuple[int, int]:
    return captured.optimizer_step or 0, captured.rank or 0


def _repeated(captures: Iterable[Captured], num_times: int) -> Iterator[Captured]:
    """Repeat the captures. Each file is read once, and not before it is needed."""
    seen: list[Captured] = []
    for captured in captures:
        seen.append(captured)
        yield captured
    for _ in range(num_times - 1):
        yield from seen


class _Rounds:
    """Iterate over rounds of one input per data rank, all of one kind. Inputs without partners stay in the queue."""

    def __init__(self, captures: Iterable[Captured], columns: list[int] | None, num_data_ranks: int) -> None:
        self.captures = captures
        self.columns = columns  # the data rank of each capture; None: in turn
        self.waiting: dict[bool, list[deque[Captured]]] = {
            trains: [deque() for _ in range(num_data_ranks)] for trains in (True, False)
        }
        self.exhausted = False

    def __iter__(self) -> Iterator[tuple[Captured, ...]]:
        for i, captured in enumerate(self.captures):
            queues = self.waiting[captured.trains]
            shortest = min(range(len(queues)), key=lambda column: len(queues[column]))
            queues[shortest if self.columns is None else self.columns[i]].append(captured)
            if all(queues):
                yield tuple(queue.popleft() for queue in queues)
        self.exhausted = True

    def left_over(self) -> list[list[Captured]]:
        """Return the inputs left over by data rank, once every capture has been read."""
        return [[*trains, *others] for trains, others in zip(*self.waiting.values(), strict=True)]


def _nothing_to_replay(
    spec: InputsSpec, reader: Reader, num_left_over: int, num_data_ranks: int, missing: Mapping[str, int]
) -> str:
    if reader.unreplayable and not num_left_over:
        return f"nothing to replay: {unreplayable(reader.unreplayable)}"
    if num_left_over and not spec.skip_inputs:
        inputs = "input does" if num_left_over == 1 else "inputs do"
        return (
            f"{num_left_over} {spec.passes} {inputs} not suffice for {num_data_ranks} data ranks. "
            f"Start fewer processes, or give a folder with more inputs"
        )
    if spec.skip_inputs:
        skipped = Setting("skip_inputs", spec.skip_inputs)
        return f"{skipped} leaves no {spec.passes} pass on a data rank. Try: a smaller number"
    other = Passes.ROLLOUT if spec.passes is Passes.TRAIN else Passes.TRAIN
    where = spec.input_file or spec.inputs or "the sample"
    why = f" ({not_recorded_text(missing)})" if missing and spec.passes is Passes.TRAIN else ""
    text = f"{where} holds no {spec.passes} pass{why}, but {reader.num_left_out} of kind {other}"
    return f"{text}. Try: {Setting('passes', other)}"


def first_call(selection: Selection) -> Call | None:
    """Read the first input; None if it cannot be read."""
    try:
        return read_call(selection.inputs[0]) if selection.inputs else None
    except CaptureError:  # the pass itself will report it
        return None
