"""Select the captures that a data rank replays. Every rank computes the same rounds, and takes its inputs from them."""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import merge
from itertools import chain, groupby, islice
from pathlib import Path

from actor_init.inputs.packing import count_action_tokens, count_predicted_by_padding, needs_captured_rows
from actor_init.spec import UsageError
from capture.black_box.incidents import Incident, read_incidents
from capture.facts import Setting
from capture.file_format.capture_file import CapturedCall, read_call
from capture.file_format.end_record import count_not_recorded
from capture.file_format.folder_recordings import FolderRecording, list_recordings
from capture.file_format.listing import CaptureLocation, list_captures
from capture.file_format.micro_batch import (
    CaptureError,
    MicroBatch,
    NotReplayableError,
    with_loss_targets_as_labels,
)
from capture.file_format.segment import Segment, capture_exists
from capture.file_format.segment_record import SegmentRecord, digest_window
from replay.objective.objective import name_loss, name_shown_objective, select_loss_tokens
from replay.options.option_parsing import format_error_with_flags
from replay.options.spec import InputOrder, InputsSpec, LossName, Passes, check_inputs, find_sample_folder
from replay.output.text import describe_unreplayable, explain_unrecorded, join_lines, pluralise
from replay.resolution.job_windows import note_window_sizes
from replay.resolution.windows import InputRound, JobPass, SelectedCapture, WindowOrder
from replay.runlog.run_file import RunInputs, UnusedFile
from replay.verdict.recorded_pass import list_job_dtypes, read_divisor

