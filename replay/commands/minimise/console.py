"""Print the progress and the answer of `replay minimise`: a line a trial, then what is left.

run 1      as typed: IndexError in pass 3, [...].pkl: index out of range in self; 4.1 s
run 2      files, 1 file, 4 rows, 160 tokens: shows it, 1.9 s
"""

from typing import IO

from capture.progress_bar import ProgressBar
from replay.commands.minimise.folder import SmallestFolder
from replay.commands.minimise.trials import MinimiseLog, MinimiseTrial
from replay.output.printing import open_console, print_line, print_pairs
from replay.output.text import Pairs, pluralise


class MinimiseConsole:
    def __init__(self, log: MinimiseLog, file: IO[str]) -> None:
        self._out = open_console(file)
        self._log = log
        limits, num_known = log.plan.limits, log.campaign.num_ended
        print_pairs(
            self._out,
            [
                ("command", log.campaign.command_line),
                ("inputs", pluralise(len(log.plan.sources), "file")),
                ("limits", f"at most {pluralise(limits.num_runs, 'run')}, of {limits.run:g} s each"),
                *([("go on", f"{pluralise(num_known, 'run')} made before")] if num_known else []),
            ],
        )
        print_line(self._out)
        self._bar = ProgressBar(self._out.file)

    def show_progress(self, number: int) -> None:
        self._bar.show(self._log.num_runs, self._log.plan.limits.num_runs, f"trial {number}")

    def show_trial(self, trial: MinimiseTrial) -> None:
        self._bar.clear()
        parts = [f"{trial.what}{_format_size(trial)}", trial.said if trial.num_runs else f"not run: {trial.said}"]
        seconds = f", {trial.seconds:.1f} s" if trial.num_runs else ""
        print_pairs(self._out, [(f"run {self._log.num_runs}", f"{': '.join(parts)}{seconds}")])

    def report_no_failure(self) -> None:
        tries = self._log.plan.limits.tries
        self._bar.clear()
        print_line(self._out)
        print_pairs(
            self._out,
            [
                (
                    "failed",
                    f"not reproducible in {'1 try' if tries == 1 else f'{tries} tries'}: the replay did not fail",
                ),
                ("try", f"{self._log.campaign.continue_command} --tries {2 * tries}"),
            ],
        )

    def report_interruption(self) -> None:
        self._bar.clear()
        print_pairs(self._out, [("go on", self._log.campaign.continue_command)])

    def finish(self, smallest: SmallestFolder, *, is_whole: bool) -> None:
        self._bar.clear()
        log, candidate = self._log, smallest.candidate
        assert log.failure is not None
        left: Pairs = [
            ("failure", (smallest.failure or log.failure).text),
            (
                "left",
                f"{smallest.num_files} of {pluralise(len(log.plan.sources), 'file')}, "
                f"{pluralise(smallest.num_rows, 'row')}, {pluralise(smallest.num_tokens, 'token')}, "
                f"{_format_layers(log, smallest)}, "
                f"{pluralise(candidate.num_processes, 'process')}",
            ),
            ("options", " ".join(candidate.arguments) or "none"),
            ("runs", f"{log.num_runs} in {sum(trial.seconds for trial in log.trials):.0f} s"),
            ("inputs", smallest.redaction) if smallest.redaction else ("inputs", "as captured, not redacted"),
            (
                "repro.py",
                "shows it with torch and transformers alone; weights: " + smallest.standalone.weights
                if smallest.standalone.shows
                else f"none: {smallest.standalone.why}",
            ),
            ("written", str(smallest.folder)),
        ]
        if smallest.failure is None:
            left.append(("failed", f"the last run, there, did not show it, see {smallest.folder / 'output.txt'}"))
        if not is_whole:
            num_runs = 2 * log.plan.limits.num_runs
            left.append(("go on", f"{log.campaign.continue_command} --max-runs {num_runs}: it may get smaller"))
        print_line(self._out)
        print_pairs(self._out, left)


def _format_layers(log: MinimiseLog, smallest: SmallestFolder) -> str:
    number = smallest.candidate.spec.actor.num_layers or log.num_layers
    return "all layers" if number is None else pluralise(number, "layer")


def _format_size(trial: MinimiseTrial) -> str:
    cuts = trial.candidate.cuts
    if not cuts:
        return ""
    rows = sum(len(cut.rows) for cut in cuts)
    tokens = sum(len(cut.rows) * (cut.end - cut.first) for cut in cuts)
    return f", {pluralise(len(cuts), 'file')}, {pluralise(rows, 'row')}, {pluralise(tokens, 'token')}"
