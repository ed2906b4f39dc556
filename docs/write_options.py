"""Write replay/options/run_options.py: the options of a replay by name, as a type checker and an editor know them.

python -m docs.write_options
"""

from pathlib import Path
from typing import Any

from replay.options.option_parsing import DeclaredOption, list_options

FILE = Path(__file__).parent.parent / "replay" / "options" / "run_options.py"
HEAD = '''"""The options of `replay.run` by name. Written by `python -m docs.write_options` from what declares them."""

from os import PathLike
from typing import Literal, TypedDict


class RunOptions(TypedDict, total=False):
    """What `replay --help-all` lists, with `_` for `-`; None stands for one that is not given."""

'''
# `inputs` is an argument of its own; the others are about the screen, which a result takes the place of.
OTHERS = ("inputs", "quiet", "full_names")
TYPES: dict[Any, str] = {bool: "bool", int: "int", float: "float", str: "str"}


def format_type(option: DeclaredOption) -> str:
    """Return the annotation of an option."""
    if option.value_type is bool:
        return "bool | None"
    words = [f'"{choice}"' for choice in option.choices]
    name = f"Literal[{', '.join(words)}]" if words else TYPES.get(option.value_type, "str | PathLike[str]")
    if option.field in ("model", "adapter"):
        name = "str | PathLike[str]"
    return f"{name} | bool | None" if option.bare_value is not None else f"{name} | None"


def format_file() -> str:
    """Return the file as it is now."""
    options = [option for option in list_options() if option.parameter not in OTHERS]
    return HEAD + "".join(f"    {option.parameter}: {format_type(option)}\n" for option in options)


if __name__ == "__main__":
    FILE.write_text(format_file(), encoding="utf-8")
