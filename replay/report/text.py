"""Records and statistics as text: the only module that knows milliseconds and GiB.

A table here is a dict of columns, name to cells; a pair is a name and what there is to say about it.
"""

from collections.abc import Sequence
from pathlib import Path

from actor_init.spec import BackendName

TEXTS = {"as", "at input", "command", "configuration", "dtype", "given by", "input", "note", "passes", "quantity"} | {
    "ranks",
    "result",
    "run",
    "setting",
    "verdict",
}
Columns = dict[str, list[str]]
Pairs = list[tuple[str, str]]

PHASES = ("forward", "backward", "step")


def engine_text(backend: BackendName, zero_stage: object) -> str:
    """As `deepspeed, ZeRO stage 1`; ddp shards nothing, and has no stage."""
    return backend.value if backend is BackendName.DDP else f"{backend}, ZeRO stage {zero_stage}"


def milliseconds(seconds: float | None) -> str:
    """One decimal; two below 10 ms."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:,.{2 if seconds < 0.01 else 1}f}"


def gibibytes(num_bytes: float | None) -> str:
    """Of 1024^3 bytes; two decimals, three below 10 GiB."""
    if num_bytes is None:
        return "-"
    size = num_bytes / 2**30
    return f"{size:.{3 if size < 10 else 2}f}"


def one_line(text: str) -> str:
    return " ".join(text.split())


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`, `2 passes`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def damaged_files(damaged: Sequence[tuple[Path, str]]) -> Pairs:
    return [("damaged", reason if path.name in reason else f"{path.name}: {reason}") for path, reason in damaged]


def is_text(name: str) -> bool:
    """Columns of words stand left, columns of numbers right."""
    return not name or name in TEXTS or (len(name) == 1 and name.isupper())  # a letter stands for a run
