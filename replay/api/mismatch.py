"""Measure how far a rollout engine's log-probs are from a replay's: `replay.mismatch`."""

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Unpack

from actor_init.declarations.attention import ATTENTION_VALUES
from actor_init.spec import UsageError
from replay.api.running import read_whole_result, run_command
from replay.campaign.campaign_options import check_call, join_values
from replay.commands.mismatch import command
from replay.options.option_parsing import build_replay_spec
from replay.options.run_options import RunOptions

if TYPE_CHECKING:
    from replay.commands.mismatch.report import MismatchResult

# Options of a replay of which this function takes a list, and their names here.
LISTS = {"dtype": "dtypes", "attention": "attention_kernels"}


def mismatch(
    inputs: str | os.PathLike[str] | None = None,
    *,
    dtypes: str | Sequence[str] | None = None,
    attention_kernels: str | Sequence[str] | None = None,
    worst: int | None = None,
    processes: int | None = None,
    **options: Unpack[RunOptions],
) -> "MismatchResult":
    """Measure how far a rollout engine's log-probs are from these, as `replay mismatch` does. Prints nothing.

    inputs             folder of captures that hold the rollout's log-probs
    dtypes             to replay in; None: bf16 and fp32
    attention_kernels  to replay with, as `--attention` takes them; None: auto
    worst              tokens to list; None: 10
    processes          how many to start, as a launcher would; None: tp x ring
    options            of the replays, as `replay mismatch --help-all` lists them, with `_` for `-`

    Raises UsageError for an option or a file that cannot be, or inside an open process group; RunFailedError where the
    processes ended before the last replay. On KeyboardInterrupt the ranks are ended, and `replay.open` reads what was
    measured, from the folder that the exception's note names.
    """
    if typed := [name for name in LISTS if name in options]:
        raise UsageError(f"replay.mismatch takes no {typed[0]}. Give a list: {LISTS[typed[0]]}=[...]")
    own = {
        "dtype": _join_words("dtypes", dtypes, command.DTYPES),
        "attention": _join_words("attention_kernels", attention_kernels, ATTENTION_VALUES),
        "worst": worst,
    }
    values, given = check_call(command.mismatch, own, {"inputs": inputs, **options})
    child = run_command("mismatch", values, build_replay_spec(given), processes)
    from replay.commands.mismatch.report import FILE, MismatchResult

    return read_whole_result(child, FILE, MismatchResult.read)


def _join_words(name: str, words: str | Sequence[str] | None, allowed: Collection[str]) -> str | None:
    """Return words as the command line takes them. Raises UsageError for one that is not allowed."""
    joined = join_values(words)
    return None if joined is None else ",".join(command.choose_words(name, joined.split(","), allowed))
