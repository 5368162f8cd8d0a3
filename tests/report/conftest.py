import math

import numpy as np
import pytest

from lipaudit.measures import layouts
from lipaudit.measures.attack import ATTACK_TABLE
from lipaudit.measures.attention import ATTENTION_TABLE
from lipaudit.measures.bounds import BALLS_TABLE, BOUNDS_TABLE, LAYERS_TABLE
from lipaudit.measures.certify import CERTIFY_TABLE, RADII_TABLE
from lipaudit.measures.jacobian import JACOBIAN_TABLE
from lipaudit.measures.scaling import FITS_TABLE, SCALING_TABLE
from lipaudit.report import of_reports, render
from lipaudit.tables import Array, Data, Model, Note, Report, Row, Run, Section
from lipaudit.tables.report import Shard

HOSTILE = "<script>alert(1)</script>"
IDS = tuple(f"{index:02x}" * 8 for index in range(24))
EXACT = (  # 3 layers of 4 heads; the last was not measured
    (1.21, 0.874, 2.05, 1.66),
    (3.41, 0.412, 12.6, 1.09),
    (0.97, math.nan, 5.22, None),
)
INTERMEDIATE = ((0.12, 0.04, 0.31, 0.55), (0.08, 0.02, 0.91, 0.27), (0.0, 0.61, 0.46, 0.19))
NORMS = tuple(round(2.5 * 1.13**index, 3) for index in range(22)) + (math.nan, None)


def _bound(layer: int, head: int) -> Row:
    exact = EXACT[layer][head]
    times = 1.0 if exact is None or math.isnan(exact) else exact
    sharp = times * (1.12 + 0.11 * layer + 0.04 * head)
    overflow = (layer, head) == (1, 2)
    return BOUNDS_TABLE.row(
        layer=layer,
        head=head,
        module=f"blocks.{layer}.attn",
        kind="affine",
        input="one input",
        tokens=17,
        exact=exact,
        exact_max=exact and exact * 1.3,
        sharp=sharp,
        theorem3=times * (9 + 2 * layer + head),
        theorem3_g1=times * (9.5 + 2 * layer + head),
        appendix_c=times * (7 + layer),
        castin=times * 57 if layer else None,
        mean_field=math.inf if overflow else times * 130,
        hu=math.inf if overflow else times * 7.1e4 * 10**layer,
        log10_castin=math.log10(times * 57) if layer else None,
        log10_mean_field=412.6 if overflow else math.log10(times * 130),
        log10_hu=318.2 if overflow else math.log10(times * 7.1e4 * 10**layer),
        sharp_ratio_max=2.31 if (layer, head) == (2, 2) else 1.2 + 0.1 * layer + 0.05 * head,
        p_norm=1.04 + 0.2 * head,
        x_norm=18.3 + layer,
        radius=6.9,
        softmax_norm_max=0.21 + 0.02 * head,
        splitting_gain=1.43 if (layer, head) == (1, 1) else 1.0,
        upper=exact and exact * 1.0004,
        within=exact and 0.0004,
        forward_error=3e-6,
        converged=(layer, head) != (2, 1),
    )


def _bounds() -> Section:
    rows = tuple(_bound(layer, head) for layer in range(3) for head in range(4))
    per_sample = np.array([[r.sharp * f for f in (0.9, 1.0, 1.1)] for r in rows])
    return layouts()["bounds"].section(
        settings={"samples": 3, "tol": 1e-4},
        rows=rows,
        arrays={"sharp": Array.of(per_sample), "exact": Array.of(per_sample / 1.3)},
        notes=(
            Note(level="info", code="castin-mask", text="Layer 0 is masked: castin is null."),
            Note(
                level="warning",
                code="not-converged",
                text=f"Head 2.1 of {HOSTILE}: | no * limit_.",
            ),
        ),
    )


def _layers() -> Section:
    rows = tuple(
        LAYERS_TABLE.row(
            layer=layer,
            module=f"blocks.{layer}.attn",
            exact=(2.4, 13.1, 5.6)[layer],
            exact_out=(1.9, 10.2, 4.4)[layer],
            sharp_sum=(6.9, 21.7, None)[layer],
            sharp_rss=(3.6, 14.9, None)[layer],
            theorem3_sum=(61.0, 212.0, 98.7)[layer],
        )
        for layer in range(3)
    )
    return layouts()["bounds.layers"].section(rows=rows)


