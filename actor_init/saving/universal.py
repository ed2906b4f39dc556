"""Convert to DeepSpeed's universal checkpoint format, so that ZeRO state can be loaded by another number of ranks."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

CONVERTER = "deepspeed.checkpoint.ds_to_universal"


@contextmanager
def universal(checkpoint: Path) -> Iterator[Path]:
    """Yield a universal copy of the folder `checkpoint`, which exists while it is loaded. All ranks must enter.

    It is created beside the state's own folder, where every rank sees it, and needs as much disk space. Raises
    RuntimeError if DeepSpeed's converter, a separate program, fails.
    """
    home = checkpoint.parent
    converted = home.parent / f".{home.name}.universal" / checkpoint.name
    problems: list[str | None] = [None]
    try:
        if dist.get_rank() == 0:
            problems = [_convert(checkpoint, converted)]
        dist.broadcast_object_list(problems, src=0)
        if problems[0] is not None:
            raise RuntimeError(f"DeepSpeed could not convert {home} for another number of ranks: {problems[0]}")
        yield converted
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(converted.parent, ignore_errors=True)


def _convert(checkpoint: Path, converted: Path) -> str | None:
    """Return why the conversion failed, None if it did not."""
    folders = ["--input_folder", str(checkpoint), "--output_folder", str(converted)]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]  # more would start process pools
    done = subprocess.run(
        [sys.executable, "-m", CONVERTER, *folders, *workers, "--inject_missing_state"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "\n".join(done.stderr.strip().splitlines()[-1:]) if done.returncode else None
