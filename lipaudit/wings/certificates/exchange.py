"""Proofs that others can check: instances of the competition VNN-COMP, and proofs repeated."""

from __future__ import annotations

import csv
import io
import math
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.engine.prepare import Job, Request, prepare
from lipaudit.errors import InputError, explain_failure
from lipaudit.models.net import LoadOptions, ModelSpec
from lipaudit.models.precision import exact_arithmetic
from lipaudit.models.sources.loader import assemble
from lipaudit.settings import RunOptions
from lipaudit.tables import Report, Run, Section
from lipaudit.tables.trials import is_repeat, parse_radius
from lipaudit.wings.certificates.branch import Nodes
from lipaudit.wings.certificates.certificate import Bracket, certificate
from lipaudit.wings.certificates.measure import check, make_proof, name_proof
from lipaudit.wings.certificates.onnx_graph import Graph, Query
from lipaudit.wings.certificates.options import CertifyOptions
from lipaudit.wings.certificates.vnnlib import read_property

# A zip file without entries.
EMPTY = b"PK\x05\x06" + bytes(18)


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
    options = options.model_copy(update={"eps": (parse_radius("1"),)}).adapt("tokens")
    advice = "Give lines MODEL.onnx,PROPERTY.vnnlib,SECONDS in a .csv file."
    with explain_failure(f"{path} is no list of instances", advice, OSError, ValueError):
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [(model, asked, float(limit)) for model, asked, limit in csv.reader(lines)]
    for model, asked, limit in rows:
        began = time.monotonic()
        graph = Graph(path.parent / model)
        wanted = read_property(path.parent / asked)
        with explain_failure(f"{asked} does not fit {model}", advice):
            query = Query(graph, wanted)
            query(torch.zeros_like(query.centre)[None])
        spec = ModelSpec(query, tuple(query.centre.shape), kind="tokens", architecture=model)
        how = LoadOptions(device="cpu", dtype=query.dtype)
        with exact_arithmetic(torch.device("cpu")):
            net = assemble(spec, how, name=asked, source="file")
            x = torch.zeros(1, *spec.input_shape, dtype=net.dtype)
            sample = Batch(x, torch.tensor([0]), ("0",))
            check(net, sample, options)
            loaded = time.monotonic()
            proof = make_proof(net, sample, options, options.seconds or limit)
            bracket = Bracket(net, sample, proof=proof, trials=options.trials, seed=run.seed)
            for _ in bracket.decide_balls(options.eps):
                pass
            example = None
            if bracket.nearest <= 1 or not bracket.correct:
                example = query.find_example(bracket.example)
        ended = time.monotonic()
        result = _name_result(bracket)
        if example:
            result = "sat"
        folder = path.resolve().parent.name
        seconds_to_load = f"{loaded - began:.3f}"
        row = (folder, model, asked, seconds_to_load, result, f"{ended - loaded:.3f}")
        yield row, _write_example(example or ())


def _name_result(bracket: Bracket) -> str:
    """Return the competition's word for an instance without a counterexample."""
    if bracket.certified >= 1:
        return "unsat"
    if any(tried.why == "seconds" for tried in bracket.tried.values()):
        return "timeout"
    return "unknown"


def _write_example(example: Sequence[Tensor]) -> str:
    """Write inputs and outputs of a counterexample in the competition's form."""
    lines: list[str] = []
    for letter, values in zip("XY", example, strict=False):
        lines += (f"({letter}_{i} {value!r})" for i, value in enumerate(values.tolist()))
    if not lines:
        return ""
    listed = "\n".join(lines)
    return f"({listed})\n"


# The proofs of a report, repeated: every pass again, and no search.


