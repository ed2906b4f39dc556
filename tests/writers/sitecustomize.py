"""Has what processes of the tests write held against its schema: Python imports this at the start of each of them.

tests/conftest.py puts this folder on PYTHONPATH, which ranks, launchers, fork servers and nodes of Ray inherit. Another
environment's interpreter does not get PYTHONPATH, and what it writes is not looked at.
"""

import os
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HOME = os.path.dirname(__file__)
# The modules of `written_json.WATCHED`, which is imported with the first of them.
WRITERS = ("replay.runlog.run_file", "replay.runlog.writer", "replay.campaign.campaign")


class WriterFinder(MetaPathFinder):
    """Finds a module that writes as the other finders do, and has it watched as soon as it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in WRITERS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                execute(module)
                # A worker of pytest-xdist replaces its path by the one that its controller began with.
                if HOME not in sys.path:
                    sys.path.append(HOME)
                import_module("written_json").watch(module)

            loader.exec_module = execute_and_watch
        return spec


sys.meta_path.insert(0, WriterFinder())
