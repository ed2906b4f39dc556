"""Read what a job computed from its capture: numbers that a replay computes too, and why some may be other quantities.

A claim is one quantity of one pass: the loss, the log-probs of each row, the gradient norm. What nobody can know from
the file, such as the objective of a loss that the loop computed, is the claim's `doubt`: then equal numbers are worth
something, and different ones prove nothing.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from actor_init.as_json import AnyFloat
from actor_init.inputs.packing import count_action_tokens, count_predicted_by_padding
from capture.file_format.capture_file import Call
from capture.file_format.micro_batch import IGNORED_LABEL, SHIFT_LABELS, MicroBatch
from capture.file_format.optimizer_step import OptimizerStep, Sample, choose_sampled_tokens
from replay.objective.objective import tokens_for
from replay.options.spec import LossName, is_objective
from replay.output.text import pluralise
from replay.runlog.records import PassRecord
from replay.tolerances.job_bounds import ACTION_TOKENS, GRAD_NORM, LOG_PROBS, LOSS, TOKENS

MOVED, OPTIMIZER = "weights after a step", "optimizer settings"
WEIGHTING = "weighting of passes"
MISSING_GRADIENT = "gradient"
TOKEN_PLACES = "token_log_probs_places"  # of outputs: row and column of each of `token_log_probs`, in one list
NEXT_TOKENS = "the labels are the next tokens already"
FLOATS = ("float64", "float32", "float16", "bfloat16")
HALVES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16"}
ROUTER_LOSS_WEIGHTS = ("router_aux_loss_coef", "aux_loss_alpha")
ROUTER_LOSS_DOUBT = "it holds the routers' auxiliary loss, which the replay does not compute"


def inner_names(job_name: str) -> Iterator[str]:
    """Return the names that a parameter of the job may have here: the job may have had the model inside others."""
    parts = job_name.split(".")
    return (".".join(parts[begin:]) for begin in range(len(parts)))


def own_name(job_name: str, names: Container[str]) -> str | None:
    """Find the name among `names`, of this model, that a parameter of the job has here."""
    return next((name for name in inner_names(job_name) if name in names), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherValue:
    """The first element that differs."""

    name: str
    index: int  # in the flattened parameter
    recorded: AnyFloat
    replayed: AnyFloat


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightComparison:
    """What the samples of the job's weights tell about this model's weights.

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
    """One value for the pass, one for each row, or one for each of some tokens.

    num_tokens  that each value is of; None where the job does not say
    doubt       why a replay's other numbers would prove nothing, and its equal ones little
    stored_as   dtype in which the job kept a value, coarser perhaps than what it computed in
    """

    name: str
    values: Sequence[float]
    num_tokens: Sequence[int] | None = None
    doubt: str | None = None
    stored_as: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What one rank of the job recorded of one pass."""

    rank: int | None
    step: int | None
    world_size: int | None
    trains: bool
    claims: Sequence[Claim]
    weights: WeightComparison
    num_frozen: int  # parameters that the job did not train
    dtypes: Sequence[str]  # all that the job is known to have computed in; none where it is not known
    settings: Mapping[str, str] = field(default_factory=dict)  # versions and environment
    optimizer_step: int | None = None  # steps that the job's optimizer had taken
    optimizer: OptimizerStep | None = None  # the step after this pass, if it was the last before one
    num_tokens: int = 0  # that the replay's loss is the mean over
    samples: Sequence[Sample] = ()  # of the weights, as the job had them
    divisor: float | None = None  # what the model divided the sum of its losses by; None: its own tokens
    recording: str | None = None  # when it began, ISO 8601
    broke_off: str | None = None  # the incident in which the pass ended, where it computed nothing


def recorded_in(call: Call, batch: MicroBatch, loss: str, weights: WeightComparison) -> Recorded:
    """Read what a call recorded. `batch` is as captured, with its action mask; `loss` is what the replay computes."""
    return Recorded(
        rank=call.origin.rank,
        step=call.origin.step,
        world_size=call.origin.world_size,
        trains=call.trains,
        claims=[
            *_losses(call, batch, loss),
            *_log_probs(call, batch, loss),
            *_token_log_probs(call),
            *_grad_norms(call),
        ],
        weights=weights,
        num_frozen=call.weights.num_frozen if call.weights is not None else 0,
        samples=call.weights.samples if call.weights is not None else (),
        dtypes=dtypes_of(call),
        settings={**call.origin.versions, **call.environment},
        optimizer_step=call.optimizer_step,
        optimizer=call.step,
        num_tokens=count_action_tokens(tokens_for(loss, batch)),
        divisor=None if is_objective(loss) else _given_divisor(call),
        recording=call.recording,
    )


def _losses(call: Call, batch: MicroBatch, loss: str) -> list[Claim]:
    """Claim the model's own loss: as Hugging Face's causal LMs have it, the mean over labels after the first token.

    With `num_items_in_batch`, which transformers' Trainer passes, it is the sum divided by that. Where the replay
    computes the job's objective, the loss that the loop noted is claimed instead.
    """
    if is_objective(loss):
        return _losses_of_objective(call, batch, loss)
    claims: list[Claim] = []
    if isinstance(value := call.outputs.get("loss"), float):
        doubt, tokens = _doubt_of_loss(call, batch, loss), None
        if doubt is None:
            tokens = _num_labels(batch)
            if not tokens:  # the model's is nan, the replay's 0
                return []
            value *= _divisor(call, tokens) / tokens
            doubt = _doubt_of_shift(batch)
            if left_out := _labels_left_out(batch, tokens):
                doubt, tokens = left_out, None
        num_tokens = None if tokens is None else [tokens]
        stored = call.outputs.get("loss_dtype")
        stored_as = stored if isinstance(stored, str) and stored in FLOATS else None
        claims.append(Claim(name=LOSS, values=[value], num_tokens=num_tokens, doubt=doubt, stored_as=stored_as))
    if isinstance(value := call.outputs.get("noted_loss"), float) and all(claim.doubt for claim in claims):
        why = "the loss was noted by the loop, which may have another objective than the replay's"
        claims.append(Claim(name=LOSS, values=[value], doubt=f"{why} --loss {loss}"))
    return claims


def _losses_of_objective(call: Call, batch: MicroBatch, loss: str) -> list[Claim]:
    if isinstance(value := call.outputs.get("noted_loss"), float):
        return [Claim(name=LOSS, values=[value], doubt=_doubt_of_action_mask(batch))]
    if isinstance(value := call.outputs.get("loss"), float):
        why = f"it is the model's own, not of --loss {loss}. Try: recorder.note(loss=...) in the job"
        return [Claim(name=LOSS, values=[value], doubt=why)]
    return []


def _doubt_of_action_mask(batch: MicroBatch) -> str | None:
    if batch.action_mask_BA is None:
        return None
    count, predicted = int(batch.action_mask_BA.sum()), count_action_tokens(batch)
    if count == predicted:
        return None
    return f"{count - predicted} of the job's {count} action tokens are padding or follow no token: no log-prob here"


def _num_labels(batch: MicroBatch) -> int:
    next_BS = batch.shift_labels
    if next_BS is None:
        assert batch.labels_BS is not None
        next_BS = batch.labels_BS[:, 1:]
    return int((next_BS != IGNORED_LABEL).sum())


def _labels_left_out(batch: MicroBatch, tokens: int) -> str | None:
    """Say so where padding predicts some of the job's labels, and nothing predicts them in this replay."""
    number = 0 if batch.padding_predicts else count_predicted_by_padding(batch)
    if not number:
        return None
    are = "is" if number == 1 else "are"
    return (
        f"{number} of the job's {pluralise(tokens, 'label')} {are} predicted by padding on the left, which only rows "
        "padded as captured have. Try: --no-packing, without --ring"
    )


