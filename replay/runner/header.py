"""Say what a run's numbers belong to: the facts of run.json, and the lines above the passes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actor_init.declarations.attention import find_form
from actor_init.model import ModelSource, find_model, strip_config
from actor_init.spec import ActorSpec, Compile, CompileLengths, PadTo, UsageError
from actor_init.world import World
from capture.file_format.actor_config import read_adapter_configs
from capture.file_format.capture_file import Call, read_call
from capture.file_format.micro_batch import CaptureError
from replay.objective.objective import Objective, described_loss
from replay.options.resolved import ResolvedReplay
from replay.options.spec import WindowWeights
from replay.output.text import counted, engine_text
from replay.resolution.job_defaults import inputs_folder, shown
from replay.resolution.resolve import frozen_text
from replay.resolution.selection import Selection
from replay.runner.states import Earlier
from replay.verdict.optimizer_settings import differences
from replay.verdict.text import weights_line
from replay.verdict.weight_check import SameWeights

MOST_NAMED = 4  # in the header; run.json has all
# Names of outputs and tokens, and what fills weights that are read from files: no forward computes otherwise for them.
NOT_COMPUTED = {"id2label", "label2id", "problem_type", "return_dict", "output_attentions", "output_hidden_states"} | {
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "chunk_size_feed_forward"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What is known of a run when its actor is open and no pass has run.

    facts       the backend's
    devices     names by rank
    num_inputs  by rank
    first       the first capture; None if it cannot be read
    dropout     the settings of the model that make dropout
    other_config  what the model's config has other than the job's
    """

    resolved: ResolvedReplay
    selection: Selection
    facts: Mapping[str, str | int]
    devices: Sequence[str]
    num_inputs: Sequence[int]
    objective: Objective | None
    first: Call | None
    earlier: Earlier
    same_weights: SameWeights
    dropout: Sequence[str]
    other_config: list[str]
    world: World

    def run_facts(self) -> dict[str, str | int]:
        """Return what was resolved, for run.json."""
        resolved, source = self.resolved, self.resolved.source
        facts = {
            "model": source.name,
            **source.facts,
            "rows": source.layout_under(resolved.actor).describe(),
            "weights": source.weights.describe(),
            **({"head": source.head.describe()} if source.head is not None else {}),
            **self.facts,
            **({"attention_reason": resolved.attention_reason} if resolved.attention_reason else {}),
        }
        if self.other_config:
            facts["config_differences"] = "; ".join(self.other_config)
        if self.objective is not None and self.objective.sha256 is not None:
            facts["loss_sha256"] = self.objective.sha256
        return facts

    def lines(self) -> dict[str, str]:
        """Return the lines above the passes, by name."""
        resolved = self.resolved
        lines = {
            "model": self._model(),
            "backend": self._backend(),
            "device": ", ".join(f"{self.devices.count(name)} x {name}" for name in dict.fromkeys(self.devices)),
            "inputs": self._inputs(),
        }
        if resolved.attention_reason:
            kernel = find_form(str(self.facts["attention_kernel"])).describe()
            lines["attention"] = f"{kernel}: {resolved.attention_reason}"
        lines["loss"] = described_loss(self.objective, resolved, self.first)
        lines |= header_line(self.other_config)
        lines |= _adapter(resolved)
        lines |= {"frozen": f"{frozen_text(frozen)}, as in the job"} if (frozen := resolved.source.frozen) else {}
        lines |= self._resumed()
        lines |= self._first_look()
        lines |= self._first_step()
        lines |= self._snapshot()
        return lines

    def _model(self) -> str:
        source = self.resolved.source
        layers, millions = source.config.get_text_config().num_hidden_layers, int(self.facts["num_parameters"]) / 1e6
        weights = source.weights.describe()
        return f"{source.name}, {layers} layers, {millions:,.4g} M parameters; weights {weights}"

    def _backend(self) -> str:
        facts, actor, head = self.facts, self.resolved.actor, self.resolved.source.head
        parallel = actor.parallel
        toggles = [
            actor.dtype.value,
            self.resolved.source.layout_under(actor).describe(),
            *([head.describe()] if head is not None and not head.in_chunks else []),
            f"attention {facts['attention_kernel']}",
            *([f"kernels {facts['kernels']}"] if "kernels" in facts else []),
            f"optimizer {facts['optimizer']}",
            *([f"tp {parallel.tp} (plan: {facts['tp_plan']})"] if parallel.tp > 1 else []),
            *(["sequence parallel"] if parallel.sequence_parallel else []),
            *([f"ring {parallel.ring}"] if parallel.ring > 1 else []),
            *([f"padded to the {actor.pad_to}"] if actor.pad_to is PadTo.LONGEST else []),
            *([f"padded to {actor.pad_tokens} tokens"] if actor.pad_tokens is not None else []),
            *([_compile_text(actor)] if actor.compile is not Compile.OFF else []),
            *(["gradient checkpointing"] if actor.gradient_checkpointing else []),
            *([f"gradient accumulation {n}"] if (n := actor.num_accumulated) > 1 else []),
            *(["window mean-of-means"] if self.resolved.measure.window is WindowWeights.MEAN_OF_MEANS else []),
        ]
        return f"{engine_text(actor.backend, facts['zero_stage'])}, {', '.join(toggles)}"

    def _inputs(self) -> str:
        numbers = self.num_inputs
        num_each = counted(numbers[0], "input") + (" a rank" if len(numbers) > 1 else "")
        if len(set(numbers)) > 1:
            num_each = f"{', '.join(map(str, numbers))} inputs by rank"
        return f"{num_each} from {shown(inputs_folder(self.resolved.inputs))}, {self.selection.dealing}"

    def _resumed(self) -> dict[str, str]:
        """Under --resume, say where the run goes on."""
        if not self.resolved.state.resume:
            return {}
        earlier, num_passes = self.earlier, len(self.selection.inputs)
        if earlier.folder is None:
            return {"resumed": "from the beginning: no state was saved yet"}
        steps, passes = counted(earlier.num_steps, "step"), counted(num_passes, "pass")
        return {"resumed": f"behind {steps}, {earlier.num_passes} of {passes} on each rank"}

    def _first_look(self) -> dict[str, str]:
        """Say whether weights match, and where the random states of dropout come from."""
        first = self.first
        if first is None:
            return {}
        whose = "from the job's random states" if first.random else "by chance: no random states were recorded"
        weights = {} if first.weights is None else {"recorded": weights_line(self.same_weights.check(first.weights))}
        return weights | ({"dropout": f"{', '.join(self.dropout)}, {whose}"} if self.dropout else {})

    def _first_step(self) -> dict[str, str]:
        """Under --step, say whether the job's first step used other settings than the replay will."""
        actor = self.resolved.actor
        if not self.resolved.measure.step:
            return {}
        for path in self.selection.inputs[: actor.num_accumulated]:
            try:
                step = read_call(path).step
            except CaptureError:  # the pass itself will report it
                return {}
            if step is not None:
                differing = differences(step, actor, 0)
                return {"optimizer": f"other than the job's: {'; '.join(differing)}" if differing else "as the job's"}
        return {}

    def _snapshot(self) -> Mapping[str, str]:
        """Say what --memory-snapshot is of, and what it costs."""
        if not self.resolved.measure.memory_snapshot:
            return {}
        on_cuda = self.world.device.type == "cuda"
        what = "of CUDA's allocator" if on_cuda else "none on a CPU: of the process's resident memory"
        slower = ", in every pass, which makes them slower" if self.world.world_size > 1 else ""
        return {"snapshot": what + slower}


def _compile_text(actor: ActorSpec) -> str:
    of_lengths = "" if actor.compile_lengths is CompileLengths.DYNAMIC else f", {actor.compile_lengths} lengths"
    return f"compile {actor.compile}{of_lengths}"


def _adapter(resolved: ResolvedReplay) -> dict[str, str]:
    """Describe the actor's adapter, or say that the job's is not built."""
    if resolved.source.adapter is not None:
        return {"adapter": f"{resolved.source.adapter.describe()}; the rest is frozen"}
    if not (adapters := read_adapter_configs(inputs_folder(resolved.inputs))):
        return {}
    named = counted(len(adapters), "adapter")
    if resolved.actor.adapter == "none":
        return {"adapter": f"not built; the job had {named}"}
    return {
        "adapter": f"not built: the job had {named}, which the weights are taken to have merged. Try: --adapter FOLDER"
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
        return [_config_difference("model_type", *kinds)] if kinds[0] != kinds[1] else []
    there, here = strip_config(jobs), strip_config(source.config)
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
        yield _config_difference(name, there, here)


def _config_difference(name: str, there: Any, here: Any) -> str:
    return f"{name} {there} in the job, {here} here"
