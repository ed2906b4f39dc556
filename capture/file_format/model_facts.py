"""Write and read what a job's model was while it ran: `model_rank<r>_<time>.json`, beside a rank's captures.

Each rank of each recording has one, of the first recorded pass that trained, or of the first one if none did.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from capture.file_format.atomic_write import read_bytes, write_atomically
from capture.file_format.folder_layout import list_capture_folders, make_rank_folder, strip_rank_folder
from capture.file_format.micro_batch import CaptureError
from capture.file_format.name_patterns import PatternTable

FORMAT = 1
# Of file names, for whoever copies a folder.
MODEL_FACTS_NAME = "model_rank*.json"
MAX_MODEL_FACTS_BYTES = 4 * 2**20
# Parameters that are looked for, to find the part of a job's model that has them.
NUM_LOOKED_FOR = 32
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What one rank's model was. The names of the fields are keys in the file.

    A function is a list of two: `transformers.models.llama.modeling_llama:LlamaMLP.forward`, or `train.py:forward` if
    it is the job's own, and a digest of its code. Modules, parameters and buffers have the names that the model gives
    them, without those of wrappers; those that are equal but for the number of their layer are written once, by
    patterns (`name_patterns.py`).

    recording      the id of the recording, as its captures have it
    forward        the pass before which this was taken
    trains         it was one with autograd on
    python         digests are comparable in one release of Python: `cpython 3.11.7`
    versions       of the packages that have the model's classes
    config         settings of the running model's config that are other than in `actor.json`, which is of the opening
    modules        class; code, the digest of the class's forward; methods, the digest of its other methods; attributes;
                   forward, a function if it is not the class's; hooks: kind, name, digest
    parameters     dtype, trained, hooks: kind, name, digest
    tied           names of parameters that are one tensor
    frozen_later   by the number of a later pass, as text: patterns of all that was not trained from there on, where
                   that changed. In a model of many modules the change may be some passes older
    buffers        dtype, num_elements, values: the first four and the last four, norm
    functions      those in the files of the model's classes, by file and name
    patches        functions in the place of torch's own, by name
    loss_function  of transformers' models; None where there is none
    attention      name, function, mask: what transformers calls; None where nothing says so
    compiled       patterns of what torch.compile compiles; the whole model has an empty name
    autocast       its dtype, or `off`
    checkpoints    activations are computed again in the backward
    wrappers       class and settings of DDP, FSDP or DeepSpeed, from the outside in
    """

    rank: int
    recording: str
    forward: int
    trains: bool
    python: str
    versions: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tied: Sequence[Sequence[str]] = ()
    frozen_later: Mapping[str, Sequence[str]] = field(default_factory=dict)
    buffers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    functions: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    patches: Mapping[str, Sequence[str]] = field(default_factory=dict)
    loss_function: Sequence[str] | None = None
    attention: Mapping[str, Any] | None = None
    compiled: Sequence[str] = ()
    autocast: str = "off"
    checkpoints: bool = False
    wrappers: Sequence[Mapping[str, Any]] = ()

    @property
    def frozen(self) -> list[str]:
        """The patterns of the parameters that were not trained."""
        return [pattern for pattern, facts in self.parameters.items() if not facts["trained"]]


def select_part(facts: ModelFacts, names: Collection[str]) -> ModelFacts:
    """Return the facts of the part that has parameters of these names, with the names that it gives them.

    Jobs hold a model in one of their own, as OpenRLHF's `Actor` does in `actor.model`. Hooks of the modules around the
    part are told as its own, and `compiled`, which nobody compares, has the names of the whole. The facts are returned
    as they are if the whole model has these names, or no part has.
    """
    part = _find_part(facts, names)
    if not part:
        return facts
    inside = f"{part}."

    def rename(by_name: Mapping[str, ValueT]) -> dict[str, ValueT]:
        return {name.removeprefix(inside): value for name, value in by_name.items() if name.startswith(inside)}

    def rename_all(names: Sequence[str]) -> list[str]:
        return list(rename(dict.fromkeys(names)))

    parts = part.split(".")
    around = [".".join(parts[:length]) for length in range(len(parts))]
    hooks = [hook for module in (*around, part) for hook in facts.modules.get(module, {}).get("hooks", ())]
    return replace(
        facts,
        modules={"": {**facts.modules[part], **({"hooks": hooks} if hooks else {})}, **rename(facts.modules)},
        parameters=rename(facts.parameters),
        tied=[tie for names in facts.tied if len(tie := rename_all(names)) == len(names)],
        frozen_later={forward: rename_all(patterns) for forward, patterns in facts.frozen_later.items()},
        buffers=rename(facts.buffers),
    )


