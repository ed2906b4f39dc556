"""Define the body of a capture as it is pickled, and check that what was read from a file is one.

The body names no class. What the checks have passed has these types; what is in tensors, call facts and states of
generators is checked where it is used.
"""

from collections.abc import Mapping
from types import UnionType
from typing import TypedDict, cast

from capture.file_format.micro_batch import CaptureError
from capture.file_format.tensor_codec import EncodedTensor

Output = int | float | str | list[int] | list[float]


class PythonState(TypedDict):
    """The state of Python's random generator."""

    version: int
    state: bytes
    gauss: float | None


class TorchState(TypedDict, total=False):
    """The states of torch's random generators; that of the device only where the job had one."""

    cpu: bytes
    cuda: bytes


class NumpyState(TypedDict):
    """The state of NumPy's random generator."""

    algorithm: str
    keys: bytes
    position: int
    has_gauss: int
    gauss: float


class RandomStates(TypedDict, total=False):
    """The states of the random generators before a pass; empty where they were not recorded."""

    python: PythonState
    torch: TorchState
    numpy: NumpyState


class WrittenOrigin(TypedDict):
    """Where a pass came from, without its file's name."""

    rank: int | None
    world_size: int | None
    step: int | None
    time: str | None
    model_name: str | None
    versions: dict[str, str]


class _Parts(TypedDict):
    """The parts that every body has."""

    tensors: dict[str, EncodedTensor]
    call_facts: dict[str, object]
    left_out: dict[str, str]
    trains: bool
    origin: WrittenOrigin


class Body(_Parts, total=False):
    """What a capture holds, besides its head; `Call` says what each part is."""

    outputs: dict[str, Output]
    random: RandomStates
    environment: dict[str, str]
    weights: str
    optimizer_step: int
    step: str
    notes: dict[str, EncodedTensor]
    recording: str


_ORIGIN_KINDS: Mapping[str, type | UnionType] = {
    "rank": int | None,
    "world_size": int | None,
    "step": int | None,
    "time": str | None,
    "model_name": str | None,
    "versions": dict,
}
_KINDS: Mapping[str, type | UnionType] = {
    "tensors": dict,
    "call_facts": dict,
    "left_out": dict,
    "trains": bool,
    "origin": dict,
}
_OPTIONAL_KINDS: Mapping[str, type | UnionType] = {
    "outputs": dict,
    "random": dict,
    "environment": dict,
    "weights": str,
    "optimizer_step": int,
    "step": str,
    "notes": dict,
    "recording": str,
}


def is_body(read: object) -> bool:
    """Tell whether what was read has the parts of a body, each of its kind."""
    present = read if isinstance(read, dict) else {}
    kinds = {**_KINDS, **{name: kind for name, kind in _OPTIONAL_KINDS.items() if name in present}}
    return _is_of_kinds(read, kinds) and _is_of_kinds(present["origin"], _ORIGIN_KINDS)


def checked_body(read: object, source: str) -> Body:
    """Return what was read, for which `is_body` holds.

    Raises CaptureError if a part holds something else than it may.
    """
    body = cast(Body, read)
    named: tuple[Mapping[str, object], ...] = (
        body["left_out"],
        body["origin"]["versions"],
        body.get("environment", {}),
    )
    for texts in named:
        if not all(isinstance(value, str) for value in texts.values()):
            raise CaptureError(f"{source}: left_out, versions and environment must be texts, not {shown(texts)}")
    if not all(isinstance(states, dict) for states in body.get("random", {}).values()):
        raise CaptureError(f"{source}: random must hold a dict for each generator, not {shown(body['random'])}")
    if not all(_is_output(value) for value in body.get("outputs", {}).values()):
        raise CaptureError(
            f"{source}: outputs must be numbers, texts or lists of numbers, not {shown(body['outputs'])}"
        )
    return body


def shown(read: object) -> str:
    return f"a dict of {str(sorted(read))[:200]}" if isinstance(read, dict) else f"a {type(read).__name__}"


def _is_output(value: object) -> bool:
    return isinstance(value, int | float | str) or (
        isinstance(value, list) and all(type(item) in (int, float) for item in value)
    )


def _is_of_kinds(read: object, kinds: Mapping[str, type | UnionType]) -> bool:
    return (
        isinstance(read, dict)
        and read.keys() == kinds.keys()
        and all(isinstance(read[name], kind) for name, kind in kinds.items())
    )
