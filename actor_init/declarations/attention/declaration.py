"""Declare what an attention kernel is and what it lacks, as plain data without heavy imports."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actor_init.option_values import Attention, Dtype
from capture.facts import Setting

# Takes the rows and tokens of what a rank is fed, and the lengths of a packed row's documents. Returns the
# (rows, tokens) of each kernel call; the library plans each of them once.
PlanCalls = Callable[[int, int, Sequence[int]], set[tuple[int, int]]]

RING_REFUSAL = f"ring attention has no {{lacking}}, which this model needs. Try: {Setting('ring', 1)}"


def is_part_of_torch() -> bool:
    """Return True: the default of `KernelLimits.is_installed`."""
    return True


def find_no_obstacle(config: Any) -> str:
    """Take every model: the default of `AttentionKernel.find_obstacle`."""
    return ""


def is_taken_by_class(config: Any, flag: str) -> bool:
    """Does transformers' class of this config take a kernel, as its `flag` says? True for a class of the user's own."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return model_class is None or bool(getattr(model_class, flag, False))


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelObstacle:
    """Why a kernel cannot run, and what to type instead."""

    text: str
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelLimits:
    """What a kernel runs on, which features of a model it lacks, and how a refusal says so.

    title             the kernel's name in refusals; empty: every device has it, in every dtype
    package           pip's name of the package that brings the kernel; empty: torch does
    fp32_name         what a refusal says that the kernel does not have, where `has_fp32` is False
    advice            what a refusal advises where the kernel cannot run
    missing_features  features by the argument of transformers' attention functions that asks for them, each with the
                      words of a refusal; {window} and {longest} in these are tokens, of the window and of a document
    refusal           what is said of a model that needs missing features, which replace {lacking}
    """

    title: str = ""
    package: str = ""
    is_installed: Callable[[], bool] = is_part_of_torch
    devices: Sequence[str] = ("cpu", "cuda")
    has_fp32: bool = True
    fp32_name: str = "fp32"
    advice: str = str(Setting("attention", Attention.SDPA))
    missing_features: Mapping[str, str] = field(default_factory=dict)
    max_head_dim: int | None = None
    refusal: str = ""

    def find_obstacle(self, device_type: str, dtype: Dtype, *, is_installed: bool) -> KernelObstacle | None:
        """Return why the kernel cannot run on a type of device in a dtype; None if nothing is known."""
        if not self.title:
            return None
        if device_type not in self.devices:
            return KernelObstacle(text=f"{self.title} has no CPU kernel", advice=self.advice)
        if not is_installed:
            return KernelObstacle(text=f"{self.title} is not installed", advice=self.advice)
        if dtype is Dtype.FP32 and not self.has_fp32:
            return KernelObstacle(text=f"{self.title} has no {self.fp32_name}", advice=self.advice)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionForm:
    """How a kernel computes rows of one kind, and what it is called: in transformers, the header and run.json.

    A name has neither flash nor sdpa in it, unless it is transformers' own: transformers would look up its own kernel,
    or ask the class.

    function               "module:function" with transformers' attention signature; empty: transformers has one
    mask_function          "module:function" that makes the masks; empty: transformers has one for the name, or the
                           form reads no mask
    reads_mask             it reads a mask of pairs of tokens, which alone keeps packed documents apart
    skips_blocks           what the mask hides costs nothing, as in flex attention; else all pairs are computed
    allows_padding_between_tokens  rows may have padding between their real tokens
    plan_calls             returns the calls that the library plans; None: it plans none
    is_expected_on_gpu     on a GPU `replay diagnose` does not explain why auto chose it and not flash-attn
    description            says what the form is, where the name does not
    """

    name: str
    limits: KernelLimits
    function: str = ""
    mask_function: str = ""
    reads_mask: bool = False
    skips_blocks: bool = False
    allows_padding_between_tokens: bool = True
    plan_calls: PlanCalls | None = None
    is_expected_on_gpu: bool = False
    description: str = ""

    def describe(self) -> str:
        return self.description or self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernel:
    """What one value of --attention chooses: a form for packed rows, one for padded rows, and one for a ring's slices.

    padded, slices  None: the kernel has no form for such rows
    job_names       transformers' names of the kernel, as captures have them
    find_obstacle   returns why the kernel cannot run a model of a config; empty if it can
    is_checked      it is compared with plain fp32 attention before auto takes it, and by `replay doctor`
    alternative     what `replay doctor` advises where that comparison fails
    """

    option_value: str
    packed: AttentionForm
    padded: AttentionForm | None
    slices: AttentionForm | None = None
    job_names: Sequence[str] = ()
    find_obstacle: Callable[[Any], str] = find_no_obstacle
    is_checked: bool = True
    alternative: str = "flash or sdpa"

    def choose_form(self, *, packs: bool) -> AttentionForm | None:
        return self.packed if packs else self.padded

    def list_forms(self) -> Iterator[AttentionForm]:
        yield from (form for form in (self.packed, self.padded, self.slices) if form is not None)
