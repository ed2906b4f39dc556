"""Read SkyRL's training inputs: a pickled `TensorBatch`, each tensor as bytes.

SkyRL 0.3.0, `skyrl/backends/skyrl_train/training_batch.py` (`TensorBatch.save`), written by `trainer.dump_data_batch`
as `global_step_<step>_training_input.pkl`. The pickle calls `_rebuild_tensor_batch(class, state)`, and the state is
{"batch_dict", "batch_size", "device", "metadata"}. A tensor is {"format": "numpy", "data", "shape", "dtype"}, or, of a
dtype that NumPy lacks, {"format": "torch", "data": what torch.save wrote}; there are lists of them too.

`sequences` and `attention_mask` are [B, S]. `loss_mask`, which a row's loss counts, `response_mask` and all that is
there for each action are [B, A] and cover the last A tokens; the first is our action mask.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import CaptureError
from capture.importers.declaration import DumpFile, Importer, match_module
from capture.importers.dump_rows import DumpRows, select_plain_facts
from capture.importers.record_pickle import TENSOR_BYTES_PER_FILE_BYTE, Array, Record, load_records
from capture.importers.torch_zip import load_torch_zip

MODULE = "skyrl.backends.skyrl_train.training_batch"
_CLASSES = tuple((MODULE, name) for name in ("TensorBatch", "TrainingInputBatch", "TrainingOutputBatch"))
_NUMPY_CODES = {"bool": "b1", "uint8": "u1"} | {
    f"{kind}{8 * size}": f"{kind[0]}{size}" for kind in ("int", "float") for size in (1, 2, 4, 8)
}


def read_skyrl(dump: DumpFile, num_rows: int | None) -> Iterator[CapturedCall]:
    """Read a file. The step in its name is taken if the dump does not say one. Raises CaptureError."""
    data, source, step = dump.read(), dump.source, dump.step

    def record_batch(*arguments: Any) -> Record:
        return Record("batch", arguments)

    functions = {(MODULE, "_rebuild_tensor_batch"): record_batch}
    match load_records(data, source=source, classes=_CLASSES, functions=functions):
        case Record("batch", (_, {"batch_dict": dict(batch), "metadata": dict() | None as metadata})):
            pass
        case _:
            raise CaptureError(f"{source}: a pickle, but no TensorBatch as SkyRL saves it")
    tensors: dict[str, Tensor] = {}
    left_out: dict[str, str] = {}
    num_bytes_left = TENSOR_BYTES_PER_FILE_BYTE * len(data)
    for name, description in batch.items():
        if not isinstance(name, str):
            raise CaptureError(f"{source}: a tensor with a name that is no text")
        match description:
            case None:
                continue
            case {"format": "tensor_list"}:
                left_out[name] = "a list of tensors"
                continue
        tensors[name] = _read_tensor(description, name, source)
        num_bytes_left -= tensors[name].numel() * tensors[name].itemsize
        if num_bytes_left < 0:
            raise CaptureError(f"{source}: its tensors share more bytes than a dump's do")
    if "sequences" not in tensors:
        raise CaptureError(f"{source}: no sequences in this TensorBatch; it has {str(sorted(tensors))[:200]}")
    mask = tensors.pop("loss_mask", tensors.get("response_mask"))
    if mask is not None:
        tensors["action_mask"] = mask
    facts, not_plain = select_plain_facts(metadata or {})
    step = facts["global_step"] if isinstance(facts.get("global_step"), int) else step
    facts |= {"imported_from": "SkyRL"} | ({} if step is None else {"training_step": step})
    rows = DumpRows(source=source, tensors=tensors, facts=facts, left_out=left_out | not_plain)
    yield from rows.make_calls(num_rows)


def _read_tensor(description: Any, name: str, source: str) -> Tensor:
    tensor: Any = None
    match description:
        case {"format": "torch", "data": bytes(saved)}:
            tensor = load_torch_zip(saved, source=source)
        case {"data": bytes(data), "shape": tuple(shape), "dtype": str(dtype)}:
            tensor = Array(_NUMPY_CODES.get(dtype, ""), shape, data).to_tensor()
    if not isinstance(tensor, Tensor):
        raise CaptureError(f"{source}: {name[:40]} was not saved as SkyRL saves a tensor")
    return tensor


SKYRL = Importer(project="skyrl", suffixes=(".pkl",), is_its=match_module(MODULE), read=read_skyrl)
