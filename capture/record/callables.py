"""Say where a function comes from, and digest its code, so that two processes can tell whether they run the same.

A function is named `transformers.models.llama.modeling_llama:LlamaMLP.forward` if it is of an installed package, and
`train.py:make_model.<locals>.forward` if it is the job's own: no path of the machine is kept. The name is that of the
code that runs: `functools.wraps` gives a wrapper the name of what it wraps.
"""

import functools
import hashlib
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

# Packages that wrap forwards, hook modules and register gradient hooks to do their work, and this one.
PLUMBING = frozenset(
    {
        *("torch", "transformers", "accelerate", "deepspeed", "peft", "lightning", "lightning_fabric"),
        *("pytorch_lightning", "trl", "openrlhf", "ray", "typing_extensions", "wrapt", "decorator", "beartype"),
        *("capture", "actor_init", "replay"),
    }
)
# What stands between the wrappers of a function and the function: more than these is a loop.
_MAX_DEPTH = 32
_DIGEST_BYTES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeFact:
    """One function.

    name    its package's module, or its file, and its name there
    digest  of the code, its constants and names; of what it wraps too
    """

    name: str
    digest: str

    def to_json(self) -> list[str]:
        return [self.name, self.digest]


def unwrap(function: Any) -> Iterator[Any]:
    """Yield a callable and what it wraps, from the outside in: functions, and classes of objects that are called."""
    seen: set[int] = set()
    queue = [function]
    while queue and len(seen) < _MAX_DEPTH:
        current = queue.pop(0)
        if id(current) in seen or current is None:
            continue
        seen.add(id(current))
        if isinstance(current, MethodType):
            queue.insert(0, current.__func__)
        elif isinstance(current, functools.partial):
            queue.insert(0, current.func)
        elif isinstance(current, FunctionType):
            yield current
            queue.append(vars(current).get("__wrapped__"))
        elif isinstance(current, type) or not callable(current):
            continue
        else:
            # An object that is called, as accelerate's ConvertOutputsToFp32 is.
            yield type(current).__call__ if isinstance(type(current).__call__, FunctionType) else current
            queue.append(getattr(current, "__wrapped__", None))


def find_own_code(function: Any) -> Any:
    """Return the outermost function of a callable that is of no plumbing package; None if all are plumbing."""
    for part in unwrap(function):
        if isinstance(part, FunctionType) and not is_plumbing(part):
            return part
    return None


def is_plumbing(function: Any) -> bool:
    """Tell whether a function is of Python itself, or of a package whose functions only carry others."""
    package = find_package_of(function)
    return package in PLUMBING or (package in sys.stdlib_module_names and package != "__main__")


def describe_function(function: Any) -> CodeFact:
    """Name a callable's outermost function, and digest it with all that it wraps."""
    first = next(unwrap(function), function)
    return CodeFact(name=name_function(first), digest=digest_function(function))


def name_function(function: Any) -> str:
    """Name a function by its package's module, or by its file if it is the job's own."""
    module_name = _find_module_name(function)
    code = getattr(function, "__code__", None)
    qualified: Any = None
    if isinstance(code, CodeType):
        # `functools.wraps` copies `__qualname__`, and Python 3.10 has no other.
        qualified = getattr(code, "co_qualname", None)
    qualified = qualified or getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{name_module(module_name, None if code is None else code.co_filename)}:{qualified}"


def name_class(class_: type) -> str:
    file = getattr(sys.modules.get(class_.__module__), "__file__", None)
    return f"{name_module(class_.__module__, file)}:{class_.__qualname__}"


def name_module(module_name: str, file: str | None) -> str:
    """Return the name of a package's module, and of the job's own the name of its file."""
    return module_name if _is_of_package(module_name, file) else Path(file or module_name).name


