"""What an error says: facts that name settings and files, and know no command line.

    raise UsageError(Unsupported(Setting("tp", 3), "does not divide the model's 4 heads", f"Try: {Setting('tp', 2)}"))

A sentence names a setting by a mark, which is put into words where the sentence is shown: `--tp 3` by a command line
(replay/wording.py, capture/cli.py), `tp=3` in Python.
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

    def of(self, value: Any) -> "Setting":
        """Return the setting with another value."""
        return Setting(self.name, value)

    @property
    def has_value(self) -> bool:
        return self.value is not None

    @property
    def in_python(self) -> str:
        return f"{self.name}={self.value!r}" if self.has_value else self.name


def worded(text: str, words: Callable[[Setting], str]) -> str:
    """Return a sentence in which `words` names the settings."""
    return MARK.sub(lambda mark: _in_words(mark, words), text)


def flag_of(name: str) -> str:
    """Return how a command line spells the setting that it takes as it is."""
    return f"--{name.replace('_', '-')}"


def _in_words(mark: re.Match[str], words: Callable[[Setting], str]) -> str:
    name, value = mark.groups()
    try:
        return words(Setting(name, None if value is None else json.loads(value)))
    except (ValueError, RecursionError):  # no mark of ours, but what a file or a library wrote
        return mark[0]


@dataclass(frozen=True, slots=True)
class NotAllowed:
    """A value that a setting never has."""

    name: str
    value: Any
    advice: str

    def __str__(self) -> str:
        return _sentence(Setting(self.name), f"{self.value!r} is not allowed", self.advice)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A setting that does not go with another one, with the model or with this machine."""

    setting: Setting
    why: str  # a predicate, or ": " and a reason
    advice: str = ""

    def __str__(self) -> str:
        return _sentence(self.setting, self.why, self.advice)


@dataclass(frozen=True, slots=True)
class UnusableFile:
    """A file or folder that is not there, is damaged, or holds something else than it should."""

    path: Path | str | Setting  # a setting where the file was given by one
    why: str
    advice: str = ""

    def __str__(self) -> str:
        return _sentence(self.path, self.why, self.advice)


@dataclass(frozen=True, slots=True)
class UnsupportedModel:
    """A model, or a part of one, that cannot be built or run in this way."""

    subject: str | Setting  # the model, or what of it stands in the way
    why: str
    advice: str = ""

    def __str__(self) -> str:
        return _sentence(self.subject, self.why, self.advice)


@dataclass(frozen=True, slots=True)
class MissingPackage:
    """A library that is not installed, or too old, and what needs it."""

    needed_by: str
    why: str
    advice: str

    def __str__(self) -> str:
        return _sentence(self.needed_by, self.why, self.advice)


Fact = NotAllowed | Unsupported | UnusableFile | UnsupportedModel | MissingPackage


def _sentence(subject: object, predicate: str, advice: str) -> str:
    joint = "" if predicate[:1] in ":,(" else " "
    return f"{subject}{joint}{predicate}{'. ' if advice else ''}{advice}"


class FactError(ValueError):
    """An error that says a fact, or a sentence for what is no fact."""

    @property
    def fact(self) -> Fact | str:
        return self.args[0] if self.args else ""

    @property
    def text(self) -> str:
        """The sentence, with marks for settings: what goes into another error's sentence."""
        return str(self.fact)

    def __str__(self) -> str:
        """Return the sentence as Python code would name the settings."""
        return worded(self.text.replace("⟩ ⟨", "⟩, ⟨"), lambda setting: setting.in_python)
