"""`replay doctor`: what is broken is a line, and the exit code is that of a replay without options."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

import replay
from actor_init.attention import kernel_choice
from actor_init.attention.kernel_choice import choose_default_kernel
from actor_init.attention.kernels import register
from actor_init.declarations.attention import KERNELS, find_kernel
from actor_init.spec import UsageError
from replay.command_line.cli import main
from replay.commands.doctor import hardware
from replay.commands.doctor import report as doctor
from replay.commands.doctor.hardware import (
    check_compilers,
    check_devices,
    check_launcher,
    check_log_folder,
    check_shared_memory,
)
from replay.commands.doctor.packages import (
    PACKAGES,
    check_package,
    check_variables,
    is_installed,
    is_within,
    read_required_ranges,
)
from replay.commands.doctor.probe_process import ProbeAnswer, Prober, judge_answer
from replay.output.text import CheckResult, CheckStatus, format_check
from tests.warm import warm_bin

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
FLASH = next(package for package in PACKAGES if package.name == "flash-attn")
TORCH = next(package for package in PACKAGES if package.name == "torch")
SYMBOL = "flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E"
GPU = {"name": "NVIDIA H200", "bytes": 140 * 2**30, "capability": "9.0"}


def make_package(folder: Path, name: str, source: str, number: str | None = None) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    # Without metadata transformers imports the package to ask for its version.
    if number is not None:
        write_metadata(folder, name, number)


def write_metadata(folder: Path, name: str, number: str) -> None:
    metadata = folder / f"{name}-{number}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")


def make_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def other_python(folder: Path) -> Path:
    return make_script(folder / "python3", "#!/bin/sh\necho /elsewhere\n")


def find_check(checks: list[CheckResult], name: str) -> CheckResult:
    [found] = [check for check in checks if check.name == name]
    return found


# imports


@pytest.mark.parametrize(
    ("source", "status", "says"),
    [
        (f"raise ImportError({SYMBOL!r})", CheckStatus.BROKEN, f"ImportError: {SYMBOL}"),
        ("import os; os._exit(3)", CheckStatus.BROKEN, "ended without an answer, exit code 3"),
        (
            "print('LibError: lost', flush=True); import os; os._exit(3)",
            CheckStatus.BROKEN,
            "exit code 3: LibError: lost",
        ),
        ("raise SystemExit(0)", CheckStatus.BROKEN, "SystemExit: 0"),
        (
            "import ctypes\nctypes.string_at(0)",
            CheckStatus.BROKEN,
            "crashed, SIGSEGV, in string_at at ctypes/__init__.py",
        ),
        ("import signal\nsignal.pause()", CheckStatus.NO_ANSWER, "in <module> at flash_attn/__init__.py:2"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", CheckStatus.BROKEN, "crashed, SIGKILL"),
        ("", CheckStatus.OK, "of unknown version"),
    ],
)
def test_an_import_that_breaks_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, status: CheckStatus, says: str
) -> None:
    make_package(tmp_path, "flash_attn", source)
    monkeypatch.syspath_prepend(str(tmp_path))
    share = 0.01 if status is CheckStatus.NO_ANSWER else 0.5
    # Python's start takes a while.
    answer = Prober(300.0, grace=60.0).ask("import_module", "flash_attn", share=share)
    check = check_package(FLASH, answer, on_cuda=True, is_default=True)
    assert (check.status, check.fails) == (status, status is not CheckStatus.OK)
    assert says in check.found
    if status is not CheckStatus.OK:
        assert "--attention sdpa" in check.advice
    assert ("built for another torch" in check.advice) == ("undefined" in source)


@pytest.mark.slow
def test_ring_flash_attn_is_imported_as_a_replay_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = "from transformers.modeling_flash_attention_utils import is_flash_attn_greater_or_equal_2_10"
    make_package(tmp_path, "ring_flash_attn", gone)
    monkeypatch.syspath_prepend(str(tmp_path))
    prober = Prober(1800)
    assert prober.ask("import_module", "ring_flash_attn").error == ""
    # What it prints while it is imported is no answer.
    assert prober.ask("import_module", "deepspeed").error == ""


def test_a_probe_for_which_no_time_is_left_is_not_started() -> None:
    prober = Prober(60)
    prober.stop()
    answer = prober.ask("import_module", "json")
    assert answer.is_silent
    assert "no time" in answer.error


def test_a_probe_has_the_module_path_of_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_package(tmp_path, "json", "raise ImportError('hid the standard library')")
    # This process has not seen that folder.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert Prober(60).ask("import_module", "wave").error == ""


# versions


@pytest.mark.parametrize(
    ("number", "wanted", "expected"),
    [
        ("2.10", ">=2.10", True),
        ("2.9.1", ">=2.10", False),
        ("2.13.0+cpu", ">=2.10", True),
        ("2.10.0a0+git1234", ">=2.10", True),
        ("3", ">=3.0.0", True),
        ("2.5", ">=2,<3", True),
        ("3.0", ">=2,<3", False),
        ("2.4.1", "==2.4.1", True),
        ("2.4.2", "==2.4.1", False),
        ("1", "", True),
    ],
)
def test_a_version_is_held_against_its_range(number: str, wanted: str, expected: bool) -> None:
    assert is_within(number, wanted) is expected


def test_the_ranges_are_those_of_the_metadata_and_all_can_be_read() -> None:
    ranges = read_required_ranges()
    assert ranges["torch"].startswith(">=2.")
    assert {"deepspeed", "transformers", "flash-attn"} <= set(ranges)
    for wanted in ranges.values():
        is_within("1.0", wanted)


def test_a_version_out_of_range_fails_and_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_metadata(tmp_path, "torch", "2.1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = check_package(TORCH, ProbeAnswer(), on_cuda=False, is_default=True)
    assert check.fails
    assert check.found == f"2.1.0 is outside {read_required_ranges()['torch']}"
    assert "pip install 'torch>=" in check.advice


def test_what_is_not_installed_fails_only_where_it_is_needed() -> None:
    absent = check_package(TORCH, None, on_cuda=False, is_default=True)
    assert (absent.status, absent.fails) == (CheckStatus.MISSING, True)
    assert check_package(FLASH, None, on_cuda=False, is_default=False).status is CheckStatus.NOT_NEEDED
    on_cuda = check_package(FLASH, None, on_cuda=True, is_default=False)
    assert (on_cuda.status, on_cuda.fails) == (CheckStatus.MISSING, False)
    assert "pip install" in on_cuda.advice


# kernels


def test_sdpa_is_within_its_bound_by_far() -> None:
    assert kernel_choice.measure_error(find_kernel("sdpa"), CPU) < kernel_choice.BOUND / 3
    assert choose_default_kernel(CPU) == "sdpa"


def _without_documents(mask: Any) -> Any:
    return torch.ones_like(mask).tril()


def _one_token_late(mask: Any) -> Any:
    return mask | mask.roll(1, -1)


@contextmanager
def as_sdpa(kernel: Callable[..., Any]) -> Iterator[None]:
    """Let transformers know this kernel as sdpa."""
    right = AttentionInterface()["sdpa"]
    AttentionInterface.register("sdpa", kernel)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", right)


@pytest.mark.parametrize("wrong", [_without_documents, _one_token_late])
def test_a_kernel_with_a_wrong_mask_is_wrong(wrong: Callable[[Any], Any]) -> None:
    right = AttentionInterface()["sdpa"]

    def kernel(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        return right(module, query, key, value, wrong(mask), **more)

    with as_sdpa(kernel):
        assert kernel_choice.measure_error(find_kernel("sdpa"), CPU) > 5 * kernel_choice.BOUND


def test_a_wrong_gradient_is_wrong() -> None:
    right = AttentionInterface()["sdpa"]

    def kernel(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        return right(module, query, key * 0.5 + key.detach() * 0.5, value, mask, **more)

    with as_sdpa(kernel):
        assert kernel_choice.measure_error(find_kernel("sdpa"), CPU) > 5 * kernel_choice.BOUND


def test_a_kernel_of_nan_is_wrong() -> None:
    right = AttentionInterface()["sdpa"]

    def kernel(module: Any, *inputs: Any, **more: Any) -> Any:
        return right(module, *inputs, **more)[0] * float("nan"), None

    with as_sdpa(kernel):
        error = kernel_choice.measure_error(find_kernel("sdpa"), CPU)
    check = judge_answer(
        "sdpa", ProbeAnswer(facts={"error": error, "bound": 0.02}), works="", cost="", needed=True, has_error=True
    )
    assert check.fails


@pytest.mark.parametrize(("error", "fails"), [(0.004, False), (0.3, True), (float("nan"), True)])
def test_numbers_out_of_bound_are_reported_as_wrong(error: float, fails: bool) -> None:
    answer = ProbeAnswer(facts={"error": error, "bound": 0.02})
    check = judge_answer("flash", answer, works="right", cost="Try: this", needed=True, has_error=True)
    assert check.fails is fails
    assert ("wrong numbers" in check.found) is fails


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel.is_checked])
def test_each_kernel_that_is_tried_is_one_that_a_replay_can_take(name: str) -> None:
    register()
    assert KERNELS[name].packed.name in AttentionInterface()


# launchers, compilers, variables


def test_a_launcher_of_another_python_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_script(tmp_path / "torchrun", f"#!{other_python(tmp_path)}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    check = check_launcher("torchrun")
    assert check.status is CheckStatus.BROKEN
    assert "another Python, /elsewhere" in check.found
    assert f"export PATH={Path(sys.executable).parent}:$PATH" in check.advice


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (f"#!{sys.executable}\n", CheckStatus.OK),
        (f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n", CheckStatus.OK),
        ("#!/usr/bin/env python3\n", CheckStatus.BROKEN),
        ("#!/nowhere/python3\n", CheckStatus.BROKEN),
        ("#!/bin/sh\nexec something\n", CheckStatus.NOTE),
        ("\x7fELF", CheckStatus.NOTE),
    ],
)
def test_whose_launcher_it_is_stands_in_its_first_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, status: CheckStatus
) -> None:
    other_python(tmp_path)
    make_script(tmp_path / "torchrun", text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert check_launcher("torchrun").status is status


def test_a_launcher_that_is_not_on_path_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_launcher("deepspeed").status is CheckStatus.MISSING
    make_script(tmp_path / "bin" / "deepspeed", "")
    assert check_launcher("deepspeed", tmp_path / "bin" / "python").advice == f"Try: export PATH={tmp_path}/bin:$PATH"


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("9.0a", "export TORCH_CUDA_ARCH_LIST='9.0'"),
        ("8.0;9.0a+PTX", "export TORCH_CUDA_ARCH_LIST='8.0;9.0+PTX'"),
        ("Hopper", "unset TORCH_CUDA_ARCH_LIST"),
        ("8.0 9.0+PTX", ""),
    ],
)
def test_architectures_that_deepspeed_cannot_read(monkeypatch: pytest.MonkeyPatch, value: str, advice: str) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", value)
    check = find_check(check_compilers(on_cuda=True, built_for="13.0"), "TORCH_CUDA_ARCH_LIST")
    assert check.status is (CheckStatus.BROKEN if advice else CheckStatus.OK)
    assert advice in check.advice
    assert "TORCH_CUDA_ARCH_LIST" not in [c.name for c in check_compilers(on_cuda=False, built_for=None)]


def test_a_lock_that_a_killed_build_left_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    old, new = (tmp_path / name / "lock" for name in ("deepspeed_shm_comm", "being_built"))
    for lock in (old, new):
        lock.parent.mkdir()
        lock.touch()
    os.utime(old, (0, 0))
    locks = [check for check in check_compilers(on_cuda=False, built_for=None) if check.name == "extension lock"]
    assert [(check.status, check.advice.partition("Try: ")[2]) for check in locks] == [
        (CheckStatus.BROKEN, f"rm {old}")
    ]


def test_an_nvcc_of_another_cuda_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_script(tmp_path / "bin" / "nvcc", "#!/bin/sh\necho nvcc\necho 'tools, release 12.4, V12.4.1'\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    check = find_check(check_compilers(on_cuda=True, built_for="13.0"), "nvcc")
    assert (check.status, check.found.split(",")[0]) == (CheckStatus.BROKEN, "12.4")
    assert find_check(check_compilers(on_cuda=True, built_for="12.8"), "nvcc").status is CheckStatus.OK


def test_compilers_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    checks = check_compilers(on_cuda=True, built_for="13.0", headers=tmp_path)
    assert {check.status for check in checks} == {CheckStatus.MISSING}
    assert [check.name for check in checks] == ["g++", "Python.h", "ninja", "nvcc"]


def test_variables_are_shown_if_they_are_plain_settings_and_known() -> None:
    checks = check_variables(
        {
            "CUDA_LAUNCH_BLOCKING": "1",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "NCCL_ALGO": "/home/somebody/secret",
            "TORCH_HUB_TOKEN": "hunter2",
            "AWS_SECRET_ACCESS_KEY": "hunter2",
        }
    )
    assert find_check(checks, "CUDA_LAUNCH_BLOCKING").found == "1"
    assert find_check(checks, "PYTORCH_CUDA_ALLOC_CONF").found == "expandable_segments:True"
    assert find_check(checks, "also set").found == "TORCH_HUB_TOKEN"
    said = "\n".join(format_check(check) for check in checks)
    for absent in ("hunter2", "secret", "AWS"):
        assert absent not in said


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", CheckStatus.NOTE),
        ("GLOO_SOCKET_IFNAME", "eth77", CheckStatus.BROKEN),
        ("GLOO_SOCKET_IFNAME", "lo,eth77", CheckStatus.BROKEN),
        ("NCCL_SOCKET_IFNAME", "eth77,l", CheckStatus.NOTE),
        ("NCCL_SOCKET_IFNAME", "=l", CheckStatus.BROKEN),
        ("NCCL_SOCKET_IFNAME", "^docker", CheckStatus.NOTE),
    ],
)
def test_a_network_interface_that_is_not_there_is_broken(name: str, value: str, status: CheckStatus) -> None:
    assert check_variables({name: value})[0].status is status


def test_what_a_launcher_left_behind_is_named() -> None:
    assert "unset MASTER_ADDR" in find_check(check_variables({"MASTER_ADDR": "x"}), "launcher's").advice
    assert [check.status for check in check_variables({"HOME": "/"})] == [CheckStatus.OK]


# devices, disk


def test_each_gpu_is_a_line_and_a_full_one_is_noted() -> None:
    facts = {"gpus": [GPU, GPU], "free_bytes": [139 * 2**30, 2**30], "no_peers": [[0, 1], [1, 0]], "built_for": "13.0"}
    checks = check_devices(ProbeAnswer(facts=facts), "580.1")
    assert [check.status for check in checks] == [CheckStatus.OK, CheckStatus.NOTE, CheckStatus.OK, CheckStatus.NOTE]
    assert checks[0].found == "NVIDIA H200, 140 GiB, 139 free, capability 9.0"
    assert "0-1" in find_check(checks, "peer access").found


def test_a_gpu_is_full_by_its_own_size() -> None:
    sizes, free = [80, 140, 140, 80], [7, 13, 15, 9]
    facts = {
        "gpus": [{**GPU, "bytes": size * 2**30} for size in sizes],
        "free_bytes": [gibibytes * 2**30 for gibibytes in free],
        "no_peers": [[0, 3], [3, 0], [1, 2], [2, 1]],
        "built_for": "13.0",
    }
    *gpus, driver, peers = check_devices(ProbeAnswer(facts=facts), "")
    assert [check.name for check in gpus] == ["gpu 0", "gpu 1", "gpu 2", "gpu 3"]
    assert [check.status for check in gpus] == [CheckStatus.NOTE, CheckStatus.NOTE, CheckStatus.OK, CheckStatus.OK]
    assert ["Try: nvidia-smi" in check.advice for check in gpus] == [True, True, False, False]
    assert (driver.found, peers.found) == ("unknown, torch for 13.0", "none between 0-3, 1-2")


def test_a_torch_that_cannot_see_the_gpu_of_this_machine_says_so() -> None:
    checks = check_devices(ProbeAnswer(facts={"gpus": [], "torch": "2.13.0+cpu"}), "580.1")
    assert [check.status for check in checks] == [CheckStatus.OK, CheckStatus.BROKEN]
    assert "2.13.0+cpu" in checks[1].advice
    assert len(check_devices(ProbeAnswer(facts={"gpus": [], "torch": "2.13.0+cpu"}), "")) == 1


def test_a_log_folder_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "logs", Path("/proc/logs")):
        check = check_log_folder(folder)
        assert check.fails, folder
        assert "--log-folder" in check.advice
    check = check_log_folder(tmp_path / "new" / "logs")
    assert (check.status, list(tmp_path.iterdir())) == (CheckStatus.OK, [tmp_path / "file"])


def test_little_room_is_noted(tmp_path: Path) -> None:
    more_than_there_is = shutil.disk_usage(tmp_path).total + 1
    for check in (check_shared_memory, check_log_folder):
        assert check(tmp_path, least_free=0).status is CheckStatus.OK
        assert check(tmp_path, least_free=more_than_there_is).status is CheckStatus.NOTE
    assert "--shm-size" in check_shared_memory(tmp_path, least_free=more_than_there_is).advice


def test_few_open_files_are_noted() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        checks = hardware.check_limits(on_cuda=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert find_check(checks, "ulimit -n").status is CheckStatus.NOTE


# the whole


Answers = Mapping[tuple[str, ...], ProbeAnswer]
PutAnswers = Callable[[Answers], None]


class FakeProber:
    """Answers by probe and first argument; what the table does not have works."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def ask(self, probe: str, *arguments: str, **options: Any) -> ProbeAnswer:
        right = {"measure_kernel_error": {"error": 0.003, "bound": 0.02}, "run_one_pass": {"loss": 1.0}}.get(probe, {})
        return self.answers.get((probe, *arguments[:1]), self.answers.get((probe,), ProbeAnswer(facts=right)))

    def stop(self) -> None: ...


