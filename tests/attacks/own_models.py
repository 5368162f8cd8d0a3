"""Own image and array models whose robust accuracy is known without lipaudit.

`python tests/attacks/own_models.py` prints each figure of lipaudit beside its truth. Truths are
closed forms of linear and monotone models, brute force over grids of small ones, or a refusal.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

import lipaudit
from lipaudit import ModelSpec, schema
from lipaudit.errors import LipauditError
from lipaudit.gate.judging import judge
from lipaudit.gate.rules import parse_rule

RANGE = (0.0, 1.0)


@dataclass(frozen=True)
class Case:
    """A model, what lipaudit says of it, and what is true."""

    name: str
    figure: Callable[[], str]
    truth: Callable[[], str]

    def run(self) -> tuple[str, str]:
        """Return lipaudit's figure and the truth; an error of either is a figure, too."""
        try:
            figure = self.figure()
        except LipauditError as error:
            figure = f"refused ({int(error.exit_code)}): {error.message}"
        except Exception as error:  # a table of faults must show them all
            figure = f"crash: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return figure, self.truth()


CASES: list[Case] = []


def case(name: str) -> Callable[[Callable[[], tuple[Any, Any]]], None]:
    """Register a function that returns how to get lipaudit's figure, and how to get the truth."""

    def add(build: Callable[[], tuple[Any, Any]]) -> None:
        def part(i: int) -> Callable[[], str]:
            def get() -> str:
                value = build()[i]
                return value() if callable(value) else value

            return get

        CASES.append(Case(name, part(0), part(1)))

    return add


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def percent(robust: Tensor) -> str:
    return f"{100 * robust.double().mean():.1f} %"


class Lin(nn.Module):
    """W x + b of the flattened sample, times a scale, plus an offset."""

    def __init__(self, w: Tensor, b: Tensor, scale: float = 1.0, offset: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(w.shape[1], len(w))
        self.linear.weight.data, self.linear.bias.data = w.clone(), b.clone()
        self.scale, self.offset = scale, offset

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x.flatten(1)) + self.offset