# At most this many of the passes that are not replayed are kept, for the notes on the job.
MAX_LEFT_OUT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenRecording:
    """Which recording of a folder is replayed.

    number  its number in the folder, from 1
    begin   when it began, in words
    ids     the ids by which captures name it; None among them: some captures hold no id
    """

    number: int
    num_recordings: int
    begin: str
    ids: frozenset[str | None] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The inputs that one data rank replays, and those it does not.

    A round is the inputs that the data ranks replay at the same time, one for each data rank. Only the files that the
    rounds need are read: with --max-inputs, few after the last selected file. All files are read for --order worst, and
    if each data rank replays what one rank captured. A segment's index is read, and of its passes the selected ones.

    num_left_out_passes  how many passes that were read are of the kind that --passes does not select
    left_out             the first MAX_LEFT_OUT of these passes
    num_left_over        inputs that are not replayed, because other data ranks have no more inputs
    damaged              files that cannot be read, and why
    dealing              how inputs were distributed over the data ranks, in one sentence
    unreplayable         files that can be read, but record a call that no replay can make, and why
    rounds               one for each input; inputs that are replayed after the rounds (--uneven) have none
    not_recorded         how many training passes the recording could not keep, by the reason
    grad_accumulation    as typed, else the number that reproduces the job's windows, else 1
    has_job_windows      `grad_accumulation` is the number that reproduces the job's windows
    must_keep_padding    padding predicts a label of the loss, or stands between the tokens of a row, so that rows have
                         to be padded as captured
    is_whole             all passes of the kind that --passes selects are replayed, of every rank of the job
    recording            which recording of the folder is replayed; None: one file is replayed (--input-file)
    """

    inputs: list[Path]
    num_left_out_passes: int
    num_left_over: int
    damaged: list[tuple[Path, str]]
    dealing: str
    unreplayable: list[tuple[Path, str]] = field(default_factory=list)
    left_out: Sequence[CaptureLocation] = ()
    rounds: Sequence[InputRound] = ()
    not_recorded: Mapping[str, int] = field(default_factory=dict)
    grad_accumulation: int = 1
    has_job_windows: bool = False
    must_keep_padding: bool = False
    is_whole: bool = False
    recording: ChosenRecording | None = None

    @property
    def shown_objectives(self) -> frozenset[str | None]:
        """What the training passes show, as `name_shown_objective` names it; None among them: a pass shows none."""
        return frozenset(
            job_pass.objective
            for input_round in self.rounds
            if input_round.trains
            for job_pass in input_round.job_passes
        )

    @property
    def shown_objective(self) -> str | None:
        """The objective that every training pass shows; None if they show none, or not all the same."""
        return next(iter(self.shown_objectives)) if len(self.shown_objectives) == 1 else None

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
class CaptureReader:
    """Reads captures one by one. Counts those of the kind that is not replayed, and lists those that cannot be read.

    padding_predicts_label  labels that padding predicts are tokens of the loss
    """

    passes: Passes
    loss: str
    padding_predicts_label: bool = False
    num_left_out: int = 0
    left_out: list[CaptureLocation] = field(default_factory=list)
    damaged: list[tuple[Path, str]] = field(default_factory=list)
    unreplayable: list[tuple[Path, str]] = field(default_factory=list)

    def read(self, files: Iterable[CaptureLocation]) -> Iterator[SelectedCapture]:
        for file in files:
            record = file.record
            capture = self._read_file(file) if record is None else self._read_index(file, record)
            if capture is None:
                continue
            if self.passes is Passes.ALL or capture.trains == (self.passes is Passes.TRAIN):
                yield capture
            else:
                self.num_left_out += 1
                self.left_out += [capture.capture] if len(self.left_out) < MAX_LEFT_OUT else []

    def count_tokens(self, capture: SelectedCapture) -> SelectedCapture:
        """Return `capture` with its number of tokens of the loss; 0 if it cannot be read: its pass will report why."""
        if capture.num_tokens is not None:
            return capture
        try:
            call = read_call(capture.path)
            batch = call.micro_batch()
        except CaptureError:
            return replace(capture, num_tokens=0, num_after_padding=0)
        num_tokens, num_after_padding = self._count_loss_tokens(batch)
        job_pass = _describe_job_pass(call, batch, num_tokens)
        return replace(capture, num_tokens=num_tokens, num_after_padding=num_after_padding, job_pass=job_pass)

    def _count_loss_tokens(self, batch: MicroBatch) -> tuple[int, int]:
        """Count the tokens of the loss, and those among them that padding predicts.

        The second number is 1 larger if padding stands between the tokens of a row, whether or not it predicts a label.
        Both numbers are 0 for a micro-batch that no model accepts: its pass will report why.
        """
        try:
            loss_batch = select_loss_tokens(self.loss, batch)
            loss_batch = replace(loss_batch, padding_predicts_label=self.padding_predicts_label)
            # If the job computed its loss from logits, the labels are the targets that the logits' gradient shows.
            is_recorded = self.loss == LossName.AUTO and name_loss(self.loss, batch) == LossName.STAND_IN
            with_labels = with_loss_targets_as_labels(batch) if is_recorded else loss_batch
            num_after_padding = count_predicted_by_padding(with_labels) if self.padding_predicts_label else 0
            num_after_padding += needs_captured_rows(batch)
            return count_action_tokens(loss_batch), num_after_padding
        except CaptureError:
            return 0, 0

    def _read_index(self, file: CaptureLocation, record: SegmentRecord) -> SelectedCapture | None:
        """Return what a segment's index knows of a pass; the pass itself is read only if the index counts no tokens."""
        if record.counts is None:
            return self._read_file(file)
        assert isinstance(file.file, Segment)
        return SelectedCapture(
            capture=file,
            trains=record.trains,
            rank=file.file.head.rank,
            forward_number=record.forward,
            world_size=file.file.head.world_size,
            num_tokens=None,
            optimizer_step=record.optimizer_step,
            window_digest=record.window,
            has_gradients=record.has_gradients,
            real_tokens=record.counts.real_tokens,
            padded_tokens=record.counts.rows * record.counts.row_length,
        )

    def _read_file(self, file: CaptureLocation) -> SelectedCapture | None:
        try:
            call = read_call(file.path)
            batch = call.micro_batch()
        except NotReplayableError as error:
            self.unreplayable.append((file.path, format_error_with_flags(error)))
            return None
        except CaptureError as error:
            self.damaged.append((file.path, format_error_with_flags(error)))
            return None
        num_tokens, num_after_padding = self._count_loss_tokens(batch)
        return SelectedCapture(
            capture=file,
            trains=batch.trains,
            rank=batch.origin.rank,
            forward_number=batch.origin.forward_number,
            world_size=batch.origin.world_size,
            num_tokens=num_tokens,
            optimizer_step=call.optimizer_step,
            window_digest=None if call.step is None else digest_window(call.step.passes),
            has_gradients=call.step is not None and call.step.gradients is not None,
            real_tokens=batch.num_real_tokens,
            padded_tokens=batch.num_padded_tokens,
            num_after_padding=num_after_padding,
            job_pass=_describe_job_pass(call, batch, num_tokens),
        )


def _describe_job_pass(call: CapturedCall, batch: MicroBatch, num_tokens: int) -> JobPass:
    divisor = read_divisor(call)
    return JobPass(
        rank=call.origin.rank or 0,
        forward=call.origin.forward_number,
        world_size=call.origin.world_size or 1,
        num_steps_before=call.optimizer_step,
        step=None if call.step is None else call.step.drop_elements(),
        loss_per_mean=1.0 if not divisor else num_tokens / divisor,
        objective=name_shown_objective(call, batch, list_job_dtypes(call)),
    )


