"""Jobs with their own objective, recorded with notes and replayed: REPRODUCED with that objective alone."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capture import capture_files, recording
from capture.file_format.capture_file import read_call
from capture.file_format.micro_batch import LOSS_GRADIENTS, LOSS_MISFIT, LOSS_TARGETS
from replay.command_line.cli import main as replay_main
from replay.tolerances.job_bounds import GRADIENT_QUANTITIES, LOSS, TOKEN_LOG_PROBS
from tests.helpers.children import run_with
from tests.helpers.commands import run as typed_in_a_shell
from tests.helpers.policy_job import by_sequences, make_rollouts, plain_policy, token_losses, train
from tests.trainers.common import make_batches, make_model

pytestmark = pytest.mark.usefixtures("one_world")


def whole_policy(log_probs_BA: Tensor, entropies_BA: Tensor, rollout: dict[str, Tensor]) -> Tensor:
    """All terms at once: asymmetric clipping, dual clip, KL and entropy, averaged over sequences."""
    now_BA = log_probs_BA.detach()
    losses_BA = token_losses(
        log_probs_BA, now_BA + rollout["old_noise"], rollout["advantages"], low=0.1, high=0.3, dual=1.05
    )
    apart_BA = log_probs_BA - (now_BA + rollout["ref_noise"])
    losses_BA = losses_BA + 0.05 * (torch.exp(-apart_BA) - 1 + apart_BA) - 0.02 * entropies_BA
    return by_sequences(losses_BA, rollout["action_mask"])


WHOLE = {
    "--clip-low": "0.1",
    "--clip-high": "0.3",
    "--dual-clip": "1.05",
    "--kl-coefficient": "0.05",
    "--entropy-coefficient": "0.02",
    "--reduction": "sequences",
}


@pytest.fixture(scope="module")
def plain_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def whole_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("whole"), whole_policy)


def run_replay(job: Path, logs: Path, *typed: str, reverse_rows: bool = False) -> tuple[int, dict[str, Any]]:
    """Exit code and run.json."""
    command = ["--inputs", str(job / "captures"), "--model", str(job / "model"), "--log-folder", str(logs)]
    code = run_with(
        [*command, "--verdict", "strict", *(() if "--backend" in typed else ("--backend", "ddp")), *typed],
        reverse_rows=reverse_rows,
    )
    [run] = logs.glob("*/run.json")
    return code, json.loads(run.read_text())


def as_typed(options: dict[str, str]) -> list[str]:
    return [word for option in options.items() for word in option]


def check_reproduced(run: dict[str, Any]) -> None:
    verdict = run["verdict"]
    assert (verdict["outcome"], verdict["counts"], verdict["window_counts"]) == (
        "REPRODUCED",
        {"REPRODUCED": 4},
        {"REPRODUCED": 2},
    )
    found = {finding["name"]: finding for finding in verdict["worst"]}
    assert found.keys() == {LOSS, TOKEN_LOG_PROBS, *GRADIENT_QUANTITIES}


@pytest.mark.parametrize(
    ("typed", "reverse_rows"),
    [
        ("--backend ddp", False),
        ("--backend fsdp2 --no-packing", True),
        ("--backend deepspeed --zero-stage 2 --attention eager", False),
    ],
)
def test_a_job_with_all_terms_is_reproduced(
    whole_job: Path, tmp_path: Path, typed: str, reverse_rows: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--loss", "policy", *as_typed(WHOLE), *typed.split()]
    code, run = run_replay(whole_job, tmp_path, *words, reverse_rows=reverse_rows)
    check_reproduced(run)
    assert code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "loss policy, ratio clipped to 0.9 ... 1.3, reduction sequences, dual clip 1.05, KL k3 x 0.05" in said


@pytest.mark.parametrize(
    "other",
    [{"--clip-low": "0.2"}, {"--reduction": "tokens"}, {"--kl": "k1"}, {"--entropy-coefficient": "0"}],
    ids=str,
)
def test_another_setting_differs(whole_job: Path, tmp_path: Path, other: dict[str, str]) -> None:
    code, run = run_replay(whole_job, tmp_path, "--loss", "policy", *as_typed(WHOLE | other))
    assert (code, run["verdict"]["outcome"]) == (1, "DIFFERS")
    assert run["verdict"]["first"]["findings"][0]["name"] == LOSS


def test_without_a_loss_that_of_the_job_s_notes_is_computed(
    plain_job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = run_replay(plain_job, tmp_path)
    check_reproduced(run)
    said = " ".join(capsys.readouterr().out.split())
    assert "loss policy, as the job noted it; by default ratio clipped to 0.8 ... 1.2, reduction tokens" in said


def test_without_a_loss_a_job_of_other_settings_differs(whole_job: Path, tmp_path: Path) -> None:
    _, run = run_replay(whole_job, tmp_path)
    assert run["verdict"]["outcome"] == "DIFFERS"
    assert run["verdict"]["first"]["findings"][0]["name"] == LOSS


def test_without_the_notes_of_a_loss_the_header_says_what_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = train(tmp_path / "job", notes=("advantages", "action_mask"))
    run_replay(job, tmp_path / "logs")
    said = " ".join(capsys.readouterr().out.split())
    assert "loss recorded, the weights of log-probs that the job's gradient had" in said


@pytest.mark.parametrize(
    ("given", "typed", "says"),
    [
        ("labels", [], "sft: the mean cross entropy of the labels"),
        ("labels", ["--loss", "sft"], "sft: the mean cross entropy of the labels"),
        ("shift_labels", [], "sft: the mean cross entropy of the labels"),
        (None, [], "stand-in, by default: the mean cross entropy of all real tokens, for there is no action mask"),
        (None, ["--loss", "sft"], "sft: the mean cross entropy of all real tokens, for there are no labels"),
    ],
)
def test_the_header_says_of_which_tokens_the_loss_is(
    given: str | None, typed: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = make_model(tmp_path)
    [batch] = make_batches(1)
    labels_BS = batch.pop("labels")
    more = {} if given is None else {given: labels_BS if given == "labels" else labels_BS.roll(-1, dims=1)}
    with recording(model, tmp_path / "captures", reproduce=True):
        output = model(**batch, **({"labels": labels_BS, **more} if given else {}))
        (output.logits.mean() if given is None else output.loss).backward()
    _, run = run_replay(tmp_path, tmp_path / "logs", *typed)
    assert f"loss       {says}" in capsys.readouterr().out.splitlines()
    if given is not None:  # what the header says is what the model computed
        assert run["verdict"]["counts"] == {"REPRODUCED": 1}


@pytest.mark.parametrize(("divisor", "outcome"), [(None, "REPRODUCED"), ("17", "DIFFERS")])
def test_a_noted_divisor_is_used_and_a_typed_one_goes_before(tmp_path: Path, divisor: str | None, outcome: str) -> None:
    def by_divisor(log_probs_BA: Tensor, _: Tensor, rollout: dict[str, Tensor]) -> Tensor:
        losses_BA = token_losses(log_probs_BA, log_probs_BA.detach() + rollout["old_noise"], rollout["advantages"])
        return losses_BA[rollout["action_mask"]].sum() / 16 / len(losses_BA)

    names = ("advantages", "action_mask", "old_log_probs", "divisor")
    job = train(tmp_path / "job", by_divisor, notes=names, notes_first=True)
    typed = [] if divisor is None else ["--divisor", divisor]
    _, run = run_replay(job, tmp_path / "logs", "--loss", "policy", "--reduction", "divisor", *typed)
    assert run["verdict"]["outcome"] == outcome


def test_tokens_of_a_window_add_up(tmp_path: Path) -> None:
    """The passes of a step share one divisor, and their losses are differentiated as they are."""
    numbers = [int(rollout["action_mask"].sum()) for rollout in make_rollouts()]
    totals = iter([sum(numbers[:2])] * 2 + [sum(numbers[2:])] * 2)

    def share(log_probs_BA: Tensor, _: Tensor, rollout: dict[str, Tensor]) -> Tensor:
        losses_BA = token_losses(log_probs_BA, log_probs_BA.detach() + rollout["old_noise"], rollout["advantages"])
        return losses_BA[rollout["action_mask"]].sum() / next(totals)

    assert numbers[0] != numbers[1]
    job = train(tmp_path / "job", share, weigh=lambda loss, _: loss)
    _, run = run_replay(job, tmp_path / "logs", "--loss", "policy", "--reduction", "window-tokens")
    check_reproduced(run)


def test_passes_that_weigh_otherwise_are_unsettled(tmp_path: Path) -> None:
    job = train(tmp_path / "job", weigh=lambda loss, number: loss * (0.5 + number % 2))
    _, run = run_replay(job, tmp_path / "logs", "--loss", "policy")
    verdict = run["verdict"]
    assert (verdict["outcome"], verdict["counts"]) == ("UNSETTLED", {"REPRODUCED": 4})
    assert any("weighed its passes otherwise" in finding["doubt"] for finding in verdict["open"])


def test_what_was_not_noted_is_named_before_the_model_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = train(tmp_path / "job", notes=("action_mask", "advantages"))
    logs = tmp_path / "logs"
    command = ["--inputs", str(job / "captures"), "--model", str(job / "model"), "--log-folder", str(logs)]
    assert replay_main([*command, "--loss", "policy"]) == 2
    said = capsys.readouterr().err
    assert "no old_log_probs in this capture, which has action_mask, advantages, attention_mask, input_ids" in said
    assert "Try: recorder.note(old_log_probs=...) in the job" in said
    assert "--on-policy" in said
    assert not logs.exists()


def test_action_tokens_without_a_log_prob_are_counted_where_the_loss_differs(
    tmp_path: Path,
) -> None:
    """A loop that gives padding an advantage has another loss, and the reason is said."""
    rollouts = [rollout | {"action_mask": torch.ones_like(rollout["action_mask"])} for rollout in make_rollouts()]
    job = train(tmp_path / "job", rollouts=rollouts)
    _, run = run_replay(job, tmp_path / "logs", "--loss", "policy")
    verdict = run["verdict"]
    assert verdict["outcome"] == "UNSETTLED"
    assert "3 of the job's 12 action tokens are padding or follow no token" in verdict["open"][0]["doubt"]


def test_diagnose_refuses_an_objective(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_main(["diagnose", "--loss", "policy"]) == 2
    assert "diagnose learns its inputs, so --loss policy is not for it. Try: --loss stand-in" in capsys.readouterr().err


def test_a_job_with_pairs_is_reproduced_as_dpo(tmp_path: Path) -> None:
    def dpo(log_probs_BA: Tensor, _: Tensor, rollout: dict[str, Tensor]) -> Tensor:
        mask_BA = rollout["action_mask"]
        reference_BA = log_probs_BA.detach() + rollout["ref_noise"]
        chosen, rejected = ((log_probs_BA - reference_BA) * mask_BA).sum(1)
        return -F.logsigmoid(0.3 * (chosen - rejected))

    job = train(tmp_path / "job", dpo)
    _, run = run_replay(job, tmp_path / "logs", "--loss", "dpo", "--dpo-beta", "0.3")
    check_reproduced(run)
    _, run = run_replay(job, tmp_path / "others", "--loss", "dpo")
    assert run["verdict"]["outcome"] == "DIFFERS"


OWN = """
def own(inputs):
    ratio_BA = (inputs.log_probs_BA - inputs.of_tokens("old_log_probs")).exp()
    gain_BA = ratio_BA * inputs.of_tokens("advantages")
    logits_NV, place_N = inputs.logits()
    penalty = logits_NV.logsumexp(-1).square().mean()
    return -gain_BA[inputs.action_mask_BA].mean() + 0.001 * penalty
