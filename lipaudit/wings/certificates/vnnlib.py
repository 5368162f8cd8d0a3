"""Properties in VNN-LIB 1.0, the format of the verification competition VNN-COMP."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipaudit.errors import InputError, explain_failure

# Seconds for an instance where nobody set a limit: that of the competition's vision transformers.
TIMEOUT = 100.0


def write_property(low: Tensor, high: Tensor, classes: int, label: int, title: str) -> str:
    """Return the property that a classifier keeps its class on a box, as VNN-LIB text.

    VNN-LIB states the forbidden outcome: for an input in the box, the logit of another class is at
    least as large as the logit of the label.

    Args:
        low: smallest value of every input, in the order in which the network reads them.
        high: largest value of every input.
        classes: number of logits.
        label: the class to keep.
        title: the comment in the first line.
    """
    lines = [f"; {title}"]
    lines += [f"(declare-const X_{i} Real)" for i in range(low.numel())]
    lines += [f"(declare-const Y_{i} Real)" for i in range(classes)]
    lows = low.flatten().tolist()
    highs = high.flatten().tolist()
    for i, (smallest, largest) in enumerate(zip(lows, highs, strict=True)):
        lines.append(f"(assert (>= X_{i} {_write_decimal(smallest)}))")
        lines.append(f"(assert (<= X_{i} {_write_decimal(largest)}))")
    lines.append("(assert (or")
    for i in range(classes):
        if i != label:
            lines.append(f"    (and (>= Y_{i} Y_{label}))")
    lines.append("))")
    return "\n".join(lines) + "\n"


def _write_decimal(value: float) -> str:
    """Return the shortest decimal, without an exponent, that a reader parses to the same float."""
    return np.format_float_positional(value, trim="0")


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
        """Return whether outputs y, (outputs,), break the property.

        The property is a list of clauses, each a list of conditions rows[clause, c] @ y <=
        limits[clause, c]. Outputs that fulfil all conditions of a clause are forbidden.
        """
        is_fulfilled = self.rows @ y.double() <= self.limits  # (clauses, conditions)
        return bool(is_fulfilled.all(-1).any())


to_float64 = partial(torch.tensor, dtype=torch.float64)
READ = "It must be VNN-LIB 1.0: ranges of all X_i, and conditions such as (<= Y_0 Y_1)."
# Coefficients by variable of a function that must be <= 0; the constant has the empty name.
Condition = dict[str, Fraction]


def read_property(path: Path) -> Property:
    """Read a property: ranges of the inputs, and clauses of conditions on the outputs.

    Raises:
        InputError: the file is missing or has other content; the message has the line.
    """
    with explain_failure(f"cannot read {path}", "Check the path; unzip a .gz.", OSError):
        text = path.read_text(encoding="utf-8", errors="replace")
    reader = _PropertyReader()
    line = 0
    try:
        for line, command in _list_commands(text):  # noqa: B007
            reader.add(command)
        return reader.finish()
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise InputError(f"{path}: line {line} is not read: {error}", READ) from error


class _PropertyReader:
    """Collects the commands of a file.

    Attributes:
        names: declared variables.
        clauses: what must not happen: all conditions of one of the clauses.
        least, most: the range of each input so far.
    """

    def __init__(self) -> None:
        self.names = set[str]()  # the declared variables, such as X_0 and Y_0
        # The forbidden outputs: those that fulfil all conditions of a clause. The single clause
        # without conditions is the start, to which each assertion adds conditions.
        self.clauses = [list[Condition]()]
        self.least = dict[str, Fraction]()  # the smallest value of each input
        self.most = dict[str, Fraction]()

    def add(self, command: list[Any]) -> None:
        """Record one command: a declared variable, or an assertion about inputs or outputs.

        `["assert", ["<=", "X_0", "1"]]` is a range of an input. An assertion about outputs is an
        "or" of clauses, each an "and" of conditions such as `["<=", "Y_0", "Y_1"]`.

        Raises:
            ValueError: the command cannot be read; likewise LookupError, TypeError.
        """
        if command[0] == "declare-const" and command[2:] == ["Real"]:
            self.names.add(command[1])
            return
        alternatives = _list_clauses(command)
        if any(map(_has_output, alternatives)):
            # All assertions hold together: (a or b) and then (c or d) make the clauses (a and c),
            # (a and d), (b and c), (b and d).
            pairs = product(self.clauses, alternatives)
            self.clauses = [[*earlier, *later] for earlier, later in pairs]
            return
        (conditions,) = alternatives  # raises ValueError for an "or" about inputs
        for condition in conditions:
            # {"X_0": 2, "": -1} is the condition 2 X_0 - 1 <= 0, that is, X_0 <= 1/2.
            (name,) = {*condition} - {""}
            end = -condition[""] / condition[name]
            if condition[name] > 0:
                self.most[name] = min(end, self.most.get(name, end))
            else:
                self.least[name] = max(end, self.least.get(name, end))

    def finish(self) -> Property:
        """Return the property of all recorded commands: ranges of inputs, and forbidden outputs.

        Raises:
            ValueError: a range is empty, or no output has a condition; LookupError: an input has
                no range.
        """
        counts = Counter(name[0] for name in self.names)
        inputs = [f"X_{i}" for i in range(counts["X"])]
        outputs = [f"Y_{i}" for i in range(counts["Y"])]
        if {*self.least, *self.most} - {*inputs}:
            raise ValueError("a range of an input that is not declared")
        if any(self.least[name] > self.most[name] for name in inputs):
            raise ValueError("the range of an input is empty")
        # A clause is a list of conditions: {"Y_0": 1, "Y_1": -1, "": 3} is Y_0 - Y_1 + 3 <= 0.
        used = set[str]()
        for clause in self.clauses:
            used.update(*clause)
        used.discard("")  # the name of the constant
        # No output has a condition, an output is not declared, or a clause has no condition.
        if not used or used - {*outputs} or not all(self.clauses):
            raise ValueError("no condition on declared outputs")
        rows, limits = self._stack_conditions(outputs)
        # Fractions are rounded outwards to float64, so that the box contains the range.
        low = [-_round_up(-self.least[name]) for name in inputs]
        high = [_round_up(self.most[name]) for name in inputs]
        return Property(to_float64(low), to_float64(high), rows, limits)

    def _stack_conditions(self, outputs: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the conditions as rows @ y <= limits, for outputs y in the order of their names.

        All clauses get the same number of conditions: shorter ones repeat theirs.

        Returns:
            rows, (clauses, conditions, outputs), and limits, (clauses, conditions).
        """
        size = max(map(len, self.clauses))
        rows = []
        limits = []
        for clause in self.clauses:
            conditions = (clause * size)[:size]
            # {"Y_0": 1, "Y_1": -1, "": 3}, Y_0 - Y_1 + 3 <= 0, is the row [1, -1], the limit -3.
            rows.append([[float(each.get(y, 0)) for y in outputs] for each in conditions])
            limits.append([_round_up(-condition[""]) for condition in conditions])
        return to_float64(rows), to_float64(limits)


