"""Read a matrix of configurations: tables of option values, each expanded to the product of its lists.

    [[cells]]
    backend = ["deepspeed", "fsdp2"]
    packing = [true, false]
    dtype = ["fp32", "bf16"]

    [[cells]]                     # a matrix is the union of its tables
    backend = "fsdp2"
    tp = 2
    data = [1, 2]                 # data ranks: data x ring x tp processes are started

A key is an actor option of `replay` without its dashes, or `data`.
"""

import tomllib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import combinations, product
from pathlib import Path
from typing import Any

from actor_init.declarations.backends import BACKENDS, DEFAULT, find_backends
from actor_init.spec import Attention, Compile, Dtype, Kernels, UsageError
from capture import facts
from replay.options.option_parsing import DeclaredOption, list_options

# Values by option name: a word of an enum, a number or a bool.
Setting = Mapping[str, Any]
Table = Mapping[str, Sequence[Any]]

DATA = "data"
EDGE_ROWS, EDGE_DOCUMENTS = "edge rows", "edge documents"
# The folder below inputs/edges that has the inputs of each group of runs.
EDGES = {EDGE_ROWS: "rows", EDGE_DOCUMENTS: "documents"}
COMPILE_SWITCHES = {Compile.BLOCKS: "compile", Compile.DEEPCOMPILE: "deepcompile"}
# Without sharding, this backend is plain torch autograd.
REFERENCE = "fsdp2"
DTYPES = [Dtype.FP32, Dtype.BF16]
KERNELS = [Attention.SDPA, Attention.EAGER, Attention.FLASH, Attention.CUDNN, Attention.VARLEN]


def make_quick_tables(num_devices: int, kernel: str) -> tuple[Table, ...]:
    """Return the tables of the quick matrix. `kernel` is one that every device supports for the model."""
    # a wrong number of ranks or a wrong shard is clearest where rounding is smallest
    exact: Table = {"dtype": [Dtype.FP32], "attention": [kernel]}
    data: Table = {DATA: [min(2, num_devices)]}
    every = [*BACKENDS]
    split: list[Table] = [
        {"backend": find_backends(lambda backend: backend.tp), **exact, "tp": [2]},
        {"backend": find_backends(lambda backend: backend.ring), **exact, "ring": [2]},
    ]
    accumulating: list[Table] = [
        {"backend": [name], "zero_stage": [*backend.accumulating_stages], **exact, **data, "grad_accumulation": [2]}
        for name, backend in BACKENDS.items()
        if backend.accumulating_stages
    ]
    return (
        {"backend": every, "dtype": DTYPES, "packing": [False, True], "attention": [kernel]},
        {"backend": [REFERENCE], "dtype": DTYPES, "attention": KERNELS},
        *split,
        *({**stages, **exact, **data} for stages in make_stage_tables()),
        {"backend": find_backends(lambda backend: not backend.shards), **exact, **data},
        {"backend": every, **exact, "grad_accumulation": [2]},
        *accumulating,
        {"backend": every, **exact, "gradient_checkpointing": [True]},
        {"backend": every, "dtype": DTYPES, "attention": [kernel], "kernels": [Kernels.FUSED]},
    )


def make_stage_tables() -> list[Table]:
    """Return a table for each sharding backend, with its stages."""
    return [
        {"backend": [name], "zero_stage": [*backend.stages]} for name, backend in BACKENDS.items() if backend.shards
    ]


def make_edge_tables(group: str, num_devices: int, kernel: str) -> tuple[Table, ...]:
    """Return the runs of the edge shapes that ship with the project, in fp32; `group` is a key of EDGES."""
    packing: Table = {"packing": [False, True] if group == EDGE_ROWS else [True]}
    exact: Table = {"dtype": [Dtype.FP32], "attention": [kernel]}
    axes_there = ("ring", DATA) if num_devices > 1 else ()
    split: list[Table] = [{"backend": [DEFAULT], **exact, axis: [2]} for axis in axes_there]
    return ({"backend": [*BACKENDS], **exact, **packing}, *split)


class BuiltInMatrix(StrEnum):
    """The matrices that are built in."""

    QUICK = "quick"
    PAIRS = "pairs"
    FULL = "full"


