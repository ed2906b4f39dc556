"""Find what a pass puts out: its loss, rows of numbers, and the log-probs of a few of its tokens.

The job's thread only starts copies of it; the writer's thread turns them into plain data.
"""

import zlib
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capture.file_format.optimizer_step import choose_sampled_tokens
from capture.file_format.safe_unpickler import type_name
from capture.file_format.tensor_codec import Output, can_encode, view_bytes

# So many logits are computed with at once on the CPU: as many as its cache holds.
_CPU_ELEMENTS = 2**18
# Positions of the sampled tokens of a shape on a device; at most this many shapes are remembered.
_MAX_SHAPES_REMEMBERED = 64
_positions: "OrderedDict[tuple[int, int, torch.device], SampledPositions]" = OrderedDict()

# Outputs with a number for each token: their values are kept beside their sums, up to so many.
_TOKEN_OUTPUTS = ("log_probs", "output")
_MAX_TOKEN_VALUES = 65_536
# Outputs of which every value is kept, and nothing else: they have few.
_SMALL_OUTPUTS = ("token_log_probs",)
# Nodes of autograd that pass a loss on, summed over tokens, scaled, cast, or added to another: torch's, DDP's and
# DeepSpeed's.
_PASSING_NODES = (
    *("AddBackward", "DivBackward", "MeanBackward", "MulBackward", "NegBackward", "SumBackward", "ToCopyBackward"),
    *("AliasBackward", "ReshapeAliasBackward", "SqueezeBackward", "UnsqueezeBackward", "ViewBackward"),
    *("_DDPSinkBackward", "PreBackwardFunctionForModuleBackward"),
)
_MAX_NODES = 16

# Shapes: B rows, S tokens, V vocabulary, N sampled tokens.


def find_logits(output: Any, ids_BS: Tensor, vocabularies: Collection[int] = ()) -> Tensor | None:
    """Find the logits of each token in a forward's output; None if there are none in a plain tensor.

    Logits without a name are told from hidden states by their width, which must be one of `vocabularies`.
    """
    logits = output.get("logits") if isinstance(output, dict) else None
    if not isinstance(output, dict):
        members = output if isinstance(output, tuple | list) else (output,)
        tensors_BSX = (member for member in members if isinstance(member, Tensor) and member.ndim == 3)
        logits = next((tensor for tensor in tensors_BSX if tensor.shape[2] in vocabularies), None)
    if type(logits) is not Tensor or logits.ndim != 3 or not logits.is_floating_point() or not logits.numel():
        return None
    fits_ids = type(ids_BS) is Tensor and not ids_BS.is_floating_point() and logits.shape[:2] == ids_BS.shape
    return logits if fits_ids and logits.device == ids_BS.device else None


