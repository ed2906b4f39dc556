"""Describe a user's model, in place of transformers' config: sizes that were seen, and the file it is built from."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from actor_init.custom.building import build_custom_model, find_custom_facts, find_dropouts, list_layers
from actor_init.custom.forward_adapter import LogitsError
from actor_init.custom.user_file import UserFunction
from actor_init.spec import UsageError
from capture.facts import Setting

MODEL_TYPE = "custom"
# The ids that a model is tried with, and what stands for sizes that are not found out.
_ROWS, _TOKENS = 2, 5
_UNKNOWN_VOCABULARY, _UNKNOWN_WIDTH = 2**31, 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomConfig:
    """A user's model, cut to its first layers, with the attributes that are read of transformers' configs.

    blocks, num_layers  as typed
    """

    function: UserFunction
    captured: Mapping[str, object] | None
    blocks: str | None
    num_layers: int | None
    class_name: str
    num_hidden_layers: int
    vocab_size: int
    hidden_size: int
    dropout: Mapping[str, float]
    wants_targets: bool
    model_type: str = field(default=MODEL_TYPE)

    @classmethod
    def open(
        cls,
        function: UserFunction,
        captured: Mapping[str, object] | None,
        *,
        blocks: str | None,
        num_layers: int | None,
    ) -> Self:
        """Build the model once, without values, and call it with fake ones. Raises UsageError if it is no model of
        token ids.
        """
        module = build_custom_model(function, captured, blocks=blocks, num_layers=num_layers, dtype=torch.float32)
        facts = find_custom_facts(module)
        assert facts is not None
        sizes = _try_forward(module, str(function))
        return cls(
            function=function,
            captured=captured,
            blocks=blocks,
            num_layers=num_layers,
            class_name=type(module).__name__,
            num_hidden_layers=len(list_layers(module)),
            vocab_size=sizes["vocab_size"],
            hidden_size=sizes["hidden_size"],
            dropout=find_dropouts(module),
            wants_targets=facts.forward.wants_targets,
        )

    def __str__(self) -> str:
        return str(self.function)

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Build the module with parameters on the meta device."""
        captured, blocks, num_layers = self.captured, self.blocks, self.num_layers
        module = build_custom_model(self.function, captured, blocks=blocks, num_layers=num_layers, dtype=dtype)
        facts = find_custom_facts(module)
        assert facts is not None
        facts.forward.wants_targets = self.wants_targets
        return module

    def get_text_config(self) -> Self:
        return self

    def to_json_string(self, *, use_diff: bool = True) -> str:
        """Return what another run must share to be comparable. `use_diff` is for transformers' configs."""
        values = {
            "model_type": self.model_type,
            "model_file_sha256": self.function.sha256,
            "model_function": self.function.function,
            "model_class": self.class_name,
            "num_hidden_layers": self.num_hidden_layers,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            **{f"dropout of {name}": rate for name, rate in self.dropout.items()},
        }
        return json.dumps(values)

    def facts(self) -> dict[str, str]:
        """Return the file and the function, for run.json."""
        return {
            "model_file": str(self.function.file),
            "model_file_sha256": self.function.sha256,
            "model_function": self.function.function,
        }


class CustomVectors:
    """The vectors of a user's model as its own code initialises them."""

    def __init__(self, config: CustomConfig) -> None:
        self._config = config
        self._vectors: Mapping[str, Tensor] | None = None

    def make_vector(self, name: str) -> Tensor:
        if self._vectors is None:
            facts = find_custom_facts(self._config.build(torch.float32))
            assert facts is not None
            self._vectors = facts.vectors
        return self._vectors[name]


def _try_forward(module: nn.Module, function: str) -> dict[str, int]:
    """Call the module with fake tensors, and return the sizes of its vocabulary and of its embedding.

    Code that needs real values stops such a call: then sizes are those of the largest embedding, and a pass says what
    is wrong. Raises UsageError for a result without logits of every token.
    """
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    largest = max(embeddings, key=lambda embedding: embedding.num_embeddings, default=None)
    facts = find_custom_facts(module)
    assert facts is not None
    looked_up: list[nn.Embedding] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), _silence_torch():
        ids_BS = torch.ones(_ROWS, _TOKENS, dtype=torch.long, device="cpu")
        mask_BS, position_BS = torch.ones_like(ids_BS), torch.arange(_TOKENS, device="cpu").expand(_ROWS, _TOKENS)

        def note_lookup(embedding: nn.Module, args: tuple[Any, ...]) -> None:
            if args and args[0] is ids_BS and isinstance(embedding, nn.Embedding):
                looked_up.append(embedding)

        handles = [embedding.register_forward_pre_hook(note_lookup) for embedding in embeddings]
        parameters = dict(module.named_parameters(remove_duplicate=False))
        # Fakes are made by identity, so that tied parameters stay tied.
        fakes = {
            id(parameter): torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            for parameter in parameters.values()
        }
        values = {name: fakes[id(parameter)] for name, parameter in parameters.items()}
        arguments = {"input_ids": ids_BS, "attention_mask": mask_BS, "position_ids": position_BS}
        logits: Tensor | None = None
        try:
            try:
                logits = functional_call(module, values, kwargs=arguments).logits
            except LogitsError:
                if not facts.forward.can_have_targets or facts.forward.wants_targets:
                    raise
                facts.forward.wants_targets = True
                logits = functional_call(module, values, kwargs=arguments).logits
        except LogitsError as error:
            raise UsageError(Setting("model", function), f": {error}") from error
        # The error is real, or it comes of fake tensors alone: a pass will tell.
        except Exception:
            logits = None
        finally:
            for handle in handles:
                handle.remove()
    embedding = looked_up[0] if looked_up else largest
    sizes = [] if embedding is None else [embedding.num_embeddings]
    sizes += [] if logits is None else [logits.shape[-1]]
    return {
        "vocab_size": min(sizes, default=_UNKNOWN_VOCABULARY),
        "hidden_size": _UNKNOWN_WIDTH if embedding is None else embedding.embedding_dim,
    }


@contextmanager
def _silence_torch() -> Iterator[None]:
    """Keep torch from logging the traceback of an operation that has no fake form, as those of mixtures have none."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
