"""Reports made by hand out of figures per sample, and what most tests of the gate need."""

import hashlib

import numpy as np

from lipaudit.gate.rules import parse_rule
from lipaudit.measures import layouts
from lipaudit.measures.attack import ATTACK_TABLE
from lipaudit.measures.bound_tables import BOUNDS_TABLE
from lipaudit.measures.jacobian import JACOBIAN_TABLE
from lipaudit.tables import Array, Data, Model, Report, Run
from lipaudit.tables.trials import parse_radius
from lipaudit.wings.certificates.certificate_tables import CERTIFY_TABLE

NORMS = np.random.default_rng(0).lognormal(0.0, 0.5, 64)
"""They spread over a factor of ten."""
EXACT = np.random.default_rng(1).lognormal(0, 0.3, (12, 8))
"""Of 6 layers of 2 heads at 8 samples."""


def flags(ones, count=128):
    """So many ones, and then zeros."""
    return (np.arange(count) < ones).astype(int)


def rules(*texts):
    return tuple(map(parse_rule, texts))


def with_samples(section, **columns):
    """The section with other columns of samples, too."""
    columns = {name: tuple(values) for name, values in columns.items()}
    return section.model_copy(update={"samples": section.samples | columns})


def sample_ids(count, start=0):
    return tuple(
        hashlib.sha256(bytes([i % 256, i // 256])).hexdigest()[:16]
        for i in range(start, start + count)
    )


def jacobian(norms=NORMS, *, ids=None, converged=None, **settings):
    norms = np.asarray(norms, dtype=float)
    finite = norms if norms.size else np.array([np.nan])
    figures = {"mean": finite.mean(), "median": np.median(finite), "max": finite.max()}
    figures |= {"p95": np.quantile(finite, 0.95), "samples": norms.size, "converged": norms.size}
    row = JACOBIAN_TABLE.row(from_="pixels", to="logits", **figures)
    return layouts()["jacobian"].section(
        settings={"seed": 0, "tol": 1e-4, "norm": "2", **settings},
        rows=(row,),
        samples={
            "ids": sample_ids(norms.size) if ids is None else ids,
            "norm": tuple(norms.tolist()),
            "converged": tuple([True] * norms.size if converged is None else converged),
        },
    )


def bounds(exact, *, heads=2, ids=None, converged=True, **settings):
    """A `bounds` section out of exact norms, (layers * heads, samples)."""
    exact = np.asarray(exact, dtype=float)
    rows = [
        BOUNDS_TABLE.row(
            layer=i // heads,
            head=i % heads,
            module=f"blocks.{i // heads}.attn",
            exact=float(np.median(line)),
            exact_max=float(line.max()),
            sharp=float(np.median(line)) * 1.2,
            converged=converged,
        )
        for i, line in enumerate(exact)
    ]
    return layouts()["bounds"].section(
        settings={"seed": 0, "layers": None, "tol": 1e-4, **settings},
        rows=rows,
        samples={
            "ids": sample_ids(exact.shape[1]) if ids is None else ids,
            "exact_max": tuple(exact.max(0).tolist()),
        },
        arrays={"exact": Array.of(exact), "sharp": Array.of(exact * 1.2)},
    )


def attack(robust, *, correct=None, eps=("2/255",), attacks=("apgd-ce",), **more):
    """An `attack` section; `robust` holds one 0/1 list per eps (or one for all)."""
    lines = np.atleast_2d(np.asarray(robust, dtype=int))
    count = lines.shape[1]
    columns, rows = {}, []
    for text, line in zip(eps, lines, strict=True):
        for name in (*attacks, "worst"):
            columns[f"robust@{name},linf,{text}"] = tuple(line.tolist())
            ball = {"norm": "linf", "eps": float(parse_radius(text)), "eps_text": text}
            share = float(line.mean()) if count else None
            row = ATTACK_TABLE.row(attack=name, samples=count, robust=share, seconds=1.25, **ball)
            rows.append(row)
    return layouts()["attack"].section(
        settings={"seed": 0, "steps": 100, "eps": list(eps), **more},
        rows=rows,
        samples={
            "ids": sample_ids(count),
            "correct": tuple(np.asarray([1] * count if correct is None else correct).tolist()),
            **columns,
        },
    )


def certify(verdicts):
    """A `certify` section of one ball."""
    row = CERTIFY_TABLE.row(norm="linf", eps=0.01, eps_text="0.01", samples=len(verdicts))
    return layouts()["certify"].section(
        settings={"seed": 0},
        rows=(row,),
        samples={
            "ids": sample_ids(len(verdicts)),
            "correct": tuple(int(v != "wrong") for v in verdicts),
            "verdict@linf,0.01": tuple(verdicts),
            "robust@linf,0.01": tuple(int(v in ("certified", "undecided")) for v in verdicts),
            "certified@linf,0.01": tuple(int(v == "certified") for v in verdicts),
        },
    )


def report(*sections, weights="a", spec="demo", status="complete", **run):
    """A report out of sections."""
    model = {"source": "demo", "architecture": "ViT", "parameters": 10}
    values = {
        "lipaudit": "0.1.0",
        "command": "lipaudit audit demo",
        "created": "2026-01-01T00:00:00+00:00",
        "seed": 0,
        "device": "cpu",
        "dtype": "float32",
        "versions": {"torch": "2.6.0", "lipaudit": "0.1.0"},
        "model": Model(spec=spec, weights_sha256=weights * 64, **model),
        "data": Data(spec="demo", samples=8, suite_id="s" * 64),
        "preprocess": {"mean": [0.5], "std": [0.5]},
    }
    return Report(status=status, run=Run(**values | run), sections=sections)


def new(*sections, **run):
    """A report of other weights than the baseline's."""
    return report(*sections, **{"weights": "b"} | run)
