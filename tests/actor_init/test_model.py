"""What is no causal LM is refused in one line; configs that transformers writes are read back."""

import json
import math
from pathlib import Path

import pytest
from transformers import (
    BartConfig,
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    Mamba2Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    T5Config,
)

from actor_init.model import ModelSource, configure_model, find_model
from actor_init.model_config import cut_layers, parse_config
from actor_init.spec import ActorSpec, UsageError
from actor_init.weights import RandomWeights


@pytest.mark.parametrize("kind", [T5Config, BartConfig, BertConfig, LlavaConfig])
def test_what_is_no_causal_lm_is_refused_in_a_line(kind: type[PretrainedConfig], tmp_path: Path) -> None:
    kind().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="not a causal LM") as refusal:
        find_model(ActorSpec(model=str(tmp_path)), None, "")
    assert len(str(refusal.value)) < 300 + len(str(tmp_path))
    assert "\n" not in str(refusal.value)


def test_the_first_layers_keep_their_own_kinds() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]

    def cut(num_layers: int | None) -> PretrainedConfig:
        return cut_layers(Qwen2Config(num_hidden_layers=3, layer_types=kinds), num_layers)

    for num_layers in (1, 2, 3):
        assert (cut(num_layers).num_hidden_layers, cut(num_layers).layer_types) == (num_layers, kinds[:num_layers])
    assert (cut(None).num_hidden_layers, cut(None).layer_types) == (3, kinds)
    with pytest.raises(UsageError, match=r"num_layers=4, but the model has 3\. Allowed: 1 to 3"):
        cut(4)


def test_an_unknown_type_is_refused_with_the_release() -> None:
    with pytest.raises(UsageError, match=r"model_type 'llama99', which transformers [\d.]+ does not have"):
        find_model(ActorSpec(), {"model_type": "llama99"}, "actor.json")


def test_infinities_are_read_as_transformers_writes_them() -> None:
    values = json.loads(Mamba2Config().to_json_string(use_diff=False))
    assert math.isinf(parse_config(values).time_step_limit[1])


@pytest.mark.filterwarnings("error")
def test_recomputing_activations_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases before 5.23 have the older of two names alone, and 5.23 warns of that one."""
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_key_value_heads=2, **size))
    [block] = model.model.layers
    configure_model(model, ActorSpec(gradient_checkpointing=True))
    assert block.gradient_checkpointing

    if hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        given = []
        monkeypatch.delattr(PreTrainedModel, "activation_checkpointing_enable")
        monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", lambda _, options: given.append(options))
        configure_model(model, ActorSpec(gradient_checkpointing=True))
        assert given == [{"use_reentrant": False}]


@pytest.mark.parametrize(
    ("forward", "frozen"), [(None, ""), (0, ""), (2, ""), (3, "a"), (6, "a"), (7, "b"), (100, "b")]
)
def test_what_a_job_froze_later_holds_from_that_forward_until_the_next_change(forward: int | None, frozen: str) -> None:
    later = {7: frozenset({"b"}), 3: frozenset({"a"})}
    source = ModelSource(
        config=PretrainedConfig(), weights=RandomWeights(seed=0, std=0.02), name="", frozen_later=later
    )
    assert source.find_frozen_at(forward) == frozenset(frozen)
