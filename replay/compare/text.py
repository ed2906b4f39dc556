"""Write a comparison of runs as text: which runs, how they differ, how far their numbers are apart, the verdict."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from replay.compare.differences import Comparison, Quantity
from replay.report.text import Columns, Pairs, counted, gibibytes, milliseconds, short_names
from replay.runlog.reader import PastRun
from replay.tracing.trace_file import Kind

if TYPE_CHECKING:  # logs without traces are compared without torch
    from replay.tracing.first_difference import FirstDifference, Parted


UNITS = {"seconds": "ms", "bytes": "GiB"}


def compared_runs(names: Sequence[str], runs: Sequence[PastRun], comparisons: Sequence[Comparison]) -> Pairs:
    pairs = [(names[0], f"{runs[0].folder}: the reference")]
    for name, run, one in zip(names[1:], runs[1:], comparisons, strict=True):
        alone = {names[0]: one.num_only_in_reference, name: one.num_only_in_other}
        rest = "".join(f", {number} in {whose} alone" for whose, number in alone.items() if number)
        pairs.append((name, f"{run.folder}: {counted(one.num_matched, 'matched pass')}{rest}"))
    return pairs


def other_work(names: Sequence[str], comparisons: Sequence[Comparison]) -> Pairs:
    """Say in what each run did other work than the reference and was compared all the same."""
    named = zip(names[1:], comparisons, strict=True)
    return [("other work", f"{name}: {'; '.join(one.told)}") for name, one in named if one.told]


def setting_table(names: Sequence[str], differing: Mapping[str, Sequence[str]]) -> Columns:
    rows = differing.values()
    return {"setting": list(differing), **{name: [row[i] for row in rows] for i, name in enumerate(names)}}


def difference_table(names: Sequence[str], comparisons: Sequence[Comparison], *, full_names: bool = False) -> Columns:
    """Make a row for each run and quantity; means are over what was matched."""
    named = zip(names[1:], comparisons, strict=True)
    rows = [(name, quantity) for name, one in named for quantity in (*one.results, *one.costs)]
    quantities = [quantity for _, quantity in rows]
    sources = [quantity.source or "-" for quantity in quantities]
    return {
        "run": [name for name, _ in rows],
        "quantity": [f"{q.name} {UNITS[q.unit]}" if q.unit else q.name for q in quantities],
        "matched": [str(q.num_matched) for q in quantities],
        f"mean in {names[0]}": [_value(q, q.mean_reference) for q in quantities],
        "mean": [_value(q, q.mean_other) for q in quantities],
        "max diff": [_value(q, q.max_difference, "{:.3g}") for q in quantities],
        "mean diff": [_value(q, q.mean_difference, "{:.3g}") for q in quantities],
        "max relative": [f"{q.max_relative:.3g}" for q in quantities],
        "at input": [source if full_names else short_names(source) for source in sources],
    }


def _value(quantity: Quantity, value: float, form: str = "{:.6g}") -> str:
    match quantity.unit:
        case "seconds":
            return milliseconds(value)
        case "bytes":
            return gibibytes(value)
        case _:
            return form.format(value)


def remarks(names: Sequence[str], comparisons: Sequence[Comparison]) -> Pairs:
    pairs: Pairs = []
    for name, one in zip(names[1:], comparisons, strict=True):
        pairs += [("note", f"{name}: {note}") for note in one.notes]
        pairs += [
            ("note", f"{name}: {quantity.name} is not finite at {counted(quantity.num_not_finite, 'point')}")
            for quantity in one.results
            if quantity.num_not_finite
        ]
    return pairs


def verdicts(names: Sequence[str], comparisons: Sequence[Comparison], threshold: float) -> Pairs:
    pairs: Pairs = []
    for name, one in zip(names[1:], comparisons, strict=True):
        far = [quantity for quantity in one.results if quantity.max_relative > threshold]
        near = [quantity for quantity in one.results if quantity not in far]
        said = [f"{quantity.name} by {quantity.max_relative:.3g}" for quantity in far or near]
        text = f"{name}: {', '.join(said)} at most, threshold {threshold:g}"
        pairs.append(("beyond" if far else "within", text))
    return pairs


def partings(names: Sequence[str], parted: "Parted", *, full_names: bool = False) -> Pairs:
    lines = [f"{names[number + 1]}: {parting(one)}" for number, one in parted.items()]
    return [("first diff", line if full_names else short_names(line)) for line in lines]


def parting(one: "FirstDifference | None") -> str:
    if one is None:
        return "no traced tensor leaves its bound"
    place = [f"row {one.row}"] if one.row is not None else []
    place += [f"token {one.token}"] if one.token is not None else []
    where = f" at {' '.join([*([one.source] if one.source else []), *place])}"
    by = f"{one.relative:.3g} of it, bound {one.bound:.2g}"
    if one.kind is Kind.INPUT:
        by = f"{one.relative:.3g} of the tokens differ"
    behind = f"{one.num_following_beyond} of the {counted(one.num_following, 'tensor')} behind it leave theirs too"
    return f"{one.kind}, {one.name} {one.what}{where}: {by}; {behind}"
