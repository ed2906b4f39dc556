"""Errors below the command line say facts; the terminal and Python put them into words of their own."""

import ast
import pickle
import re
from pathlib import Path

import pytest

from actor_init.spec import ActorSpec, Compile, UsageError
from capture import CaptureError
from capture.cli import build_parser, list_flags, spell_in_flags
from capture.facts import FactError, Setting
from replay.command_line.cli import build_commands
from replay.options.option_parsing import format_error_with_flags, list_options

ROOT = Path(__file__).parents[1]
# Calls whose first argument is the name of a setting.
SETTINGS = ("Setting", "UsageError.not_allowed")
# Of `replay`, what types options and what is a command's own room, which has options of its own.
COMMAND_LINE = re.compile(
    r"capture/cli\.py|replay/command_line/.*|replay/options/(option_parsing|ray_options|wording)\.py"
    r"|replay/(agreement|campaign|on_ray)/.*|replay/commands/[^/]*/command\.py"
    r"|replay/commands/(parity|scan|suite|minimise|worst|recompiles|doctor|report)/.*"
)
BELOW = [
    path
    for room in ("actor_init", "capture", "replay")
    for path in sorted((ROOT / room).rglob("*.py"))
    if not COMMAND_LINE.fullmatch(path.relative_to(ROOT).as_posix())
]

FACTS: list[tuple[FactError, str, str]] = [
    (
        FactError(Setting("tp", 3), "does not divide 4 heads", f"Try: {Setting('tp')} with one of 1, 2"),
        "--tp 3 does not divide 4 heads. Try: --tp with one of 1, 2",
        "tp=3 does not divide 4 heads. Try: tp with one of 1, 2",
    ),
    (
        FactError(
            Setting("attention", "varlen"), "reads packed rows", f"Try: {Setting('packing', True)} {Setting('ring', 2)}"
        ),
        "--attention varlen reads packed rows. Try: --packing --ring 2",
        "attention='varlen' reads packed rows. Try: packing=True, ring=2",
    ),
    (
        FactError(Setting("rows"), "must be 1 or more, not 0"),
        "--rows must be 1 or more, not 0",
        "rows must be 1 or more, not 0",
    ),
    (
        FactError.not_allowed("pad_tokens", "x", f"Try: {Setting('pad_tokens', '128')}"),
        "--pad-tokens 'x' is not allowed. Try: --pad-tokens 128",
        "pad_tokens 'x' is not allowed. Try: pad_tokens='128'",
    ),
    (
        FactError(Setting("weights", Path("a b/w.pt")), ": no tensors by name in it"),
        "--weights a b/w.pt: no tensors by name in it",
        "weights='a b/w.pt': no tensors by name in it",
    ),
    (
        FactError(Path("w.pt"), "cannot be read", f"Copy it again, or give {Setting('random_weights', True)}"),
        "w.pt cannot be read. Copy it again, or give --random-weights",
        "w.pt cannot be read. Copy it again, or give random_weights=True",
    ),
    (
        FactError("the model", "calls its head twice", f"Try: {Setting('head', 'whole')}"),
        "the model calls its head twice. Try: --head whole",
        "the model calls its head twice. Try: head='whole'",
    ),
    (
        FactError("the job's LoRA", "needs peft", "Try: pip install peft"),
        "the job's LoRA needs peft. Try: pip install peft",
        "the job's LoRA needs peft. Try: pip install peft",
    ),
]


@pytest.mark.parametrize(("fact", "in_terminal", "in_python"), FACTS)
@pytest.mark.parametrize("kind", [UsageError, CaptureError])
def test_an_error_says_its_fact_in_flags_to_the_terminal_and_in_arguments_to_python(
    fact: FactError, in_terminal: str, in_python: str, kind: type[UsageError] | type[CaptureError]
) -> None:
    # An error comes pickled from another process.
    error = pickle.loads(pickle.dumps(kind(*fact.args)))
    assert (format_error_with_flags(error), str(error), error.subject) == (in_terminal, in_python, fact.subject)


@pytest.mark.parametrize(
    ("setting", "typed"),
    [
        (Setting("packing", False), "--no-packing"),
        (Setting("packing"), "--packing"),
        (Setting("compile", Compile.BLOCKS), "--compile"),
        (Setting("compile", Compile.DEEPCOMPILE), "--deepcompile"),
        (Setting("compile"), "--compile"),
        (Setting("attention", "flash"), "--attention flash"),
        (Setting("weight_decay", 0.1), "--weight-decay 0.1"),
        (Setting("max_norm", float("inf")), "--max-norm inf"),
        (Setting("model", "a ⟩ of ⟨tp⟩ 'b'"), "--model a ⟩ of ⟨tp⟩ 'b'"),
        # This one is a setting of `capture`.
        (Setting("max_bytes", 7), "--max-bytes 7"),
    ],
)
def test_a_setting_is_typed_as_the_field_that_declares_it(setting: Setting, typed: str) -> None:
    assert format_error_with_flags(f"Try: {setting}") == f"Try: {typed}"


@pytest.mark.parametrize("written", ["⟨tp=)⟩", "⟨", "⟨tp=" + "[" * 100_000 + "⟩", "⟨A b⟩ and ⟨tp=3"])
def test_what_a_file_has_between_such_brackets_stays_as_it_is(written: str) -> None:
    assert format_error_with_flags(UsageError(written)) == str(UsageError(written)) == written


