"""What is said of a run: plain in a file, whole rows, the numbers that were measured."""

import io
import os
import pty
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from actor_init.declarations.backends import BACKENDS
from replay.commands.inspect.inspection import Inspection, KindFacts, ValueSpread
from replay.commands.inspect.text import print_inspection
from replay.output.printing import open_console, print_pairs
from replay.output.text import (
    Pairs,
    describe_engine,
    format_gibibytes,
    format_milliseconds,
    format_table,
    have_distinct_short_names,
)
from replay.resolution.selection import Selection
from replay.runlog.records import PassRecord
from replay.runlog.run_file import RunFile, RunStart, RunWork
from replay.runner.result import Run
from replay.runner.text import Console
from tests.helpers.made_records import GIB, cost, record
from tests.helpers.made_time import Clock

LONG = "actor_inputs_rank0_20260301_091244_430740_" + "0" * 150 + ".pkl"
ALL_REPLAYED = Selection(inputs=[], num_left_out_passes=0, num_left_over=0, damaged=[], dealing="")
START = RunStart(
    started="2026-03-01T09:12:44+00:00",
    command="replay",
    spec={},
    resolved=[],
    facts={},
    work=RunWork(weights="", config={}),
    inputs=ALL_REPLAYED.describe(),
    memory_kind="cuda allocator",
    world_size=0,
    devices=[],
    versions={},
)


def print_run(
    records: list[PassRecord],
    selection: Selection = ALL_REPLAYED,
    *,
    quiet: bool = False,
    full_names: bool = False,
    verdict: Pairs | None = None,
) -> str:
    file = io.StringIO()
    console = Console(quiet=quiet, full_names=full_names, file=file)
    console.print_header({"model": "llama, 2 layers", "device": "1 x CPU"}, num_passes=len(records))
    for index in dict.fromkeys(run_record.index for run_record in records):
        console.show_pass([run_record for run_record in records if run_record.index == index])
    console.finish(
        Run(folder=Path("logs/x"), file=RunFile(status="finished", start=START), records=records),
        selection,
        verdict=verdict or [],
        saved_lines=[],
        missing_lines=[],
    )
    return file.getvalue()