def _balls() -> Section:
    rows = tuple(
        BALLS_TABLE.row(
            layer=1,
            head=head,
            module="blocks.1.attn",
            r=r,
            exact=4.1 + head,
            ball_norm=(4.1 + head) * (1 + r),
            ball_sharp=None if head else (6.2, float("inf"))[r > 1],
            ball_ratio_max=None if head else 1.6,
            castin=None if head else 402.0 + r,
            mean_field=None if head else 91.0 + r,
        )
        for head in (0, 1)
        for r in (0.03, 30.0)
    )
    return layouts()["bounds.ball"].section(settings={"radius": ["0.03", "30"]}, rows=rows)


def _attention_row(layer: int, head: int) -> Row:
    share = INTERMEDIATE[layer][head]
    uniform = round((1 - share) * (0.2 + 0.2 * head), 4)
    return ATTENTION_TABLE.row(
        layer=layer,
        head=head,
        module=f"blocks.{layer}.attn",
        tokens=17,
        top1=0.3 + 0.5 * (1 - share),
        top2=0.1 + 0.2 * share,
        g1=0.03 + 0.2 * share,
        g1_max=0.11 + 0.38 * share,
        softmax_norm=0.028 + 0.19 * share,
        softmax_norm_max=0.1 + 0.37 * share,
        g1_ratio=1.02 + 0.1 * share,
        gk_ratio=4.0 + 20 * share,
        entropy=1.1 + share,
        entropy_normalized=0.4 + 0.3 * share,
        support=3.0 + 5 * share,
        sink_first=0.62 if head == 0 else 0.08,
        sink_max=0.62 if head == 0 else 0.19,
        sink_token=0 if head == 0 else 4 + head,
        uniform=uniform,
        intermediate=share,
        categorical=1 - share - uniform,
        short_rows=2,
        p_norm=1.04 + 0.2 * head,
    )


def _attention() -> Section:
    weights = np.exp(-np.abs(np.arange(17)[:, None] - np.arange(17)) / 2.0)
    return layouts()["attention"].section(
        settings={"samples": 8, "gamma": 0.1, "k": 10},
        rows=tuple(_attention_row(layer, head) for layer in range(3) for head in range(4)),
        arrays={
            "map@1.2": Array.of(weights / weights.sum(axis=1, keepdims=True)),
            "map_tokens@1.2": Array.of(np.array([17, 17])),
        },
    )


def _jacobian() -> Section:
    common = {
        "samples": 24,
        "method": "dense",
        "tol": 1e-4,
        "within": 7e-4,
        "products": 10.0,
        "converged": 22,
    }
    return layouts()["jacobian"].section(
        settings={"norm": "2", "inputs": "pixels"},
        rows=(
            JACOBIAN_TABLE.row(
                **{"from": "pixels"},
                to="logits",
                norm="2",
                mean=11.2,
                median=9.02,
                p95=28.6,
                max=32.55,
                **common,
            ),
            JACOBIAN_TABLE.row(
                **{"from": "pixels"},
                to="logits",
                norm="inf",
                mean=61.0,
                median=48.8,
                p95=math.inf,
                max=math.inf,
                **common,
            ),
        ),
        samples={
            "ids": IDS,
            "norm": NORMS,
            "upper": tuple(v and round(v * 1.0007, 3) for v in NORMS),
            "converged": tuple(i < 22 for i in range(24)),
            "margin": tuple(round(8 - 0.3 * i, 2) for i in range(24)),
            "radius_first_order": tuple(round(0.2 / (1 + i), 4) for i in range(24)),
            "correct": tuple(i != 20 for i in range(24)),
        },
        notes=(
            Note(level="warning", code="not-converged", text="2 of 24 samples did not converge."),
        ),
    )


def _attack_row(attack: str, text: str, robust: float, **cost: float) -> Row:
    above, below = text.split("/")
    return ATTACK_TABLE.row(
        attack=attack,
        norm="linf",
        eps=int(above) / int(below),
        eps_text=text,
        samples=24,
        clean=23 / 24,
        robust=robust,
        robust_low=max(robust - 0.19, 0.0),
        robust_high=min(robust + 0.17, 1.0),
        **cost,
    )


