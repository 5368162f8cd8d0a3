"""How often the gate cries wolf, and what it catches: simulated, with the gate's own code.

    python -m benchmarks null_gate --runs 1000

prints the tables of docs/theory/gate.md. Without --runs it takes about ten minutes on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from lipaudit.gate import judge
from lipaudit.gate.statistics import (
    LEAST,
    judge_by_bootstrap,
    judge_mean,
    judge_median,
    judge_share,
)
from lipaudit.measures import layouts
from lipaudit.measures.attack import ATTACK_TABLE
from lipaudit.measures.bounds import BOUNDS_TABLE
from lipaudit.tables import Array, Data, Model, Report, Run
from lipaudit.tables.columns import reduce_values

ALPHA = 0.05
LEVEL = ALPHA / 4  # of four rules
SPREAD = 0.5  # of the log-norms over samples
NOISE = 0.15  # of the log-ratios, retraining against retraining
CHURN = 0.05  # share of samples whose robustness flips
LAYERS, HEADS, BOUNDS_SAMPLES = 6, 4, 8
RNG = np.random.default_rng(20260101)

Noise = Callable[[tuple[int, ...]], np.ndarray]

# Log-ratios, and what their mean and their median are.
NOISES: dict[str, Noise] = {
    "normal": lambda size: NOISE * RNG.normal(size=size),
    "t, 3 d.f.": lambda size: NOISE * RNG.standard_t(3, size),
    "lognormal, skewed up": lambda size: NOISE * RNG.lognormal(size=size),
    "lognormal, skewed down": lambda size: -NOISE * RNG.lognormal(size=size),
    "one in ten falls to a tenth": lambda size: (
        np.where(RNG.random(size) < 0.1, np.log(0.1), 0.0) + 0.02 * RNG.normal(size=size)
    ),
}
MEANS = np.array([0, 0, NOISE * np.exp(0.5), -NOISE * np.exp(0.5), 0.1 * np.log(0.1)])
COUNTS = (4, 8, 16, 32, 64, 128, 256, 512)
POPULATION = 2_000_000  # pairs that stand for all, whose change of a statistic is the margin


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=250, help="simulated gates per figure")


def run(asked: argparse.Namespace) -> None:
    """Print the tables."""
    runs = asked.runs
    print_table(level_table(runs))
    print_table(null_table(runs))
    print_table(noise_table(runs))
    print_table(power_table(4 * runs))
    print_table(head_table(4 * runs))


def print_table(lines: Iterator[tuple[object, ...]]) -> None:
    """Print rows as a Markdown table."""
    for number, line in enumerate(lines):
        print(f"| {' | '.join(map(str, line))} |", flush=True)
        if number == 0:
            print("|" + "---|" * len(line), flush=True)
    print()


def level_table(runs: int) -> Iterator[tuple[object, ...]]:
    """How often each test errs at level 0.05 although the change is exactly at the margin."""
    yield ("test", "changes", *(f"n = {n}" for n in COUNTS))
    for (name, noise), mean in zip(NOISES.items(), MEANS, strict=True):
        median = float(np.median(noise((POPULATION,))))
        margins = {
            "sign test, median": (judge_median, median),
            "Student's t, centre": (judge_mean, max(mean, median)),
            "(Student's t, mean)": (judge_mean, mean),
        }
        for test, (judged, margin) in margins.items():
            cells = (noise((10 * runs, n)) for n in COUNTS)
            yield (test, name, *(rate(judged(x).p(margin) <= ALPHA for x in c) for c in cells))
        for stat, least in LEAST.items():
            old, new = draw_norms(noise, POPULATION)
            margin = float(log_change(stat)(old[None], new[None])[0])
            # More runs of those that count: 600 of them leave an error of 0.01.
            times = {n: 4 * runs if n >= least else runs for n in COUNTS}
            rates = {n: wrong_draws(noise, stat, margin, n, times[n]) for n in COUNTS}
            cells = (f"too few ({r})" if n < least else r for n, r in rates.items())
            yield (f"bootstrap, {stat}", name, *cells)
    for churn in (0.02, 0.1, 0.5):
        lost = min(0.02 + (churn - 0.02) / 2, churn)
        cells = (RNG.multinomial(n, [lost, churn - lost, 1 - churn], 10 * runs) for n in COUNTS)
        yield (
            "Bonett and Price, share",
            f"{100 * churn:.0f} % change sides",
            *(
                rate(
                    judge_share(int(w), int(b), n).p(lost - (churn - lost)) <= ALPHA
                    for w, b, _ in c
                )
                for n, c in zip(COUNTS, cells, strict=True)
            ),
        )


def draw_norms(noise: Noise, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the norms of a baseline and of the current model."""
    old = RNG.lognormal(0, SPREAD, n)
    return old, old * np.exp(noise((n,)))


