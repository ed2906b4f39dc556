"""Sketches add up over slices of the features, keep distances, and are the same wherever they are made."""

import torch

from actor_init.sketching import NUM_SIGNS, sketch, sketch_parameter


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_sketches_of_slices_add_up_to_that_of_the_whole() -> None:
    values_TF = random(5, 96)
    parts = [sketch(part, first_feature=first) for first, part in ((0, values_TF[:, :32]), (32, values_TF[:, 32:]))]
    # fp32 sums of 96 terms in another order
    torch.testing.assert_close(sum(parts), sketch(values_TF), rtol=1e-5, atol=1e-5)


def test_norms_are_kept_as_the_formula_says() -> None:
    """The mean squared norm of 4000 vectors is exact to 4 standard errors; its spread is sqrt(2 / SIGNS)."""
    values_TF = random(4000, 256)
    ratio_T = (sketch(values_TF).norm(dim=1) / values_TF.norm(dim=1)).square()
    spread = (2 / NUM_SIGNS) ** 0.5
    assert abs(float(ratio_T.mean()) - 1) < 4 * spread / 4000**0.5
    assert abs(float(ratio_T.std()) - spread) < 0.1 * spread


def test_one_feature_of_one_token_changes_that_token_alone() -> None:
    values_TF = random(7, 64)
    changed_TF = values_TF.clone()
    changed_TF[3, 40] += 1
    difference_TK = sketch(changed_TF) - sketch(values_TF)
    assert difference_TK.norm(dim=1).nonzero().flatten().tolist() == [3]
    torch.testing.assert_close(
        difference_TK[3].norm(), torch.tensor(1.0), rtol=1e-5, atol=0
    )  # |+-1| / sqrt(K), K of them


def test_a_model_s_autocast_does_not_round_sketches() -> None:
    values_TF = random(5, 96)
    expected_TK = sketch(values_TF)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sketch(values_TF), expected_TK)


def test_two_swapped_features_differ() -> None:
    values_TF = random(1, 8)
    swapped_TF = values_TF[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    assert (sketch(values_TF) - sketch(swapped_TF)).norm() > 0.1


def test_a_parameter_has_a_row_for_each_index_of_its_shorter_dims() -> None:
    assert sketch_parameter(random(4, 10)).shape == (4, NUM_SIGNS)
    assert sketch_parameter(random(10, 4)).shape == (4, NUM_SIGNS)
    assert sketch_parameter(random(10)).shape == (1, NUM_SIGNS)
    assert sketch_parameter(random(3, 10, 4)).shape == (12, NUM_SIGNS)


def test_the_longest_dimension_of_a_parameter_is_projected() -> None:
    for shape, longest in (((3, 50), 1), ((50, 3), 0), ((2, 40, 3), 1), ((7,), 0)):
        values = random(*shape)
        sketched_TK = sketch_parameter(values)
        assert sketched_TK.shape == (values.numel() // max(shape), NUM_SIGNS)
        assert torch.equal(sketched_TK, sketch(values.movedim(longest, -1).reshape(-1, max(shape))))
