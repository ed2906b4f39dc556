"""The command line: every way to start it, what it refuses and how, and its exit codes."""

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.run import get_args_parser
from typer.models import OptionInfo

from actor_init.spec import UsageError
from replay.command_line.cli import app, main
from replay.options.option_parsing import list_options
from replay.options.spec import ReplaySpec
from replay.processes.error_reports import run_to_exit_code
from tests.helpers.commands import port_for
from tests.helpers.made_captures import damage, write_config, write_pass
from tests.helpers.made_logs import passed, write_log
from tests.helpers.typed import spec_of

ROOT = Path(__file__).resolve().parents[3]
Fake = Callable[..., SimpleNamespace]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fake], None]:
    """Puts a function in the place of replay.api.here.run_here."""

    def put(run: Fake) -> None:
        monkeypatch.setitem(sys.modules, "replay.api.here", SimpleNamespace(run_here=run))

    return put


def run_command(*command: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    return subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=1800, check=False)


def scripts(name: str) -> str:
    return str(Path(sys.executable).parent / name)


@pytest.mark.parametrize("typed", [["--version"], ["-h"], ["worst", "-h"]])
def test_version_and_short_help_are_printed(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed) == 0
    said = capsys.readouterr().out
    assert said == f"replay {version('micro-replay')}\n" if typed == ["--version"] else said.startswith("Usage: replay")


def test_an_option_has_its_short_names() -> None:
    assert spec_of(["-o", "x", "--lr", "0.1"]) == spec_of(["--log-folder", "x", "--learning-rate", "0.1"])


@pytest.mark.parametrize(
    ("typed", "meant"), [("--max-input", "--max-inputs"), ("--zero_stage", "--zero-stage"), ("--verison", None)]
)
def test_an_option_is_proposed_where_it_is_nearly_what_was_typed(
    typed: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["worst", typed]) == 2
    said = capsys.readouterr().err
    assert (f"Did you mean {meant}?" in said) if meant else ("Did you mean" not in said)


def test_an_error_is_left_for_torchrun_to_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert main(["--max-input", "5"]) == 2
    message = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert message.startswith("replay: unknown option --max-input. Did you mean --max-inputs?")


def test_an_error_that_cannot_be_left_for_torchrun_is_said_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no folder" / "error.json"))
    assert main(["--max-input", "5"]) == 2
    assert capsys.readouterr().err.startswith("replay: unknown option --max-input.")


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--max-input 5", "unknown option --max-input. Did you mean --max-inputs? Try: replay --help"),
        ("--backend zero", "--backend 'zero' is not allowed. Give one of deepspeed, fsdp2, ddp"),
        ("--max-inputs", "option '--max-inputs' requires an argument. Try: replay --help"),
        ("--max-inputs many", "--max-inputs 'many' is not allowed. Give a whole number of at least 1"),
        ("inputs/nowhere", "no such command 'inputs/nowhere'. Try: replay --help"),
        ("pariti", "no such command 'pariti'. Did you mean 'parity'? Try: replay --help"),
        ("inputs/sample --inputs x", "inputs/sample and --inputs exclude each other."),
        ("parity inputs/sample --inputs x", "inputs/sample and --inputs exclude each other."),
        ("inspect", "missing argument 'FOLDER'. Try: replay inspect --help"),
        ("inspect --max-inputs 5 x", "unknown option --max-inputs. Try: replay inspect --help"),
        ("--max-inputs 5 inspect x", "--max-inputs belongs to a replay, not to `inspect`. Try: replay inspect --help"),
        ("diagnose --inputs", "option '--inputs' requires an argument. Try: replay diagnose --help"),
        ("inspect nowhere", "nowhere does not exist. Try: replay inspect inputs/sample"),
        ("--compile --deepcompile", "--compile and --deepcompile exclude each other. Give one of the two"),
        ("--backend fsdp2 --deepcompile", "--deepcompile belongs to deepspeed."),
        ("--backend fsdp2 --sequence-parallel", "--sequence-parallel shards over the ranks of --tp. Try: --tp 2"),
        ("--backend fsdp2 --tp-plan model", "--tp-plan model is a plan for --tp. Try: --tp 2 --tp-plan model"),
        ("--tp 2 --sequence-parallel", "--sequence-parallel is not there for deepspeed. Try: --backend fsdp2"),
        ("--tp 2 --tp-plan builtin", "--tp-plan builtin is fsdp2's. Try: --backend fsdp2"),
        ("--backend fsdp2 --zero-stage 1", "--zero-stage 1 does not exist under fsdp2"),
        ("--backend ddp --deepcompile", "--deepcompile belongs to deepspeed."),
        ("--backend ddp --zero-stage 2", "--zero-stage 2 shards, and under ddp every rank holds the whole model"),
        ("--backend ddp --tp 2", "--tp 2 shards, and under ddp every rank holds the whole model and its own inputs."),
        ("--backend ddp --ring 2", "--ring 2 shards, and under ddp every rank holds the whole model"),
        ("--attention varlen --no-packing", "--attention varlen reads packed rows."),
        ("--inputs a --input-file b", "--inputs and --input-file exclude each other."),
        ("--step --no-backward", "--step needs the gradients that --no-backward leaves out."),
        ("--step --optimizer none", "--step needs an optimizer, but --optimizer none was given."),
    ],
)
def test_wrong_usage_is_one_line_that_says_what_to_type(
    typed: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"replay: {says}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "option", "value"),
    [("parity --at-once=none", "--at-once", "none"), ("suite --model x --steps 1", "--steps", "1")],
)
def test_a_commands_bad_value_is_said_in_one_line(
    typed: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed.split()) == 2
    _, err = capsys.readouterr()
    assert err.startswith(f"replay: invalid value for '{option}': ")
    assert err.endswith(f", not '{value}'. Try: replay {typed.split()[0]} --help\n")
    assert err.count("\n") == 1


