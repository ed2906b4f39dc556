"""Connect to a running Ray cluster, and start an actor on each of its nodes."""

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from capture.facts import Setting
from capture.file_format.micro_batch import CaptureError
from capture.on_ray import node_files
from capture.on_ray.node_files import NodeFiles

TRY_ANOTHER = f"Try: ray status, or another {Setting('address')}"
CONNECT_SECONDS = 5.0
# How an HTTP/2 client begins, with empty settings, and the type of the frame that every HTTP/2 server answers with. Ray
# speaks HTTP/2 (gRPC).
_HTTP_2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS_FRAME = 4


class RayNode(NamedTuple):
    id: str
    host: str
    is_alive: bool

    def __str__(self) -> str:
        return f"{self.id[:8]} on {self.host}"


@contextmanager
def connect(address: str | None) -> Iterator[Any]:
    """Connect to the cluster at the address, and give the module `ray`; disconnect at the end.

    address  HOST:PORT, `auto`, or None: the cluster that this process is connected to already, and stays connected to;
             without one, `auto`

    Raises CaptureError without Ray, without a cluster there, or with another version of Ray or Python.
    """
    try:
        import ray
    except ImportError:
        advice = "Try: pip install 'micro-replay[ray]'"
        raise CaptureError("a Ray cluster", "needs Ray here too", advice) from None
    if address is None and ray.is_initialized():
        yield ray
        return
    address = address or "auto"
    actual_address = _find_default_address() if address == "auto" else address
    if actual_address is not None:
        check_address(actual_address, typed=address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = f": {' '.join(str(error).split())} {TRY_ANOTHER}"
        raise CaptureError(Setting("address", address), why) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _find_default_address() -> str | None:
    """Find the address that Ray takes for `auto`: its variable, or the cluster last started here, which may be gone."""
    folder = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"
    try:
        latest = (folder / "ray_current_cluster").read_text().strip()
    except OSError:
        latest = ""
    return os.environ.get("RAY_ADDRESS") or latest or None


def check_address(address: str, *, typed: str | None = None) -> None:
    """Raise CaptureError if no cluster answers at the address. Ray itself would try for minutes.

    typed  what was typed for it, such as `auto`
    """
    setting, meaning = Setting("address", address if typed is None else typed), ""
    if typed not in (None, address):
        meaning = f", which is {address}"
    host, _, port = address.rpartition(":")
    if "/" in host or not host or not port.isdecimal():
        advice = "Give auto, or HOST:PORT as `ray start --head` prints it"
        raise CaptureError(setting, f"{meaning} is not allowed".strip(), advice)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "1":
                connection.sendall(_HTTP_2_PREFACE)
                answer = connection.recv(9)
                if len(answer) < 4 or answer[3] != _SETTINGS_FRAME:
                    raise ConnectionError("what listens there is something else")
    except (OSError, OverflowError) as error:
        why = f"{meaning}: no Ray cluster there: {error}"
        raise CaptureError(setting, why, TRY_ANOTHER) from None


def list_nodes(ray: Any) -> list[RayNode]:
    """List the nodes of the cluster by host, also those that it has lost."""
    nodes = [RayNode(node["NodeID"], node["NodeManagerHostname"], node["Alive"]) for node in ray.nodes()]
    return sorted(nodes, key=lambda node: (node.host, node.id))


@contextmanager
def start_readers(ray: Any, nodes: Sequence[RayNode], folder: str) -> Iterator[list[Any]]:
    """Start an actor on each node that reads below the folder, and give their handles; end them at the end.

    The actors take no CPU, so they start beside a job that has all of them. The class travels with its code: a node
    that takes no part in the job may lack micro-replay.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(node_files)
    readers: list[Any] = []
    try:
        reader_class = ray.remote(num_cpus=0)(NodeFiles)
        for node in nodes:
            on_node = NodeAffinitySchedulingStrategy(node.id, soft=False)
            # Calls only read. So Ray may repeat one that a bad connection lost, until it knows that the node is dead.
            readers.append(reader_class.options(scheduling_strategy=on_node, max_task_retries=-1).remote(folder))
        yield readers
    finally:
        ray.cloudpickle.unregister_pickle_by_value(node_files)
        for reader in readers:
            ray.kill(reader)
