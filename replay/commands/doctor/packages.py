"""Check the Python environment: versions and imports of the packages, and environment variables.

Versions are held against the ranges of this project's metadata. Reported are the variables that change what a replay
computes or measures, or that can make it hang.
"""

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

from replay.commands.doctor.probe_process import ProbeAnswer
from replay.output.text import CheckResult, CheckStatus

PROJECT = "micro-replay"


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonPackage:
    # The name that pip knows.
    name: str
    module: str
    # What does not work without it. Empty: a replay needs it.
    serves: str = ""
    # Whether it is needed on CUDA machines only.
    on_cuda: bool = False


PACKAGES = (
    PythonPackage(name="torch", module="torch"),
    PythonPackage(name="deepspeed", module="deepspeed"),
    PythonPackage(name="transformers", module="transformers"),
    PythonPackage(name="safetensors", module="safetensors"),
    PythonPackage(name="rich", module="rich"),
    PythonPackage(name="typer", module="typer"),
    PythonPackage(name="numpy", module="numpy"),
    PythonPackage(name="accelerate", module="accelerate", serves="capturing jobs of transformers' Trainer"),
    PythonPackage(name="flash-attn", module="flash_attn", serves="--attention flash", on_cuda=True),
    PythonPackage(name="ring-flash-attn", module="ring_flash_attn", serves="the fast form of --ring", on_cuda=True),
    PythonPackage(name="triton", module="triton", serves="--compile on CUDA", on_cuda=True),
    PythonPackage(name="liger-kernel", module="liger_kernel", serves="--kernels fused"),
)


def check_project() -> list[CheckResult]:
    folder = Path(__file__).resolve().parents[3]
    try:
        result = CheckResult(name=PROJECT, status=CheckStatus.OK, found=f"{version(PROJECT)} in {folder}")
    except PackageNotFoundError:
        advice = f"its version requirements are unknown. Try: pip install -e {folder}"
        result = CheckResult(
            name=PROJECT, status=CheckStatus.NOTE, found=f"not installed, run from {folder}", advice=advice
        )
    python = f"{platform.python_version()}, {sys.executable}"
    return [result, CheckResult(name="python", status=CheckStatus.OK, found=python)]


