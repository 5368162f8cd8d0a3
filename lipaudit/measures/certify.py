"""The measure `certify`: what no attack can break, beside what attacks break, sample by sample."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from lipaudit.attacks.evaluate import evaluate_chunk, require_radius
from lipaudit.attacks.outcome import Chunk, Outcome
from lipaudit.attacks.plan import Trial
from lipaudit.attacks.sanity import Checks, clean_notes
from lipaudit.data.batch import Batch
from lipaudit.errors import InputError
from lipaudit.measures.attack import classifier, require_entry, wilson
from lipaudit.measures.measure import (
    Measure,
    Part,
    Values,
    joined,
    moved,
    notes,
    number_or_none,
    sample_ids,
    seed_of,
)
from lipaudit.models.certificate import (
    Certificate,
    Proof,
    certificate,
    order_of,
    require_room,
    require_rules,
)
from lipaudit.models.net import Net
from lipaudit.results import CertifyRadiusRow, CertifyRow, Note, Section
from lipaudit.results.trials import Radius
from lipaudit.settings.certify import CertifyOptions

START = 2.0**-8
"""Where the search for an adversarial example begins, as a share of the space."""
SHARE = 2.0**-3
"""Where that for a certificate begins, as a share of the adversarial radius."""
LEAST = 2.0**-12
"""Share of the largest radius in question below which a search gives up."""


def measure(net: Net, batches: Iterable[Batch], options: CertifyOptions) -> Iterator[Part]:
    """Yield, per sample, which balls were broken and which are certified.

    Raises:
        NoRuleError: the model uses an operation that nothing is known of on balls.
    """
    for batch in batches:
        for sample in batch.split(1):
            yield _part(net, sample, options)


def check(net: Net, batch: Batch, options: CertifyOptions) -> None:
    """Refuse what cannot be certified.

    Raises:
        InputError: a model without classes, or with one, token ids whose embedding nothing
            shows, or a pass that takes more memory than there is.
        NoRuleError: the model uses an operation that nothing is known of on balls.
        UsageError: a radius beyond the box.
    """
    if net.classes is None or net.classes < 2:
        has = "no class scores" if net.classes is None else "one class"
        raise InputError(
            f"{net.info.architecture} has {has}: there is no decision to certify",
            "Certify a classifier.",
        )
    require_entry(net)
    for trial in options.trials(options.eps) if options.eps else ():
        require_radius(trial, net.box)
    first = batch[:1].trimmed().to(net.device, net.dtype)
    require_room(net, first, _order(net, first, options))
    require_rules(net, first)


def _order(net: Net, sample: Batch, options: CertifyOptions) -> int:
    return order_of(net, sample) if options.order == "auto" else int(options.order)


def _part(net: Net, sample: Batch, options: CertifyOptions) -> Part:
    case = _Case(net, sample, options)
    if case.correct:
        _settle(case)
    radii = [float(radius) for radius in options.eps]
    tried = [case.tried.get(eps, Certificate(certified=True, why="")) for eps in radii]
    values: dict[str, Any] = {
        "label": case.label,
        "predicted": case.predicted,
        "correct": case.correct,
        "order": case.proof.order,
        "robust": [case.correct and case.nearest > eps for eps in radii],
        "certified": [case.certified >= eps for eps in radii],
        "why": [each.why for each in tried],
        "nodes": [each.nodes for each in tried],
        "seconds": [case.seconds.get(eps, 0.0) for eps in radii],
    }
    if options.radius:
        values |= _searched(case)
    arrays = {name: np.array([value]) for name, value in values.items()}
    facts = {"checks": case.clean.checks, "dtype": str(net.dtype).removeprefix("torch.")}
    return Part(sample.ids, arrays, facts, tuple(case.notes))


class _Case:
    """One sample, and what is known of the balls around it.

    Attributes:
        label: the true class, -1 where it is unknown.
        predicted: the class that the model gives it.
        clean: how the sample fares without attack.
        correct: whether it is classified rightly; an unknown class is the predicted one.
        proof: how proofs are tried.
        stood: largest radius at which attacks found nothing.
        nearest: distance of the nearest adversarial example that they found.
        certified: largest radius that was certified; -1 for none.
        tried: what came of the proof at each radius.
        seconds: wall time of it.
        notes: what attacks remark.
    """

    def __init__(self, net: Net, sample: Batch, options: CertifyOptions) -> None:
        self.net, self.sample, self.options = net, sample, options
        with torch.no_grad():
            self.predicted = int(net.output(sample).argmax())
        self.label = -1 if sample.y is None else int(sample.y)
        self.wanted = self.label if self.label >= 0 else self.predicted
        self.stood, self.nearest, self.certified = 0.0, math.inf, -1.0
        self.tried: dict[float, Certificate] = {}
        self.seconds: dict[float, float] = {}
        self.notes: list[Note] = []
        self.clean = next(self._outcomes(()))
        self.correct = bool(self.clean.robust)
        limit = math.inf if options.seconds is None else options.seconds
        self.proof = Proof(
            norm=options.norm or "linf",
            order=_order(net, sample, options),
            nodes=options.nodes,
            deadline=time.monotonic() + limit,
        )

    def attack(self, radius: Radius) -> None:
        """Attack one ball, until something breaks it."""
        _, *outcomes = self._outcomes(self.options.trials([radius]))
        for outcome in outcomes:
            self.notes += outcome.notes
            if not outcome.robust:
                self.nearest = min(self.nearest, float(radius), float(outcome.distance))
                return
        self.stood = max(self.stood, float(radius))

    def prove(self, eps: float) -> None:
        """Try to certify one ball."""
        began = time.perf_counter()
        self.tried[eps] = certificate(self.net, self.sample, self.wanted, eps, self.proof)
        self.seconds[eps] = time.perf_counter() - began
        if self.tried[eps].certified:
            self.certified = max(self.certified, eps)

    def _outcomes(self, trials: Sequence[Trial]) -> Iterator[Outcome]:
        """Run attacks, the sample without attack first; its random numbers are its own."""
        y = torch.tensor([self.wanted], device=self.sample.x.device)
        chunk = Chunk(0, self.net.point(self.sample), y, self.net.free(self.sample))
        model = classifier(self.net, self.sample)
        seed = seed_of(self.sample.ids[0], self.options.seed)
        return evaluate_chunk(model, chunk, trials, box=self.net.box, seed=seed)


def _settle(case: _Case) -> None:
    """Settle the balls that are asked for.

    Attacks go outwards until one succeeds, which breaks all larger balls; proofs go inwards until
    one succeeds, which holds for all smaller ones.
    """
    radii = sorted(case.options.eps, key=float)
    for radius in radii:
        if case.nearest > float(radius):
            case.attack(radius)
    for number, radius in enumerate(reversed(radii), 1):
        if case.nearest > float(radius) > case.certified:
            case.prove(float(radius))
        moved(number / (len(radii) + case.options.radius))


def _searched(case: _Case) -> dict[str, float]:
    """Return the smallest adversarial and the largest certified radius that searches find."""
    if not case.correct:
        return {"radius": math.nan, "radius_adversarial": math.nan, "passes": 0, "searching": 0.0}
    asked, most, tol = sum(case.seconds.values()), _most(case), case.options.tol

    def attack(radius: float) -> None:
        case.attack(Radius(f"{radius:.6g}", Fraction(radius)))

    def open_from() -> float:
        return min([case.nearest, *(r for r, each in case.tried.items() if not each.certified)])

    _search(attack, lambda: (case.stood, case.nearest), (START * most, most), tol)
    reach = min(case.nearest, most)
    _search(case.prove, lambda: (max(case.certified, 0), open_from()), (SHARE * reach, reach), tol)
    return {
        "radius": max(case.certified, 0.0),
        "radius_adversarial": case.nearest,
        "passes": len(case.tried),
        "searching": sum(case.seconds.values()) - asked,
    }


def _search(
    look: Callable[[float], None],
    known: Callable[[], tuple[float, float]],
    reach: tuple[float, float],
    tol: float,
) -> None:
    """Search for the radius up to which something holds: doubling or halving, then bisection.

    Args:
        look: looks at a radius.
        known: returns the largest radius at which it is known to hold, or 0, and the smallest at
            which it is known not to.
        reach: where to begin, and the largest radius in question.
        tol: relative width at which it ends.
    """
    first, most = reach
    low, high = known()
    while low < most and high > max(low * (1 + tol), LEAST * most):
        if low:
            look(min(2 * low, math.sqrt(low * high), most))
        else:
            look(min(first, high / 2))
        low, high = known()


def _most(case: _Case) -> float:
    """Return the largest radius in question: the width of the space, or the size of the sample."""
    point, linf = case.net.point(case.sample), case.proof.norm == "linf"
    if case.net.box is None:
        return float(point.abs().max() if linf else torch.linalg.vector_norm(point))
    width = case.net.box[1] - case.net.box[0]
    return width if linf else width * math.sqrt(point.numel())


def summarise(parts: Sequence[Part], options: CertifyOptions) -> list[Section]:
    """Make the section `certify`, a row per ball, and that of the radii if they were searched."""
    arrays = {name: joined(parts, name) for name in parts[0].values}
    rows = tuple(_row(i, radius, arrays, options) for i, radius in enumerate(options.eps))
    settings = options.model_dump()
    first = Section(
        measure="certify",
        settings=settings,
        rows=rows,
        samples={"ids": sample_ids(parts), **_columns(arrays, rows)},
        notes=_remarks(parts, arrays, options) + notes(parts),
    )
    if not options.radius:
        return [first]
    radii = Section(
        measure="certify.radius", settings=settings, rows=(_radius_row(arrays, options),)
    )
    return [first, radii]


def _row(i: int, radius: Radius, arrays: dict[str, Values], options: CertifyOptions) -> CertifyRow:
    robust, certified = arrays["robust"][:, i], arrays["certified"][:, i]
    known = arrays["correct"][arrays["label"] >= 0]
    ends = [wilson(int(each.sum()), len(each)) for each in (robust, certified)]
    return CertifyRow(
        norm=options.norm or "linf",
        eps=float(radius),
        eps_text=radius.text,
        samples=len(robust),
        clean=float(known.mean()) if known.size else None,
        robust=float(robust.mean()),
        robust_low=ends[0][0],
        robust_high=ends[0][1],
        certified=float(certified.mean()),
        certified_low=ends[1][0],
        certified_high=ends[1][1],
        undecided=int((robust & ~certified).sum()),
        order=int(arrays["order"].max()),
        nodes=int(arrays["nodes"][:, i].sum()),
        seconds=round(float(arrays["seconds"][:, i].sum()), 3),
    )


def _columns(arrays: dict[str, Values], rows: Sequence[CertifyRow]) -> dict[str, tuple[Any, ...]]:
    """Return what is told of every sample."""
    label, correct = arrays["label"].tolist(), arrays["correct"]
    columns: dict[str, Any] = {
        "label": [y if y >= 0 else None for y in label],
        "predicted": arrays["predicted"].tolist(),
        "correct": [int(c) if y >= 0 else None for y, c in zip(label, correct, strict=True)],
    }
    for i, row in enumerate(rows):
        robust, certified = arrays["robust"][:, i], arrays["certified"][:, i]
        verdict = np.select(
            [~correct, ~robust, certified], ["wrong", "broken", "certified"], "undecided"
        )
        each = {
            "verdict": verdict,
            "why": arrays["why"][:, i],
            "robust": robust.astype(int),
            "certified": certified.astype(int),
        }
        columns |= {row.key.column(name): values.tolist() for name, values in each.items()}
    if "radius" in arrays:
        columns["radius"] = [number_or_none(r) for r in arrays["radius"]]
        found = arrays["radius_adversarial"]
        columns["radius_adversarial"] = [float(r) if math.isfinite(r) else None for r in found]
    return {name: tuple(values) for name, values in columns.items()}


def _radius_row(arrays: dict[str, Values], options: CertifyOptions) -> CertifyRadiusRow:
    right = arrays["correct"]
    radius, nearest = arrays["radius"][right], arrays["radius_adversarial"][right]
    broken = np.isfinite(nearest)
    return CertifyRadiusRow(
        norm=options.norm or "linf",
        samples=int(right.sum()),
        radius=_median(radius),
        radius_adversarial=_median(nearest[broken]),
        ratio=_median(radius[broken] / nearest[broken]),
        smallest=float(radius.min()) if radius.size else None,
        largest=float(radius.max()) if radius.size else None,
        passes=int(arrays["passes"].sum()),
        seconds=round(float(arrays["searching"].sum()), 3),
    )


def _median(values: Values) -> float | None:
    return float(np.median(values)) if values.size else None


def _remarks(
    parts: Sequence[Part], arrays: dict[str, Values], options: CertifyOptions
) -> tuple[Note, ...]:
    checks: Checks = parts[0].facts["checks"]
    for part in parts[1:]:
        checks = checks + part.facts["checks"]
    dtype = parts[0].facts["dtype"]
    texts = {
        "real-arithmetic": "certificates are of the function of real numbers that the stored "
        f"weights define; a program that runs it in {dtype} adds its own rounding"
    }
    unknown, cut = int((arrays["label"] < 0).sum()), int((arrays["why"] == "seconds").sum())
    if unknown:
        texts["own-predictions"] = (
            f"{unknown} of {len(arrays['label'])} samples have no label: what is attacked and "
            "certified of them is the class that the model gives them"
        )
    if cut:
        texts["time-limit"] = (
            f"--seconds {options.seconds:g} ended {cut} proofs: where that falls depends on the "
            "machine; --nodes does not"
        )
    remarks = (Note(level="info", code=code, text=text) for code, text in texts.items())
    return (*clean_notes(checks), *remarks)


MEASURE = Measure(measure, summarise, batch=1, check=check)
