"""Put parts of a model into the mode that they had in the job: an encoder in eval mode, say, in a model that trains."""

from collections.abc import Collection, Sequence

from torch import nn

from capture.file_format.optimizer_step import strip_wrappers


def match_part(job_name: str, names: Collection[str]) -> str | None:
    """Find the one of this model's modules `names` that a module of the job is; None if none is, or several may be.

    Either model may be inside other modules, whose names come first.
    """
    outer_names = [name for name in names if f".{job_name}".endswith(f".{name}")]
    inner_names = [name for name in names if f".{name}".endswith(f".{job_name}")]
    if outer_names:
        return max(outer_names, key=len)
    return inner_names[0] if len(inner_names) == 1 else None


def switch_parts(model: nn.Module, parts: Sequence[str]) -> None:
    """Give each of these modules, with all inside it, the other mode than the module around it has; outermost first.

    parts  names of the job's modules; those that this model does not have are left out
    """
    modules = {strip_wrappers(name): module for name, module in model.named_modules() if name}
    for job_name in parts:
        name = match_part(job_name, modules)
        if name is not None:
            modules[name].train(not modules[name].training)


def list_missing_parts(model: nn.Module, parts: Sequence[str]) -> list[str]:
    """Name the job's modules that this model does not have."""
    names = [strip_wrappers(name) for name, _ in model.named_modules() if name]
    return [job_name for job_name in parts if match_part(job_name, names) is None]
