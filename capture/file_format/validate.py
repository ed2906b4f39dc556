"""The second pickle of a file of format 1, held against its head and against what may be in it."""

import zlib
from collections.abc import Mapping
from typing import Any

from capture.file_format.encode import FORMAT, other_format
from capture.file_format.micro_batch import CaptureError
from capture.file_format.safe_unpickler import load_plain

_ORIGIN_KINDS: dict[str, Any] = {
    "rank": int | None,
    "world_size": int | None,
    "step": int | None,
    "time": str | None,
    "model_name": str | None,
    "versions": dict,
}
_BODY_KINDS = {"tensors": dict, "call_facts": dict, "left_out": dict, "trains": bool, "origin": dict}
_OPTIONAL_BODY_KINDS = {
    "outputs": dict,
    "random": dict,
    "environment": dict,
    "weights": str,
    "optimizer_step": int,
    "step": str,
}


def checked_body(head: Any, data: bytes, start: int, source: str) -> dict[str, Any]:
    """What begins at byte `start` of `data`. Raises CaptureError if it is not what `head` says, or no capture."""
    if not isinstance(head, dict) or "format" not in head:
        raise CaptureError(f"{source}: a pickle, but no capture: expected a dict with `format`, got {_shown(head)}")
    if head["format"] != FORMAT:
        raise CaptureError(other_format(source, head["format"]))
    if {key: type(value) for key, value in head.items()} != dict.fromkeys(("format", "num_bytes", "crc32"), int):
        raise CaptureError(f"{source}: the file's head is damaged. Delete the file or copy it again")
    payload = memoryview(data)[start:]
    if len(payload) != head["num_bytes"]:
        raise CaptureError(
            f"{source}: {'truncated' if len(payload) < head['num_bytes'] else 'damaged'}: {head['num_bytes']} bytes "
            f"were written after the head, {len(payload)} are here. Delete the file or copy it again"
        )
    if zlib.crc32(payload) != head["crc32"]:
        raise CaptureError(f"{source}: the checksum is wrong: the file is damaged. Delete it or copy it again")
    body: Any
    body, end = load_plain(payload, source=source)
    present = body if isinstance(body, dict) else {}
    kinds = _BODY_KINDS | {key: kind for key, kind in _OPTIONAL_BODY_KINDS.items() if key in present}
    if end != len(payload) or not _is_of_kinds(body, kinds) or not _is_of_kinds(body["origin"], _ORIGIN_KINDS):
        raise CaptureError(f"{source}: the checksum is right, but this is no body of format {FORMAT}: {_shown(body)}")
    for named in (body["left_out"], body["origin"]["versions"], body.get("environment", {})):
        if not all(isinstance(value, str) for value in named.values()):
            raise CaptureError(f"{source}: left_out, versions and environment must be texts, not {_shown(named)}")
    if not all(isinstance(states, dict) for states in body.get("random", {}).values()):
        raise CaptureError(f"{source}: random must hold a dict for each generator, not {_shown(body['random'])}")
    if not all(_is_output(value) for value in body.get("outputs", {}).values()):
        raise CaptureError(
            f"{source}: outputs must be numbers, texts or lists of numbers, not {_shown(body['outputs'])}"
        )
    checked: dict[str, Any] = body
    return checked


def _is_output(value: Any) -> bool:
    return isinstance(value, int | float | str) or (
        isinstance(value, list) and all(type(item) in (int, float) for item in value)
    )


def _is_of_kinds(value: Any, kinds: Mapping[str, Any]) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == kinds.keys()
        and all(isinstance(value[key], kind) for key, kind in kinds.items())
    )


def _shown(value: Any) -> str:
    return f"a dict of {str(sorted(value))[:200]}" if isinstance(value, dict) else f"a {type(value).__name__}"
