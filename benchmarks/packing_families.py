"""Try the packing probe on every causal LM family of the installed transformers: a line each, and the totals.

    python -m benchmarks packing_families
    torchrun --nproc-per-node 2 -m benchmarks packing_families --ring

Right is what gives the loss and gradients of each document alone, in the plain model with eager attention:

    family            packed without probe  the probe says                        then    seconds
    gpt_oss           0.89 WRONG            packed, documents kept apart by a mask  4e-07    0.21

The exit code is 1 if a run is wrong, or a family that is right when packed is not packed.
"""

import time
import warnings
from functools import partial
from typing import NamedTuple

import torch
import transformers

from actor_init.attention.kernel_choice import choose_kernel_name
from actor_init.model_form import Layout
from actor_init.probe.layout_choice import choose_layout
from actor_init.spec import ActorSpec, Dtype, ParallelSpec, UsageError
from actor_init.world import World
from benchmarks.harness import Answers, make_parser
from replay.options.option_parsing import format_error_with_flags
from tests.helpers.each_alone import BOUND, EachAlone
from tests.helpers.families import families, tiny_config

PACKED = Layout(packs=True)


class Line(NamedTuple):
    family: str
    without: str
    was_right: bool
    decided: str
    then: float | None  # how far off; None: refused
    packs: bool
    seconds: float

    @property
    def is_wrong(self) -> bool:
        return self.then is not None and not self.then <= BOUND

    @property
    def is_sent_away(self) -> bool:
        return self.was_right and not self.packs


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--ring", action="store_true", help="slice packed rows over the ranks that torchrun started")
    parser.add_argument("--only", nargs="*", help="these families")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    parallel = ParallelSpec(ring=2 if given.ring else 1)
    if torch.cuda.is_available():
        parser.error("the models are on the CPU. Try: CUDA_VISIBLE_DEVICES= python -m benchmarks packing_families")
    with World.from_env(parallel) as world:
        answers = Answers(given, "packing_families", writes=world.rank == 0)
        said = [answers.machine, f"{'family':<22}{'packed without':<18}{'seconds':>8}  {'then':<9}the probe says"]
        lines = []
        spec = ActorSpec(backend="fsdp2", dtype=Dtype.FP32, parallel=parallel)
        for family in given.only or families():
            line = Line(*answers.ask(family, partial(_line, family, spec, world)))
            lines.append(line)
            then = "refused" if line.then is None else f"{line.then:.0e}" + " WRONG" * line.is_wrong
            said.append(f"{family:<22}{line.without:<18}{line.seconds:>8.2f}  {then:<9}{line.decided}")
        wrong = [line.family for line in lines if line.is_wrong]
        away = [line.family for line in lines if line.is_sent_away]
        refused = sum(line.then is None for line in lines)
        said.append(
            f"{len(lines)} families: {sum(line.was_right for line in lines)} right when packed without the probe; "
            f"with it {sum(line.packs for line in lines)} packed, {refused} refused or not built, "
            f"{len(wrong)} wrong {' '.join(wrong)}; {len(away)} right ones not packed {' '.join(away)}"
        )
        if world.rank == 0:
            print("\n".join(said))
        return 1 if wrong or away else 0


def _line(family: str, spec: ActorSpec, world: World) -> Line:
    config = tiny_config(family)
    try:
        alone = EachAlone(config)
    except Exception as error:  # whatever a class of this release raises
        return Line(family, "not built", False, f"{type(error).__name__} from its class", None, False, 0.0)
    ring = world.ring_group if spec.parallel.ring > 1 else None
    asked = spec.with_defaults()
    try:
        off = alone.off(choose_kernel_name(asked, world.device, config), PACKED, ring)
        without, was_right = f"{off:.0e} {'right' if off <= BOUND else 'WRONG'}", off <= BOUND
    except Exception as error:  # whatever a class raises on packed rows
        without, was_right = type(error).__name__, False
    begin = time.perf_counter()
    try:
        chosen, layout = choose_layout(asked, config, world, is_typed=False)
    except UsageError as error:
        return Line(
            family, without, was_right, format_error_with_flags(error), None, False, time.perf_counter() - begin
        )
    seconds = time.perf_counter() - begin
    then = alone.off(choose_kernel_name(chosen, world.device, config), layout, ring)
    return Line(family, without, was_right, layout.describe(), then, layout.packs, seconds)
