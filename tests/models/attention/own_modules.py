"""Attention as people write it themselves, and how lipaudit reads each: own_modules.md.

Run by hand, from the root: python -m tests.models.attention.own_modules
"""

import importlib
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipaudit
from lipaudit.errors import LipauditError
from lipaudit.tables import Row
from lipaudit.theory.bounds.record import load_bounds

TOKENS, WIDTH, HEADS = 5, 8, 2
SAMPLES = 2
SAME = 1e-6
"""Largest relative difference from the truth."""
APART = "queries apart"
OWN, PLAIN = "own", "plain"
"""What the module of a case and the usual one before it are called."""
USUAL = "linear layers, fused attention"

Forward = Callable[[Any, Tensor], Tensor]
HeadMap = Callable[[Tensor], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


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

    def norms(self, x, row):
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

    forward: Forward
    truth: Callable[[Any], Sequence[Layer]]
    outcome: str
    build: Callable[[Any], None]
    derivative: bool


CASES: dict[str, Case] = {}
"""By the mechanism, as the page has it."""
FILES = ("own_weights", "own_maps", "own_uses", "own_loops")
"""The files of cases, as the page has them."""


def own(what, outcome="read", *, heads=None, truth=None, build=lambda _: None, derivative=True):
    """Register a module; its truth is that of the usual attention where nothing else is given."""
    one = attend if heads is None else heads

    def register(forward):
        assert what not in CASES, what
        layers = truth or (lambda a: (Layer(lambda x: one(a, x)),))
        CASES[what] = Case(forward, layers, outcome, build, derivative)
        return forward

    return register


def own_heads(cases, outcome="read", **how):
    """Register modules by what they make of the heads of q (scaled), k and v."""
    for what, function in cases.items():
        own(what, outcome, **how)(lambda a, x, f=function: a.o(join(f(*qkv(a, x)))))


class Own(nn.Module):
    """The module of a case, with four linear maps."""

    def __init__(self, case):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self._forward = case.forward
        case.build(self)

    def forward(self, x):
        """Run the case."""
        return self._forward(self, x)


class Model(nn.Module):
    """The module of a case alone, or behind a usual attention."""

    def __init__(self, case, *, beside):
        super().__init__()
        self.plain = Own(CASES[USUAL]) if beside else None
        self.own = Own(case)
        self.head = nn.Linear(WIDTH, 3)

    def before(self, x):
        """Return what the module of the case takes."""
        return x if self.plain is None else x + self.plain(x)

    def forward(self, x):
        """Return logits."""
        x = self.before(x)
        return self.head((x + self.own(x)).mean(1))


# --- parts of modules


def split(t, heads=HEADS):
    """(..., tokens, width) -> (..., heads, tokens, width / heads)."""
    return t.unflatten(-1, (heads, -1)).transpose(-3, -2)


def join(t):
    """The inverse of `split`."""
    return t.transpose(-3, -2).flatten(-2)


def qkv(a, x):
    """Return the heads of q (scaled), k and v."""
    q, k, v = (split(part(x)) for part in (a.q, a.k, a.v))
    return q / q.shape[-1] ** 0.5, k, v


def sdpa(a, q, k, v, **how):
    """Attend to q, k and v of (batch, tokens, width), and project."""
    return a.o(join(F.scaled_dot_product_attention(split(q), split(k), split(v), **how)))


def add(**parts):
    """Return what adds parts, made by functions, to a module."""

    def build(a):
        for name, make in parts.items():
            setattr(a, name, make())

    return build


def parameter(*shape):
    """Return what makes a parameter."""
    return lambda: nn.Parameter(torch.randn(*shape) / WIDTH**0.5)


def linear(inputs=WIDTH, outputs=WIDTH, **how):
    """Return what makes a linear layer."""
    return lambda: nn.Linear(inputs, outputs, **how)


def later(s):
    """Return which keys come after their query."""
    return torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)


# --- the truth, from the weights


def affine(map_, x):
    """Return x W^T + b in heads."""
    return split(apply(map_, x))


def apply(map_, x):
    """Return x W^T + b."""
    return x @ map_.weight.T + map_.bias


