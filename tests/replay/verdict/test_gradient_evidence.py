"""The job's gradient beside the replay's, by parameter and kind: made records, whose gradients are known."""

import math
import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from capture.file_format.gradient_signature import GradientSignature, choose_signature_elements, find_held_elements
from capture.file_format.optimizer_step import OptimizerStep
from replay.verdict.gradient_evidence import (
    GradientEvidence,
    compare_signatures,
    measure_signature_distances,
    name_kind,
)
from replay.verdict.gradient_samples import GradientSamples
from replay.verdict.recorded_pass import RecordedPass, WeightComparison

Gradient = Sequence[float]
SHAPE = (40, 30)
NAMES = [f"model.layers.{layer}.{part}.weight" for layer in range(2) for part in ("q_proj", "o_proj")]


def draw_gradients() -> dict[str, Gradient]:
    draws = random.Random(3)
    return {name: [draws.gauss(0, 1) for _ in range(math.prod(SHAPE))] for name in NAMES}


def sign(name: str, gradient: Gradient, first: int = 0, end: int | None = None) -> GradientSignature:
    """Sign the part `first` to `end` of a gradient."""
    start, stride, count = choose_signature_elements(name, SHAPE)
    end = len(gradient) if end is None else end
    number, held = find_held_elements(start, stride, count, first, end)
    values = tuple(gradient[start + (number + offset) * stride] for offset in range(held))
    return GradientSignature(
        name=name,
        shape=SHAPE,
        is_part=end - first < len(gradient),
        norm=math.hypot(*gradient[first:end]),
        start=start + number * stride,
        stride=stride,
        values=values,
    )


def compare(ranks: Sequence[Sequence[GradientSignature]], replayed: Mapping[str, Gradient]) -> GradientEvidence:
    """Compare what each rank signed with a replay's gradient."""
    recorded = [
        RecordedPass(
            rank=rank,
            forward_number=0,
            world_size=len(ranks),
            trains=True,
            claims=(),
            weight_comparison=WeightComparison(),
            num_frozen=0,
            dtypes=["float32"],
            step_after=OptimizerStep(number=0, passes=(0,), shares=(1.0,), signatures=tuple(signatures)),
        )
        for rank, signatures in enumerate(ranks)
    ]
    elements = {
        (signature.name, signature.start): tuple(
            replayed[signature.name][signature.start :: signature.stride][: len(signature.values)]
        )
        for signatures in ranks
        for signature in signatures
    }
    gradient = GradientSamples(
        norms={name: math.hypot(*values) for name, values in replayed.items()},
        sizes={name: len(values) for name, values in replayed.items()},
        values={},
        signatures=elements,
    )
    evidence = compare_signatures(recorded, gradient)
    assert evidence is not None
    return evidence


