"""Ask every question about the cost of a pass that needs one GPU, one after the other; the next call goes on.

    python -m benchmarks one_gpu --out OUT --inputs inputs/my-run --total 560
    python -m benchmarks one_gpu --out OUT --inputs inputs/my-run --only 'bare: (gemma|qwen)'
    python -m benchmarks one_gpu --out OUT --tiny --total 3600               # the same commands, small, on a CPU
    python -m benchmarks one_gpu --out OUT --list

benchmarks/questions.py says what is kept in OUT, and what the next call asks again. Exit code 0: all that were asked
for have ended with 0; 1: not. The whole sizes need a GPU of 139 GiB; --small halves the layers for one of 78 GiB.

torchtitan 0.2.2 has to be importable for its questions, as benchmarks/beside_torchtitan.py says, and peft for LoRA's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.questions import Question, ask, make_campaign_parser, write_tiny_config

FORMS = ("compiled", "eager")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Models and sizes of the questions; `tiny` is the config that stands for all of them on a CPU."""

    share: float = 1.0  # of the layers
    rounds: int = 4
    tokens: int = 8192
    passes: str = ""
    steps: int = 480
    tiny: Path | None = None

    def choose_model(self, name: str, num_layers: int) -> str:
        if self.tiny is not None:
            return f"--model {self.tiny}"
        return f"--model {name} --num-layers {max(1, round(num_layers * self.share))}"

    def limit_tokens(self, num_tokens: int) -> int:
        return min(self.tokens, num_tokens)


def main() -> int:
    parser = make_campaign_parser(__doc__)
    parser.add_argument("--small", action="store_true", help="half of the layers")
    given = parser.parse_args()
    work = Path("/tmp/one-gpu")
    work.mkdir(exist_ok=True)
    scale = _make_tiny(work) if given.tiny else Scale(share=0.5 if given.small else 1.0)
    return ask(list_questions(scale, given.inputs.resolve(), work), given, "one_gpu")


def list_questions(scale: Scale, inputs: Path, work: Path) -> Iterator[Question]:
    """Yield the questions; those whose answers are awaited most come first."""
    bare = f"python -m benchmarks beside_bare --rounds {scale.rounds} {scale.passes}"
    for form in FORMS:
        for name, num_layers, num_tokens in (
            ("qwen3-30b-a3b", 8, 8192),
            ("gpt-oss-20b", 8, 2048),
            # Eager, whole logits of 34 layers and the other side's weights fill the GPU.
            ("gemma-3-4b", 34 if form == "compiled" else 24, 8192),
            ("llama-3.1-8b", 32, 8192),
        ):
            sizes = f"{scale.choose_model(name, num_layers)} --tokens {scale.limit_tokens(num_tokens)}"
            # transformers has no sdpa for attention with sinks, and flex has no backward on a CPU.
            kernel = f"--attention {'eager' if scale.tiny else 'flex'}" if name.startswith("gpt-oss") else ""
            line = f"{bare} {sizes} --form {form} {kernel}"
            # torch compiles flex attention, eager or not.
            seconds = 250 if kernel else 150
            yield Question(name=f"bare: {name}, {form}", seconds=seconds, line=line)
        llama = f"{scale.choose_model('llama-3.1-8b', 16)} --tokens {scale.tokens}"
        for options in ("--engine zero1", "--engine zero3", "--lora"):
            line = f"{bare} {llama} --form {form} {options}"
            yield Question(name=f"bare: llama-3.1-8b {options}, {form}", seconds=150, line=line)

    # Without the package of its kernels, transformers loops over chunks of 64 tokens, and a compiler unrolls the loop.
    for form, num_tokens in (("eager", 8192), ("compiled", 2048)):
        sizes = f"{scale.choose_model('qwen3-next-80b-a3b', 4)} --tokens {scale.limit_tokens(num_tokens)}"
        yield Question(name=f"bare: qwen3-next-80b-a3b, {form}", seconds=250, line=f"{bare} {sizes} --form {form}")

    titan = f"python -m benchmarks beside_torchtitan --rounds {scale.rounds} --tokens {scale.tokens} {scale.passes}"
    for form in FORMS:
        sizes = "--tiny" if scale.tiny else f"--layers {round(8 * scale.share)}"
        for options in ("--attention sdpa", "--attention sdpa --kernels fused"):
            # No fused kernel runs on a CPU.
            if not (scale.tiny and "fused" in options):
                line = f"{titan} --model qwen3-30b-a3b {sizes} --form {form} {options}"
                yield Question(name=f"torchtitan: qwen3-30b-a3b {options}, {form}", seconds=150, line=line)

    llama = scale.choose_model("llama-3.1-8b", 8)
    for backend in ("fsdp2", "deepspeed"):
        common = f"{llama} --backend {backend} --zero-stage 2 --head whole"
        # Neither kernel runs on a CPU.
        kernels = "" if scale.tiny else "--attention flash --kernels fused"
        packed = f"--packing --compile {kernels}"
        line = f"python -m benchmarks side_by_side --inputs {inputs} --rounds {scale.rounds} --common '{common}'"
        line += f" '--no-packing --attention sdpa' '{packed}'"
        yield Question(name=f"packed, compiled beside padded, eager: {backend}", seconds=150, line=line)

    bare_packing = f"python -m benchmarks bare_packing --inputs {inputs} --rounds {scale.rounds} {llama}"
    yield Question(name="packed, compiled beside padded, eager: a bare loop", seconds=150, line=bare_packing)

    overhead = f"python -m benchmarks capture_overhead --read-loss step --steps {scale.steps}"
    overhead += f" {llama} --tokens {scale.limit_tokens(2048)}"
    yield Question(name="capture: its cost", seconds=260, line=overhead)
    verdicts = f"python -m benchmarks trainer_verdicts --steps 8 --only clean --inputs {inputs} {llama}"
    yield Question(name="verdict: a clean Trainer job", seconds=150, line=verdicts)
    sizes = "" if scale.tiny else "--hidden 1024 --layers 8 --tokens 1024"
    cost = f"python -m benchmarks verdict_cost --rounds {scale.rounds} {sizes} --out {work}/verdict-cost"
    yield Question(name="verdict: its cost", seconds=400, line=f"rm -rf {work}/verdict-cost; {cost}")


def _make_tiny(work: Path) -> Scale:
    return Scale(rounds=1, tokens=128, passes="--passes 1 --warmup 1", steps=24, tiny=write_tiny_config(work))
