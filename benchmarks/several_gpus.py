"""Ask every question that needs several GPUs, one after the other, within a limit; the next call goes on.

    python -m benchmarks several_gpus --out OUT --inputs inputs/my-run --total 560
    python -m benchmarks several_gpus --out OUT --inputs inputs/my-run --only 'torchtitan|longest'
    python -m benchmarks several_gpus --out OUT --tiny --total 3600          # the same commands, small, on a CPU
    python -m benchmarks several_gpus --out OUT --list

benchmarks/questions.py says what is kept in OUT, and what the next call asks again. Exit code 0: all that were asked
for have ended with 0; 1: not.

torchtitan 0.2.2 has to be importable for the first three, as benchmarks/beside_torchtitan.py says.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.questions import Question, ask, make_campaign_parser, write_tiny_config

TWO = "torchrun --nproc-per-node 2"
BENCHMARKS = f"{TWO} -m benchmarks"
PYTEST = "python -m pytest -v -o addopts= -p no:cacheprovider"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Model and sizes of the questions."""

    qwen: str
    model: str = "--model llama-3.1-8b"
    titan: str = "--rounds 3 --tokens 8192"
    ring: str = "--rounds 30 --tokens 32768"
    row: str = "--tokens 8192"
    longest: str = "--tokens 262144"
    overhead: str = "--steps 96 --block 24 --tokens 2048"
    deaths: str = ""
    layers: str = "--num-layers {}"
    at_once: int = 5  # cells of parity on each GPU

    def of_layers(self, number: int) -> str:
        return f"{self.model} {self.layers}".format(number)


def main() -> int:
    given = make_campaign_parser(__doc__).parse_args()
    work = Path("/tmp/several-gpus")
    work.mkdir(exist_ok=True)
    scale = _tiny(work) if given.tiny else Scale(qwen=_qwen3(work, 128256, 4096, 12288, num_heads=32))
    return ask(list_questions(scale, given.inputs.resolve(), work, given.out), given, "several_gpus")


def list_questions(scale: Scale, inputs: Path, work: Path, out: Path | None) -> Iterator[Question]:
    """Yield the questions; those whose answers are awaited most come first."""
    fed = f"--inputs {inputs}"
    logs, kept = f"--log-folder {work}/logs", "OUT" if out is None else out.resolve()
    titan = f"{BENCHMARKS} beside_torchtitan --form compiled --kernels fused {scale.titan}"
    for options in ("", "--tp 2", "--tp 2 --sequence-parallel"):
        yield Question(name=f"torchtitan: {options or 'data ranks'}", seconds=200, line=f"{titan} {options}")
    ring = f"{BENCHMARKS} ring_attention {scale.ring}"
    yield Question(name="ring: beside one GPU", seconds=150, line=ring)
    for backend in ("fsdp2", "deepspeed"):
        long_row = f"python -m benchmarks long_input {work}/longest {scale.longest} --count 1"
        options = "--ring 2 --gradient-checkpointing --optimizer none --warmup 0 --max-inputs 1 --timeout 200"
        replay = f"{TWO} replay --backend {backend} {options} --inputs {work}/longest {scale.model} {logs}"
        yield Question(name=f"ring: the longest row, {backend}", seconds=240, line=f"{long_row} && {replay}")

    table = f"python -m benchmarks configurations --warmup 2 --limit 150 {scale.model}"
    of_two = f"{table} --num-gpus 2 {fed} --max-inputs"
    only = "--only '(one GPU|two data ranks), compiled$'"
    yield Question(name="data ranks: shuffled, compiled", seconds=330, line=f"{of_two} 40 {only} --out {kept}/dealt")
    for kind, backend in (("fsdp2", "--backend fsdp2"), ("zero3", "--zero-stage 3")):
        yield from _captured(scale, kind, backend, work)
    for name, options in (("fsdp2, compiled", "--backend fsdp2 --compile"), ("ZeRO 3", "--zero-stage 3")):
        line = f"{TWO} replay {options} --profile --shuffle-inputs --max-inputs 6 {fed} {scale.model} {logs}"
        yield Question(name=f"profile: {name}", seconds=100, line=line)

    deaths = f"{PYTEST} -s --tb=line tests/replay/watch/test_deaths_and_hangs.py {scale.deaths}"
    yield Question(name="deaths and hangs", seconds=240, line=deaths)
    yield Question(name="tests: multi_gpu", seconds=400, line=f"{PYTEST} --tb=short --durations=0 -m multi_gpu")
    suite = f"replay suite --dataset {inputs} {scale.of_layers(20)} --learning-rate 1e-5 --log-folder {work}/suite"
    yield Question(name="suite", seconds=330, line=suite)
    diagnose = f"{TWO} replay diagnose --backend fsdp2 {fed} {scale.of_layers(4)} {logs}"
    yield Question(name="diagnose", seconds=150, line=diagnose)
    parity = f"replay parity {fed} {scale.of_layers(2)} --max-inputs 4 --log-folder {work}/parity"
    yield Question(name="parity: quick", seconds=300, line=f"{parity} --matrix quick")
    graphs = f"{TWO} replay --backend fsdp2 --tp 2 --compile --max-inputs 4 {fed} {scale.qwen} {logs}"
    yield Question(name="graphs: qwen3, tp 2", seconds=100, line=graphs)
    for options in (
        "--shuffle-inputs --max-inputs 10",
        "--tp 2 --zero-stage 1 --max-inputs 5",
        "--ring 2 --max-inputs 5",
    ):
        line = f"deepspeed --num_gpus=2 replay {options} {logs}"
        yield Question(name=f"sample: deepspeed {options}", seconds=90, line=line)
    yield Question(name="sample: fsdp2 --tp 2", seconds=90, line=f"torchrun replay --backend fsdp2 --tp 2 {logs}")

    for name, pattern in (("eager", "^(?!.*compiled)"), ("compiled", "^(?!.*sdpa).*compiled")):
        line = f"{of_two} 10 --only '{pattern}' --out {kept}/two-{name}"
        yield Question(name=f"configurations: two GPUs, {name}", seconds=540, line=line)
    long_rows = f"python -m benchmarks long_input {work}/long {scale.row} --count 8"
    line = f"{table} --num-gpus 2 --only '(one GPU|tp 2|ring 2)$' --inputs {work}/long --out {kept}/two-long"
    yield Question(name="configurations: two GPUs, long rows", seconds=300, line=f"{long_rows} && {line}")
    line = f"{table} --num-gpus 4 {fed} --max-inputs 10 --only '^(?!.*sdpa)' --out {kept}/four"
    yield Question(name="configurations: four GPUs", seconds=540, line=line)
    full = f"{parity} --matrix full --at-once {scale.at_once} --run-limit 150 --time-limit 480"
    yield Question(name="parity: full", seconds=560, line=full)


