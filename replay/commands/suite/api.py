"""`replay.suite`."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from replay.campaign.campaign_options import call_command
from replay.commands.suite import command

if TYPE_CHECKING:
    from replay.commands.suite.runs import SuiteResult


def suite(
    dataset: str | os.PathLike[str] | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    num_layers: int | None = None,
    dtype: Literal["bf16", "fp32", "fp16"] | None = None,
    gradient_checkpointing: bool | None = None,
    learning_rate: float | None = None,
    steps: int | None = None,
    max_samples: int | None = None,
    processes: int | None = None,
    tp: int | None = None,
    ring: int | None = None,
    data_ranks: int | None = None,
    init_weights: str | os.PathLike[str] | None = None,
    save_init_weights: bool | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    run_limit: float | None = None,
    skip: Sequence[str] | None = None,
    skip_deepspeed: bool | None = None,
    skip_fsdp2: bool | None = None,
    skip_tp: bool | None = None,
    skip_ring: bool | None = None,
    only: Sequence[str] | None = None,
    save_state: bool | None = None,
    save_every: int | None = None,
    storage: str | None = None,
    plot: str | os.PathLike[str] | None = None,
    log_folder: str | os.PathLike[str] | None = None,
    launcher: Literal["ray"] | None = None,
    address: str | None = None,
    continue_: str | os.PathLike[str] | None = None,
) -> "SuiteResult":
    """Train one model under each configuration, and judge the losses, as `replay suite` does. Prints nothing.

    dataset    captures, or a .jsonl or .parquet with a column text; None: the sample that ships with the project
    continue_  a folder that suite left, or the name of a suite, to go on with; then the options are its own

    The others are those that `replay suite --help` explains. Its environment variables are not read.

    Raises UsageError for an option or a file that cannot be. On KeyboardInterrupt the ranks are ended, and what
    was trained is kept for `continue_`.
    """
    own = {
        "dataset": dataset,
        "model": model,
        "num_layers": num_layers,
        "dtype": dtype,
        "gradient_checkpointing": gradient_checkpointing,
        "learning_rate": learning_rate,
        "steps": steps,
        "max_samples": max_samples,
        "processes": processes,
        "tp": tp,
        "ring": ring,
        "data_ranks": data_ranks,
        "init_weights": init_weights,
        "save_init_weights": save_init_weights,
        "output_dir": output_dir,
        "run_limit": run_limit,
        "skip": skip,
        "skip_deepspeed": skip_deepspeed,
        "skip_fsdp2": skip_fsdp2,
        "skip_tp": skip_tp,
        "skip_ring": skip_ring,
        "only": only,
        "save_state": save_state,
        "save_every": save_every,
        "storage": storage,
        "plot": plot,
        "log_folder": log_folder,
        "launcher": launcher,
        "address": address,
        "continue_": continue_,
    }
    result: SuiteResult = call_command(command.suite, {"context": own, **own}, {})
    return result
