"""Report a matrix of configurations: on the terminal, and in the files of its folder."""

from actor_init.as_json import to_json
from replay.parity.console import ParityProgress
from replay.parity.html import page
from replay.parity.results import MatrixResult
from replay.parity.rows import ParityLog
from replay.parity.shares import shares_of
from replay.report.text import Pairs


def report(log: ParityLog, result: MatrixResult, differences: Pairs, progress: ParityProgress) -> None:
    """Print what is known, and write it into parity.json, parity.html and, with matplotlib, parity.svg."""
    log.write({**to_json(result), "first_differences": [text for _, text in differences]})
    written, note, picture = [log.campaign.path], "", None
    if shares := shares_of(log, result):
        drawn = log.folder / "parity.svg"
        try:
            from replay.compare.plot import draw_parity

            draw_parity(drawn, shares)
        except ImportError:
            note = "no picture: it needs matplotlib. Try: pip install 'micro-replay[plot]'"
        else:
            written.append(drawn)
            picture = drawn.read_text(encoding="utf-8")
    html = log.folder / "parity.html"
    html.write_text(page(log, result, differences, picture), encoding="utf-8")
    progress.finish(result, differences, [*written, html], note)
