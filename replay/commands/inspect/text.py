"""Format the facts about a folder of captures as text."""

from collections.abc import Sequence
from typing import IO

from capture.file_format.listing import format_ranges
from replay.commands.inspect.inspection import Inspection, ValueSpread
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import (
    Columns,
    Pairs,
    describe_damaged_files,
    describe_unrecorded,
    describe_unreplayable,
    pluralise,
)


def list_folder_facts(inspection: Inspection) -> Pairs:
    pairs = [("folder", str(inspection.folder)), ("model", inspection.model)]
    pairs.append(("files", ", ".join(f"{number} {what}" for what, number in inspection.num_by_format.items())))
    if inspection.unreplayable:
        pairs.append(("no replay", describe_unreplayable(inspection.unreplayable)))
    if inspection.missing_ranks:
        pairs.append(("no pass", f"of {name_ranks(inspection.missing_ranks)} of the job's {inspection.world_size}"))
    pairs += describe_unrecorded(inspection.not_recorded)
    if inspection.first_time is not None and inspection.last_time is not None:
        pairs.append(("time", f"{inspection.first_time} to {inspection.last_time}"))
    if inspection.versions:
        pairs.append(("versions", ", ".join(inspection.versions)))
    return pairs


def list_incidents(inspection: Inspection) -> Pairs:
    """List ranks that were killed, then the first failures; last what follows from another rank's end.

    A killed rank has the time at which its passes were salvaged, so it is not sorted by that time.
    """
    pairs: Pairs = [] if inspection.in_memory is None else [("incident", inspection.in_memory)]
    order = {"died": 0}
    ranked = [(record.rank, record.incident) for record in inspection.incidents]
    ranked.sort(key=lambda pair: (order.get(pair[1].what, 1 + pair[1].follows_another), pair[1].time))
    for rank, incident in ranked:
        forward = "before any forward" if incident.forward is None else f"pass {incident.forward + 1}"
        text = f"rank {rank}, {forward}, {incident.time}: {incident.what}, {incident.where}"
        if incident.message:
            text += f": {incident.message}"
        saved = f"; {pluralise(len(incident.files), 'file')} for it"
        if incident.num_not_copied:
            saved += f", {pluralise(incident.num_not_copied, 'pass')} not on the host in time"
        pairs.append(("incident", text + saved))
    if number := sum({record.rank: record.num_others for record in inspection.incidents}.values()):
        pairs.append(("incident", f"{number} more like these, for which nothing was written"))
    return pairs


def list_exceptional_passes(inspection: Inspection, most: int = 10) -> Pairs:
    pairs = [("longest", f"{odd.source}: {odd.reason}") for odd in inspection.longest]
    pairs += [("odd", f"{odd.source}: {odd.reason}") for odd in inspection.odd[:most]]
    if (num_more := inspection.num_odd - min(len(inspection.odd), most)) > 0:
        pairs.append(("odd", f"{num_more} more"))
    return pairs


def build_kind_table(inspection: Inspection) -> Columns:
    """Return a row for the training passes and one for the rollout passes; a spread is least / median / most."""
    kinds = inspection.kinds
    return {
        "passes": [kind.name for kind in kinds],
        "number": [str(kind.num_passes) for kind in kinds],
        "ranks": [_format_ranks(kind.ranks) for kind in kinds],
        "rows": [_format_spread(kind.rows) for kind in kinds],
        "row length": [_format_spread(kind.row_length) for kind in kinds],
        "padded": [f"{kind.padded_tokens:,}" for kind in kinds],
        "real": [f"{kind.real_tokens:,}" for kind in kinds],
        "share": [f"{kind.real_tokens / kind.padded_tokens:.1%}" for kind in kinds],
        "action": [f"{kind.action_tokens:,}" for kind in kinds],
    }


def build_recording_table(inspection: Inspection) -> Columns:
    """Return a row for each recording; `--recording` takes its number."""
    recordings = inspection.recordings
    columns = {
        "recording": [str(recording.number) for recording in recordings],
        "begun": [recording.began or "not known" for recording in recordings],
        "passes": [str(recording.num_passes) for recording in recordings],
        "steps": [str(recording.num_steps) for recording in recordings],
        "ranks": [_format_ranks(recording.ranks or [None]) for recording in recordings],
        "files": [str(recording.num_files) for recording in recordings],
    }
    if any(recording.num_hosts is not None for recording in recordings):
        columns["hosts"] = [str(recording.num_hosts or "not known") for recording in recordings]
    return columns


def list_lint_remarks(inspection: Inspection) -> Pairs:
    """List what the checks say, and which passes they read."""
    if inspection.linting is None:
        return []
    remarks = [(remark.topic, remark.text) for remark in inspection.linting.remarks]
    which = f" of recording {inspection.linting.recording}" if len(inspection.recordings) > 1 else ""
    return [("checked", f"{inspection.linting.read}{which}{'' if remarks else ': no remark'}"), *remarks]


def name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_format_ranks(ranks)}"


def _format_ranks(ranks: Sequence[int | None]) -> str:
    ranges = format_ranges(rank for rank in ranks if rank is not None)
    return ", ".join([*([ranges] if ranges else []), *(["unknown"] if None in ranks else [])])


def _format_spread(spread: ValueSpread) -> str:
    return str(spread.least) if spread.least == spread.most else f"{spread.least} / {spread.median:g} / {spread.most}"


def print_inspection(inspection: Inspection, file: IO[str] | None = None) -> None:
    """Print the answer of `replay inspect`.

    folder     inputs/sample
    model      llama, layers 4, hidden 64, vocabulary 264
    files      40 of format 1
    time       2026-11-21T11:20:04.571116+00:00 to 2026-11-21T11:20:09.133124+00:00
    versions   python 3.11.7, torch 2.13.0+cpu, transformers 5.23.0

    passes   number  ranks  rows        row length  padded    real  share  action
    train        32   0, 1     2  82 / 623.5 / 978  37,446  27,142  72.5%  21,556
    rollout       8   0, 1     4              1024  32,768  13,571  41.4%  10,778

    longest    actor_inputs_rank0_20261121_112004_571116_00000000.pkl: 4 rows of 1024, 1,522 tokens real

    A table lists the recordings of the folder, if their captures name them, or there are several:

    recording                             begun  passes  steps  ranks  files
            1  2026-11-21T11:20:04.571116+00:00      20      4   0, 1     20

    What checks of the latest recording's first passes say comes next, or `no remark`:

    checked    all 20 passes
    labels     12 of 340 labels are of padding, outside the attention mask

    Incidents of the recording come first:

    incident   rank 0, pass 7, 2026-11-21T11:20:09.133124+00:00: not finite, loss: loss is nan; 3 files for it

    Of several ranks that did not end well, the one that was behind is named, as `replay hang` does.
    """
    out = open_console(file)
    if inspection.incidents or inspection.in_memory is not None:
        print_pairs(out, list_incidents(inspection) + inspection.hang)
        print_line(out)
    print_pairs(out, list_folder_facts(inspection))
    if inspection.kinds:
        print_line(out)
        print_table(out, build_kind_table(inspection))
    if len(inspection.recordings) > 1 or any(recording.began for recording in inspection.recordings):
        print_line(out)
        print_table(out, build_recording_table(inspection))
    if remarks := list_lint_remarks(inspection):
        print_line(out)
        print_pairs(out, remarks)
    if exceptional := list_exceptional_passes(inspection):
        print_line(out)
        print_pairs(out, exceptional)
    if inspection.damaged:
        print_line(out)
        print_pairs(out, describe_damaged_files(inspection.damaged))
