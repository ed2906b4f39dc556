"""What an error says: facts that name settings and files, and know no command line.

    raise UsageError(Setting("tp", 3), "does not divide the model's 4 heads", f"Try: {Setting('tp', 2)}")

A sentence names a setting by a mark, which is put into words where the sentence is shown: `--tp 3` by a command line
(replay/options/option_parsing.py, capture/cli.py), `tp=3` in Python.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = re.compile("⟨([a-z0-9_]+)(?:=([^⟩]*))?⟩")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting by the name of the field that declares it, and a value of it; None where none is meant."""

    name: str
    value: Any = None

    def __str__(self) -> str:
        """Return the mark that a sentence names the setting by. Its value is JSON in ASCII, so the mark ends once."""
        if not self.has_value:
            return f"⟨{self.name}⟩"
        plain = self.value if isinstance(self.value, (bool, int, float)) else str(self.value)
        return f"⟨{self.name}={json.dumps(plain)}⟩"

    def with_value(self, value: Any) -> "Setting":
        """Return the setting with another value."""
        return Setting(self.name, value)

    @property
    def has_value(self) -> bool:
        return self.value is not None

    @property
    def in_python(self) -> str:
        return f"{self.name}={self.value!r}" if self.has_value else self.name


def spell_settings(text: str, spell: Callable[[Setting], str]) -> str:
    """Return a sentence in which each mark has become what `spell` makes of its setting."""
    return MARK.sub(lambda mark: _spell_setting(mark, spell), text)


def flag_of(name: str) -> str:
    """Return how a command line spells the setting that it takes as it is.

    An underscore at the end is Python's alone: `continue_`, since `continue` is a word of the language.
    """
    return f"--{name.rstrip('_').replace('_', '-')}"


def _spell_setting(mark: re.Match[str], spell: Callable[[Setting], str]) -> str:
    name, value = mark.groups()
    try:
        return spell(Setting(name, None if value is None else json.loads(value)))
    except (ValueError, RecursionError):
        # This is no mark that a Setting made: a file or a library wrote it into the sentence.
        return mark[0]


class FactError(ValueError):
    """An error that says a fact: the subject, a predicate that says why not, and what to do instead.

    subject  a setting; a file or folder; the name of a model, a part or a package; or, without `why`, a whole sentence
    why      a predicate, or ": " and a reason
    """

    def __init__(self, subject: Setting | Path | str, why: str = "", advice: str = "") -> None:
        super().__init__(subject, why, advice)
        self.subject, self.why, self.advice = subject, why, advice

    @classmethod
    def not_allowed(cls, name: str, value: Any, advice: str) -> "FactError":
        """Return the error of a value that a setting never has."""
        return cls(Setting(name), f"{value!r} is not allowed", advice)

    @classmethod
    def mutually_exclusive(cls, first: Setting, second: Setting) -> "FactError":
        """Return the error of two settings that were given together."""
        return cls(first, f"and {second} exclude each other", "Give one of the two")

    @property
    def text(self) -> str:
        """The sentence, with marks for settings: what goes into another error's sentence."""
        joint = "" if self.why[:1] in ":,(" else " "
        return f"{self.subject}{joint}{self.why}{'. ' if self.advice else ''}{self.advice}"

    def __str__(self) -> str:
        """Return the sentence as Python code would name the settings."""
        return spell_settings(self.text.replace("⟩ ⟨", "⟩, ⟨"), lambda setting: setting.in_python)


class CaptureError(FactError):
    """A capture that cannot be read or is no micro-batch. The message names the file where one is known."""
