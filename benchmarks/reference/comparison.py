"""Run lipaudit's measures on a model and set every number against the truth."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from benchmarks.reference import loaded, truth
from lipaudit.data.batch import Batch, ProcessBatches
from lipaudit.engine import results
from lipaudit.errors import LipauditError
from lipaudit.measures import base, load_measures, option_types
from lipaudit.models.attention.survey import survey
from lipaudit.models.net import Net
from lipaudit.theory.bounds.record import load_bounds

GAINS = (1.3, 0.6, 0.2)
"""How large the weights are; smaller ones where the larger overflow or magnify rounding."""
STEEP = 2e-5
"""How far rounding may move the output, relative to its largest entry."""
EXACT = {"narrow": 1e-3, "wide": 1e-6}
"""How far a norm may be from the truth: what is proven of it, and rounding of float32; what is
proven in float64."""
BELOW = {"narrow": 1e-4, "wide": 1e-12}
"""How far a bound may be below the truth, by rounding alone."""
STATISTICS = {"narrow": 1e-3, "wide": 1e-6}
SEVERITY = ("ok", "numerical", "refused", "wrong", "crash")


@dataclass
class Outcome:
    """What came of one model.

    Attributes:
        name: of the family or the type.
        library: timm or transformers.
        outcome: ok, numerical, refused, wrong, crash, or unbuilt (no model, no verdict).
        reasons: why it is not ok.
        layers: number of attention layers.
        closed: how many of them have a closed form.
        checked: numbers that were set against a truth.
        worst: largest relative error of an exact norm in float64.
        tightest: smallest ratio of a bound to the truth in float64.
        moved: by how much single precision alone moves the dense Jacobian of the model.
        unchecked: why a truth is missing.
        seconds: taken.
    """

    name: str
    library: str
    outcome: str = "ok"
    reasons: list[str] = field(default_factory=list)
    layers: int = 0
    closed: int = 0
    checked: int = 0
    worst: float = 0.0
    tightest: float = math.inf
    moved: float = 0.0
    unchecked: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def meet(self, outcome: str, reason: str) -> None:
        """Keep the worst outcome, and every reason once."""
        self.outcome = max(self.outcome, outcome, key=SEVERITY.index)
        text = f"{outcome}: {reason}"
        if text not in self.reasons:
            self.reasons.append(text)

    def plain(self) -> dict[str, Any]:
        """Return plain values for a line of JSON."""
        return asdict(self)


def compare(name: str, library: str, loader: loaded.Loader) -> Outcome:
    """Load a model, measure it in both precisions, and compare."""
    outcome, start = Outcome(name, library), time.process_time()
    nets = _guarded(outcome, "load", lambda: _tamed(loader))
    if nets is not None:
        _guarded(outcome, "measure", lambda: _compare(outcome, *nets))
    outcome.seconds = round(time.process_time() - start, 1)
    return outcome


def _tamed(loader: loaded.Loader) -> tuple[Net, Net]:
    """Return the model in both precisions, with the largest weights that keep it tame."""
    nets = None
    for nets in loaded.pairs(loader, GAINS):
        if _tame(*nets):
            break
    assert nets is not None
    return nets


def _tame(narrow: Net, wide: Net) -> bool:
    """Say whether single precision still gives the same function."""
    batch = loaded.batch_for(wide)
    with torch.no_grad():
        try:
            true = wide.output(batch)
            out = narrow.output(batch.to(narrow.device, narrow.dtype))
        except Exception:
            return True  # for lipaudit to say
    return bool((out - true).abs().max() <= STEEP * true.abs().max())


def _guarded(outcome: Outcome, what: str, work: Callable[[], Any]) -> Any:
    """Return what lipaudit gives; note a refusal, or a crash with its last frames."""
    try:
        return work()
    except LipauditError as error:
        outcome.meet("refused", f"{what}: {type(error).__name__}: {error.message}")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in frames[-4:]]
        text = str(error).partition("\n")[0][:200]
        outcome.meet("crash", f"{what}: {type(error).__name__}: {text} ({' > '.join(own)})")
    return None


def _compare(outcome: Outcome, narrow: Net, wide: Net) -> None:
    batch = loaded.batch_for(wide)
    ones = [loaded.alone(batch, i) for i in range(len(batch))]
    _whole_model(outcome, wide, batch, ones, "wide", {"tol": 1e-7, "within": 1e-6})
    # A sample alone too: torch has derivatives that are wrong in a batch of one only.
    _whole_model(outcome, wide, batch[-1:], ones[-1:], "wide", {"tol": 1e-7, "within": 1e-6})
    single = batch.to(narrow.device, narrow.dtype)
    _whole_model(outcome, narrow, single, ones, "narrow", {"within": 1e-3}, wide)
    sites = _guarded(outcome, "survey", lambda: survey(wide, batch).sites)
    if not sites:
        return
    outcome.layers, outcome.closed = len(sites), sum(site.closed_form for site in sites)
    for site in sites:
        if not site.closed_form:
            outcome.meet("numerical", str(site.reason))
    chosen = sorted({0, len(sites) // 2, len(sites) - 1})
    known = [_truths(outcome, wide, one, sites, chosen) for one in ones]
    runs = (
        (wide, batch, "wide", {"tol": 1e-7, "max_steps": 600, "within": 1e-6}),
        (narrow, single, "narrow", {"within": 1e-3}),
    )
    for net, samples, precision, options in runs:
        _heads(outcome, net, samples, known, precision, {"layers": tuple(chosen)} | options)


def _truths(
    outcome: Outcome, net: Net, one: Batch, sites: Sequence[Any], chosen: Sequence[int]
) -> truth.Truths:
    try:
        return truth.truths(net, one, sites, chosen)
    except Exception as error:  # of the truth's own, which is then missing
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).partition("\n")[0][:150]
        place = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
        return dict.fromkeys(chosen, f"{type(error).__name__}: {text} ({place})")


def _cut(batch: Batch) -> ProcessBatches:
    """Return what a run measures: texts of one length at a time, so that nothing is padded."""
    return ProcessBatches(batch, [*batch.by_length(len(batch))])


def _measure(net: Net, batch: Batch, name: str, options: dict[str, Any]) -> Any:
    measure = load_measures()[name]
    given = option_types()[name].parse(options)
    parts = results.in_order(list(measure.compute(net, _cut(batch), given)), batch.ids)
    measure.summarise(parts, given)
    values = {name: base.join_parts(parts, name) for name in parts[0].values}
    return replace(parts[0], ids=batch.ids, values=values)


def _whole_model(
    outcome: Outcome,
    net: Net,
    batch: Batch,
    ones: Sequence[Batch],
    precision: str,
    options: dict[str, Any],
    reference: Net | None = None,
) -> None:
    part = _guarded(outcome, "jacobian", lambda: _measure(net, batch, "jacobian", options))
    if part is None:
        return
    for i, one in enumerate(ones):
        try:
            true = truth.norm(truth.whole(reference or net, one))
        except Exception as error:
            outcome.unchecked.append(f"model: {type(error).__name__}: {str(error)[:100]}")
            return
        value, missed = float(part.values["norm"][i]), not bool(part.values["converged"][i])
        if reference is not None:
            single = truth.norm(truth.whole(net, one.to(net.device, net.dtype)))
            outcome.moved = max(outcome.moved, abs(single - true) / max(true, 1e-300))
        _exact(outcome, f"jacobian[{i}]", value, true, precision, missed=missed)


def _heads(
    outcome: Outcome,
    net: Net,
    batch: Batch,
    known: Sequence[truth.Truths],
    precision: str,
    options: dict[str, Any],
) -> None:
    layers = {"layers": options["layers"]}
    rows = _guarded(outcome, "attention", lambda: _rows(net, batch, layers))
    if rows is not None:
        _statistics(outcome, rows, known[-1], precision)
    whole = {"concat": True, "layer_within": options["within"]}
    part = _guarded(outcome, "bounds", lambda: _measure(net, batch, "bounds", options | whole))
    if part is None:
        return
    names = part.facts["heads"]
    for i, one in enumerate(known):
        for place, (layer, _) in enumerate(part.facts["layers"]):
            columns = [c for c, head in enumerate(names) if head[0] == layer]
            found = {key: part.values[key][i] for key in part.values}
            _layer(outcome, found, columns, place, (layer, one[layer]), precision)


def _rows(net: Net, batch: Batch, options: dict[str, Any]) -> dict[tuple[int, int], Any]:
    """Return the rows of `attention`, by (layer, head), of the last sample."""
    measure = load_measures()["attention"]
    given = option_types()["attention"].parse(options)
    section = measure.summarise(list(measure.compute(net, _cut(batch[-1:]), given)), given)[0]
    return {(row.layer, row.head): row for row in section.rows}


def _statistics(outcome: Outcome, rows: Any, known: truth.Truths, precision: str) -> None:
    for (layer, head), row in rows.items():
        true = known[layer]
        if isinstance(true, str):
            continue
        for name, values in true.statistics.items():
            value, want = getattr(row, name), float(values[head])
            outcome.checked += 1
            allowed = _allowed(outcome, STATISTICS, precision) * max(want, 0.05)
            if value is None or abs(value - want) > allowed:
                text = f"{name} of P {value!r} for {want:.9g} [{precision}]"
                outcome.meet("wrong", f"layer {layer} head {head}: {text}")


def _layer(
    outcome: Outcome,
    found: dict[str, Any],
    columns: Sequence[int],
    place: int,
    true: tuple[int, truth.LayerTruth | str],
    precision: str,
) -> None:
    layer, expected = true
    if isinstance(expected, str):
        text = f"layer {layer}: {expected}"
        if text not in outcome.unchecked:
            outcome.unchecked.append(text)
        return
    for head, column in enumerate(columns):
        where, sigma = f"layer {layer} head {head}", float(expected.heads[head])
        if math.isnan(sigma):
            continue
        value, missed = float(found["exact"][column]), bool(found["missed"][column])
        _exact(outcome, where, value, sigma, precision, missed=missed)
        for name in load_bounds():
            _bound(outcome, f"{where} {name}", float(found[name][column]), sigma, precision)
    joined, missed = float(found["layer_exact"][place]), bool(found["layer_missed"][place])
    if not math.isnan(joined + expected.joined):
        _exact(outcome, f"layer {layer}", joined, expected.joined, precision, missed=missed)


def _allowed(outcome: Outcome, usual: dict[str, float], precision: str) -> float:
    """Return a tolerance; in single precision not less than what rounding does to the model."""
    return max(usual[precision], 3 * outcome.moved if precision == "narrow" else 0.0)


def _exact(
    outcome: Outcome, what: str, value: float, true: float, precision: str, *, missed: bool
) -> None:
    if math.isnan(value):
        outcome.meet("refused", f"{what.partition(' head')[0]}: no norm is given")
        return
    outcome.checked += 1
    error = abs(value - true) / max(true, 1e-300)
    if abs(value - true) <= 1e-9 or (missed and value <= true):
        return
    if precision == "wide":
        outcome.worst = max(outcome.worst, error)
    if not error <= _allowed(outcome, EXACT, precision):
        outcome.meet("wrong", f"{what}: {value:.9g} for {true:.9g} ({error:.1e}) [{precision}]")


def _bound(outcome: Outcome, what: str, value: float, true: float, precision: str) -> None:
    if math.isnan(value):
        return
    outcome.checked += 1
    if true > 1e-9 and precision == "wide":
        outcome.tightest = min(outcome.tightest, value / true)
    if value < true * (1 - _allowed(outcome, BELOW, precision)) - 1e-15:
        gap = (true - value) / max(true, 1e-300)
        outcome.meet("wrong", f"{what}: {value:.9g} below {true:.9g} by {gap:.1e} [{precision}]")


def worst_first(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Sort: crashes first."""
    return sorted(outcomes, key=lambda o: (-SEVERITY.index(o.outcome), o.name))
