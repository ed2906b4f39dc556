"""Declare options, and the values they take, for the spec and for what the backends declare."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import field
from enum import StrEnum
from pathlib import Path
from typing import Any

from capture.facts import FactError

# Configs of models that ship with the project, and their names, which --model takes.
PRESETS = Path(__file__).parent / "presets"
PRESET_NAMES = sorted(path.stem for path in PRESETS.glob("*.json"))
MODEL_ADVICE = f"Allowed: {', '.join(PRESET_NAMES)}, a folder with config.json, a config.json, or FILE.py:function"


class UsageError(FactError):
    """Raised for options that are invalid or not possible here. The message says what to give instead."""


def option(
    default: Any,
    help: str | Callable[[], str],
    *,
    min: float | None = None,
    max: float | None = None,
    flags: Mapping[str, Any] | None = None,
    named: bool = True,
    choices: Collection[str] = (),
    metavar: str | Callable[[], str] | None = None,
    bare: Any = None,
    brief: str = "",
    aliases: Collection[str] = (),
) -> Any:
    """Return a dataclass field that is also a command line option.

    `flags` are extra switches that set the field to a fixed value, such as {"--compile": Compile.BLOCKS}; with
    named=False they are the only way to set it. `bare` is what the field's own flag sets where no value follows it.
    `choices` are the values that text may have; `metavar` says in the help what it may be where that is no list.
    `aliases` are other flags for the same, such as `-o`. `brief` is the line of `replay --help`; without it an option
    is in --help-all alone.
    `choices`, and functions for `help` and `metavar`, are evaluated when needed, because more backends may have been
    registered by then.
    """
    shape = {
        "min": min,
        "max": max,
        "flags": dict(flags or {}),
        "named": named,
        "choices": choices,
        "metavar": metavar,
        "bare": bare,
        "brief": brief,
        "aliases": aliases,
    }
    return field(default=default, metadata={"help": help, **shape})


class Attention(StrEnum):
    """Words of --attention that the code names; `declarations/attention` has what each chooses, and may have others."""

    AUTO = "auto"
    FLASH = "flash"
    CUDNN = "cudnn"
    VARLEN = "varlen"
    FLEX = "flex"
    SDPA = "sdpa"
    EAGER = "eager"


class Kernels(StrEnum):
    AUTO = "auto"
    MODEL = "model"
    FUSED = "fused"


class Head(StrEnum):
    """How log-probs come from the head: whole logits, chunks of tokens, or Liger's fused linear cross entropy."""

    AUTO = "auto"
    WHOLE = "whole"
    CHUNKS = "chunks"
    LIGER = "liger"


class Compile(StrEnum):
    OFF = "off"
    BLOCKS = "blocks"
    DEEPCOMPILE = "deepcompile"


class CompileLengths(StrEnum):
    DYNAMIC = "dynamic"
    AUTOMATIC = "automatic"
    STATIC = "static"


class Dtype(StrEnum):
    AUTO = "auto"
    BF16 = "bf16"
    FP32 = "fp32"
    FP16 = "fp16"


class Routing(StrEnum):
    AUTO = "auto"
    RECORDED = "recorded"
    LIVE = "live"


class PadTo(StrEnum):
    OWN = "own"
    LONGEST = "longest"


class OptimizerName(StrEnum):
    """Words of --optimizer that the code names; `declarations/optimizers` has what each steps with.

    AUTO is the job's where its steps are followed, else ADAMW.
    """

    AUTO = "auto"
    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"
    ADAFACTOR = "adafactor"
    TRANSFORMERS_ADAFACTOR = "transformers-adafactor"
    MUON = "muon"
    LION = "lion"
    ADAMW_8BIT = "adamw-8bit"
    ADAM_8BIT = "adam-8bit"
    LION_8BIT = "lion-8bit"
    NONE = "none"


class TpPlan(StrEnum):
    AUTO = "auto"
    MODEL = "model"
    BUILTIN = "builtin"
