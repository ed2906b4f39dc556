"""Make tables for notebooks. pandas is imported when the first one is made."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from actor_init.spec import UsageError

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame


def make_frame(rows: Iterable[dict[str, Any]], columns: tuple[str, ...] | None = None) -> "DataFrame":
    """Make a table of these rows; without `columns` it has those of the rows. Raises UsageError without pandas."""
    try:
        from pandas import DataFrame
    except ImportError:
        raise UsageError("a table needs pandas, which is not installed. Try: pip install pandas") from None
    return DataFrame(list(rows), columns=None if columns is None else list(columns))
