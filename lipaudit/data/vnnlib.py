"""Properties in VNN-LIB 1.0, the format of the verification competition VNN-COMP."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipaudit.errors import InputError, explain_failure

# Seconds for an instance where nobody set a limit: that of the competition's vision transformers.
TIMEOUT = 100.0


def write_property(low: Tensor, high: Tensor, classes: int, label: int, title: str) -> str:
    """Write the property that a classifier keeps its class on a box, as what must not happen.

    Args:
        low: smallest value of every input, in the order in which the network reads them.
        high: largest value of every input.
        classes: number of logits.
        label: the class to keep.
        title: a line that says what it is.
    """

    def write_lines() -> Iterator[str]:
        yield f"; {title}"
        yield from (f"(declare-const X_{i} Real)" for i in range(low.numel()))
        yield from (f"(declare-const Y_{i} Real)" for i in range(classes))
        ranges = zip(low.flatten().tolist(), high.flatten().tolist(), strict=True)
        for i, ends in enumerate(ranges):
            # Shortest decimals that are read as the same numbers; not all tools read exponents.
            least, most = (np.format_float_positional(end, trim="0") for end in ends)
            yield from (f"(assert (>= X_{i} {least}))", f"(assert (<= X_{i} {most}))")
        yield "(assert (or"
        yield from (f"    (and (>= Y_{i} Y_{label}))" for i in range(classes) if i != label)
        yield "))"

    return "\n".join(write_lines()) + "\n"


@dataclass(frozen=True)
class Property:
    """A box of inputs, and what must not happen to the outputs y on it.

    Attributes:
        low: smallest value of every input, (inputs,), in float64.
        high: largest value of every input.
        rows: (clauses, size, outputs); clauses with fewer conditions repeat one.
        limits: (clauses, size). All of rows @ y <= limits of a clause must not happen.
    """

    low: Tensor
    high: Tensor
    rows: Tensor
    limits: Tensor

    def is_broken_by(self, y: Tensor) -> bool:
        """Say whether outputs (outputs,) are what must not happen."""
        return bool((self.rows @ y.double() <= self.limits).all(-1).any())


READ = "It must be VNN-LIB 1.0: ranges of all X_i, and conditions such as (<= Y_0 Y_1)."
# Coefficients by variable of a function that must be <= 0; the constant has the empty name.
Condition = dict[str, Fraction]


def read_property(path: Path) -> Property:
    """Read a property: ranges of the inputs, and clauses of conditions on the outputs.

    Raises:
        InputError: the file is missing or has something else; the message has the line.
    """
    names, clauses, line = set[str](), [list[Condition]()], 0
    ends: tuple[dict[str, Fraction], dict[str, Fraction]] = ({}, {})
    with explain_failure(f"cannot read {path}", "Check the path; unzip a .gz.", OSError):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        for line, command in _list_commands(text):  # noqa: B007
            if command[0] == "declare-const" and command[2:] == ["Real"]:
                names.add(command[1])
                continue
            added = _list_clauses(command)
            if any(name.startswith("Y") for clause in added for each in clause for name in each):
                clauses = [[*one, *other] for one in clauses for other in added]
                continue
            (conditions,) = added  # ranges are no alternatives
            for condition in conditions:
                (name,) = {*condition} - {""}
                end, most = -condition[""] / condition[name], condition[name] > 0
                ends[most][name] = (min if most else max)(ends[most].get(name, end), end)
        counts = Counter(name[0] for name in names)
        inputs, outputs = ([f"{kind}_{i}" for i in range(counts[kind])] for kind in "XY")
        used = {name for clause in clauses for each in clause for name in each} - {""}
        if any(ends[0][name] > ends[1][name] for name in inputs):
            raise ValueError("the range of an input is empty")
        if not used or used - {*outputs} or not all(clauses):
            raise ValueError("no condition on declared outputs")
        size = max(map(len, clauses))
        full = [(clause * size)[:size] for clause in clauses]
        values = (
            [-_round_up(-ends[0][name]) for name in inputs],
            [_round_up(ends[1][name]) for name in inputs],
            [[[float(each.get(y, 0)) for y in outputs] for each in clause] for clause in full],
            [[_round_up(-each[""]) for each in clause] for clause in full],
        )
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise InputError(f"{path}: line {line} is not read: {error}", READ) from error
    return Property(*(torch.tensor(each, dtype=torch.float64) for each in values))


def _round_up(value: Fraction) -> float:
    """Return the smallest number of float64 that is not below: seldom is a decimal one itself."""
    nearest = float(value)
    return nearest if nearest >= value else math.nextafter(nearest, math.inf)


def _list_commands(text: str) -> Iterator[tuple[int, list[Any]]]:
    """Yield every command with its line: words, and lists of them for brackets."""
    lines = enumerate((line.partition(";")[0] for line in text.splitlines()), 1)
    words = ((i, word) for i, line in lines for word in re.findall(r"[()]|[^\s()]+", line))

    def read_list() -> list[Any]:
        parts = list[Any]()
        for _, word in words:
            if word == ")":
                return parts
            parts.append(read_list() if word == "(" else word)
        raise ValueError("a bracket is not closed")

    for number, _ in words:
        yield number, read_list()


def _list_clauses(expression: list[Any]) -> list[list[Condition]]:
    """Return alternatives of conditions."""
    name, *parts = expression
    if name == "or":
        return [clause for part in parts for clause in _list_clauses(part)]
    if name in ("assert", "and"):
        chosen = product(*map(_list_clauses, parts))
        return [[condition for clause in each for condition in clause] for each in chosen]
    less, more = {"<=": parts, ">=": parts[::-1]}[name]
    condition = {"": Fraction(0)}
    for term, sign in ((less, 1), (more, -1)):
        key = term if term[:2] in ("X_", "Y_") else ""
        condition[key] = condition.get(key, 0) + sign * (Fraction(1) if key else Fraction(term))
    return [[condition]]
