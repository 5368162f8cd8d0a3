"""The measure `certify`: the balls that are proven, beside those that attacks break."""

from __future__ import annotations

import base64
import io
import math
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipaudit.errors import InputError, UsageError
from lipaudit.measures import base
from lipaudit.measures.attack import eps_column, seconds_column
from lipaudit.measures.base import AuditRole, Measure, Part, Values
from lipaudit.tables import Column, Display, Layout, Note, Report, Row, Section
from lipaudit.tables.columns import (
    ACCURACY,
    CERTIFIED,
    CERTIFIED_SHARE,
    OUTCOMES,
    finite,
    limit_columns,
    median_limits,
)
from lipaudit.tables.formats import format_value
from lipaudit.tables.summary import (
    CLEAN_OF_BALLS,
    Headline,
    declare_clean,
    describe_survivors,
    read_row,
)
from lipaudit.wings.certificates.options import MOST, CertifyOptions, plan_certificates

if TYPE_CHECKING:
    from lipaudit.data.batch import Batch
    from lipaudit.models.net import Net
    from lipaudit.wings.certificates.certificate import Bracket, Proof


# A lower limit of the truth, and an upper one.
_proven_column = partial(Column, better="higher", domain="ball", status="certified")
_found_column = partial(Column, better="higher", domain="ball", status="empirical")
# Seconds of trial passes before the first sample of a run with several patches.
TRIAL = 1.0
# Differs from machine to machine, so no gate reads it.
SECONDS = seconds_column("Wall time of the proofs.")


