"""Run `replay doctor`: report what works on this machine, and what to type. Needs no GPU and no captures.

    packages, versions and imports
      ok           torch                2.13.0 (>=2.10)
      broken       flash-attn           2.8.3, import: ImportError: [...] undefined symbol: [...]; its [...]

Each check is a line: status, name, finding, consequence and what to type. What may crash or hang runs in processes of
its own, in parallel. Of a replay's dependencies only typer is required, so output goes through plain print.
"""

import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from actor_init.as_json import json_bytes
from actor_init.declarations.attention import KERNELS
from actor_init.spec import UsageError
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
from replay.output.text import CheckResult, CheckStatus, format_check

# Also on fewer cores: a probe that hangs uses none.
MAX_PROBES_AT_ONCE = 4

CheckGroup = tuple[str, list[CheckResult]]


def examine(folder: Path, json_file: Path | None, timeout: float) -> int:
    """Print all checks and return 0 if those that `replay` without options needs here pass, else 1."""
    if json_file is not None:
        try:
            json_file.open("a").close()
        except OSError as error:
            raise UsageError(f"--json {json_file}: {error.strerror}. Try: --json doctor.json") from None
    groups: list[CheckGroup] = []
    for title, checks in run_checks(folder, timeout):
        print(title)
        for check in checks:
            print(f"  {format_check(check)}", flush=True)
        groups.append((title, checks))
    failing = list(dict.fromkeys(check.name for _, checks in groups for check in checks if check.fails))
    verdict = "replay works here" if not failing else f"replay does not work here, because of: {', '.join(failing)}"
    print(f"\n{verdict}")
    if json_file is not None:
        whole = {"works": not failing, "failing": failing, "groups": dict(groups)}
        json_file.write_bytes(json_bytes(whole))
    return 1 if failing else 0


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
