"""Hold the model that a job ran against the one that a replay builds, once, when its actor is open."""

from collections.abc import Mapping

from actor_init.model import ModelSource, find_model, strip_config
from actor_init.spec import ActorSpec, UsageError
from replay.verdict.model_facts import ModelDifference, compare_configs, make_config_difference


def find_config_differences(
    spec: ActorSpec, source: ModelSource, captured: Mapping[str, object] | None
) -> list[ModelDifference]:
    """List the settings in which the model of `--model` computes otherwise than the job's config says.

    captured  the config in the job's actor.json; None without one
    """
    if spec.model is None or spec.is_custom or captured is None:
        return []
    try:
        job_config = find_model(ActorSpec(num_layers=spec.num_layers), captured, "the job").config
    except UsageError:
        # The transformers that is installed has no such model type, or the job's model has fewer layers than this run.
        job_type, own_type = captured.get("model_type"), source.config.model_type
        return [make_config_difference("model_type", job_type, own_type)] if job_type != own_type else []
    return compare_configs(strip_config(job_config), strip_config(source.config))
