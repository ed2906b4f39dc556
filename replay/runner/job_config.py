"""Hold the model's config against the job's, which lies beside the inputs, where --model names another place."""

from collections.abc import Iterator, Mapping
from typing import Any

from actor_init.model import ModelSource, find_model, lasting_config
from actor_init.spec import ActorSpec, UsageError

MOST_NAMED = 4  # in the header; run.json has all
# Names of outputs and tokens, and what fills weights that are read from files: no forward computes otherwise for them.
NOT_COMPUTED = {"id2label", "label2id", "problem_type", "return_dict", "output_attentions", "output_hidden_states"} | {
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "chunk_size_feed_forward"),
}


def differences_from_job(spec: ActorSpec, source: ModelSource, captured: Mapping[str, object] | None) -> list[str]:
    """List the settings in which the model of `--model` computes otherwise than the job's config says.

    captured  the config in the job's actor.json; None without one

    Settings that the model's class does not know are in one of the two alone, and are left out.
    """
    if spec.model is None or spec.is_custom or captured is None:
        return []
    try:
        jobs = find_model(ActorSpec(num_layers=spec.num_layers), captured, "the job").config
    except UsageError:  # a type that transformers does not have here, or fewer layers than are asked for
        kinds = captured.get("model_type"), source.config.model_type
        return [_said("model_type", *kinds)] if kinds[0] != kinds[1] else []
    there, here = lasting_config(jobs), lasting_config(source.config)
    shared = [name for name in here if name in there and name not in NOT_COMPUTED]
    shared.sort(key=lambda name: name != "model_type")  # which explains the others
    return [one for name in shared for one in _different(name, there[name], here[name])]


def header_line(differences: list[str]) -> dict[str, str]:
    """Return the line of the header; none if nothing differs."""
    if not differences:
        return {}
    more = f"; and {len(differences) - MOST_NAMED} more, in run.json" if len(differences) > MOST_NAMED else ""
    return {"config": f"other than the job's: {'; '.join(differences[:MOST_NAMED])}{more}"}


def _different(name: str, there: Any, here: Any) -> Iterator[str]:
    """Yield what differs, of settings within settings one by one."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in dict.fromkeys([*here, *there]):
            if key not in NOT_COMPUTED:
                yield from _different(f"{name}.{key}", there.get(key), here.get(key))
    elif there != here:
        yield _said(name, there, here)


def _said(name: str, there: Any, here: Any) -> str:
    return f"{name} {there} in the job, {here} here"