def _has_output(clause: list[Condition]) -> bool:
    """Return whether a condition of the clause is about an output, Y_i."""
    return any(name.startswith("Y") for condition in clause for name in condition)


def _round_up(value: Fraction) -> float:
    """Return the smallest float64 >= value: a fraction such as 1/10 has no exact float64."""
    nearest = float(value)
    if nearest >= value:
        return nearest
    return math.nextafter(nearest, math.inf)


def _list_commands(text: str) -> Iterator[tuple[int, list[Any]]]:
    """Yield the line number and the words of every command (...) of a VNN-LIB file.

    Brackets within a command become lists: (assert (<= X_0 1)) is ["assert", ["<=", "X_0", "1"]].
    """
    words = _list_words(text)

    def read_list() -> list[Any]:
        """Return the words up to the closing bracket; inner brackets become nested lists."""
        parts = list[Any]()
        for _, word in words:
            if word == ")":
                return parts
            if word == "(":
                parts.append(read_list())
            else:
                parts.append(word)
        raise ValueError("a bracket is not closed")

    # Each command begins with a bracket, and `read_list` takes the words behind it.
    for line, _ in words:
        yield line, read_list()


def _list_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of every bracket and word; comments start with ";"."""
    for number, line in enumerate(text.splitlines(), 1):
        code, _, _ = line.partition(";")
        for word in re.findall(r"[()]|[^\s()]+", code):
            yield number, word


def _list_clauses(expression: list[Any]) -> list[list[Condition]]:
    """Return a VNN-LIB expression as an "or" of clauses, each an "and" of conditions.

    A condition is a linear function that must be <= 0, with a coefficient for each variable and
    the constant under "": `["<=", "Y_0", "3"]` becomes one clause of one condition,
    `[[{"Y_0": 1, "": -3}]]`.
    """
    name, *parts = expression
    if name == "or":
        return [clause for part in parts for clause in _list_clauses(part)]
    if name in ("assert", "and"):
        # ((a or b) and (c or d)) is (a and c) or (a and d) or (b and c) or (b and d).
        choices = product(*map(_list_clauses, parts))
        return [list(chain.from_iterable(clauses)) for clauses in choices]
    # An inequality smaller <= larger: the condition is smaller - larger <= 0.
    if name == "<=":
        smaller, larger = parts
    elif name == ">=":
        larger, smaller = parts
    else:
        raise ValueError(repr(name))
    condition = {"": Fraction(0)}
    for term, sign in ((smaller, 1), (larger, -1)):  # each a variable or a number
        if term[:2] in ("X_", "Y_"):
            condition[term] = condition.get(term, Fraction(0)) + sign
        else:
            condition[""] += sign * Fraction(term)
    return [[condition]]
