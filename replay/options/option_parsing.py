"""Turn dataclass fields into command line options, and parsed options back into a ReplaySpec.

Every option is None here unless it was given: defaults, help and ranges are declared in the dataclasses only. typer
passes on text and switches; this module converts the text, so that every error says what was given and what is
allowed.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from enum import StrEnum
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import typer

from actor_init.as_json import from_json, to_json
from actor_init.spec import ActorSpec, ParallelSpec, UsageError
from capture.facts import FactError, Setting, flag_of, spell_settings
from replay.options.spec import InputsSpec, MeasureSpec, ObjectiveSpec, Parts, ReplaySpec, StateSpec

Action = Callable[[], int]  # the work of a parsed command; returns the exit code

PARTS: dict[str, type] = {  # parts of a ReplaySpec by their attribute path
    "actor": ActorSpec,
    "actor.parallel": ParallelSpec,
    "inputs": InputsSpec,
    "measure": MeasureSpec,
    "objective": ObjectiveSpec,
    "state": StateSpec,
}
PANELS = {
    "actor": "Actor",
    "actor.parallel": "Ranks",
    "inputs": "Inputs",
    "measure": "Measuring",
    "objective": "The job's objective",
    "state": "Saving and loading",
}
METAVARS = {int: "N", float: "X", str: "NAME", Path: "PATH", bool: ""}


@dataclass(frozen=True, kw_only=True, slots=True)
class Toggle:
    """Describe one command line option: a field's own option, or a switch that sets the field to a fixed value."""

    part: str
    field: str
    flag: str  # as typed
    base: Any  # the type of its value: bool, int, float, str, Path or an enum
    help: str
    default: Any
    min: float | None = None
    max: float | None = None
    is_switch: bool = False
    sets: Any = None  # the value that a switch sets
    choices: Collection[str] = ()  # the allowed words, if the value is one of a few
    metavar: str | None = None  # what help shows for the value, if it is not the choices or the type

    @property
    def parameter(self) -> str:
        """The name of the command function's parameter."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def negation(self) -> str:
        return f"--no-{self.flag.removeprefix('--')}"

    def value_in(self, spec: Parts) -> Any:
        return attrgetter(f"{self.part}.{self.field}")(spec)

    def as_typed(self, value: Any) -> list[str]:
        """Return the arguments that set the field to `value`."""
        if self.is_switch or self.base is bool:
            return [self.flag if self.is_switch or value else self.negation]
        return [self.flag, str(value)]


@cache
def toggles() -> tuple[Toggle, ...]:
    """Return every option, in the order of the fields that declare them."""
    declared: list[Toggle] = []
    for part, spec_class in PARTS.items():
        hints = get_type_hints(spec_class)
        for spec_field in fields(spec_class):
            if spec_field.metadata:
                declared.extend(_toggles_of(part, spec_field, bare_type(hints[spec_field.name])))
    assert len({t.parameter for t in declared}) == len(declared), "two options have one name"
    return tuple(declared)


def _toggles_of(part: str, spec_field: Field[Any], base: Any) -> Iterator[Toggle]:
    meta = spec_field.metadata
    shared: dict[str, Any] = {"part": part, "field": spec_field.name, "default": spec_field.default}
    choices = _choices_of(spec_field, base)
    own_flag = flag_of(spec_field.name)
    text, metavar = (meta[name]() if callable(meta[name]) else meta[name] for name in ("help", "metavar"))
    if meta["named"]:
        yield Toggle(
            flag=own_flag,
            base=base,
            help=text,
            min=meta["min"],
            max=meta["max"],
            choices=choices,
            metavar=metavar,
            **shared,
        )
    for flag, value in meta["flags"].items():
        if meta["named"]:
            text = f"The same as {own_flag} {value}."
        yield Toggle(flag=flag, base=bool, help=text, is_switch=True, sets=value, **shared)
        text = f"See {flag}."


def _choices_of(spec_field: Field[Any], base: Any) -> Collection[str]:
    """Return the words that a field's value may be; empty if any value of its type is allowed."""
    choices: Collection[str] = list(base) if issubclass(base, StrEnum) else spec_field.metadata.get("choices", ())
    return choices


