"""What tests take from the machine they run on."""

import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Variables that say where this machine has programs, libraries, packages, compilers, GPUs and room, and pytest's own.
# mpi4py calls MPI_Init when it is imported, and ends the process on a machine whose MPI is not set up by its variables.
KEPT_VARIABLES = re.compile(
    "((C_INCLUDE_|CPLUS_INCLUDE_|LIBRARY_|LD_LIBRARY_|PYTHON)?PATH|CPATH|LD_PRELOAD|CC|CXX|CUDA_HOME|CUDA_VISIBLE_DEVICES"
    "|TORCH_CUDA_ARCH_LIST|TMPDIR|PYTHONDONTWRITEBYTECODE|PYTEST_.*|OMPI_.*|PMIX_.*)"
)


def job_environment() -> dict[str, str]:
    """Variables of a training job that a test starts: none of the world that tests in this process have opened."""
    kept = {name: value for name, value in os.environ.items() if name == "HOME" or KEPT_VARIABLES.fullmatch(name)}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def lack_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an import of the package, or of what is in it, fail as where it is not installed."""
    for module in {name, *(module for module in sys.modules if module.startswith(f"{name}."))}:
        monkeypatch.setitem(sys.modules, module, None)
