"""Turn dataclass fields into command line options, parsed options into a ReplaySpec, settings in errors into flags.

Every option is None in this module unless it was typed: defaults, help and ranges are declared in the dataclasses
alone. typer passes on text and switches; this module converts the text, so that every error says what was typed and
what is allowed.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from difflib import get_close_matches
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
from replay.options.spec import InputsSpec, MeasureSpec, ObjectiveSpec, ReplayParts, ReplaySpec, StateSpec
from replay.options.value_checks import check_range, check_value, unbox

# The work of a parsed command. It returns the exit code.
CommandAction = Callable[[], int]

# The parts of a ReplaySpec by their attribute path.
PARTS: dict[str, type] = {
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
# What they would print is in a result.
SCREEN_OPTIONS = ("quiet", "full_names")
METAVARS = {int: "N", float: "X", str: "NAME", Path: "PATH", bool: ""}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredOption:
    """Describe one command line option: a field's own option, or a switch that sets the field to a fixed value.

    flag          as it is typed
    value_type    the type of its value: bool, int, float, str, Path or an enum
    switch_value  the value that a switch sets
    choices       the allowed words, if the value is one of a few
    metavar       what help shows for the value, if it is not the choices or the type
    bare_value    the value that the flag sets where no value follows it; None: one has to follow
    aliases       other flags that set the same
    brief         the line of `replay --help`; empty: the option is in --help-all alone
    """

    part: str
    field: str
    flag: str
    value_type: Any
    help: str
    default: Any
    min: float | None = None
    max: float | None = None
    is_switch: bool = False
    switch_value: Any = None
    choices: Collection[str] = ()
    metavar: str | None = None
    bare_value: Any = None
    aliases: Collection[str] = ()
    brief: str = ""

    @property
    def parameter(self) -> str:
        """The name of the command function's parameter."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def negation(self) -> str:
        return f"--no-{self.flag.removeprefix('--')}"

    def read_value(self, spec: ReplayParts) -> Any:
        return attrgetter(f"{self.part}.{self.field}")(spec)

    def format_arguments(self, value: Any) -> list[str]:
        """Format the arguments that set the field to `value`."""
        if self.is_switch or self.value_type is bool:
            return [self.flag if self.is_switch or value else self.negation]
        if self.bare_value is not None and value == self.bare_value:
            return [self.flag]
        return [self.flag, str(value)]


@cache
def list_options() -> tuple[DeclaredOption, ...]:
    """List every option, in the order of the fields that declare them."""
    all_options: list[DeclaredOption] = []
    for part, spec_class in PARTS.items():
        hints = get_type_hints(spec_class)
        for spec_field in fields(spec_class):
            if spec_field.metadata:
                all_options.extend(_make_options(part, spec_field, unwrap_optional(hints[spec_field.name])))
    assert len({option.parameter for option in all_options}) == len(all_options), "two options have one name"
    return tuple(all_options)


def _make_options(part: str, spec_field: Field[Any], value_type: Any) -> Iterator[DeclaredOption]:
    metadata = spec_field.metadata
    shared: dict[str, Any] = {"part": part, "field": spec_field.name, "default": spec_field.default}
    choices = _list_choices(spec_field, value_type)
    own_flag = flag_of(spec_field.name)
    text, metavar = (metadata[name]() if callable(metadata[name]) else metadata[name] for name in ("help", "metavar"))
    if metadata["named"]:
        yield DeclaredOption(
            flag=own_flag,
            value_type=value_type,
            help=text,
            min=metadata["min"],
            max=metadata["max"],
            choices=choices,
            metavar=metavar,
            bare_value=metadata["bare"],
            aliases=metadata["aliases"],
            brief=metadata["brief"],
            **shared,
        )
    for flag, value in metadata["flags"].items():
        if metadata["named"]:
            text = f"The same as {own_flag} {value}."
        brief = "" if metadata["named"] or text.startswith("See ") else metadata["brief"]
        yield DeclaredOption(
            flag=flag, value_type=bool, help=text, is_switch=True, switch_value=value, brief=brief, **shared
        )
        text = f"See {flag}."


def _list_choices(spec_field: Field[Any], value_type: Any) -> Collection[str]:
    """List the words that a field's value may be; empty if any value of its type is allowed."""
    choices: Collection[str] = (
        list(value_type) if issubclass(value_type, StrEnum) else spec_field.metadata.get("choices", ())
    )
    return choices


