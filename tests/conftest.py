"""One process group for all replays that tests run in their own process, and one thread for each process."""

import gc
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Set
from contextlib import nullcontext
from functools import partialmethod
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests import warm
from tests.helpers.machine import KEPT_VARIABLES
from tests.writers import written_json

# pytest-xdist's controller reads this file while its workers wait to be started, and runs no test. What takes seconds
# to import is imported by those that collect.
if TYPE_CHECKING:
    from actor_init.world import World
    from replay.watch.watcher import Watch

GPUS_NEEDED = {"gpu": 1, "multi_gpu": 2}  # by marker
sys.path.append(written_json.HOME)  # the fork server of replays gets the path of this process

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # a shell starts what it puts in the background so, for all below it
        signal.signal(number, usual)


def pytest_configure(config: pytest.Config) -> None:
    _refuse_missing_gpus(config)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Workers start after this, and inherit it; pytest has chosen its own colours by the user's variables before."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _leave_home(session.config)
    # A folder of this worker's own: what its tests start inherits it.
    os.environ[written_json.BREACHES] = tempfile.mkdtemp(prefix="breaches-", dir=os.environ["HOME"])


def pytest_report_header(config: pytest.Config) -> str:
    return "pytest: about 4 minutes on two cores; pytest -m slow, the other tests: about 10"


def _leave_home(config: pytest.Config) -> None:
    """Give the tests a home and variables of their own: no cache, setting or terminal of the user's is looked at."""
    home = tempfile.mkdtemp(prefix="tests-home-")
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    for name in [name for name in os.environ if not KEPT_VARIABLES.fullmatch(name)]:
        del os.environ[name]
    os.environ |= {
        "HOME": home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_TQDM_PATCH_PRINT": "0",  # Ray would replace builtins.print in the process that connects
        "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compiles where it is asked, without worker processes
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # else each process that compiles starts others to try what the CPU can do
        "PYTHONPATH": os.pathsep.join(filter(None, [written_json.HOME, os.environ.get("PYTHONPATH")])),
        warm.HOME: home,
        warm.OWNER: str(os.getpid()),
    }


