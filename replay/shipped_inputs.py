"""Find the captures that ship with the project, in a checkout or an installed package."""

from pathlib import Path


def default_folder() -> Path:
    """Return the folder of the sample inputs that ship with the project."""
    return _shipped("sample")


def edge_folder(name: str) -> Path:
    """Return one of the folders of edge shapes that ship with the project."""
    return _shipped("edges") / name


def _shipped(name: str) -> Path:
    # In a checkout it is a link to inputs/, and resolved, so that the header names the folder that people know.
    return (Path(__file__).parent / name).resolve()
