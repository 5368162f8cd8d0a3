"""How often the gate flags a checkpoint that is no worse, and what it catches: simulated.

    python -m benchmarks null_gate --runs 50

prints the tables of docs/theory/gate.md, with the gate's own code. It takes several minutes on
one core; the first table takes most of them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product

import numpy as np

from lipaudit.gate import judge
from lipaudit.gate.statistics import (
    ALPHA,
    LEAST,
    LEVEL,
    QUIET,
    Evidence,
    correct_by_holm,
    correct_jointly,
    judge_by_bootstrap,
    judge_median,
    judge_share,
)
from lipaudit.measures import layouts
from lipaudit.measures.attack import ATTACK_TABLE
from lipaudit.measures.bound_tables import BOUNDS_TABLE
from lipaudit.tables import Array, Data, Model, Report, Run
from lipaudit.tables.columns import reduce_values

RULES = 6  # default rules of a labelled audit
FIRST = ALPHA / RULES  # level of the first of them
CHURN = 0.025  # share of samples that change sides by chance, each way
NOISE = 0.15  # of the log-ratios, retraining against retraining
LAYERS, HEADS, BOUNDS_SAMPLES = 6, 4, 16
RNG = np.random.default_rng(20260101)

Noise = Callable[[tuple[int, ...]], np.ndarray]

# Changes of spread 1, half of which are below 0.
NOISES: dict[str, Noise] = {
    "normal": lambda size: RNG.normal(size=size),
    "lognormal, up": lambda size: RNG.lognormal(size=size) - 1,
    "lognormal, down": lambda size: 1 - RNG.lognormal(size=size),
    "exponential, up": lambda size: RNG.exponential(size=size) - math.log(2),
    "exponential, down": lambda size: math.log(2) - RNG.exponential(size=size),
    "two clusters, up": lambda size: np.where(RNG.random(size) < 0.5, 5.0, -1.0),
    "two clusters, down": lambda size: np.where(RNG.random(size) < 0.5, 1.0, -5.0),
    "half of them zero": lambda size: RNG.normal(size=size) * (RNG.random(size) < 0.5),
}
SPREADS = (0.1, 0.2, 0.5, 2.5)
COUNTS = (4, 8, 16, 32, 128, 512)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=100, help="simulated gates per figure")


def run(asked: argparse.Namespace) -> None:
    """Print the tables."""
    print_table(alarm_table(asked.runs))
    print_table(share_table(asked.runs))
    print_table(gate_table(asked.runs))
    print_table(power_table(4 * asked.runs))
    print_table(head_table(asked.runs))
    print_table(group_table(20 * asked.runs))


def print_table(lines: Iterator[tuple[object, ...]]) -> None:
    """Print rows as a Markdown table."""
    for number, line in enumerate(lines):
        print(f"| {' | '.join(map(str, line))} |", flush=True)
        if number == 0:
            print("|" + "---|" * len(line), flush=True)
    print()


def is_flagged(evidence: Evidence, limit: float, level: float = LEVEL) -> bool:
    """Say whether a rule fails, tested at a level: proven to be worse, and beyond its limit."""
    return evidence.estimate > limit and evidence.p(0.0) <= min(level, LEVEL)


def was_flagged(evidence: Evidence, limit: float, level: float) -> bool:
    """Say whether a rule failed until commit 1edb77d8: the limit was proven to be exceeded."""
    return evidence.p(limit) <= level


# No change


def alarm_table(runs: int) -> Iterator[tuple[object, ...]]:
    """How often a rule alone fails without any change, over all spreads together."""
    yield ("rule", "changes", *(f"n = {n}" for n in COUNTS))
    limit = math.log(1.1)
    rules: dict[str, tuple[Callable[[Noise, float, int], bool], int]] = {
        "median": (lambda noise, s, n: is_flagged(judge_median(s * noise((n,))), limit), 4 * runs),
        "each of 24 rows": (lambda noise, s, n: alarms(s * noise((24, n))), runs),
        "each of 144 rows": (lambda noise, s, n: alarms(s * noise((144, n))), runs),
        "each of 144, half shared": (lambda noise, s, n: alarms(share(noise, s, n)), runs),
    }
    for (rule, (alarm, times)), (name, noise) in product(rules.items(), NOISES.items()):
        cells = (rate(alarm(noise, s, n) for s in SPREADS for _ in range(times)) for n in COUNTS)
        yield (rule, name, *cells)
    for stat, spread in product(("mean", "p95"), (0.15, 2.5)):
        cells = (rate(exchange(stat, spread, n) for _ in range(6 * runs)) for n in COUNTS)
        yield (stat, f"exchanged, log-ratios of spread {spread}", *cells)


def alarms(changes: np.ndarray) -> bool:
    """Judge `each <= +20%` over the rows of (rows, samples)."""
    limit = math.log(1.2)
    adjusted = correct_jointly(changes, QUIET * limit)
    found = [judge_median(changes[i]) for i in np.flatnonzero(adjusted <= ALPHA)]
    return any(is_flagged(evidence, limit) for evidence in found)


def share(noise: Noise, spread: float, n: int) -> np.ndarray:
    """Draw 144 rows, half of which move together."""
    rows = spread * noise((144, n))
    rows[::2] = rows[0]
    return rows


def exchange(stat: str, spread: float, n: int) -> bool:
    """Judge norms with noise of one kind before and after: exchangeable, not equal."""
    base = RNG.lognormal(0, 0.5, n)
    old, new = (base * np.exp(spread * RNG.normal(size=n)) for _ in range(2))

    def change(before: np.ndarray, now: np.ndarray) -> np.ndarray:
        return np.log(reduce_values(stat, now, 1)) - np.log(reduce_values(stat, before, 1))

    return is_flagged(judge_by_bootstrap(old, new, change, LEAST[stat]), math.log(1.1))


def share_table(runs: int) -> Iterator[tuple[object, ...]]:
    """How often `>= -2pp` alone fails although as many samples are lost as gained."""
    yield ("samples that change sides", *(f"n = {n}" for n in COUNTS))
    for churn in (0.0, 0.02, 0.1, 0.5, 1.0):
        yield (f"{100 * churn:.0f}%", *(drop_rate(n, 0.0, churn / 2, 10 * runs) for n in COUNTS))


def gate_table(runs: int) -> Iterator[tuple[object, ...]]:
    """How often the default gate fails: no change at all, and every rule exactly at its limit."""
    sizes = {64: runs, 256: runs, 1024: max(1, runs // 4)}
    yield ("true change", *(f"n = {n} ({r} runs)" for n, r in sizes.items()))
    for limit, name in ((False, "none"), (True, "every rule exactly at its limit")):
        failures = (
            rate(judge(*pair(n, limit=limit)).exit_code == 1 for _ in range(r))
            for n, r in sizes.items()
        )
        yield (name, *failures)


def pair(n: int, *, limit: bool) -> tuple[Report, Report]:
    """Simulate a report and its baseline: no change at all, or every rule exactly at its limit."""
    norms, radii = RNG.lognormal(0, 0.5, (2, n))
    heads = RNG.lognormal(0, 0.3, (LAYERS * HEADS, BOUNDS_SAMPLES))
    growth, fall, louder = (math.log(1.1), math.log(0.9), math.log(1.2)) if limit else (0, 0, 0)
    flags = RNG.random((2, n)) < 0.5
    lost, gained = (CHURN + 0.01, CHURN - 0.01) if limit else (CHURN, CHURN)
    draw = RNG.random((2, n))
    flipped = np.where(flags, draw >= 2 * lost, draw < 2 * gained)
    changed = norms * np.exp(growth + NOISE * RNG.normal(size=n))
    nearer = radii * np.exp(fall + NOISE * RNG.normal(size=n))
    loud = heads * np.exp(louder + NOISE * RNG.normal(size=heads.shape))
    return report(changed, nearer, loud, flipped, "b"), report(norms, radii, heads, flags, "a")


# True changes


def power_table(runs: int) -> Iterator[tuple[object, ...]]:
    """How often a true change is caught: by a rule alone, as the first of all, and before."""
    drops, ratios = (0.0, 0.02, 0.03, 0.05, 0.1, 0.2), (1.0, 1.05, 1.1, 1.2)
    changes = [f"-{100 * d:.0f} pp" if d else "no drop" for d in drops]
    yield ("n", "decided by", *changes, *(f"x {r:.2f}" for r in ratios))
    ways = (
        ("a rule alone", is_flagged, LEVEL, 1.1),
        ("the first of six rules", is_flagged, FIRST, 1.1),
        ("the first of four, before", was_flagged, ALPHA / 4, 1.05),
    )
    for n, (name, decide, level, limit) in product((32, 64, 128, 256, 512, 1024), ways):
        caught = (drop_rate(n, d, CHURN, runs, decide, level) for d in drops)
        margin = round(math.log(limit), 12)
        grown = (
            rate(
                decide(judge_median(x), margin, level)
                for x in RNG.normal(math.log(r), NOISE, (runs // 4, n))
            )
            for r in ratios
        )
        yield (n, name, *caught, *grown)


def drop_rate(
    n: int,
    drop: float,
    churn: float,
    runs: int,
    decide: Callable[[Evidence, float, float], bool] = is_flagged,
    level: float = LEVEL,
) -> str:
    """Return how often `>= -2pp` fails; besides the drop, samples change sides both ways."""
    lost = min(churn + drop, 1 - churn)
    flips = RNG.multinomial(n, [lost, churn, max(0.0, 1 - lost - churn)], size=runs)
    known: dict[tuple[int, int], bool] = {}
    for worse, gained in {(int(w), int(b)) for w, b, _ in flips}:
        known[worse, gained] = decide(judge_share(worse, gained, n), 0.02, level)
    return rate(known[int(w), int(b)] for w, b, _ in flips)


def head_table(runs: int) -> Iterator[tuple[object, ...]]:
    """How often one head's growth is caught among others by `bounds.exact:each <= +20%` alone."""
    cells = [(1.5, 0.01), (1.5, 0.05), (1.5, 0.15), (1.3, 0.05), (2.0, 0.15)]
    yield ("heads", "samples", *(f"x {r}, noise {d}" for r, d in cells))
    for heads, n in product((12, 144), (8, 16, 32)):
        yield (heads, n, *(caught_head(heads, n, r, d, runs) for r, d in cells))