def _refuse_missing_gpus(config: pytest.Config) -> None:
    """Whoever asks for GPU tests by name is told that they cannot be had; nothing is skipped in silence."""
    for marker, needed in GPUS_NEEDED.items():
        if re.search(rf"(?<!not )\b{marker}\b", config.option.markexpr):
            import torch

            if torch.cuda.device_count() < needed:
                raise pytest.UsageError(
                    f"-m {marker} needs {needed} GPU{'s' * (needed > 1)}, and torch sees {torch.cuda.device_count()} "
                    "here. Try: pytest, for all that needs none"
                )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import without collections of garbage: they would take as long as all else."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long files first, and leave out tests that need more GPUs than this machine has."""
    # A worker that takes a long file last keeps the others waiting.
    with_slow_tests = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: _find_place(item, with_slow_tests))
    import torch

    lacking = {marker for marker, needed in GPUS_NEEDED.items() if torch.cuda.device_count() < needed}
    left_out = [item for item in items if any(item.get_closest_marker(marker) for marker in lacking)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _find_place(item: pytest.Item, with_slow_tests: Set[Path]) -> tuple[bool, bool, bool]:
    """Find the place of an item's file in the order: slow as a whole, then long, then with slow tests, then others."""
    module = item.getparent(pytest.Module)
    marks = set() if module is None else {mark.name for mark in module.own_markers}
    return "slow" not in marks, "long" not in marks, item.path not in with_slow_tests


def pytest_collection_finish() -> None:
    """Make a process that is going to run tests ready."""
    import torch

    for name in written_json.WATCHED:
        written_json.watch(import_module(name))
    torch.set_num_threads(1)  # processes share the cores, and more threads than cores wait for each other
    gc.freeze()  # what is there now stays; going through it took half of the time of tests in this process
    gc.set_threshold(*warm.GARBAGE_THRESHOLDS)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave what a file has imported out of later collections, too."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def lines_give_their_jobs_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parse each line that a test has people shown to repeat a run: it gives the job again, or the test fails."""
    from replay.processes.child_job import ChildJob

    repeat_line = ChildJob.repeat_line
    others: list[str] = []

    def read_back(job: ChildJob, *, num_processes: int = 1, python: str = "") -> str:
        from tests.helpers.repeated import Repeated, repeated_by

        line = repeat_line(job, num_processes=num_processes, python=python)
        if repeated_by(line) != Repeated(job.spec, num_processes, python):
            others.append(line)
        return line

    monkeypatch.setattr(ChildJob, "repeat_line", read_back)
    yield
    assert others == [], "these lines give another job than theirs"


@pytest.fixture(autouse=True)
def what_is_written_fits_its_schema() -> Iterator[None]:
    """Fail a test in which a process wrote a log or a result that is not as replay/schemas/ says."""
    yield
    assert written_json.take_breaches() == [], "what was written does not fit replay/schemas/"


@pytest.fixture(scope="session", autouse=True)
def replays_fork_from_a_warm_process() -> Iterator[None]:
    """Have the fork server of replays forked, too, and not started: each pytest worker would import all once more."""
    from replay.processes import forkserver

    start = forkserver.start

    def start_warm(*arguments: Any) -> Any:
        multiprocessing.set_executable(str(warm.warm_bin() / "python"))
        return start(*arguments)

    with patch.object(forkserver, "start", start_warm):
        yield


@pytest.fixture(scope="module")
def fork_server_as_a_users() -> Iterator[None]:
    """Start the fork server of replays with all its imports, as a user's command does."""
    from replay.processes import forkserver

    forkserver.forget_server()
    with patch.object(warm, "warm_bin", lambda: warm.COLD_BIN):
        yield
    forkserver.forget_server()


@pytest.fixture
def forks_compile_to_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile in forks that replay to graphs alone, as `compiles_to_graphs` does in this process."""
    from replay.processes import forkserver

    forkserver.forget_server()
    monkeypatch.setenv(warm.GRAPHS, "1")
    yield
    forkserver.forget_server()


@pytest.fixture(scope="session")
def world() -> Iterator["World"]:
    from actor_init.spec import ParallelSpec
    from actor_init.world import World

    with World.from_env(ParallelSpec()) as world:
        yield world


@pytest.fixture(autouse=True)
def deepspeed_keeps_a_living_group() -> Iterator[None]:
    """Name the test that closes the group which DeepSpeed keeps: every later one of DeepSpeed in its process fails."""
    yield
    comm = sys.modules.get("deepspeed.comm.comm")
    if comm is not None and comm.cdb is not None:
        import torch.distributed as dist

        assert dist.is_initialized(), "the process group that DeepSpeed holds is closed: add the fixture one_world"


@pytest.fixture
def one_world(world: "World", monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed keeps its process groups for good, so a second group in one process would be none of its own."""
    from replay.watch.watcher import Watch

    monkeypatch.setattr("replay.runner.run.World.from_env", lambda _: nullcontext(world))
    monkeypatch.setattr(Watch, "__init__", partialmethod(_begin_patiently, Watch.__init__))


def _begin_patiently(
    watch: "Watch", begin: Callable[..., None], world: "World", folder: Path, timeout: float, **given: Any
) -> None:
    """Begin a watch. On a busy machine compiling takes longer than --timeout usually is, and the process would end."""
    from replay.options.spec import MeasureSpec
    from tests.helpers.commands import LIMIT

    begin(watch, world, folder, LIMIT if timeout == MeasureSpec().timeout else timeout, **given)


@pytest.fixture
def compiles_to_graphs() -> Iterator[None]:
    """Compile in this process to graphs alone: their kernels take half a minute, and are torch's."""
    from tests.helpers.replay_worker import graphs_alone

    with graphs_alone():
        yield


@pytest.fixture(scope="module")
def proofs_once() -> Iterator[None]:
    """The replays of a file, in this process, prove once what a model's rows and its head allow."""
    from tests.helpers.replay_worker import proved_once

    with proved_once():
        yield


@pytest.fixture
def become_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Have torch say that this process is a rank of so many, of whichever group it is asked."""

    def become(rank: int, world_size: int) -> None:
        monkeypatch.setattr("torch.distributed.get_rank", lambda group=None: rank)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: world_size)

    return become


@pytest.fixture
def no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is in no process group, though other tests keep one open."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)


@pytest.fixture
def shared_memory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for this machine's shared memory, where flight recorders are kept."""
    from capture.black_box import flight_recorder

    folder = tmp_path_factory.mktemp("shared-memory")
    monkeypatch.setattr(flight_recorder, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture(scope="session")
def short_sample_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from capture import capture_files
    from replay.options.spec import find_sample_folder
    from tests.helpers.made_captures import SHORT_PASSES, copy_captures

    captures = capture_files(find_sample_folder())
    return copy_captures(tmp_path_factory.mktemp("short") / "sample", [captures[number] for number in SHORT_PASSES])


@pytest.fixture
def short_sample(short_sample_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay of this process that names no inputs has the short passes of the sample."""
    for name in ("replay.resolution.selection", "replay.resolution.job_defaults", "replay.options.needed_tensors"):
        monkeypatch.setattr(f"{name}.find_sample_folder", lambda: short_sample_folder)
