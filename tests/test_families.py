"""Ten telling families, loaded from what `save_pretrained` wrote, give the plain model's loss and gradient norm.

`python -m benchmarks families` does it for every family and form; docs/models.md has its tables.
"""

from pathlib import Path

import pytest

from benchmarks.families.forms import FORMS
from benchmarks.families.models import save_family, write_inputs
from benchmarks.families.results import read_results, verdict
from tests.helpers.ranks import run_ranks

TWO_RANKS = ("tp 2", "ring 2")
FAMILIES = {  # and what its ring is: right, or the reason why it is refused
    "mixtral": "right",  # experts fused on loading
    "qwen3_moe": "right",  # the same, with norms on heads
    "deepseek_v3": "right",  # latent attention, shared experts
    "gpt_oss": "right",  # sinks, sliding windows, no sdpa
    "llama4_text": "does not keep its slices right",  # chunked attention; experts that are given rows
    "phi3": "right",  # fused projections
    "gpt2": "right",  # Conv1D, a position table
    "gpt_neox": "right",  # a head that is saved under another name
    "mamba2": "does not keep its slices right",  # a config with an infinity, no attention
    "gemma3n_text": "right",  # a submodel's own init, Linears that another module reads
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("families")
    write_inputs(home / "inputs")
    for family in FAMILIES:
        save_family(family, home / family)
    # a launch each: gloo hangs now and then where a process opens a second group
    for form in ("padded fsdp2", *TWO_RANKS):
        results = home / f"{form}.jsonl"
        program = ["-m", "benchmarks.families.worker", str(home), str(results), form, ",".join(FAMILIES)]
        run_ranks(program, 2 if form in TWO_RANKS else 1)
    return home


@pytest.mark.slow
@pytest.mark.parametrize("form", ["padded fsdp2", *TWO_RANKS])
def test_a_family_is_right_or_refused_in_a_line_that_says_why(home: Path, form: str) -> None:
    outcomes = read_results(home.glob("*.jsonl"))
    for family, ring in FAMILIES.items():
        outcome = outcomes[family, form]
        if form == "ring 2" and ring != "right":
            assert ring in outcome["refused"], outcome
            assert outcome["refused"].endswith("Try: no --ring")
            assert "\n" not in outcome["refused"]
        else:
            assert verdict(home, outcome) == "right", outcome
            assert ("plan" in outcome and outcome["plan"] is not None) == (FORMS[form].tp > 1)
