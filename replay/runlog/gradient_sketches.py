"""Store a sketch of each parameter's gradient, so that runs are compared by direction and not only by norm.

    gradients/pass000003.safetensors    by rank 0, at the end of an accumulation window: a row per parameter

Written under `--gradient-sketches`. A row is the gradient's norm and its sketch: the table of `sketch_parameter`, whose
rows are summed into a few with the signs of a hash. A sketch is linear: the difference of two sketches is the sketch of
the difference. A rank that holds different values has its own rows, such as `model.norm.weight@1`.

Shape letters: T rows of a parameter's sketch, K signs, R rows of the stored sketch.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from actor_init.name_hash import mix_bits
from actor_init.sketching import sketch_parameter
from actor_init.spec import UsageError
from actor_init.world import World

FOLDER = "gradients"
# R: with 16 signs a row, a sketch has 128 numbers for a parameter of any size.
NUM_ROWS = 8
# A gradient below this share of the total norm is measured by that share: its whole size may be rounding.
LEAST_SHARE = 1e-2
_KEY = 0x0DDBA11


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterDistance:
    """The distance of one parameter's gradient from the reference's.

    size      the norm of the reference's gradient, or LEAST_SHARE of its total norm if that is more
    distance  the norm of the difference, as estimated from the sketches
    """

    name: str
    size: float
    other_norm: float
    distance: float


def make_row(gradient: Tensor) -> Tensor:
    """Return [1 + R * K], fp32, on the host: the norm and the sketch."""
    sketch_TK = sketch_parameter(gradient if gradient.ndim else gradient.reshape(1))
    index_T = torch.arange(len(sketch_TK), device=sketch_TK.device)
    bits_T = mix_bits(mix_bits(index_T ^ _KEY) ^ _KEY)
    signs_TK = (2 * ((bits_T[:, None] >> torch.arange(sketch_TK.shape[1], device=bits_T.device)) & 1) - 1).float()
    summed_RK = sketch_TK.new_zeros(NUM_ROWS, sketch_TK.shape[1])
    summed_RK.index_add_(0, index_T % NUM_ROWS, sketch_TK * signs_TK)
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64 if gradient.device.type == "cpu" else None)
    return torch.cat([norm.float().reshape(1), summed_RK.flatten()]).cpu()


def write(folder: Path, index: int, gradients: Iterable[tuple[str, Tensor]], world: World) -> None:
    """Write the sketches of the gradient that the window which ends with pass `index` accumulated.

    All ranks must call this, since iterating over `gradients` gathers each of them.
    """
    with torch.no_grad():
        rows = {name: make_row(gradient) for name, gradient in gradients}
    by_rank = world.gather({name: row.numpy().tobytes() for name, row in rows.items()})
    if world.rank:
        return
    for rank, rank_rows in enumerate(by_rank):
        for name, data in rank_rows.items():
            if data != by_rank[0].get(name):
                rows[f"{name}@{rank}"] = torch.frombuffer(bytearray(data), dtype=torch.float32)
    path = path_of(folder, index)
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    save_file(rows, unfinished)
    os.replace(unfinished, path)


def path_of(folder: Path, index: int) -> Path:
    return folder / FOLDER / f"pass{index:06}.safetensors"


def read(folder: Path, index: int) -> Mapping[str, Tensor]:
    """Read what `write` wrote. Raises UsageError if it is missing or damaged."""
    path = path_of(folder, index)
    try:
        rows: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} is missing or damaged: {error}. Try: the run again") from error
    return rows


def compare(reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Iterator[ParameterDistance]:
    """Yield the distance of each parameter that has a gradient in either run; the largest if several ranks have one."""
    references, others = _group_by_parameter(reference), _group_by_parameter(other)
    total_norm = math.sqrt(sum(float(rows[0][0]) ** 2 for rows in references.values()))
    for name in dict.fromkeys([*references, *others]):
        # A run without a gradient of the parameter has the sketch of zeros.
        zeros = [torch.zeros_like((references.get(name) or others[name])[0])]
        pairs = list(product(references.get(name, zeros), others.get(name, zeros)))
        row, other_row = max(pairs, key=lambda pair: _estimate_distance(*pair))
        yield ParameterDistance(
            name=name,
            size=max(float(row[0]), LEAST_SHARE * total_norm),
            other_norm=float(other_row[0]),
            distance=_estimate_distance(row, other_row),
        )


def _group_by_parameter(rows: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    by_name: dict[str, list[Tensor]] = {}
    for key in sorted(rows):
        by_name.setdefault(key.partition("@")[0], []).append(rows[key])
    return by_name


def _estimate_distance(row: Tensor, other_row: Tensor) -> float:
    """Return the larger of two estimates of the difference's norm: from the sketches, and from the norms alone."""
    if not bool(row.isfinite().all() and other_row.isfinite().all()):
        return 0.0 if torch.equal(row.isfinite(), other_row.isfinite()) else math.inf
    difference = other_row.double() - row.double()
    return max(abs(float(difference[0])), float(torch.linalg.vector_norm(difference[1:])))
