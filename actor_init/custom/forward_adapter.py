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
    """Stand for a module's forward: it is called with transformers' keywords, and returns an object with `logits`.

    wants_targets   given the ids as targets, whose loss is thrown away: some forwards return all logits only then
    autocast_dtype  None: no autocast

    ids_name      the argument that takes the token ids; None: the first one, by position
    inputs        those of MASK and POSITIONS that the forward takes
    targets_name  the argument that takes targets; None: there is none
    """

    def __init__(
        self, forward: Callable[..., Any], *, ids_name: str | None, inputs: frozenset[str], targets_name: str | None
    ) -> None:
        self._forward = forward
        self._ids_name = ids_name
        self._inputs = inputs
        self._targets_name = targets_name
        self.wants_targets = False
        self.autocast_dtype: torch.dtype | None = None

    @classmethod
    def from_module(cls, module: nn.Module, function: str) -> "ForwardAdapter":
        """Read the signature of the module's forward. Raises UsageError if token ids are not all that it needs."""
        subject = f": the forward of {type(module).__name__}"
        parameters = inspect.signature(module.forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        ids_name = next((name for name in ID_NAMES if name in parameters), ID_NAMES[0] if takes_any else None)
        positional = [parameter for parameter in parameters.values() if parameter.kind in _POSITIONAL_KINDS]
        if ids_name is None and not positional:
            why = f"{subject} takes no token ids: allowed are {', '.join(ID_NAMES)}, or a first argument"
            raise UsageError(Setting("model", function), why)
        if ids_name is None or parameters.get(ids_name) in positional[:1]:
            ids_name, known = None, {positional[0].name}
        else:
            known = {ids_name}
        targets_name = next((name for name in TARGET_NAMES if name in parameters), None)
        known |= {MASK, POSITIONS, *TARGET_NAMES}
        required = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty and parameter.kind in (*_KEYWORD_KINDS, *_POSITIONAL_KINDS)
        ]
        if unknown := [name for name in required if name not in known]:
            ids_argument = f"token ids ({', '.join(ID_NAMES)}, or the first argument)"
            all_arguments = f"{ids_argument}, {MASK}, {POSITIONS} and {' or '.join(TARGET_NAMES)}"
            why = f"{subject} needs {unknown[0]}, which a replay does not have: it gives {all_arguments}"
            advice = "Wrap it in a module that needs no more"
            raise UsageError(Setting("model", function), why, advice)
        inputs = frozenset(name for name in (MASK, POSITIONS) if takes_any or name in parameters)
        adapter = cls(module.forward, ids_name=ids_name, inputs=inputs, targets_name=targets_name)
        adapter.wants_targets = targets_name in required
        return adapter

    @property
    def can_have_targets(self) -> bool:
        return self._targets_name is not None

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
        if MASK in self._inputs and attention_mask is not None:
            keywords[MASK] = attention_mask.long()
        if POSITIONS in self._inputs and position_ids is not None:
            keywords[POSITIONS] = position_ids
        if self.wants_targets and self._targets_name is not None:
            keywords[self._targets_name] = input_ids
        positional = [input_ids] if self._ids_name is None else []
        if self._ids_name is not None:
            keywords[self._ids_name] = input_ids
        autocast: AbstractContextManager[object] = nullcontext()
        if self.autocast_dtype is not None:
            autocast = torch.autocast(input_ids.device.type, self.autocast_dtype)
        with autocast:
            output = self._forward(*positional, **keywords)
        return CausalLMOutput(logits=find_logits(output, input_ids))


_POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_KEYWORD_KINDS = (inspect.Parameter.KEYWORD_ONLY,)


def find_logits(output: Any, input_ids: Tensor) -> Tensor:
    """Find logits [B, S, V] in a forward's result: itself, its `logits`, or the first such tensor of a tuple.

    Raises LogitsError if there are none.
    """
    logits: Any = output
    if isinstance(output, Mapping):
        logits = output.get("logits")
    elif not isinstance(output, Tensor):
        logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, tuple | list):
        tensors = [tensor for tensor in output if isinstance(tensor, Tensor)]
        logits = next((tensor for tensor in tensors if tensor.ndim == 3), tensors[0] if tensors else None)
    if not isinstance(logits, Tensor):
        keys = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        raise LogitsError(f"the forward returned a {type(output).__name__}{keys}, and no logits in it. {_ALLOWED}")
    if logits.ndim != 3 or logits.shape[:2] != input_ids.shape or not logits.is_floating_point():
        why = ""
        if logits.ndim == 3 and logits.shape[1] == 1:
            why = ", those of the last token alone"
        raise LogitsError(
            f"the forward returned {_describe_tensor(logits)} for token ids {list(input_ids.shape)}{why}. {_ALLOWED}"
        )
    return logits


_ALLOWED = "Allowed are logits [rows, tokens, vocabulary], or an object, dict or tuple that has them"


def _describe_tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
