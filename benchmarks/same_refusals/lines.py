"""The wrong command lines, and the folder of wrong files that they are typed in."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.same_numbers.trees import SAMPLE, Tree

# `replay` stands before each
REPLAY = """
    --max-input 5
    --max-inputs
    --max-inputs many
    --max-inputs 0
    --max-inputs 2.5
    --skip-inputs=-1
    --backend zero
    --zero-stage 4
    --learning-rate inf
    --learning-rate=-1
    --max-norm nan
    --label-smoothing 0.6
    --tp 0
    --tp-plan theirs
    --dtype fp64
    --inputs=
    --compile --deepcompile
    --attention eager --flash-attn
    nonsense
    sample
    --backend fsdp2 --deepcompile
    --backend fsdp2 --sequence-parallel
    --backend fsdp2 --tp-plan model
    --tp 2 --sequence-parallel
    --tp 2 --tp-plan builtin
    --backend fsdp2 --zero-stage 1
    --backend ddp --zero-stage 2
    --backend ddp --tp 2
    --backend ddp --ring 2
    --backend ddp --deepspeed-config ds.json
    --ring-head-stride 1
    --ring 2 --no-packing
    --ring 2 --attention varlen
    --pad-tokens 1,x
    --pad-tokens 0
    --compile-lengths static
    --backend fsdp2 --tp 2 --sequence-parallel --compile --compile-lengths automatic
    --attention varlen --no-packing
    --model own.py
    --model own.py:
    --weights weights.pt
    --weights llama
    --blocks layers
    --model own.py:plain --tp 2
    --model own.py:plain --ring 2
    --model own.py:plain --packing
    --model own.py:plain --attention eager
    --model own.py:plain --adapter adapter
    --model own.py:plain --weights weights.pt --random-weights
    --optimizer sgd --beta1 0.5
    --momentum 0.9
    --optimizer none --weight-decay 0.1
    --inputs sample --input-file bare
    --order worst --shuffle-inputs
    --pick-inputs 1,,2
    --pick-inputs 1 --uneven
    --loss other
    --loss policy --window mean-of-means
    --divisor 0
    --loss policy --divisor 3
    --clip-low 0.3
    --dpo-beta 0.3
    --save-every 2
    --resume
    --resume --save-state new --save-every 1 --load-state state --step
    --save-state new --save-model new
    --step --no-backward
    --step --optimizer none
    --save-state new --save-every 2
    --step --save-state new --save-every 1 --resume --trace
    --optimizer none --save-state new
    --load-state state --random-weights
    --processes 2
    --address auto
    --launcher slurm
    --input-file sample
    --input-file nothing.pkl
    --inputs note.txt
    --inputs nowhere
    --inputs empty
    --inputs damaged
    --inputs bare
    --inputs broken-config
    --input-file note.txt
    --pick-inputs 77
    --skip-inputs 500
    --model nowhere
    --model note.txt
    --model torn.json
    --model list.json
    --model nameless.json
    --model unknown.json
    --model remote.json
    --model bert.json
    --model t5.json
    --model adapter
    --num-layers 40
    --model llama --num-layers 3
    --adapter adapter
    --adapter list-adapter
    --adapter other-adapter
    --adapter empty
    --model other-weights
    --model shorter-weights
    --model torn-weights
    --model own.py:absent
    --model absent.py:build
    --model own.py:nothing
    --model own.py:needs
    --model own.py:breaks
    --model own.py:loads
    --model own.py:plain
    --model own.py:asks --loss sft
    --model own.py:layered --blocks nowhere
    --model own.py:layered --num-layers 7
    --model own.py:layered --weights weights.pt
    --model own.py:layered --weights list.pt
    --model own.py:layered --weights other.safetensors
    --model own.py:layered --weights shorter.safetensors
    --model own.py:layered --weights note.txt
    --loss absent.py:loss
    --loss own.py:absent
    --loss policy
    --loss dpo
    --deepspeed-config nowhere.json
    --deepspeed-config torn.json
    --deepspeed-config list.json
    --deepspeed-config ds.json
    --deepspeed-config stage.json
    --deepcompile
    --dtype fp16
    --attention flash
    --attention cudnn
    --attention flex
    --optimizer none --zero-stage 2
    --load-state nowhere
    --load-state state
    --load-state old-state
    --load-state other-state
    --save-model sample
    --save-model note.txt
    --tp 3 --inputs policy
    --backend fsdp2 --tp 3 --inputs policy
    --backend fsdp2 --tp 2 --model gpt2.json --tp-plan model
    --ring 2 --model gpt2-dropout.json
    --ring 2 --backend fsdp2 --model mamba.json
    --packing --model mamba.json
    --attention varlen --model gpt2.json
    --ring 2 --ring-head-stride 3 --inputs policy
