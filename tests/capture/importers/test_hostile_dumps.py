"""Hostile dumps of other projects, made here: each ends in a CaptureError, runs nothing, and stays small and quick.

As in `file_format/test_hostile_pickles.py`, they are read in one child process (this file as a script), watched by
an audit hook and an address space limit; that the attacks are live is shown there.
"""

import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from capture import CaptureError
from capture.importers import IMPORTERS, read_dump
from capture.importers.declaration import Importer
from tests.helpers.hostile import (
    MARKER,
    MAX_GROWTH_BYTES,
    ROOT,
    TARGETS,
    Attack,
    attacks,
    integer,
    legacy_storage,
    loaded,
    name,
    read_peak_resident_bytes,
    saved,
    text,
    watch,
)

pytestmark = pytest.mark.slow

FOREIGN = ROOT / "tests" / "foreign"
# Seconds of processor time: twice what the most instructions take.
MAX_SECONDS = 20
CLASSES = {
    ".dp": ("verl.protocol", "DataProto"),
    ".roll.pkl": ("roll.distributed.scheduler.protocol", "DataProto"),
}
SKYRL = "skyrl.backends.skyrl_train.training_batch"


def pickled(instructions: bytes) -> bytes:
    return b"\x80\x04" + instructions + b"."


def data_proto(batch: bytes, meta: bytes = b"}", suffix: str = ".dp") -> bytes:
    return pickled(name(*CLASSES[suffix]) + b")\x81" + batch + b"}" + meta + b"\x87b")


def tensor_batch(described: bytes) -> bytes:
    batch = b"}" + text("sequences") + described + b"s"
    state = b"}(" + text("batch_dict") + batch + text("metadata") + b"Nu"
    return pickled(
        name(SKYRL, "_rebuild_tensor_batch") + name(SKYRL, "TrainingInputBatch") + state + b"\x86R",
    )


def zipped(data_pickle: bytes, elements: bytes = bytes(32), *, deflated: str = "") -> bytes:
    """Make a zip as torch.save does, but for the part whose name is `deflated`, which is compressed."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for part, data in (("data.pkl", data_pickle), ("data/0", elements)):
            archive.writestr(f"archive/{part}", data, zipfile.ZIP_DEFLATED if part == deflated else zipfile.ZIP_STORED)
    return file.getvalue()


def stored(key: bytes = text("0"), num_elements: int = 4, kind: str = "LongStorage") -> bytes:
    return b"(" + text("storage") + name("torch", kind) + key + text("cpu") + integer(num_elements) + b"tQ"


def tensor(storage: bytes, size: bytes = b"K\4\x85", stride: bytes = b"K\1\x85") -> bytes:
    hooks = name("collections", "OrderedDict") + b")R"
    return (
        name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + b"K\0" + size + stride + b"\x89" + hooks + b"tR"
    )


def bytes_io(value: bytes) -> bytes:
    return name("_io", "BytesIO") + b")\x81" + saved(value) + b"K\0N\x87b"


def sample(columns: bytes) -> bytes:
    return pickled(b"}" + text("samples") + b"](}(" + columns + b"ues")


def consolidated(leaf: bytes, num_leaves: int = 1, num_bytes: int = 32) -> bytes:
    leaves = b"}(" + b"".join(text(f"a{n}") + leaf for n in range(num_leaves)) + b"u"
    flat = tensor(stored(kind="ByteStorage", num_elements=num_bytes), integer(num_bytes) + b"\x85")
    metadata = b"}(" + text("leaves") + leaves + text("non_tensors") + b"}u"
    called = name("tensordict._reductions", "_rebuild_tensordict_files_consolidated")
    return zipped(pickled(called + metadata + flat + b"\x86R"), bytes(num_bytes))


def leaf(dtype: str, shape: bytes, start: int, end: int) -> bytes:
    return b"(" + text(dtype) + shape + integer(start) + integer(end) + b"K\0t"


def numpy_array(code: str, shape: bytes, data: bytes) -> bytes:
    made = (
        name("numpy._core.multiarray", "_reconstruct") + name("numpy", "ndarray") + b"K\0\x85" + saved(b"b") + b"\x87R"
    )
    dtype = name("numpy", "dtype") + text(code) + b"\x89\x88\x87R" + b"(K\3" + text("<") + b"NNNtb"
    return made + b"(K\1" + shape + dtype + b"\x89" + data + b"tb"


def placements(instructions: bytes) -> dict[str, bytes]:
    """Put instructions wherever a file of each format could be made to run them; a key ends with the file's suffix."""
    inner = zipped(pickled(instructions))
    twice = zipped(pickled(loaded(legacy_storage(instructions))))
    return {
        "verl's root.dp": pickled(instructions),
        "verl's meta_info.dp": data_proto(b"N", b"}" + text("a") + instructions + b"s"),
        "verl's batch.dp": data_proto(saved(inner)),
        "verl's batch, as an old storage.dp": data_proto(saved(twice)),
        "verl's batch, itself.dp": data_proto(instructions),
        "ROLL's batch.roll.pkl": data_proto(bytes_io(inner), suffix=".roll.pkl"),
        "ROLL's remote batch.roll.pkl": data_proto(bytes_io(inner) + b"}" + instructions, suffix=".roll.pkl"),
        "an array's elements.dp": data_proto(
            b"N", b"}" + text("a") + numpy_array("O8", b"K\1\x85", instructions) + b"s"
        ),
        "SkyRL's batch.skyrl.pkl": tensor_batch(instructions),
        "SkyRL's saved tensor.skyrl.pkl": tensor_batch(
            b"}(" + text("format") + text("torch") + text("data") + saved(inner) + b"u"
        ),
        "slime's file.pt": inner,
        "slime's sample.pt": zipped(sample(text("tokens") + instructions)),
        "slime's old storage.pt": twice,
        "slime's storage.pt": zipped(pickled(tensor(instructions))),
    }


