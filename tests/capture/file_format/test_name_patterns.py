"""Names of many layers are written as few patterns, and every name finds its own again."""

import pytest

from capture.file_format.name_patterns import PatternTable, format_patterns

LAYERS = [f"layers.{layer}.mlp" for layer in range(6)]
EXPERTS = [f"layers.{layer}.experts.{expert}.w1" for layer in range(3) for expert in range(4)]


@pytest.mark.parametrize(
    ("names", "all_names", "patterns"),
    [
        (LAYERS, LAYERS, ["layers.*.mlp"]),
        (LAYERS[:1], LAYERS, ["layers.0.mlp"]),
        ([*LAYERS[:3], LAYERS[4]], LAYERS, ["layers.[0-2,4].mlp"]),
        (["norm", *LAYERS, "head"], [*LAYERS, "norm", "head"], ["norm", "layers.*.mlp", "head"]),
        (EXPERTS, EXPERTS, ["layers.*.experts.*.w1"]),
        (EXPERTS[:4], EXPERTS, ["layers.0.experts.*.w1"]),
        ([*EXPERTS[:4], EXPERTS[5]], EXPERTS, ["layers.0.experts.*.w1", "layers.1.experts.1.w1"]),
        ([EXPERTS[1], EXPERTS[5], EXPERTS[9]], EXPERTS, ["layers.*.experts.1.w1"]),
        (["0", "1"], ["0", "1", "2"], ["[0-1]"]),
    ],
)
def test_equal_names_are_one_pattern(names: list[str], all_names: list[str], patterns: list[str]) -> None:
    assert format_patterns(names, all_names) == patterns
    table = PatternTable(dict.fromkeys(patterns, True))
    assert [name for name in all_names if table.find(name)] == [name for name in all_names if name in names]


def test_a_name_finds_the_value_of_its_own_pattern() -> None:
    table = PatternTable({"layers.[0-2,4].mlp": "wide", "layers.3.mlp": "narrow", "layers.*.norm": "norm", "": "root"})
    assert [table.find(name) for name in ("layers.4.mlp", "layers.3.mlp", "layers.9.norm", "")] == [
        ("layers.[0-2,4].mlp", "wide"),
        ("layers.3.mlp", "narrow"),
        ("layers.*.norm", "norm"),
        ("", "root"),
    ]
    assert [table.find(name) for name in ("layers.5.mlp", "layers.mlp", "layers.1.mlp.gate", "other")] == [None] * 4
