"""Say what a run's numbers belong to: the facts of run.json, and the lines above the passes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from actor_init.declarations.attention import find_attention_form
from actor_init.declarations.backends import list_whole_backend
from actor_init.model import ModelSource
from actor_init.spec import ActorSpec, Compile, CompileLengths, PadTo
from actor_init.world import World
from capture.facts import Setting
from capture.file_format.actor_config import read_adapter_configs
from capture.file_format.capture_file import CapturedCall, read_call
from capture.file_format.micro_batch import CaptureError
from replay.objective.objective import Objective, describe_loss
from replay.options.option_parsing import spell_setting
from replay.options.resolved import LOSS, STEP, ChosenBy, ResolvedReplay
from replay.options.spec import WindowWeights
from replay.output.text import describe_engine, name_some, pluralise
from replay.resolution.job_defaults import find_inputs_folder, shorten_path
from replay.resolution.resolve import describe_frozen
from replay.resolution.selection import Selection
from replay.runner.job_optimizer_state import count_loaded_steps
from replay.runner.state_store import EarlierPasses
from replay.verdict.model_facts import ModelDifference, ModelDifferenceKind
from replay.verdict.optimizer_comparison import list_setting_differences
from replay.verdict.recorded_pass import is_mixture, list_modules_in_other_mode
from replay.verdict.text import format_weights
from replay.verdict.weight_check import WeightChecker

# The header names this many differences of the config; run.json has all.
MAX_NAMED_DIFFERENCES = 4
MAX_NAMED_PARTS = 4


def describe_frozen_in_job(resolved: ResolvedReplay) -> str:
    """Say what is not trained, and that the backend cannot change that where the job did; empty for neither."""
    frozen, changed_at = list_frozen(resolved.source), resolved.first_forward_with_other_trained_parameters
    if changed_at is None:
        return f"{frozen}, as in the job" if frozen else ""
    follower = " ".join(map(spell_setting, list_whole_backend(resolved.actor)))
    return (
        f"{frozen or 'none'}, as in the job up to pass {changed_at}: {resolved.actor.backend} does not follow what the "
        f"job trains from pass {changed_at + 1} on. Try: {follower}"
    )


def list_frozen(source: ModelSource) -> str:
    """Name the parameters that are not trained, in any pass and in a part of them; empty where all are."""
    texts = [describe_frozen(source.frozen)] if source.frozen else []
    for forward, names in sorted(source.frozen_later.items()):
        texts.append(f"{describe_frozen(names) if names else 'no other'} from pass {forward + 1} on")
    return "; ".join(texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What is known of a run when its actor is open and no pass has run.

    facts               what the backend says of itself
    devices             names by rank
    num_inputs          by rank
    first_call          of the first input; None if it cannot be read
    dropout             the settings of the model that make dropout
    config_differences  what the model's config has other than the job's
    model_problem       why the job's model could not be compared with the replay's; None: it was
    missing_parts       of those that the job had in another mode than its model, the ones that this model does not have
    """

    resolved: ResolvedReplay
    selection: Selection
    facts: Mapping[str, str | int]
    devices: Sequence[str]
    num_inputs: Sequence[int]
    objective: Objective | None
    first_call: CapturedCall | None
    earlier: EarlierPasses
    weight_checker: WeightChecker
    dropout: Sequence[str]
    config_differences: Sequence[str]
    model_problem: str | None
    missing_parts: Sequence[str]
    world: World

    def collect_facts(self) -> dict[str, str | int]:
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
        if self.config_differences:
            facts["config_differences"] = "; ".join(self.config_differences)
        if self.model_problem is not None:
            facts["model_problem"] = self.model_problem
        if self.objective is not None and self.objective.sha256 is not None:
            facts["loss_sha256"] = self.objective.sha256
        return facts

    def collect_lines(self) -> dict[str, str]:
        """Return the lines above the passes, by name."""
        resolved = self.resolved
        lines = {
            "model": self._describe_model(),
            **describe_missing_weights(resolved.actor),
            "backend": self._describe_backend(),
            "device": ", ".join(f"{self.devices.count(name)} x {name}" for name in dict.fromkeys(self.devices)),
            "inputs": self._describe_inputs(),
            **self._describe_recording(),
        }
        if resolved.attention_reason:
            kernel = find_attention_form(str(self.facts["attention_kernel"])).describe()
            lines["attention"] = f"{kernel}: {resolved.attention_reason}"
        if (head := resolved.source.head) is not None:
            lines["head"] = head.describe()
        lines["loss"] = describe_loss(
            self.objective, resolved, self.first_call, is_noted=resolved.find_chooser(LOSS) is ChosenBy.JOB
        )
        lines |= _format_config_line(self.config_differences)
        lines |= {} if self.model_problem is None else {"job model": f"not compared: {self.model_problem}"}
        lines |= _describe_adapter(resolved)
        lines |= {"frozen": frozen} if (frozen := describe_frozen_in_job(resolved)) else {}
        lines |= self._describe_resumption()
        lines |= self._describe_first_call()
        lines |= self._describe_optimizer()
        lines |= {"state": state.describe()} if (state := self.resolved.source.optimizer_state) is not None else {}
        lines |= self._describe_snapshot()
        return lines

    def _describe_model(self) -> str:
        source = self.resolved.source
        layers, millions = source.config.get_text_config().num_hidden_layers, int(self.facts["num_parameters"]) / 1e6
        weights = source.weights.describe()
        return f"{source.name}, {layers} layers, {millions:,.4g} M parameters; weights {weights}"

    def _describe_backend(self) -> str:
        facts, actor = self.facts, self.resolved.actor
        parallel = actor.parallel
        toggles = [
            actor.dtype.value,
            self.resolved.source.layout_under(actor).describe(),
            f"attention {facts['attention_kernel']}",
            *([f"kernels {facts['kernels']}"] if "kernels" in facts else []),
            f"optimizer {facts['optimizer']}",
            *([f"tp {parallel.tp} (plan: {facts['tp_plan']})"] if parallel.tp > 1 else []),
            *(["sequence parallel"] if parallel.sequence_parallel else []),
            *([f"ring {parallel.ring}"] if parallel.ring > 1 else []),
            *([f"padded to the {actor.pad_to}"] if actor.pad_to is PadTo.LONGEST else []),
            *([f"padded to {actor.pad_tokens} tokens"] if actor.pad_tokens is not None else []),
            *([_describe_compile(actor)] if actor.compile is not Compile.OFF else []),
            *([f"routing {actor.routing}"] if is_mixture(self.weight_checker.names) else []),
            *(["gradient checkpointing"] if actor.gradient_checkpointing else []),
            *(
                [f"gradient accumulation {actor.resolved_grad_accumulation}"]
                if actor.resolved_grad_accumulation > 1
                else []
            ),
            *(["window mean-of-means"] if self.resolved.measure.window is WindowWeights.MEAN_OF_MEANS else []),
        ]
        return f"{describe_engine(actor.backend, facts['zero_stage'])}, {', '.join(toggles)}"

    def _describe_inputs(self) -> str:
        num_by_rank = self.num_inputs
        num_text = pluralise(num_by_rank[0], "input") + (" a rank" if len(num_by_rank) > 1 else "")
        if len(set(num_by_rank)) > 1:
            num_text = f"{', '.join(map(str, num_by_rank))} inputs by rank"
        return f"{num_text} from {shorten_path(find_inputs_folder(self.resolved.inputs))}, {self.selection.dealing}"

    def _describe_recording(self) -> dict[str, str]:
        """Say which recording of a folder with several is replayed, and how to take another."""
        chosen = self.selection.recording
        if chosen is None or chosen.num_recordings == 1:
            return {}
        is_one_of_two = chosen.num_recordings == 2
        option = spell_setting(Setting("recording", 3 - chosen.number if is_one_of_two else "N"))
        other = f"{option} takes {'the other' if is_one_of_two else 'another'}"
        return {"recording": f"{chosen.number} of {chosen.num_recordings}, {chosen.begin}; {other}"}

    def _describe_resumption(self) -> dict[str, str]:
        """Under --resume, say where the run goes on."""
        if not self.resolved.state.resume:
            return {}
        earlier, num_passes = self.earlier, len(self.selection.inputs)
        if earlier.folder is None:
            return {"resumed": "from the beginning: no state was saved yet"}
        steps, passes = pluralise(earlier.num_steps, "step"), pluralise(num_passes, "pass")
        return {"resumed": f"behind {steps}, {earlier.num_passes} of {passes} on each rank"}

    def _describe_first_call(self) -> dict[str, str]:
        """Say whether weights match, where the random states of dropout come from, and which parts do not train."""
        first_call = self.first_call
        if first_call is None:
            return {}
        origin = "from the job's random states" if first_call.random else "by chance: no random states were recorded"
        weights = (
            {}
            if first_call.weights is None
            else {"recorded": format_weights(self.weight_checker.check(first_call.weights))}
        )
        dropout = {"dropout": f"{', '.join(self.dropout)}, {origin}"} if self.dropout else {}
        return weights | dropout | _describe_mode(first_call, self.missing_parts)

    def _describe_optimizer(self) -> dict[str, str]:
        """Say whether the job's first step had other settings than the replay's will, or why the replay takes none."""
        actor = self.resolved.actor
        why = next((choice.why for choice in self.resolved.choices if choice.setting == STEP), "")
        if not self.resolved.measure.steps:
            return {"optimizer": f"not stepped: {why}"} if why else {}
        for path in self.selection.inputs[: actor.resolved_grad_accumulation]:
            try:
                step = read_call(path).step
            except CaptureError:
                # The pass on this input will report why it cannot be read.
                return {}
            if step is not None:
                counts = count_loaded_steps(self.resolved.source)
                limit = self.resolved.job_code_clip_norm
                step = step if limit is None else replace(step, max_norm=limit)
                differing = list_setting_differences(
                    step,
                    actor,
                    0,
                    loaded_counts=counts,
                    setting_names_from_job=self.resolved.setting_names_from_job,
                )
                text = f"other than the job's: {'; '.join(differing)}" if differing else "as the job's"
                text += "" if limit is None else f", whose own code clips to {limit:g}"
                return {"optimizer": f"{text}; the replay follows its steps until it cannot: {why}" if why else text}
        return {}

    def _describe_snapshot(self) -> Mapping[str, str]:
        """Say what --memory-snapshot is of, and what it costs."""
        if not self.resolved.measure.memory_snapshot:
            return {}
        on_cuda = self.world.device.type == "cuda"
        what = "of CUDA's allocator" if on_cuda else "none on a CPU: of the process's resident memory"
        slower = ", in every pass, which makes them slower" if self.world.world_size > 1 else ""
        return {"snapshot": what + slower}


