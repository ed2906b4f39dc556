"""The table: bugs that DeepSpeed, PyTorch, transformers, accelerate and TRL have published, and the command for each.

A bug is found if that command says so of the broken release and says nothing of the fixed one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.published_bugs.environments import Environment


@dataclass(frozen=True, kw_only=True)
class Bug:
    """Shown by a job that is recorded and then replayed here, or by configurations that are held against each other."""

    what: str
    broken: Environment
    fixed: Environment
    job: Sequence[str] = ()  # of jobs/, with its arguments before the folder
    fixed_job: Sequence[str] = ()  # where the job itself has to change, as no release is fixed
    records_itself: bool = False  # the job has a recorder in its loop; else it runs under `capture run`
    processes: int = 1
    replay: Sequence[str] = ()  # options of the replay
    parity: Sequence[str] = ()  # options of `replay parity`, run in both environments
    cells: Mapping[str, Any] = field(default_factory=dict)  # the table of its matrix
    files: Mapping[str, Any] = field(default_factory=dict)  # JSON files that an option names as {folder}/NAME

    def command(self) -> str:
        """What has to find it, for the table."""
        if self.cells:
            axes = " ".join(f"{key}={'/'.join(map(str, _listed(value)))}" for key, value in self.cells.items())
            return " ".join(["replay parity", *self.parity, f"[{axes}]"])
        return " ".join(["recording, replay" if self.records_itself else "capture run, replay", *self.replay])


def deepspeed(release: str) -> Environment:
    return Environment(packages=[f"deepspeed=={release}"])


def transformers(release: str, accelerate: str = "", tokenizers: str = "0.22.2", hub: str = "0.26.5") -> Environment:
    """A release of 5.x beside our accelerate, or an older one beside its own."""
    packages = [f"transformers=={release}", f"tokenizers=={tokenizers}"]
    if not accelerate:
        return Environment(packages=[*packages, "huggingface_hub==1.5.0", "httpx", "httpcore", "certifi"], hidden=LATER)
    of_its_time = [f"huggingface_hub=={hub}", "requests", "urllib3", "certifi", "charset_normalizer"]
    return Environment(packages=[*packages, f"accelerate=={accelerate}", *of_its_time], hidden=LATER)


def trl(release: str) -> Environment:
    """0.18 and 0.19, beside releases of their time."""
    packages = transformers("4.52.4", "1.8.1", "0.21.4", hub="0.33.4").packages
    data = ["datasets==3.6.0", "dill==0.3.8", "multiprocess==0.70.16"]
    return Environment(packages=[f"trl=={release}", *packages, *data], hidden=["peft", "deepspeed"])


def engine(**config: Any) -> list[str]:
    return ["engine", json.dumps(config)]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


HERE = Environment()
LATER = ("datasets", "peft", "trl")  # of our environment, which old releases import where they are there
FP32 = ["--dtype", "fp32"]
BF16: dict[str, Any] = {"bf16": {"enabled": True}}

GRPO = {
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 6,
    "beta": 0.0,
}

BUGS: dict[str, Bug] = {
    "deepspeed-7837": Bug(
        what="bf16 without ZeRO: gradients are divided by a loss scale that was never applied, and never zeroed",
        broken=deepspeed("0.18.5"),
        fixed=deepspeed("0.18.6"),
        cells={"backend": "deepspeed", "zero-stage": [0, 1], "dtype": "bf16"},
        parity=["--num-layers", "2"],
    ),
    "deepspeed-7837-job": Bug(
        what="the same, in a recorded job",
        broken=deepspeed("0.18.5"),
        fixed=deepspeed("0.18.6"),
        job=engine(**BF16, zero_optimization={"stage": 0}),
    ),
    "deepspeed-7985": Bug(
        what="bf16 with fp32 accumulation under ZeRO 1: each rank's last micro-batch is left out of the average",
        broken=deepspeed("0.18.6"),
        fixed=deepspeed("0.19.0"),
        job=engine(
            **BF16,
            data_types={"grad_accum_dtype": "fp32"},
            zero_optimization={"stage": 1},
        ),
        processes=2,
    ),
    "deepspeed-7948": Bug(
        what="ZeRO 1 and 2 on a CPU: the optimizer's step raises, as the flat weights are part of a graph",
        broken=deepspeed("0.18.9"),
        fixed=deepspeed("0.19.0"),
        cells={"backend": "deepspeed", "zero-stage": [1, 2], "dtype": "fp32", "data": 2},
        parity=["--num-layers", "2", "--step"],
    ),
    "deepspeed-7967": Bug(
        what="ZeRO 1 and 2 with offload: of an accumulation window only the first micro-batch's gradient is kept",
        broken=deepspeed("0.18.6"),
        fixed=deepspeed("0.19.0"),
        # scaled by the caller, as the engine's own scaling has another bug in both releases: 8245
        job=engine(
            zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}},
            gradient_accumulation_steps=4,
            scaled_by_caller=True,
        ),
        processes=2,
    ),
    "deepspeed-8245": Bug(
        what="a window's gradient is divided by its length in a hook on every output: twice with loss and logits",
        broken=deepspeed("0.19.5"),
        fixed=deepspeed("0.19.6"),
        job=engine(zero_optimization={"stage": 1}, gradient_accumulation_steps=2),
    ),
    "deepspeed-7724": Bug(
        what="a caller that scales its loss itself, as transformers' Trainer, has it divided by the window once more",
        broken=deepspeed("0.18.3"),
        fixed=deepspeed("0.18.4"),
        job=engine(zero_optimization={"stage": 1}, gradient_accumulation_steps=2, scaled_by_caller=True),
        processes=2,
    ),
    "transformers-34191": Bug(
        what="a window's loss is the mean of its micro-batches' means, whatever their numbers of tokens",
        broken=transformers("4.45.2", "1.0.1", "0.20.3"),
        fixed=transformers("4.46.3", "1.0.1", "0.20.3"),
        job=["trainer", json.dumps({"gradient_accumulation_steps": 2, "prompt": 3})],
    ),
    "transformers-46204": Bug(
        what="the Trainer divides by a number of tokens that counts each row's first one, which nothing predicts",
        broken=transformers("5.9.0"),
        fixed=transformers("5.10.1"),
        job=["trainer", "{}"],
    ),
    "transformers-46634": Bug(
        what="packed documents see each other once a mask of ones comes with them: every release; fixed is the job",
        broken=HERE,
        fixed=HERE,
        job=["packed", "with-mask"],
        fixed_job=["packed", "without-mask"],
    ),
    "transformers-44380": Bug(
        what="GPT-2's attention is not scaled by its layer under sdpa, though its config asks for it",
        broken=transformers("5.2.0"),
        fixed=transformers("5.4.0"),
        cells={"backend": "fsdp2", "attention": ["sdpa", "eager"], "dtype": "fp32", "packing": False},
        parity=["--model", "{folder}/gpt2.json"],
        files={
            "gpt2.json": {
                "model_type": "gpt2",
                "architectures": ["GPT2LMHeadModel"],
                "n_embd": 64,
                "n_layer": 3,
                "n_head": 4,
                "vocab_size": 1024,
                "scale_attn_by_inverse_layer_idx": True,
                "attn_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "resid_pdrop": 0.0,
            }
        },
    ),
    "pytorch-170862": Bug(
        what="under FSDP2 clip_grad_norm_ returns a norm that a loop reads as its rank's own",
        broken=Environment(packages=["torch==2.9.1"], hidden=["functorch", "torchgen"], dependencies=True),
        fixed=HERE,
        job=["fsdp2_loop"],
        records_itself=True,
        processes=2,
    ),
    "trl-3538": Bug(
        what="SFT divides by each rank's own number of tokens, and then averages over the ranks",
        broken=trl("0.18.2"),
        fixed=trl("0.19.0"),
        job=["trl_job", "sft", "{}"],
        processes=2,
    ),
    "trl-3231": Bug(
        what="GRPO's loss is a mean over a micro-batch's tokens, so that accumulation changes it (cure: loss_type)",
        broken=trl("0.18.2"),
        fixed=trl("0.18.2"),
        job=["trl_job", "grpo", json.dumps(GRPO | {"loss_type": "bnpo"})],
        fixed_job=["trl_job", "grpo", json.dumps(GRPO | {"loss_type": "dr_grpo"})],
    ),
    "accelerate-3979": Bug(
        what="FSDP2 with mixed precision: weights that were loaded in bf16 stay so, and small steps of AdamW are lost",
        broken=Environment(packages=["accelerate==1.13.0"]),
        fixed=Environment(packages=["accelerate==1.14.0"]),
        job=["accelerate_fsdp2"],
        processes=2,
    ),
}