"""

# a command of `replay` stands before each
COMMANDS = """
    inspect
    inspect nowhere
    inspect note.txt
    inspect empty
    inspect damaged
    inspect --max-inputs 5 sample
    compare logs/base
    compare logs/base nowhere
    compare logs/base torn-log
    compare logs/base old-log
    compare logs/base logs/base --plot out.xyz
    report nowhere
    report empty
    report logs/base --to nowhere/page.html
    parity --at-once=none
    parity --matrix nowhere.toml
    parity --matrix torn.json
    parity --matrix colours.toml
    parity --matrix values.toml
    parity --continue nowhere
    parity --continue torn-parity
    parity --continue torn-parity --max-inputs 2
    parity --python nowhere/python
    parity --backend ddp --tp 2
    parity --inputs empty
    parity --inputs policy --model bert.json
    scan --group 0
    scan --continue nowhere
    scan --continue torn-scan
    scan --inputs nowhere
    worst --measured 0
    worst --predict colour=3
    worst --predict num-layers=many
    worst --inputs empty
    recompiles --policies off,none
    recompiles --buckets 3,x
    recompiles --compile
    recompiles --inputs empty
    hang
    hang nowhere
    hang empty
    hang note.txt
    minimise --parity torn-parity
    minimise --parity torn-parity --cell a
    minimise --parity torn-parity --cell a --tp 2
    minimise --continue nowhere
    minimise --continue torn-minimise
    minimise --redact --continue torn-minimise
    minimise --tries 0
    suite --model x --steps 1
    suite --dataset nowhere
    suite --dataset note.txt --model llama
    suite --dataset texts.jsonl --model llama
    suite --only colour
    suite --skip colour
    suite --save-every 3
    suite --storage there
    suite --continue nowhere
    suite --continue torn-suite
    suite --continue nothing --storage empty
    suite --continue torn-suite --steps 9
    suite --plot out.xyz --dataset sample
    diagnose --inputs
    diagnose --inputs nowhere
    diagnose --inputs damaged
    diagnose --steps 0
    diagnose --model t5.json
    mismatch --dtype fp64
    mismatch --attention flash
    mismatch --inputs nowhere
    mismatch --inputs policy --model llama --max-inputs 1
    mismatch --inputs policy --model llama --tp-plan model
    doctor --time-limit 1
    doctor --colour
"""

CAPTURE = """
    colour
    check
    check nowhere
    check damaged
    salvage nowhere
    run
    run --ring 3
    run --steps 3
    run absent.py
    run --forwards 9:3 absent.py
    run --ranks x absent.py
    run --passes some absent.py
    run --keep middle absent.py
    run --arguments idx absent.py
    run --arguments idx=input_ids,idx=labels absent.py
    run --segment many absent.py
    run --slow-step fast absent.py
    convert nowhere new
    convert note.txt new
    convert sample new --rows 0
    convert sample new --segment much
    convert dump.pt new
    convert sample damaged
    convert note.txt new --from colour
    redact nowhere new
    redact sample damaged
    redact damaged new
    pack nowhere new.zip
    pack damaged new.zip
    pack sample note.txt
    pack sample small.zip --max-bytes 10
    collect /tmp/none
    collect captures --to home
    collect /tmp/none --to /tmp/none/home
    collect /tmp/none --to home --address nowhere
    collect /tmp/none --to home --address 127.0.0.1:1
"""


def command_lines() -> list[str]:
    replays = [f"replay {line.strip()}" for line in (REPLAY + COMMANDS).splitlines() if line.strip()]
    return [*replays, *(f"python -m capture {line.strip()}" for line in CAPTURE.splitlines() if line.strip())]


OWN = """
import torch
from torch import nn


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 64)

    def forward(self, input_ids):
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Asking(Layered):
    def forward(self, input_ids, temperature):
        return super().forward(input_ids) / temperature


def layered():
    return Layered()


def asks():
    return Asking()


def plain():
    return nn.Linear(2, 2)


def nothing():
    return None


def needs(width, depth):
    return Layered()


def breaks():
    raise RuntimeError("no such thing")


def loads():
    model = Layered()
    model.load_state_dict({})
    return model