def describe_missing_weights(actor: ActorSpec) -> dict[str, str]:
    """Say that a model of the user's own has random weights because none were given."""
    if not actor.lacks_weights:
        return {}
    function, option = spell_setting(Setting("model", actor.model)), spell_setting(Setting("weights", "FOLDER"))
    return {"weights": f"random: {function} builds a model without values. Try: {option}, with the job's"}


def _describe_mode(first_call: CapturedCall, missing_parts: Sequence[str]) -> dict[str, str]:
    """Say which mode the job's model was in, where that was not the training mode of a pass that trains."""
    training = first_call.training
    if training is None or not first_call.trains:
        return {}
    if not training["model"]:
        return {"mode": "the job's model was in eval mode in its first pass; here it is in training mode"}
    parts = list_modules_in_other_mode(first_call)
    if not parts:
        return {}
    text = f"another one than the model's, as in the job: {name_some(parts, MAX_NAMED_PARTS)}"
    missing = f"; not found here: {', '.join(missing_parts[:MAX_NAMED_PARTS])}" if missing_parts else ""
    return {"mode": f"{text}{missing}"}


def _describe_compile(actor: ActorSpec) -> str:
    lengths_text = "" if actor.compile_lengths is CompileLengths.DYNAMIC else f", {actor.compile_lengths} lengths"
    return f"compile {actor.compile}{lengths_text}"


