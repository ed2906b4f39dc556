"""Files of texts as captures: what arrives, and what is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actor_init.spec import UsageError
from capture.file_format.actor_config import read_actor_config
from capture.file_format.capture_file import read_micro_batch
from capture.file_format.listing import capture_files
from replay.commands.suite.inputs import prepare_inputs, write_texts
from replay.commands.suite.plan import SuiteSpec
from replay.options.spec import LossName
from tests.helpers.machine import lack_package

WORDS = {"<unk>": 0, "one": 1, "two": 2, "three": 3}
CONFIG = {"model_type": "llama", "vocab_size": 4, "num_hidden_layers": 1}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model folder with a tokenizer of three words."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "inputs"
    folder.mkdir()
    return folder


def jsonl(folder: Path, *rows: Any) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def texts(*words: str) -> list[dict[str, str]]:
    return [{"text": text} for text in words]


def test_each_text_is_a_training_pass_whose_labels_are_its_tokens(tmp_path: Path, target: Path, model: str) -> None:
    dataset = jsonl(tmp_path, *texts("two one", "one", "three two one four"), "", *texts("one one", "never read"))
    written = write_texts(dataset, model, target, 3, max_length=3)
    assert (written.num_texts, written.num_cut, written.num_left_out) == (3, 1, 1)
    batches = [read_micro_batch(path) for path in capture_files(target)]
    assert [batch.sequences_BS.tolist() for batch in batches] == [[[2, 1]], [[3, 2, 1]], [[1, 1]]]
    for batch in batches:
        assert batch.trains
        assert batch.labels_BS is not None
        assert batch.labels_BS.equal(batch.sequences_BS)
        assert batch.attention_mask_BS.all()
    assert read_actor_config(target) == CONFIG


def test_a_suite_trains_on_texts_with_the_sft_loss(tmp_path: Path, model: str) -> None:
    dataset = jsonl(tmp_path, *texts("one two", "two one", "two two"))
    made = prepare_inputs(SuiteSpec(dataset=dataset, model=model, max_samples=2), tmp_path / "made" / "inputs", 1)
    assert (made.num_inputs, made.loss) == (2, LossName.SFT)
    assert len(capture_files(tmp_path / "made" / "inputs")) == 2


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"prompt": "a", "answer": "b"}], "has no column text in line 1: the columns are prompt, answer. Try: "),
        ([{"text": "one two"}, {}], "has no column text in line 2: there is no column."),
        ([{"text": 3}], ": text in line 1 is a int. Give a string"),
        (["{"], ": line 1 is not JSON"),
        (["[1]"], ": line 1 is no object. Give lines as "),
        ([{"text": "one"}], " holds no text of two tokens or more."),
        ([], " holds no text of two tokens or more."),
    ],
)
def test_a_file_without_texts_is_refused(tmp_path: Path, target: Path, model: str, rows: list[Any], says: str) -> None:
    with pytest.raises(UsageError) as refusal:
        write_texts(jsonl(tmp_path, *rows), model, target, 8)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (None, "no --model is given"),
        ("llama-3.1-8b", "--model llama-3.1-8b is no model folder"),
        ("bare", "bare holds none"),
    ],
)
def test_texts_need_a_model_with_a_tokenizer(tmp_path: Path, target: Path, named: str | None, says: str) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(CONFIG))
    model = str(tmp_path / "bare") if named == "bare" else named
    with pytest.raises(UsageError) as refusal:
        write_texts(jsonl(tmp_path, *texts("one two")), model, target, 8)
    assert says in str(refusal.value)
    assert "Try: --model FOLDER with config.json and tokenizer.json" in str(refusal.value)


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, target: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lack_package("pyarrow", monkeypatch)
    with pytest.raises(UsageError, match=r"needs pyarrow. Try: pip install 'micro-replay\[parquet\]', or a"):
        write_texts(tmp_path / "texts.parquet", model, target, 8)


def test_parquet_is_read_by_its_column(tmp_path: Path, target: Path, model: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    dataset = tmp_path / "texts.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["one two", "two one three"]}), dataset)
    assert write_texts(dataset, model, target, 8).num_texts == 2
    assert [read_micro_batch(path).sequences_BS.tolist() for path in capture_files(target)] == [[[1, 2]], [[2, 1, 3]]]
    parquet.write_table(pyarrow.table({"id": [1], "prompt": ["a"]}), dataset)
    with pytest.raises(UsageError, match="has no column text: the columns are id, prompt"):
        write_texts(dataset, model, target, 8)
    dataset.write_text("no parquet")
    with pytest.raises(UsageError, match="is not parquet"):
        write_texts(dataset, model, target, 8)
