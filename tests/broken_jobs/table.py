"""The jobs: broken ones in thirteen classes, each with the names of its true cause, and clean ones, by name.

The causes say what was planted, by whoever planted it; what the verdict can see of it does not matter here.
"""

from collections.abc import Mapping, Sequence

import torch

from replay.verdict.causes.cause import CauseName as C
from tests.broken_jobs import faults as f
from tests.broken_jobs.declarations import Dtype, Fault, FaultClass, Job, Kind, Layout, Setup, Weighting
from tests.broken_jobs.further_jobs import FURTHER_JOBS
from tests.broken_jobs.lines import broken_jobs, clean_jobs
from tests.broken_jobs.quiet_jobs import QUIET_JOBS

PLAIN, TRAINER, TRAINER_DDP, DDP = Kind.PLAIN, Kind.TRAINER, Kind.TRAINER_DDP, Kind.DDP
FSDP2, ZERO1, ZERO2, ZERO3 = Kind.FSDP2, Kind.ZERO1, Kind.ZERO2, Kind.ZERO3

# Setups that several jobs share: one unbroken twin serves them all
LLAMA = Setup()
TIED = Setup(model="llama-tied")
PACKED = Setup(layout=Layout.PACKED)
LEFT = Setup(layout=Layout.LEFT)
WINDOWS = Setup(accumulation=2, num_steps=2)
MEANS = Setup(accumulation=2, num_steps=2, weighting=Weighting.MEANS)
OWN_MEANS = Setup(weighting=Weighting.MEANS, layout=Layout.FULL)
AUTOCAST = Setup(dtype=Dtype.AUTOCAST)
BF16 = Setup(dtype=Dtype.BF16)
FP16 = Setup(dtype=Dtype.FP16)
CLIPPED = Setup(max_norm=1.0)
GPT2 = Setup(model="gpt2")
GPT2_LEFT = Setup(model="gpt2", layout=Layout.LEFT, passes_position_ids=True)
GPT2_PACKED = Setup(model="gpt2", layout=Layout.PACKED)
MISTRAL = Setup(model="mistral")
MIXTRAL = Setup(model="mixtral", config={"output_router_logits": False})
QWEN2 = Setup(model="qwen2")
STILL = Setup(learning_rate=0.0)  # weights do not move, so that every pass is judged
GELU = Setup(model="gpt2", config={"activation_function": "gelu"})
ROUTER = Setup(model="mixtral", config={"output_router_logits": True, "router_aux_loss_coef": 0.1})
LORA = Setup(lora=True)
SECOND = Setup(saved_at=1)  # replayed from the second step on
CLIPPED_STEPS = Setup(max_norm=1.0, num_steps=4)
FOUR = Setup(num_steps=4)

# What the user believes of the steps is typed: what is not would be the job's.
ADAMW_SETTINGS = ("--beta1", "0.9", "--beta2", "0.999", "--eps", "1e-8", "--weight-decay", "0.01")
ADAMW = ("--step", "--optimizer", "adamw", "--learning-rate", "0.001", *ADAMW_SETTINGS)
STEPS: Sequence[tuple[str, ...]] = ((*ADAMW, "--max-norm", "inf"),)
STEPS_CLIPPED: Sequence[tuple[str, ...]] = ((*ADAMW, "--max-norm", "1.0"),)
STEPS_WARMUP: Sequence[tuple[str, ...]] = ((*ADAMW, "--max-norm", "inf", "--lr-warmup-steps", "2"),)


