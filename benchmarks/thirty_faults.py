"""Count how many of thirty faults are found, and the false alarms of clean runs.

    python benchmarks/thirty_faults.py --seeds 6 --out faults.json

tests/helpers/faults.py has the faults. Each is put into its own run, on a CPU, over the sample and small models, and is
searched for by the command that should find it: `replay parity` or `replay diagnose`. Two other methods are compared.
torch's DebugMode with hashes of every operation's output is given a clean run of the same configuration, which users
seldom have; it finds a fault if more hashes differ than between two clean runs. Losses of twelve passes' steps, to the
five digits that torchtitan prints, are compared with the reference's; they find a fault if they differ while those of
the clean configuration are equal.

Clean runs are the same configurations over seeds and dtypes, each judged by `replay parity` and by its first
difference.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from replay.agreement.noise_floor import CellResult
from replay.agreement.plan import Cell, Role
from replay.options.spec import find_sample_folder
from replay.processes.child_job import ChildJob
from replay.runlog.reader import PastRun
from tests.helpers.fault_campaign import (
    Campaign,
    Ground,
    Run,
    ground_of,
    grounds_for,
    is_traceable,
    replay_all,
    run_command,
    run_jobs,
)
from tests.helpers.faults import FAULTS, Fault

TRAINED = {"step": True, "learning_rate": "1e-3", "epochs": "3"}
AGREE = (CellResult.EQUAL, CellResult.WITHIN_NOISE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="of the clean runs' weights")
    parser.add_argument("--out", type=Path, default=Path("thirty_faults.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-") as home:
        found = faults(Path(home) / "faults")
        print(f"{sum(one['found'] for one in found.values())} of {len(found)} faults found", flush=True)
        for name, answers in (("equal losses", losses(Path(home) / "losses")), ("DebugMode", hashes(Path(home) / "h"))):
            for broken, answer in answers.items():
                found[broken][name] = answer
            print(f"{name}: {sum(answer == 'found' for answer in answers.values())}", Counter(answers.values()))
        alarms = clean(Path(home) / "clean", arguments.seeds)
        print(f"clean runs: {len(alarms)}, alarms: {[name for name, alarm in alarms.items() if alarm]}")
    arguments.out.write_text(json.dumps({"faults": found, "clean": alarms}, indent=1))
    for name, row in found.items():
        print(f"| {name} | " + " | ".join(str(row.get(key, "")) for key in COLUMNS) + " |")


COLUMNS = ("command", "found", "first", "names it", "DebugMode", "equal losses")


def faults(home: Path) -> dict[str, dict[str, Any]]:
    """Return, by fault, whether it was found, and what was named first."""
    home.mkdir(parents=True)
    wanted = list(FAULTS.values())
    campaign = Campaign(home=home, grounds=grounds_for(_by_parity(wanted), home), faults=wanted)
    campaign.replay()
    found: dict[str, dict[str, Any]] = {}
    for fault in wanted:
        if fault.command == "diagnose":
            failed = diagnosed(fault, home / f"{fault.name}.json")
            found[fault.name] = {"command": "diagnose", "found": bool(failed), "first": ", ".join(failed)}
            continue
        number, cell = campaign.place_of(fault)
        verdict = campaign.judged(number, cell, fault.name).result
        first = (
            None if fault.options else campaign.parting(number, cell, fault.name)
        )  # training faults have several locations
        named = "" if first is None else f"{first.name} ({first.kind})"
        found[fault.name] = {
            "command": "parity",
            "found": verdict is CellResult.DIFFERS,
            "first": named,
            "names it": fault.named in named if fault.named else "has no layer",
        }
    return found


def _by_parity(wanted: Sequence[Fault]) -> list[Fault]:
    return [fault for fault in wanted if fault.command == "parity"]


def diagnosed(fault: Fault, file: Path) -> list[str]:
    """Return the checks that fail with the fault, and not without it."""
    failed: list[set[str]] = []
    arguments = ["diagnose", "--backend", "fsdp2", "--dtype", "fp32", "--steps", "1", "--json", str(file)]
    for broken in (False, True):
        run_command([*arguments, "--log-folder", str(file.parent)], fault.name if broken else "")
        checks = json.loads(file.read_text())["checks"]
        failed.append({check["name"] for check in checks if check["status"] == "failed"})
    return sorted(failed[1] - failed[0])


def losses(home: Path) -> dict[str, str]:
    """Compare each step's mean loss, to five digits, between the reference, the clean cell and the faulty one."""
    home.mkdir(parents=True)
    answers: dict[str, str] = {}
    runs: dict[tuple[str, str], Run] = {}
    grounds: dict[str, tuple[Ground, Cell]] = {}
    for number, fault in enumerate(FAULTS.values()):
        options = {**TRAINED, **fault.options}
        ground = ground_of(fault.model, [fault.cell], home, options)
        cell = ground.cell(fault.cell)
        [reference] = [one for one in ground.cells if one.name == cell.reference]
        grounds[fault.name] = ground, cell
        for kind, one, broken in (("reference", reference, ""), ("clean", cell, ""), ("faulty", cell, fault.name)):
            runs[fault.name, kind] = Run(cell=one, logs=home / f"{number}-{kind}", fault=broken, traced=False)
    replay_all(list(runs.values()), home)
    for name in FAULTS:
        right, clean_cell, faulty = (_steps(runs[name, kind]) for kind in ("reference", "clean", "faulty"))
        answers[name] = _answer(clean_differs=clean_cell != right, faulty_differs=faulty != right)
    return answers


