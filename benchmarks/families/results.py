"""Judge what replays of families gave, and write the table of docs/models.md."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.families.models import read_answer
from benchmarks.harness import markdown

LOSS_BOUND = 1e-5  # relative: fp32 sums in another order
NORM_BOUND = 1e-4
Outcomes = Mapping[tuple[str, str], Mapping[str, Any]]  # by family and form


def read_results(paths: Iterable[Path]) -> Outcomes:
    """Return the last line of each family under each form."""
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            one = json.loads(line)
            found[one["family"], one["form"]] = one
    return found


def verdict(home: Path, one: Mapping[str, Any]) -> str:
    """Return right, wrong, refused, raw error, or died for a replay that never came back."""
    if "refused" in one:
        return "refused"
    if "raw" in one:
        return "raw error"
    if "begun" in one:
        return "died"
    answer = read_answer(home / one["family"])
    is_near = abs(one["loss"] - answer.loss) <= LOSS_BOUND * abs(answer.loss)
    norm = one["grad_norm"]
    return "right" if is_near and abs(norm - answer.grad_norm) <= NORM_BOUND * answer.grad_norm else "wrong"


def table(home: Path, outcomes: Outcomes, forms: Sequence[str]) -> str:
    """Return the counts, the families by what they gave, and the reasons of the refusals, as Markdown."""
    verdicts = {key: verdict(home, one) for key, one in outcomes.items()}
    families = list(dict.fromkeys(family for family, _ in outcomes))
    counted = [["", *forms]]
    for word in ("right", "refused", "wrong", "raw error", "died"):
        counts = Counter(form for (_, form), found in verdicts.items() if found == word)
        counted.append([word, *(str(counts[form]) for form in forms)])
    alike: dict[tuple[str, ...], list[str]] = {}
    for family in families:
        alike.setdefault(tuple(verdicts.get((family, form), "not run") for form in forms), []).append(family)
    rows = [[*forms, "families"], *([*found, ", ".join(named)] for found, named in alike.items())]
    lines = [markdown(counted), "", markdown(rows)]
    reasons: dict[str, list[str]] = {}
    for (family, form), one in outcomes.items():
        if "refused" in one:
            reason = str(one["refused"]).replace(f"a {family}:", "a model:").replace(str(home), "FOLDER")
            reasons.setdefault(f"{form}: {reason}", []).append(family)
    lines += ["", *(f"* {reason}\n  {', '.join(named)}" for reason, named in sorted(reasons.items()))]
    return "\n".join(lines) + "\n"
