"""Declare the options of `replay mismatch`: its own, and those of a replay that it does not set itself."""

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import typer

from actor_init.declarations.attention import ATTENTION_VALUES
from actor_init.spec import Dtype, UsageError
from replay.campaign.campaign_options import CampaignAction
from replay.options.declarations.tensor_names import ROLLOUT_LOG_PROBS
from replay.options.option_parsing import CommandAction, DeclaredOption, add_options, job_option, json_option
from replay.options.spec import ReplaySpec
from replay.processes.child_job import ChildJob, leave_refusal
from replay.processes.launch import start_missing

Word = TypeVar("Word", bound=str)
WITH_COMMAS = ", with commas between"
DTYPES = [dtype for dtype in Dtype if dtype is not Dtype.AUTO]


def _serves_mismatch(option: DeclaredOption) -> bool:
    """Tell whether the option applies to mismatch: it runs forwards alone, in dtypes and kernels of its own lists."""
    if option.part == "measure":
        return option.field in ("timeout", "log_folder")
    return option.part in ("inputs", "actor", "actor.parallel") and option.field not in (
        *("dtype", "attention", "uneven", "epochs", "grad_accumulation", "gradient_checkpointing"),
        *("learning_rate", "lr_warmup_steps", "max_norm", "weight_decay", "beta1", "beta2", "eps", "momentum"),
    )


@partial(add_options, serves=_serves_mismatch)
def mismatch(
    context: typer.Context,
    dtype: str = typer.Option(
        "bf16,fp32", metavar="A,B", show_default=False, help="Replay in each of these dtypes. (default: bf16,fp32)"
    ),
    attention: str = typer.Option(
        "auto",
        metavar="A,B",
        show_default=False,
        help="And with each of these kernels, as --attention eager,sdpa. (default: auto)",
    ),
    worst: int = typer.Option(10, min=0, metavar="N", show_default=False, help="Tokens to list. (default: 10)"),
    json: bool = json_option(),
    job: Path | None = job_option(),  # noqa: B008
    **given: Any,
) -> CommandAction:
    """Measure how far a rollout engine's log-probs are from these.

    Under each dtype and kernel. The captures need the rollout's log-probs: of a converted dump, or noted by the job
    as rollout_log_probs. The tokens listed are those on which the first replay is farthest. Exit code 0 if the
    numbers were measured.
    """
    action = partial(
        _measure,
        ChildJob.from_options(given, job).spec,
        choose_words("dtype", dtype.split(","), DTYPES, separated=WITH_COMMAS),
        choose_words("attention", attention.split(","), ATTENTION_VALUES, separated=WITH_COMMAS),
        worst,
        typed=context.obj,
        as_json=json,
    )
    return action if job is None else partial(leave_refusal, action, job.parent)


def _measure(
    spec: ReplaySpec,
    dtypes: Sequence[Dtype],
    kernels: Sequence[str],
    worst: int,
    *,
    typed: Sequence[str],
    as_json: bool,
) -> int:
    if (exit_code := start_missing(spec, typed, needs=ROLLOUT_LOG_PROBS)) is not None:
        return exit_code
    from replay.commands.mismatch.report import mismatch

    return CampaignAction(run=partial(mismatch, spec, dtypes, kernels, worst), as_json=as_json)()


def choose_words(setting: str, words: Sequence[str], allowed: Collection[Word], *, separated: str = "") -> list[Word]:
    """Return the allowed words that were given, each once. Raises UsageError, which says how several are given."""
    if unknown := [word for word in words if word not in allowed]:
        raise UsageError.not_allowed(setting, unknown[0], f"Give some of {', '.join(allowed)}{separated}")
    # The allowed words may be members of an enum, equal to what was typed.
    members: dict[str, Word] = {word: word for word in allowed}
    return [members[word] for word in dict.fromkeys(words)]