def _attack() -> Section:
    rows = (
        _attack_row("fgsm", "2/255", 17 / 24, seconds=0.31, forwards=24, backwards=24),
        _attack_row("fgsm", "4/255", 12 / 24, seconds=0.29, forwards=24, backwards=24),
        _attack_row("pgd", "2/255", 15 / 24, seconds=12.4, forwards=960, backwards=960),
        _attack_row("pgd", "4/255", 5 / 24, seconds=11.9, forwards=960, backwards=960),
        _attack_row("worst", "2/255", 15 / 24),
        _attack_row("worst", "4/255", 5 / 24),
    )
    broken = {"2/255": (13, 15, 16, 17, 18, 19, 20, 21, 23), "4/255": range(5, 24)}
    flags = {
        f"robust@worst,linf,{eps}": tuple(int(i not in which) for i in range(24))
        for eps, which in broken.items()
    }
    return layouts()["attack"].section(
        settings={"attacks": ["fgsm", "pgd"], "steps": 40},
        rows=rows,
        samples={"ids": IDS[::-1], "correct": tuple(int(i != 3) for i in range(24))}
        | {name: values[::-1] for name, values in flags.items()},
    )


def _certify_row(text: str, robust: int, certified: int) -> Row:
    above, below = text.split("/")
    return CERTIFY_TABLE.row(
        norm="linf",
        eps=int(above) / int(below),
        eps_text=text,
        samples=24,
        clean=23 / 24,
        robust=robust / 24,
        robust_low=0.43,
        robust_high=0.79,
        certified=certified / 24,
        certified_low=0.15,
        certified_high=0.49,
        undecided=robust - certified,
        order=2,
        nodes=812,
        seconds=41.3,
    )


def _certify() -> tuple[Section, Section]:
    settings = {"eps": ["1/255", "2/255"], "norm": "linf", "radius": True, "attack": "pgd"}
    counts = {"1/255": (18, 12), "2/255": (15, 0)}
    samples: dict[str, tuple[object, ...]] = {"ids": IDS}
    for eps, (robust, certified) in counts.items():
        ends = {"certified": certified, "undecided": robust, "broken": 23, "wrong": 24}
        verdicts = tuple(next(k for k, end in ends.items() if i < end) for i in range(24))
        samples[f"verdict@linf,{eps}"] = verdicts
        samples[f"certified@linf,{eps}"] = tuple(int(v == "certified") for v in verdicts)
        samples[f"why@linf,{eps}"] = tuple("bound" * (v == "undecided") for v in verdicts)
    samples["radius"] = (*(round(0.0003 * i, 4) for i in range(23)), None)
    samples["radius_adversarial"] = (None, *(round(0.008 + 0.002 * i, 3) for i in range(22)), None)
    rows = tuple(_certify_row(eps, *each) for eps, each in counts.items())
    note = Note(level="info", code="real-arithmetic", text="certificates are of real numbers")
    radii = RADII_TABLE.row(
        norm="linf",
        samples=23,
        radius=0.0033,
        radius_adversarial=0.029,
        ratio=0.38,
        smallest=0.0,
        largest=0.0066,
        passes=131,
        seconds=212.0,
    )
    return (
        layouts()["certify"].section(settings=settings, rows=rows, samples=samples, notes=(note,)),
        layouts()["certify.radius"].section(settings=settings, rows=(radii,)),
    )


def _scaling() -> Section:
    rows = tuple(
        SCALING_TABLE.row(
            layer=layer,
            head=0,
            module=f"blocks.{layer}.attn",
            mode=mode,
            n=n,
            radius=6.9,
            n_max=982.0 if mode == "adversarial" else None,
            norm=1.1 * n**power,
            norm_low=0.9 * n**power,
            norm_high=1.4 * n**power,
            bound_sharp=1.9 * n**power,
            bound_theorem3=80 * n**power,
            bound_castin=700 * n**0.5,
        )
        for mode, layer, power in (("real", 0, 0.25), ("adversarial", 1, 0.5))
        for n in (8, 16, 32, 64)
    )
    return layouts()["scaling"].section(settings={"windows": 4}, rows=rows)


