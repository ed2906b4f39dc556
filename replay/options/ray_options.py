"""Declare the options of a Ray cluster, which `replay` and its subcommands share."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from actor_init.spec import UsageError


class Launcher(StrEnum):
    RAY = "ray"


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOptions:
    address: str | None  # of the cluster, or `auto`; None: a local one is started, and stopped at the end
    num_processes: int | None = None  # None: as many as the options need


LauncherOption = Annotated[
    Launcher | None,
    typer.Option(
        metavar="ray",
        rich_help_panel="Ranks",
        show_default=False,
        help="Start the ranks on a Ray cluster (pip install 'micro-replay[ray]').",
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        rich_help_panel="Ranks",
        show_default=False,
        help="Of the Ray cluster, or auto. Default: a local one is started, and stopped at the end.",
    ),
]
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel="Ranks",
        show_default=False,
        help="Ranks on the Ray cluster. Default: tp x ring.",
    ),
]


def ray_options(launcher: Launcher | None, address: str | None, num_processes: int | None = None) -> RayOptions | None:
    """Return what was typed about a Ray cluster, or None if it is not to be used.

    Raises UsageError if something was typed about it without --launcher ray.
    """
    if launcher is Launcher.RAY:
        return RayOptions(address=address, num_processes=num_processes)
    for option, value in (("--address", address), ("--processes", num_processes)):
        if value is not None:
            raise UsageError(f"{option} is for a Ray cluster. Try: --launcher ray {option} ...")
    return None
