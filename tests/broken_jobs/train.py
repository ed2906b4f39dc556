"""Carries a job of the table out: python train.py FOLDER NAME [--unbroken [--eager]]

`FOLDER/model` gets the weights that its user believes it trained (of the step that is replayed), and
`FOLDER/numbers_rank<r>.pt` what it computed, for tests/broken_jobs/effect.py. Nothing here tells capture anything, but
what the loss of a policy is computed of.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import capture
from tests.broken_jobs.batches import Batch, num_labels, windows_of
from tests.broken_jobs.declarations import At, Dtype, Fault, Job, Kind, Objective, Parameters, Setup, Weighting
from tests.broken_jobs.further_faults import add_to_averages, copy_into
from tests.broken_jobs.models import make_model, with_other_config
from tests.broken_jobs.table import JOBS

IGNORED = -100
WARMUP_STEPS = 2
# The Trainer's names of schedules that it calls otherwise, each with its warm-up.
TRAINER_SCHEDULES = {"warmup": "constant_with_warmup", "cosine-warmup": "cosine"}


@dataclass(kw_only=True, slots=True)
class Numbers:
    """What a rank computed: losses and log-probs by pass, norms and gradients (as the optimizer got them) by step."""

    losses: list[float] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    moved: dict[str, Tensor] = field(default_factory=dict)  # how far the weights went in all steps

    def add_pass(
        self, output: Any, batch: Mapping[str, Tensor], *, divisor: float | None, loss: Tensor | None = None
    ) -> None:
        """The loss as the mean over the labels; `divisor` is what the model divided their sum by instead.

        loss  that of the loop; None: the model's own
        """
        logits_BSV = output.logits.detach().float()
        labels_BS = batch["labels"][:, 1:]
        found_BS = logits_BSV[:, :-1].log_softmax(-1).gather(-1, labels_BS.clamp(min=0)[..., None])[..., 0]
        times = 1.0 if divisor is None else divisor / max(num_labels(dict(batch)), 1)
        self.losses.append(float((output.loss if loss is None else loss).detach()) * times)
        self.log_probs.append(found_BS[labels_BS != IGNORED])

    def add_step(self, gradients: dict[str, Tensor], norm: float) -> None:
        self.gradients.append(gradients)
        self.norms.append(norm)

    def write(self, folder: Path, rank: int) -> None:
        plain = {name: getattr(self, name) for name in self.__slots__}
        torch.save(plain, folder / f"numbers_rank{rank}.pt")


@dataclass(kw_only=True, slots=True)
class Run:
    """A job under way in this process."""

    job: Job
    setup: Setup  # that it really has
    fault: Fault
    folder: Path
    at: At
    eager: bool = False  # another kernel than the job's
    numbers: Numbers = field(default_factory=Numbers)
    began: dict[str, Tensor] = field(default_factory=dict)

    def make_model(self) -> Any:
        """Save what the user believes to be trained, then break it."""
        believed = self.job.setup
        model: Any = make_model(believed.model, believed.config)
        if believed.lora:
            model = _with_adapter(model, believed.lora_dropout)
        if believed.dtype is Dtype.BF16:
            model = model.to(torch.bfloat16)
        if believed.saved_at == 0:
            self.save(model)
        for name, parameter in model.named_parameters():
            if self.setup.frozen and self.setup.frozen in name:
                parameter.requires_grad_(False)
        if self.fault.config:
            dtype = model.dtype
            model = with_other_config(model, self.fault.config).to(dtype)
        if self.eager:
            model.set_attn_implementation("eager")
        if self.setup.checkpointing:
            model.gradient_checkpointing_enable()
        if self.fault.model is not None:
            self.fault.model(model)
        model.train()
        # Each rank drops out other values than the others.
        torch.manual_seed(0 if self.fault.has_one_seed else self.at.rank)
        self.began = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        return model

    def end(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.numbers.moved = {name: _whole(parameter) - self.began[name] for name, parameter in parameters.items()}

    def save(self, model: Any) -> None:
        if self.at.rank == 0:
            saved = model
            if self.job.setup.lora_dropout:
                # An adapter with dropout cannot be merged: it acts on other inputs than the layer that it adapts.
                model.save_pretrained(self.folder / "adapter")
                saved = _without_adapter(model)
            elif self.job.setup.lora:
                saved = _merged(model)
            # by the names of the module: a replay reads no experts by their older names
            saved.save_pretrained(self.folder / "model", save_original_format=False)

    def make_optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """One, but where Muon steps the layers' matrices alone; broken where the optimizer is."""
        found = self._make_muon(model) if self.setup.optimizer == "muon" else [self._make_optimizer(model)]
        for optimizer in found:
            if self.fault.optimizer is not None:
                self.fault.optimizer(optimizer)
        return found

    def _make_muon(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        names = {name for name, parameter in model.named_parameters() if parameter.ndim == 2 and "layers." in name}
        matrices = [parameter for name, parameter in model.named_parameters() if name in names]
        others = [parameter for name, parameter in model.named_parameters() if name not in names]
        rate = self.setup.learning_rate
        return [torch.optim.Muon(matrices, lr=rate), torch.optim.AdamW(others, lr=rate)]

    def _make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups: Any = trained
        if self.setup.decay_groups:
            groups = [
                {"params": [parameter for parameter in trained if parameter.ndim > 1]},
                {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
            ]
        settings = {"lr": self.setup.learning_rate, **self.setup.settings}
        kinds: dict[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        made: torch.optim.Optimizer = kinds[self.setup.optimizer](groups, **settings)
        return made

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        steps = self.setup.num_steps
        factors: dict[str, Callable[[int], float]] = {
            "linear": lambda step: 1 - step / steps,
            "cosine": lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)),
            "warmup": lambda step: min(1.0, step / WARMUP_STEPS),
        }
        if self.setup.schedule == "constant":
            return None
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factors[self.setup.schedule])


