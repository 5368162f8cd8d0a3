"""Branch and bound over the signs of ReLUs, in the symbols of one pass."""

from lipaudit.theory.relaxation.branch.search import Effort, Verdict, decide

__all__ = ["Effort", "Verdict", "decide"]
