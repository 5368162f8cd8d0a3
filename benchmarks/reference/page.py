"""The page docs/coverage.md: from outcomes to Markdown."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
OUTCOMES = {
    "ok": "every attention layer has the closed form, every number is true",
    "numerical": "some layers have no closed form: their norms are exact by differentiation, "
    "without bounds",
    "refused": "lipaudit says why it cannot measure the model, or a part of it",
    "unfinished": "took longer than the limit",
    "wrong": "a number or a bound is not true",
    "crash": "an error that is not lipaudit's own",
    "unbuilt": "our rules give no small model of the type: nothing is said of it",
}
LIBRARIES = {"timm": "timm", "transformers": "transformers"}
UNFIT = "its tensors do not fit together, most likely for our small configuration"
INTRODUCTION = """# What is measured, and against what

Every family of timm and every model type of transformers, made small (about two layers, random
weights that leave no bias, norm or position table at zero), is measured on two samples, those of
text with different lengths. For the first, middle and last attention layer and for the whole
model, each number is set against a dense Jacobian that autograd takes in float64 through the
model's own code, by means that share nothing with lipaudit's closed form:

* exact norms of every head and of the layer, in float64 (1e-6) and float32 (1e-3);
* every bound, which may not be below the true norm by more than rounding (1e-12 in float64);
* statistics of the attention map, against the map that the model computes;
* the norm of the Jacobian of the whole model.

What a model casts to float32 within, it computes in float64 there, for both; in float32 no more is
asked than what rounding alone does to the model's dense Jacobian.

```
python -m pytest -m reference -n 0
python -m benchmarks.reference.coverage --write
```

The first fails at a crash or a wrong number; the second writes this page. It can be stopped and
taken up again (`--kept FILE`), and takes some models only (`timm --only levit pit`).
"""


def page(rows: Sequence[Row], before: Mapping[str, Mapping[str, int]], facts: str) -> str:
    """Return the whole page.

    Args:
        rows: outcomes, as plain values.
        before: counts of outcomes by library, before the faults that were seen were mended.
        facts: versions, for the head of the tables.
    """
    parts = [INTRODUCTION, f"## Counts\n\n{facts}\n", _counts(rows, before)]
    for library in LIBRARIES:
        own = [row for row in rows if row["library"] == library]
        parts += [f"## {library}\n", _measured(own), _grouped(own)]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _counts(rows: Sequence[Row], before: Mapping[str, Mapping[str, int]]) -> str:
    head = " | ".join(f"{name} before | {name} now" for name in LIBRARIES)
    lines = [f"| outcome | {head} | |", "|---|" + "--:|" * 2 * len(LIBRARIES) + "---|"]
    now = {name: Counter(r["outcome"] for r in rows if r["library"] == name) for name in LIBRARIES}
    for outcome, meaning in OUTCOMES.items():
        pairs = [f"{before.get(n, {}).get(outcome, 0)} | {now[n][outcome]}" for n in LIBRARIES]
        lines.append(f"| {outcome} | {' | '.join(pairs)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _measured(rows: Iterable[Row]) -> str:
    """Return a line per model with attention that was measured."""
    lines = [
        "| model | outcome | layers | closed form | numbers | largest error | bound / norm | |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        if row["layers"] or row["outcome"] in ("wrong", "crash", "unfinished"):
            error = f"{row['worst']:.0e}" if row["worst"] else ""
            ratio = f"{row['tightest']:.3f}" if math.isfinite(row["tightest"]) else ""
            reasons = [*row["reasons"], *(f"no truth for {text}" for text in row["unchecked"])]
            why = "; ".join(dict.fromkeys(short(reason) for reason in reasons))
            facts = (row["name"], row["outcome"], row["layers"], row["closed"], row["checked"])
            lines.append(f"| {' | '.join(map(str, (*facts, error, ratio, why)))} |")
    return "\n".join(lines) + "\n"


def _grouped(rows: Iterable[Row]) -> str:
    """Return the models of which nothing but a reason is to be said, by reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if not row["layers"] and row["outcome"] in ("refused", "unbuilt", "ok"):
            why = "; ".join(dict.fromkeys(short(reason) for reason in row["reasons"][:1]))
            text = f"{row['outcome']}: {generic(why, row['name'])}"
            reasons.setdefault(text, []).append(row["name"])
    lines = [f"* {reason} - {', '.join(names)}" for reason, names in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def short(reason: str) -> str:
    """Leave out what a table has no room for."""
    reason = re.sub(r"^(ok|numerical|refused|wrong|crash): ", "", reason)
    reason = re.sub(r" \([\w./]+\.py:\d+.*\)$", "", reason)
    return reason.replace("|", "/")[:160]


def generic(reason: str, name: str) -> str:
    """Take the model's own names out, so that the same reason reads the same."""
    reason = re.sub(r"\b[A-Z]\w*(Model|For\w+|Encoder|Net|Former)\b", "MODEL", reason)
    reason = re.sub(r"no attention was seen in [\w.]+", "no attention was seen", reason)
    reason = re.sub(r" of shape \([\d, ]*\)", "", reason)
    return re.sub(r"one sample \((Runtime|Index)Error: .*", f"one sample ({UNFIT})", reason)
