"""Parameters that the job did not train are not trained here; those that lost their gradient by a fault are.

About 8 seconds: recordings in this process, and their replays.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture import recording
from capture.file_format.actor_config import read_frozen_names
from capture.folder_tools.redact import TokenRedaction, redact_folder
from replay.command_line.cli import main
from tests.trainers.common import make_batches, make_model

pytestmark = pytest.mark.usefixtures("one_world", "proofs_once")

LEARNING_RATE = 1e-2
STEP = ["--step", "--learning-rate", str(LEARNING_RATE), "--weight-decay", "0", "--max-norm", "1"]
FROZEN, LOST = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"


def with_query_detached(model: Any) -> None:
    """As where a job computes with a copy of a weight: it is trained, and has no gradient."""
    query = model.model.layers[0].self_attn.q_proj

    def detached(hidden: Tensor) -> Tensor:
        return F.linear(hidden, query.weight.detach())

    query.forward = detached


def drop_query(model: Any) -> None:
    """As where a loop leaves parameters out of its steps by hand."""
    model.model.layers[0].self_attn.q_proj.weight.grad = None


def do_nothing(model: Any) -> None:
    pass


def train(
    folder: Path, fault: Callable[[Any], None] = do_nothing, before_step: Callable[[Any], None] = do_nothing
) -> Path:
    model: Any = make_model(folder)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].requires_grad_(False)
    fault(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    with recording(model, folder / "captures", reproduce=True):
        for batch in make_batches(2):
            model(**batch).loss.backward()
            before_step(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return folder


class Actor(nn.Module):
    """Holds the model, as RLHF trainers' actors do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)


def test_the_cause_of_a_model_inside_the_job_s_own_is_named(tmp_path: Path) -> None:
    def scale_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * 1.5

    model: Any = make_model(tmp_path)
    model.model.layers[1].mlp.register_forward_hook(scale_output)
    actor = Actor(model)
    with recording(actor, tmp_path / "captures", reproduce=True):
        for batch in make_batches(2):
            actor(**batch).loss.backward()
            actor.zero_grad()
    command = ["--inputs", str(tmp_path / "captures"), "--model", str(tmp_path / "model"), "--loss", "sft"]
    assert main([*command, "--log-folder", str(tmp_path / "logs")]) == 0
    [run] = (tmp_path / "logs").glob("*/run.json")
    verdict = json.loads(run.read_text())["verdict"]
    assert verdict["outcome"] == "DIFFERS"
    assert "scale_output" in verdict["causes"][0]["sentence"]
    assert "model.layers.1.mlp" in verdict["causes"][0]["sentence"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("job"))


def verdict_of(job: Path, logs: Path, *typed: str) -> Any:
    command = ["--inputs", str(job / "captures"), "--model", str(job / "model"), "--loss", "sft"]
    assert main([*command, "--log-folder", str(logs), *STEP, *typed]) == 0
    [run] = logs.glob("*/run.json")
    return json.loads(run.read_text())["verdict"]


@pytest.mark.parametrize("typed", ["", "--zero-stage 3", "--backend fsdp2", "--backend ddp"])
def test_what_the_job_froze_is_frozen_and_its_steps_are_reproduced(
    typed: str, job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = verdict_of(job, tmp_path, *typed.split())
    assert [judged["outcome"] for judged in (*verdict["passes"], *verdict["windows"])] == ["REPRODUCED"] * 4
    assert f"frozen     {FROZEN} and 9 more, as in the job" in capsys.readouterr().out


def test_a_trained_parameter_without_a_gradient_is_a_finding(tmp_path: Path) -> None:
    verdict = verdict_of(train(tmp_path, with_query_detached), tmp_path / "logs")
    first = verdict["windows"][0]
    assert first["outcome"] == "DIFFERS"
    assert f"{LOST}, which has no gradient in the job" in [finding["where"] for finding in first["findings"]]


def test_a_gradient_that_the_loop_drops_is_not_said_to_be_missing_from_the_backward(tmp_path: Path) -> None:
    """The norm that the job clips by is that of the other gradients, and needs no cause of its own."""
    verdict = verdict_of(train(tmp_path, before_step=drop_query), tmp_path / "logs")
    assert verdict["windows"][0]["outcome"] == "DIFFERS"
    [cause] = verdict["causes"]
    assert cause["sentence"] == f"the job steps without a gradient for {LOST}, since the job's step 1"


def test_a_redacted_recording_still_says_what_was_frozen(job: Path, tmp_path: Path) -> None:
    redact_folder(job / "captures", tmp_path / "redacted", tokens=TokenRedaction.ZERO)
    names = read_frozen_names(tmp_path / "redacted")
    assert names == read_frozen_names(job / "captures")
    assert len(names) == 10
    assert FROZEN in names


class Plain(torch.nn.Module):
    """A user's own model, which has no config."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(16, 16)])

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.blocks[0](self.embed(idx)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build() -> Plain:
    return Plain()


@pytest.mark.parametrize(
    ("backend", "outcome", "says"),
    [
        ("ddp", "REPRODUCED\n", ""),
        ("fsdp2", "REPRODUCED\n", ""),
        (
            "deepspeed --zero-stage 1",
            "REPRODUCED (3 of 4 passes)\n",
            "is trained from pass 3 on in the job, and the replay does not follow that. Try: --backend fsdp2",
        ),
    ],
)
def test_what_the_job_trains_from_a_later_pass_on_is_no_fault(
    backend: str, outcome: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where an optimizer has pieces of several parameters, the replay does not follow it, and judges nothing then."""
    torch.manual_seed(0)
    model, arguments = Plain(), {"idx": "input_ids", "targets": "shift_labels"}
    torch.save(model.state_dict(), tmp_path / "start.pt")
    model.embed.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    with recording(model, tmp_path / "captures", reproduce=True, arguments=arguments):
        for step in range(4):
            model.embed.requires_grad_(step > 1)
            ids = torch.randint(64, (2, 9))
            model(idx=ids[:, :-1], targets=ids[:, 1:])[1].backward()
            optimizer.step()
            optimizer.zero_grad()
    command = ["--inputs", str(tmp_path / "captures"), "--model", f"{__file__}:build", "--log-folder", str(tmp_path)]
    command += ["--weights", str(tmp_path / "start.pt"), "--backend", *backend.split()]
    assert main(command) == 0
    screen = capsys.readouterr().out
    assert f"verdict    {outcome}" in screen
    assert says in screen
    assert ("frozen here" in screen) is bool(says)
    assert ("does not follow what the job trains from pass 3 on. Try: --backend fsdp2" in screen) is bool(says)
