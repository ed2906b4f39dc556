"""Run `replay recompiles`: the inputs twice under each policy, and what that took."""

import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from actor_init.spec import ActorSpec, UsageError
from replay.inspection.shapes import Rows, Shape, read_shapes, rows_fed
from replay.option_parsing import command_line
from replay.processes.pool import Child, Task, run_child, sigterm_interrupts
from replay.recompiles.console import RecompilesConsole
from replay.recompiles.policies import Asked, Policy, actor_under, least_padding
from replay.recompiles.result import Result, write
from replay.resolution.selection import select
from replay.runlog.reader import log_below
from replay.runlog.records import PassRecord
from replay.runlog.writer import INTERRUPTED, create_folder
from replay.spec import ReplaySpec
from replay.wording import in_flags

CACHES = "TORCHINDUCTOR_CACHE_DIR"
_NUMBER = re.compile(r"\b\d+(/\d+)?\b")


def try_policies(spec: ReplaySpec, asked: Asked) -> int:
    """Run each policy in processes of its own, print what came out, and return the exit code.

    `off` always runs, first: what the others are compared with. Raises UsageError before anything has run if there is
    nothing to replay, or options contradict each other.
    """
    selection = select(spec.inputs, 0, 1, loss=spec.measure.loss)
    shapes, wrong = read_shapes(selection.inputs, spec.measure.loss)
    if not shapes:
        raise UsageError("no input can be fed to a model. Try: replay inspect, with that folder")
    for policy in asked.policies:
        actor_under(policy, spec.actor, multiple=asked.multiple, sizes=[1])  # refuses what cannot be
    folder = create_folder(spec.measure.log_folder, "recompiles")
    command = shlex.join(["replay", "recompiles", *asked.typed, *command_line(spec)])
    console = RecompilesConsole(command, len(shapes), [*selection.damaged, *wrong])
    work = _Work(spec=spec, asked=asked, shapes=shapes, folder=folder, console=console)
    results: list[Result] = []
    try:
        with sigterm_interrupts():
            for policy in dict.fromkeys([Policy.OFF, *asked.policies]):
                result = work.run(policy)
                results.append(result)
                console.ended(result)
                write(folder, command, asked.num_passes, results)
    except KeyboardInterrupt:
        console.finish(results, asked.num_passes, folder)
        return INTERRUPTED
    console.finish(results, asked.num_passes, folder)
    return 1 if selection.damaged or wrong or any(one.error for one in results) else 0


@dataclass(kw_only=True, slots=True)
class _Work:
    spec: ReplaySpec
    asked: Asked
    shapes: Sequence[Shape]
    folder: Path
    console: RecompilesConsole
    rows: Rows | None = None  # known from the first pass that ran

    def run(self, policy: Policy) -> Result:
        """Replay all inputs twice under `policy`. Where lengths are too short, or the like, the result says so."""
        try:
            sizes = self._sizes() if policy is Policy.BUCKETS else [1]
        except UsageError as error:
            return Result(policy=policy, error=in_flags(error))
        actor = actor_under(policy, self.spec.actor, multiple=self.asked.multiple, sizes=sizes)
        numbers = [str(shape.number) for shape in self.shapes]
        run = replace(
            self.spec,
            actor=replace(actor, grad_accumulation=1),
            inputs=replace(self.spec.inputs, pick_inputs=",".join(numbers + numbers)),
            measure=replace(self.spec.measure, noise_floor=False),
        )
        num_processes = actor.parallel.tp * actor.parallel.ring
        self.console.runs(policy)
        with _empty_cache(self.folder / "cache"):
            child = run_child(
                Task.attempt(
                    self.folder / "runs", command_line(run), num_processes=num_processes, limit=self.asked.limit
                )
            )
        folder, _, records = log_below(child.logs)
        if self.rows is None and policy is Policy.OFF:
            first = [one for one in records if one.error is None and one.index < len(self.shapes)]
            self.rows = rows_fed((self.shapes[one.index], one.fed_tokens) for one in first) if first else None
        return _result(policy, actor, records, child, len(self.shapes), str(folder) if folder is not None else "")

    def _sizes(self) -> list[int]:
        """Return the lengths of buckets. Raises UsageError if a row is longer than all that were asked for."""
        if self.rows is None:
            raise UsageError("no pass could be run without compiling, so the lengths of rows are not known")
        lengths = {shape.longest_row(self.rows): shape for shape in self.shapes}
        if isinstance(self.asked.sizes, int):
            return least_padding([shape.longest_row(self.rows) for shape in self.shapes], self.asked.sizes)
        longest = max(lengths)
        if longest > max(self.asked.sizes):
            typed = ",".join(map(str, self.asked.sizes))
            raise UsageError(
                f"--buckets {typed} holds no row of {longest} tokens, as {lengths[longest].source} has. "
                f"Try: --buckets {typed},{longest}"
            )
        return list(self.asked.sizes)


def _result(
    policy: Policy, actor: ActorSpec, records: Sequence[PassRecord], child: Child, num_inputs: int, log: str
) -> Result:
    """Sum up what a run wrote, however far it came; of several ranks the slowest counts."""
    passes: dict[int, list[PassRecord]] = {}
    for record in records:
        passes.setdefault(record.index, []).append(record)
    failed = next((one for one in records if one.error is not None), None)
    error = "" if failed is None else f"{failed.source}: {failed.error_type}: {failed.error}"
    done = {index: ranks for index, ranks in passes.items() if all(one.error is None for one in ranks)}
    seconds = {index: max(one.seconds or 0.0 for one in ranks) for index, ranks in done.items()}
    again = {index - num_inputs: seconds[index] for index in seconds if index >= num_inputs}
    both = [index for index in again if index in seconds]
    reasons = Counter(
        _NUMBER.sub("N", reason) for ranks in done.values() for one in ranks[:1] for reason in one.recompilations
    )
    is_whole = len(again) == num_inputs
    return Result(
        policy=policy,
        options=shlex.join(_own_options(actor)),
        num_passes=len(done),
        num_graphs=sum(max(one.new_graphs for one in ranks) for ranks in done.values()),
        recompilations=dict(reasons.most_common()),
        compile_seconds=sum(max(one.compile_seconds for one in ranks) for ranks in done.values()),
        extra_seconds=sum(seconds[index] - again[index] for index in both),
        pass_seconds=sum(again.values()) / num_inputs if is_whole else None,
        fed_tokens=sum(ranks[0].fed_tokens for index, ranks in done.items() if index < num_inputs),
        error=error or child.error or ("" if is_whole else f"{len(done)} of {2 * num_inputs} passes"),
        log=log,
    )


def _own_options(actor: ActorSpec) -> list[str]:
    """Return the options that make a policy."""
    own = ActorSpec(compile=actor.compile, compile_lengths=actor.compile_lengths, pad_tokens=actor.pad_tokens)
    return command_line(ReplaySpec(actor=own))


@contextmanager
def _empty_cache(folder: Path) -> Iterator[None]:
    """Have processes that start now compile into an empty folder, which is removed at the end."""
    before = os.environ.get(CACHES)
    os.environ[CACHES] = str(folder.absolute())
    try:
        yield
    finally:
        if before is None:
            del os.environ[CACHES]
        else:
            os.environ[CACHES] = before
        shutil.rmtree(folder, ignore_errors=True)
