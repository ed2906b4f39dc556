"""Run a module as `python -m` does, in a process that is killed when the one that started it ends, however that ends.

Ray kills a worker without the processes that it has started.
"""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # of prctl(2)

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # it ended before
        sys.exit(1)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
