"""Environments of other releases: a virtual environment that has a few packages of its own, and sees the rest of ours.

What an environment has itself is installed by pip; links lead to every other package of the environment that this runs
in, so that torch is not there twice. A package that does not go with an old release is hidden.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The releases that a bug is in, or not in any more."""

    packages: Sequence[str] = ()  # as pip takes them; none: the environment that this runs in
    hidden: Sequence[str] = ()
    dependencies: bool = False  # what the packages ask for and is not linked is installed too

    @property
    def name(self) -> str:
        return self.packages[0].replace("==", "-") if self.packages else "current"

    def python(self, home: Path) -> Path:
        return home / self.name / "bin" / "python" if self.packages else Path(sys.executable)

    def make(self, home: Path) -> None:
        """Does nothing if it is there."""
        folder, done = home / self.name, home / self.name / "made"
        if not self.packages or done.exists():
            return
        venv.create(folder, with_pip=False, clear=True)
        links = folder / "links"
        links.mkdir()
        for entry in _entries():
            if not any(entry.name == name or entry.name.startswith(f"{name}-") for name in self._own()):
                (links / entry.name).symlink_to(entry)
        purelib = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        (Path(purelib) / "links.pth").write_text(f"{links}\n")
        command = [sys.executable, "-m", "pip", "--python", str(self.python(home)), "install", "--quiet"]
        command += [] if self.dependencies else ["--no-deps"]
        command += ["--no-build-isolation", "--no-warn-conflicts", *self.packages]
        # DeepSpeed would compile its kernels
        subprocess.run(command, check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
        done.touch()

    def _own(self) -> set[str]:
        """Names of what must not be linked, as folders and as distributions."""
        names = {package.split("==")[0] for package in self.packages} | set(self.hidden)
        return names | {name.replace("-", "_") for name in names}


def _entries() -> dict[Path, None]:
    """The packages of this environment, each once: the first on the path is the one that is imported."""
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    folders = [Path(torch.origin).parent.parent, Path(sysconfig.get_path("purelib"))]
    found = {entry.name: entry for folder in folders for entry in folder.iterdir()}
    return {entry: None for name, entry in found.items() if not name.endswith(".pth") and not _is_ours(name)}


def _is_ours(name: str) -> bool:
    """The checkout is on PYTHONPATH; its finder would lead an old release to the floors of our pyproject."""
    return name.startswith(("__editable__", "micro_replay-")) or name == "__pycache__"
