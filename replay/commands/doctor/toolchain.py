"""Check launchers and compilers: which one the shell finds, which Python it belongs to, and whether it works."""

import os
import re
import shutil
import sys
import sysconfig
import time
from pathlib import Path

from replay.commands.doctor.probe_process import first_line
from replay.output.check import Check, Status

LONGEST_BUILD = 600.0  # seconds
ARCHITECTURE = r"\d+\.\d+(\+PTX)?"  # what DeepSpeed can parse; torch also accepts 9.0a and Hopper


def launcher(name: str) -> Check:
    """Check that the launcher the shell finds starts this Python."""
    cost = "only `replay` and `python -m replay` work. " if name == "torchrun" else ""
    own = Path(sys.executable).parent / name
    module = {"torchrun": "torch.distributed.run", "deepspeed": "deepspeed.launcher.runner"}[name]
    advice = f"Try: export PATH={own.parent}:$PATH" if own.exists() else f"Try: python -m {module}"
    path = shutil.which(name)
    if path is None:
        return Check(name=name, status=Status.MISSING, found="not on PATH", advice=cost + advice)
    python = _python_of(Path(path))
    if python is None:
        return Check(name=name, status=Status.NOTE, found=f"{path}, of a Python that it does not name")
    if not Path(python).exists():
        return Check(name=name, status=Status.BROKEN, found=f"{path}: its {python} is not there", advice=advice)
    if (prefix := _prefix(python)) != sys.prefix:
        text = f"{path} belongs to another Python, {prefix or python}"
        return Check(name=name, status=Status.BROKEN, found=text, advice=f"it would not start this one. {advice}")
    return Check(name=name, status=Status.OK, found=path)


def _python_of(script: Path) -> str | None:
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


def _prefix(python: str) -> str:
    if Path(python).parent == Path(sys.executable).parent:
        return sys.prefix
    return first_line([python, "-I", "-c", "import sys; print(sys.prefix)"])


def compilers(*, on_cuda: bool, built_for: str | None) -> list[Check]:
    """Check the programs and headers that torch.compile and DeepSpeed's extensions are built with.

    A replay without options needs none of them.
    """
    nvcc = _nvcc(on_cuda=on_cuda, built_for=built_for)
    return [_cxx(), _headers(), _ninja(), nvcc, *_architectures(on_cuda=on_cuda), *_left_locks()]


def _cxx() -> Check:
    name = os.environ.get("CXX", "g++")
    if (path := shutil.which(name)) is None:
        advice = "no --compile, nor DeepSpeed's extensions. Try: apt install g++"
        return Check(name="g++", status=Status.MISSING, found=f"{name} is not on PATH", advice=advice)
    said = first_line([path, "--version"])
    if not said:
        return Check(name="g++", status=Status.BROKEN, found=f"{path} --version fails", advice="Try: apt install g++")
    return Check(name="g++", status=Status.OK, found=f"{said}, {path}")


def _headers() -> Check:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        return Check(name="Python.h", status=Status.OK, found=str(header))
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    advice = f"no --compile: inductor and triton include it. Try: apt install {package}"
    return Check(name="Python.h", status=Status.MISSING, found=f"{header} is not there", advice=advice)


def _ninja() -> Check:
    if (path := shutil.which("ninja")) is None:
        advice = "DeepSpeed builds no extensions, which --deepcompile needs. Try: pip install ninja, on PATH"
        return Check(name="ninja", status=Status.MISSING, found="not on PATH", advice=advice)
    return Check(name="ninja", status=Status.OK, found=f"{first_line([path, '--version'])}, {path}")


def _nvcc(*, on_cuda: bool, built_for: str | None) -> Check:
    if not on_cuda:
        return Check(name="nvcc", status=Status.NOT_NEEDED, found="for CUDA machines")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = shutil.which("nvcc", path=f"{home}/bin{os.pathsep}{os.environ.get('PATH', '')}")
    cost = "no --deepcompile, no flash-attn from source."
    if path is None:
        advice = f"{cost} Try: a CUDA {built_for} toolkit, and export CUDA_HOME to its folder"
        return Check(name="nvcc", status=Status.MISSING, found=f"neither on PATH nor in {home}", advice=advice)
    release = re.search(r"release ([\d.]+)", first_line(["sh", "-c", '"$0" --version | grep release', path]))
    number = release[1] if release else "of unknown version"
    if built_for and release and number.split(".")[0] != built_for.split(".")[0]:
        advice = f"{cost} Try: export CUDA_HOME to a toolkit of CUDA {built_for}"
        text = f"{number}, {path}, and torch was built with {built_for}"
        return Check(name="nvcc", status=Status.BROKEN, found=text, advice=advice)
    return Check(name="nvcc", status=Status.OK, found=f"{number}, {path}")


def _architectures(*, on_cuda: bool) -> list[Check]:
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
        return [Check(name=name, status=Status.BROKEN, found=value, advice=advice)]
    return [Check(name=name, status=Status.OK, found=value)]


def _left_locks() -> list[Check]:
    """Report locks that a killed job left in torch's extension builder: loading that extension waits forever."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torch_extensions"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", default))
    ages = {
        lock: time.time() - lock.stat().st_mtime for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern)
    }
    return [
        Check(
            name="extension lock",
            status=Status.BROKEN,
            found=f"{lock} is {age / 60:.0f} minutes old",
            advice=f"loading {lock.parent.name} waits forever if no build is running. Try: rm {lock}",
        )
        for lock, age in ages.items()
        if age > LONGEST_BUILD
    ]
