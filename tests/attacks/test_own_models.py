"""Own image and array models whose robust accuracy is known without lipaudit.

Truths are closed forms of linear and monotone models, brute force over grids of small ones, or a
refusal.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import lipaudit
from lipaudit import ModelSpec, schema
from lipaudit.errors import InputError, UsageError
from lipaudit.gate.judging import judge

RANGE = (0.0, 1.0)
APGD = "custom:apgd-ce,apgd-t"


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Lin(nn.Module):
    """W x + b of the flattened sample."""

    def __init__(self, w: Tensor, b: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(w.shape[1], len(w))
        self.linear.weight.data, self.linear.bias.data = w.clone(), b.clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1))


class Changed(nn.Module):
    """A model whose samples or logits are changed, before and behind it."""

    def __init__(self, inner: nn.Module, before=lambda x: x, behind=lambda z: z) -> None:
        super().__init__()
        self.inner, self.before, self.behind = inner, before, behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.inner(self.before(x)))


class Score(nn.Module):
    """Two classes by the sign of a score."""

    def __init__(self, score) -> None:
        super().__init__()
        self.score, self.unused = score, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        z = self.score(x)
        return torch.stack([z, -z], 1)


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


def robust_truth(w, b, x, y, eps: float, norm: str = "linf", box: Any = RANGE) -> float:
    """Return the exact share of samples that no point of ball and box misclassifies."""
    flat, w, b = x.double().flatten(1), w.double(), b.double()
    logits = flat @ w.T + b
    stands = torch.ones(len(x), dtype=torch.bool)
    for j in range(len(w)):
        v = w[y] - w[j]
        gap = logits.gather(1, y[:, None])[:, 0] - logits[:, j]
        stands &= (j == y) | (gap > reach(v, flat, eps, norm, box))
    return float(stands.double().mean())


def measure(model: Any, x: Any, y: Any, measure: str = "attack", **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lipaudit.measure(model, measure, data=(x, y), samples=len(x), **options)


def attack(model: Any, x: Any, y: Any, **options: Any) -> list[float]:
    """Return the robust accuracies under all attacks, one per radius."""
    options = {"attack": "fgsm,pgd,quick"} | options
    rows = measure(model, x, y, **options).section("attack").rows
    alone = len({row.attack for row in rows}) == 1
    return [row.robust for row in rows if alone or row.attack == "worst"]


def codes(model: Any, x: Any, y: Any, **options: Any) -> set[str]:
    options = {"attack": "fgsm", "eps": "0.01"} | options
    return {note.code for note in measure(model, x, y, **options).section("attack").notes}


@pytest.mark.parametrize(
    ("eps", "norm", "box", "scale", "offset"),
    [
        (0.05, "linf", RANGE, 1, 0),
        (0.2, "l2", RANGE, 1, 0),
        (0.05, "linf", RANGE, 1e-12, 0),
        (0.05, "linf", RANGE, 1e12, 0),
        (0.2, "l2", RANGE, 1, 1000),
        (12.0, "linf", (0.0, 255.0), 1, 0),
        (0.4, "l2", (-1.0, 1.0), 1, 0),
    ],
)
def test_linear_models_of_any_scale_and_box(eps, norm, box, scale, offset):
    w, b, x, y = linear(box=box)
    model = Changed(Lin(w, b), behind=lambda z: scale * z + offset)
    spec = ModelSpec(model, (1, 4, 4), box=box)
    truth = robust_truth(w, b, x, y, eps, norm, box)
    assert attack(spec, x, y, eps=str(eps), norm=norm) == [truth]


def test_a_radius_larger_than_the_box_is_refused_and_without_a_box_attacked():
    w, b, x, y = linear()
    with pytest.raises(UsageError, match="larger than the range of the data"):
        attack(ModelSpec(Lin(w, b), (1, 4, 4)), x, y, eps="1e30", norm="l2")
    w, b, x, y = linear(shape=(4, 4))
    x = 4 * x - 2
    y = Lin(w, b)(x).argmax(1)
    found = attack(Lin(w, b), x, y, eps="1e30", norm="l2", input_shape=(4, 4))
    assert found == [robust_truth(w, b, x, y, 1e30, "l2", None)]


# Gradients that are not finite.


class Rooted(nn.Module):
    """Adds a branch of zeros to a model, whose gradient is NaN where a pixel is 0."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + torch.where(x > 2, x.sqrt(), 0.0).sum((1, 2, 3))[:, None]


