"""What is no causal LM is refused in one line; configs that transformers writes are read back."""

import json
import math
from pathlib import Path

import pytest
from transformers import BartConfig, BertConfig, LlavaConfig, Mamba2Config, PretrainedConfig, T5Config

from actor_init.model import find_model
from actor_init.model_config import parse_config
from actor_init.spec import ActorSpec, UsageError


@pytest.mark.parametrize("kind", [T5Config, BartConfig, BertConfig, LlavaConfig])
def test_what_is_no_causal_lm_is_refused_in_a_line(kind: type[PretrainedConfig], tmp_path: Path) -> None:
    kind().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="not a causal LM") as refusal:
        find_model(ActorSpec(model=str(tmp_path)), None, "")
    assert len(str(refusal.value)) < 300 + len(str(tmp_path))
    assert "\n" not in str(refusal.value)


def test_an_unknown_type_is_refused_with_the_release() -> None:
    with pytest.raises(UsageError, match=r"model_type 'llama99', which transformers [\d.]+ does not have"):
        find_model(ActorSpec(), {"model_type": "llama99"}, "actor.json")


def test_infinities_are_read_as_transformers_writes_them() -> None:
    values = json.loads(Mamba2Config().to_json_string(use_diff=False))
    assert math.isinf(parse_config(values).time_step_limit[1])
