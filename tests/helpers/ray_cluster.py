"""Ray clusters of several nodes on this machine.

`two_nodes` gives each node a disk and shared memory of its own: the second node runs in a mount namespace of its own.
Where that is not allowed, its disk has another path. What tells the path on each node is the variable NODE_DISK.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.warm import warm_bin

CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 0x4000, 0x40000


@dataclass
class TwoNodes:
    cluster: Any
    address: str
    disk: Path  # as the first node, and this process, see it
    has_namespace: bool

    def actors(self, name: str) -> list[int]:
        """The processes of this cluster's actors of that class."""
        raylets = [node.all_processes["raylet"][0].process.pid for node in self.cluster.list_all_nodes()]
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                title, status = (process / "cmdline").read_bytes(), (process / "status").read_text()
            except OSError:
                continue
            if title.startswith(f"ray::{name}".encode()) and any(f"\nPPid:\t{pid}\n" in status for pid in raylets):
                found.append(int(process.name))
        return found


@contextmanager
def cluster_with_head(*, num_cpus: int, **head: Any) -> Iterator[Any]:
    """Start a `ray.cluster_utils.Cluster` of one node, and stop it at the end; nothing else of Ray here is touched.

    The cluster knows about three seconds after its end that a node is dead.
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": num_cpus,
            "include_dashboard": False,
            "_system_config": {"health_check_period_ms": 500},
            **head,
        },
    )
    try:
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def warm_cluster(*, num_cpus: int) -> Iterator[Any]:
    """Start one whose workers have imported already what a replay imports; until its end so has `sys.executable`."""
    with patch.object(sys, "executable", str(warm_bin() / "python")), cluster_with_head(num_cpus=num_cpus) as cluster:
        yield cluster


@contextmanager
def two_nodes(folder: Path, *, cpus_a_node: int) -> Iterator[TwoNodes]:
    """Start them, and stop them at the end."""
    disks = [folder / "disk", folder / "disk"]
    disks[0].mkdir()
    with cluster_with_head(num_cpus=cpus_a_node, env_vars={"NODE_DISK": str(disks[0])}) as cluster:
        has_namespace = _in_a_namespace(lambda: _add(cluster, cpus_a_node, disks[1]), disks[1])
        if not has_namespace:
            disks[1] = folder / "disk-of-second"
            disks[1].mkdir()
            _add(cluster, cpus_a_node, disks[1])
        yield TwoNodes(cluster, cluster.address, disks[0], has_namespace)


def _add(cluster: Any, num_cpus: int, disk: Path) -> None:
    cluster._shutdown_at_exit = False  # its signal handlers belong to the main thread; the head's end ends this node
    cluster.add_node(num_cpus=num_cpus, env_vars={"NODE_DISK": str(disk)})


def _in_a_namespace(start: Any, disk: Path) -> bool:
    """Call `start` in a thread that has left this process's mount namespace; what it starts inherits the thread's."""
    libc = ctypes.CDLL(None)
    libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
    outcome: list[Any] = []

    def work() -> None:
        if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
            outcome.append(False)
            return
        mounted = [libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, None) for path in (disk, "/dev/shm")]
        if any(mounted):
            outcome.append(False)
            return
        try:
            start()
            outcome.append(True)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (happened,) = outcome
    if isinstance(happened, Exception):
        raise happened
    return bool(happened)