def bare_type(annotation: Any) -> Any:
    """Return `int` for `int | None`, and any other annotation unchanged."""
    if get_origin(annotation) in (Union, UnionType):
        [annotation] = [a for a in get_args(annotation) if a is not type(None)]
    return annotation


def with_options(
    command: Callable[..., Any], *, serves: Callable[[Toggle], bool] = lambda toggle: True
) -> Callable[..., Any]:
    """Replace the `**given` of `command` with one parameter for each option that `serves` accepts."""
    return with_parameters(command, [_parameter(toggle) for toggle in toggles() if serves(toggle)])


def with_parameters(
    command: Callable[..., Any], parameters: Sequence[inspect.Parameter], *, come_first: bool = False
) -> Callable[..., Any]:
    """Replace the `**given` of `command` with these parameters, as typer reads them from its signature."""
    signature = inspect.signature(command)
    own_parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    every = [*parameters, *own_parameters] if come_first else [*own_parameters, *parameters]
    command.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return command


def _parameter(toggle: Toggle) -> inspect.Parameter:
    has_negation = toggle.base is bool and not toggle.is_switch
    default = "on" if toggle.default is True else toggle.default
    says_default = not toggle.is_switch and default is not None and default is not False
    help = f"{toggle.help} (default: {default})" if says_default else toggle.help
    return inspect.Parameter(
        toggle.parameter,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=(bool if toggle.base is bool else str) | None,
        default=typer.Option(
            None,
            f"{toggle.flag}/{toggle.negation}" if has_negation else toggle.flag,
            help=help,
            metavar=toggle.metavar or "|".join(toggle.choices) or METAVARS[toggle.base],
            show_default=False,
            rich_help_panel=PANELS[toggle.part],
        ),
    )


def replay_spec(given: Mapping[str, Any]) -> ReplaySpec:
    """Build a ReplaySpec from the typed options, given by parameter name.

    Raises UsageError for an invalid value, or for two options that contradict each other.
    """
    typed: dict[tuple[str, str], tuple[str, Any]] = {}  # (part, field): (as typed, value)
    for toggle in toggles():
        if given.get(toggle.parameter) is None:
            continue
        value = toggle.sets if toggle.is_switch else _parsed(toggle, given[toggle.parameter])
        text = " ".join(toggle.as_typed(value))
        earlier, other = typed.setdefault((toggle.part, toggle.field), (text, value))
        if other != value:
            raise UsageError(f"{earlier} and {text} exclude each other. Give one of the two")
    made: dict[str, Any] = {}
    for part, spec_class in reversed(PARTS.items()):  # nested parts before the part that holds them
        inner = {way.removeprefix(f"{part}."): made.pop(way) for way in list(made) if way.startswith(f"{part}.")}
        made[part] = spec_class(**inner, **{name: value for (of, name), (_, value) in typed.items() if of == part})
    return ReplaySpec(**made)


def refuse_typed(given: Mapping[str, Any], why: str) -> None:
    """Raise UsageError for the first of `given`, by parameter name, that is not None. `why` says what excludes it."""
    if typed := [name for name, value in given.items() if value is not None]:
        raise UsageError(f"{why}. Leave out {flag_of(typed[0])}")


def _parsed(toggle: Toggle, given: str | bool) -> Any:
    """Convert the typed text to the field's type."""
    try:
        value = toggle.base(given)
    except ValueError:
        value = None
    if given == "" or value is None or (toggle.choices and value not in toggle.choices):
        raise UsageError(f"{toggle.flag} {given!r} is not allowed. Give {_allowed(toggle)}")
    _check_range(toggle, value)
    return value


