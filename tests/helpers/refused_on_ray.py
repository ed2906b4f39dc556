"""Run a command on a local Ray cluster, whose rank refuses what was typed.

`python -m tests.helpers.refused_on_ray LOGS`
"""

import sys
from pathlib import Path

from actor_init.spec import UsageError
from replay.on_ray.launch import run_on_ray
from replay.options.ray_options import RayOptions
from replay.options.spec import MeasureSpec, ReplaySpec
from replay.processes.child_job import ChildJob


def refuse(job: ChildJob) -> int:
    """Refuse, in the place of a replay."""
    raise UsageError(f"{job.spec.measure.name} is not allowed")


if __name__ == "__main__":
    logs = Path(sys.argv[1])
    job = ChildJob(spec=ReplaySpec(measure=MeasureSpec(log_folder=logs, name="--this")))
    sys.exit(run_on_ray(refuse, job, RayOptions(address=None), show_traceback=False))