def cells(text: str, first: str) -> list[str]:
    """The cells of the line that begins with `first`."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return next(line for line in lines if line[0] == first)


def test_ddp_has_no_stage() -> None:
    assert [describe_engine(backend, 2) for backend in BACKENDS] == [
        "deepspeed, ZeRO stage 2",
        "fsdp2, ZeRO stage 2",
        "ddp",
    ]


def test_a_pass_is_a_row_with_its_numbers() -> None:
    first_record = record(0, 0.0312, 1.055, grad_norm=12.3456, new_graphs=1)
    text = print_run([first_record, record(1)])
    assert cells(text, "pass") == [
        *("pass", "input", "rows", "padded", "real", "fwd ms", "bwd ms", "peak GiB", "loss", "grad norm", "note"),
    ]
    row = ["1", "input_0.pkl", "2", "100", "80", "31.2", "1,055.0", "2.000", "1.50000", "12.35", "compiled"]
    assert cells(text, "1") == row


def test_the_summary_holds_what_was_measured() -> None:
    text = print_run(
        [
            record(0, warmup=True),
            record(1),
            record(2, 0.3, 0.4, phases={"forward": cost(0.3, 12.5), "backward": cost(0.4, 4.0)}),
        ]
    )
    assert cells(text, "passes measured") == ["passes measured", "2 of 3; excluded: 1 warm-up"]
    assert cells(text, "forward") == ["forward", "200.0", "100.0", "290.0", "12.50"]
    assert cells(text, "backward") == ["backward", "300.0", "100.0", "390.0", "4.000"]
    assert cells(text, "speed") == ["speed", "160 real tokens/s"]
    assert cells(text, "padding") == [
        "padding",
        "20.0% of the inputs' tokens; 0.0% of the ranks' time went to padding that was fed",
    ]
    assert cells(text, "slowest") == ["slowest", "700.0 ms, pass 3, rank 0, input_2.pkl"]
    assert cells(text, "peak") == ["peak", "12.50 GiB, cuda allocator, pass 3, rank 0, input_2.pkl"]
    assert cells(text, "log") == ["log", "logs/x"]


def test_a_row_is_one_line_and_no_name_is_cut() -> None:
    text = print_run([record(0, source=LONG), record(1)])
    rows = [line for line in text.splitlines() if LONG in line]
    assert len([row for row in rows if row.startswith("   1  ")]) == 1
    assert "…" not in text


def test_words_stand_left_and_numbers_right_however_wide_a_character_is() -> None:
    columns = {
        "kernel": ["flash\x1b", "注意力"],
        "ms": ["1,250.0", "-"],
        "share": ["12.5%", "nan"],
        "diff": ["1.5e-08", "inf"],
        "rows": ["1 / 2.5 / 4", "2"],
        "note": ["", "a"],
    }
    assert format_table(columns) == [
        "kernel          ms  share     diff         rows  note",
        r"flash\x1b  1,250.0  12.5%  1.5e-08  1 / 2.5 / 4",
        "注意力           -    nan      inf            2  a",
    ]


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1", "COLUMNS": "20"}, {"TERM": "xterm-256color"}])
def test_in_a_file_there_are_no_control_characters(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    text = print_run(
        [record(0, error="[red]no[/red]\n\x1b[31mnot so\r", error_type="RuntimeError", source=LONG), record(1)]
    )
    assert set(re.findall(r"[\x00-\x1f\x7f]", text)) == {"\n"}
    assert "[red]no[/red]" in text


def test_in_a_file_each_pass_has_a_line_while_it_runs() -> None:
    text = print_run([record(0, warmup=True), record(1)])
    assert "pass 1 of 2: forward 100.0 ms, backward 200.0 ms, loss 1.50000, warm-up, input_0.pkl\n" in text
    assert "pass 2 of 2: forward 100.0 ms, backward 200.0 ms, loss 1.50000, input_1.pkl\n" in text


def test_captures_have_short_names_and_the_table_of_passes_fits_a_hundred_columns() -> None:
    names = [f"actor_inputs_rank{rank}_20260301_091244_430740_0000012{rank}.pkl" for rank in (0, 1)]
    old = "actor_inputs_rank0_20260301_091244_430740.pkl"
    large = {"padded_tokens": 131_072, "real_tokens": 131_072, "wait_seconds": 12.5, "grad_norm": 0.012345}
    records = [record(0, 11.0, 22.0, rank=rank, source=names[rank], warmup=True, **large) for rank in (0, 1)]
    records += [record(1, 11.0, 22.0, rank=rank, source=old, new_graphs=2, **large) for rank in (0, 1)]
    text = print_run(records)
    rows = [line for line in text.splitlines() if line.startswith(("pass  ", "   1  ", "   2  "))]
    assert max(map(len, rows)) <= 100
    assert [name in rows[1] + rows[2] for name in ("rank0 #120", "rank1 #121")] == [True, True]
    assert "rank0 091244_430740" in rows[3]
    assert cells(print_run([*records, record(2, source=names[0])]), "slowest")[1].endswith("rank 0, rank0 #120")
    assert names[0] in print_run(records, full_names=True)


def test_the_answer_comes_before_the_table_of_passes() -> None:
    text = print_run(
        [record(0), record(1, error="no", error_type="RuntimeError")], verdict=[("verdict", "DIFFERS: loss")]
    )
    order = [text.index(f"\n{word} ") for word in ("verdict", "failed", "slowest", "pass  input", "passes measured")]
    assert order == sorted(order)


def test_a_spread_of_more_than_a_tenth_is_warned_of() -> None:
    assert "\nspread " not in print_run([record(0), record(1)])
    text = print_run([record(index, 0.1 + 0.05 * index, 0.1) for index in range(4)])
    assert cells(text, "spread")[1].startswith("times vary a lot (IQR 27 % of the median): ")


def test_on_a_terminal_the_verdict_has_a_colour() -> None:
    for outcome, colour in (("REPRODUCED", "32"), ("DIFFERS", "1;31"), ("CANNOT TELL", "33")):
        file = Terminal()
        print_pairs(open_console(file), [("verdict", f"{outcome}: x")])
        assert f"\x1b[{colour}mverdict    {outcome}: x" in file.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_quiet_prints_the_summary_alone() -> None:
    text = print_run([record(0), record(1)], quiet=True)
    assert text.splitlines()[0].startswith("slowest    ")
    assert text.splitlines()[1] == "passes measured  2 of 2"
    assert "loss" not in text


def test_several_ranks_show_their_lengths_and_who_waited() -> None:
    records = [record(0, rank=rank, real_tokens=60 + rank, wait_seconds=0.1 * rank) for rank in (0, 1)]
    text = print_run(records)
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.startswith("   1  ")]
    assert [row[:6] for row in rows] == [["1", str(k), "input_0.pkl", "2", "100", str(60 + k)] for k in (0, 1)]
    assert [row[8] for row in rows] == ["0.00", "100.0"]
    assert cells(text, "waiting") == ["waiting", "16.7% of the ranks' time, for the slowest rank"]


def test_a_failed_pass_is_marked_and_explained() -> None:
    failed = record(1, phases={}, loss=None, error="CUDA out of\nmemory", error_type="OutOfMemoryError")
    text = print_run([record(0), failed])
    assert cells(text, "2")[-1] == "failed: OutOfMemoryError"
    assert cells(text, "failed")[1] == "pass 2, rank 0, input_1.pkl: OutOfMemoryError: CUDA out of memory"


def test_without_a_counted_pass_that_is_said_instead_of_numbers() -> None:
    text = print_run([record(0, warmup=True)])
    assert cells(text, "passes measured")[1].endswith("so there are no statistics. Try: more inputs, or --warmup 0")
    for name in ("median ms", "speed", "slowest"):
        assert name not in text


def test_what_was_not_replayed_is_said() -> None:
    damaged = [(Path("inputs/bad.pkl"), "bad.pkl: truncated")]
    selection = Selection(inputs=[], num_left_out_passes=4, num_left_over=1, damaged=damaged, dealing="")
    text = print_run([record(0)], selection, quiet=True)
    lines = text.splitlines()
    assert "damaged    bad.pkl: truncated" in lines
    assert any(line.startswith("excluded   4 passes that --passes does not select (by default") for line in lines)
    assert "left over  1 input: the data ranks hold unequal numbers" in lines
    assert "damaged    1 file, named above" in lines


def test_on_a_terminal_a_pass_overwrites_the_line_of_the_one_before() -> None:
    def two_passes(console: Console) -> None:
        console.print_header({}, num_passes=2)
        console.show_pass([record(0)])
        console.show_pass([record(1)])

    assert re.findall(rb"([#.]+ \d of \d)[^\n]*?\r", on_a_terminal(two_passes)) == [
        b"##########.......... 1 of 2",
        b"#################### 2 of 2",
    ]


def test_on_a_terminal_the_weights_that_are_filled_are_counted() -> None:
    clock = Clock()

    def fill_in_ten_seconds(console: Console) -> None:
        clock.now += 10.0
        console.show_opening(20_000_000, 80_000_000)

    text = on_a_terminal(fill_in_ten_seconds, clock)
    assert re.match(rb"#####\.{15} 20 of 80, 30 s left  million parameters filled +\r", text)


def on_a_terminal(write: Callable[[Console], None], clock: Clock | None = None) -> bytes:
    """What a terminal receives, to its end: one read may return the beginning of what was written."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        write(Console(quiet=False, file=terminal, clock=(clock or Clock()).read))
        terminal.write("END")
        terminal.flush()
        received = b""
        while not received.endswith(b"END"):
            received += os.read(ours, 100_000)
    os.close(ours)
    return received.removesuffix(b"END")


