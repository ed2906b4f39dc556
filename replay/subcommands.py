"""What `replay` can do beside replaying: each command's options, and the room that does the work.

A command is read before anything heavy is imported, and returns what is left to do.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import typer

from actor_init.spec import Dtype, UsageError
from replay.options import with_options
from replay.suite_plan import SuiteSpec, skipped

Action = Callable[[], int]  # returns the exit code


def inspect(folder: Path = typer.Argument(help="Folder of captures.")) -> Action:  # noqa: B008
    """Say what a folder holds: passes, ranks, shapes, damaged files."""
    return partial(_inspect, folder)


def _inspect(folder: Path) -> int:
    from replay.console import print_inspection
    from replay.inspection import inspect_folder

    facts = inspect_folder(folder)
    print_inspection(facts)
    return 1 if facts.damaged else 0


def doctor(
    log_folder: Path = typer.Option(  # noqa: B008
        Path("logs"), metavar="PATH", show_default=False, help="Where runs would be logged. (default: logs)"
    ),
    json: Path | None = typer.Option(None, metavar="PATH", help="Write the checks into this file too."),  # noqa: B008
    timeout: float = typer.Option(
        60.0, min=10.0, metavar="X", show_default=False, help="Seconds for all checks together. (default: 60)"
    ),
) -> Action:
    """Say what works on this machine, what does not, and what to type. Needs no GPU and no captures.

    Exit code 0 if all works that `replay` without options needs here, else 1.
    """
    return partial(_doctor, log_folder, json, timeout)


def _doctor(log_folder: Path, json: Path | None, timeout: float) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("doctor starts its own processes. Try: replay doctor, without a launcher and its WORLD_SIZE")
    from replay.doctor import examine

    return examine(log_folder, json, timeout)


def compare(
    logs: list[Path] = typer.Argument(  # noqa: B008
        help="Folders that runs left in logs/, or that hold one run each. The first is the reference.",
        metavar="LOG LOG...",
    ),
    threshold: float = typer.Option(
        0.05,
        help="Exit with 1 if a loss, a row's log-probs or a gradient norm differs by more than this share of the "
        "reference's. Time and memory are shown, and decide nothing.",
    ),
    plot: Path | None = typer.Option(None, help="Draw losses and differences, as out.png (needs matplotlib)."),  # noqa: B008
    json: Path | None = typer.Option(None, help="Write every number, as out.json."),  # noqa: B008
) -> Action:
    """Compare runs input by input: losses, log-probs, gradient norms, time, memory.

    Runs of the same work alone: the same model, weights and inputs, the same loss. Exit code 0: within the threshold;
    1: beyond it; 2: not comparable, and why.
    """
    return partial(_compare, logs, threshold, plot, json)


def _compare(logs: list[Path], threshold: float, plot: Path | None, json: Path | None) -> int:
    from replay.compare import compare_logs

    return compare_logs(logs, threshold, plot, json)


def suite(
    context: typer.Context,
    go_on: Path | None = typer.Option(  # noqa: B008
        None, "--continue", metavar="FOLDER", help="Go on with what is missing in this folder of logs/."
    ),
    dataset: Path | None = typer.Option(  # noqa: B008
        None,
        envvar="DATASET",
        help="Captures, or a .jsonl or .parquet with a column text. Default: the sample.",
    ),
    model: str | None = typer.Option(None, envvar="MODEL", help="As of `replay`. For texts a folder with a tokenizer."),
    num_layers: int | None = typer.Option(None, min=1, help="Build only the first N transformer layers."),
    dtype: Dtype = typer.Option(Dtype.BF16, help="Compute dtype; master weights are fp32."),  # noqa: B008
    gradient_checkpointing: bool = typer.Option(
        False, "--gradient-checkpointing", help="Recompute each block's activations in backward."
    ),
    learning_rate: float = typer.Option(1e-4, min=0, help="Of AdamW."),
    steps: int = typer.Option(20, min=2, help="Optimizer steps of each configuration."),
    max_samples: int | None = typer.Option(
        None,
        min=1,
        envvar="MAX_SAMPLES",
        help="Train on the first N inputs, over and over. Default: at most 8.",
    ),
    num_gpus: int | None = typer.Option(
        None, min=1, envvar="NUM_GPUS", help="Use N GPUs, or N processes on a CPU. Default: all; 2 on a CPU."
    ),
    tp: int = typer.Option(2, min=2, envvar="TP_SIZE", help="Ranks that share each layer's weights, where any do."),
    ring: int = typer.Option(2, min=2, envvar="RING_SIZE", help="Ranks that share each packed row, where any do."),
    skip: list[str] = typer.Option(  # noqa: B008
        [], metavar="NAME", help="Leave out this configuration. May be given again."
    ),
    skip_deepspeed: bool = typer.Option(False, "--skip-deepspeed", envvar="SKIP_DEEPSPEED", help="Those of DeepSpeed."),
    skip_fsdp2: bool = typer.Option(False, "--skip-fsdp2", envvar="SKIP_FSDP2", help="Those of FSDP2."),
    skip_tp: bool = typer.Option(False, "--skip-tp", envvar="SKIP_TP", help="Those with tensor parallelism."),
    skip_ring: bool = typer.Option(False, "--skip-ring", envvar="SKIP_RING", help="Those with ring attention."),
    output_dir: Path | None = typer.Option(  # noqa: B008
        None, envvar="OUTPUT_DIR", help="Where the folder inputs, on which all train, is made. Default: with the logs."
    ),
    log_folder: Path = typer.Option(Path("logs"), envvar="LOG_DIR", help="Where the suite's folder is made."),  # noqa: B008
    limit: float = typer.Option(1800.0, min=1, metavar="X", help="Seconds that one configuration may take."),
) -> Action:
    """Train the same model on the same inputs under each standard configuration, and judge the losses.

    ddp (the reference), deepspeed (ZeRO 2), fsdp2, fsdp2-tp, fsdp2-ring, fsdp2-tp-ring, deepspeed-autotp. Exit code 0:
    each loss falls, none is further from deepspeed's and ddp's than its bound; 1: one is, or failed.
    """
    if go_on is not None:
        typed = [name for name in context.params if _is_typed(context, name) and name != "go_on"]
        if typed:
            option = f"--{typed[0].replace('_', '-')}"
            raise UsageError(f"--continue goes on as the suite was begun. Try: replay suite, with {option}")
        return partial(_continue_suite, go_on)
    groups = {"deepspeed": skip_deepspeed, "fsdp2": skip_fsdp2, "tp": skip_tp, "ring": skip_ring}
    spec = SuiteSpec(
        dataset=dataset,
        model=model,
        num_layers=num_layers,
        dtype=dtype,
        gradient_checkpointing=gradient_checkpointing,
        learning_rate=learning_rate,
        steps=steps,
        max_samples=max_samples,
        num_gpus=num_gpus,
        tp=tp,
        ring=ring,
        output_dir=output_dir,
        limit=limit,
        skip=skipped(skip, [group for group, is_given in groups.items() if is_given]),
    )
    return partial(_suite, spec, log_folder)


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _suite(spec: SuiteSpec, log_folder: Path) -> int:
    from replay.suite import run_suite
    from replay.suite_folder import Suite

    return run_suite(Suite.begin(spec, log_folder))


def _continue_suite(folder: Path) -> int:
    from replay.suite import run_suite
    from replay.suite_folder import Suite

    return run_suite(Suite.read(folder))


@with_options
def parity(
    matrix: str | None = typer.Option(
        None,
        metavar="NAME",
        help="quick: one process, and one tp, ring and data rank; pairs: every two values of any options together; "
        "full: the whole product, pairs first; or a TOML file, see docs/parity.md. (default: quick)",
    ),
    num_devices: int | None = typer.Option(
        None, min=1, metavar="N", help="Processes of one run at most. (default: the GPUs, or 2 on a CPU)"
    ),
    go_on: Path | None = typer.Option(  # noqa: B008
        None, "--continue", metavar="PATH", help="Run what a folder of parity's lacks, and report all of it."
    ),
    cell_timeout: float = typer.Option(
        600.0, min=1.0, metavar="X", show_default=False, help="Seconds for one run. (default: 600)"
    ),
    time_limit: float | None = typer.Option(
        None, min=0.0, metavar="X", help="Start no run after X seconds; --continue goes on."
    ),
    first_difference: bool = typer.Option(
        False, "--first-difference", help="Run what differs again, traced, and name the first layer and tensor."
    ),
    **given: Any,
) -> Action:
    """Replay one folder under many configurations, and say which agree within measured noise.

    A replay's own options hold for every run; what they say of an option that the matrix varies chooses among its
    runs. Exit code 0: all equal or within noise; 1: one differs or failed; 2: nothing can run, and why.
    """
    return partial(_parity, matrix, num_devices, go_on, cell_timeout, time_limit, first_difference, given)


def _parity(
    matrix: str | None,
    num_devices: int | None,
    go_on: Path | None,
    cell_timeout: float,
    time_limit: float | None,
    first_difference: bool,
    given: dict[str, Any],
) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("parity starts its own processes. Try: replay parity, without a launcher and its WORLD_SIZE")
    own = {"matrix": matrix, "num_devices": num_devices}
    typed = [name for name, value in {**own, **given}.items() if value is not None]
    if go_on is not None and typed:
        raise UsageError(f"--continue goes on with what that folder says. Leave out --{typed[0].replace('_', '-')}")
    from replay import parity as work

    limits = work.Limits(cell=cell_timeout, total=time_limit)
    if go_on is not None:
        return work.go_on(go_on, limits, trace=first_difference)
    return work.begin(matrix or "quick", given, num_devices, limits, trace=first_difference)


COMMANDS: tuple[Callable[..., Action], ...] = (inspect, compare, parity, suite, doctor)