def linear(
    classes: int = 4, shape: tuple[int, ...] = (1, 4, 4), n: int = 64, box: Any = RANGE
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw weights, bias, samples over the whole box and labels, one in sixteen wrong."""
    g, size = draw(classes + len(shape)), torch.Size(shape).numel()
    w = torch.randn(classes, size, generator=g)
    low, width = box[0], box[1] - box[0]
    x = low + width * torch.rand(n, *shape, generator=g)
    b = -(low + width / 2) * w.sum(1)
    y = (x.flatten(1) @ w.T + b).argmax(1)
    y[::16] = (y[::16] + 1) % classes
    return w, b, x, y


def reach(v: Tensor, x: Tensor, eps: float, norm: str, box: Any) -> Tensor:
    """Return by how much <v, x> can fall within the ball and the box, exactly, in float64."""
    v, x = v.double(), x.double()
    low, high = (-torch.inf, torch.inf) if box is None else box
    room = torch.where(v > 0, x - low, high - x).clamp_min(0)
    if norm == "linf":
        return (v.abs() * room.clamp_max(eps)).sum(-1)
    short, long = torch.zeros(len(x), 1).double(), torch.full((len(x), 1), 1e12).double()
    for _ in range(200):  # the step is min(t |v|, room), with t such that its length is eps
        t = (short + long) / 2
        far = torch.minimum(t * v.abs(), room).norm(dim=-1, keepdim=True) > eps
        short, long = torch.where(far, short, t), torch.where(far, t, long)
    return (v.abs() * torch.minimum(short * v.abs(), room)).sum(-1)


def linear_truth(
    w: Tensor, b: Tensor, x: Tensor, y: Tensor, eps: float, norm: str = "linf", box: Any = RANGE
) -> Tensor:
    """Tell exactly which samples no point of ball and box misclassifies."""
    flat, w, b = x.double().flatten(1), w.double(), b.double()
    logits = flat @ w.T + b
    stands = torch.ones(len(x), dtype=torch.bool)
    for j in range(len(w)):
        v = w[y] - w[j]
        gap = logits.gather(1, y[:, None])[:, 0] - logits[:, j]
        stands &= (j == y) | (gap > reach(v, flat, eps, norm, box))
    return stands


def measured(model: Any, x: Any, y: Any, measure: str = "attack", **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lipaudit.measure(model, measure, data=(x, y), samples=len(x), **options)


def attacked(model: Any, x: Any, y: Any, **options: Any) -> Callable[[], str]:
    """Return what gives the robust accuracies under all attacks, one per radius."""
    options.setdefault("attack", "fgsm,pgd,quick")

    def get() -> str:
        rows = measured(model, x, y, **options).section("attack").rows
        names = {row.attack for row in rows}
        last = [row for row in rows if row.attack == "worst" or len(names) == 1]
        return ", ".join(f"{100 * row.robust:.1f} %" for row in last)

    return get


def clean(model: Any, x: Any, y: Any, **options: Any) -> Callable[[], str]:
    def get() -> str:
        row = (
            measured(model, x, y, attack="fgsm", eps="0.001", **options).section("attack").rows[0]
        )
        return f"{100 * row.clean:.1f} %"

    return get


def noted(model: Any, x: Any, y: Any, code: str, **options: Any) -> Callable[[], str]:
    options = {"attack": "fgsm", "eps": "0.01"} | options

    def get() -> str:
        notes = measured(model, x, y, **options).section("attack").notes
        return code if code in {note.code for note in notes} else "not noted"

    return get


# Linear models: the truth is a closed form.


def _linear(eps: float, norm: str, box: Any = RANGE, scale: float = 1.0, offset: float = 0.0):
    w, b, x, y = linear(box=box)
    model = Lin(w, b, scale, offset)
    spec = ModelSpec(model, (1, 4, 4), box=box)
    figure = attacked(spec, x, y, eps=str(eps), norm=norm)
    return figure, percent(linear_truth(w, b, x, y, eps, norm, box))


case("linear, linf 0.05")(lambda: _linear(0.05, "linf"))
case("linear, l2 0.2")(lambda: _linear(0.2, "l2"))
case("linear, logits of size 1e-12, linf")(lambda: _linear(0.05, "linf", scale=1e-12))
case("linear, logits of size 1e12, linf")(lambda: _linear(0.05, "linf", scale=1e12))
case("linear, logits + 1000, l2")(lambda: _linear(0.2, "l2", offset=1000.0))
case("linear, box 0..255, linf 12")(lambda: _linear(12.0, "linf", (0.0, 255.0)))
case("linear, box -1..1, l2 0.4")(lambda: _linear(0.4, "l2", (-1.0, 1.0)))
case("linear, l2 1e30: larger than the box")(
    lambda: (_linear(1e30, "l2")[0], "refused (2)"),
)


@case("linear, sequences without a box, l2 1e30")
def _() -> Any:
    w, b, x, y = linear(shape=(4, 4))
    x = 4 * x - 2
    y = Lin(w, b)(x).argmax(1)
    figure = attacked(Lin(w, b), x, y, eps="1e30", norm="l2", input_shape=(4, 4))
    return figure, percent(linear_truth(w, b, x, y, 1e30, "l2", None))


# Gradients that are not finite.


class Rooted(nn.Module):
    """A linear model that adds a branch of zeros, whose gradient is NaN where a pixel is 0."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + torch.where(x > 2, x.sqrt(), 0.0).sum((1, 2, 3))[:, None]


def _rooted(norm: str, eps: float, attack: str, classes: int = 4) -> Any:
    """Four pixels are 0 in every sample, and nothing but the branch of zeros looks at them."""
    w, b, x, _ = linear(classes)
    w[:, :4] = 0
    x.flatten(1)[:, :4] = 0
    y = Lin(w, b)(x).argmax(1)
    figure = attacked(Rooted(Lin(w, b)), x, y, eps=str(eps), norm=norm, attack=attack)
    return figure, percent(linear_truth(w, b, x, y, eps, norm))


case("gradient NaN at pixels of 0, PGD, linf")(lambda: _rooted("linf", 0.05, "pgd", 2))
case("gradient NaN at pixels of 0, AutoAttack, linf")(lambda: _rooted("linf", 0.05, "quick"))
case("gradient NaN at pixels of 0, APGD, l2")(lambda: _rooted("l2", 0.2, "custom:apgd-ce,apgd-t"))


def _counting(norm: str, eps: float, attack: str, classes: int = 4) -> Any:
    """Four pixels are 0 in every sample, and the logits depend on them."""
    w, b, x, _ = linear(classes)
    x.flatten(1)[:, :4] = 0
    y = Lin(w, b)(x).argmax(1)
    figure = attacked(Rooted(Lin(w, b)), x, y, eps=str(eps), norm=norm, attack=attack)
    return figure, percent(linear_truth(w, b, x, y, eps, norm))


case("gradient NaN at a pixel that counts, PGD, linf")(lambda: _counting("linf", 0.1, "pgd", 2))
case("gradient NaN at a pixel that counts, FGSM, linf")(lambda: _counting("linf", 0.1, "fgsm", 2))
case("gradient NaN at a pixel that counts, AutoAttack")(lambda: _counting("linf", 0.05, "quick"))
case("gradient NaN at a pixel that counts, APGD, l2")(
    lambda: _counting("l2", 0.2, "custom:apgd-ce,apgd-t")
)
case("gradient NaN at a pixel that counts, FAB, l2")(lambda: _counting("l2", 0.2, "custom:fab-t"))


@case("gradient NaN: a warning")
def _() -> Any:
    w, b, x, y = linear()
    x = (x * 1.5 - 0.4).clamp(0, 1)
    return noted(Rooted(Lin(w, b)), x, y, "gradients-not-finite"), "gradients-not-finite"


class Roots(nn.Module):
    """Two classes by sum_i a_i sqrt(x_i): infinitely steep at 0, monotone in each pixel."""

    def __init__(self, a: Tensor, b: float) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a), b

    def forward(self, x: Tensor) -> Tensor:
        z = x.flatten(1).sqrt() @ self.a - self.b
        return torch.stack([z, -z], 1)