def make_full_tables(num_devices: int, kernel: str) -> tuple[Table, ...]:
    """Return every stage, split, kernel, dtype and compiler, then the options that are not multiplied with the rest.

    Those are a backend's own compiler, on one process only, gradient accumulation, gradient checkpointing and fused
    modules.
    """
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    shared: Table = {"dtype": [*DTYPES, Dtype.FP16], "packing": [False, True], "attention": KERNELS}
    compiled: Table = {"compile": [Compile.OFF, Compile.BLOCKS]}
    alone: Table = {"dtype": DTYPES, "packing": [True], "attention": [kernel]}
    folded: list[Table] = [
        {"grad_accumulation": [2]},
        {"gradient_checkpointing": [True]},
        {"kernels": [Kernels.FUSED], **compiled},
    ]
    engines = [(engine, _make_splits(engine["backend"][0], sizes)) for engine in make_stage_tables()]
    unsharded_engines = [
        ({"backend": [name]}, _make_splits(name, sizes)) for name in find_backends(lambda backend: not backend.shards)
    ]
    own_compilers: list[Table] = [
        {
            "backend": [name],
            "zero_stage": [*stages],
            "dtype": [Dtype.BF16],
            "packing": [True],
            "attention": [Attention.SDPA],
            "compile": [compiler],
        }
        for name, backend in BACKENDS.items()
        for compiler, stages in backend.compilers.items()
    ]
    return (
        *({**engine, **split, **shared, **compiled} for engine, split in [*engines, *unsharded_engines]),
        *own_compilers,
        *({**engine, **alone, **split, **extra} for engine, split in engines for extra in folded),
    )


def _make_splits(backend: str, sizes: Sequence[int]) -> Table:
    """Split over the given number of ranks on each axis that `backend` has."""
    declaration = BACKENDS[backend]
    return {
        axis: sizes for axis, is_there in (("ring", declaration.ring), ("tp", declaration.tp), (DATA, True)) if is_there
    }


def read_settings(matrix: str, num_devices: int, kernel: str = Attention.SDPA) -> list[Setting]:
    """Return the settings of `--matrix` (for `pairs` those of `full`); of the full matrix, those that fit
    `num_devices`.

    `kernel` is one that every device supports for the model. Raises UsageError for a file that is not a matrix.
    """
    if matrix == BuiltInMatrix.QUICK:
        return _expand(make_quick_tables(num_devices, kernel))
    if matrix not in list(BuiltInMatrix):
        return _expand(read_matrix(Path(matrix)))
    return [
        setting for setting in _expand(make_full_tables(num_devices, kernel)) if count_processes(setting) <= num_devices
    ]


def make_edge_settings(matrix: str, num_devices: int, kernel: str) -> dict[str, list[Setting]]:
    """Return, by group, the edge-shape runs that a built-in matrix adds to its own."""
    if matrix not in list(BuiltInMatrix):
        return {}
    return {group: _expand(make_edge_tables(group, num_devices, kernel)) for group in EDGES}


def arrange_settings(matrix: str, settings: Sequence[Setting]) -> Sequence[Setting]:
    """Select and order, for `--matrix`, the settings that can run."""
    if matrix not in (BuiltInMatrix.PAIRS, BuiltInMatrix.FULL):
        return settings
    ordered, num_covering = order_by_pairs(settings)
    return ordered[:num_covering] if matrix == BuiltInMatrix.PAIRS else ordered


def read_matrix(path: Path) -> list[Table]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            facts.Setting("matrix", path), f"is neither one of {', '.join(BuiltInMatrix)} nor a file"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(
            facts.Setting("matrix", path), f"cannot be read: {error}", "docs/parity.md has an example"
        ) from error
    tables = content.get("cells")
    if (
        list(content) != ["cells"]
        or not isinstance(tables, list)
        or not all(isinstance(table, dict) for table in tables)
    ):
        raise UsageError(
            facts.Setting("matrix", path),
            f"holds {', '.join(content) or 'nothing'}; it needs tables called [[cells]]",
        )
    return [{_read_axis(key, path): _read_values(key, value, path) for key, value in table.items()} for table in tables]


def _read_values(key: str, value: Any, path: Path) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(element, (str, int, float)) for element in values):
        raise UsageError(
            facts.Setting("matrix", path), f": {key} is {value!r}; allowed is a value, or a list of values"
        )
    return values


