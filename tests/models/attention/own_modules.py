"""Attention as people write it themselves, and how lipaudit reads each: the table of the page.

Run by hand, from the root: python -m tests.models.attention.own_modules
"""

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lipaudit
from lipaudit.errors import LipauditError
from lipaudit.tables import Report, Row
from lipaudit.theory.bounds.record import load_bounds

TOKENS, WIDTH, HEADS = 5, 8, 2
SAMPLES = 2
SAME = 1e-6
"""Largest relative difference from the truth."""
APART = "queries apart"
OWN, PLAIN = "own", "plain"
"""What the module of a case and the usual one before it are called."""

Forward = Callable[[Any, Tensor], Tensor]
HeadMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """The truth about one use of an attention map.

    Attributes:
        heads: X of one sample, (tokens, width) -> O of every head, (heads, ...).
        before: what the module does to its input before the maps of the layer read it.
        apart: the same where queries and keys are said to read inputs that vary independently.
    """

    heads: HeadMap
    before: HeadMap = lambda x: x
    apart: "Layer | None" = None

    def norms(self, x: Tensor, row: Row) -> Tensor:
        """Return the spectral norm of every head, dense, in what the row says."""
        if "numerical" in row.kind:
            return _norms(lambda z: self.heads(self.before(z)), x)
        if row.input == APART and self.apart is not None:
            return self.apart.norms(x, row)
        return _norms(self.heads, self.before(x))


@dataclass(frozen=True)
class Case:
    """A module of a person.

    Attributes:
        what: the mechanism, for the page.
        forward: the module, (batch, tokens, width) -> the same; its first argument has q, k, v, o.
        truth: the layers, from the module.
        outcome: how lipaudit reads it: `read`, `numerical`, `left` (named in a warning beside
            other layers, refused alone), `refused`, `none` (no attention), `autograd` (the figures
            are of a gradient that is no derivative, and a warning says so); `in parts` where
            a warning says that layers are calls on the same input; `+elsewhere` where a
            warning names an X outside the module of the attention.
        build: adds parts to the module.
        derivative: whether autograd gives the derivative of the function.
    """

    what: str
    forward: Forward
    truth: Callable[[Any], Sequence[Layer]]
    outcome: str
    build: Callable[[Any], None]
    derivative: bool


CASES: dict[str, Case] = {}
FILES = ("own_weights", "own_maps", "own_uses", "own_loops")
"""The files of cases, as the page has them."""


def own(
    what: str,
    outcome: str = "read",
    *,
    heads: Callable[[Any, Tensor], Tensor] | None = None,
    truth: Callable[[Any], Sequence[Layer]] | None = None,
    build: Callable[[Any], None] = lambda _: None,
    derivative: bool = True,
) -> Callable[[Forward], Forward]:
    """Register a module; its truth is that of the usual attention where nothing else is given."""
    one = attend if heads is None else heads

    def layers(a: Any) -> Sequence[Layer]:
        return (Layer(lambda x: one(a, x)),)

    def add(forward: Forward) -> Forward:
        name = forward.__name__
        assert name not in CASES, name
        CASES[name] = Case(what, forward, truth or layers, outcome, build, derivative)
        return forward

    return add


