"""Count how many of fifteen more faults the quick matrix finds, and the false alarms of clean runs.

    python benchmarks/more_faults.py --seeds 2 --out more_faults.json

tests/helpers/more_faults.py has the faults: small parameters, directions, accumulation, checkpointing, stages, edges.
Each is put into its own run, on a CPU, and judged as `replay parity --matrix quick` judges it. Clean runs are the same
configurations over seeds and dtypes.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from replay.agreement.noise_floor import CellResult
from replay.agreement.plan import Role
from tests.helpers.fault_campaign import Campaign, ground_of, grounds_for
from tests.helpers.more_faults import MORE_FAULTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="of the clean runs' weights")
    parser.add_argument("--out", type=Path, default=Path("more_faults.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        home = Path(folder)
        found = faults(home / "faults")
        alarms = clean(home / "clean", arguments.seeds)
    for name, said in found.items():
        print(f"| {name} | {said} |")
    print(f"{sum(said.startswith('DIFFERS') for said in found.values())} of {len(found)} faults found")
    print(f"clean runs: {len(alarms)}, alarms: {[name for name, alarm in alarms.items() if alarm]}")
    arguments.out.write_text(json.dumps({"faults": found, "clean": alarms}, indent=1))


def faults(home: Path) -> dict[str, str]:
    """Return, by fault, the result and what decided it."""
    home.mkdir(parents=True)
    wanted = list(MORE_FAULTS.values())
    campaign = Campaign(home=home, grounds=grounds_for(wanted, home), faults=wanted, traced=False)
    campaign.replay()
    found: dict[str, str] = {}
    for fault in wanted:
        number, cell = campaign.place_of(fault)
        judged = campaign.judged(number, cell, fault.name)
        where = judged.distances["gradients"].name
        found[fault.name] = f"{judged.result}: {', '.join(judged.deciding)}; farthest gradient {where}; {cell.name}"
    return found


def clean(home: Path, num_seeds: int) -> dict[str, str]:
    """Return, by run, its false alarm; empty if it gave none."""
    home.mkdir(parents=True)
    cells = {(fault.group, tuple(sorted(fault.cell.items()))) for fault in MORE_FAULTS.values()}
    grounds = [
        ground_of(
            model,
            [{**dict(cell), "dtype": dtype} for own, cell in sorted(cells, key=str) if own == group],
            home,
            {"weights_seed": str(seed)},
            group,
        )
        for seed in range(num_seeds)
        for model in ("llama", "llama, biases")
        for dtype in ("fp32", "bf16")
        for group in sorted({group for group, _ in cells})
    ]
    campaign = Campaign(home=home, grounds=grounds, traced=False)
    campaign.replay()
    alarms: dict[str, str] = {}
    for number, ground in enumerate(grounds):
        for cell in ground.cells:
            if cell.role is not Role.REFERENCE:
                judged = campaign.judged(number, cell)
                is_clean = judged.result in (CellResult.EQUAL, CellResult.WITHIN_NOISE)
                name = f"{ground.model}, seed {ground.options['weights_seed']}, {cell.name}"
                far = {quantity: f"{one.value:.3g}" for quantity, one in judged.distances.items()}
                alarms[name] = "" if is_clean else f"{judged.result}: {far}"
    return alarms


if __name__ == "__main__":
    main()
