"""Register the backends. To add one, write a file that declares it, its engine, and one entry here."""

from collections.abc import Callable

from actor_init.declarations.backends import ddp, deepspeed, fsdp2
from actor_init.declarations.backends.declaration import BackendDeclaration
from actor_init.option_words import UsageError

BACKENDS: dict[str, BackendDeclaration] = {
    declaration.name: declaration for declaration in (deepspeed.DECLARATION, fsdp2.DECLARATION, ddp.DECLARATION)
}
DEFAULT = next(iter(BACKENDS))


def find_declaration(name: str) -> BackendDeclaration:
    """Return the declaration of a backend. Raises UsageError for an unknown name."""
    if name not in BACKENDS:
        raise UsageError.not_allowed("backend", name, f"Give one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def find_backends(condition: Callable[[BackendDeclaration], bool]) -> list[str]:
    """Return the backends for which the condition holds, the default first."""
    return [name for name, declaration in BACKENDS.items() if condition(declaration)]
