"""Write `repro.py`, which shows a failure with torch and transformers alone, and try it.

The script builds the model from the config, loads tensors that torch.load(weights_only=True) reads, and runs forward
and backward on padded rows. It is kept only if it shows the same failure, at first with random weights of transformers'
own, then with the replay's.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actor_init.inputs.packing import prepare_inputs
from actor_init.model import ModelSource, build_on_meta, count_elements, find_model, materialise, to_plain_config
from actor_init.model_positions import add_model_positions
from actor_init.schedule_and_norm import TORCH_DTYPES
from actor_init.spec import Attention, UsageError
from capture.file_format.actor_config import read_actor_config, read_adapter_configs
from capture.file_format.capture_file import read_call
from capture.file_format.listing import capture_files
from capture.file_format.micro_batch import CaptureError
from replay.commands.minimise.failure import JOB_DIFFERENCES, FailureKind, ReplayFailure, mask
from replay.objective.objective import select_loss_tokens
from replay.options.option_parsing import format_error_with_flags
from replay.options.spec import USER_LOSS_PATTERN, ReplaySpec
from replay.processes.launch import without_launcher

SCRIPT, DATA = "repro.py", "repro.pt"
# The most bytes of weights that are written beside the script.
MAX_WEIGHT_BYTES = 256 * 2**20
# Seconds for imports, before a pass can hang.
GRACE_SECONDS = 60.0

_SCRIPT_HEAD = '''"""{text}

Shown by torch and transformers alone, without micro-replay: python repro.py
"""

{imports}
import torch
from transformers import AutoConfig, AutoModelForCausalLM

{loss_file}data = torch.load(Path(__file__).with_name("{data}"), weights_only=True)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = AutoConfig.for_model(**data["config"])
model = AutoModelForCausalLM.from_config(config, attn_implementation="{attention}")
{weights}model.to(device, {dtype}).train()
{settings}
for number, captured in enumerate(data["passes"], start=1):
    batch = {{name: value.to(device) if torch.is_tensor(value) else value for name, value in captured.items()}}
    mask = batch["action_mask"]
    with torch.set_grad_enabled(batch["trains"]):
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
            use_cache=False,
        ).logits
        chosen = logits.flatten(0, 1)[batch["predictor"]].float().log_softmax(-1)
        chosen = chosen.gather(1, batch["target"][:, None])[:, 0]
        log_probs = chosen.new_zeros(mask.numel()).index_put((batch["slot"],), chosen).view(mask.shape)
{loss}
'''
# transformers before 5.23 knows the older name alone, and later ones warn of it.
_CHECKPOINTING = """new_name = "activation_checkpointing_enable"
enable = getattr(model, new_name, None) or model.gradient_checkpointing_enable
enable({"use_reentrant": False})
"""
_FINITE = """    if not torch.isfinite(loss):
        sys.exit(f"pass {number}: the loss is {loss.item()}")
"""
_NUMBERS = """    for row, there in enumerate(batch["recorded"].tolist()):
        here, tokens = float(log_probs[row].sum()), max(int(mask[row].sum()), 1)
        if abs(there - here) > {bound} * max(abs(there), tokens):
            sys.exit(f"pass {{number}}, row {{row}}: log-probs sum to {{here}}, in the job to {{there}}")
"""
_BACKWARD = """    if batch["trains"]:
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                sys.exit(f"pass {number}: the gradient of {name} is not finite")
        model.zero_grad()
"""
_LOSS_FILE = """sys.path.insert(0, str(Path(__file__).parent))
from {module} import {function} as loss_of

"""
_STAND_IN = "        loss = -log_probs.sum() / mask.sum().clamp(min=1)"
_OWN_LOSS = """        given = SimpleNamespace(
            log_probs_BA=log_probs,
            action_mask_BA=mask,
            tensors={name: value.to(device) for name, value in batch["tensors"].items()},
            num_window_tokens=int(mask.sum()),
            num_window_passes=1,
        )
        loss = loss_of(given)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standalone:
    """What became of the script. `why` says why there is none, `weights` whose weights it has."""

    shows: bool
    why: str = ""
    weights: str = ""


def write_standalone(
    home: Path, spec: ReplaySpec, failure: ReplayFailure, *, num_processes: int, seconds: float
) -> Standalone:
    """Write the script into `home`, beside `inputs`, and run it for at most `seconds`; remove it if it shows nothing.

    The script is first tried with random weights, which need no file. If it shows nothing, it is tried with the
    replay's weights, unless they are too large.

    spec  of the replay that failed, with the dtype and the attention kernel that it had
    """
    if reason := _find_obstacle(spec, failure, num_processes):
        return Standalone(shows=False, why=reason)
    inputs = home / "inputs"
    try:
        source = find_model(spec.actor, read_actor_config(inputs), "captured", read_adapter_configs(inputs))
        if source.adapter is not None:
            return Standalone(shows=False, why="the model has an adapter")
        data = {"config": to_plain_config(source.config), "passes": _prepare_passes(inputs, spec, source)}
    except (UsageError, CaptureError) as error:
        return Standalone(shows=False, why=format_error_with_flags(error))
    origins = ["random ones, as transformers makes them", "those of the replay, in repro.pt"]
    if failure.kind in JOB_DIFFERENCES:
        # With other weights the numbers differ in any case.
        origins = origins[1:]
    last_line = ""
    for weights in origins:
        has_own = weights == "those of the replay, in repro.pt"
        if has_own:
            model = build_on_meta(source.config, attention="eager", dtype=torch.float32)
            if count_elements(model) * 4 > MAX_WEIGHT_BYTES:
                last_line += (
                    f". The weights may matter: they are more than {MAX_WEIGHT_BYTES >> 20} MiB and were left out"
                )
                break
            materialise(model, source.weights, torch.device("cpu"))
            data["weights"] = {name: value.clone() for name, value in model.state_dict().items()}
        torch.save(data, home / DATA)
        (home / DATA).chmod(0o600)
        (home / SCRIPT).write_text(format_script(spec, failure, has_weights=has_own), encoding="utf-8")
        shows, last_line = _run_script(home, failure, seconds)
        if shows:
            return Standalone(shows=True, weights=weights)
    for name in (SCRIPT, DATA):
        (home / name).unlink(missing_ok=True)
    return Standalone(shows=False, why=f"plain transformers did not show it: {last_line}")


