"""Ports for launchers that cannot find one themselves: deepspeed takes the same for each of its runs."""

import socket


def free_port() -> int:
    """One that nobody on this machine listens on now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])
