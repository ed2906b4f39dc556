"""Run a replay with --save-every as one worker of Ray Train, which keeps its states.

Each worker reports its own part of a state; Ray Train joins the parts in its storage, and counts them as a checkpoint
when all workers have reported. Workers that Ray Train starts again go on from the latest.
"""

import logging
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actor_init.spec import UsageError
from actor_init.world import World
from replay.on_ray.node_actors import NodeAgent, redirect_output, work_in
from replay.processes.child_job import ChildJob
from replay.processes.error_reports import run_to_exit_code
from replay.runner.state_store import name_state_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class RayStates:
    """The states of a run, as checkpoints of Ray Train: none lies below --save-state, for --load-state to find."""

    # The latest checkpoint, as a folder on this node; None: the training begins.
    start: Path | None
    # Folder on this node where workers write their parts before they report them.
    parts: Path
    has_folder = False

    def check(self) -> None:
        """Do nothing: Ray Train and the driver have looked at the storage."""

    def find_latest(self, world: World) -> Path | None:
        return self.start

    def keep(self, num_steps: int, write: Callable[[Path], None], world: World) -> None:
        from ray.train import Checkpoint, report

        self.parts.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{name_state_folder(num_steps)}-rank{world.rank}-", dir=self.parts))
        write(part)
        report(
            {"num_steps": num_steps},
            checkpoint=Checkpoint.from_directory(part),
            checkpoint_dir_name=name_state_folder(num_steps),
            delete_local_checkpoint_after_upload=True,
        )


def train(job: Mapping[str, Any]) -> int:
    """Run a replay as a rank of the group that Ray has opened. Returns its exit code.

    job     what is replayed, as JSON
    homes   folder with a folder for each node, for what ranks write there
    logs    the folder for the run's log, relative to the node's folder
    output  file for what is printed there, with the node's name behind it; relative, too
    folder  the driver's working folder, which becomes this rank's if the node has it
    inputs  by node, the folder of the inputs that were sent there; none where a node sees the driver's folder

    Raises what breaks a run off, so that Ray Train ends the other workers and begins again.
    """
    import ray
    from ray.train import get_checkpoint

    from replay.runner.run import run

    node = ray.get_runtime_context().get_node_id()
    home = Path(job["homes"]) / node
    child_job = ChildJob.parse(job["job"], source="the job of a rank")
    spec = child_job.on_node(home / job["logs"], job["inputs"].get(node)).spec
    work_in(job["folder"])
    output = home / f"{job['output']}.node-{node}"
    output.parent.mkdir(parents=True, exist_ok=True)
    # Ray Train logs two lines for each state.
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    errors: list[Exception] = []
    with ExitStack() as stack:
        checkpoint = get_checkpoint()
        start = Path(stack.enter_context(checkpoint.as_directory())) if checkpoint else None
        states = RayStates(start=start, parts=NodeAgent.folder_of_states(home))
        stack.enter_context(redirect_output(output, output))
        exit_code = run_to_exit_code(
            partial(_keep_error, errors, lambda: run(spec, show_traceback=False, states=states).exit_code)
        )
    if errors:
        raise errors[0]
    return exit_code


def _keep_error(errors: list[Exception], action: Callable[[], int]) -> int:
    try:
        return action()
    except UsageError:
        raise
    except Exception as error:
        errors.append(error)
        raise
