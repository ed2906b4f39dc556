"""What a rank that ended without a word left in its file of stacks."""

from pathlib import Path

import pytest

from replay.watch.stacks import has_aborted_in_collective, has_watchdog_fired

ABORTED = "Fatal Python error: Aborted\n\n"
SEGMENTATION_FAULT = "Fatal Python error: Segmentation fault\n\n"
FIRED = "Timeout (0:00:10)!\n"
REDUCING = '  File "/x/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
COUNTING = '  File "/x/job.py", line 7 in count\n'


def make_thread(*frames: str) -> str:
    return "Thread 0x01 (most recent call first):\n" + "".join(frames)


@pytest.mark.parametrize(
    ("text", "aborted", "fired"),
    [
        (ABORTED + make_thread(REDUCING, COUNTING), True, False),
        (ABORTED + make_thread(COUNTING), False, False),  # of its own code
        # One thread of several is enough.
        (ABORTED + make_thread(COUNTING) + "\n" + make_thread(COUNTING, REDUCING), True, False),
        # Frames far out tell nothing, as where a hook of a collective runs a model.
        (ABORTED + make_thread(*[COUNTING] * 5, REDUCING), True, False),
        (ABORTED + make_thread(*[COUNTING] * 6, REDUCING), False, False),
        (SEGMENTATION_FAULT + make_thread(REDUCING), False, False),
        (FIRED + make_thread(REDUCING), False, True),
        # The job's own faulthandler may have written before.
        (make_thread(COUNTING) + FIRED, False, False),
        ("", False, False),
    ],
)
def test_an_abort_is_a_collectives_if_a_thread_was_in_one(
    text: str, aborted: bool, fired: bool, tmp_path: Path
) -> None:
    (tmp_path / "rank3.stack.txt").write_text(text)
    assert (has_aborted_in_collective(tmp_path, 3), has_watchdog_fired(tmp_path, 3)) == (aborted, fired)
    # Of a rank on another node there is no file here.
    assert (has_aborted_in_collective(tmp_path, 1), has_watchdog_fired(tmp_path, 1)) == (False, False)