def main(name: str, folder: Path, *, broken: bool, eager: bool) -> None:
    torch.set_num_threads(1)
    job = JOBS[name]
    setup, fault = job.as_run(broken=broken)
    if fault.process is not None:
        fault.process()
    at = At(rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1")))
    run = Run(job=job, setup=setup, fault=fault, folder=folder, at=at, eager=eager)
    if job.kind.is_trainer:
        _train_with_trainer(run)
    elif job.kind.zero_stage:
        _train_with_deepspeed(run)
    else:
        _train_in_a_loop(run)
    run.numbers.write(folder, at.rank)


def _train_in_a_loop(run: Run) -> None:
    """One process, DDP or FSDP2."""
    setup, fault, kind = run.setup, run.fault, run.job.kind
    if kind.num_ranks > 1:
        dist.init_process_group("gloo")
    model = run.make_model()
    called = _wrapped(model, run)
    if fault.wrapped is not None:
        fault.wrapped(called)
    parameters = dict(model.named_parameters())
    optimizers = run.make_optimizers(model)
    schedules = [run.make_schedule(optimizer) for optimizer in optimizers]
    scaler = torch.amp.GradScaler("cpu", init_scale=setup.loss_scale, enabled=setup.dtype is Dtype.FP16)
    averages: dict[str, Tensor] = {}
    for step, window in enumerate(windows_of(run.job.setup, run.at.rank)):
        if step and step == run.job.setup.saved_at:
            run.save(model)
        window_tokens = _sum_over_ranks(sum(map(num_labels, window)))
        for number, batch in enumerate(window):
            at = replace(run.at, step=step, number=number, tokens=num_labels(batch), window_tokens=window_tokens)
            is_last = number == len(window) - 1
            with _without_reduction(called, kind) if not is_last else nullcontext():
                loss = _loss_of(called, batch, run, at)
                scaler.scale(loss).backward()
                if fault.clips_each_pass is not None:
                    nn.utils.clip_grad_norm_(parameters.values(), fault.clips_each_pass)
        if fault.unscales_first:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if fault.gradients is not None:
            fault.gradients(parameters, at)
        norm = _clip(parameters, run)
        run.numbers.add_step(_whole_gradients(parameters), norm)
        if step not in fault.skipped_steps:
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        for schedule in schedules:
            if schedule is not None:
                schedule.step()
        if fault.zero_grad:
            for optimizer in optimizers:
                optimizer.zero_grad()
        if fault.after_step is not None:
            fault.after_step(parameters, at)
        if setup.evaluates_average:
            add_to_averages(averages, parameters)
            _evaluate_average(called, parameters, averages, window[0])
    run.end(parameters)
    del called, model
    if kind.num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _evaluate_average(called: Any, parameters: Parameters, averages: dict[str, Tensor], batch: Batch) -> None:
    """One pass of the averaged weights, without a gradient; then the weights are as before."""
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    copy_into(parameters, averages)
    called.eval()
    with torch.no_grad():
        called(**batch)
    called.train()
    copy_into(parameters, weights)


def _train_with_deepspeed(run: Run) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    # compiled at first use otherwise, under a lock in the home folder that a killed job leaves behind
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    setup, fault = run.setup, run.fault
    model = run.make_model()
    (optimizer,) = run.make_optimizers(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": setup.accumulation,
            "gradient_clipping": setup.max_norm or 0.0,
            "zero_optimization": {"stage": run.job.kind.zero_stage},
            "bf16": {"enabled": setup.dtype is Dtype.BF16},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    if fault.wrapped is not None:
        fault.wrapped(engine)
    parameters = dict(model.named_parameters())
    for step, window in enumerate(windows_of(run.job.setup, run.at.rank)):
        window_tokens = _sum_over_ranks(sum(map(num_labels, window)))
        for number, batch in enumerate(window):
            at = replace(run.at, step=step, number=number, tokens=num_labels(batch), window_tokens=window_tokens)
            engine.backward(_loss_of(engine, batch, run, at))
            if number == len(window) - 1:
                found = {name: safe_get_full_grad(parameter) for name, parameter in parameters.items()}
                gradients = {name: gradient.float().clone() for name, gradient in found.items() if gradient is not None}
            engine.step()
        run.numbers.add_step(gradients, float(engine.get_global_grad_norm() or 0.0))
    dist.barrier()
    dist.destroy_process_group()


def _train_with_trainer(run: Run) -> None:
    import transformers
    from torch.utils.data import SequentialSampler

    setup, fault, numbers = run.setup, run.fault, run.numbers
    model = run.make_model()
    (optimizer,) = run.make_optimizers(model)
    parameters = dict(model.named_parameters())

    class JobTrainer(transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Any:
            loss, output = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
            divisor = None if setup.weighting is Weighting.MEANS else num_items_in_batch
            numbers.add_pass(output, inputs, divisor=None if divisor is None else float(divisor))
            at = replace(run.at, step=self.state.global_step)
            return loss if fault.loss is None else fault.loss(loss, at)

    class Watching(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            numbers.gradients.append(_whole_gradients(parameters))

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if fault.after_step is not None:
                fault.after_step(parameters, replace(run.at, step=state.global_step - 1))

        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step and state.global_step == run.job.setup.saved_at:
                run.save(model)

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "grad_norm" in logs:
                numbers.norms.append(float(logs["grad_norm"]))

    ranks = [windows_of(run.job.setup, rank) for rank in range(run.at.world_size)]
    batches = [
        ranks[rank][step][number]
        for step in range(setup.num_steps)
        for number in range(setup.accumulation)
        for rank in range(run.at.world_size)
    ]
    trainer = JobTrainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(run.folder / "trainer"),
            learning_rate=setup.learning_rate,
            lr_scheduler_type=TRAINER_SCHEDULES.get(setup.schedule, setup.schedule),
            warmup_steps=WARMUP_STEPS if setup.schedule in TRAINER_SCHEDULES else 0,
            gradient_accumulation_steps=setup.accumulation,
            max_grad_norm=setup.max_norm or 0.0,
            logging_steps=1,
            num_train_epochs=1,
            per_device_train_batch_size=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            bf16=setup.dtype is Dtype.AUTOCAST,
            gradient_checkpointing=setup.checkpointing,
        ),
        train_dataset=batches,
        data_collator=lambda samples: samples[0],
        callbacks=[Watching()],
        optimizers=(optimizer, None),
    )
    if setup.weighting is Weighting.MEANS:
        trainer.model_accepts_loss_kwargs = False
    if fault.wrapped is not None:
        fault.wrapped(trainer)
    trainer.train()
    run.end(parameters)
    if dist.is_initialized():
        trainer.accelerator.free_memory()
        del trainer
        dist.barrier()
        dist.destroy_process_group()


def _wrapped(model: Any, run: Run) -> Any:
    """What the loop calls."""
    if run.setup.compiled:
        model = torch.compile(model, backend="eager")
    match run.job.kind:
        case Kind.DDP:
            return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        case Kind.FSDP2:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            mesh = init_device_mesh("cpu", (run.at.world_size,))
            mixed = run.setup.dtype is Dtype.AUTOCAST
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            return fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


@contextmanager
def _without_reduction(called: Any, kind: Kind) -> Iterator[None]:
    match kind:
        case Kind.DDP:
            with called.no_sync():
                yield
        case Kind.FSDP2:
            called.set_requires_gradient_sync(False)
            yield
            called.set_requires_gradient_sync(True)
        case _:
            yield


def _loss_of(called: Any, batch: Batch, run: Run, at: At) -> Tensor:
    """One forward, and its loss with the share that it has in the step's.

    DDP, FSDP2 and DeepSpeed average over ranks, DeepSpeed over the window too: where the loss is weighted already,
    that is taken back.
    """
    setup = run.setup
    divided = at.world_size * (setup.accumulation if run.job.kind.zero_stage else 1)
    is_divided = setup.weighting is Weighting.TOKENS and setup.objective is Objective.MODEL
    more: dict[str, Any] = {"num_items_in_batch": at.window_tokens} if is_divided else {}
    with _autocast(run):
        if setup.objective is Objective.MODEL:
            output = called(**batch, **more)
            loss: Tensor = output.loss
        else:
            output = called(**{name: tensor for name, tensor in batch.items() if name != "labels"})
            if setup.objective is Objective.POLICY:
                loss = _policy_loss(output.logits, batch, run, at)
            else:
                loss = (run.fault.loop_loss or _cross_entropy)(output.logits, batch["labels"])
    run.numbers.add_pass(output, batch, divisor=more.get("num_items_in_batch"), loss=loss)
    match setup.weighting:
        case Weighting.TOKENS:
            loss = loss * divided
        case Weighting.BY_HAND:
            loss = loss * (at.tokens / at.window_tokens * divided)
        case Weighting.MEANS if not run.job.kind.zero_stage:
            loss = loss / setup.accumulation
        case Weighting.SUM if run.job.kind.zero_stage:
            loss = loss * setup.accumulation
    return loss if run.fault.loss is None else run.fault.loss(loss, at)


def _cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), labels_BS[:, 1:].flatten())