"""


def test_a_function_of_the_users_is_reproduced_and_its_file_named(tmp_path: Path) -> None:
    """A loss with a penalty on the logits, which no log-prob holds."""

    def own(log_probs_BA: Tensor, _: Tensor, rollout: dict[str, Tensor]) -> Tensor:
        ratio_BA = (log_probs_BA - (log_probs_BA.detach() + rollout["old_noise"])).exp()
        gain_BA = ratio_BA * rollout["advantages"]
        penalty = rollout["logits"][rollout["action_mask"]].logsumexp(-1).square().mean()
        return -gain_BA[rollout["action_mask"]].mean() + 0.001 * penalty

    (tmp_path / "own.py").write_text(OWN)
    job = train(tmp_path / "job", own)
    _, run = run_replay(job, tmp_path / "logs", "--loss", f"{tmp_path}/own.py:own", reverse_rows=True)
    check_reproduced(run)
    assert run["facts"]["loss_sha256"] == hashlib.sha256(OWN.encode()).hexdigest()


@pytest.mark.parametrize(
    "settings",
    [
        {"reproduce": True, "segment": "64KB"},
        {"flight_recorder": 8},
        {"passes": "train", "reproduce": True},
        {"reproduce": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("notes_first", [False, True])
def test_notes_are_kept_however_passes_are(tmp_path: Path, settings: dict[str, Any], notes_first: bool) -> None:
    """Without `reproduce` a pass is written at once, so the first one's notes come too late unless noted before."""
    if "flight_recorder" in settings:
        with pytest.raises(RuntimeError, match="the job fails"):
            train(tmp_path, FailsAtLast(), settings=settings, notes_first=notes_first)
    elif not settings["reproduce"] and not notes_first:
        with pytest.warns(RuntimeWarning, match="what was noted after pass 1 came when its file was written"):
            train(tmp_path, settings=settings, notes_first=notes_first)
    else:
        train(tmp_path, settings=settings, notes_first=notes_first)
    calls = [read_call(path) for path in capture_files(tmp_path / "captures")]
    noted = [call for call in calls if call.trains]
    late = [] if settings.get("reproduce", True) or notes_first else noted[:1]
    failed = noted[-1] if "flight_recorder" in settings else None
    assert len(noted) >= 3
    assert all(not call.notes for call in late)
    for call in noted[len(late) :]:
        # The pass that failed had no backward.
        of_logits = call.notes.keys() & {LOSS_TARGETS, LOSS_GRADIENTS, LOSS_MISFIT}
        assert (len(of_logits) == 3) == (settings.get("reproduce", True) and call is not failed)
        assert call.notes.keys() - of_logits == {"advantages", "action_mask", "old_log_probs", "ref_log_probs"}
        assert call.micro_batch().action_mask_BA is not None
    assert all(not call.notes for call in calls if not call.trains)


class FailsAtLast:
    """The loss of a job that ends in its fourth pass."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, log_probs_BA: Tensor, entropies_BA: Tensor, rollout: dict[str, Tensor]) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 4:
            raise RuntimeError("the job fails")
        return plain_policy(log_probs_BA, entropies_BA, rollout)


@pytest.mark.parametrize("typed", ["--tp 2", "--ring 2"])
def test_ranks_that_share_a_replica_reproduce_it_too(whole_job: Path, tmp_path: Path, typed: str) -> None:
    """Its entropies are of logits that are sharded on the vocabulary under tp, and on the tokens under ring."""
    options = " ".join(as_typed(WHOLE))
    done = typed_in_a_shell(
        f"torchrun --nproc-per-node 2 replay --inputs {whole_job / 'captures'} "
        f"--model {whole_job / 'model'} --backend fsdp2 {typed} --verdict strict --loss policy {options}",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    [written] = tmp_path.glob("*/run.json")
    check_reproduced(json.loads(written.read_text()))