def log_change(stat: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return what maps (draws, samples) of both to the log-ratio of a statistic."""
    return lambda old, new: (
        np.log(reduce_values(stat, new, 1)) - np.log(reduce_values(stat, old, 1))
    )


def wrong_draws(noise: Noise, stat: str, margin: float, n: int, runs: int) -> str:
    """Judge pairs whose population has a change exactly at the margin, however few they are."""
    pairs = (draw_norms(noise, n) for _ in range(runs))
    return rate(
        judge_by_bootstrap(old, new, log_change(stat), least=1).p(margin) <= ALPHA
        for old, new in pairs
    )


def null_table(runs: int) -> Iterator[tuple[object, ...]]:
    """How often the whole default gate fails although every rule holds."""
    sizes = {64: runs, 256: runs, 1024: max(1, runs // 2)}
    yield ("null", *(f"n = {n} ({r} runs)" for n, r in sizes.items()))
    for limit, name in ((False, "no change"), (True, "every rule exactly at its limit")):
        yield (name, *(false_alarms(n, limit=limit, runs=r) for n, r in sizes.items()))


def false_alarms(n: int, *, limit: bool, runs: int) -> str:
    """Judge simulated pairs of reports by the default rules."""
    return rate(judge(*pair(n, limit=limit)).exit_code == 1 for _ in range(runs))


def noise_table(runs: int) -> Iterator[tuple[object, ...]]:
    """How often `bounds.exact:each <= +20%` fails at its own level although all heads hold."""
    truths = {"at the limit": np.log(1.2), "half way to it": np.log(1.2) / 2}
    counts = (8, 16, 64)
    yield ("noise", *(f"{where}, n = {n}" for where in truths for n in counts))
    for (name, noise), mean in zip(NOISES.items(), MEANS, strict=True):
        centre = max(mean, float(np.median(noise((POPULATION,)))))
        cells = ((truth - centre, n) for truth in truths.values() for n in counts)
        yield (name, *(wrong_heads(noise, shift, n, runs) for shift, n in cells))


def wrong_heads(noise: Noise, shift: float, n: int, runs: int) -> str:
    """Flag any of the heads, whose log-ratios are noise that is shifted."""
    level, bound = LEVEL / (LAYERS * HEADS), round(np.log(1.2), 12)
    draws = shift + noise((runs, LAYERS * HEADS, n))
    return rate(any(judge_mean(x).p(bound) <= level for x in heads) for heads in draws)


def pair(n: int, *, limit: bool) -> tuple[Report, Report]:
    """Simulate a report and its baseline: no change at all, or every rule exactly at its limit.

    With log-norms of spread s and log-ratios of mean m and deviation d, the median of the paired
    ratios is e^m and the 95th percentile grows by e^(m + 1.645 (sqrt(s^2 + d^2) - s)): d = 0.1705
    puts the one at +5 %, and the other at +10 %.
    """
    drift, deviation = (np.log(1.05), 0.1705) if limit else (0.0, NOISE)
    norms = RNG.lognormal(0, SPREAD, n)
    heads = RNG.lognormal(0, 0.3, (LAYERS * HEADS, BOUNDS_SAMPLES))
    growth = np.log(1.2) if limit else 0.0
    robust = RNG.random(n) < 0.5
    lost, won = (CHURN / 2 + 0.01, CHURN / 2 - 0.01) if limit else (CHURN / 2, CHURN / 2)
    draw = RNG.random(n)
    flipped = np.where(robust, draw >= 2 * lost, draw < 2 * won)
    changed = norms * np.exp(drift + deviation * RNG.normal(size=n))
    louder = heads * np.exp(growth + NOISE * RNG.normal(size=heads.shape))
    return report(changed, louder, flipped, "b"), report(norms, heads, robust, "a")


def power_table(runs: int) -> Iterator[tuple[object, ...]]:
    """How often a true change is caught, at the level the default gate gives at least."""
    drops, ratios = (0.0, 0.02, 0.05, 0.1), (1.0, 1.05, 1.1, 1.2)
    yield (
        "n",
        *(f"-{100 * d:.0f} pp" if d else "no drop" for d in drops),
        *(f"x {r:.2f}" for r in ratios),
    )
    for n in (64, 128, 256, 512, 1024):
        yield (
            n,
            *(caught_drop(n, d, runs) for d in drops),
            *(caught_ratio(n, r, runs) for r in ratios),
        )


def caught_drop(n: int, drop: float, runs: int) -> str:
    """Power of `attack.robust >= -2pp`."""
    better = max(0.0, (CHURN - drop) / 2)
    flips = RNG.multinomial(n, [better + drop, better, 1 - 2 * better - drop], size=runs)
    return rate(judge_share(int(w), int(b), n).p(0.02) <= LEVEL for w, b, _ in flips)


def caught_ratio(n: int, ratio: float, runs: int) -> str:
    """Power of `jacobian.norm:median <= +5%`."""
    changes = RNG.normal(np.log(ratio), NOISE, (runs, n))
    return rate(judge_median(x).p(round(np.log(1.05), 12)) <= LEVEL for x in changes)


def head_table(runs: int) -> Iterator[tuple[object, ...]]:
    """How often one head's growth is caught among others by `bounds.exact:each <= +20%`."""
    yield (
        "heads",
        "samples",
        *(f"x 1.5, noise {d}" for d in (0.0, 0.05, 0.1, 0.15)),
        "x 1.3, 0.05",
    )
    for heads in (12, 144):
        for n in (8, 16, 32):
            cells = [(1.5, 0.0), (1.5, 0.05), (1.5, 0.1), (1.5, 0.15), (1.3, 0.05)]
            yield (heads, n, *(caught_head(heads, n, r, d, runs) for r, d in cells))


def caught_head(heads: int, n: int, ratio: float, noise: float, runs: int) -> str:
    """Power for one head, at the level of the first of all heads."""
    changes = RNG.normal(np.log(ratio), noise, (runs, n))
    return rate(judge_mean(x).p(round(np.log(1.2), 12)) <= LEVEL / heads for x in changes)


def rate(outcomes: Iterable[bool]) -> str:
    """Write the share of true outcomes."""
    return f"{np.mean(list(outcomes)):.3f}"


def report(norms: np.ndarray, heads: np.ndarray, robust: np.ndarray, weights: str) -> Report:
    """Write simulated figures as a report."""
    ids = tuple(map(str, range(len(norms))))
    rows = [
        BOUNDS_TABLE.row(layer=i // HEADS, head=i % HEADS, exact=float(np.median(line)))
        for i, line in enumerate(heads)
    ]
    run = Run(
        lipaudit="0",
        command="",
        created="",
        seed=0,
        device="cpu",
        dtype="float32",
        versions={},
        model=Model(spec="m", source="", architecture="", parameters=0, weights_sha256=weights),
        data=Data(spec="simulated", samples=len(ids), suite_id=""),
    )
    return Report(
        run=run,
        sections=(
            layouts()["bounds"].section(
                rows=rows,
                samples={"ids": ids[:BOUNDS_SAMPLES]},
                arrays={"exact": Array.of(heads)},
            ),
            layouts()["jacobian"].section(samples={"ids": ids, "norm": tuple(norms.tolist())}),
            layouts()["attack"].section(
                rows=(
                    ATTACK_TABLE.row(attack="worst", norm="linf", eps=2 / 255, eps_text="2/255"),
                ),
                samples={"ids": ids, "robust@worst,linf,2/255": tuple(robust.tolist())},
            ),
        ),
    )
