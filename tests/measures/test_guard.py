"""The guard of the product: a bound below the exact norm ends the run, whatever made it so."""

import pytest
import torch

from lipaudit import measure
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import EvaluationError, ExitCode
from lipaudit.measures import bounds
from lipaudit.measures.base import seed_of
from lipaudit.models.sources.loader import load_net
from lipaudit.theory import ball, ingredients, spectral
from lipaudit.theory import head_bounds as theory
from lipaudit.theory.bounds.record import load_bounds
from lipaudit.theory.head_norms import head_norms


@pytest.fixture(scope="module")
def demo():
    net = load_net("demo")
    return net, load_data("demo", net, DataOptions(samples=2)).batch


@pytest.mark.parametrize("name", load_bounds())
def test_a_bound_below_the_norm_ends_the_run(demo, monkeypatch, name):
    head_bounds = theory.head_bounds

    def wrong(heads, **options):
        values = head_bounds(heads, **options)
        values[name] = values[name].clone()
        values[name][1, 2] *= 1e-7
        return values

    monkeypatch.setattr(theory, "head_bounds", wrong)
    with pytest.raises(
        EvaluationError, match=rf"{name} of head 0\.2 \(blocks\.0\.attn\)"
    ) as caught:
        list(bounds.measure(*demo_parts(demo), bounds.BoundsOptions(layers=(0,))))
    assert caught.value.exit_code is ExitCode.INTERNAL
    assert demo[1].ids[1] in str(caught.value)


def shortened(share):
    head_bounds = theory.head_bounds

    def wrong(heads, **options):
        exact = head_norms(heads, seeds=[seed_of(i, 0) for i in heads_ids]).norm
        values = head_bounds(heads, **options)
        values["sharp"] = values["sharp"].clone()
        values["sharp"][1, 2] = (1 - share) * exact[1, 2]
        return values

    heads_ids = []
    return wrong, heads_ids


@pytest.mark.parametrize(("share", "passes"), [(3e-13, True), (1e-10, False)])
def test_rounding_excuses_what_it_can_do_and_no_more(demo, monkeypatch, share, passes):
    """The slack of a trained head is some 1e-12, and the report names what was excused."""
    wrong, ids = shortened(share)
    ids.extend(demo[1].ids)
    monkeypatch.setattr(theory, "head_bounds", wrong)
    options = bounds.BoundsOptions(layers=(0,))
    if not passes:
        with pytest.raises(EvaluationError, match=r"sharp of head 0\.2"):
            list(bounds.measure(*demo_parts(demo), options))
        return
    section = bounds.summarise(list(bounds.measure(*demo_parts(demo), options)), options)[0]
    (text,) = [note.text for note in section.notes if note.code == "within-rounding"]
    assert "sharp of head 0.2 (blocks.0.attn)" in text
    assert demo[1].ids[1] in text


@pytest.mark.parametrize(("share", "passes"), [(1e-13, True), (1e-9, False)])
def test_a_constant_of_a_ball_that_rounding_excuses_is_named(demo, monkeypatch, share, passes):
    options = bounds.BoundsOptions(layers=(0,), radius="1/100")
    (part,) = bounds.measure(*demo_parts(demo), options)
    found = torch.as_tensor(part.values["at_r_ball_norm"])[..., 0]
    ball_sharp = ball.ball_sharp

    def wrong(heads, r, **more):
        values = ball_sharp(heads, r, **more).clone()
        values[1, 2] = (1 - share) * found[1, 2]
        return values

    monkeypatch.setattr(ball, "ball_sharp", wrong)
    assert_excused(demo, options, passes, "ball_sharp of head 0.2 (blocks.0.attn) at r = 1/100")


@pytest.mark.parametrize(("share", "passes"), [(1e-14, True), (1e-9, False)])
def test_a_layer_that_rounding_excuses_is_named(demo, monkeypatch, share, passes):
    options = bounds.BoundsOptions(layers=(0,))
    (part,) = bounds.measure(*demo_parts(demo), options)
    sharp, norms = (torch.as_tensor(part.values[name]) for name in ("sharp", "layer_exact_out"))
    least = (norms[:, 0] / sharp.square().sum(1).sqrt()).max() * (1 - share)
    replace_output_norm(monkeypatch, least)
    assert_excused(demo, options, passes, "sharp_rss of layer 0 (blocks.0.attn)")


def replace_output_norm(monkeypatch, norm):
    """Give a wrong ||W_O||, the only matrix whose norm is computed alone."""
    true = spectral.spectral_norm
    monkeypatch.setattr(spectral, "spectral_norm", lambda a: norm if a.ndim == 2 else true(a))


def assert_excused(demo, options, passes, named):
    """The run ends, or its report names what rounding excused: of the wrong figure's sample."""
    if not passes:
        with pytest.raises(EvaluationError, match="below the exact norm"):
            list(bounds.measure(*demo_parts(demo), options))
        return
    sections = bounds.summarise(list(bounds.measure(*demo_parts(demo), options)), options)
    notes = [n.text for s in sections[1:] for n in s.notes if n.code == "within-rounding"]
    (text,) = notes
    assert named in text


FAMILIES = ["visformer_tiny", "fastvit_sa12", "nextvit_small", "xcit_nano_12_p16_224"]
SLOW = pytest.mark.slow(seconds=240)


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("visformer_tiny", (1.5,)),
        *(pytest.param(name, (1, 1.5, 3, 10), marks=SLOW) for name in FAMILIES),
    ],
)
def test_ill_conditioned_heads_pass(name, factors):
    """Logits of 1e13 in float64: products with J once lost up to 4e-5 of a norm."""
    timm = pytest.importorskip("timm")
    sized = {"img_size": 64} if name.startswith(("visformer", "xcit")) else {}
    x = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for factor in factors:
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=24, **sized).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(factor) if p.ndim > 1 else p.add_(
                    0.1 * torch.randn(p.shape, generator=generator)
                )
        rows = (
            measure(model, "bounds", data=x, input_shape=(3, 64, 64), dtype="float64")
            .section("bounds")
            .rows
        )
        assert factor > 3 or any(row.sharp is not None for row in rows)
        for row in rows:
            if row.sharp is not None:
                assert row.exact <= row.sharp * (1 + 1e-10)


def test_a_layer_above_the_sum_of_its_heads_ends_the_run(demo, monkeypatch):
    replace_output_norm(monkeypatch, torch.tensor(1e-9))
    with pytest.raises(EvaluationError, match=r"sharp_rss of layer 0"):
        list(bounds.measure(*demo_parts(demo), bounds.BoundsOptions(layers=(0,))))


def test_ties_lost_by_rounding_would_not_pass_unseen(demo, monkeypatch):
    """The fault that once printed bounds of 1.29 for a norm of 10.7, put back."""
    zeros = lambda p: (p.amax((-2, -1)) * 0, p.amax((-2, -1)) * 0)  # noqa: E731
    monkeypatch.setattr(ingredients, "row_maxima", zeros)
    with pytest.raises(EvaluationError, match="below the exact norm"):
        list(bounds.measure(*demo_parts(demo), bounds.BoundsOptions()))


def demo_parts(demo):
    net, batch = demo
    return net, [batch]
