"""Call a user's module with token ids, as its forward's signature asks, and find the logits in what it returns.

Shape letters: B rows, S tokens a row, V vocabulary.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from actor_init.spec import UsageError
from capture.facts import Setting

ID_NAMES = ("input_ids", "idx", "tokens")
MASK, POSITIONS = "attention_mask", "position_ids"
TARGET_NAMES = ("targets", "labels")


class LogitsError(ValueError):
    """Raised for a forward that returns no logits [B, S, V]."""


class ForwardAdapter:
    """Stands for a module's forward: it is called with transformers' keywords, and returns an object with `logits`.

    wants_targets   given the ids as targets, whose loss is thrown away: some forwards return all logits only then
    autocast_dtype  None: no autocast
    """

    def __init__(self, forward: Callable[..., Any], *, ids: str | None, given: frozenset[str], targets: str | None):
        self._forward = forward
        self._ids = ids  # None: the first argument by position
        self._given = given  # of MASK and POSITIONS
        self._targets = targets
        self.wants_targets = False
        self.autocast_dtype: torch.dtype | None = None

    @classmethod
    def from_module(cls, module: nn.Module, function: str) -> "ForwardAdapter":
        """Read the signature of the module's forward. Raises UsageError if token ids are not all that it needs."""
        named = f": the forward of {type(module).__name__}"
        parameters = inspect.signature(module.forward).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        ids = next((name for name in ID_NAMES if name in parameters), ID_NAMES[0] if takes_any else None)
        by_place = [one for one in parameters.values() if one.kind in _POSITIONAL_KINDS]
        if ids is None and not by_place:
            why = f"{named} takes no token ids: allowed are {', '.join(ID_NAMES)}, or a first argument"
            raise UsageError(Setting("model", function), why)
        if ids is None or parameters.get(ids) in by_place[:1]:
            ids, known = None, {by_place[0].name}
        else:
            known = {ids}
        targets = next((name for name in TARGET_NAMES if name in parameters), None)
        known |= {MASK, POSITIONS, *TARGET_NAMES}
        needed = [
            n
            for n, one in parameters.items()
            if one.default is one.empty and one.kind in (*_KEYWORD_KINDS, *_POSITIONAL_KINDS)
        ]
        if unknown := [name for name in needed if name not in known and parameters[name].kind not in _VARIADIC_KINDS]:
            ids_given = f"token ids ({', '.join(ID_NAMES)}, or the first argument)"
            all_given = f"{ids_given}, {MASK}, {POSITIONS} and {' or '.join(TARGET_NAMES)}"
            why = f"{named} needs {unknown[0]}, which a replay does not have: it gives {all_given}"
            advice = "Wrap it in a module that needs no more"
            raise UsageError(Setting("model", function), why, advice)
        given = frozenset(name for name in (MASK, POSITIONS) if takes_any or name in parameters)
        calling = cls(module.forward, ids=ids, given=given, targets=targets)
        calling.wants_targets = targets in needed
        return calling

    @property
    def can_have_targets(self) -> bool:
        return self._targets is not None

    def __call__(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutput:
        """Return the logits [B, S, V] for ids [B, S]. Raises LogitsError if the forward returns others, or none."""
        keywords: dict[str, Any] = {}
        if MASK in self._given and attention_mask is not None:
            keywords[MASK] = attention_mask.long()
        if POSITIONS in self._given and position_ids is not None:
            keywords[POSITIONS] = position_ids
        if self.wants_targets and self._targets is not None:
            keywords[self._targets] = input_ids
        place = [input_ids] if self._ids is None else []
        if self._ids is not None:
            keywords[self._ids] = input_ids
        casting: AbstractContextManager[object] = nullcontext()
        if self.autocast_dtype is not None:
            casting = torch.autocast(input_ids.device.type, self.autocast_dtype)
        with casting:
            output = self._forward(*place, **keywords)
        return CausalLMOutput(logits=find_logits(output, input_ids))


_POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_KEYWORD_KINDS = (inspect.Parameter.KEYWORD_ONLY,)
_VARIADIC_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def find_logits(output: Any, input_ids: Tensor) -> Tensor:
    """Find logits [B, S, V] in a forward's result: itself, its `logits`, or the first such tensor of a tuple.

    Raises LogitsError if there are none.
    """
    found: Any = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif not isinstance(output, Tensor):
        found = getattr(output, "logits", None)
    if found is None and isinstance(output, tuple | list):
        tensors = [one for one in output if isinstance(one, Tensor)]
        found = next((one for one in tensors if one.ndim == 3), tensors[0] if tensors else None)
    if not isinstance(found, Tensor):
        keys = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        raise LogitsError(f"the forward returned a {type(output).__name__}{keys}, and no logits in it. {_ALLOWED}")
    if found.ndim != 3 or found.shape[:2] != input_ids.shape or not found.is_floating_point():
        why = ""
        if found.ndim == 3 and found.shape[1] == 1:
            why = ", those of the last token alone"
        raise LogitsError(
            f"the forward returned {_describe_tensor(found)} for token ids {list(input_ids.shape)}{why}. {_ALLOWED}"
        )
    return found


_ALLOWED = "Allowed are logits [rows, tokens, vocabulary], or an object, dict or tuple that has them"


def _describe_tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
