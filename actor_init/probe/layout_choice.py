"""Choose how rows are fed to a model: as typed, or, where nothing was typed, as the probe shows to be right."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import device
from transformers import PretrainedConfig

from actor_init.attention.kernel_choice import choose_kernel_name, choose_kernel_name_on_all_ranks, choose_plain_kernel
from actor_init.custom.config import CustomConfig
from actor_init.declarations.attention import find_attention_form, find_kernel
from actor_init.model_form import DocumentBorders, Layout
from actor_init.probe.packing_probe import SEEDS, NotProvedError, Probe, choose_bound
from actor_init.spec import PACKED, ActorSpec, Attention, UsageError
from actor_init.world import World, compute_on_rank0
from capture.facts import Setting

PADDED = Layout(packs=False)
ONE_DOCUMENT_PER_ROW = Layout(packs=False, as_captured=False)
_CUSTOM = "nothing is known about the attention of a user's model"
# What `explain_not_packed` found out, by model type and config.
_why_not_packed: dict[tuple[str, str], str] = {}


def choose_layout(
    spec: ActorSpec, config: PretrainedConfig, world: World, *, is_typed: bool, trains: bool = True
) -> tuple[ActorSpec, Layout]:
    """Return `spec` with packing and kernel as they will be, and the layout. `is_typed`: packing was typed.

    trains  there may be passes with autograd on, in which dropout acts

    Rows are packed if a small copy of the model keeps documents apart, and padded by themselves if it does not. All
    ranks must call this, and get the same. Raises UsageError, on all of them, if what was typed gives wrong numbers for
    this model, or if rank 0's device lacks the kernel; in a ring, if any rank's does. For the kernel that comes of it
    call `choose_kernel_name_on_all_ranks`.
    """
    if spec.has_user_model:
        return spec, Layout(packs=False, why_unusual=_CUSTOM)
    if spec.parallel.ring > 1:
        return spec, _prove_in_ring(spec, config, world, trains)
    attention, layout = compute_on_rank0(world, partial(choose_on_one_rank, spec, config, world.device, is_typed))
    return replace(spec, packing=layout.packs, attention=attention), layout


def explain_not_packed(config: PretrainedConfig) -> str:
    """Return why no packed layout is right for the model with the kernel that every device has; empty if one is.

    It is found out on the CPU, once for a config.
    """
    if isinstance(config, CustomConfig):
        return _CUSTOM
    key = str(config.model_type), config.to_json_string(use_diff=False)
    if key not in _why_not_packed:
        search, kernel = _LayoutSearch(config=config, device=torch.device("cpu")), choose_plain_kernel(config)
        is_right = any(search.is_right(kernel, layout) for layout in _list_packed_layouts())
        _why_not_packed[key] = "" if is_right else search.find_packed_complaint(kernel)
    return _why_not_packed[key]


def _list_packed_layouts() -> Iterator[Layout]:
    for borders in DocumentBorders:
        why = "" if borders is DocumentBorders.OWN else "its own masks do not see where one begins"
        yield Layout(packs=True, borders=borders, why_unusual=why)


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayoutSearch:
    """Try layouts with kernels on small copies of a model, each once.

    complaints  why a layout is wrong with a kernel; empty: it is right
    """

    config: PretrainedConfig
    device: device
    probes: dict[int, Probe] = field(default_factory=dict)
    complaints: dict[tuple[str, Layout], str] = field(default_factory=dict)

    def is_right(self, kernel: str, layout: Layout) -> bool:
        if (kernel, layout) not in self.complaints:
            self.complaints[kernel, layout] = self._find_complaint(kernel, layout)
        return not self.complaints[kernel, layout]

    def find_packed_complaint(self, kernel: str) -> str:
        """Return the complaint about packed rows as they usually are."""
        return self.complaints[kernel, Layout(packs=True)]

    def _find_complaint(self, kernel: str, layout: Layout) -> str:
        kind = self.config.model_type
        for seed in SEEDS:
            try:
                if seed not in self.probes:
                    self.probes[seed] = Probe.build(self.config, self.device, seed)
                error = self.probes[seed].error(kernel, layout)
            except NotProvedError as reason:
                return f"it could not be proved that {kind} keeps packed documents apart: {_summarise(reason)}"
            # The model, its kernel and its layers raise any type.
            except Exception as reason:
                return f"{kind} does not run packed: {_summarise(reason)}"
            if error <= choose_bound(kernel):
                return ""
        return f"packed documents of {kind} see each other: a small copy's numbers are {error:.2g} off"


def choose_on_one_rank(spec: ActorSpec, config: PretrainedConfig, where: device, is_typed: bool) -> tuple[str, Layout]:
    """Return the value of --attention, and the layout. Raises UsageError if what was typed is wrong."""
    kernel = choose_kernel_name(spec, where, config)
    search = _LayoutSearch(config=config, device=where)
    if not spec.packs:
        is_right = search.is_right(_choose_padded_kernel(kernel, config), PADDED)
        why = "" if is_right else f"{config.model_type} sees padding on the left"
        return spec.attention, replace(PADDED, why_unusual=why)
    kernels = {kernel: spec.attention}
    is_auto = spec.attention == Attention.AUTO
    if is_auto:
        kernels.setdefault(choose_plain_kernel(config), choose_plain_kernel(config))
    for name, attention in kernels.items():
        for layout in _list_packed_layouts():
            if search.is_right(name, layout):
                return attention, layout
    why = search.find_packed_complaint(kernel)
    why_padded = why
    if not search.is_right(_choose_padded_kernel(kernel, config), ONE_DOCUMENT_PER_ROW):
        why_padded += ", and padded rows are not right either"
    if not is_auto and find_kernel(spec.attention).padded is None:
        setting, sdpa = Setting("attention", spec.attention), Setting("attention", Attention.SDPA)
        raise UsageError(setting, f"reads packed rows, and {why}", f"Try: {sdpa}")
    if is_typed:
        advice = f"Try: {PACKED.with_value(False)}, or neither: rows are padded by themselves"
        raise UsageError(PACKED, f": {why}", advice)
    return spec.attention, replace(ONE_DOCUMENT_PER_ROW, why_unusual=why_padded)


def _choose_padded_kernel(kernel: str, config: PretrainedConfig) -> str:
    """Return the kernel of padded rows that the probe runs: flash attention unpads them, and has no fp32."""
    return kernel if find_attention_form(kernel).reads_mask else choose_plain_kernel(config)


def _prove_in_ring(spec: ActorSpec, config: PretrainedConfig, world: World, trains: bool) -> Layout:
    """Prove on a small copy that its log-probs and gradients are the same in slices.

    Raises UsageError, on all ranks, if they are not, or if a rank's device lacks the kernel.

    trains  there may be passes with dropout in the attention, which most ring kernels do not have

    `check_ring` proves less, of the model itself once it is open: mixed sharding, or a caller without this probe.
    """
    kernel = choose_kernel_name_on_all_ranks(spec, world, config)
    setting, advice = Setting("ring", spec.parallel.ring), f"Try: no {Setting('ring')}"
    probes: list[Probe] = []

    def find_complaint(seed: int) -> str:
        try:
            probes.append(Probe.build(config, world.device, seed, ring=True))
            error = probes[-1].error(kernel, Layout(packs=True), ring=world.ring_group)
            return "" if error <= choose_bound(kernel) else _describe_ring_error(error)
        except NotProvedError as reason:
            return f"that could not be proved: {_summarise(reason)}"
        # The model, its kernel and its layers raise any type.
        except Exception as reason:
            return explain_no_slice(reason, kernel)

    if why := find_complaint_of_ranks(world, find_complaint, SEEDS):
        why = f"slices packed rows, and {config.model_type} does not keep its slices right: {why}"
        raise UsageError(setting, why, advice)
    if trains and "dropout" in find_attention_form(kernel).limits.missing_features and probes[-1].has_dropout(kernel):
        why = f": {config.model_type}'s attention has dropout in training, and {kernel} has none"
        raise UsageError(setting, why, advice)
    return Layout(packs=True)


def find_complaint_of_ranks(world: World, find_complaint: Callable[[int], str], seeds: Sequence[int]) -> str:
    """Try seeds until all ranks are content with one of them; all must call this, and try the same ones.

    A rank that went on alone would wait for the others in the next seed's collectives.

    find_complaint  returns what a rank has against a seed; empty: nothing

    Returns an empty text, or else the first rank's complaint about the last seed.
    """
    why = ""
    for seed in seeds:
        why = next(filter(None, world.gather(find_complaint(seed))), "")
        if not why:
            break
    return why


def _describe_ring_error(error: float) -> str:
    return (
        "its tokens meet elsewhere than in the attention that a ring replaces, as in a recurrent state or a mask of "
        f"its own (log-probs or gradients of a small copy are {error:.2g} off)"
    )


def explain_no_slice(error: Exception, kernel: str) -> str:
    """Say in words why a small copy could not run on slices."""
    if isinstance(error, KeyError) and error.args == (kernel,):
        return "its layers have no attention that a ring can replace"
    if isinstance(error, TypeError) and "argument: 'ring'" in str(error).replace('"', "'"):
        return "its layers do not tell their attention of the slice"
    return (
        _summarise(error)
        if isinstance(error, UsageError)
        else f"its layers cannot run on a slice ({_summarise(error)})"
    )


def _summarise(error: Exception) -> str:
    """Return an error's first sentence, with its type unless it is one of ours."""
    first = " ".join(str(error).split()).split(". ")[0].rstrip(".")
    return first if isinstance(error, (UsageError, NotProvedError)) else f"{type(error).__name__}: {first}"