def test_what_was_typed_reaches_the_run_and_its_exit_code_comes_back(session: Callable[[Fake], None]) -> None:
    seen: list[tuple[ReplaySpec, bool]] = []

    def run(spec: ReplaySpec, *, show_traceback: bool, as_json: bool) -> SimpleNamespace:
        assert not as_json
        seen.append((spec, show_traceback))
        return SimpleNamespace(exit_code=1)

    session(run)
    assert main(["--local_rank=0", "--max-inputs", "5", "--traceback"]) == 1
    [(spec, show_traceback)] = seen
    assert spec.inputs.max_inputs == 5
    assert show_traceback


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UsageError("no such model. Try: --model x"), 2, "replay: no such model. Try: --model x\n"),
        (RuntimeError("broken\n  twice"), 1, "replay: RuntimeError: broken twice. --traceback shows where\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_a_run_raises_is_one_line_without_a_traceback(
    session: Callable[[Fake], None], capsys: pytest.CaptureFixture[str], error: BaseException, code: int, says: str
) -> None:
    def run(spec: ReplaySpec, *, show_traceback: bool, as_json: bool) -> SimpleNamespace:
        raise error

    session(run)
    assert main([]) == code
    assert capsys.readouterr().err == says


@pytest.mark.parametrize("error", [UsageError("not here"), RuntimeError("broken")])
def test_traceback_shows_where(
    session: Callable[[Fake], None], capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def run(spec: ReplaySpec, *, show_traceback: bool, as_json: bool) -> SimpleNamespace:
        raise error

    session(run)
    main(["--traceback"])
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_of_several_ranks_only_the_first_speaks_of_a_wrong_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["--compile", "--deepcompile"]) == 2
    assert capsys.readouterr().err == ""


def test_a_rank_that_alone_is_refused_says_so_in_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> int:
        raise UsageError("more processes than GPUs")

    monkeypatch.setenv("RANK", "1")
    assert run_to_exit_code(refuse, head_start=0.0) == 2
    assert capsys.readouterr().err == "replay: rank 1: more processes than GPUs\n"


