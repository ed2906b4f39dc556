"""The `capture` command: run a job and record it, and collect, check, salvage, convert, redact or pack a folder."""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from capture.facts import CaptureError, FactError, Setting, flag_of, spell_settings
from capture.path_checks import (
    check_dumps,
    check_folder_of_captures,
    check_new_file,
    check_new_folder,
    check_node_folder,
)

RUN_USAGE = "capture run [-h] [--to FOLDER] [--module NAME] [what to keep] (SCRIPT | -m MODULE) ARGUMENTS"
# An issue on GitHub takes attachments of this size.
DEFAULT_MAX_BYTES = 25 * 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was typed and return its exit code: 0 all well, 1 damaged or refused files, 2 wrong usage.

    `run` returns 0 where its script ends, and raises what its script raises.
    """
    typed = sys.argv[1:] if arguments is None else list(arguments)
    asks_for_words = "--help-all" in typed or ("convert" in typed and not {"-h", "--help"}.isdisjoint(typed))
    parsed = build_parser(has_importers=asks_for_words).parse_args(typed)
    return int(parsed.action(parsed))


def find_product_version() -> str:
    """Return the version that is installed."""
    try:
        return version("micro-replay")
    except PackageNotFoundError:
        return "of a folder that is not installed"


class _HelpFormatter(argparse.HelpFormatter):
    """Two columns as `replay --help` has them, and no option's text on another line than the option."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=50, width=min(110, shutil.get_terminal_size().columns))


