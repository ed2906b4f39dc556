"""Describe a step of the job's optimizer as one rank saw it: the passes that went into it, and the gradient.

It is written as JSON into the file of the last pass before the step. The other passes have the step's number.

The gradient, and the weights before a pass, are kept as samples. A sample is a run of neighbouring elements of one
parameter. The parameter's name and full shape alone decide where it lies, so it is the same place in any sharding, in
the job and in a replay. Which tokens' log-probs are kept follows from the shape of the token ids alone, too.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from capture.file_format.gradient_signature import GradientSignature
from capture.file_format.micro_batch import CaptureError
from capture.file_format.optimizer_state import StateSample, merge_state_samples

NUM_SAMPLED_ELEMENTS = 4
MAX_SAMPLED_TOKENS = 64
# No model has so many parameters: a range that is longer is damaged.
MAX_NUMBERED = 1_000_000

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The values of neighbouring elements of a flattened parameter, from `start` on, as the job had them.

    name   name of the parameter, as `strip_wrappers` gives it
    shape  shape of the whole parameter, also where it is sharded
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSamples:
    """The samples that one rank took of its weights in one pass, or of its gradients at one step.

    The names of the fields are keys in the file.

    num_parameters  number of parameters of the model, as the rank sees it
    num_frozen      number of those that are not trained
    is_sharded      this rank holds a part of the samples, and other ranks hold the others
    left_out        number of parameters without a sample, by the reason
    """

    samples: tuple[Sample, ...]
    num_parameters: int
    num_frozen: int
    is_sharded: bool
    left_out: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return them as JSON, which takes a job's background thread a tenth of the time of nested plain data."""
        samples = {sample.name: [sample.dtype, sample.shape, sample.start, sample.values] for sample in self.samples}
        counts = {"num_parameters": self.num_parameters, "num_frozen": self.num_frozen, "is_sharded": self.is_sharded}
        return json.dumps({"samples": samples, **counts, "left_out": dict(self.left_out)})

    @classmethod
    def from_json(cls, text: str, source: str) -> "ParameterSamples":
        """Read what `to_json` wrote. Raises CaptureError for anything else."""
        try:
            content = json.loads(text)
            samples = tuple(_parse_sample(name, *parts) for name, parts in content["samples"].items())
            parsed = cls(samples=samples, **{key: value for key, value in content.items() if key != "samples"})
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError):
            raise CaptureError(f"{source}: these are no samples of parameters: {text[:80]}") from None
        counts = (parsed.num_parameters, parsed.num_frozen, *parsed.left_out.values())
        if type(parsed.is_sharded) is not bool or not all(type(count) is int for count in counts):
            raise CaptureError(f"{source}: these are no samples of parameters: {text[:80]}")
        return parsed


def _parse_sample(name: Any, dtype: Any, shape: Any, start: Any, values: Any) -> Sample:
    """Check one sample as it was written. Raises TypeError or ValueError."""
    numbers = [*shape, start]
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(name + dtype, str):
        raise TypeError
    if not all(type(value) is float for value in values) or start + len(values) > math.prod(shape):
        raise ValueError
    return Sample(name=name, dtype=dtype, shape=tuple(shape), start=start, values=tuple(values))


