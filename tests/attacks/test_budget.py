"""The default budget of attacks on texts against ten times as much, and what they left untried."""

import pytest
import torch
from torch import nn

import lipaudit
from lipaudit import ModelSpec
from lipaudit.attacks.kinds import ATTACKS, SINGLE_CHANGES
from lipaudit.attacks.rewriting import NEIGHBOURS

VOCABULARY, WIDTH, TEXTS = 400, 16, 32


class Classifier(nn.Module):
    """One attention layer, a mean over tokens and a pooler; a large gain saturates its tanh."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(0.3 * torch.randn(64, WIDTH))
        self.q, self.k, self.v, self.pool = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head, self.gain = nn.Linear(WIDTH, 3), gain

    def forward(self, ids, mask=None):
        x = self.embed(ids) + self.place[: ids.shape[1]]
        attention = (self.q(x) @ self.k(x).mT / WIDTH**0.5).softmax(-1)
        pooled = torch.relu(x + attention @ self.v(x)).mean(1)
        return self.head(torch.tanh(self.gain * self.pool(pooled)))


@pytest.fixture(scope="module")
def trained():
    """Weights of a model that tells the majority of three kinds of words."""
    model, draw = Classifier(1.0), torch.Generator().manual_seed(2)
    worth = torch.randn(VOCABULARY, 3, generator=draw)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(200):
        ids = torch.randint(1, VOCABULARY, (64, 12), generator=draw)
        loss = nn.functional.cross_entropy(model(ids), worth[ids].mean(1).argmax(1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.state_dict()


def attack(model: nn.Module, tokens: int, **how):
    """Attack texts that the model gets right, one word and two; return the two rows."""
    ids = torch.randint(1, VOCABULARY, (TEXTS, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = model(ids).argmax(1)
    spec = ModelSpec(model.eval(), (tokens,), kind="text", vocabulary=VOCABULARY)
    given = {"data": (ids, y), "samples": TEXTS, "attack": "words", "eps": "1,2"}
    section = lipaudit.measure(spec, "attack", **given, **how).section("attack")
    return section, [row for row in section.rows if row.attack == "words"]


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        *(("saturated", 8), ("usual", 8), ("random", 8), ("saturated", 30)),
        pytest.param("usual", 30, marks=pytest.mark.ci),
        pytest.param("random", 30, marks=pytest.mark.ci),
    ],
)
def test_the_default_finds_nine_tenths_of_what_ten_times_the_budget_finds(trained, kind, tokens):
    """Saturated: the gradient is 0 for most texts, where a hundred steepest changes are none."""
    model = Classifier(3000.0 if kind == "saturated" else 1.0)
    if kind == "random":  # centred, so that it is not sure of one class
        with torch.no_grad():
            model.head.bias -= model(torch.arange(1, VOCABULARY).reshape(-1, 7)).mean(0)
    else:
        model.load_state_dict(trained)
    section, default = attack(model, tokens)
    _, more = attack(model, tokens, queries=10 * SINGLE_CHANGES)
    assert section.settings["queries"] == SINGLE_CHANGES
    # Texts broken with one word and with two together. Training ends a little differently on each
    # processor, and one text of 32 is 3 points: a single ball of seven seeds found 0.88 to 0.97,
    # both together 0.90 to 0.95.
    found = sum(1 - row.robust for row in default)
    most = sum(1 - row.robust for row in more)
    assert found >= 0.9 * most
    assert more[-1].robust < 1  # some texts can be broken


def test_what_was_tried_of_each_text_is_said(trained):
    """Of one word, as many as there are near words; of two, those of both steps."""
    model = Classifier(1.0)
    model.load_state_dict(trained)
    section, rows = attack(model, 8)
    codes = {note.code: note.text for note in section.notes}
    survived = [row for row in rows if row.robust]
    assert survived
    assert [row.untried for row in survived] == [0.0] * len(survived)
    for row in rows:
        if not row.robust:
            assert row.untried is None
    assert f"{8 * NEIGHBOURS} of the median text" in codes["all-tried"]
    section, rows = attack(model, 8, queries=100)
    assert rows[0].untried == pytest.approx(1 - 100 / (8 * NEIGHBOURS))
    worst = [row for row in section.rows if row.attack == "worst"]
    assert [row.untried for row in worst] == [None] * len(worst)
    (text,) = (
        n.text for n in section.notes if n.code == "untried-changes" and "1 word:" in n.text
    )
    assert "75.0%" in text
    assert "--queries" in text


def test_a_search_with_a_flat_gradient_tries_every_word(trained):
    """Gradients of exactly 0 rank nothing: a tenth of the changes reaches all words."""
    model = Classifier(1e6)
    model.load_state_dict(trained)
    _, (first, _) = attack(model, 30, queries=150)
    _, (every, _) = attack(model, 30, queries=30 * NEIGHBOURS)
    assert first.robust < 1
    assert 1 - first.robust >= 0.6 * (1 - every.robust)


def test_the_default_is_said_where_options_are_explained():
    assert {ATTACKS[name].queries for name in ("words", "characters")} == {SINGLE_CHANGES}
    known = lipaudit.measures.attack.AttackOptions.options()
    assert f"words and characters: {SINGLE_CHANGES}" in known["queries"].usual
    assert f"patch: {ATTACKS['patch'].restarts}" in known["restarts"].usual
