"""mkdocs calls these hooks: README and the other pages outside of docs/ are pages of the site, too."""

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "results.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that lead from a file of the repository to another one lead from page to page."""
    names = {name: path for path, name in OUTSIDE.items()}
    folder = PurePosixPath(names.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def rewrite(link: re.Match[str]) -> str:
        path = (ROOT / folder / link[1]).resolve().relative_to(ROOT).as_posix()
        return f"]({OUTSIDE.get(path, path.removeprefix('docs/'))}"

    return re.sub(r"\]\((?!https?:|#)([^)#\s]+)", rewrite, markdown)
