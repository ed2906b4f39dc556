"""The options of `replay.run` by name. Written by `python -m docs.write_options` from what declares them."""

from os import PathLike
from typing import Literal, TypedDict


class RunOptions(TypedDict, total=False):
    """What `replay --help-all` lists, with `_` for `-`; None stands for one that is not given."""

    backend: Literal["deepspeed", "fsdp2", "ddp"] | None
    model: str | PathLike[str] | None
    weights: str | PathLike[str] | None
    blocks: str | None
    adapter: str | PathLike[str] | None
    num_layers: int | None
    random_weights: bool | None
    weights_seed: int | None
    dtype: Literal["auto", "bf16", "fp32", "fp16"] | None
    zero_stage: int | None
    packing: bool | None
    pad_to: Literal["own", "longest"] | None
    pad_tokens: str | None
    attention: Literal["auto", "flash", "cudnn", "varlen", "flex", "sdpa", "eager"] | None
    flash_attn: bool | None
    no_flash_attn: bool | None
    head: Literal["auto", "whole", "chunks", "liger"] | None
    kernels: Literal["auto", "model", "fused"] | None
    compile: bool | None
    deepcompile: bool | None
    compile_lengths: Literal["dynamic", "automatic", "static"] | None
    routing: Literal["auto", "recorded", "live"] | None
    gradient_checkpointing: bool | None
    optimizer: str | None
    learning_rate: float | None
    weight_decay: float | None
    beta1: float | None
    beta2: float | None
    eps: float | None
    momentum: float | None
    lr_warmup_steps: int | None
    grad_accumulation: int | None
    max_norm: float | None
    deepspeed_config: str | PathLike[str] | None
    tp: int | None
    ring: int | None
    ring_head_stride: int | None
    tp_plan: Literal["auto", "model", "builtin"] | None
    sequence_parallel: bool | None
    input_file: str | PathLike[str] | None
    recording: int | None
    skip_inputs: int | None
    max_inputs: int | None
    epochs: int | None
    uneven: bool | None
    passes: Literal["train", "rollout", "all"] | None
    shuffle_inputs: bool | None
    random_seed: int | None
    order: Literal["recorded", "worst"] | None
    pick_inputs: str | None
    loss: str | None
    window: Literal["job", "tokens", "mean-of-means"] | None
    verdict: Literal["report", "strict"] | None
    noise_floor: bool | None
    second_opinion: bool | None
    backward: bool | None
    step: Literal["auto", "on", "off"] | bool | None
    no_step: bool | None
    trace: bool | None
    profile: bool | None
    memory_snapshot: bool | None
    warmup: int | None
    timeout: float | None
    log_folder: str | PathLike[str] | None
    name: str | None
    clip_low: float | None
    clip_high: float | None
    dual_clip: float | None
    reduction: Literal["tokens", "window-tokens", "sequences", "divisor"] | None
    divisor: float | None
    on_policy: bool | None
    kl: Literal["k1", "k2", "k3", "k3-weighted"] | None
    kl_coefficient: float | None
    entropy_coefficient: float | None
    dpo_beta: float | None
    label_smoothing: float | None
    pairs: Literal["halves", "alternate"] | None
    average_log_probs: bool | None
    load_state: str | PathLike[str] | None
    optimizer_state: str | PathLike[str] | None
    save_state: str | PathLike[str] | None
    save_every: int | None
    resume: bool | None
    save_model: str | PathLike[str] | None
