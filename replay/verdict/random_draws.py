"""Hold where torch's random generators stood before and after one forward, in the job or in the replay.

A forward with dropout moves a generator. Two forwards that began at one state and ended at one state drew as many
random numbers; whether these made the same masks depends on what they were drawn for (`dropout_masks.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from capture.file_format.capture_file import CapturedCall
from capture.record.generator_marks import CPU, CPU_KIND, CUDA, GeneratorMarks, mark_recorded_states


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomDraws:
    """The generators of one forward, by the type of their device.

    before, after  marks of their states
    cpu_kind       how the CPU draws; two CPUs with another kind draw other masks from one state
    num_drawn      numbers that the CPU's generator drew; None where that was not counted
    """

    before: GeneratorMarks
    after: GeneratorMarks
    cpu_kind: bytes = b""
    num_drawn: int | None = None

    @classmethod
    def from_marks(cls, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> "RandomDraws":
        names = [name for name in (CPU, CUDA) if name in before and name in after]
        return cls(
            before={name: before[name] for name in names},
            after={name: after[name] for name in names},
            cpu_kind=after.get(CPU_KIND, b""),
        )

    @classmethod
    def from_call(cls, call: CapturedCall) -> "RandomDraws | None":
        """Return the job's; None where it did not record the states after the forward too."""
        if not call.random_after or not call.random:
            return None
        return cls.from_marks(mark_recorded_states(call.random), call.random_after)

    @property
    def has_any(self) -> bool:
        """Did the forward draw a random number?"""
        return self.before != self.after
