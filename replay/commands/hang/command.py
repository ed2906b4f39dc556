"""Declare `replay hang`: which rank of a job was behind, and would its schedule of collectives have met?"""

from functools import partial
from pathlib import Path

import typer

from replay.options.option_parsing import CommandAction, json_option
from replay.options.spec import check_folder


def hang(
    folder: Path = typer.Argument(metavar="FOLDER", help="Folder of captures, of all ranks."),  # noqa: B008
    equal_shapes: bool = typer.Option(
        False,
        "--equal-shapes",
        help="The job gathers tensors of its rows' shape over the ranks, so each pass needs equal shapes.",
    ),
    json: bool = json_option(),
) -> CommandAction:
    """Say which rank of a job that hung was behind, and where.

    And whether all ranks would have met in each pass. No model is run. Exit code 0: no hang found, and all ranks did
    the same passes and steps; 1: a rank was behind or failed, or the ranks differ; 2: wrong usage, or a damaged
    file without an incident.
    """
    return partial(_hang, folder, equal_shapes, json)


def _hang(folder: Path, equal_shapes: bool, as_json: bool) -> int:
    check_folder(folder, "Try: replay hang inputs/sample")
    from replay.output.printing import print_json
    from replay.post_mortem.hang import examine_hang
    from replay.post_mortem.text import print_report

    report = examine_hang(folder, equal_shapes=equal_shapes)
    (print_json if as_json else print_report)(report)
    return report.exit_code