def _find_part(facts: ModelFacts, names: Collection[str]) -> str:
    """Find the outermost module that has most of the parameters; empty where that is the whole model, or none is."""
    looked_for = sorted(names)[:: max(len(names) // NUM_LOOKED_FOR, 1)]
    table = PatternTable(facts.parameters)
    part, most = "", 0
    for module in sorted(facts.modules, key=lambda module: len(module.split(".")) if module else 0):
        num_found = sum(table.find(f"{module}.{name}" if module else name) is not None for name in looked_for)
        if num_found > most:
            part, most = module, num_found
        # Each of many ranks has facts, and mostly the whole model or a part right inside has all names.
        if most == len(looked_for):
            break
    return part


def write_model_facts(home: Path, facts: ModelFacts, *, stamp: str) -> Path:
    """Write a rank's facts into its folder, over those of the same recording. Raises OSError."""
    make_rank_folder(home)
    path = home / f"model_rank{facts.rank}_{stamp}.json"
    write_atomically(path, json.dumps({"format": FORMAT, **asdict(facts)}, separators=(",", ":")).encode())
    return path


def read_model_facts(folder: Path) -> list[ModelFacts]:
    """Read the facts of all ranks and recordings in a folder, by recording and rank.

    A rank's folder has those of the folder above. Raises CaptureError for a damaged file.
    """
    homes = list_capture_folders(strip_rank_folder(folder))
    all_facts = [_read_file(path) for home in homes for path in sorted(home.glob(MODEL_FACTS_NAME))]
    return sorted(all_facts, key=lambda facts: (facts.recording, facts.rank))


def copy_model_facts(source: Path, target: Path) -> None:
    """Copy the facts of a folder and its ranks' folders to another one. Raises OSError."""
    for home in list_capture_folders(source):
        for path in sorted(home.glob(MODEL_FACTS_NAME)):
            make_rank_folder(target / home.relative_to(source))
            write_atomically(target / path.relative_to(source), path.read_bytes())


def _read_file(path: Path) -> ModelFacts:
    advice = "Delete the file or copy it again: without it nothing is said of the job's model"
    try:
        content: Any = json.loads(read_bytes(path, MAX_MODEL_FACTS_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(f"{path.name}: cannot be read: {error}. {advice}") from None
    if isinstance(content, dict) and content.pop("format", None) == FORMAT and _is_well_formed(content):
        return ModelFacts(**content)
    raise CaptureError(f"{path.name}: no facts of a model of format {FORMAT}. {advice}")


def _is_well_formed(content: Mapping[str, Any]) -> bool:
    """Tell whether all values have the types that a reader relies on."""
    return (
        {"rank", "recording", "forward", "trains", "python"}
        <= content.keys()
        <= {key.name for key in fields(ModelFacts)}
        and type(content["rank"]) is type(content["forward"]) is int
        and type(content["recording"]) is type(content["python"]) is type(content.get("autocast", "")) is str
        and type(content["trains"]) is type(content.get("checkpoints", False)) is bool
        and all(isinstance(content.get(key, {}), dict) for key in ("versions", "config", "functions"))
        and all(map(_is_module, _values_of(content, "modules")))
        and all(map(_is_parameter, _values_of(content, "parameters")))
        and all(map(_is_buffer, _values_of(content, "buffers")))
        and all(_is_table(functions) for functions in _values_of(content, "functions"))
        and _is_table(content.get("patches", {}))
        and isinstance(content.get("frozen_later", {}), dict)
        and all(forward.isdecimal() and len(forward) < 16 for forward in content.get("frozen_later", {}))
        and all(map(_is_list_of_texts, content.get("frozen_later", {}).values()))
        and isinstance(content.get("tied", []), list)
        and all(map(_is_list_of_texts, content.get("tied", [])))
        and _is_list_of_texts(content.get("compiled", []))
        and (content.get("loss_function") is None or _is_function(content["loss_function"]))
        and (content.get("attention") is None or _is_attention(content["attention"]))
        and isinstance(content.get("wrappers", []), list)
        and all(
            isinstance(wrapper, dict) and type(wrapper.get("class")) is str for wrapper in content.get("wrappers", [])
        )
    )


def _values_of(content: Mapping[str, Any], key: str) -> list[Any]:
    table = content.get(key, {})
    return list(table.values()) if isinstance(table, dict) else [None]


def _is_module(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and type(value.get("class")) is type(value.get("code")) is type(value.get("methods", "")) is str
        and isinstance(value.get("attributes", {}), dict)
        and ("forward" not in value or _is_function(value["forward"]))
        and _are_hooks(value.get("hooks", []))
    )


def _is_parameter(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and type(value.get("dtype")) is str
        and type(value.get("trained")) is bool
        and _are_hooks(value.get("hooks", []))
    )


def _is_buffer(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and type(value.get("dtype")) is str
        and type(value.get("num_elements")) is int
        and isinstance(value.get("values"), list)
        and all(type(number) in (int, float) for number in [*value["values"], value.get("norm")])
    )


def _is_attention(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and type(value.get("name")) is str
        and all(value.get(key) is None or _is_function(value[key]) for key in ("function", "mask"))
    )


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_function, value.values()))


def _are_hooks(value: Any) -> bool:
    return isinstance(value, list) and all(_is_list_of_texts(hook) and len(hook) == 3 for hook in value)


def _is_function(value: Any) -> bool:
    return _is_list_of_texts(value) and len(value) == 2


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(type(text) is str for text in value)