@case("slope infinite at pixels of 0, PGD, linf")
def _() -> Any:
    g = draw(5)
    a, x = torch.randn(16, generator=g), torch.rand(64, 1, 4, 4, generator=g)
    x = (x - 0.5).clamp_min(0)
    model = Roots(a, float((x.flatten(1).sqrt() @ a).median()))
    y = model(x).argmax(1)
    sign = torch.where(y == 0, 1.0, -1.0)[:, None].double()
    low, high = (x.flatten(1) - 0.03).clamp_min(0), (x.flatten(1) + 0.03).clamp_max(1)
    v = sign * a.double()
    worst = (torch.minimum(v * low.double().sqrt(), v * high.double().sqrt())).sum(1)
    truth = percent(worst > sign[:, 0] * model.b)
    return attacked(model, x, y, eps="0.03", attack="pgd", restarts=3), truth


# Models that are not what attacks assume.


class Noisy(nn.Module):
    def __init__(
        self, inner: nn.Module, noise: float, offset: float, masked: bool = False
    ) -> None:
        super().__init__()
        self.inner, self.noise, self.offset, self.masked = inner, noise, offset, masked

    def forward(self, x: Tensor) -> Tensor:
        logits = self.inner(x)
        logits = logits + self.noise * torch.randn(logits.shape)
        if self.masked:
            logits = torch.cat([logits, torch.full_like(logits[:, :1], -1e6)], 1)
        return logits + self.offset


def _noise(offset: float, masked: bool = False) -> Any:
    w, b, x, y = linear()
    return noted(Noisy(Lin(w, b), 0.05, offset, masked), x, y, "randomised"), "randomised"