def own_heads(what: str, outcome: str = "read", **how: Any) -> Callable[..., Any]:
    """Register a module by what it makes of the heads of q (scaled), k and v."""

    def add(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Any:
        def forward(a: Any, x: Tensor) -> Tensor:
            return a.o(join(function(*qkv(a, x))))

        forward.__name__, forward.__module__ = function.__name__, function.__module__
        own(what, outcome, **how)(forward)
        return function

    return add


class Own(nn.Module):
    """The module of a case, with four linear maps."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self._forward = case.forward
        case.build(self)

    def forward(self, x: Tensor) -> Tensor:
        """Run the case."""
        return self._forward(self, x)


class Model(nn.Module):
    """The module of a case alone, or behind a usual attention."""

    def __init__(self, case: Case, *, beside: bool) -> None:
        super().__init__()
        self.plain = Own(CASES["usual"]) if beside else None
        self.own = Own(case)
        self.head = nn.Linear(WIDTH, 3)

    def before(self, x: Tensor) -> Tensor:
        """Return what the module of the case takes."""
        return x if self.plain is None else x + self.plain(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.before(x)
        return self.head((x + self.own(x)).mean(1))


# --- parts of modules


def split(t: Tensor, heads: int = HEADS) -> Tensor:
    """(..., tokens, width) -> (..., heads, tokens, width / heads)."""
    return t.unflatten(-1, (heads, -1)).transpose(-3, -2)


def join(t: Tensor) -> Tensor:
    """The inverse of `split`."""
    return t.transpose(-3, -2).flatten(-2)


def qkv(a: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heads of q (scaled), k and v."""
    q, k, v = (split(part(x)) for part in (a.q, a.k, a.v))
    return q / q.shape[-1] ** 0.5, k, v


# --- the truth, from the weights


def affine(map_: Any, x: Tensor) -> Tensor:
    """Return x W^T + b in heads."""
    return split(x @ map_.weight.T + map_.bias)


def softmax(logits: Tensor) -> Tensor:
    """Return the rows e^l / sum e^l."""
    e = (logits - logits.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def attend(
    a: Any,
    x: Tensor,
    *,
    change: HeadMap = lambda logits: logits,
    share: HeadMap = softmax,
    **parts: Tensor,
) -> Tensor:
    """Return O of every head, (heads, tokens, width): the usual attention, or changed.

    Args:
        a: the module.
        x: one sample.
        change: what is made of the logits.
        share: what is made of them then.
        parts: q, k, v in heads, (heads, tokens, width), where they are not the usual.
    """
    q, k, v = (parts.get(n) for n in "qkv")
    q, k, v = (affine(m, x) if t is None else t for m, t in ((a.q, q), (a.k, k), (a.v, v)))
    return share(change(q @ k.mT / q.shape[-1] ** 0.5)) @ v


def _norms(f: HeadMap, x: Tensor) -> Tensor:
    jacobian = torch.autograd.functional.jacobian(f, x, vectorize=True)
    return torch.linalg.matrix_norm(jacobian.view(len(jacobian), -1, x.numel()), 2)


# --- lipaudit


@dataclass(frozen=True)
class Reading:
    """What lipaudit says of a model.

    Attributes:
        outcome: of the module of the case: read, numerical, named, refused, none; joined with
            `+`; or what is wrong.
        fault: what is wrong.
    """

    outcome: str
    fault: str = ""


def model(name: str, *, beside: bool) -> tuple[Model, Tensor]:
    """Return the model of a case, in float64, and samples."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = Model(CASES[name], beside=beside).double().eval()
        with torch.no_grad():
            for p in built.parameters():
                p.add_(0.3 * torch.randn_like(p))
        x = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    return built, x


def read(name: str, *, beside: bool) -> Reading:
    """Read the heads of the model of a case and compare them with the truth."""
    built, x = model(name, beside=beside)
    try:
        report = lipaudit.measure(built, "bounds", data=x, dtype="float64", tol=1e-10)
    except LipauditError as error:
        if error.exit_code != 4:
            return Reading("wrong", f"exit {error.exit_code}: {error}")
        none = not CASES[name].truth(built.own)
        return Reading("none" if none and "no attention" in str(error) else "refused")
    return _judged(report, built, x, CASES[name])


def _judged(report: Report, built: Model, x: Tensor, case: Case) -> Reading:
    if fault := _bounds_fault(report):
        return Reading("wrong", fault)
    plain = CASES["usual"].truth(built.plain) if built.plain is not None else ()
    with torch.no_grad():
        inner = torch.stack([built.before(one[None])[0] for one in x])
    outcomes: dict[str, str] = {}
    for module, at, truth in ((PLAIN, x, plain), (OWN, inner, case.truth(built.own))):
        outcome, fault = _matched(_layers(report, module), truth, at)
        if any(
            n.code == "in-parts" and f"({module}" in n.text for n in report.section("bounds").notes
        ):
            outcome += " in parts"
        elsewhere = any(
            n.code == "input-elsewhere" and n.level == "warning" and module in n.text
            for n in report.section("bounds").notes
        )
        outcome += "+elsewhere" * elsewhere
        if fault and warned(report):
            outcome = "autograd"
        elif fault:
            return Reading("wrong", f"{module}: {fault}")
        outcomes[module] = outcome
    if not case.derivative and not warned(report):
        return Reading("silent", "no warning says that the gradient is no derivative")
    missing = "left" in outcomes[OWN]
    named = any(n.level == "warning" and OWN in n.text for n in report.section("bounds").notes)
    if missing and not named:
        return Reading("silent", "a layer is left out without a warning that names its module")
    unread = any(
        n.code == "attention-unread" and OWN in n.text for n in report.section("bounds").notes
    )
    if unread and not missing:
        return Reading("wrong", "a warning names a module of which all is read")
    return Reading(outcomes[OWN].replace("left", "named"))


def warned(report: Report) -> bool:
    """Say whether a report says that a gradient is no derivative."""
    return any(n.code == "no-derivative" for s in report.sections for n in s.notes)


def _layers(report: Report, module: str) -> dict[int, list[Row]]:
    """Return the heads of the layers of a module."""
    found: dict[int, list[Row]] = {}
    for row in report.section("bounds").rows:
        if row.module.split(".")[0] == module:
            found.setdefault(row.layer, []).append(row)
    return found


def _matched(found: Mapping[int, list[Row]], truth: Sequence[Layer], x: Tensor) -> tuple[str, str]:
    """Give every layer that was found one of the truth; return the outcome and a fault."""
    left, outcomes = list(truth), []
    for rows in found.values():
        if rows[0].exact is None:
            continue
        if (layer := next((one for one in left if _same(rows, one, x)), None)) is None:
            norms = ", ".join(f"{row.exact:.4g}" for row in rows)
            return "", f"heads of norm {norms} are none of the module's"
        left.remove(layer)
        outcomes.append("numerical" if "numerical" in rows[0].kind else "read")
    outcomes += ["left"] * bool(left)
    return "+".join(sorted(set(outcomes), reverse=True)) or "none", ""


def _same(rows: Sequence[Row], layer: Layer, x: Tensor) -> bool:
    """Say whether rows are the heads of a layer; of two samples median and largest say all."""
    true = torch.stack([layer.norms(one, rows[0]) for one in x])
    ours = torch.tensor([(row.exact, row.exact_max) for row in rows], dtype=true.dtype)
    if len(ours) != true.shape[1]:
        return False
    wanted = torch.stack([true.mean(0), true.amax(0)], 1)
    return bool(((ours - wanted).abs() <= SAME * wanted).all())


def _bounds_fault(report: Report) -> str:
    for row in report.section("bounds").rows:
        for name in load_bounds():
            bound = getattr(row, name)
            if bound is not None and bound < row.exact * (1 - 1e-9):
                return f"{name} {bound} is below {row.exact}"
    return ""


def expected(case: Case, *, beside: bool) -> str:
    """Return the outcome that a case is to have."""
    left = "named" if beside or "+" in case.outcome else "refused"
    return case.outcome.replace("left", left)


def whole(name: str) -> str:
    """Compare the norm of the whole model with a dense one; return what is wrong."""
    built, x = model(name, beside=True)
    report = lipaudit.measure(built, "jacobian", data=x, dtype="float64", tol=1e-10)
    exact = [_norms(lambda z: built(z[None]), one)[0] for one in x]
    rows = report.section("jacobian").rows
    true = float(torch.stack(exact).amax())
    if abs(rows[0].max - true) > SAME * true:
        return f"{rows[0].max} is not {true}"
    if warned(report) == CASES[name].derivative:
        return "the warning that the gradient is no derivative is " + (
            "false" if CASES[name].derivative else "missing"
        )
    return ""


HEADING = "## Attention that people write themselves"
LEGEND = f"""
{HEADING}

How lipaudit reads modules of no library. Each is tested alone in a model. Modules with any outcome
but *read* are also tested behind a usual layer. The tests compare the heads with dense
Jacobians, which autograd computes in float64 without lipaudit: they agree to 1e-6, and no bound is
below them.
`python -m tests.models.attention.own_modules` writes this section.

* **read**: closed form, with bounds. **in parts**: a warning says that several layers are
  calls on the same input (`in-parts`). **elsewhere**: a warning names X, which is the input of
  another module (`input-elsewhere`).
* **numerical**: exact norms in the input of the module, no bounds; a warning says why.
* **named**: no figures; a warning names the module and the line of code. **refused**: the same,
  as an error (exit code 4), because the model has no other attention.
* **autograd**: the figures follow a gradient that is not the derivative; a warning says so.
* **none**: this is no attention, and lipaudit does not take it for one.

| module | alone | behind a usual layer |
|---|---|---|
"""


def section(outcome: Callable[[str, bool], str]) -> str:
    """Return the section of the page: a line per module, those that are read alike together."""
    groups: dict[tuple[str, str], list[str]] = {}
    # In the order of the files, whichever was imported first.
    known = sorted(
        CASES.items(), key=lambda each: FILES.index(each[1].forward.__module__.rpartition(".")[2])
    )
    for name, case in known:
        groups.setdefault((outcome(name, False), outcome(name, True)), []).append(case.what)
    rows = ((what, *key) for key, modules in groups.items() for what in modules)
    return LEGEND + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def read_outcome(name: str, beside: bool) -> str:
    """Return how lipaudit reads a module."""
    return read(name, beside=beside).outcome


def expected_outcome(name: str, beside: bool) -> str:
    """Return how it is to read it."""
    return expected(CASES[name], beside=beside)


def load_cases() -> None:
    """Import the modules that register cases."""
    for module in FILES:
        importlib.import_module(f"tests.models.attention.{module}")


if __name__ == "__main__":
    from tests.models.attention import own_modules  # one registry, whatever this file is run as

    warnings.filterwarnings("ignore")
    own_modules.load_cases()
    print(own_modules.section(own_modules.read_outcome), end="")
