from pathlib import Path

import pytest

from lipaudit.attacks.kinds import ATTACKS, PRESETS, Attack, adapt, read_plan
from lipaudit.errors import UsageError
from lipaudit.measures.attack import AttackOptions
from lipaudit.tables.trials import parse_budget, parse_radius


def test_standard_is_the_reference_autoattack():
    (trial,) = read_plan("standard", radii=[parse_radius("8/255")])
    assert [attack.name for attack in trial.attacks] == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert {attack.steps for attack in trial.attacks} == {100}
    assert [attack.turns for attack in trial.attacks] == [1, 9, 9, 1]
    assert trial.attacks[-1].queries == 5000


def test_paper_brings_its_own_radii_and_says_what_is_ours():
    plan = read_plan("paper")
    found = [
        (trial.label, trial.radius.text, trial.attacks[0].steps, [n.code for n in trial.notes])
        for trial in plan
    ]
    assert found == [
        ("fgsm", "2/255", 100, []),
        ("fgsm", "4/255", 100, []),
        ("pgd", "2/255", 4, ["own-step-size"]),
        ("pgd", "4/255", 4, ["own-step-size"]),
        ("autoattack", "2/255", 10, ["own-queries"]),
    ]
    assert {attack.steps for attack in plan[-1].attacks} == {10}


def test_custom_keeps_the_order_and_takes_settings_and_a_changed_preset_says_so():
    radii = [parse_radius("0.1"), parse_radius("0.2")]
    plan = read_plan("custom:square, pgd", norm="l2", radii=radii, queries=7, steps=3, restarts=2)
    assert [trial.radius for trial in plan] == radii
    same = {"steps": 3, "restarts": 2, "queries": 7}
    assert plan[0].attacks == (Attack("square", **same), Attack("pgd", **same))
    assert (plan[0].norm, plan[0].notes) == ("l2", ())
    (trial,) = read_plan("standard", radii=radii[:1], queries=100)
    assert trial.attacks[-1].queries == 100
    assert [note.code for note in trial.notes] == ["preset-changed"]
    assert "queries = 100" in trial.notes[0].text


def test_what_was_changed_is_reported():
    assert [n.code for n in adapt(Attack("apgd-t"), 2)[1]] == ["attack-skipped"]
    assert [n.code for n in adapt(Attack("apgd-t"), 3)[1]] == ["attack-replaced"]
    fitted, notes = adapt(Attack("fab-t"), 4)
    assert (fitted.targets, [n.code for n in notes]) == (3, ["fewer-targets"])


@pytest.mark.parametrize("preset", PRESETS)
def test_the_guide_says_what_each_preset_runs(preset):
    guide = Path(__file__).parents[2] / "docs/guide/attack.md"
    rows = [line for line in guide.read_text("utf-8").splitlines() if line.startswith("|")]
    assert any(f"`{preset}`" in row.split("|")[1] for row in rows)


def keys(attack, radii="", **how):
    given = [parse_budget(text) for text in radii.split(",") if text]
    return [str(trial.key) for trial in read_plan(attack, radii=given, **how)]


def test_plain_radii_are_counts_where_every_attack_counts_and_units_name_their_attack():
    assert keys("words,characters", "1,3") == [
        f"{name},{name},{n}" for name in ("words", "characters") for n in (1, 3)
    ]
    assert keys("pgd,words,characters", "0.1,2words", norm="token-l2") == [
        "pgd,token-l2,0.1",
        "words,words,2",
        *(f"characters,characters,{n}" for n in ATTACKS["characters"].radii),
    ]


def test_attacks_that_count_bring_radii_and_queries_of_their_own():
    plan = read_plan("words")
    assert [trial.radius.text for trial in plan] == list(ATTACKS["words"].radii)
    assert {trial.attacks[0].queries for trial in plan} == {ATTACKS["words"].queries}
    assert [t.attacks[0].queries for t in read_plan("custom:words", queries=7)] == [7, 7, 7]


@pytest.mark.parametrize(
    ("attack", "radii", "how", "message"),
    [
        ("strong", "0.1", {}, "unknown attack preset 'strong'"),
        ("custom:apgd", "0.1", {}, "unknown attack 'apgd'"),
        ("standard", "", {}, "no attack radius"),
        ("quick", "0.1", {"steps": 0}, "steps is 0"),
        ("paper", "8/255", {}, "fixes"),
        ("words", "0.5", {}, "0.5 is not a whole number of words"),
        ("pgd", "2words", {}, "no requested attack changes words"),
        ("words", "1", {"norm": "l2"}, "cannot search l2 balls"),
        ("pgd", "1", {"norm": "words"}, "pgd cannot change words"),
        ("words", "1", {"norm": "characters"}, "words cannot change characters"),
        ("custom:words,pgd", "1", {}, "have different units"),
        ("pgd,words", "2words", {}, "no attack radius"),
    ],
)
def test_mistakes_and_requests_that_mean_nothing_are_refused(attack, radii, how, message):
    with pytest.raises(UsageError, match=message) as caught:
        keys(attack, radii, **how)
    assert caught.value.advice


