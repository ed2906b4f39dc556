"""Connect every two ranks by a socket that does not belong to torch, so that it works while torch.distributed hangs.

The kernel closes the sockets of a process that ends, however it ends, so the other ranks learn of it at once.
"""

import json
import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from actor_init.world import World

# How long to wait for another rank. Every rank has opened its port before any other rank connects to it.
CONNECT_SECONDS = 20.0
SEND_SECONDS = 1.0

Message = dict[str, Any]


@dataclass(slots=True)
class Peer:
    rank: int
    connection: socket.socket
    unread: bytes = b""

    def receive(self) -> list[Message | None]:
        """Read what has come in; None means that the other end is gone."""
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self.unread = (self.unread + data).split(b"\n")
        return [*(json.loads(line) for line in lines), *([] if data else [None])]


@dataclass(slots=True)
class Peers:
    """Connections to all other ranks, and a bell: `receive` returns the bytes that are written to it as well.

    The bell wakes up a thread that waits in `receive`.
    """

    by_rank: dict[int, Peer] = field(default_factory=dict)
    bell: socket.socket = field(init=False)
    _bell_reader: socket.socket = field(init=False)
    _selector: selectors.DefaultSelector = field(init=False, default_factory=selectors.DefaultSelector)

    def __post_init__(self) -> None:
        self.bell, self._bell_reader = socket.socketpair()
        # signal.set_wakeup_fd refuses a file descriptor that blocks.
        self.bell.setblocking(False)
        self._selector.register(self._bell_reader, selectors.EVENT_READ, None)
        for peer in self.by_rank.values():
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    @classmethod
    def connect(cls, world: World, *, connect_seconds: float = CONNECT_SECONDS) -> Self:
        """Connect all ranks, which call this together. Raises OSError on all of them if two could not be connected.

        connect_seconds  how long to wait for another rank
        """
        if world.world_size == 1:
            return cls()
        address = _find_own_address()
        failure, connections = None, {}
        token = world.broadcast_from_rank0(secrets.token_hex(16) if world.rank == 0 else None)
        with socket.socket(address[0], socket.SOCK_STREAM) as listener:
            listener.bind((address[1], 0))
            listener.listen(world.world_size)
            addresses = world.gather((*address, listener.getsockname()[1]))
            try:
                for rank, (family, host, port) in enumerate(addresses[: world.rank]):
                    connections[rank] = _call_rank(family, host, port, f"{token} {world.rank}\n", connect_seconds)
                while len(connections) + 1 < world.world_size:
                    connections.update(_accept_caller(listener, token, connect_seconds))
            except OSError as error:
                failure = f"rank {world.rank} at {address[1]}: {error}"
        if errors := [text for text in world.gather(failure) if text]:
            for connection in connections.values():
                connection.close()
            raise OSError("; ".join(errors))
        return cls({rank: Peer(rank, connection) for rank, connection in connections.items()})

    def send(self, message: Message, *, to: int | None = None) -> None:
        """Send to one rank or to all. A rank that is gone is skipped: `receive` reports it."""
        line = json.dumps(message).encode() + b"\n"
        for peer in list(self.by_rank.values()) if to is None else [self.by_rank[to]]:
            try:
                peer.connection.sendall(line)
            except OSError:
                continue

    def receive(self, seconds: float) -> list[tuple[int | None, Message | int | None]]:
        """Wait up to `seconds` for messages of ranks (None: it is gone) and bytes of the bell."""
        received: list[tuple[int | None, Message | int | None]] = []
        for key, _ in self._selector.select(seconds):
            peer: Peer | None = key.data
            if peer is None:
                received += [(None, byte) for byte in self._bell_reader.recv(4096)]
                continue
            messages = peer.receive()
            received += [(peer.rank, message) for message in messages]
            if messages and messages[-1] is None:
                self._selector.unregister(peer.connection)
                peer.connection.close()
                del self.by_rank[peer.rank]
        return received

    def ring(self) -> None:
        """Wake up `receive`."""
        self.bell.send(b"\0")

    def close(self) -> None:
        self._selector.close()
        for connection in (self.bell, self._bell_reader, *(peer.connection for peer in self.by_rank.values())):
            connection.close()


class Barrier:
    """A barrier outside torch. The main thread waits; the thread that receives messages marks who arrived."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._missing = set(ranks)
        self._all_arrived = threading.Event()

    def mark_arrived(self, rank: int) -> None:
        self._missing.discard(rank)
        if not self._missing:
            self._all_arrived.set()

    def wait(self, tick: float) -> None:
        # Python handles Ctrl-C only between two waits.
        while not self._all_arrived.wait(tick):
            pass


def connect_ranks(world: World, *, connect_seconds: float = CONNECT_SECONDS) -> Peers:
    """Connect all ranks. Where two machines cannot reach each other, say so once and go on with no peers."""
    try:
        return Peers.connect(world, connect_seconds=connect_seconds)
    except OSError as error:
        if world.rank == 0:
            print(f"replay: a rank that dies or hangs will not be named: {error}", file=sys.stderr, flush=True)
        return Peers()


def _find_own_address() -> tuple[int, str]:
    """Find the address under which other ranks reach this machine: that of the route to rank 0's machine."""
    first_host = os.environ.get("MASTER_ADDR", "localhost")
    family, kind, protocol, _, address = socket.getaddrinfo(first_host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Connecting a datagram socket chooses the route, and sends nothing.
        probe.connect(address)
        return int(family), str(probe.getsockname()[0])


def _call_rank(family: int, host: str, port: int, greeting: str, connect_seconds: float) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.settimeout(connect_seconds)
    connection.connect((host, port))
    connection.sendall(greeting.encode())
    connection.settimeout(SEND_SECONDS)
    return connection


def _accept_caller(listener: socket.socket, token: str, connect_seconds: float) -> dict[int, socket.socket]:
    """Accept the next caller and return it by its rank; nothing if it does not know the token."""
    listener.settimeout(connect_seconds)
    connection, _ = listener.accept()
    connection.settimeout(connect_seconds)
    greeting = b""
    while not greeting.endswith(b"\n") and len(greeting) < 100 and (byte := connection.recv(1)):
        greeting += byte
    word, _, rank = greeting.decode(errors="replace").strip().partition(" ")
    if word != token or not rank.isdigit():
        connection.close()
        return {}
    connection.settimeout(SEND_SECONDS)
    return {int(rank): connection}