class _HelpOfAllCommands(argparse.Action):
    """Prints the help of `capture` and of each command, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.print_help()
        for command in list_commands(parser).values():
            print(f"\n\n{command.format_help()}", end="")
        parser.exit()


def build_parser(*, has_importers: bool = False) -> argparse.ArgumentParser:
    """Build the parser. Each command but `run` takes a folder first, and has its function as `action`.

    has_importers  the help of `convert --from` has its words, which are declared where dumps are read: with torch
    """
    project_words = "NAME"
    if has_importers:
        from capture.importers import IMPORTERS

        project_words = "|".join(IMPORTERS)

    parser = argparse.ArgumentParser(
        prog="capture",
        description="Micro-batches of training jobs, and folders of them.",
        epilog="Options of a command: capture COMMAND -h",
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"capture {find_product_version()}")
    parser.add_argument(
        "--help-all", action=_HelpOfAllCommands, nargs=0, help="show the help of every command and exit"
    )
    # `deepspeed --module capture run ...` puts this before the command. The script gets it, as without `capture run`.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add_command(
        name: str,
        action: Callable[[argparse.Namespace], int],
        help: str,
        folder_help: str = "Folder of captures.",
        metavar: str = "FOLDER",
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help, formatter_class=_HelpFormatter)
        command.set_defaults(action=_catch_errors(action), command=name)
        command.add_argument("folder", type=Path, metavar=metavar, help=folder_help)
        return command

    _add_run(commands)
    add_command("check", _check, "Read every capture and compare it with the manifests and indexes.")
    add_command(
        "salvage",
        _salvage,
        "Write the passes that killed processes of this host left in memory; cut torn segments.",
    )
    collect = add_command(
        "collect",
        _collect,
        "Bring home what the nodes of a Ray cluster recorded.",
        "Folder on the nodes, an absolute path; '$VARIABLE/...' is looked up on each node.",
    )
    collect.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="Folder here.")
    collect.add_argument(
        "--address", default="auto", metavar="HOST:PORT|auto", help="Of the cluster; auto: of this machine's (default)."
    )
    collect.add_argument(
        "--node", metavar="NAME", help="Host of the nodes to ask, or beginning of an id (default: all)."
    )
    convert = add_command(
        "convert",
        _convert,
        "Write older dumps, and those of other projects, as format 1.",
        "A dump or a folder of them.",
        metavar="PATH",
    )
    convert.add_argument("target", type=Path, metavar="NEW_FOLDER", help="Folder to write.")
    convert.add_argument(
        "--from",
        dest="project",
        metavar=project_words,
        help="Project that wrote them (default: told from each file).",
    )
    convert.add_argument(
        "--segment",
        metavar="SIZE",
        help="Write many passes into one file of about this size, as 64MB (default: a file a pass).",
    )
    convert.add_argument("--rows", type=int, metavar="N", help="Rows of a micro-batch (default: those of the dump).")
    redact = add_command("redact", _redact, "Write a copy of the folder without its text.")
    redact.add_argument("target", type=Path, metavar="NEW_FOLDER", help="Folder to write.")
    redact.add_argument(
        "--tokens",
        choices=["permute", "zero"],
        default="permute",
        metavar="permute|zero",
        help="What token ids become (default: permute).",
    )
    pack = add_command("pack", _pack, "Put the folder into one zip file.")
    pack.add_argument("target", type=Path, metavar="NEW_FILE", help="Zip file to write.")
    pack.add_argument(
        "--max-bytes",
        default=DEFAULT_MAX_BYTES,
        metavar="SIZE",
        help=f"Largest size of the zip file (default: {DEFAULT_MAX_BYTES // 2**20}MiB).",
    )
    return parser


def _add_run(commands: Any) -> None:
    """Add `run`. Its options for retention have the names of the settings of `recording`, which checks them."""
    help = "Run a script or module and record the model that it trains."
    run = commands.add_parser("run", help=help, description=help, usage=RUN_USAGE, formatter_class=_HelpFormatter)
    run.set_defaults(action=_run)
    run.add_argument("--to", type=Path, metavar="FOLDER", help="Folder for the captures (default: inputs/TIME-SCRIPT).")
    run.add_argument(
        "--module", metavar="NAME", help="Class of the module to record (default: the outermost causal LM in training)."
    )
    run.add_argument(
        "--arguments",
        metavar="NAME=NAME,...",
        help="Names of the forward's arguments, for a model of one's own, as idx=input_ids,targets=labels; labels are "
        "as transformers has them, and targets that are the next tokens already are shift_labels.",
    )
    retention = run.add_argument_group("which passes are kept (as in capture.recording)")
    retention.add_argument(
        "--every", type=int, metavar="N", help="Every Nth forward of those that the other options leave."
    )
    retention.add_argument("--forwards", metavar="FIRST:END", help="Numbers of forwards, as 100:200 (without 200).")
    retention.add_argument("--ranks", metavar="N,N,...", help="Ranks that record, as 0,3.")
    retention.add_argument(
        "--passes", metavar="all|train|rollout", help="With autograd on (train), off (rollout), or all."
    )
    retention.add_argument("--max-files", type=int, metavar="N", help="At most N files for each rank.")
    retention.add_argument("--max-bytes", metavar="SIZE", help="At most so much for each rank, as 10GB.")
    retention.add_argument("--keep", metavar="first|last", help="Which passes stay when a limit is reached.")
    retention.add_argument(
        "--flight-recorder", type=int, metavar="N", help="Keep the last N passes in memory; an incident writes them."
    )
    retention.add_argument(
        "--slow-step",
        metavar="TIMES|SECONDSs",
        help="A longer step is an incident: 3, than 3 times the median; 60s, than 60 seconds.",
    )
    retention.add_argument(
        "--reproduce",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Keep random states, outputs, samples of weights and gradients, to judge a replay by (default: on).",
    )
    retention.add_argument(
        "--segment",
        metavar="SIZE",
        help="Put many passes into one file of about this size, as 64MB, in a folder for each rank. Without it a pass "
        "is a file, and a rank has a folder of its own if there are more than 16.",
    )
    retention.add_argument(
        "--routes",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="With --reproduce, keep which experts a mixture of experts chose for each token (default: on).",
    )
    run.add_argument("-m", dest="is_module", action="store_true", help="Run a module, as python -m does.")
    run.add_argument(
        "job", nargs=argparse.REMAINDER, metavar="SCRIPT ARGUMENTS", help="The script, and what it is given."
    )


def _run(parsed: argparse.Namespace) -> int:
    from capture.record.retention import SETTINGS, check_retention

    settings = {name: getattr(parsed, name) for name in SETTINGS if getattr(parsed, name) is not None}
    try:
        if not parsed.job:
            raise CaptureError("run needs a script. Try: capture run train.py, or capture run -m package.module")
        check_retention(**settings)
        arguments = _parse_argument_names(parsed.arguments)
        if not parsed.is_module and not Path(parsed.job[0]).is_file():
            advice = "Try: capture run train.py, or capture run -m package.module"
            raise CaptureError(f"{parsed.job[0]}: no such script. {advice}")
    except ValueError as error:
        return _print_usage_error(error)
    from capture.run import ScriptJob, choose_folder, run

    name, *script_arguments = parsed.job
    local_rank = [] if parsed.local_rank is None else [f"--local_rank={parsed.local_rank}"]
    job = ScriptJob(name=name, is_module=parsed.is_module, arguments=[*local_rank, *script_arguments])
    try:
        folder = choose_folder(job, parsed.to)
    except CaptureError as error:
        return _print_usage_error(error)
    run(job, folder=folder, module_name=parsed.module, settings=settings, arguments=arguments)
    return 0


def _parse_argument_names(typed: str | None) -> dict[str, str]:
    """Parse `idx=input_ids,targets=labels`. Raises CaptureError."""
    if typed is None:
        return {}
    from capture.record.call_arguments import check_argument_names

    pairs = [pair.partition("=") for pair in typed.split(",") if pair]
    try:
        names = check_argument_names(
            {forward_name.strip(): capture_name.strip() for forward_name, _, capture_name in pairs}
        )
    except (TypeError, ValueError):
        names = {}
    if not names or len(names) < len(pairs):
        raise CaptureError(
            f"--arguments {typed}: give pairs of names, each name once. Try: --arguments idx=input_ids,targets=labels"
        )
    return names


def _catch_errors(action: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    def run_action(parsed: argparse.Namespace) -> int:
        try:
            _check_paths(parsed)
            return action(parsed)
        except (CaptureError, OSError) as error:
            return _print_usage_error(error)

    return run_action


def _check_paths(parsed: argparse.Namespace) -> None:
    """Raise CaptureError for paths that the command will refuse, before torch is imported for it."""
    if parsed.command == "collect":
        check_node_folder(str(parsed.folder), parsed.to.absolute())
        return
    (check_dumps if parsed.command == "convert" else check_folder_of_captures)(parsed.folder)
    if parsed.command in ("convert", "redact"):
        check_new_folder(parsed.target)
    elif parsed.command == "pack":
        check_new_file(parsed.target)


def _print_usage_error(error: Exception) -> int:
    """Print the error on stderr, and return the exit code of wrong usage."""
    print(f"capture: {spell_in_flags(error)}", file=sys.stderr)
    return 2


def spell_in_flags(error: Exception) -> str:
    """Return an error's sentence with settings as they are typed in this command line."""
    flags = dict(list_flags(build_parser()))

    def spell(setting: Setting) -> str:
        flag = flags.get(setting.name, flag_of(setting.name))
        return f"{flag} {setting.value}" if setting.has_value else flag

    return spell_settings(error.text if isinstance(error, FactError) else str(error), spell)


