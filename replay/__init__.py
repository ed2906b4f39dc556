"""Replay captured micro-batches, and read what came of it, from Python.

    import replay

    run = replay.run("inputs/my-run", backend="fsdp2", max_inputs=8)
    assert run.verdict.reproduced, run.verdict.explain()

docs/api.md lists every function. A function imports what it needs when it is first used, so that `import replay` takes
milliseconds and runs where only `capture` is installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actor_init.spec import UsageError as UsageError
    from capture.file_format.micro_batch import CaptureError as CaptureError
    from replay.api.captures import Capture as Capture
    from replay.api.captures import captures as captures
    from replay.api.diagnose import diagnose as diagnose
    from replay.api.logs import open as open
    from replay.api.mismatch import mismatch as mismatch
    from replay.api.run import ReplayedRun as ReplayedRun
    from replay.api.running import RunFailedError as RunFailedError
    from replay.api.running import run as run
    from replay.api.upgrade import check_upgrade as check_upgrade
    from replay.commands.compare.comparing import compare as compare
    from replay.commands.doctor.report import examine_machine as doctor
    from replay.commands.inspect.inspection import inspect_folder as inspect
    from replay.commands.minimise.api import minimise as minimise
    from replay.commands.parity.api import parity as parity
    from replay.commands.recompiles.api import recompiles as recompiles
    from replay.commands.report.writing import write_report as report
    from replay.commands.scan.api import scan as scan
    from replay.commands.suite.api import suite as suite
    from replay.commands.worst.api import worst as worst
    from replay.comparison.comparison import Comparison as Comparison
    from replay.post_mortem.hang import examine_hang as hang

# The module and the name there of each export.
_EXPORTS = {
    "Capture": ("replay.api.captures", "Capture"),
    "CaptureError": ("capture.file_format.micro_batch", "CaptureError"),
    "Comparison": ("replay.comparison.comparison", "Comparison"),
    "ReplayedRun": ("replay.api.run", "ReplayedRun"),
    "RunFailedError": ("replay.api.running", "RunFailedError"),
    "UsageError": ("actor_init.spec", "UsageError"),
    "captures": ("replay.api.captures", "captures"),
    "check_upgrade": ("replay.api.upgrade", "check_upgrade"),
    "compare": ("replay.commands.compare.comparing", "compare"),
    "diagnose": ("replay.api.diagnose", "diagnose"),
    "doctor": ("replay.commands.doctor.report", "examine_machine"),
    "hang": ("replay.post_mortem.hang", "examine_hang"),
    "inspect": ("replay.commands.inspect.inspection", "inspect_folder"),
    "minimise": ("replay.commands.minimise.api", "minimise"),
    "mismatch": ("replay.api.mismatch", "mismatch"),
    "open": ("replay.api.logs", "open"),
    "parity": ("replay.commands.parity.api", "parity"),
    "recompiles": ("replay.commands.recompiles.api", "recompiles"),
    "report": ("replay.commands.report.writing", "write_report"),
    "run": ("replay.api.running", "run"),
    "scan": ("replay.commands.scan.api", "scan"),
    "suite": ("replay.commands.suite.api", "suite"),
    "worst": ("replay.commands.worst.api", "worst"),
}

__all__ = [
    "Capture",
    "CaptureError",
    "Comparison",
    "ReplayedRun",
    "RunFailedError",
    "UsageError",
    "captures",
    "check_upgrade",
    "compare",
    "diagnose",
    "doctor",
    "hang",
    "inspect",
    "minimise",
    "mismatch",
    "open",
    "parity",
    "recompiles",
    "report",
    "run",
    "scan",
    "suite",
    "worst",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'replay' has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return [*globals(), *_EXPORTS]