@pytest.fixture
def put_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PutAnswers:
    """Lets probes have answers, on a machine that has all packages."""
    for package in PACKAGES:
        if not is_installed(package):
            make_package(tmp_path / "packages", package.module, "")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))

    def put(answers: Answers) -> None:
        monkeypatch.setattr(doctor, "Prober", lambda timeout: FakeProber(answers))

    return put


ON_CPU = ProbeAnswer(facts={"gpus": [], "torch": "2.13.0+cpu", "built_for": None, "default_kernel": "sdpa"})
ON_CUDA = ProbeAnswer(
    facts={"gpus": [GPU] * 2, "free_bytes": [GPU["bytes"]] * 2, "no_peers": [], "torch": "2.13.0+cu130"}
    | {"built_for": "13.0", "default_kernel": "flash"}
)
BAD = ProbeAnswer(error="ImportError: broken")


@pytest.mark.parametrize(
    ("answers", "failing"),
    [
        ({("list_devices",): ON_CPU}, []),
        ({("list_devices",): ON_CPU, ("import_module", "flash_attn"): BAD}, []),
        ({("list_devices",): ON_CPU, ("compile_function",): BAD, ("all_reduce", "gloo"): BAD}, []),
        ({("list_devices",): ON_CPU, ("import_module", "deepspeed"): BAD}, ["deepspeed"]),
        (
            {("list_devices",): ON_CPU, ("measure_kernel_error", "sdpa"): BAD, ("run_one_pass",): BAD},
            ["sdpa", "one input"],
        ),
        ({("list_devices",): BAD}, ["devices"]),
        ({("list_devices",): ON_CUDA}, []),
        ({("list_devices",): ON_CUDA, ("measure_kernel_error", "varlen"): BAD, ("all_reduce", "nccl"): BAD}, []),
        ({("list_devices",): ON_CUDA, ("import_module", "flash_attn"): BAD}, ["flash-attn"]),
        (
            {
                ("list_devices",): ON_CUDA,
                ("measure_kernel_error", "flash"): ProbeAnswer(facts={"error": 1.0, "bound": 0.02}),
            },
            ["flash"],
        ),
        (
            {("list_devices",): ON_CUDA, ("run_one_pass",): ProbeAnswer(error="not finished in 60 s", is_silent=True)},
            ["one input"],
        ),
    ],
)
def test_the_exit_code_is_about_what_a_replay_without_options_needs(
    answers: dict[tuple[str, ...], ProbeAnswer],
    failing: list[str],
    put_answers: PutAnswers,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put_answers(answers)
    assert main(["doctor", "--log-folder", str(tmp_path), "--json"]) == bool(failing)
    printed = json.loads(capsys.readouterr().out)
    assert (printed["works"], printed["failing"]) == (not failing, failing)
    report = replay.doctor(log_folder=tmp_path)
    assert (report.to_dict().keys(), report.exit_code) == (printed.keys(), bool(failing))
    assert main(["doctor", "--log-folder", str(tmp_path)]) == bool(failing)
    last = capsys.readouterr().out.splitlines()[-1]
    is_silent = any(answer.is_silent for answer in answers.values())
    no = "whether replay works here is not known: no answer in time from"
    no = no if is_silent else "replay does not work here, because of:"
    assert last == (f"{no} {', '.join(failing)}" if failing else "replay works here")


def test_an_error_that_comes_from_a_package_names_it(
    put_answers: PutAnswers,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    because_of = {("import_module", name): BAD for name in ("torch", "deepspeed")}
    answers = because_of | {
        ("list_devices",): ON_CPU,
        ("measure_kernel_error", "sdpa"): BAD,
        ("compile_function",): ProbeAnswer(error="other"),
    }
    put_answers(answers)
    main(["doctor", "--log-folder", str(tmp_path)])
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  broken")}
    assert [name for name, line in lines.items() if "because of torch" in line] == ["deepspeed", "sdpa"]
    assert "pip install" in lines["torch"]
    assert "no --compile" in lines["torch.compile"]


def test_a_check_is_one_line_without_control_characters() -> None:
    check = CheckResult(name="a", status=CheckStatus.BROKEN, found="x\n\x1b[31my", advice="Try: z")
    assert format_check(check) == r"broken       a                    x \x1b[31my; Try: z"
    assert len(format_check(CheckResult(name="a", status=CheckStatus.BROKEN, found="x" * 9000))) < 400


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("doctor --time-limit 1", "invalid value for '--time-limit'"),
        ("doctor --max-inputs 1", "unknown option --max-inputs"),
        ("--max-inputs 1 doctor", "--max-inputs belongs to a replay, not to `doctor`"),
    ],
)
def test_wrong_usage_is_refused(typed: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split()) == 2
    assert capsys.readouterr().err.lower().startswith(f"replay: {says}".lower())


