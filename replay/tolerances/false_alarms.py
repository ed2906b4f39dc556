"""Compute how far beyond the largest measured difference a new one may be, at given odds of a false alarm."""

import math
from functools import cache

FALSE_ALARM = 1e-7


@cache
def factor_for(num_samples: int) -> float:
    """Return k such that one more normal sample exceeds k times the largest of `num_samples` at odds FALSE_ALARM."""
    low, high = 1.0, 1e7
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        if chance_beyond(middle, num_samples) > FALSE_ALARM:
            low = middle
        else:
            high = middle
    return high


def chance_beyond(factor: float, num_samples: int) -> float:
    """Integrate, over the largest sample's size m, its density times the chance of exceeding `factor` m."""
    step = 0.005
    sizes = [(number + 0.5) * step for number in range(int(8 / step))]
    density = (
        num_samples * math.erf(m / math.sqrt(2)) ** (num_samples - 1) * math.sqrt(2 / math.pi) * math.exp(-m * m / 2)
        for m in sizes
    )
    chances = (math.erfc(factor * m / math.sqrt(2)) for m in sizes)
    return step * sum(a * b for a, b in zip(density, chances, strict=True))
