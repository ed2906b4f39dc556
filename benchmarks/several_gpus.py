"""Ask every question that needs several GPUs, one after the other, within a limit; the next call goes on.

    python benchmarks/several_gpus.py OUT --inputs inputs/my-run --total 560
    python benchmarks/several_gpus.py OUT --inputs inputs/my-run --only 'torchtitan|longest'
    python benchmarks/several_gpus.py OUT --tiny --total 3600          # the same commands, small, on a CPU
    python benchmarks/several_gpus.py OUT --list

A question is a line of shell with a limit of its own. One that the total cuts off is asked again by the next call with
the same OUT; one that reached its own limit is not. `OUT/answers.jsonl` has a line for each that ended, with its exit
code, seconds and last lines; `OUT/output.txt` has all that they printed. Exit code 0: all that were asked for have
ended with 0; 1: not.

torchtitan 0.2.2 has to be importable for the first three, as benchmarks/beside_torchtitan.py says.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from capture import read_actor_config

ROOT = Path(__file__).resolve().parent.parent
LEAST_SECONDS = 30  # that are left, for a question to be begun
SHOWN_LINES = 40
TWO = "torchrun --nproc-per-node 2"
PYTEST = "python -m pytest -v -o addopts= -p no:cacheprovider"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    name: str
    seconds: int  # its limit
    line: str  # of shell
    num_gpus: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    name: str
    line: str
    exit_code: int
    seconds: float
    shown: list[str]  # the last lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Model and sizes of the questions."""

    qwen: str
    model: str = "--model llama-3.1-8b"
    titan: str = "--rounds 3 --tokens 8192"
    ring: str = "--rounds 30 --tokens 32768"
    row: str = "--tokens 8192"
    longest: str = "--tokens 262144"
    overhead: str = "--steps 96 --tokens 2048"
    deaths: str = ""
    layers: str = "--num-layers {}"
    at_once: int = 5  # cells of parity on each GPU

    def of_layers(self, number: int) -> str:
        return f"{self.model} {self.layers}".format(number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--inputs", type=Path, default=Path("inputs/sample"))
    parser.add_argument("--total", type=float, default=560, help="seconds for this call")
    parser.add_argument("--only", default="", help="questions whose name matches this regular expression")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short rows")
    parser.add_argument("--list", action="store_true", help="print the questions, and ask none")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    work = Path("/tmp/several-gpus")
    work.mkdir(exist_ok=True)
    scale = _tiny(work) if given.tiny else Scale(qwen=_qwen3(work, 128256, 4096, 12288, num_heads=32))
    asked = [one for one in questions(scale, given.inputs.resolve(), work) if re.search(given.only, one.name)]
    if given.list:
        print("\n".join(f"{one.name} ({one.num_gpus} GPUs, {one.seconds} s)\n    {one.line}" for one in asked))
        return 0
    ends = time.monotonic() + given.total
    for question in asked:
        left = ends - time.monotonic()
        if question.name not in _answers(given.out) and left >= LEAST_SECONDS:
            _ask(question, min(question.seconds, left), given.out)
    answers = _answers(given.out)
    for question in asked:
        answer = answers.get(question.name)
        said = "not answered" if answer is None else f"exit code {answer.exit_code} after {answer.seconds:.0f} s"
        print(f"{question.name:<50}{said}")
    return int(any(one.name not in answers or answers[one.name].exit_code for one in asked))


def questions(scale: Scale, inputs: Path, work: Path) -> Iterator[Question]:
    """Yield the questions; those whose answers are awaited most come first."""
    fed = f"--inputs {inputs}"
    logs = f"--log-folder {work}/logs"
    titan = f"{TWO} benchmarks/beside_torchtitan.py --form compiled --kernels fused {scale.titan}"
    for options in ("", "--tp 2", "--tp 2 --sequence-parallel"):
        yield Question(name=f"torchtitan: {options or 'data ranks'}", seconds=200, line=f"{titan} {options}")
    ring = f"{TWO} benchmarks/ring_attention.py {scale.ring}"
    yield Question(name="ring: beside one GPU", seconds=150, line=ring)
    for backend in ("fsdp2", "deepspeed"):
        long_row = f"python benchmarks/long_input.py {work}/longest {scale.longest} --count 1"
        options = "--ring 2 --gradient-checkpointing --optimizer none --warmup 0 --max-inputs 1 --timeout 200"
        replay = f"{TWO} replay --backend {backend} {options} --inputs {work}/longest {scale.model} {logs}"
        yield Question(name=f"ring: the longest row, {backend}", seconds=240, line=f"{long_row} && {replay}")

    table = f"python benchmarks/configurations.py --warmup 2 --limit 150 {scale.model}"
    of_two = f"{table} --num-gpus 2 {fed} --max-inputs"
    only = "--only '(one GPU|two data ranks), compiled$'"
    yield Question(name="data ranks: shuffled, compiled", seconds=330, line=f"{of_two} 40 {only} --out {work}/dealt")
    yield Question(name="data ranks: what dealing by length saves", seconds=150, line=_dealt(scale, fed, work))
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
        line = f"{of_two} 10 --only '{pattern}' --out {work}/two-{name}"
        yield Question(name=f"configurations: two GPUs, {name}", seconds=540, line=line)
    long_rows = f"python benchmarks/long_input.py {work}/long {scale.row} --count 8"
    line = f"{table} --num-gpus 2 --only '(one GPU|tp 2|ring 2)$' --inputs {work}/long --out {work}/two-long"
    yield Question(name="configurations: two GPUs, long rows", seconds=300, line=f"{long_rows} && {line}")
    line = f"{table} --num-gpus 4 {fed} --max-inputs 10 --only '^(?!.*sdpa)' --out {work}/four"
    yield Question(name="configurations: four GPUs", seconds=540, line=line, num_gpus=4)
    full = f"{parity} --matrix full --at-once {scale.at_once} --run-limit 150 --time-limit 480"
    yield Question(name="parity: full", seconds=560, line=full)


def _dealt(scale: Scale, fed: str, work: Path) -> str:
    replay = f"{TWO} replay --backend fsdp2 --compile {fed} {scale.model} --quiet"
    logs = f"{work}/shuffled {work}/by-length"
    return (
        f"rm -rf {logs}; {replay} --shuffle-inputs --log-folder {work}/shuffled && "
        f"{replay} --order worst --log-folder {work}/by-length && "
        f"for log in {work}/shuffled/* {work}/by-length/*; do python benchmarks/dealing.py $log; done"
    )


def _captured(scale: Scale, kind: str, backend: str, work: Path) -> Iterator[Question]:
    """Yield what recording a job of two ranks costs, and the verdicts on its recording."""
    folder = f"{work}/captured-{kind}"
    job = f"{TWO} benchmarks/capture_overhead.py --read-loss step {scale.overhead} {scale.model} --sharded {kind}"
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
    config = work / "config.json"
    config.write_text(json.dumps(read_actor_config(ROOT / "inputs" / "sample")))
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


def _ask(question: Question, limit: float, out: Path) -> None:
    """Run the line; write its answer, unless it was cut off before its own limit."""
    print(f"== {question.name}: {question.line}", flush=True)
    began = time.monotonic()
    where = {**os.environ, "PYTHONUNBUFFERED": "1"}
    where["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(
        ["bash", "-c", question.line],
        cwd=ROOT,
        env=where,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit)
            exit_code = process.returncode
        except subprocess.TimeoutExpired:
            said, exit_code = _ended(process), 124
    seconds = time.monotonic() - began
    lines = said.splitlines()
    with (out / "output.txt").open("a") as file:
        file.write(f"== {question.name}: {question.line}\n{said}\n")
    print("\n".join(line[:400] for line in lines[-SHOWN_LINES:]))
    print(f"exit code {exit_code} after {seconds:.0f} s", flush=True)
    if exit_code != 124 or limit == question.seconds:
        shown = [line[:400] for line in lines[-SHOWN_LINES:]]
        answer = Answer(
            name=question.name, line=question.line, exit_code=exit_code, seconds=round(seconds, 1), shown=shown
        )
        with (out / "answers.jsonl").open("a") as file:
            file.write(json.dumps(asdict(answer)) + "\n")


def _ended(process: subprocess.Popen[str]) -> str:
    """End a line with SIGTERM, which launchers pass on to their workers; return what it printed."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        said, _ = process.communicate(timeout=15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    return said


def _answers(out: Path) -> dict[str, Answer]:
    file = out / "answers.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {answer.name: answer for answer in (Answer(**json.loads(line)) for line in lines)}


if __name__ == "__main__":
    sys.exit(main())