def read_required_ranges() -> dict[str, str]:
    """Return the ranges of this project's metadata by package name, such as ">=2.10"; empty if not installed.

    Extras stand behind what the bare install needs, so torch has the range of `replay` and not that of `capture`.
    """
    try:
        lines = requires(PROJECT) or []
    except PackageNotFoundError:
        return {}
    parts = [re.match(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*([^;]*)", line) for line in lines]
    return {part[1]: part[2].strip() for part in parts if part}


def is_within(number: str, required: str) -> bool:
    """Tell whether a version is in a range. Builds and pre-releases (+cu130, a0, rc1) count as their releases."""
    for clause in filter(None, required.split(",")):
        operator, bound = re.fullmatch(r"\s*(>=|<=|==|!=|<|>)\s*([\w.+]+)\s*", clause).groups()  # type: ignore[union-attr]
        release, bound_release = _parse_release(number), _parse_release(bound)
        width = max(len(release), len(bound_release))
        release, bound_release = (parts + (0,) * (width - len(parts)) for parts in (release, bound_release))
        holds = {
            ">=": release >= bound_release,
            "<=": release <= bound_release,
            "==": release == bound_release,
            "!=": release != bound_release,
            "<": release < bound_release,
            ">": release > bound_release,
        }
        if not holds[operator]:
            return False
    return True


def _parse_release(number: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(?:\.\d+)*", number)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def is_installed(package: PythonPackage) -> bool:
    if "." not in package.module:
        return find_spec(package.module) is not None
    # To look for a module inside a package would import the package.
    try:
        version(package.name)
    except PackageNotFoundError:
        return False
    return True


def check_package(
    package: PythonPackage, imported: ProbeAnswer | None, *, on_cuda: bool, is_default: bool
) -> CheckResult:
    """Check a package's version against this project's range, and the result of importing it (None if not installed).

    `is_default` says that `replay` without options uses it here.
    """
    required = read_required_ranges().get(package.name, "")
    install = f"Try: pip install '{package.name}{required}'"
    if package.on_cuda:
        install = f"Try: pip install --no-build-isolation '{package.name}{required}'"
    if imported is None:
        if not is_default and (not on_cuda if package.on_cuda else True):
            return CheckResult(
                name=package.name,
                status=CheckStatus.NOT_NEEDED,
                found="not installed",
                advice=f"serves {package.serves}",
            )
        cost = f"no {package.serves}. " if package.serves else ""
        text = f"not installed{required and f', needed {required}'}"
        return CheckResult(
            name=package.name, status=CheckStatus.MISSING, found=text, advice=cost + install, needed=is_default
        )
    try:
        number = version(package.name)
    except PackageNotFoundError:
        number = "of unknown version"
    if imported.error:
        status = CheckStatus.NO_ANSWER if imported.is_silent else CheckStatus.BROKEN
        return CheckResult(
            name=package.name,
            status=status,
            found=f"{number}, import: {imported.error}",
            advice=_advise_on_import(package, imported, install),
            needed=is_default,
        )
    if number[0].isdigit() and not is_within(number, required):
        text = f"{number} is outside {required}"
        return CheckResult(name=package.name, status=CheckStatus.BROKEN, found=text, advice=install, needed=is_default)
    return CheckResult(
        name=package.name, status=CheckStatus.OK, found=f"{number}{required and f' ({required})'}", needed=is_default
    )


def _advise_on_import(package: PythonPackage, imported: ProbeAnswer, install: str) -> str:
    advice = install.replace("pip install", "pip install --force-reinstall --no-deps --no-cache-dir")
    if "undefined symbol" in imported.error:
        advice = f"its C++ library was built for another torch. {advice}"
    if imported.is_silent:
        advice = "a hang, or a slow machine. Try: replay doctor --time-limit 300"
    if "flash" in package.name:
        advice += ", or without it: replay --attention sdpa"
    return advice


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
# Any other value is not shown.
PLAIN_SETTING = r"[A-Za-z0-9_.,:;=^+ -]{1,60}"
# None of these holds a secret.
EFFECTS = {
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
CHECKED_ELSEWHERE = {"TORCH_CUDA_ARCH_LIST", "CUDA_HOME"}
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_variables(environment: Mapping[str, str] = os.environ) -> list[CheckResult]:
    """Return a check per variable that is set and has an effect here, and one that names others of its families."""
    checks = [_check_interface(name, environment[name]) for name in INTERFACE_VARIABLES if environment.get(name)]
    for name, effect in EFFECTS.items():
        if name in environment:
            checks.append(
                CheckResult(name=name, status=CheckStatus.NOTE, found=describe_value(environment[name]), advice=effect)
            )
    if left_over := [
        name for name in LAUNCHER_VARIABLES if name in environment and "TORCHELASTIC_RUN_ID" not in environment
    ]:
        advice = f"replay takes them for a launcher's. Try: unset {' '.join(left_over)}"
        checks.append(
            CheckResult(name="launcher's", status=CheckStatus.NOTE, found=", ".join(left_over), advice=advice)
        )
    known = {*EFFECTS, *CHECKED_ELSEWHERE, *INTERFACE_VARIABLES}
    if others := sorted(name for name in environment if name.startswith(PREFIXES) and name not in known):
        advice = "their effect here is unknown"
        checks.append(CheckResult(name="also set", status=CheckStatus.NOTE, found=", ".join(others), advice=advice))
    return checks or [CheckResult(name="variables", status=CheckStatus.OK, found="none is set that changes results")]


def describe_value(value: str) -> str:
    """Return the value if it is a plain setting; paths, addresses and long values stay out of logs that are shared."""
    return value if re.fullmatch(PLAIN_SETTING, value) else f"set, {len(value)} characters"


def _check_interface(name: str, value: str) -> CheckResult:
    """Check that the network interface exists. NCCL treats names as prefixes, and as exact names after `=`."""
    interfaces = [interface for _, interface in socket.if_nameindex()]
    status, advice = CheckStatus.NOTE, "the network that ranks use"
    if not value.startswith("^"):
        names = value.lstrip("=").split(",")
        if name.startswith("GLOO"):
            is_there = all(interface in interfaces for interface in names)
        elif value.startswith("="):
            is_there = any(interface in interfaces for interface in names)
        else:
            is_there = any(interface.startswith(tuple(names)) for interface in interfaces)
        if not is_there:
            status, advice = CheckStatus.BROKEN, f"there is no such interface: ranks fail or hang. Try: unset {name}"
    return CheckResult(name=name, status=status, found=describe_value(value), advice=advice)