def read_attacked(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield the share of every ball that the attack of the certificates does not break."""
    attacks = str(section.settings.get("attack")).split(",")
    for row in section.rows:
        for found in read_row(headline, section, row):
            yield describe_survivors(found, attacks)


def read_certified(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield the certified accuracy of every ball, with the undecided samples in the text."""
    for row in section.rows:
        remarks = [f"{row.samples} samples"]
        if row.undecided:
            remarks.append(f"{row.undecided} undecided")
        yield from read_row(headline, section, row, *remarks)


CERTIFY_TABLE = Layout(
    name="certify",
    title="What is proven?",
    headlines=(
        declare_clean(12),
        CLEAN_OF_BALLS,
        Headline(
            name="attacked_accuracy",
            column="robust",
            label="robust accuracy",
            place=21,
            read=read_attacked,
            ranks=True,
        ),
        Headline(
            name="certified_accuracy",
            column="certified",
            label="certified accuracy",
            meaning="Share of the samples proven correct for every input of the ball.",
            place=30,
            read=read_certified,
            sentence="{value:.1%} are certified at {ball}.",
            rule="certify.certified >= -2pp",
            ranks=True,
        ),
    ),
    display=Display(
        about="The true robust accuracy is between the certified share (proven) and the robust "
        "share (not broken by the attacks).",
        columns=(
            *("norm", "eps_text", "clean", "certified", "robust", "undecided", "places"),
            "samples",
        ),
        worst=("radius",),
        folded=False,
    ),
    sample_columns={
        **OUTCOMES,
        "verdict": Column(
            "verdict", "Verdict: wrong, broken, certified or undecided.", domain="ball", format="s"
        ),
        "why": Column("why undecided", "Reason why a sample is undecided.", domain="", format="s"),
        "places": _proven_column(
            "places proven",
            "Share of the places of a patch (of the choices of several) that are proven.",
            format=".1%",
        ),
        "certified": _proven_column(
            "certified",
            "Whether it is proven that no input in the ball changes the class.",
            format="d",
            reading=CERTIFIED,
        ),
        "radius": _proven_column(
            "certified radius",
            "Largest certified radius of the sample.",
            reading="Every input closer than this is proven to have the same class. Larger "
            "balls may be safe too, but that is not proven.",
        ),
        "radius_adversarial": _found_column(
            "adversarial radius",
            "Distance of the nearest adversarial example that attacks found.",
            reading="The nearest adversarial example is at most this far away. Empty if the "
            "attacks found none.",
        ),
    },
    fixed={
        "norm": Column.text("norm", "Norm of the ball.", needed=True),
        "eps": eps_column("Radius, for pixels in [0, 1] or token embeddings."),
        **ACCURACY,
        "certified": CERTIFIED_SHARE,
        **limit_columns("certified"),
        "undecided": Column.count("undecided", "Samples neither broken nor certified."),
        "places": _proven_column(
            "places",
            "Share of the places of a patch that are proven, of samples that are not broken.",
            format=".1%",
        ),
        "order": Column.count(
            "order", "Proof method: 1 is affine, 2 quadratic (tighter and slower).", default=1
        ),
        "nodes": Column(
            "nodes", "Number of parts of balls that branch and bound examined.", format="d"
        ),
        "seconds": SECONDS,
    },
)


def read_radius(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield the median certified radius, with its limits and that of attacks in the text."""
    row = None
    if section.rows:
        row = section.rows[0]
    if row is None or not finite([row.radius]):
        return
    column = section.columns["radius"]
    proven = report.section("certify")
    radii = proven.samples.get("radius", ()) if proven else ()
    text = f"median of {row.samples} samples"
    if row.radius_adversarial is not None:
        text += f", nearest adversarial {format_value(row.radius_adversarial, column)}"
    yield headline.row(
        section,
        row.radius,
        limits=median_limits(radii),
        text=text,
        samples=row.samples,
        norm=row.norm,
        figure=f"{headline.label}, {row.norm}",
    )


RADII_TABLE = Layout(
    name="certify.radius",
    title="How far around a sample is its class proven?",
    headlines=(
        Headline(
            name="certified_radius",
            column="radius",
            label="certified radius",
            meaning="Median radius in which the class is proven not to change.",
            place=40,
            read=read_radius,
        ),
    ),
    display=Display(
        about="Certified radius: no input nearer to the sample changes its class. Adversarial "
        "radius: an attack found a misclassified input at this distance."
    ),
    fixed={
        "norm": Column.text("norm", "Norm of the ball.", needed=True),
        "samples": Column.count("samples", "Number of correctly classified samples."),
        "radius": _proven_column("certified", "Median certified radius."),
        "radius_adversarial": _found_column(
            "adversarial", "Median distance to the nearest adversarial example found."
        ),
        "ratio": _found_column(
            "ratio",
            "Median over the samples of certified radius / adversarial radius.",
            reading="Proven share of the way to the nearest adversarial example found. At 1 the "
            "radius is known exactly; below 1, the proof or the attack could be stronger.",
        ),
        "smallest": _proven_column("smallest", "Smallest certified radius.", better=None),
        "largest": _proven_column("largest", "Largest certified radius.", better=None),
        "passes": Column("passes", "Number of radii that were tried.", format="d"),
        "seconds": SECONDS,
    },
)


def measure(net: Net, batches: Iterable[Batch], options: CertifyOptions) -> Iterator[Part]:
    """Yield, sample by sample, which balls an attack broke and which are certified.

    Raises:
        NoRuleError: the model uses an operation that nothing is known of on balls.
    """
    import numpy as np

    from lipaudit.measures.texts import make_reader, read_texts
    from lipaudit.wings.certificates.certificate import Bracket

    reader = None
    if options.counted == "words":
        reader = make_reader(net)
    told = options.counted != "patch" or options.seconds is not None
    for batch in batches:
        brackets = []
        for number, sample in enumerate(batch.split(1)):
            proof = make_proof(net, sample, options, options.seconds or math.inf)
            seed = base.seed_of(sample.ids[0], options.seed)
            texts = None
            if reader:
                texts = read_texts(reader, sample, characters=False)
            trials = options.trials
            bracket = Bracket(net, sample, proof=proof, trials=trials, seed=seed, texts=texts)
            for done, _ in enumerate(bracket.decide_balls(options.eps)):
                told = told or (not done and _tell_choices(bracket, options))
                base.report_progress(number + done / max(len(options.eps) + options.radius, 1))
            if options.radius:
                bracket.search(options.tol)
            brackets.append(bracket)
        values = [_read_bracket(bracket, options) for bracket in brackets]
        arrays = {}
        for name in values[0]:
            arrays[name] = np.array([each[name] for each in values])
        facts = {
            "checks": base.read_checks(*(bracket.clean for bracket in brackets)),
            "dtype": str(net.dtype).removeprefix("torch."),
            "classes": base.class_names(net, arrays["label"], arrays["predicted"]),
            "exported": _to_text(_export(net, brackets, options) if options.export else {}),
            "proofs": _to_text(_encode_proofs(brackets) if options.proofs else {}),
        }
        yield Part(batch.ids, arrays, facts, tuple(n for b in brackets for n in b.notes))


def _tell_choices(bracket: Bracket, options: CertifyOptions) -> bool:
    """Tell how many passes prove a sample after its attacks; return whether there was need."""
    from lipaudit.wings.certificates.certificate import certificate

    net = bracket.net
    sample = bracket.sample
    patch = bracket.proof.patch or (1, 1)
    unbroken = (int(float(eps)) for eps in options.eps if bracket.nearest > float(eps))
    counts = []
    if bracket.correct:
        counts = sorted(unbroken)
    if max(counts, default=1) == 1:
        return False
    begun = time.monotonic()
    brief = replace(bracket.proof, nodes=1, deadline=begun + TRIAL)
    passes = certificate(net, sample, bracket.wanted, counts[-1], brief).nodes
    seconds = (time.monotonic() - begun) / max(passes, 1)
    # A box may be cut. And what is proven of the most patches needs no proof of fewer.
    cut = bracket.proof.nodes > 1
    counts, limit = (counts[-1:], "at least, unless one breaks it") if cut else (counts, "at most")
    places = math.prod(net.input_shape[1:]) // math.prod(patch)
    choice = f"choice of {' or '.join(map(str, counts))} patches"
    unit = f"passes {limit} (one for each {choice}; limit: --seconds)"
    base.report_cost(sum(math.comb(places, k) for k in counts), seconds, unit)
    return True


def make_proof(net: Net, sample: Batch, options: CertifyOptions, seconds: float) -> Proof:
    """Return the settings of the proofs of a sample that begin now."""
    from lipaudit.wings.certificates.certificate import Proof, choose_order

    return Proof(
        norm=options.norm or "linf",
        order=choose_order(net, sample, options.order, options.count_inputs(net, sample)),
        nodes=sys.maxsize if options.most_nodes is None else options.most_nodes,
        deadline=time.monotonic() + seconds,
        patch=options.choose_patch(net),
    )


def check(net: Net, batch: Batch, options: CertifyOptions) -> None:
    """Refuse a model, samples or options that cannot be certified.

    Raises:
        InputError: a model with fewer than two classes or with scored continuations, token ids
            without a known embedding table, or a pass that needs more memory than is free.
        NoRuleError: the model uses an operation that has no rule.
        UsageError: a radius beyond the box, or a model that computes on several devices.
    """
    from lipaudit.attacks.evaluate import require_radius
    from lipaudit.models.precision import devices
    from lipaudit.wings.certificates.certificate import choose_order, require_room, require_rules
    from lipaudit.wings.certificates.onnx_graph import export_onnx

    base.require_decision(net, "Certify a classifier.")
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
    for trial in options.trials(options.eps) if options.eps else ():
        require_radius(trial, net.box, net.input_shape, options.choose_patch(net))
    # At one order the longest sample needs the most memory: check each order in use.
    if batch.mask is None:
        lengths = [batch.x.shape[1]]
    else:
        lengths = batch.mask.sum(1).tolist()
    places = {length: i for i, length in enumerate(lengths)}
    each = [batch[i : i + 1].trim().to(net.device, net.dtype) for _, i in sorted(places.items())]
    inputs = [options.count_inputs(net, sample) for sample in each]
    known = zip(each, inputs, strict=True)
    for order, one in {choose_order(net, s, options.order, n): (s, n) for s, n in known}.items():
        require_room(net, one[0], order, one[1])
    first = batch[:1].trim().to(net.device, net.dtype)
    require_rules(net, first)
    if options.export is not None:
        export_onnx(net, first)


def _read_bracket(bracket: Bracket, options: CertifyOptions) -> dict[str, Any]:
    from lipaudit.wings.certificates.certificate import Certificate

    radii = [float(radius) for radius in options.eps]
    # A ball that was not tried lies inside a certified one, or an attack broke a smaller one.
    tried = [bracket.tried.get(eps, Certificate(certified=True, why="")) for eps in radii]
    seconds = [bracket.seconds.get(eps, 0.0) for eps in radii]
    robust = [bracket.correct and bracket.nearest > eps for eps in radii]
    # Of a number of patches that was not tried all places are proven.
    places = []
    for eps in radii:
        places.append(bracket.tried[eps].places if eps in bracket.tried else 1.0)
    patch = options.counted == "patch"
    values = {
        "label": bracket.label,
        "predicted": bracket.predicted,
        "correct": bracket.correct,
        "order": bracket.proof.order,
        "robust": robust,
        "certified": [bracket.certified >= eps for eps in radii],
        "why": [each.why for each in tried],
        "nodes": [each.nodes for each in tried],
        "places": [p if r and patch else math.nan for p, r in zip(places, robust, strict=True)],
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


def _to_text(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return files by name as facts of a part: in base64."""
    return {name: base64.b64encode(content).decode() for name, content in files.items()}


def _export(net: Net, brackets: Sequence[Bracket], options: CertifyOptions) -> dict[str, bytes]:
    """Return the model and the balls around correct samples as files by name."""
    from lipaudit.wings.certificates.onnx_graph import export_onnx
    from lipaudit.wings.certificates.vnnlib import write_property

    files: dict[str, bytes] = {}
    for sample, bracket in ((each.sample, each) for each in brackets):
        # The function of token embeddings depends on the text around them.
        if net.kind == "text" or sample.start == 0:
            name = "model"
            if net.kind == "text":
                name = sample.ids[0]
            files[f"{name}.onnx"] = export_onnx(net, sample)
        x = net.point(sample).double()
        free = net.free(sample)
        for eps in options.eps if bracket.correct else ():
            change = float(eps) * (x.new_ones(x.shape) if free is None else free[..., None])
            low, high = (
                (x + way * change).clamp(*(net.box or (-math.inf, math.inf))) for way in (-1, 1)
            )
            title = f"sample {sample.ids[0]}, class {bracket.wanted}, L-inf radius {eps.text}"
            text = write_property(low, high, net.classes or 0, bracket.wanted, title)
            files[f"{sample.ids[0]}_eps_{float(eps)}.vnnlib"] = text.encode()
    return files


def name_proof(sample: str, radius: float) -> str:
    """Return the name of the proof of a ball in the file of `--proofs`."""
    return f"{sample}@{radius}"


def _encode_proofs(brackets: Sequence[Bracket]) -> dict[str, bytes]:
    """Return the proven parts of split balls as .npz files by name."""
    import numpy as np

    files = {}
    for each in brackets:
        for radius, proof in each.tried.items():
            if proof.certified and proof.leaves is not None:
                arrays = {name: part.cpu().numpy() for name, part in vars(proof.leaves).items()}
                file = io.BytesIO()
                np.savez(file, **arrays)
                name_of_proof = name_proof(each.sample.ids[0], radius)
                files[name_of_proof] = file.getvalue()
    return files


def _decode_files(parts: Sequence[Part], fact: str) -> dict[str, bytes]:
    """Return the files that parts hold as text, by name."""
    texts = base.join_facts(parts, fact)
    return {name: base64.b64decode(text) for name, text in texts.items()}


def encode_files(parts: Sequence[Part], options: CertifyOptions) -> dict[Path, bytes]:
    """Return the files of `--export` (models, properties, a list of instances) and `--proofs`."""
    from lipaudit.wings.certificates.vnnlib import TIMEOUT

    exported = _decode_files(parts, "exported")
    proofs = _decode_files(parts, "proofs")
    files: dict[Path, bytes] = {}
    if options.export is not None:
        files = {options.export / name: content for name, content in exported.items()}
        rows = []
        for name in exported:
            if not name.endswith(".vnnlib"):
                continue
            own = f"{name.partition('_')[0]}.onnx"
            model = own if own in exported else "model.onnx"
            rows.append(f"{model},{name},{options.seconds or TIMEOUT:g}\n")
        files[options.export / "instances.csv"] = "".join(rows).encode()
    if options.proofs is not None:
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            for name, content in proofs.items():
                file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        files[options.proofs] = archive.getvalue()
    return files


def summarise(parts: Sequence[Part], options: CertifyOptions) -> list[Section]:
    """Make the section `certify`, a row per ball, and with `--radius` the section of radii."""
    import numpy as np

    arrays = base.join_arrays(parts)
    # A repeated sample counts once in every row.
    once = {name: values[base.mark_unique(parts)] for name, values in arrays.items()}
    robust = once["robust"]
    certified = once["certified"]
    correct = once["correct"]
    norm = options.norm or "linf"
    rows = base.make_rows(
        CERTIFY_TABLE,
        norm=norm,
        eps=[float(radius) for radius in options.eps],
        eps_text=[radius.text for radius in options.eps],
        samples=len(robust),
        clean=base.reduce_known(correct[once["label"] >= 0], np.mean),
        **base.share_columns("robust", robust),
        **base.share_columns("certified", certified),
        undecided=(robust > certified).sum(0),
        places=[base.reduce_known(each, np.mean) for each in once["places"].T],
        order=int(once["order"].max()),
        nodes=once["nodes"].sum(0),
        seconds=once["seconds"].sum(0).round(3),
    )
    notes = _write_notes(parts, arrays, options)
    columns = _make_columns(arrays, rows)
    first = base.make_section(CERTIFY_TABLE, parts, options, rows, notes, samples=columns)
    if not options.radius:
        return [first]
    radius = once["radius"][correct]
    nearest = once["radius_adversarial"][correct]
    broken = np.isfinite(nearest)
    row = RADII_TABLE.row(
        norm=norm,
        samples=len(radius),
        radius=base.reduce_known(radius, np.median),
        radius_adversarial=base.reduce_known(nearest[broken], np.median),
        ratio=base.reduce_known(radius[broken] / nearest[broken], np.median),
        smallest=base.reduce_known(radius, np.min),
        largest=base.reduce_known(radius, np.max),
        passes=int(once["passes"].sum()),
        seconds=round(float(once["searching"].sum()), 3),
    )
    return [first, RADII_TABLE.section(settings=options.model_dump(), rows=(row,))]


def _make_columns(arrays: dict[str, Values], rows: Sequence[Row]) -> dict[str, Values]:
    import numpy as np

    known = arrays["label"] >= 0
    correct = arrays["correct"]
    columns = {
        "label": np.where(known, arrays["label"], np.nan),
        "predicted": arrays["predicted"],
        "correct": np.where(known, correct, np.nan),
    }
    for i, row in enumerate(rows):
        robust = arrays["robust"][:, i]
        certified = arrays["certified"][:, i]
        # The first that applies: a wrong sample is neither broken nor certified.
        verdict = np.select(
            [~correct, ~robust, certified], ["wrong", "broken", "certified"], "undecided"
        )
        why = np.where(verdict == "undecided", arrays["why"][:, i], "")
        each = {"verdict": verdict, "why": why, "robust": robust, "certified": certified}
        each |= {"places": arrays["places"][:, i]} if row.norm == "patch" else {}
        columns |= {row.trial.column(name): values for name, values in each.items()}
    if "radius" in arrays:
        found = arrays["radius_adversarial"]
        columns["radius"] = arrays["radius"]
        columns["radius_adversarial"] = np.where(np.isfinite(found), found, np.nan)
    return columns


def _write_notes(
    parts: Sequence[Part], arrays: dict[str, Values], options: CertifyOptions
) -> Iterator[Note]:
    from lipaudit.attacks.signs import note_signs

    yield from note_signs(base.sum_checks(parts))
    text = (
        "certificates hold for exact arithmetic with the stored weights. Running the model in "
        f"{parts[0].facts['dtype']} adds rounding errors that they do not cover"
    )
    yield Note.info("real-arithmetic", text)
    label = arrays["label"]
    if unknown := int((label < 0).sum()):
        samples = f"{unknown} of {len(label)} samples"
        text = f"{samples} have no label: the predicted class is attacked and certified"
        yield Note.info("own-predictions", text)
    if cut := int((arrays["why"] == "seconds").sum()):
        text = (
            f"--seconds {options.seconds:g} ended {cut} proofs. This depends on the speed of "
            "the machine; for reproducible limits, use --nodes"
        )
        yield Note.info("time-limit", text)
    yield from base.notes(parts)
    yield from base.repeat_notes(parts)


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
        switch=f"Also compute certificates, at the radii --eps: up to {MOST:g} s a sample.",
        uses=("eps", "attack", "norm"),
        samples={"quick": 4, "full": 32},
        plan=plan_certificates,
    ),
)
