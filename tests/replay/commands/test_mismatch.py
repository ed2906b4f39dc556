"""`replay mismatch`: a rollout's log-probs against the replay's, with differences that are put in and known."""

import io
import json
import math
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import replay
from actor_init.spec import Attention, Dtype, UsageError
from actor_init.world import World
from capture import capture_files
from capture.file_format.capture_file import read_call
from replay.command_line.cli import main as replay_main
from replay.commands.mismatch.report import gather_data_ranks, mismatch_in_world, number_sequences
from replay.commands.mismatch.statistics import (
    ActionTokens,
    compute_effective_share,
    find_worst_tokens,
    measure_mismatch,
)
from replay.options.spec import ReplaySpec
from tests.helpers.interrupted_world import InterruptedWorld
from tests.helpers.policy_job import make_rollouts, train
from tests.helpers.schemas import assert_valid
from tests.helpers.typed import spec_of


def test_the_statistics_are_those_of_the_definitions() -> None:
    """Each is written out as a loop, over tokens of three sequences."""
    generator = torch.Generator().manual_seed(0)
    rollout_N = -3 * torch.rand(200, generator=generator)
    replay_N = rollout_N + 0.2 * torch.randn(200, generator=generator)
    sequence_N = torch.arange(200) % 3
    pairs = list(zip(rollout_N.tolist(), replay_N.tolist(), strict=True))
    apart = [here - there for there, here in pairs]
    # Of pi_replay and pi_rollout, for samples of the rollout.
    ratios = [math.exp(here - there) for there, here in pairs]
    found = measure_mismatch(rollout_N, replay_N, sequence_N)
    assert found.mean == pytest.approx(sum(map(abs, apart)) / 200)
    assert found.largest == pytest.approx(max(map(abs, apart)))
    # One per cent of 200 tokens are two.
    assert sum(abs(difference) > found.p99 for difference in apart) == 1
    assert found.shift == pytest.approx(sum(apart) / 200)
    assert found.kl_k1 == pytest.approx(-sum(map(math.log, ratios)) / 200)
    assert found.kl_k3 == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios) / 200)
    assert found.ess_tokens == pytest.approx(sum(ratios) ** 2 / 200 / sum(ratio**2 for ratio in ratios))
    whole = [math.prod(ratios[number::3]) for number in range(3)]
    assert found.ess_sequences == pytest.approx(sum(whole) ** 2 / 3 / sum(ratio**2 for ratio in whole))
    assert (found.num_tokens, found.num_sequences) == (200, 3)


def test_k3_is_the_divergence_of_known_distributions() -> None:
    """The mean over the rollout's own samples, in their shares, is KL(rollout || replay) itself."""
    rollout, replay = (0.5, 0.3, 0.2), (0.4, 0.4, 0.2)
    samples = [0] * 5 + [1] * 3 + [2] * 2
    found = measure_mismatch(
        torch.tensor([math.log(rollout[token]) for token in samples], dtype=torch.float64),
        torch.tensor([math.log(replay[token]) for token in samples], dtype=torch.float64),
        torch.zeros(10, dtype=torch.long),
    )
    divergence = sum(p * math.log(p / q) for p, q in zip(rollout, replay, strict=True))
    assert found.kl_k1 == pytest.approx(divergence)
    assert found.kl_k3 == pytest.approx(divergence)


def test_weights_that_are_equal_are_all_effective_and_one_that_rules_is_alone() -> None:
    assert compute_effective_share(torch.full((8,), 700.0, dtype=torch.float64)) == pytest.approx(1)
    assert compute_effective_share(torch.tensor([900.0] + [0.0] * 7, dtype=torch.float64)) == pytest.approx(1 / 8)


def test_each_data_rank_reads_inputs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def select(spec: Any, data_rank: int, num_data_ranks: int) -> Any:
        return SimpleNamespace(inputs=[], damaged=[(Path("a.pkl"), f"data rank {data_rank} of {num_data_ranks}")])

    monkeypatch.setattr("replay.commands.mismatch.report.select", select)
    # The second tp rank of the second data rank.
    world: Any = SimpleNamespace(rank=3, data_rank=1, num_data_ranks=2)
    with pytest.raises(UsageError, match="no input can be read: data rank 1 of 2"):
        mismatch_in_world(world, ReplaySpec(), [Dtype.FP32], ["sdpa"], 3, io.StringIO())


