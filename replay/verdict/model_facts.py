"""Say what the job's running model had other than the replay's: not numbers, but what the two are.

A recording states of each module its class, the code of its forward, its settings and hooks, and of each parameter
whether it is trained and with which other one it is tied. The replay states the same of its own model. Whatever differs
is known, where a number that differs has to be explained.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# The key of a buffer that has other values for its dtype alone.
BUFFER_DTYPE = "dtype"
# What a buffer has in the job that nothing computed, as its norm tells of all of its elements.
ALL_ZEROS = "all zeros"
# Attributes that no forward computes with: a model that resized its embedding may keep the number from before.
NOT_COMPUTED_ATTRIBUTES = {"vocab_size"}
# Names of outputs and tokens, and what fills weights that are read from files: no forward computes otherwise for them.
NOT_COMPUTED = {"id2label", "label2id", "problem_type", "return_dict", "output_attentions", "output_hidden_states"} | {
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "chunk_size_feed_forward"),
}


class ModelDifferenceKind(StrEnum):
    """What of two models can differ, from cause to consequence.

    CONFIG              a key of the config: the running model's, and the one of the model folder
    MODULE              a module that one of the two does not have
    CLASS               the class of a module
    FORWARD             the code that a module's forward runs: replaced in the job, or another text under the same name
    FUNCTION            a function that forwards call, of torch or of the model's file: replaced, or another text
    ATTENTION_FUNCTION  the same of the function that transformers calls for attention
    LOSS_FUNCTION       the same of the model's loss function
    HOOK                a forward hook or a backward hook of a module, which the job's own code registered
    ATTRIBUTE           a plain setting of a module, such as `scaling`, `eps` or an adapter's scale
    BUFFER              the values of a buffer, such as rope's inverse frequencies
    TIED                two parameters that are one tensor in the job alone, or in the replay alone
    FROZEN              a parameter that is trained in the replay and not in the job, or the other way round
    DTYPE               a parameter whose dtype is not that of the job's other parameters
    PARAMETER_HOOK      a hook on a parameter's gradient, which the job's own code registered
    WRAPPER             what the wrapper does with gradients: DDP, FSDP2 or DeepSpeed
    """

    CONFIG = "config"
    MODULE = "module"
    CLASS = "class"
    FORWARD = "forward"
    FUNCTION = "function"
    ATTENTION_FUNCTION = "attention function"
    LOSS_FUNCTION = "loss function"
    HOOK = "hook"
    ATTRIBUTE = "attribute"
    BUFFER = "buffer"
    TIED = "tied weights"
    FROZEN = "frozen parameter"
    DTYPE = "dtype"
    PARAMETER_HOOK = "gradient hook"
    WRAPPER = "wrapper"


ALL_PARAMETERS, WHOLE_MODEL = "all parameters", "the model"
# What the job has of a function whose name is the replay's, and whose source is not.
OTHER_TEXT = "another text"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDifference:
    """One thing that the job's model has other than the replay's.

    where   the module, parameter, function or key of the config; WHOLE_MODEL for the outermost module. Modules of
            several layers are one difference if they differ alike: `model.layers.*.self_attn` where all do,
            `model.layers.[0-3,7].self_attn` where some do. A module of which all parameters differ alike stands for
            these, and ALL_PARAMETERS for those of the whole model
    key     the attribute, the wrapper's setting, the kind of hook, as `forward hook`, or BUFFER_DTYPE; empty where
            `where` says all
    job     what the job has, in words; None: nothing
    replay  what the replay has, in words; None: nothing
    ranks   the ranks of the job that have it; empty: all
    forward the number of the job's forward from which on it has it; None: from the first one on
    """

    kind: ModelDifferenceKind
    where: str
    key: str = ""
    job: str | None
    replay: str | None
    ranks: tuple[int, ...] = ()
    forward: int | None = None


def compare_configs(job: Mapping[str, object], replay: Mapping[str, object]) -> list[ModelDifference]:
    """List the settings that both configs have and in which they differ; another model type comes first.

    Settings that the model's class does not know are in one of the two alone, and are left out.
    """
    names = [name for name in replay if name in job and name not in NOT_COMPUTED]
    # Another model type explains all other differences.
    names.sort(key=lambda name: name != "model_type")
    return [difference for name in names for difference in _list_differences(name, job[name], replay[name])]


def _list_differences(name: str, job_value: Any, own_value: Any) -> Iterator[ModelDifference]:
    """Yield what differs, of settings within settings one by one."""
    if isinstance(job_value, dict) and isinstance(own_value, dict):
        for key in dict.fromkeys([*own_value, *job_value]):
            if key not in NOT_COMPUTED:
                yield from _list_differences(f"{name}.{key}", job_value.get(key), own_value.get(key))
    elif job_value != own_value:
        yield make_config_difference(name, job_value, own_value)


def make_config_difference(name: str, job_value: object, own_value: object) -> ModelDifference:
    return ModelDifference(kind=ModelDifferenceKind.CONFIG, where=name, job=str(job_value), replay=str(own_value))
