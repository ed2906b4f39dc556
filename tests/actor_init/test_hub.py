"""A model or an adapter may be named by its id on the Hub; where nobody has it, one line says what was tried."""

import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from actor_init import hub
from actor_init.spec import UsageError
from capture.facts import Setting

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache with one model, on a machine without a network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    home = tmp_path / "models--someone--small"
    snapshot = home / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_an_id_is_found_in_the_cache(cache: Path) -> None:
    assert hub.find_folder(Setting("model", "someone/small")) == cache


def test_what_neither_has_is_refused_with_what_was_tried(cache: Path) -> None:
    with pytest.raises(UsageError) as refusal:
        hub.find_folder(Setting("model", "someone/other"))
    text = str(refusal.value)
    assert "model='someone/other': not a folder here, not in the cache " in text
    assert constants.ENDPOINT in text
    assert "\n" not in text


def test_a_path_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("checkpoints")
    for typed in ("checkpoints/step-0", "nowhere/config.json", "llama-9", "a/b/c", "/a/b"):
        assert not hub.names_hub(typed)
        assert hub.find_folder(Setting("model", typed)) == Path(typed)
    assert hub.names_hub("Qwen/Qwen3-0.6B")
