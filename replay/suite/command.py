"""Declare the options of `replay suite`."""

from functools import partial
from pathlib import Path

import typer

from actor_init.spec import Dtype, UsageError
from replay.given_paths import check_left_by
from replay.on_ray.command import AddressOption, LauncherOption, RayOptions, ray_options
from replay.option_parsing import Action
from replay.suite.plan import SAVE_EVERY, SuiteSpec, all_but, num_ranks_of, skipped

DEFAULTS = SuiteSpec()


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
    dtype: Dtype = typer.Option(DEFAULTS.dtype, help="Compute dtype; master weights are fp32."),  # noqa: B008
    gradient_checkpointing: bool = typer.Option(
        DEFAULTS.gradient_checkpointing,
        "--gradient-checkpointing",
        help="Recompute each block's activations in backward.",
    ),
    learning_rate: float = typer.Option(DEFAULTS.learning_rate, min=0, help="Of AdamW."),
    steps: int = typer.Option(DEFAULTS.steps, min=2, help="Optimizer steps of each configuration."),
    max_samples: int | None = typer.Option(
        None,
        min=1,
        envvar="MAX_SAMPLES",
        help="Train on the first N inputs, over and over. Default: at most 8.",
    ),
    num_gpus: int | None = typer.Option(
        None, min=1, envvar="NUM_GPUS", help="Use N GPUs, or N processes on a CPU. Default: all; 2 on a CPU."
    ),
    tp: int = typer.Option(
        DEFAULTS.tp, min=2, envvar="TP_SIZE", help="Ranks that share each layer's weights, where any do."
    ),
    ring: int = typer.Option(
        DEFAULTS.ring, min=2, envvar="RING_SIZE", help="Ranks that share each packed row, where any do."
    ),
    skip: list[str] = typer.Option(  # noqa: B008
        [], metavar="NAME", help="Leave out this configuration. May be given again."
    ),
    skip_deepspeed: bool = typer.Option(False, "--skip-deepspeed", envvar="SKIP_DEEPSPEED", help="Those of DeepSpeed."),
    skip_fsdp2: bool = typer.Option(False, "--skip-fsdp2", envvar="SKIP_FSDP2", help="Those of FSDP2."),
    skip_tp: bool = typer.Option(False, "--skip-tp", envvar="SKIP_TP", help="Those with tensor parallelism."),
    skip_ring: bool = typer.Option(False, "--skip-ring", envvar="SKIP_RING", help="Those with ring attention."),
    only: list[str] = typer.Option([], metavar="NAME", help="Train this one alone. May be given again."),  # noqa: B008
    data_ranks: int | None = typer.Option(
        None, min=1, help="Data ranks of each configuration. Default: as many as the GPUs are enough for."
    ),
    init_weights: str | None = typer.Option(
        None, metavar="PATH", help="Begin with the weights in this model folder. Default: those of --model."
    ),
    save_init_weights: bool = typer.Option(
        False, "--save-init-weights", help="Write the weights to begin with, in fp32, and begin with that file."
    ),
    save_state: bool = typer.Option(
        False, "--save-state", help="Keep a state every few steps, from which a training goes on."
    ),
    save_every: int | None = typer.Option(
        None, min=1, metavar="N", help=f"Steps between two states of --save-state. (default: {SAVE_EVERY})"
    ),
    storage: str | None = typer.Option(
        None, metavar="PATH", help="Where states are kept; for Ray a folder that all nodes share, or a URI."
    ),
    resume_from: str | None = typer.Option(
        None, metavar="NAME", help="Go on with the suite of this name, in --log-folder or --storage."
    ),
    plot: Path | None = typer.Option(None, help="Draw the curves, as out.png (needs matplotlib)."),  # noqa: B008
    output_dir: Path | None = typer.Option(  # noqa: B008
        None, envvar="OUTPUT_DIR", help="Where the folder inputs, on which all train, is made. Default: with the logs."
    ),
    log_folder: Path = typer.Option(Path("logs"), envvar="LOG_DIR", help="Where the suite's folder is made."),  # noqa: B008
    limit: float = typer.Option(DEFAULTS.limit, min=1, metavar="X", help="Seconds that one configuration may take."),
    launcher: LauncherOption = None,
    address: AddressOption = None,
) -> Action:
    """Train the same model on the same inputs under each configuration, and judge the losses.

    ddp is the reference; deepspeed (ZeRO 2), fsdp2, fsdp2-tp, fsdp2-ring and fsdp2-tp-ring are the standard ones;
    deepspeed-autotp comes beside them. Exit code 0: each loss falls, and is within its bound of deepspeed's and ddp's;
    1: one is not, or failed.
    """
    ray = ray_options(launcher, address)
    if go_on is not None or resume_from is not None:
        if go_on is not None and resume_from is not None:
            raise UsageError("--continue and --resume-from exclude each other. Give one of the two")
        _refuse_options_of_the_suite(context, resumes=resume_from is not None)
        return partial(_continue_suite, go_on, resume_from, log_folder, storage, ray, plot)
    _check_storage(storage, save_every, ray, saves=save_state)
    if save_init_weights and init_weights is not None:
        raise UsageError("--init-weights and --save-init-weights exclude each other. Give one of the two")
    if skip and only:
        raise UsageError("--skip and --only exclude each other. Give one of the two")
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
        skip=skipped(skip, [group for group, is_given in groups.items() if is_given]) | all_but(only),
        init_weights=init_weights,
        saves_init_weights=save_init_weights,
        num_data_ranks=data_ranks,
        save_every=(save_every or SAVE_EVERY) if save_state else None,
        storage=storage if storage is None or "://" in storage else str(Path(storage).absolute()),
    )
    return partial(_suite, spec, log_folder, ray, plot)


