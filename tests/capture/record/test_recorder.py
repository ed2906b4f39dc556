"""The recorder in a training job: it keeps what went in, and the job never notices it, whatever happens to the disk."""

import copy
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import capture.record.rank_writer
import capture.record.recorder
from capture import CaptureError, capture_files, read_actor_config, read_micro_batch, recording
from capture.file_format.atomic_write import write_atomically
from capture.file_format.end_record import count_not_recorded
from capture.record.background_writer import BackgroundWriter
from capture.record.host_copy import ArgumentCopier
from capture.record.pass_store import SkippedPasses
from tests.helpers.full_disk import full_disk
from tests.warm import warm_bin

IDS_BS = torch.tensor([[0, 5, 9, 7], [3, 3, 0, 0]])
MASK_BS = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
ROOT = Path(capture.record.recorder.__file__).resolve().parents[2]


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


class TinyConfig:
    _name_or_path = "tiny"

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "tiny", "dtype": torch.float32, "id2label": {0: "a"}, **self.settings}


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = TinyConfig()
        self.embedding = nn.Embedding(16, 4)
        self.head = nn.Linear(4, 16)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **facts: Any
    ) -> Tensor:
        if facts.get("asks_itself"):
            self(input_ids)
        logits_BSV: Tensor = self.head(self.embedding(input_ids))
        return logits_BSV


class Wrapper(nn.Module):
    """Names no argument, as DDP's and DeepSpeed's forward do not."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


class SlowDisk:
    """Takes the first pass and holds it until `freed`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.freed = threading.Event(), threading.Event()
        monkeypatch.setattr(capture.record.rank_writer, "write_atomically", self.write)

    def write(self, *args: Any) -> None:
        self.entered.set()
        assert self.freed.wait(60)
        write_atomically(*args)


def train(model: nn.Module, num_steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(num_steps):
        loss = model((IDS_BS + step) % 16, attention_mask=MASK_BS).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapper, lambda model: Wrapper(Wrapper(model))])
@pytest.mark.parametrize("num_positionals", [0, 1, 3])
def test_arguments_are_kept_under_the_names_of_the_models_forward(
    wrap: Any, num_positionals: int, tmp_path: Path
) -> None:
    arguments = {"input_ids": IDS_BS, "attention_mask": MASK_BS, "labels": IDS_BS}
    positionals = list(arguments.values())[:num_positionals]
    keywords = dict(list(arguments.items())[num_positionals:])
    model = wrap(TinyModel())
    with recording(model, tmp_path) as recorder:
        model(*positionals, **keywords, position_ids=IDS_BS, use_cache=False, scale=0.5, nothing=None)
    assert (recorder.num_seen, recorder.num_written, recorder.num_dropped, recorder.failure) == (1, 1, 0, None)
    (path,) = capture_files(tmp_path)
    batch = read_micro_batch(path)
    assert torch.equal(batch.sequences_BS, IDS_BS)
    assert torch.equal(batch.attention_mask_BS, MASK_BS.bool())
    assert batch.labels_BS is not None
    assert torch.equal(batch.labels_BS, IDS_BS)
    assert torch.equal(batch.extra_tensors["position_ids"], IDS_BS)
    assert batch.call_facts == {"use_cache": False, "scale": 0.5, "nothing": None}
    assert batch.left_out == {}


@pytest.mark.usefixtures("no_process_group")
def test_the_origin_says_where_and_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    model = TinyModel()
    with recording(model, tmp_path):
        train(model, num_steps=3)
    origins = [read_micro_batch(path).origin for path in capture_files(tmp_path)]
    assert [origin.step for origin in origins] == [0, 1, 2]
    assert {(origin.rank, origin.world_size, origin.model_name) for origin in origins} == {(3, 8, "tiny")}
    assert origins == sorted(origins, key=lambda origin: str(origin.time))
    assert all(origin.source.startswith("actor_inputs_rank3_") for origin in origins)
    assert origins[0].versions["torch"] == torch.__version__


def test_a_pass_without_autograd_is_marked(tmp_path: Path) -> None:
    model = TinyModel()
    with recording(model, tmp_path):
        model(IDS_BS)
        with torch.no_grad():
            model(IDS_BS)
        with torch.inference_mode():
            model(IDS_BS)
    assert [read_micro_batch(path).trains for path in capture_files(tmp_path)] == [True, False, False]


