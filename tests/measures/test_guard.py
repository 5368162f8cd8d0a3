"""The guard of the product: a bound below the exact norm ends the run, whatever made it so."""

import pytest
import torch

from lipaudit import measure
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import EvaluationError, ExitCode
from lipaudit.measures import bounds
from lipaudit.models.sources.loader import load_net
from lipaudit.theory import head_bounds as theory
from lipaudit.theory import matrix_norms
from lipaudit.theory.bounds.record import load_bounds

PLAIN, BALLS = (bounds.BoundsOptions(layers=(0,), radius=r) for r in ((), "1/100"))


@pytest.fixture(scope="module")
def demo():
    net = load_net("demo")
    return net, [load_data("demo", net, DataOptions(samples=2)).batch]


@pytest.fixture(scope="module")
def norms(demo):
    """The true figures of the first layer."""
    (part,) = bounds.measure(*demo, BALLS)
    return {name: torch.as_tensor(values) for name, values in part.values.items()}


def spoil(monkeypatch, room, function, value, name=None):
    """Replace what a function returns (`name`: an entry of it) for one head of one sample."""
    true = getattr(room, function)

    def wrong(*args, **options):
        values = true(*args, **options)
        one = (values[name] if name else values).clone()
        one[1, 2] = value
        return values | {name: one} if name else one

    monkeypatch.setattr(room, function, wrong)


def spoil_head(monkeypatch, norms, share, name="sharp"):
    spoil(monkeypatch, theory, "head_bounds", (1 - share) * norms["exact"][1, 2], name)


def spoil_ball(monkeypatch, norms, share):
    spoil(monkeypatch, theory, "ball_sharp", (1 - share) * norms["at_r_ball_norm"][1, 2, 0])


def spoil_layer(monkeypatch, norms, share):
    """Give a wrong ||W_O||, the only matrix whose norm is computed alone."""
    true, rss = matrix_norms.spectral_norm, norms["sharp"].square().sum(1).sqrt()
    least = (norms["layer_exact_out"][:, 0] / rss).max() * (1 - share)
    monkeypatch.setattr(matrix_norms, "spectral_norm", lambda a: least if a.ndim == 2 else true(a))


@pytest.mark.parametrize("name", load_bounds())
def test_a_bound_below_the_norm_ends_the_run(demo, norms, monkeypatch, name):
    spoil_head(monkeypatch, norms, 1 - 1e-7, name)
    with pytest.raises(EvaluationError, match=rf"{name} of head 0\.2 \(blocks\.0\.attn\)") as end:
        list(bounds.measure(*demo, PLAIN))
    assert end.value.exit_code is ExitCode.INTERNAL
    assert demo[1][0].ids[1] in str(end.value)


@pytest.mark.parametrize(
    ("fault", "excused", "refused", "says"),
    [
        (spoil_head, 3e-13, 1e-10, "sharp of head 0.2 (blocks.0.attn)"),
        (spoil_ball, 1e-13, 1e-9, "ball_sharp of head 0.2 (blocks.0.attn) at r = 1/100"),
        (spoil_layer, 1e-14, 1e-9, "sharp_rss of layer 0 (blocks.0.attn)"),
    ],
)
def test_what_rounding_excuses(demo, norms, monkeypatch, fault, excused, refused, says):
    """The slack of a trained head is some 1e-12, and the report names what was excused."""
    options = BALLS if fault is spoil_ball else PLAIN
    with monkeypatch.context() as patch:
        fault(patch, norms, excused)
        sections = bounds.summarise([*bounds.measure(*demo, options)], options)
    (text,) = [n.text for s in sections for n in s.notes if n.code == "within-rounding"]
    assert says in text
    assert fault is spoil_layer or demo[1][0].ids[1] in text
    fault(monkeypatch, norms, refused)
    with pytest.raises(EvaluationError, match="below the exact norm") as end:
        list(bounds.measure(*demo, options))
    assert says.partition(" of ")[0] in end.value.message


FAMILIES = ["visformer_tiny", "fastvit_sa12", "nextvit_small", "xcit_nano_12_p16_224"]
SLOW = pytest.mark.slow(seconds=240)


@pytest.mark.parametrize(
    ("name", "size", "factors"),
    [
        ("visformer_tiny", {"embed_dim": 96}, (1.5,)),
        *(pytest.param(name, {}, (1, 1.5, 3, 10), marks=SLOW) for name in FAMILIES),
    ],
)
def test_ill_conditioned_heads_pass(name, size, factors):
    """Logits of 1e13 in float64: products with J once lost up to 4e-5 of a norm."""
    import timm

    size = size | ({"img_size": 64} if name.startswith(("visformer", "xcit")) else {})
    x = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for factor in factors:
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=24, **size).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(factor) if p.ndim > 1 else p.add_(
                    0.1 * torch.randn(p.shape, generator=generator)
                )
        how = {"data": x, "input_shape": (3, 64, 64), "dtype": "float64"}
        section = measure(model, "bounds", **how).section("bounds")
        has_bounds = any(row.sharp is not None for row in section.rows)
        # Beyond factor 1.5, no layer may be left whose logits float64 resolves.
        refused = [n.text for n in section.notes if n.code == "no-closed-form"]
        assert has_bounds or (factor > 1.5 and "cannot resolve its attention map" in refused[0])
        for row in section.rows:
            if row.sharp is not None:
                assert row.exact <= row.sharp * (1 + 1e-10)
