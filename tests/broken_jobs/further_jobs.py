"""Jobs of kinds that the first ones lack: dropout, frozen parts, schedules, Muon, skipped steps, moving averages."""

from typing import Any

from replay.verdict.causes.cause import CauseName as C
from tests.broken_jobs import faults as f
from tests.broken_jobs import further_faults as g
from tests.broken_jobs.declarations import Dtype, Fault, FaultClass, Job, Kind, Layout, Setup
from tests.broken_jobs.lines import broken_jobs, clean_jobs

PLAIN, TRAINER, TRAINER_DDP, DDP, FSDP2 = Kind.PLAIN, Kind.TRAINER, Kind.TRAINER_DDP, Kind.DDP, Kind.FSDP2


def _llama_rate(rate: float) -> dict[str, Any]:
    return {"attention_dropout": rate}


def _gpt2_rate(rate: float) -> dict[str, Any]:
    return {"resid_pdrop": rate, "embd_pdrop": rate, "attn_pdrop": rate}


DROPOUT = Setup(model="gpt2", config=_gpt2_rate(0.1))
DROPOUT_BF16 = Setup(config=_llama_rate(0.1), dtype=Dtype.BF16)
DROPOUT_PACKED = Setup(config=_llama_rate(0.3), layout=Layout.PACKED)
DROPOUT_CHECKPOINTING = Setup(model="gpt2", config=_gpt2_rate(0.1), checkpointing=True)
DROPOUT_TRAINER = Setup(model="gpt2", config=_gpt2_rate(0.1), accumulation=2, num_steps=2)
LORA_DROPOUT = Setup(lora=True, lora_dropout=0.1)
LEFT_AUTOCAST = Setup(layout=Layout.LEFT, dtype=Dtype.AUTOCAST)
GPT2_LEFT_AUTOCAST = Setup(model="gpt2", layout=Layout.LEFT, passes_position_ids=True, dtype=Dtype.AUTOCAST)
MIXTRAL = Setup(model="mixtral", config={"output_router_logits": False})
ROUTER_LOSS = Setup(model="mixtral", config={"output_router_logits": True, "router_aux_loss_coef": 0.1})
LLAMA_LEFT = Setup(layout=Layout.LEFT)
FOUR = Setup(num_steps=4)
WARMUP = Setup(num_steps=4, schedule="warmup")
MUON = Setup(num_steps=4, optimizer="muon")
WINDOW_OF_FOUR = Setup(accumulation=4, num_steps=2)
FP16_CLIPPED = Setup(dtype=Dtype.FP16, max_norm=1.0)

# The replay is to step as the job did: without arguments where the setup is the job's own, and with those that its
# user believes where the fault is another setup.
STEPPED = {"is_stepped": True}
ADAMW = {"replays": (("--step", "--optimizer", "adamw", "--learning-rate", "0.001"),)}
ADAMW_WARMUP = {"replays": (("--step", "--optimizer", "adamw", "--learning-rate", "0.001", "--lr-warmup-steps", "2"),)}

