"""What one worker of Ray Train does: `replay`, as a rank of the process group that Ray has opened."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replay.runlog.writer import versions

EXIT_CODE, OUT, ERR = "exit-code", "out", "err"  # files of each rank, with its number: `out0`


def replay(job: Mapping[str, Any]) -> None:
    """Run `job["command"]` with `job["arguments"]`; leave its output and exit code in files, for `NodeFiles` to send.

    home      folder for what the ranks of this node write
    folder    the driver's working folder, which becomes this rank's if the node has it
    inputs    contents of the driver's folder of inputs by path in it; None if every node sees that folder
    versions  of the driver's packages
    """
    import ray

    home = Path(job["home"]) / ray.get_runtime_context().get_node_id()
    home.mkdir(parents=True, exist_ok=True)
    rank = os.environ["RANK"]
    arguments = [*job["arguments"], "--log-folder", str(home)]
    with _output(home / f"{OUT}{rank}", home / f"{ERR}{rank}"):
        exit_code = 2
        if not _say_other_versions(job["versions"], rank):
            if Path(job["folder"]).is_dir():
                os.chdir(job["folder"])
            if job["inputs"] is not None:
                arguments += ["--inputs", str(_shipped(ray.get(job["inputs"][0]), Path(f"{home}-inputs-{rank}")))]
            exit_code = job["command"](arguments)
    (home / f"{EXIT_CODE}{rank}").write_text(str(exit_code))


def _say_other_versions(drivers: Mapping[str, str | None], rank: str) -> bool:
    here = versions()
    others = [f"{name} {here[name]}, not {version}" for name, version in drivers.items() if here[name] != version]
    if others:
        print(
            f"replay: rank {rank}: {os.uname().nodename} has other versions than the driver: {'; '.join(others)}. "
            "Try: one image for all nodes",
            file=sys.stderr,
        )
    return bool(others)


def _shipped(files: Mapping[str, bytes], folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@contextmanager
def _output(out: Path, err: Path) -> Iterator[None]:
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