def unwrap_optional(annotation: Any) -> Any:
    """Return `int` for `int | None`, and any other annotation unchanged."""
    if get_origin(annotation) in (Union, UnionType):
        [annotation] = [alternative for alternative in get_args(annotation) if alternative is not type(None)]
    return annotation


def add_options(
    command: Callable[..., Any], *, serves: Callable[[DeclaredOption], bool] = lambda option: True
) -> Callable[..., Any]:
    """Replace the `**given` of `command` with one parameter for each option that `serves` accepts."""
    return with_parameters(command, [_make_parameter(option) for option in list_options() if serves(option)])


def json_option() -> Any:
    """Return the option of a command that prints its result as JSON."""
    return typer.Option(False, "--json", help="Print the result alone, as JSON.")


def job_option() -> Any:
    """Return the option that a child process gets for all options of a replay: the file of its `ChildJob`."""
    return typer.Option(None, "--job", hidden=True)


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
    set_signature(command, signature.replace(parameters=every))
    return command


def set_signature(command: Callable[..., Any], signature: inspect.Signature) -> None:
    """Give `command` another signature. typer takes the parameters from it, and their types from the annotations."""
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}


def _make_parameter(option: DeclaredOption) -> inspect.Parameter:
    has_negation = option.value_type is bool and not option.is_switch
    default = "on" if option.default is True else option.default
    says_default = not option.is_switch and default is not None and default is not False
    help = f"{option.help} (default: {default})" if says_default else option.help
    return inspect.Parameter(
        option.parameter,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=(bool if option.value_type is bool else str) | None,
        default=typer.Option(
            None,
            *option.aliases,
            f"{option.flag}/{option.negation}" if has_negation else option.flag,
            help=help,
            metavar=option.metavar or "|".join(option.choices) or METAVARS[option.value_type],
            show_default=False,
            rich_help_panel=PANELS[option.part],
        ),
    )


def build_replay_spec(given: Mapping[str, Any]) -> ReplaySpec:
    """Build a ReplaySpec from the typed options, given by parameter name.

    Raises UsageError for an invalid value, or for two options that contradict each other.
    """
    # By part and field: how it was typed, and its value.
    typed: dict[tuple[str, str], tuple[str, Any]] = {}
    for option in list_options():
        if given.get(option.parameter) is None:
            continue
        value = option.switch_value if option.is_switch else parse_value(option, given[option.parameter])
        text = " ".join(option.format_arguments(value))
        earlier, other = typed.setdefault((option.part, option.field), (text, value))
        if other != value:
            raise UsageError(f"{earlier} and {text} exclude each other. Give one of the two")
    parts: dict[str, Any] = {}
    # In reverse, nested parts come before the part that holds them.
    for part, spec_class in reversed(PARTS.items()):
        inner = {path.removeprefix(f"{part}."): parts.pop(path) for path in list(parts) if path.startswith(f"{part}.")}
        values = {name: value for (owner, name), (_, value) in typed.items() if owner == part}
        parts[part] = spec_class(**inner, **values)
    return ReplaySpec(**parts)


def check_options(
    options: Mapping[str, Any], names: Collection[str], *, owner: str = "a replay", command: str = "replay"
) -> dict[str, Any]:
    """Return options that a program gave by name as they would be typed. Raises UsageError for a name not in `names`.

    owner, command  what has these options, and whose help lists them
    """
    for name in options:
        if name not in names or name in SCREEN_OPTIONS:
            close = get_close_matches(name, set(names) - set(SCREEN_OPTIONS), n=1)
            advice = f"Did you mean {close[0]}?" if close else f"`{command} --help-all` lists them, with _ for -"
            raise UsageError(f"{owner} has no option {name}. {advice}")
    switches = {option.parameter for option in list_options() if option.is_switch}
    return {name: None if name in switches and value is False else value for name, value in options.items()}


def join_optional_values(typed: Sequence[str]) -> list[str]:
    """Join each flag that may stand alone with its value: `--step` and `--step auto` become `--step=on`, `--step=auto`.

    The parser takes either flags with a value or flags without one. What follows `--` is no option.
    """
    words = {option.flag: option for option in list_options() if option.bare_value is not None}
    joined: list[str] = []
    end = typed.index("--") if "--" in typed else len(typed)
    for word in typed[:end]:
        option = words.get(joined[-1]) if joined else None
        if option is not None and word in option.choices:
            joined[-1] = f"{option.flag}={word}"
        else:
            joined.append(word)
    return [*(f"{word}={words[word].bare_value}" if word in words else word for word in joined), *typed[end:]]


