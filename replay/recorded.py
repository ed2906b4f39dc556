"""What a capture says that its job computed, as numbers that a replay computes too; and why some of them may not be.

A claim is one quantity of one pass: the loss, the log-probs of each row, the gradient norm. What nobody can know from
the file, such as the objective of a loss that the loop computed, is the claim's `doubt`: then equal numbers are worth
something, and different ones prove nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from capture.capture_file import Call
from capture.micro_batch import IGNORED_LABEL, MicroBatch
from replay.spec import LossName

LOSS, LOG_PROBS, GRAD_NORM = "loss", "log-probs", "gradient norm"
FLOATS = ("float64", "float32", "float16", "bfloat16")
HALVES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherValue:
    """The first element that is another one."""

    name: str
    index: int  # in the flattened parameter
    recorded: float
    found: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsFound:
    """What samples of the job's weights say of this model's.

    doubt  why equal samples do not prove equal weights; None: they do, as far as samples can
    """

    compared: tuple[str, ...] = ()  # parameters
    differing: tuple[str, ...] = ()  # of those
    num_parameters: int = 0  # of the job's model
    first: OtherValue | None = None
    is_sharded: bool = False  # the job's other ranks kept the other samples
    doubt: str | None = None

    @property
    def are_same(self) -> bool:
        return bool(self.compared) and not self.differing and self.doubt is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One value for the pass, or one for each row, each of so many tokens."""

    name: str
    values: Sequence[float]
    num_tokens: Sequence[int] | None = None  # None where the job does not say
    doubt: str | None = None  # why a replay's other numbers would prove nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """Of one pass, by one rank of the job."""

    rank: int | None
    step: int | None
    world_size: int | None
    trains: bool
    claims: Sequence[Claim]
    weights: WeightsFound
    num_frozen: int  # parameters that the job did not train
    dtypes: Sequence[str]  # all that the job is known to have computed in; none where it is not known
    settings: Mapping[str, str] = field(default_factory=dict)  # versions and environment


def recorded_in(call: Call, batch: MicroBatch, loss: LossName, weights: WeightsFound) -> Recorded:
    """`batch` as it was captured, with its action mask; `loss` is what the replay computes."""
    return Recorded(
        rank=call.origin.rank,
        step=call.origin.step,
        world_size=call.origin.world_size,
        trains=call.trains,
        claims=[*_losses(call, batch, loss), *_log_probs(call, batch, loss), *_grad_norms(call)],
        weights=weights,
        num_frozen=call.weights.num_frozen if call.weights is not None else 0,
        dtypes=_dtypes(call),
        settings={**call.origin.versions, **call.environment},
    )


def _losses(call: Call, batch: MicroBatch, loss: LossName) -> list[Claim]:
    """The model's own loss: of labels, as Hugging Face's causal LMs have it, the mean over those after the first token.

    With `num_items_in_batch`, which transformers' Trainer passes, it is the sum divided by that.
    """
    found: list[Claim] = []
    if isinstance(value := call.outputs.get("loss"), float):
        doubt, tokens = _doubt_of_loss(call, batch, loss), None
        if doubt is None:
            assert batch.labels_BS is not None
            tokens = int((batch.labels_BS[:, 1:] != IGNORED_LABEL).sum())
            if not tokens:  # the model's is nan, the replay's 0
                return []
            value *= _divisor(call, tokens) / tokens
        found.append(Claim(name=LOSS, values=[value], num_tokens=None if tokens is None else [tokens], doubt=doubt))
    if isinstance(value := call.outputs.get("noted_loss"), float) and all(claim.doubt for claim in found):
        why = "the loss was noted by the loop, which may have another objective than the replay's"
        found.append(Claim(name=LOSS, values=[value], doubt=f"{why} --loss {loss}"))
    return found


def _doubt_of_loss(call: Call, batch: MicroBatch, loss: LossName) -> str | None:
    if batch.labels_BS is None:
        return "the model was given no labels, so its loss is of an objective that the replay does not compute"
    if loss is LossName.STAND_IN and batch.action_mask_BA is not None:
        return "the recorded loss is of the labels, the replay's of the action tokens. Try: --loss sft"
    if "shift_labels" in call.tensors or call.call_facts.get("output_router_logits"):
        return "the model's loss is not the mean over its labels alone"
    return None


def _divisor(call: Call, tokens: int) -> float:
    if (given := call.tensors.get("num_items_in_batch")) is not None:
        return float(given.item())
    fact = call.call_facts.get("num_items_in_batch")
    return float(tokens if fact is None else fact)


def _log_probs(call: Call, batch: MicroBatch, loss: LossName) -> list[Claim]:
    found: list[Claim] = []
    for kept_as in ("log_probs_row_sums", "output_row_sums"):
        sums = call.outputs.get(kept_as)
        if not isinstance(sums, list) or len(sums) != batch.num_rows:
            continue
        doubt, tokens = None, None
        if loss is LossName.STAND_IN and batch.action_mask_BA is not None:
            tokens = batch.action_mask_BA.sum(dim=1).tolist()
        else:
            doubt = "rows of numbers were recorded, and nothing says that they are the log-probs of the replay's tokens"
        found.append(Claim(name=LOG_PROBS, values=sums, num_tokens=tokens, doubt=doubt))
    return found


def _grad_norms(call: Call) -> list[Claim]:
    value = call.outputs.get("grad_norm")
    if not isinstance(value, float):
        return []
    doubt = None
    if "num_items_in_batch" in call.tensors or call.call_facts.get("num_items_in_batch") is not None:
        doubt = "the job weighted its micro-batches by their numbers of tokens"
    if "float16" in _dtypes(call):
        doubt = "the job may have scaled its loss for fp16"
    return [Claim(name=GRAD_NORM, values=[value], doubt=doubt)]


def _dtypes(call: Call) -> list[str]:
    """Of the weights, of the logits, of autocast, of accelerate, and TF32."""
    environment = call.environment
    said = [sample.dtype for sample in call.weights.samples] if call.weights is not None else []
    said += [logits] if (logits := str(call.outputs.get("logits_dtype"))) in FLOATS else []
    mixed = (environment.get("autocast", "off"), environment.get("ACCELERATE_MIXED_PRECISION", "no"))
    said += [HALVES[name] for name in mixed if name in HALVES]
    has_tf32 = environment.get("torch.float32_matmul_precision", "highest") != "highest"
    return sorted({*said, *(["tf32"] if has_tf32 and environment.get("device") != "CPU" else [])})
