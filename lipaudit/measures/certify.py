"""The measure `certify`: the balls that are proven, beside those that attacks break."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np

from lipaudit.attacks.evaluate import require_radius
from lipaudit.attacks.sanity import Checks, note_signs
from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, UsageError
from lipaudit.measures.attack import ONE_LOGIT, require_entry
from lipaudit.measures.measure import (
    Measure,
    Part,
    Values,
    class_names,
    distinct,
    join_parts,
    moved,
    named_classes,
    notes,
    number_or_none,
    reduce_known,
    repeat_notes,
    sample_ids,
    seed_of,
)
from lipaudit.models.certificate import (
    Bracket,
    Certificate,
    Proof,
    choose_order,
    require_room,
    require_rules,
)
from lipaudit.models.lifting import devices
from lipaudit.models.net import Net
from lipaudit.settings import CERTIFY_TABLE, RADII_TABLE
from lipaudit.settings.certify import CertifyOptions
from lipaudit.tables import Note, Row, Section
from lipaudit.tables.figures import wilson
from lipaudit.tables.trials import Radius


def measure(net: Net, batches: Iterable[Batch], options: CertifyOptions) -> Iterator[Part]:
    """Yield, sample by sample, which balls an attack broke and which are certified.

    Raises:
        NoRuleError: the model uses an operation that nothing is known of on balls.
    """
    for batch in batches:
        brackets = []
        for number, sample in enumerate(batch.split(1)):
            limit = math.inf if options.seconds is None else options.seconds
            proof = Proof(
                norm=options.norm or "linf",
                order=choose_order(net, sample, options.order),
                nodes=sys.maxsize if options.most_nodes is None else options.most_nodes,
                deadline=time.monotonic() + limit,
            )
            seed = seed_of(sample.ids[0], options.seed)
            bracket = Bracket(net, sample, proof=proof, trials=options.trials, seed=seed)
            for done, _ in enumerate(bracket.settle(options.eps), 1):
                moved(number + done / (len(options.eps) + options.radius))
            if options.radius:
                bracket.search(options.tol)
            brackets.append(bracket)
        values = [_read_bracket(bracket, options) for bracket in brackets]
        arrays = {name: np.array([each[name] for each in values]) for name in values[0]}
        facts = {
            "checks": [bracket.clean.checks for bracket in brackets],
            "dtype": str(net.dtype).removeprefix("torch."),
            "classes": class_names(net, arrays["label"], arrays["predicted"]),
        }
        yield Part(batch.ids, arrays, facts, tuple(n for b in brackets for n in b.notes))


def check(net: Net, batch: Batch, options: CertifyOptions) -> None:
    """Refuse a model, samples or options that cannot be certified.

    Raises:
        InputError: a model with fewer than two classes or with scored continuations, token ids
            without a known embedding table, or a pass that needs more memory than is free.
        NoRuleError: the model uses an operation that has no rule.
        UsageError: a radius beyond the box, or a model that computes on several devices.
    """
    if net.classes is None or net.classes < 2:
        lacks = f"{net.architecture} has one class" if net.classes else net.lacks_classes
        raise InputError(
            f"{lacks}, so there is no decision to certify",
            f"Certify a classifier. {ONE_LOGIT}",
        )
    if net.scored:
        raise InputError(
            f"{net.architecture} scores continuations: certificates need a classifier",
            "Use `lipaudit attack`, or certify a classifier.",
        )
    if len(set(devices(net.module))) > 1:
        raise UsageError(
            "certificates are computed on one device, but --device-map uses several",
            "Leave --device-map out, or name one device beside cpu and disk.",
        )
    require_entry(net)
    for trial in options.trials(options.eps) if options.eps else ():
        require_radius(trial, net.box, net.input_shape)
    # At one order the longest sample needs the most memory: check each order in use.
    lengths = [batch.x.shape[1]] if batch.mask is None else batch.mask.sum(1).tolist()
    places = {length: i for i, length in enumerate(lengths)}
    each = [batch[i : i + 1].trim().to(net.device, net.dtype) for _, i in sorted(places.items())]
    for order, sample in {choose_order(net, s, options.order): s for s in each}.items():
        require_room(net, sample, order)
    require_rules(net, batch[:1].trim().to(net.device, net.dtype))


def _read_bracket(bracket: Bracket, options: CertifyOptions) -> dict[str, Any]:
    radii = [float(radius) for radius in options.eps]
    # A ball that was not tried lies inside a certified one, or an attack broke a smaller one.
    tried = [bracket.tried.get(eps, Certificate(certified=True, why="")) for eps in radii]
    seconds = [bracket.seconds.get(eps, 0.0) for eps in radii]
    values = {
        "label": bracket.label,
        "predicted": bracket.predicted,
        "correct": bracket.correct,
        "order": bracket.proof.order,
        "robust": [bracket.correct and bracket.nearest > eps for eps in radii],
        "certified": [bracket.certified >= eps for eps in radii],
        "why": [each.why for each in tried],
        "nodes": [each.nodes for each in tried],
        "seconds": seconds,
    }
    if not options.radius:
        return values
    return values | {
        "radius": max(bracket.certified, 0.0) if bracket.correct else math.nan,
        "radius_adversarial": bracket.nearest,
        "passes": len(bracket.tried),
        "searching": sum(bracket.seconds.values()) - sum(seconds),
    }


def summarise(parts: Sequence[Part], options: CertifyOptions) -> list[Section]:
    """Make the section `certify`, a row per ball, and with `--radius` the section of radii."""
    arrays = {name: join_parts(parts, name) for name in parts[0].values}
    once = {name: values[distinct(parts)] for name, values in arrays.items()}
    rows = tuple(_make_row(i, radius, once, options) for i, radius in enumerate(options.eps))
    settings = options.model_dump()
    first = CERTIFY_TABLE.section(
        settings=settings,
        rows=rows,
        samples={"ids": sample_ids(parts), **_make_columns(arrays, rows)},
        notes=_write_notes(parts, arrays, options) + notes(parts) + repeat_notes(parts),
        classes=named_classes(parts),
    )
    if not options.radius:
        return [first]
    right = once["correct"]
    radius, nearest = once["radius"][right], once["radius_adversarial"][right]
    broken = np.isfinite(nearest)
    row = RADII_TABLE.row(
        norm=options.norm or "linf",
        samples=int(right.sum()),
        radius=reduce_known(radius, np.median),
        radius_adversarial=reduce_known(nearest[broken], np.median),
        ratio=reduce_known(radius[broken] / nearest[broken], np.median),
        smallest=float(radius.min()) if radius.size else None,
        largest=float(radius.max()) if radius.size else None,
        passes=int(once["passes"].sum()),
        seconds=round(float(once["searching"].sum()), 3),
    )
    return [first, RADII_TABLE.section(settings=settings, rows=(row,))]


def _make_row(i: int, radius: Radius, arrays: dict[str, Values], options: CertifyOptions) -> Row:
    robust, certified = arrays["robust"][:, i], arrays["certified"][:, i]
    known = arrays["correct"][arrays["label"] >= 0]
    ends = [wilson(int(each.sum()), len(each)) for each in (robust, certified)]
    return CERTIFY_TABLE.row(
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


def _make_columns(arrays: dict[str, Values], rows: Sequence[Row]) -> dict[str, tuple[Any, ...]]:
    label, correct = arrays["label"].tolist(), arrays["correct"]
    columns: dict[str, Any] = {
        "label": [y if y >= 0 else None for y in label],
        "predicted": arrays["predicted"].tolist(),
        "correct": [int(c) if y >= 0 else None for y, c in zip(label, correct, strict=True)],
    }
    for i, row in enumerate(rows):
        robust, certified = arrays["robust"][:, i], arrays["certified"][:, i]
        # The first that applies: a wrong sample is neither broken nor certified.
        verdict = np.select(
            [~correct, ~robust, certified], ["wrong", "broken", "certified"], "undecided"
        )
        each = {
            "verdict": verdict,
            "why": np.where(verdict == "undecided", arrays["why"][:, i], ""),
            "robust": robust.astype(int),
            "certified": certified.astype(int),
        }
        columns |= {row.trial.column(name): values.tolist() for name, values in each.items()}
    if "radius" in arrays:
        columns["radius"] = [number_or_none(r) for r in arrays["radius"]]
        found = arrays["radius_adversarial"]
        columns["radius_adversarial"] = [float(r) if math.isfinite(r) else None for r in found]
    return {name: tuple(values) for name, values in columns.items()}


def _write_notes(
    parts: Sequence[Part], arrays: dict[str, Values], options: CertifyOptions
) -> tuple[Note, ...]:
    each = [checks for part in parts for checks in part.facts.get("checks", ())]
    dtype = parts[0].facts["dtype"]
    texts = {
        "real-arithmetic": "certificates hold for exact arithmetic with the stored weights. "
        f"Running the model in {dtype} adds rounding errors that they do not cover"
    }
    unknown, cut = int((arrays["label"] < 0).sum()), int((arrays["why"] == "seconds").sum())
    if unknown:
        texts["own-predictions"] = (
            f"{unknown} of {len(arrays['label'])} samples have no label: the predicted class "
            "is attacked and certified"
        )
    if cut:
        texts["time-limit"] = (
            f"--seconds {options.seconds:g} ended {cut} proofs. This depends on the speed of "
            "the machine; for reproducible limits, use --nodes"
        )
    remarks = (Note(level="info", code=code, text=text) for code, text in texts.items())
    return (*note_signs(reduce(Checks.__add__, each)), *remarks)


MEASURE = Measure(measure, summarise, batch=1, check=check)
