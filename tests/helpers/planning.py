"""Plans of a matrix for a model and a machine that are made up."""

from collections.abc import Sequence
from typing import Any

from transformers import LlamaConfig

from replay.agreement.matrix import Setting
from replay.agreement.plan import MatrixContext, ParityPlan, plan_matrix

CONFIG = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, hidden_size=32)


def planned(settings: Sequence[Setting], common: dict[str, Any] | None = None, **here: Any) -> ParityPlan:
    facts = {"device": "cpu", "num_devices": 2, "num_inputs": 8, "config": CONFIG, "must_pack": False}
    return plan_matrix(settings, common or {}, MatrixContext(**(facts | here)))
