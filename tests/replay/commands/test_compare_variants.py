"""`replay compare LOG VARIANT`: what a variant's word means, which pass is replayed, and a fault of code found so."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from actor_init.spec import Attention, UsageError
from capture import recording
from replay.command_line import cli
from replay.commands.compare.command import is_variant
from replay.commands.compare.variants import make_traced_spec, make_variant
from replay.options.option_parsing import build_replay_spec
from replay.options.spec import WindowWeights
from replay.runlog.run_file import RunFile
from replay.runner.result import Run
from replay.verdict.outcomes import Outcome, PassVerdict
from tests.helpers.made_logs import VERDICT, passed, write_log
from tests.trainers.common import make_batches, make_model

SPEC = build_replay_spec({"model": "checkpoint", "inputs": "captures"})
BUILD = """
from transformers import AutoConfig, AutoModelForCausalLM

def build(config):
    settings = dict(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    model.model.layers[1].mlp.register_forward_hook(lambda module, arguments, output: output * 1.05)
    return model
"""


@pytest.mark.parametrize("word", ["stock", "mine.py:build", "attention=eager", "python=/other/bin/python"])
def test_words_that_mean_a_variant(word: str) -> None:
    assert is_variant(word)


def test_a_log_is_no_variant(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    assert not is_variant(str(folder))
    assert not is_variant("logs/20261125-101500")


def test_a_function_takes_the_weights_of_the_logs_model() -> None:
    actor = make_variant(SPEC, "mine.py:build").spec.actor
    assert (actor.model, actor.weights) == ("mine.py:build", Path("checkpoint"))
    stock = make_variant(make_variant(SPEC, "mine.py:build").spec, "stock").spec.actor
    assert (stock.model, stock.weights) == ("checkpoint", None)


def test_an_option_takes_a_value() -> None:
    assert make_variant(SPEC, "attention=eager").spec.actor.attention == Attention.EAGER
    assert make_variant(SPEC, "window=mean-of-means").spec.measure.window is WindowWeights.MEAN_OF_MEANS
    assert make_variant(SPEC, "python=/x/python").python == "/x/python"


@pytest.mark.parametrize(
    ("word", "words"), [("atention=eager", "is no variant"), ("attention=", "not allowed"), ("stock", "already")]
)
def test_what_means_nothing_is_refused(word: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_variant(SPEC, word)


@pytest.mark.parametrize(
    ("index", "first_index", "picked"), [(3, None, "3"), (3, 2, "2,3"), (1, 0, "0,1"), (None, None, "0")]
)
def test_the_first_wrong_pass_is_replayed_with_its_window(
    tmp_path: Path, index: int | None, first_index: int | None, picked: str
) -> None:
    norms = [None, 4.0, None, 4.0]
    records = [passed(number, f"p{number}", norm=norm) for number, norm in enumerate(norms)]
    first = None
    if index is not None:
        first = PassVerdict(
            index=index,
            source="a",
            rank=0,
            outcome=Outcome.DIFFERS,
            reason=None,
            findings=[],
            first_index=first_index,
        )
    file = RunFile.read(write_log(tmp_path / "run", records))
    assert file.end is not None
    verdict = replace(VERDICT, first=first)
    run = Run(
        folder=tmp_path / "run", file=replace(file, end=replace(file.end, verdict=verdict.to_dict())), records=records
    )
    spec = make_traced_spec(SPEC, run)
    assert spec.inputs.pick_inputs == picked
    assert (spec.measure.trace, spec.measure.trials) == (True, False)
    # Numbers of inputs that were picked before are those of the recording.
    again = make_traced_spec(replace(SPEC, inputs=replace(SPEC.inputs, pick_inputs="7,6,5,4")), run)
    assert again.inputs.pick_inputs == ",".join("7654"[int(number)] for number in picked.split(","))


def test_a_fault_of_code_is_found_in_its_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job scales an MLP's output. The replay of stock code differs, and leads to the layer by one command."""
    model: nn.Module = make_model(tmp_path, saves=False)
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    model.model.layers[1].mlp.register_forward_hook(lambda module, arguments, output: output * 1.05)  # type: ignore
    with recording(model, tmp_path / "captures", reproduce=True):
        for batch in make_batches()[:1]:
            torch.autograd.backward(model(**batch).loss)
    (tmp_path / "mine.py").write_text(BUILD)
    monkeypatch.chdir(tmp_path)
    cli.main(["--inputs", "captures", "--model", "model", "--loss", "sft", "--dtype", "fp32", "--backend", "fsdp2"])
    printed = capsys.readouterr().out
    assert "verdict    DIFFERS: " in printed
    [command] = re.findall(r"^layer +replay (compare \S+ )FILE.py:FUNCTION", printed, re.MULTILINE)
    assert cli.main([*command.split(), "mine.py:build"]) == 0
    printed = capsys.readouterr().out
    assert "other work B: the model is mine.py:build" in printed
    assert re.search(r"^first diff B: forward, model\.layers\.1 output", printed, re.MULTILINE), printed
