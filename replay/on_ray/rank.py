"""What one worker of Ray Train does: `replay`, as a rank of the process group that Ray has opened."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from replay.on_ray.node_actors import work_in
from replay.processes.child_job import ChildJob
from replay.processes.exit_code import exit_code_of

EXIT_CODE, OUT, ERR = "exit-code", "out", "err"  # files of each rank, with its number: `out0`


def replay(job: Mapping[str, Any]) -> int:
    """Run a command, and leave its output and exit code in files, for `NodeFiles` to send.

    command function of the job, which returns an exit code
    job     what is replayed, as JSON
    homes   folder with a folder for each node, for what ranks write there
    folder  the driver's working folder, which becomes this rank's if the node has it
    inputs  by node, the folder of the inputs that were sent there; none where a node sees the driver's folder
    show_traceback  of an error
    """
    import ray

    node, rank = ray.get_runtime_context().get_node_id(), os.environ["RANK"]
    home = Path(job["homes"]) / node
    home.mkdir(parents=True, exist_ok=True)
    own = ChildJob.parse(job["job"], source="the job of a rank").on_node(home, job["inputs"].get(node))
    work_in(job["folder"])
    with output_into(home / f"{OUT}{rank}", home / f"{ERR}{rank}"):
        exit_code = exit_code_of(partial(job["command"], own), show_traceback=job["show_traceback"])
    (home / f"{EXIT_CODE}{rank}").write_text(str(exit_code))
    return exit_code


@contextmanager
def output_into(out: Path, err: Path) -> Iterator[None]:
    """Send this process's standard output and error into files, native code's too."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    kept = [os.dup(number) for number in (1, 2)]
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    with open(1, "w", buffering=1, closefd=False) as to_out, open(2, "w", buffering=1, closefd=False) as to_err:
        sys.stdout, sys.stderr = to_out, to_err
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams
            for number, own in zip((1, 2), kept, strict=True):
                os.dup2(own, number)
                os.close(own)