def choose_sampled_run(name: str, shape: Sequence[int]) -> tuple[int, int]:
    """Choose the elements to sample: the first one in the flattened parameter, and how many.

    All lie in one row of the last dimension.
    """
    width = shape[-1] if shape else 1
    count = min(NUM_SAMPLED_ELEMENTS, width)
    digest = hashlib.blake2b(f"{name} {list(shape)}".encode(), digest_size=16).digest()
    row, column = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
    return row % (math.prod(shape) // width) * width + column % (width - count + 1), count


def strip_wrappers(name: str) -> str:
    """Remove from a name what DDP, DeepSpeed, torch.compile, FSDP, checkpoint wrappers and PEFT put into it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and (parts[0] == "module" or parts[:2] == ["base_model", "model"]):
        parts = parts[1 if parts[0] == "module" else 2 :]
    return ".".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStep:
    """One rank's part of one optimizer step. What is not known is None. The names of the fields are keys in the file.

    number            steps that this rank's recorder saw before
    passes            numbers of the forwards with autograd on since the last step, as in `Origin.step`, in order
    shares            for each of them the derivative of what was differentiated by the pass's own loss: 1 where the
                      loss itself was, 1 / 4 in a mean over four passes; fp16's loss scale is part of it
    gradients         samples of the gradients as the optimizer would get them without clipping, at the elements that
                      samples of the weights have; of parameters that have a gradient
    signatures        of the gradients as they were when `gradients` were sampled; taken at some steps alone
    without_gradient  names of sampled and signed parameters that are trained and have no gradient
    grad_norm         global norm before clipping, where the job computed one
    is_part_of_norm   `grad_norm` is that of this rank's shards: the squares of all ranks add up
    max_norm          norm that the job clipped to
    unapplied_norm    norm that it was to clip to when none of the parameters had a gradient, or it was given none
    num_clipped       number of parameters that were clipped by that norm; None: all
    is_unclipped      False: some clipping was not seen or came before the last pass, so `gradients` may be shorter
    clips_early       True: gradients were clipped, with a limit, before the last of these passes
    clips_otherwise   True: gradients were clipped by another rule than to a 2-norm, as by value
    clippings         all clippings of such a step, in their order: the order of the norm, or None for each element's
                      value, and the limit; empty where one is not known, or was not of all gradients of the step
    optimizer         name of its class; of several that stepped, all their names
    library           the package that the class is of, as `torch`; `__main__` for one of the job's script
    settings          one mapping for each distinct group: `lr`, `betas`, `eps`, `weight_decay`, ... as numbers,
                      and `num_parameters` of the model, 0 where it is not known.
                      Where several optimizers stepped, `optimizer` and `library` say which one a group is of.
                      Where an optimizer has several groups, `parameters` has the numbers of the group's parameters
                      among the model's, as `0-8,11`
    num_schedule_steps  how often one of torch's schedules set its learning rate since its step before
    schedule_count    the steps that this schedule had counted by then, those before the recording too
    has_state         False: it was this optimizer's first step, so its moments began at 0
    state             samples of what the optimizer held before the step: moments, momentum
    state_steps       the steps that it had counted by then: different numbers where parameters have counts of their own
    """

    number: int
    passes: Sequence[int]
    shares: Sequence[float | None]
    gradients: ParameterSamples | None = None
    signatures: Sequence[GradientSignature] = ()
    without_gradient: Sequence[str] = ()
    grad_norm: float | None = None
    is_part_of_norm: bool = False
    max_norm: float | None = None
    unapplied_norm: float | None = None
    num_clipped: int | None = None
    is_unclipped: bool = True
    clips_early: bool = False
    clips_otherwise: bool = False
    clippings: Sequence[tuple[float | None, float]] = ()
    optimizer: str | None = None
    settings: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    num_schedule_steps: int = 0
    schedule_count: int | None = None
    has_state: bool | None = None
    library: str | None = None
    state: Sequence[StateSample] = ()
    state_steps: Sequence[int] = ()

    def drop_elements(self) -> "OptimizerStep":
        """Return the step without elements of gradients: of their signatures the norms are left."""
        signatures = tuple(replace(signature, values=()) for signature in self.signatures)
        return replace(self, gradients=None, signatures=signatures)

    def to_json(self) -> str:
        """Return the step as the text that is written."""
        # `asdict` would copy every sample.
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["gradients"] = None if self.gradients is None else self.gradients.to_json()
        plain["signatures"] = [signature.to_plain() for signature in self.signatures]
        plain["state"] = [sample.to_plain() for sample in self.state]
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str, source: str) -> "OptimizerStep":
        """Read what `to_json` wrote. Raises CaptureError for anything else."""
        try:
            content = json.loads(text)
            gradients = content.pop("gradients")
            signatures = tuple(GradientSignature.from_plain(plain) for plain in content.pop("signatures", ()))
            state = tuple(StateSample.from_plain(plain) for plain in content.pop("state", ()))
            clippings = tuple((order, limit) for order, limit in content.pop("clippings", ()))
            plain: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
            }
            samples = None if gradients is None else ParameterSamples.from_json(gradients, source)
            step = cls(gradients=samples, signatures=signatures, state=state, clippings=clippings, **plain)
            step.check()
        except (TypeError, KeyError, ValueError, AttributeError, RecursionError):
            raise CaptureError(f"{source}: no record of an optimizer step: {text[:80]}") from None
        return step

    def list_settings_with_class(self) -> list[dict[str, Any]]:
        """List the settings of each group with the optimizer that it is of."""
        return [{"optimizer": self.optimizer, "library": self.library, **group} for group in self.settings]

    def check(self) -> None:
        """Check the types of all values. Raises ValueError."""
        numbers = [self.number, *self.passes, *self.state_steps, self.num_schedule_steps]
        floats = [self.grad_norm, self.max_norm, self.unapplied_norm, *self.shares]
        floats += [order for order, _ in self.clippings]
        is_right = (
            all(type(number) is int and number >= 0 for number in numbers)
            and len(self.shares) == len(self.passes)
            and all(value is None or type(value) in (int, float) for value in floats)
            and all(type(limit) in (int, float) for _, limit in self.clippings)
            and all(type(name) is str for name in self.without_gradient)
            and type(self.is_part_of_norm) is type(self.is_unclipped) is bool
            and type(self.clips_early) is type(self.clips_otherwise) is bool
            and all(name is None or type(name) is str for name in (self.optimizer, self.library))
            and all(number is None or type(number) is int for number in (self.num_clipped, self.schedule_count))
            and (self.has_state is None or type(self.has_state) is bool)
            and all(isinstance(group, dict) for group in self.settings)
        )
        if not is_right:
            raise ValueError


def merge_steps(first: OptimizerStep, second: OptimizerStep) -> OptimizerStep:
    """Merge two parts of one step, in their order. Where both know a value, the first counts.

    A step has several parts where several optimizers step, or one is called for its partitions one after the other.
    """
    samples: dict[str, Sample] = {}
    for gradients in (second.gradients, first.gradients):
        samples |= {} if gradients is None else {sample.name: sample for sample in gradients.samples}
    gradients = first.gradients or second.gradients
    signatures = {signature.name: signature for signature in (*second.signatures, *first.signatures)}
    with_norm = first if first.grad_norm is not None or first.max_norm is not None else second
    names = [first.optimizer]
    if second.optimizer not in str(first.optimizer).split(", "):
        names.append(second.optimizer)
    states = (first.has_state, second.has_state)
    settings = [*first.settings, *second.settings]
    known = None not in (first.optimizer, second.optimizer)
    if known and (first.optimizer, first.library) != (second.optimizer, second.library):
        settings = [*first.list_settings_with_class(), *second.list_settings_with_class()]
    return replace(
        first,
        shares=tuple(
            other_share if share is None else share
            for share, other_share in zip(first.shares, second.shares, strict=True)
        ),
        gradients=None if gradients is None else replace(gradients, samples=tuple(samples.values())),
        signatures=tuple(signatures.values()),
        without_gradient=tuple(dict.fromkeys([*first.without_gradient, *second.without_gradient])),
        grad_norm=with_norm.grad_norm,
        is_part_of_norm=with_norm.is_part_of_norm,
        max_norm=with_norm.max_norm,
        unapplied_norm=second.unapplied_norm if first.unapplied_norm is None else first.unapplied_norm,
        num_clipped=with_norm.num_clipped,
        is_unclipped=first.is_unclipped and second.is_unclipped,
        clips_early=first.clips_early or second.clips_early,
        clips_otherwise=first.clips_otherwise or second.clips_otherwise,
        clippings=first.clippings if first.clippings == second.clippings else (),
        optimizer=", ".join(name for name in names if name is not None) or None,
        settings=merge_equal_settings(settings),
        num_schedule_steps=max(first.num_schedule_steps, second.num_schedule_steps),
        schedule_count=second.schedule_count if first.schedule_count is None else first.schedule_count,
        has_state=None if None in states else any(states),
        state=merge_state_samples(first.state, second.state),
        state_steps=tuple(sorted({*first.state_steps, *second.state_steps})),
    )


def merge_equal_settings(settings: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Merge groups of the same settings, and add up their parameters.

    Of a merged group it is known which parameters it has only if that was known of all its parts.
    """
    distinct_groups: list[dict[str, Any]] = []
    for group in settings:
        for distinct in distinct_groups:
            if _strip_members(distinct) == _strip_members(group):
                distinct["num_parameters"] += group["num_parameters"]
                members: list[str | None] = [distinct.pop("parameters", None), group.get("parameters")]
                known_members = [text for text in members if text is not None]
                if len(known_members) == len(members):
                    distinct["parameters"] = format_numbers(
                        {number for text in known_members for number in parse_numbers(text)}
                    )
                break
        else:
            distinct_groups.append(dict(group))
    return tuple(distinct_groups)


def _strip_members(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings without those that tell which parameters it has."""
    return {name: value for name, value in group.items() if name not in ("num_parameters", "parameters")}


def format_numbers(numbers: Iterable[int]) -> str:
    """Format whole numbers as ranges in their order, as `0-8,11`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def parse_numbers(text: str) -> list[int]:
    """Read what `format_numbers` wrote. Raises ValueError for anything else."""
    numbers: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        if int(last or first) - int(first) >= MAX_NUMBERED:
            raise ValueError(f"{part} are too many")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def choose_sampled_tokens(num_rows: int, num_tokens: int) -> list[tuple[int, int]]:
    """Choose rows and columns of at most NUM_TOKENS tokens, evenly spaced over all but each row's first.

    The shape alone decides, so a job need not look at its masks; log-probs of padding among them say nothing.
    """
    total = num_rows * (num_tokens - 1)
    if total <= 0:
        return []
    count = min(MAX_SAMPLED_TOKENS, total)
    positions = [math.floor((number + 0.5) * total / count) for number in range(count)]
    return [(position // (num_tokens - 1), position % (num_tokens - 1) + 1) for position in positions]
