"""Tell from captures which steps the job's optimizer took after the passes of a replay, and what each pass weighed.

A window of the replay is a step of the job if it has the same passes, of all ranks of the job.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from capture.file_format.optimizer_step import OptimizerStep
from replay.resolution.windows import InputRound, JobPass, find_training_rounds, find_window_size
from replay.tolerances.job_bounds import SAME_SHARES


@dataclass(frozen=True, kw_only=True, slots=True)
class JobWindow:
    """The passes of one window of the replay, and the job's step after them.

    place        of the window among the replay's
    first_index  index of the window's first pass
    last_index   of its last one
    passes       of all data ranks, round by round
    steps        what each rank of the job recorded of the step; empty: the window is not a whole step of the job
    number       how many steps the job's optimizer had taken before
    """

    place: int
    first_index: int
    last_index: int
    passes: Sequence[JobPass]
    steps: Sequence[OptimizerStep]
    number: int | None


def note_window_sizes(rounds: Sequence[InputRound], grad_accumulation: int) -> tuple[list[InputRound], int]:
    """Note in rounds how many passes their windows have, if not all have `grad_accumulation`. Also return the largest.

    The job's last window of an epoch may be shorter than the others. What is no whole step of the job's is divided into
    windows of `grad_accumulation` passes, and what is left of it is an incomplete window: no pass of another step joins
    it. The last of all passes leave their window open.
    """
    indices = [index for index, input_round in enumerate(rounds) if input_round.trains]
    sizes: dict[int, int] = {}
    incomplete: set[int] = set()
    begin = 0
    while begin < len(indices):
        later_rounds = [rounds[index] for index in indices[begin:]]
        size = _count_passes_of_step(later_rounds)
        if not size:
            num_passes = _count_passes_before_next_step(later_rounds)
            size = num_passes if num_passes < min(grad_accumulation, len(later_rounds)) else grad_accumulation
            incomplete.update(indices[begin : begin + size] if size < grad_accumulation else ())
        sizes |= dict.fromkeys(indices[begin : begin + size], size)
        begin += size
    if set(sizes.values()) <= {grad_accumulation}:
        return list(rounds), grad_accumulation
    noted = [
        replace(input_round, num_in_window=sizes.get(index, 0), is_incomplete=index in incomplete)
        for index, input_round in enumerate(rounds)
    ]
    return noted, max(sizes.values())


def _count_passes_before_next_step(rounds: Sequence[InputRound]) -> int:
    """Count the rounds that have as many steps before them as the first one; all where that is not known of it."""
    number = rounds[0].num_steps_before
    if number is None:
        return len(rounds)
    return len(list(takewhile(lambda input_round: input_round.num_steps_before == number, rounds)))


def _count_passes_of_step(rounds: Sequence[InputRound]) -> int:
    """Count the rounds up to the job's next step; 0 if they are not all of that step."""
    passes: list[JobPass] = []
    for number, input_round in enumerate(rounds):
        if not input_round.job_passes or {job_pass.num_steps_before for job_pass in input_round.job_passes} != {
            rounds[0].job_passes[0].num_steps_before
        }:
            return number if number and find_steps_of_job(passes) else 0
        passes += input_round.job_passes
    return len(rounds) if passes and find_steps_of_job(passes) else 0


def list_job_windows(rounds: Sequence[InputRound], grad_accumulation: int) -> list[JobWindow]:
    """List the windows of a replay that are full: so many training passes of each data rank."""
    windows: list[JobWindow] = []
    indices = [index for index, input_round in enumerate(rounds) if input_round.trains]
    begin = 0
    while begin < len(indices):
        size = find_window_size(rounds, indices[begin], grad_accumulation)
        if begin + size > len(indices):
            break
        members = [rounds[index] for index in indices[begin : begin + size]]
        passes = [job_pass for member in members for job_pass in member.job_passes]
        is_known = all(member.job_passes for member in members)
        windows.append(
            JobWindow(
                place=len(windows),
                first_index=indices[begin],
                last_index=indices[begin + size - 1],
                passes=passes,
                steps=find_steps_of_job(passes) if is_known else (),
                number=passes[0].num_steps_before if passes else None,
            )
        )
        begin += size
    return windows


def find_steps_of_job(passes: Sequence[JobPass]) -> Sequence[OptimizerStep]:
    """Return what each rank of the job recorded of one step, if these are all the passes of that step; else nothing.

    passes  at least one; those of a rank in the job's order
    """
    by_rank: dict[int, list[JobPass]] = {}
    for job_pass in passes:
        by_rank.setdefault(job_pass.rank, []).append(job_pass)
    steps = [rank_passes[-1].step for rank_passes in by_rank.values()]
    if len(by_rank) != passes[0].world_size or len({job_pass.num_steps_before for job_pass in passes}) > 1:
        return ()
    known_steps = [step for step in steps if step is not None]
    are_whole = len(known_steps) == len(steps) and all(
        [job_pass.forward for job_pass in rank_passes] == list(step.passes)
        for rank_passes, step in zip(by_rank.values(), known_steps, strict=True)
    )
    return known_steps if are_whole else ()


def did_job_average_means(rounds: Sequence[InputRound], first_index: int, size: int) -> bool:
    """Did each pass weigh the same in the job's step? False if that was not recorded, or the window is no step of it.

    What a pass weighed is the derivative of what the job differentiated by the pass's mean loss, as a share of the sum
    over the window. How large the sum is, is for the verdict to judge.
    """
    members = find_training_rounds(rounds, first_index, size)
    passes = [job_pass for member in members for job_pass in member.job_passes]
    if len(members) != size or not all(member.job_passes for member in members):
        return False
    ranks = dict.fromkeys(job_pass.rank for job_pass in passes)
    shares = {
        (rank, forward): share
        for rank, step in zip(ranks, find_steps_of_job(passes), strict=False)
        for forward, share in zip(step.passes, step.shares, strict=True)
    }
    weights: list[float] = []
    for job_pass in passes:
        share = None if job_pass.forward is None else shares.get((job_pass.rank, job_pass.forward))
        if share is None:
            return False
        weights.append(share * job_pass.loss_per_mean)
    total = sum(weights)
    return total > 0 and all(abs(weight / total - 1 / len(weights)) <= SAME_SHARES for weight in weights)
