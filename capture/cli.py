"""`capture check | convert | redact | pack`: what can be done to a folder of captures without a model."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from capture.micro_batch import CaptureError

DEFAULT_MAX_BYTES = 25 * 2**20  # what an issue on GitHub takes as an attachment


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was typed and return its exit code: 0 all well, 1 damaged or refused files, 2 wrong usage."""
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.action(parsed))
    except (CaptureError, OSError) as error:
        print(f"capture: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="capture", description="Folders of captured micro-batches.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, action: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(action=action)
        added.add_argument("folder", type=Path, help="Folder of captures.")
        return added

    command("check", _check, "Read every file and hold it against the manifests.")
    convert = command("convert", _convert, "Write older dumps again as format 1.")
    convert.add_argument("target", type=Path, help="A new folder.")
    redact = command("redact", _redact, "Write the folder again without its text.")
    redact.add_argument("target", type=Path, help="A new folder.")
    redact.add_argument(
        "--tokens", choices=["permute", "zero"], default="permute", help="What becomes of token ids (default: permute)."
    )
    pack = command("pack", _pack, "Put the folder into one zip file.")
    pack.add_argument("target", type=Path, help="The zip file.")
    pack.add_argument(
        "--max-bytes", type=int, default=DEFAULT_MAX_BYTES, help="Its largest size (default: %(default)s)."
    )
    return parser


def _check(parsed: argparse.Namespace) -> int:
    from capture.manifest import check_folder

    found = check_folder(parsed.folder)
    print(f"good       {len(found.good)} files")
    if found.uncommitted:
        reason = "no manifest" if not found.num_manifests else "in no manifest"
        print(f"           {len(found.uncommitted)} of them {reason}: their recording was cut short, or is older")
    for reason in found.damaged.values():
        print(f"damaged    {reason}")
    for name in found.missing:
        print(f"missing    {name}")
    return 0 if found.is_whole else 1


def _convert(parsed: argparse.Namespace) -> int:
    from capture.convert import convert_folder

    done = convert_folder(parsed.folder, parsed.target)
    share = done.num_bytes_after / done.num_bytes_before if done.num_bytes_before else 0
    print(
        f"converted  {len(done.written)} files to {parsed.target}, {share:.0%} of their size, each read back and equal"
    )
    return _refused(done.refused)


def _redact(parsed: argparse.Namespace) -> int:
    from capture.redact import Tokens, redact_folder

    done = redact_folder(parsed.folder, parsed.target, Tokens(parsed.tokens))
    print(f"redacted   {len(done.written)} files to {parsed.target}, tokens: {parsed.tokens}")
    if done.blanked:
        print(f"blanked    {', '.join(sorted(done.blanked))}")
    return _refused(done.refused)


def _pack(parsed: argparse.Namespace) -> int:
    from capture.pack import pack_folder

    done = pack_folder(parsed.folder, parsed.target, max_bytes=parsed.max_bytes)
    print(f"packed     {done.num_files} files in {done.path}, {done.num_bytes:,} bytes")
    if done.left_out:
        print(
            f"left out   {len(done.left_out)} files, from {done.left_out[0]} on: more than {parsed.max_bytes:,} bytes"
        )
    print("           it holds what was captured; to take the text out first: capture redact")
    return 0


def _refused(refused: dict[str, str]) -> int:
    for reason in refused.values():
        print(f"refused    {reason}")
    return 1 if refused else 0