def make_tokens(source: str, replay: list[float], sequence: list[int] | None = None) -> ActionTokens:
    numbers = torch.arange(len(replay))
    return ActionTokens(
        source=source,
        row_N=torch.zeros_like(numbers),
        column_N=numbers + 1,
        sequence_N=torch.tensor(sequence if sequence is not None else [0] * len(replay)),
        id_N=numbers + 10,
        before_N=numbers + 9,
        after_N=numbers + 11,
        rollout_N=torch.zeros(len(replay)),
        replay_N=torch.tensor(replay),
    )


def test_peers_of_a_data_rank_have_the_same_tokens_and_count_once() -> None:
    rank_tokens = [
        [make_tokens("b", [1.0])],
        [make_tokens("b", [1.0])],
        [make_tokens("a", [2.0]), make_tokens("c", [3.0])],
    ]
    # Ranks 0 and 1 are peers of data rank 1.
    world: Any = SimpleNamespace(data_rank=0, gather=lambda own: list(zip([1, 1, 0], rank_tokens, strict=True)))
    assert [tokens.source for tokens in gather_data_ranks(rank_tokens[2], world)] == ["a", "c", "b"]


def test_sequences_of_all_micro_batches_have_numbers_of_their_own() -> None:
    batches = [make_tokens("a", [1.0] * 3, [0, 0, 2]), make_tokens("b", []), make_tokens("c", [1.0] * 2, [0, 1])]
    assert number_sequences(batches).tolist() == [0, 0, 2, 3, 4]


def test_worst_tokens_are_the_farthest_in_either_direction_and_of_equal_ones_the_first() -> None:
    first = [make_tokens("a", [0.5, -3.0, 1.0]), make_tokens("b", [2.0, 3.0])]
    second = [make_tokens("a", [7.0, 8.0, 9.0]), make_tokens("b", [5.0, 6.0])]
    worst = find_worst_tokens([first, second], 3)
    assert [(token.source, token.column, token.replays) for token in worst] == [
        ("a", 2, [-3.0, 8.0]),
        ("b", 2, [3.0, 6.0]),
        ("b", 1, [2.0, 5.0]),
    ]
    assert (worst[0].before, worst[0].after) == ((10, 0.5), (12, 1.0))
    # A neighbour that is no action token has an id and no distance.
    assert (worst[1].before, worst[1].after) == ((10, 2.0), (12, None))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("job"), notes=("action_mask", "rollout_log_probs"))


def run_mismatch(job: Path, logs: Path, *typed: str) -> dict[str, Any]:
    command = ["mismatch", "--inputs", str(job / "captures"), "--model", str(job / "model"), "--backend", "ddp"]
    assert replay_main([*command, "--log-folder", str(logs), *typed]) == 0
    [written] = logs.glob("*-mismatch/mismatch.json")
    values: dict[str, Any] = json.loads(written.read_text())
    return values


