"""Declare the options of `replay mismatch`: its own, and those of a replay that it does not set itself."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import typer

from actor_init.declarations.attention import WORDS
from actor_init.spec import Dtype, UsageError
from replay.options.option_parsing import CommandAction, DeclaredOption, add_options, build_replay_spec
from replay.options.path_checks import check_paths
from replay.processes.launch import count_missing_processes, relaunch

Word = TypeVar("Word", bound=str)


def _serves_mismatch(option: DeclaredOption) -> bool:
    """Tell whether the option applies to mismatch: it runs forwards alone, in dtypes and kernels of its own lists."""
    if option.part == "measure":
        return option.field in ("timeout", "log_folder")
    return option.part in ("inputs", "actor", "actor.parallel") and option.field not in (
        *("dtype", "attention", "uneven", "epochs", "grad_accumulation", "gradient_checkpointing"),
        *("learning_rate", "lr_warmup_steps", "max_norm", "weight_decay", "beta1", "beta2", "eps", "momentum"),
    )


@partial(add_options, serves=_serves_mismatch)
def mismatch(
    context: typer.Context,
    dtype: str = typer.Option(
        "bf16,fp32", metavar="A,B", show_default=False, help="Replay in each of these dtypes. (default: bf16,fp32)"
    ),
    attention: str = typer.Option(
        "auto",
        metavar="A,B",
        show_default=False,
        help="And with each of these kernels, as --attention eager,sdpa. (default: auto)",
    ),
    worst: int = typer.Option(10, min=0, metavar="N", show_default=False, help="Tokens to list. (default: 10)"),
    json: Path | None = typer.Option(None, metavar="FILE", help="Write the numbers into this file too."),  # noqa: B008
    **given: Any,
) -> CommandAction:
    """Measure how far a rollout engine's log-probs are from these.

    Under each dtype and kernel. The captures need the rollout's log-probs: of a converted dump, or noted by the job
    as rollout_log_probs. The tokens listed are those on which the first replay is farthest. Exit code 0 if the
    numbers could be had.
    """
    run = build_replay_spec(given)
    dtypes: list[Dtype] = _parse_words("--dtype", dtype, [member for member in Dtype if member is not Dtype.AUTO])
    kernels = _parse_words("--attention", attention, WORDS)

    def measure() -> int:
        check_paths(run)
        if num_processes := count_missing_processes(run.actor.parallel):
            return relaunch(num_processes, context.obj)
        from replay.commands.mismatch.report import mismatch

        return mismatch(run, dtypes, kernels, worst, json)

    return measure


def _parse_words(flag: str, typed: str, allowed: Collection[Word]) -> list[Word]:
    words = typed.split(",")
    if unknown := [word for word in words if word not in allowed]:
        raise UsageError(
            f"{flag} {unknown[0]!r} is not allowed. Give some of {', '.join(allowed)}, with commas between"
        )
    # The allowed words may be members of an enum, equal to what was typed.
    members: dict[str, Word] = {word: word for word in allowed}
    return [members[word] for word in dict.fromkeys(words)]