def _describe_adapter(resolved: ResolvedReplay) -> dict[str, str]:
    """Describe the actor's adapter, or say that the job's is not built."""
    if resolved.source.adapter is not None:
        return {"adapter": f"{resolved.source.adapter.describe()}; {resolved.source.adapter.describe_training()}"}
    if not (adapters := read_adapter_configs(find_inputs_folder(resolved.inputs))):
        return {}
    num_adapters = pluralise(len(adapters), "adapter")
    if resolved.actor.adapter == "none":
        return {"adapter": f"not built; the job had {num_adapters}"}
    why = f"the job had {num_adapters}, which the weights are taken to have merged"
    return {"adapter": f"not built: {why}. Try: --adapter FOLDER"}


def _format_config_line(differences: Sequence[str]) -> dict[str, str]:
    """Return the line of the header; none if nothing differs."""
    if not differences:
        return {}
    more = (
        f"; and {len(differences) - MAX_NAMED_DIFFERENCES} more, in run.json"
        if len(differences) > MAX_NAMED_DIFFERENCES
        else ""
    )
    return {"config": f"other than the job's: {'; '.join(differences[:MAX_NAMED_DIFFERENCES])}{more}"}


def format_config_differences(differences: Sequence[ModelDifference]) -> list[str]:
    """Say in which settings of the config the job's model and the replay's differ."""
    return [
        f"{difference.where} {difference.job} in the job, {difference.replay} here"
        for difference in differences
        if difference.kind is ModelDifferenceKind.CONFIG
    ]