def test_later_changes_of_the_job_do_not_reach_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, model, ids_BS, lengths = SlowDisk(monkeypatch), TinyModel(), IDS_BS.clone(), [4, 2]
    with recording(model, tmp_path):
        model(ids_BS, lengths=lengths)
        ids_BS.zero_()
        lengths.clear()
        disk.freed.set()
    batch = read_micro_batch(capture_files(tmp_path)[0])
    assert torch.equal(batch.sequences_BS, IDS_BS)
    assert batch.call_facts == {"lengths": [4, 2]}


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_copied_as_the_forward_saw_them(tmp_path: Path) -> None:
    """The GPU is kept busy, so that the job's next change is queued long before the copy has happened."""
    model, ids_BS = TinyModel().cuda(), IDS_BS.cuda()
    busy = torch.randn(8192, 8192, device="cuda")
    noise = torch.randn(2, 4, device="cuda").bfloat16()
    expected = noise.cpu()
    with recording(model, tmp_path) as recorder:
        for _ in range(20):
            busy = busy @ busy
        model(ids_BS, noise=noise, transposed=noise.T)
        ids_BS.zero_()
        noise.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(ids_BS)
    assert (recorder.num_written, recorder.num_skipped, recorder.failure) == (1, 1, None)
    batch = read_micro_batch(capture_files(tmp_path)[0])
    assert torch.equal(batch.sequences_BS, IDS_BS)
    assert torch.equal(batch.extra_tensors["noise"], expected)
    assert torch.equal(batch.extra_tensors["transposed"], expected.T)


def test_tensors_in_containers_are_kept_and_objects_are_named_as_left_out(tmp_path: Path) -> None:
    model = TinyModel()
    angles = torch.randn(2, 4, requires_grad=True)
    with recording(model, tmp_path):
        model(IDS_BS, position_embeddings=(angles, angles + 1), device=torch.device("cpu"), sparse=MASK_BS.to_sparse())
    batch = read_micro_batch(capture_files(tmp_path)[0])
    assert torch.equal(batch.extra_tensors["position_embeddings.0"], angles.detach())
    assert torch.equal(batch.extra_tensors["position_embeddings.1"], angles.detach() + 1)
    assert batch.left_out == {"device": "torch.device", "sparse": "torch.Tensor"}


def test_a_forward_inside_the_models_own_forward_is_part_of_it(tmp_path: Path) -> None:
    model = TinyModel()
    with recording(model, tmp_path) as recorder:
        model(IDS_BS, asks_itself=True)
        with pytest.raises(IndexError):
            # A forward that failed must not count as still running.
            model(IDS_BS + 100)
        model(IDS_BS)
    assert (recorder.num_seen, recorder.num_written) == (3, 3)


def test_steps_of_generation_with_a_cache_are_skipped_and_counted(tmp_path: Path) -> None:
    model = TinyModel()
    with recording(model, tmp_path) as recorder:
        model(IDS_BS, past_key_values=None)
        model(IDS_BS[:, -1:], past_key_values=((IDS_BS, IDS_BS),))
    assert (recorder.num_seen, recorder.num_written, recorder.num_skipped, recorder.num_dropped) == (2, 1, 1, 0)
    assert recorder.not_recorded == {"given a cache of earlier tokens": 1}


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=["seen at once", "seen on the host"])
def test_a_mask_of_pairs_of_tokens_is_said_once_and_counted(dtype: torch.dtype, tmp_path: Path) -> None:
    model = TinyModel()
    mask = torch.ones(len(IDS_BS), 1, IDS_BS.shape[1], IDS_BS.shape[1], dtype=dtype)
    with warnings.catch_warnings(record=True) as warned, recording(model, tmp_path) as recorder:
        warnings.simplefilter("always")
        for _ in range(2):
            model(IDS_BS, attention_mask=mask)
        with torch.no_grad():
            model(IDS_BS, attention_mask=mask)
    [said] = [str(warning.message) for warning in warned if "capture: " in str(warning.message)]
    assert "a training pass is not recorded, given an attention mask of pairs of tokens" in said
    assert (recorder.num_skipped, recorder.num_dropped) == (3, 0)
    assert recorder.not_recorded == {"given an attention mask of pairs of tokens": 2}
    assert count_not_recorded(tmp_path) == {"given an attention mask of pairs of tokens": 2}


def test_a_mask_of_pairs_as_bool_is_not_recorded_of_eager_attention(tmp_path: Path) -> None:
    model: Any = TinyModel()
    model.config._attn_implementation = "eager"
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    with pytest.warns(RuntimeWarning, match="which eager attention adds"), recording(model, tmp_path) as recorder:
        model(IDS_BS, attention_mask=mask)
    with recording(model, tmp_path / "added") as other:
        model(IDS_BS, attention_mask=torch.zeros(2, 1, 4, 4).masked_fill(~mask, -torch.inf))
    assert (recorder.num_written, other.num_written) == (0, 1)


