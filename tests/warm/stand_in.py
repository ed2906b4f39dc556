"""A process that looks from outside like the program that a fork of the server runs for it. Standard library only."""

import ctypes
import json
import os
import signal
import socket
import sys

ENDS_WITH_PARENT = "replay.processes.supervisor"  # it ends with its parent; the fork's own parent is the server's
PR_SET_PDEATHSIG = 1


def is_passed(number: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{number}") and os.get_inheritable(number)


def main(address: str, first: list[str]) -> None:
    if ENDS_WITH_PARENT in sys.argv:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    environment = {**os.environ, "WARM_PARENT": str(os.getppid())}
    # multiprocessing's fork server is passed a socket and a pipe. What is there is inherited; the listing's own is not.
    numbers = sorted(number for number in map(int, os.listdir("/proc/self/fd")) if is_passed(number))
    request = json.dumps([[*first, *sys.argv[1:]], os.getcwd(), environment, numbers]).encode()
    socket.send_fds(connection, [len(request).to_bytes(8, "big")], numbers)
    connection.sendall(request)
    replies = connection.makefile()
    process = int(replies.readline())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(process, number))
    code = int(replies.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
