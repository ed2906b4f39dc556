"""Check the machine: the devices that torch sees, memory, disk, limits, launchers and compilers.

A launcher or compiler is the one that the shell finds: which Python it belongs to, and whether it works.
"""

import os
import re
import resource
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from replay.commands.doctor.probe_process import ProbeAnswer, read_first_line
from replay.output.text import CheckResult, CheckStatus

GIB = 2**30
# A log folder or /dev/shm with less is reported.
LEAST_FREE_BYTES = GIB
OPEN_FILES = 4096


def check_devices(answer: ProbeAnswer, driver: str) -> list[CheckResult]:
    """Report the devices that torch computes on. `driver` is nvidia-smi's driver version, empty if there is none."""
    if answer.error:
        status = CheckStatus.NO_ANSWER if answer.is_silent else CheckStatus.BROKEN
        return [CheckResult(name="devices", status=status, found=answer.error, advice="see packages", needed=True)]
    facts = answer.facts
    checks: list[CheckResult] = []
    if not facts["gpus"]:
        checks.append(_check_cpu())
        if driver:
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
            advice = (
                "CUDA_VISIBLE_DEVICES is empty" if hidden else f"this torch is {facts['torch']}; a CUDA build of it"
            )
            why = f"driver {driver}, and torch sees no GPU"
            checks.append(
                CheckResult(name="cuda", status=CheckStatus.BROKEN, found=why, advice=f"replays use the CPU: {advice}")
            )
        return checks
    for index, (gpu, free) in enumerate(zip(facts["gpus"], facts["free_bytes"], strict=True)):
        text = f"{gpu['name']}, {gpu['bytes'] / GIB:.0f} GiB, {free / GIB:.0f} free, capability {gpu['capability']}"
        is_full = free < gpu["bytes"] / 10
        advice = "another process has its memory. Try: nvidia-smi" if is_full else ""
        status = CheckStatus.NOTE if is_full else CheckStatus.OK
        checks.append(CheckResult(name=f"gpu {index}", status=status, found=text, advice=advice, needed=True))
    checks.append(
        CheckResult(
            name="driver", status=CheckStatus.OK, found=f"{driver or 'unknown'}, torch for {facts['built_for']}"
        )
    )
    if len(facts["gpus"]) > 1:
        checks.append(_check_peers(facts["no_peers"]))
    return checks


def _check_peers(pairs_without_access: Sequence[Sequence[int]]) -> CheckResult:
    if not pairs_without_access:
        return CheckResult(name="peer access", status=CheckStatus.OK, found="between all GPUs")
    pairs = ", ".join(f"{first}-{second}" for first, second in pairs_without_access if first < second)
    cost = "--tp and --ring go through the host, slower. See: nvidia-smi topo -m"
    return CheckResult(name="peer access", status=CheckStatus.NOTE, found=f"none between {pairs}", advice=cost)


def _check_cpu() -> CheckResult:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A container may be given less memory than the machine has.
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        size = min(size, int(text))
    return CheckResult(
        name="cpu", status=CheckStatus.OK, found=f"{cores} cores, {size / GIB:.1f} GiB, no GPU", needed=True
    )


def check_shared_memory(folder: Path = Path("/dev/shm"), *, least_free: int = LEAST_FREE_BYTES) -> CheckResult:
    """Check that shared memory has `least_free` bytes free."""
    if not folder.is_dir():
        return CheckResult(
            name=str(folder), status=CheckStatus.NOTE, found="not there", advice="captures keep no ring in memory"
        )
    usage = shutil.disk_usage(folder)
    text = f"{usage.free / GIB:.2f} GiB free of {usage.total / GIB:.2f}"
    if usage.free >= least_free:
        return CheckResult(name=str(folder), status=CheckStatus.OK, found=text)
    advice = "several ranks of NCCL, data loaders and a capture's ring use it. Try: docker run --shm-size=8g"
    return CheckResult(name=str(folder), status=CheckStatus.NOTE, found=text, advice=advice)


