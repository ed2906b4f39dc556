"""Compare two environments: `replay.check_upgrade`."""

import math
import os
from collections.abc import Sequence
from typing import Unpack

from replay.api.running import build_spec
from replay.commands.check_upgrade.checking import RUN_SECONDS, check
from replay.commands.check_upgrade.result import UpgradeCheck
from replay.options.path_checks import check_paths
from replay.options.run_options import RunOptions
from replay.options.value_checks import check_value
from replay.output.printing import open_silence
from replay.processes.launch import refuse_process_group


def check_upgrade(
    inputs: str | os.PathLike[str] | None = None,
    *,
    python: Sequence[str | os.PathLike[str]],
    run_limit: float = RUN_SECONDS,
    **options: Unpack[RunOptions],
) -> UpgradeCheck:
    """Replay the same captures in two environments, and say whether they compute the same numbers. Prints nothing.

    inputs     folder of captures; None: the sample that ships with the project
    python     the interpreters of the old environment and of the new one
    run_limit  seconds that one replay may take
    options    those of `replay.run`; 8 inputs are replayed unless `max_inputs` says otherwise

    Raises UsageError for an option or an environment that cannot be.
    """
    spec = build_spec({"inputs": inputs, **options})
    refuse_process_group("replay.check_upgrade")
    check_paths(spec)
    run_limit = check_value("run_limit", run_limit, float, min=1, max=math.inf)
    with open_silence() as screen:
        return check(spec, [os.fspath(path) for path in python], run_limit=run_limit, screen=screen)
