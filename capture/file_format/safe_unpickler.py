"""Read pickles of plain data with a reader of our own: no unpickler ever sees a captured file.

A pickle is a program. This reader knows only the instructions that build None, bool, int, float, str, bytes, list,
tuple and dict; there is none that imports or calls, so there is nothing to attack. A reader of older dumps may lend it
a table of names, and then it knows GLOBAL, STACK_GLOBAL and REDUCE too, for these names alone.

The result is a tree: a dict's keys are strings and no list, tuple or dict is referred to twice, so that its size is
bounded by the file's and walking it takes no longer than reading it.
"""

import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any

from capture.facts import CaptureError

# Reading so many takes about a second; a captured pass has a few hundred.
MAX_INSTRUCTIONS = 200_000
MAX_TEXT_BYTES = 16 * 2**20
# Lists within lists; a call's facts are flat or nearly so.
MAX_DEPTH = 16
MAX_INT_BYTES = 8
FLOAT_BYTES = 9  # the instruction BINFLOAT and its number
# So many floats are read at once: a reader that looked through all that is left would take longer for each longer file.
MAX_FLOATS_AT_ONCE = 1024

_CONSTANTS = {pickle.NONE: None, pickle.NEWTRUE: True, pickle.NEWFALSE: False}
_NUMBERS = {pickle.BININT1: "<B", pickle.BININT2: "<H", pickle.BININT: "<i"}
_TEXTS = {pickle.SHORT_BINUNICODE: "<B", pickle.BINUNICODE: "<I"}
_BYTES = {pickle.SHORT_BINBYTES: "<B", pickle.BINBYTES: "<I", pickle.BINBYTES8: "<Q"}
_EMPTY = {pickle.EMPTY_LIST: list, pickle.EMPTY_DICT: dict, pickle.EMPTY_TUPLE: tuple}
_CONTAINERS = (list, tuple, dict)
_TUPLES = {pickle.TUPLE1: 1, pickle.TUPLE2: 2, pickle.TUPLE3: 3}


class NamesAClassError(CaptureError):
    """A pickle that names a class or function was given to a reader without a table of names."""


def load_plain(
    data: bytes | memoryview,
    *,
    source: str,
    start: int = 0,
    names: Mapping[tuple[str, str], Any] | None = None,
    persistent_load: Callable[[Any], Any] | None = None,
    max_instructions: int = MAX_INSTRUCTIONS,
) -> tuple[Any, int]:
    """Read the pickle that starts at byte `start`; returns its value and where it ends.

    names            what (module, name) stands for; a callable among them may be called. None: NamesAClassError
    persistent_load  what a persistent id stands for
    max_instructions of the pickle; more are refused

    Raises CaptureError for everything else.
    """
    reader = PickleReader(memoryview(data), start, source, names, persistent_load, max_instructions)
    value = reader.run()
    if is_nested_deeper(value):
        raise reader.error(f"more than {MAX_DEPTH} levels of nesting")
    return value, reader.position


