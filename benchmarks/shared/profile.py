"""Time by function: whoever calls them, wherever the package of a commit keeps them."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.shared.timing import cpu_clock


class Profile:
    """Seconds of labelled functions of lipaudit, without those of others among them.

    Attributes:
        seconds: by label; one is missing where this commit has none of its functions.
    """

    def __init__(
        self, functions: Mapping[str, Sequence[str]], clock: Callable[[], float] = cpu_clock
    ) -> None:
        self.functions, self.clock = functions, clock
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time them inside the block."""
        _import_all()
        replaced = [
            (owner, name, original, self._timed(original, label))
            for label, names in self.functions.items()
            for wanted in names
            for owner, name, original in _places(wanted)
        ]
        self.seconds = defaultdict(float)
        try:
            for owner, name, _, watched in replaced:
                setattr(owner, name, watched)
            yield
        finally:
            for owner, name, original, _ in replaced:
                setattr(owner, name, original)

    def _timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*given: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            start = self.clock()
            try:
                return function(*given, **named)
            finally:
                whole = self.clock() - start
                self.seconds[label] += whole - self._inner.pop()
                if self._inner:
                    self._inner[-1] += whole

        return watched


@functools.cache
def _import_all() -> None:
    """Import every module: a function of one that is imported later would not be watched."""
    import lipaudit

    for module in pkgutil.walk_packages(lipaudit.__path__, "lipaudit."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def _places(wanted: str) -> Iterator[tuple[Any, str, Any]]:
    """Every name in the package by which a function, or `Class.method`, is called."""
    owner, _, method = wanted.rpartition(".")
    name = owner or method
    modules = [m for key, m in sys.modules.items() if key.partition(".")[0] == "lipaudit"]
    own = (vars(m).get(name) for m in modules)
    known = {id(o): o for o in own if getattr(o, "__module__", "").startswith("lipaudit")}
    for each in known.values():
        if method and owner:
            if method in vars(each):
                yield each, method, vars(each)[method]
            continue
        for module in modules:
            for at, held in list(vars(module).items()):
                if held is each:
                    yield module, at, held