case("noise of 0.05 in the logits")(lambda: _noise(0.0))
case("noise of 0.05, logits + 10,000")(lambda: _noise(1e4))
case("noise of 0.05 beside a class at -1e6")(lambda: _noise(0.0, masked=True))


class OfBatch(nn.Module):
    """Takes the mean of its batch off the samples."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x - x.mean(0))


class Normed(nn.Module):
    """Has a BatchNorm that forward puts into training mode."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.BatchNorm2d(1)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.train()
        out = self.inner(self.norm(x))
        self.norm.eval()
        return out


def _batch(kind: type[nn.Module], measure: str) -> Any:
    w, b, x, y = linear()
    options = {"attack": {"eps": "0.05", "attack": "fgsm"}, "certify": {"eps": "0.01"}}
    model = kind(Lin(w, b))

    def figure() -> str:
        measured(model, x, y, measure, **options.get(measure, {}))
        return "measured"

    return figure, "refused (4)"


for _measure in ("attack", "jacobian", "certify"):
    case(f"x - x.mean(0), {_measure}")(lambda m=_measure: _batch(OfBatch, m))
    case(f"BatchNorm of the batch, {_measure}")(lambda m=_measure: _batch(Normed, m))


class Shell(nn.Module):
    """Right but in a thin shell around (0.5, 0.5), where the other class is far ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        far = (x.flatten(1) - 0.5).abs().amax(1)
        z = 1 - far - 1000 * (0.02 - (far - 0.09).abs()).clamp_min(0)
        return torch.stack([z, torch.zeros_like(z)], 1)


@case("wrong in a thin shell at 0.09, radii 0.1 and 0.2")
def _() -> Any:
    x = 0.5 + 0.01 * (torch.rand(32, 1, 1, 2, generator=draw(3)) - 0.5)
    y = torch.zeros(32, dtype=torch.int64)
    grid = torch.linspace(0, 1, 401)
    points = torch.cartesian_prod(grid, grid)
    wrong = points[Shell()(points[:, None, None]).argmax(1) == 1]
    away = (wrong[None] - x.flatten(1)[:, None]).abs().amax(2).amin(1)
    truth = ", ".join(percent(away > eps) for eps in (0.1, 0.2))
    return attacked(Shell(), x, y, eps="0.1,0.2", attack="fgsm"), truth


@case("wrong in a thin shell, every attack and the worst")
def _() -> Any:
    x = 0.5 + 0.01 * (torch.rand(32, 1, 1, 2, generator=draw(3)) - 0.5)
    y = torch.zeros(32, dtype=torch.int64)

    def figure() -> str:
        section = measured(Shell(), x, y, eps="0.2,0.1", attack="fgsm,pgd").section("attack")
        by = {name: dict[str, Any]() for name in ("fgsm", "pgd", "worst")}
        for row in section.rows:
            by[row.attack][row.eps_text] = section.samples[row.key.column("robust")]
        back = sum(
            large > small
            for flags in by.values()
            for small, large in zip(flags["0.1"], flags["0.2"], strict=True)
        )
        return f"{back} come back"

    return figure, "0 come back"


# Large coordinates.


def _far(attack: str, dtype: str = "float64", code: str = "") -> Any:
    """Sequences with one coordinate at 1e5 that the model does not look at."""
    w, b, x, _ = linear(shape=(4, 4))
    x = x - 0.5
    w[:, 0] = 0
    x[:, 0, 0] = 1e5
    y = Lin(w, 0 * b)(x).argmax(1)
    model = Lin(w, 0 * b)
    options = {"eps": "0.02", "norm": "linf", "attack": attack, "dtype": dtype}
    options["input_shape"] = (4, 4)
    if code:
        return noted(model, x, y, code, **options), code
    return attacked(model, x, y, **options), percent(
        linear_truth(w, 0 * b, x, y, 0.02, "linf", None)
    )


case("a coordinate of 1e5, APGD in float64")(lambda: _far("custom:apgd-ce,apgd-t"))
case("a coordinate of 1e5, FAB in float64")(lambda: _far("custom:fab-t"))
case("a coordinate of 1e5 in float32: a warning")(
    lambda: _far("fgsm", "float32", "ball-below-resolution")
)
case("a coordinate of 1e5 in float64: no warning")(
    lambda: (_far("fgsm", "float64", "ball-below-resolution")[0], "not noted")
)


@case("a coordinate of 1e5, Square in float64: two classes by one pixel")
def _() -> Any:
    return _pixel(None)


@case("a box of 0..1e5, Square in float64: two classes by one pixel")
def _() -> Any:
    return _pixel((0.0, 1e5))


class Pixel(nn.Module):
    """Two classes by whether the sum of a picture but for its first pixel is above a level."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.tensor(level))

    def forward(self, x: Tensor) -> Tensor:
        z = x.flatten(1)[:, 1:].sum(1) - self.level
        return torch.stack([z, -z], 1)


