"""Declare the options of `replay check-upgrade`: its own, and those of a replay that it does not set itself."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer

from actor_init.spec import UsageError
from replay.campaign.campaign_options import run_limit_option
from replay.options.option_parsing import CommandAction, DeclaredOption, add_options, build_replay_spec, json_option
from replay.options.path_checks import check_paths
from replay.options.spec import ReplaySpec
from replay.processes.launch import refuse_launcher


def _applies_to_check(option: DeclaredOption) -> bool:
    """Does the option apply? Nothing is saved, and both replays are compared where neither is traced or profiled."""
    return option.part != "state" and option.field not in (
        *("uneven", "quiet", "full_names", "name", "verdict", "trace", "profile", "memory_snapshot"),
    )


@partial(add_options, serves=_applies_to_check)
def check_upgrade(
    python: list[str] | None = typer.Option(  # noqa: B008
        None, "--python", metavar="FILE", help="Interpreter of an environment; give two, the old one's first."
    ),
    markdown: Path | None = typer.Option(  # noqa: B008
        None, metavar="FILE", help="Append the result to this file, such as $GITHUB_STEP_SUMMARY."
    ),
    run_limit: float = run_limit_option("one replay"),
    json: bool = json_option(),
    **given: Any,
) -> CommandAction:
    """Say whether two environments compute the same numbers.

    Each replays the same inputs, 8 unless --max-inputs says otherwise. They agree if losses, log-probs and gradients
    differ by no more than rounding explains, and the verdicts on the job are the same. Otherwise both are replayed
    again, traced, to name the first tensor that differs. Exit code 0: they agree; 1: they differ, or one fails.
    """
    return partial(_check, build_replay_spec(given), python or [], markdown, run_limit, as_json=json)


def _check(spec: ReplaySpec, pythons: Sequence[str], markdown: Path | None, run_limit: float, *, as_json: bool) -> int:
    refuse_launcher("check-upgrade")
    check_paths(spec)
    if markdown is not None:
        _append(markdown, "")
    from replay.commands.check_upgrade.checking import check
    from replay.commands.check_upgrade.text import print_check
    from replay.output.printing import print_json
    from replay.processes.pool import interrupt_on_sigterm

    with interrupt_on_sigterm():
        # With --json, standard output holds the result alone.
        result = check(spec, pythons, run_limit=run_limit, screen=sys.stderr)
    if markdown is not None:
        _append(markdown, result.to_markdown())
    if as_json:
        print_json(result)
    else:
        print_check(result)
    return result.exit_code


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--markdown {path}: {error.strerror}. Give a file that can be written") from error
