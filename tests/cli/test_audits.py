"""Audits that finish, of one model or of several: what fails costs its own figures alone."""

import csv
import gc
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import lipaudit
from lipaudit.errors import EvaluationError, InputError
from lipaudit.measures import load_measures
from lipaudit.report import render
from lipaudit.schema import load
from tests.cli import own
from tests.commands import break_measure, invoke, refuse

pytestmark = pytest.mark.usefixtures("blank_charts")

AUDIT = ("audit", "demo", "-n", "1", "--run-dir", "run")


def audit_demo(*args: str, code: int | None = 0):
    return invoke(*AUDIT, *args, code=code)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (EvaluationError("values are not finite", "Try float64."), 3, "values are not finite"),
        (InputError("there is no such thing"), 4, "no such thing"),
        (ZeroDivisionError("by zero"), 3, "internal error: ZeroDivisionError: by zero"),
        (RuntimeError("CUDA error: device-side assert triggered"), 3, "the device failed"),
        (torch.OutOfMemoryError("CUDA out of memory"), 3, "out of memory"),
    ],
)
def test_a_measure_that_fails_leaves_its_reason_in_its_place(monkeypatch, error, code, says):
    break_measure(monkeypatch, "attention", error)
    done = audit_demo("--only", "attention,jacobian", code=None)
    assert done.exit_code == code, done.output
    assert says in done.stderr.splitlines()[-2]
    assert "--resume" in done.stderr.splitlines()[-1]
    report = load("run/report.json")
    assert report.status == "partial"
    lost, kept, *_ = report.sections
    assert (lost.measure, kept.measure) == ("attention", "jacobian")
    assert says in lost.failure.reason
    assert lost.failure.exit_code == code
    assert kept.failure is None
    assert kept.rows
    assert "failure" not in kept.model_dump()
    for format in ("table", "markdown", "html"):
        page = render(report, format).decode()
        assert "attention failed: " in page
        assert "The other measures are complete." in " ".join(page.split())
        assert page.rindex("FAILED: ") > page.index(
            "Jacobian norm"
        )  # in the order of the scorecard


def test_the_last_hope_ends_the_run_with_its_own_error_and_a_stop_keeps_what_there_is(monkeypatch):
    with monkeypatch.context() as broken:
        break_measure(broken, "jacobian", EvaluationError("values are not finite"))
        done = audit_demo("--only", "jacobian", code=3)
    assert "error: values are not finite" in done.stderr
    assert not Path("run").exists()
    break_measure(monkeypatch, "jacobian", KeyboardInterrupt())
    done = audit_demo("--only", "attention,jacobian", code=130)
    assert "run the same command with --resume to continue" in done.stderr
    assert list(Path("cache").rglob("*.npz"))


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("demo --only bounds,atention", 2, "no measure 'atention'"),
        ("demo --skip scaling", 2, "--skip scaling: an audit does not run it"),
        ("demo --skip bounds,attention,jacobian,attack", 2, "no measure is left"),
        ("demo --only bounds --attack pgd", 2, "--attack needs a measure attack"),
        ("demo --only bounds,bounds", 2, "bounds is named twice"),
        ("demo --attack nope", 2, "unknown attack"),
        ("demo --norm l3", 2, "--norm"),
        ("demo --norm token-l2 --attack pgd", 2, "token-l2 is a norm for token embeddings"),
        ("demo --eps 2", 2, "larger than the range of the data"),
        ("demo --attack pgd --data random", 2, "attack needs labelled samples"),
        ("demo --attack pgd --data random", 2, "name the label column with --label-column"),
        ("demo --run-dir file", 2, "file is a file"),
        ("demo --run-dir file/inside", 2, "file is a file"),
        ("demo --rank-by jacobian.norm:p95", 2, "--rank-by needs several models"),
        ("demo demo", 2, "demo is named twice"),
        ("demo demo:nonsense", 4, "demo:nonsense: "),
        ("demo demo:robust -o map.png", 2, "cannot tell the format of map.png"),
        ("demo demo:robust --rank-by bounds.exact", 2, "has one value per row"),
    ],
)
def test_what_can_be_checked_is_checked_before_anything_is_measured(monkeypatch, line, code, says):
    Path("file").touch()
    for name in load_measures():
        break_measure(monkeypatch, name, AssertionError("something was measured"))
    refuse(code, says, "audit", *line.split(), "-n", "1")
    assert sorted(p.name for p in Path().iterdir()) == ["file"]
    Path("file").rename("lipaudit-runs")  # the folder of runs
    refuse(2, "lipaudit-runs is a file", "audit", "demo", "-n", "1")


def test_a_partial_report_is_no_baseline_passes_no_gate_and_is_completed(monkeypatch):
    args = ("--only", "attention,jacobian")
    audit_demo(*args)
    invoke("baseline", "save", "run/report.json")
    with monkeypatch.context() as broken:
        break_measure(broken, "attention", EvaluationError("values are not finite"))
        audit_demo(*args, code=3)
    refused = invoke("baseline", "save", "run/report.json", "-o", "b.json", code=5)
    assert "attention failed: values are not finite" in refused.stderr
    rule = ("--fail-on", "jacobian.norm:median <= +5%")
    judged = invoke("gate", "run/report.json", *rule, code=3)
    assert "partial: attention failed" in " ".join(judged.stdout.split())
    # A journal that holds every sample leaves nothing to measure: the generator is never asked.
    break_measure(monkeypatch, "jacobian", AssertionError("it is measured again"))
    audit_demo(*args, "--resume", "--run-dir", "again")
    assert load("again/report.json").status == "complete"


