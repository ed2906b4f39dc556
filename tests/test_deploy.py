"""The files in deploy/: a Slurm job of two nodes, jobs for Ray and KubeRay, the image; and nodes that share no disk.

Two nodes are two launchers on loopback. Slurm's own commands are stand-ins that do what theirs do for such a job.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml

from replay.command_line.cli import main, parse_command_line
from replay.runlog.records import PassRecord
from tests.helpers.commands import BIN, LIMIT, ROOT
from tests.helpers.ports import free_port
from tests.helpers.process_table import processes_left
from tests.helpers.read_logs import read_log
from tests.helpers.replay_worker import PATIENCE
from tests.warm import warm_bin

pytestmark = pytest.mark.slow

DEPLOY = ROOT / "deploy"
KUBERAY_JOBS = sorted(DEPLOY.glob("rayjob-*.yaml"))
OPTIONS = "--dtype fp32 --max-inputs 2"
SLURM = {
    "scontrol": 'test "$*" = "show hostnames nodes-[1-2]" && printf "127.0.0.1\\nlocalhost\\n"\n',
    "srun": """
test "$1 $2 $3 $4 $5" = "--ntasks 2 --ntasks-per-node 1 --kill-on-bad-exit=1" || exit 99
shift 5
for node in 0 1; do SLURM_NODEID=$node "$@" & pids+=($!); done
worst=0
for pid in "${pids[@]}"; do wait "$pid" || worst=$?; done
exit $worst
""",
}


def slurm_job(arguments: str, folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Run the job's script on two nodes. Its port is that of its number."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for command, text in SLURM.items():
        (commands / command).write_text(f"#!/usr/bin/env bash\n{text}")
        (commands / command).chmod(0o700)
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "nodes-[1-2]", "SLURM_JOB_ID": name}
    return subprocess.run(
        ["bash", str(DEPLOY / "replay.sbatch"), *shlex.split(arguments)],
        cwd=folder,
        env=os.environ | slurm | {"PATH": f"{commands}{os.pathsep}{warm_bin()}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def job_number() -> str:
    """A number whose port, 20000 and its last four digits, is free."""
    for number in range(os.getpid() % 10000, 20000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 20000 + number % 10000)):
                return str(number)
    raise AssertionError("no port is free")


def only_log(folder: Path) -> tuple[Path, dict[str, Any], list[PassRecord]]:
    (log,) = folder.glob("*/run.json")
    return log.parent, *read_log(log.parent)


@pytest.fixture(scope="module")
def losses_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float | None]:
    """The losses of one process, of the first passes of both captured ranks: 16 of the first come first."""
    logs = tmp_path_factory.mktemp("alone")
    assert (
        main(["--backend", "ddp", "--dtype", "fp32", "--max-inputs", "18", "--quiet", "--log-folder", str(logs)]) == 0
    )
    return {record.source: record.result.loss for record in only_log(logs)[2]}


@pytest.mark.parametrize("typed", ["torchrun --backend fsdp2 --tp 2", "deepspeed --zero-stage 3"])
def test_a_slurm_job_of_two_nodes_has_the_losses_of_one_process(
    typed: str, tmp_path: Path, losses_alone: Mapping[str, float | None]
) -> None:
    number = job_number()
    done = slurm_job(f"{typed} {OPTIONS} {' '.join(PATIENCE)}", tmp_path, number)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = tmp_path / "logs" / f"slurm-{number}"
    folder, run, records = only_log(logs)
    assert {path.name for path in logs.glob("rank*.txt")} == {"rank0.txt", "rank1.txt"}
    assert {path.name for path in folder.glob("rank*")} == {"rank0.jsonl", "rank1.jsonl"}
    assert f"log        {folder.relative_to(tmp_path)}" in done.stdout.splitlines()
    assert (run["status"], run["world_size"], len(records)) == ("finished", 2, 4)
    for record in records:
        assert record.result.loss == pytest.approx(losses_alone[record.source], rel=1e-6)


@pytest.mark.parametrize(
    ("typed", "exit_code", "says"),
    [
        ("", 2, "deploy/replay.sbatch: the first argument is nothing; allowed are torchrun and deepspeed. Try: sbatch"),
        ("mpirun --tp 2", 2, "deploy/replay.sbatch: the first argument is mpirun; allowed are torchrun and deepspeed."),
        ("deepspeed --max-input 2", 2, "replay: unknown option --max-input. Did you mean --max-inputs?"),
    ],
)
def test_a_slurm_job_that_is_refused_says_why(typed: str, exit_code: int, says: str, tmp_path: Path) -> None:
    done = slurm_job(typed, tmp_path, job_number())
    assert done.returncode == exit_code
    assert any(line.startswith(says) for line in (done.stdout + done.stderr).splitlines()), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "speaker", "says"),
    [
        ("killed", 0, "replay: rank 1 died in a pass that rank1.position.json on its own node says: its process ended"),
        ("raised", 1, "replay: rank 1 failed in pass 2 on actor_inputs_rank1_"),
    ],
)
def test_a_rank_that_fails_on_a_node_with_a_disk_of_its_own_is_named(
    kind: str, speaker: int, says: str, tmp_path: Path
) -> None:
    port = free_port()
    command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "localhost"]
    command += ["--master-port", str(port), "-m", "tests.helpers.faulty_replay", kind, "forward", "1"]
    environment = os.environ | {"PATH": f"{warm_bin()}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    nodes = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        nodes.append(
            subprocess.Popen(
                [*command[:5], "--node-rank", str(number), *command[5:], "--backend", "fsdp2", "--max-inputs", "3"],
                cwd=tmp_path / str(number),  # where the logs come to be
                env=environment,
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
            )
        )
    said = [node.communicate(timeout=LIMIT)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1], said
    assert any(line.startswith(says) for line in said[speaker].splitlines()), said
    (log,) = (tmp_path / "0" / "logs").iterdir()
    run = json.loads((log / "run.json").read_text())
    assert (run["status"], run["failure"]["rank"], run["world_size"]) == ("failed", 1, 2)
    (there,) = (tmp_path / "1" / "logs").iterdir()
    position = json.loads((there / "rank1.position.json").read_text())
    assert (there.name, position["index"], position["phase"]) == (log.name, 1, "forward")
    assert not (there / "run.json").exists()


# in the schema of KubeRay 1.3.2, 1.4.2, 1.5.0, 1.6.2 and 1.7.0, by deploy/check_rayjob.py
POD = {
    "containers[].image": str,
    "containers[].name": str,
    "containers[].resources.limits.*": str,
    "containers[].resources.requests.*": str,
    "containers[].volumeMounts[].mountPath": str,
    "containers[].volumeMounts[].name": str,
    "volumes[].name": str,
    "volumes[].persistentVolumeClaim.claimName": str,
}
RAY_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata.name": str,
    "spec.backoffLimit": int,
    "spec.entrypoint": str,
    "spec.rayClusterSpec.headGroupSpec.rayStartParams.*": str,
    "spec.rayClusterSpec.rayVersion": str,
    "spec.rayClusterSpec.workerGroupSpecs[].groupName": str,
    "spec.rayClusterSpec.workerGroupSpecs[].maxReplicas": int,
    "spec.rayClusterSpec.workerGroupSpecs[].minReplicas": int,
    "spec.rayClusterSpec.workerGroupSpecs[].rayStartParams": dict,
    "spec.rayClusterSpec.workerGroupSpecs[].replicas": int,
    "spec.shutdownAfterJobFinishes": bool,
    "spec.submitterConfig.backoffLimit": int,
    "spec.ttlSecondsAfterFinished": int,
    **{
        f"spec.rayClusterSpec.{of}.template.spec.{k}": v
        for of in ("headGroupSpec", "workerGroupSpecs[]")
        for k, v in POD.items()
    },
}


def fields(value: Any, path: str = "") -> Iterator[tuple[str, type]]:
    """Each field of a job and its type; names that the user chooses are `*`."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            own = "*" if path.endswith((".limits", ".requests", ".rayStartParams")) else name
            yield from fields(inner, f"{path}.{own}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from fields(inner, f"{path}[]")
    else:
        yield path, type(value)


@pytest.mark.parametrize("path", KUBERAY_JOBS, ids=lambda path: path.stem)
def test_a_kuberay_job_has_fields_of_its_schema_and_adds_up(path: Path) -> None:
    job = yaml.safe_load(path.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert dict(fields(job)) == RAY_JOB
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], workers)]
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1
    program, *typed = shlex.split(job["spec"]["entrypoint"])
    assert program == "replay"
    assert typed[:4] == ["--launcher", "ray", "--address", "auto"]
    assert typed[4] == "--processes"
    num_workers, spec = int(typed[5]), parse_command_line(typed[6:]).args[0].spec
    assert num_workers == workers["replicas"] * int(pods[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert num_workers % (spec.actor.parallel.tp * spec.actor.parallel.ring) == 0
    assert Path("/shared") in spec.measure.log_folder.parents
    assert path.stem == f"rayjob-{spec.actor.backend}"


def test_the_kuberay_jobs_differ_in_name_and_command_alone() -> None:
    assert len(KUBERAY_JOBS) == 2
    jobs = [yaml.safe_load(path.read_text()) for path in KUBERAY_JOBS]
    for job in jobs:
        del job["metadata"]["name"], job["spec"]["entrypoint"]
    assert jobs[0] == jobs[1]


def test_the_image_has_every_package_and_the_jobs_version_of_ray() -> None:
    recipe = (DEPLOY / "Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (.+) \S+$", recipe, re.MULTILINE) for word in line.split()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    inputs = {str(link.resolve().relative_to(ROOT)) for link in (ROOT / "replay").iterdir() if link.is_symlink()}
    assert inputs == {"inputs/sample", "inputs/edges"}
    assert packages | inputs <= copied
    assert {"pyproject.toml", "constraints.txt", project["project"]["readme"], "LICENSE"} <= copied
    (version,) = re.findall(r"ray\[default\]==([\d.]+)", recipe)
    assert {yaml.safe_load(path.read_text())["spec"]["rayClusterSpec"]["rayVersion"] for path in KUBERAY_JOBS} == {
        version
    }


def test_the_workflow_of_an_upgrade_types_what_the_command_takes() -> None:
    """Its schema was checked by check-jsonschema --builtin-schema vendor.github-workflows."""
    workflow = yaml.safe_load((DEPLOY / "check-upgrade.yml").read_text())
    job = workflow["jobs"]["check-upgrade"]
    install, check = (step["run"].replace("\\\n", " ") for step in job["steps"] if "run" in step)
    program, command, folder, *typed = shlex.split(check)
    assert (program, command, folder) == ("new/bin/replay", "check-upgrade", "$INPUTS")
    arguments = parse_command_line([command, folder, *typed]).args
    assert (arguments[1], str(arguments[2])) == (["old/bin/python", "new/bin/python"], "$GITHUB_STEP_SUMMARY")
    assert (
        {"INPUTS", "MODEL", "OLD", "NEW"}
        == {*job["env"]}
        == {*re.findall(r"\$(\w+)", install + check)} - {"GITHUB_STEP_SUMMARY"}
    )


@pytest.mark.parametrize("typed", ["", "--processes 2"])
def test_a_ray_job_without_a_dashboard_is_one_line(typed: str) -> None:
    done = subprocess.run(
        ["bash", str(DEPLOY / "ray-job.sh"), *typed.split()], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 2
    first = typed.split()[0] if typed else "missing"
    assert done.stderr.startswith(
        f"deploy/ray-job.sh: the first argument is {first}; it has to be the address of Ray's"
    )
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """A Ray head that takes jobs, with a token that it asks for. Its process group is ended at the end."""
    pytest.importorskip("ray")
    pytest.importorskip("aiohttp_cors", reason="needs ray[default]")
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # names of its sockets are as long as may be
    ports = {name: free_port() for name in ("port", "dashboard-port", "dashboard-agent-listen-port")}
    ports["ray-client-server-port"] = free_port()
    head = subprocess.Popen(
        [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus", "2", "--temp-dir", folder]
        + [f"--{name}={port}" for name, port in ports.items()],
        env=os.environ | RAY_ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{ports['dashboard-port']}"
    try:
        deadline = time.monotonic() + LIMIT
        while not answers(address):
            assert head.poll() is None, "the head ended"
            assert time.monotonic() < deadline, "the head did not start"
        yield address
    finally:
        os.killpg(head.pid, signal.SIGKILL)
        head.wait(LIMIT)
        assert processes_left(folder, LIMIT) == []
        shutil.rmtree(folder, ignore_errors=True)


RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "of-this-test-and-32-characters-long",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
}


def answers(address: str) -> bool:
    try:
        urlopen(address, timeout=5).close()
    except (URLError, OSError):
        time.sleep(0.1)
        return False
    return True


def submitted(dashboard: str, typed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(DEPLOY / "ray-job.sh"), dashboard, *typed.split()],
        env=os.environ | RAY_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.parametrize("engine", ["--backend fsdp2 --tp 2", "--backend deepspeed --zero-stage 3"])
def test_a_job_that_is_submitted_to_a_head_leaves_its_log(engine: str, dashboard: str, tmp_path: Path) -> None:
    done = submitted(dashboard, f"--processes 2 {engine} {OPTIONS} --log-folder {tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    folder, run, _ = only_log(tmp_path)
    assert (run["status"], run["world_size"]) == ("finished", 2)
    assert f"log        {folder}" in done.stdout
    assert {path.name for path in folder.glob("rank*.jsonl")} == {"rank0.jsonl", "rank1.jsonl"}


def test_a_job_that_is_refused_fails_where_it_was_submitted(dashboard: str, tmp_path: Path) -> None:
    done = submitted(dashboard, f"--processes 3 --log-folder {tmp_path}")
    assert done.returncode == 1
    refusal = "replay: --processes 3 needs as many CPUs, and the cluster has 2 on 1 node. Try: --processes 2"
    assert refusal in done.stdout
