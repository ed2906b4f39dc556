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
from replay.commands.doctor.hardware import compilers, devices, launcher, limits, log_folder, shared_memory
from replay.commands.doctor.packages import PACKAGES, Package, is_installed, package, project, variables
from replay.commands.doctor.probe_process import Answer, Prober, answer_of_a_replay, first_line, tried
from replay.output.text import CheckResult, CheckStatus, format_check

NUM_PROBES_AT_ONCE = 4  # also on fewer cores: a probe that hangs uses none

Group = tuple[str, list[CheckResult]]


def examine(folder: Path, json_file: Path | None, timeout: float) -> int:
    """Print all checks and return 0 if those that `replay` without options needs here pass, else 1."""
    if json_file is not None:
        try:
            json_file.open("a").close()
        except OSError as error:
            raise UsageError(f"--json {json_file}: {error.strerror}. Try: --json doctor.json") from None
    groups: list[Group] = []
    for title, checks in examined(folder, timeout):
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


def examined(folder: Path, timeout: float) -> Iterator[Group]:
    """Yield all groups of checks, each as soon as it is known."""
    prober = Prober(timeout)
    pool = ThreadPoolExecutor(NUM_PROBES_AT_ONCE)
    with tempfile.TemporaryDirectory(prefix="replay-doctor-", ignore_cleanup_errors=True) as scratch:
        try:
            asked = _Asked(pool, prober, scratch)
            for title, checks in _groups(asked, folder):
                yield title, [asked.with_cause(check) for check in checks]
        finally:
            prober.stop()
            pool.shutdown(cancel_futures=True)


class _Asked:
    """Hold the probes that are running. Those for CUDA start once a GPU is known to be there."""

    def __init__(self, pool: ThreadPoolExecutor, prober: Prober, scratch: str) -> None:
        self._pool, self._prober = pool, prober
        self.devices = self.ask("devices")
        logs = f"{scratch}/logs"
        self.one_pass = pool.submit(prober.ask, "one_pass", logs, share=1.0, read=answer_of_a_replay(Path(logs)))
        # an empty cache, so that compilation is tested and not the cache
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor", "TRITON_CACHE_DIR": f"{scratch}/triton"}
        compile_settings = caches | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self.compile = pool.submit(prober.ask, "compile", share=1.0, environment=compile_settings)
        self.imports = {one: self.ask("import_module", one.module) for one in PACKAGES if is_installed(one)}
        self.sdpa = self.ask("kernel", "sdpa")
        self.gloo = self.ask("all_reduce", "gloo")

    def ask(self, probe: str, *arguments: str) -> Future[Answer]:
        return self._pool.submit(self._prober.ask, probe, *arguments)

    def with_cause(self, check: CheckResult) -> CheckResult:
        """Attribute a check to an earlier package whose import failed with the same error."""
        said = {one.name: future.result().error for one, future in self.imports.items() if future.done()}
        cause = next((name for name, error in said.items() if error and error in check.found), check.name)
        return check if cause == check.name else replace(check, advice=f"because of {cause}")


def _groups(asked: _Asked, folder: Path) -> Iterator[Group]:
    yield "project", project()
    seen = asked.devices.result()
    num_gpus = len(seen.facts.get("gpus", []))
    default_kernel = seen.facts.get("default_kernel", "sdpa")
    kernels = {name: asked.ask("kernel", name) for name in _kernels(num_gpus)}
    nccl = asked.ask("all_reduce", "nccl") if num_gpus > 1 else None

    def check_of(one: Package) -> CheckResult:
        answer = asked.imports[one].result() if one in asked.imports else None
        is_default = not one.serves or (one.name == "flash-attn" and default_kernel == "flash")
        return package(one, answer, on_cuda=num_gpus > 0, is_default=is_default)

    yield "packages, versions and imports", [check_of(one) for one in PACKAGES]
    driver = first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    yield "devices", devices(seen, driver)
    yield "attention kernels, forward and backward", list(_kernel_checks(asked.sdpa, kernels, num_gpus, default_kernel))
    yield "several processes", list(_process_checks(asked.gloo.result(), nccl.result() if nccl else None, num_gpus))
    built = compilers(on_cuda=num_gpus > 0, built_for=seen.facts.get("built_for"))
    compiled = tried(
        "torch.compile", asked.compile.result(), works="a function, in an empty cache", cost="no --compile"
    )
    yield "compilers", [*built, compiled]
    yield "environment", [*variables(), shared_memory(), log_folder(folder), *limits(on_cuda=num_gpus > 0)]
    answer = asked.one_pass.result()
    works = f"replay --max-inputs 1 in {answer.seconds:.0f} s, loss {answer.facts.get('loss', float('nan')):.4f}"
    cost = "Try: replay doctor --time-limit 300" if answer.is_silent else "Try: replay --max-inputs 1 --traceback"
    yield "all together", [tried("one input", answer, works=works, cost=cost, needed=True)]


def _kernels(num_gpus: int) -> tuple[str, ...]:
    """Return the kernels that are tried besides sdpa."""
    packages = {name: KERNELS[name].packed.limits.package for name in _checked()}
    there = [name for name, brings in packages.items() if not brings or is_installed(_package(brings))]
    return tuple(name for name in there if num_gpus and name != "sdpa")


def _checked() -> list[str]:
    """Return the kernels in the order in which they are printed."""
    return sorted(
        (name for name, kernel in KERNELS.items() if kernel.is_checked), key=lambda name: (name != "sdpa", name)
    )


def _package(name: str) -> Package:
    return next(one for one in PACKAGES if one.name == name)


def _kernel_checks(
    sdpa: Future[Answer], others: dict[str, Future[Answer]], num_gpus: int, default_kernel: str
) -> Iterator[CheckResult]:
    for name in _checked():
        asked = sdpa if name == "sdpa" else others.get(name)
        if asked is None:
            is_missing = num_gpus and name == "flash"
            status = CheckStatus.MISSING if is_missing else CheckStatus.NOT_NEEDED
            text = "for CUDA machines" if not num_gpus else "not installed"
            yield CheckResult(name=name, status=status, found=text)
            continue
        cost = f"Try: replay --attention {KERNELS[name].alternative}"
        yield tried(
            name, asked.result(), works="as plain fp32", cost=cost, needed=name == default_kernel, has_error=True
        )


def _process_checks(gloo: Answer, nccl: Answer | None, num_gpus: int) -> Iterator[CheckResult]:
    yield launcher("torchrun")
    yield launcher("deepspeed")
    cost = "no --tp, no --ring, no run of several ranks"
    works = "2 processes add up"
    yield tried("gloo", gloo, works=works, cost=cost if not num_gpus else "no run of several ranks on the CPU")
    if nccl is None:
        text = "for CUDA machines" if not num_gpus else "one GPU, nothing to try"
        yield CheckResult(name="nccl", status=CheckStatus.NOT_NEEDED, found=text)
    else:
        yield tried("nccl", nccl, works=works, cost=f"{cost}. Try: NCCL_DEBUG=INFO replay --tp 2 --backend fsdp2")