_GRADIENT_SCALE = broken_jobs(
    FaultClass.GRADIENT_SCALE,
    ("gradients-x10", PLAIN, C.GRADIENTS_SCALED, "every gradient is ten times too large", LLAMA,
     Fault(model=f.gradients_times(10))),
    ("loss-x10", PLAIN, C.GRADIENTS_SCALED, "ten times the loss is differentiated", LLAMA,
     Fault(loss=lambda loss, _: loss * 10)),
    ("loss-scale-left-in", PLAIN, C.GRADIENTS_SCALED, "the loss is scaled by 1024 and the gradients are not unscaled",
     LLAMA, Fault(loss=lambda loss, _: loss * 1024)),
    ("one-layer-halved", PLAIN, C.GRADIENTS_SCALED, "one layer's gradients are half as long", LLAMA,
     Fault(model=f.gradients_times(0.5, "layers.1."))),
    ("trainer-gradients-x10", TRAINER, C.GRADIENTS_SCALED, "every gradient is ten times too large", WINDOWS,
     Fault(model=f.gradients_times(10))),
    ("embedding-by-frequency", TRAINER, C.GRADIENTS_CHANGED,
     "the embedding's gradient is divided by each token's frequency", LLAMA, Fault(model=f.scaled_by_frequency)),
    ("ddp-gradients-x10", TRAINER_DDP, C.GRADIENTS_SCALED, "every gradient is ten times too large, under bf16=True",
     AUTOCAST, Fault(model=f.gradients_times(10))),
    # The factor is -1, and another direction is a change.
    ("zero2-negated-layer", ZERO2, (C.GRADIENTS_SCALED, C.GRADIENTS_CHANGED),
     "one layer's gradients point the other way", LLAMA, Fault(model=f.gradients_times(-1, "layers.2.mlp"))),
    ("q-gradient-transposed", DDP, C.GRADIENTS_CHANGED,
     "the gradient of a square weight is transposed: its length is right", LLAMA,
     Fault(model=f.gradients_changed(f.transposed, "layers.0.self_attn.q_proj"))),
    ("fsdp2-gradients-x10", FSDP2, C.GRADIENTS_SCALED, "every gradient is ten times too large", LLAMA,
     Fault(model=f.logits_gradient_times(10)), {"as_fsdp2": True}),
    ("zero3-gradients-halved", ZERO3, C.GRADIENTS_SCALED, "every gradient is half as long", LLAMA,
     Fault(model=f.logits_gradient_times(0.5))),
    ("norms-doubled", PLAIN, C.GRADIENTS_SCALED, "the gradients of the norms' weights are twice as long", LLAMA,
     Fault(gradients=f.given_gradients_times(2, "layernorm"))),
    ("clipped-gradients-x10", PLAIN, C.GRADIENTS_SCALED, "every gradient is ten times too large before the clipping",
     CLIPPED, Fault(model=f.gradients_times(10))),
)  # fmt: skip

_DETACHED = broken_jobs(
    FaultClass.DETACHED,
    ("o-proj-detached", PLAIN, C.NO_GRADIENT, "no gradient goes through one attention's output", LLAMA,
     Fault(model=f.output_changed("model.layers.1.self_attn.o_proj", f.detached))),
    # The weight has a gradient, of which a part is lost.
    ("tied-head-detached", PLAIN, C.GRADIENTS_CHANGED, "the tied weight has its gradient from the embedding alone",
     TIED, Fault(model=f.forward_replaced("lm_head", f.detached_weight))),
    # The norm before the MLP has none; those below have a part of theirs.
    ("mlp-input-detached", TRAINER, C.NO_GRADIENT, "no gradient goes back through one MLP", LLAMA,
     Fault(model=f.input_changed("model.layers.2.mlp", f.detached))),
    ("probabilities-detached", PLAIN, C.NO_GRADIENT, "no gradient reaches queries and keys", LLAMA,
     Fault(process=f.attention_patched(f.probabilities_detached))),
    ("ddp-o-proj-detached", DDP, C.NO_GRADIENT, "no gradient goes through one attention's output", LLAMA,
     Fault(model=f.output_changed("model.layers.0.self_attn.o_proj", f.detached))),
    ("zero1-lower-layers-detached", ZERO1, C.NO_GRADIENT, "no gradient reaches the first layer", LLAMA,
     Fault(model=f.output_changed("model.layers.0", f.detached))),
    ("fsdp2-v-dropped", FSDP2, C.NO_GRADIENT, "no gradient goes through one layer's values", LLAMA,
     Fault(model=f.output_changed("model.layers.1.self_attn.v_proj", f.detached))),
    # The gradient is there, of zeros: it is lost, and its factor is 0.
    ("router-detached", PLAIN, (C.NO_GRADIENT, C.GRADIENTS_SCALED),
     "the experts' weights have no gradient for the router", MIXTRAL, Fault(model=f.gradients_times(0, "gate.weight"))),
    ("embedding-detached-bf16", PLAIN, C.NO_GRADIENT, "the embedding has no gradient", BF16,
     Fault(model=f.output_changed("model.embed_tokens", lambda out: out.detach().requires_grad_()))),
)  # fmt: skip