@pytest.mark.parametrize(
    ("counts", "eps", "norm", "name", "classes"),
    [
        (False, 0.05, "linf", "pgd", 2),
        (False, 0.05, "linf", "quick", 4),
        (False, 0.2, "l2", APGD, 4),
        (True, 0.1, "linf", "pgd", 2),
        (True, 0.1, "linf", "fgsm", 2),
        (True, 0.05, "linf", "quick", 4),
        (True, 0.2, "l2", APGD, 4),
        (True, 0.2, "l2", "custom:fab-t", 4),
    ],
)
def test_gradients_that_are_nan_at_pixels_of_0(counts, eps, norm, name, classes):
    """Four pixels are 0 in every sample; the logits depend on them, or the zeros alone do."""
    w, b, x, _ = linear(classes, n=24)
    x.flatten(1)[:, :4] = 0
    if not counts:
        w[:, :4] = 0
    y = Lin(w, b)(x).argmax(1)
    found = attack(Rooted(Lin(w, b)), x, y, eps=str(eps), norm=norm, attack=name)
    assert found == [robust_truth(w, b, x, y, eps, norm)]


def test_an_infinite_slope_at_pixels_of_0():
    """Two classes by sum_i a_i sqrt(x_i), monotone in each pixel: its worst point is known."""
    g = draw(5)
    a, x = torch.randn(16, generator=g), torch.rand(64, 1, 4, 4, generator=g)
    x = (x - 0.5).clamp_min(0)
    b = float((x.flatten(1).sqrt() @ a).median())
    model = Score(lambda x: x.flatten(1).sqrt() @ a - b)
    y = model(x).argmax(1)
    sign = torch.where(y == 0, 1.0, -1.0)[:, None].double()
    low, high = (x.flatten(1) - 0.03).clamp_min(0), (x.flatten(1) + 0.03).clamp_max(1)
    v = sign * a.double()
    worst = (torch.minimum(v * low.double().sqrt(), v * high.double().sqrt())).sum(1)
    truth = float((worst > sign[:, 0] * b).double().mean())
    assert attack(model, x, y, eps="0.03", attack="pgd", restarts=3) == [truth]


# Models that are not what attacks assume.


def noise(offset: float, masked: bool = False):
    def add(z: Tensor) -> Tensor:
        z = z + 0.05 * torch.randn(z.shape)
        hidden = [torch.full_like(z[:, :1], -1e6)] if masked else []
        return torch.cat([z, *hidden], 1) + offset

    return add


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda m: Changed(m, behind=noise(0.0)), "randomised"),
        (lambda m: Changed(m, behind=noise(1e4)), "randomised"),
        (lambda m: Changed(m, behind=noise(0.0, masked=True)), "randomised"),
        (lambda m: Changed(m, lambda x: (8 * x).round() / 8), "zero-gradients"),
        (lambda m: Changed(m, behind=lambda z: 1e6 * z), "zero-gradients"),
        (lambda m: Changed(m, behind=lambda z: (z / 10).softmax(1)), "probabilities"),
        (Rooted, "gradients-not-finite"),
    ],
)
def test_a_warning_names_what_makes_attacks_weak(change, code):
    w, b, x, y = linear()
    x = (x * 1.5 - 0.4).clamp(0, 1)
    assert code in codes(change(Lin(w, b)), x, y)
    assert code not in codes(Lin(w, b), x, y)


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


@pytest.mark.parametrize("wrap", [lambda m: Changed(m, lambda x: x - x.mean(0)), Normed])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("attack", {"eps": "0.05", "attack": "fgsm"}),
        ("jacobian", {}),
        ("certify", {"eps": "0.01"}),
    ],
)
def test_samples_that_depend_on_their_batch_are_refused(wrap, name, options):
    w, b, x, y = linear()
    with pytest.raises(InputError):
        measure(wrap(Lin(w, b)), x, y, name, **options)


def test_what_is_broken_in_a_thin_shell_is_broken_at_every_larger_radius():
    """Right but in a thin shell around (0.5, 0.5), where the other class is far ahead."""

    def score(x: Tensor) -> Tensor:
        far = (x.flatten(1) - 0.5).abs().amax(1)
        return 1 - far - 1000 * (0.02 - (far - 0.09).abs()).clamp_min(0)

    x = 0.5 + 0.01 * (torch.rand(32, 1, 1, 2, generator=draw(3)) - 0.5)
    model, y = Score(score), torch.zeros(32, dtype=torch.int64)
    grid = torch.linspace(0, 1, 401)
    points = torch.cartesian_prod(grid, grid)
    wrong = points[model(points[:, None, None]).argmax(1) == 1]
    away = (wrong[None] - x.flatten(1)[:, None]).abs().amax(2).amin(1)
    truth = [float((away > eps).double().mean()) for eps in (0.1, 0.2)]
    assert attack(model, x, y, eps="0.1,0.2", attack="fgsm") == truth
    section = measure(model, x, y, eps="0.2,0.1", attack="fgsm,pgd").section("attack")
    flags = {
        (row.attack, row.eps_text): section.samples[row.key.column("robust")]
        for row in section.rows
    }
    for name in ("fgsm", "pgd", "worst"):
        pairs = zip(flags[name, "0.1"], flags[name, "0.2"], strict=True)
        assert all(large <= small for small, large in pairs)


