"""Norms, margins and the solver's behaviour on maps whose Jacobian is known in closed form."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lipaudit.errors import EvaluationError, UsageError
from lipaudit.models.linearize import linearize
from lipaudit.models.model_norms import compute_jacobian_norms, compute_margins


def matrices(samples, outputs, inputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, outputs, inputs, generator=generator, dtype=torch.float64)


def linear_maps(a, b=0.0):
    """x -> A_i x + b_i for sample i, at zero: the Jacobian is `a`."""
    b = torch.as_tensor(b).expand(len(a), a.shape[1])
    f = lambda z, index: (a[index] @ z[:, :, None])[:, :, 0] + b[index]  # noqa: E731
    return linearize(f, torch.zeros(len(a), a.shape[2], dtype=a.dtype))


@pytest.mark.parametrize(
    ("outputs", "inputs", "method"),
    [(1, 30, "dense"), (16, 30, "dense"), (30, 16, "dense"), (17, 30, "lanczos"),
     (30, 17, "lanczos")],
)  # fmt: skip
def test_spectral_norm_on_either_side(outputs, inputs, method):
    """And its leading direction, if asked for, whatever the scale."""
    a = matrices(5, outputs, inputs)
    found = compute_jacobian_norms(linear_maps(a), tol=1e-10)
    torch.testing.assert_close(found.norm, torch.linalg.matrix_norm(a, 2), rtol=1e-9, atol=0)
    assert found.method == method
    assert (found.upper >= found.norm).all()
    assert found.converged.all()
    assert found.vector is None
    truth = torch.linalg.svd(a)[2][:, 0]
    for scale in (1.0, 1e-120):
        linear = linear_maps(a * scale)
        direction = compute_jacobian_norms(linear, tol=1e-12, directions=True).vector
        cosines = torch.cosine_similarity(direction / direction.abs().amax(), truth)
        torch.testing.assert_close(cosines.abs(), torch.ones_like(cosines), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("outputs", "inputs"), [(4, 30), (30, 4), (20, 30), (30, 20)])
def test_left_vectors_and_the_gap_of_the_two_largest_values(outputs, inputs):
    """Vectors whose values agree to tol are all returned, of samples without a tie the first."""
    a = matrices(3, outputs, inputs)
    left, values, right = torch.linalg.svd(a, full_matrices=False)
    values[1, 1] = values[1, 0] * (1 - 1e-7)  # a tie in one sample
    a = left @ torch.diag_embed(values) @ right
    found = compute_jacobian_norms(linear_maps(a), left=True, tol=1e-6, within=1e-6)
    torch.testing.assert_close(found.gap, 1 - values[:, 1] / values[:, 0], rtol=1e-3, atol=1e-6)
    assert found.tied.tolist() == [[True, False], [True, True], [True, False]]
    assert found.vector is None
    lengths = torch.linalg.vector_norm(found.left, dim=2, keepdim=True)
    cosines = found.left / lengths @ left[:, :, :2]
    assert cosines[[0, 2], 0, 0].abs().min() > 1 - 1e-5
    # Of a tie, the vectors span the plane of the two true ones.
    torch.testing.assert_close(
        torch.linalg.det(cosines[1]).abs(), torch.ones(()).double(), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("outputs", [3, 40])
def test_inf_norm_is_the_largest_row_sum(outputs):
    a = matrices(4, outputs, 7)
    found = compute_jacobian_norms(linear_maps(a), norm="inf")
    torch.testing.assert_close(found.norm, torch.linalg.matrix_norm(a, torch.inf))
    assert found.products.tolist() == [outputs] * 4


@pytest.mark.parametrize("norm", ["2", "inf"])
def test_a_misspelt_accuracy_is_an_error_where_it_is_not_used_too(norm):
    with pytest.raises(TypeError, match="tolerance"):
        compute_jacobian_norms(linear_maps(matrices(1, 3, 7)), norm=norm, tolerance=1e-3)


def test_samples_that_finish_early_leave_the_batch():
    """Half of the problems have rank one: they are done at once, the others are not disturbed."""
    a = matrices(8, 40, 50)
    a[::2] = a[::2, :, :1] @ a[::2, :1]
    sizes, linear = [], linear_maps(a)

    def f(z, index):
        sizes.append(len(index))
        return linear.f(z, index)

    found = compute_jacobian_norms(linearize(f, linear.x), tol=1e-9)
    torch.testing.assert_close(found.norm, torch.linalg.matrix_norm(a, 2), rtol=1e-8, atol=0)
    assert 4 in sizes
    assert found.products[::2].max() < found.products[1::2].min()


def test_what_does_not_converge_is_marked():
    found = compute_jacobian_norms(linear_maps(matrices(3, 60, 60)), tol=1e-12, max_steps=4)
    assert not found.converged.any()
    assert found.products.tolist() == [8] * 3


def test_no_start_vector_misses_the_norm():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True).eval().double()
    x = torch.randn(4, 6, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda z: layer(z[None])[0], x)
    truth = torch.linalg.matrix_norm(jacobian.view(24, 24), 2)
    linear = linearize(lambda z, _: layer(z), x.expand(200, 4, 6))
    for tol in (1e-3, 1e-6):
        found = compute_jacobian_norms(linear, tol=tol, seeds=range(200))
        assert found.converged.all()
        assert (found.norm >= truth * (1 - tol)).all()
        assert (found.norm <= truth * (1 + 1e-12)).all()
        assert (found.upper >= truth * (1 - 1e-12)).float().mean() >= 0.995


def test_a_constant_direction_and_a_zero_map():
    a = matrices(2, 20, 20)
    a[0] = 0
    found = compute_jacobian_norms(linear_maps(a), tol=1e-9)
    assert found.norm[0] == 0
    assert found.converged.all()


@pytest.mark.parametrize("outputs", [5, 20])
def test_a_derivative_that_is_not_finite_is_an_error(outputs):
    x = torch.ones(3, outputs)
    x[1] = 0
    with pytest.raises(EvaluationError, match="not finite"):
        compute_jacobian_norms(linearize(lambda z, _: z.abs().sqrt(), x))


def test_rows_of_a_large_output_are_refused():
    with pytest.raises(UsageError, match="2000 outputs"):
        compute_jacobian_norms(
            linearize(lambda z, _: z.expand(-1, 2000), torch.ones(2, 1)), norm="inf"
        )


@settings(deadline=None, max_examples=5)
@given(classes=st.integers(2, 30), norm=st.sampled_from(["2", "inf"]), seed=st.integers(0, 1000))
def test_margins_are_those_of_the_rows(classes, norm, seed):
    a, b = matrices(4, classes, 9, seed), matrices(4, classes, 1, seed + 1)[:, :, 0]
    y = torch.tensor([0, classes - 1, 1, -1])
    found = compute_margins(linear_maps(a, b), y, norm=norm, rivals=classes)
    for i in range(4):
        label = int(y[i]) if y[i] >= 0 else int(b[i].argmax())
        others = [j for j in range(classes) if j != label]
        gaps = b[i, label] - b[i, others]
        dual = 1 if norm == "inf" else 2
        slopes = torch.linalg.vector_norm(a[i, label] - a[i, others], dual, 1)
        radii = gaps / slopes
        torch.testing.assert_close(found.margin[i], gaps.min())
        torch.testing.assert_close(found.slope[i], slopes[gaps.argmin()])
        torch.testing.assert_close(found.radius[i], radii.min())
        assert int(found.closest[i]) == others[int(radii.argmin())]
    assert found.complete.all()


def test_the_direction_of_a_margin_is_its_gradient():
    a, y = matrices(4, 20, 30), torch.tensor([3, 0, -1, 4])
    f = lambda z, index: (a[index] @ z[:, :, None])[:, :, 0]  # noqa: E731
    x = matrices(4, 30, 1, seed=1)[:, :, 0]
    for rows in (20, 5):
        part = linearize(lambda z, index, m=rows: f(z, index)[:, :m], x)
        found = compute_margins(part, y, norm="2")
        for i, logits in enumerate(part.output):
            own = int(y[i]) if y[i] >= 0 else int(logits.argmax())
            other = max((j for j in range(rows) if j != own), key=lambda j, f=logits: f[j])
            torch.testing.assert_close(found.direction[i], a[i, own] - a[i, other])


def test_the_radius_of_a_linear_classifier_is_where_the_decision_turns():
    a, b = matrices(3, 6, 9), matrices(3, 6, 1)[:, :, 0]
    linear = linear_maps(a, b)
    y = linear.output.argmax(1)
    for norm, steepest in (("inf", torch.sign), ("2", lambda g: g / g.norm(dim=1, keepdim=True))):
        found = compute_margins(linear, y, norm=norm)
        each = torch.arange(3)
        direction = steepest(a[each, found.closest] - a[each, y])
        for factor, moved in ((0.999, False), (1.001, True)):
            z = factor * found.radius[:, None] * direction
            assert ((linear.f(z, each).argmax(1) != y) == moved).all()


def radii(linear, y, dual):
    """The radius of every class, without a short cut."""
    rows, each = torch.stack([linear.row(i) for i in range(linear.outputs)], 1), range(len(y))
    gaps = linear.output[each, y][:, None] - linear.output
    slopes = torch.linalg.vector_norm(rows[each, y][:, None] - rows, dual, 2)
    return (gaps / slopes).nan_to_num(torch.inf).scatter(1, y[:, None], torch.inf)


@pytest.mark.parametrize("classes", [8, 60])
@pytest.mark.parametrize("norm", ["2", "inf"])
def test_the_nearest_boundary_may_be_that_of_the_last_class(classes, norm):
    """The smallest logit belongs to the only class whose logit moves."""
    a = torch.zeros(2, classes, 70, dtype=torch.float64)
    a[:, :, :classes] = torch.eye(classes) * 1e-2
    a[:, -1] = 1e3
    linear = linear_maps(a, -torch.linspace(0, 1, classes).double())
    y = torch.zeros(2, dtype=torch.long)
    upper = compute_jacobian_norms(linear, norm=norm).upper
    found = compute_margins(linear, y, norm=norm, upper=upper, rivals=classes)
    want = radii(linear, y, 1 if norm == "inf" else 2)
    torch.testing.assert_close(found.radius, want.amin(1), rtol=1e-9, atol=0)
    assert found.closest.tolist() == [classes - 1] * 2
    assert found.complete.all()
    assert found.rivals.tolist() == [classes - 1] * 2
    few = compute_margins(linear, y, norm=norm, upper=upper, rivals=5)
    assert few.complete.tolist() == [classes == 8] * 2
    assert (few.radius <= want.amin(1) * (1 + 1e-12)).all()
    assert (few.radius > 0).all()


@settings(deadline=None, max_examples=5)
@given(norm=st.sampled_from(["2", "inf"]), seed=st.integers(0, 1000), rivals=st.integers(1, 39))
def test_no_class_that_was_not_looked_at_is_nearer(norm, seed, rivals):
    a, b = matrices(5, 40, 9, seed), 6 * matrices(5, 40, 1, seed + 1)[:, :, 0]
    linear = linear_maps(a, b)
    y = linear.output.argmax(1)
    upper = compute_jacobian_norms(linear, norm=norm).upper
    found = compute_margins(linear, y, norm=norm, upper=upper, rivals=rivals)
    want = radii(linear, y, 1 if norm == "inf" else 2).amin(1)
    done = found.complete
    torch.testing.assert_close(found.radius[done], want[done], rtol=1e-9, atol=0)
    assert (found.radius <= want * (1 + 1e-9)).all()
    assert (found.rivals[~done] == rivals).all()
    assert (found.rivals <= rivals).all()
    # Without a limit of the norm every class has to be looked at.
    unknown = compute_margins(linear, y, norm=norm, rivals=rivals)
    assert (unknown.complete == (rivals == 39)).all()


def test_a_clear_decision_needs_few_classes():
    a, b = matrices(3, 40, 9), torch.zeros(3, 40).double()
    b[:, :2] = torch.tensor([100.0, 99.0])
    linear = linear_maps(a, b)
    upper = compute_jacobian_norms(linear).upper
    found = compute_margins(linear, torch.zeros(3).long(), norm="2", upper=upper)
    assert found.complete.all()
    assert found.rivals.tolist() == [1, 1, 1]


@pytest.mark.parametrize("shape", [(3, 1), (3, 4, 5)])
def test_margins_need_classes(shape):
    linear = linearize(lambda z, _: z, torch.randn(shape))
    with pytest.raises(UsageError, match="logits"):
        compute_margins(linear, torch.zeros(3, dtype=torch.long))


CROWDS = [(count, gap) for count in (2, 3, 10) for gap in (1e-3, 1e-5, 1e-7, 1e-9, 0.0)]


def crowded(count, gap, seed):
    """A matrix whose `count` largest singular values lie between 1 - gap and 1, the rest below."""
    largest = 1 - gap * torch.arange(count) / (count - 1)
    values = torch.cat([largest, torch.linspace(0.8, 0, 120 - count)]).double()
    gen = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, 120, generator=gen).double()).Q for n in (120, 130))
    return (u * values) @ v.T


def test_largest_singular_values_that_agree_to_many_digits():
    """A norm is proven to tol with few products; as estimated it may lie anywhere among them."""
    matrices = torch.stack([crowded(*crowd, seed) for seed, crowd in enumerate(CROWDS)])
    seeds = range(len(CROWDS))
    proven = compute_jacobian_norms(linear_maps(matrices), tol=1e-6, within=1e-6, seeds=seeds)
    assert proven.converged.all()
    assert (proven.norm - 1).abs().max() <= 1e-6
    assert (proven.within <= 1e-6 * (1 + 1e-6)).all()
    estimated = compute_jacobian_norms(linear_maps(matrices), tol=1e-6, seeds=seeds)
    assert (estimated.norm * (1 + estimated.within) >= 1 - 1e-12).all()
    for (count, gap), spent, miss in zip(
        CROWDS, proven.products / 2, 1 - estimated.norm, strict=True
    ):
        # One vector finds them one after the other; ties are one to it.
        assert spent <= 25 + 8 * count * (gap > 1e-9)
        assert miss <= gap + 1e-6
    assert (1 - estimated.norm > 1e-6).any()  # or a proof would add nothing


@pytest.mark.parametrize("outputs", [4, 20])
def test_a_tiny_derivative_of_centred_outputs_is_no_derivative_of_zero(outputs):
    """The sum of centred outputs is constant: equal cotangents show no derivative."""
    w = torch.randn(outputs, 24, generator=torch.Generator().manual_seed(0)) * 1e-36

    def centre(z, index):
        y = (z @ w.T) * 1e-4
        return y - y.mean(1, keepdim=True)

    with pytest.raises(EvaluationError, match="too small for torch.float32"):
        compute_jacobian_norms(linearize(centre, torch.randn(2, 24)))