def refuse_typed(given: Mapping[str, Any], why: str) -> None:
    """Raise UsageError for the first of `given`, by parameter name, that is not None. `why` says what excludes it."""
    if typed := [name for name, value in given.items() if value is not None]:
        raise UsageError(f"{why}. Leave out {Setting(typed[0])}")


def parse_value(option: DeclaredOption, given: Any) -> Any:
    """Convert typed text, or the value that a program gave, to the field's type. Raises UsageError for another."""
    if option.bare_value is not None and isinstance(given := unbox(given), bool):
        # The terminal has the flag alone for True, and its own flag for False.
        given = option.bare_value if given else option.value_type("off")
    return check_value(
        option.parameter, given, option.value_type, min=option.min, max=option.max, choices=option.choices
    )


def format_command_line(spec: ReplaySpec) -> list[str]:
    """Format the shortest arguments that produce this spec, for example ["--max-inputs", "5", "--compile"]."""
    arguments: list[str] = []
    written: set[tuple[str, str]] = set()
    for option in list_options():
        value = option.read_value(spec)
        if (
            (option.part, option.field) in written
            or value == option.default
            or (option.is_switch and option.switch_value != value)
        ):
            continue
        arguments += option.format_arguments(value)
        written.add((option.part, option.field))
    return arguments


def find_values_without_option(spec: ReplaySpec) -> dict[str, Any]:
    """Find the fields that no option sets and that are not at their default, with their values."""
    declared = {(option.part, option.field) for option in list_options()}
    return {
        spec_field.name: value
        for part, spec_class in PARTS.items()
        for spec_field in fields(spec_class)
        if (part, spec_field.name) not in declared
        and f"{part}.{spec_field.name}" not in PARTS
        and (value := getattr(attrgetter(part)(spec), spec_field.name)) != spec_field.default
    }


def replace_values(spec: ReplaySpec, values: Iterable[tuple[DeclaredOption, Any]]) -> ReplaySpec:
    """Replace the values of some options of a spec. Raises UsageError if they contradict the rest."""
    values_by_part = spec_to_dict(spec)
    for option, value in values:
        part = values_by_part
        for name in option.part.split("."):
            part = part[name]
        part[option.field] = to_json(value)
    return spec_from_dict(values_by_part, source="the options")


def spec_to_dict(spec: ReplaySpec) -> dict[str, Any]:
    """Return the spec as JSON-ready values: nested by part, enums as their values, paths as text."""
    plain: dict[str, Any] = to_json(spec)
    return plain


def spec_from_dict(values: Mapping[str, Any], *, source: str = "a run's spec") -> ReplaySpec:
    """Read a spec from the values that `spec_to_dict` returned; missing fields get their defaults.

    Raises UsageError, with a message that begins with `source`, for invalid values.
    """
    spec = from_json(ReplaySpec, values, source=source)
    for option in list_options():
        try:
            check_range(option.parameter, option.read_value(spec), min=option.min, max=option.max)
        except UsageError as error:
            raise UsageError(f"{source}: {error.text}") from error
    return spec


def format_error_with_flags(error: BaseException | str) -> str:
    """Spell an error's sentence, or one from `FactError.text`, as the terminal shows it: settings as flags."""
    if isinstance(error, FactError):
        error = error.text
    return spell_settings(str(error), spell_setting)


def describe_error(error: BaseException) -> str:
    """Return an error's sentence in one line, as the terminal shows it; behind its type where it is no refusal."""
    sentence = " ".join(format_error_with_flags(error).split())
    return sentence if isinstance(error, FactError) else f"{type(error).__name__}: {sentence}"


def spell_setting(setting: Setting) -> str:
    """Spell a setting as `--tp 2` or `--no-packing`; without a value `--tp`.

    The flags are those of the options that the field declares; a setting of `capture` is no option here.
    """
    declared = [option for option in list_options() if option.field == setting.name]
    option = next((option for option in declared if not option.is_switch or option.switch_value == setting.value), None)
    if option is None:
        flag = declared[0].flag if declared else flag_of(setting.name)
        return f"{flag} {setting.value}" if setting.has_value and not declared else flag
    return " ".join(option.format_arguments(setting.value)) if setting.has_value else option.flag
