"""Records the jobs, replays each as a user would, and says what the verdict was.

    python -m tests.broken_jobs.campaign [--only NAME] [--class C] [--kind K] [--twins] [--keep FOLDER]

    job              class           kind     effect            outcome       expected
    gradients-x10    gradient scale  plain    gradient 9        REPRODUCED    another one   WRONG
    clean-llama      clean           plain                      REPRODUCED    REPRODUCED    ok

A broken job must not be REPRODUCED unless its effect is below what its dtype can carry, or a note names what is wrong;
a clean one must not DIFFER.
With --twins the unbroken twin of each chosen broken job is replayed in its place, with the same arguments: it must not
DIFFER, no cause may be surer than "may be", and no note may say what was planted in another job. Exit code 1 where one
is not as it must be.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock

from replay.processes.launch import list_rank_variables, open_rank_store
from replay.verdict.causes.cause import Sureness
from tests.broken_jobs.declarations import FaultClass, Job, Kind, Objective
from tests.broken_jobs.effect import Effect, effect_of
from tests.broken_jobs.table import JOBS, TWINS
from tests.broken_jobs.traces import traces_of
from tests.helpers.machine import job_environment
from tests.warm import warm_bin

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = "tests/broken_jobs/train.py"
IMPORTS = ("accelerate", "peft")
MAX_SECONDS = 900
CLEAR = {"loss": 0.05, "token": 0.5, "norm": 0.05, "gradient": 0.1, "update": 0.1}  # no dtype's rounding
EXACT = {"shares", "settings", "optimizer", "state", "untrained"}  # recorded without rounding: no dtype hides these
FSDP2 = "2 ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One replay of one job."""

    job: str
    replay: str  # its arguments, or FSDP2
    outcome: str
    headline: str  # the verdict's line
    effect: Mapping[str, float] | None
    is_below: bool  # the effect is below what the job's dtype can carry
    traces: Mapping[str, float] | None  # what of the recording is other than the unbroken job's
    causes: Sequence[Sequence[str]] | None = None  # name and sureness of each, in the verdict's order; None: not told
    notes: Sequence[str] = ()  # lines under the verdict

    @property
    def cause(self) -> str | None:
        """The name of the first cause; None where the verdict has none."""
        return self.causes[0][0] if self.causes else None

    @property
    def sureness(self) -> str | None:
        return self.causes[0][1] if self.causes else None

    @property
    def is_right(self) -> bool:
        """Is the first cause one of the job's?"""
        return self.cause in job_of(self.job).causes

    @property
    def has_note(self) -> bool:
        """Does a note say what was planted?"""
        return any(job_of(self.job).note in note for note in self.notes)

    @property
    def planted_note(self) -> str | None:
        """A note that says what was planted in any job of the table."""
        planted = [job.note for job in JOBS.values() if job.note]
        return next((note for note in self.notes if any(text in note for text in planted)), None)

    @property
    def says(self) -> str:
        job = job_of(self.job)
        if self.outcome == "FAILED" or (not job.is_broken and self.outcome == "DIFFERS"):
            return "WRONG"
        if job.twin_of and any(sureness != Sureness.MAY_BE for _, sureness in self.causes or ()):
            return "WRONG"
        if not job.is_broken and self.planted_note is not None:
            return "WRONG"
        if not job.is_broken:
            return "ok" if self.outcome == "REPRODUCED" else "weak"
        if job.note:
            return "ok" if self.has_note else "WRONG"
        if self.outcome != "REPRODUCED":
            return "ok"
        return "below" if self.is_below else "WRONG"


def job_of(name: str) -> Job:
    """A job of the table, or the twin of one."""
    return JOBS[name] if name in JOBS else TWINS[name]


