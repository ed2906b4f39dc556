"""What a job imports has the names of its Python, docstrings begin plainly, words are compared by value."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("capture", "actor_init", "replay", "tests", "benchmarks", "examples", "deploy")


@pytest.mark.slow
def test_what_a_job_imports_knows_no_name_that_its_python_lacks(tmp_path: Path) -> None:
    """mypy with Python 3.10's standard library, and nothing but names: the job's torch is another one anyway."""
    settings = "[mypy]\nfollow_imports = skip\nignore_missing_imports = true\ndisable_error_code = misc, union-attr\n"
    (tmp_path / "mypy.ini").write_text(settings)
    files = [*map(str, (ROOT / "capture").rglob("*.py")), "replay/command_line/entry.py", "replay/__main__.py"]
    command = ["mypy", "--python-version", "3.10", "--config-file", str(tmp_path / "mypy.ini"), "--no-incremental"]
    done = subprocess.run(
        [sys.executable, "-m", *command, *files], cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_docstring_begins_with_of() -> None:
    """A docstring's first line says what the thing is or does, in a whole sentence."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    # To parse all files takes six seconds.
    offenders = [
        f"{path.relative_to(ROOT)}:{line}: {first_line}"
        for path in files
        if '"""Of ' in (text := path.read_text(encoding="utf-8"))
        for line, first_line in first_lines_of_docstrings(ast.parse(text))
        if first_line.startswith("Of ")
    ]
    assert not offenders, "docstrings that begin with 'Of ':\n" + "\n".join(offenders)


def first_lines_of_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring.splitlines()[0]


def test_words_of_attention_are_compared_by_value() -> None:
    """A word that was typed or read is text; `is` with a member of the enumeration would be False for it."""
    offenders = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for folder in ("actor_init", "replay")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "Attention." in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Compare)
        and any(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops)
        and "Attention." in ast.unparse(node)
    ]
    assert not offenders, "compare with == and !=:\n" + "\n".join(offenders)
