"""Declare `replay inspect`."""

from functools import partial
from pathlib import Path
from typing import IO

import typer

from replay.commands.inspect import text as wording
from replay.commands.inspect.inspection import Inspection
from replay.options.option_parsing import Action
from replay.options.spec import check_folder
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import damaged_files

# Print the answer of `replay inspect`.


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

    Incidents of the recording come first:

    incident   rank 0, forward 6, 2026-11-21T11:20:09.133124+00:00: not finite, loss: loss is nan; 3 files for it

    Of several ranks that did not end well, the one that was behind is named, as `replay hang` does.
    """
    out = open_console(file)
    if inspection.incidents or inspection.in_memory is not None:
        print_pairs(out, wording.incidents(inspection) + inspection.hang)
        print_line(out)
    print_pairs(out, wording.folder_facts(inspection))
    if inspection.kinds:
        print_line(out)
        print_table(out, wording.kind_table(inspection))
    if stand_outs := wording.stand_outs(inspection):
        print_line(out)
        print_pairs(out, stand_outs)
    if inspection.damaged:
        print_line(out)
        print_pairs(out, damaged_files(inspection.damaged))


def inspect(folder: Path = typer.Argument(help="Folder of captures.")) -> Action:  # noqa: B008
    """Show what a folder holds: passes, ranks, shapes, damaged files."""
    return partial(_inspect, folder)


def _inspect(folder: Path) -> int:
    check_folder(folder, "Try: replay inspect inputs/sample")
    from replay.commands.inspect.command import print_inspection
    from replay.commands.inspect.inspection import inspect_folder

    inspection = inspect_folder(folder)
    print_inspection(inspection)
    return 1 if inspection.damaged else 0
