"""Run `replay doctor`: report what works on this machine, and what to type. Needs no GPU and no captures.

    packages, versions and imports
      ok           torch                2.13.0 (>=2.10)
      broken       flash-attn           2.8.3, import: ImportError: [...] undefined symbol: [...]; its [...]

Each check is a line: status, name, finding, consequence and what to type. What may crash or hang runs in processes of
its own, in parallel. Of a replay's dependencies only typer is required, so output goes through plain print.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actor_init.as_json import to_json
from actor_init.declarations.attention import KERNELS
from replay.commands.doctor.hardware import (
    check_compilers,
    check_devices,
    check_launcher,
    check_limits,
    check_log_folder,
    check_shared_memory,
)
from replay.commands.doctor.packages import (
    PACKAGES,
    PythonPackage,
    check_package,
    check_project,
    check_variables,
    is_installed,
)
from replay.commands.doctor.probe_process import ProbeAnswer, Prober, judge_answer, make_replay_reader, read_first_line
from replay.options.spec import check_working_folder
from replay.options.value_checks import check_value
from replay.output.text import CheckResult, CheckStatus, format_check
from replay.processes.launch import refuse_launcher

# A probe's imports alone take seconds.
LEAST_SECONDS = 10.0
# Also on fewer cores: a probe that hangs uses none.
MAX_PROBES_AT_ONCE = 4

CheckGroup = tuple[str, list[CheckResult]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineReport:
    """What works on this machine: the checks in their groups, by title."""

    groups: Mapping[str, Sequence[CheckResult]]

    @property
    def failing(self) -> list[str]:
        """The checks that `replay` without options needs here, and that do not pass."""
        return list(dict.fromkeys(check.name for checks in self.groups.values() for check in checks if check.fails))

    @property
    def works(self) -> bool:
        return not self.failing

    @property
    def exit_code(self) -> int:
        """0: `replay` without options works here; 1: it does not."""
        return 0 if self.works else 1

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        return {"works": self.works, "failing": self.failing, "groups": to_json(self.groups)}


def examine_machine(
    *,
    log_folder: str | os.PathLike[str] = "logs",
    time_limit: float = 60.0,
    on_group: Callable[[str, Sequence[CheckResult]], None] | None = None,
) -> MachineReport:
    """Check what works on this machine; what may crash or hang runs in processes of its own.

    log_folder  where runs would be logged
    time_limit  seconds for all checks together, at least 10
    on_group    is called with the title and the checks of each group, as soon as they are known

    Raises UsageError for a time limit that is too short, and in one of several processes of a launcher.
    """
    refuse_launcher("doctor")
    check_working_folder()
    time_limit = check_value("time_limit", time_limit, float, min=LEAST_SECONDS)
    groups: dict[str, Sequence[CheckResult]] = {}
    for title, checks in run_checks(check_value("log_folder", log_folder, Path), time_limit):
        groups[title] = checks
        if on_group is not None:
            on_group(title, checks)
    return MachineReport(groups=groups)


def print_group(title: str, checks: Sequence[CheckResult]) -> None:
    """Print a group's title, and a line for each check."""
    print(title)
    for check in checks:
        print(f"  {format_check(check)}", flush=True)


def print_answer(report: MachineReport, *, as_json: bool) -> None:
    """Print the last line, whether a replay works here, or the whole report as JSON."""
    if as_json:
        # What prints the results of other commands needs rich, which may be what is missing.
        print(json.dumps(report.to_dict(), allow_nan=False))
        return
    print(f"\n{describe_answer(report)}")


def describe_answer(report: MachineReport) -> str:
    """Say whether a replay works here; of checks that gave no answer in time alone, that this is not known."""
    if report.works:
        return "replay works here"
    failing = [check for checks in report.groups.values() for check in checks if check.fails]
    if all(check.status is CheckStatus.NO_ANSWER for check in failing):
        return f"whether replay works here is not known: no answer in time from {', '.join(report.failing)}"
    return f"replay does not work here, because of: {', '.join(report.failing)}"


def run_checks(folder: Path, timeout: float) -> Iterator[CheckGroup]:
    """Yield all groups of checks, each as soon as it is known."""
    prober = Prober(timeout)
    pool = ThreadPoolExecutor(MAX_PROBES_AT_ONCE)
    with tempfile.TemporaryDirectory(prefix="replay-doctor-", ignore_cleanup_errors=True) as scratch:
        try:
            probes = RunningProbes(pool, prober, scratch)
            for title, checks in _check_groups(probes, folder):
                yield title, [probes.with_cause(check) for check in checks]
        finally:
            prober.stop()
            pool.shutdown(cancel_futures=True)