def test_a_known_difference_is_found_and_its_worst_token_named(
    job: Path,
    tmp_path: Path,
    one_world: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The rollout's log-probs are the fp32 model's plus noise that the job noted no trace of."""
    typed = ("--dtype", "fp32,bf16", "--attention", "eager,sdpa", "--worst", "3")
    found = run_mismatch(job, tmp_path, *typed)
    rollouts = make_rollouts()
    noise = torch.cat([(rollout["old_noise"] / 10)[rollout["action_mask"]] for rollout in rollouts]).double()
    cells = {(replay["dtype"], replay["attention"]): replay["mismatch"] for replay in found["replays"]}
    assert list(cells) == [("fp32", "eager"), ("fp32", "sdpa"), ("bf16", "eager"), ("bf16", "sdpa")]
    for kernel in ("eager", "sdpa"):
        assert cells["fp32", kernel]["mean"] == pytest.approx(noise.abs().mean().item(), abs=1e-5)
        assert cells["fp32", kernel]["shift"] == pytest.approx(-noise.mean().item(), abs=1e-5)
        assert abs(cells["bf16", kernel]["mean"] - cells["fp32", kernel]["mean"]) > 1e-4
    names = [replay["name"] for replay in found["replays"]]
    assert [(distance["one"], distance["other"]) for distance in found["distances"]] == list(combinations(names, 2))
    by_pair = {(distance["one"], distance["other"]): distance["mean"] for distance in found["distances"]}
    assert by_pair["fp32, eager", "fp32, sdpa"] < 1e-5 < 1e-3 < by_pair["fp32, eager", "bf16, eager"]

    number, row, column = max(
        (
            (number, row, column)
            for number, rollout in enumerate(rollouts)
            for row, column in rollout["action_mask"].nonzero()
        ),
        key=lambda place: float(rollouts[place[0]]["old_noise"][place[1], place[2]].abs()),
    )
    first = found["worst"][0]
    captures = [path.name for path in capture_files(job / "captures") if read_call(path).trains]
    ids_BS = rollouts[number]["input_ids"]
    at = int(column) + ids_BS.shape[1] - 6
    assert (first["source"], first["row"], first["column"]) == (captures[number], int(row), at)
    assert first["token"] == int(ids_BS[row, at])
    assert first["before"][0] == int(ids_BS[row, at - 1])
    assert first["replays"][0] - first["rollout"] == pytest.approx(
        -float(rollouts[number]["old_noise"][row, column]) / 10, abs=1e-5
    )
    said = capsys.readouterr().out
    assert "fp32, eager and bf16, sdpa" in said
    assert "nearest    " in said


@pytest.mark.parametrize("num_measured", [0, 1])
def test_after_ctrl_c_what_was_measured_can_be_read(num_measured: int, job: Path, tmp_path: Path, world: World) -> None:
    def holds_tokens(value: Any) -> bool:
        return isinstance(value, tuple) and isinstance(value[1], list)

    interrupted = InterruptedWorld.from_world(world, holds_tokens, num_measured)
    typed = ["--inputs", str(job / "captures"), "--model", str(job / "model"), "--backend", "ddp"]
    spec, screen = spec_of([*typed, "--log-folder", str(tmp_path)]), io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        mismatch_in_world(interrupted, spec, [Dtype.FP32], [Attention.EAGER, Attention.SDPA], 10, screen)
    [folder] = tmp_path.iterdir()
    assert screen.getvalue().splitlines()[-1].split() == ["log", str(folder)]
    result: Any = replay.open(folder)
    assert [cell.name for cell in result.replays] == ["fp32, eager"][:num_measured]
    assert (result.status, result.exit_code) == ("running", 1)
    assert_valid("mismatch", result.to_dict())


@pytest.mark.slow
def test_from_python_the_same_is_measured_in_processes_of_its_own(job: Path, tmp_path: Path) -> None:
    result = replay.mismatch(
        job / "captures",
        model=job / "model",
        backend="ddp",
        dtypes="fp32",
        attention_kernels=["eager"],
        worst=2,
        processes=2,
        log_folder=tmp_path,
    )
    noise = torch.cat([(rollout["old_noise"] / 10)[rollout["action_mask"]] for rollout in make_rollouts()]).double()
    [cell] = result.replays
    assert (cell.name, len(result.worst), result.exit_code) == ("fp32, eager", 2, 0)
    assert cell.mismatch.mean == pytest.approx(noise.abs().mean().item(), abs=1e-5)
    assert cell.mismatch.num_tokens == len(noise), "of both data ranks"
    assert_valid("mismatch", result.to_dict())


def test_inputs_without_a_rollouts_log_probs_are_refused(
    tmp_path: Path, one_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay_main(["mismatch", "--log-folder", str(tmp_path / "logs")]) == 2
    assert "no rollout_log_probs in this capture, which has" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--dtype", "fp8"], "--dtype 'fp8' is not allowed. Give some of bf16, fp32, fp16, with commas between"),
        (["--attention", "sdpa,none"], "--attention 'none' is not allowed"),
    ],
)
def test_words_that_are_none_are_refused(typed: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_main(["mismatch", *typed]) == 2
    assert said in capsys.readouterr().err