_BROKEN = [
    *broken_jobs(
        FaultClass.KERNEL,
        ("experts-with-lowest-scores", PLAIN, (C.ROUTES, C.MODEL_CODE),
         "each token goes to the experts with the lowest scores", MIXTRAL, Fault(model=f.experts_with_lowest_scores)),
        ("router-loss-doubled", PLAIN, C.ROUTER_LOSS, "the routers' loss counts twice what the config says",
         ROUTER_LOSS, Fault(model=f.attribute_set("router_aux_loss_coef", 0.2))),
    ),
    *broken_jobs(
        FaultClass.DROPOUT,
        # The rate is a value of the config, and it is the rate of the dropout.
        ("dropout-x3", PLAIN, (C.DROPOUT, C.MODEL_CONFIG), "three times as much is dropped out as the config says",
         DROPOUT, Fault(config=_gpt2_rate(0.3))),
        ("trainer-no-dropout", TRAINER, C.DROPOUT, "the model stays in eval mode, so that nothing is dropped out",
         DROPOUT_TRAINER, Fault(model=g.stays_in_eval_mode)),
        ("no-dropout-bf16", PLAIN, C.DROPOUT, "attention drops nothing out, in bf16", DROPOUT_BF16,
         Fault(model=g.dropout_set(0.0))),
        # The forward is the job's; the gradient is another one, by the masks that are drawn anew.
        ("dropout-masks-anew", PLAIN, (C.DROPOUT, C.GRADIENTS_CHANGED),
         "checkpointing recomputes each block with other masks than the forward's", DROPOUT_CHECKPOINTING,
         Fault(model=g.masks_drawn_anew)),
    ),
    *broken_jobs(
        FaultClass.GRADIENT_SCALE,
        ("dropout-loss-x10", PLAIN, C.GRADIENTS_SCALED, "ten times the loss is differentiated, with dropout", DROPOUT,
         Fault(loss=lambda loss, _: loss * 10)),
    ),
    *broken_jobs(
        FaultClass.MASKING,
        ("dropout-documents-visible", PLAIN, C.DOCUMENTS_MEET, "packed documents see each other, with dropout",
         DROPOUT_PACKED, Fault(model=f.visible(f.sees_other_documents))),
        ("left-padding-predicts", PLAIN, C.OTHER_TOKENS,
         "prompts have labels, and the last of the padding on the left predicts the first", LLAMA_LEFT,
         Fault(model=f.labels_of_prompts_too)),
    ),
    *broken_jobs(
        FaultClass.WEIGHTS,
        ("lora-dropout-adapter-twice", PLAIN, C.ADAPTER_SCALE, "the adapter acts twice, and has dropout", LORA_DROPOUT,
         Fault(model=f.adapter_twice)),
        ("average-swapped-in", PLAIN, C.WEIGHTS_CHANGED,
         "the weights are their moving average after the second step, and training goes on from it", FOUR,
         Fault(after_step=g.average_swapped_in(1)), ADAMW),
        ("frozen-weights-rounded", PLAIN, C.WEIGHTS_CHANGED, "after each step the frozen weights go through bf16",
         Setup(frozen="mlp", num_steps=4), Fault(after_step=g.frozen_through_bf16), STEPPED),
        ("ddp-loaded-on-one-rank", DDP, C.OTHER_WEIGHTS, "weights are loaded on rank 0 alone, inside of the wrapper",
         FOUR, Fault(wrapped=g.loaded_on_rank_0_alone), STEPPED),
        ("trainer-weights-reloaded", TRAINER, C.WEIGHTS_CHANGED,
         "after the third step the weights are those of after the first again", FOUR,
         Fault(after_step=g.reloaded(2, read_after=0)), ADAMW),
    ),
    *broken_jobs(
        FaultClass.DTYPE,
        ("cast-and-back", PLAIN, C.DTYPE, "the model is cast to bf16 and back after the second step", FOUR,
         Fault(after_step=g.cast_and_back(1)), ADAMW),
    ),
    *broken_jobs(
        FaultClass.DETACHED,
        # A parameter that is frozen has no gradient. One that is frozen from the first step on is no fault here: the
        # replay takes over what the job froze, and a job that means to freeze it has the same recording.
        ("layer-frozen-later", PLAIN, (C.FROZEN, C.NO_GRADIENT), "the first layer is frozen after the first step", FOUR,
         Fault(after_step=g.frozen_after(0, "layers.0.")), ADAMW),
        # The same as above.
        ("trainer-norms-frozen-later", TRAINER, (C.FROZEN, C.NO_GRADIENT), "the norms are frozen after the second step",
         FOUR, Fault(after_step=g.frozen_after(1, "norm")), ADAMW),
    ),
    *broken_jobs(
        FaultClass.POSITIONS,
        ("trainer-padding-counted", TRAINER, C.POSITIONS, "positions count the padding on the left, under bf16=True",
         GPT2_LEFT_AUTOCAST, Fault(model=f.without_positions)),
    ),
    *broken_jobs(
        FaultClass.WEIGHTING,
        ("third-of-four-lost", PLAIN, C.WINDOW_WEIGHTS, "the third of a window's four micro-batches is lost",
         WINDOW_OF_FOUR, Fault(loss=lambda loss, at: loss * (at.number != 2))),
        ("cleared-in-window", PLAIN, (C.WINDOW_WEIGHTS, C.NOT_CLEARED),
         "the loop over a window's micro-batches empties the gradients", WINDOW_OF_FOUR,
         Fault(wrapped=g.cleared_before_forward)),
    ),
    *broken_jobs(
        FaultClass.OPTIMIZER,
        ("linear-for-warmup", PLAIN, C.SCHEDULE, "the learning rate falls to zero and has no warm-up", WARMUP,
         Fault(setup={"schedule": "linear"}), ADAMW_WARMUP),
        ("trainer-cosine-for-constant", TRAINER, C.SCHEDULE, "the learning rate falls with a cosine", FOUR,
         Fault(setup={"schedule": "cosine"}), ADAMW),
        ("muon-for-adamw", PLAIN, C.OPTIMIZER, "the layers' matrices are stepped by Muon", FOUR,
         Fault(setup={"optimizer": "muon"}), ADAMW),
        ("muon-steps-twice", PLAIN, C.STEPS_SKIPPED, "each step of Muon and AdamW is taken twice", MUON,
         Fault(optimizer=f.steps_twice), STEPPED),
        ("optimizer-before-adapter", PLAIN, C.OPTIMIZER, "the optimizer was made before the adapter",
         Setup(lora=True, num_steps=4, max_norm=1.0), g.optimizer_of_frozen_parameters(), STEPPED),
        ("ddp-rates-of-ranks", DDP, C.OPTIMIZER, "the last rank's learning rate is a tenth larger", FOUR,
         Fault(optimizer=g.setting_of_last_rank("lr", 1.1e-3)), STEPPED),
        ("ddp-decay-of-ranks", DDP, C.OPTIMIZER, "weights decay by 0.1 on the last rank alone", FOUR,
         Fault(optimizer=g.setting_of_last_rank("weight_decay", 0.1)), STEPPED),
        ("step-left-out", PLAIN, C.STEPS_SKIPPED, "the second step is not taken, and its gradients are emptied", FOUR,
         Fault(skipped_steps=(1,)), ADAMW),
        ("clipped-before-unscale", PLAIN, C.CLIPPED_EARLY, "fp16's gradients are clipped with the loss scale in them",
         FP16_CLIPPED, Fault(unscales_first=False)),
    ),
]  # fmt: skip