def select(
    spec: InputsSpec,
    data_rank: int,
    num_data_ranks: int,
    *,
    loss: str = LossName.STAND_IN,
    grad_accumulation: int | None = 1,
    packs: bool = True,
    padding_predicts_label: bool = False,
) -> Selection:
    """Select the inputs of `data_rank` out of `num_data_ranks`. Raises UsageError if there is nothing to replay.

    Round i holds the i-th input of every data rank, all of one kind (train or rollout), so that all ranks run or skip
    the same backward. In recorded order, each data rank replays what one rank captured, if there are as many data ranks
    as ranks that captured. Otherwise, and with --shuffle-inputs or --order worst, inputs are dealt to the data ranks in
    turn. A single --input-file is replayed by every data rank. With --uneven, inputs that fill no round come after the
    rounds. In recorded order, captures that record the optimizer step are sorted by step. With --order worst, the
    largest inputs come first.

    grad_accumulation  None: the number of passes in a window is chosen to reproduce the job's windows
    packs              rows are packed, so --order worst compares real tokens; otherwise it compares padded tokens
    padding_predicts_label  labels that padding predicts are tokens of the loss
    """
    check_inputs(spec)
    reader = CaptureReader(passes=spec.passes, loss=loss, padding_predicts_label=padding_predicts_label)
    order = WindowOrder(None if grad_accumulation is None else grad_accumulation * num_data_ranks, num_data_ranks)
    left_over: list[list[SelectedCapture]] = []
    not_recorded: Mapping[str, int] = {}
    recording: ChosenRecording | None = None
    if spec.input_file is not None:
        captures = list(reader.read([CaptureLocation(_check_file_exists(spec.input_file))]))
        rounds = [tuple(captures * num_data_ranks)] * (len(captures) * spec.epochs)
        rounds = rounds[spec.skip_inputs : _find_end(spec)]
        dealing = f"{spec.input_file.name}" + (" on every data rank" if num_data_ranks > 1 else "")
    else:
        folder = spec.inputs if spec.inputs is not None else find_sample_folder()
        recordings = _require_recordings(folder)
        chosen = choose_recording(recordings, spec.recording)
        recording = ChosenRecording(
            number=chosen.number, num_recordings=len(recordings), begin=chosen.describe_begin(), ids=chosen.ids
        )
        files = chosen.list_captures()
        not_recorded = _count_not_recorded(folder, recordings, chosen)
        rounds, left_over, dealing = _deal(spec, reader, files, num_data_ranks, order, packs)
    num_left_over = sum(map(len, left_over))
    if not rounds and not reader.damaged and not (spec.uneven and num_left_over):
        raise UsageError(_explain_empty_selection(spec, reader, num_left_over, num_data_ranks, not_recorded))
    rounds = [tuple(map(reader.count_tokens, captures)) for captures in _pick_rounds(rounds, spec)]
    inputs = [captures[data_rank].path for captures in rounds]
    described = [InputRound.from_captures(captures) for captures in rounds]
    job_accumulation = order.find_accumulation() if grad_accumulation is None else None
    if job_accumulation is not None:
        described, job_accumulation = note_window_sizes(described, job_accumulation)
    if spec.uneven and spec.input_file is None:
        left_over_inputs = [capture.path for capture in left_over[data_rank]] if left_over else []
        inputs = [*inputs, *left_over_inputs][spec.skip_inputs : _find_end(spec)]
        dealing += "; uneven: none left over" if num_left_over else ""
        num_left_over = 0
    return Selection(
        inputs=inputs,
        num_left_out_passes=reader.num_left_out,
        left_out=reader.left_out,
        num_left_over=num_left_over,
        damaged=reader.damaged,
        unreplayable=reader.unreplayable,
        not_recorded=not_recorded,
        dealing=dealing + (f", {spec.epochs} times over" if spec.epochs > 1 else ""),
        rounds=described,
        grad_accumulation=grad_accumulation or job_accumulation or 1,
        has_job_windows=job_accumulation is not None,
        must_keep_padding=any(capture.num_after_padding for captures in rounds for capture in captures),
        is_whole=not (spec.input_file or spec.skip_inputs or spec.max_inputs or spec.pick_inputs or num_left_over)
        and not (reader.damaged or reader.unreplayable),
        recording=recording,
    )


def _find_end(spec: InputsSpec) -> int | None:
    """Return the number of the first input that --max-inputs leaves out; None: it leaves out none."""
    return None if spec.max_inputs is None else spec.skip_inputs + spec.max_inputs