def _policy_loss(logits_BSV: Tensor, batch: Batch, run: Run, at: At) -> Tensor:
    """PPO's loss (https://arxiv.org/abs/1707.06347, equation 7); the old policy and the reference are near this one."""
    generator = torch.Generator().manual_seed(1000 * at.rank + 10 * at.step + at.number)
    ids_BA = batch["input_ids"][:, 1:]
    log_probs_BA = logits_BSV[:, :-1].log_softmax(-1).gather(-1, ids_BA[..., None])[..., 0]
    size = tuple(ids_BA.shape)
    noted = {
        "action_mask": batch["labels"][:, 1:] != IGNORED,
        "advantages": torch.randn(size[0], 1, generator=generator).expand(size),
        "old_log_probs": log_probs_BA.detach() + 0.05 * torch.randn(size, generator=generator),
    }
    if run.job.setup.divergence:
        noted["ref_log_probs"] = log_probs_BA.detach() + 0.5 * torch.randn(size, generator=generator)
    if run.fault.noted is not None:
        noted = run.fault.noted(noted)
    capture.note(**noted)
    if run.fault.used is not None:
        noted = run.fault.used(noted)
    ratio_BA = (log_probs_BA - noted["old_log_probs"]).exp()
    losses_BA = -torch.min(ratio_BA * noted["advantages"], ratio_BA.clamp(0.8, 1.2) * noted["advantages"])
    if run.setup.divergence:
        apart_BA = noted["ref_log_probs"] - log_probs_BA
        losses_BA = losses_BA + run.setup.divergence * (apart_BA.exp() - 1 - apart_BA)
    loss = losses_BA[noted["action_mask"]].mean()
    capture.note(loss=loss)
    return loss


