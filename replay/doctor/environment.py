"""Environment variables that change what a replay computes, measures, or whether it ends."""

import os
import re
import socket
from collections.abc import Mapping

from replay.report.check import Check, Status

PREFIXES = (
    "CUDA_",
    "CUBLAS_",
    "DEEPSPEED_",
    "DS_",
    "GLOO_",
    "NCCL_",
    "PYTORCH_",
    "TORCH_",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
)
PLAIN = r"[A-Za-z0-9_.,:;=^+ -]{1,60}"  # a setting; whatever else a value is, it is not shown
EFFECTS = {  # none of these holds a secret
    "CUBLAS_WORKSPACE_CONFIG": "changes speed, and whether sums are repeatable",
    "CUDA_DEVICE_MAX_CONNECTIONS": "changes how copies and kernels overlap",
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for: times are not those of training",
    "CUDA_VISIBLE_DEVICES": "hides and numbers GPUs",
    "FLASH_ATTENTION_DETERMINISTIC": "another backward of flash-attn, slower",
    "MKL_CBWR": "changes numbers on a CPU",
    "NCCL_ALGO": "changes the order of sums",
    "NCCL_BLOCKING_WAIT": "as TORCH_NCCL_BLOCKING_WAIT, whose old name it is",
    "NCCL_DEBUG": "NCCL prints among the results",
    "NCCL_IB_DISABLE": "several hosts are slower",
    "NCCL_NVLS_ENABLE": "changes the order of sums",
    "NCCL_P2P_DISABLE": "several GPUs are slower",
    "NCCL_PROTO": "changes the order of sums",
    "NCCL_SHM_DISABLE": "several GPUs are slower",
    "NVIDIA_TF32_OVERRIDE": "changes fp32 numbers",
    "OMP_NUM_THREADS": "changes speed on a CPU",
    "PYTORCH_ALLOC_CONF": "changes memory peaks",
    "PYTORCH_CUDA_ALLOC_CONF": "changes memory peaks",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "no cache of memory: slow, and peaks are not those of training",
    "TORCHDYNAMO_DISABLE": "--compile compiles nothing",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "changes fp32 numbers",
    "TORCH_COMPILE_DISABLE": "--compile compiles nothing",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL makes collectives slow",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0 lets a rank hang for good",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits in each collective: times are not those of training",
}
ELSEWHERE = {"TORCH_CUDA_ARCH_LIST", "CUDA_HOME"}  # other checks look at them
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def variables(environment: Mapping[str, str] = os.environ) -> list[Check]:
    """A line for each that is set and has an effect here, and one for others of the same families, by name alone."""
    found = [_interface(name, environment[name]) for name in INTERFACES if environment.get(name)]
    for name, effect in EFFECTS.items():
        if name in environment:
            found.append(Check(name=name, status=Status.NOTE, found=shown(environment[name]), advice=effect))
    if left_over := [name for name in LAUNCHER if name in environment and "TORCHELASTIC_RUN_ID" not in environment]:
        advice = f"replay takes them for a launcher's. Try: unset {' '.join(left_over)}"
        found.append(Check(name="launcher's", status=Status.NOTE, found=", ".join(left_over), advice=advice))
    known = {*EFFECTS, *ELSEWHERE, *INTERFACES}
    if others := sorted(name for name in environment if name.startswith(PREFIXES) and name not in known):
        advice = "what they do here is not known"
        found.append(Check(name="also set", status=Status.NOTE, found=", ".join(others), advice=advice))
    return found or [Check(name="variables", status=Status.OK, found="none is set that changes results")]


def shown(value: str) -> str:
    """The value if it is a plain setting; a path, an address or anything long is not for a log that is sent around."""
    return value if re.fullmatch(PLAIN, value) else f"set, {len(value)} characters"


def _interface(name: str, value: str) -> Check:
    """Is there a network interface that the variable names; NCCL takes names as beginnings, after = as whole ones."""
    there = [interface for _, interface in socket.if_nameindex()]
    status, advice = Status.NOTE, "the network that ranks talk over"
    if not value.startswith("^"):
        wanted = value.lstrip("=").split(",")
        if name.startswith("GLOO"):
            is_there = all(one in there for one in wanted)
        elif value.startswith("="):
            is_there = any(one in there for one in wanted)
        else:
            is_there = any(one.startswith(tuple(wanted)) for one in there)
        if not is_there:
            status, advice = Status.BROKEN, f"there is no such interface: ranks fail or hang. Try: unset {name}"
    return Check(name=name, status=status, found=shown(value), advice=advice)
