"""Take a pass's random states, outputs and settings that change numbers, which a replay needs beside its arguments.

The job's thread only takes snapshots; the writer's thread turns them into plain data. NumPy's generator is taken if the
job has loaded NumPy, which is never imported here.
"""

import _random
import ctypes
import os
import random
import struct
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from capture.file_format.body import Output, RandomStates
from capture.file_format.safe_unpickler import type_name
from capture.file_format.tensor_codec import bytes_of, can_encode

ENVIRONMENT_NAMES = (  # variables that change numbers; none of them holds a secret or a path
    "ACCELERATE_MIXED_PRECISION",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "FLASH_ATTENTION_DETERMINISTIC",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
_MAX_VALUE_LENGTH = 100
_NUM_WORDS = 625  # Python's generator has 624 and a position
_MAX_VALUES = 65_536
_NAMES_OF_TOKENS = ("log_probs", "output")  # numbers of tokens, kept value by value beside their sums
_NAMES_OF_FEW = ("token_log_probs",)


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomSnapshot:
    """The states of the random generators before a pass, as the generators' own objects."""

    python: tuple[Any, ...]
    numpy: Mapping[str, Any] | None
    cpu: Tensor
    cuda: Tensor | None

    def plain(self) -> RandomStates:
        """Return the states as plain data, as they are written."""
        version, words, gauss = self.python
        states: RandomStates = {
            "python": {"version": version, "state": struct.pack(f"<{_NUM_WORDS}I", *words), "gauss": gauss},
            "torch": {"cpu": bytes(bytes_of(self.cpu))},
        }
        if self.cuda is not None:
            states["torch"]["cuda"] = bytes(bytes_of(self.cuda))
        if self.numpy is not None:
            states["numpy"] = {
                "algorithm": str(self.numpy["bit_generator"]),
                "keys": self.numpy["state"]["key"].tobytes(),
                "position": int(self.numpy["state"]["pos"]),
                "has_gauss": int(self.numpy["has_gauss"]),
                "gauss": float(self.numpy["gauss"]),
            }
        return states


def random_snapshot(*, on_cuda: bool) -> RandomSnapshot:
    """Take the generators' states.

    The device's generator is a seed and an offset on the host, so there is no wait for the device.
    """
    numpy_random = sys.modules.get("numpy.random")
    return RandomSnapshot(
        python=_python_state(),
        numpy=None if numpy_random is None else _numpy_state(numpy_random),
        cpu=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state() if on_cuda else None,
    )


_python_before: tuple[bytes, tuple[Any, ...]] | None = None  # the latest state of Python's generator, raw and whole


def _python_state() -> tuple[Any, ...]:
    """Take the state of Python's global generator; the one taken before, if the generator was not used since.

    Its 625 numbers take 0.2 ms in a job whose caches hold other things. Their bytes are compared in none of it.
    """
    global _python_before
    if not _has_raw_python_state():
        return random.getstate()
    generator = random.getstate.__self__  # type: ignore[attr-defined]
    raw = _raw_python_state(generator)
    if _python_before is None or _python_before[0] != raw or _python_before[1][2] != generator.gauss_next:
        _python_before = (raw, random.getstate())
    return _python_before[1]


def _raw_python_state(generator: random.Random) -> bytes:
    """Return the bytes of what CPython's generator written in C adds to a plain object."""
    begin, end = object.__basicsize__, _random.Random.__basicsize__
    return ctypes.string_at(id(generator) + begin, end - begin)


@cache
def _has_raw_python_state() -> bool:
    """Tell, by trying with a generator of its own, whether those bytes change with each use, and only then."""
    if sys.implementation.name != "cpython" or _random.Random.__basicsize__ < _NUM_WORDS * 4:
        return False
    generator = random.Random(7)
    seen = [_raw_python_state(generator)]
    for _ in range(3):
        generator.random()
        seen.append(_raw_python_state(generator))
    at_end = generator.getstate()
    generator.seed(7)
    is_same = _raw_python_state(generator) == seen[0] == _raw_python_state(random.Random(7))
    generator.setstate(at_end)
    return is_same and len(set(seen)) == len(seen) and _raw_python_state(generator) == seen[-1]


def _numpy_state(numpy_random: Any) -> Mapping[str, Any] | None:
    """Take the state of NumPy's global generator; None if the job has put another one than its own there."""
    state: Mapping[str, Any] = numpy_random.get_state(legacy=False)
    return state if state["bit_generator"] == "MT19937" else None


def restore_random_states(states: RandomStates) -> None:
    """Set the generators of this process to the states before a captured pass; NumPy's if it is loaded.

    `states` are those of `Call.random`. Raises ValueError if they are damaged or missing.
    """
    try:
        python = states["python"]
        words = struct.unpack(f"<{_NUM_WORDS}I", python["state"])
        random.setstate((python["version"], words, python["gauss"]))
        torch.set_rng_state(torch.tensor(list(states["torch"]["cpu"]), dtype=torch.uint8, device="cpu"))
        if "cuda" in states["torch"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.tensor(list(states["torch"]["cuda"]), dtype=torch.uint8, device="cpu"))
        numpy_random = sys.modules.get("numpy.random")
        if "numpy" in states and numpy_random is not None:
            kept = states["numpy"]
            keys = sys.modules["numpy"].frombuffer(kept["keys"], dtype="<u4")
            numpy_random.set_state((kept["algorithm"], keys, kept["position"], kept["has_gauss"], kept["gauss"]))
    except (KeyError, TypeError, RuntimeError, struct.error) as error:
        raise ValueError(
            f"no random states: {error}. Record with reproduce=True or a flight recorder to have them"
        ) from None


def environment() -> dict[str, str]:
    """Return settings that change numbers: allow-listed variables that are set, and torch's own."""
    named = {name: os.environ[name][:_MAX_VALUE_LENGTH] for name in ENVIRONMENT_NAMES if name in os.environ}
    return named | {
        "torch.deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.num_threads": str(torch.get_num_threads()),
        "torch.cudnn.deterministic": str(torch.backends.cudnn.deterministic),
        "torch.cudnn.benchmark": str(torch.backends.cudnn.benchmark),
    }


def outputs_of(output: Any, *, with_rows: bool) -> dict[str, Tensor]:
    """Find `loss` in a forward's result, and `output` if the result is a row of numbers for each row.

    In a tuple, the loss is the only number; what is no number is looked for in its first place.
    """
    if isinstance(output, tuple) and output:
        numbers = [one for one in output if isinstance(one, Tensor) and one.ndim == 0 and one.is_floating_point()]
        output = numbers[0] if len(numbers) == 1 else output[0]
    if isinstance(output, dict):
        loss = output.get("loss")
        return {"loss": loss} if isinstance(loss, Tensor) and loss.numel() == 1 and can_encode(loss) else {}
    if not isinstance(output, Tensor) or not output.is_floating_point() or not can_encode(output):
        return {}
    if output.ndim == 0:
        return {"loss": output}
    return {"output": output} if output.ndim == 2 and with_rows else {}


def dtypes_of(output: Any, loss: Tensor | None) -> dict[str, str]:
    """Return the dtypes of logits and loss: they say more of a job's arithmetic than that of its weights."""
    logits = output.get("logits") if isinstance(output, dict) else None
    named = {"logits_dtype": logits, "loss_dtype": loss}
    return {name: str(one.dtype).removeprefix("torch.") for name, one in named.items() if isinstance(one, Tensor)}


def noted(values: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, float | str]]:
    """Sort what a job noted into tensors to copy and plain values.

    A DTensor becomes the name of its type: its value would take a collective. Raises TypeError or ValueError for what
    is no number.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, float | str] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            if can_encode(value):
                tensors[name] = value
            else:
                plain[name] = type_name(value)
        elif value is not None:
            plain[name] = float(value)
    return tensors, plain


def plain_outputs(tensors: Mapping[str, Tensor]) -> dict[str, Output]:
    """Turn tensors on the host into plain outputs.

    One number is kept as it is, more as a sum for each row and a checksum of all bytes. Numbers of tokens are also kept
    value by value, flat, with their shape, up to 65,536.
    """
    outputs: dict[str, Output] = {}
    for name, tensor in tensors.items():
        if name in _NAMES_OF_FEW:
            outputs[name] = tensor.double().tolist()
            continue
        if name in _NAMES_OF_TOKENS and tensor.is_floating_point() and 0 < tensor.numel() <= _MAX_VALUES:
            outputs[f"{name}_values"] = tensor.double().flatten().tolist()
            outputs[f"{name}_shape"] = list(tensor.shape)
        if tensor.numel() == 1:
            outputs[name] = float(tensor.item())
            continue
        rows = tensor.reshape(tensor.shape[0], -1) if tensor.ndim > 1 else tensor.reshape(1, -1)
        outputs[f"{name}_row_sums"] = rows.double().sum(dim=1).tolist()
        outputs[f"{name}_crc32"] = zlib.crc32(bytes_of(tensor.contiguous().reshape(-1)))
    return outputs