def test_inspect_says_what_is_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pass(tmp_path)
    write_config(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "llama, layers 2" in out
    assert "80.0%" in out


def test_inspect_fails_on_a_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = write_pass(tmp_path)
    damage(bad)
    assert main(["inspect", str(tmp_path)]) == 1
    assert bad.name in capsys.readouterr().out


def test_help_shows_every_option_whole_and_hides_local_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help-all"]) == 0
    out = capsys.readouterr().out
    for text in (
        "Actor:",
        "Inputs:",
        "Measuring:",
        "Ranks:",
        "--ring ",
        "--gradient-checkpointing / --no-gradient-checkpointing",
        "inspect",
        "compare",
    ):
        assert text in out
    for absent in ("--local", "--parallel"):
        assert absent not in out


def test_help_needs_neither_torch_nor_rich() -> None:
    probe = (
        "import sys; from replay.command_line.cli import main; code = main(['--help']); "
        "print(code, [m for m in ('torch', 'rich', 'transformers', 'deepspeed') if m in sys.modules])"
    )
    assert run_command(sys.executable, "-c", probe).stdout.splitlines()[-1] == "0 []"


NOWHERE = [
    "--inputs nowhere",
    "--input-file nowhere.pkl",
    "--inputs nowhere --tp 2",
    *(f"{command} nowhere" for command in ("inspect", "hang", "report", "compare nowhere")),
    *(
        f"{command} --inputs nowhere"
        for command in ("diagnose", "minimise", "mismatch", "parity", "recompiles", "scan", "worst")
    ),
    *(f"{command} --continue nowhere" for command in ("minimise", "parity", "scan", "suite")),
    "minimise --parity nowhere --cell x",
    "suite --dataset nowhere",
    *(
        f"{command} --model nowhere"
        for command in ("", "diagnose", "minimise", "mismatch", "parity", "recompiles", "scan", "suite", "worst")
    ),
    "--adapter nowhere",
    "--loss nowhere.py:loss",
]


def test_what_is_not_there_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    probe = (
        "import sys; from replay.command_line.cli import main; "
        f"codes = [main(typed.split()) for typed in {NOWHERE}]; "
        "print({*codes}, [m for m in ('torch', 'rich', 'transformers', 'deepspeed') if m in sys.modules])"
    )
    done = run_command(sys.executable, "-c", probe, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.stdout == "{2} []\n"
    lines = done.stderr.splitlines()
    assert len(lines) == len(NOWHERE)
    assert all("nowhere" in line and any(word in line for word in ("Try: ", "Give ", "Allowed: ")) for line in lines)
    assert [*tmp_path.iterdir()] == []


def test_what_runs_no_model_imports_neither_a_model_library_nor_a_compiler(tmp_path: Path) -> None:
    log = str(write_log(tmp_path / "log", [passed(0, "a")]))
    commands = [["inspect", "inputs/sample"], ["hang", "inputs/sample"], ["compare", log, log]]
    heavy = ("transformers", "deepspeed", "peft", "torch._dynamo", "torch._inductor", "torch.distributed.tensor")
    probe = (
        f"import sys; from replay.command_line.cli import main; codes = [main(typed) for typed in {commands}]; "
        f"print(codes, [m for m in {heavy} if m in sys.modules])"
    )
    assert run_command(sys.executable, "-c", probe).stdout.splitlines()[-1] == "[0, 0, 0] []"


WAYS = {
    "the console script": [scripts("replay")],
    "python -m replay": [sys.executable, "-m", "replay"],
    "python -u replay": [sys.executable, "-u", "replay"],
    "deepspeed replay": [scripts("deepspeed"), "--num_gpus=1", "replay"],
    "deepspeed --module replay": [scripts("deepspeed"), "--num_gpus=1", "--module", "replay"],
    "torchrun replay": [scripts("torchrun"), "replay"],
    "torchrun -m replay": [scripts("torchrun"), "-m", "replay"],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_start_it_is_the_same_command(way: str) -> None:
    program, *arguments = WAYS[way]
    done = run_command(program, *port_for(program), *arguments, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage: replay [OPTIONS] COMMAND [ARGS]..." in done.stdout
    assert "--max-inputs N" in done.stdout


@pytest.mark.parametrize("way", ["the console script", "python -m replay", "python -u replay"])
def test_every_way_refuses_alike(way: str) -> None:
    done = run_command(*WAYS[way], "--compile", "--deepcompile")
    assert done.returncode == 2
    assert done.stderr == "replay: --compile and --deepcompile exclude each other. Give one of the two\n"


def test_run_as_a_folder_it_is_that_folder_that_runs(tmp_path: Path) -> None:
    for package in ("actor_init", "replay"):
        shutil.copytree(ROOT / package, tmp_path / package)
    cli_file = tmp_path / "replay" / "command_line" / "cli.py"
    cli_file.write_text(cli_file.read_text().replace("Replay captured micro-batches", "This is the copy"))
    (tmp_path / "replay" / "annotated_doc.py").write_text("raise SystemExit('a module of replay/ hid a library')")
    done = run_command(sys.executable, "-u", str(tmp_path / "replay"), "--help", cwd=ROOT)
    assert "This is the copy" in done.stdout, done.stderr


@pytest.mark.parametrize("flag", [flag for toggle in list_options() for flag in (toggle.flag, toggle.negation)])
def test_torchrun_hands_every_option_on(flag: str) -> None:
    parser = get_args_parser()
    assert parser.parse_args(["--nproc-per-node", "2", "replay", flag, "x"]).training_script_args == [flag, "x"]


def test_no_option_takes_its_name_from_its_metavar() -> None:
    """typer 0.27 called an option --ADDRESS whose parameter is `address` and whose metavar is ADDRESS."""
    declared = 0
    for command in (app.registered_callback, *app.registered_commands):
        assert command is not None
        assert command.callback is not None
        for name, parameter in inspect.signature(command.callback).parameters.items():
            for option in (parameter.default, *getattr(parameter.annotation, "__metadata__", ())):
                if isinstance(option, OptionInfo):
                    declared += 1
                    assert option.param_decls or (option.metavar or "").replace("_", "-").lower() != name
    assert declared > 50
