"""Compute from a log what dealing the same inputs by length to the data ranks would save.

    torchrun --nproc-per-node 2 replay --backend fsdp2 --shuffle-inputs --log-folder logs
    python benchmarks/dealing.py logs/20261123-101500-replay

Data ranks of one pass take as long as the one with most work. So the seconds of a pass (of the slowest rank in each
phase) are fitted to the shape of the input with most tokens, as `replay worst` does; passes that are left out of the
statistics are not fitted. By that fit it prints what the passes take as they were dealt, what they would take if
inputs of like length shared a pass (`--order worst` deals so), and what they would take if work could be shared out
evenly. The measured seconds are of the same passes, but for those left out.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from replay.profiling.prediction import Cost, CostModel, InputShape, MeasuredPass, RowLayout, infer_row_layout
from replay.runlog.reader import read_records
from replay.runlog.records import PassRecord
from replay.runlog.summary import find_reason_to_leave_out

PHASES = ("forward", "backward")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="the log folder of a run on several data ranks")
    given = parser.parse_args()
    records = read_records(given.log)
    passes: defaultdict[int, dict[int, PassRecord]] = defaultdict(dict)
    for record in records:
        if record.error is None:
            passes[record.index].setdefault(record.data_rank, record)
    num_ranks = max(map(len, passes.values()))
    whole = [list(ranks.values()) for ranks in passes.values() if len(ranks) == num_ranks]
    if num_ranks == 1:
        parser.error(f"{given.log} has one data rank. Replay with two or more")
    print("\n".join(report(whole)))
    return 0


def report(passes: Sequence[Sequence[PassRecord]]) -> list[str]:
    """Return the lines to print, of passes with a record for each data rank."""
    every = [record for ranks in passes for record in ranks]
    rows = infer_row_layout((_shape(record), record.input.fed_tokens) for record in every)
    measured = [_measured(ranks, rows) for ranks in passes if find_reason_to_leave_out(ranks) is None]
    model = CostModel.fit(measured)
    seconds = {id(record): _predicted(model, _shape(record)) for record in every}
    num_ranks = len(passes[0])
    dealt = sum(max(seconds[id(record)] for record in ranks) for ranks in passes)
    in_order = sorted(seconds.values(), reverse=True)
    by_length = sum(in_order[::num_ranks])
    even = sum(in_order) / num_ranks
    took = sum(one.cost.total_seconds for one in measured)
    fit = sum(_predicted(model, one.shape) for one in measured)
    off = "not known" if model.error is None else f"at most {model.error.most_of_seconds:.1%} of a pass, held out"
    return [
        f"{len(passes)} passes of {num_ranks} data ranks; {len(measured)} fitted: measured {took:.2f} s, by the fit "
        f"{fit:.2f} s; error {off}",
        f"as dealt   {dealt:.2f} s",
        f"by length  {by_length:.2f} s: {1 - by_length / dealt:.1%} less",
        f"evenly     {even:.2f} s: {1 - even / dealt:.1%} less",
    ]


def _measured(ranks: Sequence[PassRecord], rows: RowLayout) -> MeasuredPass:
    most = max(ranks, key=lambda record: _shape(record).count_fed_tokens(rows))
    phases = [name for name in PHASES if name in most.cost.phases]
    return MeasuredPass(
        shape=_shape(most),
        fed_tokens=most.input.fed_tokens,
        cost=Cost(
            seconds={name: max(record.cost.phases[name].seconds for record in ranks) for name in phases},
            peaks={
                name: float(max(record.cost.phases[name].peak_allocated_bytes for record in ranks)) for name in phases
            },
        ),
    )


def _shape(record: PassRecord) -> InputShape:
    return InputShape(
        number=record.index,
        source=record.source,
        trains=bool(record.input.trains),
        rows=record.input.rows,
        row_length=record.input.padded_tokens // record.input.rows,
        documents=record.input.row_tokens,
        action_tokens=sum(record.result.row_action_tokens),
    )


def _predicted(model: CostModel, shape: InputShape) -> float:
    cost = model.predict(shape)
    assert cost is not None, "every kind of pass was fitted"
    return cost.total_seconds


if __name__ == "__main__":
    sys.exit(main())