def _pixel(box: Any) -> Any:
    shape = (4, 4) if box is None else (1, 4, 4)
    x = torch.rand(64, *shape, generator=draw(7))
    level, eps = float(x.flatten(1)[:, 1:].sum(1).median()), 0.02
    x.flatten(1)[:, 0] = 1e5
    model = Pixel(level)
    y = model(x).argmax(1)
    flat = x.double().flatten(1)
    gap = (flat[:, 1:].sum(1) - level).abs()
    v = torch.ones(64, 15) * torch.where(y == 0, 1.0, -1.0)[:, None]
    truth = percent(gap > reach(v, flat[:, 1:], eps, "linf", box))
    spec = ModelSpec(model, shape, kind="tokens" if box is None else "image", box=box)
    options = {"norm": "linf", "attack": "custom:square", "queries": 500, "dtype": "float64"}
    return attacked(spec, x, y, eps=str(eps), **options), truth


# Array shapes and boxes.


class Conv(nn.Module):
    """A linear model that takes images of so many channels, and nothing else."""

    def __init__(self, w: Tensor, b: Tensor, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], len(w), shape[1:])
        self.conv.weight.data, self.conv.bias.data = w.reshape(-1, *shape).clone(), b.clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(1)


@case("grey floats (N, 4, 4), a convolution, linf 0.1")
def _() -> Any:
    w, b, x, y = linear()
    figure = attacked(Conv(w, b, (1, 4, 4)), x[:, 0], y, eps="0.1")
    return figure, percent(linear_truth(w, b, x, y, 0.1))


@case("floats (N, 4, 4) in [0, 1], a model that takes any shape")
def _() -> Any:
    w, b, x, y = linear()
    return attacked(Lin(w, b), x[:, 0], y, eps="0.1"), "refused (2)"


@case("the same with input_shape=(1, 4, 4)")
def _() -> Any:
    w, b, x, y = linear()
    figure = attacked(Lin(w, b), x[:, 0], y, eps="0.1", input_shape=(1, 4, 4))
    return figure, percent(linear_truth(w, b, x, y, 0.1))


@case("floats (N, 4, 4) beyond [0, 1], a model that takes any shape: sequences")
def _() -> Any:
    w, b, x, y = linear(shape=(4, 4), box=(-1.0, 1.0))
    figure = attacked(Lin(w, b), x, y, eps="0.1", norm="linf")
    return figure, percent(linear_truth(w, b, x, y, 0.1, "linf", None))


@case("floats (N, 4, 4) beyond [0, 1], a convolution: pixels outside the box")
def _() -> Any:
    w, b, x, y = linear(box=(-1.0, 1.0))
    return attacked(Conv(w, b, (1, 4, 4)), x[:, 0], y, eps="0.1"), "refused (4): x holds values"


