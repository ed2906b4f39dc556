"""Check the versions and imports of this project and the packages it uses, against the ranges of its metadata."""

import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from replay.commands.doctor.probe_process import Answer
from replay.output.text import CheckResult, CheckStatus

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


def project() -> list[CheckResult]:
    folder = Path(__file__).resolve().parents[3]
    try:
        own = CheckResult(name=PROJECT, status=CheckStatus.OK, found=f"{version(PROJECT)} in {folder}")
    except PackageNotFoundError:
        advice = f"its version requirements are unknown. Try: pip install -e {folder}"
        own = CheckResult(
            name=PROJECT, status=CheckStatus.NOTE, found=f"not installed, run from {folder}", advice=advice
        )
    python = f"{platform.python_version()}, {sys.executable}"
    return [own, CheckResult(name="python", status=CheckStatus.OK, found=python)]


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


def package(one: Package, imported: Answer | None, *, on_cuda: bool, is_default: bool) -> CheckResult:
    """Check a package's version against this project's range, and the result of importing it (None if not installed).

    `is_default` says that `replay` without options uses it here.
    """
    wanted = required_ranges().get(one.name, "")
    install = f"Try: pip install '{one.name}{wanted}'"
    if one.on_cuda:
        install = f"Try: pip install --no-build-isolation '{one.name}{wanted}'"
    if imported is None:
        if not is_default and (not on_cuda if one.on_cuda else True):
            return CheckResult(
                name=one.name, status=CheckStatus.NOT_NEEDED, found="not installed", advice=f"serves {one.serves}"
            )
        cost = f"no {one.serves}. " if one.serves else ""
        text = f"not installed{wanted and f', needed {wanted}'}"
        return CheckResult(
            name=one.name, status=CheckStatus.MISSING, found=text, advice=cost + install, needed=is_default
        )
    try:
        number = version(one.name)
    except PackageNotFoundError:
        number = "of unknown version"
    if imported.error:
        status = CheckStatus.NO_ANSWER if imported.is_silent else CheckStatus.BROKEN
        return CheckResult(
            name=one.name,
            status=status,
            found=f"{number}, import: {imported.error}",
            advice=_import_advice(one, imported, install),
            needed=is_default,
        )
    if number[0].isdigit() and not is_within(number, wanted):
        text = f"{number} is outside {wanted}"
        return CheckResult(name=one.name, status=CheckStatus.BROKEN, found=text, advice=install, needed=is_default)
    return CheckResult(
        name=one.name, status=CheckStatus.OK, found=f"{number}{wanted and f' ({wanted})'}", needed=is_default
    )


def _import_advice(one: Package, imported: Answer, install: str) -> str:
    advice = install.replace("pip install", "pip install --force-reinstall --no-deps --no-cache-dir")
    if "undefined symbol" in imported.error:
        advice = f"its C++ library was built for another torch. {advice}"
    if imported.is_silent:
        advice = f"a hang, or a slow machine. Try: replay doctor --time-limit 300, or{advice.removeprefix('Try:')}"
    if "flash" in one.name:
        advice += ", or without it: replay --attention sdpa"
    return advice


# Check environment variables that change what a replay computes or measures, or that can make it hang.

PREFIXES = (
    "CUDA_",
    "CUBLAS_",
    "DEEPSPEED_",
    "DS_",
    "GLOO_",
    "NCCL_",
    "PYTORCH_",
    "TORCH_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
)
PLAIN = r"[A-Za-z0-9_.,:;=^+ -]{1,60}"  # a plain setting; any other value is not shown
EFFECTS = {  # none of these holds a secret
    "CUBLAS_WORKSPACE_CONFIG": "changes speed, and whether sums are repeatable",
    "CUDA_DEVICE_MAX_CONNECTIONS": "changes how copies and kernels overlap",
    "CUDA_LAUNCH_BLOCKING": "the host waits for each kernel: times are not those of training",
    "CUDA_VISIBLE_DEVICES": "hides and numbers GPUs",
    "FLASH_ATTENTION_DETERMINISTIC": "another backward of flash-attn, slower",
    "MKL_CBWR": "changes numbers on a CPU",
    "NCCL_ALGO": "changes the order of sums",
    "NCCL_BLOCKING_WAIT": "old name of TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DEBUG": "NCCL prints between the results",
    "NCCL_IB_DISABLE": "several hosts are slower",
    "NCCL_NVLS_ENABLE": "changes the order of sums",
    "NCCL_P2P_DISABLE": "several GPUs are slower",
    "NCCL_PROTO": "changes the order of sums",
    "NCCL_SHM_DISABLE": "several GPUs are slower",
    "NVIDIA_TF32_OVERRIDE": "changes fp32 numbers",
    "OMP_NUM_THREADS": "changes speed on a CPU",
    "PYTORCH_ALLOC_CONF": "changes memory peaks",
    "PYTORCH_CUDA_ALLOC_CONF": "changes memory peaks",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "disables the memory cache: slow, and peaks are not those of training",
    "TORCHDYNAMO_DISABLE": "--compile compiles nothing",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "changes fp32 numbers",
    "TORCH_COMPILE_DISABLE": "--compile compiles nothing",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL makes collectives slow",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0 lets a rank hang forever",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits in each collective: times are not those of training",
}
ELSEWHERE = {"TORCH_CUDA_ARCH_LIST", "CUDA_HOME"}  # checked elsewhere
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def variables(environment: Mapping[str, str] = os.environ) -> list[CheckResult]:
    """Return a check per variable that is set and has an effect here, and one that names others of its families."""
    checks = [_interface(name, environment[name]) for name in INTERFACES if environment.get(name)]
    for name, effect in EFFECTS.items():
        if name in environment:
            checks.append(
                CheckResult(name=name, status=CheckStatus.NOTE, found=shown(environment[name]), advice=effect)
            )
    if left_over := [name for name in LAUNCHER if name in environment and "TORCHELASTIC_RUN_ID" not in environment]:
        advice = f"replay takes them for a launcher's. Try: unset {' '.join(left_over)}"
        checks.append(
            CheckResult(name="launcher's", status=CheckStatus.NOTE, found=", ".join(left_over), advice=advice)
        )
    known = {*EFFECTS, *ELSEWHERE, *INTERFACES}
    if others := sorted(name for name in environment if name.startswith(PREFIXES) and name not in known):
        advice = "their effect here is unknown"
        checks.append(CheckResult(name="also set", status=CheckStatus.NOTE, found=", ".join(others), advice=advice))
    return checks or [CheckResult(name="variables", status=CheckStatus.OK, found="none is set that changes results")]


def shown(value: str) -> str:
    """Return the value if it is a plain setting; paths, addresses and long values stay out of logs that are shared."""
    return value if re.fullmatch(PLAIN, value) else f"set, {len(value)} characters"


def _interface(name: str, value: str) -> CheckResult:
    """Check that the network interface exists. NCCL treats names as prefixes, and as exact names after `=`."""
    there = [interface for _, interface in socket.if_nameindex()]
    status, advice = CheckStatus.NOTE, "the network that ranks use"
    if not value.startswith("^"):
        wanted = value.lstrip("=").split(",")
        if name.startswith("GLOO"):
            is_there = all(one in there for one in wanted)
        elif value.startswith("="):
            is_there = any(one in there for one in wanted)
        else:
            is_there = any(one.startswith(tuple(wanted)) for one in there)
        if not is_there:
            status, advice = CheckStatus.BROKEN, f"there is no such interface: ranks fail or hang. Try: unset {name}"
    return CheckResult(name=name, status=status, found=shown(value), advice=advice)
