"""Check the shapes that annotations state, in the rooms of mathematics.

jaxtyping and beartype check every function of these rooms that states a shape; mypy checks the
others. Calls whose arguments and results have types, shapes and dtypes that passed before are not
checked again: the answer would be the same, and a check takes longer than most of the functions.
"""

import ast
import functools
import inspect
import sys
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import beartype
import jaxtyping
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("lipaudit.theory", "lipaudit.wings", "lipaudit.attacks")
SHAPES: dict[str, set[str]] = {}
"""By module: the types with shapes that it imports or defines."""
PASSED: dict[object, set[Hashable]] = {}
"""By function: the calls that passed, as types, shapes and dtypes."""
CHECKS: dict[object, Callable[..., None]] = {}
LITERALS: set[object] = set()
"""What annotations of the functions that were called name as a Literal."""
T = TypeVar("T")


class Descriptions(dict[type, Callable[[Any], Hashable] | None]):
    """By type: what an annotation can say of a value besides its type."""

    def __missing__(self, kind: type) -> Callable[[Any], Hashable] | None:
        self[kind] = None
        if issubclass(kind, (torch.Tensor, np.ndarray)):
            self[kind] = lambda value: (kind, value.shape, value.dtype)
        elif issubclass(kind, (list, tuple)) and kind is not torch.Size:
            # beartype looks at one item of those that are long
            self[kind] = lambda value: (kind, *map(describe, value[:6]))
        elif issubclass(kind, dict):
            self[kind] = lambda value: (kind, *map(describe, islice(value.items(), 2)))
        elif kind is bool:
            self[kind] = lambda value: value
        elif kind is str:  # other strings are alike, whatever text they are
            self[kind] = lambda value: value if value in LITERALS else kind
        return self[kind]


DESCRIPTIONS = Descriptions()


def describe(value: object) -> Hashable:
    """Return all that an annotation can say of a value: types, shapes, dtypes and literals."""
    kind = type(value)
    description = DESCRIPTIONS[kind]
    return description(value) if description else kind


def checked(function: T) -> T:
    """Return a function, or a dataclass, whose arguments and results are checked."""
    if inspect.isclass(function):
        if is_dataclass(function):
            function.__init__ = checked(function.__init__)
        return function
    # The functions of dataclasses have equal code; those inside of others are made at each call.
    name = (function.__module__, function.__qualname__, function.__code__)
    passed = PASSED.setdefault(name, set())

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if name not in CHECKS:
            CHECKS[name] = make_check(function)
        # Classes of ours are checked themselves, and modes would see what shapes are asked for.
        with torch._C.DisableTorchFunction():
            inputs = (*map(describe, args), *options, *map(describe, options.values()))
        result = function(*args, **options)
        with torch._C.DisableTorchFunction():
            case = (inputs, describe(result))
        if case not in passed:
            CHECKS[name](result, args, options)
            passed.add(case)
        return result

    return call


def make_check(function: types.FunctionType) -> Callable[..., None]:
    """Return what raises if arguments or a result are not what the annotations say."""
    results: list[object] = []
    replay = lambda *_args, **_options: results.pop()  # noqa: E731
    # with the names that the annotations are looked up in
    stand_in = types.FunctionType(
        replay.__code__, function.__globals__, function.__name__, closure=replay.__closure__
    )
    functools.update_wrapper(stand_in, function)
    with suppress(NameError):
        LITERALS.update(*map(list_literals, get_type_hints(function).values()))
    strict = jaxtyping.jaxtyped(stand_in, typechecker=beartype.beartype)

    def check(result: object, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        results[:] = [result]
        strict(*args, **options)

    return check


def list_literals(hint: object) -> set[object]:
    """Return the values of every Literal in an annotation."""
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    parts = [part for part in get_args(hint) if not isinstance(part, list)]
    return set().union(*map(list_literals, parts))


def import_shapes(node: ast.stmt) -> list[ast.stmt]:
    """Return the body of `if TYPE_CHECKING` if it imports shapes: here they are needed to run."""
    if not isinstance(node, ast.If) or ast.unparse(node.test) != "TYPE_CHECKING":
        return [node]
    return node.body if any(map(list_imported_shapes, node.body)) else [node]


def list_imported_shapes(node: ast.stmt) -> set[str]:
    """Return the types with shapes that a statement imports, such as Float or Logits."""
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return set()
    names = {each.asname or each.name for each in node.names}
    if node.module == "jaxtyping":
        return names
    return names & list_shapes(node.module)


def list_shapes(module: str) -> set[str]:
    """Return the types with shapes that a module of the rooms imports or defines."""
    if module in SHAPES:
        return SHAPES[module]
    shapes = SHAPES[module] = set()  # for modules that import each other for types
    file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    if not module.startswith(ROOMS) or not file.is_file():
        return shapes
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in (each for statement in tree.body for each in import_shapes(statement)):
        shapes |= list_imported_shapes(node)
        if isinstance(node, ast.Assign) and has_shape(node.value, shapes):
            shapes.update(each.id for each in node.targets if isinstance(each, ast.Name))
    return shapes


def has_shape(node: ast.AST, shapes: set[str]) -> bool:
    """Say whether a type states a shape."""
    return any(isinstance(each, ast.Name) and each.id in shapes for each in ast.walk(node))


class Decoration(ast.NodeTransformer):
    """Decorate each function that states a shape before its other decorators, classes after."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self.shapes = list_shapes(module)
        tree.body = [each for node in tree.body for each in import_shapes(node)]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        given = [each.annotation for each in ast.walk(node.args) if isinstance(each, ast.arg)]
        if any(has_shape(hint, self.shapes) for hint in (node.returns, *given) if hint):
            node.decorator_list.append(ast.Name("__checked__", ast.Load()))
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        if any(has_shape(each.annotation, self.shapes) for each in fields):
            node.decorator_list.insert(0, ast.Name("__checked__", ast.Load()))
        return node


class Loader(SourceFileLoader):
    """Load a module whose functions are checked."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path))
        tree = Decoration(fullname, tree).visit(tree)
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__checked__ = checked
        super().exec_module(module)


class Finder(PathFinder):
    """Find the modules of the rooms."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(ROOMS):
            return None
        spec = super().find_spec(fullname, path, target)
        spec.loader = Loader(fullname, spec.origin)
        return spec


def install() -> None:
    """Check the rooms from now on."""
    assert not any(name.startswith(ROOMS) for name in sys.modules), "imported too early"
    sys.meta_path.insert(0, Finder)
