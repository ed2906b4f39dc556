"""Time cells that wait rather than compute on a Ray cluster of four slots against one of one slot.

    python benchmarks/ray_cells.py --seconds 20 --rounds 2

Eight cells each wait for that time. Prints the seconds of each round and the ratio, of which 0.25 is the least there
can be; the rest is what a cell costs: a placement group, an actor, a Python, and its files' way home.
"""

import argparse
import tempfile
import time
from pathlib import Path

from ray.cluster_utils import Cluster

from replay.on_ray.cluster import open_cluster
from replay.on_ray.task_runner import RayTaskRunner
from replay.options.spec import MeasureSpec, ReplaySpec
from replay.processes.child_job import ChildJob
from replay.processes.pool import Task

NUM_CELLS = 8


def seconds_on(num_slots: int, seconds: float) -> float:
    """Return how long the cells take on a cluster with that many slots, which runs already."""
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": num_slots, "include_dashboard": False})
    try:
        with open_cluster(started.address) as cluster, tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            run = RayTaskRunner(cluster, root, module="tests.helpers.cell_program")
            assert cluster.agents
            began = time.monotonic()
            done = list(run((number, task(root / str(number), seconds)) for number in range(NUM_CELLS)))
            took = time.monotonic() - began
        assert [child.exit_code for _, child in done] == [0] * NUM_CELLS
        return took
    finally:
        started.shutdown()


def task(logs: Path, seconds: float) -> Task:
    job = ChildJob(spec=ReplaySpec(measure=MeasureSpec(name=f"wait {seconds}", log_folder=logs)))
    return Task(job=job, num_processes=1, output=logs / "output.txt", limit=60 + 2 * seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    for number in range(given.rounds):
        four, one = seconds_on(4, given.seconds), seconds_on(1, given.seconds)
        print(f"round {number + 1}: four slots {four:.1f} s, one slot {one:.1f} s, ratio {four / one:.3f}", flush=True)
