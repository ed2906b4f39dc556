"""Write a comparison of runs as text: which runs, how they differ, how far their numbers are apart, the verdict."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from replay.comparison.comparison import Comparison
from replay.comparison.differences import Quantity
from replay.output.printing import open_console, print_line, print_pairs, print_table
from replay.output.text import Columns, Pairs, format_gibibytes, format_milliseconds, pluralise, shorten_names
from replay.tracing.trace_file import TensorKind

if TYPE_CHECKING:
    # This module needs torch, and logs without traces are compared without torch.
    from replay.tracing.first_difference import FirstDifference

UNITS = {"seconds": "ms", "bytes": "GiB"}


def describe_runs(comparison: Comparison) -> Pairs:
    reference, *others = comparison.runs
    pairs = [(comparison.names[0], f"{reference.folder}: the reference")]
    for run, (name, differences) in zip(others, comparison.by_name, strict=True):
        unmatched = {comparison.names[0]: differences.num_only_in_reference, name: differences.num_only_in_other}
        remaining = "".join(f", {number} in {run_name} alone" for run_name, number in unmatched.items() if number)
        pairs.append((name, f"{run.folder}: {pluralise(differences.num_matched, 'matched pass')}{remaining}"))
    return pairs


def describe_other_work(comparison: Comparison) -> Pairs:
    """Say in what each run did other work than the reference and was compared all the same."""
    return [
        ("other work", f"{name}: {'; '.join(differences.told)}")
        for name, differences in comparison.by_name
        if differences.told
    ]


def make_setting_table(comparison: Comparison) -> Columns:
    rows = comparison.settings.values()
    values = {name: [row[number] for row in rows] for number, name in enumerate(comparison.names)}
    return {"setting": list(comparison.settings), **values}


def make_difference_table(comparison: Comparison, *, full_names: bool = False) -> Columns:
    """Make a row for each run and quantity; means are over what was matched."""
    rows = [
        {
            "run": name,
            "quantity": f"{quantity.name} {UNITS[quantity.unit]}" if quantity.unit else quantity.name,
            "matched": str(quantity.num_matched),
            f"mean in {comparison.names[0]}": _format_value(quantity, quantity.mean_reference),
            "mean": _format_value(quantity, quantity.mean_other),
            "max diff": _format_value(quantity, quantity.max_difference, "{:.3g}"),
            "mean diff": _format_value(quantity, quantity.mean_difference, "{:.3g}"),
            "max relative": f"{quantity.max_relative:.3g}",
            "at input": (quantity.source or "-") if full_names else shorten_names(quantity.source or "-"),
        }
        for name, differences in comparison.by_name
        for quantity in (*differences.results, *differences.costs)
    ]
    return {column: [row[column] for row in rows] for column in rows[0]}


def _format_value(quantity: Quantity, value: float, form: str = "{:.6g}") -> str:
    match quantity.unit:
        case "seconds":
            return format_milliseconds(value)
        case "bytes":
            return format_gibibytes(value)
        case _:
            return form.format(value)


def list_remarks(comparison: Comparison) -> Pairs:
    pairs: Pairs = []
    for name, differences in comparison.by_name:
        pairs += [("note", f"{name}: {note}") for note in differences.notes]
        pairs += [
            ("note", f"{name}: {quantity.name} is not finite at {pluralise(quantity.num_not_finite, 'point')}")
            for quantity in differences.results
            if quantity.num_not_finite
        ]
    return pairs


def describe_verdicts(comparison: Comparison) -> Pairs:
    pairs: Pairs = []
    for name, differences in comparison.by_name:
        far = [quantity for quantity in differences.results if quantity.max_relative > comparison.threshold]
        near = [quantity for quantity in differences.results if quantity not in far]
        quantities = [f"{quantity.name} by {quantity.max_relative:.3g}" for quantity in far or near]
        text = f"{name}: {', '.join(quantities)} at most, threshold {comparison.threshold:g}"
        pairs.append(("beyond" if far else "within", text))
    return pairs


def describe_first_differences(comparison: Comparison, *, full_names: bool = False) -> Pairs:
    lines = [
        f"{comparison.names[number + 1]}: {describe_first_difference(first)}"
        for number, first in comparison.first_differences.items()
    ]
    return [("first diff", line if full_names else shorten_names(line)) for line in lines]


def describe_first_difference(difference: "FirstDifference | None") -> str:
    if difference is None:
        return "no traced tensor leaves its bound"
    place = [difference.source] if difference.source else []
    place += [f"row {difference.row}"] if difference.row is not None else []
    place += [f"token {difference.token}"] if difference.token is not None else []
    size = f"{difference.relative:.3g} of it, bound {difference.bound:.2g}"
    if difference.kind is TensorKind.INPUT:
        size = f"{difference.relative:.3g} of the tokens differ"
    following = pluralise(difference.num_following, "tensor")
    return (
        f"{difference.kind}, {difference.name} {difference.what} at {' '.join(place)}: {size}; "
        f"{difference.num_following_beyond} of the {following} behind it leave theirs too"
    )


def print_comparison(comparison: Comparison, *, written: Sequence[Path], full_names: bool = False) -> None:
    """Print the answer to `replay compare`; docs/compare-and-trace.md shows one."""
    out = open_console()
    print_pairs(out, describe_other_work(comparison))
    print_pairs(out, describe_runs(comparison))
    print_line(out)
    if comparison.settings:
        print_table(out, make_setting_table(comparison))
        print_line(out)
    print_table(out, make_difference_table(comparison, full_names=full_names))
    print_line(out)
    print_pairs(out, list_remarks(comparison))
    print_pairs(out, describe_first_differences(comparison, full_names=full_names))
    print_pairs(out, describe_verdicts(comparison))
    print_pairs(out, [("written", str(path)) for path in written])
