"""Files that try to run code or to take all memory when they are read."""

import os
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_GROWTH_BYTES = 2**30


ROOT = Path(__file__).resolve().parents[2]


# The name of a file that an attack would leave in the child's working folder.
MARKER = "marker"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def saved(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def integer(value: int) -> bytes:
    return pickle.dumps(value, protocol=2)[2:-1]


def arguments(*values: str | bytes) -> bytes:
    return b"".join(text(value) if isinstance(value, str) else saved(value) for value in values)


def name(module: str, function: str) -> bytes:
    return f"c{module}\n{function}\n".encode()


def calls(module: str, function: str, *values: str | bytes) -> dict[str, bytes]:
    """Return every way in which a pickle can call, build or fetch something."""
    packed, named = arguments(*values), name(module, function)
    stack_named = text(module) + text(function) + b"\x93"
    return {
        "GLOBAL": named + b"(" + packed + b"tR",
        "STACK_GLOBAL": stack_named + b"(" + packed + b"tR",
        "memoized": b"("
        + text(module)
        + b"q\xc8"
        + text(function)
        + b"q\xc9th\xc8h\xc9\x93q\xcah\xca("
        + packed
        + b"tR",
        "INST": b"(" + packed + f"i{module}\n{function}\n".encode(),
        "OBJ": b"(" + named + packed + b"o",
        "NEWOBJ": named + b"(" + packed + b"t\x81",
        "NEWOBJ_EX": named + b"(" + packed + b"t}\x92",
        "BUILD": named + b"(" + packed + b"tR}" + text("x") + text("y") + b"sb",
        "EXT1": b"\x82\1(" + packed + b"tR",
        "EXT2": b"\x83\1\0(" + packed + b"tR",
        "EXT4": b"\x84\1\0\0\0(" + packed + b"tR",
        "PERSID": b"P" + f"{module}.{function}".encode() + b"\n",
        "BINPERSID": stack_named + b"Q",
        "name alone": stack_named,
    }


TARGETS: dict[str, tuple[str, str, tuple[str | bytes, ...]]] = {
    "os.system": ("os", "system", (f"touch {MARKER}",)),
    "posix.system": ("posix", "system", (f"touch {MARKER}",)),
    "nt.system": ("nt", "system", (f"touch {MARKER}",)),
    "os.remove": ("os", "remove", ("actor.json",)),
    "eval": ("builtins", "eval", (f"open('{MARKER}', 'w')",)),
    "exec": ("builtins", "exec", (f"open('{MARKER}', 'w')",)),
    "Python 2's eval": ("__builtin__", "eval", (f"open('{MARKER}', 'w')",)),
    "compile": ("builtins", "compile", ("1", "x", "eval")),
    "getattr": ("builtins", "getattr", ("x", "upper")),
    "open": ("builtins", "open", (MARKER, "w")),
    "Popen": ("subprocess", "Popen", (f"./{MARKER}",)),
    "socket": ("socket", "create_connection", ("localhost",)),
    "import": ("importlib", "import_module", ("antigravity",)),
    "runpy": ("runpy", "run_path", (MARKER,)),
    "ctypes": ("ctypes", "CDLL", (MARKER,)),
    "pickle.loads": ("pickle", "loads", (name("os", "system") + text(f"touch {MARKER}") + b"\x85R.",)),
    "torch.load": ("torch", "load", (MARKER,)),
    "torch.hub": ("torch.hub", "load", (MARKER, MARKER)),
    "another of torch.storage": ("torch.storage", "_new_dtypes", ()),
    "another of torch._utils": ("torch._utils", "_rebuild_parameter", ()),
    "attribute of an allowed name": ("torch.storage", "_load_from_bytes.__globals__", ()),
    "load from bytes": (
        "torch.storage",
        "_load_from_bytes",
        (name("os", "system") + text(f"touch {MARKER}") + b"\x85R.",),
    ),
}


def loaded(inner: bytes) -> bytes:
    return name("torch.storage", "_load_from_bytes") + saved(inner) + b"\x85R"


LEGACY_HEAD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."


def legacy_storage(
    described: bytes | None = None,
    *,
    dtype: str = "LongStorage",
    num_elements: int = 4,
    num_written: int | None = None,
    elements: bytes = bytes(32),
    system: Any = None,
    keys: Any = ("1",),
    view: bytes = b"N",
) -> bytes:
    described = described or (
        b"(" + text("storage") + name("torch", dtype) + text("1") + text("cpu") + integer(num_elements) + view + b"tQ"
    )
    written = struct.pack("<q", num_elements if num_written is None else num_written)
    about_system = pickle.dumps({"little_endian": True} if system is None else system, protocol=2)
    return LEGACY_HEAD + about_system + described + b"." + pickle.dumps(list(keys), protocol=2) + written + elements


def attacks(placements: Callable[[bytes], dict[str, bytes]]) -> dict[str, bytes]:
    """Make a file for every target by one form of call, and for FileIO by every form.

    `placements` puts instructions into every place in which they could be run.
    """
    files = {}
    for target, (module, function, values) in TARGETS.items():
        for where, data in placements(calls(module, function, *values)["STACK_GLOBAL"]).items():
            files[f"{target}, {where}"] = data
    for form, instructions in calls("_io", "FileIO", MARKER, "w").items():
        for where, data in placements(instructions).items():
            files[f"FileIO by {form}, {where}"] = data
    return files


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {MARKER}",)


WATCHED = (
    *("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "urllib.", "http.", "marshal.", "glob."),
    *(
        "exec",
        "compile",
        "import",
        "code.__new__",
        "pickle.find_class",
        "builtins.",
        "sys.",
        "tempfile.",
        "webbrowser.",
    ),
)


# ctypes looks at the bytes of a tensor for their checksum.
HARMLESS = ("sys._getframe", "ctypes.cdata")


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def watch(events: list[str]) -> None:
    """Note in `events` whatever Python does from now on that reading a file does not need."""

    def note(event: str, details: tuple[Any, ...]) -> None:
        is_write = event == "open" and isinstance(details[2], int) and details[2] & WRITING
        if is_write or (event.startswith(WATCHED) and event not in HARMLESS):
            events.append(f"{event} {details!r}"[:200])

    sys.addaudithook(note)


def read_peak_resident_bytes() -> int:
    """Read the peak from /proc: getrusage's starts at the size of the process that started this one."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024
