"""Write a comparison of runs as text: which runs, how they differ, how far their numbers are apart, the verdict."""

from typing import TYPE_CHECKING

from replay.comparison.comparison import Comparison
from replay.comparison.differences import Quantity
from replay.output.text import Columns, Pairs, format_gibibytes, format_milliseconds, pluralise, shorten_names
from replay.tracing.trace_file import TensorKind

if TYPE_CHECKING:  # logs without traces are compared without torch
    from replay.tracing.first_difference import FirstDifference
from collections.abc import Sequence
from pathlib import Path

from replay.output.printing import open_console, print_line, print_pairs, print_table

UNITS = {"seconds": "ms", "bytes": "GiB"}


def compared_runs(comparison: Comparison) -> Pairs:
    reference, *others = comparison.runs
    pairs = [(comparison.names[0], f"{reference.folder}: the reference")]
    for run, (name, differences) in zip(others, comparison.named, strict=True):
        alone = {comparison.names[0]: differences.num_only_in_reference, name: differences.num_only_in_other}
        rest = "".join(f", {number} in {whose} alone" for whose, number in alone.items() if number)
        pairs.append((name, f"{run.folder}: {pluralise(differences.num_matched, 'matched pass')}{rest}"))
    return pairs


def other_work(comparison: Comparison) -> Pairs:
    """Say in what each run did other work than the reference and was compared all the same."""
    named = comparison.named
    return [("other work", f"{name}: {'; '.join(differences.told)}") for name, differences in named if differences.told]


def setting_table(comparison: Comparison) -> Columns:
    rows = comparison.settings.values()
    values = {name: [row[number] for row in rows] for number, name in enumerate(comparison.names)}
    return {"setting": list(comparison.settings), **values}


def difference_table(comparison: Comparison, *, full_names: bool = False) -> Columns:
    """Make a row for each run and quantity; means are over what was matched."""
    rows = [
        (name, quantity)
        for name, differences in comparison.named
        for quantity in (*differences.results, *differences.costs)
    ]
    quantities = [quantity for _, quantity in rows]
    sources = [quantity.source or "-" for quantity in quantities]
    return {
        "run": [name for name, _ in rows],
        "quantity": [f"{q.name} {UNITS[q.unit]}" if q.unit else q.name for q in quantities],
        "matched": [str(q.num_matched) for q in quantities],
        f"mean in {comparison.names[0]}": [_value(q, q.mean_reference) for q in quantities],
        "mean": [_value(q, q.mean_other) for q in quantities],
        "max diff": [_value(q, q.max_difference, "{:.3g}") for q in quantities],
        "mean diff": [_value(q, q.mean_difference, "{:.3g}") for q in quantities],
        "max relative": [f"{q.max_relative:.3g}" for q in quantities],
        "at input": [source if full_names else shorten_names(source) for source in sources],
    }


def _value(quantity: Quantity, value: float, form: str = "{:.6g}") -> str:
    match quantity.unit:
        case "seconds":
            return format_milliseconds(value)
        case "bytes":
            return format_gibibytes(value)
        case _:
            return form.format(value)


def remarks(comparison: Comparison) -> Pairs:
    pairs: Pairs = []
    for name, differences in comparison.named:
        pairs += [("note", f"{name}: {note}") for note in differences.notes]
        pairs += [
            ("note", f"{name}: {quantity.name} is not finite at {pluralise(quantity.num_not_finite, 'point')}")
            for quantity in differences.results
            if quantity.num_not_finite
        ]
    return pairs


def verdicts(comparison: Comparison) -> Pairs:
    pairs: Pairs = []
    for name, differences in comparison.named:
        far = [quantity for quantity in differences.results if quantity.max_relative > comparison.threshold]
        near = [quantity for quantity in differences.results if quantity not in far]
        said = [f"{quantity.name} by {quantity.max_relative:.3g}" for quantity in far or near]
        text = f"{name}: {', '.join(said)} at most, threshold {comparison.threshold:g}"
        pairs.append(("beyond" if far else "within", text))
    return pairs


def partings(comparison: Comparison, *, full_names: bool = False) -> Pairs:
    lines = [f"{comparison.names[number + 1]}: {parting(first)}" for number, first in comparison.parted.items()]
    return [("first diff", line if full_names else shorten_names(line)) for line in lines]


def parting(one: "FirstDifference | None") -> str:
    if one is None:
        return "no traced tensor leaves its bound"
    place = [f"row {one.row}"] if one.row is not None else []
    place += [f"token {one.token}"] if one.token is not None else []
    where = f" at {' '.join([*([one.source] if one.source else []), *place])}"
    by = f"{one.relative:.3g} of it, bound {one.bound:.2g}"
    if one.kind is TensorKind.INPUT:
        by = f"{one.relative:.3g} of the tokens differ"
    behind = f"{one.num_following_beyond} of the {pluralise(one.num_following, 'tensor')} behind it leave theirs too"
    return f"{one.kind}, {one.name} {one.what}{where}: {by}; {behind}"


# Print the answer to `replay compare`.


def print_comparison(comparison: Comparison, *, written: Sequence[Path], full_names: bool = False) -> None:
    """Print the answer to `replay compare`; docs/compare.md shows one."""
    out = open_console()
    print_pairs(out, other_work(comparison))
    print_pairs(out, compared_runs(comparison))
    print_line(out)
    if comparison.settings:
        print_table(out, setting_table(comparison))
        print_line(out)
    print_table(out, difference_table(comparison, full_names=full_names))
    print_line(out)
    print_pairs(out, remarks(comparison))
    print_pairs(out, partings(comparison, full_names=full_names))
    print_pairs(out, verdicts(comparison))
    print_pairs(out, [("written", str(path)) for path in written])
