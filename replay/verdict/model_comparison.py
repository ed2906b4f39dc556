"""Compare what a recording states of the job's model with what the replay's own model is."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from capture.file_format.model_facts import ModelFacts
from capture.file_format.name_patterns import PatternTable, format_patterns, split_name
from capture.record.wrapper_facts import GRADIENT_SYNC
from replay.tolerances.difference import roundoff
from replay.verdict.model_facts import (
    ALL_PARAMETERS,
    ALL_ZEROS,
    BUFFER_DTYPE,
    NOT_COMPUTED_ATTRIBUTES,
    OTHER_TEXT,
    WHOLE_MODEL,
    ModelDifference,
    ModelDifferenceKind,
)
from replay.verdict.recorded_pass import RecordedPass

_REPLAY_PACKAGES = ("actor_init", "replay")
# A module of these computes what the replaced one does, in fewer steps; `kernels` in a pass's settings says so.
_FUSED_PACKAGES = ("liger_kernel",)
# Rotary embeddings of these kinds change their frequencies with the longest row that they have seen.
_CHANGING_ROPE = ("dynamic", "longrope")
# How many roundoffs of its dtype a buffer's value may be off: its values come from powers, on another device.
_BUFFER_ROUNDOFFS = 64
# What a wrapper has where nobody changed it.
_USUAL_SETTINGS: Mapping[str, object] = {
    "parameters_to_ignore": [],
    "comm_hooks": [],
    "gradient_divide_factor": None,
    "gradient_average": True,
    "gradient_predivide_factor": 1.0,
    "postscale_gradients": True,
}
_ADAPTER_PART = re.compile(r"\.lora_|\.modules_to_save\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnParameter:
    """What the replay knows of a parameter beside its facts.

    is_frozen_by_class  the model's class makes it frozen; transformers forgets that as it loads weights
    is_followed         it is trained in the steps in which the job trained it, which are not all
    may_be_fp32         the model's class keeps it in fp32 in a model of another dtype
    """

    is_frozen_by_class: bool = False
    is_followed: bool = False
    may_be_fp32: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnModel:
    """The model as the replay builds it, before it is sharded, compiled or fused, in the job's dtype.

    facts       each module and parameter by its own name
    parameters  by name
    """

    facts: ModelFacts
    parameters: Mapping[str, OwnParameter] = field(default_factory=dict)


class _Key(NamedTuple):
    """What a difference says, apart from where it is and on which rank."""

    kind: ModelDifferenceKind
    key: str
    job: str | None
    replay: str | None
    forward: int | None = None


def find_usual_dtype(facts: ModelFacts) -> str:
    """Return the dtype that most parameters have, apart from adapters' ones; `float32` without any."""
    counts = Counter(row["dtype"] for name, row in facts.parameters.items() if not _is_of_adapter(name))
    return counts.most_common(1)[0][0] if counts else "float32"


def compare_models(job: Sequence[ModelFacts], replay: OwnModel) -> list[ModelDifference]:
    """List what the job's model had other than the replay's, from cause to consequence.

    job  of each rank

    What one of the two alone states, as code of another version of a package, is not compared.
    """
    ranks_by_difference: dict[ModelDifference, list[int]] = {}
    ranks_by_facts: dict[str, list[int]] = {}
    facts_by_text = {}
    for facts in job:
        text = repr(replace(facts, rank=0, recording=""))
        ranks_by_facts.setdefault(text, []).append(facts.rank)
        facts_by_text[text] = facts
    for text, ranks in ranks_by_facts.items():
        for difference in _Comparison(job=facts_by_text[text], own=replay).list_differences():
            ranks_by_difference.setdefault(difference, []).extend(ranks)
    order = list(ModelDifferenceKind)
    differences = [
        difference if len(ranks) == len(job) else replace(difference, ranks=tuple(sorted(ranks)))
        for difference, ranks in ranks_by_difference.items()
    ]
    return sorted(differences, key=lambda difference: order.index(difference.kind))


