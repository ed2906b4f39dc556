"""Check environment variables that change what a replay computes or measures, or that can make it hang."""

import os
import re
import socket
from collections.abc import Mapping

from replay.output.check import Check, Status

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
PLAIN = r"[A-Za-z0-9_.,:;=^+ -]{1,60}"  # a plain setting; any other value is not shown
EFFECTS = {  # none of these holds a secret
    "CUBLAS_WORKSPACE_CONFIG": "changes speed, and whether sums are repeatable",
    "CUDA_DEVICE_MAX_CONNECTIONS": "changes how copies and kernels overlap",
    "CUDA_LAUNCH_BLOCKING": "the host waits for each kernel: times are not those of training",
    "CUDA_VISIBLE_DEVICES": "hides and numbers GPUs",
    "FLASH_ATTENTION_DETERMINISTIC": "another backward of flash-attn, slower",
    "MKL_CBWR": "changes numbers on a CPU",
    "NCCL_ALGO": "changes the order of sums",
    "NCCL_BLOCKING_WAIT": "old name of TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DEBUG": "NCCL prints between the results",
    "NCCL_IB_DISABLE": "several hosts are slower",
    "NCCL_NVLS_ENABLE": "changes the order of sums",
    "NCCL_P2P_DISABLE": "several GPUs are slower",
    "NCCL_PROTO": "changes the order of sums",
    "NCCL_SHM_DISABLE": "several GPUs are slower",
    "NVIDIA_TF32_OVERRIDE": "changes fp32 numbers",
    "OMP_NUM_THREADS": "changes speed on a CPU",
    "PYTORCH_ALLOC_CONF": "changes memory peaks",
    "PYTORCH_CUDA_ALLOC_CONF": "changes memory peaks",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "disables the memory cache: slow, and peaks are not those of training",
    "TORCHDYNAMO_DISABLE": "--compile compiles nothing",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "changes fp32 numbers",
    "TORCH_COMPILE_DISABLE": "--compile compiles nothing",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL makes collectives slow",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0 lets a rank hang forever",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits in each collective: times are not those of training",
}
ELSEWHERE = {"TORCH_CUDA_ARCH_LIST", "CUDA_HOME"}  # checked elsewhere
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def variables(environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Return a check per variable that is set and has an effect here, and one that names others of its families."""
    checks = [_interface(name, environment[name]) for name in INTERFACES if environment.get(name)]
    for name, effect in EFFECTS.items():
        if name in environment:
            checks.append(Check(name=name, status=Status.NOTE, found=shown(environment[name]), advice=effect))
    if left_over := [name for name in LAUNCHER if name in environment and "TORCHELASTIC_RUN_ID" not in environment]:
        advice = f"replay takes them for a launcher's. Try: unset {' '.join(left_over)}"
        checks.append(Check(name="launcher's", status=Status.NOTE, found=", ".join(left_over), advice=advice))
    known = {*EFFECTS, *ELSEWHERE, *INTERFACES}
    if others := sorted(name for name in environment if name.startswith(PREFIXES) and name not in known):
        advice = "their effect here is unknown"
        checks.append(Check(name="also set", status=Status.NOTE, found=", ".join(others), advice=advice))
    return checks or [Check(name="variables", status=Status.OK, found="none is set that changes results")]


def shown(value: str) -> str:
    """Return the value if it is a plain setting; paths, addresses and long values stay out of logs that are shared."""
    return value if re.fullmatch(PLAIN, value) else f"set, {len(value)} characters"


def _interface(name: str, value: str) -> Check:
    """Check that the network interface exists. NCCL treats names as prefixes, and as exact names after `=`."""
    there = [interface for _, interface in socket.if_nameindex()]
    status, advice = Status.NOTE, "the network that ranks use"
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
