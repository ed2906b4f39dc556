"""Run a module as `python -m` does, in a process that is killed when the one that started it ends, however that ends.

Ray kills a worker without the processes that it has started.
"""

import runpy
import sys

from replay.processes.supervisor import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
