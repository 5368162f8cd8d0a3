"""A package of its own adds a bound, and nothing of ours changes; a wrong one is stopped."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests import processes

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tests/plugins"


def lipaudit(*args, cwd, path=EXAMPLE, then=()):
    """Run a command where the package in `path` is installed, and then others."""
    before = partial(processes.installed, path)
    return processes.completed(*args, cwd=cwd, before=before, then=then)


def check_bare_tensors():
    """Compute the example bound of the hostile heads of our own tests, beside the exact norm."""
    processes.installed(EXAMPLE)
    import lipaudit

    rng = np.random.default_rng(0)
    for scale in (0.0, 1e-3, 1.0, 30.0):  # uniform attention to one-hot
        x, (wq, wk, wv) = rng.normal(size=(2, 5, 4)), scale * rng.normal(size=(3, 2, 4, 3))
        bound = lipaudit.bounds.frobenius(x, wq, wk, wv)
        assert (lipaudit.bounds.exact(x, wq, wk, wv) <= bound * (1 + 1e-6) + 1e-12).all()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Reports of `bounds demo`, with the example bound."""
    folder = tmp_path_factory.mktemp("measured")
    outputs = [f"-o{folder / name}" for name in ("a.json", "a.html", "a.md")]
    done = lipaudit("bounds", "demo", "-n", 2, "-q", *outputs, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "a.txt").write_text(done.stdout, encoding="utf-8")
    return folder


def test_the_bound_is_in_the_rows_and_above_the_exact_norm(measured):
    rows = json.loads((measured / "a.json").read_text())["sections"][0]["rows"]
    assert all(row["frobenius"] > row["exact"] for row in rows)
    names = list(rows[0])
    assert names.index("frobenius") == names.index("hu") + 1
    assert names.index("log10_frobenius") == names.index("log10_hu") + 1


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html"])
def test_the_bound_is_in_every_format(measured, name):
    text = (measured / name).read_text(encoding="utf-8")
    assert text.count("Frobenius") >= 3  # multiples of exact, tightness, picture


def test_the_bound_is_on_bare_tensors_explained_compared_and_gated(measured, tmp_path):
    both = (f"{measured / 'a.json'}",) * 2
    gate = ("gate", both[0], "-b", both[1], "--fail-on")
    others = (
        ("compare", *both, "-f", "json", "-o", "pair.json", "-q"),
        ("report", *both, "-o", "pair.md", "-q"),
        (*gate, "bounds.frobenius:each <= +5%"),
        (*gate, "bounds.frobenius:each <= 1e-3"),
    )
    explain = ("explain", "frobenius")
    done = processes.completed(*explain, cwd=tmp_path, before=check_bare_tensors, then=others)
    assert "||K W_Q^T||_F" in done.stdout
    assert "Proven upper bound, at the samples X only" in done.stdout
    assert '"metric": "bounds.frobenius:median"' in (tmp_path / "pair.json").read_text()
    assert "Frobenius" in (tmp_path / "pair.md").read_text()
    # The second gate runs only if the first found no regression.
    assert "regressed: bounds.frobenius:each <= 1e-3" in done.stdout
    assert done.returncode == 1, done.stderr


def test_a_report_is_read_and_printed_where_the_plugin_is_not_installed(measured, tmp_path):
    again = tmp_path / "again.json"
    report = ("report", measured / "a.json", "-f", "markdown", f"-o{again}")
    done = processes.completed(*report, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Frobenius") >= 3
    before, after = (json.loads(p.read_text())["sections"] for p in (measured / "a.json", again))
    assert after == before


def test_scaling_follows_the_bound(tmp_path):
    scaling = ("scaling", "demo", "-n", 1, "--mode", "real", "-q", "-f", "json")
    sections = json.loads(lipaudit(*scaling, cwd=tmp_path).stdout)["sections"]
    layers = [row for row in sections[0]["rows"] if row["layer"] is not None]
    assert layers
    assert all(row["bound_frobenius"] > row["norm"] for row in layers)
    assert any(row["frobenius_exponent"] for row in sections[1]["rows"])


def test_the_guide_quotes_the_example():
    guide = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    files = [*EXAMPLE.rglob("*.py"), *EXAMPLE.rglob("entry_points.txt")]
    example = "".join(path.read_text(encoding="utf-8") for path in files)
    quoted = re.findall(r"```\w+\n(.*?)```", guide, re.DOTALL)
    assert len(quoted) >= 3
    assert [block for block in quoted if block not in example] == []


def test_reading_a_report_needs_no_torch(measured):
    code = (
        "import sys\nfrom pathlib import Path\nfrom lipaudit import report, schema\n"
        f"page = report.render(schema.load(Path({str(measured / 'a.json')!r})), 'markdown')\n"
        "assert b'Frobenius' in page\nassert 'torch' not in sys.modules\n"
        "assert 'lipaudit_example.bounds' in sys.modules"
    )
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLE}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


RECORD = """
from lipaudit.theory.bounds.record import Bound
words = dict.fromkeys(("label", "meaning", "formula", "source", "explanation"), "x")
def low(known): return 1e-6 * known.p_norm
RECORD = Bound(name={name!r}, **words, {compute})
"""


@pytest.fixture
def strangers(tmp_path):
    """Install a package with one bound; return its folder."""

    def add(name, compute="compute=low", entry=None):
        (tmp_path / "strange_record.py").write_text(RECORD.format(name=name, compute=compute))
        info = tmp_path / "strange_bounds-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange-bounds\nVersion: 1\n")
        points = f"[lipaudit.bounds]\n{entry or name} = strange_record:RECORD\n"
        (info / "entry_points.txt").write_text(points)
        return tmp_path

    return add


def test_a_bound_below_the_norm_ends_the_run_by_its_name(strangers):
    folder = strangers("strange")
    done = lipaudit("bounds", "demo", "-n", 2, "-q", cwd=folder, path=folder)
    assert done.returncode == 3
    assert done.stdout == ""
    assert "strange of head 0.0 (blocks.0.attn) is" in done.stderr
    assert "below the exact norm" in done.stderr
    assert "a bug in strange_record:low. Report it to its authors" in done.stderr
    assert "bug in lipaudit" not in done.stderr


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (("exact",), "has a name that is in use already"),
        (("castin",), "has a name that is in use already"),
        (("strange", ""), "missing 1 required keyword-only argument: 'compute'"),
        (("strange", "compute=no_such"), "name 'no_such' is not defined"),
        (("strange", "compute=low", "other"), "is called 'strange' in its record"),
        (("log10_castin",), "in use already"),
        (("log10_x",), "not a valid name of a bound"),
    ],
)
def test_a_record_that_cannot_be_used_is_refused_by_its_package(strangers, record, says):
    folder = strangers(*record)
    done = lipaudit("explain", "sharp", cwd=folder, path=folder)
    assert done.returncode == 2
    assert "strange-bounds" in done.stderr
    assert says in done.stderr
