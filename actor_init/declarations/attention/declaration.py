"""Declare what an attention kernel is and what it lacks, as plain data without heavy imports."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actor_init.toggles import Attention, Dtype
from capture.facts import Setting

# Rows and tokens of what a rank is fed, and the lengths of a packed row's documents: which calls (rows, tokens) are
# there, each of which the library plans once.
Planned = Callable[[int, int, Sequence[int]], set[tuple[int, int]]]

RING_REFUSAL = f"ring attention has no {{lacking}}, which this model needs. Try: {Setting('ring', 1)}"


def always() -> bool:
    return True


def takes_every_model(config: Any) -> str:
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lack:
    """Why a kernel cannot run, and what to type instead."""

    text: str
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a kernel runs on, what it lacks of what a model may ask, and how a refusal says so."""

    title: str = ""  # in refusals; empty: every device has it, in every dtype
    package: str = ""  # pip's name of what brings it; empty: torch does
    is_installed: Callable[[], bool] = always
    devices: Sequence[str] = ("cpu", "cuda")
    has_fp32: bool = True
    fp32: str = "fp32"  # what a refusal says that it has not
    advice: str = str(Setting("attention", Attention.SDPA))  # where it cannot run
    # by argument of transformers', how a refusal calls it; {window} and {longest} are tokens, of it and of a document
    lacks: Mapping[str, str] = field(default_factory=dict)
    max_head_dim: int | None = None
    refusal: str = ""  # of a model that asks for what it lacks; {lacking} is that

    def lack(self, device_type: str, dtype: Dtype, *, is_installed: bool) -> Lack | None:
        """Return why it cannot run on a type of device in a dtype; None if nothing is known."""
        if not self.title:
            return None
        if device_type not in self.devices:
            return Lack(text=f"{self.title} has no CPU kernel", advice=self.advice)
        if not is_installed:
            return Lack(text=f"{self.title} is not installed", advice=self.advice)
        if dtype is Dtype.FP32 and not self.has_fp32:
            return Lack(text=f"{self.title} has no {self.fp32}", advice=self.advice)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How a kernel computes rows of one kind, and what it is called: in transformers, the header and run.json.

    A name has neither flash nor sdpa in it, unless it is transformers' own: transformers would look up its own kernel,
    or ask the class.
    """

    name: str
    limits: Limits
    function: str = ""  # "module:function" with transformers' attention signature; empty: transformers has one
    mask: str = ""  # "module:function" that makes its masks; empty: transformers has one for the name, or it reads none
    reads_mask: bool = False  # of all pairs of tokens, which alone keeps packed documents apart
    takes_holes: bool = True  # rows with padding between their tokens
    planned: Planned | None = None  # the calls that its library plans; None: it plans nothing
    is_expected: bool = False  # of auto on a GPU: `replay diagnose` gives no reason why it is not flash-attn
    description: str = ""  # for a reader, where the name does not say it

    def describe(self) -> str:
        return self.description or self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """What one word of --attention chooses: a form for packed rows, one for padded rows, and one for a ring's slices.

    None: it has none for them.
    """

    word: str
    packed: Form
    padded: Form | None
    slices: Form | None = None
    job_names: Sequence[str] = ()  # transformers' names of it, as captures have them
    complaint: Callable[[Any], str] = takes_every_model  # why a model's config does not go with it; empty: it does
    is_checked: bool = True  # whether it is compared with plain fp32 attention, before auto takes it and by the doctor
    instead: str = "flash or sdpa"  # what the doctor advises where it is not right

    def form(self, *, packs: bool) -> Form | None:
        return self.packed if packs else self.padded

    def forms(self) -> Iterator[Form]:
        yield from (form for form in (self.packed, self.padded, self.slices) if form is not None)