@case("sequences (N, 6, 4) for attention, linf 0.1")
def _() -> Any:
    w, b, x, y = linear(shape=(6, 4))

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Lin(w, b)

        def forward(self, z: Tensor) -> Tensor:
            batch, steps, width = z.shape
            return self.inner(z.reshape(batch, steps * width))

    figure = attacked(Steps(), x, y, eps="0.1", norm="linf")
    return figure, percent(linear_truth(w, b, x, y, 0.1, "linf", None))


def _channels(shape: tuple[int, int, int], last: bool) -> Any:
    w, b, x, y = linear(shape=shape)
    given = x.movedim(1, -1) if last else x
    return clean(Conv(w, b, shape), given, y), percent(Lin(w, b)(x).argmax(1) == y)


case("(N, 8, 5, 4), a convolution of 8 channels, clean")(lambda: _channels((8, 5, 4), False))
case("(N, 2, 5, 3), a convolution of 2 channels, clean")(lambda: _channels((2, 5, 3), False))
case("(N, 6, 5, 3), a convolution of 3 channels, clean")(lambda: _channels((3, 6, 5), True))


@case("(N, 8, 5, 4), a model that takes any shape")
def _() -> Any:
    w, b, x, y = linear(shape=(8, 5, 4))
    return clean(Lin(w, b), x, y), "refused (2)"


@case("(N, 8, 5, 4): what was read as what")
def _() -> Any:
    w, b, x, y = linear(shape=(8, 5, 4))
    return noted(Conv(w, b, (8, 5, 4)), x, y, "read-as"), "read-as"


@case("the same with input_shape=(8, 5, 4), clean")
def _() -> Any:
    w, b, x, y = linear(shape=(8, 5, 4))
    return clean(Lin(w, b), x, y, input_shape=(8, 5, 4)), percent(Lin(w, b)(x).argmax(1) == y)


def _bytes(box: tuple[float, float], eps: float) -> Any:
    w, b, _, _ = linear(box=box)
    pixels = torch.randint(0, 256, (64, 1, 4, 4), generator=draw(9), dtype=torch.uint8)
    x = box[0] + (box[1] - box[0]) * pixels.float() / 255
    y = Lin(w, b)(x).argmax(1)
    spec = ModelSpec(Lin(w, b), (1, 4, 4), box=box)
    return attacked(spec, pixels, y, eps=str(eps)), percent(linear_truth(w, b, x, y, eps, box=box))


case("uint8, box -1..1, linf 0.1")(lambda: _bytes((-1.0, 1.0), 0.1))
case("uint8, box 0..255, linf 8")(lambda: _bytes((0.0, 255.0), 8.0))


def _folder(box: tuple[float, float], eps: float) -> Any:
    """Pictures in a folder per class, for a model that normalises nothing itself."""
    w, b, *_ = linear(box=box)
    pixels = torch.randint(0, 256, (64, 4, 4), generator=draw(10), dtype=torch.uint8)
    x = (box[0] + (box[1] - box[0]) * pixels.double() / 255)[:, None].float()
    y = Lin(w, b)(x).argmax(1)

    def get() -> str:
        with tempfile.TemporaryDirectory() as root:
            for i, (picture, label) in enumerate(zip(pixels, y.tolist(), strict=True)):
                (Path(root) / str(label)).mkdir(exist_ok=True)
                Image.fromarray(picture.numpy()).save(Path(root) / str(label) / f"{i}.png")
            spec = ModelSpec(Lin(w, b), (1, 4, 4), box=box)
            report = lipaudit.measure(spec, "attack", data=root, samples=64, eps=str(eps))
        row = report.section("attack").rows[0]
        return f"{100 * row.clean:.1f} %, {100 * row.robust:.1f} %"

    return get, f"100.0 %, {percent(linear_truth(w, b, x, y, eps, box=box))}"


case("folder of images, box -1..1, linf 0.1")(lambda: _folder((-1.0, 1.0), 0.1))
case("folder of images, box 0..255, linf 8")(lambda: _folder((0.0, 255.0), 8.0))
case("folder of images, box 0..1, linf 0.05")(lambda: _folder((0.0, 1.0), 0.05))