def _pick_rounds(rounds: list[tuple[SelectedCapture, ...]], spec: InputsSpec) -> list[tuple[SelectedCapture, ...]]:
    """Return the rounds that --pick-inputs names; all if it was not typed. Raises UsageError for a missing number."""
    if spec.picked_numbers is None:
        return rounds
    if missing_numbers := [number for number in spec.picked_numbers if number >= len(rounds)]:
        picked, why = Setting("pick_inputs", missing_numbers[0]), f": each data rank has {len(rounds)} inputs"
        raise UsageError(picked, why, f"Give numbers from 0 to {len(rounds) - 1}")
    return [rounds[number] for number in spec.picked_numbers]


def _check_file_exists(path: Path) -> Path:
    if not capture_exists(path):
        raise UsageError(Setting("input_file", path), "does not exist", f"Try: replay inspect {path.parent}")
    return path


def choose_recording(recordings: Sequence[FolderRecording], number: int | None) -> FolderRecording:
    """Return the recording of this number; None: the latest. Raises UsageError if no recording has the number."""
    if number is None:
        return recordings[-1]
    if number > len(recordings):
        texts = "; ".join(f"{recording.number}, {recording.describe_begin()}" for recording in recordings)
        why = f"is not there: the folder has {pluralise(len(recordings), 'recording')}: {texts}"
        raise UsageError(Setting("recording", number), why, f"Give a number from 1 to {len(recordings)}")
    return recordings[number - 1]


def _count_not_recorded(
    folder: Path, recordings: Sequence[FolderRecording] = (), chosen: FolderRecording | None = None
) -> dict[str, int]:
    """Count, by the reason, the training passes that a recording could not keep; empty if its end cannot be read.

    chosen  the recording; None: all recordings of the folder
    """
    others = {id for recording in recordings for id in recording.ids if recording is not chosen}
    try:
        return count_not_recorded(folder, without=others)
    except CaptureError:
        # `replay inspect` names the file that cannot be read.
        return {}


def _read_first_incident(folder: Path) -> Incident | None:
    try:
        return next((incident for record in read_incidents(folder) for incident in record.incidents), None)
    except CaptureError:
        return None


def _require_recordings(folder: Path) -> list[FolderRecording]:
    recordings, setting = list_recordings(folder), Setting("inputs", folder)
    if recordings:
        return recordings
    if not_recorded := _count_not_recorded(folder):
        raise UsageError(setting, "holds no captures", f"Missing: {explain_unrecorded(not_recorded)}")
    if (incident := _read_first_incident(folder)) is not None:
        text = f"{incident.what}, {incident.where}" + (f": {join_lines(incident.message)}" if incident.message else "")
        raise UsageError(setting, f"holds no captures, but an incident: {text}", f"Try: replay inspect {folder}")
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir() and list_captures(path))
    if subfolders:
        names = ", ".join(path.name for path in subfolders[:5])
        why = f"holds no captures (*.pkl), but folders that do: {names}"
        raise UsageError(setting, why, f"Try: {setting.with_value(subfolders[0])}")
    advice = "Capture some with `capture.recording`, or try: replay"
    raise UsageError(setting, "holds no captures (*.pkl)", advice)


def _deal(
    spec: InputsSpec,
    reader: CaptureReader,
    files: list[CaptureLocation],
    num_data_ranks: int,
    order: WindowOrder,
    packs: bool,
) -> tuple[list[tuple[SelectedCapture, ...]], list[list[SelectedCapture]], str]:
    """Return the rounds, the inputs left over on each data rank, and a sentence that describes the distribution.

    First the captures get their order: shuffled, by size, or as recorded. Then each capture is dealt to a data rank. In
    recorded order, if there are as many data ranks as ranks that captured, each data rank gets what one rank captured.
    Otherwise captures are dealt in turn. `Selection` says which files are read.
    """
    if spec.shuffle_inputs:
        random.Random(spec.random_seed).shuffle(files)
        ordered, sentence = reader.read(files), f"shuffled with seed {spec.random_seed}"
    elif spec.order is InputOrder.WORST:
        ordered = iter(sorted(reader.read(files), key=partial(_make_size_key, packs=packs), reverse=True))
        sentence = f"most {'real' if packs else 'padded'} tokens first"
    else:
        ordered, sentence = _read_in_job_order(reader, files, order)
    captures: Iterable[SelectedCapture] = _repeat(ordered, spec.epochs)
    dealing = f"{sentence}, dealt in turn to {num_data_ranks} data ranks" if num_data_ranks > 1 else sentence
    columns: list[int] | None = None
    if num_data_ranks > 1 and not spec.shuffle_inputs and spec.order is InputOrder.RECORDED:
        captures = list(captures)
        job_ranks = {capture.rank for capture in captures}
        if len(job_ranks) == num_data_ranks and None not in job_ranks:
            sorted_ranks = sorted(rank for rank in job_ranks if rank is not None)
            column_by_rank = {rank: column for column, rank in enumerate(sorted_ranks)}
            columns = [column_by_rank[capture.rank] for capture in captures if capture.rank is not None]
            dealing = "in recorded order, each data rank what one rank captured"
    dealer = _RoundDealer(captures, columns, num_data_ranks)
    rounds = list(dealer) if spec.uneven else list(islice(dealer, spec.skip_inputs, _find_end(spec)))
    return rounds, dealer.collect_left_over() if dealer.is_exhausted else [], dealing