"""
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50000, "n_positions": 1024}
DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
CONFIGS: Mapping[str, Any] = {
    "list": [],
    "nameless": {"vocab_size": 64},
    "unknown": {"model_type": "nonesuch"},
    "remote": {"model_type": "nonesuch", "auto_map": {"AutoModelForCausalLM": "modeling.Nonesuch"}},
    "bert": {"model_type": "bert", "intermediate_size": 64, **SIZES},
    "t5": {"model_type": "t5", "d_model": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64},
    "gpt2": {**GPT2, **dict.fromkeys(DROPOUT, 0.0)},
    "gpt2-dropout": {**GPT2, **dict.fromkeys(DROPOUT, 0.1)},
    "mamba": {"model_type": "mamba", "state_size": 8, **SIZES, "vocab_size": 50000},
    "ds": {"optimizer": {"type": "Adam"}},
    "stage": {"zero_optimization": {"stage": 3}},
}


def make_folder(base: Tree, sources: Path) -> Path:
    """Make the folder, with two logs that BASE writes, beside the jobs that were recorded. Returns it."""
    folder = sources / "refusals"
    shutil.copytree(sources / SAMPLE / "inputs", folder / "sample")
    shutil.copytree(sources / "policy" / "inputs", folder / "policy")
    shutil.copytree(sources / "policy" / "model", folder / "llama")
    for name in ("", "-other"):
        options = "--model llama --inputs policy --loss sft --noise-floor --log-folder logs --quiet"
        ended = base.run(f"replay {options} --max-inputs {2 if name else 1} --name log{name}", folder)
        assert ended.exit_code == 0, ended.errors
        [log] = (folder / "logs").glob(f"*-log{name}")
        log.rename(folder / "logs" / (name[1:] or "base"))
    _write_wrong_inputs(folder)
    _write_wrong_weights(folder)
    for name, config in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    _write_wrong_logs(folder)
    return folder


def _write_wrong_inputs(folder: Path) -> None:
    first = sorted((folder / "sample").glob("*_rank0_*.pkl"))[-1]  # of a training pass
    for name in ("empty", "bare", "damaged", "broken-config"):
        (folder / name).mkdir()
    for name in ("bare", "damaged", "broken-config"):
        (folder / name / first.name).write_bytes(first.read_bytes()[: -20 if name == "damaged" else None])
    shutil.copy(folder / "sample" / "actor.json", folder / "damaged")
    (folder / "broken-config" / "actor.json").write_text("{")
    (folder / "torn.json").write_text("{")
    (folder / "note.txt").write_text("a note\n")
    (folder / "own.py").write_text(OWN)
    (folder / "texts.jsonl").write_text('{"words": "none is called text"}\n')
    (folder / "colours.toml").write_text('[[cells]]\ncolour = ["red"]\n')
    (folder / "values.toml").write_text("[[cells]]\ntp = [[2]]\n")
    torch.save({"names": ["a"]}, folder / "dump.pt")


def _write_wrong_weights(folder: Path) -> None:
    torch.save({}, folder / "weights.pt")
    torch.save([1, 2], folder / "list.pt")
    save_file({"another": torch.zeros(2)}, folder / "other.safetensors")
    save_file({"embedding.weight": torch.zeros(2)}, folder / "shorter.safetensors")
    for name, tensors in (
        ("other-weights", {"another": torch.zeros(2)}),
        ("shorter-weights", {"model.embed_tokens.weight": torch.zeros(2)}),
        ("torn-weights", {"another": torch.zeros(2)}),
    ):
        (folder / name).mkdir()
        shutil.copy(folder / "llama" / "config.json", folder / name)
        save_file(tensors, folder / name / "model.safetensors")
    (folder / "torn-weights" / "model.safetensors").write_bytes(b"torn")
    for name, config in (
        ("adapter", {"peft_type": "LORA", "r": 2, "base_model_name_or_path": "base"}),
        ("list-adapter", []),
        ("other-adapter", {"peft_type": "IA3"}),
    ):
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text(json.dumps(config))


def _write_wrong_logs(folder: Path) -> None:
    for name in ("torn-log", "old-log"):
        shutil.copytree(folder / "logs" / "base", folder / name)
    (folder / "torn-log" / "run.json").write_text("{")
    run = json.loads((folder / "logs" / "base" / "run.json").read_text())
    (folder / "old-log" / "run.json").write_text(json.dumps({**run, "format": 0}))
    for command in ("parity", "scan", "minimise", "suite"):
        (folder / f"torn-{command}").mkdir()
        (folder / f"torn-{command}" / f"{command}.json").write_text("{")
    for name, state in (("state", "{"), ("old-state", '{"format": 0}'), ("other-state", '{"format": 1}')):
        (folder / name).mkdir()
        (folder / name / "state.json").write_text(state)
