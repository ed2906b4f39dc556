"""Declare the options of `replay suite`."""

import inspect
import shutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, get_type_hints

import typer

from actor_init.spec import ActorSpec, UsageError
from capture.facts import Setting, flag_of
from replay.campaign.campaign_options import CampaignAction, list_words
from replay.commands.suite.plan import SAVE_EVERY, SuiteSpec, find_others, find_skipped
from replay.options.option_parsing import METAVARS, CommandAction, json_option, unwrap_optional, with_parameters
from replay.options.path_checks import check_paths
from replay.options.ray_options import RayOptions, with_ray_options
from replay.options.spec import ReplaySpec, check_result_folder

if TYPE_CHECKING:
    from replay.commands.suite.runs import SuiteResult


def _add_options_of_spec(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the `**given` of `command` with one parameter for each option that SuiteSpec declares."""
    hints = get_type_hints(SuiteSpec)
    parameters = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[option.name],
            default=typer.Option(
                option.default,
                flag_of(option.name),
                **{"metavar": METAVARS.get(unwrap_optional(hints[option.name])) or None, **option.metadata},
            ),
        )
        for option in fields(SuiteSpec)
        if option.metadata
    ]
    return with_parameters(command, parameters, come_first=True)


@_add_options_of_spec
@with_ray_options
def suite(
    context: typer.Context,
    skip: list[str] = typer.Option(  # noqa: B008
        [], metavar="NAME", help="Leave out this configuration. May be given again."
    ),
    skip_deepspeed: bool = typer.Option(False, "--skip-deepspeed", envvar="SKIP_DEEPSPEED", help="Those of DeepSpeed."),
    skip_fsdp2: bool = typer.Option(False, "--skip-fsdp2", envvar="SKIP_FSDP2", help="Those of FSDP2."),
    skip_tp: bool = typer.Option(False, "--skip-tp", envvar="SKIP_TP", help="Those with tensor parallelism."),
    skip_ring: bool = typer.Option(False, "--skip-ring", envvar="SKIP_RING", help="Those with ring attention."),
    only: list[str] = typer.Option([], metavar="NAME", help="Train this one alone. May be given again."),  # noqa: B008
    save_state: bool = typer.Option(
        False, "--save-state", help="Keep a state every few steps, from which a training goes on."
    ),
    save_every: int | None = typer.Option(
        None, min=1, metavar="N", help=f"Steps between two states of --save-state. (default: {SAVE_EVERY})"
    ),
    storage: str | None = typer.Option(
        None, metavar="FOLDER|URI", help="Where states are kept; for Ray a folder that all nodes share, or a URI."
    ),
    continue_: str | None = typer.Option(
        None,
        "--continue",
        metavar="FOLDER|NAME",
        help="Go on with what is missing in this folder of suite's, or of the suite of this name in --log-folder or "
        "--storage.",
    ),
    plot: Path | None = typer.Option(None, metavar="FILE", help="Draw the curves, as out.png (needs matplotlib)."),  # noqa: B008
    log_folder: Path = typer.Option(  # noqa: B008
        Path("logs"), "-o", "--log-folder", metavar="FOLDER", envvar="LOG_DIR", help="Where the suite's folder is made."
    ),
    json: bool = json_option(),
    ray: RayOptions | None = None,
    **given: Any,
) -> CommandAction:
    """Train one model under each configuration; judge the losses.

    ddp is the reference; deepspeed (ZeRO 2), fsdp2, fsdp2-tp, fsdp2-ring and fsdp2-tp-ring are the standard ones;
    deepspeed-autotp comes beside them. Exit code 0: each loss falls, and is within its bound of deepspeed's and
    ddp's; 1: one is not, or failed.
    """
    if continue_ is not None:
        folder = Path(continue_)
        is_name = folder.name == continue_ and not folder.is_dir()
        _refuse_options_of_the_suite(context, is_name=is_name)
        run = partial(_resume, folder, continue_ if is_name else None, log_folder, storage, ray, plot)
        return CampaignAction(run=run, as_json=json)
    _check_storage(storage, save_every, ray, saves=save_state)
    if skip and only:
        raise UsageError.mutually_exclusive(Setting("skip"), Setting("only"))
    groups = {"deepspeed": skip_deepspeed, "fsdp2": skip_fsdp2, "tp": skip_tp, "ring": skip_ring}
    spec = SuiteSpec(
        **given,
        skip=find_skipped(skip, [group for group, is_given in groups.items() if is_given]) | find_others(only),
        save_every=(save_every or SAVE_EVERY) if save_state else None,
        storage=storage if storage is None or "://" in storage else str(Path(storage).absolute()),
    )
    words = list_words(_read_options(context, "COMMANDLINE", "ENVIRONMENT"))
    return CampaignAction(run=partial(_begin, spec, log_folder, words, ray, plot), as_json=json)


def _refuse_options_of_the_suite(context: typer.Context, *, is_name: bool) -> None:
    """Raise UsageError for an option that --continue takes from the suite that was begun."""
    allowed = ["continue_", "launcher", "address", "plot", *(["storage", "log_folder"] if is_name else [])]
    option_names = [name for name in _read_options(context, "COMMANDLINE") if name not in allowed]
    if option_names:
        why = "takes its options from the suite that was begun"
        raise UsageError(Setting("continue_"), why, f"Try: replay suite, with {Setting(option_names[0])}")


def _check_storage(storage: str | None, save_every: int | None, ray: RayOptions | None, *, saves: bool) -> None:
    """Raise UsageError for a storage, or for numbers of steps, where no state is saved or none can be saved there."""
    if not saves:
        states = Setting("save_state")
        for setting in (Setting("save_every", save_every), Setting("storage", storage)):
            if setting.has_value:
                name = Setting(setting.name)
                raise UsageError(name, f"is for the states of {states}", f"Try: {states} {setting}")
    elif storage is None and ray is not None and ray.address is not None:
        advice = f"Try: {Setting('save_state')} {Setting('storage', 'FOLDER')}"
        raise UsageError(Setting("save_state"), "needs a folder that all nodes share, or a URI", advice)
    elif storage is not None and ray is None and "://" in storage:
        advice = f"Try: {Setting('launcher', 'ray')}, or a folder"
        raise UsageError(Setting("storage", storage), "is for a Ray cluster", advice)


def _read_options(context: typer.Context | Mapping[str, Any], *sources: str) -> dict[str, Any]:
    """Return the values of the options that come from there, by parameter name; Python gives what it has of them."""
    if isinstance(context, Mapping):
        return {name: value for name, value in context.items() if value is not None}
    given = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name: context.params[name]
        for name, source in given.items()
        if source and source.name in sources and name != "json"
    }


def _begin(
    spec: SuiteSpec, log_folder: Path, words: list[str], ray: RayOptions | None, plot: Path | None, screen: IO[str]
) -> "SuiteResult":
    if spec.dataset is not None and not spec.dataset.exists():
        advice = "Give a folder of captures, a .jsonl or a .parquet file"
        raise UsageError(Setting("dataset", spec.dataset), "does not exist", advice)
    if ray is None:
        check_paths(ReplaySpec(actor=ActorSpec(model=spec.model)))
    from replay.commands.suite.runs import begin

    return begin(spec, log_folder, words, ray, plot, screen)


def _resume(
    folder: Path,
    name: str | None,
    log_folder: Path,
    storage: str | None,
    ray: RayOptions | None,
    plot: Path | None,
    screen: IO[str],
) -> "SuiteResult":
    if name is None:
        check_result_folder("suite", folder)
    else:
        folder = _find_suite_folder(name, log_folder, storage)
    from replay.commands.suite.runs import resume

    return resume(folder, ray, plot, screen)


def _find_suite_folder(name: str, logs: Path, storage: str | None) -> Path:
    """Return the folder of the suite called `name`; if it is not below `logs`, it is made from the copy in `storage`.

    Raises UsageError if it is in neither.
    """
    folder = logs / name
    if (folder / "suite.json").is_file():
        return folder
    copy = Path(storage) / name if storage is not None else None
    if copy is None or not (copy / "suite.json").is_file():
        places = [str(logs), *([storage] if storage is not None else [])]
        advice = (
            "one that `replay suite` left"
            if storage
            else f"a folder that `replay suite` left, or {Setting('storage')} too"
        )
        why = f": no such folder, and no suite of that name in {' or '.join(places)}"
        raise UsageError(Setting("continue_", name), why, f"Give {advice}")
    try:
        folder.mkdir(parents=True)
        for path in (*copy.glob("*.jsonl"), copy / "suite.json"):
            shutil.copy2(path, folder)
    except OSError as error:
        raise UsageError(Setting("log_folder", logs), f": {error}", "Give a folder where you may write") from None
    return folder
