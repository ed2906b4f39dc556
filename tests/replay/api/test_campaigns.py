"""What commands of many replays refuse from Python, in Python's words, and before anything heavy is imported."""

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replay
from tests.helpers.machine import lack_package


@pytest.mark.parametrize(
    ("function", "options", "says"),
    [
        (replay.scan, {"group": 0}, "group=0 is not allowed. Give a whole number of at least 1"),
        (replay.scan, {"group": 2.5}, "group 2.5 is not allowed. Give a whole number of at least 1"),
        (replay.scan, {"run_limit": True}, "run_limit True is not allowed. Give a number of at least 1"),
        (replay.scan, {"group": np.int64(0)}, "group=0 is not allowed. Give a whole number of at least 1"),
        (replay.scan, {"address": 3}, "address 3 is not allowed. Give a name"),
        (replay.scan, {"json": True}, "replay.scan has no option json. "),
        (replay.scan, {"continue_": 3}, "continue_ 3 is not allowed. Give a path"),
        (replay.minimise, {"redact": 1}, "redact 1 is not allowed. Give True or False"),
        (replay.parity, {"python": "bin/python"}, "python 'bin/python' is not allowed. Give a list"),
        (replay.parity, {"python": [3]}, "python 3 is not allowed. Give a name"),
        (replay.recompiles, {"buckets": np.int64(0)}, "buckets '0' is not allowed. Give how many, or several lengths"),
        (replay.recompiles, {"policies": "none"}, "policies 'none' is not allowed. Give some of off, automatic"),
        (replay.scan, {"step": True}, "replay.scan has no option step. "),
        (replay.scan, {"max_input": 3}, "replay.scan has no option max_input. Did you mean max_inputs?"),
        (replay.scan, {"max_inputs": 0}, "max_inputs=0 is not allowed. Give a whole number of at least 1"),
        (replay.scan, {"launcher": "slurm"}, "launcher 'slurm' is not allowed. Give one of ray"),
        (replay.scan, {"address": "auto"}, "address is for a Ray cluster. Try: launcher='ray', address='auto'"),
        (replay.scan, {"inputs": "nowhere"}, "inputs='nowhere': no such folder."),
        (replay.scan, {"continue_": "nowhere"}, "continue_='nowhere' holds no scan.json. Give a folder that `replay"),
        (replay.scan, {"continue_": Path("x"), "tp": 2}, "continue_ takes its options from that folder. Leave out tp"),
        (replay.parity, {"continue_": "x", "matrix": "quick"}, "continue_ takes its options from that folder. Leave"),
        (replay.parity, {"model": "nowhere/at/all"}, "model='nowhere/at/all'"),
        (replay.worst, {"measured": 0}, "measured=0 is not allowed. Give a whole number of at least 1"),
        (replay.worst, {"predict": ["tp=x"]}, "predict='tp=x': 'tp=x' is not allowed. Give each of num-layers"),
        (replay.recompiles, {"policies": ["none"]}, "policies 'none' is not allowed. Give some of off, automatic"),
        (replay.recompiles, {"buckets": 0}, "buckets '0' is not allowed. Give how many, or several lengths. Try: buck"),
        (replay.minimise, {"cell": "x"}, "parity and cell go together. Try: parity='logs/TIME-parity', cell='NAME'"),
        (replay.minimise, {"cell": "x", "parity": "y", "tp": 2}, "cell='x' has its options from y. Leave out tp"),
        (replay.suite, {"only": ["zero"]}, "only='zero' is no configuration. Give one of ddp"),
        (replay.suite, {"dtype": "int8"}, "dtype 'int8' is not allowed. Give one of "),
        (replay.suite, {"steps": 1}, "steps=1 is not allowed. Give a whole number of at least 2"),
        (replay.suite, {"continue_": "x", "steps": 3}, "continue_ takes its options from the suite that was begun. "),
        (replay.suite, {"save_every": 3}, "save_every is for the states of save_state. Try: save_state, save_every=3"),
        (replay.diagnose, {"steps": 0}, "steps=0 is not allowed. Give a whole number of at least 1"),
        (replay.diagnose, {"learning_rate": -1}, "learning_rate=-1.0 is not allowed. Give a number of at least 0"),
        (replay.diagnose, {"grad_accumulation": 2}, "replay.diagnose has no option grad_accumulation. "),
        (replay.diagnose, {"loss": "policy"}, "diagnose learns its inputs, so loss='policy' is not for it. Try: loss="),
        (replay.diagnose, {"processes": 3, "tp": 2}, "processes=3 is not allowed. Give a multiple of tp x ring"),
        (replay.diagnose, {"inputs": "nowhere"}, "inputs='nowhere': no such folder."),
        (replay.mismatch, {"dtypes": "fp8"}, "dtypes 'fp8' is not allowed. Give some of bf16, fp32, fp16"),
        (replay.mismatch, {"dtypes": 3}, "dtypes '3' is not allowed. Give some of bf16, fp32, fp16"),
        (replay.mismatch, {"attention_kernels": ["none"]}, "attention_kernels 'none' is not allowed. Give some of"),
        (replay.mismatch, {"dtype": "bf16"}, "replay.mismatch takes no dtype. Give a list: dtypes=[...]"),
        (replay.mismatch, {"worst": 2.5}, "worst 2.5 is not allowed. Give a whole number of at least 0"),
        (replay.mismatch, {"inputs": "nowhere"}, "inputs='nowhere': no such folder."),
    ],
)
def test_a_wrong_option_is_refused_in_python_s_words(
    function: Callable[..., Any], options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(replay.UsageError) as refusal:
        function(**options)
    assert str(refusal.value).startswith(says)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def daemonic() -> Iterator[None]:
    """Mark this process as a worker of multiprocessing.Pool is marked."""
    multiprocessing.current_process().daemon = True
    yield
    multiprocessing.current_process().daemon = False


@pytest.mark.usefixtures("daemonic")
@pytest.mark.parametrize("function", [replay.run, replay.scan])
def test_a_daemonic_process_may_start_none(function: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(replay.UsageError, match=r"this one is daemonic, as workers of multiprocessing\.Pool are"):
        function(log_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_of_several_processes_may_not_start_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    lack_package("torch", monkeypatch)
    with pytest.raises(replay.UsageError, match=r"replay\.scan starts its own processes, and this one is rank 1 of 2"):
        replay.scan()