def _fit() -> Section:
    rows = (
        FITS_TABLE.row(
            layer=0,
            head=0,
            mode="real",
            exponent=0.25,
            exponent_se=0.012,
            r2=0.97,
        ),
        FITS_TABLE.row(mode="real", exponent=0.31, exponent_se=None, r2=0.88),
    )
    return layouts()["scaling.fit"].section(rows=rows)


def make_report(**changes: object) -> Report:
    run = Run(
        lipaudit="0.1.0",
        command="lipaudit audit demo",
        created="2026-01-05T12:00:00Z",
        seed=0,
        device="cpu",
        dtype="float32",
        versions={"python": "3.11.9", "torch": "2.15.0"},
        model=Model(
            spec=f"py:{HOSTILE}",
            source="local \x1b[31mred",
            architecture="VisionTransformer",
            parameters=58570,
            weights_sha256="3f" * 32,
        ),
        data=Data(spec="demo", samples=24, suite_id="9c" * 32),
        preprocess={"mean": [0.5], "std": [0.5], "size": [8, 8]},
    )
    measured = (_bounds(), _layers(), _balls(), _attention(), _jacobian(), _attack(), *_certify())
    sections = (*measured, _scaling(), _fit())
    return Report(run=run, sections=sections).model_copy(update=changes)


def keep(report: Report, *sections: Section) -> Report:
    """The report with these sections and no others."""
    return report.model_copy(update={"sections": sections})


def swap(report: Report, section: Section) -> Report:
    """The report with a section in place of the one of its measure."""
    same = section.measure
    return keep(report, *(section if s.measure == same else s for s in report.sections))


def rename(report: Report, **changes: str) -> Report:
    """The report of a model of another name, source or hash."""
    model = report.run.model.model_copy(update=changes)
    return report.model_copy(update={"run": report.run.model_copy(update={"model": model})})


def show(*reports):
    """The page of a report, or of several side by side."""
    return of_reports(*reports).page()


def find_chapter(page, name):
    """The chapter of a page by its name."""
    return next(chapter for chapter in page.chapters if chapter.name == name)


@pytest.fixture(scope="session")
def report() -> Report:
    """A report with every section, nulls, NaN, infinities, notes and a hostile model name."""
    return make_report()


def shard_of(number: int, of: int) -> Shard:
    """What a report that is one of several shards says of itself."""
    return Shard(number=number, of=of, ids=(), counts={}, notes=(), options={}, parts={})


@pytest.fixture(scope="session")
def other() -> Report:
    """A second model: the same sections, other numbers in two of them."""
    return make_other()


def make_other() -> Report:
    """A second model: the same sections, other numbers in two of them."""
    first = make_report()
    run = first.run.model_copy(
        update={"model": first.run.model.model_copy(update={"spec": "demo:robust"})}
    )
    changed = []
    for section in first.sections:
        halve = {"bounds": ("exact", "sharp"), "attention": ("g1", "intermediate")}
        names = halve.get(section.measure, ())
        rows = tuple(
            row.replace(**{n: getattr(row, n) and getattr(row, n) / 2 for n in names})
            for row in section.rows
        )
        changed.append(section.model_copy(update={"rows": rows}))
    return Report(run=run, sections=tuple(changed))


@pytest.fixture(scope="session")
def page(report) -> str:
    """The HTML page of one report."""
    return render(report, "html").decode()


@pytest.fixture(scope="session")
def double_page(report, other) -> str:
    """The HTML page of two reports side by side."""
    return render(of_reports(report, other), "html").decode()


@pytest.fixture(scope="session")
def blank_report() -> Report:
    """One row per section with nothing in it but what names the row."""
    names = {"layer": 0, "head": 0, "r": 0.1, "n": 8}
    names |= {"attack": "pgd", "norm": "linf", "eps": 0.1}
    sections = []
    for measure, kind in layouts().items():
        required = {n: names[n] for n, column in kind.columns.items() if column.needed}
        sections.append(layouts()[measure].section(rows=(kind.row(**required),)))
    return make_report().model_copy(update={"sections": tuple(sections)})
