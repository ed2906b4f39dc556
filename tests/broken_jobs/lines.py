"""Jobs from the lines of a table."""

from typing import Any

from tests.broken_jobs.declarations import FaultClass, Job


def broken_jobs(fault_class: FaultClass, *lines: tuple[Any, ...]) -> list[Job]:
    """A line a job: name, kind, its cause, what is broken, how it trains, the fault, and what else there is to say.

    The cause is one name, or a tuple of names where each is a right one, the best first.
    """
    found = []
    for name, kind, cause, says, setup, fault, *more in lines:
        extra: dict[str, Any] = more[0] if more else {}
        causes = cause if isinstance(cause, tuple) else (cause,)
        found.append(
            Job(
                name=name,
                kind=kind,
                says=says,
                setup=setup,
                fault=fault,
                fault_class=fault_class,
                causes=causes,
                **extra,
            )
        )
    return found


def clean_jobs(*lines: tuple[Any, ...]) -> list[Job]:
    """A line a job: name without `clean-`, kind, what is notable, how it trains, and what else there is to say."""
    return [
        Job(name=f"clean-{name}", kind=kind, says=says, setup=setup, **(more[0] if more else {}))
        for name, kind, says, setup, *more in lines
    ]
