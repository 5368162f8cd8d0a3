"""The measure `certify`: the balls that are proven, beside those that attacks break."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lipaudit.errors import InputError, UsageError
from lipaudit.measures import base
from lipaudit.measures.base import Arrays, AuditRole, Facts, Measure, Part
from lipaudit.tables import Note, Row, Section
from lipaudit.wings.certificates.certificate_tables import CERTIFY_TABLE, RADII_TABLE
from lipaudit.wings.certificates.exports import (
    encode_files,
    encode_proofs,
    encode_text,
    export_balls,
)
from lipaudit.wings.certificates.options import AUDIT_SECONDS, CertifyOptions, plan_certificates

if TYPE_CHECKING:
    from lipaudit.attacks.text import Reader
    from lipaudit.data.batch import Batch
    from lipaudit.models.net import Net
    from lipaudit.wings.certificates.bracket import Bracket
    from lipaudit.wings.certificates.certificate import Proof

# Seconds of trial passes before the first sample of a run with several patches.
TRIAL_SECONDS = 1.0


def measure(net: Net, batches: Iterable[Batch], options: CertifyOptions) -> Iterator[Part]:
    """Yield, sample by sample, which balls an attack broke and which are certified.

    Raises:
        NoRuleError: the model uses an operation for which certificates have no rule.
    """
    from lipaudit.measures.texts import make_reader

    reader = None
    if options.counted == "words":
        reader = make_reader(net)
    # The cost of several patches is reported once, unless --seconds limits it.
    is_cost_reported = options.counted != "patch" or options.seconds is not None
    # Steps of progress within a sample: one for each ball, and one for the radius search.
    steps = max(len(options.eps) + options.radius, 1)
    for batch in batches:
        brackets = []
        for number, sample in enumerate(batch.split(1)):
            bracket = _make_bracket(net, sample, options, reader)
            # The generator yields after the attacks (done == 0), then after each proof.
            for done, _ in enumerate(bracket.decide_balls(options.eps)):
                if done == 0 and not is_cost_reported:
                    is_cost_reported = _report_passes(bracket, options)
                base.report_progress(number + done / steps)
            if options.radius:
                bracket.search(options.tol)
            brackets.append(bracket)
        yield _make_part(net, batch, brackets, options)


def _make_bracket(
    net: Net, sample: Batch, options: CertifyOptions, reader: Reader | None
) -> Bracket:
    """Return the `Bracket` that runs the attacks and proofs of a sample.

    `reader` tokenizes texts. It is only needed to replace words by near words, else None.
    """
    from lipaudit.measures.texts import read_texts
    from lipaudit.wings.certificates.bracket import Bracket

    texts = None
    if reader:
        texts = read_texts(reader, sample, characters=False)
    return Bracket(
        net,
        sample,
        proof=make_proof(net, sample, options, options.seconds or math.inf),
        trials=options.trials,
        seed=base.seed_of(sample.ids[0], options.seed),
        texts=texts,
    )


def _make_part(
    net: Net, batch: Batch, brackets: Sequence[Bracket], options: CertifyOptions
) -> Part:
    """Return the results of a batch as a `Part`; each bracket has the results of one sample.

    Values become arrays (samples, ...) by name. Exported files and proofs become texts among the
    facts of the part.
    """
    import numpy as np

    values = [_read_bracket(bracket, options) for bracket in brackets]
    arrays = {}
    for name in values[0]:
        arrays[name] = np.array([of_sample[name] for of_sample in values])
    facts: Facts = {
        # Signs of weak attacks at the clean samples, such as gradients that are 0.
        "checks": base.read_checks(*(bracket.clean for bracket in brackets)),
        "dtype": str(net.dtype).removeprefix("torch."),
        "classes": base.name_classes(net, arrays["label"], arrays["predicted"]),
    }
    if options.export:
        facts["exported"] = encode_text(export_balls(net, brackets, options))
    if options.proofs:
        facts["proofs"] = encode_text(encode_proofs(brackets))
    notes: list[Note] = []
    for bracket in brackets:
        notes += bracket.notes
    return Part(batch.ids, arrays, facts, tuple(notes))


def _report_passes(bracket: Bracket, options: CertifyOptions) -> bool:
    """Tell the user how many passes the proofs of a sample need, and how long a pass takes.

    A proof for 2 patches on a grid of 196 places has a pass for each of the 196 * 195 / 2 choices
    of places. A trial measures the time: one pass for each choice, until TRIAL_SECONDS are over.

    Args:
        bracket: runs the attacks and proofs of the sample; the attacks are already done.
        options: the options of the run; the radii in `eps` are numbers of patches.

    Returns:
        Whether a cost was reported. It is not if the sample is misclassified, or if attacks broke
        the sample with every number of patches above one.
    """
    from lipaudit.wings.certificates.certificate import certify_ball

    net = bracket.net
    if not bracket.correct:
        return False
    # The numbers of patches for which no attack succeeded, so that a proof will be tried.
    counts = sorted(int(k.value) for k in options.eps if bracket.adversarial_radius > k.value)
    patches = max(counts, default=1)
    if patches == 1:
        return False
    began = time.monotonic()
    brief = replace(bracket.proof, nodes=1, deadline=began + TRIAL_SECONDS)
    certificate = certify_ball(net, bracket.sample, bracket.label_to_prove, patches, brief)
    # `nodes` counts the passes before the deadline.
    seconds = (time.monotonic() - began) / max(certificate.nodes, 1)
    # With --nodes 1 each choice has one pass. All numbers of patches are tried at most: the proof
    # for the largest number comes first and, if it succeeds, holds for fewer patches, too.
    relation = "at most"
    if bracket.proof.nodes > 1:
        # The values of a choice may be split, and each part has a pass. So only a lower limit is
        # known: a pass for each choice of the largest number of patches, of which all are tried
        # unless the model fails on one of them.
        relation = "at least, unless one breaks it"
        counts = [patches]
    places = math.prod(net.input_shape[1:]) // math.prod(bracket.proof.patch or (1, 1))
    choice = f"choice of {' or '.join(map(str, counts))} patches"
    unit = f"passes {relation} (one for each {choice}; limit: --seconds)"
    base.report_cost(sum(math.comb(places, k) for k in counts), seconds, unit)
    return True


def make_proof(net: Net, sample: Batch, options: CertifyOptions, seconds: float) -> Proof:
    """Return the settings for proofs of a sample; the time limit of `seconds` starts now."""
    from lipaudit.wings.certificates.certificate import Proof, choose_order

    return Proof(
        norm=options.norm or "linf",
        order=choose_order(options.order, options.count_inputs(net, sample)),
        nodes=sys.maxsize if options.most_nodes is None else options.most_nodes,
        deadline=time.monotonic() + seconds,
        patch=options.choose_patch(net),
    )


def check(net: Net, batch: Batch, options: CertifyOptions) -> None:
    """Refuse a model, samples or options that cannot be certified.

    Raises:
        InputError: the model has fewer than two classes, scores continuations or is random, the
            embedding table of token ids is unknown, or a pass needs more memory than is free.
        NoRuleError: the model uses an operation that has no rule.
        UsageError: a radius is too large for the box, or the model computes on several devices.
    """
    from lipaudit.attacks.evaluate import require_radius
    from lipaudit.models.precision import list_devices
    from lipaudit.models.requirements import require_fixed
    from lipaudit.wings.certificates.certificate import require_rules
    from lipaudit.wings.certificates.onnx_graph import export_onnx

    base.require_decision(net, "Certify a classifier.")
    if net.scored:
        raise InputError(
            f"{net.architecture} scores continuations: certificates need a classifier",
            "Use `lipaudit attack`, or certify a classifier.",
        )
    if len(set(list_devices(net.module))) > 1:
        raise UsageError(
            "certificates are computed on one device, but --device-map uses several",
            "Leave --device-map out, or name one device beside cpu and disk.",
        )
    require_fixed(net, batch)
    if options.eps:
        for trial in options.trials(options.eps):
            require_radius(trial, net.box, net.input_shape, options.choose_patch(net))
    _require_memory(net, batch, options)
    first = batch[:1].trim().to(net.device, net.dtype)
    require_rules(net, first)
    if options.export is not None:
        # A trial export: if the model cannot be exported, fail before the proofs.
        export_onnx(net, first)


def _require_memory(net: Net, batch: Batch, options: CertifyOptions) -> None:
    """Refuse samples whose proofs need more memory than is free.

    Memory grows with the length of a text and with the order of the proof. The order depends on
    the length, too. So the longest sample of each order is checked.
    """
    from lipaudit.wings.certificates.certificate import choose_order, require_room

    if batch.mask is None:
        lengths = [batch.x.shape[1]]
    else:
        lengths = batch.mask.sum(1).tolist()
    index_of_length = {length: i for i, length in enumerate(lengths)}  # one sample of each length
    largest = {}  # the longest sample of each order: longer samples overwrite shorter ones
    for _, i in sorted(index_of_length.items()):
        sample = batch[i : i + 1].trim().to(net.device, net.dtype)
        inputs = options.count_inputs(net, sample)
        largest[choose_order(options.order, inputs)] = (sample, inputs)
    for order, (sample, inputs) in largest.items():
        require_room(net, sample, order, inputs)


def _read_bracket(bracket: Bracket, options: CertifyOptions) -> Facts:
    """Return the results of a sample by name; lists have a value for each radius of --eps.

    `bracket` has run the attacks and the proofs of the sample.
    """
    from lipaudit.wings.certificates.certificate import Certificate

    # No proof was tried for a ball inside a certified ball: it is certified, too, and so are all
    # places of its patches. Nor for a ball that contains a broken ball, or around a misclassified
    # sample: its certificate has no meaning, and `robust` (below) hides its places.
    untried = Certificate(why="", places=1.0 if options.counted == "patch" else math.nan)
    radii = [float(radius) for radius in options.eps]
    certificates = [bracket.certificates.get(eps, untried) for eps in radii]
    robust = [bracket.correct and bracket.adversarial_radius > eps for eps in radii]
    # The share of the places of patches in the image that are proven; NaN for broken samples.
    pairs = zip(certificates, robust, strict=True)
    places = [certificate.places if is_robust else math.nan for certificate, is_robust in pairs]
    values = {
        "label": bracket.label,
        "predicted": bracket.predicted,
        "correct": bracket.correct,
        "order": bracket.proof.order,
        "robust": robust,
        "certified": [bracket.certified_radius >= eps for eps in radii],
        "why": [certificate.why for certificate in certificates],
        "nodes": [certificate.nodes for certificate in certificates],
        "places": places,
        "seconds": [certificate.seconds for certificate in certificates],
    }
    if options.radius:
        values |= _read_search(bracket, radii)
    return values


def _read_search(bracket: Bracket, radii: Sequence[float]) -> dict[str, float]:
    """Return the results of the radius search of a sample, by name.

    `radii` are those of --eps, whose proofs are no part of the search.
    """
    radius = math.nan  # of a misclassified sample
    if bracket.correct:
        radius = max(bracket.certified_radius, 0.0)  # 0 if no ball was certified
    searching = 0.0
    for eps, certificate in bracket.certificates.items():
        if eps not in radii:
            searching += certificate.seconds
    return {
        "radius": radius,
        "radius_adversarial": bracket.adversarial_radius,
        "passes": len(bracket.certificates),
        "searching": searching,
    }


def summarise(parts: Sequence[Part], options: CertifyOptions) -> list[Section]:
    """Return the section `certify`, a row per ball, and with `--radius` the section of radii.

    Args:
        parts: the results of the batches, arrays with an entry per sample.
        options: the options of the run.
    """
    arrays = base.join_arrays(parts)
    # A repeated sample counts once in every row.
    unique = base.select_unique(parts, arrays)
    rows = _make_rows(unique, options)
    notes = _write_notes(parts, arrays, options)
    columns = _make_columns(arrays, rows)
    sections = [base.make_section(CERTIFY_TABLE, parts, options, rows, notes, samples=columns)]
    if options.radius:
        sections.append(_summarise_radii(unique, options))
    return sections


def _make_rows(arrays: Arrays, options: CertifyOptions) -> Sequence[Row]:
    """Return the rows of the section `certify`: shares of robust and certified samples by ball.

    Args:
        arrays: the results of the samples, by name; repeated samples are left out.
        options: the options of the run.
    """
    import numpy as np

    robust = arrays["robust"]  # (samples, balls), like `certified`
    certified = arrays["certified"]
    correct = arrays["correct"]
    return base.make_rows(
        CERTIFY_TABLE,
        norm=options.norm,
        eps=[float(radius) for radius in options.eps],
        eps_text=[radius.text for radius in options.eps],
        samples=len(robust),
        clean=base.reduce_known(correct[arrays["label"] >= 0], np.mean),
        **base.make_share_columns("robust", robust),
        **base.make_share_columns("certified", certified),
        undecided=(robust > certified).sum(0),  # robust, but not certified
        places=base.reduce_columns(arrays["places"], np.mean),
        order=int(arrays["order"].max()),
        nodes=arrays["nodes"].sum(0),
        seconds=arrays["seconds"].sum(0).round(3),
    )


def _summarise_radii(arrays: Arrays, options: CertifyOptions) -> Section:
    """Return the section of radii with one row: statistics of the radii of all samples.

    Args:
        arrays: the results of the samples, by name; repeated samples are left out.
        options: the options of the run.
    """
    import numpy as np

    correct = arrays["correct"]
    radius = arrays["radius"][correct]
    adversarial = arrays["radius_adversarial"][correct]
    is_broken = np.isfinite(adversarial)  # inf: attacks found no adversarial example
    row = RADII_TABLE.row(
        norm=options.norm,
        samples=len(radius),
        radius=base.reduce_known(radius, np.median),
        radius_adversarial=base.reduce_known(adversarial[is_broken], np.median),
        ratio=base.reduce_known(radius[is_broken] / adversarial[is_broken], np.median),
        smallest=base.reduce_known(radius, np.min),
        largest=base.reduce_known(radius, np.max),
        passes=int(arrays["passes"].sum()),
        seconds=round(float(arrays["searching"].sum()), 3),
    )
    return RADII_TABLE.section(settings=options.model_dump(), rows=(row,))


def _make_columns(arrays: Arrays, rows: Sequence[Row]) -> Arrays:
    """Return the per-sample columns by name; columns of a ball end in its norm and radius.

    Args:
        arrays: the results of all samples by name.
        rows: the rows of the table of balls, one per radius.
    """
    import numpy as np

    has_label = arrays["label"] >= 0
    correct = arrays["correct"]
    columns = {
        "label": np.where(has_label, arrays["label"], np.nan),
        "predicted": arrays["predicted"],
        "correct": np.where(has_label, correct, np.nan),
    }
    for i, row in enumerate(rows):
        robust = arrays["robust"][:, i]
        certified = arrays["certified"][:, i]
        # The first condition that holds gives the verdict: a misclassified sample is "wrong", even
        # though it was neither attacked nor proven.
        verdict = np.select(
            [~correct, ~robust, certified], ["wrong", "broken", "certified"], "undecided"
        )
        why = np.where(verdict == "undecided", arrays["why"][:, i], "")
        values = {"verdict": verdict, "why": why, "robust": robust, "certified": certified}
        if row.norm == "patch":
            values["places"] = arrays["places"][:, i]
        for name, column in values.items():
            columns[row.trial.column(name)] = column
    if "radius" in arrays:
        adversarial = arrays["radius_adversarial"]
        columns["radius"] = arrays["radius"]
        columns["radius_adversarial"] = np.where(np.isfinite(adversarial), adversarial, np.nan)
    return columns


def _write_notes(parts: Sequence[Part], arrays: Arrays, options: CertifyOptions) -> Iterator[Note]:
    """Yield the notes of the section: on masked gradients, rounding, labels and the time limit.

    The notes of the attacks, and a note on repeated samples, come last.
    """
    from lipaudit.attacks.signs import note_signs

    yield from note_signs(base.sum_checks(parts))
    text = (
        "certificates hold for exact arithmetic with the stored weights. Running the model in "
        f"{parts[0].facts['dtype']} adds rounding errors that they do not cover"
    )
    yield Note.info("real-arithmetic", text)
    unlabelled = int((arrays["label"] < 0).sum())
    if unlabelled:
        text = (
            f"{unlabelled} of {len(arrays['label'])} samples have no label: the predicted class "
            "is attacked and certified"
        )
        yield Note.info("own-predictions", text)
    ended = int((arrays["why"] == "seconds").sum())
    if ended:
        text = (
            f"--seconds {options.seconds:g} ended {ended} proofs. This depends on the speed of "
            "the machine; for reproducible limits, use --nodes"
        )
        yield Note.info("time-limit", text)
    yield from base.notes(parts)
    yield from base.note_repeats(parts)


CERTIFY = Measure(
    "certify",
    (CERTIFY_TABLE, RADII_TABLE),
    CertifyOptions,
    measure,
    summarise,
    batch=1,
    encode_files=encode_files,
    check=check,
    place=44,
    audit=AuditRole(
        switch="Also compute certificates, at the radii --eps: up to "
        f"{AUDIT_SECONDS:g} s a sample.",
        uses=("eps", "attack", "norm"),
        samples={"quick": 4, "full": 32},
        plan=plan_certificates,
    ),
)
