"""One process was started and the toggles need more: start them here, through torch's own elastic launcher."""

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from actor_init.spec import ParallelSpec, UsageError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def num_processes_missing(parallel: ParallelSpec) -> int:
    """How many processes to start here; 0 where one is enough, or a launcher started more than one."""
    needed = parallel.tp * parallel.ring
    return needed if needed > 1 and int(os.environ.get("WORLD_SIZE", 1)) == 1 else 0


def relaunch(num_processes: int, arguments: Sequence[str]) -> int:
    """Run `replay` with `arguments` in that many processes on this machine, and return their exit code.

    Raises UsageError if there are fewer GPUs than that, on a machine that has any.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and num_gpus < num_processes:
        raise UsageError(
            f"tp x ring needs {num_processes} GPUs and this machine has {num_gpus}. "
            f"Try: tp x ring of at most {num_gpus}, or CUDA_VISIBLE_DEVICES= for a CPU"
        )
    print(f"replay: tp x ring needs {num_processes} processes and 1 was started; starting them", file=sys.stderr)
    return start_processes(num_processes, ["-u", str(Path(__file__).parents[1]), *arguments])


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` but for what a launcher set; threads as torchrun sets them: processes share the machine's cores."""
    own = {name: value for name, value in environment.items() if not name.startswith("TORCHELASTIC_")}
    return {"OMP_NUM_THREADS": "1"} | {name: value for name, value in own.items() if name not in OF_A_LAUNCHER}


def visible_gpus(number: int) -> list[str]:
    """The first `number` of this process's GPUs, as its children's CUDA_VISIBLE_DEVICES may name them."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (own.split(",") if own else [str(index) for index in range(number)])[:number]


def store_of_ranks() -> "TCPStore":
    """Where the ranks of a run meet, as torchrun's agent keeps it: here, so that nobody else can take its port."""
    from torch.distributed import TCPStore

    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def variables_of_ranks(num_processes: int, port: int) -> list[dict[str, str]]:
    """What torchrun would set for each process of a run on this machine, whose `store_of_ranks` listens on `port`."""
    shared = {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    shared |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": str(True)}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank)} | shared for rank in range(num_processes)]


def start_processes(num_processes: int, arguments: Sequence[str]) -> int:
    """Run this Python with `arguments` in that many processes, as torchrun would, and return their exit code."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    own = without_launcher(os.environ)
    for name in os.environ.keys() - own.keys():
        del os.environ[name]
    os.environ.update(own)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode
    return 0
