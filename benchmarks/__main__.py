"""List the benchmarks, or run one with its own arguments.

python -m benchmarks
python -m benchmarks head --tokens 512 --vocabulary 4096 --hidden 256 --out /tmp/head
torchrun --nproc-per-node 2 -m benchmarks ring_attention --tokens 32768
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple


class Benchmark(NamedTuple):
    """What a module of this folder, or the `__main__` of a package here, answers."""

    question: str
    needs: str
    takes: str  # with its defaults; as far as it was timed, or as its figures or limits say


BENCHMARKS = {
    "replay_vs_bare": Benchmark("What does a replayed pass cost beside a bare loop's?", "one GPU, or CPU", "1 min"),
    "beside_bare": Benchmark("What does it cost beside transformers and FSDP2 alone?", "one GPU, or CPU", "not timed"),
    "beside_torchtitan": Benchmark(
        "How fast is it beside torchtitan, with which peak?", "1 or 2 GPUs", "3 min at most"
    ),
    "side_by_side": Benchmark("How fast are passes under several options?", "one GPU, or CPU", "not timed"),
    "bare_packing": Benchmark("How much faster are packed rows in a bare loop?", "one GPU, or CPU", "not timed"),
    "configurations": Benchmark(
        "How fast is each backend, kernel and layout, with which loss?", "1 to 4 GPUs", "9 min at most"
    ),
    "one_gpu": Benchmark(
        "What does a pass cost in each architecture, one question after the other?", "one GPU", "40 min at most"
    ),
    "several_gpus": Benchmark(
        "All that needs several GPUs, one question after the other", "2 or 4 GPUs", "2 hours at most"
    ),
    "ring_attention": Benchmark(
        "What does a ring's attention cost beside one GPU's?", "2 GPUs, or CPU", "3 min at most"
    ),
    "head": Benchmark("What do log-probs without whole logits cost and save?", "one GPU, or CPU", "30 s on an H200"),
    "loading": Benchmark("How fast are weights loaded, beside the disk?", "a disk; CPU or GPU", "not timed"),
    "start_up": Benchmark("How long is it from the key press to the table?", "CPU", "2 min"),
    "capture_overhead": Benchmark("What does recording cost a training step?", "CPU, or 1 or 2 GPUs", "not timed"),
    "capture_kill": Benchmark("What does a kill leave of a recording?", "CPU", "not timed"),
    "many_ranks": Benchmark("What do a million recorded passes and 64 ranks cost?", "CPU", "not timed"),
    "trainer_verdicts": Benchmark(
        "Which verdict has a sound Trainer job, and three broken ones?", "CPU or GPU", "3 min on an H200"
    ),
    "verdict_cost": Benchmark("What does a verdict cost a replay of 40 passes?", "one GPU, or CPU", "not timed"),
    "mixtures": Benchmark("Are mixtures of experts judged rightly, sound and broken?", "CPU", "not timed"),
    "faults": Benchmark(
        "How many injected faults are found, and how many clean runs give an alarm?", "CPU", "not timed"
    ),
    "planted_failures": Benchmark("How small does minimise make planted failures, in how many runs?", "CPU", "15 min"),
    "published_bugs": Benchmark("Which bugs that others published are found?", "CPU, a package registry", "not timed"),
    "families": Benchmark("Is each causal LM family replayed rightly, in five forms?", "CPU", "10 min"),
    "packing_families": Benchmark("Does the probe pack each family rightly?", "CPU", "not timed"),
    "ray_launcher": Benchmark("What does starting ranks on Ray cost?", "CPU, or GPUs", "4 min"),
    "ray_cells": Benchmark("What does a campaign's cell on Ray cost?", "CPU", "8 min"),
    "version_table": Benchmark(
        "Which releases of torch, transformers and DeepSpeed work?", "CPU, environments", "not timed"
    ),
    "same_numbers": Benchmark("Did a change of the code change a number?", "CPU, git", "130 s of CPU a tree"),
    "same_refusals": Benchmark("Did a change of the code change a refusal?", "CPU, git", "some minutes"),
    "long_input": Benchmark("None: it writes inputs of a stated length", "CPU", "seconds"),
}


def main() -> int:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__)
        for each, about in BENCHMARKS.items():
            print(f"{each:<18}{about.question:<75}{about.needs:<25}{about.takes}")
        return 0
    if name not in BENCHMARKS:
        print(f"no benchmark is called {name}. Try: python -m benchmarks", file=sys.stderr)
        return 2
    sys.argv = [f"benchmarks {name}", *arguments]
    spec = find_spec(f"benchmarks.{name}")
    assert spec is not None
    is_package = spec.submodule_search_locations is not None
    exit_code: int = import_module(f"benchmarks.{name}.__main__" if is_package else f"benchmarks.{name}").main()
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