class PickleReader:
    """A stack machine. `stack` holds the values since the last mark, `outer_stacks` those before it.

    `run` reads the pickle, `step` does one instruction, and `read_value` reads the value of one that pushes a value.
    Methods raise CaptureError for what the reader does not know.
    """

    max_text_bytes = MAX_TEXT_BYTES

    def __init__(
        self,
        data: memoryview,
        start: int,
        source: str,
        names: Mapping[tuple[str, str], Any] | None,
        persistent_load: Callable[[Any], Any] | None,
        max_instructions: int = MAX_INSTRUCTIONS,
    ) -> None:
        self.data = data
        self.position = start
        self.source = source
        self.names = names
        self.persistent_load = persistent_load
        self.max_instructions = max_instructions
        self.stack: list[Any] = []
        self.outer_stacks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.num_text_bytes = 0
        self.num_instructions = 0

    def error(self, problem: str) -> CaptureError:
        return CaptureError(f"{self.source}: {problem} at byte {self.position}: the file is damaged or no capture")

    def take(self, num_bytes: int) -> memoryview:
        view = self.data[self.position : self.position + num_bytes]
        if len(view) != num_bytes:
            raise CaptureError(
                f"{self.source}: truncated: {num_bytes} bytes were expected at byte {self.position}, "
                f"{len(view)} are left. Delete the file or copy it again"
            )
        self.position += num_bytes
        return view

    def read_number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def read_floats(self) -> list[float]:
        """Read the float whose instruction was taken, and those that follow one another after it.

        Most instructions of a capture are floats of weights' and gradients' samples: one by one they took half of the
        time of reading it.
        """
        following = self.data[self.position + FLOAT_BYTES - 1 :]
        most = min(len(following) // FLOAT_BYTES, self.max_instructions - self.num_instructions, MAX_FLOATS_AT_ONCE)
        instructions = bytes(following[: most * FLOAT_BYTES : FLOAT_BYTES])
        num_following = len(instructions) - len(instructions.lstrip(pickle.BINFLOAT))
        self.num_instructions += num_following
        first = self.read_number(">d")
        return [first, *(number for (number,) in struct.iter_unpack(">xd", self.take(num_following * FLOAT_BYTES)))]

    def read_text(self, num_bytes: int) -> str:
        self.num_text_bytes += num_bytes
        if self.num_text_bytes > self.max_text_bytes:
            raise self.error(f"more than {self.max_text_bytes} bytes of text")
        try:
            return str(self.take(num_bytes), "utf-8")
        except UnicodeDecodeError:
            raise self.error("text that is not UTF-8") from None

    def read_line(self) -> str:
        end = bytes(self.data[self.position : self.position + 256]).find(b"\n")
        if end < 0:
            raise self.error("a name without an end")
        name = self.read_text(end)
        self.position += 1
        return name

    def pop(self, kind: type | tuple[type, ...] = object) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise self.error("an instruction without its operand")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        if not self.outer_stacks:
            raise self.error("an instruction without its mark")
        values, self.stack = self.stack, self.outer_stacks.pop()
        return values

    def fill(self, values: list[Any], kind: type[list[Any]] | type[dict[str, Any]]) -> None:
        """Add values to the list, or keys and values in turn to the dict, on top of the stack."""
        if not self.stack or type(self.stack[-1]) is not kind:
            raise self.error(f"items for a {kind.__name__} that is none")
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
            return
        if len(values) % 2:
            raise self.error("a dict with a key that has no value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) is not str or key in target:
                raise self.error("a dict with a key that is no text or is there twice")
            target[key] = value

    def remember(self, index: int) -> None:
        if not self.stack:
            raise self.error("an instruction without its operand")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> Any:
        if index not in self.memo or isinstance(self.memo[index], list | tuple | dict):
            raise self.error("a reference to something other than a value seen before")
        return self.memo[index]

    def look_up(self, module: str, name: str) -> Any:
        """Return what a name stands for, by the table of names; nothing is ever imported."""
        # `repr` because the name may hold control characters.
        full_name = repr(f"{module}.{name}"[:120])
        advice = "Nothing of it was run. Delete the file unless you know where it came from"
        if self.names is None:
            raise NamesAClassError(
                f"{self.source}: refused: the pickle names {full_name}; a capture names nothing. {advice}"
            )
        if (module, name) not in self.names:
            allowed = ", ".join(sorted(".".join(pair) for pair in self.names)) or "none"
            raise CaptureError(f"{self.source}: refused: the pickle names {full_name}; allowed: {allowed}. {advice}")
        return self.names[module, name]

    def call(self) -> Any:
        arguments, function = self.pop(tuple), self.pop()
        if self.names is None or not callable(function) or function not in self.names.values():
            raise self.error("a call of something that is no allowed name")
        return function(*arguments)

    def load_persistent(self, persistent_id: Any) -> Any:
        if self.persistent_load is None:
            raise self.error("a persistent id")
        return self.persistent_load(persistent_id)

    def run(self) -> Any:
        while self.num_instructions < self.max_instructions:
            self.num_instructions += 1
            instruction = bytes(self.take(1))
            if instruction == pickle.STOP:
                return self.pop()
            self.step(instruction)
            if len(self.outer_stacks) > MAX_DEPTH + 1:
                raise self.error(f"more than {MAX_DEPTH} levels of nesting")
        raise self.error(f"more than {self.max_instructions} instructions")

    def step(self, instruction: bytes) -> None:
        match instruction:
            case pickle.PROTO:
                if self.read_number("<B") > 5:
                    raise self.error("a pickle protocol above 5")
            case pickle.FRAME:
                self.take(8)
            case pickle.MARK:
                self.outer_stacks.append(self.stack)
                self.stack = []
            case pickle.BINFLOAT:
                self.stack += self.read_floats()
            case pickle.MEMOIZE:
                self.remember(len(self.memo))
            case pickle.BINPUT:
                self.remember(self.read_number("<B"))
            case pickle.LONG_BINPUT:
                self.remember(self.read_number("<I"))
            case pickle.APPEND:
                self.fill([self.pop()], list)
            case pickle.APPENDS:
                self.fill(self.pop_to_mark(), list)
            case pickle.SETITEM:
                value, key = self.pop(), self.pop()
                self.fill([key, value], dict)
            case pickle.SETITEMS:
                self.fill(self.pop_to_mark(), dict)
            case _:
                # The value comes first: to read it may replace `self.stack` by an outer one.
                value = self.read_value(instruction)
                self.stack.append(value)

    def read_value(self, instruction: bytes) -> Any:
        if instruction in _CONSTANTS:
            return _CONSTANTS[instruction]
        if instruction in _NUMBERS:
            return self.read_number(_NUMBERS[instruction])
        if instruction in _TEXTS:
            return self.read_text(self.read_number(_TEXTS[instruction]))
        if instruction in _BYTES:
            return bytes(self.take(self.read_number(_BYTES[instruction])))
        if instruction in _EMPTY:
            return _EMPTY[instruction]()
        if instruction in _TUPLES:
            return tuple(reversed([self.pop() for _ in range(_TUPLES[instruction])]))
        match instruction:
            case pickle.LONG1:
                return self.read_integer(self.read_number("<B"))
            case pickle.TUPLE:
                return tuple(self.pop_to_mark())
            case pickle.BINGET:
                return self.recall(self.read_number("<B"))
            case pickle.LONG_BINGET:
                return self.recall(self.read_number("<I"))
            case pickle.GLOBAL:
                module = self.read_line()
                return self.look_up(module, self.read_line())
            case pickle.STACK_GLOBAL:
                name, module = self.pop(str), self.pop(str)
                return self.look_up(module, name)
            case pickle.REDUCE:
                return self.call()
            case pickle.BINPERSID:
                return self.load_persistent(self.pop())
        raise self.error(f"instruction {instruction!r}, which plain data does not need,")

    def read_integer(self, num_bytes: int) -> int:
        if num_bytes > MAX_INT_BYTES:
            raise self.error(f"an integer of more than {MAX_INT_BYTES} bytes")
        return int.from_bytes(self.take(num_bytes), "little", signed=True)


def copy_plain(value: Any, *, max_depth: int = MAX_DEPTH) -> Any:
    """Copy `value` into what a class-free pickle can hold: exact built-in types only, nothing referred to twice.

    Raises TypeError naming the first type that is not plain data.
    """
    if value is None or type(value) in (bool, float, str, bytes):
        return value
    if type(value) is int and value.bit_length() < 8 * MAX_INT_BYTES:
        return value
    if max_depth > 0:
        if type(value) is list:
            return [copy_plain(member, max_depth=max_depth - 1) for member in value]
        # A tensor's size is a tuple of torch's, which is not imported here.
        if type(value) is tuple or (type(value).__module__, type(value).__name__) == ("torch", "Size"):
            return tuple(copy_plain(member, max_depth=max_depth - 1) for member in value)
        if type(value) is dict and all(type(key) is str for key in value):
            return {key: copy_plain(member, max_depth=max_depth - 1) for key, member in value.items()}
    raise TypeError(type_name(value))


def is_nested_deeper(value: Any, max_depth: int = MAX_DEPTH) -> bool:
    """Tell whether more than `max_depth` lists, tuples and dicts lie within one another."""
    level = [value]
    for _ in range(max_depth + 2):
        level = [
            member
            for container in level
            if isinstance(container, _CONTAINERS)
            for member in (container.values() if isinstance(container, dict) else container)
        ]
    return bool(level)


def type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
