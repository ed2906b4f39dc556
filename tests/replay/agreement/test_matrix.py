"""What a matrix spells out: products and sums of its tables, in an order that sees every pair of values early."""

from collections import Counter
from itertools import combinations, product
from pathlib import Path

import pytest

from actor_init.spec import Attention, Compile, Dtype, UsageError
from replay.agreement.matrix import (
    arrange_settings,
    count_processes,
    make_full_tables,
    name_of,
    order_by_pairs,
    read_settings,
    to_options,
)
from replay.options.option_parsing import build_replay_spec

TWO_TABLES = """
[[cells]]
backend = ["deepspeed", "fsdp2"]
packing = [true, false]

[[cells]]
backend = "fsdp2"
zero-stage = 2
data = 2

[[cells]]
packing = true
backend = "fsdp2"
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_a_matrix_is_the_sum_of_its_tables_products_each_once(tmp_path: Path) -> None:
    assert read_settings(written(tmp_path, TWO_TABLES), 1) == [
        {"backend": "deepspeed", "packing": True},
        {"backend": "deepspeed", "packing": False},
        {"backend": "fsdp2", "packing": True},
        {"backend": "fsdp2", "packing": False},
        {"backend": "fsdp2", "zero_stage": 2, "data": 2},
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[cells]]\nbackends = 'fsdp2'", "backends is no axis; allowed are data, backend, model,"),
        ("[[cells]]\nlearning_rate = [0.1]\nmax_inputs = 1", "max_inputs is no axis"),
        ("[[cells]]\ntp = []", r"tp is \[\]; allowed is a value, or a list of values"),
        ("[[cells]]\ntp = [[1]]", r"tp is \[\[1\]\]; allowed is a value"),
        ("backend = 'fsdp2'", r"holds backend; it needs tables called \[\[cells\]\]"),
        ("", r"holds nothing; it needs tables called \[\[cells\]\]"),
        ("cells = 3", r"it needs tables called \[\[cells\]\]"),
        ("[[cells]\n", "cannot be read: .*docs/parity.md has an example"),
    ],
)
def test_a_file_that_is_no_matrix_is_refused_with_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_settings(written(tmp_path, text), 1)


def test_a_word_that_names_no_matrix_is_refused() -> None:
    with pytest.raises(UsageError, match="matrix='quik' is neither one of quick, pairs, full nor a file"):
        read_settings("quik", 1)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"tp": "two"}, "tp 'two' is not allowed"),
        ({"packing": "yes"}, "packing 'yes' is not allowed. Give true or false"),
        ({"compile": True}, "compile True is not allowed. Give one of off, blocks, deepcompile"),
        ({"data": 0}, "data 0 is not allowed"),
        ({"backend": "zero"}, "Give one of deepspeed, fsdp2"),
    ],
)
def test_a_value_of_another_kind_is_refused_for_its_cell(setting: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build_replay_spec(to_options(setting))


def test_a_setting_is_what_the_command_line_would_give() -> None:
    setting = {"backend": "fsdp2", "packing": False, "compile": "blocks", "tp": 2, "data": 2, "attention": "eager"}
    actor = build_replay_spec(to_options(setting)).actor
    assert (actor.backend, actor.packing, actor.compile) == ("fsdp2", False, Compile.BLOCKS)
    assert (actor.parallel.tp, actor.attention) == (2, Attention.EAGER)
    assert count_processes(setting) == 4
    assert name_of(setting) == "fsdp2 bf16 padded eager compiled data 2 tp 2"
    assert name_of({"dtype": "fp32", "gradient_checkpointing": True}) == (
        "deepspeed fp32 packed auto gradient-checkpointing"
    )


def test_full_is_the_whole_product_of_what_fits_on_the_devices() -> None:
    found = read_settings("full", 2)
    stages = {"deepspeed": 4, "fsdp2": 2}
    layouts = sum(ring * tp * data <= 2 for ring, tp, data in product((1, 2), repeat=3))
    num_kernels, num_compiled, num_dtypes, num_packing, num_deepcompile = 5, 2, 3, 2, 2
    layouts_of_ddp = 2  # one and two data ranks
    num_variants = num_kernels * num_compiled * num_dtypes * num_packing
    # two dtypes; accumulated, checkpointed, fused and fused compiled
    num_folded = sum(stages.values()) * layouts * 2 * 4
    num_plain = (sum(stages.values()) * layouts + layouts_of_ddp) * num_variants
    assert len(found) == num_plain + num_deepcompile + num_folded
    assert {setting["dtype"] for setting in found} == {Dtype.FP32, Dtype.BF16, Dtype.FP16}


def test_the_first_cells_of_a_full_matrix_hold_every_pair_of_values() -> None:
    settings = read_settings("full", 2)
    ordered, num_covering = order_by_pairs(settings)
    pairs = {pair for setting in settings for pair in combinations(sorted(setting.items()), 2)}
    early = {pair for setting in ordered[:num_covering] for pair in combinations(sorted(setting.items()), 2)}
    assert early == pairs
    assert len(ordered) == len(settings)
    assert all(setting in ordered for setting in settings)
    assert arrange_settings("pairs", settings) == ordered[:num_covering]
    assert arrange_settings("full", settings) == ordered
    assert arrange_settings("quick", settings) == settings
    assert num_covering < len(settings) / 10


def test_wherever_a_full_matrix_is_broken_off_each_value_was_seen_about_as_often() -> None:
    # Each second one, in which all values are: ordering takes as the square of their number.
    settings = read_settings("full", 4)[::2]
    ordered, _ = order_by_pairs(settings)
    for option, values in (("backend", ("deepspeed", "fsdp2")), ("tp", (1, 2, 4)), ("zero_stage", (0, 1, 2, 3))):
        seen = Counter(setting.get(option) for setting in ordered[:200])
        assert min(seen[value] for value in values) > 20, seen


def test_full_uses_splits_that_divide_the_devices() -> None:
    [first, *_] = make_full_tables(6, Attention.SDPA)
    assert first["tp"] == [1, 2, 3, 6]