def caught_head(heads: int, n: int, ratio: float, noise: float, runs: int) -> str:
    """Power for one head among others that only have noise, as the first of six rules."""
    limit = math.log(1.2)
    found = []
    for _ in range(runs):
        changes = noise * RNG.normal(size=(heads, n))
        changes[0] += math.log(ratio)
        adjusted = correct_jointly(changes, QUIET * limit)[0]
        found.append(adjusted <= FIRST and is_flagged(judge_median(changes[0]), limit))
    return rate(found)


# Groups


SIZES: dict[str, Callable[[], list[int]]] = {
    "2 groups of 256": lambda: [256] * 2,
    "10 groups of 64": lambda: [64] * 10,
    "100 groups of 16": lambda: [16] * 100,
    "100 groups of 1 to 200": lambda: RNG.geometric(0.05, 100).clip(1, 200).tolist(),
}


def group_table(runs: int) -> Iterator[tuple[object, ...]]:
    """How often `attack.clean@group=each >= -5pp` fails, and where the largest group is worse."""
    churns, drops = (0.05, 0.2, 1.0), (0.1, 0.2)
    losses = (f"one loses {100 * drop:.0f} pp" for drop in drops)
    yield ("groups", *(f"{100 * churn:.0f}% change sides" for churn in churns), *losses)
    for name, draw_sizes in SIZES.items():
        cells = [
            rate(is_group_flagged(draw_sizes(), churn / 2, 0.0) for _ in range(runs))
            for churn in churns
        ]
        cells += [
            rate(is_group_flagged(draw_sizes(), CHURN, drop) for _ in range(runs))
            for drop in drops
        ]
        yield (name, *cells)


