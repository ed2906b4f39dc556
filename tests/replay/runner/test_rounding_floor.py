"""Where a replay's kernel has to stay, rows in another order alone would say that nothing is rounded."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import LlamaConfig

from actor_init.spec import ActorSpec, Attention, ParallelSpec
from replay.options.resolved import ChosenBy
from replay.runner.rounding_floor import RunRepeater

pytestmark = pytest.mark.quick


def repeater_of(padding_predicts: bool = False, **actor: Any) -> RunRepeater:
    spec = SimpleNamespace(
        actor=ActorSpec(attention=Attention.SDPA, backend="fsdp2", **actor),
        source=SimpleNamespace(config=LlamaConfig()),
        find_chooser=lambda setting: ChosenBy.MACHINE,
    )
    parts: dict[str, Any] = {
        "world": None,
        "spec": spec,
        "selection": SimpleNamespace(padding_predicts=padding_predicts),
        "tracker": None,
        "weight_checker": None,
        "dropout": (),
    }
    return RunRepeater(**{name: cast(Any, part) for name, part in parts.items()})


def test_a_plain_replay_has_another_kernel() -> None:
    assert repeater_of().why_kernel_must_stay is None


@pytest.mark.parametrize("parallel", [{"ring": 2}, {"tp": 2, "sequence_parallel": True}])
def test_ranks_that_share_a_row_have_no_other_kernel(parallel: dict[str, Any]) -> None:
    repeater = repeater_of(parallel=ParallelSpec(**parallel), packing=True)
    assert repeater.why_kernel_must_stay == "attention that ranks share has no other kernel"
    assert repeater.keeps_kernel


def test_padding_that_predicts_keeps_the_kernel() -> None:
    why = repeater_of(padding_predicts=True, packing=False).why_kernel_must_stay
    assert why is not None
    assert "padding that predicts a label" in why