def test_from_python_a_wrong_time_limit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"time_limit=9.* is not allowed. Give a finite number of at least 10"):
        replay.doctor(time_limit=9)


def test_under_a_launcher_it_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor"]) == 2
    assert "without a launcher" in capsys.readouterr().err


def test_its_help_needs_neither_torch_nor_rich() -> None:
    probe = (
        "import sys; from replay.command_line.cli import main; code = main(['doctor', '--help']); "
        "import replay.commands.doctor.report; "
        "print(code, [m for m in ('torch', 'rich', 'transformers', 'deepspeed') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.slow
def test_a_sick_machine_is_described_and_what_works_is_not_blamed(tmp_path: Path) -> None:
    make_package(tmp_path / "fakes", "flash_attn", f"raise ImportError({SYMBOL!r})", "2.8.3")
    make_script(tmp_path / "bin" / "torchrun", f"#!{other_python(tmp_path)}\n")
    # A warm process has read CXX already.
    make_script(tmp_path / "bin" / "g++", "#!/bin/sh\nexit 1\n")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "fakes"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CUDA_LAUNCH_BLOCKING": "1",
        "CXX": "/nowhere/g++",
    }
    typed = ["doctor", "--log-folder", "/proc/logs", "--time-limit", "1800"]
    # Warm, with its probes: each of them would import all once more.
    doctor = [str(warm_bin() / "python"), "-m", "replay", *typed]
    done = subprocess.run(doctor, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    lines = [line[2:] for line in done.stdout.splitlines() if line.startswith("  ")]
    status = {line[13:33].strip(): line[:13].strip() for line in lines}
    for name in ("flash-attn", "torchrun", "torch.compile", "log folder"):
        assert status[name] == "broken"
    assert status["g++"] == "missing"
    for name in ("torch", "deepspeed", "sdpa", "gloo", "one input"):
        assert status[name] == "ok", done.stdout
    assert "undefined symbol" in done.stdout
    assert status["CUDA_LAUNCH_BLOCKING"] == "note"
    assert done.stdout.splitlines()[-1] == "replay does not work here, because of: log folder"