def softmax(logits):
    """Return the rows e^l / sum e^l."""
    e = (logits - logits.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def attend(a, x, *, change=lambda logits: logits, share=softmax, **parts):
    """Return O of every head at one sample, (heads, tokens, width): the usual, or changed.

    `change` is of the logits, `share` makes P of them, and `parts` are q, k or v in heads.
    """
    q, k, v = (parts.get(n) for n in "qkv")
    q, k, v = (affine(m, x) if t is None else t for m, t in ((a.q, q), (a.k, k), (a.v, v)))
    return share(change(q @ k.mT / q.shape[-1] ** 0.5)) @ v


def attend_packed(a, x, qkv):
    """Return O of every head where q, k and v are parts of one tensor, (tokens, 3 width)."""
    return attend(a, x, **dict(zip("qkv", map(split, qkv.chunk(3, -1)), strict=True)))


def _norms(f, x):
    jacobian = torch.autograd.functional.jacobian(f, x, vectorize=True)
    return torch.linalg.matrix_norm(jacobian.view(len(jacobian), -1, x.numel()), 2)


# --- lipaudit


def model(what, beside=False):
    """Return the model of a case, in float64, and samples."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = Model(CASES[what], beside=beside).double().eval()
        with torch.no_grad():
            for p in built.parameters():
                p.add_(0.3 * torch.randn_like(p))
        x = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    return built, x


def read(what, beside):
    """Read the heads of the model of a case; return the outcome, or what is wrong."""
    (built, x), case = model(what, beside), CASES[what]
    try:
        report = lipaudit.measure(built, "bounds", data=x, dtype="float64", tol=1e-10)
    except LipauditError as error:
        if error.exit_code != 4:
            return f"wrong, exit {error.exit_code}: {error}"
        none = not case.truth(built.own) and "no attention" in str(error)
        return "none" if none else "refused"
    section = report.section("bounds")
    bounds = [(row.exact, getattr(row, name)) for row in section.rows for name in load_bounds()]
    if below := [(n, b) for n, b in bounds if b is not None and b < n * (1 - 1e-9)]:
        return f"wrong: norms above bounds: {below}"

    def says(module, code=""):
        """Say whether a warning names a module."""
        notes = [n for n in section.notes if n.level == "warning" and code in n.code]
        return any(module in n.text for n in notes)

    plain = CASES[USUAL].truth(built.plain) if beside else ()
    with torch.no_grad():
        inner = torch.stack([built.before(one[None])[0] for one in x])
    for module, at, truth in ((PLAIN, x, plain), (OWN, inner, case.truth(built.own))):
        outcome, fault = _match(section.rows, module, truth, at)
        if fault and not warned(report):
            return f"wrong: {module}: {fault}"
    if fault:
        outcome = "autograd"
    if not case.derivative and not warned(report):
        return "silent: no warning says that the gradient is no derivative"
    if "left" in outcome and not says(OWN):
        return "silent: a layer is left out without a warning that names its module"
    if "left" not in outcome and says(OWN, "attention-unread"):
        return "wrong: a warning names a module of which all is read"
    outcome += " in parts" * says(f"({OWN}", "in-parts")
    outcome += "+elsewhere" * says(OWN, "input-elsewhere")
    return outcome.replace("left", "named")


def warned(report):
    """Say whether a report says that a gradient is no derivative."""
    return any(n.code == "no-derivative" for s in report.sections for n in s.notes)


def _match(rows, module, truth, x):
    """Give every layer of a module one of the truth; return the outcome and a fault."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        if row.module.split(".")[0] == module and row.exact is not None:
            found.setdefault(row.layer, []).append(row)
    left, outcomes = list(truth), []
    for heads in found.values():
        if (layer := next((one for one in left if _same(heads, one, x)), None)) is None:
            return "", f"heads of norm {[row.exact for row in heads]} are none of the module's"
        left.remove(layer)
        outcomes.append("numerical" if "numerical" in heads[0].kind else "read")
    outcomes += ["left"] * bool(left)
    return "+".join(sorted(set(outcomes), reverse=True)) or "none", ""


def _same(rows, layer, x):
    """Say whether rows are the heads of a layer; of two samples median and largest say all."""
    true = torch.stack([layer.norms(one, rows[0]) for one in x])
    ours = torch.tensor([(row.exact, row.exact_max) for row in rows], dtype=true.dtype)
    if len(ours) != true.shape[1]:
        return False
    wanted = torch.stack([true.mean(0), true.amax(0)], 1)
    return bool(((ours - wanted).abs() <= SAME * wanted).all())


PAGE = Path(__file__).parents[3] / "docs" / "mechanisms.md"
HEADING = "## Attention that people write themselves"
LISTING = Path(__file__).with_suffix(".md")
INTRODUCTION = """# Attention that people write themselves, and how lipaudit reads it

`python -m tests.models.attention.own_modules` writes this list. docs/mechanisms.md says what the
outcomes mean.

Alone in a model, or behind a usual layer too:

"""


def listing(outcome):
    """Return the list of all cases: modules that are read alike together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for what in CASES:
        groups.setdefault((outcome(what, False), outcome(what, True)), []).append(what)
    items = [INTRODUCTION]
    for (alone, beside), names in groups.items():
        label = alone if alone == beside else f"{alone}; behind a usual layer {beside}"
        text = f"* **{label}**: {'; '.join(names)}."
        lines = textwrap.wrap(text, 118, subsequent_indent="  ", break_on_hyphens=False)
        items.append("\n".join(lines) + "\n")
    return "".join(items)


def expected(what, beside):
    """Return the outcome that a case is to have."""
    outcome = CASES[what].outcome
    return outcome.replace("left", "named" if beside or "+" in outcome else "refused")


if __name__ == "__main__":
    from tests.models.attention import own_modules  # one registry, whatever this file is run as

    warnings.filterwarnings("ignore")
    LISTING.write_text(own_modules.listing(own_modules.read), encoding="utf-8")
else:  # in the order of the list, whichever file is imported first
    for file in FILES:
        importlib.import_module(f"tests.models.attention.{file}")
