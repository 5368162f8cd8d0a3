"""Proofs that others can check: instances of the competition VNN-COMP, and proofs repeated."""

from __future__ import annotations

import csv
import io
import math
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.engine.prepare import Job, Request, prepare
from lipaudit.errors import InputError, explain_failure
from lipaudit.models.net import LoadOptions, ModelSpec, Net
from lipaudit.models.precision import exact_arithmetic
from lipaudit.models.sources.loader import assemble
from lipaudit.settings import RunOptions
from lipaudit.tables import Report, Run, Section
from lipaudit.tables.trials import Radius, is_repeat, parse_radius
from lipaudit.wings.certificates.bracket import Bracket
from lipaudit.wings.certificates.branch import Nodes
from lipaudit.wings.certificates.certificate import certify_ball
from lipaudit.wings.certificates.certify import check, make_proof
from lipaudit.wings.certificates.exports import name_proof
from lipaudit.wings.certificates.onnx_graph import Graph, Query
from lipaudit.wings.certificates.options import CertifyOptions
from lipaudit.wings.certificates.vnnlib import read_property

ADVICE = "Give lines MODEL.onnx,PROPERTY.vnnlib,SECONDS in a .csv file."


def decide_instances(
    path: Path, options: CertifyOptions, run: RunOptions
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Prove or break the instances of a list, one after the other.

    Args:
        path: a CSV file with model, property and seconds in each line; paths are relative to it.
        options: how to prove; its `seconds` count in place of those of the list.
        run: the seed.

    Yields:
        A line of the competition's results (name of the folder, model, property, seconds to load,
        unsat (proven), sat (broken), timeout or unknown, seconds to decide); a counterexample.

    Raises:
        InputError: a file is missing, or has something that is not read.
    """
    # `Query` makes a classifier of each property. The property holds if the classifier keeps its
    # class on the ball of radius 1 around 0.
    # Kind tokens: plain numbers without a box of pixels.
    options = options.model_copy(update={"eps": (parse_radius("1"),)}).adapt(kind="tokens")
    with explain_failure(f"{path} is no list of instances", ADVICE, OSError, ValueError):
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [(model, name, float(limit)) for model, name, limit in csv.reader(lines)]
    folder = path.resolve().parent.name
    for model, name, limit in rows:
        began = time.monotonic()
        query = _read_query(path.parent, model, name)
        with exact_arithmetic(torch.device("cpu")):
            net = _make_net(query, model, name)
            # The centre of the ball, with the label 0: the class that the classifier has to keep.
            x = torch.zeros(1, *net.input_shape, dtype=net.dtype)
            sample = Batch(x, y=torch.tensor([0]), ids=("0",))
            check(net, sample, options)
            loaded = time.monotonic()
            proof = make_proof(net, sample, options, options.seconds or limit)
            # Attacks and proofs on the balls around the sample.
            bracket = Bracket(net, sample, proof=proof, trials=options.trials, seed=run.seed)
            result, example = _decide_instance(bracket, query, options)
        seconds_to_load = f"{loaded - began:.3f}"
        seconds = f"{time.monotonic() - loaded:.3f}"
        row = (folder, model, name, seconds_to_load, result, seconds)
        yield row, _write_example(example)


def _read_query(folder: Path, model: str, name: str) -> Query:
    """Return a network and a property, two files of a folder, as one classifier.

    Raises:
        InputError: a file is missing, cannot be read, or does not fit the other one.
    """
    graph = Graph(folder / model)
    goal = read_property(folder / name)
    with explain_failure(f"{name} does not fit {model}", ADVICE):
        query = Query(graph, goal)
        query(torch.zeros_like(query.centre)[None])  # fails if the shapes do not fit
    return query


def _make_net(query: Query, model: str, name: str) -> Net:
    """Return the classifier of a verification instance as a `Net`, which can be certified.

    `query` maps the ball of radius 1 around 0 to the box of inputs of the property. The property
    holds if the classifier keeps its class on this ball.
    """
    spec = ModelSpec(query, tuple(query.centre.shape), kind="tokens", architecture=model)
    return assemble(spec, LoadOptions(device="cpu", dtype=query.dtype), name=name, source="file")


def _decide_instance(
    bracket: Bracket, query: Query, options: CertifyOptions
) -> tuple[str, tuple[Tensor, ...]]:
    """Attack and try to prove a verification instance, the ball of radius 1 in `options.eps`.

    Args:
        bracket: runs the attacks and the proof.
        query: the network and its property as a classifier.
        options: how to prove.

    Returns:
        The competition's word for the outcome (sat: broken, unsat: proven, timeout or unknown);
        the inputs and outputs of a counterexample, empty without one.
    """
    for _ in bracket.decide_balls(options.eps):  # a generator: the loop runs it to its end
        pass
    # An attack found an example in the ball, or the centre is one. It must break the property of
    # the network as well: after rounding it may not, and the outcome is unknown.
    if bracket.adversarial_radius <= 1 or not bracket.correct:
        example = query.find_example(bracket.example)
        if example:
            return "sat", example
    if bracket.certified_radius >= 1:
        return "unsat", ()
    if any(certificate.why == "seconds" for certificate in bracket.certificates.values()):
        return "timeout", ()
    return "unknown", ()


def _write_example(example: Sequence[Tensor]) -> str:
    """Return inputs and outputs of a counterexample in the competition's format; "" for none.

    Each line has a variable and its value, as in (X_0 0.5); Y are the outputs.
    """
    if not example:
        return ""
    lines = []
    for letter, values in zip("XY", example, strict=True):
        lines += [f"({letter}_{i} {value!r})" for i, value in enumerate(values.tolist())]
    return "({})\n".format("\n".join(lines))


# The proofs of a report, repeated: every pass again, and no search.


def verify_proofs(report: Report, proofs: Path | None) -> Iterator[tuple[str, str, bool]]:
    """Repeat the proofs of the certified balls of a report.

    A ball is proven by one pass through the model, or by branch and bound. For the latter the file
    of proofs has the parts of the ball and their multipliers, so nothing is searched again.

    Args:
        report: the report.
        proofs: the file of `--proofs`; without the file, only balls proven by one pass are proven.

    Yields:
        The id of a sample, its largest certified radius, and whether its ball is proven again.

    Raises:
        InputError: there are no certificates, the model or the samples are others, or the file is
            damaged.
    """
    section, options = _read_certificates(report)
    job = _load_again(report, section, options)
    if proofs is not None and not zipfile.is_zipfile(proofs):
        raise InputError(
            f"{proofs} is no file of --proofs", "Write one: certify --proofs FILE.npz."
        )
    predicted = dict(zip(section.ids, section.samples["predicted"], strict=True))
    radii = _find_certified(section, options)
    net = job.net
    _, batches = job.batches("certify")
    for batch in batches:
        for sample in batch.to(net.device, net.dtype).split(1):
            (name,) = sample.ids
            if name not in radii:  # the report certifies no ball of this sample
                continue
            radius = radii[name]
            # The class to prove is the label, or the prediction of a sample without one.
            label: Any = predicted[name]
            if sample.y is not None and int(sample.y) >= 0:
                label = int(sample.y)
            # With the stored parts of the ball (leaves) the proof is evaluated without a search.
            leaves = _read_leaves(proofs, name_proof(name, float(radius)), net.device)
            with exact_arithmetic(net.device):
                proof = replace(make_proof(net, sample, options, math.inf), leaves=leaves)
                result = certify_ball(net, sample, label, float(radius), proof)
            yield name, radius.text, result.certified


def _read_certificates(report: Report) -> tuple[Section, CertifyOptions]:
    """Return the certificates of a report, and the options of their run.

    Raises:
        InputError: there are none, or they are not of balls.
    """
    section = report.section("certify")
    if section is None or not section.ids or not section.rows:
        raise InputError("the report has no certificates", "Write one: certify -o report.json.")
    options = CertifyOptions.parse(section.settings)
    if options.counted:
        raise InputError(f"certificates of {options.counted} are not repeated", "Only balls are.")
    return section, options


def _load_again(report: Report, section: Section, options: CertifyOptions) -> Job:
    """Load the model and the samples of a report again, with its options.

    `section` has the certificates of the report, and `options` are the options of their run.

    Raises:
        InputError: the model, the samples or the verdicts are not those of the report.
    """
    before = report.run
    run = {"data": before.data.spec, "seed": before.seed, "dtype": before.dtype} | before.options
    plan = {"certify": options}
    count = {"certify": len(section.ids)}
    job = prepare(Request(before.model.spec, plan, RunOptions.parse(run), count))
    if not _is_report_of(job, section, options, before):
        raise InputError(
            "the report does not fit its model, its samples or its own verdicts",
            "Verify the report as it was written, where its model and data are.",
        )
    return job


def _find_certified(section: Section, options: CertifyOptions) -> dict[str, Radius]:
    """Return the largest certified radius of each sample of a report that has one."""
    largest: dict[str, Radius] = {}
    pairs = zip(options.eps, section.rows, strict=True)
    # Smallest radius first: larger ones overwrite it.
    for radius, row in sorted(pairs, key=lambda pair: float(pair[0])):
        certified = section.samples[row.trial.column("certified")]  # a flag for each sample
        largest |= {
            name: radius for name, flag in zip(section.ids, certified, strict=True) if flag
        }
    return largest


def _is_report_of(job: Job, section: Section, options: CertifyOptions, before: Run) -> bool:
    """Return whether a report has the weights, samples and labels of a job, and is consistent.

    A report is consistent if its rows are the balls in its options, and if the certified share of
    each row is the share of the samples that are flagged as certified.

    Args:
        job: the model and the samples, loaded again.
        section: the certificates of the report.
        options: the options in the report.
        before: the run in the report.
    """
    if job.net.weights_sha256 != before.model.weights_sha256:
        return False
    batch = job.samples.batch
    labels = [-1] * len(batch)  # -1: no label
    if batch.y is not None:
        labels = batch.y.tolist()
    stored_labels = [-1 if label is None else label for label in section.samples["label"]]
    label_of_sample = dict(zip(batch.ids, labels, strict=True))
    if label_of_sample != dict(zip(section.ids, stored_labels, strict=True)):
        return False
    balls = [(row.norm, row.eps_text, row.eps) for row in section.rows]
    if balls != [(options.norm, radius.text, float(radius)) for radius in options.eps]:
        return False
    # A repeated sample counts once.
    unique = [i for i, name in enumerate(section.ids) if not is_repeat(name)]
    for row in section.rows:
        certified: Any = section.samples[row.trial.column("certified")]  # a flag for each sample
        if sum(certified[i] for i in unique) / len(unique) != row.certified:
            return False
    return True


def _read_leaves(proofs: Path | None, name: str, device: torch.device) -> Nodes:
    """Return the proof of a ball from the file of `--proofs`: the parts into which it was split.

    Each part has signs of ReLUs and the multipliers that prove a margin on it. Without a file, or
    if the file does not have the ball, the result has no parts: then only a single pass through
    the model can prove the ball.

    Args:
        proofs: the file, a zip archive with a .npz file for each ball.
        name: the name of the ball.
        device: where the tensors are needed.
    """
    content = b""
    damaged = explain_failure(f"{proofs} is damaged", "Copy the file again.", Exception)
    with damaged:
        if proofs is not None:
            with zipfile.ZipFile(proofs) as archive:
                if name in archive.namelist():
                    content = archive.read(name)
        if not content:  # no parts
            none = torch.zeros(0, 0, dtype=torch.long)
            return Nodes(which=none.flatten(), state=none, y=none[None].float())
        stored = np.load(io.BytesIO(content)).items()
        arrays = {key: torch.tensor(array, device=device) for key, array in stored}
        which = arrays["which"]  # the margin of each part, (parts,)
        state = arrays["state"]  # the sign of each ReLU on it, (parts, relus)
        y = arrays["y"]  # two multipliers for each ReLU, (2, parts, relus)
        if y.shape != (2, *state.shape) or which.shape != state.shape[:1]:
            raise ValueError("other shapes")
        return Nodes(which.long(), state.long(), y.double())
