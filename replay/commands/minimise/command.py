"""Declare the options of `replay minimise`: its own, and those of the replay that fails."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from actor_init.spec import UsageError
from capture.facts import Setting
from replay.campaign.campaign_options import CampaignAction, make_begin_action, make_continue_action
from replay.options.option_parsing import (
    CommandAction,
    DeclaredOption,
    add_options,
    build_replay_spec,
    json_option,
    refuse_typed,
)
from replay.options.spec import check_result_folder
from replay.processes.launch import refuse_launcher

if TYPE_CHECKING:
    from replay.commands.minimise.runs import MinimiseResult

# The defaults of the fields of `MinimiseLimits` in trials.py.
DEFAULTS: dict[str, float] = {"tries": 3, "run": 600.0, "num_runs": 40}


def _applies_to_minimise(option: DeclaredOption) -> bool:
    """Does the option apply? Nothing is saved, and a trial has a name of its own."""
    return option.field not in ("save_state", "save_every", "resume", "save_model", "quiet", "full_names", "name")


@partial(add_options, serves=_applies_to_minimise)
def minimise(
    processes: int | None = typer.Option(
        None,
        min=1,
        metavar="N",
        show_default=False,
        help="Processes of the replay that fails, as a launcher would start them. (default: tp x ring)",
    ),
    tries: int | None = typer.Option(
        None,
        min=1,
        metavar="N",
        show_default=False,
        help=f"Runs to see it fail, at most. (default: {DEFAULTS['tries']})",
    ),
    run_limit: float | None = typer.Option(
        None,
        min=1.0,
        metavar="SECONDS",
        show_default=False,
        help=f"For one run; one that takes longer hangs. (default: {DEFAULTS['run']:.0f})",
    ),
    max_runs: int | None = typer.Option(
        None,
        min=1,
        metavar="N",
        show_default=False,
        help=f"Runs of the search, at most. (default: {DEFAULTS['num_runs']})",
    ),
    parity: Path | None = typer.Option(  # noqa: B008
        None, metavar="FOLDER", help="A folder that parity left: minimise what its --cell differs in."
    ),
    cell: str | None = typer.Option(None, metavar="NAME", help="Name of a cell of --parity that DIFFERS."),
    redact: bool = typer.Option(False, "--redact", help="Take the text out of the inputs, if they still fail so."),
    continue_: Path | None = typer.Option(  # noqa: B008
        None, "--continue", metavar="FOLDER", help="Go on with what a folder of minimise's holds; nothing is run twice."
    ),
    json: bool = json_option(),
    **given: Any,
) -> CommandAction:
    """Find the fewest inputs and options with which a replay fails.

    Fewest files, rows, tokens, layers, ranks and options. Give the options of the replay that fails: raises, is not
    finite, DIFFERS, is UNSETTLED, hangs or dies. Each trial runs in processes of its own. Exit code 0: what is left
    lies in a folder with one command; 1: it did not fail.
    """
    typed_limits = {"tries": tries, "run": run_limit, "num_runs": max_runs}
    limits = {name: value for name, value in typed_limits.items() if value is not None}
    own_options = {"processes": processes, "redact": redact or None, "parity": parity, "cell": cell}
    if continue_ is not None:
        return make_continue_action("minimise", continue_, {**own_options, **given}, limits, as_json=json)
    if parity is not None or cell is not None:
        if parity is None or cell is None:
            advice = f"Try: {Setting('parity', 'logs/TIME-parity')} {Setting('cell', 'NAME')}"
            raise UsageError(Setting("parity"), f"and {Setting('cell')} go together", advice)
        other_options = {name: value for name, value in given.items() if name != "log_folder"} | {
            "processes": processes
        }
        refuse_typed(other_options, f"{Setting('cell', cell)} has its options from {parity}")
        logs = build_replay_spec(given).measure.log_folder
        run = partial(_minimise_cell, parity, cell, logs, DEFAULTS | limits, redact=redact)
        return CampaignAction(run=run, as_json=json)
    spec = build_replay_spec(given)
    return make_begin_action("minimise", spec, spec, processes, DEFAULTS | limits, redact=redact, as_json=json)


def _minimise_cell(
    parity: Path, cell: str, logs: Path, limits: Mapping[str, float], screen: IO[str], *, redact: bool
) -> "MinimiseResult":
    refuse_launcher("minimise")
    check_result_folder("parity", parity, option="parity")
    from replay.commands.minimise import runs

    return runs.begin_with_cell(parity, cell, logs, limits, redact=redact, screen=screen)