def _captured(scale: Scale, kind: str, backend: str, work: Path) -> Iterator[Question]:
    """Yield what recording a job of two ranks costs, and the verdicts on its recording."""
    folder = f"{work}/captured-{kind}"
    job = f"{BENCHMARKS} capture_overhead --read-loss step {scale.overhead} {scale.model} --sharded {kind}"
    yield Question(name=f"capture: its cost, {kind}", seconds=200, line=f"rm -rf {folder}; {job} --keep {folder}")
    judged = f"replay {backend} --inputs {folder} --random-weights --loss sft --verdict strict --warmup 0 {scale.model}"
    for where, launcher in (("two GPUs", f"{TWO} "), ("one GPU", "")):
        # another machine has no recording of the call before
        recorded = f"test -d {folder} || {job} --steps 0 --keep {folder}"
        line = f"({recorded}) && {launcher}{judged} --log-folder {work}/logs"
        yield Question(name=f"capture: {kind}'s verdict on {where}", seconds=120, line=line)


def _qwen3(work: Path, vocabulary: int, width: int, mlp: int, *, num_heads: int) -> str:
    """Return the option of a Qwen 3 of 8 layers, whose head norms are a rank's own under tensor parallelism."""
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": 8,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 8,
        "head_dim": width // num_heads,
        "tie_word_embeddings": False,
    }
    path = work / "qwen3.json"
    path.write_text(json.dumps(config))
    return f"--model {path}"


def _tiny(work: Path) -> Scale:
    config = write_tiny_config(work)
    return Scale(
        model=f"--model {config}",
        qwen=_qwen3(work, 264, 64, 96, num_heads=8),
        titan=f"--tiny --rounds 1 --passes 1 --warmup 1 --tokens 128 --model {config}",
        ring="--rounds 1 --tokens 256",
        row="--tokens 256 --vocabulary 264",
        longest="--tokens 1024 --vocabulary 264",
        overhead="--steps 24 --tokens 64",
        deaths="-k 'killed or blocked'",
        layers="--num-layers 2",
        at_once=1,
    )
