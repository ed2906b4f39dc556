"""Run a command of several ranks here or on a Ray cluster.

The command line imports this file while it is parsed, so what imports torch is imported inside.
"""

from collections.abc import Callable

from replay.options.ray_options import RayOptions
from replay.processes.child_job import ChildJob


def run_here_or_on_ray(
    job: ChildJob, command: Callable[[ChildJob], int], ray: RayOptions | None, *, show_traceback: bool
) -> int:
    """Call `command` with its job, in this process or as each rank on a cluster. Returns its exit code."""
    if ray is None:
        return command(job)
    from replay.on_ray.launch import run_on_ray

    return run_on_ray(command, job, ray, show_traceback=show_traceback)
