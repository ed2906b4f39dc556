"""Measure from the key press to the table: `python -m replay --max-inputs 5` beside a bare script of the same passes.

    python -m benchmarks start_up --rounds 5

The bare script imports torch, deepspeed and transformers, builds the sample's model with transformers' own values,
opens DeepSpeed's engine as the replay does, feeds it the same five captures packed, and prints a table. The two
alternate; the bare script once more in each round is the control. CPU seconds of the whole process are told beside
wall time: they say more on a machine that others load too.
"""

import resource
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, Answers, Column, Sample, alternate, make_parser, run_to_end, table

COLUMNS = (
    Column("wall s", "wall"),
    Column("CPU s", "CPU"),
    Column("wall / bare", "wall", of="bare"),
    Column("CPU / bare", "CPU", of="bare"),
)
BARE = """
import os, sys, time
import deepspeed, torch, transformers
from capture.file_format.actor_config import read_actor_config
from capture.file_format.capture_file import read_micro_batch
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM

folder = Path(sys.argv[1])
values = read_actor_config(folder)
config = AutoConfig.for_model(values.pop("model_type"), **values)
model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
os.environ["LOCAL_RANK"] = "0"
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
}, dist_init_required=False)
batches = [one for path in sorted(folder.glob("*.pkl")) if (one := read_micro_batch(path)).trains]
rows = []
for batch in batches[:5]:
    documents = [ids[mask] for ids, mask in zip(batch.sequences_BS, batch.attention_mask_BS, strict=True)]
    input_ids = torch.cat(documents)[None]
    position_ids = torch.cat([torch.arange(len(one)) for one in documents])[None]
    began = time.perf_counter()
    logits = engine(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), input_ids[0, 1:])
    between = time.perf_counter()
    engine.backward(loss)
    norm = sum(p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None)
    engine.zero_grad()
    rows.append((between - began, time.perf_counter() - between, loss.item()))
for forward, backward, loss in rows:
    print(f"{forward * 1e3:10.1f} {backward * 1e3:10.1f} {loss:10.5f}")
"""


def main() -> int:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--inputs", type=Path, default=ROOT / "inputs" / "sample")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        bare = [sys.executable, "-c", BARE, str(given.inputs)]
        replay = ["-m", "replay", "--max-inputs", "5", "--inputs", str(given.inputs), "--log-folder", home]
        commands = {"replay": [sys.executable, *replay], "bare": bare, "bare again": bare}
        series = {name: partial(measured, command) for name, command in commands.items()}
        answers = Answers(given, "start_up")
        figures = alternate(series, answers, rounds=given.rounds)  # the first round reads the files into memory
    print(f"{answers.machine}: {given.rounds} rounds\n\n{table('series', figures, COLUMNS)}")
    return 0


def measured(command: list[str], number: int) -> list[Sample]:
    """Run a command, and return its wall and CPU seconds, those of its children included."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    run_to_end(command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return [{"wall": time.perf_counter() - began, "CPU": cpu}]