def _autocast(run: Run) -> AbstractContextManager[Any]:
    if run.job.kind is Kind.FSDP2 or run.setup.dtype not in (Dtype.AUTOCAST, Dtype.FP16):
        return nullcontext()
    return torch.autocast("cpu", torch.bfloat16 if run.setup.dtype is Dtype.AUTOCAST else torch.float16)


def _clip(parameters: Mapping[str, nn.Parameter], run: Run) -> float:
    """Returns the norm that the loop believes."""
    max_norm = run.setup.max_norm
    if max_norm is not None and run.fault.clip is not None:
        return float(run.fault.clip(parameters, max_norm))
    if max_norm is not None:
        return float(_whole(nn.utils.clip_grad_norm_(parameters.values(), max_norm)))
    return float(
        torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in _whole_gradients(parameters).values()]))
    )


def _whole_gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {
        name: _whole(parameter.grad).float().clone()
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }


def _whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.detach()
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def _sum_over_ranks(number: int) -> int:
    if not dist.is_initialized():
        return number
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


def _with_adapter(model: Any, dropout: float) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        lora_dropout=dropout,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(2)
    return get_peft_model(model, config)


def _without_adapter(model: Any) -> Any:
    import copy

    return copy.deepcopy(model).unload()


def _merged(model: Any) -> Any:
    import copy

    return copy.deepcopy(model).merge_and_unload()


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    main(arguments[1], Path(arguments[0]), broken="--unbroken" not in sys.argv, eager="--eager" in sys.argv)