def _steps(run: Run) -> list[str]:
    past = PastRun.read(run.logs)
    size = past.actor.num_accumulated * past.num_data_ranks
    firsts = {(record.index, record.data_rank): record.result.loss or 0.0 for record in reversed(past.records)}
    in_order = [firsts[key] for key in sorted(firsts)]
    return [f"{sum(in_order[at : at + size]) / size:.5f}" for at in range(0, len(in_order), size)]


def _answer(*, clean_differs: bool, faulty_differs: bool) -> str:
    if clean_differs:
        return "cannot: the clean run differs too"
    return "found" if faulty_differs else "missed"


def hashes(home: Path) -> dict[str, str]:
    """Compare DebugMode's hashes: the reference with the clean cell, and the clean cell with the faulty one."""
    home.mkdir(parents=True)
    answers: dict[str, str] = {}
    jobs: dict[tuple[int, int, int], list[dict[str, object]]] = {}
    for fault in FAULTS.values():
        ground = ground_of(fault.model, [fault.cell], home, fault.options)
        cell = ground.cell(fault.cell)
        for kind, broken in (("first", ""), ("again", ""), ("faulty", fault.name)):
            run = Run(cell=cell, logs=home / f"{fault.name}-{kind}", fault=broken)
            spec = replace(cell.spec, inputs=replace(cell.spec.inputs, max_inputs=1))
            job = ChildJob(spec=spec).with_log_folder(run.logs).text
            compare = str(home / f"{fault.name}-{kind}.json")
            jobs.setdefault(run.world, []).append({"job": job, "fault": broken, "compare": compare})
    for world, own in jobs.items():
        run_jobs(own, world, home)
    for name in FAULTS:
        again, faulty = (json.loads((home / f"{name}-{kind}.json").read_text()) for kind in ("again", "faulty"))
        more = [_is_more(one, partner) for one, partner in zip(again, faulty, strict=True)]
        answers[name] = _answer(clean_differs=not all(one.isdigit() for one in again), faulty_differs=any(more))
    return answers


def _is_more(clean: str, faulty: str) -> bool:
    """Do more hashes differ than between clean runs? Those differ too, in views of uninitialised memory."""
    return not faulty.isdigit() or int(faulty) > int(clean)


def clean(home: Path, num_seeds: int) -> dict[str, str]:
    """Return, by run, its false alarm; empty if it gave none."""
    home.mkdir(parents=True)
    settings = [dict(one) for one in {tuple(sorted(fault.cell.items())) for fault in FAULTS.values()}]
    grounds = [
        ground_of(model, [{**one, "dtype": dtype} for one in settings], home, {"weights_seed": str(seed)})
        for seed in range(num_seeds)
        for model in ("llama", "qwen3")
        for dtype in ("fp32", "bf16")
    ]
    campaign = Campaign(home=home, grounds=grounds)
    campaign.replay()
    alarms: dict[str, str] = {}
    for number, ground in enumerate(grounds):
        for cell in ground.cells:
            if cell.role is Role.REFERENCE:
                continue
            verdict = campaign.judged(number, cell).result
            first = campaign.parting(number, cell) if is_traceable(cell) else None
            name = f"{ground.model}, seed {ground.options['weights_seed']}, {cell.name}"
            alarms[name] = "" if verdict in AGREE and first is None else f"{verdict}, {first and first.name}"
    return alarms


if __name__ == "__main__":
    assert find_sample_folder().is_dir()
    main()