# What a classifier may return.


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.inner(x))


def _single(x: Tensor) -> Tensor:
    if len(x) > 1:
        raise RuntimeError("only one sample at a time")
    return x


def _wrapped(change: Callable[[Tensor], Tensor], truth: str, **options: Any) -> Any:
    w, b, x, y = linear()
    model = Wrapped(Lin(w, b), change)
    exact = percent(linear_truth(w, b, x, y, 0.1))
    options = {"attack": "fgsm,pgd,quick", "eps": "0.1"} | options
    return attacked(model, x, y, **options), truth or exact


case("fails on two samples at a time")(lambda: _wrapped(_single, "refused (4)"))
case("the same with batch_size=1")(lambda: _wrapped(_single, "", batch_size=1, attack="pgd"))
case("integer logits")(lambda: _wrapped(lambda z: (9 * z).long(), "refused (4)"))
case("drops samples")(lambda: _wrapped(lambda z: z[: max(len(z) - 1, 1)], "refused (4)"))
case("a class masked by minus infinity")(
    lambda: _wrapped(lambda z: torch.cat([z, torch.full_like(z[:, :2], -torch.inf)], 1), "")
)
case("logits that are NaN")(lambda: _wrapped(lambda z: z + torch.nan, "refused (4)"))


def _binary(change: Callable[[Tensor], Tensor], labels: Any) -> Any:
    w, b, x, _ = linear(classes=2)
    v, c = w[1] - w[0], b[1] - b[0]
    y = (x.flatten(1) @ v + c > 0).long()
    model = Wrapped(Lin(v[None], c[None]), change)
    spec = ModelSpec(model, (1, 4, 4), labels=labels)
    return attacked(spec, x, y, eps="0.1"), percent(linear_truth(w, b, x, y, 0.1))


case("one logit (B, 1), two labels")(lambda: _binary(lambda z: z, ("no", "yes")))
case("one logit (B,), two labels")(lambda: _binary(lambda z: z[:, 0], ("no", "yes")))
case("one logit, labels unknown")(lambda: (_binary(lambda z: z, None)[0], "refused (4)"))


case("one logit z, wrapped as the refusal says")(
    lambda: _binary(lambda z: torch.cat([0 * z, z], 1), None)
)


@case("one logit, labels unknown: how to wrap it")
def _() -> Any:
    def advice() -> str:
        try:
            return str(_binary(lambda z: z, None)[0]())
        except LipauditError as error:
            return error.advice[error.advice.index("torch") :]

    return advice, "torch.cat([0 * z, z], 1)"


@case("clips its pixels to [0.2, 0.8], linf 0.1")
def _() -> Any:
    w, b, _, _ = linear()

    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Lin(w, b)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.clamp(0.2, 0.8))

    x = torch.rand(64, 1, 4, 4, generator=draw(11)) * 0.6 + 0.2  # inside: gradients are there
    y = Lin(w, b)(x).argmax(1)
    return attacked(Clip(), x, y, eps="0.1"), percent(
        linear_truth(w, b, x, y, 0.1, box=(0.2, 0.8))
    )


@case("rounds its pixels: a warning")
def _() -> Any:
    w, b, x, y = linear()

    class Rounded(Lin):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((8 * x).round() / 8)

    return noted(Rounded(w, b), x, y, "zero-gradients"), "zero-gradients"


# Samples that repeat, and the gate.


def _reports(change: Callable[[Tensor], Tensor], copies: int, **options: Any) -> list[Any]:
    """Measure a linear model and one that is worse on the same samples."""
    w, b, x, y = linear(n=32)
    x, y = x.repeat(copies, 1, 1, 1), y.repeat(copies)
    options = {"eps": "0.05", "attack": "pgd"} | options
    return [measured(Lin(v, b), x, y, **options) for v in (change(w), w)]


def _worse(w: Tensor) -> Tensor:
    return w + 0.25 * torch.randn(w.shape, generator=draw(0))