_REDUCTION = broken_jobs(
    FaultClass.REDUCTION,
    ("ddp-summed", DDP, C.SUMMED, "gradients are added up over ranks, not averaged", LLAMA,
     Fault(wrapped=f.ddp_summed)),
    ("ddp-not-reduced", DDP, C.NOT_REDUCED, "no_sync is left on: each rank steps on its own gradients", LLAMA,
     Fault(wrapped=f.ddp_not_reduced)),
    ("ddp-rank-dropped", DDP, C.NOT_REDUCED, "one rank's gradients are not added", LLAMA,
     Fault(wrapped=f.ddp_of_rank_0_alone)),
    ("ddp-one-layer-not-reduced", DDP, C.NOT_REDUCED, "one layer's gradients are each rank's own", LLAMA,
     Fault(model=f.ddp_without("layers.1.mlp"))),
    ("trainer-ddp-summed", TRAINER_DDP, C.SUMMED, "gradients are added up over ranks, not averaged", LLAMA,
     Fault(process=f.trainer_ddp_patched(f.ddp_summed))),
    ("trainer-ddp-not-reduced", TRAINER_DDP, C.NOT_REDUCED, "each rank steps on its own gradients, under bf16=True",
     AUTOCAST, Fault(process=f.trainer_ddp_patched(f.ddp_not_reduced))),
    ("fsdp2-summed", FSDP2, C.SUMMED, "gradients are added up over ranks, not averaged", LLAMA,
     Fault(wrapped=f.fsdp2_summed), {"as_fsdp2": True}),
    ("fsdp2-own-shards", FSDP2, C.NOT_REDUCED, "each rank keeps its own gradient of its shard", LLAMA,
     Fault(process=f.fsdp2_own_gradients_alone)),
    ("zero1-summed", ZERO1, C.SUMMED, "gradients are added up over ranks, not averaged", LLAMA,
     Fault(wrapped=f.zero_summed)),
    ("zero2-not-reduced", ZERO2, C.NOT_REDUCED, "each rank's partition has its own gradient", LLAMA,
     Fault(wrapped=f.zero_not_reduced)),
    ("zero3-summed", ZERO3, C.SUMMED, "gradients are added up over ranks, not averaged", LLAMA,
     Fault(wrapped=f.zero3_summed)),
    # The rank is missing from the mean, because its own gradients have the factor 0.
    ("zero3-rank-dropped", ZERO3, (C.NOT_REDUCED, C.GRADIENTS_SCALED), "one rank's gradients are zeros", LLAMA,
     Fault(model=f.logits_gradient_times(0, rank=1))),
    # The same as above.
    ("fsdp2-rank-dropped", FSDP2, (C.NOT_REDUCED, C.GRADIENTS_SCALED), "one rank's gradients are zeros", LLAMA,
     Fault(model=f.logits_gradient_times(0, rank=1))),
)  # fmt: skip

# The user believes that passes weigh by their tokens. Not typed, a mean of means is the job's, and is remarked.
BY_TOKENS = {"replays": (("--window", "tokens"),)}

_WEIGHTING = broken_jobs(
    FaultClass.WEIGHTING,
    ("mean-of-means", PLAIN, C.WINDOW_WEIGHTS, "micro-batches of unequal tokens are averaged as means", WINDOWS,
     Fault(setup={"weighting": Weighting.MEANS}), BY_TOKENS),
    ("ddp-mean-of-means", DDP, C.WINDOW_WEIGHTS, "ranks of unequal tokens are averaged as means", LLAMA,
     Fault(setup={"weighting": Weighting.MEANS}), BY_TOKENS),
    ("not-divided", PLAIN, C.WINDOW_WEIGHTS, "the means of a window are added up", WINDOWS,
     Fault(setup={"weighting": Weighting.SUM}), BY_TOKENS),
    ("trainer-mean-of-means", TRAINER, C.WINDOW_WEIGHTS, "the Trainer averages means: transformers#34191", WINDOWS,
     Fault(setup={"weighting": Weighting.MEANS}), BY_TOKENS),
    # Every pass has half its weight, so that all gradients have one factor.
    ("trainer-items-of-a-rank", TRAINER_DDP, (C.WINDOW_WEIGHTS, C.GRADIENTS_SCALED),
     "num_items_in_batch is off by the world size", LLAMA, Fault(loss=lambda loss, at: loss / at.world_size)),
    # The same as above.
    ("zero2-divided-twice", ZERO2, (C.WINDOW_WEIGHTS, C.GRADIENTS_SCALED),
     "the loop divides by the window, and DeepSpeed again", WINDOWS, Fault(loss=lambda loss, _: loss / 2)),
    ("zero3-mean-of-means", ZERO3, C.WINDOW_WEIGHTS, "ranks and windows of unequal tokens are averaged as means",
     WINDOWS, Fault(setup={"weighting": Weighting.MEANS}), BY_TOKENS),
    ("fsdp2-mean-of-means", FSDP2, C.WINDOW_WEIGHTS, "ranks of unequal tokens are averaged as means", LLAMA,
     Fault(setup={"weighting": Weighting.MEANS}), BY_TOKENS),
    ("last-of-window", PLAIN, C.WINDOW_WEIGHTS, "all but the window's last micro-batch are lost", WINDOWS,
     Fault(loss=lambda loss, at: loss * (at.number == 1))),
    ("first-twice", PLAIN, C.WINDOW_WEIGHTS, "the window's first micro-batch counts twice", WINDOWS,
     Fault(loss=lambda loss, at: loss * (2 if at.number == 0 else 1))),
    ("mean-of-rows", PLAIN, C.OBJECTIVE, "the model's loss is the mean of its rows' means", LLAMA,
     Fault(model=f.mean_of_rows)),
    ("label-smoothing", PLAIN, C.OBJECTIVE, "the model's loss is smoothed", LLAMA, Fault(model=f.label_smoothing)),
    ("trainer-bf16-mean-of-means", TRAINER, C.WINDOW_WEIGHTS, "the Trainer averages means, under bf16=True",
     Setup(dtype=Dtype.AUTOCAST, accumulation=2, num_steps=2), Fault(setup={"weighting": Weighting.MEANS}), BY_TOKENS),
)  # fmt: skip

