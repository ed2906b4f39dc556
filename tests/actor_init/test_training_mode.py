import pytest
from torch import nn

from actor_init.training_mode import list_missing_parts, match_part, switch_parts


def make_model() -> nn.Module:
    layers = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), "head": nn.Linear(2, 2)})
    return nn.ModuleDict({"model": layers})


def test_a_part_gets_the_other_mode_than_the_module_around_it_has() -> None:
    model = make_model().train()
    switch_parts(model, ["model.encoder", "model.encoder.1"])
    modes = {name: module.training for name, module in model.named_modules()}
    assert {name for name, trains in modes.items() if not trains} == {"model.encoder", "model.encoder.0"}


def test_a_part_that_this_model_lacks_is_named_and_left_out() -> None:
    model = make_model().train()
    switch_parts(model, ["vision"])
    assert all(module.training for module in model.modules())
    assert list_missing_parts(model, ["vision", "actor.model.encoder"]) == ["vision"]


@pytest.mark.parametrize(
    ("job_name", "name"),
    [
        ("model.encoder", "model.encoder"),
        ("actor.model.encoder", "model.encoder"),
        ("encoder", "model.encoder"),
        # Two parts have this name, and none that one.
        ("dropout", None),
        ("decoder", None),
        ("layers.0.dropout", "model.layers.0.dropout"),
    ],
)
def test_parts_are_matched_by_the_end_of_their_names(job_name: str, name: str | None) -> None:
    names = ["model.encoder", "model.layers.0.dropout", "model.layers.1.dropout"]
    assert match_part(job_name, names) == name