def _check_range(toggle: Toggle, value: Any) -> None:
    if isinstance(value, (int, float)) and not (
        (math.isfinite(value) or value == toggle.max)
        and (toggle.min is None or value >= toggle.min)
        and (toggle.max is None or value <= toggle.max)
    ):
        raise UsageError(f"{toggle.flag} {value} is not allowed. Give {_allowed(toggle)}")


def _allowed(toggle: Toggle) -> str:
    if toggle.choices:
        return f"one of {', '.join(toggle.choices)}"
    number = "a number" if toggle.max == math.inf else "a finite number"
    kind = {int: "a whole number", float: number, Path: "a path", str: "a name"}[toggle.base]
    if toggle.max is not None:
        return f"{kind} from {toggle.min} to {toggle.max}"
    return kind if toggle.min is None else f"{kind} of at least {toggle.min}"


def command_line(spec: ReplaySpec) -> list[str]:
    """Return the shortest arguments that produce this spec, for example ["--max-inputs", "5", "--compile"]."""
    arguments: list[str] = []
    done: set[tuple[str, str]] = set()
    for toggle in toggles():
        value = toggle.value_in(spec)
        if (
            (toggle.part, toggle.field) in done
            or value == toggle.default
            or (toggle.is_switch and toggle.sets != value)
        ):
            continue
        arguments += toggle.as_typed(value)
        done.add((toggle.part, toggle.field))
    return arguments


def set_without_option(spec: ReplaySpec) -> dict[str, Any]:
    """Return the fields that no option sets and that are not at their default, with their values."""
    declared = {(toggle.part, toggle.field) for toggle in toggles()}
    return {
        spec_field.name: value
        for part, spec_class in PARTS.items()
        for spec_field in fields(spec_class)
        if (part, spec_field.name) not in declared
        and f"{part}.{spec_field.name}" not in PARTS
        and (value := getattr(attrgetter(part)(spec), spec_field.name)) != spec_field.default
    }


def with_values(spec: ReplaySpec, values: Iterable[tuple[Toggle, Any]]) -> ReplaySpec:
    """Return the spec with other values of some options. Raises UsageError if they contradict the rest."""
    whole = spec_to_dict(spec)
    for toggle, value in values:
        part = whole
        for name in toggle.part.split("."):
            part = part[name]
        part[toggle.field] = to_json(value)
    return spec_from_dict(whole, source="the options")


def spec_to_dict(spec: ReplaySpec) -> dict[str, Any]:
    """Return the spec as JSON-ready values: nested by part, enums as their values, paths as text."""
    plain: dict[str, Any] = to_json(spec)
    return plain


def spec_from_dict(values: Mapping[str, Any], *, source: str = "a run's spec") -> ReplaySpec:
    """Read a spec from the values that `spec_to_dict` returned; missing fields get their defaults.

    Raises UsageError, with a message that begins with `source`, for invalid values.
    """
    spec = from_json(ReplaySpec, values, source=source)
    for toggle in toggles():
        try:
            _check_range(toggle, toggle.value_in(spec))
        except UsageError as error:
            raise UsageError(f"{source}: {error.text}") from error
    return spec


# Put what an error says into the words of the command line: settings become the flags that are typed for them.


def in_flags(said: BaseException | str) -> str:
    """Return an error's sentence, or one from `FactError.text`, as the terminal shows it."""
    if isinstance(said, FactError):
        said = said.text
    return spell_settings(str(said), as_typed)


def as_typed(setting: Setting) -> str:
    """Return `--tp 2` or `--no-packing`; without a value `--tp`.

    The flags are those of the options that the field declares; a setting of `capture` is no option here.
    """
    declared = [toggle for toggle in toggles() if toggle.field == setting.name]
    toggle = next((toggle for toggle in declared if not toggle.is_switch or toggle.sets == setting.value), None)
    if toggle is None:
        flag = declared[0].flag if declared else flag_of(setting.name)
        return f"{flag} {setting.value}" if setting.has_value and not declared else flag
    return " ".join(toggle.as_typed(setting.value)) if setting.has_value else toggle.flag