@torch.no_grad()
def compute_token_log_probs(logits_BSV: Tensor, ids_BS: Tensor) -> Tensor | None:
    """Compute log-probs, in fp32, of the ids at `choose_sampled_tokens` from the logits one token before.

    Log-probs tell tokens apart, which a loss does not. An id without a logit gives nan.
    """
    if logits_BSV.shape[1] < 2:
        return None
    positions = find_sampled_positions(ids_BS.shape[0], ids_BS.shape[1], logits_BSV.device)
    logits_BSV = logits_BSV.detach()
    ids_N = ids_BS.take(positions.tokens_N).long()
    known_N = ids_N.clamp(0, logits_BSV.shape[2] - 1)
    if logits_BSV.device.type == "cpu":
        num_at_once = max(1, _CPU_ELEMENTS // logits_BSV.shape[2])
        pieces = zip(positions.before_N.split(num_at_once), known_N.split(num_at_once), strict=True)
        log_probs_N = torch.cat([_compute_log_probs(select_rows(logits_BSV, before), ids) for before, ids in pieces])
    else:
        log_probs_N = _compute_log_probs(select_rows(logits_BSV, positions.before_N), known_N)
    return log_probs_N.masked_fill_(known_N != ids_N, torch.nan)


def _compute_log_probs(logits_NV: Tensor, ids_N: Tensor) -> Tensor:
    return logits_NV.float().log_softmax(dim=1).gather(1, ids_N[:, None])[:, 0]


def select_rows(tensor_BSV: Tensor, positions_N: Tensor) -> Tensor:
    """Return a copy [N, V] of the rows at these positions, which count through [B, S].

    Of a contiguous tensor whole rows are copied, which takes a device a quarter of the time of an index by two tensors.
    Otherwise the tensor must not be flattened: that would copy all of it.
    """
    if tensor_BSV.is_contiguous():
        return tensor_BSV.flatten(0, 1).index_select(0, positions_N)
    num_tokens = tensor_BSV.shape[1]
    return tensor_BSV[positions_N // num_tokens, positions_N % num_tokens]


class SampledPositions(NamedTuple):
    """Where the sampled tokens are, and the tokens before them, whose logits predict them: positions in [B, S], [N]."""

    tokens_N: Tensor
    before_N: Tensor


def find_sampled_positions(num_rows: int, num_tokens: int, device: torch.device) -> SampledPositions:
    """Find the sampled tokens of a shape, as tensors on the device."""
    key = num_rows, num_tokens, device
    if key not in _positions:
        tokens = [row * num_tokens + column for row, column in choose_sampled_tokens(num_rows, num_tokens)]
        positions = torch.tensor([tokens, [token - 1 for token in tokens]], device="cpu")
        # A copy from pinned memory does not wait for the device.
        if device.type == "cuda":
            positions = positions.pin_memory().to(device, non_blocking=True)
        _positions[key] = SampledPositions(*positions.to(device).unbind())
        if len(_positions) > _MAX_SHAPES_REMEMBERED:
            _positions.popitem(last=False)
    return _positions[key]


def find_outputs(output: Any, *, with_rows: bool) -> dict[str, Tensor]:
    """Find `loss` in a forward's result, and `output` if the result is a row of numbers for each row.

    In a tuple, the loss is its only number. A tuple without a number, or with several, is judged by its first member.
    """
    if isinstance(output, tuple) and output:
        tensors = [member for member in output if isinstance(member, Tensor)]
        numbers = [tensor for tensor in tensors if tensor.ndim == 0 and tensor.is_floating_point()]
        output = numbers[0] if len(numbers) == 1 else output[0]
    if isinstance(output, dict):
        loss = output.get("loss")
        return {"loss": loss} if isinstance(loss, Tensor) and loss.numel() == 1 and can_encode(loss) else {}
    if not isinstance(output, Tensor) or not output.is_floating_point() or not can_encode(output):
        return {}
    if output.ndim == 0:
        return {"loss": output}
    return {"output": output} if output.ndim == 2 and with_rows else {}


def describe_outputs(output: Any, loss: Tensor | None) -> dict[str, str]:
    """Return the dtypes of logits and loss, and the function that made the loss.

    The dtypes tell more of a job's arithmetic than that of its weights.
    """
    logits = output.get("logits") if isinstance(output, dict) else None
    tensors = {"logits_dtype": logits, "loss_dtype": loss}
    dtypes = {
        name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items() if isinstance(tensor, Tensor)
    }
    return dtypes | describe_loss_function(loss)


def describe_loss_function(loss: Any) -> dict[str, str]:
    """Name autograd's node of the function that made a loss, behind those that scale, add up or cast it.

    Such as `NllLossBackward0`, or `CompiledFunctionBackward` of what torch.compile has compiled. A loss without a
    graph has none.
    """
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return {}
    node, output_number = loss.grad_fn, loss.output_nr
    for _ in range(_MAX_NODES):
        inputs = [(function, number) for function, number in node.next_functions if function is not None]
        if not node.name().startswith(_PASSING_NODES) or not inputs:
            break
        # A wrapper's function returns as many tensors as it is given.
        node, output_number = inputs[output_number if output_number < len(inputs) else 0]
    return {"loss_function": node.name()}


def sort_noted_values(values: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, float | str]]:
    """Sort what a job noted into tensors to copy and plain values.

    A DTensor becomes the name of its type: reading its value would take a collective. Raises TypeError or ValueError
    for what is no number.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, float | str] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            if can_encode(value):
                tensors[name] = value
            else:
                plain[name] = type_name(value)
        elif value is not None:
            plain[name] = float(value)
    return tensors, plain


def summarise_outputs(tensors: Mapping[str, Tensor]) -> dict[str, Output]:
    """Turn tensors on the host into plain outputs.

    A single number is kept as it is. Of several, the sum of each row and a checksum of all bytes are kept. Of outputs
    with a number for each token, up to 65,536 values are kept too, flat, with their shape.
    """
    outputs: dict[str, Output] = {}
    for name, tensor in tensors.items():
        if name in _SMALL_OUTPUTS:
            outputs[name] = tensor.double().tolist()
            continue
        if name in _TOKEN_OUTPUTS and tensor.is_floating_point() and 0 < tensor.numel() <= _MAX_TOKEN_VALUES:
            outputs[f"{name}_values"] = tensor.double().flatten().tolist()
            outputs[f"{name}_shape"] = list(tensor.shape)
        if tensor.numel() == 1:
            outputs[name] = float(tensor.item())
            continue
        rows = tensor.reshape(tensor.shape[0], -1) if tensor.ndim > 1 else tensor.reshape(1, -1)
        outputs[f"{name}_row_sums"] = rows.double().sum(dim=1).tolist()
        outputs[f"{name}_crc32"] = zlib.crc32(view_bytes(tensor.contiguous().reshape(-1)))
    return outputs