def check_log_folder(folder: Path, *, least_free: int = LEAST_FREE_BYTES) -> CheckResult:
    """Check that a run's folder can be created and written in `folder`, and that `least_free` bytes are free there.

    Nothing is left there.
    """
    existing_folder = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    advice = "Try: --log-folder with a folder that you may write to"
    try:
        with (
            tempfile.TemporaryDirectory(dir=existing_folder) as scratch,
            (Path(scratch) / "rank0.jsonl").open("wb") as file,
        ):
            file.write(bytes(4096))
            os.fsync(file.fileno())
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror}"
        return CheckResult(name="log folder", status=CheckStatus.BROKEN, found=text, advice=advice, needed=True)
    free = shutil.disk_usage(existing_folder).free
    is_full = free < least_free
    return CheckResult(
        name="log folder",
        status=CheckStatus.NOTE if is_full else CheckStatus.OK,
        found=f"{folder} can be written, {free / GIB:.1f} GiB free",
        advice="a saved state needs many times the model. " + advice if is_full else "",
        needed=True,
    )


def check_limits(*, on_cuda: bool) -> list[CheckResult]:
    """Report limits of ulimit that are low for a replay."""
    checks: list[CheckResult] = []
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < OPEN_FILES:
        advice = f"many ranks or data loaders exhaust it. Try: ulimit -n {OPEN_FILES * 16}"
        checks.append(
            CheckResult(name="ulimit -n", status=CheckStatus.NOTE, found=f"{files} open files", advice=advice)
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if on_cuda and Path("/sys/class/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        advice = "NCCL over InfiniBand may fail. Try: ulimit -l unlimited, or docker run --ulimit memlock=-1"
        checks.append(
            CheckResult(name="ulimit -l", status=CheckStatus.NOTE, found=f"{locked // 1024} KiB locked", advice=advice)
        )
    return checks


# A lock that is older was left by a job that was killed.
LONGEST_BUILD_SECONDS = 600.0
# DeepSpeed can parse these; torch also accepts 9.0a and Hopper.
ARCHITECTURE = r"\d+\.\d+(\+PTX)?"


def check_launcher(name: str, interpreter: Path = Path(sys.executable)) -> CheckResult:
    """Check that the launcher the shell finds starts this Python, which is `interpreter`."""
    cost = "only `replay` and `python -m replay` work. " if name == "torchrun" else ""
    beside_python = interpreter.parent / name
    module = {"torchrun": "torch.distributed.run", "deepspeed": "deepspeed.launcher.runner"}[name]
    advice = f"Try: export PATH={beside_python.parent}:$PATH" if beside_python.exists() else f"Try: python -m {module}"
    path = shutil.which(name)
    if path is None:
        return CheckResult(name=name, status=CheckStatus.MISSING, found="not on PATH", advice=cost + advice)
    python = _find_interpreter(Path(path))
    if python is None:
        return CheckResult(name=name, status=CheckStatus.NOTE, found=f"{path}, of a Python that it does not name")
    if not Path(python).exists():
        return CheckResult(
            name=name, status=CheckStatus.BROKEN, found=f"{path}: its {python} is not there", advice=advice
        )
    if (prefix := _ask_for_prefix(python)) != sys.prefix:
        text = f"{path} belongs to another Python, {prefix or python}"
        return CheckResult(
            name=name, status=CheckStatus.BROKEN, found=text, advice=f"it would not start this one. {advice}"
        )
    return CheckResult(name=name, status=CheckStatus.OK, found=path)


def _find_interpreter(script: Path) -> str | None:
    """Return the interpreter of a script's first line, also through `env` and pip's workaround for long lines."""
    lines = [*script.read_bytes()[:2000].decode(errors="replace").splitlines(), "", ""]
    if not lines[0].startswith("#!"):
        return None
    words = lines[0].removeprefix("#!").split()
    if words and words[0].endswith("/env"):
        words = [shutil.which(words[1]) or words[1]] if len(words) > 1 else []
    if words and words[0].endswith("/sh") and (inner := re.match(r"""'''exec' "?([^"\s]+)""", lines[1])):
        words = [inner[1]]
    return words[0] if words and "python" in Path(words[0]).name else None


def _ask_for_prefix(python: str) -> str:
    if Path(python).parent == Path(sys.executable).parent:
        return sys.prefix
    return read_first_line([python, "-I", "-c", "import sys; print(sys.prefix)"])


def check_compilers(*, on_cuda: bool, built_for: str | None, headers: Path | None = None) -> list[CheckResult]:
    """Check the programs and headers that torch.compile and DeepSpeed's extensions are built with.

    A replay without options needs none of them. `headers` is the folder of Python.h; None: that of this Python.
    """
    nvcc = _check_nvcc(on_cuda=on_cuda, built_for=built_for)
    return [
        _check_cxx(),
        _check_headers(headers or Path(sysconfig.get_path("include"))),
        _check_ninja(),
        nvcc,
        *_check_architectures(on_cuda=on_cuda),
        *_find_abandoned_locks(),
    ]


def _check_cxx() -> CheckResult:
    name = os.environ.get("CXX", "g++")
    if (path := shutil.which(name)) is None:
        advice = "no --compile, nor DeepSpeed's extensions. Try: apt install g++"
        return CheckResult(name="g++", status=CheckStatus.MISSING, found=f"{name} is not on PATH", advice=advice)
    version = read_first_line([path, "--version"])
    if not version:
        return CheckResult(
            name="g++", status=CheckStatus.BROKEN, found=f"{path} --version fails", advice="Try: apt install g++"
        )
    return CheckResult(name="g++", status=CheckStatus.OK, found=f"{version}, {path}")


def _check_headers(folder: Path) -> CheckResult:
    header = folder / "Python.h"
    if header.exists():
        return CheckResult(name="Python.h", status=CheckStatus.OK, found=str(header))
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    advice = f"no --compile: inductor and triton include it. Try: apt install {package}"
    return CheckResult(name="Python.h", status=CheckStatus.MISSING, found=f"{header} is not there", advice=advice)


def _check_ninja() -> CheckResult:
    if (path := shutil.which("ninja")) is None:
        advice = "DeepSpeed builds no extensions, which --deepcompile needs. Try: pip install ninja, on PATH"
        return CheckResult(name="ninja", status=CheckStatus.MISSING, found="not on PATH", advice=advice)
    return CheckResult(name="ninja", status=CheckStatus.OK, found=f"{read_first_line([path, '--version'])}, {path}")


def _check_nvcc(*, on_cuda: bool, built_for: str | None) -> CheckResult:
    if not on_cuda:
        return CheckResult(name="nvcc", status=CheckStatus.NOT_NEEDED, found="for CUDA machines")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = shutil.which("nvcc", path=f"{home}/bin{os.pathsep}{os.environ.get('PATH', '')}")
    cost = "no --deepcompile, no flash-attn from source."
    if path is None:
        advice = f"{cost} Try: a CUDA {built_for} toolkit, and export CUDA_HOME to its folder"
        return CheckResult(
            name="nvcc", status=CheckStatus.MISSING, found=f"neither on PATH nor in {home}", advice=advice
        )
    release = re.search(r"release ([\d.]+)", read_first_line(["sh", "-c", '"$0" --version | grep release', path]))
    number = release[1] if release else "of unknown version"
    if built_for and release and number.split(".")[0] != built_for.split(".")[0]:
        advice = f"{cost} Try: export CUDA_HOME to a toolkit of CUDA {built_for}"
        text = f"{number}, {path}, and torch was built with {built_for}"
        return CheckResult(name="nvcc", status=CheckStatus.BROKEN, found=text, advice=advice)
    return CheckResult(name="nvcc", status=CheckStatus.OK, found=f"{number}, {path}")


def _check_architectures(*, on_cuda: bool) -> list[CheckResult]:
    """Check TORCH_CUDA_ARCH_LIST if it is set: DeepSpeed reads each part as two numbers."""
    name = "TORCH_CUDA_ARCH_LIST"
    value = os.environ.get(name, "")
    parts = [part for part in re.split(r"[;\s]+", value) if part]
    if not on_cuda or not parts:
        return []
    if bad := [part for part in parts if not re.fullmatch(ARCHITECTURE, part)]:
        readable = [re.sub(r"^(\d+\.\d+)[a-z]", r"\1", part) for part in parts]
        can_be_read = all(re.fullmatch(ARCHITECTURE, part) for part in readable)
        type_this = f"export {name}='{';'.join(readable)}'" if can_be_read else f"unset {name}"
        advice = f"--deepcompile fails: DeepSpeed cannot read {bad[0]}. Try: {type_this}"
        return [CheckResult(name=name, status=CheckStatus.BROKEN, found=value, advice=advice)]
    return [CheckResult(name=name, status=CheckStatus.OK, found=value)]


def _find_abandoned_locks() -> list[CheckResult]:
    """Report locks that a killed job left in torch's extension builder: loading that extension waits forever."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torch_extensions"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", default))
    ages = {
        lock: time.time() - lock.stat().st_mtime for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern)
    }
    return [
        CheckResult(
            name="extension lock",
            status=CheckStatus.BROKEN,
            found=f"{lock} is {age / 60:.0f} minutes old",
            advice=f"loading {lock.parent.name} waits forever if no build is running. Try: rm {lock}",
        )
        for lock, age in ages.items()
        if age > LONGEST_BUILD_SECONDS
    ]
