"""What goes out to others: the model card, as the Hub's own library reads it, and badges."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from huggingface_hub import ModelCard

from lipaudit.gate import judge, parse_rule
from lipaudit.report import of_judgement, render
from lipaudit.report.draw.colours import contrast
from lipaudit.report.page.publishing import badge as badges
from lipaudit.results import Note
from lipaudit.results.summary import summary
from tests.report.conftest import shard_of

GUIDE = Path(__file__).parents[2] / "docs/guide/hub.md"
HOSTILE = 'x\n---\n<script>"\x1b[31m: {[#'
HUB = re.compile(r"(?:[\w-]+/)?[\w.-]+", re.ASCII)
"""What the Hub takes as the type of a data set."""


def card(report) -> ModelCard:
    return ModelCard(render(report, "model-card").decode())


def of_run(report, *, spec="timm:vit_tiny@main", source="timm", data="demo", commit=""):
    model = report.run.model.model_copy(update={"spec": spec, "source": source})
    read = report.run.data.model_copy(update={"spec": data, "commit": commit})
    run = report.run.model_copy(update={"model": model, "data": read})
    return report.model_copy(update={"run": run})


def warned(report, code):
    note = Note(level="warning", code=code, text="nothing that matters")
    sections = (s.model_copy(update={"notes": (*s.notes, note)}) for s in report.sections)
    return report.model_copy(update={"sections": tuple(sections)})


def only(report, *measures):
    return report.model_copy(update={"sections": tuple(map(report.section, measures))})


def test_the_hub_reads_the_figures_of_the_report(report):
    data = card(of_run(report)).data
    assert (data.model_name, data.library_name) == ("vit_tiny", "timm")
    assert {"lipaudit", "robustness"} == set(data.tags)
    summed = summary(report)
    said = [(r.metric_type, r.metric_name, r.metric_value) for r in data.eval_results]
    kinds = {"clean": "accuracy", "attacked": "robust_accuracy", "certified": "certified_accuracy"}
    accuracies = [(kinds[each.kind], each.share) for each in summed.accuracy]
    assert [(kind, value) for kind, _, value in said[: len(accuracies)]] == accuracies
    norms = [getattr(summed.norms, name) for name in ("median", "p95", "max")]
    assert said[len(accuracies) :] == [
        ("certified_radius", "certified radius, linf, median", 0.0033),
        *(
            ("jacobian_norm", f"Jacobian norm, {name}", value)
            for name, value in zip(("median", "p95", "max"), norms, strict=True)
        ),
    ]
    attacked = next(r for r in data.eval_results if r.metric_name == "under attack, linf 2/255")
    known = next(each for each in summed.accuracy if each.ball == "linf 2/255")
    assert attacked.metric_args == {
        "norm": "linf", "eps": "2/255", "attacks": ["fgsm", "pgd"], "samples": 24,
        "low": known.low, "high": known.high,
    }  # fmt: skip
    assert {r.verified for r in data.eval_results} == {False}
    assert {r.task_type for r in data.eval_results} == {"image-classification"}


@pytest.mark.parametrize(
    ("spec", "source", "name", "library"),
    [
        ("hf:ORG/NAME@v1.2", "hf", "NAME", "transformers"),
        ("/home/me/secret/check point", "hf", "check-point", "transformers"),
        ("py:model.py:load", "py", "py-model.py-load", None),
        (HOSTILE, "demo", "x-----script-31m", None),
        ("\u202e", "demo", "unnamed", None),
    ],
)
def test_a_model_is_named_without_its_path(report, spec, source, name, library):
    data = card(of_run(report, spec=spec, source=source)).data
    assert (data.model_name, data.library_name) == (name, library)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("/data/mine/val.npz", ("val.npz", None, None, None)),
        ("demo:train", ("demo-train", None, None, None)),
        ("hf:stanfordnlp/imdb[test]", ("stanfordnlp/imdb", None, "test", "c0ffee")),
        ("hf:nyu-mll/glue/sst2[test[:5]]@v1", ("nyu-mll/glue", "sst2", "test[:5]", "c0ffee")),
        ("hf:/data/saved[test]", ("saved-test", None, None, None)),
        (HOSTILE, ("x-----script-31m", None, None, None)),
    ],
)
def test_data_are_named_as_the_hub_names_them(report, spec, named):
    for result in card(of_run(report, data=spec, commit="c0ffee")).data.eval_results:
        parts = (result.dataset_config, result.dataset_split, result.dataset_revision)
        assert (result.dataset_type, *parts) == named
        assert HUB.fullmatch(result.dataset_type)


def test_the_section_says_how_it_was_measured_and_what_it_means(report):
    text = card(of_run(report)).text
    plain = text.replace("\\", "")
    for said in (
        "## Robustness (lipaudit)",
        "### Scorecard",
        report.run.command,
        report.run.model.weights_sha256[:16],
        report.run.data.suite_id[:16],
        f"{report.run.data.samples} samples",
        f"torch {report.run.versions['torch']}",
        "certified in the ball",
        "is no guarantee. What is certified is one",
    ):
        assert said in plain, said
    assert text.index("did not converge") < text.index("### Scorecard")
    assert "lipaudit train" not in text
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert all(line.startswith(("## ", "### ")) for line in headings)
    pointwise = card(only(report, "attack")).text
    assert "Nothing here is certified." in pointwise
    assert "Certified:" not in pointwise


def test_a_card_that_there_is_keeps_what_it_says(report, tmp_path, monkeypatch):
    """The lines of the guide, run."""
    monkeypatch.chdir(tmp_path)
    theirs = "---\nlicense: mit\ntags:\n- cats\n---\n# Cats\n\nOf cats.\n"
    Path("README.md").write_text(theirs)
    Path("card.md").write_bytes(render(of_run(report), "model-card"))
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    exec(code, {})
    merged = ModelCard.load("README.md")
    assert merged.data.eval_results == card(of_run(report)).data.eval_results
    assert (merged.data.license, merged.data.tags) == ("mit", ["cats"])
    assert merged.text.index("Of cats.") < merged.text.index("## Robustness (lipaudit)")


@pytest.mark.parametrize("code", ["random-weights", "random-data"])
def test_programs_get_no_figure_that_needs_a_warning_beside_it(report, code):
    shown = card(warned(report, code))
    assert shown.data.eval_results is None
    assert "nothing that matters" in shown.text
    assert "clean accuracy" in shown.text
    badge = json.loads(render(warned(report, code), "endpoint"))
    assert (badge["message"], badge["color"]) == (code.replace("-", " "), badges.GREY)


def test_a_partial_report_is_no_badge_and_says_so_first(report):
    partial = report.model_copy(update={"status": "partial"})
    assert card(partial).data.eval_results is None
    assert "Partial: the run was cut short" in card(partial).text
    assert json.loads(render(partial, "endpoint"))["message"] == "partial"


def test_a_shard_is_no_badge_and_says_so_first(report):
    shard = report.model_copy(update={"shard": shard_of(1, 2)})
    assert card(shard).data.eval_results is None
    assert "Partial: this is shard 1 of 2" in card(shard).text
    assert "complete, shard 1 of 2" in card(shard).text
    assert json.loads(render(shard, "endpoint"))["message"] == "shard 1 of 2"


def test_what_is_no_number_is_no_metric(report):
    attack = report.section("attack")
    rows = tuple(r.model_copy(update={"robust": float("nan")}) for r in attack.rows)
    broken = report.model_copy(update={"sections": (attack.model_copy(update={"rows": rows}),)})
    assert [r.metric_type for r in card(broken).data.eval_results] == ["accuracy"]


def test_a_report_without_figures_is_a_card_without(blank_report):
    assert card(blank_report).data.eval_results is None
    assert json.loads(render(blank_report, "endpoint"))["message"] == "no figures"


@pytest.mark.parametrize(
    ("measures", "label"),
    [
        (("attack", "jacobian"), "robust accuracy linf 4/255"),
        (("attack", "certify"), "certified accuracy linf 2/255"),
        (("jacobian", "bounds"), "Jacobian norm"),
        (("bounds",), "steepest head"),
    ],
)
def test_a_badge_shows_the_strongest_figure_that_there_is(report, measures, label):
    assert json.loads(render(only(report, *measures), "endpoint"))["label"] == label


@pytest.mark.parametrize(
    ("share", "low", "colour"),
    [(1.0, 0.75, "GREEN"), (0.99, 0.7499, "YELLOW"), (0.6, 0.5, "YELLOW"), (0.6, 0.4, "ORANGE"),
     (0.3, 0.24, "RED"), (0.0, 0.0, "RED"), (0.8, None, "GREEN")],
)  # fmt: skip
def test_an_accuracy_has_the_colour_of_its_lower_limit(report, share, low, colour):
    attack = report.section("attack")
    limits = {"robust": share, "robust_low": low, "robust_high": None if low is None else 1.0}
    rows = tuple(row.model_copy(update=limits) for row in attack.rows)
    shown = report.model_copy(update={"sections": (attack.model_copy(update={"rows": rows}),)})
    badge = json.loads(render(shown, "endpoint"))
    assert badge["color"] == getattr(badges, colour)
    ends = "" if low is None else f" ({100 * low:.0f}\u2013100)"
    assert badge["message"] == f"{share:.0%}{ends}"


def test_every_colour_can_be_read_in_white():
    for name in ("GREEN", "YELLOW", "ORANGE", "RED", "BLUE", "GREY"):
        channels = tuple(bytes.fromhex(getattr(badges, name)[1:]))
        assert contrast(channels) == "#ffffff", name
        assert 1.05 / (luminance(channels) + 0.05) >= 4.5, name


def luminance(channels) -> float:
    """Relative luminance of WCAG 2."""
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(part * of for part, of in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_svg_says_the_same_to_eyes_and_to_ears(report):
    shown = json.loads(render(report, "endpoint"))
    root = ElementTree.fromstring(render(report, "badge"))
    space = "{http://www.w3.org/2000/svg}"
    said = f"{shown['label']}: {shown['message']}"
    assert (root.get("role"), root.get("aria-label")) == ("img", said)
    assert root.find(f"{space}title").text == said
    label, message = root.iter(f"{space}text")
    assert (label.text, message.text) == (shown["label"], shown["message"])
    left, right = (float(each.get("textLength")) for each in (label, message))
    assert float(message.get("x")) > float(label.get("x")) + left
    assert float(root.get("width")) > float(message.get("x")) + right
    assert not re.search(rb"href|url\((?!#)|@import", render(report, "badge"))


def test_a_badge_of_the_gate_is_its_outcome(report, other):
    passed = judge(report, report, (parse_rule("attack.robust >= -2pp"),))
    unproven = [v.model_copy(update={"status": "inconclusive"}) for v in passed.verdicts]
    open_ = passed.model_copy(update={"verdicts": (*passed.verdicts, *unproven)})
    outcomes = [
        (passed, "passed", badges.GREEN),
        (
            judge(other, report, (parse_rule("bounds.layers.exact <= 0.1"),)),
            "regressed",
            badges.RED,
        ),
        (open_, f"passed, {len(unproven)} not proven", badges.YELLOW),
        (open_.model_copy(update={"strict": True}), "not proven", badges.ORANGE),
        (
            passed.model_copy(
                update={"verdicts": (unproven[0].model_copy(update={"status": "error"}),)}
            ),
            "not judged",
            badges.GREY,
        ),
    ]
    for judgement, message, colour in outcomes:
        shown = json.loads(render(of_judgement(judgement), "endpoint"))
        assert (shown["message"], shown["color"]) == (message, colour)


def test_hostile_names_break_neither(report):
    attack = report.section("attack")
    rows = tuple(row.model_copy(update={"eps_text": "1", "norm": "<b>&"}) for row in attack.rows)
    section = attack.model_copy(update={"rows": rows})
    hostile = of_run(report.model_copy(update={"sections": (section,)}), spec=HOSTILE)
    assert card(hostile).data.eval_results
    assert "<script>" not in card(hostile).text
    root = ElementTree.fromstring(render(hostile, "badge"))
    assert "<b>&" in root.get("aria-label")
