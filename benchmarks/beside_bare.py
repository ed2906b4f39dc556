"""Compare a pass of the replay with one of a bare loop of the same options, in blocks of passes that alternate.

    python -m benchmarks beside_bare --model qwen3-30b-a3b --num-layers 8 --form compiled --rounds 4
    python -m benchmarks beside_bare --model tiny-moe --tokens 128 --rounds 2                   # on a CPU

The bare loop is benchmarks/bare.py, which knows nothing of this project: FSDP2 or DeepSpeed's ZeRO over fp32 master
weights, bf16 compute, whole logits, one document; compiled, it compiles the blocks and the loss. The replay has the
same attention kernel and head, and the options behind this script's own. A third series, the bare loop again, is the
control. Prints time and peak of
each, and from one profiled pass of each where the time goes.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch

from actor_init.declarations.attention import KERNELS
from actor_init.world import World
from benchmarks import bare
from benchmarks.harness import Answers, Column, Contestant, Sample, alternate, make_parser, table
from benchmarks.long_input import write_inputs
from benchmarks.sides import Side, describe_parts, hold, open_replay, run_block, time_pass
from replay.command_line.cli import parse_command_line

COLUMNS = (
    Column("ms", "s", ".1f", 1e3),
    Column("time / bare", "s", ".4f", of="bare"),
    Column("peak GiB", "peak", ".2f", 2**-30, reduce=max),
    Column("peak / bare", "peak", ".4f", of="bare"),
)


def main() -> int:
    parser = make_parser(__doc__, rounds=4)
    parser.add_argument("--form", choices=("eager", "compiled"), default="eager")
    parser.add_argument("--model", required=True, help=bare.MODEL_HELP)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--tokens", type=int, default=8192)
    words = [word for word, kernel in KERNELS.items() if kernel.job_names]
    parser.add_argument(
        "--attention", choices=words, default="sdpa", help="the bare loop has transformers' name for it"
    )
    parser.add_argument("--engine", choices=bare.ENGINES, default="fsdp2")
    parser.add_argument("--lora", action="store_true", help="both train an adapter of rank 16 on every linear layer")
    parser.add_argument("--passes", type=int, default=4, help="measured passes a block")
    parser.add_argument("--warmup", type=int, default=2, help="passes before them")
    given, replay_arguments = parser.parse_known_args()
    config = bare.read_config(given.model, given.num_layers)
    kernel = KERNELS[given.attention].job_names[0]
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs"
        write_inputs(inputs, num_tokens=given.tokens, vocabulary=config.vocab_size, count=1)
        adapter = Path(folder) / "adapter" if given.lora else None
        options = ["--inputs", str(inputs), "--log-folder", folder]
        zero_stage = ["--backend", "deepspeed", "--zero-stage", given.engine.removeprefix("zero")]
        options += ["--backend", "fsdp2"] if given.engine == "fsdp2" else zero_stage
        options += ["--model", str(bare.find_config(given.model)), "--attention", given.attention]
        options += ["--num-layers", str(given.num_layers)] if given.num_layers else []
        options += ["--adapter", str(adapter)] if adapter is not None else []
        options += ["--compile"] if given.form == "compiled" else []
        spec = parse_command_line([*options, *replay_arguments]).args[0].spec
        with World.from_env(spec.actor.parallel) as world:

            def build_bare() -> Side:
                is_compiled = given.form == "compiled"
                run_bare, clear = bare.build(config, kernel, is_compiled, world.device, given.engine, adapter)
                ids = torch.randint(config.vocab_size, (1, given.tokens), device=world.device)

                def run() -> tuple[float, int]:
                    measured = time_pass(lambda: run_bare(ids), world.device)
                    clear()
                    return measured

                return Side(name="bare", run=run)

            sides = [hold(build_bare, world.device), hold(lambda: open_replay(spec, world), world.device)]

            def measure(side: Side, number: int) -> list[Sample]:
                num_passes, num_warmup = given.passes, given.warmup
                return [run_block(side, world.device, num_warmup=num_warmup, num_passes=num_passes, number=number)]

            series: dict[str, Contestant] = {side.name: partial(measure, side) for side in sides}
            series["bare again"] = series["bare"]
            what = f"{given.model} {given.form} {given.engine}{' lora' * given.lora}"
            answers = Answers(given, f"beside_bare {what}", more=replay_arguments)
            figures = alternate(series, answers, rounds=given.rounds, warmup=0)  # a block has its own
            print(f"{answers.machine}\n\n{table(what, figures, COLUMNS)}\n", flush=True)
            for side in sides:
                print(describe_parts(side.name, side.run, world.device), flush=True)
    return 0
