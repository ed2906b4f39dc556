"""Write the table of tolerances into docs/tolerances.md, between its two marks.

python -m docs.write_constants
"""

import importlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from docs.generated_block import insert_lines

PAGE = Path(__file__).parent / "tolerances.md"
MODULES = (
    "replay.tolerances.difference",
    "replay.tolerances.job_bounds",
    "replay.tolerances.run_bounds",
    "replay.runlog.gradient_sketches",
    "replay.tracing.distances",
    "replay.commands.diagnose.checks",
    "actor_init.probe.packing_probe",
    "actor_init.probe.head_probe",
    "actor_init.attention.kernel_choice",
    "actor_init.fused.liger",
    "actor_init.fused.swiglu",
)


def list_constants() -> list[str]:
    """Return the lines of the table: the numbers that these modules define themselves, alone or in a mapping."""
    lines = ["| module | constant | value |", "|---|---|---|"]
    for name in MODULES:
        numbers = _list_numbers(importlib.import_module(name))
        lines += [f"| `{name}` | `{constant}` | {value} |" for constant, value in numbers]
    return lines


def _list_numbers(module: ModuleType) -> Iterator[tuple[str, str]]:
    assert module.__file__ is not None
    for name in re.findall(r"^([A-Z0-9_]+)\b[^=\n]*=", Path(module.__file__).read_text(), re.MULTILINE):
        value = getattr(module, name)
        if isinstance(value, float):
            yield name, format_number(value)
        elif isinstance(value, Mapping):
            for key, numbers in value.items():
                if isinstance(numbers, float | tuple):
                    several = numbers if isinstance(numbers, tuple) else (numbers,)
                    yield f"{name}: {key}", ", ".join(map(format_number, several))


def format_number(value: float) -> str:
    """Write a small power of two as one, and any other number as short as it is exact."""
    power = math.log2(value)
    return f"2^{power:.0f}" if power == round(power) < -2 else f"{value:g}"


if __name__ == "__main__":
    PAGE.write_text(insert_lines(PAGE.read_text(), "constants", list_constants()))