def _doubt_of_shift(batch: MicroBatch) -> str | None:
    """Say so where the labels are the next tokens, which a model that shifts them itself would not be given."""
    labels_BS, ids_BS = batch.labels_BS, batch.sequences_BS
    if labels_BS is None or batch.shift_labels is not None:
        return None
    given = labels_BS[:, :-1] != IGNORED_LABEL
    are_next = torch.equal(labels_BS[:, :-1][given], ids_BS[:, 1:][given])
    are_own = torch.equal(labels_BS[:, :-1][given], ids_BS[:, :-1][given])
    if not are_next or are_own:
        return None
    return (
        f"{NEXT_TOKENS}, so a model that shifts them itself makes each token predict the one after the next. If this "
        "one does not shift, record them as shift_labels (--arguments NAME=shift_labels, by their NAME in its forward)"
    )


def _doubt_of_loss(call: Call, batch: MicroBatch, loss: str) -> str | None:
    if batch.labels_BS is None and batch.shift_labels is None:
        return "the model was given no labels, so its loss is of an objective that the replay does not compute"
    if loss == LossName.STAND_IN and batch.action_mask_BA is not None:
        return "the recorded loss is of the labels, the replay's of the action tokens. Try: --loss sft"
    is_other = SHIFT_LABELS in call.tensors and batch.shift_labels is None  # of another shape
    if is_other or call.call_facts.get("output_router_logits"):
        return "the model's loss is not the mean over its labels alone"
    return None


