import hashlib

import numpy as np
import pytest

from lipaudit.measures import layouts
from lipaudit.measures.attack import ATTACK_TABLE
from lipaudit.measures.bounds import BOUNDS_TABLE
from lipaudit.measures.jacobian import JACOBIAN_TABLE
from lipaudit.tables import Array, Data, Model, Report, Run


def sample_ids(count, start=0):
    return tuple(
        hashlib.sha256(bytes([i % 256, i // 256])).hexdigest()[:16]
        for i in range(start, start + count)
    )


def make_jacobian(norms, *, ids=None, converged=None, **settings):
    norms = np.asarray(norms, dtype=float)
    finite = norms if norms.size else np.array([np.nan])
    row = JACOBIAN_TABLE.row(
        from_="pixels",
        to="logits",
        samples=norms.size,
        mean=finite.mean(),
        median=np.median(finite),
        p95=np.quantile(finite, 0.95),
        max=finite.max(),
        converged=norms.size,
    )
    flags = [True] * norms.size if converged is None else converged
    return layouts()["jacobian"].section(
        settings={"seed": 0, "tol": 1e-4, "norm": "2", **settings},
        rows=(row,),
        samples={
            "ids": sample_ids(norms.size) if ids is None else ids,
            "norm": tuple(norms.tolist()),
            "converged": tuple(flags),
        },
    )


def make_bounds(exact, *, heads=2, ids=None, converged=True, **settings):
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


def make_attack(
    robust, *, correct=None, eps=("2/255",), attacks=("apgd-ce",), norm="linf", **more
):
    """An `attack` section; `robust` holds one 0/1 list per eps (or one for all)."""
    flags = np.atleast_2d(np.asarray(robust, dtype=int))
    count = flags.shape[1]
    columns, rows = {}, []
    for text, line in zip(eps, flags, strict=True):
        for attack in (*attacks, "worst"):
            columns[f"robust@{attack},{norm},{text}"] = tuple(line.tolist())
            rows.append(
                ATTACK_TABLE.row(
                    attack=attack,
                    norm=norm,
                    eps=float(eval_fraction(text)),
                    eps_text=text,
                    samples=count,
                    robust=float(line.mean()) if count else None,
                    seconds=1.25,
                )
            )
    return layouts()["attack"].section(
        settings={"seed": 0, "steps": 100, "eps": list(eps), **more},
        rows=rows,
        samples={
            "ids": sample_ids(count),
            "correct": tuple(
                (np.ones(count, int) if correct is None else np.asarray(correct)).tolist()
            ),
            **columns,
        },
    )


def eval_fraction(text):
    top, _, bottom = text.partition("/")
    return float(top) / float(bottom or 1)


def make_report(*sections, weights="a", spec="demo", status="complete", **run):
    """A report out of sections."""
    values = {
        "lipaudit": "0.1.0",
        "command": "lipaudit audit demo",
        "created": "2026-01-01T00:00:00+00:00",
        "seed": 0,
        "device": "cpu",
        "dtype": "float32",
        "versions": {"torch": "2.6.0", "lipaudit": "0.1.0"},
        "model": Model(
            spec=spec,
            source="demo",
            architecture="ViT",
            parameters=10,
            weights_sha256=weights * 64,
        ),
        "data": Data(spec="demo", samples=8, suite_id="s" * 64),
        "preprocess": {"mean": [0.5], "std": [0.5]},
    }
    return Report(status=status, run=Run(**values | run), sections=sections)


@pytest.fixture
def jacobian():
    return make_jacobian


@pytest.fixture
def bounds():
    return make_bounds


@pytest.fixture
def attack():
    return make_attack


@pytest.fixture
def report():
    return make_report


@pytest.fixture
def ids():
    return sample_ids


@pytest.fixture
def norms():
    """Norms of 64 samples that spread over a factor of ten."""
    return np.random.default_rng(0).lognormal(0.0, 0.5, 64)