def find_unreduced_step_differences(passes: Sequence[RecordedPass]) -> list[ModelDifference]:
    """Say that DDP did not reduce the gradients of the last pass before a step, as where `no_sync` is left on.

    passes  that the job recorded, of all ranks
    """
    last_passes = [
        recorded
        for recorded in passes
        if recorded.step_after is not None
        and list(recorded.step_after.passes)[-1:] == [recorded.forward_number]
        and GRADIENT_SYNC in recorded.environment
        and (recorded.world_size or 1) > 1
    ]
    unreduced = [recorded for recorded in last_passes if recorded.environment[GRADIENT_SYNC] == "off"]
    if not unreduced:
        return []
    ranks = {recorded.rank for recorded in unreduced if recorded.rank is not None}
    has_all = ranks == {recorded.rank for recorded in last_passes}
    num_steps = len({recorded.num_steps_before for recorded in last_passes})
    num_unreduced = len({recorded.num_steps_before for recorded in unreduced})
    return [
        ModelDifference(
            kind=ModelDifferenceKind.WRAPPER,
            where="DistributedDataParallel",
            key="gradient sync",
            job=f"off in the last pass before {num_unreduced} of {num_steps} steps",
            replay="on",
            ranks=() if has_all else tuple(sorted(ranks)),
        )
    ]


