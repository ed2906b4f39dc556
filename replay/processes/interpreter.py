"""Tell what is installed in another environment, by its interpreter, and start replays there.

env 2      old/bin/python: python 3.11.7, torch 2.8.0, transformers 4.57.6, deepspeed 0.16.5, micro-replay 0.1.0
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actor_init.spec import UsageError
from capture.facts import Setting
from replay.processes import supervisor
from replay.processes.supervisor import Process

SHOWN = ("python", "torch", "transformers", "deepspeed", "micro-replay")
PROBE_SECONDS = 120.0
# This runs in any Python 3. It prints the versions, and the line in which `replay` itself refuses this environment. The
# other environment may hold another version of micro-replay, so `complaint` keeps its name and arguments there.
_PROBE = """
import json, platform, sys
try:
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec
    versions, refusal = {"python": platform.python_version()}, ""
    for name in NAMES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    if sys.version_info >= (3, 10) and find_spec("replay") and find_spec("replay.command_line.entry"):
        from replay.command_line.entry import complaint
        refusal = complaint([], tuple(sys.version_info[:2])) or ""
    elif sys.version_info >= (3, 10):
        refusal = "it has no micro-replay"
    else:
        refusal = "it is too old: Python %d.%d" % tuple(sys.version_info[:2])
except ImportError:
    versions, refusal = {}, "it is too old: Python %d.%d" % tuple(sys.version_info[:2])
print(json.dumps([versions, refusal]))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """An interpreter and the versions installed for it; None for a package that is not."""

    python: str
    versions: Mapping[str, str | None]

    @property
    def text(self) -> str:
        return f"{self.python}: " + _describe_versions(self.versions)

    def describe_differences(self, first: "Environment") -> str:
        """Name the versions that differ from those of `first`, such as `torch 2.8.0, transformers 4.57.6`."""
        changed = {name: version for name, version in self.versions.items() if version != first.versions.get(name)}
        return _describe_versions(changed)


def _describe_versions(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" if version else f"no {name}" for name, version in versions.items())


def probe(python: str) -> Environment:
    """Ask the interpreter at the path `python` what it has.

    Raises UsageError if there is none, if it does not answer, or if it cannot replay.
    """
    # A venv's python is a link; Python finds the venv by the link's own place, so it must not be resolved.
    path = Path(os.path.abspath(Path(python).expanduser()))
    code = f"NAMES = {SHOWN[1:]!r}\n{_PROBE}"
    setting, refusal = Setting("python", python), ""
    try:
        # `-c` puts the working folder on the path. It may be a checkout of this project, so another one is taken.
        completed = subprocess.run(
            [str(path), "-c", code],
            cwd="/",
            env=without_python_path(os.environ),
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
        versions, refusal = json.loads(completed.stdout.strip().splitlines()[-1])
    except OSError as error:
        advice = "Give the path of an interpreter, such as old/bin/python"
        raise UsageError(setting, f": {error.strerror}", advice) from None
    except subprocess.TimeoutExpired:
        raise UsageError(setting, f": no answer within {PROBE_SECONDS:.0f} s", "Is it a Python?") from None
    except (ValueError, IndexError):
        raise UsageError(setting, ": it does not answer as a Python does", "Give the path of one") from None
    if refusal.startswith("it has no"):
        raise UsageError(setting, f": {refusal}", f"Try: {python} -m pip install 'micro-replay[replay]'")
    if refusal:
        advice = "" if "Try:" in refusal else "Give an environment of Python 3.11 or later"
        raise UsageError(setting, f": {refusal}", advice)
    return Environment(python=str(path), versions={name: versions.get(name) for name in SHOWN})


def without_python_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without what would lead another interpreter to this one's packages."""
    return {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def start(python: str, arguments: Sequence[str], environment: Mapping[str, str], output: Path, folder: Path) -> Process:
    """Run `replay arguments` by `python` in `folder`, in its own session; output is appended to the file `output`."""
    command = [python, "-u", "-P", "-m", "replay", *arguments]
    with output.open("ab") as file:
        return supervisor.start_process(
            command, without_python_path(environment), stdin=subprocess.DEVNULL, output=file, folder=folder
        )
