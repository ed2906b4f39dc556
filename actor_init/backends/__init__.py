"""The backends that there are. Another one is a file that declares it, and an entry here."""

from collections.abc import Callable

from actor_init.backends import ddp, deepspeed, fsdp2
from actor_init.backends.declaration import Declaration
from actor_init.toggles import UsageError

BACKENDS: dict[str, Declaration] = {
    one.name: one for one in (deepspeed.DECLARATION, fsdp2.DECLARATION, ddp.DECLARATION)
}
DEFAULT = next(iter(BACKENDS))  # of --backend


def declaration_of(name: str) -> Declaration:
    """Raises UsageError where no backend is called so."""
    if name not in BACKENDS:
        raise UsageError(f"--backend {name!r} is not allowed. Give one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def names_of(that: Callable[[Declaration], bool]) -> list[str]:
    """The backends for which `that` holds, the default first."""
    return [name for name, one in BACKENDS.items() if that(one)]
