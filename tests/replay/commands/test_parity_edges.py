"""What ordinary batches, lengths and matrices do not show is found by cells of the quick matrix, and clean ones pass.

Those that one process shows, one for each kind: `python -m benchmarks faults --more` has all fifteen.
"""

from collections.abc import Iterator

import pytest

from actor_init.spec import Attention
from replay.agreement.matrix import make_edge_tables, make_quick_tables
from replay.agreement.noise_floor import CellResult
from replay.agreement.plan import Role
from tests.helpers.fault_campaign import Campaign, comparing_once, grounds_for
from tests.helpers.faults import Fault
from tests.helpers.more_faults import MORE_FAULTS

pytestmark = pytest.mark.slow

HERE = ("query_gradient_transposed", "accumulation_divided_twice", "checkpoint_recomputes_otherwise")
OF_EDGES = ("short_documents_go_on", "empty_rows_counted")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    home = tmp_path_factory.mktemp("faults")
    faults = [MORE_FAULTS[name] for name in (*HERE, *OF_EDGES)]
    campaign = Campaign(home=home, grounds=grounds_for(faults, home), faults=faults, traced=False)
    campaign.replay()
    with comparing_once():
        yield campaign


@pytest.mark.parametrize("name", [*HERE, *OF_EDGES])
def test_a_fault_is_found(name: str, campaign: Campaign) -> None:
    number, cell = campaign.place_of(MORE_FAULTS[name])
    judged = campaign.judged(number, cell, name)
    assert judged.result is CellResult.DIFFERS
    if name == "query_gradient_transposed":
        assert judged.deciding == ["gradients"]
        assert judged.distances["gradients"].name == "model.layers.1.self_attn.q_proj.weight"


def test_clean_runs_give_no_alarm(campaign: Campaign) -> None:
    for number, ground in enumerate(campaign.grounds):
        for cell in ground.cells:
            if cell.role is not Role.REFERENCE:
                assert campaign.judged(number, cell).result in (CellResult.EQUAL, CellResult.WITHIN_NOISE), cell.name


@pytest.mark.parametrize("fault", MORE_FAULTS.values(), ids=lambda fault: fault.name)
def test_each_is_put_into_a_cell_that_the_quick_matrix_has(fault: Fault) -> None:
    tables = make_edge_tables(fault.group, 2, Attention.SDPA) if fault.group else make_quick_tables(2, Attention.SDPA)
    assert any(
        all(value in table.get(name, [True, False] if name == "packing" else [1]) for name, value in fault.cell.items())
        for table in tables
    )