def list_declared(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """List the options and arguments that a parser declares, for which argparse has no public way."""
    return list(parser._actions)


def list_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands below a parser, by name."""
    return {
        name: command
        for action in list_declared(parser)
        if isinstance(action, argparse._SubParsersAction)
        for name, command in action.choices.items()
    }


def list_flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield the name and the flag of each option of a parser, and of the commands below it."""
    for option in list_declared(parser):
        if option.option_strings:
            yield option.dest, option.option_strings[-1]
    for command in list_commands(parser).values():
        yield from list_flags(command)


def _check(parsed: argparse.Namespace) -> int:
    from capture.file_format.listing import format_ranges
    from capture.file_format.manifest import check_folder

    result = check_folder(parsed.folder)
    good = [f"{len(result.good)} files"] if result.good or not result.num_good_in else []
    if result.num_good_in:
        num_passes = sum(result.num_good_in.values())
        num_segments = len(result.num_good_in)
        good.append(f"{num_passes} passes in {num_segments} segment{'s' * (num_segments > 1)}")
    print(f"good       {', '.join(good)}")
    if result.uncommitted:
        reason = "no manifest" if not result.num_manifests else "in no manifest"
        print(f"           {len(result.uncommitted)} of them {reason}: their recording was cut short")
    for name in result.without_index:
        print(f"no index   {name}: read without, or with a part of it; the rank's next recording or salvage writes it")
    for name, num_bytes in result.num_torn_bytes.items():
        print(f"torn       {name}: {num_bytes} bytes at its end, of a pass that is or was being written")
    if number := len(result.unreplayable):
        print(f"no replay  {number} of them cannot be replayed: {result.unreplayable[0]}")
    if missing := result.missing_ranks:
        print(f"no pass    of rank{'s' * (len(missing) > 1)} {format_ranges(missing)} of the job's {result.world_size}")
    for reason in result.damaged.values():
        print(f"damaged    {reason}")
    for name in result.missing:
        print(f"missing    {name}")
    return 0 if result.is_whole else 1


def _salvage(parsed: argparse.Namespace) -> int:
    from capture.black_box.salvage import repair_folder, salvage
    from capture.record.retention import RetentionSettings

    print(f"salvaged   {salvage(parsed.folder, RetentionSettings())} passes of processes that died")
    if num_repaired := repair_folder(parsed.folder):
        print(f"repaired   {num_repaired} segments: torn tails cut, indexes completed")
    return 0


def _collect(parsed: argparse.Namespace) -> int:
    from capture.on_ray.collect import collect_folder
    from capture.progress_bar import ProgressBar

    folder, target, bar = parsed.folder, parsed.to, ProgressBar()

    def show(num_done: int, num_all: int, text: str) -> None:
        bar.show(num_done // 2**20, num_all // 2**20, f"MiB from {text}")

    try:
        # Ray prints on stdout what it thinks of a node that dies.
        with redirect_stdout(sys.stderr):
            collection = collect_folder(folder, target, address=parsed.address, node=parsed.node, on_progress=show)
    except KeyboardInterrupt:
        bar.clear()
        print(f"capture: interrupted. What is in {target} is whole; type the same again for the rest", file=sys.stderr)
        return 130
    bar.clear()
    for line in collection.lines(folder, target):
        print(line)
    return 0 if collection.is_whole else 1


def _convert(parsed: argparse.Namespace) -> int:
    from capture.folder_tools.convert import convert_folder
    from capture.progress_bar import ProgressBar

    bar = ProgressBar()
    conversion = convert_folder(
        parsed.folder,
        parsed.target,
        project=parsed.project,
        num_rows=parsed.rows,
        segment=None if parsed.segment is None else _parse_size("--segment", parsed.segment),
        on_progress=bar.show,
    )
    bar.clear()
    num_bytes_before = conversion.num_bytes_before
    share = conversion.num_bytes_after / num_bytes_before if num_bytes_before else 0
    print(
        f"converted  {conversion.num_written} passes to {parsed.target}, {share:.0%} of their size, "
        "each read back and equal"
    )
    return _print_refused(conversion.refused)


def _redact(parsed: argparse.Namespace) -> int:
    from capture.folder_tools.redact import TokenRedaction, redact_folder

    redaction = redact_folder(parsed.folder, parsed.target, TokenRedaction(parsed.tokens))
    print(f"redacted   {redaction.num_written} passes to {parsed.target}, tokens: {parsed.tokens}")
    if redaction.blanked:
        print(f"blanked    {', '.join(sorted(redaction.blanked))}")
    return _print_refused(redaction.refused)


def _pack(parsed: argparse.Namespace) -> int:
    from capture.folder_tools.pack import pack_folder

    max_bytes = _parse_size("--max-bytes", parsed.max_bytes)
    packed = pack_folder(parsed.folder, parsed.target, max_bytes=max_bytes)
    print(f"packed     {packed.num_passes} passes in {packed.path}, {packed.num_bytes:,} bytes")
    if packed.left_out is not None:
        limit = f"more than {max_bytes:,} bytes"
        print(f"excluded   {packed.num_left_out} passes, from {packed.left_out} on: {limit}")
    print("           it holds what was captured; to take the text out first: capture redact")
    return 0


def _parse_size(flag: str, typed: str | int) -> int:
    from capture.record.retention import parse_num_bytes

    try:
        return parse_num_bytes(flag, typed)
    except ValueError as error:
        raise CaptureError(str(error)) from None


def _print_refused(refused: Mapping[str, CaptureError]) -> int:
    """Print each refusal, and return the exit code."""
    for error in refused.values():
        print(f"refused    {spell_in_flags(error)}")
    return 1 if refused else 0
