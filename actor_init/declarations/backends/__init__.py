"""Register the backends. To add one, write a file that declares it, its engine, and one entry here."""

from collections.abc import Callable

from actor_init.declarations.backends import ddp, deepspeed, fsdp2
from actor_init.declarations.backends.declaration import ActorSettings, BackendDeclaration
from actor_init.declarations.optimizers import OPTIMIZERS
from actor_init.option_values import UsageError
from capture.facts import Setting

BACKENDS: dict[str, BackendDeclaration] = {
    declaration.name: declaration for declaration in (deepspeed.DECLARATION, fsdp2.DECLARATION, ddp.DECLARATION)
}
DEFAULT = next(iter(BACKENDS))


def find_backend_declaration(name: str) -> BackendDeclaration:
    """Return the declaration of a backend. Raises UsageError for an unknown name."""
    if name not in BACKENDS:
        raise UsageError.not_allowed("backend", name, f"Give one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def find_backends(condition: Callable[[BackendDeclaration], bool]) -> list[str]:
    """Return the backends for which the condition holds, the default first."""
    return [name for name, declaration in BACKENDS.items() if condition(declaration)]


def list_whole_backend(spec: ActorSettings) -> list[Setting]:
    """Return the setting that gives an optimizer whole parameters, where the backend of `spec` gives it pieces."""
    if not find_backend_declaration(spec.backend).cuts_parameters(spec):
        return []
    return [Setting("backend", find_backends(lambda other: not other.cuts_parameters(spec))[0])]


def find_obstacle(spec: ActorSettings, device_type: str) -> str | None:
    """Return why the backend of `spec` cannot run it on a type of device; None if it can."""
    declaration = find_backend_declaration(spec.backend)
    return _find_optimizer_obstacle(spec, declaration) or declaration.find_obstacle(spec, device_type)


def _find_optimizer_obstacle(spec: ActorSettings, declaration: BackendDeclaration) -> str | None:
    """Return why the optimizer cannot step as it does elsewhere on what the backend gives it; None if it can."""
    if not spec.has_optimizer:
        return None
    optimizer, backend = Setting("optimizer", spec.optimizer), Setting("backend")
    family = OPTIMIZERS.get(spec.optimizer)
    if not declaration.cuts_parameters(spec) or (family is not None and family.is_elementwise):
        return None
    why = "does not go with" if family is not None else "is not known to step alike on"
    pieces = f"the pieces of parameters that {backend.with_value(declaration.name)} gives an optimizer"
    others = find_backends(lambda other: not other.cuts_parameters(spec))
    return f"{optimizer} {why} {pieces}. Try: {', or '.join(str(backend.with_value(name)) for name in others)}"
