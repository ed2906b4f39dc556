"""Name the policies of compiling a mix of lengths, say which options each is and what it took, and choose one."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from actor_init.spec import PAD_TOKENS, ActorSpec, Compile, CompileLengths, UsageError
from capture.facts import Setting
from replay.options.option_parsing import format_command_line
from replay.options.spec import ReplaySpec

NUM_BUCKETS = 4
MULTIPLE = 128  # tokens


class Policy(StrEnum):
    OFF = "off"
    AUTOMATIC = "automatic"
    DYNAMIC = "dynamic"
    STATIC = "static"
    BUCKETS = "buckets"
    MULTIPLE = "multiple"


NAMES = tuple(policy.value for policy in Policy)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecompilesPlan:
    """Which policies replay which inputs.

    spec        of a replay without compiling
    sizes       of buckets: how many, or which
    num_passes  over which compiling has to pay
    """

    spec: ReplaySpec
    policies: list[Policy]
    sizes: int | list[int]
    multiple: int
    num_passes: int


def parse_buckets(text: str) -> int | list[int]:
    """Read --buckets: one number is how many, several are lengths. Raises UsageError for anything else."""
    if not PAD_TOKENS.fullmatch(text):
        raise UsageError(
            Setting("buckets"),
            f"{text!r} is not allowed",
            "Give how many, or several lengths. "
            f"Try: {Setting('buckets', '4')}, or {Setting('buckets', '512,1024,2048')}",
        )
    numbers = [int(number) for number in text.split(",")]
    return numbers[0] if len(numbers) == 1 else sorted(set(numbers))


def apply_policy(policy: Policy, actor: ActorSpec, *, multiple: int, sizes: Sequence[int]) -> ActorSpec:
    """Return `actor` with the options of a policy."""
    compiled = replace(actor, compile=Compile.BLOCKS)
    match policy:
        case Policy.OFF:
            return actor
        case Policy.DYNAMIC:
            return compiled
        case Policy.AUTOMATIC:
            return replace(compiled, compile_lengths=CompileLengths.AUTOMATIC)
        case Policy.STATIC:
            return replace(compiled, compile_lengths=CompileLengths.STATIC)
        case Policy.BUCKETS:
            # One number alone would be read as a multiple, so a single length is given twice.
            padded = ",".join(map(str, sizes if len(sizes) > 1 else [*sizes, *sizes]))
            return replace(compiled, compile_lengths=CompileLengths.STATIC, pad_tokens=padded)
        case Policy.MULTIPLE:
            return replace(compiled, compile_lengths=CompileLengths.STATIC, pad_tokens=str(multiple))


def find_policy_options(actor: ActorSpec) -> list[str]:
    """Return the options that make a policy."""
    policy_actor = ActorSpec(compile=actor.compile, compile_lengths=actor.compile_lengths, pad_tokens=actor.pad_tokens)
    return format_command_line(ReplaySpec(actor=policy_actor))


def choose_lengths(lengths: Iterable[int], number: int) -> list[int]:
    """Return at most `number` lengths, such that padding each of `lengths` to the next of them adds the fewest tokens.

    Dynamic programming: the best choice of n lengths that ends with a value extends the best choice of n - 1 lengths
    that ends with a smaller value.
    """
    counts = sorted(Counter(lengths).items())
    values = [value for value, _ in counts]
    # For each value, the number of lengths below it.
    before = [0]
    for _, count in counts:
        before.append(before[-1] + count)
    # For each value as the last length, the tokens after padding.
    best = [values[end] * before[end + 1] for end in range(len(values))]
    choices = [[values[end]] for end in range(len(values))]
    for _ in range(number - 1):
        next_best, next_choices = list(best), list(choices)
        for end in range(len(values)):
            for middle in range(end):
                cost = best[middle] + values[end] * (before[end + 1] - before[middle + 1])
                if cost < next_best[end]:
                    next_best[end], next_choices[end] = cost, [*choices[middle], values[end]]
        best, choices = next_best, next_choices
    return choices[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyResult:
    """What a policy took to replay the inputs once, compiling, and once more."""

    policy: Policy
    # The words that select the policy in a replay.
    options: str = ""
    # Passes of both rounds that were replayed.
    num_passes: int = 0
    num_graphs: int = 0
    # How often each guard failed; numbers in a guard stand as N.
    recompilations: Mapping[str, int] = field(default_factory=dict)
    compile_seconds: float = 0.0
    # Seconds that the first round took more than the second.
    extra_seconds: float = 0.0
    # Mean over the second round; None if that was not finished.
    pass_seconds: float | None = None
    # Tokens that the first round was fed.
    fed_tokens: int = 0
    error: str = ""
    log: str = ""
    # As `estimate_seconds` gives them for --num-passes.
    net_seconds: float | None = None

    def estimate_seconds(self, num_passes: int) -> float | None:
        """Return the seconds of so many passes with this mix of lengths; None if it is not known."""
        return None if self.pass_seconds is None else self.extra_seconds + num_passes * self.pass_seconds


def find_best(results: Sequence[PolicyResult], num_passes: int) -> PolicyResult | None:
    """Return the policy with the fewest net seconds; None if none is known."""
    net_seconds = [
        (net, number)
        for number, result in enumerate(results)
        if (net := result.estimate_seconds(num_passes)) is not None
    ]
    return results[min(net_seconds)[1]] if net_seconds else None


def find_break_even(result: PolicyResult, other: PolicyResult) -> int | None:
    """Return from how many passes on `result` takes less time than `other`; None: never."""
    if result.pass_seconds is None or other.pass_seconds is None or result.pass_seconds >= other.pass_seconds:
        return None
    return max(1, round((result.extra_seconds - other.extra_seconds) / (other.pass_seconds - result.pass_seconds)))