def with_column(array: bytes) -> bytes:
    """Make a DataProto, saved by way of NumPy, without tensors and with one column."""
    batch = b"K\4\x85N}\x87"
    return pickled(name(*CLASSES[".dp"]) + b")\x81" + batch + b"}" + text("input_ids") + array + b"s}\x87b")


def bombs() -> Iterator[tuple[str, bytes, str]]:
    """Yield for each file what it is, ending with its suffix, then its bytes, and why it is refused."""
    million, overflow = integer(10**6), integer(2**40) * 15
    endless = struct.pack("<Q", 2**60)
    huge = tensor(stored(), million + million + b"\x86", b"K\0K\0\x86")
    often = b"](" + tensor(stored(), million + b"\x85", b"K\0\x85") * 1000 + b"e"
    tokens = sample(text("tokens") + tensor(stored()))
    last = [b"h" + bytes([n]) for n in range(9)]
    laughs = b"()q\0" + b"".join(b"(" + last[n] * 200 + b"tq" + bytes([n + 1]) for n in range(8)) + b"t"
    one_row = b"}(" + text("tokens") + b"](" + b"K\1" * 1000 + b"e" + text("response_length") + b"K\1uq\0"
    repeated = pickled(b"}" + text("samples") + b"](" + one_row + b"h\0" * 10**5 + b"es")
    shards = text("dp_shards") + b"](}q\0" + b"h\0" * 10**5 + b"e"
    few_tokens = b"](K\1K\2e" + text("response_length") + b"K\1"
    a_shard_often = pickled(b"}(" + text("samples") + b"](}(" + text("tokens") + few_tokens + b"ue" + shards + b"u")
    damaged, larger, gone = "damaged", "bytes of tensors; allowed are", "a compressed one, which torch does not write"
    yield "expanded to 8 TB.pt", zipped(sample(text("tokens") + huge)), larger
    yield "expanded a thousand times.pt", zipped(sample(text("tokens") + often)), larger
    yield "a deflated storage.pt", zipped(tokens, bytes(2**28), deflated="data/0"), gone
    yield "a deflated storage, though a small one.pt", zipped(tokens, deflated="data/0"), gone
    yield "a deflated pickle.pt", zipped(pickled(b"N" + bytes(2**27)), deflated="data.pkl"), gone
    too_long = tensor(stored(num_elements=2**40))
    yield "a storage larger than its file.pt", zipped(sample(text("tokens") + too_long)), "comes with 32 bytes"
    for key in ("9", "../../etc/passwd"):
        yield f"a storage elsewhere, {key}.pt", zipped(sample(text("tokens") + tensor(stored(text(key))))), gone
    yield "an archive cut short.pt", zipped(tokens)[:-30], damaged
    encrypted = zipped(tokens).replace(b"PK\1\2\x14\3\x14\0\0\0", b"PK\1\2\x14\3\x14\0\1\0")
    yield "an encrypted archive.pt", encrypted, "is encrypted"
    yield "a billion laughs.pt", zipped(pickled(laughs)), "a saved tuple"
    yield "a billion laughs in a sample.pt", zipped(sample(text("tokens") + laughs)), "a sample without tokens"
    in_meta = b"}" + text("a") + laughs + b"s"
    yield "a billion laughs in verl's meta_info.dp", data_proto(b"N", in_meta), "without tensors"
    yield "a billion laughs for verl's batch.dp", data_proto(laughs), "not saved as verl"
    yield "a billion laughs as a key.dp", data_proto(b"N", b"}" + laughs + b"Ns"), "no text or number"
    yield "a list in itself.pt", zipped(pickled(b"]q\0h\0a")), "a saved list"
    in_itself = pickled(b"}q\0" + text("samples") + b"]h\0as")
    yield "samples in themselves.pt", zipped(in_itself), "a sample without tokens"
    yield "one sample, a hundred thousand times.pt", zipped(repeated), "Try: rows="
    yield "one shard, a hundred thousand times.pt", zipped(a_shard_often), "the same samples"
    for what, described, why in (
        ("beyond the flat one", leaf("torch.int64", b"]K\5a", 0, 40), "not within"),
        ("before the flat one", leaf("torch.int64", b"]K\1a", -8, 0), "not within"),
        ("larger than its bytes", leaf("torch.int64", b"]" + integer(2**40) + b"a", 0, 32), "32 bytes are no"),
        ("of an overflowing size", leaf("torch.int64", b"](" + overflow + b"e", 0, 32), "32 bytes are no"),
        ("of no known dtype", leaf("torch.os", b"]K\4a", 0, 32), "a tensor of 'os'"),
        ("of negative size", leaf("torch.int64", b"](" + integer(-1) + integer(-4) + b"e", 0, 32), "shape"),
    ):
        yield f"a leaf {what}.dp", data_proto(saved(consolidated(described))), why
    whole = leaf("torch.uint8", b"]" + integer(2**20) + b"a", 0, 2**20)
    yield "a thousand leaves of the same bytes.dp", data_proto(saved(consolidated(whole, 1000, 2**20))), "share more"
    for what, code, shape in (
        ("of a large shape", "i8", million * 2 + b"\x86"),
        ("of a negative shape", "i8", integer(-4) + b"\x85"),
        ("of an overflowing shape", "i8", b"(" + overflow + b"t"),
        ("of objects", "O8", b"K\4\x85"),
        ("of voids", "V8", b"K\4\x85"),
    ):
        yield f"an array {what}.dp", with_column(numpy_array(code, shape, saved(bytes(32)))), "no input_ids"
    described = b"}(" + text("data") + saved(bytes(32)) + text("shape") + million * 2 + b"\x86" + text("dtype")
    for dtype in ("int64", "object"):
        batch = tensor_batch(described + text(dtype) + b"u")
        yield f"SkyRL's tensor of a large shape, {dtype}.skyrl.pkl", batch, "not saved as SkyRL"
    yield "many empty dicts.dp", data_proto(b"](" + b"}" * 2**23 + b"e"), "instructions"
    yield "many marks.dp", data_proto(b"(" * 10**6), "levels of nesting"
    yield "tuples in each other.dp", data_proto(b")" + b"\x85" * 10**5), "not saved as verl"
    yield "endless bytes.dp", data_proto(b"\x8e" + endless), "truncated"
    yield "an endless byte array.dp", data_proto(b"\x96" + endless), "truncated"
    not_json, no_ids = "not JSON", "no token_ids"
    yield "brackets in each other.jsonl", b'{"token_ids":' + b"[" * 10**6, not_json
    yield "many empty lists.jsonl", b'{"token_ids":[' + b"[]," * 2**22 + b"[]]}", no_ids
    yield "many objects.jsonl", b'{"token_ids":[[1,2]]}\n' + b"{}\n" * 10**6, no_ids
    yield "many values.jsonl", b"{" + b",".join(b'"%d":1' % n for n in range(10**5)) + b"}", "up to 100 values"
    yield "many lines.jsonl", b'{"a":[1,2]}\n' * 10**5, no_ids
    yield "many names.jsonl", b"".join(b'{"%d":1}\n' % n for n in range(10**5)), "names"
    yield "a long number.jsonl", b'{"token_ids":[[' + b"9" * 10**6 + b"]]}", not_json
    yield "a large number.jsonl", b'{"token_ids":[[1,1e308,99999999999999999999]]}', no_ids
    yield "NaN for a token.jsonl", b'{"token_ids":[[1,NaN]]}', no_ids
    yield "one long line.jsonl", b'{"token_ids":"' + b"a" * 2**25 + b'"}', "more than"
    yield "not UTF-8.jsonl", b'{"token_ids":"\xff"}', not_json


