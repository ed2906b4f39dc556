"""Check the versions and imports of this project and the packages it uses, against the ranges of its metadata."""

import platform
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from replay.commands.doctor.probe_process import Answer
from replay.output.check import Check, Status

PROJECT = "micro-replay"


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    name: str  # pip's name
    module: str
    serves: str = ""  # what is missing without it; empty: nothing
    on_cuda: bool = False  # needed on CUDA machines only


PACKAGES = (
    Package(name="torch", module="torch"),
    Package(name="deepspeed", module="deepspeed"),
    Package(name="transformers", module="transformers"),
    Package(name="safetensors", module="safetensors"),
    Package(name="rich", module="rich"),
    Package(name="typer", module="typer"),
    Package(name="numpy", module="numpy"),
    Package(name="accelerate", module="accelerate", serves="capturing jobs of transformers' Trainer"),
    Package(name="flash-attn", module="flash_attn", serves="--attention flash", on_cuda=True),
    Package(name="ring-flash-attn", module="ring_flash_attn", serves="the fast form of --ring", on_cuda=True),
    Package(name="triton", module="triton", serves="--compile on CUDA", on_cuda=True),
    Package(name="liger-kernel", module="liger_kernel", serves="--kernels fused"),
)


def project() -> list[Check]:
    folder = Path(__file__).resolve().parents[3]
    try:
        own = Check(name=PROJECT, status=Status.OK, found=f"{version(PROJECT)} in {folder}")
    except PackageNotFoundError:
        advice = f"its version requirements are unknown. Try: pip install -e {folder}"
        own = Check(name=PROJECT, status=Status.NOTE, found=f"not installed, run from {folder}", advice=advice)
    python = f"{platform.python_version()}, {sys.executable}"
    return [own, Check(name="python", status=Status.OK, found=python)]


def required_ranges() -> dict[str, str]:
    """Return the ranges of this project's metadata by package name, such as ">=2.10"; empty if not installed."""
    try:
        lines = requires(PROJECT) or []
    except PackageNotFoundError:
        return {}
    parts = [re.match(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*([^;]*)", line) for line in lines]
    return {part[1]: part[2].strip() for part in parts if part}


def is_within(number: str, wanted: str) -> bool:
    """Is the version in the range, by release number? Builds and pre-releases (+cu130, a0, rc1) count as releases."""
    for clause in filter(None, wanted.split(",")):
        operator, bound = re.fullmatch(r"\s*(>=|<=|==|!=|<|>)\s*([\w.+]+)\s*", clause).groups()  # type: ignore[union-attr]
        mine, other = _release(number), _release(bound)
        width = max(len(mine), len(other))
        mine, other = (one + (0,) * (width - len(one)) for one in (mine, other))
        holds = {
            ">=": mine >= other,
            "<=": mine <= other,
            "==": mine == other,
            "!=": mine != other,
            "<": mine < other,
            ">": mine > other,
        }
        if not holds[operator]:
            return False
    return True


def _release(number: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(?:\.\d+)*", number)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def is_installed(package: Package) -> bool:
    if "." not in package.module:
        return find_spec(package.module) is not None
    try:  # to look inside a package is to import it
        version(package.name)
    except PackageNotFoundError:
        return False
    return True


def package(one: Package, imported: Answer | None, *, on_cuda: bool, is_default: bool) -> Check:
    """Check a package's version against this project's range, and the result of importing it (None if not installed).

    `is_default` says that `replay` without options uses it here.
    """
    wanted = required_ranges().get(one.name, "")
    install = f"Try: pip install '{one.name}{wanted}'"
    if one.on_cuda:
        install = f"Try: pip install --no-build-isolation '{one.name}{wanted}'"
    if imported is None:
        if not is_default and (not on_cuda if one.on_cuda else True):
            return Check(name=one.name, status=Status.NOT_NEEDED, found="not installed", advice=f"serves {one.serves}")
        cost = f"no {one.serves}. " if one.serves else ""
        text = f"not installed{wanted and f', needed {wanted}'}"
        return Check(name=one.name, status=Status.MISSING, found=text, advice=cost + install, needed=is_default)
    try:
        number = version(one.name)
    except PackageNotFoundError:
        number = "of unknown version"
    if imported.error:
        status = Status.NO_ANSWER if imported.is_silent else Status.BROKEN
        return Check(
            name=one.name,
            status=status,
            found=f"{number}, import: {imported.error}",
            advice=_import_advice(one, imported, install),
            needed=is_default,
        )
    if number[0].isdigit() and not is_within(number, wanted):
        text = f"{number} is outside {wanted}"
        return Check(name=one.name, status=Status.BROKEN, found=text, advice=install, needed=is_default)
    return Check(name=one.name, status=Status.OK, found=f"{number}{wanted and f' ({wanted})'}", needed=is_default)


def _import_advice(one: Package, imported: Answer, install: str) -> str:
    advice = install.replace("pip install", "pip install --force-reinstall --no-deps --no-cache-dir")
    if "undefined symbol" in imported.error:
        advice = f"its C++ library was built for another torch. {advice}"
    if imported.is_silent:
        advice = f"a hang, or a slow machine. Try: replay doctor --time-limit 300, or{advice.removeprefix('Try:')}"
    if "flash" in one.name:
        advice += ", or without it: replay --attention sdpa"
    return advice
