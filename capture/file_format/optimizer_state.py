"""Describe what an optimizer held of a few parameters before a step: its moments, and how often it had stepped."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Significant digits that tell every number of fp32 from the next.
_NUM_DIGITS = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSample:
    """The elements of a parameter's state that stand where those of its weight's sample do.

    name    name of the parameter, as `strip_wrappers` gives it
    shape   shape of the whole parameter, also where it is sharded
    values  by the name of the state, as `exp_avg`, the elements from `start` on in the flattened parameter
    """

    name: str
    shape: tuple[int, ...]
    start: int
    values: Mapping[str, tuple[float, ...]]

    def to_plain(self) -> list[Any]:
        values = {
            key: [float(f"{value:.{_NUM_DIGITS}g}") for value in elements] for key, elements in self.values.items()
        }
        return [self.name, self.shape, self.start, values]

    @classmethod
    def from_plain(cls, plain: Any) -> "StateSample":
        """Read what `to_plain` wrote. Raises TypeError or ValueError for anything else."""
        name, shape, start, values = plain
        numbers = [*shape, start]
        lengths = [len(elements) for elements in values.values()]
        elements_are_right = all(type(value) is float for elements in values.values() for value in elements)
        if type(name) is not str or not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError
        if not elements_are_right or not all(type(key) is str for key in values):
            raise TypeError
        if any(start + length > math.prod(shape) for length in lengths):
            raise ValueError
        return cls(
            name=name,
            shape=tuple(shape),
            start=start,
            values={key: tuple(elements) for key, elements in values.items()},
        )


def merge_state_samples(first: Iterable[StateSample], second: Iterable[StateSample]) -> tuple[StateSample, ...]:
    """Merge the samples of two parts of a step; of a parameter that both have, the first part's count."""
    by_place = {(sample.name, sample.start): sample for sample in (*second, *first)}
    return tuple(by_place.values())
