"""Where a rule is looked for, and what is said where there is none, or no number comes out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lipaudit.errors import EvaluationError, InputError


class NoRuleError(InputError):
    """The model uses an operation that nothing is known of on forms.

    Args:
        operation: its name, with what about it is not supported.
        module: path of the module that uses it, where known.
    """

    def __init__(self, operation: str, module: str = "") -> None:
        where = f" (in {module})" if module else ""
        super().__init__(
            f"no certificate for this model: no rule for the operation {operation}{where}",
            "certificates know the operations of common transformers; attacks work on any model",
        )
        self.operation, self.module = operation, module


class UnboundedError(EvaluationError):
    """A range left the numbers: the ball is too large to say anything of it."""

    def __init__(self) -> None:
        super().__init__("a range is not finite: the ball is too large for this model")


def rule_of(
    rules: Mapping[str, Callable[..., Any]], name: str, args: Any, kwargs: Any
) -> Callable[..., Any]:
    """Return the rule of an operation.

    Raises:
        NoRuleError: there is none, or none that takes these arguments.
    """
    rule = rules.get(name)
    if rule is None:
        raise NoRuleError(name)
    try:
        inspect.signature(rule).bind(*args, **kwargs)
    except TypeError:
        raise NoRuleError(f"{name} with these arguments") from None
    return rule
