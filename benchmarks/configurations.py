"""Replay the same inputs under a list of configurations, each in its own processes, and print one table.

    python -m benchmarks configurations --inputs inputs/my-run --model llama-3.1-8b --max-inputs 12

A configuration that fails or exceeds its limit is a row with the error. `--num-gpus 2` and `4` have their own lists,
that begin with one GPU. "speed a GPU" is a row's tokens/s on each of its GPUs over that of the one-GPU row of the same
backend and compiler; "loss from one GPU" the largest relative difference from the first row, over the inputs that both
replayed (how many).
"""

import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Answers, Ended, make_parser, markdown, run
from replay.runlog.reader import read_records
from replay.runlog.records import PassRecord
from replay.runlog.summary import Statistics, summarize

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
ALONE = {
    "fsdp2, one GPU": "--backend fsdp2",
    "fsdp2, one GPU, sdpa": "--backend fsdp2 --attention sdpa",
    "deepspeed ZeRO 1, one GPU": "--zero-stage 1",
}
TWO_GPUS = {
    "deepspeed ZeRO 1, two data ranks": "--zero-stage 1 --shuffle-inputs",
    "deepspeed ZeRO 3, two data ranks": "--zero-stage 3 --shuffle-inputs",
    "fsdp2, two data ranks": "--backend fsdp2 --shuffle-inputs",
    "deepspeed ZeRO 1, tp 2": "--zero-stage 1 --tp 2",
    "deepspeed ZeRO 1, ring 2": "--zero-stage 1 --ring 2",
    "fsdp2, tp 2": "--backend fsdp2 --tp 2",
    "fsdp2, ring 2": "--backend fsdp2 --ring 2",
}
FOUR_GPUS = {
    "deepspeed ZeRO 3, four data ranks": "--zero-stage 3 --shuffle-inputs",
    "fsdp2, tp 2 x ring 2": "--backend fsdp2 --tp 2 --ring 2",
    "fsdp2, two data ranks x tp 2": "--backend fsdp2 --tp 2 --shuffle-inputs",
}
COMPILED = ", compiled"
OUT_OF_TIME = "not run: out of time"
LISTS = {
    1: ONE_GPU,
    **{
        number: {
            f"{name}{suffix}": flags + " --compile" * bool(suffix)
            for suffix in ("", COMPILED)
            for name, flags in rows.items()
        }
        for number, rows in ((2, ALONE | TWO_GPUS), (4, ALONE | FOUR_GPUS))
    },
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
    "speed a GPU",
    "loss from one GPU",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    name: str
    error: str = ""
    num_gpus: int = 1
    statistics: Statistics | None = None
    records: Sequence[PassRecord] = ()  # records with a loss

    @property
    def tokens_per_second(self) -> float | None:
        speed: float | None = self.statistics.real_tokens_per_second if self.statistics else None
        return speed


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-gpus", type=int, default=1, choices=LISTS)
    parser.add_argument("--only", default="", help="configurations whose name matches this regular expression")
    parser.add_argument("--limit", type=float, default=150, help="seconds for one configuration")
    parser.add_argument("--total", type=float, default=540, help="seconds for all; what does not fit is not begun")
    parser.set_defaults(out=Path("logs/configurations"))
    given, replay_arguments = parser.parse_known_args()
    began = time.monotonic()
    answers = Answers(given, "configurations", more=replay_arguments)
    rows: list[Row] = []
    for name, flags in LISTS[given.num_gpus].items():
        if not re.search(given.only, name):
            continue
        num_gpus = 1 if name.partition(COMPILED)[0] in ALONE else given.num_gpus
        logs = given.out / name.replace(",", "").replace(" ", "-")
        typed = [*shlex.split(flags), *replay_arguments, "--quiet", "--log-folder", str(logs)]
        left = given.total - (time.monotonic() - began)
        error = answers.known.get(name, OUT_OF_TIME)
        if name not in answers.known and left >= 20:
            ended = _replay([*_launcher(num_gpus, flags), *typed], min(given.limit, left))
            if ended.exit_code is not None or left >= given.limit:
                stopped = f"stopped after {given.limit:.0f} s"
                error = {0: "", None: stopped}.get(ended.exit_code, f"exit code {ended.exit_code}")
                answers.keep(name, error)
        rows.append(_row(name, num_gpus, logs, error))
        print(markdown([_cells(rows[-1], rows), []]).splitlines()[0], flush=True)
    print(f"\n{answers.machine}\n\n{markdown([COLUMNS, *(_cells(row, rows) for row in rows)])}")
    return 0


def _launcher(num_gpus: int, flags: str) -> list[str]:
    if num_gpus == 1:
        return ["replay"]
    if "fsdp2" in flags:
        return ["torchrun", "--nproc-per-node", str(num_gpus), "replay"]
    return ["deepspeed", f"--num_gpus={num_gpus}", "replay"]


def _replay(command: list[str], limit: float) -> Ended:
    print(f"$ {shlex.join(command)}", flush=True)
    ended = run(command, limit=limit)
    if ended.exit_code:
        print("\n".join(ended.output.splitlines()[-15:]), flush=True)
    return ended


def _row(name: str, num_gpus: int, logs: Path, error: str) -> Row:
    if error:
        return Row(name=name, error=error)
    records = read_records(max(logs.iterdir()))
    good = [record for record in records if record.result.loss is not None]
    return Row(name=name, num_gpus=num_gpus, statistics=summarize(records), records=good)


def _cells(row: Row, rows: list[Row]) -> tuple[str, ...]:
    if row.error:
        return (row.name, row.error, *["-"] * (len(COLUMNS) - 2))
    statistics, records = row.statistics, row.records
    assert statistics is not None

    def milliseconds(phase: str) -> str:
        return f"{statistics.phases[phase].median_seconds * 1e3:.1f}" if phase in statistics.phases else "-"

    return (
        row.name,
        f"{statistics.num_counted} of {statistics.num_passes}",
        milliseconds("forward"),
        milliseconds("backward"),
        f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "-",
        f"{statistics.highest_peak.value / 2**30:.1f}" if statistics.highest_peak else "-",
        f"{statistics.wait_share:.1%}" if statistics.wait_share is not None else "-",
        f"{records[0].result.loss:.4f}",
        f"{sum(record.result.loss or 0 for record in records) / len(records):.4f}",
        next((f"{record.result.grad_norm:.4f}" for record in records if record.result.grad_norm is not None), "-"),
        _speed_a_gpu(row, rows),
        _loss_difference(row, rows[0]),
    )


def _speed_a_gpu(row: Row, rows: list[Row]) -> str:
    suffix = COMPILED if row.name.endswith(COMPILED) else ""
    alone = f"{'fsdp2' if 'fsdp2' in row.name else 'deepspeed ZeRO 1'}, one GPU{suffix}"
    speeds = [other.tokens_per_second for other in rows if other.name == alone and other.tokens_per_second]
    if not speeds or row.tokens_per_second is None:
        return "-"
    return f"{row.tokens_per_second / row.num_gpus / speeds[0]:.2f}"


def _loss_difference(row: Row, first: Row) -> str:
    expected = {record.source: record.result.loss for record in first.records}
    differences = [
        abs((record.result.loss or 0) / loss - 1) for record in row.records if (loss := expected.get(record.source))
    ]
    return f"{max(differences):.1e} ({len({r.source for r in row.records} & set(expected))})" if differences else "-"
