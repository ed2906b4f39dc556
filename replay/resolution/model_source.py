"""Find the model that a run is of: the one that --model names, or the job's, whose config lies beside the inputs."""

from pathlib import Path

from actor_init.model import ModelSource, find_model
from actor_init.spec import UsageError
from actor_init.world import World
from capture.facts import Setting
from capture.file_format.actor_config import read_actor_config, read_adapter_configs, read_frozen_names
from capture.file_format.capture_file import Call
from capture.file_format.folder_layout import folder_of_capture
from capture.file_format.micro_batch import CaptureError
from replay.options.spec import InputsSpec, Parts, default_folder
from replay.verdict.weight_check import SameWeights


def find_source(spec: Parts) -> ModelSource:
    folder = inputs_folder(spec.inputs)
    try:
        captured = read_actor_config(folder) if spec.actor.model is None or spec.actor.is_custom else None
        adapters = {} if spec.actor.is_custom else read_adapter_configs(folder)
    except CaptureError as error:
        raise UsageError(*error.args) from error
    source = find_model(spec.actor, captured, str(shown(folder / "actor.json")), adapters)
    if source.adapter is not None and spec.state.save_model is not None:
        why = "writes whole models, and this one has an adapter"
        raise UsageError(Setting("save_model"), why, f"Try: {Setting('save_state')}")
    return source


def source_of_all(spec: Parts, world: World) -> ModelSource:
    """Find the model on every rank. Raises UsageError on all of them if one lacks it, or has another file of it."""
    source: ModelSource | None = None
    problem = ""
    try:
        source = find_source(spec)
    except UsageError as error:
        if world.world_size == 1:
            raise
        problem = error.text
    found = world.gather((problem, dict(source.facts) if source is not None else {}))
    problems = [(rank, said) for rank, (said, _) in enumerate(found) if said]
    if problems:
        rank, said = problems[0]
        raise UsageError(said if len(problems) == len(found) else f"on rank {rank}: {said}")
    assert source is not None
    for rank, (_, facts) in enumerate(found):
        if facts.get("model_file_sha256") != found[0][1].get("model_file_sha256"):
            raise UsageError(
                f"{facts['model_file']} is another file on rank {rank} than {found[0][1]['model_file']} on rank 0. "
                "Copy one to all nodes"
            )
    return source


def inputs_folder(spec: InputsSpec) -> Path:
    if spec.input_file is not None:
        return folder_of_capture(spec.input_file)
    return spec.inputs if spec.inputs is not None else default_folder()


def frozen_in_job(spec: Parts, source: ModelSource, first: Call | None) -> frozenset[str]:
    """Return the parameters that the job did not train, if its first pass had as many as were there to begin with.

    None where it had an adapter, which freezes what is not its own; merged into the weights, that is trained here.
    """
    folder = inputs_folder(spec.inputs)
    names = read_frozen_names(folder)
    num_frozen = None if first is None or first.weights is None else first.weights.num_frozen
    if not names or num_frozen != len(names) or source.adapter is not None:
        return frozenset()
    return SameWeights(source).own_names(names)


def shown(path: Path) -> Path:
    """Return the path relative to the current folder, if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