@dataclass(slots=True)
class Campaign:
    """Folders of jobs, twins and results under one home."""

    home: Path
    replay_arguments: Sequence[str] = ()
    imports: tuple[str, ...] = ()  # of the warm processes, on top of a replay's
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    _locks: dict[str, Lock] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @property
    def bin(self) -> Path:
        return warm_bin(self.imports)

    def load(self) -> None:
        """Results of before, of the jobs that there still are."""
        path = self.home / "results.json"
        for row in json.loads(path.read_text())["rows"] if path.exists() else ():
            if row["job"] not in JOBS and row["job"] not in TWINS:
                print(f"{row['job']} is no longer in the table: its result is left out", flush=True)
                continue
            self.rows[row["job"], row["replay"]] = Row(**{name: row[name] for name in Row.__slots__ if name in row})

    def save(self) -> None:
        rows = [
            {**asdict(row), **{name: getattr(row, name) for name in ("cause", "sureness", "is_right", "says")}}
            for row in self.rows.values()
        ]
        text = json.dumps({"rows": rows, "totals": totals(self.rows.values())}, indent=1)
        partial = self.home / "results.json.part"
        partial.write_text(text)
        partial.replace(self.home / "results.json")

    def record(self, job: Job) -> Path:
        """Its folder. A job that was recorded is not recorded again."""
        if job.twin_of:
            return self._twin(job)
        folder = self.home / "jobs" / job.name
        if not _is_done(folder, job):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self._run(job, [job.name], folder)
        return folder

    def effect(self, job: Job) -> tuple[Effect, bool]:
        """Return the effect of a recorded broken job, and whether it is below what the dtype can carry."""
        run = self.home / "jobs" / job.name
        found = effect_of(job, run, self._twin(job))
        if any(getattr(found, name) > least for name, least in CLEAR.items()):
            return found, False
        return found, not found.exceeds(effect_of(job, self._twin(job, "--eager"), self._twin(job)))

    def _twin(self, job: Job, *arguments: str) -> Path:
        """The job unbroken; one for all jobs of this kind and setup."""
        first = next(other_job for other_job in JOBS.values() if other_job.is_trained_as(job))
        folder = self.home / "twins" / "-".join([first.name, *(argument.strip("-") for argument in arguments)])
        with self._lock:
            lock = self._locks.setdefault(str(folder), Lock())
        with lock:
            if not _is_done(folder, job):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                self._run(job, [first.name, "--unbroken", *arguments], folder)
        return folder

    def judge(self, job: Job, *, with_effect: bool = True) -> list[Row]:
        """Replay the job's recording once for each of its `replays`."""
        folder = self.record(job)
        effect, is_below, traces = None, False, None
        if job.is_broken and with_effect:
            effect, is_below = self.effect(job)
            traces = traces_of(job, folder, self._twin(job))
            is_below = is_below and not EXACT & traces.keys()
        replays = [(" ".join(arguments), list(arguments)) for arguments in job.replays]
        if job.as_fsdp2:
            replays.append((FSDP2, []))
        found = []
        for name, arguments in replays:
            outcome, headline, causes, notes = self._replay(job, folder, name, arguments)
            found.append(
                Row(
                    job=job.name,
                    replay=name,
                    outcome=outcome,
                    headline=headline,
                    effect=None if effect is None else asdict(effect),
                    is_below=is_below,
                    traces=traces,
                    causes=causes,
                    notes=notes,
                )
            )
        return found

    def _replay(
        self, job: Job, folder: Path, name: str, arguments: Sequence[str]
    ) -> tuple[str, str, Sequence[Sequence[str]] | None, Sequence[str]]:
        """Return the outcome, the verdict's line, the causes and the notes, as `Row` has them."""
        logs = folder / "logs" / str(abs(hash((name, *arguments, *self.replay_arguments))))
        shutil.rmtree(logs, ignore_errors=True)
        command = ["--inputs", str(folder / "captures"), "--model", str(folder / "model")]
        command += ["--loss", "sft"] if job.setup.objective is Objective.MODEL else []
        adapter = folder / "adapter"
        command += ["--adapter", str(adapter)] if adapter.exists() else []
        command += ["--verdict", "strict", "--quiet", "--timeout", "600", "--log-folder", str(logs)]
        command += [*arguments, *self.replay_arguments]
        program = ["replay"]
        if name == FSDP2:
            program = ["python", *_launcher(2), str(ROOT / "replay")]
            command += ["--backend", "fsdp2"]
        done = _start([str(self.bin / program[0]), *program[1:], *command])
        runs = sorted(logs.glob("*/run.json"))
        verdict = json.loads(runs[0].read_text()).get("verdict") if runs else None
        if not verdict:
            return "FAILED", (done.stdout + done.stderr)[-1500:], None, ()
        lines = [line for line in done.stdout.splitlines() if line.startswith("verdict")]
        causes = [(cause["name"], cause["sureness"]) for cause in verdict["causes"]] if "causes" in verdict else None
        headline = lines[0].removeprefix("verdict").strip() if lines else ""
        return str(verdict["outcome"]), headline, causes, read_notes(done.stdout)

    def _run(self, job: Job, arguments: Sequence[str], folder: Path) -> None:
        """Carry the job out under `capture run`. Its ranks meet as torchrun's would."""
        capture = ["-m", "capture", "run", "--to", str(folder / "captures"), SCRIPT, str(folder)]
        store = open_rank_store() if job.kind.num_ranks > 1 else None
        meetings = [{}] if store is None else list_rank_variables(job.kind.num_ranks, store.port)
        ranks = []
        for rank, meeting in enumerate(meetings):
            environment = job_environment() | meeting
            with open(folder / f"output_rank{rank}.txt", "w") as output:
                command = [str(self.bin / "python"), *capture, *arguments]
                ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output))
        try:
            codes = [process.wait(MAX_SECONDS) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(codes):
            raise RuntimeError(f"exit codes {codes}, see {folder}/output_rank0.txt: {_error_in(folder)}")


def read_notes(output: str) -> list[str]:
    """Read the notes under a verdict, each in one line."""
    notes: list[str] = []
    label = ""
    for line in output.splitlines():
        label = line.split(" ")[0] if line[:1].strip() else label
        if label == "note" and line[:1].strip():
            notes.append(line.removeprefix("note").strip())
        elif label == "note":
            notes[-1] += f" {line.strip()}"
    return notes


def chosen(only: Sequence[str], classes: Sequence[str], kinds: Sequence[str]) -> list[Job]:
    """Those of the table that were asked for; all without a choice."""
    unknown = [name for name in only if name not in JOBS]
    if unknown:
        raise SystemExit(f"no such job: {', '.join(unknown)}")
    return [
        job
        for job in JOBS.values()
        if (not only or job.name in only) and (not classes or job.group in classes) and (not kinds or job.kind in kinds)
    ]


def twins_of(jobs: Sequence[Job]) -> list[Job]:
    """The twins of the broken ones; one for all that are trained and replayed alike."""
    found: list[Job] = []
    for job in jobs:
        is_known = any(job.is_trained_as(twin) and job.is_replayed_as(twin) for twin in found)
        if job.is_broken and not is_known:
            found.append(job.twin)
    return found


def in_turn(jobs: Sequence[Job]) -> list[Job]:
    """One of each class after the other, so that a campaign that was broken off has some of all."""
    places: Counter[str] = Counter()
    order = []
    for number, job in enumerate(jobs):
        places[job.group] += 1
        order.append((places[job.group], number))
    return [jobs[number] for _, number in sorted(order)]


def totals(rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """How many replays of each class have which outcome, and what is said of them."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        counts = found.setdefault(job_of(row.job).group, Counter())
        counts.update(["replays", row.outcome, row.says])
    return {name: dict(counts) for name, counts in found.items()}


def line_of(row: Row) -> str:
    job = job_of(row.job)
    effect = ""
    if row.effect is not None:
        effect = " ".join(f"{name} {value:.1e}" for name, value in row.effect.items() if value)
    if row.traces is not None:
        effect += "; recorded: " + (" ".join(f"{name} {value:.1e}" for name, value in row.traces.items()) or "nothing")
    expected = "not REPRODUCED" if job.is_broken else "not DIFFERS" if job.twin_of else "REPRODUCED"
    name = f"{row.job} ({row.replay})" if row.replay else row.job
    name = name if len(name) < 40 else f"{name[:36]}...)"
    cause = _cause_in_words(row)
    return f"{name:40} {job.group:14} {job.kind:11} {row.outcome:12} {expected:14} {row.says:6} {cause:50} {effect}"


def _cause_in_words(row: Row) -> str:
    """Return the first cause with its sureness, and of a broken job whether it is a right one."""
    if row.cause is None:
        return "no cause"
    told = f"{row.sureness} {row.cause}"
    if not job_of(row.job).is_broken:
        return told
    return f"{told}: {'right' if row.is_right else 'wrong'}"


def text_of_causes(rows: Iterable[Row]) -> list[str]:
    """How many first causes are right, and how sure those are, over broken jobs with an effect that the dtype carries.

    A job that is replayed in several ways counts once for each.
    """
    broken = [row for row in rows if job_of(row.job).is_broken and job_of(row.job).causes]
    known = [row for row in broken if not row.is_below and not job_of(row.job).below]
    right = [row for row in known if row.is_right]
    sure = [row for row in right if row.sureness == Sureness.IS]
    likely = [row for row in right if row.sureness == Sureness.PROBABLY]
    mistakes = [row for row in known if row.sureness == Sureness.IS and not row.is_right]
    without = [row.job for row in known if row.cause is None]
    others = [row for row in known if row.cause is not None and not row.is_right and row not in mistakes]
    return [
        f"causes     of {len(known)} replays of broken jobs {len(sure) + len(likely)} have a right first cause "
        f"at least probably, {len(sure)} as is",
        f"wrong is   {len(mistakes)}: " + (", ".join(f"{row.job} ({row.cause})" for row in mistakes) or "none"),
        f"wrong      {len(others)} less surely: "
        + (", ".join(f"{row.job} ({row.sureness} {row.cause})" for row in others) or "none"),
        f"no cause   {len(without)}: {', '.join(without) or 'none'}",
    ]


def text_of_totals(rows: Sequence[Row]) -> str:
    lines = [f"{'class':14}  replays  REPRODUCED  UNSETTLED  DIFFERS  CANNOT TELL  FAILED  below  WRONG"]
    for name, counts in totals(rows).items():
        numbers = [
            counts.get(what, 0)
            for what in (
                "replays",
                "REPRODUCED",
                "UNSETTLED",
                "DIFFERS",
                "CANNOT TELL",
                "FAILED",
                "below",
                "WRONG",
            )
        ]
        lines.append(f"{name:14}  {numbers[0]:7}  {numbers[1]:10}  {numbers[2]:9}  {numbers[3]:7}  {numbers[4]:11}  "
                     f"{numbers[5]:6}  {numbers[6]:5}  {numbers[7]:5}")  # fmt: skip
    broken = [row for row in rows if job_of(row.job).is_broken]
    untraced = dict.fromkeys(row.job for row in broken if row.traces is not None and not row.traces)
    clean = [row for row in rows if job_of(row.job).group == "clean"]
    twins = [row for row in rows if job_of(row.job).twin_of]
    noted = [row for row in broken if job_of(row.job).note]
    reproduced = [row for row in broken if row.outcome == "REPRODUCED" and row not in noted]
    lines += text_of_causes(rows)
    lines += [
        f"noted      {sum(row.has_note for row in noted)} of {len(noted)} whose replay has nothing to differ from: "
        + (", ".join(row.job for row in noted if not row.has_note) or "none is left"),
        f"broken     {len(reproduced)} of {len(broken) - len(noted)} others REPRODUCED, "
        f"{sum(row.is_below for row in reproduced)} of them with an effect below the dtype",
        "below      " + ("; ".join(f"{row.job}: {_why_below(row)}" for row in rows if row.says == "below") or "none"),
        f"no trace   in the recording of {len(untraced)} broken jobs: {', '.join(untraced) or 'none'}",
        f"clean      {sum(row.outcome == 'REPRODUCED' for row in clean)} of {len(clean)} REPRODUCED, "
        f"{sum(row.outcome == 'DIFFERS' for row in clean)} DIFFER; others: "
        + (", ".join(f"{row.job} {row.outcome}" for row in clean if row.says == "weak") or "none"),
        f"twins      {sum(row.says == 'WRONG' for row in twins)} of {len(twins)} WRONG: "
        + (", ".join(row.job for row in twins if row.says == "WRONG") or "none"),
    ]
    return "\n".join(lines)


def _why_below(row: Row) -> str:
    return job_of(row.job).below or "the table gives no reason"


def _launcher(num_ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]


def _is_done(folder: Path, job: Job) -> bool:
    return all((folder / f"numbers_rank{rank}.pt").exists() for rank in range(job.kind.num_ranks))


def _error_in(folder: Path) -> str:
    """The last line of a rank's output that looks like one."""
    lines = [line for path in sorted(folder.glob("output_rank*.txt")) for line in path.read_text().splitlines()]
    return next((line for line in reversed(lines) if "Error" in line), "no error was written")


def _start(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=job_environment(), capture_output=True, text=True, timeout=MAX_SECONDS, check=False
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.broken_jobs.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="This job; may be repeated.")
    parser.add_argument(
        "--class", action="append", default=[], dest="classes", choices=[*FaultClass, "clean"], help="This class."
    )
    parser.add_argument("--kind", action="append", default=[], choices=list(Kind), help="This kind of job.")
    parser.add_argument(
        "--twins",
        action="store_true",
        help="In place of each chosen broken job its unbroken twin; clean ones have none.",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="Recordings and results; those there are used.")
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="Replay only what has no result yet.")
    parser.add_argument("--jobs-only", action="store_true", help="Record, and replay nothing.")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="Jobs at one time.")
    parser.add_argument("--replay-arguments", nargs=argparse.REMAINDER, default=[], help="For every replay; the last.")
    asked = parser.parse_args()
    home = asked.keep.absolute() if asked.keep else Path(tempfile.mkdtemp(prefix="broken-jobs-"))
    home.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(home=home, replay_arguments=asked.replay_arguments, imports=IMPORTS)
    campaign.load()
    jobs = chosen(asked.only, asked.classes, asked.kind)
    if asked.twins:
        jobs = twins_of(jobs)
    known = {name for name, _ in campaign.rows}
    jobs = in_turn(jobs)
    todo = [job for job in jobs if not (asked.goes_on and job.name in known)]
    num_failed = 0
    assert campaign.bin.is_dir()  # the warm processes' server is started here, not in a thread

    def work(job: Job) -> list[Row] | str:
        try:
            if asked.jobs_only:
                campaign.record(job)
                return []
            return campaign.judge(job)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return f"{job.name:40} FAILED: {error}"

    with ThreadPoolExecutor(asked.at_once) as pool:
        for found in pool.map(work, todo):
            if isinstance(found, str):
                num_failed += 1
                print(found, flush=True)
                continue
            for row in found:
                campaign.rows[row.job, row.replay] = row
                print(line_of(row), flush=True)
            campaign.save()
    names = {job.name for job in jobs}
    rows = [row for row in campaign.rows.values() if row.job in names]
    print(f"\n{text_of_totals(rows)}\nin         {home}")
    return 1 if num_failed or any(row.says == "WRONG" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
