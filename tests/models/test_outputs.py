"""Forms of a classifier's output, and models that are undefined on a blank sample."""

import pytest
import torch
from torch import nn
from torch.func import jacrev

import lipaudit
from lipaudit import ModelSpec
from lipaudit.errors import EvaluationError, InputError
from tests.nets import TEXT, Calls, draw, own_net

X = draw(1, 4, 3, 4, 4).sigmoid()
Y = torch.tensor([0, 1, 2, 3])


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.Tanh(), nn.Linear(5, 4))


FORMS = {
    "logits": lambda z: z,
    "log-probabilities": lambda z: z.log_softmax(-1),
    "probabilities": lambda z: z.softmax(-1),
    "probabilities, by exp": lambda z: z.log_softmax(-1).exp(),
    "probabilities, averaged": lambda z: (z.softmax(-1) + z.softmax(1)) / 2,
    "probabilities, functional": lambda z: nn.functional.softmax(z, dim=1),
    "sigmoids": lambda z: z.sigmoid(),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("target", ["logits", "probabilities", "loss"])
def test_every_form_gives_the_jacobian_of_the_same_scores(name, target):
    model, form = linear(), name.partition(",")[0]
    module = Calls(lambda inner, x: FORMS[name](inner(x)), model)
    how = {"samples": 4, "to": target, "dtype": "float64", "norm": "2"}
    report = lipaudit.measure(ModelSpec(module, (3, 4, 4)), "jacobian", data=(X, Y), **how)
    section = report.section("jacobian")
    ends = {
        "logits": lambda z, _y: z.log_softmax(-1) if "prob" in form else z,
        "probabilities": lambda z, _y: z.softmax(-1),
        "loss": lambda z, y: -z.log_softmax(-1)[:, y],
    }
    wide = linear().double()
    order = [int(place.removeprefix("index ")) for place in report.samples["place"]]
    truth, radii = [], []
    for i in order:
        x = X[i : i + 1].double()
        j = jacrev(lambda x, y=Y[i]: ends[target](wide(x), y))(x).reshape(-1, 48)
        truth.append(torch.linalg.matrix_norm(j, 2).item())
        z, rows = wide(x)[0], jacrev(wide)(x).reshape(4, 48)
        others = [k for k in range(4) if k != Y[i]]
        distance = [(z[Y[i]] - z[k]) / (rows[Y[i]] - rows[k]).norm() for k in others]
        radii.append(min(distance).item() if z.argmax() == Y[i] else float("nan"))
    assert section.samples["norm"] == pytest.approx(truth, rel=1e-6)
    if target == "logits":
        found = [float(r or "nan") for r in section.samples["radius_first_order"]]
        assert found == pytest.approx(radii, rel=1e-6, nan_ok=True)
        named = "log-probabilities" if form == "probabilities" else "logits"
        assert section.rows[0].to == named
    codes = {note.code for note in section.notes}
    assert (form in codes) == (form != "logits")


@pytest.mark.parametrize("form", ["logits", "probabilities", "sigmoids"])
def test_attacks_and_calibration_are_those_of_the_scores(form):
    rows = []
    for each in ("logits", form):
        module = Calls(lambda inner, x, f=FORMS[each]: f(3 * inner(x)), linear())
        x, y = X.repeat(10, 1, 1, 1), Y.repeat(10)
        x = (x + 0.1 * draw(2, *x.shape)).clamp(0, 1)
        how = {"samples": 40, "eps": "0.02", "attack": "pgd"}
        report = lipaudit.measure(ModelSpec(module, (3, 4, 4)), "attack", data=(x, y), **how)
        rows.append(report.section("attack").rows[0])
        assert not [n for n in report.section("attack").notes if "softmax: attacks" in n.text]
    plain, other = rows
    assert other.ece_clean == pytest.approx(plain.ece_clean, abs=1e-4)
    assert other.robust == plain.robust


def test_scores_that_sum_to_one_by_chance_on_grey_are_logits():
    def run(inner, x):
        return inner(x - 0.5) + torch.tensor([0.2, 0.3, 0.5])

    bare = nn.Sequential(nn.Flatten(), nn.Linear(48, 3, bias=False))
    assert own_net(Calls(run, bare), (3, 4, 4), kind="image").form == "logits"


def test_a_probability_that_is_zero_has_no_logarithm():
    module = Calls(lambda inner, x: (500 * inner(x)).softmax(-1).mul(1.0), linear())
    with pytest.raises(EvaluationError, match="0 in torch.float32") as refused:
        lipaudit.measure(ModelSpec(module, (3, 4, 4)), "jacobian", data=X, samples=4)
    assert "--dtype float64" in refused.value.advice


UNDEFINED = {
    "standardised": lambda x: (
        (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)
    ),
    "unit length": lambda x: (x - 0.5) / (x - 0.5).flatten(1).norm(dim=1)[:, None, None, None],
    "defined on the samples only": lambda x: (x[:, :, :1, :1] - 1.5).log() + x,
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_a_model_undefined_on_a_blank_sample_is_measured_on_those_of_the_user(name):
    model = linear()
    module = Calls(lambda inner, x: inner(UNDEFINED[name](x)).softmax(-1), model)
    spec = ModelSpec(module, (3, 4, 4), box=(0, 2))
    x = X.clone()
    x[:, :, 0, 0] = 1.9
    report = lipaudit.measure(spec, "jacobian", data=x, samples=4, to="probabilities")
    wide = linear().double()
    truth = []
    for place in report.samples["place"]:
        i = int(place.removeprefix("index "))
        one = x[i : i + 1].double()
        j = jacrev(lambda x: wide(UNDEFINED[name](x)).softmax(-1))(one).reshape(4, 48)
        truth.append(torch.linalg.matrix_norm(j, 2).item())
    assert report.section("jacobian").samples["norm"] == pytest.approx(truth, rel=1e-3)


def test_a_model_that_refuses_a_blank_sample_is_run_on_noise():
    def run(inner, x):
        if float(x.std()) == 0:
            raise ValueError("a constant image has no contrast")
        return inner(x)

    assert own_net(Calls(run, linear()), (3, 4, 4), kind="image").classes == 4


def test_a_model_undefined_everywhere_is_refused_with_the_sample():
    module = Calls(lambda inner, x: inner(x) / 0, linear())
    with pytest.raises(InputError, match="not finite, neither on a blank sample nor on"):
        lipaudit.measure(ModelSpec(module, (3, 4, 4)), "jacobian", data=X, samples=2)


class TokensFirst(nn.Module):
    """Attention over (tokens, batch, width)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4)
        self.head = nn.Linear(16, 3)

    def forward(self, ids):
        return self.read(self.embed(ids.T))

    def read(self, x):
        h = self.norm(x)
        return self.head((x + self.attention(h, h, h)[0]).mean(0))


@pytest.mark.parametrize("names_entry", [True, False])
def test_an_embedding_of_tokens_first_is_an_entry(names_entry):
    module, ids = TokensFirst(), torch.randint(1, 40, (4, 6), generator=torch.Generator())
    entry = module.embed if names_entry else None
    spec = ModelSpec(module, (6,), kind="text", entry=entry)
    report = lipaudit.audit(spec, ["jacobian", "bounds"], data=ids, samples=4, dtype="float64")
    wide, truth = TokensFirst().double(), []
    for place in report.samples["place"]:
        x = wide.embed(ids[int(place.removeprefix("index "))])[:, None].detach()
        j = jacrev(lambda x: wide.read(x)[0])(x).reshape(3, -1)
        truth.append(torch.linalg.matrix_norm(j, 2).item())
    assert report.section("jacobian").samples["norm"] == pytest.approx(truth, rel=1e-6)
    assert all(row.exact_max > 0 for row in report.section("bounds").rows)
    how = {"data": (ids, torch.zeros(4, dtype=torch.long)), "samples": 4, "eps": "0.1"}
    attacked = lipaudit.measure(spec, "attack", attack="fgsm", **how)
    assert attacked.section("attack").rows[0].samples == 4


def test_a_mixture_of_experts_runs_in_float64_and_keeps_its_setting():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 8}
    model = MixtralForCausalLM(MixtralConfig(**TEXT | sizes)).eval()
    before, ids = model.config._experts_implementation, torch.arange(6)[None] + 3
    report = lipaudit.measure(model, "jacobian", data=ids, samples=1, dtype="float64")
    assert model.config._experts_implementation == before == "grouped_mm"
    wide = model.double()
    wide.config._experts_implementation = "eager"
    x = wide.model.embed_tokens(ids).detach()
    j = jacrev(lambda z: wide(inputs_embeds=z).logits[0, -1])(x).flatten(1)
    truth = torch.linalg.matrix_norm(j, 2).item()
    assert report.section("jacobian").samples["norm"][0] == pytest.approx(truth, rel=1e-4)


class Volumes(nn.Module):
    """Attention over patches of a volume (3, 4, 8, 8)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patch = nn.Conv3d(3, 16, (2, 4, 4), (2, 4, 4))
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.patch(x).flatten(2).mT
        return self.head((x + self.attention(x, x, x)[0]).mean(1))


@pytest.mark.parametrize("how", ["data", "input_shape", "spec"])
def test_volumes_are_read(how):
    x, shape = torch.rand(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0)), (3, 4, 8, 8)
    model = ModelSpec(Volumes(), shape, kind="tokens", box=(0, 1)) if how == "spec" else Volumes()
    more = {"input_shape": shape} if how == "input_shape" else {}
    names = ["bounds", "jacobian"]
    report = lipaudit.audit(model, names, data=x, samples=2, dtype="float64", **more)
    wide, truth = Volumes().double(), []
    for place in report.samples["place"]:
        one = x[int(place.removeprefix("index "))][None].double()
        truth.append(torch.linalg.matrix_norm(jacrev(wide)(one).reshape(3, -1), 2).item())
    assert report.section("jacobian").samples["norm"] == pytest.approx(truth, rel=1e-6)
    assert len(report.section("bounds").rows) == 4


def test_an_image_of_four_axes_is_refused_at_the_door():
    with pytest.raises(InputError, match="kind 'image' has samples of shape") as refused:
        lipaudit.measure(ModelSpec(Volumes(), (3, 4, 8, 8)), "jacobian", samples=1)
    assert 'kind="tokens"' in refused.value.advice
