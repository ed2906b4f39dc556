"""Compare logs of runs, or a run with itself under other code or options."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from actor_init.spec import UsageError
from replay.comparison.comparison import Comparison
from replay.options.spec import find_log

if TYPE_CHECKING:
    # It needs transformers, and logs are compared without it.
    from replay.runner.result import Run

DEFAULT_THRESHOLD = 0.05


def compare(
    *runs: "str | os.PathLike[str] | Run", variants: Sequence[str] = (), threshold: float = DEFAULT_THRESHOLD
) -> Comparison:
    """Compare runs with the first of them: losses, log-probs, gradient norms, time, memory, input by input.

    runs       logs, or runs; the first is the reference
    variants   of one run: `stock` or `FILE.py:FUNCTION` for other code of the model, `python=PATH` for another
               environment, or an option and its value, such as `attention=eager`. The run's first wrong pass is
               replayed again, traced, as it was and as each of them says, and these runs are compared
    threshold  the largest relative difference that is taken for none

    Raises UsageError for logs that cannot be compared: they did other work, or are not whole.
    """
    folders = [find_log(run) for run in runs]
    if not isinstance(variants, (list, tuple)) or not all(isinstance(variant, str) for variant in variants):
        raise UsageError(f"variants={variants!r} is not allowed. Give a list, such as ['attention=eager']")
    if variants:
        if len(folders) != 1:
            raise UsageError(
                f"{variants[0]} beside {len(folders)} logs: give one log with variants, or logs without variants"
            )
        from replay.commands.compare.variants import replay_variants

        folders = replay_variants(folders[0], variants)
    return Comparison.read(folders, threshold=threshold)