_CLEAN = clean_jobs(
    ("dropout", PLAIN, "dropout of 0.1 after embedding, attention and MLP, and in attention", DROPOUT),
    ("dropout-half", PLAIN, "dropout of 0.5", Setup(model="gpt2", config=_gpt2_rate(0.5))),
    ("dropout-attention", PLAIN, "dropout of 0.05 in attention alone", Setup(config=_llama_rate(0.05))),
    ("dropout-bf16", PLAIN, "dropout of 0.1, weights in bf16", DROPOUT_BF16),
    ("dropout-packed", PLAIN, "dropout of 0.3, packed rows", DROPOUT_PACKED),
    ("dropout-packed-autocast", PLAIN, "dropout of 0.1, packed rows under bf16's autocast",
     Setup(model="gpt2", config=_gpt2_rate(0.1), layout=Layout.PACKED, dtype=Dtype.AUTOCAST)),
    ("dropout-checkpointing", PLAIN, "dropout of 0.1 with gradient checkpointing", DROPOUT_CHECKPOINTING),
    ("trainer-dropout-windows", TRAINER, "dropout of 0.1, two micro-batches a step", DROPOUT_TRAINER),
    ("ddp-dropout", DDP, "dropout of 0.1 in attention", Setup(config=_llama_rate(0.1))),
    ("lora-dropout", PLAIN, "an adapter with dropout", LORA_DROPOUT),
    ("frozen-layer", PLAIN, "the first layer is frozen", Setup(frozen="layers.0.", num_steps=4), STEPPED),
    ("trainer-frozen-mlps", TRAINER, "the MLPs are frozen, bf16=True",
     Setup(frozen="mlp", dtype=Dtype.AUTOCAST, num_steps=4), STEPPED),
    ("trainer-left", TRAINER, "rows padded on the left, bf16=True", LEFT_AUTOCAST),
    ("ddp-left", DDP, "rows padded on the left", LLAMA_LEFT),
    ("cosine", PLAIN, "a cosine schedule", Setup(num_steps=4, schedule="cosine"), STEPPED),
    ("trainer-cosine-warmup", TRAINER, "a warm-up and a cosine, clipped",
     Setup(num_steps=6, schedule="cosine-warmup", max_norm=1.0), STEPPED),
    ("muon", PLAIN, "Muon for the layers' matrices, AdamW for the rest", MUON, STEPPED),
    ("window-of-four", PLAIN, "four micro-batches a step", WINDOW_OF_FOUR),
    ("fp16-skips", PLAIN, "fp16's gradients overflow in the first and the third step, which are skipped",
     Setup(dtype=Dtype.FP16, loss_scale=2.0**18, num_steps=4), STEPPED),
    ("average-beside", PLAIN, "a moving average is swapped in for an evaluation after each step, and out again",
     Setup(num_steps=4, evaluates_average=True), STEPPED),
)  # fmt: skip

FURTHER_JOBS: list[Job] = [*_BROKEN, *_CLEAN]
