"""Define the doctor's probes; each runs in its own process.

`replay.commands.doctor.probe_process` starts them and reads what `main` prints.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import runpy
import sys
from collections.abc import Callable
from itertools import permutations
from typing import Any

from replay.commands.doctor.probe_process import ANSWER_MARK, build_probe_arguments
from replay.options.option_parsing import format_error_with_flags

Facts = dict[str, Any]


class ProbeError(Exception):
    """A fault that a probe found, described in its message."""


def import_module(name: str) -> Facts:
    if name == "ring_flash_attn":
        from actor_init.attention.ring_attention import import_ring_flash_attn

        import_ring_flash_attn()
        return {}
    importlib.import_module(name)
    return {}


def list_devices() -> Facts:
    """Report what torch sees, and the attention kernel that the defaults choose."""
    import torch

    facts: Facts = {"torch": torch.__version__, "built_for": torch.version.cuda, "gpus": [], "no_peers": []}
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        facts["gpus"] = [_describe_gpu(torch.cuda.get_device_properties(index)) for index in range(count)]
        pairs = list(permutations(range(count), 2))
        facts["no_peers"] = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        facts["free_bytes"] = [torch.cuda.mem_get_info(index)[0] for index in range(count)]
    # A broken transformers is reported by its own check.
    with contextlib.suppress(Exception):
        from actor_init.attention.kernel_choice import choose_default_kernel

        facts["default_kernel"] = choose_default_kernel(_choose_device())
    return facts


def _describe_gpu(properties: Any) -> Facts:
    return {
        "name": properties.name,
        "bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
    }


def measure_kernel_error(name: str) -> Facts:
    from actor_init.attention.kernel_choice import BOUND, measure_error
    from actor_init.declarations.attention import find_kernel

    return {"error": measure_error(find_kernel(name), _choose_device()), "bound": BOUND}


def _choose_device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compile_function() -> Facts:
    import torch

    def function(values: torch.Tensor) -> torch.Tensor:
        return values.sin() * values

    values = torch.linspace(-3, 3, 1000, device=_choose_device())
    compiled: torch.Tensor = torch.compile(function)(values)
    error = float((compiled - function(values)).abs().max())
    # The values go up to 3, in fp32. Two implementations of sine differ by about 1e-7.
    if not error < 1e-5:
        raise ProbeError(f"the compiled function is off by {error:.2g}")
    return {}


def all_reduce(backend: str) -> Facts:
    """Add a number from each of two processes, started as `replay --tp 2` starts its own."""
    from replay.processes.launch import start_processes

    if code := start_processes(2, build_probe_arguments("all_reduce_rank", float(sys.argv[2]), backend)):
        raise ProbeError(f"a rank ended with exit code {code}")
    return {}


def all_reduce_rank(backend: str) -> Facts:
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    # Libraries send small and large messages differently: the second has several megabytes.
    for size in (1, 1 << 20):
        total = torch.full((size,), rank + 1.0, device=device)
        dist.all_reduce(total)
        if not bool((total == 3).all()):
            raise ProbeError(f"1 + 2 came to {float(total[0])} on rank {rank}")
    return {}


def run_one_pass(folder: str) -> Facts:
    """Run `replay --max-inputs 1` in place of the probe, with its log in `folder`; the log is the answer."""
    sys.argv = ["replay", "--max-inputs", "1", "--warmup", "0", "--quiet", "--log-folder", folder]
    runpy.run_module("replay", run_name="__main__", alter_sys=True)
    raise AssertionError("replay ends its process")


PROBES: dict[str, Callable[..., Facts]] = {
    probe.__name__: probe
    for probe in (
        import_module,
        list_devices,
        measure_kernel_error,
        compile_function,
        all_reduce,
        all_reduce_rank,
        run_one_pass,
    )
}


def main() -> None:
    """Run the probe named on the command line, print its answer and exit without the interpreter's cleanup."""
    name, limit, *arguments = sys.argv[1:]
    faulthandler.enable()
    # This also ends hangs in native code.
    faulthandler.dump_traceback_later(float(limit), exit=True)
    answer: Facts
    try:
        answer = {"facts": PROBES[name](*arguments)}
    except BaseException as error:
        kind = "" if isinstance(error, ProbeError) else f"{type(error).__name__}: "
        answer = {"error": f"{kind}{format_error_with_flags(error)}"}
    print(f"\n{ANSWER_MARK}{json.dumps(answer)}", flush=True)
    os._exit(0 if "facts" in answer else 1)
