"""Run a file that the user names, by `FILE.py:function` of --model, --loss or --optimizer, and find its function.

No other file of a capture or of a model folder is ever run. What the file imports from its own folder is found.
"""

import hashlib
import inspect
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from torch import nn

from actor_init.spec import UsageError
from capture.facts import Setting

# An optional argument of this name is given the captured config too.
CONFIG_ARGUMENT = "config"
# torch warns in these words when a checkpoint is loaded into parameters without values.
_NO_OP_WARNING = "which is a no-op"
MODEL = "model"


@dataclass(frozen=True, kw_only=True, slots=True)
class UserFunction:
    """A function in a user's file, such as one that builds the model.

    sha256   of the file
    setting  the setting that names the function
    """

    file: Path
    function: str
    sha256: str
    setting: str = MODEL

    @classmethod
    def open(cls, file: Path, function: str, setting: str = MODEL) -> Self:
        """Run the file. Raises UsageError if there is no such file or function, or if the file raises."""
        try:
            source = file.read_bytes()
        except OSError as error:
            typed = Setting(setting, f"{file}:{function}")
            advice = f"Give {typed.with_value('FILE.py:FUNCTION')}"
            if setting == MODEL:
                advice = f"Try: {typed.with_value('FILE.py:function')}, where function() returns the module"
            raise UsageError(typed, f": {file.absolute()}: {error.strerror}", advice) from None
        sha256 = hashlib.sha256(source).hexdigest()
        user_function = cls(file=file.absolute(), function=function, sha256=sha256, setting=setting)
        user_function.load()
        return user_function

    def __str__(self) -> str:
        return f"{self.file.name}:{self.function}"

    @property
    def full_setting(self) -> Setting:
        return Setting(self.setting, str(self))

    def build(self, captured: Mapping[str, object] | None) -> nn.Module:
        """Call the function, with the captured config if it asks for one, and return its module.

        Raises UsageError if it raises, asks for more, or returns something else.
        """
        function = self.load()
        arguments = (
            [deepcopy(dict(captured))] if self._takes_config(function, captured) and captured is not None else []
        )
        with self._translate_errors(f"{self.function} raised"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = function(*arguments)
        for warning in caught:
            if _NO_OP_WARNING in str(warning.message):
                lost = "those would be lost: parameters have no values before they are sharded"
                why = f": {self.function} loads weights, and {lost}"
                advice = f"Try: no loading there, and {Setting('weights', 'FILE')}"
                raise UsageError(self.full_setting, why, advice)
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        if not isinstance(module, nn.Module):
            why, advice = f": {self.function} returned {_describe_type(module)}", "It has to return the torch.nn.Module"
            raise UsageError(self.full_setting, why, advice)
        return module

    def call(self, *arguments: Any) -> Any:
        """Call the function and return what it returns. Raises UsageError if it raises."""
        function = self.load()
        with self._translate_errors(f"{self.function} raised"):
            return function(*arguments)

    def load(self) -> Any:
        """Run the file, unless it ran before, and return what it has by that name. Raises what `open` does."""
        with self._translate_errors("it raised"):
            module = _run_file(self.file, self.sha256)
        function = getattr(module, self.function, None)
        if not callable(function):
            defined = [name for name, value in vars(module).items() if _is_defined_in(value, module)]
            known = f"It has {', '.join(defined[:8])}" if defined else "It defines no function"
            raise UsageError(self.full_setting, f": {self.file} has no function {self.function}", known)
        return function

    def _takes_config(self, function: Any, captured: Mapping[str, object] | None) -> bool:
        """Does the function take the captured config? Raises UsageError for arguments that nobody can give."""
        signature = inspect.signature(function)
        parameters = [parameter for parameter in signature.parameters.values() if parameter.kind not in _VARIADIC_KINDS]
        needed = [parameter for parameter in parameters if parameter.default is parameter.empty]
        if len(needed) > 1 or any(parameter.kind is parameter.KEYWORD_ONLY for parameter in needed):
            names = ", ".join(parameter.name for parameter in needed)
            why = f": {self.function} needs {names}, and is called with the captured config at most"
            raise UsageError(self.full_setting, why, "Give the others defaults")
        if needed and captured is None:
            lacking = "there is no actor.json with a config beside the inputs"
            why = f": {self.function} needs {needed[0].name}, and {lacking}"
            raise UsageError(self.full_setting, why, "Give it a default")
        first = parameters[:1]
        return bool(needed) or bool(first and first[0].name == CONFIG_ARGUMENT and captured is not None)

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        """Turn what the user's code raises into one line, with the place in their file."""
        try:
            with _allow_imports_from(self.file.parent):
                yield
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            last = traceback.format_exception_only(error)[-1].strip()
            frames = traceback.extract_tb(error.__traceback__)
            frame = next((frame for frame in reversed(frames) if frame.filename == str(self.file)), frames[-1])
            line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(self.file) else frame.lineno
            file = self.file if isinstance(error, SyntaxError) else frame.filename
            why = f": {what} {' '.join(last.split())}, at {file}:{line}"
            raise UsageError(self.full_setting, why, "With --traceback: all of it") from error


_VARIADIC_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@cache
def _run_file(file: Path, sha256: str) -> ModuleType:
    """Run a file, once in this process while it does not change."""
    name = f"micro_replay_user_{sha256[:12]}_{file.stem}"
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # The dataclasses module and torch.compile look a class's module up there.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _allow_imports_from(folder: Path) -> Iterator[None]:
    """Let the file's neighbours be imported: before other modules here, and after them later, as in a forward."""
    path = str(folder)
    was_on_path = path in sys.path
    sys.path.insert(0, path)
    try:
        yield
    finally:
        sys.path.remove(path)
        if not was_on_path:
            sys.path.append(path)


def _is_defined_in(value: Any, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _describe_type(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
