"""Replay the same inputs under a list of configurations, each in processes of its own, and print one table.

    python benchmarks/configurations.py --inputs inputs/my-run --model llama-3.1-8b --max-inputs 12

A configuration that fails or outlasts its limit is a row that says so. `--num-gpus 2` runs the list for two data ranks.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from replay.logbook import read_log
from replay.records import PassRecord

KERNELS = {
    "padded sdpa": "--no-packing --attention sdpa",
    "padded flash": "--no-packing --attention flash",
    "packed flash": "--attention flash",
    "packed varlen": "--attention varlen",
    "packed flash, compiled": "--attention flash --compile",
    "packed varlen, compiled": "--attention varlen --compile",
}
ONE_GPU = {
    **{f"deepspeed ZeRO 1, {name}": f"--backend deepspeed {flags}" for name, flags in KERNELS.items()},
    "deepspeed ZeRO 1, packed sdpa, DeepCompile": "--backend deepspeed --deepcompile --no-flash-attn",
    **{f"fsdp2, {name}": f"--backend fsdp2 {flags}" for name, flags in KERNELS.items()},
    "deepspeed ZeRO 0, packed flash, no optimizer": "--zero-stage 0 --optimizer none --attention flash",
    "fsdp2, packed flash, no optimizer": "--backend fsdp2 --optimizer none --attention flash",
}
SEVERAL_GPUS = {
    "deepspeed ZeRO 1": "--zero-stage 1",
    "deepspeed ZeRO 3": "--zero-stage 3",
    "fsdp2": "--backend fsdp2",
    "deepspeed ZeRO 1, compiled": "--zero-stage 1 --compile",
    "fsdp2, compiled": "--backend fsdp2 --compile",
    "deepspeed ZeRO 1, padded": "--zero-stage 1 --no-packing",
    "deepspeed ZeRO 3, stepping": "--zero-stage 3 --step",
    "fsdp2, stepping": "--backend fsdp2 --step",
}
COLUMNS = (
    "configuration",
    "counted",
    "forward ms",
    "backward ms",
    "real tokens/s",
    "peak GiB",
    "waiting",
    "first loss",
    "mean loss",
    "first grad norm",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-gpus", type=int, default=1)
    parser.add_argument("--only", default="", help="configurations whose name holds this text")
    parser.add_argument("--limit", type=float, default=150, help="seconds for one configuration")
    parser.add_argument("--total", type=float, default=540, help="seconds for all; what does not fit is not run")
    parser.add_argument("--out", type=Path, default=Path("logs/configurations"))
    arguments, replay_arguments = parser.parse_known_args()
    chosen = {k: v for k, v in (ONE_GPU if arguments.num_gpus == 1 else SEVERAL_GPUS).items() if arguments.only in k}
    began = time.monotonic()
    rows = []
    for name, flags in chosen.items():
        left = arguments.total - (time.monotonic() - began)
        logs = arguments.out / name.replace(",", "").replace(" ", "-")
        command = [
            *_launcher(arguments.num_gpus, flags),
            *shlex.split(flags),
            *replay_arguments,
            "--quiet",
            "--log-folder",
            str(logs),
        ]
        print(f"$ {shlex.join(command)}", flush=True)
        if left < 20:
            rows.append(_failed(name, "not run: out of time"))
        else:
            rows.append(_row(name, logs, _run(command, min(arguments.limit, left))))
        print(_line(rows[-1]), flush=True)
    print(f"\n{_line(COLUMNS)}\n{_line(['---'] * len(COLUMNS))}")
    print("\n".join(_line(row) for row in rows))
    return 0


def _launcher(num_gpus: int, flags: str) -> list[str]:
    if num_gpus == 1:
        return ["replay"]
    if "fsdp2" in flags:
        return ["torchrun", "--nproc-per-node", str(num_gpus), "replay", "--shuffle-inputs"]
    return ["deepspeed", f"--num_gpus={num_gpus}", "replay", "--shuffle-inputs"]


def _run(command: list[str], limit: float) -> str:
    """Empty if it went well, else what to say of it."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"stopped after {limit:.0f} s"
    if process.returncode:
        print("\n".join(output.splitlines()[-15:]), flush=True)
        return f"exit code {process.returncode}"
    return ""


def _end(process: subprocess.Popen[str]) -> None:
    """Launchers pass SIGTERM on to their workers, which torchrun starts in sessions of their own."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.communicate(timeout=15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def _row(name: str, logs: Path, trouble: str) -> tuple[str, ...]:
    if trouble:
        return _failed(name, trouble)
    run, records = read_log(max(logs.iterdir()))
    statistics: dict[str, Any] = run["statistics"]
    good = [record for record in records if record.loss is not None]

    def milliseconds(phase: str) -> str:
        return f"{statistics['phases'][phase]['median_seconds'] * 1e3:.1f}" if phase in statistics["phases"] else "-"

    return (
        name,
        f"{statistics['num_counted']} of {statistics['num_passes']}",
        milliseconds("forward"),
        milliseconds("backward"),
        f"{statistics['real_tokens_per_second']:,.0f}" if statistics["real_tokens_per_second"] else "-",
        f"{statistics['highest_peak']['value'] / 2**30:.1f}" if statistics["highest_peak"] else "-",
        f"{statistics['wait_share']:.1%}" if statistics["wait_share"] is not None else "-",
        f"{good[0].loss:.4f}",
        f"{sum(record.loss or 0 for record in good) / len(good):.4f}",
        _first_norm(good),
    )


def _first_norm(records: list[PassRecord]) -> str:
    return next((f"{record.grad_norm:.4f}" for record in records if record.grad_norm is not None), "-")


def _failed(name: str, trouble: str) -> tuple[str, ...]:
    return (name, trouble, *["-"] * (len(COLUMNS) - 2))


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
