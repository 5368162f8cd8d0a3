"""An audit of several models: the same samples, one model at a time, a report of each."""

import csv
import gc
import json
import weakref
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import lipaudit
from lipaudit import api
from lipaudit.errors import EvaluationError
from lipaudit.schema import load
from tests.commands import break_measure, invoke, refuse

pytestmark = pytest.mark.usefixtures("blank_charts")

THREE = ("demo", "demo:jasmin", "demo:robust")
PLACES = ("1-demo", "2-demo-jasmin", "3-demo-robust")


@pytest.fixture(autouse=True)
def _narrow(_elsewhere, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(autouse=True, scope="module")
def _own_garbage():
    """Behind every model garbage is collected: not among all that other tests hold."""
    gc.freeze()
    yield
    gc.unfreeze()


def audit(*args: str, models=THREE, code: int | None = 0):
    return invoke("audit", *models, *args, code=code)


def written(folder: str = "run"):
    return {path.parent.name: load(path) for path in sorted(Path(folder).glob("*/report.json"))}


def test_three_models_are_ranked_on_one_screen():
    files = ("-o", "models.csv", "-o", "all.json", "-f", "table")
    done = audit("-n", "4", "--attack", "pgd", "--run-dir", "run", *files)
    shown = done.stdout.splitlines()
    assert len(shown) <= 40
    assert max(map(len, shown)) <= 80
    assert done.stderr.splitlines()[-1] == "data:   run/*/report.json"
    reports = written()
    assert tuple(reports) == PLACES
    samples = {report.samples["ids"] for report in reports.values()}
    assert len(samples) == 1
    ranking = lipaudit.rank(list(reports.values()))
    assert ranking.model_dump_json(indent=2) + "\n" == Path("all.json").read_text()
    assert f"Best: {ranking.models[0].model}." in " ".join(done.stdout.split())
    rows = list(csv.DictReader(Path("models.csv").read_text().splitlines()))
    assert [row["model"] for row in rows] == [model.model for model in ranking.models]
    assert {path.name for path in Path("run/1-demo").iterdir()} == {"report.json", "report.html"}


@pytest.mark.parametrize("broken", [(), ("bounds",)])
def test_one_model_is_in_memory_at_a_time(monkeypatch, broken):
    loads, alive, load_net = [], [], api.load_net

    def counted(*args, **options):
        gc.collect()
        alive.append(sum(net() is not None for net in loads))
        net = load_net(*args, **options)
        loads.append(weakref.ref(net.module))
        return net

    monkeypatch.setattr(api, "load_net", counted)
    for name in broken:
        break_measure(monkeypatch, name, EvaluationError("out of luck"))
    only = ",".join(("jacobian", *broken))
    audit("-n", "1", "--only", only, "--run-dir", "run", code=3 if broken else 0)
    assert alive == [0] * 6


def test_where_one_model_fails_the_others_go_on(monkeypatch):
    break_measure(monkeypatch, "jacobian", EvaluationError("values are not finite"), "demo:jasmin")
    done = audit(
        "-n", "2", "--only", "jacobian,attention", "--run-dir", "run", "-o", "all.md", code=3
    )
    assert "demo:jasmin: jacobian failed: values are not finite" in " ".join(done.stderr.split())
    assert "--resume to measure only what is missing" in done.stderr
    reports = written()
    assert [report.status for report in reports.values()] == ["complete", "partial", "complete"]
    for text in (Path("run/report.html").read_text(), Path("all.md").read_text(), done.stdout):
        said = " ".join(text.rpartition("</nav>")[2].split())
        assert "demo:jasmin: jacobian failed: values are not finite" in said
        assert said.index("not finite") < said.index("Which model is the most robust?")
        assert "demo:robust" in said
    page = Path("run/report.html").read_text()
    assert page.index('id="ranking"') < page.index('id="attention"')


def test_a_model_of_which_nothing_could_be_measured_has_a_report_that_says_so(monkeypatch):
    break_measure(monkeypatch, "jacobian", EvaluationError("out of luck", "Try again."), "demo")
    done = audit("-n", "2", "--only", "jacobian", "--run-dir", "run", code=3)
    lost, *others = written().values()
    assert (lost.status, lost.failures["jacobian"].reason) == ("partial", "out of luck")
    assert all(report.status == "complete" for report in others)
    assert "Best: demo:robust." in " ".join(done.stdout.split())
    assert "Not measured: demo." in " ".join(done.stdout.split())


def test_an_audit_that_was_cut_short_goes_on_where_it_stopped(monkeypatch):
    common = ("-n", "2", "--only", "jacobian")
    with monkeypatch.context() as broken:
        break_measure(broken, "jacobian", KeyboardInterrupt(), "demo:jasmin")
        done = audit(*common, code=130)
    (folder,) = Path("lipaudit-runs").glob("*-demo-*")
    text = "finished batches are kept: run the same command with --resume to continue: "
    assert done.stderr.count(text) == 1
    assert tuple(written(folder)) == PLACES[:1]
    first = load(folder / "1-demo/report.json")
    seen = break_measure(monkeypatch, "jacobian", EvaluationError(""), "")
    again = audit(*common, "--resume", "--run-dir", "run")
    assert "finished 2 of 2 samples of jacobian: continuing from there" in again.stderr
    assert seen == ["demo:jasmin", "demo:robust"]
    assert tuple(written()) == PLACES
    assert written()[PLACES[0]].sections == first.sections
    assert not list(Path("cache").rglob("*.npz"))


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("demo demo", 2, "demo is named twice"),
        ("demo demo:nonsense", 4, "demo:nonsense: "),
        ("demo demo:robust -o map.png", 2, "cannot tell the format of map.png"),
        ("demo demo:robust --rank-by bounds.exact", 2, "has one value per row"),
        ("demo --rank-by jacobian.norm:p95", 2, "--rank-by needs several models"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(monkeypatch, line, code, says):
    seen = break_measure(monkeypatch, "jacobian", EvaluationError(""), "")
    refuse(code, says, "audit", *line.split())
    assert seen == []
    assert not Path("lipaudit-runs").exists()


def test_quiet_says_nothing_but_the_result():
    by = ("--rank-by", "jacobian.norm:p95")
    done = audit("-n", "1", "--only", "jacobian", "-q", "-f", "json", "--run-dir", "run", *by)
    assert done.stderr == ""
    written = json.loads(done.stdout)
    assert (len(written["models"]), written["criterion"]) == (3, "jacobian.norm:p95")
    saved = [f"run/{place}/report.json" for place in PLACES]
    again = invoke("report", *saved, "-f", "json", *by, code=None)
    assert again.stdout == done.stdout


OWN = """
import torch
from torch import nn
from lipaudit import ModelSpec

class Conv(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.patch, self.head = nn.Conv2d(3, 6, 4, 4), nn.Linear(6, 2)
    def forward(self, x):
        return self.head(self.patch(x).flatten(2).mean(2).tanh())

class Words(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(vocabulary, 4), nn.Linear(4, 2)
    def forward(self, ids, mask=None):
        return self.head(self.embed(ids).mean(1))

def small():
    return ModelSpec(Conv(0), (3, 8, 8), labels=("cat", "dog"))

def large():
    return ModelSpec(Conv(1), (3, 16, 16), labels=("cat", "dog"))

def turned():
    return ModelSpec(Conv(0), (3, 8, 8), labels=("dog", "cat"))

def other():
    return ModelSpec(Conv(0), (3, 8, 8), labels=("church", "truck"))

def words(size=3, vocabulary=40):
    cut = lambda text, most: [1 + sum(map(ord, text[i : i + size])) % (vocabulary - 1)
                              for i in range(0, len(text), size)][:most]
    return ModelSpec(Words(vocabulary), (32,), kind="text", vocabulary=vocabulary, tokenize=cut)

def letters():
    return words(1, 30)
"""


@pytest.fixture
def pictures():
    Path("own.py").write_text(OWN)
    rng = np.random.default_rng(0)
    for i, name in enumerate(("cat", "dog") * 4):
        Path("val", name).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"val/{name}/{i}.png")


def ranked(*names: str, data: str) -> tuple[dict, list[lipaudit.Report]]:
    models = [f"py:own.py:{name}" for name in names]
    few = ("-n", "8", "--only", "jacobian", "--data", data, "-q", "-f", "json", "--run-dir", "run")
    done = audit(*few, models=models)
    return json.loads(done.stdout), list(written().values())


@pytest.mark.parametrize("second", ["large", "turned"])
def test_the_same_pictures_are_paired_in_every_size_and_order_of_classes(pictures, second):
    ranking, reports = ranked("small", second, data="val")
    ids = [set(report.samples["ids"]) for report in reports]
    assert not ids[0] & ids[1]
    assert reports[0].samples["place"] == reports[1].samples["place"]
    assert [note["code"] for note in ranking["notes"]] == ["paired-by-place"]
    assert ranking["compared"] == 1
    (difference,) = (model["difference"] for model in ranking["models"] if model["difference"])
    norms = [np.array(report.section("jacobian").samples["norm"]) for report in reports]
    if second == "turned":  # the order of the classes changes no norm
        assert difference["status"] == "unchanged"
        return
    best, other = sorted(norms, key=np.median)
    assert difference["samples"] == 8
    assert difference["paired"] == pytest.approx(
        np.expm1(np.median(np.log(other / best))), abs=1e-12
    )


def test_the_same_texts_are_paired_by_every_tokenizer(pictures):
    Path("texts.csv").write_text("text\n" + "\n".join(f"the {i}th text" for i in range(8)))
    ranking, reports = ranked("words", "letters", data="texts.csv")
    assert not {*reports[0].samples["ids"]} & {*reports[1].samples["ids"]}
    assert ranking["compared"] == 1


def test_labels_of_other_classes_are_refused(pictures):
    np.savez("x.npz", x=np.zeros((2, 3, 8, 8), np.float32), y=np.array([0, 1]))
    models = ("py:own.py:small", "py:own.py:other")
    done = audit("--data", "x.npz", "-n", "2", models=models, code=4)
    assert "the class 'cat' of py:own.py:small is 'church' in py:own.py:other" in done.stderr