def test_an_error_keeps_its_fact_in_the_sentence_of_another() -> None:
    with pytest.raises(UsageError) as refused:
        ActorSpec(compile=Compile.DEEPCOMPILE, backend="ddp")
    outer = UsageError(f"run.json: {refused.value.text}")
    assert format_error_with_flags(outer).startswith(
        "run.json: --deepcompile belongs to deepspeed. Try: --backend deepspeed --deep"
    )
    assert str(outer).startswith("run.json: compile='deepcompile' belongs to deepspeed. Try: backend='deepspeed', ")


def test_each_setting_that_an_error_names_is_declared_as_an_option() -> None:
    declared = {toggle.field for toggle in list_options()}
    assert len(declared) == len({(toggle.part, toggle.field) for toggle in list_options()}), "two fields have one name"
    named = {
        (path.relative_to(ROOT).as_posix(), node.args[0].value)
        for path in BELOW
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in SETTINGS
        if node.args and isinstance(node.args[0], ast.Constant)
    }
    assert {path.split("/")[0] for path, _ in named} == {"actor_init", "capture", "replay"}
    of_capture = {name for name, _ in list_flags(build_parser())}
    of_commands = {
        flag.removeprefix("--").replace("-", "_")
        for command in build_commands().commands.values()
        for option in command.params
        for flag in option.opts
    }
    known = {"actor_init": declared, "replay": declared | of_commands, "capture": declared | of_capture}
    assert [(path, name) for path, name in named if name not in known[path.split("/")[0]]] == []


@pytest.mark.parametrize(
    ("setting", "typed"),
    [
        (Setting("project"), "--from"),
        (Setting("rows", 4), "--rows 4"),
        (Setting("max_bytes"), "--max-bytes"),
        # This one is a setting of `replay`.
        (Setting("model"), "--model"),
    ],
)
def test_the_capture_command_types_a_setting_as_its_parser_declares_it(setting: Setting, typed: str) -> None:
    assert spell_in_flags(CaptureError(f"no. Try: {setting}")) == f"no. Try: {typed}"


# The flags that are left in texts of errors, file by file. Take out what is moved to facts; put nothing in.
FLAGS_LEFT = {
    # It is no setting: it chooses how much is printed.
    "actor_init/custom/user_file.py": ["--traceback"],
    # A user's objective may catch this error, which is a ValueError.
    "actor_init/inputs/documents.py": ["--ring", "--tp"],
    # These are flags of launchers.
    "actor_init/world.py": ["--module", "--nproc-per-node", "--nproc-per-node", "--num_gpus"],
    # Checks give advice in their table.
    "replay/commands/diagnose/checks.py": ["--nproc-per-node", "--traceback"],
    # The console prints what a search found.
    "replay/runner/non_finite.py": ["--deepcompile", "--grad-accumulation", "--step"],
    # The console prints a table.
    "replay/runner/out_of_memory.py": ["--memory-snapshot"],
    # The error is raised in a job, too, so it names the flag and the argument.
    "capture/file_format/micro_batch.py": ["--arguments"],
    # It is a flag of Ray.
    "capture/on_ray/cluster.py": ["--head"],
}


def test_no_error_below_the_command_line_names_a_flag() -> None:
    flags_left = {}
    for path in BELOW:
        name = path.relative_to(ROOT).as_posix()
        flags = [flag for text in read_error_texts(path) for flag in re.findall(r"--[a-z][\w-]*", text)]
        if flags:
            flags_left[name] = sorted(flags)
    assert flags_left == FLAGS_LEFT


def read_error_texts(path: Path) -> list[str]:
    """Return the literals of functions that make an error, and of constants that these may put into it, in order."""
    module = ast.parse(path.read_text())
    parts: list[ast.stmt] = [node for node in module.body if isinstance(node, ast.Assign)]
    parts += [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and makes_an_error(node)]
    literals = {
        (node.lineno, node.col_offset, node.value)
        for part in parts
        for node in ast.walk(part)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if not (isinstance(part, ast.FunctionDef) and node.value == ast.get_docstring(part, clean=False))
    }
    return [text for _, _, text in sorted(literals)]


def makes_an_error(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error"))
        for node in ast.walk(function)
    )


def test_the_command_line_words_each_error_that_it_puts_into_a_text() -> None:
    kinds = {"UsageError", "CaptureError", "NotReplayableError"}
    unworded = [
        f"{path.relative_to(ROOT)}:{handler.lineno}"
        for path in sorted((ROOT / "replay").rglob("*.py"))
        for handler in ast.walk(ast.parse(path.read_text()))
        if isinstance(handler, ast.ExceptHandler) and handler.type is not None and handler.name
        if kinds & {name.id for name in ast.walk(handler.type) if isinstance(name, ast.Name)}
        for node in ast.walk(handler)
        if is_text_of(node, handler.name)
    ]
    assert unworded == []


def is_text_of(node: ast.AST, name: str) -> bool:
    """Tell whether it is `str(error)`, or `{error}` in an f-string."""
    if isinstance(node, ast.FormattedValue):
        return ast.unparse(node.value) == name
    return isinstance(node, ast.Call) and ast.unparse(node) == f"str({name})"