def _status(now: Any, before: Any) -> str:
    return judge(now, before, (parse_rule("attack.robust@linf >= -2pp"),)).verdicts[0].status


@case("32 samples four times: how many count")
def _() -> Any:
    return lambda: str(_reports(_worse, 4)[0].section("attack").rows[0].samples), "32"


def _fallen(copies: int) -> tuple[Any, Any]:
    """Return a report whose baseline is more robust: by 5 of 32 samples."""
    before, now = _reports(lambda w: w + 0.12 * torch.randn(w.shape, generator=draw(1)), copies)
    return now, before


def _as_distinct(report: Any) -> Any:
    section = report.section("attack")
    ids = tuple(f"{i:016x}" for i in range(len(section.samples["ids"])))
    section = section.model_copy(update={"samples": {**section.samples, "ids": ids}})
    return report.model_copy(update={"sections": (section,)})


case("32 samples: the gate")(lambda: (lambda: _status(*_fallen(1)), "inconclusive"))
case("32 samples four times: the gate")(lambda: (lambda: _status(*_fallen(4)), "inconclusive"))
case("128 distinct samples with the same flags: the gate")(
    lambda: (lambda: _status(*map(_as_distinct, _fallen(4))), "regressed")
)


@case("8 samples four times, certified: how many count")
def _() -> Any:
    w, b, x, y = linear(n=8)
    repeated = x.repeat(4, 1, 1, 1), y.repeat(4)

    def figure() -> str:
        report = measured(Lin(w, b), *repeated, "certify", eps="0.01", attack="fgsm")
        return str(report.section("certify").rows[0].samples)

    return figure, "8"


@case("eps 1/20 against 0.05: the gate")
def _() -> Any:
    now, before = _reports(_worse, 1, eps="1/20")[0], _reports(_worse, 1)[1]
    return lambda: _status(now, before), lambda: _status(*_reports(_worse, 1))


@case("a column of 0 and 1 that holds a 2")
def _() -> Any:
    before = _reports(_worse, 1)[1]
    section = before.section("attack")
    name = next(n for n in section.samples if n.startswith("robust@worst"))
    flags = list(section.samples[name])
    text = schema.dumps(before)
    assert str(flags)[1:-1] in text

    def figure() -> str:
        broken = text.replace(f'"{name}": {flags}', f'"{name}": {[2, *flags[1:]]}')
        assert broken != text
        return _status(schema.loads(broken), before)

    return figure, "refused (4)"


def _named(new: tuple[str, str] | None, old: tuple[str, str] | None, truth: str) -> Any:
    w, b, x, y = linear(classes=2, n=32)

    def report(labels: tuple[str, str] | None) -> Any:
        spec = ModelSpec(Lin(w, b), (1, 4, 4), classifier=True, labels=labels)
        return measured(spec, x, y, eps="0.05", attack="pgd")

    def figure() -> str:
        notes = judge(report(new), report(old)).notes
        return next((n for n in notes if "cat" in n), "not noted")

    return figure, truth


case("classes that changed places: a note of the gate")(
    lambda: _named(("dog", "cat"), ("cat", "dog"), "class 0")
)
case("classes named in the new report alone: a note")(
    lambda: _named(("dog", "cat"), None, "only the new report names its classes")
)
case("classes named in the baseline alone: a note")(
    lambda: _named(None, ("dog", "cat"), "only the baseline names its classes")
)
case("classes of the same names: no note")(
    lambda: _named(("dog", "cat"), ("dog", "cat"), "not noted")
)


def main() -> int:
    """Print the table; return how many figures are not their truth."""
    wrong = 0
    width = max(len(each.name) for each in CASES)
    for each in CASES:
        figure, truth = each.run()
        good = figure.startswith(truth)
        wrong += not good
        print(f"{' ' if good else 'X'} {each.name:{width}}  {figure[:90]}  | {truth}", flush=True)
    print(f"{len(CASES)} cases, {wrong} are not their truth")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main()))
