"""Hold the values of a pass that a verdict compares: those that the job recorded, and those that the replay computed.

A claim is one quantity that the job recorded of a pass: the loss, the log-probs of each row, the gradient norm. A claim
has a `doubt` where the capture does not tell whether the replay computes the same quantity, as with a loss whose
objective only the job's loop knew: then equal numbers are evidence, and different ones prove nothing.

Shape letters: B rows, S tokens a row, A columns of the action mask (the last tokens of each row).
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from actor_init.as_json import AnyFloat
from actor_init.inputs.packing import count_action_tokens, count_predicted_by_padding
from actor_init.routes import RouterFlips
from capture.file_format.capture_file import CapturedCall
from capture.file_format.micro_batch import IGNORED_LABEL, SHIFT_LABELS, MicroBatch
from capture.file_format.optimizer_step import OptimizerStep, Sample, choose_sampled_tokens
from capture.file_format.tensor_codec import TrainingMode
from replay.objective.objective import WEIGHTS_IN_MEAN, LogProbWeights, name_loss, select_loss_tokens
from replay.options.declarations.recorded import FROM_LOGIT_GRADIENT
from replay.options.declarations.tensor_names import ADVANTAGES, OLD_LOG_PROBS, REF_CHOSEN, REF_LOG_PROBS, REF_REJECTED
from replay.options.spec import LossName, is_objective
from replay.output.text import pluralise
from replay.runlog.records import PassRecord
from replay.tolerances.job_bounds import ACTION_TOKENS, GRAD_NORM, LOG_PROBS, LOSS, TOKEN_LOG_PROBS
from replay.verdict.gradient_samples import GradientSamples
from replay.verdict.noted_log_probs import NotedLogProbs
from replay.verdict.random_draws import RandomDraws
from replay.verdict.special_tokens import SpecialTokens
from replay.verdict.state_samples import StateElements
from replay.verdict.token_traits import TokenTraits, read_token_traits
from replay.verdict.tried_losses import TriedLosses

MOVED, OPTIMIZER, OPTIMIZER_STATE = "weights after a step", "optimizer settings", "optimizer state"
WEIGHTING, WEIGHTS_OF_RANKS = "weighting of passes", "weights of the ranks"
MISSING_GRADIENT = "gradient"
# The output of a capture that holds the row and the column of each of its `token_log_probs`, in one list.
TOKEN_POSITIONS_KEY = "token_log_probs_places"
ROUTER_LOSS_DOUBT = "it holds the routers' auxiliary loss, which the replay does not compute"
NOTED_LOSS = "the loss was noted by the loop"
NEXT_TOKENS = "the labels are the next tokens already"
FLOATS = ("float64", "float32", "float16", "bfloat16")
HALVES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16"}


def list_inner_names(job_name: str) -> Iterator[str]:
    """List the names that a parameter of the job may have here: the job may have wrapped the model in other modules."""
    parts = job_name.split(".")
    return (".".join(parts[begin:]) for begin in range(len(parts)))


def match_parameter_name(job_name: str, names: Container[str]) -> str | None:
    """Find the one of this model's `names` that a parameter of the job has here."""
    return next((name for name in list_inner_names(job_name) if name in names), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class DifferingElement:
    """The first element of a parameter that differs; `index` counts in the flattened parameter."""

    name: str
    index: int
    recorded: AnyFloat
    replayed: AnyFloat


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightComparison:
    """What the samples of the job's weights tell about this model's weights.

    compared        the parameters of which samples were compared
    differing       those of them that differ
    num_parameters  of the job's whole model
    is_sharded      the job's other ranks sampled the other parameters
    doubt           why equal samples do not prove equal weights; None: they do, as far as samples can
    """

    compared: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    num_parameters: int = 0
    first: DifferingElement | None = None
    is_sharded: bool = False
    doubt: str | None = None

    @property
    def are_same(self) -> bool:
        return bool(self.compared) and not self.differing and self.doubt is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A quantity that the job recorded: one value for the pass, one for each row, or one for each of some tokens.

    num_tokens  how many tokens each value is of; None where the job does not say
    doubt       why a replay's other numbers would prove nothing, and its equal ones little
    stored_as   the dtype in which the job stored a value, which may be coarser than the one that it computed in
    """

    name: str
    values: Sequence[float]
    num_tokens: Sequence[int] | None = None
    doubt: str | None = None
    stored_as: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedPass:
    """What one rank of the job recorded of one pass.

    forward_number    the number of the forward in the job
    num_frozen        how many parameters the job did not train
    dtypes            all that the job is known to have computed in; none where it is not known
    environment       versions of libraries, and settings such as the device
    num_steps_before  how many steps the job's optimizer had taken
    step_after        the optimizer's step after this pass, if there was one before the next pass
    num_tokens        the tokens that the replay's loss is the mean over
    samples           of the weights, as the job had them
    divisor           what the model divided the sum of its losses by; None: the number of its own tokens
    recording         the recording's id
    incident          the incident that ended the pass before it computed anything
    draws             the random numbers that the forward drew; None where their end was not recorded
    training          which parts of the model were in training mode; None where that was not recorded
    tokens            traits of the tokens; None where they were not read
    has_job_weights_of_tokens  the replay's loss weighs each token's log-prob as the job's gradient did
    num_left_out      targets of the job's loss that padding predicts, so that the replay's loss is not of them
    noted_log_probs   sums of each sequence's log-probs that the job noted, by whose they are; chosen sequences first
    largest_advantage  the size of the largest advantage that the job noted; None: it noted none
    """

    rank: int | None
    forward_number: int | None
    world_size: int | None
    trains: bool
    claims: Sequence[Claim]
    weight_comparison: WeightComparison
    num_frozen: int
    dtypes: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    num_steps_before: int | None = None
    step_after: OptimizerStep | None = None
    num_tokens: int = 0
    samples: Sequence[Sample] = ()
    divisor: float | None = None
    recording: str | None = None
    incident: str | None = None
    draws: RandomDraws | None = None
    training: TrainingMode | None = None
    tokens: TokenTraits | None = None
    has_job_weights_of_tokens: bool = False
    num_left_out: int = 0
    noted_log_probs: Mapping[str, Sequence[float]] = field(default_factory=dict)
    largest_advantage: AnyFloat | None = None


def read_recorded_pass(
    call: CapturedCall,
    batch: MicroBatch,
    loss: str,
    weight_comparison: WeightComparison,
    special_tokens: SpecialTokens,
) -> RecordedPass:
    """Read what the job recorded of one pass.

    batch    as captured, with its action mask
    loss     what the replay computes
    weight_comparison  of the job's weights with the replay's
    """
    is_recorded = loss == FROM_LOGIT_GRADIENT.name
    num_tokens = count_action_tokens(select_loss_tokens(loss, batch))
    targets_BS = batch.loss_targets_BS if is_recorded else None
    return RecordedPass(
        rank=call.origin.rank,
        forward_number=call.origin.forward_number,
        world_size=call.origin.world_size,
        trains=call.trains,
        claims=[
            *_claim_losses(call, batch, loss),
            *_claim_log_probs(call, batch, loss),
            *_claim_token_log_probs(call),
            *_claim_grad_norm(call),
        ],
        weight_comparison=weight_comparison,
        num_frozen=call.weights.num_frozen if call.weights is not None else 0,
        samples=call.weights.samples if call.weights is not None else (),
        dtypes=list_job_dtypes(call),
        environment={**call.origin.versions, **call.environment},
        num_steps_before=call.optimizer_step,
        step_after=call.step,
        num_tokens=num_tokens,
        divisor=None if is_objective(loss) else read_divisor(call),
        recording=call.recording,
        draws=RandomDraws.from_call(call),
        training=call.training,
        tokens=read_token_traits(call, batch, special_tokens),
        has_job_weights_of_tokens=is_recorded,
        num_left_out=0 if targets_BS is None else int((targets_BS != IGNORED_LABEL).sum()) - num_tokens,
        noted_log_probs=_sum_noted_log_probs(call, batch),
        largest_advantage=_find_largest_advantage(call, batch),
    )


def _find_largest_advantage(call: CapturedCall, batch: MicroBatch) -> float | None:
    tensors = {**call.tensors, **call.notes}
    advantages = next((tensors[name] for name in ADVANTAGES if name in tensors), None)
    if advantages is None or not advantages.numel() or not advantages.is_floating_point():
        return None
    mask_BA = batch.action_mask_BA
    if mask_BA is not None and mask_BA.shape == advantages.shape:
        advantages = torch.where(mask_BA.bool(), advantages, 0)
    return float(advantages.abs().max())


def _sum_noted_log_probs(call: CapturedCall, batch: MicroBatch) -> dict[str, list[float]]:
    """Sum the log-probs of each sequence that the job noted, of its reference and of its old policy."""
    tensors = {**call.tensors, **call.notes}
    sums: dict[str, list[float]] = {}
    for label, names in (("reference", REF_LOG_PROBS), ("old policy", OLD_LOG_PROBS)):
        values = next((tensors[name] for name in names if name in tensors), None)
        mask_BA = batch.action_mask_BA
        if values is not None and mask_BA is not None and values.shape == mask_BA.shape:
            sums[label] = torch.where(mask_BA.bool(), values, 0).double().sum(dim=1).tolist()
        elif values is not None and values.ndim == 1:
            sums[label] = values.double().tolist()
    pairs = [tensors[name].double().flatten().tolist() for (name,) in (REF_CHOSEN, REF_REJECTED) if name in tensors]
    return sums | ({"reference": pairs[0] + pairs[1]} if len(pairs) == 2 else {})


def list_modules_in_other_mode(call: CapturedCall) -> tuple[str, ...]:
    """List the modules of a model that trains which had another mode, train or eval, than the module around them."""
    return () if call.training is None or not call.training["model"] else tuple(call.training["parts"])


def _claim_losses(call: CapturedCall, batch: MicroBatch, loss: str) -> list[Claim]:
    """Claim the model's own loss: in Hugging Face's causal LMs the mean over the labels after the first token.

    With `num_items_in_batch`, which transformers' Trainer passes, it is the sum divided by that. Where the replay
    computes the job's objective, the loss that the loop noted is claimed instead.
    """
    if is_objective(loss):
        return _claim_losses_of_objective(call, batch, loss)
    claims: list[Claim] = []
    if isinstance(value := call.outputs.get("loss"), float):
        doubt, tokens = _doubt_objective_of_model(call, batch, loss), None
        if doubt is None:
            tokens = _count_labels(batch)
            if not tokens:
                # A mean over no labels is nan in the model, and the replay's is 0.
                return []
            value *= scale_to_mean(call, batch)
            doubt = _doubt_label_shift(batch)
            if left_out := _doubt_labels_after_padding(batch, tokens):
                doubt, tokens = left_out, None
        num_tokens = None if tokens is None else [tokens]
        loss_dtype = call.outputs.get("loss_dtype")
        stored_as = loss_dtype if isinstance(loss_dtype, str) and loss_dtype in FLOATS else None
        claims.append(Claim(name=LOSS, values=[value], num_tokens=num_tokens, doubt=doubt, stored_as=stored_as))
    if isinstance(value := call.outputs.get("noted_loss"), float) and all(claim.doubt for claim in claims):
        why = f"{NOTED_LOSS}, which may have another objective than the replay's --loss {loss}"
        claims.append(Claim(name=LOSS, values=[value], doubt=why))
    return claims


def _claim_losses_of_objective(call: CapturedCall, batch: MicroBatch, loss: str) -> list[Claim]:
    # The gradient tells the weights of the log-probs, and not the value of the loss.
    if loss == FROM_LOGIT_GRADIENT.name:
        return []
    if isinstance(value := call.outputs.get("noted_loss"), float):
        return [Claim(name=LOSS, values=[value], doubt=_doubt_action_mask(batch))]
    if isinstance(value := call.outputs.get("loss"), float):
        why = f"it is the model's own, not of --loss {loss}. Try: recorder.note(loss=...) in the job"
        return [Claim(name=LOSS, values=[value], doubt=why)]
    return []


def _doubt_action_mask(batch: MicroBatch) -> str | None:
    """Say so where the job's loss counts action tokens that have no log-prob in the replay."""
    if batch.action_mask_BA is None:
        return None
    count, predicted = int(batch.action_mask_BA.sum()), count_action_tokens(batch)
    if count == predicted:
        return None
    return f"{count - predicted} of the job's {count} action tokens are padding or follow no token: no log-prob here"


def _count_labels(batch: MicroBatch) -> int:
    labels_BS = batch.shift_labels
    if labels_BS is None:
        assert batch.labels_BS is not None
        labels_BS = batch.labels_BS[:, 1:]
    return int((labels_BS != IGNORED_LABEL).sum())


def _doubt_labels_after_padding(batch: MicroBatch, tokens: int) -> str | None:
    """Say so where padding predicts some of the job's labels, and nothing predicts them in this replay."""
    number = 0 if batch.padding_predicts_label else count_predicted_by_padding(batch)
    if not number:
        return None
    are = "is" if number == 1 else "are"
    return (
        f"{number} of the job's {pluralise(tokens, 'label')} {are} predicted by padding on the left, which only rows "
        "padded as captured have. Try: --no-packing, without --ring"
    )


def _doubt_label_shift(batch: MicroBatch) -> str | None:
    """Say so where the labels are the next tokens, which nobody should give to a model that shifts labels itself.

    Labels that equal both a token and its next token, as in a row of one repeated token, tell nothing.
    """
    labels_BS, ids_BS = batch.labels_BS, batch.sequences_BS
    if labels_BS is None or batch.shift_labels is not None:
        return None
    is_label_BS = labels_BS[:, :-1] != IGNORED_LABEL
    are_next = torch.equal(labels_BS[:, :-1][is_label_BS], ids_BS[:, 1:][is_label_BS])
    are_same = torch.equal(labels_BS[:, :-1][is_label_BS], ids_BS[:, :-1][is_label_BS])
    if not are_next or are_same:
        return None
    return (
        f"{NEXT_TOKENS}, so a model that shifts them itself makes each token predict the one after the next. If this "
        "one does not shift, record them as shift_labels (--arguments NAME=shift_labels, by their NAME in its forward)"
    )


def _doubt_objective_of_model(call: CapturedCall, batch: MicroBatch, loss: str) -> str | None:
    """Say why the model's own loss may be of another objective than the replay's; None if it is of the same."""
    if batch.labels_BS is None and batch.shift_labels is None:
        return "the model was given no labels, so its loss is of an objective that the replay does not compute"
    if name_loss(loss, batch) == LossName.STAND_IN and batch.action_mask_BA is not None:
        return "the recorded loss is of the labels, the replay's of the action tokens. Try: --loss sft"
    # Shifted labels of another shape than the sequences are recorded, and are no part of the micro-batch.
    has_other_labels = SHIFT_LABELS in call.tensors and batch.shift_labels is None
    if has_other_labels:
        return "the model's loss is not the mean over its labels alone"
    return None


def scale_to_mean(call: CapturedCall, batch: MicroBatch) -> float:
    """Return what to multiply a model's own loss by to get the mean over its labels."""
    divisor, tokens = read_divisor(call), _count_labels(batch)
    return 1.0 if divisor is None or not tokens else divisor / tokens


def read_divisor(call: CapturedCall) -> float | None:
    """Read what the job told the model to divide the sum of a pass's losses by; None where it told nothing."""
    if (divisor := call.tensors.get("num_items_in_batch")) is not None:
        return float(divisor.item())
    fact = call.call_facts.get("num_items_in_batch")
    return float(fact) if isinstance(fact, int | float) else None


def read_token_positions(call: CapturedCall, num_rows: int, num_tokens: int) -> list[tuple[int, int]]:
    """Return the row and the column of each token whose log-prob the job recorded.

    The shape of the micro-batch decides which tokens are sampled. A capture that was cut out of a larger one
    (`replay minimise`) lists instead where the tokens that are left of its samples stand.
    """
    numbers = call.outputs.get(TOKEN_POSITIONS_KEY)
    if not isinstance(numbers, list):
        return choose_sampled_tokens(num_rows, num_tokens)
    positions = [(int(row), int(column)) for row, column in zip(numbers[::2], numbers[1::2], strict=False)]
    return [(row, column) for row, column in positions if 0 <= row < num_rows and 0 < column < num_tokens]


def read_recorded_log_probs(call: CapturedCall, batch: MicroBatch) -> dict[tuple[int, int], float]:
    """Read the log-probs of the rows' own tokens that the job recorded, by row and column of the token."""
    recorded: dict[tuple[int, int], float] = {}
    mask_BA = batch.action_mask_BA
    if mask_BA is not None:
        first = batch.sequences_BS.shape[1] - mask_BA.shape[1]
        for claim in _claim_log_probs(call, batch, LossName.AUTO):
            if claim.name == ACTION_TOKENS:
                values_BA = torch.tensor(claim.values, dtype=torch.float64).reshape(mask_BA.shape)
                places = mask_BA.nonzero().tolist()
                recorded |= {(row, first + column): float(values_BA[row, column]) for row, column in places}
    for claim in _claim_token_log_probs(call):
        positions = read_token_positions(call, *batch.sequences_BS.shape)
        recorded.update(zip(positions, claim.values, strict=False))
    return recorded


def _claim_token_log_probs(call: CapturedCall) -> list[Claim]:
    values = call.outputs.get("token_log_probs")
    return [Claim(name=TOKEN_LOG_PROBS, values=values)] if isinstance(values, list) and values else []


def _claim_log_probs(call: CapturedCall, batch: MicroBatch, loss: str) -> list[Claim]:
    """Claim the sums of each row, and each value where the job recorded all of them under the action mask."""
    claims: list[Claim] = []
    for key in ("log_probs_row_sums", "output_row_sums"):
        sums = call.outputs.get(key)
        if not isinstance(sums, list) or len(sums) != batch.num_rows:
            continue
        doubt, tokens = None, None
        if name_loss(loss, batch) != LossName.SFT and batch.action_mask_BA is not None:
            tokens = batch.action_mask_BA.sum(dim=1).tolist()
        else:
            doubt = "rows of numbers were recorded, and nothing says that they are the log-probs of the replay's tokens"
        claims.append(Claim(name=LOG_PROBS, values=sums, num_tokens=tokens, doubt=doubt))
        values = call.outputs.get(key.replace("row_sums", "values"))
        shape = call.outputs.get(key.replace("row_sums", "shape"))
        mask = batch.action_mask_BA
        if isinstance(values, list) and mask is not None and shape == list(mask.shape):
            claims.append(Claim(name=ACTION_TOKENS, values=values, doubt=doubt))
    return claims


def _claim_grad_norm(call: CapturedCall) -> list[Claim]:
    value = call.outputs.get("grad_norm")
    if not isinstance(value, float):
        return []
    doubt = (
        "the job may have scaled its loss for fp16"
        if call.step is None and "float16" in list_job_dtypes(call)
        else None
    )
    return [Claim(name=GRAD_NORM, values=[value], doubt=doubt)]


def list_job_dtypes(call: CapturedCall) -> list[str]:
    """List the dtypes that the job computed in: weights, logits, autocast, accelerate, and TF32."""
    environment = call.environment
    dtypes = {sample.dtype for sample in call.weights.samples} if call.weights is not None else set()
    if (logits_dtype := str(call.outputs.get("logits_dtype"))) in FLOATS:
        dtypes.add(logits_dtype)
    mixed = (environment.get("autocast", "off"), environment.get("ACCELERATE_MIXED_PRECISION", "no"))
    dtypes |= {HALVES[name] for name in mixed if name in HALVES}
    has_tf32 = environment.get("torch.float32_matmul_precision", "highest") != "highest"
    if has_tf32 and environment.get("device") != "CPU":
        dtypes.add("tf32")
    return sorted(dtypes)


def describe_mixed_recordings(passes: Sequence[tuple[PassRecord, RecordedPass]]) -> str | None:
    """Say which recordings these passes are of, in the order in which they were replayed; None if it is one.

    A replay takes one recording of a folder. Passes of two come together where both were written at the same time, so
    that their files are mixed. Converted passes have no recording, and passes without a recorded number are not judged,
    so neither counts.
    """
    recordings = [
        (record.index, recorded.rank, recorded.recording)
        for record, recorded in passes
        if recorded.claims and recorded.recording
    ]
    first = {rank: began for _, rank, began in reversed(recordings)}
    other = next(((index, rank) for index, rank, began in recordings if began != first[rank]), None)
    if other is None:
        return None
    _, rank = other
    begins = sorted({began for _, other_rank, began in recordings if other_rank == rank})
    times = f"{', '.join(begins[:-1])} and {begins[-1]}"
    return (
        f"these passes are of {len(begins)} recordings into one folder, which began {times} and whose files are mixed. "
        "Try: a folder for each recording"
    )


def doubt_loss_and_grad_norm(recorded: RecordedPass, why: str) -> RecordedPass:
    """Return `recorded`, its loss and gradient norm doubted since they hold a routers' loss that is not computed here.

    why  it is not
    """
    doubt = f"{ROUTER_LOSS_DOUBT}: {why}"
    claims = [replace(claim, doubt=doubt) if claim.name in (LOSS, GRAD_NORM) else claim for claim in recorded.claims]
    return replace(recorded, claims=claims)


def is_mixture(parameters: Iterable[str]) -> bool:
    """Tell by the names of its parameters whether a model has experts that a router chooses from."""
    return any(word in name for name in parameters for word in ("expert", "router"))


# What the replay computed, beside the pass's record.


@dataclass(frozen=True, kw_only=True, slots=True)
class SteppedSample:
    """Neighbouring elements of a parameter, after steps, before a pass: in the job, here, and where the replay began.

    name   of the parameter in the replay
    dtype  that the job stored them in
    """

    name: str
    dtype: str
    start: int
    job_values: tuple[float, ...]
    replay_values: tuple[float, ...]
    initial_values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRouterLoss:
    """The routers' loss that the job's model returned, and its loop may have added to a loss of its own.

    coefficient  that of the model's config
    factor       how many times the loss that the job noted holds it; nan where that does not tell
    is_noted     the job noted a loss
    """

    coefficient: float
    factor: float
    is_noted: bool

    @property
    def is_held(self) -> bool:
        """The noted loss holds it, so that the replay's does."""
        return not math.isnan(self.factor) and self.factor != 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedPass:
    """What a replay computed of one pass.

    log_probs_at_recorded_positions  of the tokens where the job recorded a log-prob; None for tokens that have none in
                      the replay
    all_action_log_probs  [B, A] in one list, None where the action mask is off; empty unless the job recorded all of
                      them, or details are kept
    log_prob_weights  what the log-probs weigh in the loss
    gradient          None where the pass ends no window, or the job sampled no gradient
    state             what the optimizer held before the step that follows, at the elements that the job sampled
    draws             the random numbers that the forward drew
    was_fed_as_captured  the model was fed the captured rows, each token in its place, on one rank; False where the
                      forward drew no random numbers
    router_flips      of a mixture of experts, by router: the tokens whose scores here choose other experts than the job
    has_job_routes    every token went to the job's experts
    router_loss_of_training_loop  the routers' loss that the job's training loop, and not its model, may have added to
                      its loss; None: it had none to add
    weights_before_pass  those that the pass ran on, where the job sampled them; empty before the first step
    tried_losses      other losses of the pass's log-probs, where the objective's is not the job's; else None
    noted_log_probs   those that the job noted beside the replay's own; None where it noted none of single tokens
    """

    log_probs_at_recorded_positions: Sequence[float | None] = ()
    all_action_log_probs: Sequence[float | None] = ()
    log_prob_weights: LogProbWeights = WEIGHTS_IN_MEAN
    gradient: GradientSamples | None = field(default=None)
    state: StateElements = field(default_factory=dict)
    draws: RandomDraws | None = None
    was_fed_as_captured: bool = False
    router_flips: Sequence[RouterFlips] = ()
    has_job_routes: bool = False
    router_loss_of_training_loop: JobRouterLoss | None = None
    weights_before_pass: Sequence[SteppedSample] = ()
    tried_losses: TriedLosses | None = None
    noted_log_probs: NotedLogProbs | None = None


def list_action_log_probs(log_probs_BA: Tensor, has_BA: Tensor, *, is_reversed: bool) -> list[float | None]:
    """List the log-probs row by row; None where `has_BA` is False."""
    values_BA, has_BA = _restore_row_order(log_probs_BA, has_BA, is_reversed)
    pairs = zip(values_BA.flatten().tolist(), has_BA.flatten().tolist(), strict=True)
    return [value if has_value else None for value, has_value in pairs]


def _restore_row_order(log_probs_BA: Tensor, has_BA: Tensor, is_reversed: bool) -> tuple[Tensor, Tensor]:
    """Return both on the CPU, with the rows in the order in which they were captured."""
    values_BA, has_BA = log_probs_BA.detach().double().cpu(), has_BA.cpu()
    return (values_BA.flip(0), has_BA.flip(0)) if is_reversed else (values_BA, has_BA)


def list_log_probs_at(
    log_probs_BA: Tensor, has_BA: Tensor, positions: Sequence[tuple[int, int]], *, first_column: int, is_reversed: bool
) -> list[float | None]:
    """List the log-probs of the tokens at these positions; None for tokens that have none.

    has_BA       where there is a log-prob of the row's token
    positions    row and column of each token in the captured rows [B, S]
    first_column  of the first of the A tokens
    is_reversed  the rows are the captured ones from the last to the first
    """
    values_BA, has_BA = _restore_row_order(log_probs_BA, has_BA, is_reversed)
    shifted = [(row, column - first_column) for row, column in positions]
    return [
        float(values_BA[row, column]) if column >= 0 and bool(has_BA[row, column]) else None for row, column in shifted
    ]