@dataclass(kw_only=True, slots=True)
class _Comparison:
    """Compares one rank's model with the replay's, and collects in `names` where each difference is.

    own_modules  classes of modules that the job alone has, by pattern
    """

    job: ModelFacts
    own: OwnModel
    names: dict[_Key, list[str]] = field(default_factory=dict)
    own_modules: dict[str, str] = field(default_factory=dict)

    @property
    def replay(self) -> ModelFacts:
        return self.own.facts

    def list_differences(self) -> list[ModelDifference]:
        self._compare_modules()
        self._compare_functions()
        self._compare_parameters()
        self._compare_biases()
        self._compare_ties()
        self._compare_buffers()
        self._compare_wrappers()
        all_names = [*self.replay.modules, *self.replay.parameters, *self.replay.buffers]
        differences = [
            ModelDifference(kind=ModelDifferenceKind.MODULE, where=pattern, job=class_name, replay=None)
            for pattern, class_name in self.own_modules.items()
        ]
        for key, names in self.names.items():
            wheres = format_patterns(self._name_whole_modules(names), all_names)
            differences += [
                ModelDifference(
                    kind=key.kind, where=where, key=key.key, job=key.job, replay=key.replay, forward=key.forward
                )
                for where in wheres
            ]
        return differences

    def _name_whole_modules(self, names: Sequence[str]) -> list[str]:
        """Name a module in place of its parameters, where these are several and all of them are among `names`."""
        num_in_module = Counter(module for name in self.replay.parameters for module in _list_modules_around(name))
        num_chosen = Counter(
            module for name in names if name in self.replay.parameters for module in _list_modules_around(name)
        )
        if not num_chosen:
            return list(names)
        return list(
            dict.fromkeys(
                next(
                    (
                        module or ALL_PARAMETERS
                        for module in _list_modules_around(name)
                        if 1 < num_in_module[module] == num_chosen[module]
                    ),
                    name,
                )
                for name in names
            )
        )

    def _add(
        self,
        kind: ModelDifferenceKind,
        where: str,
        key: str = "",
        *,
        job: str | None,
        replay: str | None,
        forward: int | None = None,
    ) -> None:
        self.names.setdefault(_Key(kind, key, job, replay, forward), []).append(where)

    def _compare_modules(self) -> None:
        job_modules = PatternTable(self.job.modules)
        job_root, own_root = self.job.modules.get("", {}), self.replay.modules.get("", {})
        has_same_root = _get_last_name(job_root.get("class")) == _get_last_name(own_root.get("class"))
        for name, own in self.replay.modules.items():
            found = job_modules.find(name)
            if found is not None:
                self._compare_module(name, found[1], own)
            elif has_same_root and self._has_same_version(own_root["class"]) and not self._is_inside_other(name):
                self._add(ModelDifferenceKind.MODULE, name, job=None, replay=own["class"])
        if not has_same_root or not self._has_same_version(own_root["class"]):
            return
        known = {split_name(name)[0] for name in self.replay.modules}
        for pattern, values in self.job.modules.items():
            is_new = _find_template(pattern) not in known and not self._is_unbuilt_adapter(values["class"])
            if is_new and not self._has_unbuilt_adapter and not self._is_inside_other(pattern):
                self.own_modules[pattern] = values["class"]

    def _is_inside_other(self, name: str) -> bool:
        """Tell whether a module around this one is another one already, which says enough."""
        kinds = (ModelDifferenceKind.MODULE, ModelDifferenceKind.CLASS)
        others = {_find_template(other) for key, names in self.names.items() if key.kind in kinds for other in names}
        others |= {_find_template(pattern) for pattern in self.own_modules}
        parts = _find_template(name).split(".")
        return any(".".join(parts[:length]) in others for length in range(1, len(parts)))

    def _compare_module(self, name: str, job: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        where = name or WHOLE_MODEL
        self._compare_hooks(ModelDifferenceKind.HOOK, where, job, own)
        if _is_fused(job["class"]) or _is_fused(job.get("forward", [""])[0]) or self._is_unbuilt_adapter(job["class"]):
            return
        is_same_class = job["class"] == own["class"] or (
            not self._has_same_version(own["class"]) and _get_last_name(job["class"]) == _get_last_name(own["class"])
        )
        if not is_same_class:
            self._add(ModelDifferenceKind.CLASS, where, job=job["class"], replay=own["class"])
            return
        job_forward, own_forward = job.get("forward"), own.get("forward")
        own_name = own_forward[0] if own_forward else f"{own['class']}.forward"
        if job_forward is not None and job_forward != own_forward:
            self._add(ModelDifferenceKind.FORWARD, where, job=job_forward[0], replay=own_name)
        elif self._is_comparable(own["class"]):
            for key in ("code", "methods"):
                if job.get(key) != own.get(key):
                    self._add(ModelDifferenceKind.FORWARD, where, key, job=OTHER_TEXT, replay=own["class"])
        job_attributes, own_attributes = job.get("attributes", {}), own.get("attributes", {})
        for key, own_value in own_attributes.items():
            is_known = key in job_attributes and key not in NOT_COMPUTED_ATTRIBUTES
            if is_known and not _is_same_value(job_attributes[key], own_value):
                self._add(
                    ModelDifferenceKind.ATTRIBUTE, where, key, job=str(job_attributes[key]), replay=str(own_value)
                )

    def _compare_hooks(
        self, kind: ModelDifferenceKind, where: str, job: Mapping[str, Any], own: Mapping[str, Any]
    ) -> None:
        own_hooks = Counter(map(tuple, own.get("hooks", ())))
        for hook, count in Counter(map(tuple, job.get("hooks", ()))).items():
            if count > own_hooks[hook]:
                hook_kind, name, _ = hook
                self._add(kind, where, hook_kind, job=name, replay=None)

    def _compare_functions(self) -> None:
        for file, job_functions in self.job.functions.items():
            own_functions = self.replay.functions.get(file, {})
            # What a file of the job's imports replaces nothing, where the replay runs no class of that file.
            if not own_functions and _is_of_job(file):
                continue
            for name, (job_name, job_digest) in job_functions.items():
                own_name, own_digest = own_functions.get(name, ("", ""))
                if job_name and job_name != own_name and not _is_fused(job_name):
                    self._add(ModelDifferenceKind.FUNCTION, f"{file}:{name}", job=job_name, replay=own_name or file)
                elif own_digest and job_digest != own_digest and self._is_comparable(job_name or file):
                    self._add(ModelDifferenceKind.FUNCTION, f"{file}:{name}", job=OTHER_TEXT, replay=own_name or file)
        for name, (job_name, job_digest) in self.job.patches.items():
            if self.replay.patches.get(name) != [job_name, job_digest]:
                package, _, function = name.rpartition(".")
                self._add(ModelDifferenceKind.FUNCTION, f"{package}:{function}", job=job_name, replay=package)
        self._compare_function(ModelDifferenceKind.LOSS_FUNCTION, "", self.job.loss_function, self.replay.loss_function)
        job_attention, own_attention = self.job.attention or {}, self.replay.attention or {}
        if own_attention.get("name") != job_attention.get("name"):
            own_attention = {}
        for key in ("function", "mask"):
            self._compare_function(
                ModelDifferenceKind.ATTENTION_FUNCTION, key, job_attention.get(key), own_attention.get(key)
            )

    def _compare_function(
        self, kind: ModelDifferenceKind, key: str, job: Sequence[str] | None, own: Sequence[str] | None
    ) -> None:
        if job is None or _is_fused(job[0]):
            return
        # The replay has no such function, or put one of its own in its place.
        if (own is None or _get_package(own[0]) in _REPLAY_PACKAGES) and not _is_of_job(job[0]):
            return
        own_name = None if own is None else own[0]
        is_same_name = own is not None and (
            job[0] == own[0] or (not _is_of_job(job[0]) and not self._has_same_version(job[0]))
        )
        if not is_same_name:
            self._add(kind, WHOLE_MODEL, key, job=job[0], replay=own_name)
        elif own is not None and job[1] != own[1] and self._is_comparable(job[0]):
            self._add(kind, WHOLE_MODEL, key, job=OTHER_TEXT, replay=own_name)

    def _compare_parameters(self) -> None:
        job_parameters = PatternTable(self.job.parameters)
        pairs = {
            name: (found[1], own)
            for name, own in self.replay.parameters.items()
            if (found := job_parameters.find(name)) is not None
        }
        job_dtypes: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        own_dtypes: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        for name, (job, own) in pairs.items():
            job_dtypes[_is_of_adapter(name)][job["dtype"]] += 1
            own_dtypes[_is_of_adapter(name)][own["dtype"]] += 1
        for name, (job, own) in pairs.items():
            known = self.own.parameters.get(name, OwnParameter())
            self._compare_hooks(ModelDifferenceKind.PARAMETER_HOOK, name, job, own)
            is_as_in_job = known.is_frozen_by_class or known.is_followed
            says_training = self.job.trains and not self._has_unbuilt_adapter and not is_as_in_job
            if says_training and job["trained"] is not own["trained"]:
                words = {True: "trained", False: "frozen"}
                self._add(ModelDifferenceKind.FROZEN, name, job=words[job["trained"]], replay=words[own["trained"]])
            elif says_training:
                self._compare_later(name, is_trained=job["trained"])
            ((usual, _),) = job_dtypes[_is_of_adapter(name)].most_common(1)
            ((own_usual, _),) = own_dtypes[_is_of_adapter(name)].most_common(1)
            is_unusual_here = own["dtype"] != own_usual or (known.may_be_fp32 and job["dtype"] == "float32")
            if job["dtype"] != usual and not is_unusual_here:
                others = f"as the others, {usual} in the job"
                self._add(ModelDifferenceKind.DTYPE, name, job=job["dtype"], replay=others)

    def _compare_biases(self) -> None:
        """Compare which modules have a bias, of those that have a weight in the job and here."""
        job_parameters = PatternTable(self.job.parameters)
        weights = [name for name in self.replay.parameters if name.endswith(".weight") and job_parameters.find(name)]
        for module in (name.removesuffix(".weight") for name in weights):
            name = f"{module}.bias"
            has_job, has_own = job_parameters.find(name) is not None, name in self.replay.parameters
            if has_job is not has_own:
                job, own = ("a parameter" if has_bias else None for has_bias in (has_job, has_own))
                self._add(ModelDifferenceKind.ATTRIBUTE, module, "bias", job=job, replay=own)

    def _compare_later(self, name: str, *, is_trained: bool) -> None:
        """Compare a parameter that both trained, or neither, at first, with what the job did later."""
        for forward, patterns in sorted(self.job.frozen_later.items(), key=lambda change: int(change[0])):
            is_trained_later = PatternTable(dict.fromkeys(patterns, True)).find(name) is None
            if is_trained_later is not is_trained:
                word, own_word = ("trained", "frozen") if is_trained_later else ("frozen", "trained")
                job_words = f"{word} from pass {int(forward) + 1} on"
                self._add(ModelDifferenceKind.FROZEN, name, job=job_words, replay=own_word, forward=int(forward))
                return

    def _compare_ties(self) -> None:
        job_parameters = PatternTable(self.job.parameters)
        job_ties = [frozenset(names) for names in self.job.tied]
        own_ties = [frozenset(names) for names in self.replay.tied]
        for ties, others, job_word, own_word in (
            (own_ties, job_ties, "tensors of their own", "one tensor"),
            (job_ties, own_ties, "one tensor", "tensors of their own"),
        ):
            for names in ties:
                is_known = all(name in self.replay.parameters and job_parameters.find(name) for name in names)
                if is_known and not any(names <= other for other in others):
                    self._add(ModelDifferenceKind.TIED, " and ".join(sorted(names)), job=job_word, replay=own_word)

    def _compare_buffers(self) -> None:
        job_buffers, own_modules = PatternTable(self.job.buffers), self.replay.modules
        for name, own in self.replay.buffers.items():
            found = job_buffers.find(name)
            owner = own_modules.get(name.rpartition(".")[0], {})
            rope_type = str(owner.get("attributes", {}).get("rope_type"))
            if found is None or any(changing in rope_type for changing in _CHANGING_ROPE):
                continue
            job = found[1]
            bound = _BUFFER_ROUNDOFFS * max(roundoff(job["dtype"]), roundoff(own["dtype"]))
            if job["num_elements"] != own["num_elements"]:
                sizes = f"{job['num_elements']} elements", f"{own['num_elements']} elements"
                self._add(ModelDifferenceKind.BUFFER, name, job=sizes[0], replay=sizes[1])
            elif any(
                abs(value - own_value) > bound * max(abs(value), abs(own_value))
                for value, own_value in zip([*job["values"], job["norm"]], [*own["values"], own["norm"]], strict=True)
            ):
                self._add(ModelDifferenceKind.BUFFER, name, job=_format_values(job), replay=_format_values(own))
            elif roundoff(job["dtype"]) > roundoff(own["dtype"]):
                # `model.to(bfloat16)` rounds rope's frequencies too, which from_pretrained(dtype=) leaves in fp32.
                self._add(ModelDifferenceKind.BUFFER, name, BUFFER_DTYPE, job=job["dtype"], replay=own["dtype"])

    def _compare_wrappers(self) -> None:
        for wrapper in self.job.wrappers:
            where = str(wrapper["class"])
            for key, usual in _USUAL_SETTINGS.items():
                if key in wrapper and not _is_same_value(wrapper[key], usual):
                    value = wrapper[key]
                    if key == "comm_hooks":
                        value = ", ".join(str(hook[0]) for hook in value)
                    elif isinstance(value, list):
                        value = ", ".join(map(str, value))
                    self._add(ModelDifferenceKind.WRAPPER, where, key, job=str(value), replay=str(usual or "none"))
            for key, function in wrapper.get("replaced", {}).items():
                self._add(ModelDifferenceKind.WRAPPER, where, key, job=str(function[0]), replay=f"{where}'s own")

    def _has_same_version(self, name: str) -> bool:
        """Tell whether both have the same version of the package that `name` begins with; the job's own has none."""
        package = _get_package(name)
        if _is_of_job(name):
            return True
        job, own = self.job.versions.get(package), self.replay.versions.get(package)
        # `2.13.0+cpu` and `2.13.0+cu128` have the same Python code.
        return job is not None and own is not None and job.partition("+")[0] == own.partition("+")[0]

    @property
    def _has_unbuilt_adapter(self) -> bool:
        """Tell whether the job had an adapter of a kind that is not built here."""
        has_job, has_own = (
            any(_is_of_peft(module["class"]) for module in facts.modules.values()) for facts in (self.job, self.replay)
        )
        return has_job and not has_own

    def _is_unbuilt_adapter(self, class_name: str) -> bool:
        return _is_of_peft(class_name) and self._has_unbuilt_adapter

    def _is_comparable(self, name: str) -> bool:
        """Tell whether equal code has equal digests here and in the job."""
        return self.job.python == self.replay.python and self._has_same_version(name)


def _list_modules_around(name: str) -> list[str]:
    """List the modules around a parameter, from the whole model, the empty name, inwards."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))]


def _is_of_job(name: str) -> bool:
    """Tell whether a function or class is the job's own: its name begins with that of a file."""
    return name.partition(":")[0].endswith(".py")


def _get_package(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def _is_fused(name: str) -> bool:
    return _get_package(name) in _FUSED_PACKAGES


def _is_of_peft(class_name: str) -> bool:
    return _get_package(class_name) == "peft"


def _is_of_adapter(name: str) -> bool:
    return _ADAPTER_PART.search(name) is not None


def _find_template(pattern: str) -> str:
    """Return a pattern or a name with `*` for each number."""
    return split_name(re.sub(r"\[[^\]]*\]", "*", pattern))[0]


def _get_last_name(name: object) -> str:
    return str(name).rpartition(":")[2]


def _is_same_value(job: object, own: object) -> bool:
    # An adapter may have another name here.
    if isinstance(job, dict) and isinstance(own, dict) and len(job) == len(own) == 1:
        return list(job.values()) == list(own.values())
    return job == own


def _format_values(buffer: Mapping[str, Any]) -> str:
    return ", ".join(f"{value:.4g}" for value in buffer["values"]) if buffer["norm"] else ALL_ZEROS
