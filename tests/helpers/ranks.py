"""Start the ranks of a program as torchrun does, but without its agent, which would be one more process."""

import os
import tempfile
from collections.abc import Sequence
from functools import partial

from replay.processes.launch import list_rank_variables, open_rank_store, without_launcher
from replay.processes.supervisor import ChildGroup, start_process
from tests.helpers.commands import LIMIT, ROOT
from tests.warm import warm_bin


def run_ranks(arguments: Sequence[str], num_ranks: int) -> str:
    """Run `python ARGUMENTS`, warm, on each rank, and return what they wrote. All must succeed.

    One rank is a process without a launcher's variables.
    """
    common = {**without_launcher(os.environ), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [str(warm_bin() / "python"), *arguments]
    store = open_rank_store() if num_ranks > 1 else None
    rank_variables = [{}] if store is None else list_rank_variables(num_ranks, store.port)
    with tempfile.TemporaryFile() as output:
        starts = [partial(start_process, command, common | variables, output=output) for variables in rank_variables]
        ranks = ChildGroup.start(starts, limit=LIMIT)
        try:
            exit_code = ranks.wait()
        finally:
            ranks.end(grace=5.0)
        output.seek(0)
        said = output.read().decode(errors="replace")
    assert exit_code == 0, f"exit code {exit_code}\n{said[-6000:]}"
    return said
