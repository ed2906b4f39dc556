"""Published bugs, in the release that has them and in the one that has them fixed.

    python -m benchmarks published_bugs make [NAME ...]       # the environments
    python -m benchmarks published_bugs run [NAME ...]        # each bug's job or parity, and the table

From the root of a checkout, on a CPU. Environments lie in --home, runs in --out, which are folders outside of it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import ROOT, markdown
from benchmarks.published_bugs.bugs import BUGS, Bug

JOBS = Path(__file__).resolve().parent / "jobs"
QUIET = ("EQUAL", "WITHIN NOISE")


@dataclass(frozen=True)
class Said:
    """What the tool said of one release."""

    is_quiet: bool  # it has nothing against it
    has_alarm: bool  # it says that something is wrong
    text: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["make", "run"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "published-bugs")
    parser.add_argument("--out", type=Path, default=Path("/tmp/published-bugs"))
    arguments = parser.parse_intermixed_args()
    rows = []
    for name in arguments.names or BUGS:
        bug = BUGS[name]
        for environment in (bug.broken, bug.fixed):
            environment.make(arguments.home)
        if arguments.action == "run":
            rows.append(row_of(name, bug, arguments.home, arguments.out / name))
            print(json.dumps(rows[-1], indent=1), flush=True)
    if rows:
        print(table(rows))
        print(f"{sum(row['found'] == 'yes' for row in rows)} of {len(rows)} found")


def row_of(name: str, bug: Bug, home: Path, out: Path) -> dict[str, str]:
    said = {}
    for side, environment, job in (("broken", bug.broken, bug.job), ("fixed", bug.fixed, bug.fixed_job or bug.job)):
        folder = out / side
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file, content in bug.files.items():
            (folder / file).write_text(json.dumps(content))
        ask = by_parity if bug.cells else by_job
        said[side] = ask(bug, job, environment.python(home), folder)
    return {
        "bug": name,
        "what": bug.what,
        "releases": f"{bug.broken.name}, {bug.fixed.name}",
        "command": bug.command(),
        "broken": said["broken"].text,
        "fixed": said["fixed"].text,
        "found": "yes" if said["broken"].has_alarm and said["fixed"].is_quiet else "no",
    }


def by_job(bug: Bug, job: Sequence[str], python: Path, folder: Path) -> Said:
    """Recorded in that environment, replayed in ours: captures travel."""
    script, *arguments = job
    command = [str(python)]
    if bug.processes > 1 or script == "engine":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(bug.processes)]
    if not bug.records_itself:
        command += ["-m", "capture", "run", "--to", str(folder / "captures")]
    done = run([*command, str(JOBS / f"{script}.py"), *arguments, str(folder)], folder / "job.log")
    if done:
        return Said(False, True, f"the job failed: {last_error(folder / 'job.log')}")
    command = [sys.executable, "-m", "replay", "--inputs", str(folder / "captures"), "--model", str(folder / "model")]
    command += ["--backend", "fsdp2", "--loss", "sft", "--verdict", "strict", "--log-folder", str(folder / "logs")]
    done = run([*command, "--quiet", *bug.replay], folder / "replay.log")
    logs = sorted((folder / "logs").glob("*/run.json"))
    verdict = json.loads(logs[-1].read_text()).get("verdict") if logs else None
    if verdict is None:
        return Said(False, False, f"the replay failed: {last_error(folder / 'replay.log')}")
    lines = (folder / "replay.log").read_text().splitlines()
    text = next((line.split(maxsplit=1)[1] for line in lines if line.startswith("verdict ")), verdict["outcome"])
    return Said(verdict["outcome"] == "REPRODUCED" and not done, bool(done), text)


def by_parity(bug: Bug, _: Sequence[str], python: Path, folder: Path) -> Said:
    """All in that environment: the reference is what the release itself computes in one process."""
    lines = ["[[cells]]", *(f"{key} = {json.dumps(value)}" for key, value in bug.cells.items())]
    (folder / "matrix.toml").write_text("\n".join(lines) + "\n")
    command = [str(python), "-m", "replay", "parity", "--matrix", str(folder / "matrix.toml")]
    command += ["--at-once", "2", "--log-folder", str(folder / "logs")]
    run([*command, *(option.replace("{folder}", str(folder)) for option in bug.parity)], folder / "parity.log")
    reports = sorted((folder / "logs").glob("*/parity.json"))
    if not reports:
        return Said(False, False, f"parity failed: {last_error(folder / 'parity.log')}")
    said = (folder / "parity.log").read_text().splitlines()
    result = next((line.split(maxsplit=1)[1] for line in said if line.startswith("result ")), "")
    against = [" ".join(line.split())[:100] for line in said if line.startswith(("DIFFERS", "FAILED"))]
    is_quiet = bool(result) and not against and "FAILED" not in result and "DIFFERS" not in result
    return Said(is_quiet, bool(against) or "FAILED" in result, "; ".join([*against[:2], result]))


def run(command: list[str], log: Path) -> int:
    """The exit code; what it said is in the log."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with log.open("w") as opened:
        return subprocess.run(command, cwd=ROOT, env=environment, stdout=opened, stderr=subprocess.STDOUT).returncode


def last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
    return (errors or lines or ["nothing was said"])[-1][:200]


def table(rows: list[dict[str, str]]) -> str:
    columns = ("bug", "releases", "command", "broken", "fixed", "found")
    return markdown([columns, *([row[column].replace("|", "/") for column in columns] for row in rows)])


if __name__ == "__main__":
    main()