def digest_function(function: Any) -> str:
    """Digest the code of a callable and of what it wraps. Equal code has equal digests in one version of Python."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in unwrap(function):
        code = getattr(part, "__code__", None)
        digest.update(_digest_code(code) if isinstance(code, CodeType) else name_function(part).encode())
        for default in getattr(part, "__defaults__", None) or ():
            digest.update(_encode_constant(default))
        for name, default in sorted((getattr(part, "__kwdefaults__", None) or {}).items()):
            digest.update(name.encode() + _encode_constant(default))
    return digest.hexdigest()


def digest_methods(class_: type, base: type) -> str:
    """Digest the methods of a class, of its bases down to `base` too, except `forward` and `__init__`.

    Methods that a library has put into another package's class are left out: DeepSpeed leaves some behind.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for ancestor in class_.__mro__:
        if not issubclass(ancestor, base) or ancestor is base or _is_foreign(ancestor):
            continue
        for name, value in sorted(vars(ancestor).items()):
            function = getattr(value, "__func__", value)
            if not isinstance(function, FunctionType) or name == "forward" or function.__name__ == "__init__":
                continue
            if find_package_of(function) != find_package(ancestor.__module__) and is_plumbing(function):
                continue
            digest.update(f"{name} {digest_function(function)}".encode())
    return digest.hexdigest()


def is_of_package(class_: type) -> bool:
    """Tell whether a class is of an installed package."""
    return _is_of_package(class_.__module__, getattr(sys.modules.get(class_.__module__), "__file__", None))


def name_python() -> str:
    """Name the Python that compiled the code here: `cpython 3.11.7`. Another release may compile to other bytes."""
    without_asserts = f" -{'O' * sys.flags.optimize}" if sys.flags.optimize else ""
    return f"{sys.implementation.name} {platform.python_version()}{without_asserts}"


def find_package(module_name: str) -> str:
    return module_name.partition(".")[0]


def find_package_of(function: Any) -> str:
    """Return the package whose globals a function sees."""
    return find_package(_find_module_name(function))


def list_called_names(class_: type) -> set[str]:
    """List the global names that the methods of a class use."""
    functions = (getattr(value, "__func__", value) for value in vars(class_).values())
    codes = (part.__code__ for function in functions for part in unwrap(function) if type(part) is FunctionType)
    return {name for code in codes for name in list_names(code)}


def list_names(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes that a code uses, with those of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from list_names(constant)


def _is_foreign(class_: type) -> bool:
    """Tell whether a class is a base of a library's, whose methods are the library's own business."""
    return class_.__module__ in (
        "transformers.modeling_utils",
        "transformers.generation.utils",
        "torch.nn.modules.module",
    )


def _find_module_name(function: Any) -> str:
    """Return the name of the module whose globals a function sees."""
    namespace = getattr(function, "__globals__", None)
    if isinstance(namespace, dict):
        name = namespace.get("__name__")
    else:
        # A builtin function, or an object that is called.
        name = getattr(function, "__module__", None) or type(function).__module__
    return name if isinstance(name, str) else ""


@lru_cache(maxsize=4096)
def _is_of_package(module_name: str, file: str | None) -> bool:
    """Tell whether a module is of an installed package or of Python itself."""
    package = find_package(module_name)
    if package == "__main__" or not package:
        return False
    if package in PLUMBING or package in sys.stdlib_module_names or file is None:
        return True
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


@cache
def _digest_code(code: CodeType) -> bytes:
    digest = hashlib.blake2b(code.co_code, digest_size=16)
    for name in (*code.co_names, *code.co_varnames, *code.co_freevars):
        digest.update(name.encode() + b"\0")
    for constant in code.co_consts:
        digest.update(_encode_constant(constant))
    return digest.digest()


def _encode_constant(value: object) -> bytes:
    """Write a constant as bytes that are the same in each process: no address is among them."""
    match value:
        case CodeType():
            return _digest_code(value)
        case frozenset() | set():
            return b"{" + b",".join(sorted(map(_encode_constant, value))) + b"}"
        case tuple() | list():
            return b"(" + b",".join(map(_encode_constant, value)) + b")"
        case None | bool() | int() | float() | complex() | str() | bytes():
            return f"{type(value).__name__} {value!r}".encode("utf-8", "surrogatepass")
        case _:
            return type(value).__qualname__.encode()