def verify_proofs(report: Report, proofs: Path | None) -> Iterator[tuple[str, str, bool]]:
    """Repeat the proofs of the certified balls of a report.

    A ball is proven by the pass alone, or at the stored multipliers of its parts.

    Args:
        report: the report.
        proofs: the file of `--proofs`; without one, only passes prove.

    Yields:
        The id of a sample, its largest certified radius, and whether its ball is proven again.

    Raises:
        InputError: there are no certificates, the model or the samples are others, or the file is
            damaged.
    """
    section = report.section("certify")
    before = report.run
    if section is None or not section.ids or not section.rows:
        raise InputError("the report has no certificates", "Write one: certify -o report.json.")
    options = CertifyOptions.parse(section.settings)
    if options.counted:
        raise InputError(f"certificates of {options.counted} are not repeated", "Only balls are.")
    run = {"data": before.data.spec, "seed": before.seed, "dtype": before.dtype} | before.options
    plan = {"certify": options}
    count = {"certify": len(section.ids)}
    job = prepare(Request(before.model.spec, plan, RunOptions.parse(run), count))
    if not _is_of(section, options, before, job):
        raise InputError(
            "the report does not fit its model, its samples or its own verdicts",
            "Verify the report as it was written, where its model and data are.",
        )
    if proofs is not None and not zipfile.is_zipfile(proofs):
        raise InputError(
            f"{proofs} is no file of --proofs", "Write one: certify --proofs FILE.npz."
        )
    told: Mapping[str, Any] = section.samples
    flags = [told[row.trial.column("certified")] for row in section.rows]
    _, batches = job.batches("certify")
    for batch in batches:
        for sample in batch.to(job.net.device, job.net.dtype).split(1):
            (name,) = sample.ids
            at = section.ids.index(name)
            proven = [r for r, flag in zip(options.eps, flags, strict=True) if flag[at]]
            if not proven:
                continue
            radius = max(proven, key=float)
            size = float(radius)
            label = told["predicted"][at]
            if sample.y is not None and int(sample.y) >= 0:
                label = int(sample.y)
            leaves = _read_leaves(proofs, name_proof(name, size), job.net.device)
            with exact_arithmetic(job.net.device):
                proof = replace(make_proof(job.net, sample, options, math.inf), leaves=leaves)
                result = certificate(job.net, sample, label, size, proof)
            yield name, radius.text, result.certified


def _is_of(section: Section, options: CertifyOptions, before: Run, job: Job) -> bool:
    """Say whether certificates are of the model and the samples of a job, and add up."""
    if job.net.weights_sha256 != before.model.weights_sha256:
        return False
    batch = job.samples.batch
    labels = [-1] * len(batch)
    if batch.y is not None:
        labels = batch.y.tolist()
    told: Mapping[str, Any] = section.samples
    stored = []
    for y in told["label"]:
        stored.append(-1 if y is None else y)
    read = dict(zip(batch.ids, labels, strict=True))
    if read != dict(zip(section.ids, stored, strict=True)):
        return False
    norm = options.norm or "linf"
    claimed = [(row.norm, row.eps_text, row.eps) for row in section.rows]
    if claimed != [(norm, radius.text, float(radius)) for radius in options.eps]:
        return False
    once = [i for i, name in enumerate(section.ids) if not is_repeat(name)]
    for row in section.rows:
        flags = told[row.trial.column("certified")]
        if sum(flags[i] for i in once) / len(once) != row.certified:
            return False
    return True


def _read_leaves(proofs: Path | None, name: str, device: torch.device) -> Nodes:
    """Return the parts of a ball; none where nothing is stored."""
    damaged = explain_failure(f"{proofs} is damaged", "Copy the file again.", Exception)
    with damaged, zipfile.ZipFile(proofs or io.BytesIO(EMPTY)) as archive:
        content = b""
        if name in archive.namelist():
            content = archive.read(name)
        if not content:
            none = torch.zeros(0, 0, dtype=torch.long)
            return Nodes(none.flatten(), none, none[None].float())
        arrays = {}
        for key, array in np.load(io.BytesIO(content)).items():
            arrays[key] = torch.tensor(array, device=device)
        which = arrays["which"]
        state = arrays["state"]
        y = arrays["y"]
        if y.shape != (2, *state.shape) or which.shape != state.shape[:1]:
            raise ValueError("other shapes")
        return Nodes(which.long(), state.long(), y.double())