THREE = ("demo", "demo:jasmin", "demo:robust")
PLACES = ("1-demo", "2-demo-jasmin", "3-demo-robust")


@pytest.fixture(autouse=True, scope="module")
def _own_garbage():
    """Behind every model garbage is collected: not among all that other tests hold."""
    gc.freeze()
    yield
    gc.unfreeze()


def audit(*args: str, models=THREE, **how):
    return invoke("audit", *models, *args, **how)


def written(folder: str = "run"):
    return {path.parent.name: load(path) for path in sorted(Path(folder).glob("*/report.json"))}


def test_three_models_are_ranked_on_one_screen():
    files = ("-o", "models.csv", "-o", "all.json", "-f", "table")
    done = audit("-n", "2", "--attack", "pgd", "--run-dir", "run", *files, columns=80)
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
    assert f": {ranking.models[0].model} (" in " ".join(done.stdout.split())
    rows = list(csv.DictReader(Path("models.csv").read_text().splitlines()))
    assert [row["model"] for row in rows] == [model.model for model in ranking.models]
    assert {path.name for path in Path("run/1-demo").iterdir()} == {"report.json", "report.html"}


@pytest.mark.parametrize("broken", [(), ("bounds",)])
def test_one_model_is_in_memory_at_a_time(monkeypatch, broken):
    own.MADE.clear()
    for name in broken:
        break_measure(monkeypatch, name, EvaluationError("out of luck"))
    models = [f"py:tests.cli.own:{name}" for name in ("one", "two", "three")]
    only = ",".join(("jacobian", *broken))
    how = ("-n", "1", "--data", "demo", "--only", only)
    audit(*how, models=models, code=3 if broken else 0)
    assert [alive for _, alive in own.MADE] == [0] * 6


def test_where_one_model_fails_the_others_go_on(monkeypatch):
    why = EvaluationError("values are not finite")
    break_measure(monkeypatch, "jacobian", why, "demo:jasmin")
    only = ("-n", "2", "--only", "jacobian,attention")
    done = audit(*only, "--run-dir", "run", "-o", "all.md", code=3)
    assert "demo:jasmin: jacobian failed: values are not finite" in " ".join(done.stderr.split())
    assert "--resume to measure only what is missing" in done.stderr
    statuses = [report.status for report in written().values()]
    assert statuses == ["complete", "partial", "complete"]
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
    assert "Best by Jacobian norm: demo:robust (" in " ".join(done.stdout.split())
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


def test_quiet_says_nothing_but_the_result():
    by = ("--rank-by", "jacobian.norm:p95")
    done = audit("-n", "1", "--only", "jacobian", "-q", "-f", "json", "--run-dir", "run", *by)
    assert done.stderr == ""
    written = json.loads(done.stdout)
    assert (len(written["models"]), written["criterion"]) == (3, "jacobian.norm:p95")
    saved = [f"run/{place}/report.json" for place in PLACES]
    again = invoke("report", *saved, "-f", "json", *by, code=None)
    assert again.stdout == done.stdout


@pytest.fixture
def pictures():
    rng = np.random.default_rng(0)
    for i, name in enumerate(("cat", "dog") * 4):
        Path("val", name).mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"val/{name}/{i}.png")


def ranked(*names: str, data: str) -> tuple[dict, list[lipaudit.Report]]:
    models = [f"py:tests.cli.own:{name}" for name in names]
    few = ("-n", "8", "--only", "jacobian", "--data", data, "-q", "-f", "json", "--run-dir", "run")
    done = audit(*few, models=models)
    return json.loads(done.stdout), list(written().values())


@pytest.mark.parametrize("second", ["large", "turned"])
def test_the_same_pictures_are_paired_in_every_size_and_order_of_classes(pictures, second):
    ranking, reports = ranked("animals", second, data="val")
    ids = [set(report.samples["ids"]) for report in reports]
    assert not ids[0] & ids[1]
    assert reports[0].samples["place"] == reports[1].samples["place"]
    assert [note["code"] for note in ranking["notes"]] == ["paired-by-place"]
    assert ranking["compared"] == 1
    (difference,) = (model["difference"] for model in ranking["models"] if model["difference"])
    if second == "turned":  # the order of the classes changes no norm
        assert difference["status"] == "unchanged"
        return
    norms = [np.array(report.section("jacobian").samples["norm"]) for report in reports]
    best, other = sorted(norms, key=np.median)
    truth = np.expm1(np.median(np.log(other / best)))
    assert difference["samples"] == 8
    assert difference["paired"] == pytest.approx(truth, abs=1e-12)


def test_the_same_texts_are_paired_by_every_tokenizer(pictures):
    Path("texts.csv").write_text("text\n" + "\n".join(f"the {i}th text" for i in range(8)))
    ranking, reports = ranked("words", "letters", data="texts.csv")
    assert not {*reports[0].samples["ids"]} & {*reports[1].samples["ids"]}
    assert ranking["compared"] == 1
