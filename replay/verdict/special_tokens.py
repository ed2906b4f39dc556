"""Read from a model's config which token ids are special: padding, and those that begin and end a text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """The ids of a model's special tokens, as its config names them. None, or an empty set: it names none."""

    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        settings = merge_text_config(config)
        pad, bos, eos = (settings.get(name) for name in ("pad_token_id", "bos_token_id", "eos_token_id"))
        return cls(
            pad_token_id=pad if isinstance(pad, int) and pad >= 0 else None,
            bos_token_id=bos if isinstance(bos, int) else None,
            eos_token_ids=frozenset(id_ for id_ in (eos if isinstance(eos, list) else [eos]) if isinstance(id_, int)),
        )


def merge_text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the config with the settings of its `text_config`, where a multimodal model has one, beside its own."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config