def is_group_flagged(sizes: list[int], churn: float, drop: float, limit: float = 0.05) -> bool:
    """Simulate the changes of groups, of which the largest loses a share, and judge them."""
    largest = sizes.index(max(sizes))
    tests: dict[int, Evidence] = {}
    for i, size in enumerate(sizes):
        lost = churn
        if i == largest:
            lost = min(churn + drop, 1 - churn)
        worse, better, _ = RNG.multinomial(size, [lost, churn, max(0.0, 1 - lost - churn)])
        tests[i] = judge_counts(int(worse), int(better), size)
    large = {i: test.p(0.0) for i, test in tests.items() if test.samples >= test.least}
    adjusted = correct_by_holm(large)
    return any(is_flagged(tests[i], limit) and p <= ALPHA for i, (p, _) in adjusted.items())


judge_counts = cache(judge_share)


def rate(outcomes: Iterable[bool]) -> str:
    """Write the share of true outcomes."""
    return f"{np.mean(list(outcomes)):.3f}"


def report(
    norms: np.ndarray, radii: np.ndarray, heads: np.ndarray, flags: np.ndarray, weights: str
) -> Report:
    """Write simulated figures as a report; the flags are of accuracy and of robustness."""
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
    clean, robust = (tuple(map(int, each)) for each in flags)
    figures = {"norm": tuple(norms.tolist()), "radius_first_order": tuple(radii.tolist())}
    ball = ATTACK_TABLE.row(attack="worst", norm="linf", eps=2 / 255, eps_text="2/255")
    return Report(
        run=run,
        sections=(
            layouts()["bounds"].section(
                rows=rows,
                samples={"ids": ids[:BOUNDS_SAMPLES]},
                arrays={"exact": Array.of(heads)},
            ),
            layouts()["jacobian"].section(samples={"ids": ids, **figures}),
            layouts()["attack"].section(
                rows=(ball,),
                samples={"ids": ids, "correct": clean, "robust@worst,linf,2/255": robust},
            ),
        ),
    )
