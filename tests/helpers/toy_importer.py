"""An importer in one file, for tests: each line of a file is a row of token ids.

`python -m tests.helpers.toy_importer ...` is `capture` with it.
"""

import sys
from collections.abc import Iterator

import torch

from capture.file_format.capture_file import CapturedCall
from capture.importers import IMPORTERS
from capture.importers.declaration import DumpFile, Importer
from capture.importers.dump_rows import DumpRows

START = b"toy rows\n"


def read_toy(dump: DumpFile, num_rows: int | None) -> Iterator[CapturedCall]:
    lines = dump.read().removeprefix(START).splitlines()
    sequences_BS = torch.tensor([[int(token) for token in line.split()] for line in lines])
    rows = DumpRows(source=dump.source, tensors={"sequences": sequences_BS}, facts={"training_step": dump.step})
    yield from rows.make_calls(num_rows)


TOY = Importer(project="toy", suffixes=(".toy",), is_its=lambda start: start.startswith(START), read=read_toy)


if __name__ == "__main__":
    IMPORTERS[TOY.project] = TOY
    from capture.cli import main

    raise SystemExit(main(sys.argv[1:]))