def _divisor(call: Call, tokens: int) -> float:
    given = _given_divisor(call)
    return float(tokens) if given is None else given


def _given_divisor(call: Call) -> float | None:
    """Return the divisor of the sum of a pass's losses, where the job gave one."""
    if (given := call.tensors.get("num_items_in_batch")) is not None:
        return float(given.item())
    fact = call.call_facts.get("num_items_in_batch")
    return float(fact) if isinstance(fact, int | float) else None


def token_places(call: Call, num_rows: int, num_tokens: int) -> list[tuple[int, int]]:
    """Return the row and the column of each token whose log-prob the job recorded.

    The shape decides, unless it is a part of a larger pass, which names the places that are left of that one's.
    """
    named = call.outputs.get(TOKEN_PLACES)
    if not isinstance(named, list):
        return choose_sampled_tokens(num_rows, num_tokens)
    places = [(int(row), int(column)) for row, column in zip(named[::2], named[1::2], strict=False)]
    return [(row, column) for row, column in places if 0 <= row < num_rows and 0 < column < num_tokens]


def _token_log_probs(call: Call) -> list[Claim]:
    values = call.outputs.get("token_log_probs")
    return [Claim(name=TOKENS, values=values)] if isinstance(values, list) and values else []


def _log_probs(call: Call, batch: MicroBatch, loss: str) -> list[Claim]:
    claims: list[Claim] = []
    for kept_as in ("log_probs_row_sums", "output_row_sums"):
        sums = call.outputs.get(kept_as)
        if not isinstance(sums, list) or len(sums) != batch.num_rows:
            continue
        doubt, tokens = None, None
        if loss != LossName.SFT and batch.action_mask_BA is not None:
            tokens = batch.action_mask_BA.sum(dim=1).tolist()
        else:
            doubt = "rows of numbers were recorded, and nothing says that they are the log-probs of the replay's tokens"
        claims.append(Claim(name=LOG_PROBS, values=sums, num_tokens=tokens, doubt=doubt))
        values = call.outputs.get(kept_as.replace("row_sums", "values"))
        shape = call.outputs.get(kept_as.replace("row_sums", "shape"))
        mask = batch.action_mask_BA
        if isinstance(values, list) and mask is not None and shape == list(mask.shape):
            claims.append(Claim(name=ACTION_TOKENS, values=values, doubt=doubt))
    return claims


def _grad_norms(call: Call) -> list[Claim]:
    value = call.outputs.get("grad_norm")
    if not isinstance(value, float):
        return []
    doubt = "the job may have scaled its loss for fp16" if call.step is None and "float16" in dtypes_of(call) else None
    return [Claim(name=GRAD_NORM, values=[value], doubt=doubt)]


def dtypes_of(call: Call) -> list[str]:
    """List the dtypes that the job computed in: weights, logits, autocast, accelerate, and TF32."""
    environment = call.environment
    said = [sample.dtype for sample in call.weights.samples] if call.weights is not None else []
    said += [logits] if (logits := str(call.outputs.get("logits_dtype"))) in FLOATS else []
    mixed = (environment.get("autocast", "off"), environment.get("ACCELERATE_MIXED_PRECISION", "no"))
    said += [HALVES[name] for name in mixed if name in HALVES]
    has_tf32 = environment.get("torch.float32_matmul_precision", "highest") != "highest"
    return sorted({*said, *(["tf32"] if has_tf32 and environment.get("device") != "CPU" else [])})


def why_not_one_job(passes: Sequence[tuple[PassRecord, Recorded]]) -> str | None:
    """Say which recordings these passes are of, in the order in which they were replayed; None if it is one.

    Each rank of a job has a recording of its own. Converted passes have none, and passes without a number of the
    job's are not judged: neither counts.
    """
    named = [(record.index, own.rank, own.recording) for record, own in passes if own.claims and own.recording]
    first = {rank: began for _, rank, began in reversed(named)}
    other = next(((index, rank) for index, rank, began in named if began != first[rank]), None)
    if other is None:
        return None
    index, rank = other
    began = sorted({one for _, of_rank, one in named if of_rank == rank})
    times = f"{', '.join(began[:-1])} and {began[-1]}"
    fewer = f"--max-inputs {index}, for those of one alone, or " if index else ""
    return (
        f"these passes are of {len(began)} recordings in one folder, which began {times}. "
        f"Try: {fewer}a folder for each (the times are in the files' names)"
    )