def test_a_mask_of_pairs_that_no_memory_is_left_for_ends_no_recording(
    monkeypatch: pytest.MonkeyPatch, caught: list[warnings.WarningMessage], tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(capture.record.snapshot, "read_pair_mask", fail)
    model = TinyModel()
    with recording(model, tmp_path) as recorder:
        model(IDS_BS, attention_mask=torch.ones(2, 1, 4, 4, dtype=torch.bool).tril())
        model(IDS_BS)
    assert (recorder.num_written, recorder.num_skipped, recorder.failure) == (1, 1, None)
    assert "mask of pairs" in str(caught[0].message)


def test_a_causal_mask_of_pairs_is_recorded_as_the_mask_of_the_tokens(tmp_path: Path) -> None:
    model = TinyModel()
    real_BS = torch.tensor([[True, True, True, False], [True, True, True, True]])
    causal_BSS = torch.ones(4, 4, dtype=torch.bool).tril() & real_BS[:, None]
    with recording(model, tmp_path) as recorder:
        model(IDS_BS, attention_mask=causal_BSS[:, None])
    assert (recorder.num_written, recorder.num_skipped, count_not_recorded(tmp_path)) == (1, 0, {})
    [file] = capture_files(tmp_path)
    assert torch.equal(read_micro_batch(file).attention_mask_BS, real_BS)


class EmptyCache:
    def get_seq_length(self) -> int:
        return 0


def test_training_passes_are_counted_by_the_reason_and_others_together(caught: list[warnings.WarningMessage]) -> None:
    skipped = SkippedPasses()
    for reason, trains in (("a", False), ("a", True), ("b", True), ("a", False), ("a", True)):
        skipped.add(reason, trains=trains)
    assert (skipped.count, skipped.by_reason) == (5, {"a": 2, "b": 1})
    assert [str(warning.message).split(". ")[0] for warning in caught] == [
        "capture: a training pass is not recorded, a",
        "capture: a training pass is not recorded, b",
    ]


def test_with_an_empty_cache_a_training_pass_is_kept_and_a_generation_is_not(tmp_path: Path) -> None:
    model = TinyModel()
    with recording(model, tmp_path) as recorder:
        model(IDS_BS, past_key_values=EmptyCache())
        with torch.no_grad():
            model(IDS_BS, past_key_values=EmptyCache())
    assert (recorder.num_written, recorder.num_skipped, recorder.not_recorded) == (1, 1, {})
    [path] = capture_files(tmp_path)
    batch = read_micro_batch(path)
    assert (batch.trains, batch.left_out) == (
        True,
        {"past_key_values": "tests.capture.record.test_recorder.EmptyCache"},
    )
    # A pass without autograd is no missing part of the training.
    assert not list(tmp_path.glob("end_rank*.json"))


def test_nothing_of_the_recorder_stays_on_the_model(tmp_path: Path) -> None:
    model = TinyModel()
    recorder = recording(model, tmp_path)
    model(IDS_BS)
    recorder.close()
    recorder.close()
    model(IDS_BS)
    assert recorder.num_seen == 1
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not [thread for thread in threading.enumerate() if thread.name == "capture-writer"]


def test_a_copy_of_the_model_is_another_model(tmp_path: Path) -> None:
    """As a frozen reference, an average of the weights, or a file of the whole module is made inside a job."""
    model = TinyModel()
    with recording(model, tmp_path) as recorder:
        model(IDS_BS)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(copied(IDS_BS), model(IDS_BS))
            with pytest.raises(IndexError):
                copied(IDS_BS + 100)
    assert (recorder.num_seen, recorder.num_written, recorder.failure) == (3, 3, None)


def test_the_config_lies_beside_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    model = Wrapper(TinyModel())
    with recording(model, folder):
        model(IDS_BS)
    assert read_actor_config(folder) == {"model_type": "tiny", "dtype": "torch.float32", "id2label": {"0": "a"}}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "actor.json").stat().st_mode & 0o777 == 0o600


def test_one_folder_holds_one_models_captures(tmp_path: Path) -> None:
    model, other = TinyModel(), TinyModel()
    other.config = TinyConfig(num_layers=3)
    for _ in range(2):
        with recording(model, tmp_path):
            model(IDS_BS)
    with pytest.warns(RuntimeWarning, match="a model with another config"), recording(other, tmp_path) as recorder:
        other(IDS_BS)
    assert isinstance(recorder.failure, CaptureError)
    assert len(capture_files(tmp_path)) == 2


