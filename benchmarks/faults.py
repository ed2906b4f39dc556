"""Count how many injected faults are found, and the false alarms of clean runs.

    python -m benchmarks faults --seeds 6 --out FOLDER            # the thirty of tests/helpers/faults.py
    python -m benchmarks faults --more --seeds 2                  # the fifteen of tests/helpers/more_faults.py

Each fault is put into its own run, on a CPU, over the sample and small models, and is searched for by the command that
should find it: `replay parity` or `replay diagnose`. Clean runs are the same configurations over seeds and dtypes,
judged by `replay parity` and, of the thirty, by their first differences.

For the thirty, two other methods are compared. torch's DebugMode with hashes of every operation's output is given a
clean run of the same configuration, which users seldom have; it finds a fault if more hashes differ than between two
clean runs. Losses of twelve passes' steps, to the five digits that torchtitan prints, are held against those of the
reference; they find a fault if they differ while those of the clean configuration are equal.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Answers, make_parser, markdown
from replay.agreement.noise_floor import CellResult
from replay.agreement.plan import Cell, Role
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
from tests.helpers.more_faults import MORE_FAULTS

TRAINED = {"step": True, "learning_rate": "1e-3", "epochs": "3"}
AGREE = (CellResult.EQUAL, CellResult.WITHIN_NOISE)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=6, help="of the clean runs' weights")
    parser.add_argument("--more", action="store_true", help="the fifteen")
    given = parser.parse_args()
    answers = Answers(given, "faults")
    wanted, models = (MORE_FAULTS, ("llama", "llama, biases")) if given.more else (FAULTS, ("llama", "qwen3"))
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        home = Path(name)
        found = answers.ask("faults", partial(faults, list(wanted.values()), home / "faults"))
        print(
            f"{answers.machine}: {sum(one['found'] for one in found.values())} of {len(found)} faults found", flush=True
        )
        for method, ask in () if given.more else (("equal losses", losses), ("DebugMode", hashes)):
            others = answers.ask(method, partial(ask, home / method))
            for fault, answer in others.items():
                found[fault][method] = answer
            print(f"{method}: {sum(answer == 'found' for answer in others.values())}", Counter(others.values()))
        alarms = answers.ask("clean", partial(clean, wanted, models, given.seeds, home / "clean"))
    print(f"clean runs: {len(alarms)}, alarms: {[name for name, alarm in alarms.items() if alarm]}")
    print(markdown([["fault", *COLUMNS], *([name, *map(row.get, COLUMNS)] for name, row in found.items())]))
    return 0


COLUMNS = ("command", "found", "first", "names it", "decided by", "DebugMode", "equal losses")


def faults(wanted: Sequence[Fault], home: Path) -> dict[str, dict[str, Any]]:
    """Return, by fault, whether it was found, by which quantities, and what was named first."""
    home.mkdir(parents=True)
    by_parity = [fault for fault in wanted if fault.command == "parity"]
    is_traced = any(fault.named for fault in wanted)
    campaign = Campaign(home=home, grounds=grounds_for(by_parity, home), faults=wanted, traced=is_traced)
    campaign.replay()
    found: dict[str, dict[str, Any]] = {}
    for fault in wanted:
        if fault.command == "diagnose":
            failed = diagnosed(fault, home / fault.name)
            found[fault.name] = {"command": "diagnose", "found": bool(failed), "first": ", ".join(failed)}
            continue
        number, cell = campaign.place_of(fault)
        judged = campaign.judged(number, cell, fault.name)
        # training faults have several locations
        first = campaign.parting(number, cell, fault.name) if is_traced and not fault.options else None
        named = "" if first is None else f"{first.name} ({first.kind})"
        found[fault.name] = {
            "command": "parity",
            "found": judged.result is CellResult.DIFFERS,
            "first": named,
            "names it": fault.named in named if fault.named else "has no layer",
            "decided by": ", ".join(judged.deciding),
        }
    return found


def diagnosed(fault: Fault, home: Path) -> list[str]:
    """Return the checks that fail with the fault, and not without it."""
    failed: list[set[str]] = []
    arguments = ["diagnose", "--backend", "fsdp2", "--dtype", "fp32", "--steps", "1"]
    for broken in (False, True):
        logs = home / ("broken" if broken else "sound")
        run_command([*arguments, "--log-folder", str(logs)], fault.name if broken else "")
        [file] = logs.glob("*/diagnose.json")
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
    size = past.actor.resolved_grad_accumulation * past.num_data_ranks
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


def clean(wanted: Mapping[str, Fault], models: Sequence[str], num_seeds: int, home: Path) -> dict[str, str]:
    """Return, by run, its false alarm; empty if it gave none."""
    home.mkdir(parents=True)
    is_traced = any(fault.named for fault in wanted.values())
    cells = sorted({(fault.group, tuple(sorted(fault.cell.items()))) for fault in wanted.values()}, key=str)
    grounds = [
        ground_of(
            model,
            [{**dict(cell), "dtype": dtype} for own, cell in cells if own == group],
            home,
            {"weights_seed": str(seed)},
            group,
        )
        for seed in range(num_seeds)
        for model in models
        for dtype in ("fp32", "bf16")
        for group in sorted({group for group, _ in cells})
    ]
    campaign = Campaign(home=home, grounds=grounds, traced=is_traced)
    campaign.replay()
    alarms: dict[str, str] = {}
    for number, ground in enumerate(grounds):
        for cell in ground.cells:
            if cell.role is Role.REFERENCE:
                continue
            judged = campaign.judged(number, cell)
            first = campaign.parting(number, cell) if is_traced and is_traceable(cell) else None
            far = {quantity: f"{one.value:.3g}" for quantity, one in judged.distances.items()}
            name = f"{ground.model}, seed {ground.options['weights_seed']}, {cell.name}"
            is_clean = judged.result in AGREE and first is None
            alarms[name] = "" if is_clean else f"{judged.result}: {far}, {first and first.name}"
    return alarms