def hostile_files() -> dict[str, bytes]:
    files = {what: data for what, data, _ in bombs()} | attacks(placements)
    for protocol in range(6):
        files[f"os.system by protocol {protocol}.pt"] = zipped(pickle.dumps(Attack(), protocol=protocol))
    return files


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("hostile")
    names = {}
    for number, (what, data) in enumerate(hostile_files().items()):
        file = f"{number}{what[what.index('.', -10) if '.' in what[-10:] else -3 :]}"
        (folder / file).write_bytes(data)
        names[file] = what
    child = subprocess.run(
        [sys.executable, "-m", "tests.capture.importers.test_hostile_dumps", str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert child.returncode == 0, child.stderr
    report: dict[str, Any] = json.loads(child.stdout)
    report["outcomes"] = {names[file]: outcome for file, outcome in report["outcomes"].items()}
    report["has_marker"] = (folder / MARKER).exists()
    return report


def test_every_hostile_dump_ends_in_a_capture_error(verdicts: dict[str, Any]) -> None:
    assert len(verdicts["outcomes"]) > 400
    outcomes = verdicts["outcomes"]
    others = {what: outcome for what, outcome in outcomes.items() if outcome["error"] != "CaptureError"}
    assert others == {}


def test_each_is_refused_for_what_it_is(verdicts: dict[str, Any]) -> None:
    messages = {what: outcome["message"] for what, outcome in verdicts["outcomes"].items()}
    assert {what: messages[what] for what, _, why in bombs() if why not in messages[what]} == {}
    named = {what: message for what, message in messages.items() if what.startswith(tuple(TARGETS))}
    assert {what: message for what, message in named.items() if "refused: " not in message} == {}


def test_no_hostile_dump_runs_anything(verdicts: dict[str, Any]) -> None:
    assert verdicts["events"] == []
    assert not verdicts["has_marker"]


def test_no_hostile_dump_takes_long_or_much_memory(verdicts: dict[str, Any]) -> None:
    slow = {what: outcome for what, outcome in verdicts["outcomes"].items() if outcome["seconds"] > MAX_SECONDS}
    assert slow == {}
    assert verdicts["growth_bytes"] < MAX_GROWTH_BYTES


def choose_importer(path: Path) -> Importer:
    suffixes = {
        ".dp": "verl",
        ".roll.pkl": "roll",
        ".skyrl.pkl": "skyrl",
        ".pt": "slime",
        ".jsonl": "nemo-rl",
    }
    return next(IMPORTERS[project] for suffix, project in suffixes.items() if path.name.endswith(suffix))


def try_to_read(path: Path) -> dict[str, Any]:
    start = time.process_time()
    error, message = "none", ""
    try:
        for _ in read_dump(path, path.name, choose_importer(path), None):
            pass
    except CaptureError as refusal:
        error, message = "CaptureError", str(refusal)
    except Exception as other:
        error, message = type(other).__name__, str(other)
    return {"error": error, "message": message[:300], "seconds": time.process_time() - start}


def read_all(folder: Path) -> dict[str, Any]:
    for path in FOREIGN.glob("*.[dp]*"):
        if path.suffix in (".dp", ".pkl"):
            list(read_dump(path, path.name, None, None))
    # The first zip that Python wrote makes zipfile import this codec, which the audit hook would take for an attack.
    "a name in a zip that Python wrote".encode("cp437")
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + MAX_GROWTH_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = read_peak_resident_bytes()
    paths, events = sorted(folder.glob("[0-9]*.*")), list[str]()
    watch(events)
    outcomes = {path.name: try_to_read(path) for path in paths}
    return {"outcomes": outcomes, "events": list(events), "growth_bytes": read_peak_resident_bytes() - before}


if __name__ == "__main__":
    print(json.dumps(read_all(Path(sys.argv[1]))))