# Large coordinates.


def test_a_coordinate_of_1e5_takes_float64_and_a_warning_says_so():
    """Sequences with one coordinate at 1e5 that the model does not look at."""
    w, b, x, _ = linear(shape=(4, 4))
    x = x - 0.5
    w[:, 0], x[:, 0, 0] = 0, 1e5
    model, how = Lin(w, 0 * b), {"eps": "0.02", "norm": "linf", "input_shape": (4, 4)}
    y = model(x).argmax(1)
    truth = robust_truth(w, 0 * b, x, y, 0.02, "linf", None)
    assert attack(model, x, y, attack=APGD, dtype="float64", **how) == [truth]
    for dtype, warned in (("float32", True), ("float64", False)):
        assert ("ball-below-resolution" in codes(model, x, y, dtype=dtype, **how)) == warned


@pytest.mark.parametrize("box", [None, (0.0, 1e5)])
def test_square_beside_a_pixel_of_1e5(box):
    """Two classes by the sum of all pixels but that one."""
    shape = (4, 4) if box is None else (1, 4, 4)
    x = torch.rand(64, *shape, generator=draw(7))
    level, eps = float(x.flatten(1)[:, 1:].sum(1).median()), 0.02
    x.flatten(1)[:, 0] = 1e5
    model = Score(lambda x: x.flatten(1)[:, 1:].sum(1) - level)
    y = model(x).argmax(1)
    flat = x.double().flatten(1)[:, 1:]
    v = torch.ones(64, 15) * torch.where(y == 0, 1.0, -1.0)[:, None]
    stands = (flat.sum(1) - level).abs() > reach(v, flat, eps, "linf", box)
    spec = ModelSpec(model, shape, kind="tokens" if box is None else "image", box=box)
    options = {"norm": "linf", "attack": "custom:square", "queries": 500, "dtype": "float64"}
    assert attack(spec, x, y, eps=str(eps), **options) == [float(stands.double().mean())]


# Array shapes and boxes.

SEQUENCES = {"input_shape": (6, 4)}


@pytest.mark.parametrize(
    ("shape", "box", "build", "options"),
    [
        ((1, 4, 4), RANGE, Lin, {"input_shape": (1, 4, 4)}),
        ((4, 4), (-1.0, 1.0), Lin, {}),  # values beyond [0, 1] are no pixels
        ((6, 4), RANGE, lambda w, b: Changed(Lin(w, b), lambda z: z.flatten(1)), SEQUENCES),
    ],
    ids=["input_shape", "beyond [0, 1]", "sequences"],
)
def test_arrays_of_two_axes_are_images_or_sequences(shape, box, build, options):
    w, b, x, y = linear(shape=shape, box=box)
    image = len(shape) == 3
    found = attack(build(w, b), x[:, 0] if image else x, y, eps="0.1", norm="linf", **options)
    assert found == [robust_truth(w, b, x, y, 0.1, "linf", RANGE if image else None)]


def test_arrays_that_can_be_read_in_two_ways_are_refused():
    w, b, x, y = linear()
    with pytest.raises(UsageError, match="each sample may be"):
        attack(Lin(w, b), x[:, 0], y, eps="0.1")
    w, b, x, y = linear(shape=(8, 5, 4))
    with pytest.raises(UsageError, match="each sample may be"):
        attack(Lin(w, b), x, y, eps="0.1")
    right = float((Lin(w, b)(x).argmax(1) == y).double().mean())
    how = {"attack": "fgsm", "eps": "0.001", "input_shape": (8, 5, 4)}
    assert measure(Lin(w, b), x, y, **how).section("attack").rows[0].clean == right