def _refuse_options_of_the_suite(context: typer.Context, *, resumes: bool) -> None:
    """Raise UsageError for an option that --continue, or --resume-from, takes from the suite that was begun."""
    option = "--resume-from" if resumes else "--continue"
    allowed = ["go_on", "resume_from", "launcher", "address", "plot", *(["storage", "log_folder"] if resumes else [])]
    typed = [name for name in context.params if _is_typed(context, name) and name not in allowed]
    if typed:
        other = f"--{typed[0].replace('_', '-')}"
        raise UsageError(f"{option} takes its options from the suite that was begun. Try: replay suite, with {other}")


def _check_storage(storage: str | None, save_every: int | None, ray: RayOptions | None, *, saves: bool) -> None:
    """Raise UsageError for a storage, or for numbers of steps, where no state is saved or none can be saved there."""
    if not saves:
        for other, value in (("--save-every", save_every), ("--storage", storage)):
            if value is not None:
                raise UsageError(f"{other} is for the states of --save-state. Try: --save-state {other} {value}")
    elif storage is None and ray is not None and ray.address is not None:
        raise UsageError("--save-state needs a folder that all nodes share, or a URI. Try: --save-state --storage PATH")
    elif storage is not None and ray is None and "://" in storage:
        raise UsageError(f"--storage {storage} is for a Ray cluster. Try: --launcher ray, or a folder")


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _suite(spec: SuiteSpec, log_folder: Path, ray: RayOptions | None, plot: Path | None) -> int:
    if spec.dataset is not None and not spec.dataset.exists():
        raise UsageError(
            f"--dataset {spec.dataset} does not exist. Give a folder of captures, a .jsonl or a .parquet file"
        )
    from replay.compare.plot import check_plot
    from replay.on_ray.executor import executor
    from replay.suite.runs import run_suite
    from replay.suite.state import Suite

    if plot is not None:
        check_plot(plot)
    with executor(ray, num_ranks_of(spec)) as where:
        suite = Suite.begin(spec, log_folder, where)
        return run_suite(suite, where.trainer(suite.folder, suite.machine, suite.storage), plot)


def _continue_suite(
    folder: Path | None,
    name: str | None,
    log_folder: Path,
    storage: str | None,
    ray: RayOptions | None,
    plot: Path | None,
) -> int:
    if folder is not None:
        check_left_by("suite", folder)
    from replay.compare.plot import check_plot
    from replay.on_ray.executor import executor
    from replay.suite.runs import run_suite
    from replay.suite.state import Suite, folder_named, read_spec

    if plot is not None:
        check_plot(plot)
    if name is not None:
        folder = folder_named(name, log_folder, storage)
    assert folder is not None
    with executor(ray, num_ranks_of(read_spec(folder))) as where:
        suite = Suite.read(folder, where)
        return run_suite(suite, where.trainer(suite.folder, suite.machine, suite.storage), plot)