def transpose(values: Gradient) -> Gradient:
    return [values[index % 40 * 30 + index // 40] for index in range(len(values))]


@pytest.mark.parametrize(
    ("change", "ratio", "cosine"),
    [
        (lambda values: values, 1.0, 1.0),
        (lambda values: [1.2 * value for value in values], 1.2, 1.0),
        (lambda values: [-value for value in values], 1.0, -1.0),
        (transpose, 1.0, 0.0),
    ],
)
def test_a_changed_gradient_shows_in_its_parameter_and_kind(
    change: Callable[[Gradient], Gradient], ratio: float, cosine: float
) -> None:
    gradients = draw_gradients()
    evidence = compare(
        [[sign(name, change(values) if "q_proj" in name else values) for name, values in gradients.items()]], gradients
    )
    changed = [evidence.parameters[NAMES[0]], evidence.kinds["model.layers.*.q_proj.weight"]]
    assert [compared.num_values for compared in changed] == [64, 128]
    for compared in changed:
        assert compared.ratio == pytest.approx(ratio)
        assert compared.cosine == pytest.approx(cosine, abs=0.25 if cosine == 0 else 1e-6)
        if cosine:
            assert compared.scale == pytest.approx(ratio * cosine)
    sound = [evidence.parameters[NAMES[1]], evidence.kinds["model.layers.*.o_proj.weight"]]
    assert all((compared.ratio, compared.difference) == (1.0, 0.0) for compared in sound)


def test_parts_of_ranks_make_a_whole() -> None:
    gradients = draw_gradients()
    ranks = [[sign(name, values, rank * 500, min(rank * 500 + 500, 1200)) for name, values in gradients.items()]
             for rank in range(3)]  # fmt: skip
    compared = compare(ranks, gradients).parameters[NAMES[0]]
    assert (compared.num_values, compared.difference) == (64, 0.0)
    assert compared.ratio == pytest.approx(1.0)
    assert compare(ranks, gradients).ranks == {}
    # Of ranks whose parts were not all recorded, no norm is known.
    missing = compare([ranks[0], ranks[1], []], gradients).parameters[NAMES[0]]
    assert (missing.job_norm, missing.ratio) == (None, None)
    assert 0 < missing.num_values < 64


def test_a_kind_of_which_one_parameters_norm_is_not_known_has_none() -> None:
    """The second of two ranks signed nothing; the first has one parameter whole, and its half of each other one."""
    gradients = draw_gradients()
    whole, *sharded = NAMES
    signed = [sign(whole, gradients[whole]), *(sign(name, gradients[name], 0, 600) for name in sharded)]
    evidence = compare([signed, []], gradients)
    kind, together = evidence.kinds["model.layers.*.q_proj.weight"], evidence.whole
    assert evidence.parameters[whole].ratio == pytest.approx(1.0)
    assert together is not None
    assert (kind.job_norm, together.job_norm) == (None, None)
    assert kind.replay_norm == pytest.approx(math.hypot(*gradients[NAMES[0]], *gradients[NAMES[2]]))
    # What the elements tell is told all the same.
    assert kind.cosine == pytest.approx(1.0)
    assert kind.difference == 0.0


def test_ranks_that_have_whole_gradients_are_shown_one_by_one() -> None:
    gradients = draw_gradients()
    own = {name: [3 * value for value in values] for name, values in gradients.items()}
    evidence = compare([[sign(name, values) for name, values in held.items()] for held in (gradients, own)], gradients)
    assert evidence.ranks[0][NAMES[0]].ratio == pytest.approx(1.0)
    assert evidence.ranks[1][NAMES[0]].ratio == pytest.approx(3.0)
    assert evidence.ranks[1][NAMES[0]].scale == pytest.approx(3.0)


def test_beside_shards_each_rank_is_shown_with_what_it_has_whole() -> None:
    """As where fully_shard was called on the layers and not on the root."""
    gradients = draw_gradients()
    whole, *sharded = NAMES
    ranks = [[sign(whole, [(rank + 1) * value for value in gradients[whole]]),
              *(sign(name, gradients[name], rank * 600, rank * 600 + 600) for name in sharded)]
             for rank in range(2)]  # fmt: skip
    evidence = compare(ranks, gradients)
    assert [list(parameters) for parameters in evidence.ranks.values()] == [[whole], [whole]]
    assert evidence.ranks[1][whole].ratio == pytest.approx(2.0)


def test_a_kind_has_a_star_for_each_number() -> None:
    assert name_kind("model.layers.3.mlp.experts.17.w1.weight") == "model.layers.*.mlp.experts.*.w1.weight"


def test_a_gradient_next_to_nothing_tells_no_floor_of_its_kind() -> None:
    """In a LoRA's first step the first factor has none, and rounding moves that of later steps."""
    replayed = {name: [1e-5 * value for value in values] if "q_proj" in name else values
                for name, values in draw_gradients().items()}  # fmt: skip
    other = {name: [1.01 * value for value in values] for name, values in replayed.items()}
    first, second = (
        GradientSamples(
            norms={name: math.hypot(*values) for name, values in gradients.items()},
            sizes={name: len(values) for name, values in gradients.items()},
            values={},
            signatures={(name, 0): tuple(values[:64]) for name, values in gradients.items()},
        )
        for gradients in (replayed, other)
    )
    distances = measure_signature_distances(first, second)
    assert list(distances) == ["model.layers.*.o_proj.weight"]
    assert distances["model.layers.*.o_proj.weight"] == pytest.approx([0.01, 0.01], rel=0.3)