def without_router_loss(recorded: Recorded, call: Call, config: PretrainedConfig) -> Recorded:
    """Return `recorded`, its loss and gradient norm doubted if the job's model added its routers' loss to its own.

    transformers adds it where labels are given and `output_router_logits` is asked for, by the call or by the config.
    """
    if not adds_router_loss(call, config):
        return recorded
    return replace(recorded, claims=[_doubted(claim) for claim in recorded.claims])


def adds_router_loss(call: Call, config: PretrainedConfig) -> bool:
    text = config.get_text_config()
    coefficients = [
        value for name in ROUTER_LOSS_WEIGHTS if isinstance(value := getattr(text, name, None), (int, float))
    ]
    asked = call.call_facts.get("output_router_logits")
    if asked is None:
        asked = getattr(text, "output_router_logits", False)
    return bool(asked) and any(coefficients) and "labels" in call.tensors


def is_mixture(parameters: Iterable[str]) -> bool:
    """Tell by the names of its parameters whether a model has experts that a router chooses from."""
    return any(word in name for name in parameters for word in ("expert", "router"))


def _doubted(claim: Claim) -> Claim:
    return replace(claim, doubt=ROUTER_LOSS_DOUBT) if claim.name in (LOSS, GRAD_NORM) else claim


# Collect what a verdict needs of a replayed pass beside its record: single log-probs, and single gradients.
#
# Shape letters: B rows, S tokens a row, A trailing tokens of a row that the action mask covers.


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientSamples:
    """The gradient at the end of a window, of every parameter that has one.

    norms   by parameter
    sizes   numbers of elements
    values  at the places that the job's samples have: by parameter and first element
    """

    norms: Mapping[str, float]
    sizes: Mapping[str, int]
    values: Mapping[tuple[str, int], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What a replay computed of one pass.

    token_log_probs   at `token_places` of the captured rows; None for tokens that have none in the replay
    action_log_probs  [B, A] in one list, None where the action mask is off; empty where the job kept none
    loss_gain         how far the loss moves if each log-prob moves by 1; 1 of a mean of log-probs
    gradient          None where the pass ends no window, or nobody asked
    """

    token_log_probs: Sequence[float | None] = ()
    action_log_probs: Sequence[float | None] = ()
    loss_gain: float = 1.0
    gradient: GradientSamples | None = field(default=None)


def action_log_probs(log_probs_BA: Tensor, has_BA: Tensor, *, is_reversed: bool) -> list[float | None]:
    """List the log-probs row by row; None where `has_BA` is False."""
    values, has = log_probs_BA.detach().double().cpu(), has_BA.cpu()
    if is_reversed:
        values, has = values.flip(0), has.flip(0)
    pairs = zip(values.flatten().tolist(), has.flatten().tolist(), strict=True)
    return [value if is_there else None for value, is_there in pairs]


def sampled_log_probs(
    log_probs_BA: Tensor, has_BA: Tensor, places: Sequence[tuple[int, int]], *, first: int, is_reversed: bool
) -> list[float | None]:
    """List the log-probs of the tokens at these rows and columns; None for those that have none.

    has_BA       where the log-prob is that of the row's own token
    first        the column of the first of A
    is_reversed  the rows are the captured ones from the last to the first
    """
    values, has = log_probs_BA.detach().double().cpu(), has_BA.cpu()
    if is_reversed:
        values, has = values.flip(0), has.flip(0)
    shifted = [(row, token - first) for row, token in places]
    return [float(values[row, column]) if column >= 0 and bool(has[row, column]) else None for row, column in shifted]


@torch.no_grad()
def gradient_samples(
    gradients: Iterable[tuple[str, Tensor]], wanted: Mapping[str, Sequence[Sample]]
) -> GradientSamples:
    """Take norms, sizes and the wanted samples of `gradients`, which are whole; `wanted` has the replay's names.

    For all ranks to call, since a backend gathers each gradient.
    """
    norms: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    values: dict[tuple[str, int], tuple[float, ...]] = {}
    for name, gradient in gradients:
        norms[name] = torch.linalg.vector_norm(gradient, dtype=torch.float64 if gradient.device.type == "cpu" else None)
        sizes[name] = gradient.numel()
        for sample in wanted.get(name, ()):
            run = gradient.reshape(-1)[sample.start : sample.start + len(sample.values)]
            values[name, sample.start] = tuple(run.double().tolist())
    return GradientSamples(norms={name: float(norm) for name, norm in norms.items()}, sizes=sizes, values=values)
