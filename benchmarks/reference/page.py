"""The page docs/coverage.md: from outcomes to Markdown."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
OUTCOMES = {
    "ok": "every attention layer has a closed form, every number is right",
    "numerical": "some layers have no closed form: exact norms by differentiation, no bounds",
    "refused": "lipaudit names the reason why it cannot measure the model, or a part of it",
    "unfinished": "took longer than the limit",
    "wrong": "a number or a bound is wrong",
    "crash": "an error that is not lipaudit's own",
    "unbuilt": "not tested, and on no list below: our rules build no small model of this type",
}
LIBRARIES = {"timm": "timm", "transformers": "transformers"}
WIDTH = 118
INTRODUCTION = """# Coverage of models

Which timm and transformers models does lipaudit read, and are the numbers right?
Every timm family and every transformers model type is built small, with random weights.
Each is compared with dense Jacobians, which autograd computes in float64 with the model's own
code, in the first, middle and last attention layer and for the whole model:

* exact norms of every head, layer and model, to 1e-6 in float64 and 1e-3 in float32;
* every bound: none may be below the true norm by more than rounding (1e-12 in float64);
* attention statistics, against the map that the model computes.

Models that cast to float32 inside are checked to 1e-4, their bounds to 1e-5. `lipaudit check`
says how your model is read, and why it is refused.

```
python -m pytest -m reference -n 0          fails on a crash or a wrong number
python -m benchmarks.reference --write      writes this page; resumes with --kept FILE
```
"""


def page(rows: Sequence[Row], facts: str) -> str:
    """Return the whole page.

    Args:
        rows: outcomes, as plain values.
        facts: versions, for the head of the tables.
    """
    parts = [INTRODUCTION, f"## Counts\n\n{facts}\n", _counts(rows)]
    for library in LIBRARIES:
        models = [row for row in rows if row["library"] == library]
        parts += [f"## {library}\n", _complete(models), _partial(models), _grouped(models)]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _counts(rows: Sequence[Row]) -> str:
    lines = [f"| outcome | {' | '.join(LIBRARIES)} | |", f"|---|{'--:|' * len(LIBRARIES)}---|"]
    counts = [Counter(r["outcome"] for r in rows if r["library"] == name) for name in LIBRARIES]
    for outcome, meaning in OUTCOMES.items():
        numbers = " | ".join(str(count[outcome]) for count in counts)
        lines.append(f"| {outcome} | {numbers} | {meaning} |")
    return "\n".join(lines) + "\n"


def _complete(rows: Iterable[Row]) -> str:
    """Return the names of the models that are read completely."""
    models = [row for row in rows if row["layers"] and row["outcome"] == "ok"]
    names = ", ".join(row["name"] for row in models)
    checked = sum(row["checked"] for row in models)
    return fill(f"**ok** ({checked:,} numbers checked): {names}.") + "\n"


def _partial(rows: Iterable[Row]) -> str:
    """Return the models that were measured in part, by outcome and reason."""
    models: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        measured = row["layers"] or row["outcome"] in ("wrong", "crash")
        if measured and (row["outcome"] != "ok" or row["unchecked"]):
            reasons = [*row["reasons"], *(f"no truth for {text}" for text in row["unchecked"])]
            why = "; ".join(dict.fromkeys(short(reason) for reason in reasons[:2]))
            model = f"{row['name']} ({row['closed']} of {row['layers']})"
            models.setdefault((row["outcome"], why), []).append(model)
    lines = ["| outcome | reason | models (layers with a closed form) |", "|---|---|---|"]
    lines += [f"| {' | '.join(key)} | {', '.join(names)} |" for key, names in models.items()]
    return "\n".join(lines) + "\n"


def _grouped(rows: Iterable[Row]) -> str:
    """Return numbers and first names of the models without any figure, by outcome and reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if not row["layers"] and row["outcome"] in ("refused", "unfinished", "ok"):
            why = generic(*row["reasons"][:1])
            reasons.setdefault(f"{row['outcome']}{why and ', '}{why}", []).append(row["name"])
    groups = sorted(reasons.items())
    lines = [f"* {reason} ({len(names)}): {', '.join(names)}" for reason, names in groups]
    return "\n".join(textwrap.shorten(line, WIDTH, placeholder=" ...") for line in lines) + "\n"


def fill(text: str, indent: str = "") -> str:
    """Break a text into the lines of the page."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def short(reason: str) -> str:
    """Leave out what a table has no room for."""
    reason = re.sub(r"^(ok|numerical|refused|wrong|crash): ", "", reason)
    reason = re.sub(r"^\w+: \w+Error: ", "", reason)  # the step and the class of the error
    reason = re.sub(r" \([\w./]+\.py:\d+.*\)$| \(gradient .*", "", reason)
    return reason.replace("|", "/")[:120]


def generic(reason: str = "") -> str:
    """Leave out what is particular to one model, so that the same reason reads the same."""
    reason = re.sub(r"\b(a )?[A-Z]\w+\b", "the model", short(reason))
    reason = re.sub(r"(found in|attention of) (?!the )[a-z][\w.-]*", r"\1 the model", reason)
    reason = re.sub(r"\d+ (frames|samples)", r"several \1", reason)
    reason = re.sub(r"takes (\[.*\]|\w+)(: neither|, of a shape).*", "takes another input", reason)
    return re.split(r" ?[(:,]| that coul| in [\w.]+\.| what \w+\.", reason)[0]