def test_short_names_are_whole_where_two_captures_would_share_one() -> None:
    name, other = (f"actor_inputs_rank0_{day}_012150_163029_00000004.pkl" for day in ("20261121", "20261122"))
    assert have_distinct_short_names([name, name])
    assert not have_distinct_short_names([name, other])


def test_the_facts_of_a_folder_are_a_table() -> None:
    kind = KindFacts(
        name="train",
        num_passes=32,
        ranks=[0, None],
        rows=ValueSpread(least=2, median=2, most=2),
        row_length=ValueSpread(least=61, median=140.5, most=311),
        padded_tokens=9344,
        real_tokens=7008,
        action_tokens=4211,
    )
    facts = Inspection(
        folder=Path("inputs/sample"),
        model="llama, layers 2",
        num_by_format={"of format 1": 32, "damaged": 1},
        first_time="a",
        last_time="b",
        versions=["torch 2.13.0"],
        kinds=[kind],
        damaged=[(Path("x.pkl"), "x.pkl: truncated")],
    )
    file = io.StringIO()
    print_inspection(facts, file)
    text = file.getvalue()
    row = ["train", "32", "0, unknown", "2", "61 / 140.5 / 311", "9,344", "7,008", "75.0%", "4,211"]
    assert cells(text, "train") == row
    assert cells(text, "files") == ["files", "32 of format 1, 1 damaged"]
    assert cells(text, "time") == ["time", "a to b"]
    assert cells(text, "damaged") == ["damaged", "x.pkl: truncated"]


def test_sizes_keep_their_digits() -> None:
    peaks = {"forward": cost(0.00512, 123.456), "backward": cost(0.01, 0.0126)}
    row = cells(print_run([record(0, phases=peaks), record(1, phases={"forward": cost(0.01, 0.0126)})]), "1")
    assert row[5:8] == ["5.12", "10.0", "123.46"]
    assert format_milliseconds(12.3456) == "12,345.6"
    assert (format_gibibytes(0.0126 * GIB), format_gibibytes(12.5 * GIB)) == ("0.013", "12.50")
    assert GIB == 1024**3
