"""Give every file its model and the reference that holds it."""

from pathlib import Path

import pytest

from tests.helpers.contract import save_model
from tests.helpers.reference import Reference


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Reference:
    return Reference(model_folder)