_MASKING = broken_jobs(
    FaultClass.MASKING,
    ("shifted-twice", PLAIN, C.OTHER_TOKENS, "labels are shifted twice", LLAMA, Fault(model=f.shifted_twice)),
    ("loss-over-padding", PLAIN, C.OTHER_TOKENS, "padding and prompts have labels", LLAMA,
     Fault(model=f.labels_everywhere)),
    ("trainer-loss-over-prompts", TRAINER, C.OTHER_TOKENS, "prompts have labels", LLAMA,
     Fault(model=f.labels_of_prompts_too)),
    ("zero1-not-shifted", ZERO1, C.OTHER_TOKENS, "each token predicts itself", LLAMA, Fault(model=f.not_shifted)),
    ("padding-visible", PLAIN, C.MASK, "the attention mask is ignored, and padding is on the left", LEFT,
     Fault(model=f.without_mask)),
    ("zero3-padding-visible", ZERO3, C.MASK, "the attention mask is ignored, and padding is on the left", LEFT,
     Fault(model=f.without_mask)),
    ("labels-on-other-side", PLAIN, C.OTHER_TOKENS, "tokens are padded on the left, labels on the right", LEFT,
     Fault(process=f.labels_on_other_side)),
    ("mask-inverted", PLAIN, C.MASK, "the attention mask is 1 for padding and 0 for tokens", LLAMA,
     Fault(process=f.mask_inverted)),
    ("causal-off-by-one", PLAIN, C.MASK, "each token sees the next", LLAMA, Fault(model=f.visible(f.sees_next_token))),
    ("ddp-not-itself", DDP, C.MASK, "each token sees only those before it", LLAMA,
     Fault(model=f.visible(f.sees_not_itself))),
    ("documents-visible", PLAIN, C.DOCUMENTS_MEET, "packed documents see each other: transformers#46634", PACKED,
     Fault(model=f.visible(f.sees_other_documents))),
    ("trainer-documents-visible-bf16", TRAINER, C.DOCUMENTS_MEET, "packed documents see each other, under bf16=True",
     Setup(layout=Layout.PACKED, dtype=Dtype.AUTOCAST), Fault(model=f.visible(f.sees_other_documents))),
    # A value of the config, and all that it does is the mask.
    ("window-ignored", PLAIN, (C.MODEL_CONFIG, C.MASK), "the sliding window is ignored", MISTRAL,
     Fault(config={"sliding_window": None})),
    # The same as above.
    ("fsdp2-window-off-by-one", FSDP2, (C.MODEL_CONFIG, C.MASK), "the sliding window is one token wider", MISTRAL,
     Fault(config={"sliding_window": 5})),
    ("last-layer-sees-all", PLAIN, C.MASK, "one layer is not causal", LLAMA, Fault(model=f.one_layer_sees_all)),
)  # fmt: skip

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
_POSITIONS = broken_jobs(
    FaultClass.POSITIONS,
    ("rope-theta", PLAIN, C.MODEL_CONFIG, "rope's theta is 500000 for 10000", LLAMA, Fault(config=_ROPE)),
    ("trainer-rope-theta-bf16", TRAINER, C.MODEL_CONFIG, "rope's theta is 500000 for 10000, under bf16=True", AUTOCAST,
     Fault(config=_ROPE)),
    ("zero3-rope-theta", ZERO3, C.MODEL_CONFIG, "rope's theta is 500000 for 10000", LLAMA, Fault(config=_ROPE)),
    # A value of the config, and all that it does is to halve the positions.
    ("positions-halved", PLAIN, (C.MODEL_CONFIG, C.POSITIONS), "positions are interpolated by two", LLAMA,
     Fault(config={"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}})),
    ("gpt2-padding-counted", PLAIN, C.POSITIONS, "positions count the padding on the left", GPT2_LEFT,
     Fault(model=f.without_positions)),
    ("gpt2-packed-not-reset", PLAIN, C.POSITIONS,
     "positions go on from document to document, which do not see each other", GPT2_PACKED,
     Fault(model=f.several(f.positions_changed(lambda p: torch.arange(p.shape[1])[None]),
                                        f.visible(f.sees_own_document)))),
    ("gpt2-off-by-one", DDP, C.POSITIONS, "positions begin at 1", GPT2,
     Fault(model=f.positions_changed(lambda p: p + 1))),
    ("llama-off-by-one", PLAIN, C.POSITIONS, "positions begin at 1, which rotation does not see", LLAMA,
     Fault(model=f.positions_changed(lambda p: p + 1)), {"below": "rotations are relative"}),
    ("rope-reset", PLAIN, C.POSITIONS, "positions begin again every eight tokens", LLAMA,
     Fault(model=f.positions_changed(lambda p: p % 8))),
    ("fsdp2-positions-reversed", FSDP2, C.POSITIONS, "positions count down", LLAMA,
     Fault(model=f.positions_changed(lambda p: p.shape[-1] - 1 - p))),
)  # fmt: skip

_KERNEL = broken_jobs(
    FaultClass.KERNEL,
    ("softmax-scale", PLAIN, C.MODEL_CODE, "scores are divided by 8, not by its root", LLAMA,
     Fault(model=f.attribute_set("scaling", 0.125))),
    ("zero2-softmax-scale", ZERO2, C.MODEL_CODE, "scores are a tenth too large", LLAMA,
     Fault(model=f.attribute_set("scaling", lambda scale: scale * 1.1))),
    # The dtype is another one inside of the kernel alone.
    ("attention-in-bf16", PLAIN, (C.DTYPE, C.KERNEL), "attention is computed in bf16 in a job of fp32", LLAMA,
     Fault(process=f.attention_patched(f.in_bf16))),
    ("attention-dropout", PLAIN, C.DROPOUT, "attention drops out a tenth by mistake", LLAMA,
     Fault(model=f.attribute_set("attention_dropout", 0.1))),
    ("trainer-attention-dropout", TRAINER, C.DROPOUT, "attention drops out a tenth by mistake", LLAMA,
     Fault(model=f.attribute_set("attention_dropout", 0.1))),
    # The function of attention is the wrong one, and what it computes is no matter of rounding.
    ("heads-interleaved", DDP, (C.KERNEL, C.MODEL_CODE), "query heads read the wrong key-value heads", LLAMA,
     Fault(process=f.attention_patched(f.heads_interleaved))),
    ("scores-unscaled", PLAIN, (C.KERNEL, C.MODEL_CODE), "scores are not divided by the root of the heads' size", LLAMA,
     Fault(process=f.attention_patched(f.unscaled))),
    ("gate-and-up-swapped", PLAIN, C.MODEL_CODE, "the MLP's activation is that of the other projection", LLAMA,
     Fault(model=f.mlps_with_gate_and_up_swapped)),
    ("gelu-for-silu", FSDP2, C.MODEL_CONFIG, "the MLP's activation is another one", LLAMA,
     Fault(config={"hidden_act": "gelu"})),
    ("head-norm-skipped", TRAINER, C.MODEL_CODE, "one layer's queries are not normed",
     Setup(model="qwen3"), Fault(model=f.forward_replaced("model.layers.0.self_attn.q_norm", lambda _, given: given))),
    ("gemma-activation", PLAIN, C.MODEL_CONFIG, "the MLP's activation is another one",
     Setup(model="gemma"), Fault(config={"hidden_activation": "silu", "hidden_act": "silu"})),
    ("norm-eps", PLAIN, C.MODEL_CONFIG, "the norms' eps is 1e-3 for 1e-6", LLAMA, Fault(config={"rms_norm_eps": 1e-3})),
    # TF32 is a dtype that a kernel of matrices chooses for itself.
    ("down-proj-tf32", PLAIN, (C.DTYPE, C.KERNEL), "one projection's inputs are rounded to ten bits in a job of fp32",
     LLAMA, Fault(model=f.input_changed("model.layers.1.mlp.down_proj", f.rounded_to(10)))),
    ("gelu-tanh", PLAIN, C.MODEL_CONFIG, "GELU's approximation for the exact one", GELU,
     Fault(config={"activation_function": "gelu_new"})),
    ("zero1-eps-bf16", ZERO1, C.MODEL_CONFIG, "the norms' eps is 1e-4 for 1e-6, in bf16", BF16,
     Fault(config={"rms_norm_eps": 1e-4}), {"below": "bf16 has eight bits"}),
)  # fmt: skip

_ADAM = {"replays": STEPS}
_OPTIMIZER = broken_jobs(
    FaultClass.OPTIMIZER,
    ("betas", PLAIN, C.OPTIMIZER, "AdamW's betas are 0.5 and 0.9", FOUR,
     Fault(setup={"settings": {"betas": (0.5, 0.9)}}), _ADAM),
    ("eps", PLAIN, C.OPTIMIZER, "AdamW's eps is 1e-2 for 1e-8", FOUR, Fault(setup={"settings": {"eps": 1e-2}}), _ADAM),
    ("weight-decay", PLAIN, C.OPTIMIZER, "weights decay by 10 for 0.01", FOUR,
     Fault(setup={"settings": {"weight_decay": 10.0}}), _ADAM),
    ("sgd-for-adamw", TRAINER, C.OPTIMIZER, "the optimizer is SGD", FOUR, Fault(setup={"optimizer": "sgd"}), _ADAM),
    ("rate-x10", DDP, C.OPTIMIZER, "the learning rate is ten times too large", LLAMA,
     Fault(setup={"learning_rate": 1e-2}), _ADAM),
    ("stale-state", PLAIN, C.OPTIMIZER_STATE, "AdamW begins with the moments of another run", FOUR,
     Fault(optimizer=f.with_old_state), _ADAM),
    ("no-bias-correction", TRAINER, C.OPTIMIZER_STATE, "AdamW counts from 1000", FOUR,
     Fault(optimizer=f.counts_from(1000.0)), _ADAM),
    ("steps-twice", PLAIN, C.STEPS_SKIPPED, "each step is taken twice", FOUR, Fault(optimizer=f.steps_twice), _ADAM),
    # The weights stand still because the optimizer's groups lack them.
    ("vectors-left-out", PLAIN, (C.FROZEN, C.OPTIMIZER), "norms' weights were never given to the optimizer", FOUR,
     Fault(optimizer=f.without(lambda parameter: parameter.ndim < 2)), _ADAM),
    ("clipped-by-value", PLAIN, C.CLIPPING, "gradients are clipped element by element", CLIPPED_STEPS,
     Fault(clip=f.clipped_by_value), {"replays": STEPS_CLIPPED}),
    ("clipped-each", PLAIN, C.CLIPPING, "each gradient is clipped by its own norm", CLIPPED_STEPS,
     Fault(clip=f.clipped_each), {"replays": STEPS_CLIPPED}),
    ("clipped-each-pass", PLAIN, C.CLIPPED_EARLY, "gradients are clipped after each micro-batch", WINDOWS,
     Fault(clips_each_pass=0.4)),
    ("ddp-clipped-before-reduction", DDP, C.CLIPPING, "each rank clips its own gradient, and then they are averaged",
     CLIPPED_STEPS, Fault(wrapped=f.ddp_not_reduced, clip=f.clipped_before_reduction)),
    # The norm is another one because it is used before it is reduced.
    ("fsdp2-clipped-by-shard", FSDP2, (C.CLIPPING, C.CLIPPED_EARLY), "each rank clips by the norm of its own shards",
     CLIPPED, Fault(clip=f.clipped_by_own_shard), {"replays": STEPS_CLIPPED}),
    ("zero-grad-forgotten", PLAIN, C.NOT_CLEARED, "gradients pile up from step to step", SECOND,
     Fault(zero_grad=False)),
    ("last-windows-gradients", PLAIN, C.GRADIENTS_CHANGED, "each step is taken on the gradients of the step before",
     SECOND, Fault(gradients=f.gradients_of_last_window())),
    ("no-warmup", PLAIN, C.SCHEDULE, "the learning rate has no warm-up",
     Setup(num_steps=4, schedule="warmup"), Fault(setup={"schedule": "constant"}), {"replays": STEPS_WARMUP}),
    ("zero1-betas", ZERO1, C.OPTIMIZER, "AdamW's betas are 0.5 and 0.9", LLAMA,
     Fault(setup={"settings": {"betas": (0.5, 0.9)}}), _ADAM),
)  # fmt: skip

_DTYPE = broken_jobs(
    FaultClass.DTYPE,
    ("gradients-in-bf16", PLAIN, C.DTYPE, "gradients are rounded to bf16 in a job of fp32", WINDOWS,
     Fault(model=f.gradients_changed(f.through_bf16))),
    ("ddp-reduced-in-bf16", DDP, C.DTYPE, "gradients are added up in bf16 in a job of fp32", LLAMA,
     Fault(wrapped=f.ddp_in_bf16)),
    ("bf16-masters", TRAINER, C.DTYPE, "steps are written in bf16", FOUR, Fault(optimizer=f.rounds_weights), _ADAM),
    ("logits-in-bf16", PLAIN, C.DTYPE, "logits are rounded to bf16 in a job of fp32", LLAMA,
     Fault(model=f.output_changed("lm_head", f.through_bf16))),
    ("layer-in-bf16", FSDP2, C.DTYPE, "one layer's output is rounded to bf16 in a job of fp32", LLAMA,
     Fault(model=f.output_changed("model.layers.1", f.through_bf16))),
    ("norm-in-bf16", ZERO3, C.DTYPE, "the last norm is rounded to bf16 in a job of fp32", LLAMA,
     Fault(model=f.output_changed("model.norm", f.through_bf16))),
    ("autocast-everywhere", PLAIN, C.DTYPE, "a job of fp32 ran under bf16's autocast", LLAMA,
     Fault(setup={"dtype": Dtype.AUTOCAST}), {"replays": (("--dtype", "fp32"),)}),
    ("fp16-scale-left-in", PLAIN, C.GRADIENTS_SCALED, "fp16's loss scale is left in the gradients", FP16,
     Fault(gradients=f.given_gradients_times(1024))),
    ("logits-in-bf16-autocast", PLAIN, C.DTYPE, "logits are rounded once more where they are bf16 already", AUTOCAST,
     Fault(model=f.output_changed("lm_head", f.through_bf16)), {"below": "they are bf16 already"}),
)  # fmt: skip

_WEIGHTS = broken_jobs(
    FaultClass.WEIGHTS,
    ("o-proj-transposed", PLAIN, C.MODEL_CODE, "a square weight is used transposed", LLAMA,
     Fault(model=f.forward_replaced("model.layers.0.self_attn.o_proj", f.transposed_weight))),
    ("layer-of-another-step", PLAIN, C.OTHER_WEIGHTS, "one weight is of another step", LLAMA,
     Fault(model=f.weight_changed("model.layers.1.mlp.down_proj.weight", f.stepped_on))),
    ("row-zeroed", PLAIN, C.OTHER_WEIGHTS, "the embedding of one token that occurs is zeros", LLAMA,
     Fault(model=f.weight_changed("model.embed_tokens.weight", f.row_zeroed(29)))),
    ("last-layer-skipped", PLAIN, C.MODEL_CODE, "the last layer does nothing", LLAMA,
     Fault(model=f.last_layer_skipped)),
    ("layer-skipped-bf16", ZERO2, C.MODEL_CODE, "the last layer does nothing, in bf16", BF16,
     Fault(model=f.last_layer_skipped)),
    ("untied", PLAIN, C.TIED_WEIGHTS, "the head is not tied, though the config says so", TIED, Fault(model=f.untied)),
    ("trainer-untied", TRAINER, C.TIED_WEIGHTS, "the head is not tied, though the config says so", TIED,
     Fault(model=f.untied)),
    ("layers-swapped", DDP, C.MODEL_CODE, "two layers are in each other's place", LLAMA, Fault(model=f.layers_swapped)),
    ("adapter-twice", PLAIN, C.ADAPTER_SCALE, "the adapter is merged and acts once more", LORA,
     Fault(model=f.adapter_twice)),
    ("bias-twice", PLAIN, C.MODEL_CODE, "one bias is added twice", QWEN2,
     Fault(model=f.forward_replaced("model.layers.1.self_attn.q_proj", f.bias_twice))),
    ("fsdp2-o-proj-doubled", FSDP2, C.MODEL_CODE, "one projection's output counts twice", LLAMA,
     Fault(model=f.output_changed("model.layers.1.self_attn.o_proj", f.scaled_by(2)))),
    ("still-one-weight", TRAINER, C.OTHER_WEIGHTS, "one weight is of another step, at learning rate 0", STILL,
     Fault(model=f.weight_changed("model.layers.2.self_attn.v_proj.weight", f.stepped_on))),
)  # fmt: skip

_CLEAN = clean_jobs(
    ("llama", PLAIN, "fp32, rows padded on the right", LLAMA),
    ("autocast", PLAIN, "bf16's autocast", AUTOCAST),
    ("llama-bf16", PLAIN, "weights in bf16", BF16),
    ("llama-fp16", PLAIN, "fp16's autocast with a loss scale", FP16),
    ("still", TRAINER, "learning rate 0", STILL),
    ("windows", PLAIN, "two micro-batches a step, weighted by num_items_in_batch", WINDOWS),
    ("windows-by-hand", PLAIN, "two micro-batches a step, weighted by the loop",
     Setup(accumulation=2, num_steps=2, weighting=Weighting.BY_HAND)),
    ("equal-means", PLAIN, "the mean of the means of micro-batches of one length",
     Setup(accumulation=2, num_steps=2, weighting=Weighting.MEANS, layout=Layout.FULL)),
    ("packed", PLAIN, "packed rows with position ids", PACKED),
    ("left", PLAIN, "rows padded on the left", Setup(model="qwen3", layout=Layout.LEFT)),
    ("tied-clipped", PLAIN, "tied embeddings, clipped", Setup(model="llama-tied", max_norm=1.0)),
    ("checkpointing", PLAIN, "gradient checkpointing", Setup(checkpointing=True)),
    ("compiled", PLAIN, "torch.compile", Setup(compiled=True)),
    ("qwen2", PLAIN, "biases", QWEN2),
    ("gpt2", PLAIN, "learned positions, tied", GPT2),
    ("gpt2-left", PLAIN, "padded on the left, with position ids", GPT2_LEFT),
    ("gpt2-left-counted", PLAIN, "padded on the left, without position ids: the model counts the padding",
     Setup(model="gpt2", layout=Layout.LEFT)),
    ("gemma", PLAIN, "norms of 1 + weight, scaled embeddings", Setup(model="gemma")),
    ("mistral", PLAIN, "a sliding window", MISTRAL),
    ("mixtral", PLAIN, "experts, without a loss of their own", MIXTRAL),
    ("mixtral-router", PLAIN, "experts with the router's loss", ROUTER),
    ("frozen", PLAIN, "the embedding is frozen", Setup(frozen="embed_tokens")),
    ("lora", PLAIN, "an adapter", LORA),
    ("small-weights", PLAIN, "an untrained model, its loss near ln V", Setup(config={"initializer_range": 0.02})),
    ("second-step", PLAIN, "replayed from the second step", SECOND),
    ("adamw-steps", PLAIN, "replayed with its steps", FOUR, {"replays": STEPS}),
    ("clipped-steps", PLAIN, "replayed with its clipped steps", CLIPPED_STEPS, {"replays": STEPS_CLIPPED}),
    ("warmup-steps", PLAIN, "a warm-up, replayed with its steps", Setup(num_steps=4, schedule="warmup"),
     {"replays": STEPS_WARMUP}),
    ("sgd-steps", PLAIN, "SGD, replayed with its steps", Setup(optimizer="sgd", learning_rate=0.05, num_steps=4),
     {"replays": (("--step", "--optimizer", "sgd", "--learning-rate", "0.05"),)}),
    ("schedule-groups", PLAIN, "a schedule, and groups without decay",
     Setup(num_steps=4, schedule="linear", decay_groups=True)),
    ("trainer", TRAINER, "as it comes: clipped, fp32", CLIPPED),
    ("trainer-windows", TRAINER, "two micro-batches a step", WINDOWS),
    ("trainer-bf16", TRAINER, "bf16=True, two micro-batches a step, clipped",
     Setup(dtype=Dtype.AUTOCAST, accumulation=2, num_steps=2, max_norm=1.0)),
    ("trainer-packed", TRAINER, "packed rows with position ids", PACKED),
    ("trainer-ddp-bf16", TRAINER_DDP, "bf16=True", AUTOCAST),
    ("trainer-ddp", TRAINER_DDP, "two micro-batches a step", WINDOWS),
    ("ddp", DDP, "weighted by the tokens of all ranks", LLAMA),
    ("ddp-equal-means", DDP, "the mean of the means of ranks with as many tokens", OWN_MEANS),
    ("ddp-autocast", DDP, "bf16's autocast", AUTOCAST),
    ("fsdp2", FSDP2, "fp32", LLAMA, {"as_fsdp2": True}),
    ("fsdp2-bf16", FSDP2, "mixed precision, clipped", Setup(dtype=Dtype.AUTOCAST, max_norm=1.0)),
    ("zero1-windows", ZERO1, "two micro-batches a step", WINDOWS),
    ("zero2-bf16", ZERO2, "bf16's engine, clipped", Setup(dtype=Dtype.BF16, max_norm=1.0)),
    ("zero3", ZERO3, "fp32", LLAMA),
)  # fmt: skip

_ALL = [
    *_GRADIENT_SCALE, *_DETACHED, *_REDUCTION, *_WEIGHTING, *_MASKING,
    *_POSITIONS, *_KERNEL, *_OPTIMIZER, *_DTYPE, *_WEIGHTS, *_CLEAN,
    *FURTHER_JOBS, *QUIET_JOBS,
]  # fmt: skip
JOBS: Mapping[str, Job] = {job.name: job for job in _ALL}
assert len(JOBS) == len(_ALL)
TWINS: Mapping[str, Job] = {job.twin.name: job.twin for job in _ALL if job.is_broken}
