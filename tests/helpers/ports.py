"""Ports for launchers that cannot find one themselves: deepspeed takes the same for each of its runs."""

import random
import socket

# below the ports that Linux gives to outgoing connections, one of which may take a port before the launcher does
RANGE = range(20_000, 32_000)


def free_port() -> int:
    """One that nobody on this machine listens on now."""
    while True:
        port = random.SystemRandom().choice(RANGE)
        with socket.socket() as free:
            try:
                free.bind(("localhost", port))
            except OSError:
                continue
        return port
