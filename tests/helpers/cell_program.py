"""In the place of `replay` in a cell on Ray: says who it is, or does what it is told; needs no torch.

`python -m tests.helpers.cell_program --job FILE`: the name of the run says what it does.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")

if __name__ == "__main__":
    spec = json.loads(Path(sys.argv[2]).read_text())["spec"]
    what = spec["measure"]["name"]
    run = Path(spec["measure"]["log_folder"]) / "run"
    run.mkdir(parents=True, exist_ok=True)
    rank = os.environ.get("RANK", "0")
    (run / f"rank{rank}.jsonl").write_text(" ".join(os.environ.get(name, "-") for name in VARIABLES) + "\n")
    print(f"replay: rank {rank}: {what} in {run}", flush=True)
    if what == "read":
        print(*sorted(path.name for path in Path(spec["inputs"]["inputs"]).iterdir()), flush=True)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        signal.pause()
    if what == "worker lost":
        os.kill(int(os.environ.get("WARM_PARENT", os.getppid())), signal.SIGKILL)
        signal.pause()
    if what.startswith("wait "):
        time.sleep(float(what.removeprefix("wait ")))
    sys.exit(2 if what == "refused" else 0)