@pytest.mark.parametrize(
    ("box", "eps"), [((-1.0, 1.0), 0.1), ((0.0, 255.0), 8.0), ((0.0, 1.0), 0.05)]
)
def test_bytes_and_pictures_are_mapped_to_the_box(tmp_path, box, eps):
    w, b, *_ = linear(box=box)
    pixels = torch.randint(0, 256, (64, 1, 4, 4), generator=draw(9), dtype=torch.uint8)
    x = box[0] + (box[1] - box[0]) * pixels.float() / 255
    y = Lin(w, b)(x).argmax(1)
    truth = robust_truth(w, b, x, y, eps, box=box)
    spec = ModelSpec(Lin(w, b), (1, 4, 4), box=box)
    assert attack(spec, pixels, y, eps=str(eps)) == [truth]
    for i, (picture, label) in enumerate(zip(pixels, y.tolist(), strict=True)):
        folder = Path(tmp_path, str(label))
        folder.mkdir(exist_ok=True)
        Image.fromarray(picture[0].numpy()).save(folder / f"{i}.png")
    how = {"samples": 64, "eps": str(eps), "attack": "quick"}
    report = lipaudit.measure(spec, "attack", data=str(tmp_path), **how)
    row = report.section("attack").rows[0]
    assert (row.clean, row.robust) == (1, truth)


# What a classifier may return.


def take_one(x: Tensor) -> Tensor:
    if len(x) > 1:
        raise RuntimeError("only one sample at a time")
    return x


@pytest.mark.parametrize(
    "behind",
    [
        take_one,
        lambda z: (9 * z).long(),
        lambda z: z[: max(len(z) - 1, 1)],
        lambda z: z + torch.nan,
    ],
    ids=["one sample at a time", "integers", "drops samples", "NaN"],
)
def test_what_gives_no_logits_per_sample_is_refused(behind):
    w, b, x, y = linear()
    model = Changed(Lin(w, b), behind=behind)
    with pytest.raises(InputError):
        attack(model, x, y, eps="0.1")
    if behind is take_one:
        x, y = x[:16], y[:16]
        truth = robust_truth(w, b, x, y, 0.1)
        assert attack(model, x, y, eps="0.1", batch_size=1, attack="pgd", steps=10) == [truth]


def test_one_logit_has_to_be_two():
    w, b, x, _ = linear(classes=2)
    v, c = w[1] - w[0], b[1] - b[0]
    y = (x.flatten(1) @ v + c > 0).long()
    one = Lin(v[None], c[None])
    for labels in (("no", "yes"), None):
        with pytest.raises(InputError) as refused:
            attack(ModelSpec(one, (1, 4, 4), labels=labels), x, y, eps="0.1")
        assert "torch.cat([0 * z, z], 1)" in refused.value.advice
    two = Changed(one, behind=lambda z: torch.cat([0 * z, z], 1))
    assert attack(ModelSpec(two, (1, 4, 4)), x, y, eps="0.1") == [robust_truth(w, b, x, y, 0.1)]


def test_pixels_that_are_clipped_by_the_model():
    w, b, _, _ = linear()
    x = torch.rand(64, 1, 4, 4, generator=draw(11)) * 0.6 + 0.2  # inside: gradients are there
    y = Lin(w, b)(x).argmax(1)
    found = attack(Changed(Lin(w, b), lambda x: x.clamp(0.2, 0.8)), x, y, eps="0.1")
    assert found == [robust_truth(w, b, x, y, 0.1, box=(0.2, 0.8))]


# Samples that repeat, and the gate.


@pytest.mark.parametrize("name", ["attack", "certify"])
def test_samples_that_repeat_count_once(name):
    """In the gate, too: see `test_a_share_is_the_same_in_every_command`."""
    w, b, x, y = linear(n=4)
    x, y = x.repeat(2, 1, 1, 1), y.repeat(2)
    report = measure(Lin(w, b), x, y, name, eps="0.01", attack="fgsm")
    assert report.section(name).rows[0].samples == 4


def test_flags_of_a_file_that_are_none_are_refused():
    w, b, x, y = linear(n=32)
    now = measure(Lin(w, b), x, y, eps="0.05", attack="pgd")
    section = now.section("attack")
    name = next(n for n in section.samples if n.startswith("robust@worst"))
    flags = list(section.samples[name])
    text = schema.dumps(now)
    broken = text.replace(f'"{name}": {flags}', f'"{name}": {[2, *flags[1:]]}')
    assert broken != text
    with pytest.raises(InputError):
        schema.loads(broken)


@pytest.mark.parametrize(
    ("new", "old", "note"),
    [
        (("dog", "cat"), ("cat", "dog"), "class 0"),
        (("dog", "cat"), None, ""),
        (("dog", "cat"), ("dog", "cat"), ""),
    ],
)
def test_the_gate_notes_classes_of_other_names(new, old, note):
    w, b, x, y = linear(classes=2, n=32)

    def report(labels: Any) -> Any:
        spec = ModelSpec(Lin(w, b), (1, 4, 4), classifier=True, labels=labels)
        return measure(spec, x, y, eps="0.05", attack="fgsm")

    notes = judge(report(new), report(old)).notes
    found = next((text for text in notes if "cat" in text), "")
    assert found.startswith(note)
    assert bool(found) == bool(note)