def run_out_of_memory(*_: Any) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    "fault", ["full disk", "folder removed", "folder is a file", "arguments that cannot be copied"]
)
def test_a_failure_is_one_warning_and_a_count_and_the_losses_stay_as_they_were(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caught: list[warnings.WarningMessage]
) -> None:
    folder = tmp_path / "run"
    undisturbed = train(TinyModel())
    if fault == "folder is a file":
        folder.touch()
    model = TinyModel()
    recorder = recording(model, folder)
    if fault == "folder removed":
        shutil.rmtree(folder)
    if fault == "arguments that cannot be copied":
        monkeypatch.setattr(ArgumentCopier, "copy", run_out_of_memory)
    with full_disk() if fault == "full disk" else nullcontext():
        disturbed = train(model)
        recorder.close()
    assert disturbed == undisturbed
    assert len(caught) == 1
    assert "capture stops, the job goes on" in str(caught[0].message)
    assert recorder.failure is not None
    assert (recorder.num_written, recorder.num_dropped) == (0, recorder.num_seen)
    assert recorder.num_seen == (0 if fault == "folder is a file" else 4)


def test_recording_changes_no_loss(tmp_path: Path) -> None:
    model = TinyModel()
    with recording(model, tmp_path) as recorder:
        recorded = train(model)
    assert recorded == train(TinyModel())
    assert recorder.num_written == 4


def test_a_pass_that_is_no_micro_batch_is_dropped_alone(tmp_path: Path, caught: list[warnings.WarningMessage]) -> None:
    model = TinyModel()
    with recording(model, tmp_path) as recorder:
        for mask_BS in (MASK_BS, MASK_BS * 2, MASK_BS * 3, MASK_BS):
            model(IDS_BS, attention_mask=mask_BS)
    assert len(caught) == 1
    assert "attention_mask must hold only 0 and 1" in str(caught[0].message)
    assert (recorder.num_written, recorder.num_dropped, recorder.failure) == (2, 2, None)


def test_warnings_that_are_errors_do_not_reach_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = TinyModel()
        with recording(model, tmp_path / "run"):
            model(IDS_BS)
    assert "capture stops, the job goes on" in capsys.readouterr().err


def test_a_model_that_was_never_called_is_worth_a_warning(tmp_path: Path) -> None:
    model = TinyModel()
    with pytest.warns(RuntimeWarning, match="never called"), recording(model, tmp_path):
        model.forward(IDS_BS)


