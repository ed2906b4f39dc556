"""Declare `replay compare`: read the logs, compare each with the first, print and draw the result."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer

from actor_init.spec import USER_FUNCTION
from replay.options.option_parsing import CommandAction, json_option
from replay.options.spec import check_log

STOCK = "stock"


def compare(
    operands: list[str] = typer.Argument(  # noqa: B008
        help="Folders that runs left in logs/, or that hold one run each. The first is the reference. After one log: "
        "`stock` or FILE.py:FUNCTION for other code of the model, python=PATH for another environment, or an option "
        "and its value, such as attention=eager. Then the log's first wrong pass is replayed again, traced, as it was "
        "and as each of them says, and these runs are compared.",
        metavar="LOG LOG|VARIANT...",
    ),
    threshold: float = typer.Option(
        0.05,
        metavar="X",
        help="Exit with 1 if a loss, a row's log-probs or a gradient norm differs by more than this share of the "
        "reference's. Time and memory are shown, and decide nothing.",
    ),
    plot: Path | None = typer.Option(  # noqa: B008
        None, metavar="FILE", help="Draw losses and differences, as out.png (needs matplotlib)."
    ),
    json: bool = json_option(),
    full_names: bool = typer.Option(False, "--full-names", help="Print names of captures whole, not as `rank0 #4`."),
) -> CommandAction:
    """Compare runs: losses, log-probs, gradient norms, time, memory.

    Input by input. The runs must do the same work: the same model, weights, inputs and loss. Other code of --model
    or --loss, and another --window, are compared too, and named first. Exit code 0: within the threshold; 1: beyond
    it; 2: not comparable, with the reason.
    """
    return partial(_compare, operands, threshold, plot, json, full_names=full_names)


def _compare(operands: Sequence[str], threshold: float, plot: Path | None, as_json: bool, *, full_names: bool) -> int:
    variants = [word for word in operands[1:] if is_variant(word)]
    logs = [word for word in operands if word not in variants]
    for log in logs:
        check_log(Path(log))
    from replay.commands.compare.comparing import compare
    from replay.comparison.text import print_comparison
    from replay.output.printing import print_json

    if plot is not None:
        from replay.comparison.plot import check_plot, draw

        check_plot(plot)
    comparison = compare(*logs, variants=variants, threshold=threshold)
    if plot is not None:
        draw(plot, comparison)
    if as_json:
        print_json(comparison)
    else:
        print_comparison(comparison, written=[plot] if plot else [], full_names=full_names)
    return comparison.exit_code


def is_variant(word: str) -> bool:
    """Tell whether a word of the command line means other code or another option, and not a log."""
    return not Path(word).exists() and (word == STOCK or "=" in word or USER_FUNCTION.fullmatch(word) is not None)
