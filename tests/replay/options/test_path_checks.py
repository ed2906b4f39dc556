"""Files and folders that are not there are refused, and so are folders without a model."""

from pathlib import Path

import pytest

from actor_init.spec import UsageError
from replay.options.option_parsing import format_error_with_flags
from replay.options.path_checks import check_paths
from replay.options.spec import find_sample_folder
from tests.helpers.typed import spec_of

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--inputs nowhere", "--inputs nowhere: no such folder."),
        ("--model nowhere", "--model nowhere: no such file or folder: nowhere. Allowed: llama-3.1-8b, a folder with"),
        ("--model docs", "--model docs holds no config.json. Allowed: llama-3.1-8b, "),
        ("--model nowhere.py:build", "--model nowhere.py:build: no such file or folder: nowhere.py. "),
        (
            "--adapter nowhere",
            "--adapter nowhere: no such file or folder: nowhere. Give a folder with adapter_config.json",
        ),
        ("--adapter docs", "--adapter docs holds no adapter_config.json. Give a folder with adapter_config.json"),
        ("--loss nowhere.py:loss", "--loss nowhere.py:loss: no such file or folder: nowhere.py. "),
        ("--optimizer nowhere.py:make", "--optimizer nowhere.py:make: no such file or folder: nowhere.py. "),
        ("--deepspeed-config nowhere", "--deepspeed-config nowhere: no such file or folder: nowhere. "),
        (
            "--load-state nowhere",
            "--load-state nowhere: no such file or folder: nowhere. Give a folder that --save-state wrote",
        ),
        ("--optimizer-state nowhere", "--optimizer-state nowhere: no such file or folder: nowhere. "),
    ],
)
def test_what_is_not_there_is_refused(typed: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UsageError) as refusal:
        check_paths(spec_of(typed.split()))
    assert format_error_with_flags(refusal.value).startswith(says)


def test_a_preset_a_recording_and_no_adapter_are_there() -> None:
    for typed in ("--model llama-3.1-8b", f"--model {find_sample_folder()}", "--adapter none"):
        check_paths(spec_of(typed.split()))
