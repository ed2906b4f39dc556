"""Register the optimizer families. To add one, write a file that declares it, and one entry here."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from actor_init.declarations.optimizers import adafactor, adam, muon, packaged, sgd
from actor_init.declarations.optimizers.declaration import JobGroup, OptimizerDeclaration
from actor_init.option_values import OptimizerName, UsageError
from capture.facts import Setting

OPTIMIZERS: dict[str, OptimizerDeclaration] = {
    declaration.option_value: declaration
    for declaration in (
        adam.ADAMW,
        adam.ADAM,
        sgd.SGD,
        adafactor.ADAFACTOR,
        adafactor.TRANSFORMERS_ADAFACTOR,
        muon.MUON,
        packaged.LION,
        packaged.ADAMW_8BIT,
        packaged.ADAM_8BIT,
        packaged.LION_8BIT,
    )
}
OWN_CLASS = Setting("optimizer", "FILE.py:function")


def list_optimizer_values() -> list[str]:
    """List the values of --optimizer; it may also be FILE.py:function."""
    return [*OPTIMIZERS, OptimizerName.NONE]


def find_optimizer(option_value: str) -> OptimizerDeclaration:
    """Return the family that a value of --optimizer chooses. Raises KeyError for `none` and for FILE.py:function."""
    return OPTIMIZERS[option_value]


def find_optimizers_with(option: str) -> list[str]:
    """List the families that an option, a field of ActorSpec, is a setting of."""
    return [option_value for option_value, declaration in OPTIMIZERS.items() if option in declaration.options]


def recognise_group(group: JobGroup) -> OptimizerDeclaration | None:
    """Return the family that a job's group was stepped by; None for a class that no family is known to step as."""
    return next((declaration for declaration in OPTIMIZERS.values() if declaration.recognise(group)), None)


def read_job_group(settings: Mapping[str, Any], class_name: str, library: str | None = None) -> JobGroup:
    """Return a group of a recorded step.

    class_name, library  those of the step, for a group that does not say which of several optimizers it is of
    """
    name, package = settings.get("optimizer", class_name), settings.get("library", library)
    return JobGroup(class_name=str(name), library=package, settings=settings)


def explain_unknown_class(group: JobGroup, options: Sequence[Setting] = ()) -> str:
    """Say that no family steps as a job's class does. `options` go with a function of the user's own."""
    library = f" of {group.library}" if group.library not in (None, "__main__") else ""
    library = " of the job's own script" if group.library == "__main__" else library
    typed = " ".join(map(str, [OWN_CLASS, *options]))
    advice = f"Try: {typed}, where function(named_parameters, settings) builds it: the job's own class there "
    advice += "repeats its mistakes, a library's shows them"
    return f"the job's {group.class_name}{library} is of no family here, so its steps are not judged. {advice}"


def find_missing_package(option_value: str) -> UsageError | None:
    """Return the refusal of a family whose package is not installed; None if one is, or for another value."""
    if option_value not in OPTIMIZERS or any(
        find_spec(package) is not None for package in OPTIMIZERS[option_value].packages
    ):
        return None
    packages = OPTIMIZERS[option_value].packages
    what = f"neither {' nor '.join(packages)} is" if packages[1:] else f"{packages[0]} is not"
    advice = f"Try: pip install {packages[0].replace('_', '-')}, or {OWN_CLASS}"
    return UsageError(Setting("optimizer", option_value), f": {what} installed", advice)
