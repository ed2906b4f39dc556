"""Register the backends. To add one, write a file that declares it, its engine, and one entry here."""

from collections.abc import Callable

from actor_init.declarations.backends import ddp, deepspeed, fsdp2
from actor_init.declarations.backends.declaration import Declaration
from actor_init.toggles import UsageError

BACKENDS: dict[str, Declaration] = {
    one.name: one for one in (deepspeed.DECLARATION, fsdp2.DECLARATION, ddp.DECLARATION)
}
DEFAULT = next(iter(BACKENDS))  # default of --backend


def declaration_of(name: str) -> Declaration:
    """Return the declaration of a backend. Raises UsageError for an unknown name."""
    if name not in BACKENDS:
        raise UsageError.not_allowed("backend", name, f"Give one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def names_of(that: Callable[[Declaration], bool]) -> list[str]:
    """Return the backends for which `that` holds, the default first."""
    return [name for name, one in BACKENDS.items() if that(one)]
