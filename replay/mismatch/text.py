"""Format the tables of `replay mismatch`."""

from collections.abc import Sequence

from replay.mismatch.statistics import Mismatch
from replay.mismatch.tokens import WorstToken
from replay.report.text import Columns, short_names


def replays_table(replays: Sequence[tuple[str, Mismatch]]) -> Columns:
    """Return a row for each replay: how far its log-probs are from the rollout's."""
    return {
        "configuration": [name for name, _ in replays],
        "tokens": [f"{one.num_tokens:,}" for _, one in replays],
        "mean |d|": [f"{one.mean:.3g}" for _, one in replays],
        "p99 |d|": [f"{one.p99:.3g}" for _, one in replays],
        "max |d|": [f"{one.largest:.3g}" for _, one in replays],
        "KL k1": [f"{one.kl_k1:.3g}" for _, one in replays],
        "KL k3": [f"{one.kl_k3:.3g}" for _, one in replays],
        "ESS tokens": [f"{one.ess_tokens:.4f}" for _, one in replays],
        "ESS sequences": [f"{one.ess_sequences:.4f}" for _, one in replays],
    }


def distances_table(pairs: Sequence[tuple[str, float, float]]) -> Columns:
    """Return a row for each two replays: how far they are from each other."""
    return {
        "configuration": [name for name, _, _ in pairs],
        "mean |d|": [f"{mean:.3g}" for _, mean, _ in pairs],
        "max |d|": [f"{largest:.3g}" for _, _, largest in pairs],
    }


def worst_table(worst: Sequence[WorstToken], names: Sequence[str]) -> Columns:
    """Return a row for each of the worst tokens, with its neighbours' ids and differences."""
    columns: Columns = {
        "input": [short_names(one.source) for one in worst],
        "row": [str(one.row) for one in worst],
        "token": [str(one.column) for one in worst],
        "id": [str(one.token) for one in worst],
        "rollout": [f"{one.rollout:.4f}" for one in worst],
    }
    for number, name in enumerate(names):
        columns[name] = [f"{one.replays[number]:.4f}" for one in worst]
    columns["before"] = [_neighbour(*one.before) for one in worst]
    columns["after"] = [_neighbour(*one.after) for one in worst]
    return columns


def _neighbour(token: int, apart: float | None) -> str:
    if token < 0:
        return "-"
    return str(token) if apart is None else f"{token} ({apart:+.3g})"
