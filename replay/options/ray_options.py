"""Declare the options of a Ray cluster, which `replay` and its subcommands share."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from typing import Annotated, Any

import typer

from actor_init.spec import UsageError
from capture.facts import Setting
from replay.options.option_parsing import set_signature


class Launcher(StrEnum):
    RAY = "ray"


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOptions:
    # The cluster's address, or `auto`. None: a local cluster is started, and stopped at the end.
    address: str | None
    # None: as many as the options of the ranks need.
    num_processes: int | None = None


# By parameter name.
OPTIONS: dict[str, Any] = {
    "launcher": Annotated[
        Launcher | None,
        typer.Option(
            metavar="ray",
            rich_help_panel="Ranks",
            show_default=False,
            help="Start the ranks on a Ray cluster (pip install 'micro-replay[ray]').",
        ),
    ],
    "address": Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            rich_help_panel="Ranks",
            show_default=False,
            help="Of the Ray cluster, or auto. Default: a local one is started, and stopped at the end.",
        ),
    ],
    "processes": Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel="Ranks",
            show_default=False,
            help="Ranks on the Ray cluster. Default: tp x ring.",
        ),
    ],
}


def with_ray_options(command: Callable[..., Any], *, of_one_replay: bool = False) -> Callable[..., Any]:
    """Replace the parameter `ray` of `command`, a `RayOptions | None`, with the options of a Ray cluster.

    of_one_replay  with --processes too: a command of many runs chooses the ranks of each

    The command raises UsageError if something was typed about a cluster without --launcher ray.
    """
    names = list(OPTIONS) if of_one_replay else ["launcher", "address"]
    signature = inspect.signature(command)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name == "ray":
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters += [inspect.Parameter(name, kind, annotation=OPTIONS[name], default=None) for name in names]
        else:
            parameters.append(parameter)

    @wraps(command)
    def with_ray(**values: Any) -> Any:
        ray = _ray_options(**{name: values.pop(name) for name in names})
        return command(**values, ray=ray)

    set_signature(with_ray, signature.replace(parameters=parameters))
    return with_ray


def _ray_options(launcher: Launcher | None, address: str | None, processes: int | None = None) -> RayOptions | None:
    if launcher is not None and launcher not in list(Launcher):
        raise UsageError.not_allowed("launcher", launcher, f"Give one of {', '.join(Launcher)}")
    if launcher is not None:
        return RayOptions(address=address, num_processes=processes)
    for setting in (Setting("address", address), Setting("processes", processes)):
        if setting.has_value:
            raise UsageError(
                Setting(setting.name), "is for a Ray cluster", f"Try: {Setting('launcher', Launcher.RAY)} {setting}"
            )
    return None
