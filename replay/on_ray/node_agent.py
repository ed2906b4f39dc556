"""Send what ranks write on a node to the driver of a Ray job, take inputs from it, and say what is installed."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from capture.on_ray.node_files import NodeFiles
from replay.runlog.writer import versions


class NodeAgent(NodeFiles):
    """A Ray actor pinned to a node. Its folder holds what ranks write, a folder beside it the inputs it received."""

    @staticmethod
    def folder_of_inputs(home: Path, name: str) -> Path:
        return home.with_name(f"{home.name}-inputs") / name

    @staticmethod
    def folder_of_states(home: Path) -> Path:
        """Return the folder where ranks write their part of a state, for Ray Train to carry to its storage."""
        return home.with_name(f"{home.name}-states")

    def versions(self) -> dict[str, str | None]:
        return versions()

    def lacks(self, folder: str, sizes: Mapping[str, int]) -> bool:
        """Does this node see other files, or none, where the driver has a folder of inputs?"""
        here = Path(folder)
        return any(not (here / name).is_file() or (here / name).stat().st_size != size for name, size in sizes.items())

    def receive(self, name: str, file: str, data: bytes) -> None:
        """Write one file of the inputs called `name`."""
        path = self.folder_of_inputs(self.folder, name) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def sees(self, folder: str, name: str) -> str | None:
        """Try to write into a folder that all nodes share, where the driver wrote `name`. Return why not."""
        if not (Path(folder) / name).is_file():
            return "it sees another folder there, or none"
        try:
            with TemporaryDirectory(dir=folder):
                return None
        except OSError as error:
            return error.strerror

    def leave(self) -> None:
        """Remove all that this agent and the ranks have written."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.folder_of_states(self.folder), ignore_errors=True)
        shutil.rmtree(self.folder_of_inputs(self.folder, ""), ignore_errors=True)


def work_in(folder: str) -> None:
    """Make the driver's working folder this process's, if this node has it."""
    if Path(folder).is_dir():
        os.chdir(folder)