def suited(kind, **given):
    options = AttackOptions.parse(given).adapt(kind)
    again = AttackOptions.parse(options.model_dump(mode="json")).adapt(kind)
    assert again.model_dump() == options.model_dump()  # a report's settings repeat the run
    return [str(trial.key) for trial in options.trials()]


AUTO = [f"{name},linf,2/255" for name in ("fgsm", "pgd", "autoattack")]
COUNTED = [f"{name},{name},{k}" for name in ("words", "characters") for k in (1, 2, 4)]
PAPER = [f"{name},linf,{eps}/255" for name in ("fgsm", "pgd") for eps in (2, 4)] + AUTO[2:]
AUDIT = {"usual": "fgsm,quick", "usual_eps": "2/255"}


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("image", {"eps": "2/255"}, AUTO),
        ("image", {"attack": "pgd", "eps": "1", "norm": "l2"}, ["pgd,l2,1"]),
        ("image", {"usual": "fgsm", "usual_eps": "0.1"}, ["fgsm,linf,0.1"]),
        ("image", {"attack": "pgd", "usual_eps": "0.1"}, ["pgd,linf,0.1"]),
        ("image", {"attack": "paper", "usual_eps": "0.1"}, PAPER),
        ("tokens", {"attack": "pgd", "eps": "1", "norm": "token-l2"}, ["pgd,token-l2,1"]),
        ("text", {}, COUNTED),
        ("text", AUDIT, COUNTED),
        ("text", {"eps": "0.1"}, ["fgsm,token-l2,0.1", "pgd,token-l2,0.1"]),
        ("text", {"eps": "2words"}, ["words,words,2"]),
        ("text", {"attack": "pgd", "eps": "0.1", "norm": "l2"}, ["pgd,l2,0.1"]),
        ("text", {"attack": "words", "usual_eps": "2/255"}, COUNTED[:3]),
    ],
)
def test_a_model_gets_what_can_attack_it(kind, given, expected):
    assert suited(kind, **given) == expected


OF_TEXTS = {"words", "characters", "suffix", "random"}
BALLS = {*ATTACKS, "standard", "quick", "paper", "autoattack"} - OF_TEXTS - {"patch"}
ABLE = {
    "image": BALLS | {"patch"},
    "tokens": BALLS,
    "text": {"fgsm", "pgd"} | OF_TEXTS,
}


@pytest.mark.parametrize("kind", ["image", "tokens", "text"])
@pytest.mark.parametrize("attack", sorted(ABLE["image"] | ABLE["text"]))
def test_an_attack_either_fits_or_the_advice_does(kind, attack):
    given = {} if attack in OF_TEXTS | {"paper", "patch"} else {"eps": "0.1"}
    given |= {"transfer": ("adv.safetensors",)} if attack == "transfer" else {}
    options = AttackOptions.parse({"attack": attack} | given)
    if attack in ABLE[kind]:
        assert options.adapt(kind).trials()
        return
    with pytest.raises(UsageError, match="cannot attack") as caught:
        options.adapt(kind)
    advised = caught.value.advice[:-1].removeprefix("Use --attack ")
    assert set(advised.split(",")) <= ABLE[kind]
    eps = {"text": "0.1,1words,1tokens", "image": "0.1,1patch"}.get(kind, "0.1")
    assert AttackOptions.parse({"attack": advised, "eps": eps}).adapt(kind).trials()


def test_a_model_gets_what_its_texts_can_be_changed_by():
    """Without a tokenizer there are no characters, without a table of embeddings no words."""
    usual = AttackOptions.parse({"usual_eps": "2/255"})
    for changes, attack, radii in (
        (("words",), "words", ["1", "2", "4"]),
        ((), "fgsm,pgd", ["2/255", "2/255"]),
    ):
        options = usual.adapt("text", changes)
        assert options.attack == attack
        assert [trial.radius.text for trial in options.trials()] == radii
    for name in ("words", "characters"):
        named = AttackOptions.parse({"attack": name})
        with pytest.raises(UsageError, match=f"{name} cannot be changed for this model") as caught:
            named.adapt("text", ())
        advised, eps = caught.value.advice[:-1].removeprefix("Use --attack ").split(" --eps ")
        AttackOptions.parse({"attack": advised, "eps": eps}).adapt("text", ())


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        ("image", {"attack": "pgd", "eps": "0.1", "norm": "token-l2"}, "is a norm for token emb"),
        ("text", {"attack": "words", "eps": "1", "save_adv": "a.safetensors"}, "cannot store"),
        ("text", {"attack": "pgd", "eps": "0.1", "save_adv": "a.jsonl"}, "cannot store"),
    ],
)
def test_norms_and_files_have_to_suit_the_samples(kind, given, says):
    with pytest.raises(UsageError, match=says) as caught:
        AttackOptions.parse(given).adapt(kind)
    assert kind == "text" or caught.value.advice == "--norm linf or l2 or l1"
