"""`replay parity` finds each fault and names its layer, and says nothing against the same runs without one.

Those of one model without `--step`: `python -m benchmarks faults` has the other four, each of which needs clean runs of
its own.
"""

from collections.abc import Iterator

import pytest

from replay.agreement.noise_floor import CellResult
from replay.agreement.plan import Role
from tests.helpers.fault_campaign import NUM_INPUTS, Campaign, comparing_once, grounds_for, is_traceable
from tests.helpers.faults import FAULTS, Fault
from tests.helpers.made_captures import copy_short_inputs

pytestmark = pytest.mark.long

OF_PARITY = [
    fault for fault in FAULTS.values() if fault.command == "parity" and fault.model == "llama" and not fault.options
]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    home = tmp_path_factory.mktemp("faults")
    # Rows of 60 tokens hardly show wrong positions or masks, and one fault needs equal numbers of rows.
    inputs = copy_short_inputs(home / "inputs", NUM_INPUTS, min_tokens=150)
    grounds = grounds_for(OF_PARITY, home, inputs)
    campaign = Campaign(home=home, grounds=grounds, faults=OF_PARITY)
    campaign.replay()
    with comparing_once():
        yield campaign


@pytest.mark.parametrize("fault", OF_PARITY, ids=lambda fault: fault.name)
def test_a_fault_is_found_and_its_layer_is_named(fault: Fault, campaign: Campaign) -> None:
    number, cell = campaign.place_of(fault)
    assert campaign.judged(number, cell, fault.name).result is CellResult.DIFFERS
    if fault.named:
        first = campaign.parting(number, cell, fault.name)
        assert first is not None
        assert fault.named in first.name


def test_clean_runs_give_no_alarm(campaign: Campaign) -> None:
    for number, ground in enumerate(campaign.grounds):
        for cell in ground.cells:
            if cell.role is not Role.REFERENCE:
                assert campaign.judged(number, cell).result in (CellResult.EQUAL, CellResult.WITHIN_NOISE), cell.name
                if is_traceable(cell):
                    assert campaign.parting(number, cell) is None, cell.name