def _find_obstacle(spec: ReplaySpec, failure: ReplayFailure, num_processes: int) -> str:
    """Return why no such script can show the failure; empty if one may."""
    if num_processes > 1:
        return f"the failure needs {num_processes} processes"
    if failure.kind is FailureKind.PARITY:
        return "it is a difference between two configurations of micro-replay"
    if spec.actor.has_user_model:
        return "the model is one of --model FILE.py:function, whose forward micro-replay calls"
    if failure.kind in JOB_DIFFERENCES and failure.bound is None:
        return f"it compares sums of log-probs alone, and what differs is {' and '.join(failure.quantities)}"
    return ""


def _prepare_passes(inputs: Path, spec: ReplaySpec, source: ModelSource) -> list[dict[str, Any]]:
    """Prepare the captures as padded rows. Raises CaptureError for rows that hold several documents."""
    passes: list[dict[str, Any]] = []
    for path in capture_files(inputs):
        call = read_call(path)
        batch = add_model_positions(select_loss_tokens(spec.measure.loss, call.micro_batch()), source.config)
        fed = prepare_inputs(batch, packing=False)
        sums = call.output_numbers("log_probs_row_sums") or call.output_numbers("output_row_sums")
        tensors: dict[str, Tensor | None] = {
            "input_ids": fed.input_ids,
            "attention_mask": None if fed.attention_mask_BS is None else fed.attention_mask_BS.long(),
            "position_ids": fed.position_ids,
            "predictor": fed.predictor_N,
            "target": fed.target_ids_N,
            "slot": fed.slot_N,
            "action_mask": fed.action_mask_BA,
            "recorded": None if sums is None else torch.tensor(sums, dtype=torch.float64),
        }
        user_tensors = {**call.tensors, **call.notes} if USER_LOSS_PATTERN.fullmatch(spec.measure.loss) else {}
        passes.append({**tensors, "trains": call.trains, "tensors": user_tensors})
    return passes


def format_script(spec: ReplaySpec, failure: ReplayFailure, *, has_weights: bool) -> str:
    """Return repro.py, which shows the failure with torch and transformers alone.

    has_weights  whether it loads the replay's weights
    """
    own_loss = USER_LOSS_PATTERN.fullmatch(spec.measure.loss)
    is_number = failure.kind in JOB_DIFFERENCES
    imports = ["import sys", "from pathlib import Path", *(["from types import SimpleNamespace"] if own_loss else [])]
    attention = "eager" if spec.actor.attention in (Attention.EAGER, Attention.FLEX) else "sdpa"
    head = _SCRIPT_HEAD.format(
        text=failure.text.replace("\\", "/").replace('"', "'")[:400],
        imports="\n".join(imports) + "\n",
        loss_file=_LOSS_FILE.format(module=Path(own_loss["file"]).stem, function=own_loss["function"])
        if own_loss
        else "",
        data=DATA,
        attention=attention,
        weights='model.load_state_dict(data["weights"])\n' if has_weights else "",
        dtype=str(TORCH_DTYPES[spec.actor.dtype]),
        settings=_CHECKPOINTING if spec.actor.gradient_checkpointing else "",
        loss=_OWN_LOSS if own_loss else _STAND_IN,
    )
    numbers = _NUMBERS.format(bound=failure.bound) if is_number else _FINITE
    backward = _BACKWARD if spec.measure.backward and not is_number else ""
    return head.rstrip("\n") + "\n" + numbers + backward + 'print("nothing failed")\n'


def _run_script(home: Path, failure: ReplayFailure, seconds: float) -> tuple[bool, str]:
    """Run the script; return whether it shows the failure, and what it said last."""
    environment = {name: value for name, value in without_launcher(os.environ).items() if name != "PYTHONPATH"}
    try:
        process = subprocess.run(
            [sys.executable, "-P", SCRIPT],
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return failure.kind is FailureKind.HANG, f"not finished within {seconds:.0f} s"
    lines = (process.stderr if process.returncode else process.stdout).strip().splitlines() or [
        f"exit code {process.returncode}"
    ]
    return _is_shown(failure, process.returncode, process.stderr), lines[-1]


def _is_shown(failure: ReplayFailure, exit_code: int, errors: str) -> bool:
    if failure.kind is FailureKind.DIED:
        return exit_code < 0
    if failure.kind in (FailureKind.NOT_FINITE, *JOB_DIFFERENCES):
        return exit_code == 1 and bool(re.search(r"^pass \d", errors, re.MULTILINE))
    if failure.kind is not FailureKind.EXCEPTION or exit_code != 1:
        return False
    masked_errors = mask(errors)
    return f"{failure.error_type}: {failure.message}" in masked_errors