class RunningProbes:
    """The probes that are running. Those for CUDA start once a GPU is known to be there."""

    def __init__(self, pool: ThreadPoolExecutor, prober: Prober, scratch: str) -> None:
        self._pool, self._prober = pool, prober
        self.devices = self.ask("list_devices")
        logs = f"{scratch}/logs"
        self.one_pass = pool.submit(prober.ask, "run_one_pass", logs, share=1.0, read=make_replay_reader(Path(logs)))
        # With an empty cache, so that compilation is tested and not the cache.
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor", "TRITON_CACHE_DIR": f"{scratch}/triton"}
        compile_settings = caches | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self.compile = pool.submit(prober.ask, "compile_function", share=1.0, environment=compile_settings)
        installed = [package for package in PACKAGES if is_installed(package)]
        self.imports = {package: self.ask("import_module", package.module) for package in installed}
        self.sdpa = self.ask("measure_kernel_error", "sdpa")
        self.gloo = self.ask("all_reduce", "gloo")

    def ask(self, probe: str, *arguments: str) -> Future[ProbeAnswer]:
        return self._pool.submit(self._prober.ask, probe, *arguments)

    def with_cause(self, check: CheckResult) -> CheckResult:
        """Attribute a check to an earlier package whose import failed with the same error."""
        errors = {package.name: future.result().error for package, future in self.imports.items() if future.done()}
        cause = next((name for name, error in errors.items() if error and error in check.found), check.name)
        return check if cause == check.name else replace(check, advice=f"because of {cause}")


def _check_groups(probes: RunningProbes, folder: Path) -> Iterator[CheckGroup]:
    yield "project", check_project()
    devices = probes.devices.result()
    num_gpus = len(devices.facts.get("gpus", []))
    default_kernel = devices.facts.get("default_kernel", "sdpa")
    kernels = {name: probes.ask("measure_kernel_error", name) for name in _choose_cuda_kernels(num_gpus)}
    nccl = probes.ask("all_reduce", "nccl") if num_gpus > 1 else None

    def check(package: PythonPackage) -> CheckResult:
        answer = probes.imports[package].result() if package in probes.imports else None
        is_default = not package.serves or (package.name == "flash-attn" and default_kernel == "flash")
        return check_package(package, answer, on_cuda=num_gpus > 0, is_default=is_default)

    yield "packages, versions and imports", [check(package) for package in PACKAGES]
    driver = read_first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    yield "devices", check_devices(devices, driver)
    yield (
        "attention kernels, forward and backward",
        list(_check_kernels(probes.sdpa, kernels, num_gpus, default_kernel)),
    )
    yield "several processes", list(_check_processes(probes.gloo.result(), nccl.result() if nccl else None, num_gpus))
    compilers = check_compilers(on_cuda=num_gpus > 0, built_for=devices.facts.get("built_for"))
    compiled = judge_answer(
        "torch.compile", probes.compile.result(), works="a function, in an empty cache", cost="no --compile"
    )
    yield "compilers", [*compilers, compiled]
    yield (
        "environment",
        [*check_variables(), check_shared_memory(), check_log_folder(folder), *check_limits(on_cuda=num_gpus > 0)],
    )
    answer = probes.one_pass.result()
    works = f"replay --max-inputs 1 in {answer.seconds:.0f} s, loss {answer.facts.get('loss', float('nan')):.4f}"
    cost = "Try: replay doctor --time-limit 300" if answer.is_silent else "Try: replay --max-inputs 1 --traceback"
    yield "all together", [judge_answer("one input", answer, works=works, cost=cost, needed=True)]


def _choose_cuda_kernels(num_gpus: int) -> tuple[str, ...]:
    """Return the kernels that are tried besides sdpa."""
    packages = {name: KERNELS[name].packed.limits.package for name in list_checked_kernels()}
    available = [name for name, package in packages.items() if not package or is_installed(_find_package(package))]
    return tuple(name for name in available if num_gpus and name != "sdpa")


def list_checked_kernels() -> list[str]:
    """Return the kernels in the order in which they are printed."""
    return sorted(
        (name for name, kernel in KERNELS.items() if kernel.is_checked), key=lambda name: (name != "sdpa", name)
    )


def _find_package(name: str) -> PythonPackage:
    return next(package for package in PACKAGES if package.name == name)


def _check_kernels(
    sdpa: Future[ProbeAnswer], others: dict[str, Future[ProbeAnswer]], num_gpus: int, default_kernel: str
) -> Iterator[CheckResult]:
    for name in list_checked_kernels():
        probe = sdpa if name == "sdpa" else others.get(name)
        if probe is None:
            is_missing = num_gpus and name == "flash"
            status = CheckStatus.MISSING if is_missing else CheckStatus.NOT_NEEDED
            text = "for CUDA machines" if not num_gpus else "not installed"
            yield CheckResult(name=name, status=status, found=text)
            continue
        cost = f"Try: replay --attention {KERNELS[name].alternative}"
        yield judge_answer(
            name, probe.result(), works="as plain fp32", cost=cost, needed=name == default_kernel, has_error=True
        )


def _check_processes(gloo: ProbeAnswer, nccl: ProbeAnswer | None, num_gpus: int) -> Iterator[CheckResult]:
    yield check_launcher("torchrun")
    yield check_launcher("deepspeed")
    cost = "no --tp, no --ring, no run of several ranks"
    works = "2 processes add up"
    yield judge_answer("gloo", gloo, works=works, cost=cost if not num_gpus else "no run of several ranks on the CPU")
    if nccl is None:
        text = "for CUDA machines" if not num_gpus else "one GPU, nothing to try"
        yield CheckResult(name="nccl", status=CheckStatus.NOT_NEEDED, found=text)
    else:
        yield judge_answer(
            "nccl", nccl, works=works, cost=f"{cost}. Try: NCCL_DEBUG=INFO replay --tp 2 --backend fsdp2"
        )
