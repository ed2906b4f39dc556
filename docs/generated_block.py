"""Put lines that a builder wrote between a page's two marks: <!-- NAME: begin --> and <!-- NAME: end -->."""

from collections.abc import Iterable


def insert_lines(text: str, name: str, lines: Iterable[str]) -> str:
    """Return the page with these lines in its block of that name. Raises ValueError if the page has no such block."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page has no block {name}: write {begin.strip()} and {end} into it")
    return before + begin + "".join(f"{line}\n" for line in lines) + end + after
