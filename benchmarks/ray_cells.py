"""Time cells that wait rather than compute on a Ray cluster of four slots against one of one slot.

    python -m benchmarks ray_cells --seconds 20 --rounds 2

Eight cells each wait for that time. The least ratio that there can be is 0.25; the rest is what a cell costs: a
placement group, an actor, a Python, and its files' way home.
"""

import tempfile
import time
from functools import partial
from pathlib import Path

from ray.cluster_utils import Cluster

from benchmarks.harness import Answers, Column, Sample, alternate, make_parser, table
from replay.on_ray.cluster import open_cluster
from replay.on_ray.task_runner import RayTaskRunner
from replay.options.spec import MeasureSpec, ReplaySpec
from replay.processes.child_job import ChildJob
from replay.processes.pool import Task

NUM_CELLS = 8


def measured(num_slots: int, seconds: float, number: int) -> list[Sample]:
    """Return how long the cells take on a cluster with that many slots, which runs already."""
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": num_slots, "include_dashboard": False})
    try:
        with open_cluster(started.address) as cluster, tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            run = RayTaskRunner(cluster, root, module="tests.helpers.cell_program")
            assert cluster.agents
            began = time.monotonic()
            done = list(run((cell, task(root / str(cell), seconds)) for cell in range(NUM_CELLS)))
            took = time.monotonic() - began
        assert [child.exit_code for _, child in done] == [0] * NUM_CELLS
        return [{"s": took}]
    finally:
        started.shutdown()


def task(logs: Path, seconds: float) -> Task:
    job = ChildJob(spec=ReplaySpec(measure=MeasureSpec(name=f"wait {seconds}", log_folder=logs)))
    return Task(job=job, num_processes=1, output=logs / "output.txt", limit=60 + 2 * seconds)


def main() -> int:
    parser = make_parser(__doc__, rounds=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    clusters = {f"{slots} slots": partial(measured, slots, given.seconds) for slots in (1, 4)}
    answers = Answers(given, "ray_cells")
    figures = alternate(clusters, answers, rounds=given.rounds, warmup=0)
    columns = (Column("s", "s", ".1f"), Column("of one slot's", "s", ".3f", of="1 slots"))
    print(f"{answers.machine}: {NUM_CELLS} cells\n\n{table('a cluster of', figures, columns)}")
    return 0