def _read_in_job_order(
    reader: CaptureReader, files: list[CaptureLocation], order: WindowOrder
) -> tuple[Iterator[SelectedCapture], str]:
    """Return the captures and the name of their order: by step if the first one records its step, else as `files`."""
    remaining_files = iter(files)
    captures = reader.read(remaining_files)
    first = next(captures, None)
    if first is None or first.optimizer_step is None:
        return chain([] if first is None else [first], captures), "rank by rank in recorded order"
    rank_streams = [
        reader.read(list(rank_files)) for _, rank_files in groupby(remaining_files, key=lambda file: file.rank)
    ]
    return order.sort(merge([first], *rank_streams, key=_make_step_key)), "in the order of the job's steps"


def _make_size_key(capture: SelectedCapture, *, packs: bool) -> tuple[int, int]:
    real, padded = capture.real_tokens, capture.padded_tokens
    return (real, padded) if packs else (padded, real)


def _make_step_key(capture: SelectedCapture) -> tuple[int, int]:
    return capture.optimizer_step or 0, capture.rank or 0


def _repeat(captures: Iterable[SelectedCapture], num_times: int) -> Iterator[SelectedCapture]:
    """Repeat the captures. Each file is read once, and not before it is needed."""
    captures_read: list[SelectedCapture] = []
    for capture in captures:
        captures_read.append(capture)
        yield capture
    for _ in range(num_times - 1):
        yield from captures_read


class _RoundDealer:
    """Yields rounds: one input for each data rank, all of one kind. Inputs that fill no round stay in the queues.

    columns  the data rank of each capture; None: captures are dealt in turn
    """

    def __init__(self, captures: Iterable[SelectedCapture], columns: list[int] | None, num_data_ranks: int) -> None:
        self.captures = captures
        self.columns = columns
        self.queues_by_kind: dict[bool, list[deque[SelectedCapture]]] = {
            trains: [deque() for _ in range(num_data_ranks)] for trains in (True, False)
        }
        self.is_exhausted = False

    def __iter__(self) -> Iterator[tuple[SelectedCapture, ...]]:
        for number, capture in enumerate(self.captures):
            queues = self.queues_by_kind[capture.trains]
            shortest = min(range(len(queues)), key=lambda column: len(queues[column]))
            queues[shortest if self.columns is None else self.columns[number]].append(capture)
            if all(queues):
                yield tuple(queue.popleft() for queue in queues)
        self.is_exhausted = True

    def collect_left_over(self) -> list[list[SelectedCapture]]:
        """Return the inputs that fill no round, by data rank. Call this once every capture has been read."""
        return [[*trains, *others] for trains, others in zip(*self.queues_by_kind.values(), strict=True)]


def _explain_empty_selection(
    spec: InputsSpec, reader: CaptureReader, num_left_over: int, num_data_ranks: int, not_recorded: Mapping[str, int]
) -> str:
    if reader.unreplayable and not num_left_over:
        return f"nothing to replay: {describe_unreplayable(reader.unreplayable)}"
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
    why = f" ({explain_unrecorded(not_recorded)})" if not_recorded and spec.passes is Passes.TRAIN else ""
    text = f"{where} holds no {spec.passes} pass{why}, but {reader.num_left_out} of kind {other}"
    return f"{text}. Try: {Setting('passes', other)}"


def read_first_call(selection: Selection) -> CapturedCall | None:
    """Read the first input of this rank; None if it cannot be read."""
    try:
        return read_call(selection.inputs[0]) if selection.inputs else None
    except CaptureError:
        # The pass on this input will report why it cannot be read.
        return None
