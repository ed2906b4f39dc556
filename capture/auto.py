"""Record the job's model if the environment names a folder: `import capture.auto`, a line that may stay in a job.

    MICRO_REPLAY_CAPTURE=inputs/my-run torchrun --nproc-per-node 8 train.py

does what `torchrun --nproc-per-node 8 -m capture run --to inputs/my-run train.py` would. Without the variable the line
imports nothing and changes nothing. Under `capture run`, which records the job already, it does nothing either.
"""

import os

VARIABLE = "MICRO_REPLAY_CAPTURE"


def record_into(typed: str) -> None:
    """Begin to record this process's job into a folder; what cannot be is one line, and the job goes on.

    typed  the variable's value. A relative folder is one of the folder in which the job was started, and children get
           the absolute one
    """
    import sys
    from pathlib import Path

    from capture.facts import CaptureError

    try:
        advice = f"Give a folder, as in {VARIABLE}=inputs/my-run"
        if not typed.strip():
            raise CaptureError(f"{VARIABLE} is empty. {advice}")
        folder = Path(typed).absolute()
        if folder.exists() and not folder.is_dir():
            raise CaptureError(f"{VARIABLE}={typed} is no folder. {advice}")
        os.environ[VARIABLE] = str(folder)
        from capture.run import record_this_process

        record_this_process(folder)
    except Exception as error:
        # Every rank comes here, and one of them says it.
        if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
            reason = str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
            print(f"capture: nothing is recorded, the job goes on: {reason}", file=sys.stderr)


if VARIABLE in os.environ:
    record_into(os.environ[VARIABLE])
