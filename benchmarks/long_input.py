"""Write captures of a stated length, for configurations that need longer micro-batches than real ones.

    python -m benchmarks long_input /tmp/long --tokens 8192 --documents 1 --vocabulary 128256

Random token ids of seed 0; every token but a document's first is an action.
"""

import argparse
from datetime import UTC, datetime
from pathlib import Path

import torch

from capture.file_format.capture_file import write_call
from capture.file_format.micro_batch import Origin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch, all documents together")
    parser.add_argument("--documents", type=int, default=1, help="rows of a micro-batch, equally long")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--count", type=int, default=8, help="micro-batches")
    given = parser.parse_args()
    write_inputs(
        given.folder,
        num_tokens=given.tokens,
        num_documents=given.documents,
        vocabulary=given.vocabulary,
        count=given.count,
    )
    return 0


def write_inputs(folder: Path, *, num_tokens: int, num_documents: int = 1, vocabulary: int, count: int) -> None:
    torch.manual_seed(0)
    shape = (num_documents, num_tokens // num_documents)
    folder.mkdir(parents=True, exist_ok=True)
    for step in range(count):
        tensors = {
            "sequences": torch.randint(vocabulary, shape),
            "attention_mask": torch.ones(shape, dtype=torch.bool),
            "action_mask": torch.ones(shape[0], shape[1] - 1, dtype=torch.bool),
        }
        origin = Origin(
            source="",
            rank=0,
            world_size=1,
            step=step,
            time=datetime.now(UTC).isoformat(timespec="microseconds"),
            model_name="made up",
            versions={"torch": str(torch.__version__)},
        )
        write_call(folder, tensors, {}, trains=True, origin=origin)