@pytest.mark.parametrize(
    ("rank", "settings", "others", "said"),
    [
        (0, {}, [], "ranks 1 to 3"),
        (0, {}, ["actor_inputs_rank2_x.pkl"], "ranks 1, 3"),
        (0, {}, ["rank1", "rank2", "rank3"], None),
        # Another rank's file that is not whole yet is no sign of it.
        (0, {}, ["rank1", "rank2", ".end_rank3_x.json.tmp"], "rank 3"),
        (0, {"ranks": "0,2"}, [], "rank 2"),
        (0, {"ranks": "0,2"}, ["rank2"], None),
        (0, {"ranks": 0}, [], None),
        # One rank says it, and only where it has recorded something itself.
        (1, {}, [], None),
        (0, {"passes": "rollout"}, [], None),
    ],
)
def test_rank_0_says_at_the_end_which_ranks_should_have_recorded_and_have_left_nothing(
    rank: int,
    settings: dict[str, Any],
    others: list[str],
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    no_process_group: None,
    caught: list[warnings.WarningMessage],
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(capture.record.recorder, "MAX_SECONDS_FOR_OTHER_RANKS", 0.0)
    for name in others:
        (tmp_path / name).touch()
    model = TinyModel()
    with recording(model, tmp_path, **settings):
        model(IDS_BS)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (said is not None)
    assert said is None or f"{tmp_path} has nothing of {said} of the job's 4. " in messages[0]


@pytest.mark.parametrize(("arguments", "error"), [((TinyModel.forward,), TypeError), ((TinyModel(), 0), ValueError)])
def test_nonsense_is_refused_at_once(arguments: Any, error: type[Exception], tmp_path: Path) -> None:
    model, *max_queued = arguments
    with pytest.raises(error):
        recording(model, tmp_path, **dict(zip(["max_queued"], max_queued, strict=False)))


def test_a_full_queue_drops_the_new_pass_and_counts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caught: list[warnings.WarningMessage]
) -> None:
    disk, model = SlowDisk(monkeypatch), TinyModel()
    with recording(model, tmp_path, max_queued=2) as recorder:
        model(IDS_BS)
        assert disk.entered.wait(60)
        train(model, num_steps=5)
        assert recorder.num_dropped == 3
        disk.freed.set()
    assert len(caught) == 1
    assert "slower than the job" in str(caught[0].message)
    assert (recorder.num_seen, recorder.num_written, recorder.num_dropped, recorder.failure) == (6, 3, 3, None)
    assert [read_micro_batch(path).origin.step for path in capture_files(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("reproduce", [False, True])
def test_a_disk_that_hangs_holds_the_end_of_the_job_for_a_bounded_time_and_its_passes_are_lost_until_it_goes_on(
    reproduce: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, model = SlowDisk(monkeypatch), TinyModel()
    other_threads = threading.enumerate()
    recorder = recording(model, tmp_path, reproduce=reproduce)
    new_threads = set(threading.enumerate()) - set(other_threads)
    [writer] = [thread for thread in new_threads if thread.name == "capture-writer"]
    train(model)
    assert disk.entered.wait(60)
    with pytest.warns(RuntimeWarning, match="not finished 0.1 s after the end"):
        recorder.close(max_seconds=0.1)
    assert isinstance(recorder.failure, TimeoutError)
    assert (recorder.num_seen, recorder.num_written, recorder.num_dropped) == (4, 0, 4)
    disk.freed.set()
    writer.join(60)
    assert (recorder.num_seen, recorder.num_written, recorder.num_dropped) == (4, 1, 3)


def test_a_second_failure_is_no_second_warning(caught: list[warnings.WarningMessage]) -> None:
    writer: BackgroundWriter[int] = BackgroundWriter(print, max_queued=1)
    writer.give_up(OSError("first"))
    writer.give_up(OSError("second"))
    writer.close(max_seconds=60)
    assert len(caught) == 1
    assert str(writer.failure) == "first"


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "raise RuntimeError('the job broke')"])
def test_a_recorder_left_open_is_flushed_at_exit(ending: str, tmp_path: Path) -> None:
    job = f"""
        import torch
        from capture import recording

        class Model(torch.nn.Module):
            def forward(self, input_ids):
                return input_ids

        model = Model()
        recorder = recording(model, {str(tmp_path)!r})
        for _ in range(20):
            model(torch.ones(2, 4, dtype=torch.long))
        {ending}
    """
    python = warm_bin() / "python"
    child = subprocess.run([python, "-c", textwrap.dedent(job)], cwd=ROOT, timeout=1800, capture_output=True)
    assert child.returncode == (0 if not ending else 3 if "3" in ending else 1), child.stderr
    assert len([read_micro_batch(path) for path in capture_files(tmp_path)]) == 20


def test_importing_capture_does_not_import_torch() -> None:
    code = "import capture, sys; assert 'torch' not in sys.modules; capture.MicroBatch; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=1800, check=True)


def test_a_job_that_is_recorded_gets_no_library_of_the_recorder(tmp_path: Path) -> None:
    job = f"""
        import sys
        import torch
        from tests.helpers.small_jobs import TinyModel

        model = TinyModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = set(sys.modules)

        from capture import recording

        with recording(model, {str(tmp_path)!r}, reproduce=True):
            for _ in range(3):
                model(torch.ones(2, 4, dtype=torch.long)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
        print(new - sys.stdlib_module_names - {{"capture", "torch"}})
    """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(job)], cwd=ROOT, timeout=1800, capture_output=True, text=True, check=True
    )
    assert child.stdout == "set()\n"


def test_recording_works_without_the_black_box(tmp_path: Path) -> None:
    job = f"""
        import sys
        sys.modules["capture.black_box"] = None  # importing what is in it fails
        from pathlib import Path
        import torch
        from capture.record.recorder import Recorder
        from capture.record.retention import check_retention
        from tests.helpers.small_jobs import TinyModel

        model, folder = TinyModel(), Path({str(tmp_path)!r})
        with Recorder(model, folder, retention=check_retention(reproduce=True), max_queued=9, names={{}}):
            for _ in range(3):
                model(torch.ones(2, 4, dtype=torch.long)).backward()
    """
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(job)], cwd=ROOT, timeout=1800, capture_output=True)
    assert child.returncode == 0, child.stderr
    assert [read_micro_batch(path).origin.step for path in capture_files(tmp_path)] == [0, 1, 2]