def _read_axis(key: str, path: Path) -> str:
    name = key.replace("-", "_")
    if name not in list_axes():
        raise UsageError(facts.Setting("matrix", path), f": {key} is no axis; allowed are {', '.join(list_axes())}")
    return name


def list_axes() -> list[str]:
    fields = dict.fromkeys(option.field for option in list_options() if option.part.startswith("actor"))
    return [DATA, *fields]


def _expand(tables: Sequence[Table]) -> list[Setting]:
    """Return the products of all tables, each setting once."""
    settings = (dict(zip(table, values, strict=True)) for table in tables for values in product(*table.values()))
    return list({tuple(sorted(setting.items(), key=lambda item: item[0])): setting for setting in settings}.values())


def count_processes(setting: Setting) -> int:
    return int(setting.get(DATA, 1)) * int(setting.get("tp", 1)) * int(setting.get("ring", 1))


def order_by_pairs(settings: Sequence[Setting]) -> tuple[list[Setting], int]:
    """Reorder the settings so that a first few cover every pair of values; return the order and the number of those
    few.

    The rest is ordered the same way, again and again, so that a long matrix that is interrupted has covered most
    faults between two options, and each value about equally often. Greedy: always takes the setting that adds the most
    pairs.
    """
    # torch takes seconds to import, and `--help` imports this module.
    import torch

    columns: dict[Any, int] = {}
    pairs = [
        [columns.setdefault(pair, len(columns)) for pair in combinations(sorted(setting.items()), 2)]
        for setting in settings
    ]
    has_pair = torch.zeros(len(settings), len(columns))
    for number, pair_columns in enumerate(pairs):
        has_pair[number, pair_columns] = 1
    is_left = torch.ones(len(settings), dtype=torch.bool)
    order: list[int] = []
    num_covering = 0
    while is_left.any():
        uncovered = has_pair[is_left].any(dim=0).float()
        # What is left varies one option alone and has no pairs.
        if not uncovered.any():
            order += is_left.nonzero()[:, 0].tolist()
            break
        while uncovered.any():
            num_new = (has_pair @ uncovered).masked_fill(~is_left, -1)
            # Of equally good settings, argmax takes the first.
            order.append(int(num_new.argmax()))
            is_left[order[-1]] = False
            uncovered[pairs[order[-1]]] = 0
        num_covering = num_covering or len(order)
    return [settings[number] for number in order], num_covering or len(order)


def to_options(setting: Setting) -> dict[str, Any]:
    """Return the setting as the command line would give it to `option_parsing.build_replay_spec`.

    Raises UsageError for an invalid value.
    """
    by_field: dict[str, DeclaredOption] = {}
    for option in list_options():
        by_field.setdefault(option.field, option)
    options: dict[str, Any] = {}
    for name, value in setting.items():
        if name == DATA:
            if type(value) is not int or value < 1:
                raise UsageError(f"data {value!r} is not allowed. Give a whole number of at least 1")
        elif name == "compile":
            if value not in list(Compile):
                raise UsageError(f"compile {value!r} is not allowed. Give one of {', '.join(Compile)}")
            options |= {COMPILE_SWITCHES[value]: True} if value != Compile.OFF else {}
        elif by_field[name].value_type is bool:
            if type(value) is not bool:
                raise UsageError(f"{name} {value!r} is not allowed. Give true or false")
            options[name] = value
        else:
            options[name] = str(value)
    return options


def name_of(setting: Setting) -> str:
    """Return a name such as `fsdp2 bf16 packed sdpa tp 2`."""
    remaining = dict(setting)
    words = [str(remaining.pop("backend", DEFAULT))]
    if (stage := remaining.pop("zero_stage", None)) is not None:
        words.append(f"stage {stage}")
    words.append(str(remaining.pop("dtype", Dtype.BF16)))
    words.append("packed" if remaining.pop("packing", True) else "padded")
    words.append(str(remaining.pop("attention", Attention.AUTO)))
    if (compiled := remaining.pop("compile", Compile.OFF)) != Compile.OFF:
        words.append("compiled" if compiled == Compile.BLOCKS else str(compiled))
    words += [f"{name} {size}" for name in (DATA, "tp", "ring") if (size := remaining.pop(name, 1)) != 1]
    remaining = {name.replace("_", "-"): value for name, value in remaining.items()}
    return " ".join([*words, *(name if value is True else f"{name} {value}" for name, value in remaining.items())])
